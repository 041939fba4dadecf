//! The stages of a packet application.

use std::any::{Any, TypeId};
use std::time::Duration;

use wirepath_packet::Batch;

use crate::context::Context;
use crate::stage_timers::StageTimers;

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

    /// Interval at which the worker calls [`Self::timer`]; `None`: never. The worker asks again after each call of a
    /// timer and after each job of [`Running::on_worker`](crate::Running::on_worker), so the interval can change.
    /// It is at least a microsecond.
    fn timer_interval(&self) -> Option<Duration> {
        None
    }

    /// Called about each [`Self::timer_interval`], for the first time one interval after the start. A worker tests its
    /// timers every few turns, and a sleeping worker wakes for them. A timer that is late by more than an interval is
    /// called once. It is not called while the program stops.
    ///
    /// [`Context::send`] and the other operations work as in [`Self::process`], and packets leave at the end of the
    /// turn. They do not pass the stages that follow in a tuple. [`Context::in_port`] is `None`.
    ///
    /// ```
    /// use std::time::Duration;
    /// use wirepath_pipeline::{Context, Stage};
    /// use wirepath_packet::{Batch, Packet, PortId};
    ///
    /// /// Collects packets and sends them every ten milliseconds.
    /// #[derive(Default)]
    /// struct Paced(Vec<Packet>);
    ///
    /// impl Stage for Paced {
    ///     fn process(&mut self, _: &mut Context<'_>, batch: &mut Batch) {
    ///         batch.drain_front(batch.len(), |packet| self.0.push(packet));
    ///     }
    ///
    ///     fn timer_interval(&self) -> Option<Duration> {
    ///         Some(Duration::from_millis(10))
    ///     }
    ///
    ///     fn timer(&mut self, context: &mut Context<'_>) {
    ///         self.0.drain(..).for_each(|packet| context.send(PortId::new(0), packet));
    ///     }
    /// }
    /// ```
    fn timer(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }

    /// Called in each turn that found no packets, for work that can wait. A worker that may sleep calls it also in the
    /// turn before it sleeps, and not while it sleeps: use a timer for what must happen. It is not called while the
    /// program stops. Packets can be sent as in [`Self::timer`]; the worker may then sleep nevertheless.
    #[inline(always)]
    fn idle(&mut self, context: &mut Context<'_>) {
        let _ = context;
    }

    /// Calls the timers that are due. A stage that contains others defines this method and [`Self::idle`], and calls
    /// those of each of them, always in the same order. Other stages define [`Self::timer`] only.
    fn run_timers(&mut self, timers: &mut StageTimers, context: &mut Context<'_>) {
        if timers.is_due(self.timer_interval(), context.now()) {
            self.timer(context);
        }
    }

    /// Returns the stage of a type for [`ControlPlane::run_on_stage`](crate::ControlPlane::run_on_stage): this stage,
    /// or one that it contains. A stage that contains others defines this method, and asks each of them after itself.
    fn find_stage(&mut self, stage: TypeId) -> Option<&mut dyn Any>
    where
        Self: Sized + 'static,
    {
        if stage == TypeId::of::<Self>() { Some(self) } else { None }
    }

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

            #[inline(always)]
            fn idle(&mut self, context: &mut Context<'_>) {
                $(self.$index.idle(context);)*
            }

            fn run_timers(&mut self, timers: &mut StageTimers, context: &mut Context<'_>) {
                $(self.$index.run_timers(timers, context);)*
            }

            fn find_stage(&mut self, stage: TypeId) -> Option<&mut dyn Any>
            where
                Self: Sized + 'static,
            {
                if stage == TypeId::of::<Self>() {
                    return Some(self);
                }
                $(
                    if let Some(found) = self.$index.find_stage(stage) {
                        return Some(found);
                    }
                )*
                None
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
