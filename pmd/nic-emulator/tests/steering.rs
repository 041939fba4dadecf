//! Flow rules of an emulated ConnectX in plain memory: commands as the kernel receives them, and matching
//! frames.

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{header, misc};
use wirepath_nic_defs::uverbs::{self as defs, ioctl, mlx5 as abi};
use wirepath_nic_emulator::mem_host::{AttributeValue, Connectx};

/// Builds match parameters of the outer headers and the part behind them.
fn parameters(fields: &[(wirepath_nic_defs::mlx5::MatchField, u128)]) -> Vec<u8> {
    let mut bytes = vec![0; 0x80];
    for (field, value) in fields {
        field.set(&mut bytes, *value);
    }
    bytes
}

/// Builds a UDP packet to 198.18.0.0 plus `host`, port 9.
fn udp(host: u32) -> Vec<u8> {
    let mut frame = vec![0; 60];
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 9, 8, 0]);
    frame[14..34].copy_from_slice(&[0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 0, 0, 0, 0]);
    frame[30..34].copy_from_slice(&(0xc612_0000 + host).to_be_bytes());
    frame[34..42].copy_from_slice(&[0, 7, 0, 9, 0, 26, 0, 0]);
    frame
}

fn to(nic: &Connectx, receiver: usize) -> (u16, AttributeValue) {
    (abi::FLOW_DEST_QP, AttributeValue::Handle(nic.receivers[receiver]))
}

fn tag(tag: u32) -> (u16, AttributeValue) {
    (abi::FLOW_TAG, AttributeValue::Bytes(tag.to_ne_bytes().to_vec()))
}

/// Builds the attribute of a rule of `ibv_create_flow`.
fn attribute(kind: u32, priority: u16, specs: u8, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_ne_bytes());
    bytes[6..8].copy_from_slice(&priority.to_ne_bytes());
    (bytes[8], bytes[11]) = (specs, 1);
    bytes[12..].copy_from_slice(&flags.to_ne_bytes());
    bytes
}

fn spec(kind: u32, body: &[u8]) -> Vec<u8> {
    [&kind.to_ne_bytes()[..], &(8 + body.len() as u16).to_ne_bytes(), &[0, 0], body].concat()
}

/// Sends a frame; returns receiver and tag of each received packet.
fn where_to(nic: &mut Connectx, frame: &[u8]) -> Vec<(usize, u32)> {
    nic.send(frame);
    nic.arrivals().iter().map(|arrival| (arrival.receiver, arrival.tag)).collect()
}

#[test]
fn hundred_thousand_rules_are_matched_and_removed() {
    let mut nic = Connectx::new("steering = { devx = true }");
    let mask = parameters(&[(header::DST_IPV4, 0xffff_ffff)]);
    // 100 000 rules need the tables of two priorities: a table has 65 536 entries.
    let matchers = [0, 1].map(|priority| nic.matcher(abi::TABLE_NIC_RX, priority, 1, &mask).unwrap());
    let rules: Vec<u32> = (0..100_000u32)
        .map(|rule| {
            let value = parameters(&[(header::DST_IPV4, u128::from(0xc612_0000 + rule))]);
            let matcher = matchers[(rule / 50_000) as usize];
            nic.flow(matcher, &value, &[to(&nic, (rule % 2) as usize), tag(rule + 1)]).unwrap()
        })
        .collect();
    for rule in [0, 1, 49_999, 50_000, 77_777, 99_999] {
        assert_eq!(where_to(&mut nic, &udp(rule)), [((rule % 2) as usize, rule + 1)]);
    }
    assert_eq!(where_to(&mut nic, &udp(100_000)), []);
    let counters = nic.harness.emulator.counters();
    assert_eq!(counters["devices"][0]["ports"][0]["rules"], 100_000);
    for rule in rules {
        nic.ioctl(ioctl::OBJECT_FLOW, ioctl::FLOW_DESTROY, &[(0, AttributeValue::Handle(rule))]).unwrap();
    }
    assert_eq!(where_to(&mut nic, &udp(0)), []);
    let counters = nic.harness.emulator.counters();
    assert_eq!(
        (&counters["devices"][0]["ports"][0]["rules"], &counters["devices"][0]["ports"][0]["no_rule"]),
        (&0.into(), &2.into())
    );
}

#[test]
fn full_tables_and_injected_rule_errors() {
    let mut nic = Connectx::new("steering = { table_entries = 14, priorities = 2 }");
    let mask = parameters(&[(header::DST_IPV4, 0xffff_ffff)]);
    let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 1, &mask).unwrap();
    let add = |nic: &Connectx, rule: u32| {
        let value = parameters(&[(header::DST_IPV4, u128::from(0xc612_0000 + rule))]);
        nic.flow(matcher, &value, &[to(nic, 0), tag(rule)])
    };
    let first = add(&nic, 0).unwrap();
    for rule in 1..14 {
        add(&nic, rule).unwrap();
    }
    assert_eq!(add(&nic, 14), Err(Errno::NOSPC));
    nic.ioctl(ioctl::OBJECT_FLOW, abi::FLOW_REMOVE, &[(abi::FLOW_HANDLE, AttributeValue::Handle(first))]).unwrap();
    nic.harness.emulator.inject_toml("kind = 'refuse'\ncommand = 'create_flow'\nerrno = 'EIO'\nafter = 1").unwrap();
    let again = add(&nic, 14).unwrap();
    assert_eq!(add(&nic, 0), Err(Errno::IO), "the second one, by the injected fault");
    assert_eq!(where_to(&mut nic, &udp(14)), [(0, 14)]);
    assert_eq!(where_to(&mut nic, &udp(0)), []);
    nic.ioctl(ioctl::OBJECT_FLOW, ioctl::FLOW_DESTROY, &[(0, AttributeValue::Handle(again))]).unwrap();
    add(&nic, 0).unwrap();
    let late = nic.matcher(abi::TABLE_NIC_RX, 2, 1, &mask).unwrap();
    assert_eq!(nic.flow(late, &mask, &[to(&nic, 0)]), Err(Errno::NOMEM), "there are two priorities");
}

#[test]
fn disabled_capabilities_are_refused() {
    let nic = Connectx::new(
        "class = 'connectx-5'\nsteering = { reformats = ['l2-tunnel-to-l2'], match_parts = ['outer'], \
         modify_actions = 0, counters = 1, sniffer = false }",
    );
    let action = |method, attributes: &[(u16, AttributeValue)]| {
        nic.create(ioctl::OBJECT_FLOW_ACTION, method, 0x1000, attributes)
    };
    let reformat = |kind: u8, table: u8| {
        let kind = (abi::REFORMAT_TYPE, AttributeValue::Number(u64::from(kind)));
        let table = (abi::REFORMAT_TABLE, AttributeValue::Number(u64::from(table)));
        action(abi::ACTION_REFORMAT, &[kind, table, (abi::REFORMAT_DATA, AttributeValue::Bytes(vec![0; 14]))])
    };
    assert!(reformat(abi::REFORMAT_L2_TUNNEL_TO_L2, abi::TABLE_NIC_RX).is_ok());
    assert_eq!(reformat(abi::REFORMAT_L3_TUNNEL_TO_L2, abi::TABLE_NIC_RX), Err(Errno::OPNOTSUPP));
    assert_eq!(reformat(abi::REFORMAT_L2_TO_L2_TUNNEL, abi::TABLE_NIC_TX), Err(Errno::OPNOTSUPP));
    let modify = [
        (abi::MODIFY_HEADER_COMMANDS, AttributeValue::Bytes(vec![0x10; 8])),
        (abi::MODIFY_HEADER_TABLE, AttributeValue::Number(0)),
    ];
    assert_eq!(action(abi::ACTION_MODIFY_HEADER, &modify), Err(Errno::OPNOTSUPP));
    let mask = parameters(&[(misc::VXLAN_VNI, 0xff_ffff)]);
    let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 3, &mask).unwrap();
    assert_eq!(nic.flow(matcher, &mask, &[to(&nic, 0)]), Err(Errno::INVAL));
    let counters = || nic.create(ioctl::OBJECT_COUNTERS, ioctl::COUNTERS_CREATE, 0, &[]);
    assert!(counters().is_ok());
    assert_eq!(counters(), Err(Errno::AGAIN));
    let sniffer = attribute(defs::FLOW_SNIFFER, 0, 0, 0);
    assert_eq!(nic.verbs_flow(nic.receivers[0], sniffer, &[]), Err(Errno::OPNOTSUPP));
    let devx = [(abi::DEVX_OBJ_IN, AttributeValue::Bytes(vec![0; 16])), (abi::DEVX_OBJ_OUT, AttributeValue::Room(16))];
    assert_eq!(nic.create(abi::OBJECT_DEVX_OBJ, abi::DEVX_OBJ_CREATE, abi::DEVX_OBJ_HANDLE, &devx), Err(Errno::INVAL));
}

#[test]
fn rules_are_matched_in_the_kernels_order() {
    let mut nic = Connectx::new("");
    let rule = |nic: &Connectx, kind, priority, specs: &[Vec<u8>], flags, receiver: usize| {
        nic.verbs_flow(nic.receivers[receiver], attribute(kind, priority, specs.len() as u8, flags), &specs.concat())
    };
    let mark = |number: u32| spec(defs::SPEC_TAG, &u64::from(number).to_ne_bytes());
    let group = spec(defs::SPEC_ETH, &[&[1, 0, 0, 0, 0, 0][..], &[0; 10], &[1], &[0; 15]].concat());
    let ports = |port: u8| spec(defs::SPEC_UDP, &[0, port, 0, 0, 0, if port == 0 { 0 } else { 0xff }, 0, 0]);
    rule(&nic, defs::FLOW_ALL_DEFAULT, 0, &[], 0, 1).unwrap();
    rule(&nic, defs::FLOW_NORMAL, 0, &[group, mark(1)], 0, 0).unwrap();
    let wide = rule(&nic, defs::FLOW_NORMAL, 15, &[ports(0), mark(2)], 0, 0).unwrap();
    rule(&nic, defs::FLOW_NORMAL, 14, &[ports(9), mark(3)], 0, 0).unwrap();
    let (mut to_group, mut other) = (udp(1), udp(1));
    to_group[0] = 3;
    other[37] = 8;
    let mut arp = udp(1);
    arp[12..14].copy_from_slice(&[8, 6]);
    assert_eq!(where_to(&mut nic, &udp(1)), [(0, 3)]);
    assert_eq!(where_to(&mut nic, &other), [(0, 2)]);
    assert_eq!(where_to(&mut nic, &to_group), [(0, 3)], "rules for groups come behind those of all priorities");
    assert_eq!(where_to(&mut nic, &arp), [(1, 0)]);
    arp[0] = 0xff;
    assert_eq!(where_to(&mut nic, &arp), [(0, 1)]);
    // A rule with `FLOW_DONT_TRAP` comes directly before the other rules of its priority.
    rule(&nic, defs::FLOW_NORMAL, 15, &[ports(0), mark(4)], defs::FLOW_DONT_TRAP, 1).unwrap();
    assert_eq!(where_to(&mut nic, &other), [(0, 2), (1, 4)]);
    nic.ioctl(ioctl::OBJECT_FLOW, ioctl::FLOW_DESTROY, &[(0, AttributeValue::Handle(wide))]).unwrap();
    assert_eq!(where_to(&mut nic, &other), [(1, 4), (1, 0)], "on to the defaults");

    let refused = |kind, priority, specs: &[Vec<u8>], flags| rule(&nic, kind, priority, specs, flags, 0).unwrap_err();
    assert_eq!(refused(defs::FLOW_NORMAL, 16, &[], 0), Errno::NOMEM);
    assert_eq!(refused(defs::FLOW_NORMAL, 0, &[], 8), Errno::INVAL);
    assert_eq!(refused(defs::FLOW_NORMAL, 0, &[], 1), Errno::INVAL, "a flag of old");
    assert_eq!(refused(defs::FLOW_ALL_DEFAULT, 0, &[], defs::FLOW_DONT_TRAP), Errno::INVAL);
    assert_eq!(refused(defs::FLOW_MC_DEFAULT, 0, &[], defs::FLOW_EGRESS), Errno::INVAL);
    assert_eq!(refused(4, 0, &[], 0), Errno::OPNOTSUPP);
    assert_eq!(refused(defs::FLOW_NORMAL, 0, &[mark(1 << 24)], 0), Errno::INVAL);
    assert_eq!(refused(defs::FLOW_NORMAL, 14, &[ports(9), mark(5)], 0), Errno::EXIST);
    let eleven: Vec<_> = (0..11).map(|_| ports(0)).collect();
    assert_eq!(refused(defs::FLOW_NORMAL, 0, &eleven, 0), Errno::INVAL);
    assert_eq!(nic.verbs_flow(nic.sender, attribute(0, 0, 0, 0), &[]), Err(Errno::INVAL));
    assert_eq!(nic.verbs_flow(999, attribute(0, 0, 0, 0), &[]), Err(Errno::INVAL));
    assert_eq!(nic.verbs_flow(nic.receivers[0], attribute(0, 0, 0, 0), &[0; 8]), Err(Errno::INVAL), "left-over bytes");
}

#[test]
fn a_completion_reports_a_register_set_by_a_rule() {
    let mut nic = Connectx::new("");
    let any = [0; 64];
    let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 0, &any).unwrap();
    let commands = [0x1050_0000u32.to_be_bytes(), 0x1234_5678u32.to_be_bytes()].concat();
    let table = (abi::MODIFY_HEADER_TABLE, AttributeValue::Number(u64::from(abi::TABLE_NIC_RX)));
    let attributes = [(abi::MODIFY_HEADER_COMMANDS, AttributeValue::Bytes(commands)), table];
    let action = nic.create(ioctl::OBJECT_FLOW_ACTION, abi::ACTION_MODIFY_HEADER, 0x1000, &attributes).unwrap();
    let actions = (abi::FLOW_ACTIONS, AttributeValue::Bytes(action.to_ne_bytes().to_vec()));
    nic.flow(matcher, &any, &[to(&nic, 1), actions, tag(5)]).unwrap();
    nic.send(&udp(1));
    let arrivals = nic.arrivals();
    assert_eq!((arrivals.len(), arrivals[0].metadata, arrivals[0].tag), (1, 0x1234_5678, 5));
    assert_eq!(arrivals[0].frame, udp(1));
}

#[test]
fn encapsulation_beyond_the_mtu_drops_the_frame() {
    let mut nic = Connectx::new("");
    let any = [0; 64];
    let put_on = [
        (abi::REFORMAT_TYPE, AttributeValue::Number(u64::from(abi::REFORMAT_L2_TO_L2_TUNNEL))),
        (abi::REFORMAT_TABLE, AttributeValue::Number(u64::from(abi::TABLE_NIC_TX))),
        (abi::REFORMAT_DATA, AttributeValue::Bytes(vec![0; 100])),
    ];
    let action = nic.create(ioctl::OBJECT_FLOW_ACTION, abi::ACTION_REFORMAT, 0x1000, &put_on).unwrap();
    let matcher = nic.matcher(abi::TABLE_NIC_TX, 0, 0, &any).unwrap();
    nic.flow(matcher, &any, &[(abi::FLOW_ACTIONS, AttributeValue::Bytes(action.to_ne_bytes().to_vec()))]).unwrap();
    let rest = nic.matcher(abi::TABLE_NIC_RX, 0, 0, &any).unwrap();
    nic.flow(rest, &any, &[to(&nic, 0)]).unwrap();
    for (length, arrives) in [(60, true), (1522, true), (1523, false), (1622, false)] {
        nic.send(&vec![7; length]);
        assert_eq!(nic.arrivals().len(), usize::from(arrives), "{length}");
    }
    assert_eq!(nic.harness.emulator.counters()["devices"][0]["ports"][0]["too_long"], 2);
}

/// Returns a sequence of different frames: runs of similar frames, and others between them.
fn mixture() -> Vec<Vec<u8>> {
    let mut random = fastrand::Rng::with_seed(1);
    let mut next = |below: usize| random.usize(..below);
    let mut frames = Vec::new();
    while frames.len() < 400 {
        let mut frame = udp(next(4) as u32);
        match next(8) {
            // A tunnel header with random content.
            0 => frame[36..38].copy_from_slice(&4789u16.to_be_bytes()),
            1 => frame.extend([0; 9]),
            2 => drop(frame.splice(12..12, [0x81, 0, 0, 7])),
            3 => frame[20] = 0x20,
            4 => frame[12..14].copy_from_slice(&[0x86, 0xdd]),
            _ => {}
        }
        for _ in 0..=next(12) {
            // Similar frames may differ in ports, checksum and payload.
            let at = frame.len() - 1 - next(26);
            frame[at] = next(256) as u8;
            if next(2) == 0 {
                let length = frame.len().min(34);
                frame[24..26].fill(0);
                let sum =
                    frame[14..length].chunks(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1])).sum::<u32>();
                let checksum = !((sum & 0xffff) + (sum >> 16)) as u16;
                frame[24..26].copy_from_slice(&checksum.to_be_bytes());
            }
            frames.push(frame.clone());
        }
    }
    frames
}

#[test]
fn bursts_are_received_like_single_frames() {
    let frames = mixture();
    let device = || {
        let nic = Connectx::new("steering = { devx = true }");
        nic.receive_everything();
        let mask = parameters(&[(header::DST_IPV4, 0xffff_ffff)]);
        let matcher = nic.matcher(abi::TABLE_NIC_RX, 0, 1, &mask).unwrap();
        for host in 0..2 {
            let value = parameters(&[(header::DST_IPV4, u128::from(0xc612_0000 + host))]);
            nic.flow(matcher, &value, &[to(&nic, host as usize), tag(7 + host)]).unwrap();
        }
        nic
    };
    let ports = |nic: &Connectx| {
        let counters = nic.harness.emulator.counters();
        let device = &counters["devices"][0];
        (device["ports"].clone(), device["receive_queues"].clone())
    };
    let (mut alone, mut together) = (device(), device());
    // Buffers are returned after each part; some parts need more than there are.
    for part in [1, 2, 63, 40, 33, 62, 5].iter().cycle().scan(0, |from, size| {
        let part = frames.get(*from..(*from + size).min(frames.len()))?;
        *from += size;
        Some(part)
    }) {
        if part.is_empty() {
            break;
        }
        let repeated = if part.len() > 60 { 2 } else { 1 };
        for _ in 0..repeated {
            part.iter().for_each(|frame| alone.send(frame));
            together.send_together(&part.iter().map(Vec::as_slice).collect::<Vec<_>>());
        }
        let arrived = together.arrivals();
        assert_eq!(arrived, alone.arrivals());
        assert!(!arrived.is_empty());
    }
    assert_eq!(ports(&together), ports(&alone));
    assert!(ports(&together).0[0]["no_buffer"].as_u64() > Some(0), "some found no buffer");
    assert_eq!(together.harness.emulator.log().last(), None);
}
