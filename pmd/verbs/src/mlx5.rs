// UNSAFETY: calls libmlx5 and hands out the memory of its queues.
#![allow(unsafe_code)]

//! Direct verbs of mlx5 (mlx5dv(7)): queue memory of ours, and where the queues lie.
//!
//! The order of a port: [`Mlx5::set_allocator`] before any queue; completion queues ([`Mlx5::completion_queue_with`] for compressed
//! entries); a [`RawPacketQp`] for each send queue, moved to sending with [`RawPacketQp::start`]; [`WorkQueue`]s
//! ([`Mlx5::striding_queue`] for striding ones), started; then [`IndirectionTable`]s, one [`RssQp`] for each class of
//! packets, and [`crate::FlowRule`]s: without a rule nothing is received.

mod actions;
mod steering;
pub mod var;

use std::any::Any;
use std::ffi::c_void;
use std::ops::RangeInclusive;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rdma_core_sys::mlx5dv::*;
use rdma_core_sys::verbs::*;
use wirepath_memory::DeviceMemory;

pub use self::actions::{FlowCounter, LinkHeader, Modification, ModifyHeader, Reformat};
pub use self::steering::{
    Actions, Egress, EgressFate, FlowTag, Ingress, IngressFate, MatchParameters, Matcher, SteeringRule, Table,
};
use crate::context::ContextInner;
use crate::domain::Domain;
use crate::{
    CompletionQueue, CompletionQueueOptions, Context, Device, Error, HashFields, IndirectionTable, Provider,
    QueueAllocator, RawPacketQp, Result, RssQp, WorkQueue, WorkQueueOptions,
};

/// Size of a page of registers, and of doorbell records.
pub const PAGE_BYTES: usize = 4096;
/// Bytes of a basic block of a send queue.
const BLOCK_BYTES: usize = 64;
/// Bytes of a pair of doorbell records.
const RECORD_BYTES: usize = 8;

/// The direct verbs of an mlx5 device.
#[derive(Clone, Debug)]
pub struct Mlx5 {
    context: Context,
}

/// What a device can do beyond what plain verbs tell (mlx5dv_query_device(3)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mlx5Capabilities {
    /// Enhanced multi-packet send descriptors.
    pub multi_packet: bool,
    /// Compressed completions.
    pub compression: Option<Compression>,
    /// Striding receive queues.
    pub striding: Option<Striding>,
    /// `MLX5DV_RAW_PACKET_CAP_TUNNELED_OFFLOAD_*`: tunnels that the device looks into.
    pub tunnels: u32,
}

/// Compressed completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Compression {
    /// Most packets of a session.
    pub max_session: u32,
    /// `MLX5DV_CQE_RES_FORMAT_*`.
    pub formats: u32,
}

/// Striding receive queues for raw packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Striding {
    /// Bytes of a stride, logarithm.
    pub log_bytes: RangeInclusive<u32>,
    /// Strides of a work request, logarithm.
    pub log_strides: RangeInclusive<u32>,
}

/// A send queue in memory.
#[derive(Clone, Debug)]
pub struct SendQueue {
    /// The ring: a power of two of basic blocks of 64 bytes.
    pub ring: DeviceMemory,
    /// Two words: receive record, send record.
    pub records: DeviceMemory,
    /// The number that descriptors and completions carry.
    pub number: u32,
    /// Its page of registers.
    pub registers: DeviceMemory,
    /// Offset of its register.
    pub register: usize,
    /// Where another process maps the page of registers in the device that was passed to it ([`Mlx5::registers_at`]).
    pub registers_at: u64,
    /// Bytes of a BlueFlame buffer: the register alternates between its offset and this much behind. 0: one register, for doorbells only.
    pub blue_flame: usize,
}

/// A receive queue in memory.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    /// The ring: a power of two of entries.
    pub ring: DeviceMemory,
    /// Two words: receive record, send record.
    pub records: DeviceMemory,
    /// Entries.
    pub entries: u32,
    /// Bytes of an entry.
    pub stride: u32,
}

/// A completion queue in memory.
#[derive(Clone, Debug)]
pub struct CompletionRing {
    /// The ring: a power of two of entries of 64 bytes.
    pub ring: DeviceMemory,
    /// Two words: consumer counter, arm.
    pub records: DeviceMemory,
    /// Number of the queue.
    pub number: u32,
    /// Page of registers, one of which arms it.
    pub registers: DeviceMemory,
}

type Keep = Arc<dyn Any + Send + Sync>;

impl Mlx5 {
    /// The direct verbs of an open device.
    ///
    /// # Errors
    /// The device is no mlx5, or libmlx5 is not there.
    pub fn of(context: &Context) -> Result<Self> {
        let found = context.provider();
        if found != Provider::Mlx5 {
            return Err(Error::Provider { device: context.device().name(), found, wanted: Provider::Mlx5 });
        }
        context.inner.libraries.mlx5()?;
        Ok(Self { context: context.clone() })
    }

    /// Opens a device so that it also takes commands ([`FlowCounter`] needs them), or, where it takes none, without.
    ///
    /// # Errors
    /// It cannot be opened, the device is no mlx5, or libmlx5 is not there.
    pub fn open(device: &Device) -> Result<Self> {
        let open = device.verbs().libraries.mlx5()?.mlx5dv_open_device()?;
        let mut attr = mlx5dv_context_attr { flags: MLX5DV_CONTEXT_FLAGS_DEVX, ..mlx5dv_context_attr::zeroed() };
        let context = Context::open_by(device, "mlx5dv_open_device", |raw| {
            // SAFETY: a device of a living list; libmlx5 refuses those of other providers.
            unsafe { open(raw, &raw mut attr) }
        });
        match context {
            Ok(context) => {
                context.inner.commands.store(true, Ordering::Relaxed);
                Self::of(&context)
            }
            Err(_) => Self::of(&device.open()?),
        }
    }

    /// Whether the device takes commands of the program.
    pub fn takes_commands(&self) -> bool {
        self.inner().commands.load(Ordering::Relaxed)
    }

    /// The open device.
    pub fn context(&self) -> &Context {
        &self.context
    }

    fn library(&self) -> Result<&'static Mlx5dv> {
        Ok(self.context.inner.libraries.mlx5()?)
    }

    fn inner(&self) -> &ContextInner {
        &self.context.inner
    }

    /// Has libmlx5 take the memory of queues and doorbell records from here. Queues made before keep theirs, and cannot be looked at here.
    ///
    /// # Errors
    /// The context has an allocator already: libmlx5 frees with the one that it has then.
    pub fn set_allocator(&self, allocator: Arc<dyn QueueAllocator>) -> Result<()> {
        let set = self.library()?.mlx5dv_set_context_attr()?;
        self.inner().install_allocator(allocator, |callbacks| {
            let attr = (&raw mut *callbacks).cast::<c_void>();
            // SAFETY: a context of libmlx5, which copies the three words.
            let result = unsafe { set(self.inner().raw.as_ptr(), MLX5DV_CTX_ATTR_BUF_ALLOCATORS, attr) };
            self.inner().done("mlx5dv_set_context_attr", result)
        })
    }

    /// What the device can do.
    ///
    /// # Errors
    /// libmlx5 refused.
    pub fn capabilities(&self) -> Result<Mlx5Capabilities> {
        let query = self.library()?.mlx5dv_query_device()?;
        let mut attr = mlx5dv_context::zeroed();
        attr.comp_mask =
            MLX5DV_CONTEXT_MASK_CQE_COMPRESION | MLX5DV_CONTEXT_MASK_STRIDING_RQ | MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS;
        // SAFETY: a context of libmlx5; the struct is written as far as the mask says.
        self.inner().done("mlx5dv_query_device", unsafe { query(self.inner().raw.as_ptr(), &raw mut attr) })?;
        Ok(translate(&attr))
    }

    /// A completion queue whose receive completions may be compressed in `format`, one of `MLX5DV_CQE_RES_FORMAT_*`.
    ///
    /// # Errors
    /// The size is 0 or above 2²⁴, or the device refused.
    pub fn completion_queue_with(&self, options: &CompletionQueueOptions, format: u8) -> Result<CompletionQueue> {
        let create = self.library()?.mlx5dv_create_cq()?;
        let mut mlx5 = mlx5dv_cq_init_attr {
            comp_mask: MLX5DV_CQ_INIT_ATTR_MASK_COMPRESSED_CQE,
            cqe_comp_res_format: format,
            ..mlx5dv_cq_init_attr::zeroed()
        };
        CompletionQueue::with(&self.context, options, "mlx5dv_create_cq", |context, cqe, user, channel, vector| {
            let mut attr = ibv_cq_init_attr_ex {
                cqe: cqe.cast_unsigned(),
                cq_context: user,
                channel,
                comp_vector: vector.cast_unsigned(),
                ..ibv_cq_init_attr_ex::zeroed()
            };
            // SAFETY: an open context of libmlx5, and attributes of this library's version. An extended queue begins as a plain one
            // (verbs.h, ibv_cq_ex_to_cq).
            unsafe { create(context, &raw mut attr, &raw mut mlx5).cast() }
        })
    }

    /// A striding receive queue: `options.requests` work requests of 2^`log_strides` strides of 2^`log_bytes` bytes, scattered over
    /// `options.segments` buffers each.
    ///
    /// # Errors
    /// The device refused, for example because the numbers are outside [`Striding`].
    pub fn striding_queue(
        &self,
        domain: &impl Domain,
        options: &WorkQueueOptions,
        log_bytes: u32,
        log_strides: u32,
    ) -> Result<WorkQueue> {
        self.context.same_as(&domain.inner().context)?;
        let create = self.library()?.mlx5dv_create_wq()?;
        let mut mlx5 = mlx5dv_wq_init_attr::zeroed();
        mlx5.comp_mask = MLX5DV_WQ_INIT_ATTR_MASK_STRIDING_RQ;
        mlx5.striding_rq_attrs.single_stride_log_num_of_bytes = log_bytes;
        mlx5.striding_rq_attrs.single_wqe_log_num_of_strides = log_strides;
        WorkQueue::with(domain, options, "mlx5dv_create_wq", |context, attr| {
            // SAFETY: an open context of libmlx5, living objects in the attributes.
            unsafe { create(context, attr, &raw mut mlx5) }
        })
    }

    /// [`RssQp::new`] whose packets the device looks into if they are in a tunnel that it knows ([`Mlx5Capabilities::tunnels`]): what it
    /// says of checksums is then about the inner headers. Without, it is about the outer ones (mlx5dv_create_qp(3),
    /// `MLX5DV_QP_CREATE_TUNNEL_OFFLOADS`).
    ///
    /// # Errors
    /// The device refused; it does if it knows no tunnel.
    pub fn rss_into_tunnels(
        &self,
        domain: &impl Domain,
        table: &IndirectionTable,
        fields: HashFields,
        key: &[u8; 40],
    ) -> Result<RssQp> {
        self.context.same_as(&domain.inner().context)?;
        let create = self.library()?.mlx5dv_create_qp()?;
        let mut mlx5 = mlx5dv_qp_init_attr {
            comp_mask: MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
            create_flags: MLX5DV_QP_CREATE_TUNNEL_OFFLOADS,
            ..mlx5dv_qp_init_attr::zeroed()
        };
        RssQp::with(domain, table, fields, key, "mlx5dv_create_qp", |context, attr| {
            // SAFETY: an open context of libmlx5, living objects in the attributes.
            unsafe { create(context, attr, &raw mut mlx5) }
        })
    }

    /// Where a send queue lies. What is returned keeps the queue pair.
    ///
    /// # Errors
    /// The pair is of another device, or what libmlx5 says cannot be.
    pub fn send_queue(&self, pair: &RawPacketQp) -> Result<SendQueue> {
        self.context.same_as(&pair.0.domain.context)?;
        let mut out = mlx5dv_qp { comp_mask: MLX5DV_QP_MASK_UAR_MMAP_OFFSET, ..mlx5dv_qp::zeroed() };
        let mut object = mlx5dv_obj::zeroed();
        object.qp = mlx5dv_obj_qp { in_: pair.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_QP)?;
        let keep: Keep = pair.0.clone();
        if out.sq.stride as usize != BLOCK_BYTES || !out.sq.wqe_cnt.is_power_of_two() {
            let problem = format!("a send queue of {} blocks of {} bytes", out.sq.wqe_cnt, out.sq.stride);
            return Err(self.inner().nonsense("mlx5dv_init_obj", problem));
        }
        let ring = self.ring("send queue", out.sq.buf, out.sq.wqe_cnt as usize * BLOCK_BYTES, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        let register = out.bf.reg.addr() % PAGE_BYTES;
        let blue_flame = out.bf.size as usize;
        // Both buffers lie in the page.
        let Some(page) = NonNull::new(out.bf.reg.cast::<u8>().wrapping_sub(register))
            .filter(|_| !out.bf.reg.is_null() && register.is_multiple_of(8) && blue_flame.is_multiple_of(8))
            .filter(|_| register + 2 * blue_flame.max(8) <= PAGE_BYTES)
        else {
            return Err(self.inner().nonsense("mlx5dv_init_obj", "a send queue without a page of registers"));
        };
        // SAFETY: libmlx5 mapped a page there for writing; it unmaps it with the context, which `keep` keeps.
        let registers = unsafe { DeviceMemory::new(page, PAGE_BYTES, Arc::clone(&keep)) };
        if out.comp_mask & MLX5DV_QP_MASK_UAR_MMAP_OFFSET == 0 {
            return Err(self.inner().nonsense("mlx5dv_init_obj", "a send queue whose page of registers has no offset"));
        }
        let registers_at = out.uar_mmap_offset.cast_unsigned();
        Ok(SendQueue { ring, records, number: pair.number(), registers, register, registers_at, blue_flame })
    }

    /// Maps the page of registers of another process's send queue ([`SendQueue::registers_at`]) on the device that it passed
    /// ([`crate::Verbs::import_device`]).
    ///
    /// # Errors
    /// The kernel knows no such page of the device.
    pub fn registers_at(&self, offset: u64) -> Result<DeviceMemory> {
        let at = libc::off_t::try_from(offset).ok().filter(|at| at % PAGE_BYTES as libc::off_t == 0);
        let at = at.ok_or_else(|| Error::Foreign {
            what: "the page of registers",
            problem: format!("it would be at offset {offset:#x} of the device"),
        })?;
        crate::registers::map(self.context.descriptor(), at, PAGE_BYTES, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Where a receive queue lies. What is returned keeps the queue.
    ///
    /// # Errors
    /// The queue is of another device, or what libmlx5 says cannot be.
    pub fn receive_queue(&self, queue: &WorkQueue) -> Result<ReceiveQueue> {
        self.context.same_as(&queue.0.domain.context)?;
        let mut out = mlx5dv_rwq::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.rwq = mlx5dv_obj_rwq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_RWQ)?;
        let keep: Keep = queue.0.clone();
        if !out.wqe_cnt.is_power_of_two() || !out.stride.is_power_of_two() || out.stride < 16 {
            let problem = format!("a receive queue of {} entries of {} bytes", out.wqe_cnt, out.stride);
            return Err(self.inner().nonsense("mlx5dv_init_obj", problem));
        }
        let bytes = (out.wqe_cnt as usize).saturating_mul(out.stride as usize);
        let ring = self.ring("receive queue", out.buf, bytes, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        Ok(ReceiveQueue { ring, records, entries: out.wqe_cnt, stride: out.stride })
    }

    /// Where a completion queue lies. What is returned keeps the queue, which libibverbs must not poll any more.
    ///
    /// # Errors
    /// The queue is of another device, or what libmlx5 says cannot be.
    pub fn completion_queue(&self, queue: &CompletionQueue) -> Result<CompletionRing> {
        self.context.same_as(&queue.0.context)?;
        let mut out = mlx5dv_cq::zeroed();
        let mut object = mlx5dv_obj::zeroed();
        object.cq = mlx5dv_obj_cq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MLX5DV_OBJ_CQ)?;
        let keep: Keep = queue.0.clone();
        if out.cqe_size as usize != BLOCK_BYTES || !out.cqe_cnt.is_power_of_two() {
            let problem = format!("a completion queue of {} entries of {} bytes", out.cqe_cnt, out.cqe_size);
            return Err(self.inner().nonsense("mlx5dv_init_obj", problem));
        }
        let ring = self.ring("completion queue", out.buf, out.cqe_cnt as usize * BLOCK_BYTES, &keep)?;
        let records = self.records(out.dbrec, &keep)?;
        let page = NonNull::new(out.cq_uar.cast::<u8>()).filter(|page| page.addr().get().is_multiple_of(PAGE_BYTES));
        let Some(page) = page else {
            return Err(self.inner().nonsense("mlx5dv_init_obj", "a completion queue without a page of registers"));
        };
        // SAFETY: libmlx5 mapped a page there for writing; it unmaps it with the context, which `keep` keeps.
        let registers = unsafe { DeviceMemory::new(page, PAGE_BYTES, keep) };
        Ok(CompletionRing { ring, records, number: out.cqn, registers })
    }

    fn init(&self, object: &mut mlx5dv_obj, kinds: u64) -> Result<()> {
        let init = self.library()?.mlx5dv_init_obj()?;
        // SAFETY: a living object of a context of libmlx5, and room for what is said about it. Queue pairs over indirection tables, which
        // libmlx5 cannot describe, are of another type here.
        self.inner().done("mlx5dv_init_obj", unsafe { init(object, kinds) })
    }

    /// The memory of a ring, if the allocator really gave that much there.
    fn ring(&self, what: &str, start: *mut c_void, bytes: usize, keep: &Keep) -> Result<DeviceMemory> {
        let call = "mlx5dv_init_obj";
        let Some(start) = NonNull::new(start.cast::<u8>()) else {
            return Err(self.inner().nonsense(call, format!("a {what} without memory")));
        };
        let given = self.inner().allocator.get().and_then(|installed| installed.size(start)).unwrap_or(0);
        if bytes == 0 || bytes > given {
            return Err(self.inner().nonsense(call, format!("a {what} of {bytes} bytes in memory of {given}")));
        }
        // SAFETY: memory of our allocator, at least that long, freed when the queue that `keep` holds is destroyed.
        Ok(unsafe { DeviceMemory::new(start, bytes, Arc::clone(keep)) })
    }

    /// A pair of doorbell records, in a page of the allocator that it shares with those of other queues.
    fn records(&self, records: *mut u32, keep: &Keep) -> Result<DeviceMemory> {
        let offset = records.addr() % PAGE_BYTES;
        let page = NonNull::new(records.cast::<u8>().wrapping_sub(offset));
        let given = page.and_then(|page| self.inner().allocator.get()?.size(page)).unwrap_or(0);
        match NonNull::new(records.cast::<u8>()) {
            Some(start) if offset.is_multiple_of(8) && offset + RECORD_BYTES <= given => {
                // SAFETY: in a page of our allocator, freed when the queue that `keep` holds is destroyed.
                Ok(unsafe { DeviceMemory::new(start, RECORD_BYTES, Arc::clone(keep)) })
            }
            _ => Err(self.inner().nonsense("mlx5dv_init_obj", "doorbell records outside the memory for queues")),
        }
    }
}

fn translate(attr: &mlx5dv_context) -> Mlx5Capabilities {
    let has = |bit| attr.comp_mask & bit != 0;
    let flag = |bit| attr.flags & bit != 0;
    let compression = &attr.cqe_comp_caps;
    let striding = &attr.striding_rq_caps;
    Mlx5Capabilities {
        multi_packet: flag(MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED) && flag(MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW),
        compression: (has(MLX5DV_CONTEXT_MASK_CQE_COMPRESION) && compression.max_num > 1)
            .then_some(Compression { max_session: compression.max_num, formats: compression.supported_format }),
        striding: (has(MLX5DV_CONTEXT_MASK_STRIDING_RQ) && striding.supported_qpts & (1 << IBV_QPT_RAW_PACKET) != 0)
            .then_some(Striding {
                log_bytes: striding.min_single_stride_log_num_of_bytes..=striding.max_single_stride_log_num_of_bytes,
                log_strides: striding.min_single_wqe_log_num_of_strides..=striding.max_single_wqe_log_num_of_strides,
            }),
        tunnels: if has(MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS) { attr.tunnel_offloads_caps } else { 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_library_filled_counts() {
        let mut attr = mlx5dv_context::zeroed();
        attr.cqe_comp_caps = mlx5dv_cqe_comp_caps { max_num: 64, supported_format: 7 };
        attr.striding_rq_caps.supported_qpts = 1 << IBV_QPT_RAW_PACKET;
        attr.striding_rq_caps.max_single_stride_log_num_of_bytes = 13;
        attr.tunnel_offloads_caps = 7;
        attr.flags = MLX5DV_CONTEXT_FLAGS_ENHANCED_MPW;
        assert_eq!(translate(&attr), Mlx5Capabilities::default());
        attr.comp_mask =
            MLX5DV_CONTEXT_MASK_CQE_COMPRESION | MLX5DV_CONTEXT_MASK_STRIDING_RQ | MLX5DV_CONTEXT_MASK_TUNNEL_OFFLOADS;
        attr.flags |= MLX5DV_CONTEXT_FLAGS_MPW_ALLOWED;
        let all = translate(&attr);
        assert!(all.multi_packet && all.tunnels == 7);
        assert_eq!(all.compression, Some(Compression { max_session: 64, formats: 7 }));
        assert_eq!(all.striding, Some(Striding { log_bytes: 0..=13, log_strides: 0..=0 }));
        attr.striding_rq_caps.supported_qpts = 1 << IBV_QPT_UD;
        assert_eq!(translate(&attr).striding, None, "of other queue pairs");
    }
}
