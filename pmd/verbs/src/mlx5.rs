// UNSAFETY: calls libmlx5 and gives access to the memory of its queues.
#![allow(unsafe_code)]

//! Direct verbs of mlx5 (mlx5dv(7)): allocators of queue memory, and the addresses of queues.
//!
//! Set up a port in this order:
//!
//! 1. [`Mlx5::set_allocator`], before any queue.
//! 2. Completion queues, with [`Mlx5::completion_queue_with`] for compressed CQEs.
//! 3. A [`RawPacketQp`] for each send queue, started with [`RawPacketQp::start`].
//! 4. [`WorkQueue`]s, with [`Mlx5::striding_queue`] for striding ones, started with [`WorkQueue::start`].
//! 5. [`IndirectionTable`]s, and one [`RssQp`] for each class of packets.
//! 6. [`crate::FlowRule`]s. Without a rule, the port receives nothing.

mod actions;
mod firmware;
mod steering;
pub mod var;

use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_core_sys::mlx5dv::*;
use rdma_core_sys::verbs::*;
use wirepath_memory::DeviceMemory;

pub use self::actions::{FlowCounter, LinkHeader, Modification, ModifyHeader, Reformat};
pub use self::firmware::RuleLimits;
pub use self::steering::{
    Actions, Egress, EgressDestination, FlowTag, Ingress, IngressDestination, MatchParameters, Matcher, SteeringRule,
    Table,
};
use crate::allocator::KeepAlive;
use crate::context::ContextInner;
use crate::domain::Domain;
use crate::{
    CompletionQueue, CompletionQueueOptions, Context, Device, Error, HashFields, IndirectionTable, Provider,
    QueueAllocator, RawPacketQp, Result, RssQp, WorkQueue, WorkQueueOptions,
};

/// Size of a register page (UAR) and of a page of doorbell records, in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a basic block of a send queue, and of a CQE.
const BLOCK_BYTES: usize = 64;
/// Bytes of a pair of doorbell record words.
const RECORD_BYTES: usize = 8;

/// Direct verbs of an mlx5 device.
#[derive(Clone, Debug)]
pub struct Mlx5 {
    context: Context,
}

/// Capabilities of a device that plain verbs do not report (mlx5dv_query_device(3)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mlx5Capabilities {
    /// True if the kernel reports CQE version 1, with which CQEs name queues by user index. `ibv_poll_cq` finds the
    /// completions of work queues only with this version.
    pub cqe_version_1: bool,
    /// True if enhanced multi-packet send WQEs are supported.
    pub multi_packet: bool,
    /// CQE compression, if supported.
    pub compression: Option<Compression>,
    /// Striding receive queues, if supported.
    pub striding: Option<Striding>,
    /// Tunnels whose inner headers the device parses (`MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_*`).
    pub tunnels: u32,
    /// Work that the device does on headers whose offsets are in the send WQE (`MLX5DV_SW_PARSING*`).
    pub sw_parsing: u32,
}

/// CQE compression capabilities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// Maximum number of packets in a compressed session.
    pub max_session: u32,
    /// Supported formats (`MLX5DV_CQE_RES_FORMAT_*`).
    pub formats: u32,
}

/// Capabilities of striding receive queues for raw packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Striding {
    /// Bytes of a stride, as a binary logarithm.
    pub log_bytes: RangeInclusive<u32>,
    /// Strides of a work request, as a binary logarithm.
    pub log_strides: RangeInclusive<u32>,
}

/// Memory of a send queue.
#[derive(Clone, Debug)]
pub struct SendQueue {
    /// Ring. It has a power-of-two number of basic blocks of 64 bytes.
    pub ring: DeviceMemory,
    /// Doorbell record. It has two words: receive, then send.
    pub records: DeviceMemory,
    /// Queue number that WQEs and CQEs carry.
    pub number: u32,
    /// Register page (UAR).
    pub registers: DeviceMemory,
    /// Byte offset of the doorbell register in the page.
    pub register: usize,
    /// Offset at which another process maps the register page of an imported device ([`Mlx5::map_registers`]).
    pub uar_mmap_offset: u64,
    /// Bytes of a BlueFlame buffer. The doorbell alternates between the register's offset and that offset plus this
    /// size. 0 if there is one register, for doorbells only.
    pub blue_flame: usize,
}

/// Memory of a receive queue.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    /// Ring. It has a power-of-two number of entries.
    pub ring: DeviceMemory,
    /// Doorbell record. It has two words: receive, then send.
    pub records: DeviceMemory,
    /// Number of entries.
    pub entries: u32,
    /// Bytes of an entry, a power of two.
    pub stride: u32,
}

/// Memory of a completion queue.
#[derive(Clone, Debug)]
pub struct CompletionRing {
    /// Ring. It has a power-of-two number of CQEs of 64 bytes.
    pub ring: DeviceMemory,
    /// Doorbell record. It has two words: consumer counter, then arm.
    pub records: DeviceMemory,
    /// Queue number.
    pub number: u32,
    /// Register page (UAR) with the register that arms the queue.
    pub registers: DeviceMemory,
}

impl Mlx5 {
    /// Returns the direct verbs of an open device.
    ///
    /// # Errors
    /// The device is not an mlx5, or libmlx5 is missing.
    pub fn from_context(context: &Context) -> Result<Self> {
        let found = context.provider();
        if found != Provider::Mlx5 {
            return Err(Error::Provider { device: context.device().name(), found, wanted: Provider::Mlx5 });
        }
        context.inner.libraries.mlx5()?;
        Ok(Self { context: context.clone() })
    }

    /// Opens a device with DevX, which [`FlowCounter`] needs, or without DevX if the device does not support it.
    ///
    /// # Errors
    /// The device cannot be opened, it is not an mlx5, or libmlx5 is missing.
    pub fn open(device: &Device) -> Result<Self> {
        let open = device.verbs().libraries.mlx5()?.mlx5dv_open_device()?;
        let mut attr = mlx5dv_context_attr { flags: MLX5DV_CONTEXT_FLAGS_DEVX, ..mlx5dv_context_attr::zeroed() };
        let context = Context::open_with(device, "mlx5dv_open_device", |raw| {
            // SAFETY: the device is alive, because `device` keeps its list. libmlx5 rejects devices of other providers.
            unsafe { open(raw, &raw mut attr) }
        });
        match context {
            Ok(context) => {
                context.inner.devx.store(true, Ordering::Relaxed);
                Self::from_context(&context)
            }
            Err(_) => Self::from_context(&device.open()?),
        }
    }

    /// Returns true if the context was opened with DevX, so that it accepts firmware commands.
    pub fn has_devx(&self) -> bool {
        self.inner().devx.load(Ordering::Relaxed)
    }

    /// Returns the context of the device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    fn library(&self) -> Result<&'static Mlx5dv> {
        Ok(self.context.inner.libraries.mlx5()?)
    }

    fn inner(&self) -> &ContextInner {
        &self.context.inner
    }

    /// Sets the allocator from which libmlx5 takes memory for queues and doorbell records. Queues that already exist
    /// keep their memory, and their views are not available here.
    ///
    /// # Errors
    /// The context already has an allocator. It cannot be replaced, because libmlx5 frees memory with the current one.
    pub fn set_allocator(&self, allocator: Arc<dyn QueueAllocator>) -> Result<()> {
        let set = self.library()?.mlx5dv_set_context_attr()?;
        self.inner().install_allocator(allocator, |callbacks| {
            let attr = (&raw mut *callbacks).cast::<c_void>();
            // SAFETY: the context is open and belongs to libmlx5. `attr` is valid during the call, and libmlx5 copies
            // it.
            let result = unsafe { set(self.inner().raw.as_ptr(), MLX5DV_CTX_ATTR_BUF_ALLOCATORS, attr) };
            self.inner().check("mlx5dv_set_context_attr", result)
        })
    }

    /// Queries the capabilities of the device.
    ///
    /// # Errors
    /// The query failed.
    pub fn capabilities(&self) -> Result<Mlx5Capabilities> {
        let query = self.library()?.mlx5dv_query_device()?;
        let mut attr = mlx5dv_context::zeroed();
        attr.comp_mask = MLX5DV_CONTEXT_MASK_CQE_COMPRESION
            | MLX5DV_CONTEXT_MASK_SWP
            | MLX5DV_CONTEXT_MASK_STRIDING_RQ
            | MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS;
        // SAFETY: the context is open and belongs to libmlx5. `attr` is valid for writes; its mask selects the
        // written fields.
        self.inner().check("mlx5dv_query_device", unsafe { query(self.inner().raw.as_ptr(), &raw mut attr) })?;
        Ok(translate(&attr))
    }

    /// Creates a completion queue with CQE compression of receive completions. `format` is one of
    /// `MLX5DV_CQE_RES_FORMAT_*`.
    ///
    /// # Errors
    /// The size is 0 or above 2²⁴, or the device cannot create the queue.
    pub fn completion_queue_with(&self, options: &CompletionQueueOptions, format: u8) -> Result<CompletionQueue> {
        let create = self.library()?.mlx5dv_create_cq()?;
        let mut mlx5 = mlx5dv_cq_init_attr {
            comp_mask: MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE,
            cqe_comp_res_format: format,
            ..mlx5dv_cq_init_attr::zeroed()
        };
        CompletionQueue::create_with(
            &self.context,
            options,
            "mlx5dv_create_cq",
            |context, cqe, user, channel, vector| {
                let mut attr = ibv_cq_init_attr_ex {
                    cqe: cqe.cast_unsigned(),
                    cq_context: user,
                    channel,
                    comp_vector: vector.cast_unsigned(),
                    ..ibv_cq_init_attr_ex::zeroed()
                };
                // SAFETY: the context is open and belongs to libmlx5, and both attribute structures are valid during
                // the call. An extended
                // queue starts with the fields of a plain one (verbs.h, ibv_cq_ex_to_cq), so the cast is valid.
                unsafe { create(context, &raw mut attr, &raw mut mlx5).cast() }
            },
        )
    }

    /// Creates a striding receive queue of `options.requests` work requests.
    ///
    /// Each request has 2^`log_strides` strides of 2^`log_bytes` bytes, scattered over `options.segments` buffers.
    ///
    /// # Errors
    /// The device cannot create the queue, for example because the sizes are outside [`Striding`].
    pub fn striding_queue(
        &self,
        domain: &impl Domain,
        options: &WorkQueueOptions,
        log_bytes: u32,
        log_strides: u32,
    ) -> Result<WorkQueue> {
        self.context.check_same_context(&domain.inner().context)?;
        let create = self.library()?.mlx5dv_create_wq()?;
        let mut mlx5 = mlx5dv_wq_init_attr::zeroed();
        mlx5.comp_mask = MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ;
        mlx5.striding_rq_attrs.single_stride_log_num_of_bytes = log_bytes;
        mlx5.striding_rq_attrs.single_wqe_log_num_of_strides = log_strides;
        WorkQueue::create_with(domain, options, "mlx5dv_create_wq", |context, attr| {
            // SAFETY: the context is open and belongs to libmlx5. `attr` contains living objects of it.
            unsafe { create(context, attr, &raw mut mlx5) }
        })
    }

    /// Creates an RSS queue pair with tunnel offloads (mlx5dv_create_qp(3), `MLX5DV_QP_CREATE_TUNNEL_OFFLOADS`).
    ///
    /// For packets in a supported tunnel ([`Mlx5Capabilities::tunnels`]), the checksum status in the CQE refers to
    /// the inner headers. For a pair of [`RssQp::new`], it refers to the outer headers.
    ///
    /// # Errors
    /// The device cannot create the pair, for example because it supports no tunnels.
    pub fn rss_qp_with_tunnel_offloads(
        &self,
        domain: &impl Domain,
        table: &IndirectionTable,
        fields: HashFields,
        key: &[u8; 40],
    ) -> Result<RssQp> {
        self.context.check_same_context(&domain.inner().context)?;
        let create = self.library()?.mlx5dv_create_qp()?;
        let mut mlx5 = mlx5dv_qp_init_attr {
            comp_mask: MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
            create_flags: MLX5DV_QP_CREATE_TUNNEL_OFFLOADS,
            ..mlx5dv_qp_init_attr::zeroed()
        };
        RssQp::create_with(domain, table, fields, key, "mlx5dv_create_qp", |context, attr| {
            // SAFETY: the context is open and belongs to libmlx5. `attr` contains living objects of it.
            unsafe { create(context, attr, &raw mut mlx5) }
        })
    }

    /// Returns the memory of a send queue. The returned views keep the queue pair alive.
    ///
    /// # Errors
    /// The pair belongs to another device, or libmlx5 returned invalid values.
    pub fn send_queue(&self, pair: &RawPacketQp) -> Result<SendQueue> {
        self.context.check_same_context(&pair.0.domain.context)?;
        let mut out = mlx5dv_qp { comp_mask: MLX5DV_QP_MASK_UAR_MMAP_OFFSET, ..mlx5dv_qp::zeroed() };
        let mut object = mlx5dv_obj::zeroed();
        object.qp = mlx5dv_obj_qp { in_: pair.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_QP)?;
        let keep: KeepAlive = pair.0.clone();
        if out.sq.stride as usize != BLOCK_BYTES || !out.sq.wqe_cnt.is_power_of_two() {
            let problem = format!("a send queue of {} blocks of {} bytes", out.sq.wqe_cnt, out.sq.stride);
            return Err(self.inner().invalid_answer("mlx5dv_init_obj", problem));
        }
        let ring = self.ring("send queue", out.sq.buf, out.sq.wqe_cnt as usize * BLOCK_BYTES, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        let register = out.bf.reg.addr() % PAGE_BYTES;
        let blue_flame = out.bf.size as usize;
        // Both BlueFlame buffers must be inside the page.
        let Some(page) = NonNull::new(out.bf.reg.cast::<u8>().wrapping_sub(register))
            .filter(|_| !out.bf.reg.is_null() && register.is_multiple_of(8) && blue_flame.is_multiple_of(8))
            .filter(|_| register + 2 * blue_flame.max(8) <= PAGE_BYTES)
        else {
            return Err(self.inner().invalid_answer("mlx5dv_init_obj", "a send queue without a register page"));
        };
        // SAFETY: libmlx5 mapped a writable page at this address. It unmaps the page when it closes the context, and
        // `keep` keeps the context alive.
        let registers = unsafe { DeviceMemory::new(page, PAGE_BYTES, Arc::clone(&keep)) };
        if out.comp_mask & MLX5DV_QP_MASK_UAR_MMAP_OFFSET == 0 {
            return Err(self
                .inner()
                .invalid_answer("mlx5dv_init_obj", "a send queue whose register page has no mmap offset"));
        }
        let uar_mmap_offset = out.uar_mmap_offset.cast_unsigned();
        Ok(SendQueue { ring, records, number: pair.number(), registers, register, uar_mmap_offset, blue_flame })
    }

    /// Maps the register page of another process's send queue ([`SendQueue::uar_mmap_offset`]) on the imported device
    /// ([`crate::Verbs::import_device`]).
    ///
    /// # Errors
    /// The device has no page at this offset.
    pub fn map_registers(&self, offset: u64) -> Result<DeviceMemory> {
        let at = libc::off_t::try_from(offset).ok().filter(|at| at % PAGE_BYTES as libc::off_t == 0);
        let at = at.ok_or_else(|| Error::InvalidImport {
            what: "the register page",
            problem: format!("offset {offset:#x} of the device is not valid"),
        })?;
        crate::registers::map(self.context.cmd_fd(), at, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Returns the memory of a receive queue. The returned views keep the queue alive.
    ///
    /// # Errors
    /// The queue belongs to another device, or libmlx5 returned invalid values.
    pub fn receive_queue(&self, queue: &WorkQueue) -> Result<ReceiveQueue> {
        self.context.check_same_context(&queue.0.domain.context)?;
        let mut out = mlx5dv_rwq::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.rwq = mlx5dv_obj_rwq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_RWQ)?;
        let keep: KeepAlive = queue.0.clone();
        if !out.wqe_cnt.is_power_of_two() || !out.stride.is_power_of_two() || out.stride < 16 {
            let problem = format!("a receive queue of {} entries of {} bytes", out.wqe_cnt, out.stride);
            return Err(self.inner().invalid_answer("mlx5dv_init_obj", problem));
        }
        let bytes = (out.wqe_cnt as usize).saturating_mul(out.stride as usize);
        let ring = self.ring("receive queue", out.buf, bytes, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        Ok(ReceiveQueue { ring, records, entries: out.wqe_cnt, stride: out.stride })
    }

    /// Returns the memory of a completion queue. The returned views keep the queue alive. Do not poll it through
    /// libibverbs any more.
    ///
    /// # Errors
    /// The queue belongs to another device, or libmlx5 returned invalid values.
    pub fn completion_queue(&self, queue: &CompletionQueue) -> Result<CompletionRing> {
        self.context.check_same_context(&queue.0.context)?;
        let mut out = mlx5dv_cq::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.cq = mlx5dv_obj_cq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_CQ)?;
        let keep: KeepAlive = queue.0.clone();
        if out.cqe_size as usize != BLOCK_BYTES || !out.cqe_cnt.is_power_of_two() {
            let problem = format!("a completion queue of {} entries of {} bytes", out.cqe_cnt, out.cqe_size);
            return Err(self.inner().invalid_answer("mlx5dv_init_obj", problem));
        }
        let ring = self.ring("completion queue", out.buf, out.cqe_cnt as usize * BLOCK_BYTES, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        let page = NonNull::new(out.cq_uar.cast::<u8>()).filter(|page| page.addr().get().is_multiple_of(PAGE_BYTES));
        let Some(page) = page else {
            return Err(self.inner().invalid_answer("mlx5dv_init_obj", "a completion queue without a register page"));
        };
        // SAFETY: libmlx5 mapped a writable page at this address. It unmaps the page when it closes the context, and
        // `keep` keeps the context alive.
        let registers = unsafe { DeviceMemory::new(page, PAGE_BYTES, keep) };
        Ok(CompletionRing { ring, records, number: out.cqn, registers })
    }

    fn init(&self, object: &mut mlx5dv_obj, kinds: u64) -> Result<()> {
        let init = self.library()?.mlx5dv_init_obj()?;
        // SAFETY: `object` points to a living object of a libmlx5 context, and its output is valid for writes.
        // libmlx5 cannot describe RSS queue pairs, and these have another Rust type.
        self.inner().check("mlx5dv_init_obj", unsafe { init(object, kinds) })
    }

    /// Returns the memory of a ring of a queue that `keep` keeps alive.
    fn ring(&self, what: &str, start: *mut c_void, bytes: usize, keep: &KeepAlive) -> Result<DeviceMemory> {
        // SAFETY: libmlx5 reported the ring of a queue, and `keep` keeps this queue alive.
        unsafe { self.inner().ring_memory("mlx5dv_init_obj", what, start, bytes, keep) }
    }

    /// Returns the doorbell record of a queue. It is in a page of the allocator that also contains records of other
    /// queues.
    fn records(&self, records: *mut u32, keep: &KeepAlive) -> Result<DeviceMemory> {
        let offset = records.addr() % PAGE_BYTES;
        let page = NonNull::new(records.cast::<u8>().wrapping_sub(offset));
        let allocated = page.and_then(|page| self.inner().allocator.get()?.size(page)).unwrap_or(0);
        match NonNull::new(records.cast::<u8>()) {
            Some(start) if offset.is_multiple_of(8) && offset + RECORD_BYTES <= allocated => {
                // SAFETY: the record is inside a page of the installed allocator. The page is freed only after the
                // queue is destroyed, and `keep` keeps the queue alive.
                Ok(unsafe { DeviceMemory::new(start, RECORD_BYTES, Arc::clone(keep)) })
            }
            _ => Err(self
                .inner()
                .invalid_answer("mlx5dv_init_obj", "a doorbell record outside the allocated queue memory")),
        }
    }
}

fn translate(attr: &mlx5dv_context) -> Mlx5Capabilities {
    let has = |bit| attr.comp_mask & bit != 0;
    let flag = |bit| attr.flags & bit != 0;
    let compression = &attr.cqe_comp_caps;
    let (striding, parsing) = (&attr.striding_rq_caps, &attr.sw_parsing_caps);
    let is_raw = |qpts: u32| qpts & (1 << IBV_QPT_RAW_PACKET) != 0;
    Mlx5Capabilities {
        cqe_version_1: flag(MLX5DV_CONTEXT_FLAGS_CQE_V1),
        multi_packet: flag(MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED) && flag(MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW),
        compression: (has(MLX5DV_CONTEXT_MASK_CQE_COMPRESION) && compression.max_num > 1)
            .then_some(Compression { max_session: compression.max_num, formats: compression.supported_format }),
        striding: (has(MLX5DV_CONTEXT_MASK_STRIDING_RQ) && is_raw(striding.supported_qpts)).then_some(Striding {
            log_bytes: striding.min_single_stride_log_num_of_bytes..=striding.max_single_stride_log_num_of_bytes,
            log_strides: striding.min_single_wqe_log_num_of_strides..=striding.max_single_wqe_log_num_of_strides,
        }),
        tunnels: if has(MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS) { attr.tunnel_offloads_caps } else { 0 },
        sw_parsing: if has(MLX5DV_CONTEXT_MASK_SWP) && is_raw(parsing.supported_qpts) {
            parsing.sw_parsing_offloads
        } else {
            0
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_outside_comp_mask_are_ignored() {
        let mut attr = mlx5dv_context::zeroed();
        attr.cqe_comp_caps = mlx5dv_cqe_comp_caps { max_num: 64, supported_format: 7 };
        attr.striding_rq_caps.supported_qpts = 1 << IBV_QPT_RAW_PACKET;
        attr.striding_rq_caps.max_single_stride_log_num_of_bytes = 13;
        attr.tunnel_offloads_caps = 7;
        attr.sw_parsing_caps = mlx5dv_sw_parsing_caps { sw_parsing_offloads: 5, supported_qpts: 1 << IBV_QPT_UD };
        attr.flags = MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW;
        assert_eq!(translate(&attr), Mlx5Capabilities::default());
        attr.comp_mask =
            MLX5DV_CONTEXT_MASK_CQE_COMPRESION | MLX5DV_CONTEXT_MASK_STRIDING_RQ | MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS;
        attr.flags |= MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED | MLX5DV_CONTEXT_FLAGS_CQE_V1;
        let all = translate(&attr);
        assert!(all.multi_packet && all.cqe_version_1 && all.tunnels == 7);
        assert_eq!(all.compression, Some(Compression { max_session: 64, formats: 7 }));
        assert_eq!(all.striding, Some(Striding { log_bytes: 0..=13, log_strides: 0..=0 }));
        attr.striding_rq_caps.supported_qpts = 1 << IBV_QPT_UD;
        assert_eq!(translate(&attr).striding, None, "striding of other queue pair types");
        attr.comp_mask |= MLX5DV_CONTEXT_MASK_SWP;
        assert_eq!(translate(&attr).sw_parsing, 0, "software parsing of other queue pair types");
        attr.sw_parsing_caps.supported_qpts |= 1 << IBV_QPT_RAW_PACKET;
        assert_eq!(translate(&attr).sw_parsing, 5);
    }
}
