// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Completion queues and completion channels.

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

// SAFETY: `raw` is an owned pointer, and libibverbs locks the state of the channel that it changes.
unsafe impl Send for ChannelInner {}
// SAFETY: libibverbs locks the state of the channel that it changes, so calls may come from several threads.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        // SAFETY: the channel is alive and destroyed once. Every queue of the channel keeps it alive, so none is left.
        let result = context.ibverbs().ibv_destroy_comp_channel().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.check_destroyed("ibv_destroy_comp_channel", result, || None);
    }
}

/// Channel that delivers events of completion queues (ibv_create_comp_channel(3)).
///
/// Its file descriptor is readable while an event is pending.
#[derive(Clone, Debug)]
pub struct CompletionChannel(Arc<ChannelInner>);

impl CompletionChannel {
    /// Creates a channel.
    ///
    /// # Errors
    /// The kernel cannot create a channel.
    pub fn new(context: &Context) -> Result<Self> {
        let inner = &context.inner;
        let create = inner.ibverbs().ibv_create_comp_channel()?;
        inner.ibverbs().ibv_destroy_comp_channel()?;
        // SAFETY: the context is open.
        let raw = inner.check_created("ibv_create_comp_channel", unsafe { create(inner.raw.as_ptr()) }, None)?;
        let channel = Self(Arc::new(ChannelInner { raw, context: context.clone() }));
        set_nonblocking(channel.as_fd()).map_err(|errno| inner.error("fcntl", errno.raw_os_error(), None))?;
        Ok(channel)
    }

    /// Returns the queue of the next event, or `None` if no event is pending. Never blocks.
    ///
    /// The event is acknowledged; destroying the queue would otherwise wait for that. The queue generates no further
    /// event until it is armed again ([`CompletionQueue::arm`]).
    ///
    /// # Errors
    /// The channel cannot be read.
    pub fn next_event(&self) -> Result<Option<ObjectId>> {
        let context = &self.0.context.inner;
        let get = context.ibverbs().ibv_get_cq_event()?;
        let acknowledge = context.ibverbs().ibv_ack_cq_events()?;
        let mut queue: *mut ibv_cq = std::ptr::null_mut();
        let mut user: *mut c_void = std::ptr::null_mut();
        // SAFETY: the channel is alive, and both pointers are valid for writes. The queue of the event is alive until
        // the event is acknowledged, because its destruction waits for that.
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
        Ok(Some(ObjectId::from_context(user)))
    }
}

impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive while `self` is borrowed, and its file descriptor is open until it is destroyed.
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

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state of the queue that they change.
unsafe impl Send for CompletionInner {}
// SAFETY: libibverbs and the providers lock the state of the queue that they change.
unsafe impl Sync for CompletionInner {}

impl Drop for CompletionInner {
    fn drop(&mut self) {
        let context = &self.context.inner;
        // SAFETY: the queue is alive and destroyed once. Every queue that completes here keeps it alive, so none is
        // left.
        let result = context.ibverbs().ibv_destroy_cq().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.check_destroyed("ibv_destroy_cq", result, || None);
    }
}

/// Options of a new completion queue.
#[derive(Clone, Debug)]
pub struct CompletionQueueOptions {
    /// Minimum number of entries. The device may round it up.
    pub entries: u32,
    /// Owner in the accounting of queue memory, such as "port 0 receive queue 3".
    pub owner: String,
    /// Channel for events; `None` for a queue that is only polled.
    pub channel: Option<CompletionChannel>,
    /// Completion vector (interrupt), less than [`Context::completion_vectors`].
    pub vector: u32,
}

impl CompletionQueueOptions {
    /// Creates options of a queue without a channel.
    pub fn new(entries: u32, owner: impl Into<String>) -> Self {
        Self { entries, owner: owner.into(), channel: None, vector: 0 }
    }
}

/// Completion queue (ibv_create_cq(3)). Clones refer to the same queue.
#[derive(Clone, Debug)]
pub struct CompletionQueue(pub(crate) Arc<CompletionInner>);

/// Maximum number of entries. Providers compute sizes in 32 bits without an overflow check.
const MAX_CQ_ENTRIES: u32 = 1 << 24;

impl CompletionQueue {
    /// Creates a completion queue.
    ///
    /// # Errors
    /// The size is 0 or above 2²⁴, or the device cannot create the queue.
    pub fn new(context: &Context, options: &CompletionQueueOptions) -> Result<Self> {
        let create = context.inner.ibverbs().ibv_create_cq()?;
        Self::create_with(context, options, "ibv_create_cq", |context, entries, user, channel, vector| {
            // SAFETY: the context is open, and the channel is alive: the queue keeps it. The kernel rejects a channel
            // of another context.
            unsafe { create(context, entries, user, channel, vector) }
        })
    }

    /// Creates a queue with `create`, which gets context, entries, user context, channel and vector. `call` names it
    /// in errors.
    pub(crate) fn create_with(
        context: &Context,
        options: &CompletionQueueOptions,
        call: &'static str,
        create: impl FnOnce(*mut ibv_context, i32, *mut c_void, *mut ibv_comp_channel, i32) -> *mut ibv_cq,
    ) -> Result<Self> {
        if options.entries == 0 || options.entries > MAX_CQ_ENTRIES {
            return Err(Error::InvalidRequest(format!(
                "a completion queue of {} entries; the size must be 1 to {MAX_CQ_ENTRIES}",
                options.entries
            )));
        }
        let inner = &context.inner;
        inner.check_queue_allocator()?;
        inner.ibverbs().ibv_destroy_cq()?;
        let id = ObjectId::new();
        let channel = options.channel.as_ref().map_or(std::ptr::null_mut(), |channel| channel.0.raw.as_ptr());
        let vector = options.vector.cast_signed();
        let charge = charge_to(format!("{}: completions", options.owner));
        let raw = create(inner.raw.as_ptr(), options.entries.cast_signed(), id.to_context(), channel, vector);
        let raw = inner.check_created(call, raw, None)?;
        drop(charge);
        let queue = CompletionInner { raw, context: context.clone(), id, _channel: options.channel.clone() };
        Ok(Self(Arc::new(queue)))
    }

    /// Returns the ID of the queue in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// Returns the number of entries.
    pub fn entries(&self) -> u32 {
        // SAFETY: the queue is alive, and `cqe` never changes, because this crate does not resize queues.
        u32::try_from(unsafe { (*self.0.raw.as_ptr()).cqe }).unwrap_or(0)
    }

    /// Requests an event at the next completion. Poll the queue once more afterwards, because earlier completions
    /// generate no event.
    ///
    /// # Errors
    /// The provider does not support it.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: the queue is alive.
        self.0.context.inner.check("ibv_req_notify_cq", unsafe { ibv_req_notify_cq(self.0.raw.as_ptr(), 0) })
    }
}

/// Work completion of libibverbs (ibv_poll_cq(3)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkCompletion {
    /// ID of the work request (`wr_id`).
    pub request: u64,
    /// `IBV_WC_SUCCESS` or an error (`IBV_WC_*`), see [`crate::status_text`].
    pub status: u32,
    /// Error code of the provider.
    pub vendor_error: u32,
    /// Operation, such as `IBV_WC_SEND` or `IBV_WC_RECV`. Valid only on success.
    pub opcode: u32,
    /// Number of received bytes.
    pub bytes: u32,
    /// Number of the queue pair.
    pub queue_pair: u32,
    /// Flags, such as `IBV_WC_IP_CSUM_OK`.
    pub flags: u32,
}

impl WorkCompletion {
    pub(crate) fn from_raw(raw: &ibv_wc) -> Self {
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
