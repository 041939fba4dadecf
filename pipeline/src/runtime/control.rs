use std::sync::Arc;

use wirepath_pmd::counters::Counter;
use wirepath_pmd::drops::{DropCounters, DropReason};
use wirepath_pmd::flow::Rule;
use wirepath_pmd::packet::offload::Flags;
use wirepath_pmd::packet::{Packet, Pool};
use wirepath_pmd::port::{KernelRule, Port, PortError, PortEvent, PortId, RuleHardware};

use super::{PortInfo, Rates};
use crate::clock;
use crate::events::{ControlQueues, Learn, Punt};
use crate::mailbox::Mailbox;
use crate::rules::hardware::{Devices, Ring};

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

impl Devices for ControlPlane {
    fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware> {
        Self::rule_hardware(self, port)
    }

    fn receive_rings(&self, port: PortId) -> Vec<Ring> {
        self.devices.get(usize::from(port)).map(Ring::of).unwrap_or_default()
    }
}

/// What the control thread can do.
#[derive(Debug)]
pub struct ControlPlane {
    pub(super) ports: Vec<PortInfo>,
    /// The same, started; none where they exist on paper only.
    pub(super) devices: Vec<Port>,
    pub(super) mailboxes: Arc<[Mailbox]>,
    pub(super) drops: DropCounters,
    pub(super) sent: Counter,
    pub(super) injected: Counter,
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

    /// Tells a port all flow rules, in the order in which they are asked: it may decide some of those that pass packets to the kernel
    /// before these reach it. What became of each rule of the port with that action ([`wirepath_pmd::port::Device::set_rules`]).
    pub fn set_rules(&mut self, port: PortId, rules: &[Rule]) -> Result<Vec<KernelRule>, PortError> {
        self.devices.get_mut(usize::from(port)).map_or(Ok(Vec::new()), |port| port.set_rules(rules))
    }

    /// Packets and bytes of a rule that a port decides by itself.
    pub fn rule_counters(&mut self, port: PortId, rule: &Rule) -> Option<(u64, u64)> {
        self.devices.get_mut(usize::from(port))?.rule_counters(rule)
    }

    /// The rule hardware of a port, where it has some.
    pub fn rule_hardware(&mut self, port: PortId) -> Option<&mut dyn RuleHardware> {
        self.devices.get_mut(usize::from(port))?.rule_hardware()
    }

    /// Puts a packet into the kernel's receive path as if it had just come in by the interface of the port that it came in by. Where
    /// the port cannot do that, or the kernel refuses, it is dropped as `no_kernel`.
    pub fn inject(&mut self, packet: Packet) {
        let mut frame: Vec<u8> = packet.segments().flatten().copied().collect();
        if let Some(tci) = packet.vlan().filter(|_| frame.len() >= 12) {
            let service = packet.flags().contains(Flags::VLAN_SERVICE);
            let [high, low] = tci.to_be_bytes();
            let tag = if service { [0x88, 0xa8, high, low] } else { [0x81, 0x00, high, low] };
            frame.splice(12..12, tag);
        }
        let port = self.devices.get_mut(usize::from(packet.in_port()));
        match port.map(|port| port.inject(&frame)) {
            Some(Ok(())) => self.injected.add(1),
            _ => self.drop(packet, DropReason::NoKernel),
        }
    }

    /// Packets that [`Self::inject`] has given to the kernel.
    pub fn injected(&self) -> u64 {
        self.injected.get()
    }

    /// Sends a packet of the control thread's by a port, through a worker. Packets of one port keep their order. It meets no rule of
    /// egress.
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
