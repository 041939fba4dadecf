//! Free list of the bytes of a region.

use std::collections::BTreeMap;

/// Free extents of a region, by offset. No two of them touch.
#[derive(Debug)]
pub(super) struct FreeList {
    free: BTreeMap<usize, usize>,
    /// Bytes below this offset have been allocated before, so they may not be zero.
    used_up_to: usize,
}

/// Allocated extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: usize,
    /// True if a part of it was in use before.
    pub(super) recycled: bool,
}

impl FreeList {
    pub(super) fn new(bytes: usize) -> Self {
        Self { free: BTreeMap::from([(0, bytes)]), used_up_to: 0 }
    }

    /// Allocates from the first free extent that is long enough.
    pub(super) fn take(&mut self, bytes: usize) -> Option<Extent> {
        let (&offset, &length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        let recycled = offset < self.used_up_to;
        self.used_up_to = self.used_up_to.max(offset + bytes);
        Some(Extent { offset, recycled })
    }

    /// Frees an extent.
    pub(super) fn release(&mut self, offset: usize, bytes: usize) {
        let (mut start, mut length) = (offset, bytes);
        if let Some((&before, &before_length)) = self.free.range(..offset).next_back()
            && before + before_length == offset
        {
            self.free.remove(&before);
            start = before;
            length += before_length;
        }
        if let Some(after_length) = self.free.remove(&(offset + bytes)) {
            length += after_length;
        }
        self.free.insert(start, length);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn freed_extents_are_merged() {
        let mut space = FreeList::new(100);
        let parts: Vec<_> = (0..5).map(|_| space.take(20).unwrap()).collect();
        assert_eq!(space.take(1), None);
        assert!(parts.iter().all(|part| !part.recycled));
        for part in [1, 3, 2, 0, 4] {
            space.release(parts[part].offset, 20);
        }
        assert_eq!(space.free, BTreeMap::from([(0, 100)]));
        assert_eq!(space.take(100), Some(Extent { offset: 0, recycled: true }));
    }

    proptest! {
        #[test]
        fn extents_never_overlap_and_none_is_lost(
            steps in proptest::collection::vec((any::<bool>(), 1usize..40), 1..200)
        ) {
            const BYTES: usize = 256;
            let mut space = FreeList::new(BYTES);
            let mut owners = [0u32; BYTES];
            let mut ever_used = [false; BYTES];
            let mut live: Vec<(usize, usize, u32)> = Vec::new();
            for (number, (take, size)) in (1..).zip(steps) {
                if take || live.is_empty() {
                    let free_runs = owners.chunk_by(|a, b| a == b).filter(|run| run[0] == 0);
                    let longest = free_runs.map(<[u32]>::len).max().unwrap_or(0);
                    match space.take(size) {
                        Some(taken) => {
                            let range = taken.offset..taken.offset + size;
                            prop_assert!(owners[range.clone()].iter().all(|owner| *owner == 0));
                            prop_assert!(taken.recycled || ever_used[range.clone()].iter().all(|used| !used));
                            owners[range.clone()].fill(number);
                            ever_used[range].fill(true);
                            live.push((taken.offset, size, number));
                        }
                        None => prop_assert!(longest < size),
                    }
                } else {
                    let (offset, size, _) = live.swap_remove(size % live.len());
                    owners[offset..offset + size].fill(0);
                    space.release(offset, size);
                }
                let free: usize = space.free.values().sum();
                prop_assert_eq!(free, owners.iter().filter(|owner| **owner == 0).count());
            }
        }
    }
}
