//! The tunnels of the gateway in the NIC of the underlay, as far as it can have them.
//!
//! A NIC takes apart only what the gateway would take: outer lengths and checksums that are right, and a VXLAN header that says that it has
//! a VNI. All else comes to the gateway as it is, and ends there with its reason. (A frame in a tunnel that is too short to be one ends in
//! the NIC, uncounted.) A NIC that does not compare these things takes nothing apart.
//!
//! The gateway does the same by itself, with the same packets on the wire: whatever the NIC does not take (marked by congestion, another
//! remote, too long) it does as on any port.

use std::net::IpAddr;

use wirepath_pipeline::ControlPlane;
use wirepath_pipeline::rules::RuleControl;
use wirepath_pipeline::tunnel::{GatewayControl, Tunnel};
use wirepath_pmd::flow::{Action, Direction, Field, Key, Rule};
use wirepath_pmd::port::PortId;
use wirepath_wire::MacAddr;

use super::Reporting;
use crate::rules::{decap, encap};

/// What the NIC has of each remote.
#[derive(Debug, Default)]
pub struct Offload {
    remotes: Vec<Remote>,
    /// How often devices had lost what they had.
    lost: u64,
    /// Nanoseconds of the last look.
    looked: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Remote {
    opens: bool,
    /// Next hop of the header, and its number; `Err`: the NIC does not take it to this one, and when it is asked again.
    wraps: Option<(MacAddr, Result<u32, u64>)>,
}

/// Nanoseconds between two looks at the remotes.
const LOOK: u64 = 100_000_000;
/// Nanoseconds until a NIC is asked again for what it has refused.
const AGAIN: u64 = 1_000_000_000;
/// What the configuration stands in the way of, it always does.
const NEVER: u64 = u64::MAX;

/// To be called on every tick: gives the NIC what is new, and takes back what is old.
pub fn leave_to_nic(reporting: &mut Reporting, rules: &mut RuleControl, plane: &mut ControlPlane) {
    let Reporting { gateway, offload, .. } = reporting;
    let port = gateway.config().underlay.port as PortId;
    let now = plane.now();
    if !rules.hardware().has(port) || now < offload.looked + LOOK {
        return;
    }
    offload.looked = now;
    if offload.lost != rules.hardware().lost() {
        offload.lost = rules.hardware().lost();
        for (index, remote) in offload.remotes.iter_mut().enumerate() {
            gateway.encapsulated_by_nic(index, None);
            if let Some((_, Ok(number))) = remote.wraps.take() {
                rules.drop_encap(plane, port, number);
            }
        }
    }
    // Rules at egress see packets as they leave, so they must be whole by then.
    let leaves = |rule: &Rule| rule.fields().get(Key::field(0, Field::PortId)).is_none_or(|it| it.matches(port.into()));
    let watched = rules.rules().any(|(_, rule)| rule.direction() == Direction::Egress && leaves(rule));
    let mut tunnels: Vec<Tunnel> = gateway.tunnels().collect();
    if watched {
        tunnels.iter_mut().for_each(|tunnel| tunnel.next_hop = None);
    }
    offload.remotes.resize(tunnels.len(), Remote::default());
    for (index, (tunnel, remote)) in tunnels.iter().zip(&mut offload.remotes).enumerate() {
        if !remote.opens {
            remote.opens = true;
            open(gateway, rules, plane, index, tunnel);
        }
        if let Some((hop, number)) = remote.wraps
            && Some(hop) != tunnel.next_hop
        {
            gateway.encapsulated_by_nic(index, None);
            number.into_iter().for_each(|number| rules.drop_encap(plane, port, number));
            remote.wraps = None;
        }
        let due = remote.wraps.is_none_or(|(_, number)| number.is_err_and(|again| again <= now));
        if let Some(hop) = tunnel.next_hop.filter(|_| due) {
            let (to, vni) = (tunnel.remote, tunnel.vni);
            let number = match wrap(gateway, rules, plane, port, tunnel, hop) {
                Ok(number) => {
                    tracing::info!("tunnel to {to} (VNI {vni}): headers are put on in the NIC");
                    Ok(number)
                }
                Err((why, again)) => {
                    // Once is enough.
                    if remote.wraps.is_none() {
                        tracing::info!("tunnel to {to} (VNI {vni}): headers are put on in software: {why}");
                    }
                    Err(if again { now + AGAIN } else { NEVER })
                }
            };
            remote.wraps = Some((hop, number));
            gateway.encapsulated_by_nic(index, number.ok());
        }
    }
}

/// Has the NIC take off what comes from a remote.
fn open(
    gateway: &mut GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    index: usize,
    tunnel: &Tunnel,
) {
    // Over IPv6 a datagram without checksum is refused (RFC 8200 section 8.1), and a NIC says nothing of that afterwards.
    if tunnel.remote.is_ipv6() {
        return;
    }
    let us = gateway.mac();
    let hop = |_: IpAddr| (us, us);
    let rule = decap(gateway.config(), tunnel.local, tunnel.remote, tunnel.vni, index as u32, &hop);
    // The configuration has been checked: it is a rule.
    if let Ok(rule) = rule {
        gateway.opened_by_nic();
        rules.own_decap(plane, rule, index as u32);
    }
}

/// Has the NIC put the header of a remote on: the number that says so, or why not, and whether it may another time.
fn wrap(
    gateway: &GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    port: PortId,
    tunnel: &Tunnel,
    hop: MacAddr,
) -> Result<u32, (String, bool)> {
    let (config, us) = (gateway.config(), gateway.mac());
    let never = |why: &str| Err((why.to_owned(), false));
    if config.underlay.source_ports != ALL_PORTS {
        return never("the NIC chooses source ports from all dynamic ones");
    }
    let hops = |_: IpAddr| (us, hop);
    let rule = match encap(config, tunnel.local, tunnel.remote, tunnel.vni, 0, &hops) {
        Ok(Some(rule)) => rule,
        Ok(None) => return never("the outer DSCP is that of each packet"),
        Err(error) => return never(&error.to_string()),
    };
    match rule.actions().first() {
        Some(Action::Reformat(header)) => {
            rules.own_encap(plane, port, header).map_err(|obstacle| (obstacle.to_string(), true))
        }
        _ => never("the rule has no header"),
    }
}

/// The source ports of tunnel packets unless others are configured (RFC 7348 section 5).
const ALL_PORTS: (u16, u16) = (49152, 65535);
