//! Which frames come in, and how they are spread.
//!
//! The device hashes the headers of one class of packets at a time, so that each class has a queue pair of its own, all over the same
//! table, and a rule that sends its packets there. What belongs to no class, such as ARP, goes to the first queue without a hash.

use wirepath_verbs::flow::{EthFilter, Flow, FlowType, Ipv4Filter, Ipv6Filter, Spec, TcpFilter, UdpFilter};
use wirepath_verbs::{FlowRule, HashFields, IndirectionTable, ProtectionDomain, Result, RssQp, WorkQueue};

use super::RSS_KEY;
use crate::port::{MacAddress, PortConfig};

/// Entries of an indirection table for a number of queues that is no power of two.
const TABLE: usize = 64;
/// Priorities: the more headers a class names, the earlier.
const TRANSPORT: u16 = 0;
const NETWORK: u16 = 1;
const REST: u16 = 2;
const GROUP: [u8; 6] = [1, 0, 0, 0, 0, 0];

/// Which frames a port receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Whose {
    /// All.
    Everybodys,
    /// Those to this address, and to groups.
    Ours([u8; 6]),
}

impl Whose {
    /// Those of a port with this address, if it has one.
    pub(crate) fn of(mac: Option<MacAddress>, config: &PortConfig) -> Self {
        match mac {
            Some(mac) if !config.promiscuous => Self::Ours(mac.octets()),
            _ => Self::Everybodys,
        }
    }
}

/// Classes of packets: what their headers are, and what is hashed.
fn classes() -> [(Vec<Spec>, HashFields, u16); 6] {
    let (ipv4, ipv6, tcp, udp) = (Ipv4Filter::any(), Ipv6Filter::any(), TcpFilter::any(), UdpFilter::any());
    [
        (vec![ipv4, tcp], HashFields::IPV4 | HashFields::TCP, TRANSPORT),
        (vec![ipv4, udp], HashFields::IPV4 | HashFields::UDP, TRANSPORT),
        (vec![ipv6, tcp], HashFields::IPV6 | HashFields::TCP, TRANSPORT),
        (vec![ipv6, udp], HashFields::IPV6 | HashFields::UDP, TRANSPORT),
        (vec![ipv4], HashFields::IPV4, NETWORK),
        (vec![ipv6], HashFields::IPV6, NETWORK),
    ]
}

/// Ethernet to these addresses.
fn ethernet(dst_mac: [u8; 6], mask: [u8; 6]) -> Spec {
    EthFilter { dst_mac, ..EthFilter::default() }.under(EthFilter { dst_mac: mask, ..EthFilter::default() })
}

/// Rules that are in force; each keeps the queue pair that its packets go to, and with it tables and queues.
pub(crate) type Rules = Vec<FlowRule>;

/// Spreads the packets of a port over its queues. They come from here on.
pub(crate) fn spread(domain: &ProtectionDomain, queues: &[WorkQueue], port: u8, whose: Whose) -> Result<Rules> {
    // A power of two of entries, so that every queue gets as much as another where their number is one.
    let entries =
        if queues.len().is_power_of_two() { queues.len() } else { TABLE.max(queues.len().next_power_of_two()) };
    let table: Vec<_> = queues.iter().cloned().cycle().take(entries).collect();
    let table = IndirectionTable::new(&table)?;
    let rest = IndirectionTable::new(&queues[..1])?;
    let rest = RssQp::new(domain, &rest, HashFields::NONE, &RSS_KEY)?;
    let address = match whose {
        Whose::Everybodys => EthFilter::any(),
        Whose::Ours(destination) => ethernet(destination, [0xff; 6]),
    };
    // The rest first: until the last rule is there, its queue gets what the others are for.
    let mut rules = Vec::new();
    match whose {
        Whose::Everybodys => rules.push(FlowRule::new(&rest, &Flow::of(port, FlowType::ALL_DEFAULT))?),
        Whose::Ours(_) => {
            // A device puts rules for groups alone behind all others, whatever their priority, so that no class can be told there.
            rules.push(FlowRule::new(&rest, &Flow::normal(port, REST).with(ethernet(GROUP, GROUP)))?);
            rules.push(FlowRule::new(&rest, &Flow::normal(port, REST).with(address))?);
        }
    }
    for (headers, fields, priority) in classes() {
        let pair = RssQp::new(domain, &table, fields, &RSS_KEY)?;
        let flow = headers.into_iter().fold(Flow::normal(port, priority).with(address), Flow::with);
        rules.push(FlowRule::new(&pair, &flow)?);
    }
    Ok(rules)
}
