//! State shared by the two ports of a cable: the lanes into each side and the state of the link.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::EventfdFlags;

use super::spsc_ring::{Consumer, Producer, ring};
use wirepath_packet::Packet;

/// Cables that are named in configurations.
static NAMED: LazyLock<Mutex<BTreeMap<String, Weak<Cable>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub(super) struct Cable {
    pub(super) name: String,
    state: Mutex<State>,
    /// Counts the changes of `state`, so that queues read it only after a change.
    generation: AtomicU64,
}

#[derive(Debug)]
struct State {
    taken: [bool; 2],
    lanes: [Option<Arc<Lanes>>; 2],
    /// False if the link is administratively down.
    up: bool,
    cut: bool,
}

/// One end of a cable, owned by one device.
#[derive(Debug)]
pub(super) struct CableEnd {
    pub(super) cable: Arc<Cable>,
    pub(super) side: usize,
}

/// Lanes into one side: one for each of its receive queues.
pub(super) type Lanes = [Lane];

/// Input of one receive queue: a ring from each queue that sends to it, and an eventfd that wakes the
/// sleeping reader.
#[derive(Debug)]
pub(super) struct Lane {
    depth: u32,
    /// Rings that the reader has not taken over.
    new_rings: Mutex<Vec<Consumer<Packet>>>,
    has_new: AtomicBool,
    sleeping: AtomicBool,
    wakeup: OwnedFd,
}

/// State of the other end, as a sender sees it.
#[derive(Debug)]
pub(super) enum PeerState {
    /// The other side receives.
    Receiving(Arc<Lanes>),
    /// The other side is not started, or the link is down.
    Down,
    /// The cable was cut.
    Cut,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code under these locks can panic in the middle of a change, so a poisoned lock is still consistent.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cable {
    pub(super) fn new(name: &str) -> Arc<Self> {
        let state = State { taken: [false; 2], lanes: [None, None], up: true, cut: false };
        Arc::new(Self { name: name.to_owned(), state: Mutex::new(state), generation: AtomicU64::new(0) })
    }

    /// Returns the cable of this name and creates it if no device owns an end.
    pub(super) fn named(name: &str) -> Arc<Self> {
        let mut named = lock(&NAMED);
        named.retain(|_, cable| cable.strong_count() > 0);
        if let Some(cable) = named.get(name).and_then(Weak::upgrade) {
            return cable;
        }
        let cable = Self::new(name);
        named.insert(name.to_owned(), Arc::downgrade(&cable));
        cable
    }

    /// Claims the first free end. `None` if both are in use.
    pub(super) fn claim_end(self: Arc<Self>) -> Option<CableEnd> {
        let mut state = lock(&self.state);
        let side = state.taken.iter().position(|taken| !taken)?;
        state.taken[side] = true;
        drop(state);
        Some(CableEnd { cable: self, side })
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        self.generation.fetch_add(1, Ordering::Release);
        // Pairs with the fence in `Lane::wake_if_sleeping`. Either the sender sees the new generation and
        // drops its ring, which frees the packets in it; or the receiver, which drops its end later, sees the
        // sender's packets.
        fence(Ordering::SeqCst);
    }

    pub(super) fn set_link(&self, up: bool) {
        self.change(|state| state.up = up);
    }

    pub(super) fn cut(&self) {
        self.change(|state| state.cut = true);
    }

    pub(super) fn is_cut(&self) -> bool {
        lock(&self.state).cut
    }
}

impl CableEnd {
    /// Returns the state of the other end.
    pub(super) fn peer_state(&self) -> PeerState {
        let state = lock(&self.cable.state);
        match &state.lanes[1 - self.side] {
            _ if state.cut => PeerState::Cut,
            Some(lanes) if state.up => PeerState::Receiving(Arc::clone(lanes)),
            _ => PeerState::Down,
        }
    }

    /// Starts to receive.
    pub(super) fn open(&self, lanes: Arc<Lanes>) {
        self.cable.change(|state| state.lanes[self.side] = Some(lanes));
    }

    /// Stops receiving. Frees the rings that no receive queue has taken over. The queues free the others when
    /// they are dropped, which must be later.
    pub(super) fn close(&self) {
        let mut lanes = None;
        self.cable.change(|state| lanes = state.lanes[self.side].take());
        for lane in lanes.iter().flat_map(|lanes| lanes.iter()) {
            lock(&lane.new_rings).clear();
        }
    }

    pub(super) fn link_is_up(&self) -> bool {
        let state = lock(&self.cable.state);
        state.up && !state.cut && state.lanes.iter().all(Option::is_some)
    }
}

impl Drop for CableEnd {
    fn drop(&mut self) {
        self.close();
        lock(&self.cable.state).taken[self.side] = false;
    }
}

impl Lane {
    pub(super) fn new(depth: u32) -> rustix::io::Result<Self> {
        let wakeup = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (has_new, sleeping) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { depth, new_rings: Mutex::default(), has_new, sleeping, wakeup })
    }

    /// Adds a ring to this lane and returns its producer.
    pub(super) fn connect(&self) -> Producer<Packet> {
        let (producer, consumer) = ring(self.depth);
        lock(&self.new_rings).push(consumer);
        self.has_new.store(true, Ordering::Release);
        producer
    }

    /// Returns whether there are rings to take over.
    #[inline(always)]
    pub(super) fn has_new_rings(&self) -> bool {
        self.has_new.load(Ordering::Acquire)
    }

    /// Takes over the new rings.
    #[cold]
    pub(super) fn take_new_rings(&self) -> Vec<Consumer<Packet>> {
        let mut new_rings = lock(&self.new_rings);
        self.has_new.store(false, Ordering::Relaxed);
        std::mem::take(&mut new_rings)
    }

    /// Wakes the reader if it sleeps. Senders call this after they have pushed packets.
    #[inline(always)]
    pub(super) fn wake_if_sleeping(&self) {
        // Either the reader sees the packets before it sleeps, or this thread sees that it sleeps. The fence
        // also orders the push before the sender's read of the cable's generation.
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) {
            self.wake_reader();
        }
    }

    #[cold]
    fn wake_reader(&self) {
        // This fails only if the counter is full; the reader is awake then.
        let _ = rustix::io::write(&self.wakeup, &1u64.to_ne_bytes());
    }

    /// Announces that the reader is about to sleep. Returns `None` if `has_packets` finds packets after the
    /// announcement.
    pub(super) fn prepare_sleep(&self, has_packets: impl FnOnce() -> bool) -> Option<BorrowedFd<'_>> {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.has_new_rings() && !has_packets() {
            return Some(self.wakeup.as_fd());
        }
        self.end_sleep();
        None
    }

    /// Marks the reader as awake and clears the eventfd.
    pub(super) fn end_sleep(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.wakeup, &mut [0u8; 8]);
    }
}
