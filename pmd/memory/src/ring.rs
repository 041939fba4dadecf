//! Arithmetic of rings with free-running counters.
//!
//! Producer and consumer count without ever wrapping to zero at the ring's end; the slot is the counter modulo the size. Full and
//! empty are then told apart without sacrificing a slot, and a counter that a peer or a device wrote can be checked for being
//! possible at all.

/// Size of a ring whose counters run freely: a power of two, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize {
    mask: u32,
}

impl RingSize {
    /// `entries` must be a power of two of at most 2³¹; `None` otherwise.
    pub const fn new(entries: u32) -> Option<Self> {
        if entries.is_power_of_two() { Some(Self { mask: entries - 1 }) } else { None }
    }

    /// The smallest legal size that holds `entries`, or `None` above 2³¹.
    pub const fn at_least(entries: u32) -> Option<Self> {
        match entries.checked_next_power_of_two() {
            Some(n) => Self::new(n),
            None => None,
        }
    }

    /// Number of entries.
    pub const fn entries(self) -> u32 {
        self.mask + 1
    }

    /// Slot of a free-running counter, always below [`Self::entries`].
    #[inline(always)]
    pub const fn slot(self, counter: u32) -> usize {
        (counter & self.mask) as usize
    }

    /// Entries between consumer and producer, or `None` if the pair is impossible (more in use than the ring has): the
    /// counter of the other side is not to be trusted then.
    #[inline(always)]
    pub const fn used(self, producer: u32, consumer: u32) -> Option<u32> {
        let used = producer.wrapping_sub(consumer);
        if used <= self.entries() { Some(used) } else { None }
    }

    /// How many entries from `counter` on lie before the ring's end, at most `want`.
    #[inline(always)]
    pub fn contiguous(self, counter: u32, want: u32) -> u32 {
        want.min(self.entries() - (counter & self.mask))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_and_impossible_pairs_are_seen() {
        let ring = RingSize::new(8).unwrap();
        assert_eq!(ring.used(u32::MAX.wrapping_add(3), u32::MAX), Some(3));
        assert_eq!(ring.used(8, 0), Some(8));
        assert_eq!(ring.used(9, 0), None, "nine entries in a ring of eight");
        assert_eq!(ring.used(0, 1), None, "a consumer ahead of its producer");
        assert_eq!(ring.slot(u32::MAX), 7);
        assert_eq!(ring.contiguous(6, 4), 2);
    }

    #[test]
    fn only_powers_of_two() {
        assert!(RingSize::new(0).is_none());
        assert!(RingSize::new(12).is_none());
        assert_eq!(RingSize::at_least(12).unwrap().entries(), 16);
        assert!(RingSize::at_least(u32::MAX).is_none());
    }
}
