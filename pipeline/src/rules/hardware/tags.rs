//! The space of tags, and what workers do with packets that carry one.
//!
//! A tag names one rule of one port as it was when it was given to the device. It is taken back in three steps: the device loses the
//! rule; every receive ring of the port is drained of what was marked before; no worker looks at its entry any more. Only then can
//! another rule have it.

use std::collections::VecDeque;
use std::sync::Arc;

use wirepath_pmd::port::hardware::RESERVED_TAGS;

use super::super::Program;
use crate::epoch::{Domain, Guard, Shared};

/// Entries that are made at a time.
const CHUNK: usize = 256;

/// What workers do with packets that carry a tag.
#[derive(Debug)]
pub(in super::super) struct Tagged {
    /// Where the actions and counters of the rule are that the packet has met; `None`: it is one of the program's own, whose packets
    /// only get a mark.
    pub(in super::super) record: Option<u32>,
    /// That mark.
    pub(in super::super) own: u32,
    /// What is left to do; `None`: all of it, as if the worker had found the rule itself.
    pub(in super::super) rest: Option<Program>,
    /// Whether the worker counts the packet for the rule.
    pub(in super::super) counts: bool,
    /// Whether actions need to know where the headers are.
    pub(in super::super) looks: bool,
}

type Chunk = Arc<[Shared<Option<Tagged>>]>;

/// The entries of all tags. Only ever grows.
#[derive(Debug)]
pub(in super::super) struct Tags {
    chunks: Shared<Vec<Chunk>>,
}

impl Tags {
    pub(super) fn new(domain: &Domain) -> Self {
        Self { chunks: Shared::new(domain, Vec::new()) }
    }

    /// What to do with packets that carry this tag; `None`: nobody has given it.
    #[inline]
    pub(in super::super) fn get<'g>(&'g self, guard: Guard<'g>, tag: u32) -> Option<&'g Tagged> {
        let chunk = self.chunks.read(guard).get(tag as usize / CHUNK)?;
        chunk[tag as usize % CHUNK].read(guard).as_ref()
    }
}

/// Gives tags out and takes them back. Belongs to the control thread.
#[derive(Debug)]
pub(super) struct Space {
    domain: Domain,
    tags: Arc<Tags>,
    chunks: Vec<Chunk>,
    next: u32,
    free: VecDeque<u32>,
}

impl Space {
    pub(super) fn new(domain: &Domain) -> Self {
        Self {
            domain: domain.clone(),
            tags: Arc::new(Tags::new(domain)),
            chunks: Vec::new(),
            next: RESERVED_TAGS[0] + 1,
            free: VecDeque::new(),
        }
    }

    pub(super) fn tags(&self) -> &Arc<Tags> {
        &self.tags
    }

    /// A tag that nobody has, of at most this value.
    pub(super) fn take(&mut self, most: u32) -> Option<u32> {
        let most = most.min(RESERVED_TAGS[1] - 1);
        // The one that was given back first: the longer ago, the better.
        if let Some(at) = self.free.iter().position(|tag| *tag <= most) {
            return self.free.remove(at);
        }
        (self.next <= most).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// Says what packets with a tag are to be done with. To be called before the device can give it to one.
    pub(super) fn set(&mut self, tag: u32, entry: Tagged) {
        let at = tag as usize / CHUNK;
        if at >= self.chunks.len() {
            while at >= self.chunks.len() {
                self.chunks.push((0..CHUNK).map(|_| Shared::new(&self.domain, None)).collect());
            }
            self.tags.chunks.replace(self.chunks.clone());
        }
        self.chunks[at][tag as usize % CHUNK].replace(Some(entry));
    }

    /// No packet can carry the tag any more.
    pub(super) fn give_back(&mut self, tag: u32) {
        if let Some(chunk) = self.chunks.get(tag as usize / CHUNK) {
            chunk[tag as usize % CHUNK].replace(None);
        }
        self.free.push_back(tag);
    }
}
