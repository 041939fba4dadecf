//! Order, loss and delay of the received packets of all streams.

use hdrhistogram::Histogram;

use super::density::{Densities, Density};
use super::signature::Signature;

/// Longest time that a histogram keeps apart, in nanoseconds. Longer ones count as this.
pub const LONGEST: u64 = 60_000_000_000;
/// Bits that all windows together may have.
const WINDOW_MEMORY: usize = 1 << 26;
/// Limits of the window of one stream, in packets.
const WINDOW: (usize, usize) = (1024, 1 << 16);

/// Creates a histogram of nanoseconds that is exact to a thousandth. Its memory is fixed.
pub fn histogram() -> Histogram<u64> {
    Histogram::new_with_bounds(1, LONGEST, 3).expect("constant bounds")
}

/// Counts of the received packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Packets that arrived intact for the first time.
    pub distinct: u64,
    /// Further copies of such packets (RFC 5560: duplicates).
    pub duplicates: u64,
    /// Packets with a sequence number below one that arrived before (RFC 4737 section 3: Type-P-Reordered). Duplicates
    /// do not count.
    pub reordered: u64,
    /// Largest difference between the expected sequence number and that of a reordered packet.
    pub max_distance: u64,
    /// Reordered packets so late that a duplicate could not be told from a first copy. They count as first copies.
    pub beyond_window: u64,
    /// Intact packets whose stream number does not belong to the run.
    pub unknown_stream: u64,
}

/// Largest sequence number. Only a hostile sender reaches it, in steps of 2^31.
const LAST_SEQUENCE: u64 = u64::MAX >> 1;

/// Returns the packets that the window of one stream has, if there are so many streams. It is a power of two.
pub(super) fn window(streams: usize) -> usize {
    (WINDOW_MEMORY / streams.max(1)).clamp(WINDOW.0, WINDOW.1).next_power_of_two().min(WINDOW.1)
}

/// The sequence numbers of one stream.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Sequence {
    /// Sequence number after the highest one that arrived (RFC 4737: NextExp).
    pub(super) next: u64,
}

impl Sequence {
    /// Takes a packet that arrived intact, and returns its whole sequence number if it is the first copy. `bits` is the
    /// window: one bit for each of the last sequence numbers, which has arrived.
    #[inline]
    pub(super) fn receive(&mut self, number: u32, bits: &mut [u64], order: &mut Order) -> Option<u64> {
        let window = bits.len() as u64 * 64;
        // Sequence numbers are those near the expected one.
        let ahead = number.wrapping_sub(self.next as u32) as i32;
        let sequence = self.next.checked_add_signed(ahead.into());
        let Some(sequence) = sequence.filter(|sequence| *sequence <= LAST_SEQUENCE) else {
            order.unknown_stream += 1;
            return None;
        };
        let place = |sequence: u64| ((sequence % window) / 64, 1u64 << (sequence % 64));
        if sequence >= self.next {
            // The numbers between have not arrived. Their bits are those of older ones.
            let skipped = sequence - self.next;
            if skipped >= window {
                bits.fill(0);
            } else {
                // Whole words at a time: every packet of a hostile sender may skip numbers.
                let mut missing = self.next;
                while missing < sequence {
                    let (word, first) = place(missing);
                    let n = (64 - missing % 64).min(sequence - missing);
                    bits[word as usize] &= !(first.wrapping_neg() & (u64::MAX >> (64 - missing % 64 - n)));
                    missing += n;
                }
            }
            let (word, bit) = place(sequence);
            bits[word as usize] |= bit;
            self.next = sequence + 1;
        } else {
            let distance = self.next - sequence;
            if distance > window {
                order.beyond_window += 1;
            } else {
                let (word, bit) = place(sequence);
                if bits[word as usize] & bit != 0 {
                    order.duplicates += 1;
                    return None;
                }
                bits[word as usize] |= bit;
            }
            order.reordered += 1;
            order.max_distance = order.max_distance.max(distance);
        }
        order.distinct += 1;
        Some(sequence)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Stream {
    sequence: Sequence,
    /// Delay of the packet before, in nanoseconds.
    delay: u64,
    /// Interarrival jitter in nanoseconds (RFC 3550 section 6.4.1).
    jitter: f64,
    /// Packets that have a delay.
    packets: u64,
}

/// Follows the sequence numbers and delays of all streams. Its memory is fixed, but for that of densities.
#[derive(Debug)]
pub struct Tracker {
    streams: Vec<Stream>,
    /// One bit for each of the last sequence numbers of each stream: it has arrived.
    windows: Vec<u64>,
    /// Words of a window; a power of two.
    words: usize,
    /// Counts so far.
    pub order: Order,
    /// One-way delay of all first copies, in nanoseconds.
    pub latency: Histogram<u64>,
    densities: Option<Densities>,
}

impl Tracker {
    /// Creates a tracker for streams that are numbered from 0. With a threshold, it has the densities of RFC 5236.
    pub fn new(streams: usize, reorder_threshold: Option<u16>) -> Self {
        let words = window(streams) / 64;
        Self {
            streams: vec![Stream::default(); streams],
            windows: vec![0; streams * words],
            words,
            order: Order::default(),
            latency: histogram(),
            densities: reorder_threshold.map(|threshold| Densities::new(streams, threshold.into())),
        }
    }

    /// Packets that a stream may be late before [`Order::beyond_window`] counts it.
    pub fn window(&self) -> u64 {
        self.words as u64 * 64
    }

    /// Takes a packet that arrived intact, at a time in nanoseconds.
    #[inline]
    pub fn receive(&mut self, packet: &Signature, now: u64) {
        let index = packet.stream as usize;
        let Some(stream) = self.streams.get_mut(index) else {
            self.order.unknown_stream += 1;
            return;
        };
        let bits = &mut self.windows[index * self.words..][..self.words];
        let Some(sequence) = stream.sequence.receive(packet.sequence, bits, &mut self.order) else { return };
        if let Some(densities) = &mut self.densities {
            densities.receive(index, sequence);
        }
        let delay = packet.age(now);
        self.latency.saturating_record(delay);
        if stream.packets > 0 {
            let change = stream.delay.abs_diff(delay) as f64;
            stream.jitter += (change - stream.jitter) / 16.0;
        }
        stream.packets += 1;
        stream.delay = delay;
    }

    /// Ends the arrivals, and returns the densities of their displacements.
    pub fn take_density(&mut self) -> Option<Density> {
        self.densities.take().map(Densities::finish)
    }

    /// Returns the mean and the largest interarrival jitter of the streams with two packets or more, in nanoseconds.
    pub fn jitter(&self) -> Option<(f64, f64)> {
        let jitters = || self.streams.iter().filter(|stream| stream.packets > 1).map(|stream| stream.jitter);
        let n = jitters().count();
        (n > 0).then(|| (jitters().sum::<f64>() / n as f64, jitters().fold(0.0, f64::max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(stream: u32, sequence: u64, time: u64) -> Signature {
        Signature { payload_len: 18, stream, sequence: sequence as u32, time }
    }

    fn order(sequences: &[u64]) -> Order {
        let mut tracker = Tracker::new(2, None);
        sequences.iter().for_each(|sequence| tracker.receive(&packet(1, *sequence, 0), 5));
        tracker.order
    }

    #[test]
    fn loss_order_and_duplicates_are_told_apart() {
        let of = |distinct, duplicates, reordered, max_distance| Order {
            distinct,
            duplicates,
            reordered,
            max_distance,
            ..Order::default()
        };
        assert_eq!(order(&[0, 1, 2]), of(3, 0, 0, 0));
        assert_eq!(order(&[0, 3, 4]), of(3, 0, 0, 0), "loss is no reordering");
        // RFC 4737 section 3.4: in 1, 2, 4, 5, 3 one packet is reordered.
        assert_eq!(order(&[1, 2, 4, 5, 3, 6]), of(6, 0, 1, 3));
        assert_eq!(order(&[0, 0, 1, 0, 1]), of(2, 3, 0, 0));
        assert_eq!(order(&[3, 2, 1, 0]), of(4, 0, 3, 4));
        assert_eq!(order(&[0, 2, 1, 1, 2]), of(3, 2, 1, 2));
    }

    #[test]
    fn windows_have_an_end_that_is_counted() {
        let mut tracker = Tracker::new(1, None);
        let window = tracker.window();
        let mut receive = |sequence| {
            tracker.receive(&packet(0, sequence, 0), 0);
            tracker.order
        };
        receive(0);
        receive(window);
        let late = receive(0);
        assert_eq!((late.distinct, late.beyond_window, late.duplicates), (3, 1, 0));
        let in_window = receive(1);
        assert_eq!((in_window.distinct, in_window.reordered), (4, 2));
        assert_eq!(receive(1).duplicates, 1);
        // A jump over the whole window leaves no old bits.
        receive(window * 3);
        assert_eq!(receive(window * 3 - 1).duplicates, 1, "as before");
        assert_eq!((1024, 1 << 16), (Tracker::new(1 << 16, None).window() as usize, window as usize));
    }

    #[test]
    fn skipped_numbers_have_not_arrived() {
        let mut random = fastrand::Rng::with_seed(3);
        let (mut sequence, mut bits, mut order) = (Sequence::default(), vec![0; 16], Order::default());
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..20_000 {
            // Steps forward within the window and beyond, and late packets within it.
            let jump = if random.u8(..10) == 0 { random.i64(900..1200) } else { random.i64(1..150) };
            let step: i64 = [1, 1, 1, jump, -random.i64(1..=1024), -random.i64(1..=64)][random.usize(..6)];
            let number = (sequence.next as i64 + step - 1).max(0) as u64;
            if sequence.next.saturating_sub(number) > 1024 {
                continue;
            }
            let is_first = sequence.receive(number as u32, &mut bits, &mut order).is_some();
            assert_eq!(is_first, seen.insert(number), "{number} {order:?}");
        }
        assert!(order.duplicates > 100 && order.reordered > 100 && order.beyond_window == 0, "{order:?}");
    }

    #[test]
    fn sequence_numbers_wrap() {
        let mut tracker = Tracker::new(1, None);
        let start = (1u64 << 32) - 3;
        // The numbers approach the end of 32 bits in steps that a stream could lose.
        for sequence in [1 << 30, 2 << 30, 3 << 30, start, start + 1, start + 2, start + 3, start + 5, start + 4] {
            tracker.receive(&packet(0, sequence, 0), 0);
        }
        assert_eq!((tracker.order.distinct, tracker.order.reordered, tracker.order.duplicates), (9, 1, 0));
        tracker.receive(&packet(0, start + 3, 0), 0);
        assert_eq!(tracker.order.duplicates, 1);
    }

    #[test]
    fn streams_are_apart_and_unknown_ones_counted() {
        let mut tracker = Tracker::new(2, None);
        for stream in [0, 1, 2, 1 << 23] {
            tracker.receive(&packet(stream, 0, 0), 0);
        }
        // Far below the first number.
        tracker.receive(&packet(0, u32::MAX.into(), 0), 0);
        assert_eq!((tracker.order.distinct, tracker.order.unknown_stream), (2, 3));
    }

    #[test]
    fn jitter_is_that_of_the_rfc() {
        let mut tracker = Tracker::new(2, None);
        assert_eq!(tracker.jitter(), None);
        // Delays 100, 116, 100: D is 16 twice.
        for (n, delay) in [100, 116, 100].into_iter().enumerate() {
            tracker.receive(&packet(0, n as u64, 1000 * n as u64), 1000 * n as u64 + delay);
        }
        assert_eq!(tracker.jitter(), Some((1.9375, 1.9375)));
        assert_eq!((tracker.latency.len(), tracker.latency.max(), tracker.latency.min()), (3, 116, 100));
    }
}
