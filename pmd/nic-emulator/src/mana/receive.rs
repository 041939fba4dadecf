//! Receive queues: RSS hash and queue selection, VLAN stripping, scattering into buffers, completions.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeHead, CqeTail, RxFlags, WQE_UNIT};
use wirepath_nic_defs::uverbs::{self, EVENT_WQ_FATAL};

use super::queues::{Cq, PREFETCH_BYTES, PendingCqe, Rq, pair};
use super::transmit::{Sge, Wqe};
use super::{Mana, Port, PortCounters, Qp, Rss, TABLE, event_target};
use crate::device::{Env, Event, ObjectId, receive_runs};
use crate::faults::FaultKind;
use crate::frame::{self, ETHERNET, FramePattern, HeaderOffsets, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::{KeyError, MkeyTable};
use crate::slots::Slab;
use crate::topology::DeviceSpec;

/// Pattern bits of the destination address.
const DESTINATION: [u8; FramePattern::BYTES] = {
    let mut bits = [0; FramePattern::BYTES];
    let mut at = 0;
    while at < 6 {
        bits[at] = 0xff;
        at += 1;
    }
    bits
};

/// Consecutive frames with equal header offsets and the same destination address.
struct Run<'a> {
    frames: &'a [&'a [u8]],
    layers: &'a HeaderOffsets,
    /// Fields that are hashed.
    hash_type: u32,
}

/// State that the receive path needs.
struct Queues<'a, R> {
    keys: &'a MkeyTable<R>,
    rqs: &'a mut Slab<Rq<R>>,
    cqs: &'a mut Slab<Cq<R>>,
    wqe: &'a mut Wqe,
    counters: &'a mut PortCounters,
    spec: &'a DeviceSpec,
    scan: bool,
    lossless: bool,
}

impl<H: Host> Mana<H> {
    pub(super) fn receive_frames(&mut self, env: &mut Env<'_>, at: usize, frames: &[&[u8]], lossless: bool) -> usize {
        let scan = Self::scans(env);
        let Self { ports, qps, rqs, cqs, keys, wqe, spec, .. } = self;
        let Port { steering, counters, last, .. } = &mut ports[at];
        let mut queues = Queues { keys, rqs, cqs, wqe, counters, spec, scan, lossless };
        let port = &spec.ports[at];
        receive_runs(frames, lossless, |rest| {
            let first = rest[0];
            let (seen, layers) = match last {
                Some((pattern, layers)) if pattern.matches(first) => (pattern.matching_prefix(rest), *layers),
                _ => {
                    let layers = frame::parse(first);
                    *last = FramePattern::from_frame(first, DESTINATION).map(|pattern| (pattern, layers));
                    (1, layers)
                }
            };
            if first.len() < ETHERNET || first.len() > port.mtu as usize + ETHERNET + 4 {
                return (seen, 0);
            }
            if port.own_address_only && first[0] & 1 == 0 && first[..6] != port.mac {
                queues.counters.other_address += if lossless { 1 } else { seen as u64 };
                return (seen, 0);
            }
            let Some(Qp::Rss(rss)) = steering.and_then(|qp| qps.get_mut(qp)) else {
                queues.counters.no_steering += if lossless { 0 } else { seen as u64 };
                return (seen, 0);
            };
            let run = Run { frames: &rest[..seen], layers: &layers, hash_type: hash_type(rss, &layers) };
            (seen, queues.distribute(env, rss, &run))
        })
    }

    /// Ends a burst: writes pending completions and publishes all entries.
    pub(super) fn end_burst(&mut self, env: &mut Env<'_>) {
        let Self { rqs, cqs, spec, .. } = self;
        if spec.coalesce {
            for rq in rqs.iter_mut() {
                if let Some(cq) = cqs.get_mut(rq.cq) {
                    flush_pending(rq, cq, env);
                }
            }
        }
        cqs.iter_mut().for_each(Cq::publish);
    }
}

impl<R: Region> Queues<'_, R> {
    /// Delivers frames to the queues of a queue pair; returns the number of accepted frames. With `lossless`
    /// it ends at the first frame that is not accepted.
    fn distribute(&mut self, env: &mut Env<'_>, rss: &mut Rss, run: &Run<'_>) -> usize {
        // With a single queue the delivery does not wait for the hash.
        if let Some(queue) = rss.single_queue {
            return self.fill(env, queue, run, |bytes| hash(rss, run, bytes));
        }
        receive_runs(run.frames, self.lossless, |rest| {
            let hashed = hash(rss, run, rest[0]);
            let queue = rss.table[hashed as usize % TABLE];
            (1, self.fill(env, queue, &Run { frames: &rest[..1], ..*run }, |_| hashed))
        })
    }

    /// Delivers frames to a queue; returns the number of accepted frames.
    #[inline]
    fn fill(&mut self, env: &mut Env<'_>, queue: ObjectId, run: &Run<'_>, mut hash: impl FnMut(&[u8]) -> u32) -> usize {
        let Self { keys, rqs, cqs, wqe, counters, spec, scan, lossless } = self;
        let Some(rq) = rqs.get_mut(queue) else { return 0 };
        let Some(cq) = cqs.get_mut(rq.cq) else { return 0 };
        let mut taken = 0;
        for bytes in run.frames {
            let fetched = wqe.next(&rq.work, *scan, defs::MAX_RX_WQE);
            if matches!(fetched, Ok(false)) {
                if *lossless {
                    break;
                }
                rq.no_buffer += 1;
                counters.no_buffer += 1;
                continue;
            }
            rq.work.prefetch_write(PREFETCH_BYTES);
            let head = rq.work.head;
            let pieces = frame::split_vlan(bytes, run.layers.vlan.is_some());
            let result = fetched.and_then(|_| {
                if wqe.sge_count as u32 > rq.max_sge {
                    return Err(format!("{} entries, but the queue was created for {}", wqe.sge_count, rq.max_sge));
                }
                scatter(keys, rq.work.pd, wqe, pieces).map_err(|(i, sge, why)| {
                    format!("entry {i}: address {:#x}, {} bytes, key {:#x}: {why}", sge.address, sge.size, sge.key)
                })
            });
            rq.work.consume(wqe.units, *scan);
            let written = match result {
                Ok(written) => written,
                Err(why) => {
                    stop(rq, env, spec, head, &why);
                    if *lossless {
                        break;
                    }
                    continue;
                }
            };
            taken += 1;
            let length = pieces[0].len() + pieces[1].len();
            let packet = (written as u16, hash(bytes));
            let flags = rx_flags(run.layers, bytes, run.hash_type);
            rq.received += 1;
            rq.received_bytes += length as u64;
            counters.received += 1;
            counters.received_bytes += length as u64;
            let one = PendingCqe { count: 1, flags: flags.0, packets: [packet, (0, 0), (0, 0), (0, 0)], wqe: head };
            if written < length {
                rq.truncated += 1;
                flush_pending(rq, cq, env);
                complete(rq, cq, env, &one, defs::CQE_RX_TRUNCATED);
            } else if !spec.coalesce {
                complete(rq, cq, env, &one, defs::CQE_RX_OKAY);
            } else if (1..defs::RX_COALESCED).contains(&rq.pending.count) && rq.pending.flags == flags.0 {
                rq.pending.packets[rq.pending.count as usize] = packet;
                rq.pending.count += 1;
            } else {
                flush_pending(rq, cq, env);
                rq.pending = one;
            }
        }
        taken
    }
}

/// Stops the queue because of the descriptor at `head`.
#[cold]
fn stop<R: Region>(rq: &mut Rq<R>, env: &mut Env<'_>, spec: &DeviceSpec, head: u32, why: &str) {
    let number = rq.number.unwrap_or_default();
    let offset = head.wrapping_mul(WQE_UNIT) & (rq.work.bytes - 1);
    env.log.line(format_args!("{} rq {number}: wqe at {offset:#x}: {why}; the queue stops", spec.name));
    rq.errors += 1;
    rq.work.stopped = true;
    env.events.push(Event::Object(event_target(rq), EVENT_WQ_FATAL));
}

fn flush_pending<R: Region>(rq: &mut Rq<R>, cq: &mut Cq<R>, env: &mut Env<'_>) {
    if rq.pending.count > 0 {
        let pending = std::mem::take(&mut rq.pending);
        let code = if pending.count == 1 { defs::CQE_RX_OKAY } else { defs::CQE_RX_COALESCED_4 };
        complete(rq, cq, env, &pending, code);
    }
}

#[inline(always)]
fn complete<R: Region>(rq: &Rq<R>, cq: &mut Cq<R>, env: &mut Env<'_>, pending: &PendingCqe, code: u32) {
    const { assert!(defs::RX_PACKETS == 8 && defs::RX_PACKET_BYTES == 12 && defs::RX_WQE_OFFSET == 56) };
    let head = CqeHead::default().with_cqe_type(code).with_client_type(defs::CLIENT_ETHERNET);
    // Unused packet slots are zero.
    let [first, second, third, fourth] = pending.packets;
    let entry = [
        pair(head.0, pending.flags),
        pair(first.0.into(), 0),
        pair(first.1, second.0.into()),
        pair(0, second.1),
        pair(third.0.into(), 0),
        pair(third.1, fourth.0.into()),
        pair(0, fourth.1),
        pair(pending.wqe & (rq.work.bytes / WQE_UNIT - 1), 0),
    ];
    let tail = CqeTail::default().with_queue(rq.number.unwrap_or_default());
    if !env.faults.is_empty()
        && let Some(FaultKind::CorruptCqe { corruption, .. }) =
            env.faults.trigger(env.device, |what| matches!(what, FaultKind::CorruptCqe { transmit: false, .. }))
    {
        env.log
            .line(format_args!("rq {:#x}: injected fault: corrupt completion ({corruption})", rq.number.unwrap_or(0)));
        cq.complete_corrupted(&entry, tail, corruption, env.events);
        return;
    }
    cq.complete(&entry, tail, env.events);
}

/// Copies a frame into the buffers of a descriptor; returns the number of bytes that fit.
fn scatter<R: Region>(
    keys: &MkeyTable<R>,
    pd: u32,
    wqe: &Wqe,
    pieces: [&[u8]; 2],
) -> Result<usize, (usize, Sge, KeyError)> {
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
        // All buffers are checked, even if the frame does not reach them: a device translates the whole
        // descriptor.
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

/// Returns the fields that are hashed for RSS; 0 for none.
fn hash_type(rss: &Rss, layers: &HeaderOffsets) -> u32 {
    let Some(network) = layers.network else { return 0 };
    let (addresses_wanted, plain, tcp, udp) = match network {
        Network::V4 => (
            uverbs::RX_HASH_SRC_IPV4 | uverbs::RX_HASH_DST_IPV4,
            defs::HASH_IPV4,
            defs::HASH_TCP_IPV4,
            defs::HASH_UDP_IPV4,
        ),
        Network::V6 => (
            uverbs::RX_HASH_SRC_IPV6 | uverbs::RX_HASH_DST_IPV6,
            defs::HASH_IPV6,
            defs::HASH_TCP_IPV6,
            defs::HASH_UDP_IPV6,
        ),
    };
    let wants = |fields: u64| rss.fields & fields != 0;
    match layers.protocol {
        _ if !wants(addresses_wanted) => 0,
        TCP if wants(uverbs::RX_HASH_SRC_PORT_TCP | uverbs::RX_HASH_DST_PORT_TCP) => tcp,
        UDP if wants(uverbs::RX_HASH_SRC_PORT_UDP | uverbs::RX_HASH_DST_PORT_UDP) => udp,
        _ => plain,
    }
}

/// Returns the RSS hash of a frame.
#[inline]
fn hash(rss: &mut Rss, run: &Run<'_>, bytes: &[u8]) -> u32 {
    let layers = run.layers;
    match run.hash_type {
        0 => 0,
        defs::HASH_IPV4 | defs::HASH_IPV6 => rss.hash.hash([layers.addresses(bytes)]),
        _ => match layers.tuple(bytes) {
            Some(tuple) => rss.hash.hash_tuple(tuple),
            None => rss.hash.hash([layers.addresses(bytes), &bytes[layers.l4..layers.l4 + 4]]),
        },
    }
}

/// Returns the completion flags of a frame.
#[inline]
fn rx_flags(layers: &HeaderOffsets, bytes: &[u8], hash_type: u32) -> RxFlags {
    let mut flags = RxFlags::default().with_hash_type(hash_type);
    if let Some(tag) = layers.vlan {
        // The entry contains the VLAN id only, not the priority.
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
