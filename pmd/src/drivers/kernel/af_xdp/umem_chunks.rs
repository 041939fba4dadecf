// UNSAFETY: reads and writes chunks of memory that are shared with the kernel.
#![allow(unsafe_code)]

//! Chunks of a separate UMEM, used where the pool's buffers cannot be chunks. Frames are copied between the
//! pool and these chunks.

use std::sync::Arc;

use wirepath_memory::Region;

/// Bytes of an aligned chunk. The kernel supports no larger ones, and a smaller one would not hold a standard
/// frame behind XDP's headroom.
pub(super) const CHUNK: usize = 4096;

/// Chunks of one ring. Each is free or owned by the kernel.
pub(super) struct UmemChunks {
    region: Arc<Region>,
    first: u32,
    /// Free chunks, counted from `first`.
    free: Vec<u32>,
    with_kernel: Box<[bool]>,
}

impl UmemChunks {
    /// Manages `count` chunks from chunk `first` on.
    ///
    /// # Panics
    /// If the region has fewer chunks.
    pub(super) fn new(region: &Arc<Region>, first: u32, count: u32) -> Self {
        assert!((first as usize + count as usize) * CHUNK <= region.bytes());
        let with_kernel = vec![false; count as usize].into();
        Self { region: Arc::clone(region), first, free: (0..count).collect(), with_kernel }
    }

    /// Returns the number of chunks that the kernel owns.
    pub(super) fn outstanding(&self) -> u32 {
        (self.with_kernel.len() - self.free.len()) as u32
    }

    /// Passes a free chunk to the kernel and returns its address.
    pub(super) fn post(&mut self) -> Option<u64> {
        let chunk = self.free.pop()?;
        self.with_kernel[chunk as usize] = true;
        Some(u64::from(self.first + chunk) * CHUNK as u64)
    }

    /// Copies up to a chunk from `bytes` into a free chunk and passes it to the kernel. Returns its address
    /// and the copied length.
    pub(super) fn post_copy(&mut self, bytes: &mut dyn Iterator<Item = &[u8]>, max_len: usize) -> Option<(u64, usize)> {
        let address = self.post()?;
        let mut done = 0;
        for part in bytes {
            let n = part.len().min(max_len.min(CHUNK) - done);
            // SAFETY: the chunk lies in the region, and `done + n` is at most its size. The chunk was free,
            // so the kernel does not access it before its address is posted.
            unsafe {
                let to = self.region.base().as_ptr().add(address as usize + done);
                std::ptr::copy_nonoverlapping(part.as_ptr(), to, n);
            }
            done += n;
        }
        Some((address, done))
    }

    /// Takes a chunk back from the kernel and passes the `len` bytes at `address` to `read`. Returns `None`
    /// without reading if the kernel does not own a chunk with these bytes.
    pub(super) fn complete<T>(&mut self, address: u64, len: usize, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let chunk = u32::try_from(address / CHUNK as u64).ok()?.checked_sub(self.first)?;
        let with_kernel = self.with_kernel.get_mut(chunk as usize)?;
        if !std::mem::replace(with_kernel, false) {
            return None;
        }
        self.free.push(chunk);
        if len > CHUNK - address as usize % CHUNK {
            return None;
        }
        // SAFETY: the bytes lie inside the chunk, which the kernel has returned. It does not write the chunk
        // until it is posted again.
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
        let mut chunks = UmemChunks::new(&region, 4, 2);
        let (address, n) = chunks.post_copy(&mut [&b"ab"[..], b"cd"].into_iter(), CHUNK).unwrap();
        assert_eq!((n, chunks.outstanding()), (4, 1));
        assert_eq!(chunks.complete(address, 4, <[u8]>::to_vec), Some(b"abcd".to_vec()));
        assert_eq!(chunks.complete(address, 4, <[u8]>::to_vec), None, "taken already");
        let address = chunks.post().unwrap();
        assert_eq!(chunks.complete(address + 4000, 200, <[u8]>::len), None, "beyond the chunk");
        for wrong in [0, 3 * CHUNK as u64, 6 * CHUNK as u64, u64::MAX] {
            assert_eq!(chunks.complete(wrong, 1, <[u8]>::len), None);
        }
        assert!(chunks.post().is_some() && chunks.post().is_some() && chunks.post().is_none());
    }
}
