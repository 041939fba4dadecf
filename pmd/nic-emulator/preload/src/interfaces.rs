//! Network interfaces of this machine as far ends of links.

use std::collections::VecDeque;
use std::ffi::{CString, c_int};
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use wirepath_nic_emulator::host::Interface;
use wirepath_nic_emulator::{frame, segment};

/// `PACKET_IGNORE_OUTGOING` of linux/if_packet.h, which `libc` lacks.
const PACKET_IGNORE_OUTGOING: c_int = 23;
/// `PACKET_VNET_HDR` of linux/if_packet.h, which `libc` lacks.
const PACKET_VNET_HDR: c_int = 15;
/// `TUNSETCARRIER` of linux/if_tun.h, which `libc` lacks: `_IOW('T', 226, int)`.
const TUNSETCARRIER: libc::Ioctl = 0x4004_54e2;
/// Size of `struct virtio_net_hdr`, which precedes each frame, in bytes.
const VNET: usize = 10;
/// Maximum length of a frame before segmentation: 64 KiB of IP, the Ethernet header and two VLAN tags.
const SUPERFRAME: usize = (64 << 10) + 22;
/// Size of the socket buffers in bytes.
static BUFFER: c_int = 16 << 20;

fn check(result: c_int, what: &str) -> Result<c_int, String> {
    if result < 0 { Err(format!("{what}: {}", io::Error::last_os_error())) } else { Ok(result) }
}

fn request(interface: &str) -> Result<libc::ifreq, String> {
    // SAFETY: `ifreq` contains only integers and arrays of them, so all-zero bytes are a valid value.
    let mut request: libc::ifreq = unsafe { zeroed() };
    let name = interface.as_bytes();
    if name.is_empty() || name.len() >= libc::IFNAMSIZ {
        return Err("not an interface name".to_owned());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name) {
        *to = *from as libc::c_char;
    }
    Ok(request)
}

/// Opens a socket for the properties of interfaces (netdevice(7)).
fn property_socket() -> Result<OwnedFd, String> {
    // SAFETY: the descriptor is new and owned by nobody else.
    unsafe {
        let socket = libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        Ok(OwnedFd::from_raw_fd(check(socket, "socket")?))
    }
}

/// Sets an interface up.
fn set_up(interface: &str) -> Result<(), String> {
    let mut request = request(interface)?;
    let socket = property_socket()?;
    // SAFETY: `request` is a valid `ifreq` that lives during both ioctl calls.
    unsafe {
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request), "SIOCGIFFLAGS")?;
        request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw mut request), "SIOCSIFFLAGS")?;
    }
    Ok(())
}

/// Opens a TAP interface, creates it if necessary, and sets it up.
pub(crate) fn tap(interface: &str) -> Result<Box<dyn Interface>, String> {
    let fd = open_tap(interface)?;
    // An unprivileged user may not set it up; then a privileged one has done so before.
    let _ = set_up(interface);
    Ok(Box::new(Tap { fd }))
}

/// Opens a TAP interface, and creates it if necessary.
fn open_tap(interface: &str) -> Result<OwnedFd, String> {
    let mut request = request(interface)?;
    request.ifr_ifru.ifru_flags = (libc::IFF_TAP | libc::IFF_NO_PI) as i16;
    // SAFETY: the path ends in NUL, and `request` is a valid `ifreq` that lives during the ioctl call. The
    // descriptor is new and owned by nobody else.
    unsafe {
        let flags = libc::O_RDWR | libc::O_NONBLOCK | libc::O_CLOEXEC;
        let fd = OwnedFd::from_raw_fd(check(
            libc::open(c"/dev/net/tun".as_ptr(), flags),
            "/dev/net/tun (needs CAP_NET_ADMIN)",
        )?);
        check(
            libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request),
            "TUNSETIFF (needs CAP_NET_ADMIN, or a TAP device of this user)",
        )?;
        Ok(fd)
    }
}

/// Opens a TAP interface with this address and MTU.
pub(crate) fn kernel(interface: &str, mac: [u8; 6], mtu: u32) -> Result<Box<dyn Interface>, String> {
    let fd = open_tap(interface)?;
    let mut request = request(interface)?;
    let socket = property_socket()?;
    // SAFETY: `request` is a valid `ifreq` that lives during both ioctl calls, and the field that each of them reads
    // is set.
    unsafe {
        let mut address: libc::sockaddr = zeroed();
        address.sa_family = libc::ARPHRD_ETHER;
        for (to, from) in address.sa_data.iter_mut().zip(mac) {
            *to = from as libc::c_char;
        }
        request.ifr_ifru.ifru_hwaddr = address;
        let set = libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFHWADDR, &raw mut request);
        check(set, "SIOCSIFHWADDR (needs CAP_NET_ADMIN)")?;
        request.ifr_ifru.ifru_mtu = mtu as c_int;
        check(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFMTU, &raw mut request), "SIOCSIFMTU (needs CAP_NET_ADMIN)")?;
    }
    // Last, so that the kernel sends nothing from another address.
    set_up(interface)?;
    Ok(Box::new(Tap { fd }))
}

struct Tap {
    fd: OwnedFd,
}

impl Interface for Tap {
    fn send(&mut self, frame: &[u8]) -> bool {
        // SAFETY: `frame` is valid for reads of `frame.len()` bytes, which is what the kernel reads.
        unsafe { libc::write(self.fd.as_raw_fd(), frame.as_ptr().cast(), frame.len()) == frame.len() as isize }
    }

    fn receive(&mut self, frame: &mut [u8]) -> Option<usize> {
        // SAFETY: `frame` is valid for writes of `frame.len()` bytes, which is the most that the kernel
        // writes.
        let got = unsafe { libc::read(self.fd.as_raw_fd(), frame.as_mut_ptr().cast(), frame.len()) };
        usize::try_from(got).ok().filter(|got| *got > 0)
    }

    fn descriptor(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    fn set_carrier(&mut self, up: bool) {
        let up = c_int::from(up);
        // SAFETY: the call reads one integer, which lives during it. A kernel before 5.0 does not know the call.
        unsafe { libc::ioctl(self.fd.as_raw_fd(), TUNSETCARRIER, &raw const up) };
    }
}

/// Opens a packet socket on an interface, in promiscuous mode and without packets that this machine sends.
pub(crate) fn packet(interface: &str) -> Result<Box<dyn Interface>, String> {
    let name = CString::new(interface).map_err(|_| "not an interface name".to_owned())?;
    // SAFETY: every pointer refers to a live value of the type that the call expects, with its size. All-zero
    // bytes are valid for the integer structures. The descriptor is new and owned by nobody else.
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
        // Larger buffers need privileges; errors are ignored.
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
    /// Receive buffer: a header of [`VNET`] bytes, then a frame or superframe.
    handed: Vec<u8>,
    /// Segments of a superframe that are not read yet.
    segments: VecDeque<Vec<u8>>,
}

impl Packet {
    /// Receives the next frame or superframe and inserts its VLAN tag. Returns its header and the end of the
    /// data, which starts at `VNET`.
    fn next(&mut self) -> Option<(VnetHeader, usize)> {
        // SAFETY: `msghdr` contains only integers and pointers, so all-zero bytes are a valid value; integers
        // are valid too.
        let (mut message, mut control): (libc::msghdr, [u64; 16]) = unsafe { (zeroed(), zeroed()) };
        // 4 bytes are reserved for the VLAN tag.
        let room = self.handed.len() - 4;
        let mut part = libc::iovec { iov_base: self.handed.as_mut_ptr().cast(), iov_len: room };
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = size_of_val(&control);
        // SAFETY: every pointer in `message` refers to a live buffer of the given length, and the buffers
        // outlive the call.
        let got = unsafe { crate::next_symbol::recvmsg(self.fd.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let mut length = usize::try_from(got).ok().filter(|length| *length > VNET)?;
        // SAFETY: the kernel has filled `message` and `control`. The CMSG macros stay inside the control
        // buffer, and the data is read unaligned.
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
            // The kernel passes the VLAN tag beside the frame.
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

impl Interface for Packet {
    fn send(&mut self, frame: &[u8]) -> bool {
        // An empty header requests no offload.
        let none = [0u8; VNET];
        let parts = [&none[..], frame]
            .map(|part| libc::iovec { iov_base: part.as_ptr().cast_mut().cast(), iov_len: part.len() });
        // SAFETY: all-zero bytes are a valid `msghdr`. `parts` refers to live buffers of the given lengths,
        // which the kernel only reads.
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
            // A superframe that cannot be segmented is lost, like a frame that is too long for a wire.
            let segments = &mut self.segments;
            let _ = segment::segment_superframe(whole, vnet.transport, vnet.segment_size, |segment| {
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

/// Offloads that the sender of a frame requests (`struct virtio_net_hdr`, linux/virtio_net.h, in host byte
/// order).
#[derive(Clone, Copy, Debug)]
struct VnetHeader {
    /// Offset of the checksum field in the transport header, if the field contains only the sum of the pseudo
    /// header.
    checksum: Option<usize>,
    /// Payload length of a segment; 0 if the frame is not to be segmented.
    segment_size: usize,
    /// Offset of the transport header: the inner one, unless only the outer checksum is missing.
    transport: usize,
}

impl VnetHeader {
    fn read(bytes: &[u8]) -> Option<Self> {
        let half = |at: usize| Some(usize::from(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?)));
        let [flags, segmentation] = *bytes.first_chunk()?;
        // Flag `VIRTIO_NET_HDR_F_NEEDS_CSUM`; type `VIRTIO_NET_HDR_GSO_NONE`.
        let segment_size = if segmentation == 0 { 0 } else { half(4)? };
        let checksum = if flags & 1 != 0 { Some(half(8)?) } else { None };
        Some(Self { checksum, segment_size, transport: half(6)? })
    }

    /// Completes the checksum, because a link carries complete checksums.
    fn complete(&self, bytes: &mut [u8]) {
        let Some(at) = self.checksum.map(|field| self.transport + field) else { return };
        let Some(covered) = bytes.get(self.transport..) else { return };
        let checksum = match !frame::fold(frame::sum(covered)) {
            // A zero checksum means that there is none (RFC 768).
            0 => 0xffff,
            checksum => checksum,
        };
        if let Some(field) = bytes.get_mut(at..at + 2) {
            field.copy_from_slice(&u16::to_be_bytes(checksum));
        }
    }
}
