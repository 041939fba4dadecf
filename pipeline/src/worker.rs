//! The run loop of one worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wirepath_packet::{BATCH, Batch, PortId};
use wirepath_pmd::port::RxQueue;

use crate::clock::{Clock, ticks};
use crate::context::{Context, WorkerState};
use crate::epoch::Reader;
use crate::events::Phase;
use crate::mailbox::{PortOrder, PortReply};
use crate::measure::{Accounting, MAILBOX, RECEIVE, TIMERS, TurnCounters};
use crate::stage::Stage;
use crate::stage_timers::StageTimers;

/// Behaviour of a worker that finds no packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Idle {
    /// Polls again at once and uses the whole core.
    Busy,
    /// Sleeps after a number of empty turns, until a port has packets.
    #[default]
    Adaptive,
    /// Sleeps after the first empty turn while it receives fewer packets per second than this, and else like
    /// [`Self::Adaptive`].
    Sleep(u64),
}

impl Idle {
    /// Packets per second below which [`Self::Sleep`] sleeps at once, if the configuration names no other number.
    pub const SLEEP_BELOW: u64 = 20_000;
}

/// Empty turns after which an adaptive worker sleeps.
const IDLE_POLLS: u32 = 256;
/// Turns between two reads of the clock while packets flow. Reading the counter costs about as much as
/// forwarding ten packets.
const TURNS_PER_CLOCK_READ: u32 = 8;
/// Maximum number of receive queues whose descriptors are waited for. The others are polled at the interval
/// of [`SLEEP_RANGE`].
const MAX_WAIT_DESCRIPTORS: usize = 32;
/// Longest sleep while every queue can wake the worker.
const MAX_SLEEP: Duration = Duration::from_millis(250);
/// First and longest sleep while some queue cannot wake the worker.
const SLEEP_RANGE: (Duration, Duration) = (Duration::from_micros(50), Duration::from_millis(1));

/// A function that the control thread sends to a worker, which runs it between two batches.
pub(crate) type Job<S> = Box<dyn FnOnce(&mut S) + Send>;

/// A receive queue, and whether it can wake its worker.
pub(crate) struct Input {
    pub(crate) queue: RxQueue,
    pub(crate) can_wait: bool,
}

/// A worker: everything that its thread owns.
pub(crate) struct Worker<S> {
    pub(crate) state: WorkerState,
    pub(crate) inputs: Vec<Input>,
    pub(crate) stage: S,
    pub(crate) reader: Reader,
    pub(crate) jobs: Arc<ArrayQueue<Job<S>>>,
    pub(crate) idle: Idle,
    pub(crate) clock: Clock,
    pub(crate) accounting: Accounting,
    pub(crate) timers: StageTimers,
    /// Time in nanoseconds at which the next timer of the stages is due; `u64::MAX`: there is none.
    pub(crate) next_timer: u64,
}

impl<S: Stage + 'static> Worker<S> {
    /// Runs until the phase is `Exit`. A panic of a stage ends the worker, not the program, and its message
    /// is returned.
    pub(crate) fn run(&mut self) -> Result<(), String> {
        catch_unwind(AssertUnwindSafe(|| self.run_loop())).map_err(|panic| panic_message(&*panic))
    }

    fn run_loop(&mut self) {
        let mut batch = Batch::new();
        let (mut empty_turns, mut sleep_time) = (0, SLEEP_RANGE.0);
        // Turns after which the clock is read.
        let mut window = 0;
        let mut phase = Phase::Run;
        self.accounting = Accounting::new(ticks());
        loop {
            if self.accounting.turns >= window {
                window = self.end_window();
                if self.state.now >= self.next_timer && phase == Phase::Run {
                    self.run_timers();
                }
            }
            self.accounting.turns += 1;
            self.reader.quiescent();
            let mut moved = 0;
            if phase == Phase::Run {
                moved += self.receive(&mut batch);
            }
            if self.state.mailboxes[self.state.index].notifier.take_notification() {
                moved += self.drain_mailbox(&mut batch);
                phase = self.state.control.phase();
            }
            if moved > 0 {
                self.state.flush();
                self.accounting.packets += moved as u64;
                (empty_turns, sleep_time) = (0, SLEEP_RANGE.0);
                continue;
            }
            if phase == Phase::Run {
                self.state.in_port = None;
                self.stage.idle(&mut Context { state: &mut self.state, guard: self.reader.guard() });
            }
            self.state.flush();
            self.accounting.idle_turns += 1;
            self.state.reclaim();
            match phase {
                Phase::Run => {}
                Phase::Drain => {
                    let mailbox = &self.state.mailboxes[self.state.index];
                    if mailbox.is_empty() {
                        mailbox.drained.fetch_add(1, Ordering::Release);
                    }
                }
                Phase::Exit => {
                    self.end_window();
                    return;
                }
            }
            empty_turns += 1;
            let patience = match self.idle {
                Idle::Busy => u32::MAX,
                Idle::Sleep(below) if self.accounting.load() < below && !self.state.is_sending() => 0,
                Idle::Adaptive | Idle::Sleep(_) => IDLE_POLLS,
            };
            if empty_turns > patience {
                self.end_window();
                self.sleep(&mut sleep_time);
                self.accounting.end_sleep(ticks(), &self.state.counters);
                // The time of the next turn must be right.
                window = 0;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Reads the clock, and ends the turns since the last read in the accounts. Returns the number of turns until the
    /// next read.
    #[inline(never)]
    fn end_window(&mut self) -> u32 {
        let Self { state, inputs, accounting, clock, .. } = self;
        let (now, packets) = (ticks(), accounting.packets);
        let is_turn = accounting.turns > 0;
        state.now = clock.at(now);
        let cycles = accounting.end_window(now, &state.counters);
        if accounting.is_sample_due(state.now) {
            inputs.iter_mut().for_each(|input| input.queue.sample());
            state.sample_outputs();
        }
        let Some(recording) = state.recording.as_mut() else { return TURNS_PER_CLOCK_READ };
        if is_turn {
            let counters = TurnCounters { drops: state.counters.drops.total(), punts: state.counters.punted.get() };
            recording.end_turn(now, state.now, cycles, packets, counters);
        } else {
            recording.end_sleep();
        }
        // A window of one turn.
        1
    }

    /// Calls the timers of the stages that are due. Their packets leave at the end of the turn.
    #[cold]
    #[inline(never)]
    fn run_timers(&mut self) {
        let Self { state, stage, reader, timers, .. } = self;
        state.in_port = None;
        timers.begin();
        stage.run_timers(timers, &mut Context { state, guard: reader.guard() });
        self.next_timer = timers.next();
        state.end_part(|| TIMERS);
    }

    /// Passes one burst of every receive queue through the stages. Returns the number of packets.
    #[inline(always)]
    fn receive(&mut self, batch: &mut Batch) -> usize {
        let Self { state, inputs, stage, reader, .. } = self;
        let mut moved = 0;
        for Input { queue, .. } in inputs {
            let n = queue.receive(batch);
            if n > 0 {
                moved += n;
                state.in_port = Some(queue.port());
                if state.is_observed() {
                    process_observed(state, stage, reader, batch, queue);
                } else {
                    let mut context = Context { state, guard: reader.guard() };
                    stage.process(&mut context, batch);
                    state.forward(batch);
                }
            }
        }
        moved
    }

    /// Runs the queued jobs and processes the packets that other threads enqueued.
    #[cold]
    fn drain_mailbox(&mut self, batch: &mut Batch) -> usize {
        while let Some(job) = self.jobs.pop() {
            job(&mut self.stage);
            // The job may have changed the interval of a timer.
            self.next_timer = 0;
        }
        self.state.in_port = None;
        let mailboxes = Arc::clone(&self.state.mailboxes);
        while let Some(job) = mailboxes[self.state.index].jobs.pop() {
            job(&mut self.stage, &mut Context { state: &mut self.state, guard: self.reader.guard() });
            // The job may have changed the interval of a timer.
            self.next_timer = 0;
        }
        if !self.state.tap.refresh() {
            self.state.mailboxes[self.state.index].notifier.notify();
        }
        self.take_recording_orders();
        let marks = self.take_port_orders();
        // A port that lost its device needs its transmit queues back, also from a worker that is never idle.
        self.state.sync_outputs();
        let Self { state, stage, reader, .. } = self;
        let mailbox = &mailboxes[state.index];
        let mut moved = 0;
        // Limited to what is queued now, so that a stage that enqueues to its own worker does not starve the
        // receive queues.
        for left in (0..mailbox.work.len().div_ceil(BATCH)).rev() {
            while !batch.is_full()
                && let Some(packet) = mailbox.work.pop()
            {
                let _ = batch.push(packet);
            }
            moved += batch.len();
            if let Some(recording) = &mut state.recording {
                recording.lap(MAILBOX);
                recording.batch(batch.len(), || Some(0));
            }
            let mut context = Context { state, guard: reader.guard() };
            stage.process(&mut context, batch);
            state.end_part(|| stage.name());
            state.forward(batch);
            if left == 0 && !mailbox.work.is_empty() {
                mailbox.notifier.notify();
            }
        }
        for _ in 0..mailbox.transmit.len() {
            let Some(packet) = mailbox.transmit.pop() else { break };
            moved += 1;
            state.send_by_out_port(packet);
        }
        if !mailbox.is_empty() {
            mailbox.notifier.notify();
        }
        for port in marks {
            mailbox.port_replies.push(PortReply::Marked { port });
            state.notify_control = true;
        }
        state.end_part(|| MAILBOX);
        moved
    }

    /// Carries out changes of the ports. Returns the marks, which are replied to after the packets in the mailbox.
    fn take_port_orders(&mut self) -> Vec<PortId> {
        // An empty list allocates nothing.
        let mut marks = Vec::new();
        let Self { state, inputs, .. } = self;
        let mailboxes = Arc::clone(&state.mailboxes);
        let mailbox = &mailboxes[state.index];
        while let Some(order) = mailbox.port_orders.pop() {
            let reply = match order {
                PortOrder::Add { port, inputs: mut new, output, inputs_room: mut room, outputs_room } => {
                    state.set_output(port, *output, outputs_room);
                    room.append(inputs);
                    room.append(&mut new);
                    *inputs = room;
                    PortReply::Added
                }
                PortOrder::Remove { port, inputs: mut removed } => {
                    removed.extend(inputs.extract_if(.., |input| input.queue.port() == port));
                    PortReply::Removed { port, inputs: removed, output: state.take_output(port) }
                }
                PortOrder::Mark { port } => {
                    marks.push(port);
                    continue;
                }
            };
            mailbox.port_replies.push(reply);
            state.notify_control = true;
        }
        marks
    }

    /// Fills other recordings from now on, and returns those before.
    fn take_recording_orders(&mut self) {
        let mailbox = &self.state.mailboxes[self.state.index];
        while let Some(mut order) = mailbox.recording_orders.pop() {
            if let Some(recording) = &mut order {
                recording.calibrate();
            }
            mailbox.is_recording.store(order.is_some(), Ordering::Relaxed);
            if let Some(filled) = std::mem::replace(&mut self.state.recording, order) {
                // Without room, nobody waits for it.
                let _ = mailbox.recordings.push(filled);
            }
        }
    }

    /// Sleeps until a queue has packets, a notification arrives or the time is up. No packets are pending
    /// here, because the turn was flushed.
    #[cold]
    fn sleep(&mut self, sleep_time: &mut Duration) {
        let Self { state, inputs, reader, next_timer, .. } = self;
        let notifier = &state.mailboxes[state.index].notifier;
        if !notifier.prepare_sleep() {
            return;
        }
        reader.offline(|| {
            let mut descriptors: [PollFd<'_>; MAX_WAIT_DESCRIPTORS + 1] =
                std::array::from_fn(|_| PollFd::from_borrowed_fd(notifier.descriptor(), PollFlags::IN));
            let (mut n, mut all_wait) = (1, true);
            for Input { queue, can_wait } in inputs {
                if !*can_wait || n > MAX_WAIT_DESCRIPTORS {
                    all_wait = false;
                    continue;
                }
                if queue.is_away() {
                    // The control thread notifies the worker when the device is back.
                    continue;
                }
                match queue.wait_descriptor() {
                    Some(descriptor) => {
                        descriptors[n] = PollFd::from_borrowed_fd(descriptor, PollFlags::IN);
                        n += 1;
                    }
                    // The queue already has packets.
                    None => return,
                }
            }
            let time = if all_wait {
                MAX_SLEEP
            } else {
                let time = *sleep_time;
                *sleep_time = (time * 2).min(SLEEP_RANGE.1);
                time
            };
            // The time was read just before.
            let time = time.min(Duration::from_nanos(next_timer.saturating_sub(state.now)));
            state.counters.sleeps.add(1);
            let timeout = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos().into() };
            // The queues are polled after any result, even if a signal interrupted the wait.
            let _ = poll(&mut descriptors[..n], Some(&timeout));
        });
        notifier.wake();
    }
}

/// Processes a received batch like [`Worker::receive`], for captures, traces and measurements.
#[cold]
#[inline(never)]
fn process_observed<S: Stage>(
    state: &mut WorkerState,
    stage: &mut S,
    reader: &Reader,
    batch: &mut Batch,
    queue: &mut RxQueue,
) {
    record_batch(state, batch.len(), queue);
    if state.tap.wants_received() {
        state.observe_received(batch, queue.index());
    }
    loop {
        let mut context = Context { state, guard: reader.guard() };
        stage.process(&mut context, batch);
        state.end_part(|| stage.name());
        state.forward(batch);
        if !state.tap.has_pieces() || !state.next_piece(batch) {
            break;
        }
    }
}

/// Records the reception of a batch.
fn record_batch(state: &mut WorkerState, packets: usize, queue: &mut RxQueue) {
    if let Some(recording) = &mut state.recording {
        recording.lap(RECEIVE);
        recording.batch(packets, || queue.waiting());
    }
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "panicked".to_owned(),
    }
}
