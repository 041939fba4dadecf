//! The stages of a packet application.

use wirepath_packet::Batch;

use crate::context::Context;

/// One step of a pipeline: processes a batch and leaves a batch to the next stage.
///
/// A stage is called once per batch, never per packet. Dispatch is static, so the compiler sees a chain of
/// stages as one function. During a call a stage may change packets, remove packets or add packets. It
/// removes them with [`Context::send`], [`Context::drop`], [`Context::enqueue_to_worker`] or
/// [`Context::punt`]. **The packets that remain after the last stage leave by each packet's
/// [`out_port`](wirepath_packet::Packet::out_port).** A packet without an output port is dropped and counted
/// as `no_output_port`.
///
/// A closure is a stage:
///
/// ```
/// use wirepath_pipeline::{Context, Stage};
/// use wirepath_packet::Batch;
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
/// Each worker has its own stages, so a stage need not be shared and owns its state alone. Data that all
/// workers read belongs in [`crate::epoch::Shared`] values.
pub trait Stage: Send {
    /// Processes a batch. All packets of a received batch came from the same port ([`Context::in_port`]).
    /// Packets that another worker handed over may come from different ports.
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch);

    /// Name of the stage in displays; the default is the name of its type, or of the function that made a closure.
    /// It is empty for a stage that consists of others and names the end of each by [`Context::end_part`].
    fn name(&self) -> &'static str {
        short_name(std::any::type_name::<Self>())
    }
}

/// Returns the last part of the path of a type, without generic arguments. A closure has the name of its function.
fn short_name(path: &'static str) -> &'static str {
    let end = path.find('<').unwrap_or(path.len());
    let mut name = &path[..end];
    while let Some(function) = name.strip_suffix("::{{closure}}") {
        name = function;
    }
    name.rsplit("::").next().filter(|name| !name.is_empty()).unwrap_or(path)
}

impl<F: FnMut(&mut Context<'_>, &mut Batch) + Send> Stage for F {
    #[inline(always)]
    fn process(&mut self, context: &mut Context<'_>, batch: &mut Batch) {
        self(context, batch);
    }
}

/// Implements `Stage` for tuples of stages. A stage is not called if the batch is empty before it.
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
                    context.end_stage(|| self.$index.name(), batch);
                )*
            }

            fn name(&self) -> &'static str {
                ""
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

#[cfg(test)]
mod tests {
    use super::*;

    struct Generic<T>(T);

    impl<T: Send> Stage for Generic<T> {
        fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {}
    }

    fn closure<T: Send>(value: T) -> impl Stage {
        move |_: &mut Context<'_>, _: &mut Batch| _ = &value
    }

    #[test]
    fn stages_have_short_names() {
        assert_eq!(Generic(vec![Some(1)]).name(), "Generic");
        assert_eq!((closure(1).name(), closure(Some("x")).name()), ("closure", "closure"));
        assert_eq!((Generic(1), closure(1)).name(), "", "its stages have names");
        assert_eq!(short_name("<a::B as c::D>::e"), "<a::B as c::D>::e");
    }
}
