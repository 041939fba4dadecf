//! Finds interfaces that carry a default route. Taking such an interface from the kernel would disconnect the
//! machine.

use std::io;

use super::netlink::{Attributes, DUMP, Netlink, read_u16, read_u32};

const RTM_NEWROUTE: u16 = 24;
const RTM_GETROUTE: u16 = 26;
const RTMSG: usize = 12;
const RTA_OIF: u16 = 4;
const RTA_MULTIPATH: u16 = 9;
const RTN_UNICAST: u8 = 1;

/// Returns whether a default route (0.0.0.0/0 or ::/0, in any table) uses the interface.
pub(crate) fn carries_default_route(interface: u32) -> io::Result<bool> {
    let mut carries = false;
    for family in [libc::AF_INET as u8, libc::AF_INET6 as u8] {
        let mut body = [0; RTMSG];
        body[0] = family;
        let asked = Netlink::route()?.request(RTM_GETROUTE, DUMP, &body, |kind, body| {
            carries |= kind == RTM_NEWROUTE && default_route_leaves_by(body, interface);
        });
        match asked {
            Ok(()) => {}
            // A kernel without this address family has no such route.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EAFNOSUPPORT)) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(carries)
}

/// Parses one `struct rtmsg` with its attributes.
fn default_route_leaves_by(body: &[u8], interface: u32) -> bool {
    let (Some(&prefix), Some(&kind)) = (body.get(1), body.get(7)) else { return false };
    if prefix != 0 || kind != RTN_UNICAST {
        return false;
    }
    let attributes = Attributes::after_header(body, RTMSG);
    if attributes.find(RTA_OIF).and_then(|value| read_u32(value, 0)) == Some(interface) {
        return true;
    }
    // struct rtnexthop: length, flags, hops, interface index. Attributes may follow each.
    let mut hops = attributes.find(RTA_MULTIPATH).unwrap_or_default();
    while let (Some(len), Some(out)) = (read_u16(hops, 0), read_u32(hops, 4)) {
        if out == interface {
            return true;
        }
        hops = hops.get(usize::from(len).next_multiple_of(4).max(8)..).unwrap_or_default();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::netlink::put;
    use super::*;

    #[test]
    fn single_and_multipath_defaults_are_seen() {
        let mut route = vec![0; RTMSG];
        route[7] = RTN_UNICAST;
        let mut single = route.clone();
        put(&mut single, RTA_OIF, &7u32.to_ne_bytes());
        assert!(default_route_leaves_by(&single, 7));
        assert!(!default_route_leaves_by(&single, 8));
        single[1] = 24;
        assert!(!default_route_leaves_by(&single, 7), "a prefix of 24 bits is no default route");

        let mut hops = Vec::new();
        for out in [5u32, 7] {
            hops.extend_from_slice(&8u16.to_ne_bytes());
            hops.extend_from_slice(&[0, 0]);
            hops.extend_from_slice(&out.to_ne_bytes());
        }
        let mut multipath = route;
        put(&mut multipath, RTA_MULTIPATH, &hops);
        assert!(default_route_leaves_by(&multipath, 7));
        assert!(!default_route_leaves_by(&multipath, 6));
        for cut in 0..multipath.len() {
            default_route_leaves_by(&multipath[..cut], 6);
        }
    }

    #[test]
    fn the_loopback_interface_carries_none() {
        assert!(!carries_default_route(1).unwrap());
    }
}
