//! Received BFD packets on the workers, which pass those of known sessions to the control thread.

use std::net::IpAddr;

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_wire::{HeaderOffsets, L3Type, udp};

use super::packet::{MULTIHOP_PORT, SINGLE_HOP_PORT, TTL};
use crate::Context;
use crate::tunnel::decap::{Rejection, check_datagram, check_udp};
use crate::tunnel::outer::TunnelId;
use crate::tunnel::policer::{MessageSource, Protocol};
use crate::tunnel::stage::{StageState, View};

/// Offset of the field Your Discriminator in a datagram.
const YOUR_DISCRIMINATOR: usize = udp::HEADER_LEN + 8;

impl View<'_> {
    /// Decides about a packet to the gateway's address `to` that belongs to no tunnel.
    #[cold]
    pub(in crate::tunnel) fn classify_bfd(
        &self,
        state: &StageState,
        context: &Context<'_>,
        packet: &Packet,
        layers: &HeaderOffsets,
        (from, to): (IpAddr, IpAddr),
    ) -> Rejection {
        let frame = packet.data();
        let Some(datagram) = layers.udp(frame) else { return DropReason::NotForUs.into() };
        let port = datagram.dst_port();
        if port != SINGLE_HOP_PORT && port != MULTIHOP_PORT {
            return DropReason::NotForUs.into();
        }
        let known = self.known_hosts.read(context.guard());
        if known.bfd_tunnel.is_some() || !known.bfd_peers.contains(&(to, from)) {
            return DropReason::BfdNoSession.into();
        }
        // RFC 5881 section 5: a packet with another TTL may come from anywhere.
        if port == SINGLE_HOP_PORT && layers.hop_limit(frame) != Some(TTL) {
            return DropReason::BfdTtl.into();
        }
        self.admit_bfd(state, context, packet, layers, (from, to), check_udp)
    }

    /// Decides about a tunnel packet of no segment, whose inner frame lies from `start` to `end`.
    #[cold]
    pub(in crate::tunnel) fn classify_bfd_in_tunnel(
        &self,
        state: &StageState,
        context: &Context<'_>,
        packet: &Packet,
        (tunnel, (start, end)): (TunnelId, (usize, usize)),
        (from, to): (IpAddr, IpAddr),
    ) -> Rejection {
        let known = self.known_hosts.read(context.guard());
        if known.bfd_tunnel != Some(tunnel) {
            return DropReason::UnknownVni.into();
        }
        if !known.bfd_peers.contains(&(to, from)) {
            return DropReason::BfdNoSession.into();
        }
        match self.layout.underlay.open_bfd(packet.data(), start, end) {
            // The device verified at most the outer checksum.
            Ok(layers) => self.admit_bfd(state, context, packet, &layers, (from, to), check_datagram),
            Err(reason) => reason.into(),
        }
    }

    /// Decides about a packet of a remote with a session.
    ///
    /// The control thread gets only packets of known pairs of addresses. Packets with the discriminator of a session
    /// have a limit of their own, so forged packets without it do not take a session down.
    fn admit_bfd(
        &self,
        state: &StageState,
        context: &Context<'_>,
        packet: &Packet,
        layers: &HeaderOffsets,
        (from, to): (IpAddr, IpAddr),
        check: fn(&Packet, &HeaderOffsets) -> Result<(), Rejection>,
    ) -> Rejection {
        let (frame, known) = (packet.data(), self.known_hosts.read(context.guard()));
        let at = layers.l4() + YOUR_DISCRIMINATOR;
        let Some(yours) = frame.get(at..).and_then(|bytes| bytes.first_chunk()).map(|it| u32::from_be_bytes(*it))
        else {
            return DropReason::BfdInvalid.into();
        };
        let source = match known.bfd_sessions.get(&yours) {
            Some(peer) if *peer == (to, from) => MessageSource::Known(from),
            None if yours == 0 => MessageSource::Stranger(from),
            _ => return DropReason::BfdNoSession.into(),
        };
        if !state.policer.admits(Protocol::Bfd, source, context.now()) {
            return DropReason::RateLimited.into();
        }
        let has_checksum = frame.get(layers.l4() + 6..layers.l4() + 8) != Some(&[0, 0]);
        if !has_checksum && layers.l3_type() == L3Type::Ipv6 {
            return DropReason::BadL4Checksum.into();
        }
        if has_checksum && let Err(rejection) = check(packet, layers) {
            return rejection;
        }
        Rejection::Bfd
    }
}
