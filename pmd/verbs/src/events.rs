// UNSAFETY: calls libibverbs and follows the pointers in its events.
#![allow(unsafe_code)]

//! What happens to a device by itself.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;

use rdma_core_sys::verbs::*;

use crate::{Context, Error, ObjectId, Result};

/// What happened, `IBV_EVENT_*` (ibv_get_async_event(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// The device is broken, or is reset by its service: everything of the context is void.
    DeviceFatal,
    /// The port is up.
    PortActive,
    /// The port is down.
    PortDown,
    /// The port has another speed.
    SpeedChange,
    /// A completion queue overran.
    CompletionQueueError,
    /// A queue pair is in the error state.
    QueuePairFatal,
    /// A queue pair got a request that it cannot fulfil.
    QueuePairRequestError,
    /// A queue pair got a request that it must not fulfil.
    QueuePairAccessError,
    /// A queue pair has sent everything.
    SendQueueDrained,
    /// A receive queue is in the error state.
    WorkQueueFatal,
    /// Anything else, by number.
    Other(u32),
}

/// To what it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// The whole device.
    Device,
    /// A port, counted from 1.
    Port(u8),
    /// A queue, by its id; it may have gone meanwhile.
    Queue(ObjectId),
    /// Something that this crate does not make.
    Other,
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What.
    pub kind: EventKind,
    /// To what.
    pub element: Element,
}

/// The events of a context, in order. Its descriptor is readable when there are some.
///
/// Taking an event acknowledges it: the destruction of a queue waits until all of its events are taken, so whoever has the stream should
/// look into it before queues go. Those that the kernel still holds go with the queue.
#[derive(Debug)]
pub struct AsyncEvents {
    context: Context,
}

impl AsyncEvents {
    pub(crate) fn take(context: &Context) -> Result<Self> {
        let ibverbs = context.inner.ibverbs();
        ibverbs.ibv_get_async_event()?;
        ibverbs.ibv_ack_async_event()?;
        if context.inner.events_taken.swap(true, Ordering::AcqRel) {
            return Err(Error::Request(format!("the events of {} have a reader already", context.inner.device_name())));
        }
        Ok(Self { context: context.clone() })
    }

    /// The next event, if there is one; never waits.
    ///
    /// # Errors
    /// Events cannot be read: the device is gone.
    pub fn next_event(&mut self) -> Result<Option<AsyncEvent>> {
        let inner = &self.context.inner;
        let get = inner.ibverbs().ibv_get_async_event()?;
        let acknowledge = inner.ibverbs().ibv_ack_async_event()?;
        let mut raw = ibv_async_event::zeroed();
        // A short read fails without an errno of its own.
        // SAFETY: the address of this thread's errno.
        unsafe { *libc::__errno_location() = 0 };
        // SAFETY: an open context, whose descriptor does not block; the event is written.
        if unsafe { get(inner.raw.as_ptr(), &raw mut raw) } != 0 {
            return match crate::context::last_errno() {
                libc::EAGAIN | libc::EINTR => Ok(None),
                0 => Err(inner.nonsense("ibv_get_async_event", "an event that is cut short")),
                errno => Err(inner.error("ibv_get_async_event", errno, None)),
            };
        }
        // SAFETY: not acknowledged yet: the queue that it names cannot have been destroyed.
        let event = unsafe { translate(&raw) };
        // SAFETY: taken above, acknowledged once.
        unsafe { acknowledge(&raw mut raw) };
        Ok(Some(event))
    }
}

impl Drop for AsyncEvents {
    fn drop(&mut self) {
        self.context.inner.events_taken.store(false, Ordering::Release);
    }
}

impl AsFd for AsyncEvents {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.context.async_descriptor()
    }
}

/// What the event says.
///
/// # Safety
/// The element is what the type says, and alive.
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
    // SAFETY: the caller's contract. Which member is valid goes by the type, see ibv_get_async_event(3).
    let element = unsafe {
        match raw.event_type {
            IBV_EVENT_CQ_ERR => Element::Queue(ObjectId::of_context((*raw.element.cq).cq_context)),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_PATH_MIG
            | IBV_EVENT_PATH_MIG_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => Element::Queue(ObjectId::of_context((*raw.element.qp).qp_context)),
            IBV_EVENT_WQ_FATAL => Element::Queue(ObjectId::of_context((*raw.element.wq).wq_context)),
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
        // SAFETY: the tests give what the type wants.
        unsafe { translate(&ibv_async_event { element, event_type }) }
    }

    #[test]
    fn each_kind_names_what_it_happened_to() {
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
