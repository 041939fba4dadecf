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

use wirepath_flow::{Direction, Field, Key, Ports, Rule};
use wirepath_packet::PortId;
use wirepath_pipeline::ControlPlane;
use wirepath_pipeline::registry::TableSpec;
use wirepath_pipeline::rules::RuleControl;
use wirepath_pipeline::rules::offload::{Obstacle, Placement};
use wirepath_pipeline::tunnel::{GatewayControl, NicNumbers, Tunnel, TunnelPlacement};
use wirepath_wire::MacAddr;

use super::GatewayMonitor;
use super::rules::{decap_rules, encap_headers};

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
    /// An egress rule that may match tunnel packets, as of the last check.
    watcher: Option<String>,
    /// True if [`report_nic_tunnels`] has told the places since the last check.
    reported: bool,
}

/// A tunnel that the NIC decapsulates.
#[derive(Clone, Debug)]
struct NicTunnel {
    /// As installed.
    tunnel: Tunnel,
    /// The reason if no rule decapsulates.
    decap: Result<(), Obstacle>,
    /// Numbers of the headers in the NIC; `None`: nothing was installed.
    encap: Option<Result<NicNumbers, Rejection>>,
}

/// A header that the NIC rejected.
#[derive(Clone, Debug)]
struct Rejection {
    obstacle: Obstacle,
    /// Time of the next attempt.
    retry_at: u64,
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
    // What follows may change the places of tunnels.
    offload.reported = false;
    let losses = rules.hardware().encap_losses();
    let lost = std::mem::replace(&mut offload.encap_losses, losses) != losses;
    // Egress rules see packets as they leave, so those packets must be encapsulated in software.
    let leaves =
        |rule: &Rule| rule.fields().get(Key::field(0, Field::PortId)).is_none_or(|it| it.matches(port.number().into()));
    let watcher = rules.rules().find(|(_, rule)| rule.direction() == Direction::Egress && leaves(rule));
    offload.watcher = watcher.map(|(_, rule)| {
        let names: Vec<(&str, PortId)> = plane.ports().iter().map(|port| (port.name.as_str(), port.id)).collect();
        rule.named(Ports(&names)).to_string()
    });
    let mut tunnels: HashMap<u32, Tunnel> = gateway.tunnels().map(|tunnel| (tunnel.index, tunnel)).collect();
    if offload.watcher.is_some() {
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
            unused.extend(it.encap.take().and_then(Result::ok).into_iter().flat_map(NicNumbers::all));
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
            let decap = install_decap(gateway, rules, plane, &tunnel);
            NicTunnel { tunnel, decap, encap: None }
        });
        if let (Some(Ok(numbers)), Some(_)) = (&it.encap, tunnel.next_hop) {
            // BFD may have taken the remote out and back since the last check.
            gateway.restore_nic_numbers(index as usize, *numbers);
        }
        let due = it.encap.as_ref().is_none_or(|it| it.as_ref().is_err_and(|rejection| rejection.retry_at <= now));
        if let Some(hop) = tunnel.next_hop.filter(|_| due) {
            let (to, id) = (tunnel.remote, tunnel.id);
            let numbers = match install_encap(gateway, rules, plane, port, &tunnel, hop) {
                Ok(numbers) => {
                    tracing::info!("tunnel to {to} ({id}): the NIC encapsulates");
                    Ok(numbers)
                }
                Err((obstacle, again)) => {
                    // The reason is logged only once.
                    if it.encap.is_none() {
                        tracing::info!("tunnel to {to} ({id}): the workers encapsulate: {}", obstacle.why);
                    }
                    Err(Rejection { obstacle, retry_at: if again { now + RETRY_INTERVAL } else { NEVER } })
                }
            };
            gateway.encapsulated_by_nic(index as usize, numbers.as_ref().ok().copied());
            it.encap = Some(numbers);
        }
    }
    gateway.publish_nic_tunnels();
}

/// Gives the gateway the place of each tunnel, before it lists its remotes. A listing has many pages.
pub fn report_nic_tunnels(
    reporting: &mut GatewayMonitor,
    rules: &RuleControl,
    table: &'static TableSpec,
    _: &ControlPlane,
) {
    let GatewayMonitor { gateway, offload, .. } = reporting;
    if table.name != "remotes" || offload.reported {
        return;
    }
    offload.reported = true;
    let port = PortId::new(gateway.config().underlay.port as u16);
    let of_tunnel = |(index, it): (&u32, &NicTunnel)| {
        let encap = match (&it.encap, &offload.watcher) {
            (Some(Ok(_)), _) => Ok(()),
            (Some(Err(rejection)), _) => Err(rejection.obstacle.clone()),
            (None, Some(rule)) => Err(encap_obstacle(&format!("an egress rule sees packets as they leave: {rule}"))),
            (None, None) => Err(encap_obstacle("the next hop is not resolved, or BFD keeps the remote out")),
        };
        let encap = encap.map_or_else(Placement::Software, |()| Placement::Hardware(None));
        let missing = || decap_obstacle("the rule is not in the NIC");
        let placement = |()| rules.implicit_decap_placement(port, *index).ok_or_else(missing);
        let decap = it.decap.clone().and_then(placement).unwrap_or_else(Placement::Software);
        (*index, TunnelPlacement { encap, decap })
    };
    let placements = rules.hardware().has(port).then(|| offload.tunnels.iter().map(of_tunnel).collect());
    gateway.set_nic_placements(placements);
}

fn encap_obstacle(why: &str) -> Obstacle {
    Obstacle { what: "encap".to_owned(), why: why.to_owned() }
}

fn decap_obstacle(why: &str) -> Obstacle {
    Obstacle { what: "decap".to_owned(), why: why.to_owned() }
}

/// Returns whether two tunnels differ in nothing that the NIC compares when it decapsulates.
fn has_same_ends(one: &Tunnel, other: &Tunnel) -> bool {
    (one.id, one.local, one.remote, one.mac) == (other.id, other.local, other.remote, other.mac)
}

/// Installs decapsulation of the packets from a remote. The error is the reason why there is no rule for it.
fn install_decap(
    gateway: &mut GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    tunnel: &Tunnel,
) -> Result<(), Obstacle> {
    let us = gateway.mac();
    let hop = |_: IpAddr| (us, us);
    let config = gateway.config();
    let Some(segment) = config.segment(tunnel.id, tunnel.remote) else { return Err(decap_obstacle(REMOVED)) };
    match decap_rules(config, segment, (tunnel.local, tunnel.remote), tunnel.index, &hop) {
        Ok(decaps) => {
            gateway.decapsulated_by_nic();
            decaps.into_iter().for_each(|rule| rules.add_implicit_decap(plane, rule, tunnel.index));
            Ok(())
        }
        Err(why) => {
            tracing::info!("tunnel from {} ({}): the workers decapsulate: {why}", tunnel.remote, tunnel.id);
            Err(decap_obstacle(&why))
        }
    }
}

const REMOVED: &str = "the segment was removed";

/// Installs the outer headers of a remote in the NIC. Returns their numbers, or the reason for the rejection and
/// whether to retry.
fn install_encap(
    gateway: &GatewayControl,
    rules: &mut RuleControl,
    plane: &mut ControlPlane,
    port: PortId,
    tunnel: &Tunnel,
    hop: MacAddr,
) -> Result<NicNumbers, (Obstacle, bool)> {
    let (config, us) = (gateway.config(), gateway.mac());
    let hops = |_: IpAddr| (us, hop);
    let segment = config.segment(tunnel.id, tunnel.remote).ok_or_else(|| (encap_obstacle(REMOVED), false))?;
    let headers = encap_headers(config, segment, (tunnel.local, tunnel.remote), &hops)
        .map_err(|why| (encap_obstacle(&why), false))?;
    let mut numbers: Option<NicNumbers> = None;
    for (_, encap) in &headers {
        match rules.add_implicit_encap(plane, port, encap) {
            // The second header is that of inner IPv6 packets.
            Ok(ipv6) => numbers = Some(NicNumbers { ipv4: numbers.map_or(ipv6, |first| first.ipv4), ipv6 }),
            Err(obstacle) => {
                let installed = numbers.into_iter().flat_map(NicNumbers::all);
                installed.for_each(|number| rules.remove_implicit_encap(plane, port, number));
                return Err((obstacle, true));
            }
        }
    }
    numbers.ok_or_else(|| (encap_obstacle("there are no headers"), false))
}
