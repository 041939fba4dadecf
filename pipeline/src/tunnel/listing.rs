//! The tables of a gateway for operators.

use serde_json::Value;
use wirepath_flow::Ports;
use wirepath_pmd::port::PortId;

use super::bfd::{self, Out};
use super::bindings::BindingOrigin;
use super::config::{SegmentConfig, SegmentControl};
use super::control::GatewayControl;
use super::filter;
use super::groups::RemoteGroups;
use super::tables::{Destination, Layout, NextHop, Remote};
use crate::ControlPlane;
use crate::registry::{Column, Page, Row, TableSpec, Unit};
use crate::route::NetworkPrefix;
use crate::rules::offload::Placement;
use crate::table::FdbEntry;

/// The tables of a gateway.
pub(super) const TABLES: [&TableSpec; 8] =
    [&SEGMENTS, &FDB, &BINDINGS, &NEIGHBOURS, &REMOTES, &ROUTES, &bfd::TABLE, &filter::TABLE];

static SEGMENTS: TableSpec = TableSpec {
    name: "segments",
    about: "Segments with their traffic",
    metric: Some("segment"),
    columns: &[
        Column::key("segment", "Name of the segment"),
        Column::key("vni", "Network identifier in tunnel headers, if they have one"),
        Column::attribute("sid", "Local SID, of SRv6 segments"),
        Column::attribute("kind", "Kind of its tunnels"),
        Column::attribute("ports", "Attached ports, with their VLAN"),
        Column::gauge("remotes", Unit::None, "Configured and learned remotes"),
        Column::counter("local_rx_packets", Unit::Packets, "Frames received from local ports"),
        Column::counter("local_rx_bytes", Unit::Bytes, "Bytes of those frames"),
        Column::counter("local_tx_packets", Unit::Packets, "Frames sent to local ports"),
        Column::counter("local_tx_bytes", Unit::Bytes, "Bytes of those frames"),
        Column::counter("overlay_rx_packets", Unit::Packets, "Frames received from tunnels"),
        Column::counter("overlay_rx_bytes", Unit::Bytes, "Bytes of those frames, without tunnel headers"),
        Column::counter("overlay_tx_packets", Unit::Packets, "Frames sent into tunnels"),
        Column::counter("overlay_tx_bytes", Unit::Bytes, "Bytes of those frames, without tunnel headers"),
        Column::counter("flooded", Unit::Packets, "Replicated frames: broadcast, multicast and unknown unicast"),
        Column::counter("unknown_unicast", Unit::Packets, "Replicated unicast frames with an unknown destination"),
        Column::counter("too_big", Unit::Packets, "Frames too long for the underlay"),
        Column::counter("icmp_too_big", Unit::Packets, "ICMP messages sent about frames that were too long"),
        Column::counter("outer_fragments", Unit::Packets, "Fragments sent of tunnel packets too long for the path"),
        Column::counter("routed_in_packets", Unit::Packets, "Packets that the router took from the segment"),
        Column::counter("routed_in_bytes", Unit::Bytes, "Bytes of those packets with their Ethernet headers"),
        Column::counter("routed_out_packets", Unit::Packets, "Packets that the router sent in the segment"),
        Column::counter("routed_out_bytes", Unit::Bytes, "Bytes of those packets with their Ethernet headers"),
        Column::counter("icmp_errors", Unit::Packets, "ICMP errors that the router sent in the segment"),
        Column::counter("mss_clamped", Unit::Packets, "First segments of TCP connections whose MSS was lowered"),
        Column::counter("nic_encapsulated", Unit::Packets, "Frames whose outer headers the NIC added"),
        Column::counter("nic_decapsulated", Unit::Packets, "Frames whose outer headers the NIC removed"),
        Column::counter("learned", Unit::None, "Addresses learned"),
        Column::counter("moved", Unit::None, "Addresses that moved to another port or remote"),
        Column::counter("aged", Unit::None, "Addresses removed because they were not seen"),
        Column::counter("refused", Unit::None, "Addresses not learned because a limit was reached"),
        Column::counter("frozen", Unit::None, "Addresses that moved too often and stay where they are for a time"),
        Column::counter("moves_refused", Unit::None, "Moves of frozen addresses, or from a sticky place, not followed"),
        Column::gauge("bindings", Unit::None, "IP addresses that ARP and ND suppression knows"),
        Column::counter("bindings_refused", Unit::None, "IP addresses not learned because of a limit or a fixed one"),
        Column::counter("neighbour_replies", Unit::Packets, "ARP and ND requests answered instead of flooded"),
        Column::counter("mirrored", Unit::Packets, "Copies of frames sent to the mirror"),
        Column::counter("storm_broadcast", Unit::Packets, "Broadcast frames above their limit, dropped"),
        Column::counter("storm_multicast", Unit::Packets, "Multicast frames above their limit, dropped"),
        Column::counter("storm_unknown", Unit::Packets, "Unknown unicast frames above their limit, dropped"),
    ],
};

static FDB: TableSpec = TableSpec {
    name: "fdb",
    about: "Forwarding database: the places of Ethernet addresses",
    metric: None,
    columns: &[
        Column::key("segment", "Name of the segment"),
        Column::key("mac", "Ethernet address"),
        Column::attribute("to", "Port, with its VLAN, or remote, or router"),
        Column::attribute(
            "kind",
            "learned, static, external (from the kernel's tables), sticky or frozen; the last two do not move",
        ),
        Column::gauge("age", Unit::Seconds, "Time since the address was last seen as a source"),
    ],
};

static BINDINGS: TableSpec = TableSpec {
    name: "bindings",
    about: "IP addresses of the hosts in segments with neighbour suppression",
    metric: None,
    columns: &[
        Column::key("segment", "Name of the segment"),
        Column::key("address", "IP address of the host"),
        Column::attribute("mac", "Ethernet address of the host"),
        Column::attribute("origin", "learned, static, or external: from another protocol"),
        Column::attribute("router", "Router flag of its neighbour advertisements; empty if it is not known"),
        Column::gauge("age", Unit::Seconds, "Time since a message last confirmed the address"),
    ],
};

static NEIGHBOURS: TableSpec = TableSpec {
    name: "neighbours",
    about: "Next hops on the underlay, and neighbours of the segments' routers",
    metric: None,
    columns: &[
        Column::key("segment", "Name of the segment; none for the underlay"),
        Column::key("address", "IP address of the next hop"),
        Column::attribute("state", "incomplete, reachable, stale, probe or failed"),
        Column::attribute("mac", "Ethernet address"),
    ],
};

static ROUTES: TableSpec = TableSpec {
    name: "routes",
    about: "Routes of the VRFs",
    metric: None,
    columns: &[
        Column::key("vrf", "Name of the VRF"),
        Column::key("to", "Network of the destinations"),
        Column::attribute("origin", "configured, connected, local, or neighbour: the host route of a resolved host"),
        Column::attribute("via", "Next hops"),
        Column::attribute("state", "ready, resolving or unreachable; a group is ready"),
    ],
};

static REMOTES: TableSpec = TableSpec {
    name: "remotes",
    about: "Remote VTEPs of the segments",
    metric: None,
    columns: &[
        Column::key("segment", "Name of the segment"),
        Column::key("remote", "IP address of the remote"),
        Column::attribute("origin", "configured, learned, or kernel: from the kernel's tables"),
        Column::attribute("local", "Own address of the tunnel"),
        Column::attribute("next_hop", "IP address of the next hop"),
        Column::attribute("mac", "Ethernet address of the next hop"),
        Column::attribute(
            "state",
            "ready; in_nic: the NIC adds the headers; held: frames wait after a link loss; resolving; unreachable; \
             down: its BFD session is not up; standby: backup of remotes that are up",
        ),
        Column::gauge("max_frame", Unit::Bytes, "Largest inner frame"),
        Column::gauge(
            "path_mtu",
            Unit::Bytes,
            "Largest outer IP packet: MTU of the underlay, or what a router reported",
        ),
        Column::counter("too_big_messages", Unit::Packets, "Valid ICMP errors about tunnel packets that were too long"),
        Column::attribute(
            "encap",
            "Where packets get their outer headers: hardware or software; empty without NIC offload",
        ),
        Column::attribute("encap_why", "Reason why the NIC does not add them"),
        Column::attribute("decap", "Where packets lose their outer headers: hardware or software; empty likewise"),
        Column::attribute("decap_why", "Reason why the NIC does not remove them, or the packets that it leaves"),
    ],
};

impl GatewayControl {
    /// Appends rows of one of [`TABLES`].
    pub(super) fn list_table(&mut self, table: &TableSpec, page: &mut Page<'_>, plane: &ControlPlane) {
        match table.name {
            "segments" => page.extend(0..self.config().segments.len(), |index| self.segment_row(index, plane)),
            "fdb" => {
                let now = plane.seconds();
                // The closure borrows all but the writer of the table, which walks the slots.
                let Self { fdb, config, layout, list, places, move_damping, external, .. } = self;
                page.extend_from(fdb.slots_from(page.cursor()), |entry| {
                    let entry: FdbEntry = entry?;
                    let to = Destination::unpack(entry.destination);
                    let segment = places.position(entry.key.segment()).and_then(|at| config.segments.get(at));
                    let is_sticky = || layout.is_sticky(to);
                    let is_frozen = |it: &SegmentConfig| move_damping.is_frozen(entry.key, it.learn_rules.moves, now);
                    let kind = match entry.seen {
                        None => "static",
                        Some(_) if entry.external => "external",
                        Some(_) if segment.is_some_and(is_frozen) => "frozen",
                        Some(_) if is_sticky() => "sticky",
                        Some(_) => "learned",
                    };
                    let name = segment.map(|segment| segment.name.clone());
                    let age = entry.seen.filter(|_| !entry.external).map(|seen| now.saturating_sub(seen));
                    let mac = entry.key.mac().to_string();
                    let to = place_name(layout, list, external.groups(), to, plane);
                    Some(vec![name.into(), mac.into(), to.into(), kind.into(), age.into()])
                });
            }
            "bindings" => {
                let now = plane.seconds();
                page.extend(self.bindings.iter(), |(segment, address, binding)| {
                    let name = self.segment_config(segment).map(|it| it.name.clone());
                    let age = (binding.origin == BindingOrigin::Learned).then(|| now.saturating_sub(binding.seen()));
                    vec![
                        name.into(),
                        address.to_string().into(),
                        binding.mac.to_string().into(),
                        binding.origin.name().into(),
                        binding.is_router.into(),
                        age.into(),
                    ]
                });
            }
            "neighbours" => {
                let mut all: Vec<_> = self.neighbours().map(|(ip, state, mac)| (None, ip, state, mac)).collect();
                let of_segments = self.router.neighbours().into_iter();
                all.extend(of_segments.map(|(segment, ip, state, mac)| (Some(segment), ip, state, mac)));
                all.sort_unstable_by(|a, b| (&a.0, a.1).cmp(&(&b.0, b.1)));
                page.extend(all, |(segment, address, state, mac)| {
                    let mac = mac.map(|mac| mac.to_string());
                    vec![segment.into(), address.to_string().into(), state.name().into(), mac.into()]
                });
            }
            "routes" => {
                // A page continues after the last route of the page before, which need not exist any more.
                let mut last: Option<(String, NetworkPrefix)> = page.take_state();
                let (names, cursor) = (self.router.vrf_names(), page.cursor());
                page.extend_from((cursor..).zip(self.router.positions_after(last.clone())), |position| {
                    let (to, row) = (position.to, self.router.row(position, &names));
                    last = Some((row.vrf.clone(), to));
                    Some(vec![row.vrf.into(), row.to.into(), row.origin.into(), row.via.into(), row.state.into()])
                });
                if let Some(last) = last {
                    page.keep_state(last);
                }
            }
            "bfd" => page.extend(self.bfd.rows(), |row| row),
            "filters" => {
                let ports: Vec<(&str, PortId)> = plane.ports().iter().map(|it| (it.name.as_str(), it.id)).collect();
                page.extend(self.filters.rows(Ports(&ports)), |row| row);
            }
            "remotes" => {
                let all =
                    self.list.iter().zip(&self.routes).enumerate().filter(|(_, (it, _))| !it.address.is_unspecified());
                page.extend(all, |(index, (remote, route))| {
                    let segment = self.segment_config(remote.segment).map(|it| it.name.clone());
                    let state = match remote.next_hop {
                        NextHop::Ready(_) => "ready",
                        NextHop::InNic(..) => "in_nic",
                        NextHop::Held(..) => "held",
                        NextHop::Resolving => "resolving",
                        NextHop::Unreachable => "unreachable",
                        NextHop::Out if self.bfd.out(index as u32) == Some(Out::Standby) => "standby",
                        NextHop::Out => "down",
                    };
                    let [encap, encap_why, decap, decap_why] = self.placement_columns(index as u32);
                    vec![
                        segment.into(),
                        remote.address.to_string().into(),
                        self.remote_origin(index as u32, remote.segment).into(),
                        route.local.to_string().into(),
                        route.next_hop.and_then(|it| self.next_hops.via(it)).map(|via| via.to_string()).into(),
                        route.mac.map(|mac| mac.to_string()).into(),
                        state.into(),
                        remote.max_frame.into(),
                        self.path_mtus.of(route.local, remote.address, self.underlay_mtu).into(),
                        route.too_big_messages.into(),
                        encap,
                        encap_why,
                        decap,
                        decap_why,
                    ]
                });
            }
            _ => {}
        }
    }

    /// Returns where a remote comes from.
    fn remote_origin(&self, index: u32, segment: u16) -> &'static str {
        let of_kernel = |it: &SegmentConfig| it.control == SegmentControl::Kernel;
        match self.segment_config(segment) {
            _ if self.learned.contains(index) => "learned",
            Some(segment) if of_kernel(segment) => "kernel",
            _ => "configured",
        }
    }

    /// Returns place and reason of the encapsulation to a remote and of the decapsulation from it.
    fn placement_columns(&self, index: u32) -> [Value; 4] {
        let Some(all) = &self.nic_placements else { return [const { Value::Null }; 4] };
        let columns = |placement: &Placement| [placement.name().into(), placement.why().into()];
        let [encap, decap] = match all.get(&index) {
            Some(it) => [columns(&it.encap), columns(&it.decap)],
            None if self.learned.contains(index) => {
                let why = "the remote is learned, and NICs get only configured ones";
                [["software".into(), why.into()], ["software".into(), why.into()]]
            }
            None => return [const { Value::Null }; 4],
        };
        let ([encap, encap_why], [decap, decap_why]) = (encap, decap);
        [encap, encap_why, decap, decap_why]
    }

    /// Describes the place of an address, for the log.
    pub(super) fn place_name(&self, place: Destination, plane: &ControlPlane) -> String {
        place_name(&self.layout, &self.list, self.external.groups(), place, plane).unwrap_or_default()
    }

    fn segment_row(&self, index: usize, plane: &ControlPlane) -> Row {
        let (stats, learn) = (self.segment_stats(index), self.learn_stats(index));
        let segment = &self.config.segments[index];
        let ports = segment.attachments.iter().map(|it| attachment(plane, it.port, it.vlan));
        let place = &self.places.segments[index];
        let remotes = place.remotes.len() + self.learned.of_segment(place.index).count();
        let mut row: Vec<Value> = vec![
            segment.name.clone().into(),
            segment.vni.into(),
            segment.sids().map(|sids| sids.local.to_string()).into(),
            segment.kind.name.into(),
            ports.collect::<Vec<_>>().join(" ").into(),
            remotes.into(),
        ];
        for (packets, bytes) in [stats.local_rx, stats.local_tx, stats.overlay_rx, stats.overlay_tx] {
            row.extend([packets.into(), bytes.into()]);
        }
        row.extend([stats.flooded, stats.unknown_unicast, stats.too_big, stats.icmp_too_big].map(Value::from));
        row.push(stats.outer_fragments.into());
        for (packets, bytes) in [stats.routed_in, stats.routed_out] {
            row.extend([packets.into(), bytes.into()]);
        }
        row.push(stats.icmp_errors.into());
        row.push(stats.mss_clamped.into());
        row.extend([stats.nic_encapsulated, stats.nic_decapsulated].map(Value::from));
        row.extend([learn.learned, learn.moved, learn.aged, learn.refused].map(Value::from));
        row.extend([learn.frozen, learn.moves_refused].map(Value::from));
        row.extend([self.bindings.len_of(place.index).into(), learn.bindings_refused.into()]);
        row.extend([stats.neighbour_replies.into(), stats.mirrored.into()]);
        row.extend(stats.storm_drops.map(Value::from));
        row
    }
}

/// Returns the port, with its VLAN, or the remotes of a forwarding entry.
fn place_name(
    layout: &Layout,
    remotes: &[Remote],
    groups: &RemoteGroups,
    place: Destination,
    plane: &ControlPlane,
) -> Option<String> {
    let remote = |index: u32| remotes.get(index as usize).map(|it| it.address.to_string());
    match place {
        Destination::Attachment(index) => {
            layout.attachments.get(index as usize).map(|it| attachment(plane, it.port.index(), it.vlan))
        }
        Destination::Router => Some("router".to_owned()),
        Destination::Remote(index) => remote(index),
        Destination::Group(index) => {
            let members = groups.members(index).iter();
            let members: Vec<String> = members.filter_map(|member| remote(member.next_hop)).collect();
            Some(members.join(", "))
        }
    }
}

/// Returns the name of a port, with the VLAN of an attachment.
fn attachment(plane: &ControlPlane, port: usize, vlan: Option<u16>) -> String {
    let name = plane.ports().get(port).map_or("?", |port| &port.name);
    vlan.map_or_else(|| name.to_owned(), |vlan| format!("{name}.{vlan}"))
}
