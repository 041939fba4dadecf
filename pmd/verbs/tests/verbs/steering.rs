//! Tests of flow rules and mlx5dv steering with the real libibverbs and libmlx5, on an emulated ConnectX.
//!
//! They move no packets. The driver's tests check the effect of rules on packets.

use wirepath_nic_defs::mlx5::{MODIFY_TTL, header, misc, misc3};
use wirepath_nic_emulator::launch;
use wirepath_testlab::skip_or_fail;
use wirepath_verbs::flow::{
    CounterKind, Counters, DONT_TRAP, EGRESS, EspFilter, EthFilter, Flow, FlowAttr, FlowType, GreFilter, Ipv4ExtFilter,
    Ipv4Filter, Ipv6Filter, MplsFilter, Spec, TcpFilter, TunnelFilter, UdpFilter,
};
use wirepath_verbs::mlx5::*;
use wirepath_verbs::*;

use super::common::{key, only_device, open};

/// ConnectX with all steering features.
const ALL: &str =
    "[[device]]\nkind = 'mlx5'\nsteering = { devx = true, sniffer = true }\n[[device.port]]\nlink = 'loop'\n";
/// ConnectX with few steering features.
const LITTLE: &str = "[[device]]\nkind = 'mlx5'\nsteering = { devx = false, priorities = 8, match_parts = ['outer'], \
    encap_bytes = 64, modify_actions = 2, sniffer = false, reformats = ['l2-to-l2-tunnel'] }\n\
    [[device.port]]\nlink = 'loop'\n";

/// Returns false and skips the test if libmlx5 is not installed.
fn libmlx5_installed() -> bool {
    let there = std::path::Path::new("/etc/libibverbs.d/mlx5.driver").exists();
    if !there {
        skip_or_fail(file!(), line!(), "needs rdma-core with libmlx5 (Debian: ibverbs-providers)");
    }
    there
}

struct Port {
    mlx5: Mlx5,
    rss: RssQp,
}

fn port() -> Port {
    let mlx5 = Mlx5::open(&only_device()).unwrap();
    let context = mlx5.context();
    let domain = ProtectionDomain::new(context).unwrap();
    let completions = CompletionQueue::new(context, &CompletionQueueOptions::new(63, "receive")).unwrap();
    let queue = WorkQueue::new(&domain, &WorkQueueOptions::new(&completions, 64, "receive")).unwrap();
    let table = IndirectionTable::new(&[queue]).unwrap();
    let rss = RssQp::new(&domain, &table, HashFields::NONE, &key()).unwrap();
    Port { mlx5, rss }
}

fn errno<T>(result: Result<T>) -> Option<i32> {
    match result {
        Ok(_) => panic!("the call succeeded"),
        Err(error) => error.errno(),
    }
}

fn inner(spec: Spec) -> Spec {
    let mut inside = Spec::empty(spec.kind(), true).expect("the spec supports inner headers");
    for field in spec.fields() {
        assert!(inside.add_match(field.name, field.value, field.mask));
    }
    inside
}

#[test]
fn real_library_accepts_every_spec_and_flow_type() {
    if !libmlx5_installed() {
        return;
    }
    launch::run_test("steering::real_library_accepts_every_spec_and_flow_type", ALL, || {
        let Port { mlx5, rss } = port();
        let ipv4 = Ipv4Filter { src_ip: 0x0a00_0001, dst_ip: 0 }.with_mask(Ipv4Filter { src_ip: u32::MAX, dst_ip: 0 });
        let proto = |proto| Ipv4ExtFilter { proto, ..Ipv4ExtFilter::default() };
        let tos = |tos| Ipv4ExtFilter { tos, ..Ipv4ExtFilter::default() };
        let vxlan = TunnelFilter { tunnel_id: 42 }.with_mask(TunnelFilter { tunnel_id: 0xff_ffff });
        let key = |key| GreFilter { key, ..GreFilter::default() };
        let mac = EthFilter { dst_mac: [2, 0, 0, 0, 0, 1], ..EthFilter::default() };
        let whole = EthFilter { dst_mac: [0xff; 6], ..EthFilter::default() };
        let eth = mac.with_mask(whole);
        let (v6, tcp, udp) = (Ipv6Filter::any(), TcpFilter::any(), UdpFilter::any());
        let stacks: Vec<Vec<Spec>> = vec![
            vec![eth],
            vec![EthFilter::any(), ipv4],
            vec![eth, tos(0xb8).with_mask(tos(0xfc)), tcp],
            vec![v6, udp],
            vec![ipv4, udp, vxlan, inner(eth), inner(v6), inner(tcp)],
            vec![ipv4, key(7).with_mask(key(u32::MAX)), inner(ipv4), inner(udp)],
            vec![eth, MplsFilter { label: 5 << 12 }.with_mask(MplsFilter { label: 0xffff_f000 })],
            vec![v6, Spec::Tag(0xff_fffe)],
        ];
        for (priority, specs) in (0..).zip(stacks) {
            let flow = specs.iter().fold(Flow::normal(1, priority), |flow, spec| flow.with(*spec));
            FlowRule::new(&rss, &flow).unwrap_or_else(|error| panic!("{specs:?}: {error}"));
            FlowRule::new(&rss, &flow.with(Spec::Drop)).unwrap_or_else(|error| panic!("{specs:?} dropped: {error}"));
        }
        for kind in [FlowType::ALL_DEFAULT, FlowType::MC_DEFAULT, FlowType::SNIFFER] {
            FlowRule::new(&rss, &Flow::without_specs(1, kind)).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
        }
        let copies = FlowAttr { flow_type: FlowType::NORMAL, priority: 3, port: 1, flags: DONT_TRAP };
        drop(FlowRule::new(&rss, &Flow::new(copies).with(eth)).unwrap());
        // Actions of mlx5, each in its table. The flow keeps them alive.
        let hop = ModifyHeader::<Ingress>::new(&mlx5, &[Modification::add(MODIFY_TTL, 0xff)]).unwrap();
        let flow = Flow::normal(1, 9).with(eth).with(ipv4).with(Spec::Tag(3)).action(&hop);
        let rule = FlowRule::new(&rss, &flow.clone().action(&Reformat::l2_tunnel_to_l2(&mlx5).unwrap())).unwrap();
        drop(flow);
        assert!(hop.is_used());
        drop(rule);
        assert!(!hop.is_used());
        let headers = self::vxlan(0);
        let sent = Flow::new(FlowAttr { flow_type: FlowType::NORMAL, priority: 0, port: 1, flags: EGRESS }).with(eth);
        let encap = Reformat::l2_to_l2_tunnel(&mlx5, &headers).unwrap();
        drop(FlowRule::new(&rss, &sent.clone().action(&encap)).unwrap());
        drop(FlowRule::new(&rss, &sent.clone().with(Spec::Drop)).unwrap());
        // Flows that the kernel rejects, with their errno.
        let refusals = [
            (Flow::normal(1, 0).with(EspFilter::any()), libc::EOPNOTSUPP),
            (Flow::normal(1, 16).with(eth), libc::ENOMEM),
            (Flow::normal(2, 0).with(eth), libc::EINVAL),
            (Flow::normal(1, 0).with(proto(6).with_mask(proto(0xff))).with(udp), libc::EINVAL),
            (Flow::normal(1, 0).with(eth).action(&hop).action(&hop), libc::EINVAL),
        ];
        for (flow, expected) in refusals {
            assert_eq!(errno(FlowRule::new(&rss, &flow)), Some(expected), "{flow:?}");
        }
        // Flows that are rejected before the kernel call.
        let many = (0..11).fold(Flow::normal(1, 0), |flow, _| flow.with(eth));
        let defaults = FlowAttr { flow_type: FlowType::ALL_DEFAULT, ..copies };
        for flow in [
            many,
            Flow::new(defaults),
            Flow::normal(1, 0).with(Spec::Tag(1 << 24)),
            Flow::normal(1, 0).with(Spec::Handle(8)),
            Flow::normal(1, 0).with(Spec::Count(8)),
        ] {
            assert!(matches!(FlowRule::new(&rss, &flow), Err(Error::InvalidRequest(_))), "{flow:?}");
        }
    });
}

#[test]
fn counters_are_attached_and_read() {
    if !libmlx5_installed() {
        return;
    }
    launch::run_test("steering::counters_are_attached_and_read", ALL, || {
        let Port { mlx5, rss } = port();
        let counters = Counters::new(mlx5.context(), &[CounterKind::Bytes, CounterKind::Packets]).unwrap();
        let flow = Flow::normal(1, 0).with(EthFilter::any()).count(&counters);
        let rule = FlowRule::new(&rss, &flow).unwrap();
        assert_eq!(counters.read().unwrap(), [0, 0]);
        // Two rules may share counters.
        let again = FlowRule::new(&rss, &Flow::normal(1, 1).with(Ipv6Filter::any()).count(&counters)).unwrap();
        drop(counters);
        drop(flow);
        drop((rule, again));
        let counter = FlowCounter::new(&mlx5).unwrap();
        assert_eq!(counter.read().unwrap(), (0, 0));
    });
}

fn parameters(fields: &[(wirepath_nic_defs::mlx5::MatchField, u128)]) -> MatchParameters {
    let mut parameters = MatchParameters::default();
    fields.iter().for_each(|(field, value)| parameters.set(*field, *value));
    parameters
}

/// Returns Ethernet, IPv4, UDP and VXLAN headers followed by `more` zero bytes.
fn vxlan(more: usize) -> Vec<u8> {
    let mut bytes = vec![2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x08, 0x00];
    bytes.extend([0x45, 0, 0, 0, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    bytes.extend([0xc0, 0, 0x12, 0xb5, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 42, 0]);
    bytes.resize(bytes.len() + more, 0);
    bytes
}

#[test]
fn ingress_and_egress_rules_accept_every_action() {
    if !libmlx5_installed() {
        return;
    }
    launch::run_test("steering::ingress_and_egress_rules_accept_every_action", ALL, || {
        let Port { mlx5, rss } = port();
        assert!(mlx5.has_devx());
        let mask = parameters(&[
            (header::IP_VERSION, 15),
            (header::IP_PROTOCOL, 0xff),
            (header::UDP_DPORT, 0xffff),
            (misc::VXLAN_VNI, 0xff_ffff),
        ]);
        let value = |vni| {
            let outer = [(header::IP_VERSION, 4), (header::IP_PROTOCOL, 17), (header::UDP_DPORT, 4789)];
            parameters(&[&outer[..], &[(misc::VXLAN_VNI, vni)]].concat())
        };
        let matcher = Matcher::<Ingress>::new(&mlx5, 3, &mask).unwrap();
        let counter = FlowCounter::new(&mlx5).unwrap();
        let actions = Actions {
            destination: IngressDestination::Deliver { to: (&rss).into(), tag: FlowTag::new(7) },
            modify: Some(ModifyHeader::new(&mlx5, &[Modification::add(MODIFY_TTL, 0xff)]).unwrap()),
            reformat: Some(Reformat::l2_tunnel_to_l2(&mlx5).unwrap()),
            counter: Some(counter.clone()),
        };
        let first = SteeringRule::new(&matcher, &value(1), &actions).unwrap();
        let link = LinkHeader::Tagged([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 0x81, 0, 0, 5, 8, 0]);
        let bare = Actions { reformat: Some(Reformat::l3_tunnel_to_l2(&mlx5, &link).unwrap()), ..actions.clone() };
        let second = SteeringRule::new(&matcher, &value(2), &bare).unwrap();
        let third = SteeringRule::new(&matcher, &value(3), &Actions::only(IngressDestination::Drop)).unwrap();
        let fourth = SteeringRule::new(&matcher, &value(4), &Actions::only(IngressDestination::DefaultMiss)).unwrap();
        // A second rule with the same match and other actions is rejected.
        assert_eq!(
            errno(SteeringRule::new(&matcher, &value(1), &Actions::only(IngressDestination::Drop))),
            Some(libc::EEXIST)
        );
        // Values outside the mask are rejected before the library call.
        let outside = parameters(&[(header::TTL, 1)]);
        let refused = SteeringRule::new(&matcher, &outside, &Actions::only(IngressDestination::Drop));
        assert!(matches!(refused, Err(Error::InvalidRequest(_))));
        assert_eq!(counter.read().unwrap(), (0, 0));
        // Rules keep their matcher, actions and counter alive.
        drop((matcher, counter, actions, bare));
        drop((first, second, third, fourth));

        let matcher = Matcher::<Egress>::new(&mlx5, 0, &parameters(&[(misc3::ICMP_TYPE, 0xff)])).unwrap();
        let of = |kind| parameters(&[(misc3::ICMP_TYPE, kind)]);
        let encap = Actions::<Egress> {
            destination: EgressDestination::Send,
            modify: None,
            reformat: Some(Reformat::l2_to_l2_tunnel(&mlx5, &vxlan(0)).unwrap()),
            counter: None,
        };
        let tunnel = Actions {
            reformat: Some(Reformat::l2_to_l3_tunnel(&mlx5, &vxlan(0)).unwrap()),
            ..Actions::only(EgressDestination::Send)
        };
        let rules = [
            SteeringRule::new(&matcher, &of(8), &encap).unwrap(),
            SteeringRule::new(&matcher, &of(0), &tunnel).unwrap(),
            SteeringRule::new(&matcher, &of(3), &Actions::only(EgressDestination::Drop)).unwrap(),
        ];
        assert!(matcher.is_used());
        drop(rules);
        assert!(!matcher.is_used());
    });
}

#[test]
fn unsupported_features_return_the_kernel_errno() {
    if !libmlx5_installed() {
        return;
    }
    launch::run_test("steering::unsupported_features_return_the_kernel_errno", LITTLE, || {
        let Port { mlx5, rss } = port();
        // The device does not support DevX, so the context has none.
        assert!(!mlx5.has_devx());
        assert_eq!(errno(FlowCounter::new(&mlx5)), Some(libc::EOPNOTSUPP));
        assert_eq!(errno(Reformat::l2_tunnel_to_l2(&mlx5)), Some(libc::EOPNOTSUPP));
        assert_eq!(errno(Reformat::l2_to_l3_tunnel(&mlx5, &vxlan(0))), Some(libc::EOPNOTSUPP));
        assert_eq!(errno(Reformat::l2_to_l2_tunnel(&mlx5, &vxlan(20))), Some(libc::EINVAL));
        Reformat::l2_to_l2_tunnel(&mlx5, &vxlan(14)).unwrap();
        assert!(matches!(Reformat::l2_to_l2_tunnel(&mlx5, &[]), Err(Error::InvalidRequest(_))));
        let hop = Modification::add(MODIFY_TTL, 0xff);
        assert!(ModifyHeader::<Ingress>::new(&mlx5, &[hop; 2]).is_ok());
        assert!(errno(ModifyHeader::<Ingress>::new(&mlx5, &[hop; 3])).is_some());
        assert!(matches!(ModifyHeader::<Ingress>::new(&mlx5, &[]), Err(Error::InvalidRequest(_))));
        let rule = |priority, field| {
            let mask = parameters(&[(field, 1)]);
            let matcher = Matcher::<Ingress>::new(&mlx5, priority, &mask)?;
            SteeringRule::new(&matcher, &mask, &Actions::only(IngressDestination::Drop)).map(drop)
        };
        assert!(rule(7, header::TTL).is_ok());
        assert_eq!(errno(rule(8, header::TTL)), Some(libc::ENOMEM));
        assert_eq!(errno(rule(0, misc::VXLAN_VNI)), Some(libc::EINVAL));
        assert_eq!(errno(FlowRule::new(&rss, &Flow::without_specs(1, FlowType::SNIFFER))), Some(libc::EOPNOTSUPP));
        assert_eq!(errno(FlowRule::new(&rss, &Flow::normal(1, 8).with(EthFilter::any()))), Some(libc::ENOMEM));
    });
}

/// Queue pair numbers have 14 bits in the emulator. Destroyed pairs must free their numbers.
#[test]
fn rss_queue_pair_numbers_are_reused() {
    if !libmlx5_installed() {
        return;
    }
    launch::run_test("steering::rss_queue_pair_numbers_are_reused", ALL, || {
        let context = open();
        let domain = ProtectionDomain::new(&context).unwrap();
        let completions = CompletionQueue::new(&context, &CompletionQueueOptions::new(63, "receive")).unwrap();
        let queue = WorkQueue::new(&domain, &WorkQueueOptions::new(&completions, 64, "receive")).unwrap();
        let table = IndirectionTable::new(&[queue]).unwrap();
        for round in 0..1 << 14 {
            let pair = RssQp::new(&domain, &table, HashFields::NONE, &key());
            drop(pair.unwrap_or_else(|error| panic!("{round}: {error}")));
        }
    });
}
