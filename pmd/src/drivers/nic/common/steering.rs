//! Steering of received frames: which frames a port accepts, and RSS over its queues.
//!
//! A device hashes the headers of one class of packets per RSS queue pair. Each class therefore has a queue
//! pair of its own and a rule that directs its packets there. All of them use the same indirection table.
//! Packets of no class, such as ARP, go to the first queue without a hash.

use wirepath_verbs::flow::{EthFilter, Flow, FlowTarget, FlowType, Ipv4Filter, Ipv6Filter, Spec, TcpFilter, UdpFilter};
use wirepath_verbs::{FlowRule, HashFields, IndirectionTable, Result, WorkQueue};

use super::rules::ibv::priorities;
use super::rules::{CreateRssQp, DefaultRss, RssClass};
use crate::port::{MacAddr, PortConfig};
use wirepath_flow::ItemKind;

/// Entries of the indirection table, if the number of queues is not a power of two.
const TABLE_ENTRIES: usize = 64;
/// Ranks: classes with more headers are matched first.
const TRANSPORT: u16 = 0;
const NETWORK: u16 = 1;
const REST: u16 = RssClass::ANY.rank;
/// The group bit.
const MULTICAST: MacAddr = MacAddr::new(1, 0, 0, 0, 0, 0);

/// Frames that a port accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RxFilter {
    /// All frames.
    Promiscuous,
    /// Frames to this address, and to multicast addresses.
    Mac(MacAddr),
}

impl RxFilter {
    /// Returns the filter of a port with this address, if it has one.
    pub(crate) fn new(mac: Option<MacAddr>, config: &PortConfig) -> Self {
        match mac {
            Some(mac) if !config.promiscuous => Self::Mac(mac),
            _ => Self::Promiscuous,
        }
    }
}

/// Returns the classes of packets with the fields that are hashed.
fn classes() -> [(RssClass, HashFields); 6] {
    use ItemKind::{Ipv4, Ipv6, Tcp, Udp};
    let class = |headers, rank| RssClass { headers, rank };
    [
        (class(&[Ipv4, Tcp], TRANSPORT), HashFields::IPV4 | HashFields::TCP),
        (class(&[Ipv4, Udp], TRANSPORT), HashFields::IPV4 | HashFields::UDP),
        (class(&[Ipv6, Tcp], TRANSPORT), HashFields::IPV6 | HashFields::TCP),
        (class(&[Ipv6, Udp], TRANSPORT), HashFields::IPV6 | HashFields::UDP),
        (class(&[Ipv4], NETWORK), HashFields::IPV4),
        (class(&[Ipv6], NETWORK), HashFields::IPV6),
    ]
}

/// Returns a spec that matches the presence of this header.
fn any(header: ItemKind) -> Spec {
    match header {
        ItemKind::Ipv4 => Ipv4Filter::any(),
        ItemKind::Ipv6 => Ipv6Filter::any(),
        ItemKind::Tcp => TcpFilter::any(),
        ItemKind::Udp => UdpFilter::any(),
        _ => EthFilter::any(),
    }
}

/// Returns a spec that matches the destination address.
fn ethernet(destination: MacAddr, mask: MacAddr) -> Spec {
    let filter = |mac: MacAddr| EthFilter { dst_mac: mac.octets(), ..EthFilter::default() };
    filter(destination).with_mask(filter(mask))
}

/// Installed rules. Each holds the queue pair that it delivers to, which holds tables and work queues.
pub(crate) type FlowRules = Vec<FlowRule>;

/// Creates an indirection table over these queues.
pub(crate) fn indirection_table(queues: &[WorkQueue]) -> Result<IndirectionTable> {
    // A power of two, so that all queues get equal shares if their number is one as well.
    let entries = match queues.len() {
        count if count.is_power_of_two() => count,
        count => TABLE_ENTRIES.max(count.next_power_of_two()),
    };
    let table: Vec<_> = queues.iter().cloned().cycle().take(entries).collect();
    IndirectionTable::new(&table)
}

/// The port's own rules. They use the lowest priorities of the device; the higher ones are for
/// [`DefaultRss`].
pub(crate) struct Steering {
    create_qp: CreateRssQp,
    port: u8,
    /// Match that all accepted packets share.
    address: Spec,
    /// Highest priority of the port's own rules, and the distance between two ranks.
    first: u16,
    step: u16,
    /// Which of the two priorities of its rank each class rule uses.
    parity: u16,
    classes: FlowRules,
    /// Rules for packets of no class.
    _rest: FlowRules,
}

/// Installs RSS over the queues of a port. Packets arrive from here on. `updatable`: reserves two priorities
/// per rank, which [`Steering::update_rss`] needs.
pub(crate) fn install_steering(
    create_qp: &CreateRssQp,
    queues: &[WorkQueue],
    port: u8,
    filter: RxFilter,
    updatable: bool,
) -> Result<(Steering, DefaultRss)> {
    let rest = IndirectionTable::new(&queues[..1])?;
    let rest = create_qp(&rest, HashFields::NONE)?;
    let step = if updatable { 2 } else { 1 };
    let first = priorities(&(&rest).into(), port).saturating_sub(step * REST + 1);
    let address = match filter {
        RxFilter::Promiscuous => EthFilter::any(),
        RxFilter::Mac(destination) => ethernet(destination, MacAddr::BROADCAST),
    };
    // The default rules first: until the last rule is installed, their queue gets the packets of all classes.
    let mut rules = Vec::new();
    match filter {
        RxFilter::Promiscuous => rules.push(FlowRule::new(&rest, &Flow::without_specs(port, FlowType::ALL_DEFAULT))?),
        RxFilter::Mac(_) => {
            let last = first + step * REST;
            // The kernel puts multicast-only rules behind all others, whatever their priority. Classes cannot
            // be distinguished there.
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(ethernet(MULTICAST, MULTICAST)))?);
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(address))?);
        }
    }
    let create_qp = CreateRssQp::clone(create_qp);
    let mut steering = Steering { create_qp, port, address, first, step, parity: 0, classes: Vec::new(), _rest: rules };
    let (classes, mut targets) = steering.create_rules(queues, 0)?;
    steering.classes = classes;
    targets.push((RssClass::ANY, (&rest).into()));
    // Rules of higher priority would also match frames that the port does not accept.
    let priorities = if filter == RxFilter::Promiscuous { first } else { 0 };
    let default_rss = DefaultRss::new(&steering.create_qp, queues, targets, priorities);
    Ok((steering, default_rss))
}

impl Steering {
    /// Creates the rules of all classes over these queues, and returns them with their targets.
    fn create_rules(&self, queues: &[WorkQueue], parity: u16) -> Result<(FlowRules, Vec<(RssClass, FlowTarget)>)> {
        let table = indirection_table(queues)?;
        let (mut rules, mut targets) = (Vec::new(), Vec::new());
        for (class, fields) in classes() {
            let pair = (self.create_qp)(&table, fields)?;
            let headers = class.headers.iter().map(|header| any(*header));
            let priority = self.first + self.step * class.rank + parity;
            let flow = headers.fold(Flow::normal(self.port, priority).with(self.address), Flow::with);
            rules.push(FlowRule::new(&pair, &flow)?);
            targets.push((class, (&pair).into()));
        }
        Ok((rules, targets))
    }

    /// Updates the classes to use these queues. The new rule of each class is installed before the old one is
    /// removed. Their priorities differ, so that every packet matches one of both.
    pub(crate) fn update_rss(&mut self, queues: &[WorkQueue]) -> Result<()> {
        let parity = 1 - self.parity;
        let (rules, _) = self.create_rules(queues, parity)?;
        (self.classes, self.parity) = (rules, parity);
        Ok(())
    }
}
