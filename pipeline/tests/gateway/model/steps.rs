//! Steps of the sequences: frames of hosts and remotes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_packet::PortId;
use wirepath_wire::MacAddr;

use super::config::{
    NETWORKS, PORTS, REMOTES, SLOTS, addresses, attached, host, host_addresses, neighbour, remote_address, remote_mac,
    reserved_addresses, router_addresses, silent_host,
};
use super::wire::packets::{self, Form};
use super::wire::resolution::{self, Message};
use super::wire::{self, Kind, US};
use super::{Input, Lab, SECOND, STEP, WAN};

impl Lab {
    /// Sends frames of local hosts in one batch.
    pub(super) fn local_frames(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let (slot, number) = (usize::from(how) % SLOTS.len(), usize::from(how / 12) % 3);
        let (port, vlan) = attached(slot, number);
        let mut frames = Vec::new();
        let kinds = [1, 1, 1, 2, 3][usize::from(how) % 5];
        for _ in 0..kinds {
            let (mut frame, count) = inner_frame(input, SLOTS[slot].network, kinds == 1);
            // Some frames have the tag of another segment, or one that no segment has.
            let tag = match input.byte() {
                // The sources of tagged frames are reported behind others where they are bridged with their tag.
                _ if kinds > 1 && vlan.is_none() => vlan,
                0..224 => vlan,
                224..240 => Some(99),
                _ => attached(1 + slot % 8, 1).1,
            };
            if let Some(id) = tag {
                frame = wire::tagged(&frame, id);
            }
            frames.extend(std::iter::repeat_n(frame, count));
        }
        let in_metadata = how >= 200;
        self.note(|| format!("frames at {}: {}", PORTS[usize::from(port)], describe(&frames)));
        frames.iter().for_each(|frame| self.model.local(port, frame));
        self.send_with(PortId::new(port), &frames, in_metadata);
    }

    /// Sends many frames that are flooded, unless somebody has their address.
    pub(super) fn storm(&mut self, input: &mut Input<'_>) {
        let (how, dst) = (input.byte(), input.byte());
        let slot = usize::from(how) % SLOTS.len();
        let (port, vlan) = attached(slot, usize::from(how / 12) % 3);
        let dst = match dst % 4 {
            0 | 1 => MacAddr([0xff; 6]),
            2 => MacAddr([0x33, 0x33, 0, 0, 0, 1]),
            _ => host(dst >> 4),
        };
        let mut frame = wire::ethernet(dst, host(how >> 5), 0x88b5, &[0x5a; 46]);
        if let Some(id) = vlan {
            frame = wire::tagged(&frame, id);
        }
        let frames = vec![frame; 8 + usize::from(input.byte() % 16)];
        self.note(|| format!("{} frames at {}: {}", frames.len(), PORTS[usize::from(port)], describe(&frames[..1])));
        frames.iter().for_each(|frame| self.model.local(port, frame));
        self.send(PortId::new(port), &frames);
    }

    /// Sends frames of a remote in one batch.
    pub(super) fn tunnel_frame(&mut self, input: &mut Input<'_>) {
        let (how, which) = (input.byte(), input.byte());
        let slot = usize::from(how) % SLOTS.len();
        let mut remote = REMOTES[usize::from(how / 12) % 4];
        let (kind, mut id) = (SLOTS[slot].kind, SLOTS[slot].id);
        if kind.carries_ip() || self.model.config.segments[slot].is_none() && !has_numbers(kind) {
            return;
        }
        if kind == Kind::Srv6 {
            remote = REMOTES[2];
        }
        if which > 240 && has_numbers(kind) {
            id = Some(1000);
        }
        let mut frames = Vec::new();
        let kinds = [1, 1, 1, 2, 3][usize::from(which) % 5];
        for _ in 0..kinds {
            let (mut frame, count) = inner_frame(input, SLOTS[slot].network, kinds == 1);
            if which.is_multiple_of(16) {
                frame = wire::tagged(&frame, 5);
            }
            frames.extend(std::iter::repeat_n(frame, count));
        }
        self.note(|| format!("{} {id:?} from {}: {}", kind.name(), remote_address(remote), describe(&frames)));
        frames.iter().for_each(|frame| self.model.tunnel(kind, id, remote, frame));
        self.send_tunnelled(kind, id, remote, &frames);
    }

    fn send_tunnelled(&mut self, kind: Kind, id: Option<u32>, remote: u8, payloads: &[Vec<u8>]) {
        let packet = |it: &Vec<u8>| wire::to_gateway(kind, id, remote_address(remote), remote_mac(remote), it);
        let packets: Vec<_> = payloads.iter().map(packet).collect();
        self.send(WAN, &packets);
    }

    /// Sends messages of ARP or neighbour discovery in a segment with suppression.
    pub(super) fn resolution(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let has = |slot: &usize| self.model.config.segments[*slot].as_ref().is_some_and(|it| it.suppression);
        let slots: Vec<usize> = (0..SLOTS.len()).filter(has).collect();
        let Some(slot) = slots.get(usize::from(how) % slots.len().max(1)).copied() else { return };
        for number in 0..2 + how / 64 {
            if number > 0 {
                self.finish(false);
                self.advance(STEP);
            }
            self.resolution_message(slot, input);
        }
    }

    /// Sends a message of a host, from a port or a remote.
    fn resolution_message(&mut self, slot: usize, input: &mut Input<'_>) {
        let (ends, what, place) = (input.byte(), input.byte(), usize::from(input.byte()));
        let [from, to] = [ends & 3, ends >> 2 & 3];
        // Some hosts take the address of another one.
        let claimed = if ends >= 0xe0 { from ^ 1 } else { from };
        let version = usize::from(what & 1);
        let [own, other] = [claimed, to].map(|number| host_addresses(slot, number)[version]);
        let message = match what >> 1 & 15 {
            0..6 => Message::Request,
            6 => Message::OtherRequest,
            7 => Message::UnicastRequest,
            8 => Message::Probe,
            9 | 10 => Message::Announcement,
            11 => Message::RouterAnnouncement,
            12..15 => Message::Reply,
            _ => Message::WeakReply,
        };
        let frame = resolution::message(message, (host(from), own), (host(to), other));
        self.note(|| format!("{message:?} of {own} for {other}: {}", describe(std::slice::from_ref(&frame))));
        let segment = self.model.config.segments[slot].as_ref().expect("a slot in use");
        let (kind, id) = (SLOTS[slot].kind, SLOTS[slot].id);
        match segment.ports.get(place % (segment.ports.len() + 2)) {
            Some(port) => {
                let (port, vlan) = port.at;
                let frame = vlan.map_or_else(|| frame.clone(), |vlan| wire::tagged(&frame, vlan));
                self.model.local(port, &frame);
                self.send(PortId::new(port), &[frame]);
            }
            None => {
                let remote = segment.remotes.get(place / 8 % 4).copied().unwrap_or(REMOTES[2]);
                self.model.tunnel(kind, id, remote, &frame);
                self.send_tunnelled(kind, id, remote, &[frame]);
            }
        }
    }

    /// Sends packets to the router of a segment, from a local port.
    pub(super) fn routed_frame(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let slot = usize::from(how) % 3;
        let (port, vlan) = attached(slot, usize::from(how >> 2) % 3);
        let packet = routed_packet(input, SLOTS[slot].network.unwrap_or(1));
        let mut frame = wire::ethernet(US, host(how >> 3), wire::ethertype_of(&packet), &packet);
        if how == 255 {
            frame = wire::ethernet(US, host(0), 0x88b5, &packet);
        }
        if let Some(id) = vlan {
            frame = wire::tagged(&frame, id);
        }
        let frames = vec![frame; 1 + usize::from(how >> 6)];
        self.send_routed(PortId::new(port), frames);
    }

    /// Sends the last packets to a router again, after some seconds in which the control thread runs.
    pub(super) fn routed_again(&mut self, input: &mut Input<'_>) {
        for _ in 0..[0, 1, 3, 4, 5, 12][usize::from(input.byte()) % 6] {
            self.advance(SECOND);
            self.finish(false);
        }
        if let Some((port, frames)) = self.routed.take() {
            self.send_routed(port, frames);
        }
    }

    fn send_routed(&mut self, port: PortId, frames: Vec<Vec<u8>>) {
        self.note(|| format!("routed frames at {}: {}", PORTS[port.index()], describe(&frames)));
        self.route(|model| frames.iter().for_each(|frame| model.local(port.index() as u16, frame)));
        self.send(port, &frames);
        self.routed = Some((port, frames));
    }

    /// Sends packets to a router, from a tunnel with IP packets.
    pub(super) fn routed_tunnel_frame(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let slot = 10 + usize::from(how) % 2;
        let Some(remote) = self.model.config.segments[slot].as_ref().map(|it| it.remotes[0]) else { return };
        let packet = routed_packet(input, 77);
        let (kind, id) = (SLOTS[slot].kind, SLOTS[slot].id);
        let packets = vec![packet; 1 + usize::from(how >> 6)];
        self.route(|model| packets.iter().for_each(|packet| model.tunnel(kind, id, remote, packet)));
        self.note(|| format!("{} from {}: {packets:x?}", kind.name(), remote_address(remote)));
        self.send_tunnelled(kind, id, remote, &packets);
    }
}

/// Returns whether segments of this kind have identifiers, and an unknown one is dropped as such.
fn has_numbers(kind: Kind) -> bool {
    matches!(kind, Kind::Vxlan | Kind::Geneve | Kind::VxlanGpe)
}

/// Returns a frame between hosts, and how often it is sent. Short frames are alone in their batch: the sources of
/// others are reported before theirs, which matters if only one can be learned.
fn inner_frame(input: &mut Input<'_>, network: Option<u8>, is_alone: bool) -> (Vec<u8>, usize) {
    let (ends, how) = (input.byte(), input.byte());
    let src = if how >= 250 { MacAddr([3, 0, 0, 0, 0, 9]) } else { host(ends) };
    let dst = match how % 16 {
        0..9 => host(ends >> 3),
        9..12 => MacAddr([0xff; 6]),
        12 => MacAddr([1, 0, 0x5e, 0, 0, 5]),
        13 => MacAddr([1, 0x80, 0xc2, 0, 0, how >> 4]),
        _ => neighbour(network.unwrap_or(1)).1,
    };
    let count = [1, 1, 2, 4][usize::from(ends >> 6)];
    let content = input.byte();
    let packet = |version: usize, len: usize| {
        let ip = |mac: MacAddr| match mac.is_multicast() {
            true => [Ipv4Addr::new(224, 0, 0, 5).into(), Ipv6Addr::new(0xff0e, 0, 0, 0, 0, 0, 0, 5).into()][version],
            false => addresses(1, 100 + mac.0[5] % 100)[version],
        };
        let packet = packets::packet(ip(src), ip(dst), 64, len, Form::of(content >> 4));
        wire::ethernet(dst, src, wire::ethertype_of(&packet), &packet)
    };
    let frame = match content % 8 {
        0 => wire::ethernet(dst, src, 0x88b5, &[0x5a; 46]),
        1 if is_alone => wire::ethernet(dst, src, 0x88b5, &[]),
        2 | 3 => packet(0, 20),
        4 => packet(0, content_len(0, input.byte())),
        5 | 6 => packet(1, 20),
        _ => packet(1, content_len(1, input.byte())),
    };
    (frame, count)
}

/// Returns the length of the content of a datagram. Many packets have about the length that a place takes.
fn content_len(version: usize, byte: u8) -> usize {
    let number = usize::from(byte);
    let packet = match byte {
        0..64 => 48 + 20 * number,
        64..128 => [300, 600, 1280, 1300, 1400, 1500][number % 6] + [0, 1, 4, 5][number >> 3 & 3],
        // What the headers of tunnels leave.
        128..224 => 1420 + number % 64,
        _ => 1500 + number % 32,
    };
    packet - [28, 48][version]
}

/// Returns an IP packet that a router has to forward or to refuse.
fn routed_packet(input: &mut Input<'_>, network: u8) -> Vec<u8> {
    let (how, to, form) = (input.byte(), usize::from(input.byte()), input.byte());
    let version = to >> 4 & 1;
    let dst = match to % 16 {
        number @ 0..3 => neighbour(1 + number as u8).0[version],
        number @ 3..6 => silent_host(1 + (number - 3) as u8)[version],
        6 => router_addresses(1)[version],
        7 => addresses(99, 1)[version],
        8 => match version {
            0 => reserved_addresses(1)[to >> 5 & 1],
            _ => Ipv6Addr::new([0xfe80, 0xff0e][to >> 5 & 1], 0, 0, 0, 0, 0, 0, 9).into(),
        },
        _ => match NETWORKS[(to >> 5 | to << 3) % NETWORKS.len()].0 {
            IpAddr::V4(network) => Ipv4Addr::from_bits(network.to_bits() | (0x0101 + u32::from(how & 1))).into(),
            IpAddr::V6(network) => Ipv6Addr::from_bits(network.to_bits() | 1 << 64 | (1 + u128::from(how & 1))).into(),
        },
    };
    let mut src = addresses(network, 20 + (how >> 1 & 1))[usize::from(dst.is_ipv6())];
    if dst.is_ipv6() && form >= 240 {
        src = [[0xfe80, 1], [0xff02, 1], [0, 0]]
            .map(|[first, last]| Ipv6Addr::new(first, 0, 0, 0, 0, 0, 0, last).into())[usize::from(form) % 3];
    }
    let ttl = match how {
        250.. => 0,
        232.. => 1,
        225.. => 2,
        _ => 64,
    };
    packets::packet(src, dst, ttl, content_len(version, input.byte()), Form::of(form))
}

/// Describes frames by their addresses.
fn describe(frames: &[Vec<u8>]) -> String {
    let one = |frame: &Vec<u8>| {
        let ends = (wire::source(frame), wire::destination(frame), wire::ethertype(frame), frame.len());
        let tag = wire::untagged(frame).map(|(tag, _)| tag);
        format!("{} to {} type {:04x} of {} bytes, tag {tag:?}", ends.0, ends.1, ends.2, ends.3)
    };
    frames.iter().map(one).collect::<Vec<_>>().join("; ")
}
