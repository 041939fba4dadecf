//! Segmentation in software for transmit queues whose device does not segment a superframe.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use wirepath_packet::offload::Flags;
use wirepath_packet::superframe::{self, Cutter};
use wirepath_packet::{Batch, HeaderLengths, Packet, Pool};
use wirepath_wire::L4Type;
use wirepath_wire::tcp::flags::CWR;

use super::{TunnelTso, TxDriver};

/// Place where the control thread leaves software segmentation for a running queue.
#[derive(Default)]
pub(super) struct NewGso {
    waits: AtomicBool,
    parked: Mutex<Option<Box<SoftwareGso>>>,
}

impl NewGso {
    /// Leaves it for the queue. The worker that gets a superframe by a message sent after this call finds it.
    pub(super) fn leave(&self, gso: SoftwareGso) {
        *self.parked.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(gso));
        self.waits.store(true, Ordering::Release);
    }

    /// Returns whether [`Self::take`] has something. One load.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.waits.load(Ordering::Acquire)
    }

    #[cold]
    pub(super) fn take(&self) -> Option<Box<SoftwareGso>> {
        self.waits.store(false, Ordering::Relaxed);
        self.parked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Step before the driver gets a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Plan {
    Send,
    /// Cut into frames.
    Cut,
    /// Split into a superframe of equal frames, and a shorter frame.
    Split,
}

/// Cuts superframes in front of a driver. It holds at most one superframe and one batch of frames.
pub(super) struct SoftwareGso {
    pool: Pool,
    /// The device segments plain TCP, and some tunnels.
    device_segments: bool,
    cutting: Option<Cutter>,
    /// Frames that the driver has not accepted yet. They go before all others.
    staged: Batch,
}

impl SoftwareGso {
    pub(super) fn new(pool: Pool, device_segments: bool) -> Self {
        Self { pool, device_segments, cutting: None, staged: Batch::new() }
    }

    /// Returns the step before the driver gets the packet. If it gets a superframe, the header lengths are right.
    fn plan(&self, driver: &dyn TxDriver, packet: &mut Packet) -> Plan {
        if !packet.flags().contains(Flags::TX_SEGMENT) {
            return Plan::Send;
        }
        if let Some(segments) = driver.segments(packet) {
            return if segments { Plan::Send } else { Plan::Cut };
        }
        // Every NIC segments TCP outside tunnels and without ECN marking.
        let Some(parsed) = superframe::parse(packet, None).filter(|_| self.device_segments) else { return Plan::Cut };
        let layers = parsed.innermost();
        let is_marked = superframe::tcp_flags(packet, layers).is_none_or(|flags| flags & CWR != 0);
        let lengths = HeaderLengths::from(&parsed);
        packet.set_header_lengths(lengths);
        if layers.l4_type() != L4Type::Tcp || is_marked || lengths.l4_len == 0 {
            return Plan::Cut;
        }
        if parsed.inner().is_none() {
            return Plan::Send;
        }
        match driver.tunnel_tso(packet) {
            TunnelTso::No => Plan::Cut,
            TunnelTso::Whole => Plan::Send,
            TunnelTso::EqualSegments => Plan::Split,
        }
    }

    /// Returns the number of frames that the driver has not accepted yet.
    pub(super) fn held(&self) -> usize {
        self.staged.len() + self.cutting.as_ref().map_or(0, Cutter::remaining)
    }

    /// Transmits like [`TxDriver::transmit`]. A superframe that the driver does not segment is taken and cut.
    #[inline]
    pub(super) fn transmit(&mut self, driver: &mut dyn TxDriver, batch: &mut Batch) {
        let any = batch.iter().fold(false, |any, packet| any | packet.flags().contains(Flags::TX_SEGMENT));
        if !any && self.held() == 0 {
            return driver.transmit(batch);
        }
        self.transmit_slow(driver, batch);
    }

    #[cold]
    #[inline(never)]
    fn transmit_slow(&mut self, driver: &mut dyn TxDriver, batch: &mut Batch) {
        loop {
            if !self.staged.is_empty() {
                driver.transmit(&mut self.staged);
                if !self.staged.is_empty() {
                    return;
                }
            }
            if self.cutting.is_some() {
                self.cut(driver);
                continue;
            }
            let mut plan = Plan::Send;
            let run = batch.iter_mut().position(|packet| {
                plan = self.plan(driver, packet);
                plan != Plan::Send
            });
            let run = run.unwrap_or(batch.len());
            if run == batch.len() {
                if run > 0 {
                    driver.transmit(batch);
                }
                return;
            }
            if run > 0 {
                let mut front = Batch::new();
                batch.drain_front(run, |packet| _ = front.push(packet));
                driver.transmit(&mut front);
                if front.is_empty() {
                    continue;
                }
                // A driver may refuse a superframe that it took before, so the next call plans the rest again.
                batch.drain_front(batch.len(), |packet| _ = front.push(packet));
                *batch = front;
                return;
            }
            let Self { pool, cutting, staged, .. } = self;
            let counters = driver.counters();
            batch.drain_front(1, |packet| {
                let mut cutter = match Cutter::new(packet, None) {
                    Ok(cutter) => cutter,
                    Err((_, reason)) => return counters.drops.add(reason, 1),
                };
                // One of two frames would be a superframe of one frame.
                if plan == Plan::Split && cutter.remaining() > 2 {
                    match cutter.split(pool) {
                        Ok((equal, last)) => {
                            counters.injected_copies.add(u64::from(last.is_some()));
                            // The batch is empty.
                            return [Some(equal), last].into_iter().flatten().for_each(|it| _ = staged.push(it));
                        }
                        Err(whole) => cutter = whole,
                    }
                }
                counters.segmented.add(1);
                // One of the frames stands for the superframe.
                counters.injected_copies.add(cutter.remaining().saturating_sub(1) as u64);
                *cutting = Some(cutter);
            });
        }
    }

    /// Fills the empty batch of staged frames from the superframe.
    fn cut(&mut self, driver: &mut dyn TxDriver) {
        let Some(cutter) = &mut self.cutting else { return };
        while !self.staged.is_full() {
            match cutter.next_frame(&self.pool) {
                Some(Ok(frame)) => _ = self.staged.push(frame),
                Some(Err(reason)) => driver.counters().drops.add(reason, 1),
                None => {
                    self.cutting = None;
                    return;
                }
            }
        }
    }

    /// Sends frames that the driver did not accept before.
    #[inline]
    pub(super) fn reclaim(&mut self, driver: &mut dyn TxDriver) {
        driver.reclaim();
        if self.held() > 0 {
            self.transmit_slow(driver, &mut Batch::new());
        }
    }

    /// Drops all frames; returns their number.
    pub(super) fn clear(&mut self) -> usize {
        let held = self.held();
        self.cutting = None;
        self.staged.clear();
        held
    }
}

#[cfg(test)]
mod tests {
    use std::any::Any;
    use std::sync::Arc;

    use wirepath_packet::PortId;
    use wirepath_packet::counters::QueueCounters;
    use wirepath_packet::drops::DropReason;

    use super::super::TxQueue;
    use super::*;

    /// Accepts a few packets in each call, and keeps their bytes.
    struct Slow {
        most: usize,
        sent: std::sync::mpsc::Sender<Vec<u8>>,
        counters: Arc<QueueCounters>,
    }

    impl TxDriver for Slow {
        fn transmit(&mut self, batch: &mut Batch) {
            let n = self.most.min(batch.len());
            batch.drain_front(n, |packet| {
                assert!(!packet.flags().contains(Flags::TX_SEGMENT));
                self.sent.send(packet.segments().flatten().copied().collect()).unwrap();
            });
            self.counters.packets.add(n as u64);
        }

        fn counters(&self) -> &Arc<QueueCounters> {
            &self.counters
        }

        fn set_counters(&mut self, counters: Arc<QueueCounters>) {
            self.counters = counters;
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any> {
            self
        }
    }

    /// IPv4 and TCP with `len` bytes of payload.
    fn tcp(pool: &Pool, len: usize) -> Packet {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        frame[16..18].copy_from_slice(&(40 + len as u16).to_be_bytes());
        frame.extend([0, 7, 0, 9, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 0, 9, 0, 0, 0, 0]);
        frame.extend((0..len).map(|i| (i / 100) as u8));
        let mut packet = pool.take().unwrap();
        assert!(packet.extend_from_slice(&frame, pool));
        packet
    }

    fn superframe(pool: &Pool, len: usize, mss: u16) -> Packet {
        let mut packet = tcp(pool, len);
        packet.set_mss(mss);
        packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L3_CHECKSUM).with(Flags::TX_L4_CHECKSUM));
        packet
    }

    fn queue(pool: &Pool, most: usize) -> (TxQueue, std::sync::mpsc::Receiver<Vec<u8>>) {
        let (sent, frames) = std::sync::mpsc::channel();
        let driver = Slow { most, sent, counters: Arc::default() };
        (TxQueue::new(Box::new(driver), PortId::new(0), 0, "p").with_software_gso(pool, false), frames)
    }

    #[test]
    fn superframes_are_cut_in_order_between_other_packets() {
        let pool = Pool::new("gso", 512).unwrap();
        let (mut queue, frames) = queue(&pool, 3);
        let mut batch = Batch::new();
        let _ = batch.push(tcp(&pool, 1));
        let _ = batch.push(superframe(&pool, 25_000, 250));
        let _ = batch.push(tcp(&pool, 2));
        for _ in 0..100 {
            queue.transmit(&mut batch);
            queue.reclaim();
        }
        assert!(batch.is_empty() && queue.in_flight().is_none());
        let frames: Vec<_> = frames.try_iter().collect();
        let lengths: Vec<_> = frames.iter().map(Vec::len).collect();
        assert_eq!((lengths[0], lengths[101], frames.len()), (55, 56, 102));
        assert!(lengths[1..101].iter().all(|len| *len == 54 + 250), "{lengths:?}");
        let payload: Vec<u8> = frames[1..101].iter().flat_map(|frame| &frame[54..]).copied().collect();
        assert!(payload.iter().enumerate().all(|(i, byte)| *byte == (i / 100) as u8));
        for (i, frame) in frames[1..101].iter().enumerate() {
            assert_eq!(frame[38..42], (1 + 250 * i as u32).to_be_bytes());
            assert!(wirepath_wire::checksum::sum(&frame[14..34]).is_valid());
        }
        let counters = queue.counters();
        assert_eq!((counters.segmented.get(), counters.injected_copies.get()), (1, 99));
        assert_eq!(pool.outstanding(), 0);
    }

    /// Takes the first superframe whole, and no other one.
    struct Fickle(Slow, bool);

    impl TxDriver for Fickle {
        fn transmit(&mut self, batch: &mut Batch) {
            let is_superframe = |packet: &Packet| packet.flags().contains(Flags::TX_SEGMENT);
            if !self.1 && batch.iter().any(is_superframe) {
                self.1 = true;
                batch.drain_front(1, |packet| self.0.sent.send(packet.data().to_vec()).unwrap());
                return;
            }
            self.0.transmit(batch);
        }

        fn segments(&self, _: &Packet) -> Option<bool> {
            Some(!self.1)
        }

        fn counters(&self) -> &Arc<QueueCounters> {
            &self.0.counters
        }

        fn set_counters(&mut self, counters: Arc<QueueCounters>) {
            self.0.counters = counters;
        }

        fn into_any(self: Box<Self>) -> Box<dyn Any> {
            self
        }
    }

    #[test]
    fn a_superframe_that_the_driver_leaves_is_planned_again() {
        let pool = Pool::new("gso", 512).unwrap();
        let (sent, frames) = std::sync::mpsc::channel();
        let driver = Fickle(Slow { most: 64, sent, counters: Arc::default() }, false);
        let queue = TxQueue::new(Box::new(driver), PortId::new(0), 0, "p");
        let mut queue = queue.with_software_gso(&pool, true);
        let packets = [superframe(&pool, 1000, 200), superframe(&pool, 900, 300), tcp(&pool, 1)];
        let mut batch: Batch = packets.into_iter().collect();
        for _ in 0..3 {
            queue.transmit(&mut batch);
            queue.reclaim();
        }
        let lengths: Vec<_> = frames.try_iter().map(|frame| frame.len()).collect();
        assert_eq!(lengths, [1054, 354, 354, 354, 55]);
        assert_eq!((batch.len(), pool.outstanding()), (0, 0));
    }

    #[test]
    fn lost_frames_are_counted() {
        let pool = Pool::new("gso", 12).unwrap();
        let (mut queue, frames) = queue(&pool, 64);
        let mut batch = Batch::new();
        // Four buffers hold the superframe, and eight hold eight of its 40 frames.
        let _ = batch.push(superframe(&pool, 8000, 200));
        queue.transmit(&mut batch);
        let sent = frames.try_iter().count();
        let count = |reason| queue.counters().drops.get(reason) as usize;
        assert!(sent > 0 && sent < 40, "{sent}");
        assert_eq!(sent + count(DropReason::NoBuffer), 40);
        let _ = batch.push(superframe(&pool, 800, 0));
        queue.transmit(&mut batch);
        assert_eq!(queue.counters().drops.get(DropReason::KernelOffload), 1);
        assert_eq!((batch.len(), pool.outstanding()), (0, 0));
    }

    #[test]
    fn a_running_queue_begins_to_cut() {
        let pool = Pool::new("gso", 64).unwrap();
        let (sent, frames) = std::sync::mpsc::channel();
        let driver = Slow { most: 64, sent, counters: Arc::default() };
        let mut queue = TxQueue::new(Box::new(driver), PortId::new(0), 0, "p");
        let mut batch: Batch = [tcp(&pool, 1)].into_iter().collect();
        queue.transmit(&mut batch);
        queue.new_gso().leave(SoftwareGso::new(pool.clone(), false));
        let _ = batch.push(superframe(&pool, 1000, 200));
        queue.transmit(&mut batch);
        queue.reclaim();
        assert_eq!(frames.try_iter().map(|frame| frame.len()).collect::<Vec<_>>(), [55, 254, 254, 254, 254, 254]);
        assert_eq!(queue.counters().segmented.get(), 1);
        assert_eq!((batch.len(), pool.outstanding()), (0, 0));
    }

    #[test]
    fn frames_of_a_lost_device_are_dropped() {
        let pool = Pool::new("gso", 64).unwrap();
        let (mut queue, frames) = queue(&pool, 1);
        let mut batch = Batch::new();
        let _ = batch.push(superframe(&pool, 8000, 200));
        queue.transmit(&mut batch);
        assert_eq!((frames.try_iter().count(), queue.in_flight()), (1, Some(39)));
        drop(queue.into_inner());
        assert_eq!((batch.len(), pool.outstanding()), (0, 0));
    }
}
