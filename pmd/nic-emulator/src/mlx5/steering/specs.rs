//! Converts specs of `ibv_create_flow` to match parameters. Source: Linux `drivers/infiniband/hw/mlx5/fs.c`
//! (`parse_flow_attr`, `is_valid_ethertype`, `flow_is_multicast_only`).

use rustix::io::Errno;
use wirepath_nic_defs::mlx5::{MATCH_BYTES, MatchField, header, misc, misc2};
use wirepath_nic_defs::uverbs as defs;

use super::headers::{GRE, TCP, UDP};
use super::key::Key;
use crate::device::ObjectId;
use crate::rules::FlowSpec;

type RuleError = (Errno, String);

fn invalid<T>(why: impl Into<String>) -> Result<T, RuleError> {
    Err((Errno::INVAL, why.into()))
}

fn unsupported<T>(why: impl Into<String>) -> Result<T, RuleError> {
    Err((Errno::OPNOTSUPP, why.into()))
}

/// Match and actions of a rule.
#[derive(Clone, Debug)]
pub(super) struct ParsedRule {
    pub(super) mask: Key,
    pub(super) value: Key,
    pub(super) tag: Option<u32>,
    pub(super) drop: bool,
    pub(super) actions: Vec<ObjectId>,
    pub(super) counters: Option<ObjectId>,
    /// True if the first spec matches only multicast addresses.
    pub(super) group: bool,
}

/// Match parameters under construction.
struct Parameters {
    mask: [u8; MATCH_BYTES],
    value: [u8; MATCH_BYTES],
}

fn number(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0, |number, byte| number << 8 | u128::from(*byte))
}

impl Parameters {
    fn set(&mut self, field: MatchField, value: u128, mask: u128) {
        field.set(&mut self.mask, mask);
        field.set(&mut self.value, value);
    }

    /// Sets a field from bytes of a filter.
    fn bytes(&mut self, field: MatchField, value: &[u8], mask: &[u8]) {
        self.set(field, number(value), number(mask));
    }

    /// Sets the protocol, which several specs imply.
    fn protocol(&mut self, field: MatchField, value: u8, mask: u8) -> Result<(), RuleError> {
        let (is, covered) = (field.get(&self.value), field.get(&self.mask));
        if mask == 0 {
            return Ok(());
        }
        if covered != 0 && (covered != u128::from(mask) || is != u128::from(value)) {
            return invalid(format!("protocol {value} contradicts protocol {is}"));
        }
        self.set(field, value.into(), mask.into());
        Ok(())
    }
}

/// Converts the specs of a rule.
pub(super) fn read(specs: &[FlowSpec]) -> Result<ParsedRule, RuleError> {
    for inner in [false, true] {
        ethertype_agrees(specs, inner)?;
    }
    let mut parameters = Parameters { mask: [0; MATCH_BYTES], value: [0; MATCH_BYTES] };
    let empty = || Key::from_parameters(&[]).expect("nothing is behind nothing");
    let mut read = ParsedRule {
        mask: empty(),
        value: empty(),
        tag: None,
        drop: false,
        actions: Vec::new(),
        counters: None,
        group: is_group(specs),
    };
    let mut before = None;
    for spec in specs {
        match spec {
            FlowSpec::Match { kind, inner, value, mask } => {
                header_spec(&mut parameters, *kind, *inner, value, mask, before)?;
                before = Some(*kind | if *inner { defs::SPEC_INNER } else { 0 });
            }
            FlowSpec::Tag(tag) if *tag >= 1 << 24 => return invalid(format!("tag {tag:#x} has more than 24 bits")),
            FlowSpec::Tag(tag) => read.tag = Some(*tag),
            FlowSpec::Drop => read.drop = true,
            FlowSpec::Action(action) => read.actions.push(*action),
            FlowSpec::Count(_) if read.counters.is_some() => return invalid("two sets of counters"),
            FlowSpec::Count(counters) => read.counters = Some(*counters),
        }
        if !matches!(spec, FlowSpec::Match { .. }) {
            before = None;
        }
    }
    read.mask = Key::from_parameters(&parameters.mask).expect("specs reach no part that is not known");
    read.value = Key::from_parameters(&parameters.value).expect("specs reach no part that is not known");
    Ok(read)
}

fn header_spec(
    parameters: &mut Parameters,
    kind: u32,
    inner: bool,
    value: &[u8],
    mask: &[u8],
    before: Option<u32>,
) -> Result<(), RuleError> {
    let at = |field: MatchField| if inner { field.inner() } else { field };
    let p = parameters;
    match kind {
        defs::SPEC_ETH => {
            p.bytes(at(header::DST_MAC), &value[..6], &mask[..6]);
            p.bytes(at(header::SRC_MAC), &value[6..12], &mask[6..12]);
            p.bytes(at(header::ETHERTYPE), &value[12..14], &mask[12..14]);
            let (tag, wanted) = (number(&value[14..16]), number(&mask[14..16]));
            if wanted != 0 {
                p.set(at(header::CVLAN_TAG), 1, 1);
                p.set(at(header::FIRST_VID), tag, wanted);
                p.set(at(header::FIRST_CFI), tag >> 12, wanted >> 12);
                p.set(at(header::FIRST_PRIO), tag >> 13, wanted >> 13);
            }
        }
        defs::SPEC_IPV4 => {
            if mask[10..] != [0, 0] {
                return unsupported("time to live and flags of IPv4 cannot be matched");
            }
            p.set(at(header::IP_VERSION), 4, 15);
            p.bytes(at(header::SRC_IPV4), &value[..4], &mask[..4]);
            p.bytes(at(header::DST_IPV4), &value[4..8], &mask[4..8]);
            p.bytes(at(header::IP_DSCP), &[value[9] >> 2], &[mask[9] >> 2]);
            p.bytes(at(header::IP_ECN), &value[9..10], &mask[9..10]);
            p.protocol(at(header::IP_PROTOCOL), value[8], mask[8])?;
        }
        defs::SPEC_IPV6 => {
            if mask[38..] != [0, 0] {
                return unsupported("the hop limit of IPv6 cannot be matched");
            }
            p.set(at(header::IP_VERSION), 6, 15);
            p.bytes(at(header::SRC_IPV6), &value[..16], &mask[..16]);
            p.bytes(at(header::DST_IPV6), &value[16..32], &mask[16..32]);
            p.bytes(at(header::IP_DSCP), &[value[37] >> 2], &[mask[37] >> 2]);
            p.bytes(at(header::IP_ECN), &value[37..38], &mask[37..38]);
            p.protocol(at(header::IP_PROTOCOL), value[36], mask[36])?;
            let label = if inner { misc::INNER_FLOW_LABEL } else { misc::OUTER_FLOW_LABEL };
            p.bytes(label, &value[32..36], &mask[32..36]);
        }
        defs::SPEC_TCP | defs::SPEC_UDP => {
            let (protocol, source, destination) = if kind == defs::SPEC_TCP {
                (TCP, header::TCP_SPORT, header::TCP_DPORT)
            } else {
                (UDP, header::UDP_SPORT, header::UDP_DPORT)
            };
            p.protocol(at(header::IP_PROTOCOL), protocol, 0xff)?;
            // The destination port is the first field.
            p.bytes(at(destination), &value[..2], &mask[..2]);
            p.bytes(at(source), &value[2..4], &mask[2..4]);
        }
        defs::SPEC_VXLAN => p.bytes(misc::VXLAN_VNI, &value[1..4], &mask[1..4]),
        defs::SPEC_GRE => {
            if mask[..2] != [0, 0] {
                return unsupported("flags of GRE cannot be matched");
            }
            p.protocol(at(header::IP_PROTOCOL), GRE, 0xff)?;
            p.bytes(misc::GRE_PROTOCOL, &value[2..4], &mask[2..4]);
            p.bytes(misc::GRE_KEY, &value[4..8], &mask[4..8]);
        }
        defs::SPEC_MPLS => {
            let field = match before {
                Some(defs::SPEC_UDP) => misc2::MPLS_OVER_UDP,
                Some(defs::SPEC_GRE) => misc2::MPLS_OVER_GRE,
                _ if inner => misc2::INNER_MPLS,
                _ => misc2::OUTER_MPLS,
            };
            p.bytes(field, value, mask);
        }
        kind => return unsupported(format!("spec {kind:#x} cannot be matched")),
    }
    Ok(())
}

/// Checks an EtherType beside an IP header: its mask must be full, and its value that of the IP version, or
/// of MPLS before the IP header.
fn ethertype_agrees(specs: &[FlowSpec], of: bool) -> Result<(), RuleError> {
    let mut ethertype = None;
    let mut ip = None;
    for spec in specs {
        if let FlowSpec::Match { kind, inner, value, mask } = spec
            && *inner == of
        {
            match *kind {
                defs::SPEC_ETH if mask[12..14] != [0, 0] => {
                    ethertype = Some((number(&value[12..14]), mask[12..14] == [0xff, 0xff]));
                }
                defs::SPEC_IPV4 | defs::SPEC_IPV6 => ip = Some(*kind),
                _ => {}
            }
        }
    }
    let agree = match (ethertype, ip) {
        (Some((ethertype, whole)), Some(ip)) => {
            whole
                && match ethertype {
                    0x0800 => ip == defs::SPEC_IPV4,
                    0x86dd => ip == defs::SPEC_IPV6,
                    0x8847 | 0x8848 => true,
                    _ => false,
                }
        }
        _ => true,
    };
    if agree { Ok(()) } else { invalid("an EtherType that does not match the IP header") }
}

/// Returns true if the first spec matches only multicast addresses.
fn is_group(specs: &[FlowSpec]) -> bool {
    match specs.first() {
        Some(FlowSpec::Match { kind: defs::SPEC_IPV4, inner: false, value, .. }) => value[4] >> 4 == 14,
        Some(FlowSpec::Match { kind: defs::SPEC_ETH, inner: false, value, mask }) => value[0] & mask[0] & 1 == 1,
        _ => false,
    }
}
