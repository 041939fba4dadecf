//! Packets of the underlay that are for the gateway itself, on the workers.
//!
//! A worker answers echo requests. The control thread gets ARP and ND messages that ask for an address of the
//! gateway or concern a next hop. [`super::policer`] limits their rates.

use std::net::{IpAddr, Ipv6Addr};

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_packet::offload::ChecksumStatus;
use wirepath_wire::build::echo_reply;
use wirepath_wire::{HeaderOffsets, L3Type, MacAddr, Tag, arp, icmpv4, icmpv6, ipv6, ndp, vlan};

use super::decap::Rejection;
use super::headers::VLAN_TAG_LEN;
use super::policer::{MessageSource, Protocol};
use super::stage::{StageState, View};
use crate::Context;

/// The group of all nodes on the link, to which unsolicited advertisements go.
const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);

/// Content of an ARP or ND message that decides about its way.
struct Message {
    protocol: Protocol,
    /// The address whose owner sent the message, or the advertised address.
    about: IpAddr,
    sender_mac: MacAddr,
    kind: MessageKind,
}

#[derive(PartialEq, Eq)]
enum MessageKind {
    /// Asks for an address of the gateway.
    Request,
    /// Advertises an address, with or without a request.
    Reply,
}

impl View<'_> {
    /// Decides about an ARP packet.
    pub(super) fn classify_arp(
        &self,
        state: &StageState,
        context: &Context<'_>,
        frame: &[u8],
        layers: &HeaderOffsets,
    ) -> Rejection {
        let Some(packet) = layers.arp(frame).map(|view| arp::Repr::parse(&view)) else {
            return DropReason::Truncated.into();
        };
        let (sender, target) = (IpAddr::V4(packet.sender_ip), IpAddr::V4(packet.target_ip));
        if packet.sender_mac == self.layout.underlay.mac {
            return DropReason::NotForUs.into();
        }
        let kind = if packet.operation == arp::Operation::REPLY || sender == target {
            MessageKind::Reply
        } else if packet.operation == arp::Operation::REQUEST && self.layout.underlay.has_address(target) {
            MessageKind::Request
        } else {
            return DropReason::NotForUs.into();
        };
        let message = Message { protocol: Protocol::Arp, about: sender, sender_mac: packet.sender_mac, kind };
        self.police(state, context, &message, self.layout.underlay.has_address(sender))
    }

    /// Decides about an ICMPv6 message if it belongs to neighbour discovery.
    pub(super) fn classify_nd(
        &self,
        state: &StageState,
        context: &Context<'_>,
        frame: &[u8],
        layers: &HeaderOffsets,
    ) -> Option<Rejection> {
        let ip = layers.ipv6(frame)?;
        let sender_mac = MacAddr(*frame.get(6..12)?.first_chunk()?);
        let underlay = &self.layout.underlay;
        let (src, dst) = (ip.src(), ip.dst());
        let (about, kind, conflict) = match ndp::Repr::parse(&ip) {
            Ok(Some(ndp::Repr::Solicitation { target, .. })) => {
                let ours = underlay.has_address(target.into());
                if !ours || (dst != target && dst != ipv6::solicited_node(target)) {
                    return Some(DropReason::NotForUs.into());
                }
                // A solicitation from the unspecified address detects duplicates (RFC 4862 section 5.4.3).
                let conflict = src.is_unspecified() || underlay.has_address(src.into());
                (src, MessageKind::Request, conflict)
            }
            Ok(Some(ndp::Repr::Advertisement { target, .. })) => {
                if dst != ALL_NODES && !underlay.has_address(dst.into()) {
                    return Some(DropReason::NotForUs.into());
                }
                (target, MessageKind::Reply, underlay.has_address(target.into()))
            }
            Ok(None) => return None,
            Err(error) => return Some(DropReason::from(error).into()),
        };
        if sender_mac == underlay.mac {
            return Some(DropReason::NotForUs.into());
        }
        let message = Message { protocol: Protocol::Nd, about: about.into(), sender_mac, kind };
        Some(self.police(state, context, &message, conflict))
    }

    /// Applies the limits to an ARP or ND message. `conflict` is true if the message concerns the use of an
    /// address of the gateway by another host.
    fn police(&self, state: &StageState, context: &Context<'_>, message: &Message, conflict: bool) -> Rejection {
        let now = context.now();
        let known = self.known_hosts.read(context.guard());
        let source = MessageSource::of_neighbour(message.about, message.sender_mac, known);
        let admitted = if conflict {
            state.policer.admits_conflict(now)
        } else if message.kind == MessageKind::Request {
            state.policer.admits(message.protocol, source, now)
        } else if self.expected_replies.take(message.about) {
            true
        } else if let MessageSource::Known(_) = source {
            state.policer.admits(message.protocol, source, now)
        } else {
            // Messages never create neighbours, so this one has no effect.
            return DropReason::NotForUs.into();
        };
        if admitted { Rejection::Host } else { DropReason::RateLimited.into() }
    }

    /// Turns an echo request into its reply and sends it, within the limits.
    #[cold]
    pub(super) fn reply_to_echo(
        &self,
        state: &mut StageState,
        context: &mut Context<'_>,
        packet: Packet,
        layers: &HeaderOffsets,
        source: IpAddr,
    ) {
        let underlay = &self.layout.underlay;
        let known = self.known_hosts.read(context.guard());
        if !state.policer.admits(Protocol::Echo, MessageSource::of_host(source, known), context.now()) {
            return context.drop(packet, DropReason::RateLimited);
        }
        let mut packet = match state.make_echo_reply(packet, layers) {
            Ok(reply) => reply,
            Err((packet, reason)) => return context.drop(packet, reason),
        };
        if let Some(id) = underlay.vlan {
            if packet.prepend_slice(VLAN_TAG_LEN).is_none() {
                return context.drop(packet, DropReason::NoHeadroom);
            }
            vlan::push(packet.data_mut(), Tag::new(id));
        }
        // Egress rules do not see packets of the program itself.
        context.state.transmit(underlay.port, packet);
    }
}

impl StageState {
    /// Turns an echo request into its reply. Returns the request and the reason to drop it if it is not valid.
    pub(super) fn make_echo_reply(
        &mut self,
        mut packet: Packet,
        layers: &HeaderOffsets,
    ) -> Result<Packet, (Packet, DropReason)> {
        let replied = if packet.is_chain() {
            // The checksum covers all buffers. The headers, which alone change, lie in the first one.
            let (len, head) = (packet.len(), packet.data().len());
            let Some(whole) = self.reply_buffer.get_mut(..len) else { return Err((packet, DropReason::TooLong)) };
            packet.copy_to(whole);
            let replied = echo_reply(whole, layers).is_ok();
            packet.data_mut().copy_from_slice(&whole[..head]);
            replied
        } else {
            echo_reply(packet.data_mut(), layers).is_ok()
        };
        if !replied {
            return Err((packet, DropReason::NotForUs));
        }
        packet.set_checksum_status(ChecksumStatus::NONE);
        Ok(packet)
    }
}

/// Decides about an ICMP message to an address of the gateway that does not belong to neighbour discovery.
pub(super) fn classify_echo(frame: &[u8], layers: &HeaderOffsets, source: IpAddr) -> Rejection {
    let request = match layers.l3_type() {
        L3Type::Ipv4 => icmpv4::Type::ECHO_REQUEST.0,
        _ => icmpv6::Type::ECHO_REQUEST.0,
    };
    let sender_mac = frame.get(6..12).and_then(|bytes| bytes.first_chunk()).map(|mac| MacAddr(*mac));
    if !sender_mac.is_some_and(|mac| mac.is_unicast()) {
        return DropReason::BadSource.into();
    }
    if frame.get(layers.l4()) == Some(&request) {
        Rejection::Echo(*layers, source)
    } else {
        DropReason::NotForUs.into()
    }
}
