//! Changes of the configuration while packets flow.

use std::collections::HashSet;
use std::fmt::Write;

use serde_json::Value;
use wirepath_packet::Pool;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::registry::Registry;
use wirepath_pipeline::tunnel::config::SegmentConfig;
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_settings::Source;

use crate::lab::{FAR, HOST, LAN, Lab, PEER, SECOND, US, WAN, frame, vxlan};

fn read(text: &str) -> GatewayConfig {
    let source = Source::new("test", text);
    let document = source.parse().unwrap();
    GatewayConfig::read(&document.settings(), &["wan", "lan"]).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

fn ports(pool: &Pool) -> Vec<PortInfo> {
    vec![PortInfo::simulated(WAN, "wan", Some(US), 1500, pool), PortInfo::simulated(LAN, "lan", None, 1500, pool)]
}

/// Rows of a table, without the columns that tell the state.
fn rows(stepped: &mut SteppedRuntime<Gateway>, control: &mut GatewayControl, name: &str) -> Vec<Vec<Value>> {
    let mut rows = stepped.with_plane(|plane| {
        let mut registry = Registry { control, plane };
        let table = registry.table(name).unwrap();
        registry.rows(table)
    });
    for row in &mut rows {
        match name {
            "segments" => row.truncate(4),
            "remotes" => _ = row.drain(5..7),
            _ => row.truncate(4),
        }
    }
    rows.retain(|row| name != "fdb" || row[3] == "static");
    rows.sort_by_key(|row| format!("{row:?}"));
    rows
}

/// Rules of the segments and attachments as the workers see them.
fn rules(control: &GatewayControl) -> Vec<String> {
    let layout = control.layout();
    let of_segment = |segment: &SegmentConfig| {
        let found = &layout.segments[usize::from(layout.segment_of(segment.tunnel_id()).unwrap())];
        let ports: Vec<_> = found.attachments.iter().map(|index| layout.attachments[*index as usize].rules).collect();
        let storm = found.storm_limits();
        format!("{:?} {:?} {storm:?} {} {ports:?}", segment.vni, found.learn_rules, found.neighbour_suppression)
    };
    control.config().segments.iter().map(of_segment).collect()
}

/// Returns a random configuration, in which the segment 42 is always the same.
fn random(random: &mut fastrand::Rng) -> String {
    let ttl = random.u8(60..64);
    let mut text = format!("[underlay]\nport = 'wan'\nttl = {ttl}\naddresses = ['10.9.0.1/24', 'fd00:9::1/64'");
    text += if random.bool() { ", '10.8.0.1/24']\n" } else { "]\n" };
    let before = random.bool();
    let stays = "[[segment]]\nname = 'stays'\nvni = 42\nports = [{ port = 'lan' }]\nremotes = ['10.9.0.2']\n";
    text += if before { stays } else { "" };
    let (mut vlans, mut vnis): (HashSet<u16>, HashSet<u32>) = Default::default();
    for n in 0..random.usize(0..5) {
        let vni = 50 + random.u32(0..6);
        let vlans: Vec<u16> = (0..3).map(|_| random.u16(1..30)).filter(|vlan| vlans.insert(*vlan)).collect();
        if vlans.is_empty() || !vnis.insert(vni) {
            continue;
        }
        let remotes: HashSet<u8> = (0..4).map(|_| random.u8(2..9)).collect();
        let remotes: Vec<String> = remotes.iter().map(|n| format!("'10.9.0.{n}'")).collect();
        let ports: Vec<String> = vlans
            .iter()
            .map(|vlan| {
                let (limit, sticky, isolated) = (random.u16(1..100), random.bool(), random.bool());
                format!(
                    "{{ port = 'lan', vlan = {vlan}, mac_limit = {limit}, sticky = {sticky}, isolated = {isolated} }}"
                )
            })
            .collect();
        let (mtu, ageing, learning) = (random.u16(1000..1400), random.u8(0..3), random.bool());
        writeln!(text, "[[segment]]\nname = 'n{n}'\nvni = {vni}\nremotes = [{}]", remotes.join(", ")).unwrap();
        writeln!(text, "ports = [{}]\nmtu = {mtu}\nageing = {ageing}\nlearning = {learning}", ports.join(", "))
            .unwrap();
        let mut limit = |key: &str, most: u32| {
            if random.bool() {
                writeln!(text, "{key} = {}", random.u32(1..most)).unwrap();
            }
        };
        for key in ["broadcast_limit", "multicast_limit", "unknown_unicast_limit", "mac_limit", "remote_mac_limit"] {
            limit(key, 16_384);
        }
        for key in ["move_limit", "move_window", "freeze_time"] {
            limit(key, 1000);
        }
        if random.bool() {
            text += "neighbour_suppression = true\n";
            let (host, mac) = (random.u8(1..4), random.u8(1..4));
            writeln!(text, "neighbours = [{{ address = '10.1.0.{host}', mac = '02:00:00:00:01:0{mac}' }}]").unwrap();
        }
        if random.bool() {
            let (mac, to) = (random.u8(1..4), remotes[0].as_str());
            writeln!(text, "static = [{{ mac = '02:00:00:00:00:0{mac}', remote = {to} }}]").unwrap();
        }
    }
    text + if before { "" } else { stays }
}

/// After each of many random changes the tables are those of a gateway that was started with the configuration. The
/// segment that stays keeps its entries, counters and next hop.
#[test]
fn a_changed_gateway_is_like_a_new_one() {
    let mut generator = fastrand::Rng::with_seed(7);
    let mut lab = Lab::new("name = 'stays'\nremotes = ['10.9.0.2']").with_peer();
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    let (mut out, mut back) = (1, 1);
    for step in 0..300 {
        let text = random(&mut generator);
        let config = read(&text);
        let pool = lab.pool.clone();
        let ports = ports(&pool);
        let seconds = lab.stepped.with_plane(|plane| plane.seconds());
        let change = lab.control.prepare(config.clone(), seconds).unwrap();
        lab.control.reconfigure(change, &ports, seconds);

        let domain = Domain::new();
        let mut fresh = GatewayControl::new(&config, &ports, &domain, 1, 0);
        let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
        let mut fresh_stepped = SteppedRuntime::new(ports, &domain, fresh.stage(&worker)).unwrap();
        for table in ["segments", "remotes", "fdb", "bindings"] {
            let expected = rows(&mut fresh_stepped, &mut fresh, table);
            assert_eq!(rows(&mut lab.stepped, &mut lab.control, table), expected, "{table} after step {step}:\n{text}");
        }
        assert_eq!(rules(&lab.control), rules(&fresh), "rules after step {step}:\n{text}");
        // Packets in both directions, between the change and the first work of the control thread after it.
        lab.send(LAN, &frame(FAR, HOST));
        lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
        let sent = lab.sent();
        assert_eq!(sent.iter().filter(|(port, _)| *port == WAN).count(), 1, "step {step}: {:?}", lab.stepped.drops());
        assert_eq!(sent.iter().filter(|(port, bytes)| *port == LAN && *bytes == frame(HOST, FAR)).count(), 1);
        let ttl = sent.iter().find(|(port, _)| *port == WAN).map(|(_, bytes)| bytes[22]);
        assert_eq!(ttl, Some(config.underlay.ttl), "the headers follow the configuration");
        (out, back) = (out + 1, back + 1);
        let at = config.segments.iter().position(|segment| segment.name == "stays").unwrap();
        let stats = lab.control.segment_stats(at);
        assert_eq!((stats.overlay_tx.0, stats.overlay_rx.0), (out, back), "the counters go on");
        assert_eq!(stats.unknown_unicast, 1, "the address stays learned");
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!(lab.dropped(DropReason::NoNeighbour) + lab.dropped(DropReason::UnknownRemote), 0);
}

#[test]
fn a_learned_remote_that_is_configured_keeps_its_place() {
    let mut lab = Lab::new("accept_unknown_remotes = true").with_peer();
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.settle();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    assert_eq!((lab.control.learned_remotes(), lab.control.fdb_entries()), (1, 1));
    let with = |segment: &str| {
        read(&format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nvni = 42\nports = [{{ port = 'lan' \
             }}]\n{segment}\n"
        ))
    };
    let change = |lab: &mut Lab, segment: &str| {
        let change = lab.control.prepare(with(segment), 0).unwrap();
        let ports = ports(&lab.pool.clone());
        lab.control.reconfigure(change, &ports, 0);
        lab.settle()
    };
    change(&mut lab, "remotes = ['10.9.0.2']\naccept_unknown_remotes = true");
    assert_eq!((lab.control.learned_remotes(), lab.control.fdb_entries()), (0, 1));
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!(
        (lab.tunnelled(), lab.control.segment_stats(0).unknown_unicast),
        (1, 1),
        "only the first frame was flooded"
    );
    // Without the permission, learned remotes go with their entries.
    change(&mut lab, "accept_unknown_remotes = true");
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    assert_eq!(lab.control.learned_remotes(), 1);
    change(&mut lab, "remotes = ['10.9.0.9']");
    assert_eq!((lab.control.learned_remotes(), lab.dropped(DropReason::UnknownRemote)), (0, 0));
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    assert_eq!(lab.dropped(DropReason::UnknownRemote), 1);
}

#[test]
fn what_cannot_change_is_refused() {
    let lab = Lab::new("remotes = ['10.9.0.2']");
    let segment = "[[segment]]\nvni = 42\nports = [{ port = 'lan' }]\nremotes = ['10.9.0.2']\n";
    let text = |key: &str| format!("[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n{key}\n{segment}");
    let why = lab.control.prepare(read(&text("udp_port = 8472")), 0).unwrap_err();
    assert_eq!(why, "underlay.udp_port cannot change while the program runs; start it anew");
    lab.control.prepare(read(&text("ttl = 3")), 0).unwrap();
}

/// A configuration of one segment whose remotes lie behind a next hop.
fn behind(next_hop: &str, segment: &str) -> GatewayConfig {
    read(&format!(
        "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\ngateways = ['{next_hop}']\n[[segment]]\nvni = 42\n\
         ports = [{{ port = 'lan' }}]\n{segment}\n"
    ))
}

fn change(lab: &mut Lab, config: GatewayConfig) {
    let seconds = lab.stepped.with_plane(|plane| plane.seconds());
    let change = lab.control.prepare(config, seconds).unwrap();
    let ports = ports(&lab.pool.clone());
    lab.control.reconfigure(change, &ports, seconds);
}

#[test]
fn a_remote_that_was_learned_uses_a_next_hop_that_is_known() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    change(&mut lab, behind("10.9.0.2", "remotes = ['192.0.2.1']\naccept_unknown_remotes = true"));
    lab.settle();
    let learned = Addresses { mac: PEER, addresses: vec!["192.0.2.2/24".parse().unwrap()], gateways: vec![] };
    lab.send(WAN, &vxlan(&learned, &frame(HOST, FAR)));
    lab.settle();
    assert_eq!(lab.control.learned_remotes(), 1);
    change(&mut lab, behind("10.9.0.2", "remotes = ['192.0.2.1', '192.0.2.2']"));
    lab.send(LAN, &frame(FAR, HOST));
    assert_eq!((lab.tunnelled(), lab.dropped(DropReason::NoNeighbour)), (1, 0));
}

#[test]
fn a_static_entry_outlives_the_remote_that_had_its_address() {
    let mut lab = Lab::new("accept_unknown_remotes = true").with_peer();
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    lab.settle();
    lab.send(WAN, &vxlan(&peer, &frame(HOST, FAR)));
    lab.settle();
    let with = "accept_unknown_remotes = true\nstatic = [{ mac = '02:00:00:00:02:01', port = 'lan' }]";
    change(&mut lab, behind("10.9.0.2", with));
    assert_eq!((lab.control.learned_remotes(), lab.control.fdb_entries()), (1, 1));
    // The remote has no address any more, so it goes.
    for _ in 0..400 {
        lab.stepped.advance(SECOND);
        lab.settle();
    }
    assert_eq!((lab.control.learned_remotes(), lab.control.fdb_entries()), (0, 1));
}

#[test]
fn frames_that_wait_go_with_their_remote() {
    let mut lab = Lab::new("remotes = ['10.9.0.2']");
    let two = behind("10.9.0.250", "remotes = ['192.0.2.1', '192.0.2.2']");
    change(&mut lab, two);
    lab.send(LAN, &frame(FAR, HOST));
    lab.settle();
    assert_eq!((lab.control.waiting_frames(), lab.dropped(DropReason::NoNeighbour)), (2, 0), "nobody answers");
    change(&mut lab, behind("10.9.0.250", "remotes = ['192.0.2.2']"));
    lab.settle();
    assert_eq!((lab.control.waiting_frames(), lab.dropped(DropReason::NoNeighbour)), (1, 1));
}

/// Frames of the slow path, such as short ones, are learned where a static entry was removed.
#[test]
fn the_address_of_a_removed_static_entry_is_learned() {
    let text = |fixed: &str| {
        format!(
            "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24']\n[[segment]]\nvni = 42\nremotes = ['10.9.0.2']\n\
             ports = [{{ port = 'lan' }}]\n{fixed}\n"
        )
    };
    let fixed = text(&format!("static = [{{ mac = '{HOST}', remote = '10.9.0.2' }}]"));
    let peer = Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] };
    let short = |dst, src| frame(dst, src)[..14].to_vec();
    for from in [LAN, WAN] {
        let mut lab = Lab::with_ports(&fixed, &["wan", "lan"]).with_peer();
        lab.settle();
        let pool = lab.pool.clone();
        let seconds = lab.stepped.with_plane(|plane| plane.seconds());
        let change = lab.control.prepare(read(&text("")), seconds).unwrap();
        lab.control.reconfigure(change, &ports(&pool), seconds);
        assert_eq!(lab.control.fdb_entries(), 0);
        match from {
            LAN => lab.send(LAN, &short(FAR, HOST)),
            _ => lab.send(WAN, &vxlan(&peer, &short(FAR, HOST))),
        }
        lab.settle();
        assert_eq!(lab.control.fdb_entries(), 1, "from {from:?}");
    }
}
