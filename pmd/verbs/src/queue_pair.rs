// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Raw packet queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::charge_to;

use crate::domain::{Domain, DomainInner};
use crate::{CompletionQueue, Error, Fate, ObjectId, Result};

/// Sizes of the queues of a pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSizes {
    /// Send requests that may be outstanding.
    pub send_requests: u32,
    /// Segments of one.
    pub send_segments: u32,
    /// Receive requests that may be outstanding.
    pub receive_requests: u32,
    /// Segments of one.
    pub receive_segments: u32,
    /// Bytes that may be inside a send request instead of behind a pointer.
    pub inline_bytes: u32,
}

/// What a queue pair should be.
#[derive(Clone, Debug)]
pub struct RawPacketQpOptions {
    /// Where sends complete.
    pub send_completions: CompletionQueue,
    /// Where receptions complete; may be the same.
    pub receive_completions: CompletionQueue,
    /// Sizes at least; [`RawPacketQp::sizes`] says what came of it.
    pub sizes: QueueSizes,
    /// Whether every send completes, or only those that ask for it.
    pub signal_all: bool,
    /// Bytes of the headers before a segmented payload; 0: no segmentation.
    pub max_tso_header: u16,
    /// `IBV_QP_CREATE_*`.
    pub create_flags: u32,
    /// Whom its memory is charged to.
    pub owner: String,
}

impl RawPacketQpOptions {
    /// A pair for sending only.
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

/// State of a queue pair, `IBV_QPS_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueuePairState {
    /// Nothing works; the start, and the way out of an error.
    Reset,
    /// Bound to its port.
    Initialized,
    /// Ready to receive.
    ReadyToReceive,
    /// Ready to send.
    ReadyToSend,
    /// Everything outstanding is flushed.
    Error,
}

#[derive(Debug)]
pub(crate) struct QueuePairInner {
    pub(crate) raw: NonNull<ibv_qp>,
    pub(crate) domain: Arc<DomainInner>,
    id: ObjectId,
    sizes: QueueSizes,
    fate: Fate,
    _completions: [CompletionQueue; 2],
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for QueuePairInner {}
// SAFETY: as above.
unsafe impl Sync for QueuePairInner {}

impl Drop for QueuePairInner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: made by a creation, dropped once; views of its memory kept it alive.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        if context.destroyed("ibv_destroy_qp", result, || None) {
            self.fate.set_gone();
        }
    }
}

/// A queue pair of raw Ethernet frames (ibv_create_qp(3), `IBV_QPT_RAW_PACKET`). Clones are the same one.
#[derive(Clone, Debug)]
pub struct RawPacketQp(pub(crate) Arc<QueuePairInner>);

/// Largest queue whose size in bytes every provider computes without overflow.
const MOST_BYTES: u64 = 1 << 31;

/// Refuses sizes that a provider would compute wrongly: `requests` of `segments` each.
pub(crate) fn check_size(what: &str, requests: u32, segments: u32) -> Result<()> {
    let bytes = u64::from(requests).saturating_mul(u64::from(segments) * 16 + 64);
    if bytes > MOST_BYTES {
        return Err(Error::Request(format!("a {what} of {requests} requests of {segments} segments is too large")));
    }
    Ok(())
}

impl RawPacketQp {
    /// A new pair. On MANA it is live at once, and `domain` must be the parent domain of the port; elsewhere it starts in
    /// [`QueuePairState::Reset`].
    ///
    /// # Errors
    /// The device refused: `CAP_NET_RAW` is missing ([`crate::Cause::Capability`]), or the kernel holds the port
    /// ([`crate::Cause::PortHeld`]).
    pub fn new(domain: &impl Domain, options: &RawPacketQpOptions) -> Result<Self> {
        let domain = domain.inner();
        let context = &domain.context.inner;
        let completions = [&options.send_completions, &options.receive_completions];
        if completions.iter().any(|queue| !Arc::ptr_eq(&queue.0.context.inner, context)) {
            return Err(Error::Request("a queue pair completes in queues of its own device only".to_owned()));
        }
        context.ready_for_queues()?;
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
            // The extended attributes start as the plain ones do (verbs.h relies on it).
            // SAFETY: objects of one living context.
            let raw = unsafe { create(domain.raw.as_ptr(), (&raw mut attr).cast()) };
            context.created("ibv_create_qp", raw, domain.port)?
        } else {
            // SAFETY: as above.
            let raw = unsafe { ibv_create_qp_ex(context.raw.as_ptr(), &raw mut attr) };
            context.created("ibv_create_qp_ex", raw, domain.port)?
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
            fate: Fate::default(),
            _completions: completions,
        })))
    }

    /// Its name in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// The number that the device knows it by.
    pub fn number(&self) -> u32 {
        // SAFETY: a living pair; set at creation.
        unsafe { (*self.0.raw.as_ptr()).qp_num }
    }

    /// Tells whether it was destroyed, once this and everything that keeps it is dropped.
    pub fn fate(&self) -> Fate {
        self.0.fate.clone()
    }

    /// The sizes that it has.
    pub fn sizes(&self) -> QueueSizes {
        self.0.sizes
    }

    /// Moves it on. `port`, counted from 1, is bound on the way to [`QueuePairState::Initialized`].
    ///
    /// # Errors
    /// The transition is not possible from where it is. MANA's raw pairs have none: they are live from the start.
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
        // SAFETY: a living pair.
        let result = unsafe { modify(self.0.raw.as_ptr(), &raw mut attr, mask.cast_signed()) };
        context.done("ibv_modify_qp", result)
    }

    /// From whatever state to sending: reset, bound to the port, ready.
    ///
    /// # Errors
    /// A transition was refused.
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
