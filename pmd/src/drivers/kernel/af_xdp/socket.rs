// UNSAFETY: sets a socket option that rustix lacks.
#![allow(unsafe_code)]

//! AF_XDP sockets of a port: one for each receive queue of the interface, with one registered UMEM.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpOptionsFlags, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, bind, recv, send, socket_with};
use wirepath_memory::Region;
use wirepath_memory::ring::RingSize;

use super::posted_buffers::PostedBuffers;
use super::ring::{Consumer, Producer, SharedDescriptor};
use super::umem_chunks::CHUNK;
use crate::drivers::kernel::common::namespace::Namespace;
use wirepath_packet::{BUFFER_BYTES, METADATA, Packet};

/// `XDP_PKT_CONTD`: the frame continues in the next descriptor.
pub(super) const CONTINUED: u32 = 1;
/// Shift of the data offset in an address of unaligned chunks (`XSK_UNALIGNED_BUF_OFFSET_SHIFT`).
pub(super) const OFFSET_SHIFT: u32 = 48;
/// Time to wait for a busy queue that another process may use. The kernel frees the queue of a killed process some time
/// after the end of the process.
pub(super) const QUEUE_RELEASE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time to wait for a busy queue that this process has released. The kernel frees a queue after an RCU grace period, in
/// a worker thread that takes the RTNL lock (`xsk_destruct`, `xp_release_deferred`). Both take many seconds on a busy
/// machine.
const OWN_RELEASE_TIMEOUT: Duration = Duration::from_secs(60);
/// Length of the shortest frame: an Ethernet header.
pub(super) const MIN_FRAME: usize = 14;
/// Mask of the chunk offset in an address of unaligned chunks (`XSK_UNALIGNED_BUF_ADDR_MASK`).
pub(super) const BASE_MASK: u64 = (1 << OFFSET_SHIFT) - 1;

/// UMEM that the sockets of a port share.
///
/// One registration serves all sockets of the port (`XDP_SHARED_UMEM`). The memory is pinned and accounted
/// once, and all queues get the same mode.
#[derive(Clone)]
pub(super) enum Umem {
    /// Region of the port's packet pool: the kernel writes received frames into packets.
    Pool(Arc<Region>),
    /// A separate region with aligned chunks, for kernels and drivers that refuse the pool's stride. Frames
    /// are copied.
    Separate(Arc<Region>),
}

impl Umem {
    fn region(&self) -> &Arc<Region> {
        match self {
            Self::Pool(region) | Self::Separate(region) => region,
        }
    }
}

/// State that the queues of a port share.
#[derive(Debug, Default)]
pub(super) struct PortState {
    /// The interface is gone.
    pub(super) lost: AtomicBool,
    /// Length of the longest untagged frame in bytes, from the interface's MTU.
    pub(super) frame_limit: AtomicU64,
    /// A queue found its pool empty since this was last cleared.
    pub(super) pool_was_empty: AtomicBool,
}

/// A socket, shared by the receive and the transmit queue that use its rings.
pub(super) struct Socket {
    // Closed first. After that the kernel no longer writes to posted buffers, and `free_on_close` may return
    // the packets.
    descriptor: OwnedFd,
    free_on_close: Mutex<Vec<(PostedBuffers, Vec<Packet>)>>,
    /// Receive queue of the interface.
    pub(super) queue: u32,
    /// Place of that queue on the machine; `None` in tests.
    place: Option<QueuePlace>,
    pub(super) shared: Arc<PortState>,
}

/// A receive queue of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueuePlace {
    /// Inode of the network namespace.
    namespace: u64,
    interface: u32,
    queue: u32,
}

/// Queues that sockets of this process have released, with the times. The kernel may still hold them.
static RELEASED: Mutex<Vec<(QueuePlace, Instant)>> = Mutex::new(Vec::new());

impl QueuePlace {
    /// Returns when the last socket of this process released the queue, unless the kernel must have freed it since.
    fn released(self) -> Option<Instant> {
        let list = RELEASED.lock().unwrap_or_else(PoisonError::into_inner);
        list.iter().find(|(place, _)| *place == self).map(|(_, at)| *at)
    }

    /// Remembers that a socket of this process releases the queue.
    fn release(self) {
        let mut list = RELEASED.lock().unwrap_or_else(PoisonError::into_inner);
        list.retain(|(place, at)| *place != self && at.elapsed() < OWN_RELEASE_TIMEOUT);
        list.push((self, Instant::now()));
    }

    /// Notes that a socket of this process has the queue.
    fn take(self) {
        RELEASED.lock().unwrap_or_else(PoisonError::into_inner).retain(|(place, _)| *place != self);
    }

    /// Returns the end of the time to wait for the queue. `timeout` is the time to wait for a queue that another
    /// process uses; zero: do not wait at all.
    fn wait_end(self, timeout: Duration) -> Instant {
        let own = self.released().filter(|_| !timeout.is_zero()).map(|at| at + OWN_RELEASE_TIMEOUT);
        own.into_iter().fold(Instant::now() + timeout, Instant::max)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            place.release();
        }
    }
}

/// Rings of the receive side.
pub(super) struct RxRings {
    pub(super) rx: Consumer<SharedDescriptor>,
    pub(super) fill: Producer<AtomicU64>,
}

/// Rings of the transmit side.
pub(super) struct TxRings {
    pub(super) tx: Producer<SharedDescriptor>,
    pub(super) completion: Consumer<AtomicU64>,
}

/// A bound socket with its rings.
pub(super) struct BoundSocket {
    pub(super) receive: RxRings,
    pub(super) transmit: TxRings,
    pub(super) socket: Arc<Socket>,
}

/// Parameters for binding the sockets.
#[derive(Clone, Copy, Debug)]
pub(super) struct BindConfig {
    /// Zero-copy if the driver supports it. Otherwise copy mode is requested.
    pub(super) zero_copy: bool,
    /// Frames of several buffers (`XDP_USE_SG`).
    pub(super) fragments: bool,
    /// Entries of the TX and completion rings.
    pub(super) transmit: RingSize,
    /// Entries of the RX and fill rings: the number of posted buffers, so that the RX ring never overflows.
    pub(super) receive: RingSize,
    /// Poll the NIC in system calls of the worker.
    pub(super) busy_poll: bool,
    /// Time to wait for a queue that another process holds. Unless it is zero, the wait for a queue that this process
    /// has released is longer.
    pub(super) release_timeout: Duration,
}

/// Features that the kernel granted.
#[derive(Clone, Copy, Debug)]
pub(super) struct BindFeatures {
    pub(super) zero_copy: bool,
    pub(super) fragments: bool,
    pub(super) need_wakeup: bool,
}

/// A failed step of the setup.
#[derive(Debug)]
pub(super) struct SetupError {
    pub(super) what: String,
    pub(super) source: io::Error,
}

fn setup_step<T>(what: impl Into<String>, result: rustix::io::Result<T>) -> Result<T, SetupError> {
    result.map_err(|e| SetupError { what: what.into(), source: e.into() })
}

/// Opens and binds one socket for each of the first `queues` receive queues of the interface.
pub(super) fn bind_queues(
    interface: u32,
    queues: u32,
    memory: &Umem,
    bind_config: BindConfig,
    shared: &Arc<PortState>,
) -> Result<(Vec<BoundSocket>, BindFeatures), SetupError> {
    let mut bound: Vec<BoundSocket> = Vec::with_capacity(queues as usize);
    let mut got = None;
    let namespace = Namespace::current().inode();
    for queue in 0..queues {
        let place = QueuePlace { namespace, interface, queue };
        let owner = bound.first().map(|b| &*b.socket);
        let try_with = |fragments, need_wakeup| {
            let bind_config = BindConfig { fragments, ..bind_config };
            let end = place.wait_end(bind_config.release_timeout);
            loop {
                match open(place, memory, bind_config, need_wakeup, owner, shared) {
                    // The kernel frees a queue some time after its socket is closed.
                    Err(failed) if failed.source.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    result => return result,
                }
            }
        };
        let opened = match got {
            Some(BindFeatures { fragments, need_wakeup, .. }) => try_with(fragments, need_wakeup)?,
            None => {
                // Newest features first: fragments need Linux 6.6, need-wakeup needs 5.4. A kernel refuses an
                // unknown flag with EINVAL.
                let mut choices = vec![(true, true), (false, true), (false, false)];
                choices.retain(|&(fragments, _)| bind_config.fragments || !fragments);
                let mut last = None;
                let mut found = None;
                for (fragments, need_wakeup) in choices {
                    match try_with(fragments, need_wakeup) {
                        Ok(it) => {
                            let options =
                                setup_step("reading the socket's mode", sockopt::xdp_options(&it.socket.descriptor))?;
                            let zero_copy = options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
                            got = Some(BindFeatures { zero_copy, fragments, need_wakeup });
                            found = Some(it);
                            break;
                        }
                        Err(failed) => {
                            let refused = matches!(failed.source.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP));
                            last = Some(failed);
                            if !refused {
                                break;
                            }
                        }
                    }
                }
                match (found, last) {
                    (Some(it), _) => it,
                    (None, Some(failed)) => return Err(failed),
                    (None, None) => unreachable!("there is at least one choice"),
                }
            }
        };
        bound.push(opened);
    }
    let got = got.ok_or_else(|| SetupError { what: "binding".into(), source: io::ErrorKind::InvalidInput.into() })?;
    Ok((bound, got))
}

fn open(
    place: QueuePlace,
    memory: &Umem,
    bind_config: BindConfig,
    need_wakeup: bool,
    owner: Option<&Socket>,
    shared: &Arc<PortState>,
) -> Result<BoundSocket, SetupError> {
    let kind = (AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC);
    let fd = setup_step("opening an AF_XDP socket", socket_with(kind.0, kind.1, kind.2, None))?;
    if owner.is_none() {
        register_umem(&fd, memory)?;
    }
    let (depth, receive) = (bind_config.transmit.entries(), bind_config.receive.entries());
    setup_step("creating the fill ring", sockopt::set_xdp_umem_fill_ring_size(&fd, receive))?;
    setup_step("creating the completion ring", sockopt::set_xdp_umem_completion_ring_size(&fd, depth))?;
    setup_step("creating the RX ring", sockopt::set_xdp_rx_ring_size(&fd, receive))?;
    setup_step("creating the TX ring", sockopt::set_xdp_tx_ring_size(&fd, depth))?;
    let offsets = setup_step("reading the ring layout", sockopt::xdp_mmap_offsets(&fd))?;
    let map = |what: &str, source: io::Error| SetupError { what: format!("mapping the {what} ring"), source };
    let at = fd.as_fd();
    let receive = RxRings {
        rx: Consumer::map(at, XDP_PGOFF_RX_RING, &offsets.rx, bind_config.receive).map_err(|e| map("RX", e))?,
        fill: Producer::map(at, XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, bind_config.receive)
            .map_err(|e| map("fill", e))?,
    };
    let transmit = TxRings {
        tx: Producer::map(at, XDP_PGOFF_TX_RING, &offsets.tx, bind_config.transmit).map_err(|e| map("TX", e))?,
        completion: Consumer::map(at, XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, bind_config.transmit)
            .map_err(|e| map("completion", e))?,
    };
    let QueuePlace { interface, queue, .. } = place;
    let what = || format!("binding to receive queue {queue}");
    match owner {
        Some(owner) => {
            let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, interface, queue);
            let address = SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: owner.descriptor.as_fd() };
            setup_step(what(), bind(&fd, &address))?;
        }
        None => {
            // Without XDP_COPY and XDP_ZEROCOPY the kernel uses zero-copy where possible, and copies
            // otherwise.
            let mut flags = SocketAddrXdpFlags::empty();
            flags.set(SocketAddrXdpFlags::XDP_COPY, !bind_config.zero_copy);
            flags.set(SocketAddrXdpFlags::XDP_USE_SG, bind_config.fragments);
            flags.set(SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, need_wakeup);
            setup_step(what(), bind(&fd, &SocketAddrXdp::new(flags, interface, queue)))?;
        }
    }
    // In copy mode the kernel charges every frame in flight to the send buffer, which has 208 KiB by default.
    // A refusal leaves the default in force, which is slower but not wrong.
    let _ = sockopt::set_socket_send_buffer_size_force(&fd, depth as usize * 2 * 4096);
    let _ = set_option(&fd, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, depth.min(256));
    if bind_config.busy_poll {
        for (option, value) in BUSY_POLL {
            let what = format!("setting socket option {option} for busy polling");
            set_option(&fd, libc::SOL_SOCKET, option, value).map_err(|source| SetupError { what, source })?;
        }
    }
    place.take();
    let (free_on_close, place, shared) = (Mutex::default(), Some(place), Arc::clone(shared));
    let socket = Socket { descriptor: fd, free_on_close, queue, place, shared };
    Ok(BoundSocket { socket: Arc::new(socket), receive, transmit })
}

fn register_umem(fd: &OwnedFd, memory: &Umem) -> Result<(), SetupError> {
    let region = memory.region();
    let (chunk_size, headroom, flags) = match memory {
        // The metadata is the UMEM headroom, and XDP's own 256 bytes behind it are the packet's headroom. The
        // data then starts at the same offset as in every new packet.
        Umem::Pool(_) => (BUFFER_BYTES as u32, METADATA as u32, XdpUmemRegFlags::XDP_UMEM_UNALIGNED_CHUNK_FLAG),
        Umem::Separate(_) => (CHUNK as u32, 0, XdpUmemRegFlags::empty()),
    };
    let registration = XdpUmemReg {
        addr: region.base().as_ptr() as usize as u64,
        len: region.bytes() as u64,
        chunk_size,
        headroom,
        flags,
        tx_metadata_len: 0,
    };
    setup_step(
        format!("registering {} bytes of packet memory", region.bytes()),
        sockopt::set_xdp_umem_reg(fd, registration),
    )
}

/// Packets that the kernel sends per call in copy mode (Linux 6.17); older kernels send 32.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
/// `SO_PREFER_BUSY_POLL`, `SO_BUSY_POLL` in microseconds, and `SO_BUSY_POLL_BUDGET` in packets per call.
const BUSY_POLL: [(libc::c_int, u32); 3] = [(69, 1), (46, 20), (70, 64)];

fn set_option(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: u32) -> io::Result<()> {
    let (at, len) = ((&raw const value).cast(), size_of::<u32>() as libc::socklen_t);
    // SAFETY: the kernel reads `len` bytes of `value`, a `u32` that outlives the call.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, at, len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Result of waking the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// The kernel has started to work, or will.
    Done,
    /// The kernel did a part, or is busy: try again later.
    Again,
    /// The interface is down.
    Down,
    /// The interface is gone.
    Lost,
}

impl Socket {
    /// Wakes the kernel to process the TX ring.
    pub(super) fn kick_tx(&self) -> Kick {
        self.kicked(send(&self.descriptor, &[], SendFlags::DONTWAIT).map(drop))
    }

    /// Wakes the kernel to process the fill ring.
    pub(super) fn kick_rx(&self) -> Kick {
        self.kicked(recv(&self.descriptor, &mut [0u8; 0][..], RecvFlags::DONTWAIT).map(drop))
    }

    fn kicked(&self, result: rustix::io::Result<()>) -> Kick {
        use rustix::io::Errno;
        match result {
            Ok(()) => Kick::Done,
            Err(Errno::AGAIN | Errno::BUSY | Errno::NOBUFS | Errno::INTR | Errno::NOMEM) => Kick::Again,
            Err(Errno::NXIO | Errno::NODEV) => {
                self.shared.lost.store(true, Ordering::Relaxed);
                Kick::Lost
            }
            // ENETDOWN: the interface is down or was removed. The next call distinguishes these.
            Err(_) => Kick::Down,
        }
    }

    /// Returns whether the kernel has unbound the socket because the interface was removed.
    pub(super) fn is_lost(&self) -> bool {
        // Reading clears the error. Only the removal sets it.
        if let Ok(Err(rustix::io::Errno::NETDOWN | rustix::io::Errno::NODEV)) = sockopt::socket_error(&self.descriptor)
        {
            self.shared.lost.store(true, Ordering::Relaxed);
        }
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Keeps buffers that the kernel may still use until the socket is closed.
    pub(super) fn free_on_close(&self, posted: PostedBuffers, chains: Vec<Packet>) {
        self.free_on_close.lock().unwrap_or_else(PoisonError::into_inner).push((posted, chains));
    }

    /// Returns the kernel's counters of this socket: names and values.
    pub(super) fn statistics(&self) -> Option<[(&'static str, u64); 6]> {
        let s = sockopt::xdp_statistics(&self.descriptor).ok()?;
        Some([
            ("xdp_rx_dropped", s.rx_dropped),
            ("xdp_rx_invalid_descriptors", s.rx_invalid_descs),
            ("xdp_tx_invalid_descriptors", s.tx_invalid_descs),
            ("xdp_rx_ring_full", s.rx_ring_full.unwrap_or(0)),
            ("xdp_fill_ring_empty", s.rx_fill_ring_empty_descs.unwrap_or(0)),
            ("xdp_tx_ring_empty", s.tx_ring_empty_descs.unwrap_or(0)),
        ])
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(test)]
impl Socket {
    /// A stand-in for a socket; the test acts as the kernel.
    pub(super) fn fake() -> Arc<Self> {
        let descriptor = super::ring::fake::file();
        Arc::new(Self { descriptor, free_on_close: Mutex::default(), queue: 0, place: None, shared: Arc::default() })
    }
}

#[cfg(test)]
mod tests {
    use wirepath_memory::RegionBuilder;
    use wirepath_testlab::{Lab, Requirement, require};

    use super::*;
    use crate::drivers::kernel::common::link::Interface;

    /// Binds the first queue of `eth0`.
    fn bind_first(release_timeout: Duration) -> Result<Vec<BoundSocket>, SetupError> {
        let ring = RingSize::at_least(64).unwrap();
        let bind_config = BindConfig {
            zero_copy: false,
            fragments: false,
            transmit: ring,
            receive: ring,
            busy_poll: false,
            release_timeout,
        };
        let index = Interface::find("eth0", "test").unwrap().index;
        let memory = Umem::Separate(Arc::new(RegionBuilder::new(256 * CHUNK).map().unwrap()));
        bind_queues(index, 1, &memory, bind_config, &Arc::default()).map(|(bound, _)| bound)
    }

    #[test]
    fn a_queue_of_this_process_is_waited_for() {
        require!(Requirement::Root, Requirement::Program("ip"), Requirement::Kernel(5, 10));
        let lab = Lab::new("xsk");
        let (here, there) = (lab.namespace("here"), lab.namespace("there"));
        lab.veth((&here, "eth0"), (&there, "eth0"));
        here.inside(|| {
            let short = Duration::from_millis(1);
            let is_busy = |bound: Result<Vec<BoundSocket>, SetupError>| {
                bound.err().and_then(|error| error.source.raw_os_error()) == Some(libc::EBUSY)
            };
            let mut at_once = 0;
            for _ in 0..20 {
                let bound = bind_first(short).unwrap();
                // A queue in use is waited for no longer than asked.
                let begin = Instant::now();
                assert!(is_busy(bind_first(short)));
                assert!(begin.elapsed() < Duration::from_secs(3));
                drop(bound);
                // The control thread never waits.
                at_once += usize::from(bind_first(Duration::ZERO).is_ok());
            }
            assert!(at_once < 20, "the kernel takes a while to free a queue");
        });
    }
}
