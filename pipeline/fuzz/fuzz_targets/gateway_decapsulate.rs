//! Fuzzes the gateway with arbitrary bytes on its ports. Nothing may panic. Every packet is forwarded,
//! dropped with a reason, or handled by the gateway itself.
//!
//! The first byte selects the port and the memory layout of the packet. The rest is the packet.

#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::epoch::Domain;
use wirepath_pipeline::tunnel::{Gateway, GatewayConfig, GatewayControl};
use wirepath_pipeline::{PortInfo, SteppedRuntime, WorkerInfo};
use wirepath_settings::Source;

const CONFIG: &str = "[underlay]\nport = 'wan'\naddresses = ['10.9.0.1/24', 'fd00:9::1/64']\n\
    [[segment]]\nvni = 42\nremotes = ['10.9.0.2', 'fd00:9::2']\n\
    ports = [{ port = 'lan' }, { port = 'lan', vlan = 7 }]\n\
    [[segment]]\nvni = 43\naccept_unknown_remotes = true\ninner_vlans = 'carry'\n\
    ports = [{ port = 'lan', vlan = 8 }]\n\
    [[segment]]\nvni = 44\nremotes = ['10.9.0.3', 'fd00:9::3']\nports = [{ port = 'lan', vlan = 9 }]\n\
    [[segment]]\nkind = 'mpls-udp'\nname = 'frames'\nvni = 45\nremotes = ['10.9.0.2', 'fd00:9::2']\n\
    ports = [{ port = 'lan', vlan = 10 }]\n\
    [[segment]]\nkind = 'mpls-gre'\nname = 'packets'\nvni = 46\npayload = 'ip'\nremotes = ['10.9.0.2']\n\
    addresses = ['10.255.0.1/30', 'fdff::1/64']\n\
    [bfd]\nexcept = ['10.9.0.2', 'fd00:9::2']\n";

struct Lab {
    stepped: SteppedRuntime<Gateway>,
    control: GatewayControl,
    pool: Pool,
}

fn lab() -> Lab {
    let source = Source::new("fuzz", CONFIG);
    let document = source.parse().expect("TOML");
    let config = GatewayConfig::read(&document.settings(), &["wan", "lan"]).expect("a configuration");
    let pool = Pool::new("fuzz", 256).expect("memory");
    let us = "02:00:00:00:00:01".parse().ok();
    let ports = vec![
        PortInfo::simulated(PortId::new(0), "wan", us, 1500, &pool),
        PortInfo::simulated(PortId::new(1), "lan", None, 1500, &pool),
    ];
    let domain = Domain::new();
    let mut control = GatewayControl::new(&config, &ports, &domain, 1, 0);
    for next_hop in ["10.9.0.2", "fd00:9::2", "10.9.0.3", "fd00:9::3"] {
        control.set_next_hop(next_hop.parse().expect("an address"), "02:09:09:09:09:02".parse().expect("an address"));
    }
    let worker = WorkerInfo { index: 0, workers: 1, core: None, rx_queues: vec![] };
    let stepped = SteppedRuntime::new(ports, &domain, control.stage(&worker)).expect("eventfds");
    Lab { stepped, control, pool }
}

/// Makes a packet of these bytes, in segments of `cut` bytes if that is not 0.
fn packet(bytes: &[u8], cut: usize, pool: &Pool) -> Option<Packet> {
    let mut packet = pool.take()?;
    if cut == 0 {
        return packet.extend_from_slice(bytes, pool).then_some(packet);
    }
    let mut pieces = bytes.chunks(cut);
    packet.extend_from_slice(pieces.next().unwrap_or(&[]), pool);
    for piece in pieces.take(64) {
        let mut segment = pool.take()?;
        segment.extend_from_slice(piece, pool);
        packet.append_segment(segment).ok()?;
    }
    Some(packet)
}

thread_local! {
    static LAB: RefCell<Lab> = RefCell::new(lab());
}

fuzz_target!(|data: &[u8]| {
    let Some((how, bytes)) = data.split_first() else { return };
    if bytes.is_empty() {
        return;
    }
    LAB.with_borrow_mut(|lab| {
        let port = u16::from(how & 1);
        let cut = if how & 2 == 0 { 0 } else { 1 + usize::from(how >> 2) };
        let Some(mut packet) = packet(bytes, cut, &lab.pool) else { return };
        if how & 0x40 != 0 {
            packet.set_vlan(7);
        }
        let mut batch: Batch = [packet].into_iter().collect();
        lab.stepped.process(Some(PortId::new(port)), &mut batch);
        assert!(batch.is_empty());
        while let Some(out) = lab.stepped.next_sent() {
            assert!(
                out.out_port().is_some_and(|port| port.index() < 2)
                    && out.len() == out.segments().map(<[u8]>::len).sum::<usize>()
            );
        }
        lab.stepped.advance(10_000_000);
        // The second time takes what the packets of the first time have punted.
        for _ in 0..2 {
            lab.stepped.control(&mut lab.control);
            while lab.stepped.next_sent().is_some() {}
        }
        let balance = lab.stepped.balance();
        assert_eq!(balance.in_flight(), lab.control.waiting_frames() as i64, "{balance:?}");
    });
});
