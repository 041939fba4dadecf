// UNSAFETY: calls libhbl and libibverbs.
#![allow(unsafe_code)]

//! Reliable queue pairs, with one type for each state.

use std::marker::PhantomData;
use std::net::Ipv4Addr;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::hbldv::*;
use rdma_core_sys::verbs::*;

use super::{Encap, Port, PortCompletionQueue};
use crate::domain::DomainInner;
use crate::{CompletionQueue, Error, ProtectionDomain, Result};

/// State: created (reset).
#[derive(Debug)]
pub struct Created;
/// State: initialized, bound to its port.
#[derive(Debug)]
pub struct Initialized;
/// State: ready to receive (RTR), connected to its peer.
#[derive(Debug)]
pub struct ReadyToReceive;
/// State: ready to send (RTS). It also receives.
#[derive(Debug)]
pub struct ReadyToSend;

/// Options of a new queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairOptions {
    /// Maximum number of outstanding send requests.
    pub send_requests: u32,
    /// Maximum number of outstanding receive requests.
    pub receive_requests: u32,
}

/// Purpose of the work queues (`HBLDV_WQ_*`).
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

/// Remote queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// IPv4 address.
    pub address: Ipv4Addr,
    /// Queue pair number.
    pub queue_pair: u32,
}

/// Parameters of the responder, for the transition to RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Responder {
    /// Remote queue pair.
    pub peer: Peer,
    /// Index of the source address in the port's GID table.
    pub source_index: u8,
    /// Path MTU, one of `IBV_MTU_*`.
    pub path_mtu: u32,
    /// First expected packet sequence number.
    pub sequence: u32,
    /// Key of local memory.
    pub local_key: u32,
    /// Priority; 1 to 3 on Gaudi 2.
    pub priority: u8,
}

/// Parameters of the requester, for the transition to RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    /// First packet sequence number.
    pub sequence: u32,
    /// Timeout, as `4.096 µs × 2^timeout`.
    pub timeout: u8,
    /// Number of retries.
    pub retries: u8,
    /// Key of the peer's memory.
    pub remote_key: u32,
    /// Number of entries in the peer's work queue for rendezvous. It is a power of two or 0.
    pub peer_requests: u32,
    /// Priority; 1 to 3 on Gaudi 2.
    pub priority: u8,
}

#[derive(Debug)]
struct Inner {
    raw: NonNull<ibv_qp>,
    // These keep the objects that the pair was created from and the encapsulation that it uses.
    domain: Arc<DomainInner>,
    _completions: [CompletionQueue; 2],
    encap: Option<Encap>,
    port: Port,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for Inner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: the pair is alive and is destroyed once.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        let encap = self.encap.take();
        // If the destruction fails, the encapsulation stays alive with the pair.
        context.check_destroyed("ibv_destroy_qp", result, || encap.map(|encap| Box::new(encap) as _));
    }
}

/// Reliable queue pair of a port. A failed transition destroys it.
#[derive(Debug)]
pub struct QueuePair<State> {
    inner: Inner,
    state: PhantomData<State>,
}

impl<State> QueuePair<State> {
    /// Returns the queue pair number.
    pub fn number(&self) -> u32 {
        // SAFETY: the pair is alive.
        unsafe { (*self.inner.raw.as_ptr()).qp_num }
    }

    /// Returns the encapsulation of its packets, if there is one.
    pub fn encap(&self) -> Option<&Encap> {
        self.inner.encap.as_ref()
    }

    fn modify<Next>(self, attr: &mut ibv_qp_attr, mask: u32, hbl: &mut hbldv_qp_attr) -> Result<QueuePair<Next>> {
        let modify = self.inner.port.hbl.library()?.hbldv_modify_qp()?;
        // Each transition that reads the encapsulation needs its ID together with the flag. Without the flag, the
        // kernel rejects the ID or uses the port's default.
        if let Some(encap) = self.inner.encap.as_ref().filter(|_| attr.qp_state != IBV_QPS_INIT) {
            hbl.caps |= HBLDV_QP_CAP_ENCAP;
            hbl.encap_num = encap.id();
        }
        // SAFETY: the pair is alive and belongs to libhbl, and both attribute structures are valid during the call.
        let result = unsafe { modify(self.inner.raw.as_ptr(), attr, (mask | IBV_QP_STATE).cast_signed(), hbl) };
        self.inner.domain.context.inner.check("hbldv_modify_qp", result)?;
        Ok(QueuePair { inner: self.inner, state: PhantomData })
    }
}

impl Port {
    /// Creates a queue pair with completion queues of the same port.
    ///
    /// # Errors
    /// The domain or a completion queue belongs to another device or port, or the device cannot create the pair.
    pub fn create_queue_pair(
        &self,
        domain: &ProtectionDomain,
        send: &PortCompletionQueue,
        receive: &PortCompletionQueue,
        options: &QueuePairOptions,
    ) -> Result<QueuePair<Created>> {
        let context = &self.hbl.context().inner;
        for queue in [send, receive] {
            if queue.port != self.number || !Arc::ptr_eq(&queue.queue.0.context.inner, context) {
                return Err(Error::InvalidRequest(format!(
                    "the completion queues of a queue pair must belong to its port {}",
                    self.number
                )));
            }
        }
        if !Arc::ptr_eq(&domain.0.context.inner, context) {
            let problem = "the protection domain of a queue pair must belong to its own device";
            return Err(Error::InvalidRequest(problem.to_owned()));
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
        // SAFETY: the domain and the queues in `attr` are living objects of one open context.
        let raw = unsafe { create(domain.0.raw.as_ptr(), &raw mut attr) };
        let raw = context.check_created("ibv_create_qp", raw, u8::try_from(self.number).ok())?;
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
    /// Moves the pair to the initialized state, which binds it to its port. `wide` selects send requests of 64 bytes.
    ///
    /// # Errors
    /// The transition failed.
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
    /// Moves the pair to RTR, which connects it to its peer. From then on, its packets are encapsulated with `encap`,
    /// if given.
    ///
    /// # Errors
    /// The encapsulation belongs to another port, or the transition failed.
    pub fn ready_to_receive(
        mut self,
        responder: &Responder,
        encap: Option<&Encap>,
    ) -> Result<QueuePair<ReadyToReceive>> {
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

impl QueuePair<ReadyToReceive> {
    /// Moves the pair to RTS, with the same encapsulation.
    ///
    /// # Errors
    /// `peer_requests` is not valid, or the transition failed.
    pub fn ready_to_send(self, requester: &Requester) -> Result<QueuePair<ReadyToSend>> {
        if requester.peer_requests != 0 && !requester.peer_requests.is_power_of_two() {
            let entries = requester.peer_requests;
            let problem = format!("a peer's work queue of {entries} entries; the number must be a power of two or 0");
            return Err(Error::InvalidRequest(problem));
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
