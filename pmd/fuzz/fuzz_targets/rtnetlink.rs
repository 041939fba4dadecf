//! Messages of the kernel about links, forwarding databases, neighbours and routes. The first byte chooses the type.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wirepath_pmd::rtnetlink::{Fdb, Message, NexthopTarget};

/// `RTM_NEWLINK`, `RTM_DELLINK`, `RTM_NEWNEIGH`, `RTM_DELNEIGH`, `RTM_NEWROUTE`, `RTM_NEWRULE`, `RTM_NEWNEXTHOP` and
/// `RTM_DELNEXTHOP`, and then `RTM_NEWADDR`.
const TYPES: [u16; 9] = [16, 17, 28, 29, 24, 32, 104, 105, 20];

fuzz_target!(|data: &[u8]| {
    let Some((kind, body)) = data.split_first() else { return };
    let kind = TYPES[usize::from(*kind) % TYPES.len()];
    let read = Message::read(kind, body);
    assert_eq!(read, Message::read(kind, body), "the same bytes have one meaning");
    match read {
        Ok(Some(Message::Link(link))) => {
            assert!(link.index != 0 && link.name.chars().count() <= 256 && link.master != Some(0));
        }
        Ok(Some(Message::LinkRemoved(index))) => assert!(index != 0 && kind == 17),
        Ok(Some(Message::Fdb(Fdb::Bridge(entry)))) => assert_eq!(entry.removed, kind == 29),
        Ok(Some(Message::Fdb(Fdb::Tunnel(entry)))) => assert_eq!(entry.removed, kind == 29),
        Ok(Some(Message::Neighbour(neighbour))) => assert!(kind == 28 || neighbour.mac.is_none()),
        Ok(Some(Message::Route(route))) => {
            assert!(route.len <= if route.to.is_ipv4() { 32 } else { 128 } && route.hops.len() <= 256);
        }
        Ok(Some(Message::Nexthop(nexthop))) => {
            assert!(nexthop.id != 0 && (kind == 104 || nexthop.to.is_none()));
            assert!(!matches!(nexthop.to, Some(NexthopTarget::Group(members)) if members.len() > 256));
        }
        Ok(Some(Message::Routing)) => assert_eq!(kind, 32),
        Ok(Some(Message::AddressesChanged(_))) => assert_eq!(kind, 20),
        Ok(Some(Message::Ipv6Changed(index))) => assert!(index != 0 && (kind == 16 || kind == 17)),
        Ok(None) | Err(_) => {}
    }
});
