//! Offload of the gateway's tunnels to the NIC of the underlay.
//!
//! A NIC decapsulates only packets that the gateway would decapsulate: outer lengths and checksums must be valid, and
//! the tunnel header must be one that the gateway accepts. All other packets reach the gateway unchanged, which drops
//! them with a reason. One exception: the NIC drops an inner frame that is too short without counting it. A NIC that
//! cannot check these conditions does not decapsulate.
//!
//! The gateway produces the same packets in software. It handles everything that the NIC does not handle:
//! packets with a congestion mark, other remotes, and frames that are too long.

use std::collections::HashMap;
use std::net::IpAddr;

use wirepath_flow::{Action, Direction, Field, Key, Rule};
use wirepath_packet::PortId;
use wirepath_pipeline::ControlPlane;
use wirepath_pipeline::rules::RuleControl;
use wirepath_pipeline::tunnel::{GatewayControl, Tunnel};
use wirepath_wire::MacAddr;

use super::GatewayMonitor;
use super::rules::{decap_rule, encap_rule};

/// State of the tunnels in the NIC.
#[derive(Debug, Default)]
pub struct NicTunnels {
    /// By the index of the tunnel.
    tunnels: HashMap<u32, NicTunnel>,
    /// [`GatewayControl::underlay_version`] of the last check.
    underlay_version: u64,
    /// Number of times that devices lost their state, as of the last check.
    encap_losses: u64,
    /// Time of the last check in nanoseconds.
    checked_at: u64,
}

/// A tunnel that the NIC decapsulates.
#[derive(Clone, Copy, Debug)]
struct NicTunnel {
    /// As installed.
    tunnel: Tunnel,
    /// Number of the header in the NIC; `None`: nothing was installed. `Err`: the NIC rejected the header, with the
    /// time of the next attempt.
    encap: Option<Result<u32, u64>>,
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
    let losses = rules.hardware().encap_losses();
    let lost = std::mem::replace(&mut offload.encap_losses, losses) != losses;
    // Egress rules see packets as they leave, so those packets must be encapsulated in software.
    let leaves =
        |rule: &Rule| rule.fields().get(Key::field(0, Field::PortId)).is_none_or(|it| it.matches(port.number().into()));
    let watched = rules.rules().any(|(_, rule)| rule.direction() == Direction::Egress && leaves(rule));
    let mut tunnels: HashMap<u32, Tunnel> = gateway.tunnels().map(|tunnel| (tunnel.index, tunnel)).collect();
    if watched {
        tunnels.values_mut().for_each(|tunnel| tunnel.next_hop = None);
    }
    let version = gateway.underlay_version();
    let changed = std::mem::replace(&mut offload.underlay_version, version) != version;
    // Headers that no tunnel uses any more. Workers must not send with their numbers when they are removed.
    let mut unused = Vec::new();
    offload.tunnels.retain(|index, it| {
        let tunnel = tunnels.get(index).filter(|tunnel| !changed && has_same_ends(tunnel, &it.tunnel));
        if lost || tunnel != Some(&it.tunnel) {
            gateway.encapsulated_by_nic(*index as usize, None);
            unused.extend(it.encap.take().and_then(Result::ok));
        }
        match tunnel {
            Some(tunnel) => it.tunnel = *tunnel,
            None => rules.remove_implicit_decap(plane, *index),
        }
        tunnel.is_some()
    });
    gateway.publish_nic_tunnels();
    unused.into_iter().for_each(|number| rules.remove_implicit_encap(plane, port, number));
    for (index, tunnel) in tunnels {
        let it = offload.tunnels.entry(index).or_insert_with(|| {
            install_decap(gateway, rules, plane, &tunnel);
            NicTunnel { tunnel, encap: None }
        });
        let due = it.encap.is_none_or(|number| number.is_err_and(|again| again <= now));
        if let Some(hop) = tunnel.next_hop.filter(|_| due) {
            let (to, id) = (tunnel.remote, tunnel.id);
            let number = match install_encap(gateway, rules, plane, port, &tunnel, hop) {
                Ok(number) => {
                    tracing::info!("tunnel to {to} ({id}): the NIC encapsulates");
                    Ok(number)
                }
                Err((why, again)) => {
                    // The reason is logged only once.
                    if it.encap.is_none() {
                        tracing::info!("tunnel to {to} ({id}): the workers encapsulate: {why}");
                    }
                    Err(if again { now + RETRY_INTERVAL } else { NEVER })
                }
            };
            it.encap = Some(number);
            gateway.encapsulated_by_nic(index as usize, number.ok());
        }
    }
    gateway.publish_nic_tunnels();
}

/// Returns whether two tunnels differ in nothing that the NIC compares when it decapsulates.
fn has_same_ends(one: &Tunnel, other: &Tunnel) -> bool {
    (one.id, one.local, one.remote) == (other.id, other.local, other.remote)
}

/// Installs decapsulation of the packets from a remote.
fn install_decap(gateway: &mut GatewayControl, rules: &mut RuleControl, plane: &mut ControlPlane, tunnel: &Tunnel) {
    // Over IPv6 a datagram without a checksum must be dropped (RFC 8200 section 8.1), but a NIC does not
    // report a missing checksum after decapsulation.
    if tunnel.remote.is_ipv6() {
        return;
    }
    let us = gateway.mac();
    let hop = |_: IpAddr| (us, us);
    let config = gateway.config();
    let Some(segment) = config.segment(tunnel.id, tunnel.remote) else { return };
    let rule = decap_rule(config, segment, (tunnel.local, tunnel.remote), tunnel.index, &hop);
    // The configuration was checked, so the rule is valid.
    if let Ok(Some(rule)) = rule {
        gateway.decapsulated_by_nic();
        rules.add_implicit_decap(plane, rule, tunnel.index);
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
    let Some(segment) = config.segment(tunnel.id, tunnel.remote) else { return never("the segment was removed") };
    let rule = match encap_rule(config, segment, (tunnel.local, tunnel.remote), 0, &hops) {
        Ok(Some(rule)) => rule,
        Ok(None) => return never("fields of the headers differ from packet to packet"),
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
