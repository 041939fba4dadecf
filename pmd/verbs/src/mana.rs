// UNSAFETY: calls libmana and maps its doorbell pages.
#![allow(unsafe_code)]

//! Direct verbs of MANA (manadv(7)): allocators of queue memory, and the addresses of queues.
//!
//! Set up a port in this order:
//!
//! 1. [`Mana::set_allocator`], once for each context.
//! 2. [`Mana::parent_domain`], for each port.
//! 3. Completion queues.
//! 4. [`RawPacketQp`]s to send. They claim the port.
//! 5. [`WorkQueue`]s, [`crate::IndirectionTable`] and [`crate::RssQp`] to receive.
//! 6. [`Mana::send_queue`], [`Mana::receive_queue`] and [`Mana::completion_queue`] return the memory of the queues. A
//!    completion queue has a number only after a queue pair uses it.
//!
//! Queues are live when they are created and do not change state.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::manadv::*;
use rustix::fs::{FileType, SealFlags, Stat, fcntl_get_seals, fstat};
use wirepath_memory::DeviceMemory;

use crate::allocator::KeepAlive;
use crate::context::ContextInner;
use crate::{
    CompletionQueue, Context, Error, ParentDomain, ProtectionDomain, Provider, QueueAllocator, RawPacketQp, Result,
    WorkQueue, registers,
};

/// Size of a doorbell page in bytes.
pub const DOORBELL_PAGE_BYTES: usize = 4096;

/// Size of a CQE in bytes.
const COMPLETION_BYTES: usize = 64;

/// Completion queue number that libmana reports until a queue pair uses the queue.
const UNASSIGNED_CQ_ID: u32 = u32::MAX;

/// Direct verbs of a MANA device.
#[derive(Clone, Debug)]
pub struct Mana {
    context: Context,
}

/// Memory of a send queue.
#[derive(Clone, Debug)]
pub struct SendQueue {
    /// Ring. Its size in bytes is a power of two and at least a page.
    pub ring: DeviceMemory,
    /// Maximum number of outstanding work requests, from the kernel's reply.
    pub requests: u32,
    /// Queue number (24 bits).
    pub id: u32,
    /// Virtual port offset that every WQE carries. The short OOB has 8 bits for it, the long OOB 12.
    pub vport_offset: u32,
    /// Doorbell page.
    pub doorbells: DeviceMemory,
}

/// Memory of a receive queue.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    /// Ring. Its size in bytes is a power of two and at least a page.
    pub ring: DeviceMemory,
    /// Maximum number of outstanding work requests.
    pub requests: u32,
    /// Queue number (24 bits).
    pub id: u32,
    /// Doorbell page.
    pub doorbells: DeviceMemory,
}

/// Memory of a completion queue.
#[derive(Clone, Debug)]
pub struct CompletionRing {
    /// Ring of `entries` times 64 bytes.
    pub ring: DeviceMemory,
    /// Number of entries. It is the requested number, which need not be a power of two.
    pub entries: u32,
    /// Queue number (24 bits).
    pub id: u32,
}

impl Mana {
    /// Returns the direct verbs of an open device.
    ///
    /// # Errors
    /// The device is not a MANA, or libmana is missing.
    pub fn from_context(context: &Context) -> Result<Self> {
        let found = context.provider();
        if found != Provider::Mana {
            return Err(Error::Provider { device: context.device().name(), found, wanted: Provider::Mana });
        }
        context.inner.libraries.mana()?;
        Ok(Self { context: context.clone() })
    }

    fn library(&self) -> Result<&'static Manadv> {
        Ok(self.context.inner.libraries.mana()?)
    }

    fn inner(&self) -> &ContextInner {
        &self.context.inner
    }

    /// Sets the allocator from which libmana takes queue memory. Queues can be created only afterwards.
    ///
    /// # Errors
    /// The context already has an allocator. It cannot be replaced, because libmana frees memory with the current one.
    pub fn set_allocator(&self, allocator: Arc<dyn QueueAllocator>) -> Result<()> {
        let set = self.library()?.manadv_set_context_attr()?;
        self.inner().install_allocator(allocator, |callbacks| {
            let attr = (&raw mut *callbacks).cast::<c_void>();
            // SAFETY: the context is open and belongs to libmana. `attr` is valid during the call, and libmana copies
            // it.
            let result = unsafe { set(self.inner().raw.as_ptr(), MANADV_CTX_ATTR_BUF_ALLOCATORS, attr) };
            self.inner().check("manadv_set_context_attr", result)
        })
    }

    /// Allocates the parent domain of a port, counted from 1. Raw-packet queue pairs and receive queues are created
    /// in it.
    ///
    /// # Errors
    /// `base` belongs to another device, or libmana cannot allocate the domain.
    pub fn parent_domain(&self, base: &ProtectionDomain, port: u8) -> Result<ParentDomain> {
        self.context.check_same_context(&base.0.context)?;
        ParentDomain::with_pd_context(base, port.into(), Some(port))
    }

    /// Returns the memory of a send queue. The returned views keep the queue pair alive.
    ///
    /// # Errors
    /// The pair belongs to another device, or libmana returned invalid values.
    pub fn send_queue(&self, pair: &RawPacketQp) -> Result<SendQueue> {
        self.context.check_same_context(&pair.0.domain.context)?;
        let mut out = manadv_qp::zeroed();
        let mut object = manadv_obj::zeroed();
        object.qp = manadv_obj_qp { in_: pair.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_QP)?;
        let keep: KeepAlive = pair.0.clone();
        let ring = self.ring("send queue", out.sq_buf, out.sq_size as usize, &keep)?;
        let doorbells = self.doorbells(out.db_page, &keep)?;
        check_ring(out.sq_size)
            .map_err(|problem| self.inner().invalid_answer("manadv_init_obj", format!("send queue {problem}")))?;
        Ok(SendQueue { ring, requests: out.sq_count, id: out.sq_id, vport_offset: out.tx_vp_offset, doorbells })
    }

    /// Returns the memory of a receive queue. The returned views keep the queue alive.
    ///
    /// # Errors
    /// The queue belongs to another device, or libmana returned invalid values.
    pub fn receive_queue(&self, queue: &WorkQueue) -> Result<ReceiveQueue> {
        self.context.check_same_context(&queue.0.domain.context)?;
        let mut out = manadv_rwq::zeroed();
        let mut object = manadv_obj::zeroed();
        object.rwq = manadv_obj_rwq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_RWQ)?;
        let keep: KeepAlive = queue.0.clone();
        let ring = self.ring("receive queue", out.buf, out.size as usize, &keep)?;
        let doorbells = self.doorbells(out.db_page, &keep)?;
        check_ring(out.size)
            .map_err(|problem| self.inner().invalid_answer("manadv_init_obj", format!("receive queue {problem}")))?;
        Ok(ReceiveQueue { ring, requests: out.count, id: out.wq_id, doorbells })
    }

    /// Returns the memory of a completion queue. The returned view keeps the queue alive.
    ///
    /// # Errors
    /// No queue pair uses the queue yet, it belongs to another device, or libmana returned invalid values.
    pub fn completion_queue(&self, queue: &CompletionQueue) -> Result<CompletionRing> {
        self.context.check_same_context(&queue.0.context)?;
        let mut out = manadv_cq::zeroed();
        let mut object = manadv_obj::zeroed();
        object.cq = manadv_obj_cq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_CQ)?;
        if out.cq_id == UNASSIGNED_CQ_ID {
            return Err(Error::InvalidRequest(
                "a MANA completion queue has no number before a queue pair uses it".to_owned(),
            ));
        }
        if out.count == 0 {
            return Err(self.inner().invalid_answer("manadv_init_obj", "a completion queue without entries"));
        }
        let keep: KeepAlive = queue.0.clone();
        let bytes = (out.count as usize).saturating_mul(COMPLETION_BYTES);
        let ring = self.ring("completion queue", out.buf, bytes, &keep)?;
        Ok(CompletionRing { ring, entries: out.count, id: out.cq_id })
    }

    fn init(&self, object: &mut manadv_obj, kind: u64) -> Result<()> {
        let init = self.library()?.manadv_init_obj()?;
        // SAFETY: `object` points to a living object of a libmana context, and its output is valid for writes.
        self.inner().check("manadv_init_obj", unsafe { init(object, kind) })
    }

    /// Returns the memory of a ring of a queue that `keep` keeps alive.
    fn ring(&self, what: &str, start: *mut c_void, bytes: usize, keep: &KeepAlive) -> Result<DeviceMemory> {
        // SAFETY: libmana reported the ring of a queue, and `keep` keeps this queue alive.
        unsafe { self.inner().ring_memory("manadv_init_obj", what, start, bytes, keep) }
    }

    fn doorbells(&self, page: *mut c_void, keep: &KeepAlive) -> Result<DeviceMemory> {
        match NonNull::new(page.cast::<u8>()) {
            Some(page) if page.addr().get().is_multiple_of(DOORBELL_PAGE_BYTES) => {
                // SAFETY: libmana mapped a writable page at this address. It unmaps the page when it closes the
                // context, and `keep` keeps the context alive.
                Ok(unsafe { DeviceMemory::new(page, DOORBELL_PAGE_BYTES, Arc::clone(keep)) })
            }
            _ => Err(self.inner().invalid_answer("manadv_init_obj", "a queue without a doorbell page")),
        }
    }
}

fn check_ring(bytes: u32) -> std::result::Result<(), String> {
    if bytes.is_power_of_two() && bytes >= 4096 {
        return Ok(());
    }
    Err(format!("of {bytes} bytes; the size must be a power of two of at least 4096"))
}

/// Maps the doorbell page in another process, from the device file that was passed to it ([`Context::cmd_fd`]).
///
/// The page can be written but not read. The file may be closed afterwards: the mapping keeps the kernel's queues
/// alive.
///
/// # Errors
/// The file is not an open MANA device, or it is a file that could be truncated while it is mapped.
pub fn map_doorbells(device: BorrowedFd<'_>) -> Result<DeviceMemory> {
    let keeps_its_size = || fcntl_get_seals(device).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let lasts = |file: &Stat| {
        FileType::from_raw_mode(file.st_mode) != FileType::RegularFile
            || file.st_size >= DOORBELL_PAGE_BYTES as i64 && keeps_its_size()
    };
    if !fstat(device).is_ok_and(|file| lasts(&file)) {
        let problem = "it is neither a device nor sealed memory of at least a page".to_owned();
        return Err(Error::InvalidImport { what: "the doorbell page", problem });
    }
    registers::map(device, 0, DOORBELL_PAGE_BYTES, libc::PROT_WRITE)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::fs::{MemfdFlags, fcntl_add_seals, memfd_create};
    use wirepath_memory::Doorbell;

    use super::*;

    #[test]
    fn rings_are_powers_of_two_of_whole_pages() {
        assert!(check_ring(4096).is_ok() && check_ring(1 << 20).is_ok());
        for wrong in [0, 64, 2048, 12288, u32::MAX] {
            assert!(check_ring(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn registers_are_mapped_from_a_passed_file() {
        use std::os::unix::fs::FileExt;
        let file = memfd_create("doorbells", MemfdFlags::ALLOW_SEALING).map(std::fs::File::from).unwrap();
        file.set_len(DOORBELL_PAGE_BYTES as u64 - 1).unwrap();
        // A file that is too short, or that could be truncated, is rejected: a store would kill the process.
        assert!(matches!(map_doorbells(file.as_fd()), Err(Error::InvalidImport { .. })));
        file.set_len(DOORBELL_PAGE_BYTES as u64).unwrap();
        assert!(matches!(map_doorbells(file.as_fd()), Err(Error::InvalidImport { .. })));
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let page = map_doorbells(file.as_fd()).unwrap();
        Doorbell::new(&page, 0x400).ring(0x0102_0304_0506_0708);
        let mut seen = [0; 8];
        file.read_exact_at(&mut seen, 0x400).unwrap();
        assert_eq!(u64::from_ne_bytes(seen), 0x0102_0304_0506_0708);
        // A socket is not a device.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = map_doorbells(socket.as_fd()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV), "{error}");
    }
}
