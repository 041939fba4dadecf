// UNSAFETY: calls libhbl and libibverbs.
#![allow(unsafe_code)]

//! Reliable queue pairs, state by state.

use std::marker::PhantomData;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::hbldv::*;
use rdma_core_sys::verbs::*;

use super::{Completions, Encap, Port};
use crate::domain::DomainInner;
use crate::{CompletionQueue, Error, ProtectionDomain, Result};

/// A queue pair as it was made.
#[derive(Debug)]
pub struct Created;
/// Bound to its port.
#[derive(Debug)]
pub struct Initialized;
/// Knows its peer and receives.
#[derive(Debug)]
pub struct Receiving;
/// Receives and sends.
#[derive(Debug)]
pub struct Sending;

/// Sizes of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Requests to send.
    pub send_requests: u32,
    /// Requests to receive.
    pub receive_requests: u32,
}

/// What the work queues are for (`HBLDV_WQ_*`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WorkQueueKind {
    /// Writes.
    #[default]
    Write,
    /// Rendezvous, receiving side.
    ReceiveRendezvous,
    /// Rendezvous by reading.
    ReadRendezvous,
    /// Rendezvous, sending side.
    SendRendezvous,
    /// End point of rendezvous by reading.
    ReadRendezvousEndPoint,
}

impl WorkQueueKind {
    fn code(self) -> u32 {
        match self {
            Self::Write => HBLDV_WQ_WRITE,
            Self::ReceiveRendezvous => HBLDV_WQ_RECV_RDV,
            Self::ReadRendezvous => HBLDV_WQ_READ_RDV,
            Self::SendRendezvous => HBLDV_WQ_SEND_RDV,
            Self::ReadRendezvousEndPoint => HBLDV_WQ_READ_RDV_ENDP,
        }
    }
}

/// The queue pair at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub address: Ipv4Addr,
    /// Its number.
    pub queue_pair: u32,
}

/// What the receiving side needs (to RTR).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Responder {
    /// The other end.
    pub peer: Peer,
    /// Entry of the port's address table to answer from.
    pub source_index: u8,
    /// `IBV_MTU_*`.
    pub path_mtu: u32,
    /// First sequence number that is expected.
    pub sequence: u32,
    /// Key of local memory.
    pub local_key: u32,
    /// 1 to 3 on Gaudi 2.
    pub priority: u8,
}

/// What the sending side needs (to RTS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    /// First sequence number.
    pub sequence: u32,
    /// Timeout, as `4.096 µs × 2^timeout`.
    pub timeout: u8,
    /// Retries.
    pub retries: u8,
    /// Key of the peer's memory.
    pub remote_key: u32,
    /// Entries of the peer's work queue for rendezvous: a power of two, or 0.
    pub peer_requests: u32,
    /// 1 to 3 on Gaudi 2.
    pub priority: u8,
}

#[derive(Debug)]
struct Inner {
    raw: NonNull<ibv_qp>,
    // Kept: what the pair was made from, and the encapsulation that it uses.
    domain: Arc<DomainInner>,
    _completions: [CompletionQueue; 2],
    encap: Option<Encap>,
    port: Port,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: made by a creation, dropped once.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        let encap = self.encap.take();
        // A pair that stays keeps its encapsulation.
        context.destroyed("ibv_destroy_qp", result, || encap.map(|encap| Box::new(encap) as _));
    }
}

/// A reliable queue pair of a port. A transition that is refused ends it.
#[derive(Debug)]
pub struct QueuePair<State> {
    inner: Inner,
    state: PhantomData<State>,
}

impl<State> QueuePair<State> {
    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: a living pair.
        unsafe { (*self.inner.raw.as_ptr()).qp_num }
    }

    /// The encapsulation that its packets get.
    pub fn encap(&self) -> Option<&Encap> {
        self.inner.encap.as_ref()
    }

    fn modify<Next>(self, attr: &mut ibv_qp_attr, mask: u32, hbl: &mut hbldv_qp_attr) -> Result<QueuePair<Next>> {
        let modify = self.inner.port.hbl.library()?.hbldv_modify_qp()?;
        // In each transition that reads it, and with the bit: a number without it is refused, or the port's default used.
        if let Some(encap) = self.inner.encap.as_ref().filter(|_| attr.qp_state != IBV_QPS_INIT) {
            hbl.caps |= HBLDV_QP_CAP_ENCAP;
            hbl.encap_num = encap.id();
        }
        // SAFETY: a living pair of libhbl, and attributes that it reads.
        let result = unsafe { modify(self.inner.raw.as_ptr(), attr, (mask | IBV_QP_STATE).cast_signed(), hbl) };
        self.inner.domain.context.inner.done("hbldv_modify_qp", result)?;
        Ok(QueuePair { inner: self.inner, state: PhantomData })
    }
}

impl Port {
    /// A queue pair that completes in queues of the same port.
    ///
    /// # Errors
    /// Something is of another device or port, or the device refused.
    pub fn queue_pair(
        &self,
        domain: &ProtectionDomain,
        send: &Completions,
        receive: &Completions,
        options: &QueuePairOptions,
    ) -> Result<QueuePair<Created>> {
        let context = &self.hbl.context().inner;
        for queue in [send, receive] {
            if queue.port != self.number || !Arc::ptr_eq(&queue.queue.0.context.inner, context) {
                return Err(Error::Request(format!("a queue pair of port {} completes in queues of it", self.number)));
            }
        }
        if !Arc::ptr_eq(&domain.0.context.inner, context) {
            return Err(Error::Request("a queue pair lies in a domain of its own device".to_owned()));
        }
        let create = context.ibverbs().ibv_create_qp()?;
        context.ibverbs().ibv_destroy_qp()?;
        let mut attr = ibv_qp_init_attr::zeroed();
        attr.send_cq = send.queue.0.raw.as_ptr();
        attr.recv_cq = receive.queue.0.raw.as_ptr();
        attr.cap.max_send_wr = options.send_requests;
        attr.cap.max_recv_wr = options.receive_requests;
        attr.cap.max_send_sge = 1;
        attr.cap.max_recv_sge = 1;
        attr.qp_type = IBV_QPT_RC;
        // SAFETY: objects of one living context.
        let raw = unsafe { create(domain.0.raw.as_ptr(), &raw mut attr) };
        let raw = context.created("ibv_create_qp", raw, u8::try_from(self.number).ok())?;
        let inner = Inner {
            raw,
            domain: Arc::clone(&domain.0),
            _completions: [send.queue.clone(), receive.queue.clone()],
            encap: None,
            port: self.clone(),
        };
        Ok(QueuePair { inner, state: PhantomData })
    }
}

impl QueuePair<Created> {
    /// Binds the pair to its port. `wide`: send requests of 64 bytes.
    ///
    /// # Errors
    /// The device refused.
    pub fn initialize(self, kind: WorkQueueKind, wide: bool) -> Result<QueuePair<Initialized>> {
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_INIT, ..ibv_qp_attr::zeroed() };
        attr.port_num = self.inner.port.number as u8;
        let mut hbl = hbldv_qp_attr {
            wq_type: kind.code(),
            wq_granularity: if wide { HBLDV_SWQE_GRAN_64B } else { HBLDV_SWQE_GRAN_32B },
            ..hbldv_qp_attr::zeroed()
        };
        self.modify(&mut attr, IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS, &mut hbl)
    }
}

impl QueuePair<Initialized> {
    /// Connects the pair with its peer and receives. Packets carry `encap` from here on, if there is one.
    ///
    /// # Errors
    /// The encapsulation is of another port; the device refused.
    pub fn receive(mut self, responder: &Responder, encap: Option<&Encap>) -> Result<QueuePair<Receiving>> {
        if let Some(encap) = encap {
            self.inner.port.check_encap(encap)?;
        }
        self.inner.encap = encap.cloned();
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RTR, ..ibv_qp_attr::zeroed() };
        attr.path_mtu = responder.path_mtu;
        attr.dest_qp_num = responder.peer.queue_pair;
        attr.rq_psn = responder.sequence;
        attr.max_dest_rd_atomic = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = self.inner.port.number as u8;
        attr.ah_attr.grh.sgid_index = responder.source_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr.ah_attr.grh.dgid.raw = responder.peer.address.to_ipv6_mapped().octets();
        let mut hbl =
            hbldv_qp_attr { local_key: responder.local_key, priority: responder.priority, ..hbldv_qp_attr::zeroed() };
        let mask = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attr, mask, &mut hbl)
    }
}

impl QueuePair<Receiving> {
    /// Sends as well, in the same encapsulation.
    ///
    /// # Errors
    /// The device refused.
    pub fn send(self, requester: &Requester) -> Result<QueuePair<Sending>> {
        if requester.peer_requests != 0 && !requester.peer_requests.is_power_of_two() {
            let problem = format!("a peer's work queue of {} entries; a power of two, or 0", requester.peer_requests);
            return Err(Error::Request(problem));
        }
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_RTS, ..ibv_qp_attr::zeroed() };
        attr.timeout = requester.timeout;
        attr.retry_cnt = requester.retries;
        attr.rnr_retry = requester.retries;
        attr.sq_psn = requester.sequence;
        attr.max_rd_atomic = 1;
        let mut hbl = hbldv_qp_attr {
            remote_key: requester.remote_key,
            dest_wq_size: requester.peer_requests,
            priority: requester.priority,
            ..hbldv_qp_attr::zeroed()
        };
        let mask = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attr, mask, &mut hbl)
    }
}
