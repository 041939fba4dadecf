// UNSAFETY: calls libibverbs.
#![allow(unsafe_code)]

//! Receive work queues, indirection tables over them, and RSS queue pairs.

use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::verbs::*;
use wirepath_memory::charge_to;

use crate::domain::{Domain, DomainInner};
use crate::queue_pair::check_size;
use crate::{CompletionQueue, Context, DestroyedFlag, Error, ObjectId, Provider, Result};

#[derive(Debug)]
pub(crate) struct WorkQueueInner {
    pub(crate) raw: NonNull<ibv_wq>,
    pub(crate) domain: Arc<DomainInner>,
    id: ObjectId,
    requests: u32,
    destroyed: DestroyedFlag,
    _completions: CompletionQueue,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for WorkQueueInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for WorkQueueInner {}

impl Drop for WorkQueueInner {
    fn drop(&mut self) {
        // SAFETY: the queue is alive and is destroyed once. Indirection tables and views of its memory keep it alive,
        // so none is left.
        let result = unsafe { ibv_destroy_wq(self.raw.as_ptr()) };
        if self.domain.context.inner.check_destroyed("ibv_destroy_wq", Ok(result), || None) {
            self.destroyed.set();
        }
    }
}

/// Options of a new receive queue.
#[derive(Clone, Debug)]
pub struct WorkQueueOptions {
    /// Completion queue of receive requests.
    pub completions: CompletionQueue,
    /// Minimum number of requests. [`WorkQueue::requests`] returns the granted number.
    pub requests: u32,
    /// Maximum number of segments in a request.
    pub segments: u32,
    /// Strip the customer VLAN tag.
    pub vlan_strip: bool,
    /// Keep the frame check sequence.
    pub scatter_fcs: bool,
    /// Wait for a buffer instead of dropping the packet.
    pub delay_drop: bool,
    /// Owner in the accounting of queue memory.
    pub owner: String,
}

impl WorkQueueOptions {
    /// Creates options of a queue with single-segment requests and without offloads.
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

/// Receive queue (ibv_create_wq(3)). Clones refer to the same queue.
#[derive(Clone, Debug)]
pub struct WorkQueue(pub(crate) Arc<WorkQueueInner>);

impl WorkQueue {
    /// Creates a receive queue. On MANA it is live when it is created, on other devices after [`Self::start`].
    ///
    /// # Errors
    /// The device cannot create the queue.
    pub fn new(domain: &impl Domain, options: &WorkQueueOptions) -> Result<Self> {
        Self::create_with(domain, options, "ibv_create_wq", |context, attr| {
            // SAFETY: `create_with` passes attributes with living objects of one open context.
            unsafe { ibv_create_wq(context, attr) }
        })
    }

    /// Creates a queue with `create`, which gets context and attributes. `call` names it in errors.
    pub(crate) fn create_with(
        domain: &impl Domain,
        options: &WorkQueueOptions,
        call: &'static str,
        create: impl FnOnce(*mut ibv_context, *mut ibv_wq_init_attr) -> *mut ibv_wq,
    ) -> Result<Self> {
        let domain = domain.inner();
        let context = &domain.context.inner;
        if !Arc::ptr_eq(&options.completions.0.context.inner, context) {
            return Err(Error::InvalidRequest(
                "the completion queue of a receive queue must belong to its own device".to_owned(),
            ));
        }
        context.check_queue_allocator()?;
        if options.requests == 0 {
            return Err(Error::InvalidRequest("a receive queue needs at least one request".to_owned()));
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
        let raw = context.check_created(call, raw, domain.port)?;
        let completions = options.completions.clone();
        Ok(Self(Arc::new(WorkQueueInner {
            raw,
            domain: Arc::clone(domain),
            id,
            requests: attr.max_wr,
            destroyed: DestroyedFlag::default(),
            _completions: completions,
        })))
    }

    /// Returns the ID of the queue in events.
    pub fn id(&self) -> ObjectId {
        self.0.id
    }

    /// Returns the flag that is set when the queue is destroyed, after the last handle is dropped.
    pub fn destroyed_flag(&self) -> DestroyedFlag {
        self.0.destroyed.clone()
    }

    /// Returns the maximum number of outstanding requests.
    pub fn requests(&self) -> u32 {
        self.0.requests
    }

    /// Moves the queue from reset to ready. Has no effect on MANA.
    ///
    /// # Errors
    /// The transition failed.
    pub fn start(&self) -> Result<()> {
        self.set_state(IBV_WQS_RDY)
    }

    /// Resets the queue and discards posted requests. After an error, call it before [`Self::start`].
    ///
    /// # Errors
    /// The transition failed. MANA does not support it: its queues must be recreated.
    pub fn reset(&self) -> Result<()> {
        if self.0.domain.context.provider() == Provider::Mana {
            return Err(self.0.domain.context.inner.error("ibv_modify_wq", libc::EOPNOTSUPP, self.0.domain.port));
        }
        self.set_state(IBV_WQS_RESET)
    }

    fn set_state(&self, state: u32) -> Result<()> {
        let context = &self.0.domain.context;
        // Queues of MANA are live when they are created, and `modify_wq` fails with EOPNOTSUPP.
        if context.provider() == Provider::Mana {
            return Ok(());
        }
        let mut attr = ibv_wq_attr { attr_mask: IBV_WQ_ATTR_STATE, wq_state: state, ..ibv_wq_attr::zeroed() };
        // SAFETY: the queue is alive, and `attr` is valid during the call.
        context.inner.check("ibv_modify_wq", unsafe { ibv_modify_wq(self.0.raw.as_ptr(), &raw mut attr) })
    }
}

#[derive(Debug)]
struct TableInner {
    raw: NonNull<ibv_rwq_ind_table>,
    context: Context,
    queues: Vec<WorkQueue>,
}

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for TableInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for TableInner {}

impl Drop for TableInner {
    fn drop(&mut self) {
        // SAFETY: the table is alive and is destroyed once. RSS queue pairs keep it alive, so none is left.
        let result = unsafe { ibv_destroy_rwq_ind_table(self.raw.as_ptr()) };
        self.context.inner.check_destroyed("ibv_destroy_rwq_ind_table", Ok(result), || None);
    }
}

/// RSS indirection table: maps hash values to receive queues (ibv_create_rwq_ind_table(3)). Clones refer to the same
/// table.
#[derive(Clone, Debug)]
pub struct IndirectionTable(Arc<TableInner>);

impl IndirectionTable {
    /// Creates a table with these entries. Their number is a power of two, and a queue may occur more than once.
    ///
    /// # Errors
    /// The number of entries is not a power of two, the queues belong to several devices, or the device cannot create
    /// the table.
    pub fn new(queues: &[WorkQueue]) -> Result<Self> {
        let (true, Some(first)) = (queues.len().is_power_of_two(), queues.first()) else {
            return Err(Error::InvalidRequest(format!(
                "an indirection table of {} entries; the number must be a power of two",
                queues.len()
            )));
        };
        let context = &first.0.domain.context;
        if queues.iter().any(|queue| !Arc::ptr_eq(&queue.0.domain.context.inner, &context.inner)) {
            return Err(Error::InvalidRequest(
                "the queues of an indirection table must belong to one device".to_owned(),
            ));
        }
        let mut entries: Vec<*mut ibv_wq> = queues.iter().map(|queue| queue.0.raw.as_ptr()).collect();
        let mut attr = ibv_rwq_ind_table_init_attr {
            log_ind_tbl_size: queues.len().ilog2(),
            ind_tbl: entries.as_mut_ptr(),
            ..ibv_rwq_ind_table_init_attr::zeroed()
        };
        // SAFETY: the context is open. `ind_tbl` points to `1 << log_ind_tbl_size` living queues of this context.
        let raw = unsafe { ibv_create_rwq_ind_table(context.inner.raw.as_ptr(), &raw mut attr) };
        let raw = context.inner.check_created("ibv_create_rwq_ind_table", raw, first.0.domain.port)?;
        Ok(Self(Arc::new(TableInner { raw, context: context.clone(), queues: queues.to_vec() })))
    }

    /// Returns the queue of each entry.
    pub fn queues(&self) -> &[WorkQueue] {
        &self.0.queues
    }
}

/// Hashed fields (`IBV_RX_HASH_*`). They cover one class of packets: mlx5 rejects IPv4 with IPv6, and TCP with UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HashFields(pub u64);

impl HashFields {
    /// No field: all packets go to the first entry.
    pub const NONE: Self = Self(0);
    /// IPv4 addresses.
    pub const IPV4: Self = Self(IBV_RX_HASH_SRC_IPV4 | IBV_RX_HASH_DST_IPV4);
    /// IPv6 addresses.
    pub const IPV6: Self = Self(IBV_RX_HASH_SRC_IPV6 | IBV_RX_HASH_DST_IPV6);
    /// TCP ports.
    pub const TCP: Self = Self(IBV_RX_HASH_SRC_PORT_TCP | IBV_RX_HASH_DST_PORT_TCP);
    /// UDP ports.
    pub const UDP: Self = Self(IBV_RX_HASH_SRC_PORT_UDP | IBV_RX_HASH_DST_PORT_UDP);
    /// Modifier: fields of the inner headers.
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

// SAFETY: `raw` is an owned pointer, and libibverbs and the providers lock the state that they change.
unsafe impl Send for RssInner {}
// SAFETY: libibverbs and the providers lock the state that they change.
unsafe impl Sync for RssInner {}

impl Drop for RssInner {
    fn drop(&mut self) {
        let context = &self.domain.context.inner;
        // SAFETY: the pair is alive and is destroyed once. Flow rules keep it alive, so none is left.
        let result = context.ibverbs().ibv_destroy_qp().map(|destroy| unsafe { destroy(self.raw.as_ptr()) });
        context.check_destroyed("ibv_destroy_qp", result, || None);
    }
}

/// RSS queue pair: hashes packets and distributes them over an indirection table. It has no queues of its own. Clones
/// refer to the same pair.
#[derive(Clone, Debug)]
pub struct RssQp(pub(crate) Arc<RssInner>);

impl RssQp {
    /// Creates an RSS queue pair with a Toeplitz key of 40 bytes, the only length that MANA and mlx5 accept.
    ///
    /// On MANA, `domain` must be the parent domain of the port. The pair makes the receive queues live and assigns
    /// numbers to their completion queues.
    ///
    /// # Errors
    /// A capability is missing, the kernel uses the port, or the device does not support the combination of fields.
    pub fn new(domain: &impl Domain, table: &IndirectionTable, fields: HashFields, key: &[u8; 40]) -> Result<Self> {
        Self::create_with(domain, table, fields, key, "ibv_create_qp_ex", |context, attr| {
            // SAFETY: `create_with` passes attributes with living objects of one open context. The key is copied
            // during the call.
            unsafe { ibv_create_qp_ex(context, attr) }
        })
    }

    /// Creates a pair with `create`, which gets context and attributes with living objects of it. `call` names it in
    /// errors.
    pub(crate) fn create_with(
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
            return Err(Error::InvalidRequest(
                "the indirection table of an RSS queue pair must belong to its own device".to_owned(),
            ));
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
        let raw = context.check_created(call, raw, domain.port)?;
        Ok(Self(Arc::new(RssInner { raw, domain: Arc::clone(domain), id, _table: table.clone() })))
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
}
