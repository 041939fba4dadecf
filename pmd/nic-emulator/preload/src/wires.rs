//! Network devices of this machine as the far ends of links.

use std::collections::VecDeque;
use std::ffi::{CString, c_int};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use wirepath_nic_emulator::host::Wire;
use wirepath_nic_emulator::{frame, segment};

/// Linux: `PACKET_IGNORE_OUTGOING` (linux/if_packet.h), not in `libc`.
const PACKET_IGNORE_OUTGOING: c_int = 23;
/// Linux: `PACKET_VNET_HDR` (linux/if_packet.h), not in `libc`.
const PACKET_VNET_HDR: c_int = 15;
/// Bytes of `struct virtio_net_hdr`, in front of each frame.
const VNET: usize = 10;
/// Most bytes of a frame that is still to be cut: 64 KiB of IP, Ethernet and two tags.
const SUPERFRAME: usize = (64 << 10) + 22;
/// Room of the kernel's queues.
static BUFFER: c_int = 16 << 20;

fn check(result: c_int, what: &str) -> Result<c_int, String> {
    if result < 0 { Err(format!("{what}: {}", io::Error::last_os_error())) } else { Ok(result) }
}

fn request(interface: &str) -> Result<libc::ifreq, String> {
    // SAFETY: zero is a valid request.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let name = interface.as_bytes();
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Err("not a name of an interface".to_owned());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    Ok(request)
}

/// Sets an interface up.
fn set_up(interface: &str) -> Result<(), String> {
    let mut request = request(interface)?;
    // SAFETY: plain calls with a request of the right type.
    unsafe {
        let socket = OwnedFd::from_raw_fd(check(
            libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0),
            "socket",
        )?);
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request), "SIOCGIFFLAGS")?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request), "SIOCSIFFLAGS")?;
    }
    Ok(())
}

/// A TAP device, made if it is not there, and set up.
pub(crate) fn tap(interface: &str) -> Result<Box<dyn Wire>, String> {
    let mut request = request(interface)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: plain calls with a request of the right type.
    let fd = unsafe {
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let fd = OwnedFd::from_raw_fd(check(
            libc::open(c"/dev/net/tun".as_ptr(), flags),
            "/dev/net/tun (needs CAP_NET_ADMIN)",
        )?);
        check(
            libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request),
            "TUNSETIFF (needs CAP_NET_ADMIN, or a TAP device of this user)",
        )?;
        fd
    };
    // Someone without the right to do so has set it up before.
    let _ = set_up(interface);
    Ok(Box::new(Tap { fd }))
}

struct Tap {
    fd: OwnedFd,
}

impl Wire for Tap {
    fn send(&mut self, frame: &[u8]) -> bool {
        // SAFETY: the kernel reads `len` bytes.
        unsafe { libc::write(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len()) == frame.len() as isize }
    }

    fn receive(&mut self, frame: &mut [u8]) -> Option<usize> {
        // SAFETY: the kernel writes at most `len` bytes.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len()) };
        usize::try_from(got).ok().filter(|got| *got > 0)
    }

    fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// A packet socket on an interface: promiscuous, blind to what this machine sends.
pub(crate) fn packet(interface: &str) -> Result<Box<dyn Wire>, String> {
    let name = CString::new(interface).map_err(|_| "not a name of an interface".to_owned())?;
    // SAFETY: plain calls; every structure is of the type that the call expects.
    unsafe {
        let index = libc::if_nametoindex(name.as_ptr());
        if index == 0 {
            return Err(format!("{}", io::Error::last_os_error()));
        }
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd =
            OwnedFd::from_raw_fd(check(libc::socket(libc::AF_PACKET, kind, 0), "packet socket (needs CAP_NET_RAW)")?);
        let option = |level, name, value: *const c_int| {
            libc::setsockopt(fd.as_raw_fd(), level, name, value.cast(), size_of::<c_int>() as libc::socklen_t)
        };
        // Larger queues are welcome where they are allowed.
        option(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &raw const BUFFER);
        option(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, &raw const BUFFER);
        check(option(libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, &raw const ONE), "PACKET_IGNORE_OUTGOING")?;
        check(option(libc::SOL_PACKET, libc::PACKET_AUXDATA, &raw const ONE), "PACKET_AUXDATA")?;
        let mut member: libc::packet_mreq = zeroed();
        member.mr_ifindex = index as i32;
        member.mr_type = libc::PACKET_MR_PROMISC as u16;
        let size = size_of::<libc::packet_mreq>() as libc::socklen_t;
        let joined = libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            (&raw const member).cast(),
            size,
        );
        check(joined, "promiscuous mode")?;
        let mut address: libc::sockaddr_ll = zeroed();
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
        address.sll_ifindex = index as i32;
        let size = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
        check(libc::bind(fd.as_raw_fd(), (&raw const address).cast(), size), "bind")?;
        check(option(libc::SOL_PACKET, PACKET_VNET_HDR, &raw const ONE), "PACKET_VNET_HDR")?;
        Ok(Box::new(Packet { fd, handed: vec![0; VNET + SUPERFRAME + 4], segments: VecDeque::new() }))
    }
}

static ONE: c_int = 1;

struct Packet {
    fd: OwnedFd,
    /// What the kernel hands over: [`VNET`], then a frame or superframe.
    handed: Vec<u8>,
    /// Segments of a superframe that wait.
    segments: VecDeque<Vec<u8>>,
}

impl Packet {
    /// The next frame or superframe, with its tag; the first `VNET` bytes are no part of it.
    fn next(&mut self) -> Option<(VnetHeader, usize)> {
        // SAFETY: all-zero is valid for these plain structures.
        let (mut message, mut control): (libc::msghdr, [u64; 16]) = unsafe { (zeroed(), zeroed()) };
        // Room for a tag that is put back.
        let room = self.handed.len() - 4;
        let mut part = libc::iovec { iov_base: self.handed.as_mut_ptr().cast(), iov_len: room };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in `message` is valid for its length, and outlives the call.
        let got = unsafe { crate::next::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let mut length = usize::try_from(got).ok().filter(|length| *length > VNET)?;
        // SAFETY: the kernel filled `message`; control messages are walked with the macros made for that, and read unaligned.
        let aux = unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&raw const message);
            let mut aux: Option<libc::tpacket_auxdata> = None;
            while !at.is_null() {
                if ((*at).cmsg_level, (*at).cmsg_type) == (libc::SOL_PACKET, libc::PACKET_AUXDATA) {
                    aux = Some(libc::CMSG_DATA(at).cast::<libc::tpacket_auxdata>().read_unaligned());
                }
                at = libc::CMSG_NXTHDR(&raw const message, at);
            }
            aux
        };
        let mut vnet = VnetHeader::read(&self.handed)?;
        let aux = aux?;
        if aux.tp_status & libc::TP_STATUS_VLAN_VALID != 0 && length >= VNET + 12 {
            // The kernel keeps the tag beside the frame.
            let has_kind = aux.tp_status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
            let kind = if has_kind { aux.tp_vlan_tpid } else { 0x8100 };
            self.handed.copy_within(VNET + 12..length, VNET + 16);
            self.handed[VNET + 12..VNET + 14].copy_from_slice(&kind.to_be_bytes());
            self.handed[VNET + 14..VNET + 16].copy_from_slice(&aux.tp_vlan_tci.to_be_bytes());
            length += 4;
            vnet.transport += 4;
        }
        Some((vnet, length))
    }
}

impl Wire for Packet {
    fn send(&mut self, frame: &[u8]) -> bool {
        // Nothing is left to anybody.
        let none = [0u8; VNET];
        let parts = [&none[..], frame]
            .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
        // SAFETY: all-zero is a valid message; the kernel reads the parts, which outlive the call.
        unsafe {
            let mut message: libc::msghdr = zeroed();
            message.msg_iov = parts.as_ptr().cast_mut();
            message.msg_iovlen = parts.len();
            libc::sendmsg(self.fd.as_raw_fd(), &raw const message, libc::MSG_DONTWAIT) == (VNET + frame.len()) as isize
        }
    }

    fn receive(&mut self, frame: &mut [u8]) -> Option<usize> {
        if self.segments.is_empty() {
            let (vnet, end) = self.next()?;
            let whole = &mut self.handed[VNET..end];
            if vnet.segment_size == 0 {
                vnet.complete(whole);
                let length = whole.len().min(frame.len());
                frame[..length].copy_from_slice(&whole[..length]);
                return Some(length);
            }
            // What cannot be cut is lost, as on a wire that it does not fit.
            let segments = &mut self.segments;
            let _ = segment::cut_superframe(whole, vnet.transport, vnet.segment_size, |segment| {
                segments.push_back(segment.to_vec());
            });
        }
        let segment = self.segments.pop_front()?;
        let length = segment.len().min(frame.len());
        frame[..length].copy_from_slice(&segment[..length]);
        Some(length)
    }

    fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// What the sender of a frame left to be done (`struct virtio_net_hdr`, linux/virtio_net.h, in the machine's byte order).
#[derive(Clone, Copy, Debug)]
struct VnetHeader {
    /// Where the checksum field lies, from the transport header, if it holds only the sum of the pseudo header.
    checksum: Option<usize>,
    /// Payload of a segment; 0: the frame is to be sent as it is.
    segment_size: usize,
    /// Where the transport header begins: the inner one, unless only the outer checksum is missing.
    transport: usize,
}

impl VnetHeader {
    fn read(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(usize::from(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?)));
        let [flags, segmentation] = *bytes.first_chunk()?;
        // VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE.
        let segment_size = if segmentation == 0 { 0 } else { half(4)? };
        let checksum = if flags & 1 != 0 { Some(half(8)?) } else { None };
        Some(Self { checksum, segment_size, transport: half(6)? })
    }

    /// A wire carries whole checksums.
    fn complete(&self, bytes: &mut [u8]) {
        let Some(at) = self.checksum.map(|field| self.transport + field) else { return };
        let Some(covered) = bytes.get(self.transport..) else { return };
        let checksum = match !frame::fold(frame::sum(covered)) {
            // Zero would say that there is none (RFC 768).
            0 => 0xffff,
            checksum => checksum,
        };
        if let Some(field) = bytes.get_mut(at..at + 2) {
            field.copy_from_slice(&u16::to_be_bytes(checksum));
        }
    }
}
