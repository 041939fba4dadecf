//! Traces of the gateway: they tell what happens, and they change nothing.

use wirepath_packet::PortId;
use wirepath_packet::drops::DropReason;
use wirepath_pipeline::observe::{Trace, TraceEnd, TraceReader, TraceSpec};
use wirepath_pipeline::tunnel::underlay::Addresses;
use wirepath_wire::{MacAddr, Parser, Tag, vlan};

use crate::lab::{FAR, HOST, LAN, Lab, PEER, WAN, frame, vxlan};

/// A gateway whose next hop is resolved and that knows a host at either side.
fn lab() -> Lab {
    let mut lab = Lab::new("remotes = ['10.9.0.2']").with_peer();
    lab.settle();
    lab.send(LAN, &frame(FAR, HOST));
    lab.send(WAN, &vxlan(&peer(), &frame(HOST, FAR)));
    lab.settle();
    lab
}

fn peer() -> Addresses {
    Addresses { mac: PEER, addresses: vec!["10.9.0.2/24".parse().unwrap()], gateways: vec![] }
}

fn stranger() -> Addresses {
    Addresses { addresses: vec!["10.9.0.77/24".parse().unwrap()], ..peer() }
}

pub(crate) fn start(lab: &mut Lab) -> TraceReader {
    let spec = TraceSpec { port: None, pattern: None, count: 10_000 };
    lab.stepped.with_plane(|plane| plane.start_trace(spec, Parser::default())).unwrap()
}

fn texts(trace: &Trace) -> String {
    trace.steps.iter().map(|step| format!("{}: {}\n", step.stage, step.text)).collect()
}

/// An IPv4 or IPv6 frame with UDP.
fn udp(destination: MacAddr, source: MacAddr, v6: bool, port: u16) -> Vec<u8> {
    let mut bytes = [destination.0, source.0].concat();
    if v6 {
        bytes.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0, 0, 18, 17, 64]);
        bytes.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        bytes.extend_from_slice(&[0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
    } else {
        bytes.extend_from_slice(&[8, 0, 0x45, 2, 0, 38, 0, 0, 0, 0, 64, 17, 0x26, 0xbe, 10, 0, 0, 1, 10, 0, 0, 2]);
    }
    let [a, b] = port.to_be_bytes();
    bytes.extend_from_slice(&[a, b, 0, 53, 0, 18, 0, 0]);
    bytes.resize(bytes.len() + 10, 0x5a);
    bytes
}

#[test]
fn a_trace_shows_what_was_looked_up_and_the_end() {
    let mut lab = lab();
    let mut reader = start(&mut lab);
    lab.send(LAN, &udp(FAR, HOST, false, 1000));
    lab.send(WAN, &vxlan(&peer(), &udp(HOST, FAR, false, 2000)));
    lab.send(WAN, &vxlan(&stranger(), &frame(HOST, FAR)));
    lab.send(LAN, &frame(MacAddr([0xff; 6]), HOST));
    let sent = lab.sent();
    let traces: Vec<Trace> = std::iter::from_fn(|| reader.next_trace()).collect();
    let by = |port| TraceEnd::SentByWorker { worker: 1, port };
    let ends: Vec<&[TraceEnd]> = traces.iter().map(|trace| &trace.ends[..]).collect();
    let dropped = TraceEnd::Dropped { reason: DropReason::UnknownRemote, packets: 1 };
    assert_eq!(ends, [&[by(WAN)][..], &[by(LAN)], &[dropped], &[by(WAN)]]);
    assert_eq!((sent.len(), lab.dropped(DropReason::UnknownRemote)), (3, 1));
    for (trace, expected) in traces.iter().zip([
        &[
            "receive: port lan queue 0 worker 0, 52 bytes",
            "ipv4 10.0.0.1 > 10.0.0.2 ttl 64 ecn 2 / udp 1000 > 53",
            "gateway: frame from port lan: segment of VNI 42",
            "gateway: FDB 02:00:00:00:02:01 in segment 42: remote 10.9.0.2",
            "gateway: remote 10.9.0.2: next hop is resolved",
            "transmit: port wan, 102 bytes: 50 bytes added; now eth 02:00:00:00:00:01 > 02:09:09:09:09:02 \
             / ipv4 10.9.0.1 > 10.9.0.2",
            "vxlan vni 42 / eth 02:00:00:00:01:01 > 02:00:00:00:02:01",
        ][..],
        &[
            "receive: port wan queue 0 worker 0, 102 bytes",
            "gateway: frame from remote 10.9.0.2: segment of VNI 42",
            "gateway: FDB 02:00:00:00:01:01 in segment 42: port lan",
            "transmit: port lan, 52 bytes: 50 bytes removed; now eth 02:00:00:00:02:01 > 02:00:00:00:01:01",
        ],
        &["ipv4 10.9.0.77 > 10.9.0.1", "gateway: the packet is not decapsulated"],
        &["a group address, so the frame is flooded", "flooded to 1 destinations"],
    ]) {
        let texts = texts(trace);
        for part in expected {
            assert!(texts.contains(part), "{part}:\n{texts}");
        }
    }
}

/// The same frames, traced and not traced, give the same packets in the same order and the same counters.
#[test]
fn traces_change_nothing() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut plain, mut traced) = (lab(), lab());
    let mut reader = start(&mut traced);
    let mut traces: Vec<Trace> = Vec::new();
    let mut ends: Vec<(PortId, Vec<u8>)> = Vec::new();
    for _ in 0..300 {
        let port = if random.bool() { WAN } else { LAN };
        let count = random.usize(1..=40);
        let frames: Vec<Vec<u8>> = (0..count).map(|_| any_frame(&mut random, port)).collect();
        for lab in [&mut plain, &mut traced] {
            lab.stepped.advance(1_000_000);
            lab.send_all(port, frames.iter().map(Vec::as_slice));
        }
        let before = traces.len();
        traces.extend(std::iter::from_fn(|| reader.next_trace()));
        assert_eq!(traces.len() - before, count);
        let (a, b) = (plain.sent(), traced.sent());
        // Of a whole batch, the frames of the slow path leave first.
        assert_eq!(sorted(&a), sorted(&b));
        ends.extend(b);
        assert_eq!(plain.stepped.drops(), traced.stepped.drops());
        assert_eq!(plain.settle(), traced.settle());
    }
    assert_eq!(reader.left_out(), 0);
    assert_eq!(plain.stepped.punted(), traced.stepped.punted());
    assert_eq!(plain.control.segment_stats(0), traced.control.segment_stats(0));
    let drops: usize = traced.stepped.drops().values().map(|n| *n as usize).sum();
    let of = |end: &TraceEnd| match end {
        TraceEnd::Dropped { packets, .. } => *packets,
        _ => 0,
    };
    let told: usize = traces.iter().flat_map(|trace| &trace.ends).map(of).sum();
    assert_eq!(told, drops);
    let told = traces.iter().flat_map(|trace| &trace.ends);
    let told = told.filter(|end| matches!(end, TraceEnd::SentByWorker { .. })).count();
    assert_eq!(told, ends.len());
}

pub(crate) fn sorted(frames: &[(PortId, Vec<u8>)]) -> Vec<(PortId, Vec<u8>)> {
    let mut frames = frames.to_vec();
    frames.sort();
    frames
}

/// A frame of one of many kinds, some of them malformed.
fn any_frame(random: &mut fastrand::Rng, port: PortId) -> Vec<u8> {
    let unknown = MacAddr([2, 0, 0, 0, 7, 7]);
    let (near, far) = if port == LAN { (HOST, FAR) } else { (FAR, HOST) };
    let destination = *random.choice(&[far, far, far, unknown, MacAddr([0xff; 6]), near]).unwrap();
    let mut bytes = match random.u8(..4) {
        0 => frame(destination, near),
        1 => udp(destination, near, true, random.u16(..)),
        _ => udp(destination, near, false, random.u16(..)),
    };
    if random.u8(..10) == 0 {
        bytes.splice(0..0, [0; 4]);
        vlan::push(&mut bytes, Tag::new(5));
    }
    if port == WAN {
        bytes = match random.u8(..12) {
            0 => vxlan(&stranger(), &bytes),
            1 => bytes,
            _ => vxlan(&peer(), &bytes),
        };
    }
    match random.u8(..8) {
        0 => bytes.truncate(random.usize(1..=bytes.len())),
        1 => {
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1 << random.u8(..8);
        }
        _ => {}
    }
    bytes
}
