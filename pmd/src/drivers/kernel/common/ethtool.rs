// UNSAFETY: SIOCETHTOOL takes a pointer inside `struct ifreq`.
#![allow(unsafe_code)]

//! Requests to a network driver by `ioctl(SIOCETHTOOL)`. Structures: `linux/ethtool.h`.

use std::ffi::c_void;
use std::io;
use std::os::fd::AsRawFd;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

const ETHTOOL_GSET: u32 = 0x01;
const ETHTOOL_GTSO: u32 = 0x1e;
const ETHTOOL_GFLAGS: u32 = 0x25;
const ETHTOOL_GCHANNELS: u32 = 0x3c;
/// `ETH_FLAG_RXVLAN`: the device strips VLAN tags from received frames.
const ETH_FLAG_RXVLAN: u32 = 1 << 8;

/// Sends a structure of 32-bit words whose first word is the command. Returns it as the kernel filled it.
fn query<const WORDS: usize>(interface: &str, command: u32) -> io::Result<[u32; WORDS]> {
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    let mut answer = [0; WORDS];
    answer[0] = command;
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

/// Returns whether the device segments TCP.
pub(crate) fn segments_tcp(interface: &str) -> io::Result<bool> {
    // struct ethtool_value: cmd, data.
    let answer: [u32; 2] = query(interface, ETHTOOL_GTSO)?;
    Ok(answer[1] != 0)
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
