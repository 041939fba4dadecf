// UNSAFETY: SIOCETHTOOL takes a pointer inside `struct ifreq`.
#![allow(unsafe_code)]

//! Requests to a network driver by `ioctl(SIOCETHTOOL)`. Structures: `linux/ethtool.h`.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

const ETHTOOL_GSET: u32 = 0x01;
const ETHTOOL_GSTRINGS: u32 = 0x1b;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GSSET_INFO: u32 = 0x37;
const ETHTOOL_GFEATURES: u32 = 0x3a;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// `ETH_SS_FEATURES`: the set of the names of features.
const SET_OF_FEATURES: u32 = 4;
/// Most features of a kernel that [`segmentation`] reads. Linux 6.12 has 62.
const FEATURES: usize = 256;
/// Words of a name (`ETH_GSTRING_LEN`).
const NAME: usize = 32 / 4;
/// `ETH_FLAG_RXVLAN`: the device strips VLAN tags from received frames.
const ETH_FLAG_RXVLAN: u32 = 1 << 8;

/// Sends a structure of 32-bit words whose first word is the command. Returns it as the kernel filled it.
fn query<const WORDS: usize>(interface: &str, command: u32) -> io::Result<[u32; WORDS]> {
    let mut request = [0; WORDS];
    request[0] = command;
    ask(interface, request)
}

/// Sends a structure of 32-bit words. Returns it as the kernel filled it. The kernel writes no more than `WORDS`.
fn ask<const WORDS: usize>(interface: &str, mut answer: [u32; WORDS]) -> io::Result<[u32; WORDS]> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: `ifreq` consists of integers and a union of plain data, for which zero bytes are valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if interface.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_data = answer.as_mut_ptr().cast();
    // SAFETY: `answer` has as many words as the command's structure, the name ends with a zero byte, and both
    // outlive the call.
    let rc = unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCETHTOOL as _, (&raw mut request).cast::<c_void>()) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
}

/// Returns the receive and transmit queues in use. Fails if the network driver does not support the request.
pub(crate) fn channels(interface: &str) -> io::Result<(u32, u32)> {
    // struct ethtool_channels: cmd, max_rx, max_tx, max_other, max_combined, rx, tx, other, combined.
    let answer: [u32; 9] = query(interface, ETHTOOL_GCHANNELS)?;
    let (rx, tx, combined) = (answer[5], answer[6], answer[8]);
    Ok((rx.saturating_add(combined), tx.saturating_add(combined)))
}

/// Returns the link speed in Mbit/s, or `None` if it is unknown.
pub(crate) fn speed(interface: &str) -> io::Result<Option<u32>> {
    // struct ethtool_cmd: cmd, supported, advertising, speed (low half), three words, speed_hi (low half), three words.
    let answer: [u32; 11] = query(interface, ETHTOOL_GSET)?;
    let speed = answer[3] & 0xffff | answer[7] << 16;
    // `SPEED_UNKNOWN` is -1.
    Ok(Some(speed).filter(|speed| *speed != u32::MAX && *speed != 0))
}

/// Kinds of superframes that a device segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Segmentation {
    /// TCP over IPv4.
    pub(crate) ipv4: bool,
    /// TCP over IPv6.
    pub(crate) ipv6: bool,
    /// Segments with the flag CWR, which only the first frame keeps (RFC 3168 section 6.1.2).
    pub(crate) ecn: bool,
    /// UDP datagrams.
    pub(crate) udp: bool,
}

/// Returns which superframes the device segments.
pub(crate) fn segmentation(interface: &str) -> io::Result<Segmentation> {
    // struct ethtool_sset_info: cmd, reserved, sset_mask (64 bits), the number of names.
    let mut request = [0; 5];
    (request[0], request[2]) = (ETHTOOL_GSSET_INFO, 1 << SET_OF_FEATURES);
    let count = ask(interface, request)?[4] as usize;
    if count > FEATURES {
        return Err(io::ErrorKind::Unsupported.into());
    }
    // struct ethtool_gstrings: cmd, string_set, len, the names.
    let mut request = [0; 3 + FEATURES * NAME];
    (request[0], request[1], request[2]) = (ETHTOOL_GSTRINGS, SET_OF_FEATURES, count as u32);
    let names = ask(interface, request)?;
    // struct ethtool_gfeatures: cmd, size, and for each 32 features: available, requested, active, never_changed.
    let mut request = [0; 2 + FEATURES / 32 * 4];
    (request[0], request[1]) = (ETHTOOL_GFEATURES, (FEATURES / 32) as u32);
    let states = ask(interface, request)?;
    let mut found = Segmentation::default();
    for (i, name) in names[3..].chunks_exact(NAME).take(count).enumerate() {
        let name: Vec<u8> = name.iter().flat_map(|word| word.to_ne_bytes()).take_while(|byte| *byte != 0).collect();
        let is_active = states[2 + i / 32 * 4 + 2] >> (i % 32) & 1 != 0;
        match name.as_slice() {
            b"tx-tcp-segmentation" => found.ipv4 = is_active,
            b"tx-tcp6-segmentation" => found.ipv6 = is_active,
            b"tx-tcp-ecn-segmentation" => found.ecn = is_active,
            b"tx-udp-segmentation" => found.udp = is_active,
            _ => {}
        }
    }
    Ok(found)
}

/// Returns whether the device strips VLAN tags from received frames.
pub(crate) fn strips_vlan_tags(interface: &str) -> io::Result<bool> {
    let answer: [u32; 2] = query(interface, ETHTOOL_GFLAGS)?;
    Ok(answer[1] & ETH_FLAG_RXVLAN != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_must_be_names_of_interfaces() {
        assert!(strips_vlan_tags("a-name-that-is-too-long").is_err());
        assert_eq!(channels("no-such-if").unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}
