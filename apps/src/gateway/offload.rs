//! Offload of the gateway's tunnels to the NIC of the underlay.
//!
//! A NIC decapsulates only packets that the gateway would decapsulate: outer lengths and checksums must be
//! valid, and the VXLAN header must have the I flag. All other packets reach the gateway unchanged, which
//! drops them with a reason. One exception: the NIC drops an inner frame that is too short without counting
//! it. A NIC that cannot check these conditions does not decapsulate.
//!
//! The gateway produces the same packets in software. It handles everything that the NIC does not handle:
//! packets with a congestion mark, other remotes, and frames that are too long.

use std::net::IpAddr;

use wirepath_flow::{Action, Direction, Field, Key, Rule};
use wirepath_packet::PortId;
use wirepath_pipeline::ControlPlane;
use wirepath_pipeline::rules::RuleControl;
use wirepath_pipeline::tunnel::{GatewayControl, Tunnel};
use wirepath_wire::MacAddr;

use super::GatewayMonitor;
use crate::rules::{decap_rule, encap_rule};

/// State of each remote in the NIC.
#[derive(Debug, Default)]
pub struct NicTunnels {
    remotes: Vec<Remote>,
    /// Number of times that devices lost their state, as of the last check.
    encap_losses: u64,
    /// Time of the last check in nanoseconds.
    checked_at: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Remote {
    decap: bool,
    /// Next hop in the header and the header's number in the NIC. `Err`: the NIC rejected the header, with
    /// the time of the next attempt.
    encap: Option<(MacAddr, Result<u32, u64>)>,
}

/// Nanoseconds between two checks of the remotes.
const CHECK_INTERVAL: u64 = 100_000_000;
/// Nanoseconds between a rejection by the NIC and the next attempt.
const RETRY_INTERVAL: u64 = 1_000_000_000;
/// Time of the next attempt if the configuration prevents the offload, which never changes.
const NEVER: u64 = u64::MAX;

/// Installs new tunnels in the NIC and removes outdated ones. Called on every tick.
pub fn update_nic_tunnels(reporting: &mut GatewayMonitor, rules: &mut RuleControl, plane: &mut ControlPlane) {
    let GatewayMonitor { gateway, offload, .. } = reporting;
    let port = PortId::new(gateway.config().underlay.port as u16);
    let now = plane.now();
    if !rules.hardware().has(port) || now < offload.checked_at + CHECK_INTERVAL {
        return;
    }
    offload.checked_at = now;
    if offload.encap_losses != rules.hardware().encap_losses() {
        offload.encap_losses = rules.hardware().encap_losses();
        for (index, remote) in offload.remotes.iter_mut().enumerate() {
            gateway.encapsulated_by_nic(index, None);
            if let Some((_, Ok(number))) = remote.encap.take() {
                rules.remove_implicit_encap(plane, port, number);
            }
        }
    }
    // Egress rules see packets as they leave, so those packets must be encapsulated in software.
    let leaves =
        |rule: &Rule| rule.fields().get(Key::field(0, Field::PortId)).is_none_or(|it| it.matches(port.number().into()));
    let watched = rules.rules().any(|(_, rule)| rule.direction() == Direction::Egress && leaves(rule));
    let mut tunnels: Vec<Tunnel> = gateway.tunnels().collect();
    if watched {
        tunnels.iter_mut().for_each(|tunnel| tunnel.next_hop = None);
    }
    offload.remotes.resize(tunnels.len(), Remote::default());
    for (index, (tunnel, remote)) in tunnels.iter().zip(&mut offload.remotes).enumerate() {
        if !remote.decap {
            remote.decap = true;
            install_decap(gateway, rules, plane, index, tunnel);
        }
        if let Some((hop, number)) = remote.encap
            && Some(hop) != tunnel.next_hop
        {
            gateway.encapsulated_by_nic(index, None);
            number.into_iter().for_each(|number| rules.remove_implicit_encap(plane, port, number));
            remote.encap = None;
        }
        let due = remote.encap.is_none_or(|(_, number)| number.is_err_and(|again| again <= now));
        if let Some(hop) = tunnel.next_hop.filter(|_| due) {
            let (to, vni) = (tunnel.remote, tunnel.vni);
            let number = match install_encap(gateway, rules, plane, port, tunnel, hop) {
                Ok(number) => {
                    tracing::info!("tunnel to {to} (VNI {vni}): the NIC encapsulates");
                    Ok(number)
                }
                Err((why, again)) => {
                    // The reason is logged only once.
                    if remote.encap.is_none() {
                        tracing::info!("tunnel to {to} (VNI {vni}): the workers encapsulate: {why}");
                    }
                    Err(if again { now + RETRY_INTERVAL } else { NEVER })
                }
            };
            remote.encap = Some((hop, number));
            gateway.encapsulated_by_nic(index, number.ok());
        }
    }
}

/// Installs decapsulation of the packets from a remote.
fn install_decap(
    gateway: &mut GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    index: usize,
    tunnel: &Tunnel,
) {
    // Over IPv6 a datagram without a checksum must be dropped (RFC 8200 section 8.1), but a NIC does not
    // report a missing checksum after decapsulation.
    if tunnel.remote.is_ipv6() {
        return;
    }
    let us = gateway.mac();
    let hop = |_: IpAddr| (us, us);
    let rule = decap_rule(gateway.config(), tunnel.local, tunnel.remote, tunnel.vni, index as u32, &hop);
    // The configuration was checked, so the rule is valid.
    if let Ok(rule) = rule {
        gateway.decapsulated_by_nic();
        rules.add_implicit_decap(plane, rule, index as u32);
    }
}

/// Installs the outer header of a remote in the NIC. Returns its number, or the reason for the rejection and
/// whether to retry.
fn install_encap(
    gateway: &GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    port: PortId,
    tunnel: &Tunnel,
    hop: MacAddr,
) -> Result<u32, (String, bool)> {
    let (config, us) = (gateway.config(), gateway.mac());
    let never = |why: &str| Err((why.to_owned(), false));
    if config.underlay.source_ports != DYNAMIC_PORTS {
        return never("the NIC chooses source ports from all dynamic ones");
    }
    let hops = |_: IpAddr| (us, hop);
    let rule = match encap_rule(config, tunnel.local, tunnel.remote, tunnel.vni, 0, &hops) {
        Ok(Some(rule)) => rule,
        Ok(None) => return never("the outer DSCP is that of each packet"),
        Err(error) => return never(&error.to_string()),
    };
    match rule.actions().first() {
        Some(Action::Reformat(header)) => {
            rules.add_implicit_encap(plane, port, header).map_err(|obstacle| (obstacle.to_string(), true))
        }
        _ => never("the rule has no header"),
    }
}

/// Default range of source ports (RFC 7348 section 5).
const DYNAMIC_PORTS: (u16, u16) = (49152, 65535);
