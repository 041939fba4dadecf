// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Completion queues, and the channels that wake somebody for them.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::charge_to;

use crate::context::set_nonblocking;
use crate::{Context, Error, ObjectId, Result};

#[derive(Debug)]
struct ChannelInner {
    raw: NonNull<ibv_comp_channel>,
    context: Context,
}

// SAFETY: libibverbs locks what it changes.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        // SAFETY: every queue of the channel kept it, and is gone.
        let result = context.ibverbs().ibv_destroy_comp_channel().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.destroyed("ibv_destroy_comp_channel", result, || None);
    }
}

/// Where completion queues announce that they have something (ibv_create_comp_channel(3)). Its descriptor is readable then.
#[derive(Clone, Debug)]
pub struct CompletionChannel(Arc<ChannelInner>);

impl CompletionChannel {
    /// A new channel.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn new(context: &Context) -> Result<Self> {
        let inner = &context.inner;
        let create = inner.ibverbs().ibv_create_comp_channel()?;
        inner.ibverbs().ibv_destroy_comp_channel()?;
        // SAFETY: an open context.
        let raw = inner.created("ibv_create_comp_channel", unsafe { create(inner.raw.as_ptr()) }, None)?;
        let channel = Self(Arc::new(ChannelInner { raw, context: context.clone() }));
        set_nonblocking(channel.as_fd()).map_err(|errno| inner.error("fcntl", errno.raw_os_error(), None))?;
        Ok(channel)
    }

    /// The next queue that announced something, if any did. The announcement is acknowledged, which destroying the queue waits for; the
    /// queue announces nothing more until it is armed again ([`CompletionQueue::arm`]).
    ///
    /// # Errors
    /// The channel cannot be read.
    pub fn next_event(&self) -> Result<Option<ObjectId>> {
        let context = &self.0.context.inner;
        let get = context.ibverbs().ibv_get_cq_event()?;
        let acknowledge = context.ibverbs().ibv_ack_cq_events()?;
        let mut queue: *mut ibv_cq = std::ptr::null_mut();
        let mut user: *mut c_void = std::ptr::null_mut();
        // SAFETY: a living channel; both pointers are written. The queue is destroyed only after the acknowledgement.
        unsafe {
            if get(self.0.raw.as_ptr(), &raw mut queue, &raw mut user) != 0 {
                let errno = crate::context::last_errno();
                return if errno == libc::EAGAIN {
                    Ok(None)
                } else {
                    Err(context.error("ibv_get_cq_event", errno, None))
                };
            }
            acknowledge(queue, 1);
        }
        Ok(Some(ObjectId::of_context(user)))
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open while the channel lives.
        unsafe { BorrowedFd::borrow_raw((*self.0.raw.as_ptr()).fd) }
    }
}

#[derive(Debug)]
pub(crate) struct CompletionInner {
    pub(crate) raw: NonNull<ibv_cq>,
    pub(crate) context: Context,
    id: ObjectId,
    _channel: Option<CompletionChannel>,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for CompletionInner {}
// SAFETY: as above.
unsafe impl Sync for CompletionInner {}

impl Drop for CompletionInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        // SAFETY: every queue that completes here kept it, and is gone.
        let result = context.ibverbs().ibv_destroy_cq().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.destroyed("ibv_destroy_cq", result, || None);
    }
}

/// What a completion queue should be.
#[derive(Clone, Debug)]
pub struct CompletionQueueOptions {
    /// Entries at least; the device may make it longer.
    pub entries: u32,
    /// Whom its memory is charged to, such as "port 0 receive queue 3".
    pub owner: String,
    /// Where it announces, if anybody wants to sleep.
    pub channel: Option<CompletionChannel>,
    /// Interrupt, below [`Context::completion_vectors`].
    pub vector: u32,
}

impl CompletionQueueOptions {
    /// A polled queue.
    pub fn new(entries: u32, owner: impl Into<String>) -> Self {
        Self { entries, owner: owner.into(), channel: None, vector: 0 }
    }
}

/// A queue of completions (ibv_create_cq(3)).
#[derive(Clone, Debug)]
pub struct CompletionQueue(pub(crate) Arc<CompletionInner>);

/// Sizes that the providers compute in 32 bits without a check stay below this.
const MOST_ENTRIES: u32 = 1 << 24;

impl CompletionQueue {
    /// A new queue.
    ///
    /// # Errors
    /// The size is 0 or above 2²⁴, or the device refused.
    pub fn new(context: &Context, options: &CompletionQueueOptions) -> Result<Self> {
        let create = context.inner.ibverbs().ibv_create_cq()?;
        Self::with(context, options, "ibv_create_cq", |context, entries, user, channel, vector| {
            // SAFETY: an open context; a channel of it, which the queue keeps. A channel of another context is refused by the kernel.
            unsafe { create(context, entries, user, channel, vector) }
        })
    }

    /// A new queue, made by `create` from context, entries, user context, channel and vector.
    pub(crate) fn with(
        context: &Context,
        options: &CompletionQueueOptions,
        call: &'static str,
        create: impl FnOnce(*mut ibv_context, i32, *mut c_void, *mut ibv_comp_channel, i32) -> *mut ibv_cq,
    ) -> Result<Self> {
        if options.entries == 0 || options.entries > MOST_ENTRIES {
            return Err(Error::Request(format!(
                "a completion queue of {} entries; 1 to {MOST_ENTRIES} are possible",
                options.entries
            )));
        }
        let inner = &context.inner;
        inner.ready_for_queues()?;
        inner.ibverbs().ibv_destroy_cq()?;
        let id = ObjectId::new();
        let channel = options.channel.as_ref().map_or(std::ptr::null_mut(), |channel| channel.0.raw.as_ptr());
        let vector = options.vector.cast_signed();
        let charge = charge_to(format!("{}: completions", options.owner));
        let raw = create(inner.raw.as_ptr(), options.entries.cast_signed(), id.to_context(), channel, vector);
        let raw = inner.created(call, raw, None)?;
        drop(charge);
        let queue = CompletionInner { raw, context: context.clone(), id, _channel: options.channel.clone() };
        Ok(Self(Arc::new(queue)))
    }

    /// Its name in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// Entries that it has.
    pub fn entries(&self) -> u32 {
        // SAFETY: a living queue; never changed, as nobody resizes it.
        u32::try_from(unsafe { (*self.0.raw.as_ptr()).cqe }).unwrap_or(0)
    }

    /// Asks for an announcement at the next completion. Look into the queue once more afterwards: what came before announces nothing.
    ///
    /// # Errors
    /// The provider refused.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: a living queue.
        self.0.context.inner.done("ibv_req_notify_cq", unsafe { ibv_req_notify_cq(self.0.raw.as_ptr(), 0) })
    }

    /// Takes completions through libibverbs, up to 64 and up to what fits; their number. Not for queues whose memory a driver reads by
    /// itself. Drivers that poll all the time keep [`crate::Completions`].
    ///
    /// # Errors
    /// The provider cannot, or the queue is broken.
    pub fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize> {
        let mut room = crate::Completions::default();
        let taken = room.poll(self, completions.len())?.zip(completions).map(|(from, to)| *to = from);
        Ok(taken.count())
    }
}

/// A completion as libibverbs tells it (ibv_poll_cq(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCompletion {
    /// What the request was named.
    pub request: u64,
    /// `IBV_WC_SUCCESS`, or what went wrong.
    pub status: u32,
    /// The provider's number for what went wrong.
    pub vendor_error: u32,
    /// `IBV_WC_SEND`, `IBV_WC_RECV` and the like; only valid on success.
    pub opcode: u32,
    /// Bytes received.
    pub bytes: u32,
    /// The queue pair.
    pub queue_pair: u32,
    /// `IBV_WC_IP_CSUM_OK` and the like.
    pub flags: u32,
}

impl WorkCompletion {
    pub(crate) fn of(raw: &ibv_wc) -> Self {
        Self {
            request: raw.wr_id,
            status: raw.status,
            vendor_error: raw.vendor_err,
            opcode: raw.opcode,
            bytes: raw.byte_len,
            queue_pair: raw.qp_num,
            flags: raw.wc_flags,
        }
    }
}
