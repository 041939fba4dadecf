// UNSAFETY: one socket option that rustix does not know.
#![allow(unsafe_code)]

//! AF_XDP sockets of a port: one for each receive queue of the interface, over one registered memory.

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

use super::chunks::CHUNK;
use super::posted::Posted;
use super::ring::{Consumer, Producer, SharedDescriptor};
use crate::packet::{METADATA, Packet, STRIDE};

/// `XDP_PKT_CONTD`: the frame goes on in the next descriptor.
pub(super) const CONTINUED: u32 = 1;
/// Distance of the data from the chunk in the upper bits of an address of unaligned chunks (`XSK_UNALIGNED_BUF_OFFSET_SHIFT`).
pub(super) const OFFSET_SHIFT: u32 = 48;
/// How long a queue that is taken may take to become free: the kernel's worker that frees it waits for all who change interfaces meanwhile.
const RELEASE: Duration = Duration::from_secs(5);
/// Shortest frame: an Ethernet header.
pub(super) const SHORTEST: usize = 14;
/// What an address of unaligned chunks says of the chunk (`XSK_UNALIGNED_BUF_ADDR_MASK`).
pub(super) const BASE_MASK: u64 = (1 << OFFSET_SHIFT) - 1;

/// The memory that the sockets of a port share.
///
/// One registration serves all sockets of the port (`XDP_SHARED_UMEM`): the memory is pinned and accounted once, and the kernel gives
/// every queue the same mode.
#[derive(Clone)]
pub(super) enum Memory {
    /// The region of the port's packet pool: the kernel writes received frames into packets.
    Pool(Arc<Region>),
    /// A region of our own with aligned chunks, for kernels and drivers that refuse the pool's stride; frames are copied.
    Own(Arc<Region>),
}

impl Memory {
    fn region(&self) -> &Arc<Region> {
        match self {
            Self::Pool(region) | Self::Own(region) => region,
        }
    }
}

/// What the queues of a port share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    /// The interface is gone.
    pub(super) lost: AtomicBool,
    /// Largest frame without VLAN tags in bytes, as the interface's MTU has it.
    pub(super) frame_limit: AtomicU64,
}

/// A socket, shared by the receive and the transmit queue that work on its rings.
pub(super) struct Socket {
    // The descriptor goes first: when it is closed the kernel no longer writes to what the rings had posted, and only then may
    // `left` give the packets back.
    descriptor: OwnedFd,
    left: Mutex<Vec<(Posted, Vec<Packet>)>>,
    /// Receive queue of the interface.
    pub(super) queue: u32,
    pub(super) shared: Arc<Shared>,
}

/// Rings of the receiving side.
pub(super) struct ReceiveRings {
    pub(super) rx: Consumer<SharedDescriptor>,
    pub(super) fill: Producer<AtomicU64>,
}

/// Rings of the transmitting side.
pub(super) struct TransmitRings {
    pub(super) tx: Producer<SharedDescriptor>,
    pub(super) completion: Consumer<AtomicU64>,
}

/// A bound socket with its rings.
pub(super) struct Bound {
    pub(super) receive: ReceiveRings,
    pub(super) transmit: TransmitRings,
    pub(super) socket: Arc<Socket>,
}

/// What to ask for when sockets are bound.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish {
    /// Zero-copy if the driver can; else copy at once.
    pub(super) zero_copy: bool,
    /// Frames of several buffers (`XDP_USE_SG`).
    pub(super) fragments: bool,
    /// Entries of the TX and completion rings.
    pub(super) transmit: RingSize,
    /// Entries of the RX and fill rings: as many as buffers are posted, so that the RX ring is never what is full.
    pub(super) receive: RingSize,
    /// Poll the NIC from our system calls.
    pub(super) busy_poll: bool,
}

/// What the kernel gave.
#[derive(Clone, Copy, Debug)]
pub(super) struct Got {
    pub(super) zero_copy: bool,
    pub(super) fragments: bool,
    pub(super) need_wakeup: bool,
}

/// A step that failed.
#[derive(Debug)]
pub(super) struct Failed {
    pub(super) what: String,
    pub(super) source: io::Error,
}

fn step<T>(what: impl Into<String>, result: rustix::io::Result<T>) -> Result<T, Failed> {
    result.map_err(|e| Failed { what: what.into(), source: e.into() })
}

/// Opens and binds one socket for each of the first `queues` receive queues of the interface.
pub(super) fn open_all(
    interface: u32,
    queues: u32,
    memory: &Memory,
    wish: Wish,
    shared: &Arc<Shared>,
) -> Result<(Vec<Bound>, Got), Failed> {
    let mut bound: Vec<Bound> = Vec::with_capacity(queues as usize);
    let mut got = None;
    for queue in 0..queues {
        let owner = bound.first().map(|b| &*b.socket);
        let try_with = |fragments, need_wakeup| {
            let (wish, end) = (Wish { fragments, ..wish }, Instant::now() + RELEASE);
            loop {
                match open(interface, queue, memory, wish, need_wakeup, owner, shared) {
                    // The kernel frees a queue some time after the socket that had it is closed (`xp_release_deferred`), also if it was
                    // ours or that of a killed process.
                    Err(failed) if failed.source.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                        std::thread::sleep(Duration::from_millis(2));
                    }
                    result => return result,
                }
            }
        };
        let opened = match got {
            Some(Got { fragments, need_wakeup, .. }) => try_with(fragments, need_wakeup)?,
            None => {
                // Newest first: fragments are of Linux 6.6, need-wakeup is of 5.4. EINVAL is how a kernel refuses a flag.
                let mut choices = vec![(true, true), (false, true), (false, false)];
                choices.retain(|&(fragments, _)| wish.fragments || !fragments);
                let mut last = None;
                let mut found = None;
                for (fragments, need_wakeup) in choices {
                    match try_with(fragments, need_wakeup) {
                        Ok(it) => {
                            let options = step("asking for the mode", sockopt::xdp_options(&it.socket.descriptor))?;
                            let zero_copy = options.contains(XdpOptionsFlags::XDP_OPTIONS_ZEROCOPY);
                            got = Some(Got { zero_copy, fragments, need_wakeup });
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
    let got = got.ok_or_else(|| Failed { what: "binding".into(), source: io::ErrorKind::InvalidInput.into() })?;
    Ok((bound, got))
}

fn open(
    interface: u32,
    queue: u32,
    memory: &Memory,
    wish: Wish,
    need_wakeup: bool,
    owner: Option<&Socket>,
    shared: &Arc<Shared>,
) -> Result<Bound, Failed> {
    let kind = (AddressFamily::XDP, SocketType::RAW, SocketFlags::CLOEXEC);
    let fd = step("opening an AF_XDP socket", socket_with(kind.0, kind.1, kind.2, None))?;
    if owner.is_none() {
        register(&fd, memory)?;
    }
    let (depth, receive) = (wish.transmit.entries(), wish.receive.entries());
    step("making the fill ring", sockopt::set_xdp_umem_fill_ring_size(&fd, receive))?;
    step("making the completion ring", sockopt::set_xdp_umem_completion_ring_size(&fd, depth))?;
    step("making the RX ring", sockopt::set_xdp_rx_ring_size(&fd, receive))?;
    step("making the TX ring", sockopt::set_xdp_tx_ring_size(&fd, depth))?;
    let offsets = step("asking for the rings' layout", sockopt::xdp_mmap_offsets(&fd))?;
    let map = |what: &str, source: io::Error| Failed { what: format!("mapping the {what} ring"), source };
    let at = fd.as_fd();
    let receive = ReceiveRings {
        rx: Consumer::map(at, XDP_PGOFF_RX_RING, &offsets.rx, wish.receive).map_err(|e| map("RX", e))?,
        fill: Producer::map(at, XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, wish.receive).map_err(|e| map("fill", e))?,
    };
    let transmit = TransmitRings {
        tx: Producer::map(at, XDP_PGOFF_TX_RING, &offsets.tx, wish.transmit).map_err(|e| map("TX", e))?,
        completion: Consumer::map(at, XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, wish.transmit)
            .map_err(|e| map("completion", e))?,
    };
    let what = || format!("binding to receive queue {queue}");
    match owner {
        Some(owner) => {
            let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, interface, queue);
            let address = SocketAddrXdpWithSharedUmem { addr, shared_umem_fd: owner.descriptor.as_fd() };
            step(what(), bind(&fd, &address))?;
        }
        None => {
            // Without XDP_COPY and XDP_ZEROCOPY the kernel takes zero-copy where it can, and copies else.
            let mut flags = SocketAddrXdpFlags::empty();
            flags.set(SocketAddrXdpFlags::XDP_COPY, !wish.zero_copy);
            flags.set(SocketAddrXdpFlags::XDP_USE_SG, wish.fragments);
            flags.set(SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP, need_wakeup);
            step(what(), bind(&fd, &SocketAddrXdp::new(flags, interface, queue)))?;
        }
    }
    // In copy mode the kernel accounts every frame on its way to the socket's send buffer, and stops at 208 KiB by default. Refusals
    // leave the defaults in force, which is slower but not wrong.
    let _ = sockopt::set_socket_send_buffer_size_force(&fd, depth as usize * 2 * 4096);
    let _ = set_option(&fd, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, depth.min(256));
    if wish.busy_poll {
        for (option, value) in BUSY_POLL {
            let what = format!("setting socket option {option} for busy polling");
            set_option(&fd, libc::SOL_SOCKET, option, value).map_err(|source| Failed { what, source })?;
        }
    }
    let socket = Socket { descriptor: fd, left: Mutex::default(), queue, shared: Arc::clone(shared) };
    Ok(Bound { socket: Arc::new(socket), receive, transmit })
}

fn register(fd: &OwnedFd, memory: &Memory) -> Result<(), Failed> {
    let region = memory.region();
    let (chunk_size, headroom, flags) = match memory {
        // The metadata line is the UMEM headroom; XDP's own 256 bytes behind it are the packet's headroom. The data then starts where
        // that of every fresh packet does.
        Memory::Pool(_) => (STRIDE as u32, METADATA as u32, XdpUmemRegFlags::XDP_UMEM_UNALIGNED_CHUNK_FLAG),
        Memory::Own(_) => (CHUNK as u32, 0, XdpUmemRegFlags::empty()),
    };
    let registration = XdpUmemReg {
        addr: region.base().as_ptr() as usize as u64,
        len: region.bytes() as u64,
        chunk_size,
        headroom,
        flags,
        tx_metadata_len: 0,
    };
    step(format!("registering {} bytes of packet memory", region.bytes()), sockopt::set_xdp_umem_reg(fd, registration))
}

/// How many packets the kernel sends per call in copy mode (Linux 6.17); 32 without.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;
/// `SO_PREFER_BUSY_POLL`; `SO_BUSY_POLL` with its microseconds; `SO_BUSY_POLL_BUDGET` with packets per call.
const BUSY_POLL: [(libc::c_int, u32); 3] = [(69, 1), (46, 20), (70, 64)];

fn set_option(fd: &OwnedFd, level: libc::c_int, option: libc::c_int, value: u32) -> io::Result<()> {
    let (at, len) = ((&raw const value).cast(), size_of::<u32>() as libc::socklen_t);
    // SAFETY: the kernel reads four bytes.
    let rc = unsafe { libc::setsockopt(fd.as_raw_fd(), level, option, at, len) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// What a kick of the kernel brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kick {
    /// The kernel went to work, or will.
    Done,
    /// It did a part, or is busy: again later.
    Again,
    /// The interface is down: nothing moves for now.
    Down,
    /// The interface is gone.
    Lost,
}

impl Socket {
    /// Tells the kernel to look at the TX ring.
    pub(super) fn kick_transmit(&self) -> Kick {
        self.kicked(send(&self.descriptor, &[], SendFlags::DONTWAIT).map(drop))
    }

    /// Tells the kernel to look at the fill ring.
    pub(super) fn kick_receive(&self) -> Kick {
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
            // ENETDOWN: the interface is down; or, as an error left behind on the socket, was removed. The next call tells.
            Err(_) => Kick::Down,
        }
    }

    /// Whether the kernel has unbound the socket because the interface was removed.
    pub(super) fn is_lost(&self) -> bool {
        // Reading takes the error away; it is left behind by the removal only.
        if let Ok(Err(rustix::io::Errno::NETDOWN | rustix::io::Errno::NODEV)) = sockopt::socket_error(&self.descriptor)
        {
            self.shared.lost.store(true, Ordering::Relaxed);
        }
        self.shared.lost.load(Ordering::Relaxed)
    }

    /// Keeps what the kernel may still hold until the socket is closed.
    pub(super) fn keep(&self, posted: Posted, chains: Vec<Packet>) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push((posted, chains));
    }

    /// What the kernel counted for this socket: names and values.
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

    /// Frames that the kernel dropped because the fill ring was empty.
    pub(super) fn starved(&self) -> u64 {
        sockopt::xdp_statistics(&self.descriptor).ok().and_then(|s| s.rx_fill_ring_empty_descs).unwrap_or(0)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

#[cfg(test)]
impl Socket {
    /// A socket that is none: the test plays the kernel.
    pub(super) fn fake() -> Arc<Self> {
        let descriptor = super::ring::fake::file();
        Arc::new(Self { descriptor, left: Mutex::default(), queue: 0, shared: Arc::default() })
    }
}
