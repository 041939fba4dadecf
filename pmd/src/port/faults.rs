//! Seeded faults around the queues of any port.
//!
//! [`inject`] wraps the specification of a port. The queues of the port then lose, duplicate, reorder and corrupt
//! packets, and transmit queues refuse packets for a while. With the same seed, a queue makes the same decisions for
//! the same sequence of packets. A port without faults is not wrapped and costs nothing.
//!
//! Each fault is counted ([`super::DeviceStatistics::extra_statistics`]). A lost packet counts as dropped with
//! [`DropReason::InjectedFault`], a duplicate as a copy ([`QueueCounters::injected_copies`]).
//!
//! ```
//! use wirepath_pmd::drivers::r#virtual::memory::{Options, cable};
//! use wirepath_pmd::port::faults::{Faults, QueueFaults, inject};
//!
//! let (near, far) = cable(Options::default());
//! let rx = QueueFaults { loss: 0.01, reorder: 0.05, distance: 8, ..QueueFaults::default() };
//! let near = inject(near, Faults { seed: 7, rx, ..Faults::default() });
//! assert_eq!(near.driver(), far.driver());
//! ```

use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_flow::Rule;
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_privileges::CapabilitySet;

use super::{
    Bifurcation, Capabilities, Device, DeviceLink, DeviceStatistics, KernelPunt, KernelRule, Link, PortConfig,
    PortError, PortEvent, PortId, PortSpec, PuntToKernel, Queues, RuleHardware, RxDriver, TunnelTso, TxDriver,
};

/// Largest [`QueueFaults::distance`].
pub const MAX_DISTANCE: u32 = 1024;

/// Faults of the queues of one direction. Probabilities lie between 0 and 1; 0 is never.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueFaults {
    /// Probability that a packet is lost.
    pub loss: f64,
    /// Probability that a packet is duplicated.
    pub duplicate: f64,
    /// Probability that a packet is delayed until [`Self::distance`] more have passed it.
    pub reorder: f64,
    /// Packets that pass a delayed one, 1 to [`MAX_DISTANCE`]. A queue that has nothing more to do releases its delayed
    /// packets earlier.
    pub distance: u32,
    /// Probability that one bit of a packet's first segment is flipped.
    pub corrupt: f64,
    /// Probability that a call begins a time in which the transmit queue accepts nothing. Receive queues ignore it.
    pub full: f64,
    /// Calls that such a time lasts, at least 1.
    pub full_calls: u32,
}

impl Default for QueueFaults {
    /// No faults, a distance of 4 packets and full queues for 4 calls.
    fn default() -> Self {
        Self { loss: 0.0, duplicate: 0.0, reorder: 0.0, distance: 4, corrupt: 0.0, full: 0.0, full_calls: 4 }
    }
}

/// Faults of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Faults {
    /// Seed of the random numbers. Each queue has a sequence of its own.
    pub seed: u64,
    /// Faults of the receive queues.
    pub rx: QueueFaults,
    /// Faults of the transmit queues.
    pub tx: QueueFaults,
}

/// Wraps a port, whose queues then have these faults. Values beyond their ranges count as the nearest valid ones.
pub fn inject(inner: Box<dyn PortSpec>, faults: Faults) -> Box<dyn PortSpec> {
    Box::new(FaultySpec { inner, faults })
}

#[derive(Debug)]
struct FaultySpec {
    inner: Box<dyn PortSpec>,
    faults: Faults,
}

impl FaultySpec {
    fn wrap(device: Box<dyn Device>, faults: Faults) -> Box<dyn Device> {
        Box::new(FaultyDevice { inner: device, faults, counters: Arc::default(), uncounted: Vec::new() })
    }
}

impl PortSpec for FaultySpec {
    fn driver(&self) -> &'static str {
        self.inner.driver()
    }

    fn open(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Self::wrap(self.inner.open()?, self.faults))
    }

    fn open_to_check(self: Box<Self>) -> Result<Box<dyn Device>, PortError> {
        Ok(Self::wrap(self.inner.open_to_check()?, self.faults))
    }

    fn privileges(&self) -> CapabilitySet {
        self.inner.privileges()
    }

    fn kernel_punt(&self) -> KernelPunt {
        self.inner.kernel_punt()
    }

    fn may_offload_rules(&self) -> bool {
        self.inner.may_offload_rules()
    }

    fn rule_spec_for(&self, driver: &str, device: &str) -> Option<Box<dyn PortSpec>> {
        self.inner.rule_spec_for(driver, device)
    }

    fn kernel_rules(&self, rules: &[Rule], port: PortId) -> Vec<KernelRule> {
        self.inner.kernel_rules(rules, port)
    }
}

/// Faults that the queues of one direction have made. Several queues write: the additions are atomic.
#[derive(Debug, Default)]
struct FaultCounters {
    rx: [AtomicU64; 5],
    tx: [AtomicU64; 5],
}

/// Kinds of faults, as indices of [`FaultCounters`].
#[derive(Clone, Copy)]
enum Kind {
    Lost,
    Duplicated,
    Reordered,
    Corrupted,
    Full,
}

const RX_NAMES: [&str; 4] =
    ["injected_rx_losses", "injected_rx_duplicates", "injected_rx_reorderings", "injected_rx_corruptions"];
const TX_NAMES: [&str; 5] = [
    "injected_tx_losses",
    "injected_tx_duplicates",
    "injected_tx_reorderings",
    "injected_tx_corruptions",
    "injected_tx_full_calls",
];

struct FaultyDevice {
    inner: Box<dyn Device>,
    faults: Faults,
    counters: Arc<FaultCounters>,
    /// Reasons of uncounted drops of the device, read at its start.
    uncounted: Vec<DropReason>,
}

impl FaultyDevice {
    fn wrap(&mut self, queues: Queues, config: &PortConfig) -> Queues {
        self.uncounted = self.inner.statistics().map_or_else(Vec::new, |inner| inner.uncounted_drops());
        let (driver, seed) = (self.inner.capabilities().driver, self.faults.seed);
        tracing::warn!("port {}: faults are injected into the queues of the driver {driver} (seed {seed})", config.id);
        let line = |is_tx: bool, index: usize| {
            let faults = if is_tx { self.faults.tx } else { self.faults.rx };
            let seed = self.faults.seed ^ (index as u64) << 1 ^ u64::from(is_tx);
            FaultLine::new(faults, seed, config.pool.clone(), Arc::clone(&self.counters), is_tx)
        };
        let rx = queues.rx.into_iter().enumerate().map(|(index, inner)| {
            Box::new(FaultyRx { inner, line: line(false, index), incoming: Batch::new() }) as Box<dyn RxDriver>
        });
        let tx = queues.tx.into_iter().enumerate().map(|(index, inner)| {
            let outgoing = Batch::new();
            Box::new(FaultyTx { inner, line: line(true, index), outgoing, full_calls: 0 }) as Box<dyn TxDriver>
        });
        Queues { rx: rx.collect(), tx: tx.collect() }
    }
}

impl Device for FaultyDevice {
    fn capabilities(&self) -> Capabilities {
        let inner = self.inner.capabilities();
        Capabilities { mode: format!("{}, with injected faults", inner.mode), ..inner }
    }

    fn check(&mut self, config: &PortConfig) -> Result<(), PortError> {
        self.inner.check(config)
    }

    fn start(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let queues = self.inner.start(config)?;
        Ok(self.wrap(queues, config))
    }

    fn stop(&mut self, queues: Queues) -> Result<(), PortError> {
        let rx = queues.rx.into_iter().map(|queue| match queue.into_any().downcast::<FaultyRx>() {
            Ok(queue) => Some(queue.into_inner()),
            Err(_) => None,
        });
        let tx = queues.tx.into_iter().map(|queue| match queue.into_any().downcast::<FaultyTx>() {
            Ok(queue) => Some(queue.into_inner()),
            Err(_) => None,
        });
        self.inner.stop(Queues { rx: rx.flatten().collect(), tx: tx.flatten().collect() })
    }

    fn can_return(&self) -> bool {
        self.inner.can_return()
    }

    fn privileges(&self) -> CapabilitySet {
        self.inner.privileges()
    }

    fn restart(&mut self, config: &PortConfig) -> Result<Queues, PortError> {
        let queues = self.inner.restart(config)?;
        Ok(self.wrap(queues, config))
    }

    fn set_bifurcation(&mut self, bifurcation: &Bifurcation) -> Result<(), PortError> {
        self.inner.set_bifurcation(bifurcation)
    }

    fn statistics(&mut self) -> Option<&mut dyn DeviceStatistics> {
        Some(self)
    }

    fn read_clock(&mut self) -> Option<u64> {
        self.inner.read_clock()
    }

    fn rule_hardware(&mut self) -> Option<&mut dyn RuleHardware> {
        self.inner.rule_hardware()
    }

    fn punt_to_kernel(&mut self) -> Option<&mut dyn PuntToKernel> {
        self.inner.punt_to_kernel()
    }
}

impl DeviceLink for FaultyDevice {
    fn link(&mut self) -> Link {
        self.inner.link()
    }

    fn events(&mut self) -> Vec<PortEvent> {
        self.inner.events()
    }
}

impl DeviceStatistics for FaultyDevice {
    fn extra_statistics(&mut self) -> Vec<(&'static str, u64)> {
        let mut all = self.inner.statistics().map_or_else(Vec::new, |inner| inner.extra_statistics());
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        all.extend(RX_NAMES.into_iter().zip(self.counters.rx.iter().map(value)));
        all.extend(TX_NAMES.into_iter().zip(self.counters.tx.iter().map(value)));
        all
    }

    fn drops(&mut self) -> Vec<(DropReason, u64)> {
        self.inner.statistics().map_or_else(Vec::new, |inner| inner.drops())
    }

    fn uncounted_drops(&self) -> Vec<DropReason> {
        self.uncounted.clone()
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014): a generator that is the same on all machines.
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    /// True with this probability. Certain decisions take no random number.
    fn happens(&mut self, probability: f64) -> bool {
        // 53 bits, which a double holds exactly.
        probability > 0.0 && ((self.next() >> 11) as f64) < probability * (1u64 << 53) as f64
    }
}

/// Packets on their way through the faults of one queue.
struct FaultLine {
    faults: QueueFaults,
    random: Random,
    /// Pool of duplicates.
    pool: Pool,
    /// Packets that go on, in order. The capacity suffices for all calls.
    ready: VecDeque<Packet>,
    /// Delayed packets with the number of packets that have yet to pass. They were delayed in this order.
    delayed: VecDeque<(u32, Packet)>,
    counters: Arc<FaultCounters>,
    is_tx: bool,
}

impl FaultLine {
    fn new(faults: QueueFaults, seed: u64, pool: Pool, counters: Arc<FaultCounters>, is_tx: bool) -> Self {
        let distance = faults.distance.clamp(1, MAX_DISTANCE);
        let faults = QueueFaults { distance, full_calls: faults.full_calls.max(1), ..faults };
        // A batch with its duplicates, and all delayed packets.
        let room = 3 * BATCH + distance as usize;
        let (ready, delayed) = (VecDeque::with_capacity(room), VecDeque::with_capacity(distance as usize + 1));
        Self { faults, random: Random(seed), pool, ready, delayed, counters, is_tx }
    }

    fn count(&self, kind: Kind) {
        let counters = if self.is_tx { &self.counters.tx } else { &self.counters.rx };
        counters[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Packets inside.
    fn len(&self) -> usize {
        self.ready.len() + self.delayed.len()
    }

    /// Takes a packet; `lost` counts one that is lost.
    fn pass(&mut self, mut packet: Packet, queue: &QueueCounters, lost: impl FnOnce(&Packet)) {
        for (left, _) in &mut self.delayed {
            *left -= 1;
        }
        if self.random.happens(self.faults.loss) {
            self.count(Kind::Lost);
            lost(&packet);
        } else {
            if self.random.happens(self.faults.corrupt) {
                let place = self.random.next() as usize;
                let data = packet.data_mut();
                if !data.is_empty() {
                    data[place / 8 % data.len()] ^= 1 << (place % 8);
                    self.count(Kind::Corrupted);
                }
            }
            let copy = if self.random.happens(self.faults.duplicate) { packet.duplicate(&self.pool) } else { None };
            if self.random.happens(self.faults.reorder) {
                self.count(Kind::Reordered);
                self.delayed.push_back((self.faults.distance, packet));
            } else {
                self.ready.push_back(packet);
            }
            if let Some(copy) = copy {
                self.count(Kind::Duplicated);
                queue.injected_copies.add(1);
                self.ready.push_back(copy);
            }
        }
        while let Some((_, packet)) = self.delayed.pop_front_if(|(left, _)| *left == 0) {
            self.ready.push_back(packet);
        }
    }

    /// Delays no packet any longer.
    fn release(&mut self) {
        self.ready.extend(self.delayed.drain(..).map(|(_, packet)| packet));
    }

    /// Moves packets that go on to `batch`, as many as fit.
    fn move_to(&mut self, batch: &mut Batch) {
        let n = batch.space().min(self.ready.len());
        for packet in self.ready.drain(..n) {
            // The batch has room.
            let _ = batch.push(packet);
        }
    }
}

struct FaultyRx {
    inner: Box<dyn RxDriver>,
    line: FaultLine,
    /// Empty between calls.
    incoming: Batch,
}

impl FaultyRx {
    /// Returns the queue of the driver. Packets that nobody has polled count as lost.
    fn into_inner(mut self: Box<Self>) -> Box<dyn RxDriver> {
        self.line.release();
        let counters = Arc::clone(self.inner.counters());
        for packet in self.line.ready.drain(..) {
            counters.count_unsent(DropReason::Stopping, 1, packet.len() as u64);
        }
        self.inner
    }
}

impl RxDriver for FaultyRx {
    fn receive(&mut self, batch: &mut Batch) {
        if self.line.ready.len() < batch.space() {
            self.inner.receive(&mut self.incoming);
            if self.incoming.is_empty() {
                self.line.release();
            }
            let (line, counters) = (&mut self.line, self.inner.counters());
            let n = self.incoming.len();
            self.incoming.drain_front(n, |packet| {
                line.pass(packet, counters, |lost| {
                    // The driver has counted the packet as delivered.
                    counters.count_unsent(DropReason::InjectedFault, 1, lost.len() as u64);
                });
            });
        }
        self.line.move_to(batch);
    }

    fn waiting(&mut self) -> Option<u32> {
        Some(self.inner.waiting()?.saturating_add(self.line.len() as u32))
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        self.inner.counters()
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.inner.set_counters(counters);
    }

    fn wait_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        if self.line.len() > 0 { None } else { self.inner.wait_descriptor() }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

struct FaultyTx {
    inner: Box<dyn TxDriver>,
    line: FaultLine,
    /// Packets that the driver gets next.
    outgoing: Batch,
    /// Calls for which the queue accepts nothing.
    full_calls: u32,
}

impl FaultyTx {
    /// Gives packets to the driver. Returns false if it does not accept all.
    fn flush(&mut self) -> bool {
        loop {
            self.line.move_to(&mut self.outgoing);
            if self.outgoing.is_empty() {
                return true;
            }
            self.inner.transmit(&mut self.outgoing);
            if !self.outgoing.is_empty() {
                return false;
            }
        }
    }

    /// Drops the packets that the driver has not got.
    fn drop_rest(&mut self, reason: DropReason) {
        self.line.release();
        let rest = self.line.ready.len() + self.outgoing.len();
        self.line.ready.clear();
        self.outgoing.clear();
        if rest > 0 {
            self.inner.counters().drops.add(reason, rest as u64);
        }
    }

    fn into_inner(mut self: Box<Self>) -> Box<dyn TxDriver> {
        self.line.release();
        self.flush();
        self.drop_rest(DropReason::Stopping);
        self.inner
    }
}

impl TxDriver for FaultyTx {
    fn transmit(&mut self, batch: &mut Batch) {
        if self.full_calls == 0 && self.line.random.happens(self.line.faults.full) {
            self.full_calls = self.line.faults.full_calls;
        }
        if self.full_calls > 0 {
            self.full_calls -= 1;
            self.line.count(Kind::Full);
            self.inner.counters().count_burst(0, 0);
            return;
        }
        if !self.flush() {
            return;
        }
        let (line, counters) = (&mut self.line, self.inner.counters());
        let n = batch.len();
        batch.drain_front(n, |packet| {
            line.pass(packet, counters, |_| counters.drops.add(DropReason::InjectedFault, 1));
        });
        self.flush();
    }

    fn reclaim(&mut self) {
        if self.full_calls == 0 && self.line.len() + self.outgoing.len() > 0 {
            self.line.release();
            self.flush();
        }
        self.inner.reclaim();
    }

    fn in_flight(&self) -> Option<u32> {
        Some(self.inner.in_flight()?.saturating_add((self.line.len() + self.outgoing.len()) as u32))
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        self.inner.segments(packet)
    }

    fn tunnel_tso(&self, packet: &Packet) -> TunnelTso {
        self.inner.tunnel_tso(packet)
    }

    fn count_lost(&mut self) {
        self.drop_rest(DropReason::DeviceLost);
        self.inner.count_lost();
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        self.inner.counters()
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.inner.set_counters(counters);
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

#[cfg(test)]
#[path = "faults_tests.rs"]
mod tests;
