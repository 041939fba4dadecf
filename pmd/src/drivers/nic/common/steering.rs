//! Steering of received frames: which frames a port accepts, and RSS over its queues.
//!
//! A device hashes the headers of one class of packets per RSS queue pair. Each class therefore has a queue
//! pair of its own and a rule that directs its packets there. All of them use the same indirection table.
//! Packets of no class, such as ARP, go to the first queue without a hash.

use std::net::IpAddr;

use wirepath_verbs::flow::{
    EthFilter, Flow, FlowTarget, FlowType, Ipv4ExtFilter, Ipv4Filter, Ipv6Filter, Spec, TcpFilter, UdpFilter,
};
use wirepath_verbs::{Error, FlowRule, HashFields, IndirectionTable, Result, WorkQueue};

use super::rules::ibv::priorities;
use super::rules::{CreateRssQp, DefaultRss, RssClass};
use crate::port::{Bifurcation, MacAddr, PortConfig};
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RxFilter {
    /// All frames.
    Promiscuous,
    /// Frames to this address, and to multicast addresses.
    Mac(MacAddr),
    /// These packets. The kernel keeps all other frames. Its interface has the Ethernet address, which may change.
    Bifurcated(Bifurcation),
}

impl RxFilter {
    /// Returns the filter of a port with this address, if it has one.
    pub(crate) fn new(mac: Option<MacAddr>, config: &PortConfig) -> Self {
        match (mac, &config.bifurcation) {
            (_, Some(packets)) => Self::Bifurcated(packets.clone()),
            (Some(mac), None) if !config.promiscuous => Self::Mac(mac),
            _ => Self::Promiscuous,
        }
    }

    /// Returns the spec that all flows of the filter begin with.
    fn address(&self) -> Spec {
        match *self {
            Self::Mac(mac) => ethernet(mac, MacAddr::BROADCAST),
            Self::Promiscuous | Self::Bifurcated(_) => EthFilter::any(),
        }
    }

    /// Returns the specs of each flow that takes packets of a class.
    fn flows(&self, class: RssClass) -> Vec<Vec<Spec>> {
        let Self::Bifurcated(packets) = self else {
            return vec![class.headers.iter().map(|header| any(*header)).collect()];
        };
        let of_version = packets.addresses.iter().filter(|to| to.is_ipv4() == class.headers.contains(&ItemKind::Ipv4));
        let flows = of_version.flat_map(|to| -> Vec<Vec<Spec>> {
            match class.headers {
                [_, ItemKind::Udp] => packets.udp_ports.iter().map(|port| vec![ip(*to, None), udp_to(*port)]).collect(),
                [_] => packets.protocols.iter().map(|protocol| vec![ip(*to, Some(*protocol))]).collect(),
                _ => Vec::new(),
            }
        });
        flows.collect()
    }
}

/// Returns a spec that matches the destination address, and the protocol if one is given.
fn ip(to: IpAddr, protocol: Option<u8>) -> Spec {
    let proto = protocol.unwrap_or(0);
    let proto_mask = protocol.map_or(0, |_| u8::MAX);
    match to {
        IpAddr::V4(to) => {
            let value = Ipv4ExtFilter { dst_ip: to.to_bits(), proto, ..Ipv4ExtFilter::default() };
            value.with_mask(Ipv4ExtFilter { dst_ip: u32::MAX, proto: proto_mask, ..Ipv4ExtFilter::default() })
        }
        IpAddr::V6(to) => {
            let value = Ipv6Filter { dst_ip: to.octets(), next_hdr: proto, ..Ipv6Filter::default() };
            value.with_mask(Ipv6Filter { dst_ip: [u8::MAX; 16], next_hdr: proto_mask, ..Ipv6Filter::default() })
        }
    }
}

/// Returns a spec that matches the UDP destination port.
fn udp_to(dst_port: u16) -> Spec {
    UdpFilter { dst_port, src_port: 0 }.with_mask(UdpFilter { dst_port: u16::MAX, src_port: 0 })
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
    filter: RxFilter,
    /// Queues of the indirection table.
    queues: Vec<WorkQueue>,
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
/// per rank, which [`Steering::update_rss`] needs. A filter of bifurcated packets has them in any case.
pub(crate) fn install_steering(
    create_qp: &CreateRssQp,
    queues: &[WorkQueue],
    port: u8,
    filter: RxFilter,
    updatable: bool,
) -> Result<(Steering, DefaultRss)> {
    let rest = IndirectionTable::new(&queues[..1])?;
    let rest = create_qp(&rest, HashFields::NONE)?;
    let is_bifurcated = matches!(filter, RxFilter::Bifurcated(..));
    let step = if updatable || is_bifurcated { 2 } else { 1 };
    let first = priorities(&(&rest).into(), port).saturating_sub(step * REST + 1);
    // The default rules first: until the last rule is installed, their queue gets the packets of all classes.
    let mut rules = Vec::new();
    match &filter {
        RxFilter::Promiscuous => rules.push(FlowRule::new(&rest, &Flow::without_specs(port, FlowType::ALL_DEFAULT))?),
        RxFilter::Mac(_) => {
            let last = first + step * REST;
            // The kernel puts multicast-only rules behind all others, whatever their priority. Classes cannot
            // be distinguished there.
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(ethernet(MULTICAST, MULTICAST)))?);
            rules.push(FlowRule::new(&rest, &Flow::normal(port, last).with(filter.address()))?);
        }
        RxFilter::Bifurcated(..) => {}
    }
    let create_qp = CreateRssQp::clone(create_qp);
    // Rules of higher priority would also match frames that the port does not accept.
    let priorities = if filter == RxFilter::Promiscuous { first } else { 0 };
    let (queues, classes) = (queues.to_vec(), Vec::new());
    let mut steering = Steering { create_qp, port, filter, queues, first, step, parity: 0, classes, _rest: rules };
    let (classes, mut targets) = steering.create_rules(&steering.filter, &steering.queues, 0)?;
    steering.classes = classes;
    targets.push((RssClass::ANY, (&rest).into()));
    let default_rss = DefaultRss::new(&steering.create_qp, &steering.queues, targets, priorities);
    Ok((steering, default_rss))
}

impl Steering {
    /// Creates the rules of all classes over these queues, and returns them with their targets.
    fn create_rules(
        &self,
        filter: &RxFilter,
        queues: &[WorkQueue],
        parity: u16,
    ) -> Result<(FlowRules, Vec<(RssClass, FlowTarget)>)> {
        let table = indirection_table(queues)?;
        let (mut rules, mut targets) = (Vec::new(), Vec::new());
        for (class, fields) in classes() {
            let flows = filter.flows(class);
            if flows.is_empty() {
                continue;
            }
            let pair = (self.create_qp)(&table, fields)?;
            let priority = self.first + self.step * class.rank + parity;
            for specs in flows {
                let flow = Flow::normal(self.port, priority).with(filter.address());
                rules.push(FlowRule::new(&pair, &specs.into_iter().fold(flow, Flow::with))?);
            }
            targets.push((class, (&pair).into()));
        }
        Ok((rules, targets))
    }

    /// Updates the classes to use these queues. The new rule of each class is installed before the old one is
    /// removed. Their priorities differ, so that every packet matches one of both.
    pub(crate) fn update_rss(&mut self, queues: &[WorkQueue]) -> Result<()> {
        self.update(self.filter.clone(), queues.to_vec())
    }

    /// Replaces the packets of a filter of bifurcated packets, in the same way.
    pub(crate) fn set_bifurcation(&mut self, packets: &Bifurcation) -> Result<()> {
        if !matches!(self.filter, RxFilter::Bifurcated(_)) {
            return Err(Error::InvalidRequest("the port was started for all packets of its interface".to_owned()));
        }
        self.update(RxFilter::Bifurcated(packets.clone()), self.queues.clone())
    }

    fn update(&mut self, filter: RxFilter, queues: Vec<WorkQueue>) -> Result<()> {
        let parity = 1 - self.parity;
        let (rules, _) = self.create_rules(&filter, &queues, parity)?;
        (self.filter, self.queues, self.classes, self.parity) = (filter, queues, rules, parity);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each address has a flow for each UDP port, and one for each protocol, in the class of its packets.
    #[test]
    fn flows_of_a_bifurcation() {
        let addresses = ["10.9.0.1", "10.9.0.5", "fd00:9::1"].map(|text| text.parse().unwrap()).to_vec();
        let packets =
            Bifurcation { addresses, udp_ports: vec![4789, 6081], protocols: vec![4, 41, 47], later_fragments: true };
        let filter = RxFilter::Bifurcated(packets);
        let flows = classes().map(|(class, _)| filter.flows(class));
        assert_eq!(flows.each_ref().map(Vec::len), [0, 4, 0, 2, 6, 3]);
        assert!(flows.iter().flatten().all(|specs| !specs.is_empty()), "a flow for all packets");
        let (first, last) = (&flows[1][0], &flows[5][2]);
        let [Spec::Ipv4Ext { value, mask, .. }, Spec::Udp { value: udp, mask: udp_mask, .. }] = first[..] else {
            panic!("{first:?}");
        };
        assert_eq!((value.dst_ip, value.proto, mask.dst_ip, mask.proto), (0x0a09_0001, 0, u32::MAX, 0));
        assert_eq!((udp.dst_port, udp_mask.dst_port, udp_mask.src_port), (4789, u16::MAX, 0));
        let [Spec::Ipv6 { value, mask, .. }] = last[..] else { panic!("{last:?}") };
        assert_eq!((value.dst_ip[15], value.next_hdr, mask.dst_ip, mask.next_hdr), (1, 47, [u8::MAX; 16], u8::MAX));
        // Other ports have one flow for each class.
        for filter in [RxFilter::Promiscuous, RxFilter::Mac(MacAddr::new(2, 0, 0, 0, 0, 1))] {
            assert!(classes().iter().all(|(class, _)| filter.flows(*class).len() == 1));
        }
    }
}
