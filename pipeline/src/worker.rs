//! The run loop of one worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_pmd::packet::{BATCH, Batch};
use wirepath_pmd::port::RxQueue;

use crate::clock::Clock;
use crate::context::{Context, Core};
use crate::epoch::Reader;
use crate::events::Phase;
use crate::stage::Stage;

/// What a worker does when there is nothing to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Idle {
    /// Looks again at once, and takes the whole core.
    Busy,
    /// After a while without packets sleeps until a port has some.
    #[default]
    Adaptive,
}

/// Turns without packets after which an adaptive worker sleeps.
const PATIENCE: u32 = 256;
/// Turns for which one look at the clock is good while packets flow: reading the counter costs about as much as carrying ten packets.
const TURNS_PER_TICK: u32 = 8;
/// Most receive queues whose descriptors are waited for; the others are looked at every [`NAP`].
const WAITABLE: usize = 32;
/// Longest sleep while every queue can wake the worker.
const LONG_SLEEP: Duration = Duration::from_millis(250);
/// First and longest sleep while a queue cannot.
const NAP: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// What the control thread asks of a worker: to be done between two batches.
pub(crate) type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A receive queue, and whether it can wake its worker.
pub(crate) struct Input {
    pub(crate) queue: RxQueue,
    pub(crate) can_wait: bool,
}

/// A worker: what one thread owns.
pub(crate) struct Worker<S> {
    pub(crate) core: Core,
    pub(crate) inputs: Vec<Input>,
    pub(crate) stage: S,
    pub(crate) reader: Reader,
    pub(crate) jobs: Arc<ArrayQueue<Job<S>>>,
    pub(crate) idle: Idle,
    pub(crate) clock: Clock,
}

impl<S: Stage> Worker<S> {
    /// Runs until told to return. A panic of a stage ends the worker, not the program: the message is returned.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        catch_unwind(AssertUnwindSafe(|| self.turns())).map_err(|panic| message(&*panic))
    }

    fn turns(&mut self) {
        let mut batch = Batch::new();
        let (mut empty_turns, mut until_tick, mut nap) = (0, 0, NAP.0);
        let mut phase = Phase::Run;
        loop {
            if until_tick == 0 {
                until_tick = TURNS_PER_TICK;
                self.core.now = self.clock.now();
            }
            until_tick -= 1;
            self.reader.quiescent();
            let mut moved = 0;
            if phase == Phase::Run {
                moved += self.receive(&mut batch);
            }
            if self.core.mailboxes[self.core.index].bell.answer() {
                moved += self.look_up(&mut batch);
                phase = self.core.control.phase();
            }
            self.core.flush();
            self.core.counters.turns.add(1);
            if moved > 0 {
                (empty_turns, nap) = (0, NAP.0);
                continue;
            }
            self.core.counters.idle_turns.add(1);
            self.core.reclaim();
            match phase {
                Phase::Run => {}
                Phase::Drain => {
                    let mailbox = &self.core.mailboxes[self.core.index];
                    if mailbox.is_empty() {
                        mailbox.drained.fetch_add(1, Ordering::Release);
                    }
                }
                Phase::Exit => return,
            }
            empty_turns += 1;
            if self.idle == Idle::Adaptive && empty_turns > PATIENCE {
                self.sleep(&mut nap);
                until_tick = 0;
            } else if empty_turns % 64 == 0 {
                until_tick = 0;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Takes one burst of every receive queue through the stages; returns the number of packets.
    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch) -> usize {
        let Self { core, inputs, stage, reader, .. } = self;
        let mut moved = 0;
        for Input { queue, .. } in inputs {
            let n = queue.receive(batch);
            if n > 0 {
                moved += n;
                core.in_port = Some(queue.port());
                let mut context = Context { core, guard: reader.guard() };
                stage.process(&mut context, batch);
                core.forward(batch);
            }
        }
        moved
    }

    /// Takes what others put down for this worker.
    #[cold]
    fn look_up(&mut self, batch: &mut Batch) -> usize {
        while let Some(job) = self.jobs.pop() {
            job(&mut self.stage);
        }
        let Self { core, stage, reader, .. } = self;
        core.in_port = None;
        let mailboxes = Arc::clone(&core.mailboxes);
        let mailbox = &mailboxes[core.index];
        let mut moved = 0;
        // At most what is there now: a stage that hands over to its own worker must not hold up the receive queues.
        for left in (0..mailbox.work.len().div_ceil(BATCH)).rev() {
            while !batch.is_full()
                && let Some(packet) = mailbox.work.pop()
            {
                let _ = batch.push(packet);
            }
            moved += batch.len();
            let mut context = Context { core, guard: reader.guard() };
            stage.process(&mut context, batch);
            core.forward(batch);
            if left == 0 && !mailbox.work.is_empty() {
                mailbox.bell.ring();
            }
        }
        for _ in 0..mailbox.transmit.len() {
            let Some(packet) = mailbox.transmit.pop() else { break };
            moved += 1;
            core.send(packet.out_port(), packet);
        }
        if !mailbox.is_empty() {
            mailbox.bell.ring();
        }
        moved
    }

    /// Sleeps until a queue has packets, the bell rings or the time is up. Nothing is pending here: the turn was flushed.
    #[cold]
    fn sleep(&mut self, nap: &mut Duration) {
        let Self { core, inputs, reader, .. } = self;
        let bell = &core.mailboxes[core.index].bell;
        if !bell.lie_down() {
            return;
        }
        reader.offline(|| {
            let mut descriptors: [PollFd<'_>; WAITABLE + 1] =
                std::array::from_fn(|_| PollFd::from_borrowed_fd(bell.descriptor(), PollFlags::IN));
            let (mut n, mut all_wait) = (1, true);
            for Input { queue, can_wait } in inputs {
                if !*can_wait || n > WAITABLE {
                    all_wait = false;
                    continue;
                }
                match queue.wait_descriptor() {
                    Some(descriptor) => {
                        descriptors[n] = PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
                        n += 1;
                    }
                    // It has packets already.
                    None => return,
                }
            }
            let time = if all_wait {
                LONG_SLEEP
            } else {
                let time = *nap;
                *nap = (time * 2).min(NAP.1);
                time
            };
            core.counters.sleeps.add(1);
            let timeout = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
            // Whatever comes of it, an interrupting signal too: look at the queues.
            let _ = poll(&mut descriptors[..n], Some(&timeout));
        });
        bell.get_up();
    }
}

/// What a panic says.
fn message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "panicked".to_owned(),
    }
}
