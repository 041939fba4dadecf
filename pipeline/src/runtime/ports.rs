//! Ports that are added and removed while the workers run.
//!
//! A new port is opened and started in another thread ([`PortOpener`](super::PortOpener)). The control thread then
//! assigns its queues to workers, by orders in their mailboxes. To remove a port, it asks all workers for the queues.
//! When it has them, another thread stops the device.
//!
//! Packets refer to ports by number. After the device is stopped, each worker empties its mailbox a few times. Then no
//! packet refers to the removed port, and another port can take the number.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use wirepath_packet::counters::QueueCounters;
use wirepath_pmd::port::{Capabilities, Offloads, Port, PortId, RxQueue, StartedPort, TxQueue};

use super::running::Presence;
use super::summary::PortSummary;
use super::{ControlPlane, MAX_PORTS, PortInfo, PortOpener, RuntimeError, assign_outputs, stop_ports};
use crate::context::Output;
use crate::mailbox::{PortOrder, PortReply};
use crate::worker::Input;

/// Times that all workers empty their mailboxes before the number of a port is used again. A packet passes from a
/// worker to another one by rules and then to the owner of a transmit queue.
const ROUNDS: u32 = 4;

/// A started port that no worker uses yet. Dropping it stops the port.
pub struct NewPort {
    info: PortInfo,
    started: Option<StartedPort>,
}

impl NewPort {
    pub(super) fn new(info: PortInfo, started: StartedPort) -> Self {
        Self { info: PortInfo { capabilities: started.port.capabilities(), ..info }, started: Some(started) }
    }

    /// Returns the properties of the port.
    pub fn info(&self) -> &PortInfo {
        &self.info
    }
}

impl Drop for NewPort {
    fn drop(&mut self) {
        if let Some(StartedPort { port, rx, tx }) = self.started.take() {
            stop(port, rx, tx);
        }
    }
}

impl fmt::Debug for NewPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NewPort").field("name", &self.info.name).finish_non_exhaustive()
    }
}

/// Stops a port and logs errors.
fn stop(port: Port, rx: Vec<RxQueue>, tx: Vec<TxQueue>) {
    for problem in stop_ports(vec![port], rx, tx) {
        tracing::warn!("{problem}");
    }
}

/// Waits for the thread that stops a port. Returns the last figures: `without_device` if the thread did not end well.
fn finish_stop(without_device: PortSummary, thread: JoinHandle<PortSummary>) -> PortSummary {
    thread.join().unwrap_or_else(|_| {
        tracing::warn!("port {}: a panic while the port was stopped", without_device.name);
        without_device
    })
}

/// Ports that are being added or removed, and what removed ports leave behind.
#[derive(Debug, Default)]
pub(crate) struct PortChanges {
    /// Opens new ports; `None` in simulations.
    opener: Option<PortOpener>,
    /// Transmit queues that no worker needs.
    pub(super) spare: Vec<TxQueue>,
    /// Orders to add a port that workers have not carried out.
    adding: usize,
    closing: Vec<ClosingPort>,
    /// Numbers of removed ports that may be used again.
    free: Vec<PortId>,
    /// Sum of the figures of all removed ports.
    removed: Option<PortSummary>,
}

/// Counters of the receive queues and of the transmit queues of a port.
type PortCounters = [Vec<Arc<QueueCounters>>; 2];

/// A port that is being removed.
#[derive(Debug)]
struct ClosingPort {
    id: PortId,
    rx: Vec<RxQueue>,
    tx: Vec<TxQueue>,
    /// Workers that have not replied.
    missing: usize,
    /// False if the port was never added. Its number stays with those for new ports.
    was_added: bool,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// Workers return the queues.
    Recall(Port),
    /// A thread reads the last figures of the device and stops it. The figures here are those without the device.
    Stop(Box<PortSummary>, PortCounters, JoinHandle<PortSummary>),
    /// Workers empty their mailboxes; the number of times that remain.
    Drain(u32),
}

impl PortChanges {
    /// Creates the state of a program whose ports have just started.
    pub(super) fn new(opener: PortOpener, spare: Vec<TxQueue>) -> Self {
        Self { opener: Some(opener), spare, ..Self::default() }
    }
}

impl ControlPlane {
    /// Returns what opens further ports, in any thread; `None` if the ports are only simulated.
    pub fn port_opener(&self) -> Option<PortOpener> {
        let ports = self.ports.iter().filter(|port| !port.is_removed).count();
        self.changes.opener.as_ref().map(|opener| opener.with_ports(ports))
    }

    /// Returns numbers for `n` new ports. They are the same until a port is added or removed.
    ///
    /// # Errors
    /// If the program would have too many ports.
    pub fn new_port_ids(&self, n: usize) -> Result<Vec<PortId>, RuntimeError> {
        let new = (self.ports.len()..MAX_PORTS).map(|id| PortId::new(id as u16));
        let ids: Vec<PortId> = self.changes.free.iter().copied().chain(new).take(n).collect();
        let live = self.ports.iter().filter(|port| !port.is_removed).count();
        if ids.len() < n { Err(RuntimeError::TooManyPorts(live + n)) } else { Ok(ids) }
    }

    /// Adds an opened port, whose number [`Self::new_port_ids`] returned. Its queues go to the workers that poll the
    /// fewest queues.
    ///
    /// # Errors
    /// If the number is in use. The port is stopped.
    pub fn add_port(&mut self, mut new: NewPort) -> Result<PortId, RuntimeError> {
        let id = new.info.id;
        let at = id.index();
        let is_free = self.changes.free.contains(&id) || (self.ports.len()..MAX_PORTS).contains(&at);
        let (Some(StartedPort { port, rx, tx }), true) = (is_free.then(|| new.started.take()).flatten(), is_free)
        else {
            return Err(RuntimeError::TooManyPorts(at));
        };
        self.changes.free.retain(|it| *it != id);
        self.tap.observers().set_port(id, &new.info.name);
        // Numbers that were returned together with this one, and are not used.
        while self.ports.len() <= at {
            let skipped = PortId::new(self.ports.len() as u16);
            if skipped != id {
                self.changes.free.push(skipped);
            }
            let (name, capabilities) = (String::new(), Capabilities::plain("", String::new()));
            self.ports.push(PortInfo { id: skipped, name, capabilities, is_removed: true, ..new.info.clone() });
            self.devices.push(None);
            self.presence.push(Presence::Present);
            self.losses.push(0);
            self.rule_drops.push(0);
        }
        if new.info.capabilities.offloads.contains(Offloads::RX_SUPERFRAMES) {
            // Before any worker receives from the new port.
            self.devices.iter_mut().flatten().for_each(Port::segment_superframes);
        }
        let can_wait = new.info.capabilities.can_wait;
        self.ports[at] = new.info.clone();
        self.devices[at] = Some(port);
        (self.presence[at], self.losses[at], self.rule_drops[at]) = (Presence::Present, 0, 0);

        let workers = self.workers.len();
        let mut inputs: Vec<Vec<Input>> = (0..workers).map(|_| Vec::new()).collect();
        for queue in rx {
            let Some(worker) = (0..workers).min_by_key(|worker| self.workers[*worker].0.rx_queues.len()) else { break };
            self.workers[worker].0.rx_queues.push((id, queue.index()));
            inputs[worker].push(Input { queue, can_wait });
        }
        let outputs = assign_outputs(at, tx, workers, &mut self.changes.spare);
        let orders = inputs.into_iter().zip(outputs).enumerate().map(|(worker, (inputs, output))| {
            let room = self.workers[worker].0.rx_queues.len();
            let is_owner = matches!(output, Output::Own { .. });
            let order = PortOrder::Add {
                port: id,
                inputs,
                output: Box::new(output),
                inputs_room: Vec::with_capacity(room),
                outputs_room: Vec::with_capacity(at + 1),
            };
            (worker, is_owner, order)
        });
        let mut orders: Vec<_> = orders.collect();
        // A worker that hands packets to the owner of a queue gets its order after the owner.
        orders.sort_by_key(|(_, is_owner, _)| !is_owner);
        self.changes.adding += orders.len();
        for (worker, _, order) in orders {
            self.mailboxes[worker].port_orders.push(order);
        }
        self.notify_workers();
        Ok(id)
    }

    /// Begins to remove a port. Nothing of the application may refer to it any more. Workers drop packets for the port
    /// as `device_lost`. [`Self::is_changing_ports`] tells when the device is closed.
    ///
    /// Returns `false` if there is no such port.
    pub fn remove_port(&mut self, id: PortId) -> bool {
        let Some(port) = self.devices.get_mut(id.index()).and_then(Option::take) else { return false };
        if let Some(info) = self.ports.get_mut(id.index()) {
            // Nothing of the removed port is found by name, or limits what others can do.
            let capabilities = Capabilities::plain("", String::new());
            let (name, pool) = (String::new(), info.pool.clone());
            *info = PortInfo { name, mac: None, capabilities, pool, is_removed: true, ..*info };
        }
        for (worker, (info, _)) in self.workers.iter_mut().enumerate() {
            let queues = info.rx_queues.len();
            info.rx_queues.retain(|(port, _)| *port != id);
            let inputs = Vec::with_capacity(queues - info.rx_queues.len());
            self.mailboxes[worker].port_orders.push(PortOrder::Remove { port: id, inputs });
        }
        let mine = |queue: &mut TxQueue| queue.port() == id;
        let tx = self.changes.spare.extract_if(.., mine).collect();
        let missing = self.workers.len();
        let (rx, step) = (Vec::new(), Step::Recall(port));
        self.changes.closing.push(ClosingPort { id, rx, tx, missing, was_added: true, step });
        self.notify_workers();
        true
    }

    /// Closes a port that is not added, without waiting. [`Self::is_changing_ports`] tells when the device is closed.
    pub fn discard_port(&mut self, mut new: NewPort) {
        let Some(StartedPort { port, rx, tx }) = new.started.take() else { return };
        let (id, step) = (new.info.id, Step::Recall(port));
        self.changes.closing.push(ClosingPort { id, rx, tx, missing: 0, was_added: false, step });
    }

    /// Returns true until the workers use all ports that were added, and the devices of all removed ports are closed.
    pub fn is_changing_ports(&self) -> bool {
        let is_open = |port: &ClosingPort| !matches!(port.step, Step::Drain(_));
        self.changes.adding > 0 || self.changes.closing.iter().any(is_open)
    }

    /// Moves the changes of ports forward.
    pub(super) fn advance_ports(&mut self) {
        if self.changes.adding == 0 && self.changes.closing.is_empty() {
            return;
        }
        self.take_replies();
        let mut closing = std::mem::take(&mut self.changes.closing);
        closing.retain_mut(|it| {
            if it.missing > 0 {
                return true;
            }
            match std::mem::replace(&mut it.step, Step::Drain(ROUNDS)) {
                Step::Recall(port) => it.step = self.begin_stop(port, &mut it.rx, &mut it.tx, it.was_added),
                Step::Stop(figures, counters, thread) if !thread.is_finished() => {
                    it.step = Step::Stop(figures, counters, thread);
                }
                Step::Stop(figures, counters, thread) => {
                    let figures = finish_stop(*figures, thread);
                    if !it.was_added {
                        return false;
                    }
                    self.add_removed(figures, &counters);
                    it.missing = self.mark(it.id);
                }
                Step::Drain(_) if !it.was_added => return false,
                Step::Drain(0 | 1) => {
                    self.changes.free.push(it.id);
                    return false;
                }
                Step::Drain(rounds) => {
                    it.step = Step::Drain(rounds - 1);
                    it.missing = self.mark(it.id);
                }
            }
            true
        });
        self.changes.closing.append(&mut closing);
    }

    /// Stops the device of a port in another thread. That thread also reads the last figures of the device: the kernel
    /// answers late while it is busy.
    fn begin_stop(&mut self, port: Port, rx: &mut Vec<RxQueue>, tx: &mut Vec<TxQueue>, was_added: bool) -> Step {
        let (at, name) = (port.id().index(), port.name().to_owned());
        let (losses, rule_drops) = if was_added { (self.losses[at], self.rule_drops[at]) } else { (0, 0) };
        let without_device = PortSummary::without_device(&port, losses, rule_drops);
        let counters = port.queue_counters();
        // The thread gets the port by a shared place, so that it is not lost if there is no thread.
        let (rx, tx) = (std::mem::take(rx), std::mem::take(tx));
        let place = Arc::new(Mutex::new(Some(StartedPort { port, rx, tx })));
        let rest = without_device.clone();
        let take = move |place: &Mutex<Option<StartedPort>>| {
            let taken = place.lock().unwrap_or_else(PoisonError::into_inner).take();
            let Some(StartedPort { mut port, rx, tx }) = taken else { return rest.clone() };
            let figures = PortSummary::new(&mut port, losses, rule_drops);
            stop(port, rx, tx);
            figures
        };
        let (of_thread, take_in_thread) = (Arc::clone(&place), take.clone());
        if was_added {
            tracing::info!("port {name}: removed");
        }
        match std::thread::Builder::new().name("wirepath-close".to_owned()).spawn(move || take_in_thread(&of_thread)) {
            Ok(thread) => Step::Stop(Box::new(without_device), counters, thread),
            Err(error) => {
                tracing::debug!("port {name}: cannot start a thread: {error}");
                let figures = take(&place);
                if was_added {
                    self.add_removed(figures, &counters);
                }
                Step::Drain(ROUNDS)
            }
        }
    }

    /// Adds the figures of a removed port to those of the others. Ports also send and drop packets while they stop.
    fn add_removed(&mut self, mut figures: PortSummary, [rx, tx]: &PortCounters) {
        figures.rx = rx.iter().map(|queue| queue.snapshot()).collect();
        figures.tx = tx.iter().map(|queue| queue.snapshot()).collect();
        self.changes.removed.get_or_insert_with(PortSummary::of_removed).add(figures);
    }

    /// Asks all workers to empty their mailboxes. Returns their number.
    fn mark(&self, port: PortId) -> usize {
        for mailbox in self.mailboxes.iter() {
            mailbox.port_orders.push(PortOrder::Mark { port });
        }
        self.notify_workers();
        self.mailboxes.len()
    }

    fn take_replies(&mut self) {
        for mailbox in self.mailboxes.iter() {
            while let Some(reply) = mailbox.port_replies.pop() {
                let port = match reply {
                    PortReply::Added => {
                        self.changes.adding = self.changes.adding.saturating_sub(1);
                        continue;
                    }
                    PortReply::Removed { port, .. } | PortReply::Marked { port } => port,
                };
                let Some(closing) = self.changes.closing.iter_mut().find(|it| it.id == port) else { continue };
                closing.missing = closing.missing.saturating_sub(1);
                if let PortReply::Removed { inputs, output, .. } = reply {
                    closing.rx.extend(inputs.into_iter().map(|input| input.queue));
                    closing.tx.extend(output);
                }
            }
        }
    }

    /// Takes back all that workers which have ended left undone. Ports that are not closed yet are among the started
    /// ones again. Adds their queues to `rx` and `tx`.
    pub(super) fn end_port_changes(&mut self, rx: &mut Vec<RxQueue>, tx: &mut Vec<TxQueue>) {
        self.take_replies();
        tx.append(&mut self.changes.spare);
        for mailbox in self.mailboxes.iter() {
            while let Some(order) = mailbox.port_orders.pop() {
                if let PortOrder::Add { inputs, output, .. } = order {
                    rx.extend(inputs.into_iter().map(|input| input.queue));
                    if let Output::Own { queue, .. } = *output {
                        tx.push(queue);
                    }
                }
            }
        }
        for mut closing in std::mem::take(&mut self.changes.closing) {
            rx.append(&mut closing.rx);
            tx.append(&mut closing.tx);
            match closing.step {
                Step::Recall(port) if closing.was_added => self.devices[closing.id.index()] = Some(port),
                Step::Recall(port) => {
                    let id = port.id();
                    let own_rx = rx.extract_if(.., |queue| queue.port() == id).collect();
                    let own_tx = tx.extract_if(.., |queue| queue.port() == id).collect();
                    stop(port, own_rx, own_tx);
                }
                Step::Stop(figures, counters, thread) => {
                    let figures = finish_stop(*figures, thread);
                    if closing.was_added {
                        self.add_removed(figures, &counters);
                    }
                }
                Step::Drain(_) => {}
            }
        }
    }

    /// Returns the figures of removed ports: the sum of those that are closed, and those that are being closed.
    pub(crate) fn removed_ports(&mut self) -> Vec<PortSummary> {
        let mut all: Vec<PortSummary> = Vec::new();
        for closing in self.changes.closing.iter().filter(|closing| closing.was_added) {
            let at = closing.id.index();
            match &closing.step {
                Step::Recall(port) => {
                    all.push(PortSummary::without_device(port, self.losses[at], self.rule_drops[at]));
                }
                Step::Stop(figures, [rx, tx], _) => all.push(PortSummary {
                    rx: rx.iter().map(|queue| queue.snapshot()).collect(),
                    tx: tx.iter().map(|queue| queue.snapshot()).collect(),
                    ..PortSummary::clone(figures)
                }),
                Step::Drain(_) => {}
            }
        }
        if self.changes.removed.is_some() || !all.is_empty() {
            let mut sum = self.changes.removed.clone().unwrap_or_else(PortSummary::of_removed);
            all.into_iter().for_each(|figures| sum.add(figures));
            return vec![sum];
        }
        Vec::new()
    }

    fn notify_workers(&self) {
        self.mailboxes.iter().for_each(|mailbox| mailbox.notifier.notify());
    }
}
