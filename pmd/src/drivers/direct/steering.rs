//! Which frames come in, and how they are spread.
//!
//! The device hashes the headers of one class of packets at a time, so that each class has a queue pair of its own, all over the same
//! table, and a rule that sends its packets there. What belongs to no class, such as ARP, goes to the first queue without a hash.

use std::sync::Arc;

use wirepath_verbs::flow::{EthFilter, Flow, FlowTarget, FlowType, Ipv4Filter, Ipv6Filter, Spec, TcpFilter, UdpFilter};
use wirepath_verbs::{FlowRule, HashFields, IndirectionTable, Result, RssQp, WorkQueue};

use super::rules::ibv::priorities;
use super::rules::{Class, Reception};
use crate::flow::ItemKind;
use crate::port::{MacAddress, PortConfig};

/// Entries of an indirection table for a number of queues that is no power of two.
const TABLE: usize = 64;
/// Ranks: the more headers a class names, the earlier it is asked.
const TRANSPORT: u16 = 0;
const NETWORK: u16 = 1;
const REST: u16 = Class::ANY.rank;
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
fn classes() -> [(Class, HashFields); 6] {
    use ItemKind::{Ipv4, Ipv6, Tcp, Udp};
    let class = |headers, rank| Class { headers, rank };
    [
        (class(&[Ipv4, Tcp], TRANSPORT), HashFields::IPV4 | HashFields::TCP),
        (class(&[Ipv4, Udp], TRANSPORT), HashFields::IPV4 | HashFields::UDP),
        (class(&[Ipv6, Tcp], TRANSPORT), HashFields::IPV6 | HashFields::TCP),
        (class(&[Ipv6, Udp], TRANSPORT), HashFields::IPV6 | HashFields::UDP),
        (class(&[Ipv4], NETWORK), HashFields::IPV4),
        (class(&[Ipv6], NETWORK), HashFields::IPV6),
    ]
}

/// A spec that only wants this header.
fn any(header: ItemKind) -> Spec {
    match header {
        ItemKind::Ipv4 => Ipv4Filter::any(),
        ItemKind::Ipv6 => Ipv6Filter::any(),
        ItemKind::Tcp => TcpFilter::any(),
        ItemKind::Udp => UdpFilter::any(),
        _ => EthFilter::any(),
    }
}

/// Ethernet to these addresses.
fn ethernet(dst_mac: [u8; 6], mask: [u8; 6]) -> Spec {
    EthFilter { dst_mac, ..EthFilter::default() }.under(EthFilter { dst_mac: mask, ..EthFilter::default() })
}

/// Rules that are in force; each keeps the queue pair that its packets go to, and with it tables and queues.
pub(crate) type Rules = Vec<FlowRule>;

/// Makes a queue pair that spreads packets over a table by these fields, with [`super::RSS_KEY`].
pub(crate) type MakePair = Arc<dyn Fn(&IndirectionTable, HashFields) -> Result<RssQp> + Send + Sync>;

/// The port's own rules. They have the last priorities of the device: those before are for what [`Reception`] serves.
pub(crate) struct Steering {
    pairs: MakePair,
    port: u8,
    /// What all packets are that come in.
    address: Spec,
    /// The first of the port's own priorities, and from one rank to the next.
    first: u16,
    step: u16,
    /// Which of the priorities of their ranks the rules of classes have.
    side: u16,
    classes: Rules,
    /// What belongs to no class.
    _rest: Rules,
}

/// Spreads the packets of a port over its queues. They come from here on. Whoever will spread them over others too, beside running traffic,
/// needs two priorities for each rank (`again`).
pub(crate) fn spread(
    pairs: &MakePair,
    queues: &[WorkQueue],
    port: u8,
    whose: Whose,
    again: bool,
) -> Result<(Steering, Reception)> {
    let rest = IndirectionTable::new(&queues[..1])?;
    let rest = pairs(&rest, HashFields::NONE)?;
    let step = if again { 2 } else { 1 };
    let first = priorities(&(&rest).into(), port).saturating_sub(step * REST + 1);
    let address = match whose {
        Whose::Everybodys => EthFilter::any(),
        Whose::Ours(destination) => ethernet(destination, [0xff; 6]),
    };
    // The rest first: until the last rule is there, its queue gets what the others are for.
    let mut rules = Vec::new();
    match whose {
        Whose::Everybodys => rules.push(FlowRule::new(&rest, &Flow::of(port, FlowType::ALL_DEFAULT))?),
        Whose::Ours(_) => {
            let last = first + step * REST;
            // A device puts rules for groups alone behind all others, whatever their priority, so that no class can be told there.
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(ethernet(GROUP, GROUP)))?);
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(address))?);
        }
    }
    let pairs = MakePair::clone(pairs);
    let mut steering = Steering { pairs, port, address, first, step, side: 0, classes: Vec::new(), _rest: rules };
    let (classes, mut targets) = steering.over(queues, 0)?;
    steering.classes = classes;
    targets.push((Class::ANY, (&rest).into()));
    // Rules in front would have what is not ours, too.
    let priorities = if whose == Whose::Everybodys { first } else { 0 };
    let reception = Reception::new(&steering.pairs, queues, targets, priorities);
    Ok((steering, reception))
}

impl Steering {
    /// Rules that spread the classes over these queues, and where each goes.
    fn over(&self, queues: &[WorkQueue], side: u16) -> Result<(Rules, Vec<(Class, FlowTarget)>)> {
        // A power of two of entries, so that every queue gets as much as another where their number is one.
        let entries =
            if queues.len().is_power_of_two() { queues.len() } else { TABLE.max(queues.len().next_power_of_two()) };
        let table: Vec<_> = queues.iter().cloned().cycle().take(entries).collect();
        let table = IndirectionTable::new(&table)?;
        let (mut rules, mut targets) = (Vec::new(), Vec::new());
        for (class, fields) in classes() {
            let pair = (self.pairs)(&table, fields)?;
            let headers = class.headers.iter().map(|header| any(*header));
            let priority = self.first + self.step * class.rank + side;
            let flow = headers.fold(Flow::normal(self.port, priority).with(self.address), Flow::with);
            rules.push(FlowRule::new(&pair, &flow)?);
            targets.push((class, (&pair).into()));
        }
        Ok((rules, targets))
    }

    /// Spreads what belongs to a class over these queues from here on. Each class has its new rule beside the old one before that goes, in
    /// front of it or behind it: every packet meets one of both.
    pub(crate) fn respread(&mut self, queues: &[WorkQueue]) -> Result<()> {
        let side = 1 - self.side;
        let (rules, _) = self.over(queues, side)?;
        (self.classes, self.side) = (rules, side);
        Ok(())
    }
}
