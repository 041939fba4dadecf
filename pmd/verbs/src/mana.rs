// UNSAFETY: calls libmana and maps its pages of registers.
#![allow(unsafe_code)]

//! Direct verbs of MANA (manadv(7)): queue memory of ours, and where the queues lie.
//!
//! The order of a port: [`Mana::set_allocator`] once, then for each port a [`Mana::parent_domain`]; completion queues; [`RawPacketQp`]s to
//! send, which claim the port; [`WorkQueue`]s, [`crate::IndirectionTable`] and [`crate::RssQp`] to receive. Queues are live at once, and
//! none changes state. Only then [`Mana::send_queue`], [`Mana::receive_queue`] and [`Mana::completion_queue`] have something to say: a
//! completion queue has a number since a queue pair uses it.

use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rdma_core_sys::manadv::*;
use rustix::fs::{FileType, SealFlags, Stat, fcntl_get_seals, fstat};
use wirepath_memory::DeviceMemory;

use crate::context::ContextInner;
use crate::{
    CompletionQueue, Context, Error, ParentDomain, ProtectionDomain, Provider, QueueAllocator, RawPacketQp, Result,
    WorkQueue, registers,
};

/// Size of a page of registers.
pub const DOORBELL_PAGE_BYTES: usize = 4096;

/// Bytes of a completion.
const COMPLETION_BYTES: usize = 64;

/// What libmana leaves in a completion queue's number until a queue pair has given it one.
const NO_NUMBER: u32 = u32::MAX;

/// The direct verbs of a MANA device.
#[derive(Clone, Debug)]
pub struct Mana {
    context: Context,
}

/// A send queue in memory.
#[derive(Clone, Debug)]
pub struct SendQueue {
    /// The ring: a power of two of bytes, at least a page.
    pub ring: DeviceMemory,
    /// Work requests that may be outstanding, by the kernel's reply.
    pub requests: u32,
    /// Number of the queue, 24 bits.
    pub id: u32,
    /// Virtual port offset that every descriptor carries; short descriptors have room for 8 bits of it, long ones for 12.
    pub vport_offset: u32,
    /// Its page of registers.
    pub doorbells: DeviceMemory,
}

/// A receive queue in memory.
#[derive(Clone, Debug)]
pub struct ReceiveQueue {
    /// The ring: a power of two of bytes, at least a page.
    pub ring: DeviceMemory,
    /// Work requests that may be outstanding.
    pub requests: u32,
    /// Number of the queue, 24 bits.
    pub id: u32,
    /// Its page of registers.
    pub doorbells: DeviceMemory,
}

/// A completion queue in memory.
#[derive(Clone, Debug)]
pub struct CompletionRing {
    /// The ring: `entries` times 64 bytes.
    pub ring: DeviceMemory,
    /// Entries: as many as were asked for, not always a power of two.
    pub entries: u32,
    /// Number of the queue, 24 bits.
    pub id: u32,
}

impl Mana {
    /// The direct verbs of an open device.
    ///
    /// # Errors
    /// The device is no MANA, or libmana is not there.
    pub fn of(context: &Context) -> Result<Self> {
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

    /// Has libmana take the memory of queues from here. Queues cannot be made before.
    ///
    /// # Errors
    /// The context has an allocator already: libmana frees with the one that it has then.
    pub fn set_allocator(&self, allocator: Arc<dyn QueueAllocator>) -> Result<()> {
        let set = self.library()?.manadv_set_context_attr()?;
        self.inner().install_allocator(allocator, |callbacks| {
            let attr = (&raw mut *callbacks).cast::<c_void>();
            // SAFETY: a context of libmana, which copies the three words.
            let result = unsafe { set(self.inner().raw.as_ptr(), MANADV_CTX_ATTR_BUF_ALLOCATORS, attr) };
            self.inner().done("manadv_set_context_attr", result)
        })
    }

    /// The domain of a port, counted from 1: queue pairs and receive queues of raw packets are made in it.
    ///
    /// # Errors
    /// The domain is of another device, or libmana refused.
    pub fn parent_domain(&self, base: &ProtectionDomain, port: u8) -> Result<ParentDomain> {
        self.context.same_as(&base.0.context)?;
        ParentDomain::with_word(base, port.into(), Some(port))
    }

    /// Where a send queue lies. What is returned keeps the queue pair.
    ///
    /// # Errors
    /// The pair is of another device, or what libmana says cannot be.
    pub fn send_queue(&self, pair: &RawPacketQp) -> Result<SendQueue> {
        self.context.same_as(&pair.0.domain.context)?;
        let mut out = manadv_qp::zeroed();
        let mut object = manadv_obj::zeroed();
        object.qp = manadv_obj_qp { in_: pair.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_QP)?;
        let keep: Arc<dyn std::any::Any + Send + Sync> = pair.0.clone();
        let ring = self.ring("send queue", out.sq_buf, out.sq_size as usize, &keep)?;
        let doorbells = self.doorbells(out.db_page, &keep)?;
        check_ring(out.sq_size)
            .map_err(|problem| self.inner().nonsense("manadv_init_obj", format!("send queue {problem}")))?;
        Ok(SendQueue { ring, requests: out.sq_count, id: out.sq_id, vport_offset: out.tx_vp_offset, doorbells })
    }

    /// Where a receive queue lies. What is returned keeps the queue.
    ///
    /// # Errors
    /// The queue is of another device, or what libmana says cannot be.
    pub fn receive_queue(&self, queue: &WorkQueue) -> Result<ReceiveQueue> {
        self.context.same_as(&queue.0.domain.context)?;
        let mut out = manadv_rwq::zeroed();
        let mut object = manadv_obj::zeroed();
        object.rwq = manadv_obj_rwq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_RWQ)?;
        let keep: Arc<dyn std::any::Any + Send + Sync> = queue.0.clone();
        let ring = self.ring("receive queue", out.buf, out.size as usize, &keep)?;
        let doorbells = self.doorbells(out.db_page, &keep)?;
        check_ring(out.size)
            .map_err(|problem| self.inner().nonsense("manadv_init_obj", format!("receive queue {problem}")))?;
        Ok(ReceiveQueue { ring, requests: out.count, id: out.wq_id, doorbells })
    }

    /// Where a completion queue lies. What is returned keeps the queue.
    ///
    /// # Errors
    /// No queue pair uses the queue yet, it is of another device, or what libmana says cannot be.
    pub fn completion_queue(&self, queue: &CompletionQueue) -> Result<CompletionRing> {
        self.context.same_as(&queue.0.context)?;
        let mut out = manadv_cq::zeroed();
        let mut object = manadv_obj::zeroed();
        object.cq = manadv_obj_cq { in_: queue.0.raw.as_ptr(), out: &raw mut out };
        self.init(&mut object, MANADV_OBJ_CQ)?;
        if out.cq_id == NO_NUMBER {
            return Err(Error::Request("a MANA completion queue has no number before a queue pair uses it".to_owned()));
        }
        if out.count == 0 {
            return Err(self.inner().nonsense("manadv_init_obj", "a completion queue without entries"));
        }
        let keep: Arc<dyn std::any::Any + Send + Sync> = queue.0.clone();
        let bytes = (out.count as usize).saturating_mul(COMPLETION_BYTES);
        let ring = self.ring("completion queue", out.buf, bytes, &keep)?;
        Ok(CompletionRing { ring, entries: out.count, id: out.cq_id })
    }

    fn init(&self, object: &mut manadv_obj, kind: u64) -> Result<()> {
        let init = self.library()?.manadv_init_obj()?;
        // SAFETY: a living object of a context of libmana, and room for what is said about it.
        self.inner().done("manadv_init_obj", unsafe { init(object, kind) })
    }

    /// The memory of a ring, if the allocator really gave that much there.
    fn ring(
        &self,
        what: &str,
        start: *mut c_void,
        bytes: usize,
        keep: &Arc<dyn std::any::Any + Send + Sync>,
    ) -> Result<DeviceMemory> {
        let call = "manadv_init_obj";
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

    fn doorbells(&self, page: *mut c_void, keep: &Arc<dyn std::any::Any + Send + Sync>) -> Result<DeviceMemory> {
        match NonNull::new(page.cast::<u8>()) {
            Some(page) if page.addr().get().is_multiple_of(DOORBELL_PAGE_BYTES) => {
                // SAFETY: libmana mapped a page there for writing; it unmaps it with the context, which `keep` keeps.
                Ok(unsafe { DeviceMemory::new(page, DOORBELL_PAGE_BYTES, Arc::clone(keep)) })
            }
            _ => Err(self.inner().nonsense("manadv_init_obj", "a queue without a page of registers")),
        }
    }
}

fn check_ring(bytes: u32) -> std::result::Result<(), String> {
    if bytes.is_power_of_two() && bytes >= 4096 {
        return Ok(());
    }
    Err(format!("of {bytes} bytes, which is no power of two from 4096 on"))
}

/// Maps the page of registers in another process, from the device file that was passed to it ([`Context::descriptor`]). The page can be
/// written, not read. The file may be closed afterwards; the mapping keeps the kernel's side of the queues.
///
/// # Errors
/// The kernel refused: it is not an open MANA device. Or it is a file that could lose the page while it is mapped.
pub fn map_doorbells(device: BorrowedFd<'_>) -> Result<DeviceMemory> {
    let keeps_its_size = || fcntl_get_seals(device).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    let lasts = |file: &Stat| {
        FileType::from_raw_mode(file.st_mode) != FileType::RegularFile
            || file.st_size >= DOORBELL_PAGE_BYTES as i64 && keeps_its_size()
    };
    if !fstat(device).is_ok_and(|file| lasts(&file)) {
        let problem = "it is no device, nor memory that stays".to_owned();
        return Err(Error::Foreign { what: "the page of doorbells", problem });
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
        // Too short, or not for good: a store would end the process.
        assert!(matches!(map_doorbells(file.as_fd()), Err(Error::Foreign { .. })));
        file.set_len(DOORBELL_PAGE_BYTES as u64).unwrap();
        assert!(matches!(map_doorbells(file.as_fd()), Err(Error::Foreign { .. })));
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let page = map_doorbells(file.as_fd()).unwrap();
        Doorbell::new(&page, 0x400).ring(0x0102_0304_0506_0708);
        let mut seen = [0; 8];
        file.read_exact_at(&mut seen, 0x400).unwrap();
        assert_eq!(u64::from_ne_bytes(seen), 0x0102_0304_0506_0708);
        // What is no device.
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let error = map_doorbells(socket.as_fd()).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENODEV), "{error}");
    }
}
