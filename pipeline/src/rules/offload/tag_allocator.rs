//! Allocation of tags, and the actions of workers for packets that carry one.
//!
//! A tag identifies one rule of one port as it was installed in the device. It is freed in three steps. The
//! device removes the rule. Every receive ring of the port is drained of packets with the tag. Finally, no
//! worker uses its entry any more. Only then can another rule get it.

use std::collections::VecDeque;
use std::sync::Arc;

use wirepath_pmd::port::hardware::RESERVED_TAGS;

use crate::epoch::{Domain, Guard, Shared};
use crate::rules::Program;

/// Entries per allocation.
const CHUNK: usize = 256;

/// Actions of workers for packets that carry a tag.
#[derive(Debug)]
pub(in crate::rules) struct TagEntry {
    /// Record with actions and counters of the rule that the packet matched; `None` for an implicit rule,
    /// whose packets only get a mark.
    pub(in crate::rules) record: Option<u32>,
    /// The mark of an implicit rule.
    pub(in crate::rules) implicit_mark: u32,
    /// Remaining actions; `None`: all actions of the rule, as if the worker had found it.
    pub(in crate::rules) rest: Option<Program>,
    /// True if the worker counts the packet for the rule.
    pub(in crate::rules) counts: bool,
    /// True if the actions need the header offsets.
    pub(in crate::rules) needs_headers: bool,
}

type Chunk = Arc<[Shared<Option<TagEntry>>]>;

/// Entries of all tags. The table never shrinks.
#[derive(Debug)]
pub(in crate::rules) struct TagTable {
    chunks: Shared<Vec<Chunk>>,
}

impl TagTable {
    pub(super) fn new(domain: &Domain) -> Self {
        Self { chunks: Shared::new(domain, Vec::new()) }
    }

    /// Returns the entry of a tag, or `None` if the tag is not allocated.
    #[inline]
    pub(in crate::rules) fn get<'g>(&'g self, guard: Guard<'g>, tag: u32) -> Option<&'g TagEntry> {
        let chunk = self.chunks.read(guard).get(tag as usize / CHUNK)?;
        chunk[tag as usize % CHUNK].read(guard).as_ref()
    }
}

/// Allocator of tags. The control thread owns it.
#[derive(Debug)]
pub(super) struct TagAllocator {
    domain: Domain,
    tags: Arc<TagTable>,
    chunks: Vec<Chunk>,
    next: u32,
    free: VecDeque<u32>,
}

impl TagAllocator {
    pub(super) fn new(domain: &Domain) -> Self {
        Self {
            domain: domain.clone(),
            tags: Arc::new(TagTable::new(domain)),
            chunks: Vec::new(),
            next: RESERVED_TAGS[0] + 1,
            free: VecDeque::new(),
        }
    }

    pub(super) fn tags(&self) -> &Arc<TagTable> {
        &self.tags
    }

    /// Allocates a tag of at most this value.
    pub(super) fn allocate(&mut self, max_tag: u32) -> Option<u32> {
        let max_tag = max_tag.min(RESERVED_TAGS[1] - 1);
        // The tag that was freed first is reused first.
        if let Some(at) = self.free.iter().position(|tag| *tag <= max_tag) {
            return self.free.remove(at);
        }
        (self.next <= max_tag).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Sets the entry of a tag. Must be called before the device can put the tag on a packet.
    pub(super) fn set(&mut self, tag: u32, entry: TagEntry) {
        let at = tag as usize / CHUNK;
        if at >= self.chunks.len() {
            while at >= self.chunks.len() {
                self.chunks.push((0..CHUNK).map(|_| Shared::new(&self.domain, None)).collect());
            }
            self.tags.chunks.replace(self.chunks.clone());
        }
        self.chunks[at][tag as usize % CHUNK].replace(Some(entry));
    }

    /// Frees a tag that no packet can carry any more.
    pub(super) fn free(&mut self, tag: u32) {
        if let Some(chunk) = self.chunks.get(tag as usize / CHUNK) {
            chunk[tag as usize % CHUNK].replace(None);
        }
        self.free.push_back(tag);
    }
}
