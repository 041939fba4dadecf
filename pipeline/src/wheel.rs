//! A hierarchical timer wheel: arms, cancels and fires each timer in constant time.
//!
//! The wheel has eight levels of 64 slots. A timer that is due within 64 ticks is in the lowest level, in the
//! slot of its tick. Later timers are in a higher level, whose slots span 64 times as much each, and move
//! down when their slot comes up. Time is a number of ticks; the caller chooses the length of a tick.

const LEVEL_BITS: u32 = 6;
const SLOTS: usize = 1 << LEVEL_BITS;
const LEVELS: usize = 8;
const NIL: u32 = u32::MAX;

/// Identifies an armed timer. An identifier is never reused, even after its timer has fired or was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TimerId {
    index: u32,
    generation: u32,
}

#[derive(Debug)]
struct Node<T> {
    /// Value of the timer; `None` while the node is free.
    value: Option<T>,
    due: u64,
    next: u32,
    previous: u32,
    slot: u32,
    generation: u32,
}

/// A timer wheel whose timers carry a `T`.
#[derive(Debug)]
pub struct TimerWheel<T> {
    now: u64,
    nodes: Vec<Node<T>>,
    free: u32,
    /// First node of each slot's list.
    heads: Box<[u32; SLOTS * LEVELS]>,
    /// Bit mask of the non-empty slots of each level.
    occupied: [u64; LEVELS],
    armed: usize,
}

impl<T> TimerWheel<T> {
    /// Creates a wheel whose current time is `now`.
    pub fn new(now: u64) -> Self {
        Self {
            now,
            nodes: Vec::new(),
            free: NIL,
            heads: Box::new([NIL; SLOTS * LEVELS]),
            occupied: [0; LEVELS],
            armed: 0,
        }
    }

    /// Returns the wheel's current time.
    pub fn now(&self) -> u64 {
        self.now
    }

    /// Number of armed timers.
    pub fn len(&self) -> usize {
        self.armed
    }

    /// Returns whether no timer is armed.
    pub fn is_empty(&self) -> bool {
        self.armed == 0
    }

    /// Arms a timer that fires when the time reaches `due`. A timer that is already due fires with the next
    /// tick.
    pub fn arm(&mut self, due: u64, value: T) -> TimerId {
        let due = due.max(self.now + 1);
        let index = if self.free == NIL {
            self.nodes.push(Node { value: None, due: 0, next: NIL, previous: NIL, slot: 0, generation: 0 });
            (self.nodes.len() - 1) as u32
        } else {
            self.free
        };
        let node = &mut self.nodes[index as usize];
        if self.free == index {
            self.free = node.next;
        }
        (node.value, node.due) = (Some(value), due);
        let generation = node.generation;
        self.link(index);
        self.armed += 1;
        TimerId { index, generation }
    }

    /// Cancels a timer and returns its value; `None` if it has fired or was cancelled before.
    pub fn cancel(&mut self, id: TimerId) -> Option<T> {
        let node = self.nodes.get(id.index as usize)?;
        if node.generation != id.generation || node.value.is_none() {
            return None;
        }
        self.unlink(id.index);
        Some(self.release(id.index))
    }

    /// Advances the time to `now` and calls `fire` for every timer that became due, in order of due time.
    /// Timers of the same tick fire in any order. Ticks without timers cost no time.
    pub fn advance(&mut self, now: u64, mut fire: impl FnMut(u64, T)) {
        while self.now < now {
            let Some(next) = self.next_expiry() else { break };
            if next > now {
                break;
            }
            self.now = next;
            // Highest level first, so that a timer can move down several levels at the same tick.
            for level in (1..LEVELS).rev() {
                if self.now.trailing_zeros() >= LEVEL_BITS * level as u32 {
                    self.cascade(level);
                }
            }
            let slot = self.now as usize % SLOTS;
            while self.heads[slot] != NIL {
                let index = self.heads[slot];
                self.unlink(index);
                let due = self.nodes[index as usize].due;
                fire(due, self.release(index));
            }
        }
        self.now = self.now.max(now);
    }

    /// Returns the next tick at which a non-empty slot of any level comes up.
    fn next_expiry(&self) -> Option<u64> {
        (0..LEVELS)
            .filter(|&level| self.occupied[level] != 0)
            .map(|level| {
                let shift = LEVEL_BITS * level as u32;
                let at = self.now >> shift;
                // Search from the slot after the current one, around the wheel.
                let ahead = self.occupied[level].rotate_right(((at + 1) % SLOTS as u64) as u32).trailing_zeros();
                (at + 1 + u64::from(ahead)) << shift
            })
            .min()
    }

    /// Distributes the timers of a level's current slot over the lower levels.
    fn cascade(&mut self, level: usize) {
        let slot = level * SLOTS + (self.now >> (LEVEL_BITS * level as u32)) as usize % SLOTS;
        while self.heads[slot] != NIL {
            let index = self.heads[slot];
            self.unlink(index);
            self.link(index);
        }
    }

    fn link(&mut self, index: u32) {
        let due = self.nodes[index as usize].due;
        // The highest bit in which `due` and `now` differ selects the level. A timer that is due now goes to
        // the lowest level.
        let differing = (due ^ self.now) | 1;
        let level = ((63 - differing.leading_zeros()) / LEVEL_BITS).min(LEVELS as u32 - 1) as usize;
        // A timer beyond the wheel's span goes to the last slot of the highest level and is linked again when
        // that slot comes up.
        let shift = LEVEL_BITS * level as u32;
        let reach = ((self.now >> shift) + SLOTS as u64 - 1) << shift;
        let in_level = (due.min(reach) >> shift) as usize % SLOTS;
        let slot = level * SLOTS + in_level;
        let head = self.heads[slot];
        if head != NIL {
            self.nodes[head as usize].previous = index;
        }
        let node = &mut self.nodes[index as usize];
        (node.next, node.previous, node.slot) = (head, NIL, slot as u32);
        self.heads[slot] = index;
        self.occupied[level] |= 1 << in_level;
    }

    fn unlink(&mut self, index: u32) {
        let Node { next, previous, slot, .. } = self.nodes[index as usize];
        if next != NIL {
            self.nodes[next as usize].previous = previous;
        }
        if previous == NIL {
            let slot = slot as usize;
            self.heads[slot] = next;
            if next == NIL {
                self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
            }
        } else {
            self.nodes[previous as usize].next = next;
        }
    }

    fn release(&mut self, index: u32) -> T {
        let node = &mut self.nodes[index as usize];
        node.generation = node.generation.wrapping_add(1);
        node.next = self.free;
        self.free = index;
        self.armed -= 1;
        node.value.take().expect("linked nodes are armed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fires_what_a_naive_list_fires() {
        for seed in 1..200 {
            let mut random = fastrand::Rng::with_seed(seed);
            let start = random.u64(..1 << 40);
            let (mut wheel, mut list, mut next) = (TimerWheel::new(start), Vec::new(), 0u32);
            for _ in 0..300 {
                match random.u64(..4) {
                    0 | 1 => {
                        let span = 1 << random.u64(..30);
                        let due = wheel.now() + random.u64(..span);
                        let id = wheel.arm(due, next);
                        list.push((due.max(wheel.now() + 1), next, id));
                        next += 1;
                    }
                    2 if !list.is_empty() => {
                        let (_, value, id) = list.swap_remove(random.u64(..list.len() as u64) as usize);
                        assert_eq!(wheel.cancel(id), Some(value));
                        assert_eq!(wheel.cancel(id), None);
                    }
                    _ => {
                        let span = 1 << random.u64(..28);
                        let now = wheel.now() + random.u64(..span);
                        let mut fired = Vec::new();
                        wheel.advance(now, |due, value| fired.push((due, value)));
                        assert!(fired.is_sorted_by_key(|&(due, _)| due));
                        let mut expected: Vec<_> = list
                            .extract_if(.., |&mut (due, ..)| due <= now)
                            .map(|(due, value, _)| (due, value))
                            .collect();
                        fired.sort_unstable();
                        expected.sort_unstable();
                        assert_eq!(fired, expected);
                        assert_eq!(wheel.now(), now);
                    }
                }
                assert_eq!(wheel.len(), list.len());
            }
        }
    }

    #[test]
    fn timers_beyond_the_span_and_slots_used_again() {
        let mut wheel = TimerWheel::new(5);
        let far = (1 << 50) + 3;
        wheel.arm(far, 'f');
        let first = wheel.arm(6, 'a');
        wheel.advance(6, |due, value| assert_eq!((due, value), (6, 'a')));
        let second = wheel.arm(7, 'b');
        assert_ne!(first, second);
        assert_eq!(wheel.cancel(first), None, "an old name does not cancel a new timer");
        let mut fired = Vec::new();
        wheel.advance(far - 1, |due, value| fired.push((due, value)));
        assert_eq!(fired, [(7, 'b')]);
        wheel.advance(far, |due, value| fired.push((due, value)));
        assert_eq!(fired, [(7, 'b'), (far, 'f')]);
    }
}
