//! Arithmetic of rings with free-running counters.
//!
//! Producer and consumer counters do not wrap at the end of the ring. A slot is a counter modulo the size.
//!
//! A full ring is thus distinct from an empty one without a spare slot. A counter written by a peer or a
//! device can be checked for plausibility.

/// Size of a ring with free-running counters: a power of two, at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize {
    mask: u32,
}

impl RingSize {
    /// Returns the size; `None` if `entries` is not a power of two.
    pub const fn new(entries: u32) -> Option<Self> {
        if entries.is_power_of_two() { Some(Self { mask: entries - 1 }) } else { None }
    }

    /// Returns the smallest size of at least `entries`; `None` above 2³¹.
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

    /// Number of entries in use.
    ///
    /// Returns `None` if it would exceed the ring: the counter of the other side is then invalid.
    #[inline(always)]
    pub const fn used(self, producer: u32, consumer: u32) -> Option<u32> {
        let used = producer.wrapping_sub(consumer);
        if used <= self.entries() { Some(used) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_wrap_and_invalid_pairs_are_detected() {
        let ring = RingSize::new(8).unwrap();
        assert_eq!(ring.used(u32::MAX.wrapping_add(3), u32::MAX), Some(3));
        assert_eq!(ring.used(8, 0), Some(8));
        assert_eq!(ring.used(9, 0), None, "nine entries in a ring of eight");
        assert_eq!(ring.used(0, 1), None, "a consumer ahead of its producer");
        assert_eq!(ring.slot(u32::MAX), 7);
    }

    #[test]
    fn only_powers_of_two() {
        assert!(RingSize::new(0).is_none());
        assert!(RingSize::new(12).is_none());
        assert_eq!(RingSize::at_least(12).unwrap().entries(), 16);
        assert!(RingSize::at_least(u32::MAX).is_none());
    }
}
