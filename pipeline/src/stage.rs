//! What a packet application is made of.

use wirepath_pmd::packet::Batch;

use crate::context::Context;

/// A step of a pipeline: gets a batch, and leaves a batch to the next one.
///
/// Called once per batch, never per packet, and known statically: a chain of stages is one function to the compiler. Within a call a
/// stage may change packets, take some out (send them with [`Context::send`], drop them with [`Context::drop`], hand them over, punt
/// them) or put some in. **What is left in the batch after the last stage leaves by each packet's
/// [`out_port`](wirepath_pmd::packet::Packet::out_port)**; a packet for which nobody set one is dropped and counted as `no_stage`.
///
/// A closure is a stage:
///
/// ```
/// use wirepath_pipeline::{Context, Stage};
/// use wirepath_pmd::packet::Batch;
///
/// fn back_where_it_came_from() -> impl Stage {
///     |context: &mut Context<'_>, batch: &mut Batch| {
///         if let Some(port) = context.in_port() {
///             context.send_batch(port, batch);
///         }
///     }
/// }
/// ```
///
/// Stages are made one for each worker, so that they need not be shared: what they own is theirs alone. What all workers read lies in
/// [`crate::epoch::Shared`] tables.
pub trait Stage: Send {
    /// Takes a batch through. All packets of a batch that was received came by the same port ([`Context::in_port`]); packets that
    /// another worker handed over may be mixed.
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch);
}

impl<F: FnMut(&mut Context<'_>, &mut Batch) + Send> Stage for F {
    #[inline(always)]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        self(context, batch);
    }
}

/// Stages one after the other are a stage. A stage behind an emptied batch is not called.
macro_rules! chains {
    ($($stage:ident $index:tt),*) => {
        impl<$($stage: Stage),*> Stage for ($($stage,)*) {
            #[inline(always)]
            fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
                $(
                    if batch.is_empty() {
                        return;
                    }
                    self.$index.process(context, batch);
                )*
            }
        }
    };
}
chains!(A 0);
chains!(A 0, B 1);
chains!(A 0, B 1, C 2);
chains!(A 0, B 1, C 2, D 3);
chains!(A 0, B 1, C 2, D 3, E 4);
chains!(A 0, B 1, C 2, D 3, E 4, F 5);
chains!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
chains!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
