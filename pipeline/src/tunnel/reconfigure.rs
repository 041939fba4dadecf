//! Changes of a gateway's configuration while its workers forward.
//!
//! Segments are identified by kind of tunnel and VNI or SID, those without both by kind and name. Attachments are
//! identified by port and VLAN, remotes by address. What stays keeps its index in the tables ([`super::places`]), its
//! forwarding entries, counters and next hop, so its packets do not notice the change. The workers see the new segments
//! and the new remotes at two moments, one shortly after the other. In between, only parts that the change adds or
//! removes can lose packets.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};

use wirepath_wire::MacAddr;

use super::config::{GatewayConfig, SegmentConfig, StaticDestination, UnderlayConfig};
use super::control::{GatewayControl, Route};
use super::learned::LEARNED_REMOTES;
use super::outer::TunnelId;
use super::places::{Places, SegmentPlace};
use super::router::config::HopConfig;
use super::router::router_macs;
use super::tables::{Destination, Layout, NextHop, Remote, put};
use crate::PortInfo;
use crate::table::Key;

/// A change of the configuration that was checked and is not carried out yet.
#[derive(Debug)]
pub struct Reconfiguration {
    config: GatewayConfig,
    places: Places,
}

/// A static entry: its key and its destination in forwarding tables.
pub(super) type Statics = HashMap<Key, u32>;

impl GatewayControl {
    /// Checks that the gateway can change to this configuration, which has passed all checks of
    /// [`GatewayConfig::read`] and fits the ports. Changes nothing. `seconds` is the current second.
    ///
    /// # Errors
    /// The reason why the gateway must be started anew for this configuration, or has no room for it.
    pub fn prepare(&self, mut config: GatewayConfig, seconds: u32) -> Result<Reconfiguration, String> {
        self.external.complete(&mut config);
        let (old, new) = (&self.config.underlay, &config.underlay);
        let fixed = [
            ("port", old.port == new.port),
            ("kind", old.kind == new.kind),
            ("udp_port", old.udp_port == new.udp_port),
        ];
        if let Some((key, _)) = fixed.iter().find(|(_, same)| !same) {
            return Err(format!("underlay.{key} cannot change while the program runs; start it anew"));
        }
        let of_index = |index| Some((self.list.get(index as usize)?, index));
        let learned: HashMap<(u16, IpAddr), u32> = (self.learned.indices().filter_map(of_index))
            .map(|(remote, index)| ((remote.segment, remote.address), index))
            .collect();
        let learned = |segment, address| learned.get(&(segment, address)).copied();
        let places = self.places.after(&self.config, &config, learned, seconds)?;
        // Static entries take the room of learned ones.
        if statics(&config, &places, self.layout.underlay.mac).len() > self.fdb.limits().entries {
            return Err("the forwarding table has no room for the static entries".to_owned());
        }
        Ok(Reconfiguration { config, places })
    }

    /// Carries out a change. Nothing may have changed since [`Self::prepare`]. `ports` are the configured ports.
    pub fn reconfigure(&mut self, change: Reconfiguration, ports: &[PortInfo], seconds: u32) {
        self.install_change(change, ports, seconds);
        self.place_all_external(seconds);
    }

    /// Carries out a change without the addresses from another control plane.
    pub(super) fn install_change(&mut self, change: Reconfiguration, ports: &[PortInfo], seconds: u32) {
        self.install(change.config, change.places, ports, seconds);
    }

    /// Takes over a configuration and the indices of its parts.
    pub(super) fn install(&mut self, config: GatewayConfig, places: Places, ports: &[PortInfo], now: u32) {
        let mac = self.layout.underlay.mac;
        let old_statics = self.statics();
        let old_ageing: HashMap<u16, u32> = ageing(&self.config, &self.places).collect();
        let (before, after) = (&self.config.underlay, &config.underlay);
        let addresses_changed = (&before.addresses, &before.gateways) != (&after.addresses, &after.gateways);
        let sids_changed = !config.local_sids().eq(self.config.local_sids());
        let templates_changed =
            templates_differ(&self.config.underlay, &config.underlay) || options_differ(&self.config, &config);
        self.config = config;
        let old_places = std::mem::replace(&mut self.places, places);
        self.update_followed_segments();
        if addresses_changed {
            let underlay = &self.config.underlay;
            self.next_hops.set_addresses(underlay.addresses.clone(), underlay.gateways.clone());
        }
        if sids_changed {
            self.next_hops.set_sids(self.config.local_sids());
        }
        self.underlay_version += u64::from(templates_changed);
        let (gone, back) = self.bfd.install(&self.config, &self.places, &self.next_hops);

        let removed = self.remove_parts(&old_places);
        let promoted: Vec<u32> = self.places.remotes().filter(|index| self.learned.contains(*index)).collect();
        promoted.iter().for_each(|index| self.learned.promote(*index));

        let mut layout = Layout::clone(&self.layout);
        let vrfs = self.router.number_vrfs(&self.config, now);
        self.filters.install(&self.config, &self.places, &vrfs, now);
        layout.update(&self.config, &self.places, &vrfs, &self.filters, ports, self.workers);
        self.bfd.trim(&mut layout, &self.config, &self.places);
        self.publish_layout(layout);
        self.place_remotes(templates_changed);
        // Nothing resolved their next hops for them while they were learned.
        promoted.into_iter().for_each(|index| self.refresh_remote(index));
        self.remove_lost_learned(&removed.segments, now);
        self.forget_unused_paths();
        self.update_max_frames(|_| true);
        self.update_next_hops();
        self.publish();
        self.publish_known_hosts();

        if !removed.segments.is_empty() || !removed.destinations.is_empty() {
            self.move_damping.forget_all(|key| removed.segments.contains(&key.segment()));
            self.fdb.remove_all(|entry| {
                removed.segments.contains(&entry.key.segment())
                    || entry.seen.is_some() && removed.destinations.contains(&entry.destination)
            });
        }
        self.update_statics(&old_statics, now);
        self.router.install(&self.config, &self.places, &vrfs, mac, now);
        self.finish_bfd(&gone, &back);
        self.publish();
        self.sync_bindings();
        let changed: Vec<(u16, u32)> = ageing(&self.config, &self.places)
            .filter(|(segment, seconds)| old_ageing.get(segment) != Some(seconds))
            .collect();
        self.fdb.set_ageing(changed);
        self.reset_learn_stats(&old_places);
        self.install_external();
    }

    /// Gives captures the index that the segment of their name has now. A capture whose segment was removed ends, so
    /// it does not follow a later segment of that name.
    fn update_followed_segments(&mut self) {
        let mut followed = std::mem::take(&mut self.followed_segments);
        followed.retain(|(name, segment)| {
            segment.set_index(self.segment_index(name).ok());
            segment.is_shared() && !segment.is_removed()
        });
        self.followed_segments = followed;
    }

    /// Returns what the new configuration lacks.
    fn remove_parts(&mut self, old: &Places) -> Removed {
        let mut removed = Removed::default();
        let now: HashMap<u16, &SegmentPlace> = self.places.segments.iter().map(|place| (place.index, place)).collect();
        for place in &old.segments {
            let stays = now.get(&place.index);
            if stays.is_none() {
                removed.segments.insert(place.index);
            }
            let kept: HashSet<u32> = stays.iter().flat_map(|place| place.remotes.iter().copied()).collect();
            for index in place.remotes.iter().filter(|index| !kept.contains(index)) {
                removed.destinations.insert(Destination::Remote(*index).pack());
                if let (Some(remote), Some(route)) =
                    (self.list.get_mut(*index as usize), self.routes.get_mut(*index as usize))
                {
                    if let Some(next_hop) = route.next_hop {
                        self.next_hops.discard(next_hop, *index);
                    }
                    (remote.address, remote.next_hop) = (Ipv4Addr::UNSPECIFIED.into(), NextHop::Unreachable);
                    (route.next_hop, route.mac) = (None, None);
                }
            }
            let kept: HashSet<u32> = stays.iter().flat_map(|place| place.attachments.iter().copied()).collect();
            let attachments = place.attachments.iter().filter(|index| !kept.contains(index));
            removed.destinations.extend(attachments.map(|index| Destination::Attachment(*index).pack()));
        }
        removed
    }

    /// Brings the configured remotes and their routes up to date, except for [`Remote::max_frame`].
    fn place_remotes(&mut self, templates_changed: bool) {
        let Self { config, places, list, routes, next_hops, learned, .. } = self;
        let mut changed = Vec::new();
        for (segment, place) in config.segments.iter().zip(&places.segments) {
            for (remote, index) in segment.remotes.iter().zip(&place.remotes) {
                let at = *index as usize;
                let next_hop = next_hops.next_hop(segment.destination(remote.address));
                let same = |it: &Remote| it.address == remote.address && it.segment == place.index;
                let known = list.get(at).is_some_and(same);
                if let (Some(it), Some(route), true) = (list.get_mut(at), routes.get_mut(at), known) {
                    it.sequence = segment.new_sequence().map(|new| it.sequence.take().unwrap_or(new));
                    if route.local != remote.local || route.next_hop != next_hop || templates_changed {
                        (route.local, route.next_hop) = (remote.local, next_hop);
                        changed.push(*index);
                    }
                    continue;
                }
                let new = Remote::new(remote.address, place.index, 0, Some(segment));
                let route = Route::new(remote.local, next_hop);
                put(list, at, new);
                put(routes, at, route);
                changed.push(*index);
            }
        }
        for index in learned.indices() {
            let Some(remote) = list.get_mut(index as usize) else { continue };
            let segment = places.position(remote.segment).and_then(|at| config.segments.get(at));
            let sequence = segment.and_then(SegmentConfig::new_sequence);
            remote.sequence = sequence.map(|new| remote.sequence.take().unwrap_or(new));
            changed.extend(templates_changed.then_some(index));
        }
        for index in changed {
            self.refresh_remote(index);
        }
        self.dirty = true;
    }

    /// Writes the outer headers of a remote anew. A learned remote has none before a frame had to be sent to it.
    pub(super) fn refresh_remote(&mut self, index: u32) {
        let is_used = !self.learned.contains(index) || self.learned.is_contacted(index);
        let next_hop = self.routes.get(index as usize).and_then(|route| route.next_hop).filter(|_| is_used);
        let state = next_hop.and_then(|next_hop| self.next_hops.state(next_hop));
        let mac = next_hop.and_then(|next_hop| self.next_hops.mac(next_hop));
        self.set_remote_state(index, mac, state);
        if next_hop.is_some_and(|next_hop| self.next_hops.is_held(next_hop))
            && let Some(Remote { next_hop, .. }) = self.list.get_mut(index as usize)
            && let NextHop::Ready(template) = *next_hop
        {
            *next_hop = NextHop::Held(template, None);
        }
    }

    /// Removes learned remotes that the configuration does not allow any more, and updates the others.
    fn remove_lost_learned(&mut self, removed: &HashSet<u16>, now: u32) {
        let learned: Vec<u32> = self.learned.indices().collect();
        // Of segments without identifier, another one may have the remote now.
        let without_id = self.config.segments.iter().filter(|it| it.vni.is_none() && it.sids().is_none());
        let configured: HashSet<(TunnelId, IpAddr)> =
            without_id.flat_map(|it| it.remotes.iter().map(|remote| (it.tunnel_id(), remote.address))).collect();
        for index in learned {
            let Some((address, segment)) = self.list.get(index as usize).map(|it| (it.address, it.segment)) else {
                continue;
            };
            let settings = self.segment_config(segment).filter(|_| !removed.contains(&segment));
            let accepts = |settings: &&SegmentConfig| {
                settings.accept_unknown_remotes && !configured.contains(&(settings.tunnel_id(), address))
            };
            let local = settings.filter(accepts).and_then(|settings| {
                settings.locals.iter().copied().find(|local| local.is_ipv4() == address.is_ipv4())
            });
            let destination = settings.map_or(address, |settings| settings.destination(address));
            let next_hop = self.next_hops.next_hop(destination);
            let (Some(local), true, true) = (local, next_hop.is_some(), self.layout.underlay.can_be_remote(address))
            else {
                self.remove_remote(index, now);
                continue;
            };
            let Some(route) = self.routes.get_mut(index as usize) else { continue };
            if (route.local, route.next_hop) != (local, next_hop) {
                (route.local, route.next_hop) = (local, next_hop);
                self.refresh_remote(index);
            }
        }
    }

    /// Finds the next hops anew. New ones are resolved in the next ticks, unused ones are forgotten.
    fn update_next_hops(&mut self) {
        let pair = |index: u32| Some((self.routes.get(index as usize)?.next_hop?, index));
        let pairs = self.places.remotes().chain(self.learned.contacted()).filter_map(pair);
        self.next_hops.set_users(pairs, LEARNED_REMOTES);
    }

    /// Returns the static entries in force. Those of a remote that is down are behind its backup.
    pub(super) fn statics(&self) -> Statics {
        let mut statics = statics(&self.config, &self.places, self.layout.underlay.mac);
        statics.values_mut().for_each(|destination| *destination = self.bfd.place(*destination));
        statics
    }

    /// Brings the static entries up to date.
    pub(super) fn update_statics(&mut self, old: &Statics, now: u32) {
        let new = self.statics();
        for key in old.keys().filter(|key| !new.contains_key(key)) {
            self.fdb.remove(*key);
        }
        for (key, destination) in new {
            if old.get(&key) == Some(&destination) {
                continue;
            }
            if let Some(Destination::Remote(index)) = self.fdb.get(key).map(|it| Destination::unpack(it.destination)) {
                self.learned.remove_key(index, key, now);
            }
            if !self.fdb.insert_static(key, destination) {
                tracing::warn!("the forwarding table has no room for the static entry {}", key.mac());
            }
        }
    }

    /// Gives new segments counters that begin at zero.
    fn reset_learn_stats(&mut self, old: &Places) {
        let old: HashSet<u16> = old.segments.iter().map(|place| place.index).collect();
        for place in &self.places.segments {
            let at = usize::from(place.index);
            self.learns.resize(self.learns.len().max(at + 1), Default::default());
            if !old.contains(&place.index) {
                self.learns[at] = Default::default();
            }
        }
    }
}

/// Parts that a new configuration lacks.
#[derive(Debug, Default)]
struct Removed {
    segments: HashSet<u16>,
    /// Attachments and configured remotes, as in forwarding tables.
    destinations: HashSet<u32>,
}

/// Returns the static entries of a configuration: the configured ones, those of the segments' routers, and those of the
/// routers behind remotes. `mac` is the Ethernet address of the underlay port.
fn statics(config: &GatewayConfig, places: &Places, mac: MacAddr) -> Statics {
    let of_segment = |(segment, place): (&SegmentConfig, &SegmentPlace)| -> Vec<(Key, u32)> {
        let destination = |to: &StaticDestination| match to {
            StaticDestination::Remote(i) => place.remotes.get(*i).map(|index| Destination::Remote(*index)),
            StaticDestination::Attachment(i) => place.attachments.get(*i).map(|index| Destination::Attachment(*index)),
        };
        let entry =
            |(mac, to): &(MacAddr, StaticDestination)| Some((Key::new(place.index, *mac), destination(to)?.pack()));
        segment.statics.iter().filter_map(entry).collect()
    };
    let configured = config.segments.iter().zip(&places.segments).flat_map(of_segment);
    let far = config.routing.next_hops().filter_map(|hop| match *hop {
        HopConfig::Router { segment, remote, mac } => {
            let place = places.segments.get(segment)?;
            Some((Key::new(place.index, mac), Destination::Remote(*place.remotes.get(remote)?).pack()))
        }
        HopConfig::Neighbour { .. } => None,
    });
    let own =
        router_macs(config, places, mac).map(|(segment, mac)| (Key::new(segment, mac), Destination::Router.pack()));
    configured.chain(far).chain(own).collect()
}

/// Returns the ageing time of each segment, by its index.
fn ageing(config: &GatewayConfig, places: &Places) -> impl Iterator<Item = (u16, u32)> {
    config.segments.iter().zip(&places.segments).map(|(segment, place)| (place.index, segment.ageing))
}

/// Returns whether the options in the tunnel headers of a segment change.
fn options_differ(old: &GatewayConfig, new: &GatewayConfig) -> bool {
    let options: HashMap<_, _> = old.segments.iter().map(|it| (it.identity(), &it.options)).collect();
    new.segments.iter().any(|it| options.get(&it.identity()).is_some_and(|old| **old != it.options))
}

/// Returns whether the outer headers of all tunnels change.
fn templates_differ(old: &UnderlayConfig, new: &UnderlayConfig) -> bool {
    (old.vlan, old.ttl, old.dscp, old.checksum, old.source_ports)
        != (new.vlan, new.ttl, new.dscp, new.checksum, new.source_ports)
}
