// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Raw-packet queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::charge_to;

use crate::domain::{Domain, DomainInner};
use crate::{CompletionQueue, DestroyedFlag, Error, ObjectId, Result};

/// Queue sizes of a queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSizes {
    /// Maximum number of outstanding send requests.
    pub send_requests: u32,
    /// Maximum number of segments in a send request.
    pub send_segments: u32,
    /// Maximum number of outstanding receive requests.
    pub receive_requests: u32,
    /// Maximum number of segments in a receive request.
    pub receive_segments: u32,
    /// Maximum inline data of a send request in bytes.
    pub inline_bytes: u32,
}

/// Options of a new raw-packet queue pair.
#[derive(Clone, Debug)]
pub struct RawPacketQpOptions {
    /// Completion queue of send requests.
    pub send_completions: CompletionQueue,
    /// Completion queue of receive requests. It may be the same queue.
    pub receive_completions: CompletionQueue,
    /// Minimum sizes. [`RawPacketQp::sizes`] returns the granted sizes.
    pub sizes: QueueSizes,
    /// True if every send request generates a completion, false if only requests with the flag do.
    pub signal_all: bool,
    /// Maximum header bytes of a TSO request; 0 disables TSO.
    pub max_tso_header: u16,
    /// Creation flags `IBV_QP_CREATE_*`.
    pub create_flags: u32,
    /// Owner in the accounting of queue memory.
    pub owner: String,
}

impl RawPacketQpOptions {
    /// Creates options of a pair for sending only.
    pub fn send(completions: &CompletionQueue, requests: u32, segments: u32, owner: impl Into<String>) -> Self {
        Self {
            send_completions: completions.clone(),
            receive_completions: completions.clone(),
            sizes: QueueSizes { send_requests: requests, send_segments: segments, ..QueueSizes::default() },
            signal_all: false,
            max_tso_header: 0,
            create_flags: 0,
            owner: owner.into(),
        }
    }
}

/// State of a queue pair (`IBV_QPS_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Initial state, and the state for recovery from an error. The queues do not work.
    Reset,
    /// Bound to its port.
    Initialized,
    /// Ready to receive.
    ReadyToReceive,
    /// Ready to send.
    ReadyToSend,
    /// Error: all outstanding requests are flushed.
    Error,
}

#[derive(Debug)]
pub(crate) struct QueuePairInner {
    pub(crate) raw: NonNull<ibv_qp>,
    pub(crate) domain: Arc<DomainInner>,
    id: ObjectId,
    sizes: QueueSizes,
    destroyed: DestroyedFlag,
    _completions: [CompletionQueue; 2],
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for QueuePairInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for QueuePairInner {}

impl Drop for QueuePairInner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: the pair is alive and is destroyed once. Views of its memory keep it alive, so none is left.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        if context.check_destroyed("ibv_destroy_qp", result, || None) {
            self.destroyed.set();
        }
    }
}

/// Queue pair for raw Ethernet frames (ibv_create_qp(3), `IBV_QPT_RAW_PACKET`). Clones refer to the same pair.
#[derive(Clone, Debug)]
pub struct RawPacketQp(pub(crate) Arc<QueuePairInner>);

/// Maximum queue size in bytes. Every provider computes sizes up to this without overflow.
const MAX_QUEUE_BYTES: u64 = 1 << 31;

/// Rejects a queue of `requests` requests of `segments` segments each if a provider would compute its size wrongly.
pub(crate) fn check_size(what: &str, requests: u32, segments: u32) -> Result<()> {
    let bytes = u64::from(requests).saturating_mul(u64::from(segments) * 16 + 64);
    if bytes > MAX_QUEUE_BYTES {
        return Err(Error::InvalidRequest(format!(
            "a {what} of {requests} requests of {segments} segments is too large"
        )));
    }
    Ok(())
}

impl RawPacketQp {
    /// Creates a queue pair.
    ///
    /// On MANA, `domain` must be the parent domain of the port, and the pair is live when it is created. On other
    /// devices, it starts in [`QueuePairState::Reset`].
    ///
    /// # Errors
    /// `CAP_NET_RAW` is missing ([`crate::Cause::Capability`]), the kernel uses the port
    /// ([`crate::Cause::PortBusy`]), or the device does not support the options.
    pub fn new(domain: &impl Domain, options: &RawPacketQpOptions) -> Result<Self> {
        let domain = domain.inner();
        let context = &domain.context.inner;
        let completions = [&options.send_completions, &options.receive_completions];
        if completions.iter().any(|queue| !Arc::ptr_eq(&queue.0.context.inner, context)) {
            return Err(Error::InvalidRequest(
                "the completion queues of a queue pair must belong to its own device".to_owned(),
            ));
        }
        context.check_queue_allocator()?;
        let sizes = options.sizes;
        check_size("send queue", sizes.send_requests, sizes.send_segments.max(sizes.inline_bytes / 16))?;
        check_size("receive queue", sizes.receive_requests, sizes.receive_segments)?;
        let ibverbs = context.ibverbs();
        let create = ibverbs.ibv_create_qp()?;
        ibverbs.ibv_destroy_qp()?;
        let id = ObjectId::new();
        let mut attr = ibv_qp_init_attr_ex {
            qp_context: id.to_context(),
            send_cq: options.send_completions.0.raw.as_ptr(),
            recv_cq: options.receive_completions.0.raw.as_ptr(),
            cap: ibv_qp_cap {
                max_send_wr: sizes.send_requests,
                max_recv_wr: sizes.receive_requests,
                max_send_sge: sizes.send_segments,
                max_recv_sge: sizes.receive_segments,
                max_inline_data: sizes.inline_bytes,
            },
            qp_type: IBV_QPT_RAW_PACKET,
            sq_sig_all: options.signal_all.into(),
            comp_mask: IBV_QP_INIT_ATTR_PD,
            pd: domain.raw.as_ptr(),
            ..ibv_qp_init_attr_ex::zeroed()
        };
        if options.max_tso_header != 0 {
            attr.comp_mask |= IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
            attr.max_tso_header = options.max_tso_header;
        }
        if options.create_flags != 0 {
            attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
            attr.create_flags = options.create_flags;
        }
        let _charge = charge_to(format!("{}: requests", options.owner));
        let raw = if attr.comp_mask == IBV_QP_INIT_ATTR_PD {
            // The extended attributes start with the plain ones; verbs.h relies on this.
            // SAFETY: `attr` contains living objects of one open context.
            let raw = unsafe { create(domain.raw.as_ptr(), (&raw mut attr).cast()) };
            context.check_created("ibv_create_qp", raw, domain.port)?
        } else {
            // SAFETY: `attr` contains living objects of one open context.
            let raw = unsafe { ibv_create_qp_ex(context.raw.as_ptr(), &raw mut attr) };
            context.check_created("ibv_create_qp_ex", raw, domain.port)?
        };
        let sizes = QueueSizes {
            send_requests: attr.cap.max_send_wr,
            send_segments: attr.cap.max_send_sge,
            receive_requests: attr.cap.max_recv_wr,
            receive_segments: attr.cap.max_recv_sge,
            inline_bytes: attr.cap.max_inline_data,
        };
        let completions = completions.map(CompletionQueue::clone);
        Ok(Self(Arc::new(QueuePairInner {
            raw,
            domain: Arc::clone(domain),
            id,
            sizes,
            destroyed: DestroyedFlag::default(),
            _completions: completions,
        })))
    }

    /// Returns the ID of the queue pair in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// Returns the queue pair number of the device.
    pub fn number(&self) -> u32 {
        // SAFETY: the pair is alive, and `qp_num` does not change after its creation.
        unsafe { (*self.0.raw.as_ptr()).qp_num }
    }

    /// Returns the flag that is set when the pair is destroyed, after the last handle is dropped.
    pub fn destroyed_flag(&self) -> DestroyedFlag {
        self.0.destroyed.clone()
    }

    /// Returns the granted sizes.
    pub fn sizes(&self) -> QueueSizes {
        self.0.sizes
    }

    /// Changes the state. The transition to [`QueuePairState::Initialized`] binds the pair to `port`, counted from 1.
    ///
    /// # Errors
    /// The transition is not possible from the current state. Raw-packet pairs of MANA have no transitions: they are
    /// always live.
    pub fn set_state(&self, state: QueuePairState, port: u8) -> Result<()> {
        let context = &self.0.domain.context.inner;
        let modify = context.ibverbs().ibv_modify_qp()?;
        let mut attr = ibv_qp_attr::zeroed();
        let mut mask = IBV_QP_STATE;
        attr.qp_state = match state {
            QueuePairState::Reset => IBV_QPS_RESET,
            QueuePairState::Initialized => {
                mask |= IBV_QP_PORT;
                attr.port_num = port;
                IBV_QPS_INIT
            }
            QueuePairState::ReadyToReceive => IBV_QPS_RTR,
            QueuePairState::ReadyToSend => IBV_QPS_RTS,
            QueuePairState::Error => IBV_QPS_ERR,
        };
        // SAFETY: the pair is alive, and `attr` is valid during the call.
        let result = unsafe { modify(self.0.raw.as_ptr(), &raw mut attr, mask.cast_signed()) };
        context.check("ibv_modify_qp", result)
    }

    /// Moves the pair from any state to [`QueuePairState::ReadyToSend`] by way of reset.
    ///
    /// # Errors
    /// A transition failed.
    pub fn start(&self, port: u8) -> Result<()> {
        use QueuePairState::{Initialized, ReadyToReceive, ReadyToSend, Reset};
        for state in [Reset, Initialized, ReadyToReceive, ReadyToSend] {
            self.set_state(state, port)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_would_overflow_in_c_are_refused() {
        assert!(check_size("send queue", 8192, 31).is_ok());
        assert!(check_size("send queue", 0, 0).is_ok());
        for (requests, segments) in [(u32::MAX, 1), (1 << 20, 256), (1, u32::MAX), (u32::MAX, u32::MAX)] {
            let error = check_size("send queue", requests, segments).unwrap_err().to_string();
            assert!(error.ends_with("is too large"), "{error}");
        }
    }
}
