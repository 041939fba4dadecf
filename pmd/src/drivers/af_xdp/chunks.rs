// UNSAFETY: reads and writes chunks of memory that the kernel shares.
#![allow(unsafe_code)]

//! Chunks of a port's own UMEM, where the packet pool's buffers cannot be its chunks. Frames are copied between both.

use std::sync::Arc;

use wirepath_memory::Region;

/// Bytes of an aligned chunk: the largest that the kernel takes, and the least that holds a standard frame behind XDP's headroom.
pub(super) const CHUNK: usize = 4096;

/// The chunks of one ring, each free or with the kernel.
pub(super) struct Chunks {
    region: Arc<Region>,
    first: u32,
    /// Numbers of the free chunks, from `first`.
    free: Vec<u32>,
    with_kernel: Box<[bool]>,
}

impl Chunks {
    /// `count` chunks from number `first` on.
    ///
    /// # Panics
    /// If the region has fewer.
    pub(super) fn new(region: &Arc<Region>, first: u32, count: u32) -> Self {
        assert!((first as usize + count as usize) * CHUNK <= region.bytes());
        let with_kernel = vec![false; count as usize].into();
        Self { region: Arc::clone(region), first, free: (0..count).collect(), with_kernel }
    }

    /// Chunks with the kernel.
    pub(super) fn count(&self) -> u32 {
        (self.with_kernel.len() - self.free.len()) as u32
    }

    /// A free chunk's address, which is with the kernel from now on.
    pub(super) fn post(&mut self) -> Option<u64> {
        let chunk = self.free.pop()?;
        self.with_kernel[chunk as usize] = true;
        Some(u64::from(self.first + chunk) * CHUNK as u64)
    }

    /// Copies up to a chunk from `bytes` into a free chunk, which is with the kernel from now on; returns its address and how much.
    pub(super) fn post_copy(&mut self, bytes: &mut dyn Iterator<Item = &[u8]>, most: usize) -> Option<(u64, usize)> {
        let address = self.post()?;
        let mut done = 0;
        for part in bytes {
            let n = part.len().min(most.min(CHUNK) - done);
            // SAFETY: the chunk lies in the region, and `done + n` in the chunk; it was free, so neither the kernel nor anybody else
            // reads or writes it before the address is handed over.
            unsafe {
                let to = self.region.base().as_ptr().add(address as usize + done);
                std::ptr::copy_nonoverlapping(part.as_ptr(), to, n);
            }
            done += n;
        }
        Some((address, done))
    }

    /// Takes back the chunk that holds the address and gives its `len` bytes from there to `read`. `None`, and nothing is read, if no
    /// chunk with the kernel holds them.
    pub(super) fn take<T>(&mut self, address: u64, len: usize, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let chunk = u32::try_from(address / CHUNK as u64).ok()?.checked_sub(self.first)?;
        let with_kernel = self.with_kernel.get_mut(chunk as usize)?;
        if !std::mem::replace(with_kernel, false) {
            return None;
        }
        self.free.push(chunk);
        if len > CHUNK - address as usize % CHUNK {
            return None;
        }
        // SAFETY: inside the chunk, which the kernel has given back: nobody writes it until it is posted again.
        let bytes = unsafe { std::slice::from_raw_parts(self.region.base().as_ptr().add(address as usize), len) };
        Some(read(bytes))
    }
}

#[cfg(test)]
mod tests {
    use wirepath_memory::RegionBuilder;

    use super::*;

    #[test]
    fn chunks_come_back_once_and_only_whole() {
        let region = Arc::new(RegionBuilder::new(16 * CHUNK).huge_pages(false).map().unwrap());
        let mut chunks = Chunks::new(&region, 4, 2);
        let (address, n) = chunks.post_copy(&mut [&b"ab"[..], b"cd"].into_iter(), CHUNK).unwrap();
        assert_eq!((n, chunks.count()), (4, 1));
        assert_eq!(chunks.take(address, 4, <[u8]>::to_vec), Some(b"abcd".to_vec()));
        assert_eq!(chunks.take(address, 4, <[u8]>::to_vec), None, "taken already");
        let address = chunks.post().unwrap();
        assert_eq!(chunks.take(address + 4000, 200, <[u8]>::len), None, "beyond the chunk");
        for wrong in [0, 3 * CHUNK as u64, 6 * CHUNK as u64, u64::MAX] {
            assert_eq!(chunks.take(wrong, 1, <[u8]>::len), None);
        }
        assert!(chunks.post().is_some() && chunks.post().is_some() && chunks.post().is_none());
    }
}
