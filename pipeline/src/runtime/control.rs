use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::drops::{DropCounters, DropReason};
use wirepath_pmd::packet::{Packet, Pool};
use wirepath_pmd::port::{PortEvent, PortId};

use super::{PortInfo, Rates};
use crate::clock;
use crate::events::{ControlQueues, Learn, Punt};
use crate::mailbox::Mailbox;

/// The application's part of the control thread. All methods are called there, one at a time, and all have a default, so that
/// `&mut ()` is the control of a program that needs none.
pub trait Control {
    /// A packet that a stage punted. Default: dropped as `no_stage`.
    fn punt(&mut self, punt: Punt, plane: &mut ControlPlane) {
        plane.drop(punt.packet, DropReason::NoStage);
    }

    /// An address that a stage saw.
    fn learn(&mut self, learn: Learn, plane: &mut ControlPlane) {
        let _ = (learn, plane);
    }

    /// About every ten milliseconds.
    fn tick(&mut self, plane: &mut ControlPlane) {
        let _ = plane;
    }

    /// A port changed. It was logged already.
    fn port_event(&mut self, port: PortId, event: &PortEvent, plane: &mut ControlPlane) {
        let _ = (port, event, plane);
    }

    /// Rates of the last interval ([`super::RunOptions::report_every`]).
    fn rates(&mut self, rates: &Rates) {
        let _ = rates;
    }

    /// A packet that a stage or the control thread dropped, if [`super::Running::capture_drops`] was called: as it was when it was
    /// dropped, which may be without its outer headers or its tag. It was counted already. Many at a time are not all shown.
    fn refused(&mut self, packet: Packet, reason: DropReason) {
        let _ = (packet, reason);
    }

    /// The workers have ended, the ports not yet: the time to let go of packets that were kept.
    fn stop(&mut self, plane: &mut ControlPlane) {
        let _ = plane;
    }

    /// The application's own part of the final summary, under the key `"app"`.
    fn summary(&mut self) -> Option<serde_json::Value> {
        None
    }
}

impl Control for () {}

/// What the control thread can do.
#[derive(Debug)]
pub struct ControlPlane {
    pub(super) ports: Vec<PortInfo>,
    pub(super) mailboxes: Arc<[Mailbox]>,
    pub(super) drops: DropCounters,
    pub(super) sent: Counter,
    pub(super) stop: bool,
    pub(super) control: Arc<ControlQueues>,
    /// The time, in nanoseconds, where it is made and not read from a clock.
    pub(super) stepped: Option<u64>,
}

impl ControlPlane {
    /// Nanoseconds since the program started.
    pub fn now(&self) -> u64 {
        self.stepped.unwrap_or_else(clock::precise)
    }

    /// Seconds since the program started: the tick of tables that age.
    pub fn seconds(&self) -> u32 {
        (self.now() / 1_000_000_000) as u32
    }

    /// The ports; a port's number is its place.
    pub fn ports(&self) -> &[PortInfo] {
        &self.ports
    }

    /// Where to take packets for a port from.
    pub fn pool(&self, port: PortId) -> Option<&Pool> {
        self.ports.get(usize::from(port)).map(|port| &port.pool)
    }

    /// Sends a packet of the control thread's by a port, through a worker. Packets of one port keep their order.
    pub fn send(&mut self, port: PortId, mut packet: Packet) {
        packet.set_out_port(port);
        // Any worker reaches any port; the same one for each port keeps the order.
        let mailbox = &self.mailboxes[usize::from(port) % self.mailboxes.len()];
        match mailbox.transmit.push(packet) {
            Ok(()) => {
                self.sent.add(1);
                mailbox.bell.ring();
            }
            Err(packet) => self.drop(packet, DropReason::QueueFull),
        }
    }

    /// Gives a packet to a worker, which takes it through its stages from the first on.
    pub fn hand_over(&mut self, worker: usize, packet: Packet) {
        match self.mailboxes.get(worker) {
            Some(mailbox) => match mailbox.work.push(packet) {
                Ok(()) => mailbox.bell.ring(),
                Err(packet) => self.drop(packet, DropReason::QueueFull),
            },
            None => self.drop(packet, DropReason::QueueFull),
        }
    }

    /// Drops a packet.
    pub fn drop(&mut self, packet: Packet, reason: DropReason) {
        self.drops.add(reason, 1);
        self.control.bury(packet, reason);
    }

    /// Counts a drop of `n` packets that were never made, or that the caller frees.
    pub fn count_drops(&self, reason: DropReason, n: u64) {
        self.drops.add(reason, n);
    }

    /// What the control thread dropped.
    pub fn drops(&self) -> &DropCounters {
        &self.drops
    }

    /// Ends the program, as a signal would.
    pub fn stop(&mut self) {
        self.stop = true;
    }
}
