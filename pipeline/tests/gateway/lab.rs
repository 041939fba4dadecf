//! A simulated gateway with one segment, run step by step. Tests of the programs use this file too.

use serde_json::Value;
use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::Flags;
use wirepath_packet::{BATCH, Batch, Packet, Pool};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::registry::Registry;
use wirepath_pipeline::tunnel::neighbour::NeighbourState;
use wirepath_pipeline::tunnel::underlay::{Addresses, HostReply, UnderlayHost};
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{Control, PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_pmd::port::PortEvent;
use wirepath_settings::Source;
use wirepath_wire::build::{OuterChecksum, OuterHeaders, VxlanConfig};
use wirepath_wire::{EtherType, MacAddr, Tag, Vni, checksum, ethernet, parse, vlan};

// Ethernet addresses: the gateway, its peer on the underlay, a local host, a host behind the peer.
pub(crate) const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
pub(crate) const PEER: MacAddr = MacAddr([2, 9, 9, 9, 9, 2]);
pub(crate) const HOST: MacAddr = MacAddr([2, 0, 0, 0, 1, 1]);
pub(crate) const FAR: MacAddr = MacAddr([2, 0, 0, 0, 2, 1]);
pub(crate) const SECOND: u64 = 1_000_000_000;

pub(crate) const WAN: PortId = PortId::new(0);
pub(crate) const LAN: PortId = PortId::new(1);
/// A port of the gateways that have three.
pub(crate) const SPARE: PortId = PortId::new(2);

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
        Self::with_attachments(underlay, "{ port = 'lan' }", segment)
    }

    /// Creates a gateway with these elements of `ports`.
    pub(crate) fn with_attachments(underlay: &str, ports: &str, segment: &str) -> Self {
        Self::of_segments(underlay, &format!("[[segment]]\nvni = 42\nports = [{ports}]\n{segment}\n"))
    }

    /// Creates a gateway with these tables of segments.
    pub(crate) fn of_segments(underlay: &str, segments: &str) -> Self {
        let text =
            format!("[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n{underlay}\n{segments}");
        Self::with_ports(&text, &["wan", "lan"])
    }

    /// Creates a gateway with this configuration. The first port is the underlay's.
    pub(crate) fn with_ports(text: &str, names: &[&str]) -> Self {
        let source = Source::new("test", text);
        let document = source.parse().unwrap();
        let config = GatewayConfig::read(&document.settings(), names).unwrap_or_else(|error| panic!("{error}"));
        let pool = Pool::new("stepped", 512).unwrap();
        let port = |(number, name): (u16, &&str)| {
            PortInfo::simulated(PortId::new(number), name, (number == 0).then_some(US), 1500, &pool)
        };
        let ports: Vec<PortInfo> = (0..).zip(names).map(port).collect();
        let domain = Domain::new();
        let control = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let stepped = SteppedRuntime::new(ports, &domain, control.stage(&worker)).unwrap();
        Self { stepped, control, pool, peer: None }
    }

    pub(crate) fn with_peer(mut self) -> Self {
        let addresses = vec!["10.9.0.2/24".parse().unwrap(), "fd00:9::2/64".parse().unwrap()];
        self.peer = Some(UnderlayHost::new(Addresses { mac: PEER, addresses, gateways: vec![] }));
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

    /// Sends a frame whose segmentation into frames with `mss` bytes of payload is left to a port.
    pub(crate) fn send_superframe(&mut self, port: PortId, bytes: &[u8], mss: u16) {
        let mut packet = self.pool.take().unwrap();
        assert!(packet.extend_from_slice(bytes, &self.pool));
        packet.set_flags(Flags::TX_SEGMENT.with(Flags::TX_L4_CHECKSUM));
        packet.set_mss(mss);
        self.stepped.process(Some(port), &mut [packet].into_iter().collect());
    }

    /// Returns the frames sent so far, with their ports.
    pub(crate) fn sent(&mut self) -> Vec<(PortId, Vec<u8>)> {
        let bytes = |packet: &Packet| packet.segments().flatten().copied().collect();
        std::iter::from_fn(|| self.stepped.next_sent()).map(|p| (p.out_port().unwrap(), bytes(&p))).collect()
    }

    /// Checks that a frame of `most` bytes to an unknown host leaves, and a longer one is dropped as too big.
    #[track_caller]
    pub(crate) fn assert_longest_frame(&mut self, most: usize) {
        for (len, fits) in [(most, true), (most + 1, false)] {
            let mut inner = frame(FAR, HOST);
            inner.resize(len, 0);
            self.send(LAN, &inner);
            assert_eq!(self.settle().iter().any(|(_, bytes)| bytes.ends_with(&inner)), fits, "{len}");
        }
        assert_eq!(self.dropped(DropReason::TooBigForMtu), 1);
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

    /// Returns the rows of a table for operators.
    pub(crate) fn rows(&mut self, name: &str) -> Vec<Vec<Value>> {
        let Self { stepped, control, .. } = self;
        stepped.with_plane(|plane| {
            let mut registry = Registry { control, plane };
            let table = registry.table(name).unwrap();
            registry.rows(table)
        })
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

pub(crate) fn vxlan(from: &Addresses, inner: &[u8]) -> Vec<u8> {
    vxlan_with(from, 42, inner)
}

/// Returns a tunnel packet with this VNI.
pub(crate) fn vxlan_with(from: &Addresses, vni: u32, inner: &[u8]) -> Vec<u8> {
    let src = from.addresses[0].address;
    let dst = if src.is_ipv4() { "10.9.0.1" } else { "fd00:9::1" };
    let encap = OuterHeaders::vxlan(&VxlanConfig {
        src_mac: from.mac,
        dst_mac: US,
        tags: &[],
        src,
        dst: dst.parse().unwrap(),
        dst_port: 4789,
        vni: Vni::new(vni).unwrap(),
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

/// Returns the frame with an 802.1Q tag.
pub(crate) fn tagged(bytes: &[u8], id: u16) -> Vec<u8> {
    let mut out = vec![0; 4];
    out.extend_from_slice(bytes);
    assert!(vlan::push(&mut out, Tag::new(id)));
    out
}
