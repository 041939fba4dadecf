//! Receive queues: frames are hashed, spread, stripped of their VLAN tag, scattered, and told of.

use wirepath_nic_defs::mana as defs;
use wirepath_nic_defs::mana::{CqeHead, CqeTail, RxFlags, WQE_UNIT};
use wirepath_nic_defs::uverbs::{self, EVENT_WQ_FATAL};

use super::queues::{AHEAD, Cq, Held, Rq, pair};
use super::transmit::{Sge, Wqe};
use super::{Mana, Port, PortCounters, Qp, Rss, TABLE, owner_of};
use crate::device::{Env, Event, ObjectId, take_runs};
use crate::faults::What;
use crate::frame::{self, ETHERNET, Layers, Network, Shape, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::{Keys, Refusal};
use crate::slab::Slab;
use crate::topology::DeviceSpec;

/// Bits of the address by which frames are told apart.
const DESTINATION: [u8; Shape::BYTES] = {
    let mut bits = [0; Shape::BYTES];
    let mut at = 0;
    while at < 6 {
        bits[at] = 0xff;
        at += 1;
    }
    bits
};

/// Frames that arrive one behind the other, with headers at the same places and the same destination.
struct Run<'a> {
    frames: &'a [&'a [u8]],
    layers: &'a Layers,
    /// What is hashed.
    hash_type: u32,
}

/// Where frames go.
struct Queues<'a, R> {
    keys: &'a Keys<R>,
    rqs: &'a mut Slab<Rq<R>>,
    cqs: &'a mut Slab<Cq<R>>,
    wqe: &'a mut Wqe,
    counters: &'a mut PortCounters,
    spec: &'a DeviceSpec,
    scan: bool,
    offered: bool,
}

impl<H: Host> Mana<H> {
    pub(super) fn take_frames(&mut self, env: &mut Env<'_>, at: usize, frames: &[&[u8]], offered: bool) -> usize {
        let scan = Self::scans(env);
        let Self { ports, qps, rqs, cqs, keys, wqe, spec, .. } = self;
        let Port { steering, counters, last, .. } = &mut ports[at];
        let mut queues = Queues { keys, rqs, cqs, wqe, counters, spec, scan, offered };
        let port = &spec.ports[at];
        take_runs(frames, offered, |rest| {
            let first = rest[0];
            let (seen, layers) = match last {
                Some((shape, layers)) if shape.has(first) => (shape.leads(rest), *layers),
                _ => {
                    let layers = frame::parse(first);
                    *last = Shape::of(first, DESTINATION).map(|shape| (shape, layers));
                    (1, layers)
                }
            };
            if first.len() < ETHERNET || first.len() > port.mtu as usize + ETHERNET + 4 {
                return (seen, 0);
            }
            if port.own_address_only && first[0] & 1 == 0 && first[..6] != port.mac {
                queues.counters.other_address += if offered { 1 } else { seen as u64 };
                return (seen, 0);
            }
            let Some(Qp::Rss(rss)) = steering.and_then(|qp| qps.get_mut(qp)) else {
                queues.counters.no_steering += if offered { 0 } else { seen as u64 };
                return (seen, 0);
            };
            let run = Run { frames: &rest[..seen], layers: &layers, hash_type: hash_type(rss, &layers) };
            (seen, queues.spread(env, rss, &run))
        })
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

impl<R: Region> Queues<'_, R> {
    /// Brings frames to a queue pair's queues: how many were taken. If they are only offered, the first that is not is the last.
    fn spread(&mut self, env: &mut Env<'_>, rss: &mut Rss, run: &Run<'_>) -> usize {
        // With one queue nothing waits for the hash.
        if let Some(queue) = rss.only {
            return self.fill(env, queue, run, |bytes| hash(rss, run, bytes));
        }
        take_runs(run.frames, self.offered, |rest| {
            let hashed = hash(rss, run, rest[0]);
            let queue = rss.table[hashed as usize % TABLE];
            (1, self.fill(env, queue, &Run { frames: &rest[..1], ..*run }, |_| hashed))
        })
    }

    /// Brings frames to a queue: how many were taken.
    #[inline]
    fn fill(&mut self, env: &mut Env<'_>, queue: ObjectId, run: &Run<'_>, mut hash: impl FnMut(&[u8]) -> u32) -> usize {
        let Self { keys, rqs, cqs, wqe, counters, spec, scan, offered } = self;
        let Some(rq) = rqs.get_mut(queue) else { return 0 };
        let Some(cq) = cqs.get_mut(rq.cq) else { return 0 };
        let mut taken = 0;
        for bytes in run.frames {
            let fetched = wqe.next(&rq.work, *scan, defs::MAX_RX_WQE);
            if matches!(fetched, Ok(false)) {
                if *offered {
                    break;
                }
                rq.no_buffer += 1;
                counters.no_buffer += 1;
                continue;
            }
            rq.work.expect(AHEAD);
            let head = rq.work.head;
            let pieces = frame::pieces(bytes, run.layers.vlan.is_some());
            let result = fetched.and_then(|_| {
                if wqe.count as u32 > rq.max_sge {
                    return Err(format!("{} entries, and the queue was made for {}", wqe.count, rq.max_sge));
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
                    if *offered {
                        break;
                    }
                    continue;
                }
            };
            taken += 1;
            let length = pieces[0].len() + pieces[1].len();
            let packet = (written as u16, hash(bytes));
            let flags = verdicts(run.layers, bytes, run.hash_type);
            rq.received += 1;
            rq.received_bytes += length as u64;
            counters.received += 1;
            counters.received_bytes += length as u64;
            let one = Held { count: 1, flags: flags.0, packets: [packet, (0, 0), (0, 0), (0, 0)], wqe: head };
            if written < length {
                rq.truncated += 1;
                send_held(rq, cq, env);
                complete(rq, cq, env, &one, defs::CQE_RX_TRUNCATED);
            } else if !spec.coalesce {
                complete(rq, cq, env, &one, defs::CQE_RX_OKAY);
            } else if (1..defs::RX_COALESCED).contains(&rq.held.count) && rq.held.flags == flags.0 {
                rq.held.packets[rq.held.count as usize] = packet;
                rq.held.count += 1;
            } else {
                send_held(rq, cq, env);
                rq.held = one;
            }
        }
        taken
    }
}

/// The queue stops at the descriptor at `head`.
#[cold]
fn stop<R: Region>(rq: &mut Rq<R>, env: &mut Env<'_>, spec: &DeviceSpec, head: u32, why: &str) {
    let number = rq.number.unwrap_or_default();
    let offset = head.wrapping_mul(WQE_UNIT) & (rq.work.bytes - 1);
    env.log.line(format_args!("{} rq {number}: wqe at {offset:#x}: {why}; the queue stops", spec.name));
    rq.errors += 1;
    rq.work.stopped = true;
    env.events.push(Event::Object(owner_of(rq), EVENT_WQ_FATAL));
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

/// What goes into the hash by which a frame is spread; 0: nothing.
fn hash_type(rss: &Rss, layers: &Layers) -> u32 {
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

/// The hash by which a frame is spread.
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
