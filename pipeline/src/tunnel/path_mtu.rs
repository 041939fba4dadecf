//! Path MTU of the underlay (RFC 1191, RFC 8201), learned from the ICMP errors of its routers.
//!
//! A router that cannot forward a tunnel packet reports its MTU: ICMP "fragmentation needed" or ICMPv6 "packet too
//! big". The gateway then sends no longer packets to that remote, and reports the lower MTU to the senders of
//! longer frames (RFC 4459 section 3.2).
//!
//! Anybody can send such a message. So a worker drops it unless it quotes a packet that the gateway can have sent:
//! between own and remote address, of the right kind, identifier and source port, and longer than the reported MTU.
//! The control thread gets the others, within the limits of [`super::policer`].
//!
//! A path MTU belongs to a pair of addresses, so all segments with this remote share it. It is forgotten after
//! [`LIFETIME`], and the next packets probe the path anew.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use wirepath_packet::Packet;
use wirepath_packet::drops::DropReason;
use wirepath_wire::checksum::{Sum, pseudo6};
use wirepath_wire::{HeaderOffsets, IpProtocol, L3Type, Parser, Tunnels, icmpv4, icmpv6, ipv4, ipv6, udp};

use super::config::SegmentConfig;
use super::control::{GatewayControl, Route, max_frame};
use super::decap::{Rejection, check_sum};
use super::outer::TunnelId;
use super::policer::{KnownHosts, MessageSource, Protocol};
use super::stage::{StageState, View};
use super::tables::{Remote, Remotes, Underlay};
use super::underlay::is_host_address;
use crate::{Context, ControlPlane};

/// Seconds for which a lower MTU is valid (RFC 1191 section 6.3, RFC 8201 section 5.4).
const LIFETIME: u32 = 600;
/// Least MTU that is learned over IPv4, in bytes. Routers without RFC 1191 report 0 (section 4). Smaller values would
/// only help an attacker: every host takes packets of this length (RFC 791 section 3.1).
const LEAST_MTU4: usize = 576;

/// Contents of a message, which may be forged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TooBig<'f> {
    /// Reported MTU in bytes.
    mtu: usize,
    quote: Quote<'f>,
}

/// The quoted packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Quote<'f> {
    src: IpAddr,
    dst: IpAddr,
    protocol: IpProtocol,
    /// Length of the whole packet in bytes, from its IP header on.
    len: usize,
    /// True if it is a first fragment.
    is_fragment: bool,
    /// Bytes behind its IP headers, as far as the message has them.
    rest: &'f [u8],
}

impl<'f> TooBig<'f> {
    /// Returns whether a packet with these headers reports that a packet was too long.
    fn is_in(frame: &[u8], layers: &HeaderOffsets) -> bool {
        let start = frame.get(layers.l4()..).and_then(|message| message.first_chunk::<2>());
        match layers.l3_type() {
            L3Type::Ipv4 => start == Some(&[icmpv4::Type::DESTINATION_UNREACHABLE.0, icmpv4::FRAGMENTATION_NEEDED]),
            // The code is ignored (RFC 4443 section 3.2).
            _ => start.is_some_and(|start| start[0] == icmpv6::Type::PACKET_TOO_BIG.0),
        }
    }

    /// Reads a message. Returns `None` if it reports an MTU that IPv6 excludes, or quotes a packet of another form than
    /// those of the gateway.
    fn read(frame: &'f [u8], layers: &HeaderOffsets) -> Option<Self> {
        let message = frame.get(layers.l4()..layers.end().min(frame.len()))?;
        // Both versions have eight bytes in front of the quoted packet. The MTU is in the last ones.
        let (header, quote) = message.split_first_chunk::<8>()?;
        let field = u32::from_be_bytes([header[4], header[5], header[6], header[7]]);
        if layers.l3_type() == L3Type::Ipv4 {
            // The first half is unused, or has the length of the quote (RFC 4884 section 4.1).
            return Some(Self { mtu: usize::from(field as u16).max(LEAST_MTU4), quote: Quote::read4(quote)? });
        }
        // RFC 8201 section 4: smaller values are discarded.
        let mtu = usize::try_from(field).ok().filter(|mtu| *mtu >= ipv6::MIN_MTU)?;
        Some(Self { mtu, quote: Quote::read6(quote)? })
    }
}

impl<'f> Quote<'f> {
    /// Reads an IPv4 packet. Those of the gateway have no options, and routers report only those with DF.
    fn read4(packet: &'f [u8]) -> Option<Self> {
        let (h, rest) = packet.split_first_chunk::<{ ipv4::HEADER_LEN }>()?;
        // Routers may have changed the TTL without the checksum, so that is not verified.
        if h[0] != 0x45 || u16::from_be_bytes([h[6], h[7]]) != ipv4::DONT_FRAGMENT {
            return None;
        }
        Some(Self {
            src: Ipv4Addr::new(h[12], h[13], h[14], h[15]).into(),
            dst: Ipv4Addr::new(h[16], h[17], h[18], h[19]).into(),
            protocol: IpProtocol(h[9]),
            len: u16::from_be_bytes([h[2], h[3]]).into(),
            is_fragment: false,
            rest,
        })
    }

    /// Reads an IPv6 packet. The only extension header of the gateway is that of fragments.
    fn read6(packet: &'f [u8]) -> Option<Self> {
        let (h, mut rest) = packet.split_first_chunk::<{ ipv6::HEADER_LEN }>()?;
        let address = |at: usize| h.get(at..)?.first_chunk::<16>().map(|it| IpAddr::from(Ipv6Addr::from(*it)));
        if h[0] >> 4 != 6 {
            return None;
        }
        let mut protocol = IpProtocol(h[6]);
        let is_fragment = protocol == IpProtocol::FRAGMENT;
        if is_fragment {
            let (fragment, behind) = rest.split_first_chunk::<8>()?;
            // A later fragment has no tunnel header. The first one of the same packet is as long.
            if u16::from_be_bytes([fragment[2], fragment[3]]) >> 3 != 0 {
                return None;
            }
            (protocol, rest) = (IpProtocol(fragment[0]), behind);
        }
        let len = ipv6::HEADER_LEN + usize::from(u16::from_be_bytes([h[4], h[5]]));
        Some(Self { src: address(8)?, dst: address(24)?, protocol, len, is_fragment, rest })
    }
}

impl Underlay {
    /// Returns whether the gateway can have sent a quoted packet.
    fn can_have_sent(&self, quote: &Quote<'_>, known: &KnownHosts, remotes: &Remotes) -> bool {
        let (mut header, mut port) = (quote.rest, None);
        if quote.protocol == IpProtocol::UDP {
            let Some((datagram, behind)) = quote.rest.split_first_chunk::<{ udp::HEADER_LEN }>() else { return false };
            let [source, dest, len] = [0, 2, 4].map(|at| u16::from_be_bytes([datagram[at], datagram[at + 1]]));
            let (first, count) = self.source_ports;
            let ip_header = if quote.src.is_ipv4() { ipv4::HEADER_LEN } else { ipv6::HEADER_LEN };
            let fits = quote.is_fragment || usize::from(len) + ip_header == quote.len;
            if !fits || u32::from(source.wrapping_sub(first)) >= count {
                return false;
            }
            (header, port) = (behind, Some(dest));
        }
        let mut kinds = self.kinds.iter().filter(|it| it.kind.carrier.takes(quote.protocol) && it.udp_port == port);
        kinds.any(|active| {
            if !known.paths.contains(&(active.number, quote.src, quote.dst)) {
                return false;
            }
            // RFC 792 asks for eight bytes behind the IP header, which may end in front of the tunnel header.
            // ICMPv6 quotes all that fits (RFC 4443 section 3.2).
            if header.is_empty() || (active.kind.length)(header).is_none_or(|len| len > header.len()) {
                return quote.src.is_ipv4() || active.kind.header_len == 0;
            }
            (active.kind.parse)(quote.protocol, header).is_ok_and(|found| {
                let id = TunnelId { kind: active.number, id: found.id, sid: None };
                active.kind.takes(found.payload) && remotes.find_source(id, quote.dst).is_some()
            })
        })
    }
}

impl View<'_> {
    /// Decides about a packet to an address of the gateway if it is an ICMP error about a packet that was too long.
    #[cold]
    pub(super) fn classify_too_big(
        &self,
        state: &StageState,
        context: &Context<'_>,
        remotes: &Remotes,
        packet: &Packet,
        layers: &HeaderOffsets,
        (from, to): (IpAddr, IpAddr),
    ) -> Option<Rejection> {
        let frame = packet.data();
        if !TooBig::is_in(frame, layers) {
            return None;
        }
        if !is_host_address(from) || self.layout.underlay.has_address(from) {
            return Some(DropReason::BadSource.into());
        }
        let known = self.known_hosts.read(context.guard());
        let Some(TooBig { mtu, quote }) = TooBig::read(frame, layers) else {
            return Some(DropReason::BadIcmpQuote.into());
        };
        let underlay = &self.layout.underlay;
        // The quoted packet may be longer than the MTU of the underlay port: a kernel that routes a superframe quotes
        // its length.
        let is_plausible = quote.src == to && quote.len > mtu && mtu < usize::from(underlay.mtu);
        if !is_plausible || !underlay.can_have_sent(&quote, known, remotes) {
            return Some(DropReason::BadIcmpQuote.into());
        }
        if !state.policer.admits(Protocol::TooBig, MessageSource::Known(quote.dst), context.now()) {
            return Some(DropReason::RateLimited.into());
        }
        let (start, end) = (layers.l4(), layers.end());
        let pseudo = match (from, to) {
            (IpAddr::V6(from), IpAddr::V6(to)) => pseudo6(from, to, IpProtocol::ICMPV6, (end - start) as u32),
            _ => Sum::ZERO,
        };
        Some(check_sum(packet, start, end, pseudo).err().unwrap_or(Rejection::TooBig))
    }
}

/// A lower MTU of the path between two addresses.
#[derive(Clone, Copy, Debug)]
struct Lowered {
    mtu: u16,
    /// Second in which it is forgotten.
    until: u32,
}

/// Lower MTUs of the paths from own addresses to remotes.
#[derive(Debug, Default)]
pub(super) struct PathMtus {
    paths: HashMap<(IpAddr, IpAddr), Lowered>,
    pub(super) stats: PathMtuStats,
}

/// Numbers of events since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathMtuStats {
    /// Valid messages that packets were too long.
    pub messages: u64,
    /// Path MTUs lowered by them.
    pub lowered: u64,
    /// Path MTUs forgotten after their lifetime.
    pub expired: u64,
}

impl PathMtus {
    /// Returns the MTU of the path from an own address to a remote. `most` is that of the underlay.
    pub(super) fn of(&self, local: IpAddr, remote: IpAddr, most: u16) -> u16 {
        self.paths.get(&(local, remote)).map_or(most, |path| path.mtu.min(most))
    }

    /// Iterates over the lower MTUs: path, MTU, and seconds until it is forgotten.
    pub(super) fn lowered(&self, now: u32) -> impl Iterator<Item = ((IpAddr, IpAddr), u16, u32)> {
        self.paths.iter().map(move |(path, it)| (*path, it.mtu, it.until.saturating_sub(now)))
    }

    /// Sets the MTU of a path, which is forgotten in the second `until`.
    pub(super) fn restore(&mut self, path: (IpAddr, IpAddr), mtu: u16, until: u32) {
        self.paths.insert(path, Lowered { mtu, until });
    }

    /// Number of paths with a lower MTU.
    pub(super) fn len(&self) -> usize {
        self.paths.len()
    }

    /// Takes the MTU of a valid message. Returns whether the path MTU is lower now.
    fn lower(&mut self, path: (IpAddr, IpAddr), mtu: u16, now: u32) -> bool {
        self.stats.messages += 1;
        let until = now.saturating_add(LIFETIME);
        match self.paths.get_mut(&path) {
            // A packet that was sent before the MTU was lowered, or another router of the path with a larger MTU.
            Some(known) if known.mtu < mtu => return false,
            Some(known) if known.mtu == mtu => {
                known.until = until;
                return false;
            }
            _ => {}
        }
        self.paths.insert(path, Lowered { mtu, until });
        self.stats.lowered += 1;
        true
    }

    /// Forgets the values whose lifetime is over. Returns whether there were any.
    fn expire(&mut self, now: u32) -> bool {
        let before = self.paths.len();
        self.paths.retain(|_, path| path.until > now);
        let expired = before - self.paths.len();
        self.stats.expired += expired as u64;
        expired > 0
    }
}

impl GatewayControl {
    /// Returns the numbers of path MTU messages since the start.
    pub fn path_mtu_stats(&self) -> PathMtuStats {
        self.path_mtus.stats
    }

    /// Processes an ICMP error that a worker has verified.
    pub(super) fn handle_too_big(&mut self, plane: &mut ControlPlane, packet: Packet) {
        let parser = Parser { tunnels: Tunnels::NONE, ..Parser::default() };
        let frame = packet.data();
        let layers = parser.parse_stack(frame, 0, packet.len()).ok();
        let found = layers.and_then(|layers| Some((TooBig::read(frame, &layers)?, layers.ip_addresses(frame)?.0)));
        let Some((TooBig { mtu, quote }, router)) = found else {
            return plane.drop(packet, DropReason::BadIcmpQuote);
        };
        let (path, mtu) = ((quote.src, quote.dst), u16::try_from(mtu).unwrap_or(u16::MAX));
        let mut is_used = false;
        for (remote, route) in self.list.iter().zip(&mut self.routes) {
            if (route.local, remote.address) == path {
                route.too_big_messages += 1;
                is_used = true;
            }
        }
        // The remote may have been removed since the worker verified the message.
        if !is_used {
            return plane.drop(packet, DropReason::BadIcmpQuote);
        }
        plane.consume(packet, "icmp");
        if self.path_mtus.lower(path, mtu, plane.seconds()) {
            self.update_max_frames(|changed| changed == path);
            if self.path_mtu_log.admits(plane.now() / 1_000_000) {
                tracing::info!("the path to remote {} takes {mtu} bytes: {router} reports it", path.1);
            }
        }
    }

    /// Forgets path MTUs whose lifetime is over.
    pub(super) fn expire_path_mtus(&mut self, now: u32) {
        if self.path_mtus.expire(now) {
            self.update_max_frames(|_| true);
        }
    }

    /// Forgets the MTUs of paths that no remote has any more.
    pub(super) fn forget_unused_paths(&mut self) {
        if self.path_mtus.len() > 0 {
            let paths = self.list.iter().zip(&self.routes).map(|(remote, route)| (route.local, remote.address));
            let paths: HashSet<(IpAddr, IpAddr)> = paths.collect();
            self.path_mtus.paths.retain(|path, _| paths.contains(path));
        }
    }

    /// Forgets the path MTU of a remote that is removed next, unless another remote has the same addresses.
    pub(super) fn forget_path_of(&mut self, index: u32) {
        let ends = |(remote, route): (&Remote, &Route)| (route.local, remote.address);
        let mut all = self.list.iter().zip(&self.routes);
        let Some(path) = all.nth(index as usize).map(ends).filter(|path| self.path_mtus.paths.contains_key(path))
        else {
            return;
        };
        let others = self.list.iter().zip(&self.routes).enumerate().filter(|(at, _)| *at != index as usize);
        if !others.map(|(_, pair)| ends(pair)).any(|other| other == path) {
            self.path_mtus.paths.remove(&path);
        }
    }

    /// Computes anew what frames the remotes of some paths take. The workers see it after [`Self::publish`].
    pub(super) fn update_max_frames(&mut self, concerns: impl Fn((IpAddr, IpAddr)) -> bool) {
        let remotes = self.list.iter_mut().zip(&self.routes);
        for (remote, route) in remotes.filter(|(remote, route)| concerns((route.local, remote.address))) {
            let segment = self.places.position(remote.segment).and_then(|at| self.config.segments.get(at));
            let mtu = self.path_mtus.of(route.local, remote.address, self.underlay_mtu);
            remote.max_frame = max_frame(&self.config.underlay, mtu, segment, remote.address);
            remote.max_fragmented = segment.map_or(0, SegmentConfig::longest_fragmented);
        }
        self.dirty = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(last: u8) -> (IpAddr, IpAddr) {
        (Ipv4Addr::new(10, 9, 0, 1).into(), Ipv4Addr::new(10, 9, 0, last).into())
    }

    #[test]
    fn a_path_mtu_is_lowered_and_expires() {
        let mut mtus = PathMtus::default();
        let of = |mtus: &PathMtus, last| mtus.of(path(last).0, path(last).1, 1500);
        assert!(mtus.lower(path(2), 1400, 100));
        assert_eq!((of(&mtus, 2), of(&mtus, 3)), (1400, 1500));
        assert!(!mtus.lower(path(2), 1450, 200), "it is never raised");
        assert!(mtus.lower(path(2), 1300, 300));
        assert!(!mtus.lower(path(2), 1300, 400), "the same value, which renews it");
        assert!(!mtus.expire(400 + LIFETIME - 1));
        assert_eq!(of(&mtus, 2), 1300);
        assert!(mtus.expire(400 + LIFETIME) && !mtus.expire(400 + LIFETIME));
        assert_eq!((of(&mtus, 2), mtus.len()), (1500, 0));
        assert_eq!(mtus.stats, PathMtuStats { messages: 4, lowered: 2, expired: 1 });
        assert!(mtus.lower(path(2), 9000, 0));
        assert_eq!(of(&mtus, 2), 1500, "never above that of the underlay");
    }
}
