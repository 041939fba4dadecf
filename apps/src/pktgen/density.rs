//! How far packets are displaced, and how much memory restores their order: Reorder Density and Reorder
//! Buffer-occupancy Density (RFC 5236).
//!
//! Both look at a window of the threshold and one more arrivals. A packet that is missing there counts as lost, and its
//! later arrival is left out. A receiver that holds as many packets as the threshold does not wait for the missing ones
//! either. Callers pass the first copies of packets only.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde_json::{Value, json};

/// Densities of all streams, as numbers of packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Density {
    /// Packets by their displacement: the place in which they arrived less that of their sequence number, both without
    /// lost packets. Early packets have a negative one.
    pub displacements: BTreeMap<i64, u64>,
    /// Packets by the number of packets that a receiver holds after their arrival, because earlier ones are missing.
    pub held: BTreeMap<u32, u64>,
    /// Packets that are displaced by more than the threshold, and have no displacement.
    pub left_out: u64,
}

/// Follows the arrivals of all streams.
#[derive(Debug)]
pub struct Densities {
    threshold: usize,
    streams: Vec<Stream>,
    density: Density,
}

/// Arrivals of a stream.
#[derive(Clone, Debug, Default)]
struct Stream {
    displacement: Displacement,
    occupancy: Occupancy,
}

/// The last arrivals in their order, and the same sorted.
#[derive(Clone, Debug, Default)]
struct Window {
    arrivals: VecDeque<u64>,
    sorted: BTreeSet<u64>,
}

/// State of a stream's reorder density.
#[derive(Clone, Debug, Default)]
struct Displacement {
    window: Window,
    /// Early packets whose place has not come.
    early: BTreeSet<u64>,
    /// Place of the next packet.
    receive_index: u64,
}

/// State of a stream's buffer-occupancy density.
#[derive(Clone, Debug, Default)]
struct Occupancy {
    window: Window,
    /// Packets that a receiver holds.
    held: BTreeSet<u64>,
    /// Sequence number after the highest one that has left the receiver.
    next: u64,
}

impl Window {
    fn push(&mut self, sequence: u64) {
        self.arrivals.push_back(sequence);
        self.sorted.insert(sequence);
    }

    fn pop(&mut self) -> Option<u64> {
        let first = self.arrivals.pop_front()?;
        self.sorted.remove(&first);
        Some(first)
    }
}

impl Displacement {
    /// Takes an arrival.
    fn receive(&mut self, sequence: u64, threshold: usize, density: &mut Density) {
        // Its place is over, or it is a copy that was not recognised.
        if sequence < self.receive_index || self.window.sorted.contains(&sequence) || self.early.contains(&sequence) {
            density.left_out += 1;
            return;
        }
        self.window.push(sequence);
        if self.window.arrivals.len() > threshold {
            self.step(threshold, density);
        }
    }

    /// Judges the first packet of the window.
    fn step(&mut self, threshold: usize, density: &mut Density) {
        let from = self.receive_index..;
        let next = |set: &BTreeSet<u64>| set.range(from.clone()).next().copied();
        // Places whose packets are in neither set are those of lost packets.
        let index = next(&self.window.sorted).into_iter().chain(next(&self.early)).min();
        let Some(sequence) = self.window.pop() else { return };
        let Some(index) = index else {
            density.left_out += 1;
            return;
        };
        self.receive_index = index;
        let displacement = index as i64 - sequence as i64;
        if displacement.unsigned_abs() as usize > threshold {
            density.left_out += 1;
            // A late packet has had its place, so one place more than packets is left. The authors keep it, and all
            // later packets would seem displaced.
            if displacement > 0 {
                self.early.pop_first();
            }
            return;
        }
        *density.displacements.entry(displacement).or_default() += 1;
        self.early.remove(&index);
        if displacement < 0 {
            self.early.insert(sequence);
        }
        self.receive_index = index + 1;
    }
}

impl Occupancy {
    /// Takes an arrival.
    fn receive(&mut self, sequence: u64, threshold: usize, density: &mut Density) {
        if sequence < self.next || self.window.sorted.contains(&sequence) || self.held.contains(&sequence) {
            return;
        }
        self.window.push(sequence);
        if self.window.arrivals.len() > threshold {
            self.step(threshold, density);
        }
    }

    /// Gives the first packet of the window to the receiver.
    fn step(&mut self, threshold: usize, density: &mut Density) {
        let Some(sequence) = self.window.pop().filter(|sequence| *sequence >= self.next) else { return };
        // Smaller numbers that are not in the window are lost.
        if self.missing().is_none_or(|missing| sequence < missing) {
            self.next = sequence + 1;
            self.hand_out();
        } else {
            self.held.insert(sequence);
            if self.held.len() > threshold
                && let Some(first) = self.held.pop_first()
            {
                self.next = first + 1;
                self.hand_out();
            }
        }
        *density.held.entry(self.held.len() as u32).or_default() += 1;
    }

    /// Returns the next packet for which the receiver waits; `None` if it waits for none.
    fn missing(&self) -> Option<u64> {
        self.window.sorted.range(self.next..).next().copied()
    }

    /// The receiver hands out what it holds, up to the next packet that is missing.
    fn hand_out(&mut self) {
        let missing = self.missing().unwrap_or(u64::MAX);
        while let Some(first) = self.held.first().copied().filter(|first| *first < missing) {
            self.held.remove(&first);
            self.next = first + 1;
        }
    }
}

impl Densities {
    /// Follows streams that are numbered from 0. Packets that are displaced by more than the threshold are left out.
    pub fn new(streams: usize, threshold: usize) -> Self {
        Self { threshold, streams: vec![Stream::default(); streams], density: Density::default() }
    }

    /// Takes the first copy of a packet.
    pub fn receive(&mut self, stream: usize, sequence: u64) {
        let Some(Stream { displacement, occupancy }) = self.streams.get_mut(stream) else { return };
        displacement.receive(sequence, self.threshold, &mut self.density);
        occupancy.receive(sequence, self.threshold, &mut self.density);
    }

    /// Returns the densities of all packets so far, at the end of the arrivals.
    pub fn finish(mut self) -> Density {
        for Stream { displacement, occupancy } in &mut self.streams {
            while !displacement.window.arrivals.is_empty() {
                displacement.step(self.threshold, &mut self.density);
            }
            while !occupancy.window.arrivals.is_empty() {
                occupancy.step(self.threshold, &mut self.density);
            }
        }
        self.density
    }
}

impl Density {
    /// Returns the densities as JSON.
    pub fn to_json(&self) -> Value {
        fn entries<K: Copy + Into<i64>>(name: &str, counts: &BTreeMap<K, u64>) -> Vec<Value> {
            let total = counts.values().sum::<u64>().max(1) as f64;
            let entry = |(at, n): (&K, &u64)| {
                let at: i64 = (*at).into();
                json!({ name: at, "packets": n, "share": *n as f64 / total })
            };
            counts.iter().map(entry).collect()
        }
        json!({
            "density": entries("displacement", &self.displacements),
            "buffer_occupancy": entries("held", &self.held),
            "left_out": self.left_out,
        })
    }

    /// Returns the largest shares of both densities as text of two lines.
    pub fn text(&self) -> String {
        let left_out = if self.left_out == 0 { String::new() } else { format!("; {} left out", self.left_out) };
        format!(
            "{:12} {} (RFC 5236: displacement){left_out}\n{:12} {} (RFC 5236: packets to hold)\n",
            "displaced",
            largest(&self.displacements),
            "held",
            largest(&self.held)
        )
    }
}

/// Most entries of a density that are printed.
const PRINTED: usize = 16;

/// Returns the largest shares, in the order of what they are shares of.
fn largest<K: Copy + Ord + std::fmt::Display>(counts: &BTreeMap<K, u64>) -> String {
    let total = counts.values().sum::<u64>().max(1) as f64;
    let mut entries: Vec<(K, u64)> = counts.iter().map(|(at, n)| (*at, *n)).collect();
    entries.sort_by_key(|(_, n)| std::cmp::Reverse(*n));
    let more = entries.len().saturating_sub(PRINTED);
    entries.truncate(PRINTED);
    entries.sort_unstable_by_key(|(at, _)| *at);
    let shares = entries.iter().map(|(at, n)| format!("{at}: {:.3} %", *n as f64 / total * 100.0));
    let text = shares.collect::<Vec<_>>().join(", ");
    match (entries.is_empty(), more) {
        (true, _) => "none".to_owned(),
        (false, 0) => text,
        (false, more) => format!("{text}, and {more} smaller shares"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn density(threshold: usize, arrivals: &[u64]) -> Density {
        let mut densities = Densities::new(1, threshold);
        arrivals.iter().for_each(|sequence| densities.receive(0, *sequence));
        densities.finish()
    }

    fn displacements(density: &Density) -> Vec<(i64, u64)> {
        density.displacements.iter().map(|(at, n)| (*at, *n)).collect()
    }

    fn held(density: &Density) -> Vec<(u32, u64)> {
        density.held.iter().map(|(at, n)| (*at, *n)).collect()
    }

    #[test]
    fn displacements_are_those_of_publications() {
        // Hindawi, Journal of Computer Networks and Communications 2020, 8465191, table 1.
        let found = density(8, &[1, 6, 7, 2, 3, 4, 5, 8]);
        assert_eq!(displacements(&found), [(-4, 2), (0, 2), (2, 4)]);
        // Two packets wait for four others.
        assert_eq!(held(&found), [(0, 3), (1, 1), (2, 4)]);
        // Packets in order, and lost ones, are not displaced.
        for arrivals in [&[0, 1, 2, 3, 4][..], &[0, 3, 4, 9, 20], &[5, 6, 8]] {
            let found = density(2, arrivals);
            assert_eq!(displacements(&found), [(0, arrivals.len() as u64)], "{arrivals:?}");
            assert_eq!(held(&found), [(0, arrivals.len() as u64)], "{arrivals:?}");
        }
        // Two packets that change places.
        let found = density(4, &[0, 2, 1, 3]);
        assert_eq!((displacements(&found), held(&found)), (vec![(-1, 1), (0, 2), (1, 1)], vec![(0, 3), (1, 1)]));
        // The same after a loss, which moves the places.
        let found = density(4, &[0, 5, 4, 6]);
        assert_eq!((displacements(&found), held(&found)), (vec![(-1, 1), (0, 2), (1, 1)], vec![(0, 3), (1, 1)]));
    }

    #[test]
    fn packets_beyond_the_threshold_are_left_out() {
        // 0 comes after five others. With a window of three, it is lost, and the others are in order.
        let late = [1, 2, 3, 4, 5, 0, 6];
        let found = density(2, &late);
        assert_eq!((displacements(&found), held(&found), found.left_out), (vec![(0, 6)], vec![(0, 6)], 1));
        // The last threshold that is too small, and what follows is in order.
        let tail: Vec<u64> = late.iter().copied().chain(7..200).collect();
        let found = density(4, &tail);
        assert_eq!((displacements(&found), held(&found), found.left_out), (vec![(0, 199)], vec![(0, 199)], 1));
        // A late packet after losses takes no place from those that follow.
        let jumps: Vec<u64> = [0, 4, 6, 1].into_iter().chain(10..1000).collect();
        let found = density(3, &jumps);
        assert_eq!((found.displacements[&0], found.displacements.values().sum::<u64>(), found.left_out), (991, 993, 1));
        let found = density(5, &late);
        assert_eq!((displacements(&found), found.left_out), (vec![(-1, 5), (0, 1), (5, 1)], 0));
        assert_eq!(held(&found), [(0, 2), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]);
    }

    #[test]
    fn copies_that_were_not_recognised_are_left_out() {
        let found = density(10, &[0, 1, 200_000, 1, 200_000, 200_001]);
        assert_eq!((displacements(&found), held(&found), found.left_out), (vec![(0, 4)], vec![(0, 4)], 2));
    }

    #[test]
    fn the_largest_shares_are_printed() {
        let mut density = Density { left_out: 3, ..Density::default() };
        density.displacements = (-20..=20).map(|at: i64| (at, 21 - at.unsigned_abs())).collect();
        let text = density.text();
        assert!(text.contains("displaced    -8: ") && text.contains("0: 4.762 %"), "{text}");
        assert!(
            text.contains(" and 25 smaller shares (RFC 5236: displacement); 3 left out\nheld         none"),
            "{text}"
        );
    }

    /// In any order with losses, each arrival takes the place of the packet that should have come.
    #[test]
    fn any_order_is_counted_once() {
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..500 {
            let mut arrivals: Vec<u64> = (0..random.u64(1..60)).filter(|_| random.u8(..) > 20).collect();
            for _ in 0..random.usize(..40) {
                if arrivals.len() > 1 {
                    let (a, b) = (random.usize(..arrivals.len()), random.usize(..arrivals.len()));
                    arrivals.swap(a, b);
                }
            }
            let whole = density(64, &arrivals);
            let n = arrivals.len() as u64;
            assert_eq!((whole.displacements.values().sum::<u64>(), whole.left_out), (n, 0), "{round}: {arrivals:?}");
            assert_eq!(whole.held.values().sum::<u64>(), n, "{round}: {arrivals:?}");
            let mut sorted = arrivals.clone();
            sorted.sort_unstable();
            let mut expected = BTreeMap::new();
            for (arrived, place) in arrivals.iter().zip(&sorted) {
                *expected.entry(*place as i64 - *arrived as i64).or_default() += 1;
            }
            assert_eq!(whole.displacements, expected, "{round}: {arrivals:?}");
            let small = density(3, &arrivals);
            assert_eq!(small.displacements.values().sum::<u64>() + small.left_out, n, "{round}: {arrivals:?}");
            assert!(small.held.keys().all(|held| *held <= 3), "{round}: {arrivals:?}: {small:?}");
        }
    }
}
