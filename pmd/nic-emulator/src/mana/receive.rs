//! Receive queues: frames are hashed, spread, stripped of their VLAN tag, scattered, and told of.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeHead, CqeTail, RxFlags, WQE_UNIT};
use wirepath_nic_defs::uverbs::{self, EVENT_WQ_FATAL};

use super::queues::{AHEAD, Cq, Held, Rq, pair};
use super::transmit::{Sge, Wqe};
use super::{Mana, Qp, Rss, TABLE, owner_of};
use crate::device::{Env, Event, ObjectId};
use crate::faults::What;
use crate::frame::{self, ETHERNET, Layers, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::{Keys, Refusal};

impl<H: Host> Mana<H> {
    pub(super) fn take_frames(&mut self, env: &mut Env<'_>, at: usize, frames: &[&[u8]], offered: bool) -> usize {
        let mut taken = 0;
        for frame in frames {
            let took = self.take_frame(env, at, frame, offered);
            taken += usize::from(took);
            if offered && !took {
                break;
            }
        }
        taken
    }

    #[inline]
    fn take_frame(&mut self, env: &mut Env<'_>, at: usize, bytes: &[u8], offered: bool) -> bool {
        let scan = Self::scans(env);
        let Self { ports, qps, rqs, cqs, keys, wqe, spec, .. } = self;
        let port = &mut ports[at];
        if bytes.len() < ETHERNET || bytes.len() > spec.ports[at].mtu as usize + ETHERNET + 4 {
            return false;
        }
        if spec.ports[at].own_address_only && bytes[0] & 1 == 0 && bytes[..6] != spec.ports[at].mac {
            port.counters.other_address += 1;
            return false;
        }
        let Some(Qp::Rss(rss)) = port.steering.and_then(|qp| qps.get_mut(qp)) else {
            port.counters.no_steering += u64::from(!offered);
            return false;
        };
        let layers = frame::parse(bytes);
        let (hash, kind) = hash(rss, &layers, bytes);
        // With one queue nothing waits for the hash.
        let queue = rss.only.unwrap_or_else(|| spread(rss, hash));
        let Some(rq) = rqs.get_mut(queue) else { return false };
        let Some(cq) = cqs.get_mut(rq.cq) else { return false };
        let fetched = wqe.next(&rq.work, scan, defs::MAX_RX_WQE);
        if matches!(fetched, Ok(false)) {
            if !offered {
                rq.no_buffer += 1;
                port.counters.no_buffer += 1;
            }
            return false;
        }
        rq.work.expect(AHEAD);
        let head = rq.work.head;
        let number = rq.number.unwrap_or_default();
        let stripped = layers.vlan.is_some();
        let pieces: [&[u8]; 2] = if stripped { [&bytes[..12], &bytes[16..]] } else { [bytes, &[]] };
        let result = fetched.and_then(|_| {
            if wqe.count as u32 > rq.max_sge {
                return Err(format!("{} entries, and the queue was made for {}", wqe.count, rq.max_sge));
            }
            scatter(keys, rq.work.pd, wqe, pieces).map_err(|(i, sge, why)| {
                format!("entry {i}: address {:#x}, {} bytes, key {:#x}: {why}", sge.address, sge.size, sge.key)
            })
        });
        rq.work.consume(wqe.units, scan);
        let written = match result {
            Ok(written) => written,
            Err(why) => {
                let offset = head.wrapping_mul(WQE_UNIT) & (rq.work.bytes - 1);
                env.log.line(format_args!("{} rq {number}: wqe at {offset:#x}: {why}; the queue stops", spec.name));
                rq.errors += 1;
                rq.work.stopped = true;
                env.events.push(Event::Object(owner_of(rq), EVENT_WQ_FATAL));
                return false;
            }
        };
        let length = bytes.len() - if stripped { 4 } else { 0 };
        let flags = verdicts(&layers, bytes, kind);
        rq.received += 1;
        rq.received_bytes += length as u64;
        port.counters.received += 1;
        port.counters.received_bytes += length as u64;
        let packet = (written as u16, hash);
        if written < length {
            rq.truncated += 1;
            send_held(rq, cq, env);
            let held = Held { count: 1, flags: flags.0, packets: [packet, (0, 0), (0, 0), (0, 0)], wqe: head };
            complete(rq, cq, env, &held, defs::CQE_RX_TRUNCATED);
            return true;
        }
        if spec.coalesce {
            if rq.held.count == defs::RX_COALESCED || rq.held.count > 0 && rq.held.flags != flags.0 {
                send_held(rq, cq, env);
            }
            if rq.held.count == 0 {
                rq.held = Held { count: 0, flags: flags.0, packets: [(0, 0); 4], wqe: head };
            }
            rq.held.packets[rq.held.count as usize] = packet;
            rq.held.count += 1;
            return true;
        }
        let held = Held { count: 1, flags: flags.0, packets: [packet, (0, 0), (0, 0), (0, 0)], wqe: head };
        complete(rq, cq, env, &held, defs::CQE_RX_OKAY);
        true
    }

    /// A burst is over: what waits for more goes out.
    pub(super) fn end_burst(&mut self, env: &mut Env<'_>) {
        let Self { rqs, cqs, spec, .. } = self;
        if spec.coalesce {
            for rq in rqs.iter_mut() {
                if let Some(cq) = cqs.get_mut(rq.cq) {
                    send_held(rq, cq, env);
                }
            }
        }
        cqs.iter_mut().for_each(Cq::publish);
    }
}

fn send_held<R: Region>(rq: &mut Rq<R>, cq: &mut Cq<R>, env: &mut Env<'_>) {
    if rq.held.count > 0 {
        let held = std::mem::take(&mut rq.held);
        let code = if held.count == 1 { defs::CQE_RX_OKAY } else { defs::CQE_RX_COALESCED_4 };
        complete(rq, cq, env, &held, code);
    }
}

#[inline(always)]
fn complete<R: Region>(rq: &Rq<R>, cq: &mut Cq<R>, env: &mut Env<'_>, held: &Held, code: u32) {
    const { assert!(defs::RX_PACKETS == 8 && defs::RX_PACKET_BYTES == 12 && defs::RX_WQE_OFFSET == 56) };
    let head = CqeHead::default().with_cqe_type(code).with_client_type(defs::CLIENT_ETHERNET);
    // Those that are not there are zeros.
    let [first, second, third, fourth] = held.packets;
    let entry = [
        pair(head.0, held.flags),
        pair(first.0.into(), 0),
        pair(first.1, second.0.into()),
        pair(0, second.1),
        pair(third.0.into(), 0),
        pair(third.1, fourth.0.into()),
        pair(0, fourth.1),
        pair(held.wqe & (rq.work.bytes / WQE_UNIT - 1), 0),
    ];
    let tail = CqeTail::default().with_queue(rq.number.unwrap_or_default());
    if !env.orders.is_empty()
        && let Some(What::Hostile { lie, .. }) =
            env.orders.strike(env.device, |what| matches!(what, What::Hostile { transmit: false, .. }))
    {
        env.log.line(format_args!("rq {:#x}: hostile completion as ordered: {lie}", rq.number.unwrap_or(0)));
        cq.lie(&entry, tail, lie, env.events);
        return;
    }
    cq.complete(&entry, tail, env.events);
}

/// Copies a frame into the buffers of a descriptor: how much of it fitted.
fn scatter<R: Region>(keys: &Keys<R>, pd: u32, wqe: &Wqe, pieces: [&[u8]; 2]) -> Result<usize, (usize, Sge, Refusal)> {
    if let ([sge], [whole, []]) = (wqe.sges(), pieces)
        && whole.len() <= sge.size as usize
    {
        let (region, offset) =
            keys.find(sge.key, sge.address, u64::from(sge.size), pd, true).map_err(|why| (0, *sge, why))?;
        let _ = region.write(offset, whole);
        return Ok(whole.len());
    }
    let mut written = 0;
    let mut pieces = pieces.into_iter();
    let mut rest: &[u8] = pieces.next().unwrap_or_default();
    for (i, sge) in wqe.sges().iter().enumerate() {
        // A buffer is checked even if this frame does not reach it: a device translates all of a descriptor.
        let (region, offset) =
            keys.find(sge.key, sge.address, u64::from(sge.size), pd, true).map_err(|why| (i, *sge, why))?;
        let mut used = 0;
        while used < sge.size as usize {
            if rest.is_empty() {
                match pieces.next() {
                    Some(next) => rest = next,
                    None => break,
                }
            }
            let size = rest.len().min(sge.size as usize - used);
            let _ = region.write(offset + used as u64, &rest[..size]);
            rest = &rest[size..];
            used += size;
        }
        written += used;
    }
    Ok(written)
}

/// The queue that a hash leads to. By a call, in whose place no address is chosen that needs the hash.
#[inline(never)]
fn spread(rss: &Rss, hash: u32) -> ObjectId {
    rss.table[hash as usize % TABLE]
}

/// The hash by which a frame is spread, and what went into it.
#[inline]
fn hash(rss: &mut Rss, layers: &Layers, bytes: &[u8]) -> (u32, u32) {
    let Some(network) = layers.network else { return (0, 0) };
    let (addresses_wanted, ports_tcp, ports_udp, plain, tcp, udp) = match network {
        Network::V4 => (
            uverbs::RX_HASH_SRC_IPV4 | uverbs::RX_HASH_DST_IPV4,
            uverbs::RX_HASH_SRC_PORT_TCP | uverbs::RX_HASH_DST_PORT_TCP,
            uverbs::RX_HASH_SRC_PORT_UDP | uverbs::RX_HASH_DST_PORT_UDP,
            defs::HASH_IPV4,
            defs::HASH_TCP_IPV4,
            defs::HASH_UDP_IPV4,
        ),
        Network::V6 => (
            uverbs::RX_HASH_SRC_IPV6 | uverbs::RX_HASH_DST_IPV6,
            uverbs::RX_HASH_SRC_PORT_TCP | uverbs::RX_HASH_DST_PORT_TCP,
            uverbs::RX_HASH_SRC_PORT_UDP | uverbs::RX_HASH_DST_PORT_UDP,
            defs::HASH_IPV6,
            defs::HASH_TCP_IPV6,
            defs::HASH_UDP_IPV6,
        ),
    };
    if rss.fields & addresses_wanted == 0 {
        return (0, 0);
    }
    let kind = match layers.protocol {
        TCP if rss.fields & ports_tcp != 0 => tcp,
        UDP if rss.fields & ports_udp != 0 => udp,
        _ => return (rss.hash.hash([layers.addresses(bytes)]), plain),
    };
    let hash = match layers.tuple(bytes) {
        Some(tuple) => rss.hash.hash_tuple(tuple),
        None => rss.hash.hash([layers.addresses(bytes), &bytes[layers.l4..layers.l4 + 4]]),
    };
    (hash, kind)
}

/// What the completion says about a frame.
#[inline]
fn verdicts(layers: &Layers, bytes: &[u8], hash_type: u32) -> RxFlags {
    let mut flags = RxFlags::default().with_hash_type(hash_type);
    if let Some(tag) = layers.vlan {
        // The entry has no room for the priority.
        flags = flags.with_vlan_present(1).with_vlan_id(u32::from(tag & 0xfff));
    }
    flags = match layers.ip_checksum_ok(bytes) {
        Some(true) => flags.with_ip_ok(1),
        Some(false) => flags.with_ip_bad(1),
        None => flags,
    };
    match (layers.protocol, layers.transport_checksum_ok(bytes)) {
        (TCP, Some(true)) => flags.with_tcp_ok(1),
        (TCP, Some(false)) => flags.with_tcp_bad(1),
        (UDP, Some(true)) => flags.with_udp_ok(1),
        (UDP, Some(false)) => flags.with_udp_bad(1),
        _ => flags,
    }
}
