// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Receive queues of their own, the tables that spread packets over them, and the queue pair in front.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::charge_to;

use crate::domain::{Domain, DomainInner};
use crate::queue_pair::check_size;
use crate::{CompletionQueue, Context, Error, Fate, ObjectId, Provider, Result};

#[derive(Debug)]
pub(crate) struct WorkQueueInner {
    pub(crate) raw: NonNull<ibv_wq>,
    pub(crate) domain: Arc<DomainInner>,
    id: ObjectId,
    requests: u32,
    fate: Fate,
    _completions: CompletionQueue,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for WorkQueueInner {}
// SAFETY: as above.
unsafe impl Sync for WorkQueueInner {}

impl Drop for WorkQueueInner {
    fn drop(&mut self) {
        // SAFETY: tables and views of its memory kept it alive, and are gone.
        let result = unsafe { ibv_destroy_wq(self.raw.as_ptr()) };
        if self.domain.context.inner.destroyed("ibv_destroy_wq", Ok(result), || None) {
            self.fate.set_gone();
        }
    }
}

/// What a receive queue should be.
#[derive(Clone, Debug)]
pub struct WorkQueueOptions {
    /// Where receptions complete.
    pub completions: CompletionQueue,
    /// Requests at least; [`WorkQueue::requests`] says what came of it.
    pub requests: u32,
    /// Segments of one.
    pub segments: u32,
    /// Remove the customer VLAN tag.
    pub vlan_strip: bool,
    /// Leave the frame check sequence.
    pub scatter_fcs: bool,
    /// Wait for a buffer instead of dropping.
    pub delay_drop: bool,
    /// Whom its memory is charged to.
    pub owner: String,
}

impl WorkQueueOptions {
    /// A queue of single-segment requests without any offload.
    pub fn new(completions: &CompletionQueue, requests: u32, owner: impl Into<String>) -> Self {
        Self {
            completions: completions.clone(),
            requests,
            segments: 1,
            vlan_strip: false,
            scatter_fcs: false,
            delay_drop: false,
            owner: owner.into(),
        }
    }
}

/// A receive queue (ibv_create_wq(3)). Clones are the same one.
#[derive(Clone, Debug)]
pub struct WorkQueue(pub(crate) Arc<WorkQueueInner>);

impl WorkQueue {
    /// A new queue. On MANA it is live at once, elsewhere after [`Self::start`].
    ///
    /// # Errors
    /// The device refused.
    pub fn new(domain: &impl Domain, options: &WorkQueueOptions) -> Result<Self> {
        Self::with(domain, options, "ibv_create_wq", |context, attr| {
            // SAFETY: objects of one living context.
            unsafe { ibv_create_wq(context, attr) }
        })
    }

    /// A new queue, made by `create` from context and attributes.
    pub(crate) fn with(
        domain: &impl Domain,
        options: &WorkQueueOptions,
        call: &'static str,
        create: impl FnOnce(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq,
    ) -> Result<Self> {
        let domain = domain.inner();
        let context = &domain.context.inner;
        if !Arc::ptr_eq(&options.completions.0.context.inner, context) {
            return Err(Error::Request("a receive queue completes in a queue of its own device only".to_owned()));
        }
        context.ready_for_queues()?;
        if options.requests == 0 {
            return Err(Error::Request("a receive queue needs at least one request".to_owned()));
        }
        check_size("receive queue", options.requests, options.segments)?;
        let id = ObjectId::new();
        let mut attr = ibv_wq_init_attr {
            wq_context: id.to_context(),
            wq_type: IBV_WQT_RQ,
            max_wr: options.requests,
            max_sge: options.segments,
            pd: domain.raw.as_ptr(),
            cq: options.completions.0.raw.as_ptr(),
            ..ibv_wq_init_attr::zeroed()
        };
        for (wanted, flag) in [
            (options.vlan_strip, IBV_WQ_FLAGS_CVLAN_STRIPPING),
            (options.scatter_fcs, IBV_WQ_FLAGS_SCATTER_FCS),
            (options.delay_drop, IBV_WQ_FLAGS_DELAY_DROP),
        ] {
            if wanted {
                attr.comp_mask |= IBV_WQ_INIT_ATTR_FLAGS;
                attr.create_flags |= flag;
            }
        }
        let _charge = charge_to(format!("{}: requests", options.owner));
        let raw = create(context.raw.as_ptr(), &raw mut attr);
        let raw = context.created(call, raw, domain.port)?;
        let completions = options.completions.clone();
        Ok(Self(Arc::new(WorkQueueInner {
            raw,
            domain: Arc::clone(domain),
            id,
            requests: attr.max_wr,
            fate: Fate::default(),
            _completions: completions,
        })))
    }

    /// Its name in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// Tells whether it was destroyed, once this and everything that keeps it is dropped.
    pub fn fate(&self) -> Fate {
        self.0.fate.clone()
    }

    /// Requests that may be outstanding.
    pub fn requests(&self) -> u32 {
        self.0.requests
    }

    /// Makes it ready to receive, from reset. Nothing to do on MANA.
    ///
    /// # Errors
    /// The device refused.
    pub fn start(&self) -> Result<()> {
        self.set_state(IBV_WQS_RDY)
    }

    /// Forgets what was posted: the way out of an error, before [`Self::start`].
    ///
    /// # Errors
    /// The device refused. MANA cannot: its queues are made anew.
    pub fn reset(&self) -> Result<()> {
        if self.0.domain.context.provider() == Provider::Mana {
            return Err(self.0.domain.context.inner.error("ibv_modify_wq", libc::EOPNOTSUPP, self.0.domain.port));
        }
        self.set_state(IBV_WQS_RESET)
    }

    fn set_state(&self, state: u32) -> Result<()> {
        let context = &self.0.domain.context;
        // Live from its creation, and modify_wq answers EOPNOTSUPP.
        if context.provider() == Provider::Mana {
            return Ok(());
        }
        let mut attr = ibv_wq_attr { attr_mask: IBV_WQ_ATTR_STATE, wq_state: state, ..ibv_wq_attr::zeroed() };
        // SAFETY: a living queue.
        context.inner.done("ibv_modify_wq", unsafe { ibv_modify_wq(self.0.raw.as_ptr(), &raw mut attr) })
    }
}

#[derive(Debug)]
struct TableInner {
    raw: NonNull<ibv_rwq_ind_table>,
    context: Context,
    queues: Vec<WorkQueue>,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for TableInner {}
// SAFETY: as above.
unsafe impl Sync for TableInner {}

impl Drop for TableInner {
    fn drop(&mut self) {
        // SAFETY: queue pairs kept it alive, and are gone.
        let result = unsafe { ibv_destroy_rwq_ind_table(self.raw.as_ptr()) };
        self.context.inner.destroyed("ibv_destroy_rwq_ind_table", Ok(result), || None);
    }
}

/// Which queue gets the packets of which hash values (ibv_create_rwq_ind_table(3)). Clones are the same one.
#[derive(Clone, Debug)]
pub struct IndirectionTable(Arc<TableInner>);

impl IndirectionTable {
    /// A table of these entries, a power of two; a queue may be named more than once.
    ///
    /// # Errors
    /// The number of entries is not a power of two, the queues are of several devices, or the device refused.
    pub fn new(queues: &[WorkQueue]) -> Result<Self> {
        let (true, Some(first)) = (queues.len().is_power_of_two(), queues.first()) else {
            return Err(Error::Request(format!(
                "an indirection table of {} entries; it must be a power of two",
                queues.len()
            )));
        };
        let context = &first.0.domain.context;
        if queues.iter().any(|queue| !Arc::ptr_eq(&queue.0.domain.context.inner, &context.inner)) {
            return Err(Error::Request("an indirection table names queues of one device only".to_owned()));
        }
        let mut entries: Vec<*mut ibv_wq> = queues.iter().map(|queue| queue.0.raw.as_ptr()).collect();
        let mut attr = ibv_rwq_ind_table_init_attr {
            log_ind_tbl_size: queues.len().ilog2(),
            ind_tbl: entries.as_mut_ptr(),
            ..ibv_rwq_ind_table_init_attr::zeroed()
        };
        // SAFETY: living queues of this context, as many as are announced.
        let raw = unsafe { ibv_create_rwq_ind_table(context.inner.raw.as_ptr(), &raw mut attr) };
        let raw = context.inner.created("ibv_create_rwq_ind_table", raw, first.0.domain.port)?;
        Ok(Self(Arc::new(TableInner { raw, context: context.clone(), queues: queues.to_vec() })))
    }

    /// The queues, entry by entry.
    pub fn queues(&self) -> &[WorkQueue] {
        &self.0.queues
    }
}

/// Which fields are hashed, `IBV_RX_HASH_*`. One class of packets at a time: mlx5 refuses IPv4 with IPv6, and TCP with UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HashFields(pub u64);

impl HashFields {
    /// Nothing: everything goes to the first entry.
    pub const NONE: Self = Self(0);
    /// Addresses of IPv4.
    pub const IPV4: Self = Self(IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4);
    /// Addresses of IPv6.
    pub const IPV6: Self = Self(IBV_RX_HASH_SRC_IPV6 | IBV_RX_HASH_DST_IPV6);
    /// Ports of TCP.
    pub const TCP: Self = Self(IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP);
    /// Ports of UDP.
    pub const UDP: Self = Self(IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP);
    /// Of the inner headers instead.
    pub const INNER: Self = Self(IBV_RX_HASH_INNER);
}

impl std::ops::BitOr for HashFields {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[derive(Debug)]
pub(crate) struct RssInner {
    pub(crate) raw: NonNull<ibv_qp>,
    pub(crate) domain: Arc<DomainInner>,
    id: ObjectId,
    _table: IndirectionTable,
}

// SAFETY: libibverbs and the providers lock what they change.
unsafe impl Send for RssInner {}
// SAFETY: as above.
unsafe impl Sync for RssInner {}

impl Drop for RssInner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: made by a creation, dropped once.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.destroyed("ibv_destroy_qp", result, || None);
    }
}

/// The queue pair that hashes packets and spreads them over a table. It has no queues of its own. Clones are the same one.
#[derive(Clone, Debug)]
pub struct RssQp(pub(crate) Arc<RssInner>);

impl RssQp {
    /// A new one, with a Toeplitz key of 40 bytes (both devices take no other length). On MANA this is what makes the receive queues
    /// live and gives their completion queues a number, and `domain` must be the parent domain of the port.
    ///
    /// # Errors
    /// The device refused: a capability is missing, the port is held, or the fields cannot be combined.
    pub fn new(domain: &impl Domain, table: &IndirectionTable, fields: HashFields, key: &[u8; 40]) -> Result<Self> {
        Self::with(domain, table, fields, key, "ibv_create_qp_ex", |context, attr| {
            // SAFETY: objects of one living context; the key is copied during the call.
            unsafe { ibv_create_qp_ex(context, attr) }
        })
    }

    /// [`Self::new`] by another call, which gets living objects of one context.
    pub(crate) fn with(
        domain: &impl Domain,
        table: &IndirectionTable,
        fields: HashFields,
        key: &[u8; 40],
        call: &'static str,
        create: impl FnOnce(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp,
    ) -> Result<Self> {
        let domain = domain.inner();
        let context = &domain.context.inner;
        if !Arc::ptr_eq(&table.0.context.inner, context) {
            return Err(Error::Request("a queue pair spreads over queues of its own device only".to_owned()));
        }
        context.ibverbs().ibv_destroy_qp()?;
        let id = ObjectId::new();
        let mut key = *key;
        let mut attr = ibv_qp_init_attr_ex {
            qp_context: id.to_context(),
            qp_type: IBV_QPT_RAW_PACKET,
            comp_mask: IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_RX_HASH | IBV_QP_INIT_ATTR_IND_TABLE,
            pd: domain.raw.as_ptr(),
            rwq_ind_tbl: table.0.raw.as_ptr(),
            rx_hash_conf: ibv_rx_hash_conf {
                rx_hash_function: IBV_RX_HASH_FUNC_TOEPLITZ as u8,
                rx_hash_key_len: key.len() as u8,
                rx_hash_key: key.as_mut_ptr(),
                rx_hash_fields_mask: fields.0,
            },
            ..ibv_qp_init_attr_ex::zeroed()
        };
        let raw = create(context.raw.as_ptr(), &raw mut attr);
        let raw = context.created(call, raw, domain.port)?;
        Ok(Self(Arc::new(RssInner { raw, domain: Arc::clone(domain), id, _table: table.clone() })))
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
}
