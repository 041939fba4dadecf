//! The gateway step by step with simulated time: timers, limits, and accounting of every packet.

use std::net::IpAddr;

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{Control, PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::PortEvent;
use wirepath_settings::Source;
use wirepath_wire::build::{OuterChecksum, VxlanConfig, VxlanEncap};
use wirepath_wire::{EtherType, MacAddr, Tag, Vni, checksum, ethernet, parse, vlan};

pub(crate) const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const HOST: MacAddr = MacAddr([2, 0, 0, 0, 1, 1]);
pub(crate) const FAR: MacAddr = MacAddr([2, 0, 0, 0, 2, 1]);
pub(crate) const SECOND: u64 = 1_000_000_000;

pub(crate) const WAN: PortId = PortId::new(0);
pub(crate) const LAN: PortId = PortId::new(1);

pub(crate) struct Lab {
    pub(crate) stepped: SteppedRuntime<Gateway>,
    pub(crate) control: GatewayControl,
    pub(crate) pool: Pool,
    pub(crate) peer: Option<UnderlayHost>,
}

impl Lab {
    pub(crate) fn new(segment: &str) -> Self {
        Self::of("", segment)
    }

    pub(crate) fn of(underlay: &str, segment: &str) -> Self {
        let text = format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n{underlay}\n\
             [[segment]]\nvni = 42\nports = [{{ port = 'lan' }}]\n{segment}\n"
        );
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap();
        let pool = Pool::new("stepped", 512).unwrap();
        let ports = vec![
            PortInfo::simulated(WAN, "wan", Some(US), 1500, &pool),
            PortInfo::simulated(LAN, "lan", None, 1500, &pool),
        ];
        let domain = Domain::new();
        let control = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let stepped = SteppedRuntime::new(ports, &domain, control.stage(&worker)).unwrap();
        Self { stepped, control, pool, peer: None }
    }

    pub(crate) fn with_peer(mut self) -> Self {
        let addresses = vec!["10.9.0.2/24".parse().unwrap(), "fd00:9::2/64".parse().unwrap()];
        self.peer =
            Some(UnderlayHost::new(Addresses { mac: MacAddr([2, 9, 9, 9, 9, 2]), addresses, gateways: vec![] }));
        self
    }

    pub(crate) fn send(&mut self, port: PortId, bytes: &[u8]) {
        self.send_all(port, std::iter::once(bytes));
    }

    /// Sends frames in batches.
    pub(crate) fn send_all<'f>(&mut self, port: PortId, frames: impl Iterator<Item = &'f [u8]>) {
        let mut frames = frames.peekable();
        while frames.peek().is_some() {
            let mut batch = Batch::new();
            for bytes in frames.by_ref().take(BATCH) {
                let mut packet = self.pool.take().unwrap();
                assert!(packet.extend_from_slice(bytes, &self.pool));
                batch.push(packet).unwrap();
            }
            self.stepped.process(Some(port), &mut batch);
            assert!(batch.is_empty());
        }
    }

    /// Returns the frames sent so far, with their ports.
    pub(crate) fn sent(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let bytes = |packet: &Packet| packet.segments().flatten().copied().collect();
        std::iter::from_fn(|| self.stepped.next_sent()).map(|p| (p.out_port().unwrap(), bytes(&p))).collect()
    }

    /// Every packet is somewhere: sent, dropped, consumed, or waiting for its next hop.
    #[track_caller]
    pub(crate) fn assert_balanced(&self) {
        let balance = self.stepped.balance();
        assert_eq!(balance.in_flight(), self.control.waiting_frames() as i64, "{balance:?}");
    }

    pub(crate) fn port_event(&mut self, port: PortId, event: &PortEvent) {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| control.port_event(port, event, plane));
    }

    /// Runs the control thread and answers all requests. Returns all other sent frames with their ports.
    pub(crate) fn settle(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let mut sent = Vec::new();
        for _ in 0..10 {
            self.stepped.control(&mut self.control);
            while let Some(packet) = self.stepped.next_sent() {
                let bytes: Vec<u8> = packet.segments().flatten().copied().collect();
                let answer = self.peer.as_mut().map(|peer| peer.handle(&bytes, 0).reply);
                if let (Some(HostReply::Frame(answer)), WAN) = (answer, packet.out_port().unwrap()) {
                    self.send(WAN, &answer);
                } else {
                    sent.push((packet.out_port().unwrap(), bytes));
                }
            }
        }
        self.assert_balanced();
        sent
    }

    pub(crate) fn tunnelled(&mut self) -> usize {
        let is_tunnel = |bytes: &[u8]| parse(bytes).is_ok_and(|parsed| parsed.vni().is_some());
        self.settle().iter().filter(|(port, bytes)| *port == WAN && is_tunnel(bytes)).count()
    }

    pub(crate) fn state(&self) -> NeighbourState {
        self.control.neighbours().next().unwrap().1
    }

    pub(crate) fn dropped(&self, reason: DropReason) -> u64 {
        self.stepped.drops().get(&reason).copied().unwrap_or(0)
    }
}

pub(crate) fn frame(dst: MacAddr, src: MacAddr) -> Vec<u8> {
    let mut out = vec![0; 60];
    ethernet::Repr { dst, src, ethertype: EtherType(0x88b5) }.emit(&mut out).unwrap();
    out
}

#[test]
fn frames_for_an_unresolved_next_hop_are_queued_or_dropped() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    for _ in 0..10 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    assert_eq!(lab.tunnelled(), 0);
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (NeighbourState::Incomplete, 2), "eight wait");
    for _ in 0..35 {
        lab.stepped.advance(SECOND / 10);
        lab.settle();
    }
    assert_eq!((lab.state(), lab.dropped(DropReason::NoNeighbour)), (NeighbourState::Failed, 10));
    // While the neighbour entry is failed, no frame is queued and the control thread is not notified.
    let punted = lab.stepped.punted();
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!((lab.dropped(DropReason::NoNeighbour), lab.stepped.punted()), (11, punted));
    // The next hop returns.
    let mut lab = lab.with_peer();
    lab.stepped.advance(31 * SECOND);
    lab.settle();
    lab.stepped.advance(SECOND);
    lab.settle();
    assert_eq!(lab.state(), NeighbourState::Reachable);
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.tunnelled(), 1);
}

#[test]
fn a_flood_to_an_unresolved_next_hop_lets_the_reply_in() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    for _ in 0..5000 {
        lab.send(LAN, &frame(FAR, HOST));
    }
    let mut lab = lab.with_peer();
    assert!(lab.tunnelled() <= 8);
    assert_eq!(lab.state(), NeighbourState::Reachable);
    assert_eq!(lab.dropped(DropReason::QueueFull), 0);
}

#[test]
fn unused_addresses_age_out() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\nageing = 10").with_peer();
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).learned), (1, 1));
    for _ in 0..30 {
        // The address is seen every second, so it stays.
        lab.stepped.advance(SECOND);
        lab.send(LAN, &frame(FAR, HOST));
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (1, 0));
    for _ in 0..11 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((lab.control.fdb_entries(), lab.control.learn_stats(0).aged), (0, 1));
}

#[test]
fn the_gateway_announces_itself_when_it_starts() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    let announced = |sent: &[(PortId, Vec<u8>)]| {
        let of_us = |bytes: &[u8]| bytes[28..32] == [10, 9, 0, 1] && bytes[38..42] == [10, 9, 0, 1];
        sent.iter().filter(|(port, bytes)| *port == WAN && bytes[12..14] == [8, 6] && of_us(bytes)).count()
    };
    assert_eq!(announced(&lab.settle()), 1);
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 1, "and once more");
    lab.stepped.advance(2 * SECOND);
    assert_eq!(announced(&lab.settle()), 0);
}

#[test]
fn a_duplicate_vtep_address_is_reported() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    lab.settle();
    let twin = Addresses { mac: HOST, addresses: vec!["10.9.0.1/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &twin.announcement("10.9.0.1".parse::<IpAddr>().unwrap()));
    let defended = lab.settle();
    assert_eq!(lab.control.conflicts(), 1);
    assert!(defended.iter().any(|(port, bytes)| *port == WAN && bytes[6..12] == US.0 && bytes[12..14] == [8, 6]));
}

/// Returns the frame with an 802.1Q tag.
fn tagged(bytes: &[u8], id: u16) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.extend_from_slice(bytes);
    assert!(vlan::push(&mut out, Tag::new(id)));
    out
}

#[test]
fn the_underlay_may_have_a_vlan() {
    let mut lab = Lab::of("vlan = 9", "accept_unknown_remotes = true");
    let sent = lab.settle();
    assert!(
        !sent.is_empty() && sent.iter().all(|(_, bytes)| bytes[12..16] == [0x81, 0, 0, 9]),
        "what we say ourselves"
    );
    let peer = Addresses {
        mac: MacAddr([2, 9, 9, 9, 9, 2]),
        addresses: vec!["10.9.0.2/24".parse().unwrap()],
        gateways: vec![],
    };
    let ask = peer.solicitation("10.9.0.1".parse().unwrap(), None).unwrap();
    lab.send(WAN, &ask);
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::NotForUs)), (0, 1), "without the tag it is not for us");
    lab.send(WAN, &tagged(&ask, 8));
    assert_eq!((lab.settle().len(), lab.dropped(DropReason::NotForUs)), (0, 2));
    lab.send(WAN, &tagged(&ask, 9));
    let reply = lab.settle();
    assert_eq!((reply.len(), &reply[0].1[..6], &reply[0].1[12..18]), (1, &peer.mac.0[..], &[0x81, 0, 0, 9, 8, 6][..]));
    // A tunnel packet of an unknown VTEP passes the control thread and returns, and keeps its order.
    let inner = frame(HOST, FAR);
    lab.send(WAN, &tagged(&vxlan(&peer, &inner), 9));
    let sent = lab.settle();
    assert!(sent.iter().any(|(port, bytes)| *port == LAN && *bytes == inner), "{:?}", lab.stepped.drops());
    // Frames to the VTEP get the tag after the next hop has answered.
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(lab.settle().len(), 1, "a solicitation");
    let mut answer = peer.solicitation("10.9.0.1".parse().unwrap(), Some(US)).unwrap();
    answer[21] = 2;
    answer[32..38].copy_from_slice(&US.0);
    lab.send(WAN, &tagged(&answer, 9));
    let sent = lab.settle();
    let out: Vec<_> = sent.iter().filter(|(port, bytes)| *port == WAN && bytes[16..18] == [8, 0]).collect();
    assert_eq!((out.len(), &out[0].1[12..16]), (1, &[0x81, 0, 0, 9][..]));
    assert_eq!(parse(&out[0].1).unwrap().vni().unwrap().get(), 42);
}

/// Returns a tunnel packet to the gateway from the first address of `from`.
pub(crate) fn vxlan(from: &Addresses, inner: &[u8]) -> Vec<u8> {
    let src = from.addresses[0].address;
    let dst = if src.is_ipv4() { "10.9.0.1" } else { "fd00:9::1" };
    let encap = VxlanEncap::new(&VxlanConfig {
        src_mac: from.mac,
        dst_mac: US,
        tags: &[],
        src,
        dst: dst.parse().unwrap(),
        dst_port: 4789,
        vni: Vni::new(42).unwrap(),
        ttl: 64,
        traffic_class: 0,
        flow_label: 0,
        checksum: OuterChecksum::Standard,
    })
    .unwrap();
    let mut out = vec![0; encap.len()];
    let mut fields = encap.fields(inner.len(), 50_000);
    fields.inner_sum = checksum::sum(inner);
    encap.emit(&mut out, &fields).unwrap();
    out.extend_from_slice(inner);
    out
}

#[test]
fn a_segment_with_inner_tags_keeps_them_in_both_directions() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']\ninner_vlans = 'carry'").with_peer();
    lab.settle();
    let inner = tagged(&frame(FAR, HOST), 5);
    lab.send(LAN, &inner);
    let sent = lab.settle();
    let out = sent.iter().find(|(port, bytes)| *port == WAN && parse(bytes).is_ok_and(|p| p.vni().is_some())).unwrap();
    assert!(out.1.ends_with(&inner));
    let peer = lab.peer.as_ref().unwrap().addresses().clone();
    let back = tagged(&frame(HOST, FAR), 5);
    lab.send(WAN, &vxlan(&peer, &back));
    assert!(lab.settle().contains(&(LAN, back)));
}

#[test]
fn every_buffer_returns_to_the_pool() {
    let mut lab = Lab::new("remotes = ['10.9.0.2', 'fd00:9::2']").with_peer();
    for i in 0..200u8 {
        lab.send(LAN, &frame(MacAddr([0xff; 6]), MacAddr([2, 0, 0, 0, 3, i])));
        lab.send(LAN, &frame(FAR, HOST)[..14 + usize::from(i % 40)]);
        lab.settle();
    }
    let pool = lab.pool.clone();
    drop(lab);
    assert_eq!(pool.outstanding(), 0);
}
