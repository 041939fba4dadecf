//! Policing of the packets that the gateway itself answers or learns from.
//!
//! Each protocol has its own limits, so a flood of one protocol leaves the others alone. Within a protocol,
//! next hops and remotes ("known hosts") have limits that strangers do not share. Each source also has its own
//! limit. A reply to a solicitation of the gateway passes without a limit, because the number of solicitations
//! bounds the number of such replies. Without these replies the tunnels would lose their next hops.
//!
//! The limits apply to each worker. They lie far below what the control thread can process.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, Hash, RandomState};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use wirepath_wire::MacAddr;

use super::bfd::MAX_RATE;
use super::outer::TunnelId;
use crate::token_bucket::TokenBucket;

/// Replies that pass for one solicitation: the real one, and those of another host with the same address.
const REPLIES_PER_SOLICITATION: u64 = 3;
/// Slots of [`ExpectedReplies`]. If two addresses share a slot, only the replies of the later one pass without
/// a limit.
const REPLY_SLOTS: usize = 1 << 14;
/// Buckets for the sources of one protocol. Sources that share a bucket share its limit.
const SOURCE_BUCKETS: usize = 512;

/// Rate per second and burst of a limit.
type Limit = (u64, u128);

/// Next hops and remotes, as the workers read them.
#[derive(Debug, Default)]
pub(super) struct KnownHosts {
    /// Addresses of next hops and remotes.
    pub(super) addresses: HashSet<IpAddr>,
    /// Ethernet addresses of resolved next hops.
    pub(super) macs: HashSet<MacAddr>,
    /// Local and remote address of each BFD session by its local discriminator.
    pub(super) bfd_sessions: HashMap<u32, (IpAddr, IpAddr)>,
    /// Local and remote address of all BFD sessions.
    pub(super) bfd_peers: HashSet<(IpAddr, IpAddr)>,
    /// Tunnel that carries BFD packets (RFC 8971). `None`: they are outside of tunnels.
    pub(super) bfd_tunnel: Option<TunnelId>,
    /// Kind of the tunnel, local and remote address of all remotes whose next hop is known.
    pub(super) paths: HashSet<(u8, IpAddr, IpAddr)>,
}

/// Replies to ARP and ND solicitations that the gateway expects. The control thread adds credit, and workers
/// take it.
#[derive(Debug)]
pub(super) struct ExpectedReplies {
    /// Hash of the address with the credit in its lowest two bits; 0 in an unused slot.
    slots: Box<[AtomicU64]>,
    hasher: RandomState,
}

impl ExpectedReplies {
    pub(super) fn new() -> Self {
        Self { slots: (0..REPLY_SLOTS).map(|_| AtomicU64::new(0)).collect(), hasher: RandomState::new() }
    }

    /// Returns the slot of an address and the hash in it.
    fn slot(&self, ip: IpAddr) -> (&AtomicU64, u64) {
        let hash = self.hasher.hash_one(ip);
        (&self.slots[(hash >> 32) as usize % REPLY_SLOTS], hash & !3)
    }

    /// Lets the replies to one solicitation of `ip` pass.
    pub(super) fn expect(&self, ip: IpAddr) {
        let (slot, hash) = self.slot(ip);
        slot.store(hash | REPLIES_PER_SOLICITATION, Ordering::Relaxed);
    }

    /// Takes the credit of one reply from `ip`. Returns `false` if there is none.
    pub(super) fn take(&self, ip: IpAddr) -> bool {
        let (slot, hash) = self.slot(ip);
        let take = |value: u64| (value & !3 == hash && value & 3 > 0).then(|| value - 1);
        slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok()
    }
}

/// Source of a message.
#[derive(Clone, Copy, Debug, Hash)]
pub(super) enum MessageSource {
    /// A next hop or remote, by its address.
    Known(IpAddr),
    /// A next hop, by its Ethernet address, with another address.
    KnownMac(MacAddr),
    /// Another host.
    Stranger(IpAddr),
}

impl MessageSource {
    /// Classifies the sender of an ARP or ND message.
    pub(super) fn of_neighbour(ip: IpAddr, mac: MacAddr, known: &KnownHosts) -> Self {
        match Self::of_host(ip, known) {
            Self::Stranger(_) if known.macs.contains(&mac) => Self::KnownMac(mac),
            source => source,
        }
    }

    /// Classifies the sender of a packet that may have passed routers.
    pub(super) fn of_host(ip: IpAddr, known: &KnownHosts) -> Self {
        if known.addresses.contains(&ip) { Self::Known(ip) } else { Self::Stranger(ip) }
    }
}

/// A limit for each source and one for all sources.
#[derive(Debug)]
struct SourceLimits {
    each: Box<[TokenBucket]>,
    all: TokenBucket,
}

impl SourceLimits {
    fn new((rate, burst): Limit, (all_rate, all_burst): Limit) -> Self {
        Self {
            each: (0..SOURCE_BUCKETS).map(|_| TokenBucket::new(rate, burst)).collect(),
            all: TokenBucket::new(all_rate, all_burst),
        }
    }

    fn take(&self, hash: u64, now: u64) -> bool {
        self.each[hash as usize % SOURCE_BUCKETS].take(1, now) && self.all.take(1, now)
    }
}

/// Limits of one protocol.
#[derive(Debug)]
struct ProtocolLimits {
    known: SourceLimits,
    strangers: SourceLimits,
}

impl ProtocolLimits {
    /// Limits of ARP and of ND. A host sends one solicitation per second for an address (RFC 4861 section 10).
    fn neighbours() -> Self {
        Self { known: SourceLimits::new((20, 20), (2_000, 400)), strangers: SourceLimits::new((10, 10), (500, 100)) }
    }

    /// Limits of BFD. Packets without the discriminator of a session count as those of strangers: a remote sends one
    /// per second before it knows the discriminator. With it, 4096 sessions may send every 300 ms.
    fn bfd() -> Self {
        Self {
            known: SourceLimits::new((400, 100), (MAX_RATE, 2_000)),
            strangers: SourceLimits::new((20, 10), (5_000, 500)),
        }
    }

    /// Limits of ICMP errors about packets that are too long, by the remote of the quoted packet. A path has a few
    /// routers with different MTUs, and each of them reports all packets in flight.
    fn too_big() -> Self {
        Self { known: SourceLimits::new((5, 10), (100, 100)), strangers: SourceLimits::new((0, 0), (0, 0)) }
    }

    /// Limits of echo, which workers answer.
    fn echo() -> Self {
        Self {
            known: SourceLimits::new((1_000, 200), (10_000, 1_000)),
            strangers: SourceLimits::new((1_000, 100), (5_000, 500)),
        }
    }
}

/// The limits of one worker.
#[derive(Debug)]
pub(super) struct Policer {
    hasher: RandomState,
    arp: ProtocolLimits,
    nd: ProtocolLimits,
    echo: ProtocolLimits,
    bfd: ProtocolLimits,
    too_big: ProtocolLimits,
    /// Messages of other hosts with an address of the gateway.
    conflicts: TokenBucket,
    /// Frames for an unresolved next hop.
    unresolved: TokenBucket,
}

/// Protocols with limits for each source.
#[derive(Clone, Copy, Debug)]
pub(super) enum Protocol {
    Arp,
    Nd,
    Echo,
    Bfd,
    TooBig,
}

impl Policer {
    pub(super) fn new() -> Self {
        Self {
            hasher: RandomState::new(),
            arp: ProtocolLimits::neighbours(),
            nd: ProtocolLimits::neighbours(),
            echo: ProtocolLimits::echo(),
            bfd: ProtocolLimits::bfd(),
            too_big: ProtocolLimits::too_big(),
            conflicts: TokenBucket::new(10, 10),
            unresolved: TokenBucket::new(1_000, 100),
        }
    }

    /// Returns whether a message of this source is within the limits.
    pub(super) fn admits(&self, protocol: Protocol, source: MessageSource, now: u64) -> bool {
        let limits = match protocol {
            Protocol::Arp => &self.arp,
            Protocol::Nd => &self.nd,
            Protocol::Echo => &self.echo,
            Protocol::Bfd => &self.bfd,
            Protocol::TooBig => &self.too_big,
        };
        let limits = if let MessageSource::Stranger(_) = source { &limits.strangers } else { &limits.known };
        limits.take(self.hasher.hash_one(source), now)
    }

    /// Returns whether a message about an address conflict is within the limit.
    pub(super) fn admits_conflict(&self, now: u64) -> bool {
        self.conflicts.take(1, now)
    }

    /// Returns whether a frame for an unresolved next hop is within the limit.
    pub(super) fn admits_unresolved(&self, now: u64) -> bool {
        self.unresolved.take(1, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(n: u32) -> IpAddr {
        IpAddr::from(n.to_be_bytes())
    }

    #[test]
    fn strangers_take_nothing_from_known_hosts() {
        let policer = Policer::new();
        let flood = (0..1_000_000).filter(|n| policer.admits(Protocol::Arp, MessageSource::Stranger(ip(*n)), 7));
        assert_eq!(flood.count(), 100);
        let known = (0..1000).filter(|_| policer.admits(Protocol::Arp, MessageSource::Known(ip(9)), 7));
        assert_eq!(known.count(), 20);
        assert!(policer.admits(Protocol::Nd, MessageSource::Stranger(ip(9)), 7), "another protocol");
    }

    #[test]
    fn each_solicitation_lets_three_replies_pass() {
        let replies = ExpectedReplies::new();
        assert!(!replies.take(ip(1)));
        replies.expect(ip(1));
        assert!((2..100_000).all(|n| !replies.take(ip(n))), "other addresses");
        assert_eq!((0..1000).filter(|_| replies.take(ip(1))).count(), 3);
        replies.expect(ip(1));
        assert!(replies.take(ip(1)));
    }
}
