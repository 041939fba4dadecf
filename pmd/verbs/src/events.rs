// UNSAFETY: calls libibverbs and dereferences the pointers in its events.
#![allow(unsafe_code)]

//! Asynchronous events of a device.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rdma_core_sys::verbs::*;

use crate::{Context, Error, ObjectId, Result};

/// Kind of an asynchronous event, `IBV_EVENT_*` (ibv_get_async_event(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// The device failed, or its service resets it. All objects of the context are invalid.
    DeviceFatal,
    /// A port came up.
    PortActive,
    /// A port went down.
    PortDown,
    /// The speed of a port changed.
    SpeedChange,
    /// A completion queue overran.
    CompletionQueueError,
    /// A queue pair entered the error state.
    QueuePairFatal,
    /// A queue pair received an invalid request.
    QueuePairRequestError,
    /// A queue pair received a request that violates its access rights.
    QueuePairAccessError,
    /// The send queue of a queue pair is drained.
    SendQueueDrained,
    /// A receive queue entered the error state.
    WorkQueueFatal,
    /// Another event, as a number.
    Other(u32),
}

/// Element that an event affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// The whole device.
    Device,
    /// A port, counted from 1.
    Port(u8),
    /// A queue. It may be destroyed in the meantime.
    Queue(ObjectId),
    /// An object that this crate does not create.
    Other,
}

/// Asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// Kind of the event.
    pub kind: EventKind,
    /// Affected element.
    pub element: Element,
}

/// Reader of the asynchronous events of a context, in order. Its file descriptor is readable while an event is pending.
///
/// Reading an event acknowledges it. The destruction of a queue waits until all of its delivered events are
/// acknowledged, so read pending events before queues are dropped. The kernel discards events of the queue that are
/// not yet delivered.
#[derive(Debug)]
pub struct AsyncEvents {
    context: Context,
}

impl AsyncEvents {
    pub(crate) fn claim(context: &Context) -> Result<Self> {
        let ibverbs = context.inner.ibverbs();
        ibverbs.ibv_get_async_event()?;
        ibverbs.ibv_ack_async_event()?;
        if context.inner.events_claimed.swap(true, Ordering::AcqRel) {
            return Err(Error::InvalidRequest(format!(
                "the events of {} already have a reader",
                context.inner.device_name()
            )));
        }
        Ok(Self { context: context.clone() })
    }

    /// Returns the next event, or `None` if no event is pending. Never blocks.
    ///
    /// # Errors
    /// Events cannot be read because the device was removed.
    pub fn next_event(&mut self) -> Result<Option<AsyncEvent>> {
        let inner = &self.context.inner;
        let get = inner.ibverbs().ibv_get_async_event()?;
        let acknowledge = inner.ibverbs().ibv_ack_async_event()?;
        let mut raw = ibv_async_event::zeroed();
        // A short read fails without setting errno.
        // SAFETY: `__errno_location` returns the valid address of this thread's errno.
        unsafe { *libc::__errno_location() = 0 };
        // SAFETY: the context is open, its file descriptor does not block, and `raw` is valid for the write.
        if unsafe { get(inner.raw.as_ptr(), &raw mut raw) } != 0 {
            return match crate::context::last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                0 => Err(inner.invalid_answer("ibv_get_async_event", "a truncated event")),
                errno => Err(inner.error("ibv_get_async_event", errno, None)),
            };
        }
        // SAFETY: the element matches the event type, and it is alive: its destruction waits for the acknowledgement
        // below.
        let event = unsafe { translate(&raw) };
        // SAFETY: `raw` was returned by the call above, and is acknowledged once.
        unsafe { acknowledge(&raw mut raw) };
        Ok(Some(event))
    }
}

impl Drop for AsyncEvents {
    fn drop(&mut self) {
        self.context.inner.events_claimed.store(false, Ordering::Release);
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.context.async_descriptor()
    }
}

/// Converts an event of libibverbs.
///
/// # Safety
/// The caller guarantees that the valid union member is the one of the event type, and that its object is alive.
unsafe fn translate(raw: &ibv_async_event) -> AsyncEvent {
    let kind = match raw.event_type {
        IBV_EVENT_DEVICE_FATAL => EventKind::DeviceFatal,
        IBV_EVENT_PORT_ACTIVE => EventKind::PortActive,
        IBV_EVENT_PORT_ERR => EventKind::PortDown,
        IBV_EVENT_DEVICE_SPEED_CHANGE => EventKind::SpeedChange,
        IBV_EVENT_CQ_ERR => EventKind::CompletionQueueError,
        IBV_EVENT_QP_FATAL => EventKind::QueuePairFatal,
        IBV_EVENT_QP_REQ_ERR => EventKind::QueuePairRequestError,
        IBV_EVENT_QP_ACCESS_ERR => EventKind::QueuePairAccessError,
        IBV_EVENT_SQ_DRAINED => EventKind::SendQueueDrained,
        IBV_EVENT_WQ_FATAL => EventKind::WorkQueueFatal,
        other => EventKind::Other(other),
    };
    // SAFETY: the event type determines the valid union member (ibv_get_async_event(3)). The caller guarantees that
    // this member is valid and that its object is alive.
    let element = unsafe {
        match raw.event_type {
            IBV_EVENT_CQ_ERR => Element::Queue(ObjectId::from_context((*raw.element.cq).cq_context)),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => Element::Queue(ObjectId::from_context((*raw.element.qp).qp_context)),
            IBV_EVENT_WQ_FATAL => Element::Queue(ObjectId::from_context((*raw.element.wq).wq_context)),
            IBV_EVENT_DEVICE_FATAL => Element::Device,
            IBV_EVENT_SRQ_ERR | IBV_EVENT_SRQ_LIMIT_REACHED => Element::Other,
            _ => u8::try_from(raw.element.port_num).map_or(Element::Other, Element::Port),
        }
    };
    AsyncEvent { kind, element }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(event_type: u32, element: ibv_async_event_element) -> AsyncEvent {
        // SAFETY: the tests pass the union member of the event type, with a living object.
        unsafe { translate(&ibv_async_event { element, event_type }) }
    }

    #[test]
    fn event_kinds_map_to_their_element() {
        let port = |port_num| ibv_async_event_element { port_num };
        assert_eq!(
            event(IBV_EVENT_PORT_ERR, port(2)),
            AsyncEvent { kind: EventKind::PortDown, element: Element::Port(2) }
        );
        assert_eq!(event(IBV_EVENT_PORT_ACTIVE, port(-1)).element, Element::Other);
        assert_eq!(event(IBV_EVENT_PORT_ACTIVE, port(256)).element, Element::Other);
        assert_eq!(
            event(IBV_EVENT_DEVICE_FATAL, port(0)),
            AsyncEvent { kind: EventKind::DeviceFatal, element: Element::Device }
        );
        assert_eq!(event(4711, port(1)).kind, EventKind::Other(4711));
        let id = ObjectId::new();
        let mut qp = ibv_qp { qp_context: id.to_context(), ..ibv_qp::zeroed() };
        let mut cq = ibv_cq { cq_context: id.to_context(), ..ibv_cq::zeroed() };
        let mut wq = ibv_wq { wq_context: id.to_context(), ..ibv_wq::zeroed() };
        for (kind, element) in [
            (IBV_EVENT_QP_FATAL, ibv_async_event_element { qp: &raw mut qp }),
            (IBV_EVENT_CQ_ERR, ibv_async_event_element { cq: &raw mut cq }),
            (IBV_EVENT_WQ_FATAL, ibv_async_event_element { wq: &raw mut wq }),
        ] {
            assert_eq!(event(kind, element).element, Element::Queue(id));
        }
        let srq = ibv_async_event_element { srq: std::ptr::null_mut() };
        assert_eq!(event(IBV_EVENT_SRQ_ERR, srq).element, Element::Other);
    }
}
