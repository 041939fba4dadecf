//! Offered rates, and the times at which packets are due.

use std::fmt;
use std::str::FromStr;

use super::size::GAP;

/// Highest rate in packets per second.
const MAX_PPS: f64 = 1e9;
/// Highest rate in bits per second.
const MAX_BPS: f64 = 1e13;
/// Nanoseconds by which a sender may lie behind its schedule. What it missed before that is not sent.
const MAX_LAG: f64 = 1e8;

/// The load of each sending port.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rate {
    /// As much as the port accepts.
    Max,
    /// Packets per second.
    Packets(f64),
    /// Bits per second of frames with their frame check sequences: layer 2.
    BitsL2(f64),
    /// Bits per second on the wire, with preamble and inter-frame gap: layer 1.
    BitsL1(f64),
    /// Share of the link's speed on layer 1, from 0 to 1.
    Share(f64),
}

impl FromStr for Rate {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const EXPECTED: &str = "expected `max`, or a number above 0 such as 1000, 1.5Mpps, 800Mbps (layer 2), \
                                1Gbpsl1 (layer 1) or 50%";
        let wrong = || format!("found \"{text}\", {EXPECTED}");
        let lower = text.to_ascii_lowercase();
        if lower == "max" {
            return Ok(Self::Max);
        }
        let end = lower.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(lower.len());
        let (number, unit) = lower.split_at(end);
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let (factor, unit) = match unit.as_bytes().first() {
            Some(b'k') => (1e3, &unit[1..]),
            Some(b'm') => (1e6, &unit[1..]),
            Some(b'g') => (1e9, &unit[1..]),
            _ => (1.0, unit),
        };
        let value = number * factor;
        if value <= 0.0 || !value.is_finite() {
            return Err(wrong());
        }
        let checked = |limit: f64, what: &str, rate: Self| {
            if value <= limit { Ok(rate) } else { Err(format!("{text}: at most {limit:.0} {what} are possible")) }
        };
        match unit {
            "" | "pps" => checked(MAX_PPS, "packets per second", Self::Packets(value)),
            "bps" | "bpsl2" => checked(MAX_BPS, "bits per second", Self::BitsL2(value)),
            "bpsl1" => checked(MAX_BPS, "bits per second", Self::BitsL1(value)),
            "%" => checked(100.0, "percent of the link", Self::Share(value / 100.0)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaled = |f: &mut fmt::Formatter<'_>, value: f64, unit: &str| match value {
            v if v >= 1e9 => write!(f, "{} G{unit}", v / 1e9),
            v if v >= 1e6 => write!(f, "{} M{unit}", v / 1e6),
            v if v >= 1e3 => write!(f, "{} k{unit}", v / 1e3),
            v => write!(f, "{v} {unit}"),
        };
        match self {
            Self::Max => f.write_str("max"),
            Self::Packets(value) => scaled(f, *value, "pps"),
            Self::BitsL2(value) => scaled(f, *value, "bit/s (layer 2)"),
            Self::BitsL1(value) => scaled(f, *value, "bit/s (layer 1)"),
            Self::Share(share) => write!(f, "{} % of the link", share * 100.0),
        }
    }
}

impl Rate {
    /// Converts a share of the link to bits per second, and checks the rate against the speed of the link.
    /// `speed` is in Mbit/s; `mean` is the mean length of the frames.
    ///
    /// # Errors
    /// If the link is too slow, or its speed is needed and unknown.
    pub fn on_link(self, speed: Option<u32>, mean: f64, port: &str) -> Result<Self, String> {
        let speed = speed.map(|speed| f64::from(speed) * 1e6);
        let rate = match (self, speed) {
            (Self::Share(_), None) => {
                return Err(format!("the link of port {port} reports no speed; give the rate in pps or bps, not in %"));
            }
            (Self::Share(share), Some(speed)) => Self::BitsL1(share * speed),
            (rate, _) => rate,
        };
        if let (Some(speed), Some(asked)) = (speed, rate.bits_l1(mean))
            && asked > speed * 1.000_001
        {
            return Err(format!(
                "{self} is above the speed of port {port}: {asked:.0} bit/s on layer 1, and the link has {speed:.0}"
            ));
        }
        Ok(rate)
    }

    /// Returns the rate in bits per second on layer 1, for frames of this mean length.
    fn bits_l1(self, mean: f64) -> Option<f64> {
        match self {
            Self::Max | Self::Share(_) => None,
            Self::Packets(pps) => Some(pps * (mean + GAP as f64) * 8.0),
            Self::BitsL2(bits) => Some(bits * (mean + GAP as f64) / mean),
            Self::BitsL1(bits) => Some(bits),
        }
    }

    /// Returns the packets per second for frames of this mean length; `None` for the highest possible rate.
    pub fn packets(self, mean: f64) -> Option<f64> {
        match self {
            Self::Packets(pps) => Some(pps),
            rate => rate.bits_l1(mean).map(|bits| bits / ((mean + GAP as f64) * 8.0)),
        }
    }

    /// Returns the rate of a sender with this share of the packets.
    pub(super) fn scaled(self, share: f64) -> Self {
        match self {
            Self::Max => Self::Max,
            Self::Packets(value) => Self::Packets(value * share),
            Self::BitsL2(value) => Self::BitsL2(value * share),
            Self::BitsL1(value) => Self::BitsL1(value * share),
            Self::Share(value) => Self::Share(value * share),
        }
    }
}

/// Computes when each packet is due, by the lengths of those before it.
#[derive(Clone, Debug)]
pub(super) struct Pacer {
    /// Nanoseconds of each packet, and of each byte of its frame.
    per_packet: f64,
    per_byte: f64,
    start: u64,
    /// Time at which the next packet is due, in nanoseconds since `start`.
    due: f64,
    /// Nanoseconds of the schedule that were left out.
    pub(super) skipped: f64,
}

impl Pacer {
    /// Creates a pacer whose first packet is due at `start`.
    pub(super) fn new(rate: Rate, start: u64) -> Self {
        let (per_packet, per_byte) = match rate {
            // The caller has converted a share.
            Rate::Max | Rate::Share(_) => (0.0, 0.0),
            Rate::Packets(pps) => (1e9 / pps, 0.0),
            Rate::BitsL2(bits) => (0.0, 8e9 / bits),
            Rate::BitsL1(bits) => (GAP as f64 * 8e9 / bits, 8e9 / bits),
        };
        Self { per_packet, per_byte, start, due: 0.0, skipped: 0.0 }
    }

    /// Makes the first packet due at `start`, and later for the further senders of a port, so that they take turns.
    pub(super) fn start_at(&mut self, start: u64, sender: u64, senders: u64) {
        self.start = start;
        self.due = (self.per_packet + self.per_byte * 64.0) * sender as f64 / senders.max(1) as f64;
    }

    /// Returns true if the next packet is due. A sender that lies far behind its schedule goes on from the present.
    #[inline]
    pub(super) fn is_due(&mut self, now: u64) -> bool {
        let passed = now.saturating_sub(self.start) as f64;
        if self.per_packet + self.per_byte > 0.0 && passed - self.due > MAX_LAG {
            self.skipped += passed - self.due;
            self.due = passed;
        }
        now >= self.start && passed >= self.due
    }

    /// Returns true if the next packet was due before `end`. Without a rate, no packet has a time.
    pub(super) fn is_late(&self, end: u64) -> bool {
        self.due > 0.0 && self.due < end.saturating_sub(self.start) as f64
    }

    /// Counts what was due before `end` and will not be sent as left out.
    pub(super) fn give_up(&mut self, end: u64) {
        if self.is_late(end) {
            let end = end.saturating_sub(self.start) as f64;
            self.skipped += end - self.due;
            self.due = end;
        }
    }

    /// Plans the packet after one of `size` bytes.
    #[inline]
    pub(super) fn sent(&mut self, size: usize) {
        self.due += self.per_packet + self.per_byte * size as f64;
    }

    /// Plans the next packet after `interval` nanoseconds, for recorded packets.
    pub(super) fn wait(&mut self, interval: u64) {
        self.due += interval as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_of_rates() {
        let read = |text: &str| text.parse::<Rate>();
        assert_eq!(read("1000"), Ok(Rate::Packets(1000.0)));
        assert_eq!(read("1.5Mpps"), Ok(Rate::Packets(1.5e6)));
        assert_eq!(read("800Mbps"), Ok(Rate::BitsL2(8e8)));
        assert_eq!(read("10GbpsL1"), Ok(Rate::BitsL1(1e10)));
        assert_eq!((read("50%"), read("MAX")), (Ok(Rate::Share(0.5)), Ok(Rate::Max)));
        for text in ["0", "-1", "1x", "", "k", "nan", "1e9", "0pps", "1.2.3"] {
            assert!(read(text).unwrap_err().contains("expected `max`, or a number above 0"), "{text}");
        }
        assert!(read("2Gpps").unwrap_err().contains("at most 1000000000 packets per second"));
        assert!(read("101%").unwrap_err().contains("at most 100 percent"));
    }

    #[test]
    fn layers_differ_by_the_gap() {
        // RFC 2544 and the Ethernet line rate: 14.88 Mpps of 64 bytes on 10 Gbit/s.
        let pps = |rate: Rate| rate.packets(64.0).unwrap().round();
        assert_eq!(pps(Rate::BitsL1(1e10)), 14_880_952.0);
        assert_eq!(pps(Rate::BitsL2(1e10)), 19_531_250.0);
        assert_eq!(Rate::Max.packets(64.0), None);
        let on_link = |rate: Rate| rate.on_link(Some(10_000), 64.0, "p");
        assert_eq!(on_link(Rate::Share(0.5)), Ok(Rate::BitsL1(5e9)));
        assert!(on_link(Rate::Packets(14_880_952.0)).is_ok());
        assert!(on_link(Rate::Packets(15e6)).unwrap_err().contains("above the speed of port p"));
        assert!(Rate::Share(0.5).on_link(None, 64.0, "p").unwrap_err().contains("reports no speed"));
    }

    #[test]
    fn packets_are_due_in_the_asked_intervals() {
        let count = |mut pacer: Pacer, from: u64, to: u64, size: usize| {
            let mut n = 0;
            for now in (from..=to).step_by(100) {
                while pacer.is_due(now) && n < 1_000_000 {
                    pacer.sent(size);
                    n += 1;
                }
            }
            n
        };
        // A second at 10 kpps, and at 8 Mbit/s with 100 bytes and 80 of 100 bytes with gap.
        assert_eq!(count(Pacer::new(Rate::Packets(1e4), 5), 0, 1_000_000_000, 64), 10_000);
        assert_eq!(count(Pacer::new(Rate::BitsL2(8e6), 0), 0, 999_999_999, 100), 10_000);
        assert_eq!(count(Pacer::new(Rate::BitsL1(8e6), 0), 0, 999_999_999, 80), 10_000);
    }

    #[test]
    fn a_long_stall_is_left_out_and_counted() {
        let mut pacer = Pacer::new(Rate::Packets(1e6), 0);
        assert!(pacer.is_due(0));
        pacer.sent(64);
        assert!(!pacer.is_due(999) && pacer.is_due(50_000_000));
        assert_eq!(pacer.skipped, 0.0, "50 ms are made up for");
        assert!(pacer.is_due(1_000_000_000));
        assert_eq!(pacer.skipped, 999_999_000.0);
        pacer.sent(64);
        assert!(!pacer.is_due(1_000_000_500));
    }
}
