// UNSAFETY: sendmmsg(2) takes the packets' bytes as addresses.
#![allow(unsafe_code)]

//! Transmit by sendmmsg(2): one system call for a burst.
//!
//! A transmit ring would be slower and less general. The kernel does not copy the frames of a ring, but lends
//! them to the receiver. On veth each frame is then copied again, into new pages, where the namespaces meet.
//! All slots of a ring have one size, so frames of 9216 bytes and chains would need slots of 16 KiB. sendmmsg
//! gathers chains of any shape and copies once.
//!
//! Frames bypass the queueing discipline. On that way the kernel drops superframes that the device does not segment
//! (`__dev_direct_xmit` in net/core/dev.c). So superframes take the usual way, if there is no queueing discipline that
//! could change the order. Else only those go out whole that the device segments.

use std::any::Any;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use super::socket::Socket;
use super::tunnel_gso;
use crate::drivers::kernel::common::datagrams::{self, Part};
use crate::drivers::kernel::common::ethtool::Segmentation;
use crate::drivers::kernel::common::link::GsoLimits;
use crate::drivers::kernel::common::link_probe::LinkProbe;
use crate::drivers::kernel::common::vnet_hdr::{self, VirtioNetHdr};
use crate::drivers::sw_offload;
use crate::port::{TxDriver, bytes_of};
use wirepath_packet::counters::QueueCounters;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{BATCH, Batch, Packet, superframe};
use wirepath_wire::tcp::flags::CWR;
use wirepath_wire::{HeaderOffsets, L3Type, L4Type};

/// Messages of one burst. A superframe in a tunnel takes one or two.
const MESSAGES: usize = 2 * BATCH;
/// Segments of one burst.
const SEGMENTS: usize = 4096;
/// Most segments of one packet (`UIO_MAXIOV`).
const MAX_SEGMENTS: usize = 1024;
/// Bytes for headers of tunnel packets in one burst.
const SCRATCH: usize = 128 << 10;
/// Calls after which a superframe that the kernel refuses is dropped. A worker drops the whole batch after more.
const REFUSALS: u32 = 8;
/// Bytes of an Ethernet header. The kernel refuses shorter frames.
const ETHERNET: usize = 14;
/// `virtio_net_hdr` of a complete frame.
static COMPLETE: [u8; vnet_hdr::HEADER] = [0; vnet_hdr::HEADER];

/// Sockets of a transmit queue.
pub(super) struct Sockets {
    /// Bypasses the queueing discipline.
    pub(super) plain: Socket,
    /// Sends superframes, which the kernel segments for every device.
    pub(super) superframes: Option<Socket>,
    /// True if the program of [`tunnel_gso`] describes superframes in tunnels to the kernel.
    pub(super) has_program: bool,
    /// Superframes outside tunnels that the device or the kernel segments.
    pub(super) segmentation: Segmentation,
    pub(super) gso_limits: GsoLimits,
}

impl Sockets {
    /// Returns whether a superframe outside a tunnel can be sent whole. `udp`: the kernel takes UDP superframes. The
    /// plain socket drops one that the device does not segment (`netif_skb_features` in net/core/dev.c).
    fn segments_plain(&self, packet: &Packet, layers: &HeaderOffsets, udp: bool) -> bool {
        let is_udp = layers.l4_type() == L4Type::Udp;
        let is_taken = match layers.l3_type() {
            L3Type::Ipv4 | L3Type::Ipv6 if is_udp => self.segmentation.udp,
            L3Type::Ipv4 => self.segmentation.ipv4,
            L3Type::Ipv6 => self.segmentation.ipv6,
            _ => false,
        };
        let is_ecn = !is_udp && superframe::tcp_flags(packet, layers).is_none_or(|flags| flags & CWR != 0);
        if !is_taken || !VirtioNetHdr::can_describe(packet, layers, udp) || is_ecn && !self.segmentation.ecn {
            return false;
        }
        let GsoLimits { size, segments } = self.gso_limits;
        let payload = packet.len().saturating_sub(layers.payload());
        // A device may segment fewer kinds of tagged frames.
        let is_plain = layers.l3() == ETHERNET && packet.vlan().is_none() && packet.len() < size;
        self.superframes.is_some() || is_plain && payload.div_ceil(usize::from(packet.mss()).max(1)) <= segments
    }
}

/// Form of a superframe for the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// TCP outside tunnels.
    Tcp,
    /// UDP datagrams, which may be those of a tunnel.
    Udp,
    /// A tunnel that the program of [`tunnel_gso`] describes.
    Marked,
}

/// Socket that a frame goes through.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Superframes,
}

/// Transmit queue.
pub(super) struct Sender {
    sockets: Sockets,
    link_probe: Arc<LinkProbe>,
    /// Length of the longest frame that a superframe is cut into, in bytes.
    max_frame: usize,
    /// The kernel takes UDP superframes. It is found out by the first one.
    takes_udp: bool,
    /// The kernel refused the superframe in front as invalid. It is segmented in software.
    cuts_next: bool,
    burst: Box<Burst>,
    scratch: Box<[u8]>,
    /// Calls since the kernel refused the superframe in front for the first time.
    refusals: u32,
    counters: Arc<QueueCounters>,
}

/// Arguments of a system call.
struct Burst {
    messages: [libc::mmsghdr; MESSAGES],
    segments: [libc::iovec; SEGMENTS],
    /// Virtio headers of superframes.
    headers: [[u8; vnet_hdr::HEADER]; MESSAGES],
    /// Marks of superframes in tunnels.
    marks: [Mark; MESSAGES],
    /// Packets that are sent when a message is.
    packets: [u8; MESSAGES],
    used_messages: usize,
    used_segments: usize,
}

/// Control message with the mark of a frame (`SO_MARK`).
#[repr(C)]
struct Mark {
    header: libc::cmsghdr,
    mark: u32,
}

impl Burst {
    /// Begins a message. `None` if there is no room.
    #[inline(always)]
    fn begin(&mut self, header: Option<[u8; vnet_hdr::HEADER]>) -> Option<()> {
        let (at, first) = (self.used_messages, self.used_segments);
        let message = self.messages.get_mut(at)?;
        message.msg_hdr.msg_iovlen = 0;
        message.msg_hdr.msg_controllen = 0;
        message.msg_hdr.msg_iov = self.segments.get_mut(first)?;
        self.used_messages += 1;
        match header {
            None => self.push(&COMPLETE),
            Some(header) => {
                self.headers[at] = header;
                let segment =
                    libc::iovec { iov_base: self.headers[at].as_ptr().cast_mut().cast(), iov_len: header.len() };
                self.push_segment(segment)
            }
        }
    }

    /// Sets the mark of the last message, for the program of [`tunnel_gso`]. `None` if there is no message.
    fn set_mark(&mut self, mark: u32) -> Option<()> {
        let at = self.used_messages.checked_sub(1)?;
        let (message, control) = (self.messages.get_mut(at)?, self.marks.get_mut(at)?);
        control.header.cmsg_len = size_of::<libc::cmsghdr>() + size_of::<u32>();
        control.header.cmsg_level = libc::SOL_SOCKET;
        control.header.cmsg_type = libc::SO_MARK;
        control.mark = mark;
        message.msg_hdr.msg_control = std::ptr::from_mut(control).cast();
        message.msg_hdr.msg_controllen = size_of::<Mark>();
        Some(())
    }

    /// Returns the form of the superframe in the first message.
    fn first_form(&self) -> Form {
        if self.messages[0].msg_hdr.msg_controllen > 0 {
            Form::Marked
        } else if VirtioNetHdr::read(&self.headers[0]).is_udp_superframe() {
            Form::Udp
        } else {
            Form::Tcp
        }
    }

    /// Adds bytes to the last message. `None` if there is no room.
    #[inline(always)]
    fn push(&mut self, bytes: &[u8]) -> Option<()> {
        self.push_segment(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() })
    }

    #[inline(always)]
    fn push_segment(&mut self, segment: libc::iovec) -> Option<()> {
        let message = self.messages.get_mut(self.used_messages.checked_sub(1)?)?;
        if message.msg_hdr.msg_iovlen >= MAX_SEGMENTS {
            return None;
        }
        *self.segments.get_mut(self.used_segments)? = segment;
        message.msg_hdr.msg_iovlen += 1;
        self.used_segments += 1;
        Some(())
    }

    /// Adds a frame that needs nothing from the kernel, or a superframe with this header.
    #[inline(always)]
    fn push_packet(&mut self, packet: &Packet, header: Option<[u8; vnet_hdr::HEADER]>) -> Option<()> {
        self.begin(header)?;
        packet.segments().try_for_each(|segment| self.push(segment))
    }
}

// SAFETY: the addresses in `burst` are used only within `transmit`, which writes them before each use.
unsafe impl Send for Sender {}

impl Sender {
    pub(super) fn new(sockets: Sockets, link_probe: Arc<LinkProbe>, max_frame: usize) -> Self {
        // SAFETY: zero bytes are valid for `mmsghdr`, `iovec`, `cmsghdr` and integers: no name, no control data, no
        // buffers.
        let burst = unsafe { Box::new(zeroed()) };
        let scratch = vec![0; SCRATCH].into_boxed_slice();
        let counters = Arc::default();
        Self {
            sockets,
            link_probe,
            max_frame,
            takes_udp: true,
            cuts_next: false,
            burst,
            scratch,
            refusals: 0,
            counters,
        }
    }

    /// Fills messages for packets from the front of the batch that go through one socket, as many as fit. Returns
    /// their number, and the socket. An error concerns the first packet, which can never be sent.
    #[inline]
    fn fill_messages(&mut self, batch: &mut Batch) -> Result<(usize, Way), DropReason> {
        let has_program = self.sockets.has_program;
        let mut way = Way::Plain;
        let burst = &mut *self.burst;
        (burst.used_messages, burst.used_segments) = (0, 0);
        let mut scratch = &mut self.scratch[..];
        for (n, packet) in batch.iter_mut().enumerate() {
            let before = burst.used_messages;
            let pushed = if packet.flags().contains(Flags::TX_SEGMENT) {
                let rest = std::mem::take(&mut scratch);
                let pushed = push_superframe(burst, packet, self.max_frame, has_program, rest);
                pushed.map(|rest| {
                    scratch = rest;
                    Way::Superframes
                })
            } else {
                match sw_offload::apply(packet) {
                    Ok(()) if packet.len() < ETHERNET => Err(DropReason::TooShort),
                    Ok(()) => burst.push_packet(packet, None).map(|()| Way::Plain).ok_or(DropReason::TxError),
                    Err(reason) => Err(reason),
                }
            };
            match pushed {
                Ok(this) if n == 0 || this == way => way = this,
                Err(reason) if n == 0 => return Err(reason),
                _ => {
                    burst.used_messages = before;
                    return Ok((before, way));
                }
            }
            burst.packets[before..burst.used_messages].fill(n as u8);
            burst.packets[burst.used_messages - 1] = n as u8 + 1;
        }
        Ok((burst.used_messages, way))
    }

    /// Handles that the kernel refused the superframe in front as invalid. `is_again`: it did so in the last call too,
    /// and the caller has not segmented the superframe.
    #[cold]
    fn refuse_superframe(&mut self, batch: &mut Batch, is_again: bool) {
        match self.burst.first_form() {
            // Before Linux 6.2.
            Form::Udp if self.takes_udp => {
                tracing::warn!("the kernel takes no UDP superframes; they are segmented in software");
                self.takes_udp = false;
            }
            Form::Marked => {
                tracing::warn!("the kernel takes no superframes in tunnels by a mark; they are sent in another form");
                self.sockets.has_program = false;
            }
            Form::Udp | Form::Tcp => {}
        }
        self.cuts_next = !is_again;
        if is_again {
            self.drop_front(batch, 1, DropReason::KernelOffload);
        }
    }

    fn drop_front(&self, batch: &mut Batch, n: usize, reason: DropReason) {
        self.counters.drops.add(reason, n as u64);
        batch.free_front(n);
    }
}

impl TxDriver for Sender {
    #[inline]
    fn transmit(&mut self, batch: &mut Batch) {
        let mut sent = 0;
        let was_refused = std::mem::take(&mut self.cuts_next);
        while !batch.is_empty() {
            let (n, way) = match self.fill_messages(batch) {
                Ok(filled) => filled,
                Err(reason) => {
                    self.drop_front(batch, 1, reason);
                    continue;
                }
            };
            let socket = match way {
                Way::Plain => None,
                Way::Superframes => self.sockets.superframes.as_ref(),
            };
            let socket = socket.unwrap_or(&self.sockets.plain);
            let fd = socket.as_fd().as_raw_fd();
            // SAFETY: the first `n` messages point to segments of packets in the batch, and into `burst` and `scratch`.
            // All of them live until after the call.
            let rc = unsafe { libc::sendmmsg(fd, self.burst.messages.as_mut_ptr(), n as u32, libc::MSG_DONTWAIT) };
            if let Ok(taken @ 1..) = usize::try_from(rc) {
                // A superframe whose last message is left over is sent again as a whole: TCP ignores what it has.
                let taken = usize::from(self.burst.packets[taken.min(n) - 1]);
                if taken == 0 && self.refusals < REFUSALS {
                    self.refusals += 1;
                    break;
                }
                self.refusals = 0;
                if taken == 0 {
                    // The kernel may refuse the rest each time.
                    self.drop_front(batch, 1, DropReason::TxError);
                    continue;
                }
                self.counters.packets.add(taken as u64);
                self.counters.bytes.add(bytes_of(&batch.as_slice()[..taken]));
                batch.free_front(taken);
                sent += taken;
                continue;
            }
            // The error concerns the first packet. After a partial send the kernel returns the count, and the
            // error with the next call.
            let all = batch.len();
            let is_superframe = batch.as_slice().first().is_some_and(|it| it.flags().contains(Flags::TX_SEGMENT));
            match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                // A full queue and a device that does not segment the packet return the same error.
                Some(libc::ENOBUFS) if is_superframe && self.refusals >= REFUSALS && self.link_probe.is_up() => {
                    self.refusals = 0;
                    self.drop_front(batch, 1, DropReason::KernelOffload);
                }
                // A device without carrier returns these errors too.
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.link_probe.is_up() => {
                    self.refusals = if is_superframe { self.refusals + 1 } else { 0 };
                    break;
                }
                Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) if self.link_probe.exists() => {
                    self.drop_front(batch, all, DropReason::LinkDown);
                }
                Some(libc::ENETDOWN) if self.link_probe.exists() => self.drop_front(batch, all, DropReason::LinkDown),
                Some(libc::ENXIO | libc::ENODEV | libc::ENETDOWN | libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => {
                    self.drop_front(batch, all, DropReason::DeviceLost);
                }
                Some(libc::EINVAL) if is_superframe => {
                    self.refuse_superframe(batch, was_refused && sent == 0);
                    if self.cuts_next {
                        break;
                    }
                }
                Some(libc::EMSGSIZE) => self.drop_front(batch, 1, DropReason::TooLong),
                _ => self.drop_front(batch, 1, DropReason::TxError),
            }
        }
        if sent > 0 {
            self.counters.bursts.add(1);
        } else {
            self.counters.empty.add(1);
        }
    }

    fn segments(&self, packet: &Packet) -> Option<bool> {
        let Some(parsed) = superframe::parse(packet, None).filter(|_| !self.cuts_next) else { return Some(false) };
        Some(match parsed.inner() {
            None => self.sockets.segments_plain(packet, parsed.outer(), self.takes_udp),
            Some(inner) => {
                let has_mark = self.sockets.has_program && tunnel_gso::mark(packet, &parsed).is_some();
                has_mark && VirtioNetHdr::can_describe(packet, inner, self.takes_udp)
                    || self.takes_udp
                        && self.sockets.superframes.is_some()
                        && datagrams::fits(packet, &parsed, SCRATCH, MAX_SEGMENTS)
            }
        })
    }

    fn counters(&self) -> &Arc<QueueCounters> {
        &self.counters
    }

    fn set_counters(&mut self, counters: Arc<QueueCounters>) {
        self.counters = counters;
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Adds a superframe. Returns the rest of `scratch`. `has_program`: [`tunnel_gso`] takes superframes in tunnels.
#[inline(never)]
fn push_superframe<'a>(
    burst: &mut Burst,
    packet: &'a mut Packet,
    max_frame: usize,
    has_program: bool,
    scratch: &'a mut [u8],
) -> Result<&'a mut [u8], DropReason> {
    if let Some(tci) = packet.vlan() {
        sw_offload::insert_vlan_tag(packet, tci, packet.flags().contains(Flags::VLAN_SERVICE))?;
        packet.clear_vlan();
    }
    if superframe::longest_frame(packet) > max_frame {
        return Err(DropReason::TooLong);
    }
    let parsed = superframe::parse(packet, None).ok_or(DropReason::KernelOffload)?;
    let can_describe = VirtioNetHdr::can_describe(packet, parsed.innermost(), true);
    let mark = if has_program && can_describe { tunnel_gso::mark(packet, &parsed) } else { None };
    if mark.is_some() || parsed.inner().is_none() {
        let header = VirtioNetHdr::of_superframe(packet, &parsed).ok_or(DropReason::KernelOffload)?;
        burst.push_packet(packet, Some(header)).ok_or(DropReason::TxError)?;
        if let Some(mark) = mark {
            burst.set_mark(mark).ok_or(DropReason::TxError)?;
        }
        return Ok(scratch);
    }
    let written = datagrams::write(packet, &parsed, scratch, |part| match part {
        Part::Frame(header) => burst.begin(Some(header)),
        Part::Bytes(bytes) => burst.push(bytes),
    });
    written.ok_or(DropReason::KernelOffload)
}
