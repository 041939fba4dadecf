//! What two ports share: for each side the lanes that it receives from, and the state of the link.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

use rustix::event::EventfdFlags;

use super::ring::{Consumer, Producer, ring};
use crate::packet::Packet;

/// Cables that configurations name.
static NAMED: LazyLock<Mutex<BTreeMap<String, Weak<Cable>>>> = LazyLock::new(Mutex::default);

#[derive(Debug)]
pub(super) struct Cable {
    pub(super) name: String,
    state: Mutex<State>,
    /// Counts changes of `state`, so that queues look at it only when it changed.
    generation: AtomicU64,
}

#[derive(Debug)]
struct State {
    taken: [bool; 2],
    lanes: [Option<Arc<Lanes>>; 2],
    /// Switched off by hand otherwise.
    up: bool,
    cut: bool,
}

/// One end of a cable, held by one device.
#[derive(Debug)]
pub(super) struct End {
    pub(super) cable: Arc<Cable>,
    pub(super) side: usize,
}

/// What one side receives from: a lane for each of its receive queues.
pub(super) type Lanes = [Lane];

/// Where one receive queue gets its packets: a ring from each queue that sends to it, and the bell that wakes its sleeping reader.
#[derive(Debug)]
pub(super) struct Lane {
    depth: u32,
    /// Rings that the reader has not taken over yet.
    inbox: Mutex<Vec<Consumer<Packet>>>,
    news: AtomicBool,
    asleep: AtomicBool,
    bell: OwnedFd,
}

/// What a sender finds at the other end.
#[derive(Debug)]
pub(super) enum Far {
    /// Somebody receives.
    Lanes(Arc<Lanes>),
    /// The other side is not started, or the link is switched off.
    Down,
    /// The cable was cut.
    Cut,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing in here panics half-way through a change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Cable {
    pub(super) fn new(name: &str) -> Arc<Self> {
        let state = State { taken: [false; 2], lanes: [None, None], up: true, cut: false };
        Arc::new(Self { name: name.to_owned(), state: Mutex::new(state), generation: AtomicU64::new(0) })
    }

    /// The cable of this name, made if nobody holds one.
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

    /// Takes the first free end, or `None` if both are held.
    pub(super) fn take_end(self: Arc<Self>) -> Option<End> {
        let mut state = lock(&self.state);
        let side = state.taken.iter().position(|taken| !taken)?;
        state.taken[side] = true;
        drop(state);
        Some(End { cable: self, side })
    }

    #[inline(always)]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        self.generation.fetch_add(1, Ordering::Release);
        // Pairs with the fence in `Lane::published`: a sender sees the new generation and lets go of the ring, which frees what is in
        // it, or the receiver, which lets go later, sees what the sender pushed.
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

impl End {
    /// What a sender at this end finds at the other.
    pub(super) fn far(&self) -> Far {
        let state = lock(&self.cable.state);
        match &state.lanes[1 - self.side] {
            _ if state.cut => Far::Cut,
            Some(lanes) if state.up => Far::Lanes(Arc::clone(lanes)),
            _ => Far::Down,
        }
    }

    /// Starts to receive.
    pub(super) fn open(&self, lanes: Arc<Lanes>) {
        self.cable.change(|state| state.lanes[self.side] = Some(lanes));
    }

    /// Stops receiving. What the receive queues have not taken over is freed here; the rest when they are dropped, which must be later.
    pub(super) fn close(&self) {
        let mut lanes = None;
        self.cable.change(|state| lanes = state.lanes[self.side].take());
        for lane in lanes.iter().flat_map(|lanes| lanes.iter()) {
            lock(&lane.inbox).clear();
        }
    }

    pub(super) fn link_is_up(&self) -> bool {
        let state = lock(&self.cable.state);
        state.up && !state.cut && state.lanes.iter().all(Option::is_some)
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.close();
        lock(&self.cable.state).taken[self.side] = false;
    }
}

impl Lane {
    pub(super) fn new(depth: u32) -> rustix::io::Result<Self> {
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let (news, asleep) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Self { depth, inbox: Mutex::default(), news, asleep, bell })
    }

    /// A ring into this lane.
    pub(super) fn connect(&self) -> Producer<Packet> {
        let (producer, consumer) = ring(self.depth);
        lock(&self.inbox).push(consumer);
        self.news.store(true, Ordering::Release);
        producer
    }

    /// Whether there are rings to take over.
    #[inline(always)]
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    /// Takes the new rings over.
    #[cold]
    pub(super) fn take_news(&self) -> Vec<Consumer<Packet>> {
        let mut inbox = lock(&self.inbox);
        self.news.store(false, Ordering::Relaxed);
        std::mem::take(&mut inbox)
    }

    /// To be called after packets were pushed: wakes the reader if it sleeps.
    #[inline(always)]
    pub(super) fn published(&self) {
        // Either the reader sees the packets before it sleeps, or its wish to be woken is seen here. The same fence orders the push
        // before the sender's look at the cable's generation.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) {
            self.ring();
        }
    }

    #[cold]
    fn ring(&self) {
        // Fails only if the counter is full, and then the reader is awake.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }

    /// Announces that the reader goes to sleep; `None` if there are packets, as `has_packets` finds after the announcement.
    pub(super) fn sleep(&self, has_packets: impl FnOnce() -> bool) -> Option<BorrowedFd<'_>> {
        self.asleep.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !self.has_news() && !has_packets() {
            return Some(self.bell.as_fd());
        }
        self.wake_up();
        None
    }

    /// The reader is awake.
    pub(super) fn wake_up(&self) {
        self.asleep.store(false, Ordering::Relaxed);
        let _ = rustix::io::read(&self.bell, &mut [0u8; 8]);
    }
}
