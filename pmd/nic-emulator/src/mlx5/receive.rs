//! Receive queues: flow rules, RSS hash and queue selection, scattering into buffers, completions.

use wirepath_nic_defs::mlx5::{self as defs, CQE_BYTES, CqeFlags, CqeOwner, HashType, StrideCount};
use wirepath_nic_defs::uverbs::{self, EVENT_WQ_FATAL, mlx5 as abi};

use super::completion::{Cq, Entry, RxCqe};
use super::queues::{Layout, Rq, Segment, State};
use super::steering::{Delivery, RxVerdict};
use super::{Mlx5, PortCounters, Qp, Rss, event_target};
use crate::device::{Env, Event, ObjectId, receive_runs};
use crate::faults::FaultKind;
use crate::frame::{self, ETHERNET, HeaderOffsets, Network, TCP, UDP};
use crate::host::{Host, Region};
use crate::keys::{KeyError, MkeyTable};
use crate::slots::Slab;
use crate::tunnel;

/// Consecutive frames for one queue pair, with equal length and header offsets.
struct Run<'a> {
    frames: &'a [&'a [u8]],
    layers: &'a HeaderOffsets,
    tag: u32,
    metadata: u32,
}

/// Completion fields that all frames of a run have in common.
struct FrameInfo {
    /// Offset of the packet that the completion describes: the inner packet if tunnels are parsed.
    start: usize,
    layers: HeaderOffsets,
    in_tunnel: bool,
    packet_info: u8,
    /// Completion flags without the checksum results.
    flags: CqeFlags,
    /// VLAN tag that is stripped.
    vlan: Option<u16>,
}

/// A frame on its way to a receive queue.
struct Arrival<'a> {
    bytes: &'a [u8],
    run: &'a Run<'a>,
    form: &'a FrameInfo,
    hash: u32,
    hash_type: HashType,
    /// Timestamp.
    at: u64,
}

/// State that the receive path needs.
struct Queues<'a, R> {
    keys: &'a MkeyTable<R>,
    rqs: &'a mut Slab<Rq<R>>,
    cqs: &'a mut Slab<Cq<R>>,
    port: &'a mut PortCounters,
    device: &'a str,
    /// Timestamp.
    at: u64,
    /// True if inner headers of tunnel packets are parsed.
    tunnels: bool,
    lossless: bool,
}

impl<H: Host> Mlx5<H> {
    pub(super) fn receive_frames(&mut self, env: &mut Env<'_>, at: usize, frames: &[&[u8]], lossless: bool) -> usize {
        let limit = self.spec.ports[at].mtu as usize + ETHERNET + 8;
        receive_runs(frames, lossless, |rest| {
            let first = rest[0];
            if !(ETHERNET..=limit).contains(&first.len()) {
                return (1, 0);
            }
            let Some((seen, qp, tag, layers)) = self.steering.cached_verdict(at, rest) else {
                return (1, usize::from(self.receive_frame(env, at, first, lossless)));
            };
            let run = Run { frames: &rest[..seen], layers: &layers.clone(), tag, metadata: 0 };
            let now = self.deliver(env, at, qp, &run, lossless);
            self.steering.count_cached(at, if lossless { now } else { seen }, first.len());
            (seen, now)
        })
    }

    /// Returns false if a lossless source must offer the frame again. A frame that a rule drops is done with.
    fn receive_frame(&mut self, env: &mut Env<'_>, at: usize, bytes: &[u8], lossless: bool) -> bool {
        match self.steering.receive(at, bytes) {
            RxVerdict::Queue { qp, tag, counter } => {
                let taken = self.deliver_one(env, at, qp, bytes, (tag, 0), lossless);
                if let Some(counter) = counter.filter(|_| taken || !lossless) {
                    counter.count(1, bytes.len());
                }
                taken
            }
            RxVerdict::Drop => {
                self.ports[at].counters.ruled_out += 1;
                lossless
            }
            RxVerdict::Miss if env.leave_to_kernel(at, bytes) => true,
            RxVerdict::Miss => {
                self.ports[at].counters.no_rule += u64::from(!lossless);
                false
            }
            RxVerdict::Multiple => {
                let rx_actions = std::mem::take(&mut self.steering.rx_actions);
                let mut taken = lossless && rx_actions.deliveries.is_empty();
                for delivery in &rx_actions.deliveries {
                    let Delivery { qp, tag, metadata, .. } = *delivery;
                    taken |= self.deliver_one(env, at, qp, rx_actions.frame(delivery), (tag, metadata), lossless);
                }
                if let Some(left) = &rx_actions.left {
                    taken |= env.leave_to_kernel(at, left);
                }
                if taken || !lossless {
                    rx_actions.count();
                }
                self.ports[at].counters.ruled_out += u64::from(rx_actions.dropped);
                self.steering.rx_actions = rx_actions;
                taken
            }
        }
    }

    /// Ends a burst: writes pending completions and publishes all entries.
    pub(super) fn end_burst(&mut self, env: &mut Env<'_>) {
        self.burst_time = None;
        for cq in self.cqs.iter_mut() {
            cq.flush(env.events);
            cq.publish(env.events);
        }
    }

    /// Delivers a frame to one of the queues of a queue pair, with tag and metadata.
    pub(super) fn deliver_one(
        &mut self,
        env: &mut Env<'_>,
        at: usize,
        qp: ObjectId,
        bytes: &[u8],
        (tag, metadata): (u32, u32),
        lossless: bool,
    ) -> bool {
        let run = Run { frames: &[bytes], layers: &frame::parse(bytes), tag, metadata };
        self.deliver(env, at, qp, &run, lossless) > 0
    }

    /// Delivers frames to the queues of a queue pair; returns the number of accepted frames. With `lossless`
    /// it ends at the first frame that is not accepted.
    fn deliver(&mut self, env: &mut Env<'_>, at: usize, qp: ObjectId, run: &Run<'_>, lossless: bool) -> usize {
        let Self { ports, qps, rqs, cqs, keys, spec, clock, burst_time, .. } = self;
        let Some(Qp::Rss(rss)) = qps.get_mut(qp) else { return 0 };
        let port = &mut ports[at].counters;
        let at = *burst_time.get_or_insert_with(|| clock.stamp(spec.mlx5.timestamps));
        let mut queues = Queues { keys, rqs, cqs, port, device: &spec.name, at, tunnels: rss.tunnels, lossless };
        let plain = plain(rss, run.layers);
        let hash = |rss: &mut Rss, bytes: &[u8]| match (plain, &mut rss.hash) {
            (Some((at, hash_type)), Some(toeplitz))
                if let Some(tuple) = bytes.get(at..).and_then(<[u8]>::first_chunk) =>
            {
                (toeplitz.hash_tuple(tuple), hash_type)
            }
            _ => hash(rss, run.layers, bytes),
        };
        // With a single queue the delivery does not wait for the hash.
        if let Some(queue) = rss.single_queue {
            return queues.fill(env, queue, run, |bytes| hash(rss, bytes));
        }
        receive_runs(run.frames, lossless, |rest| {
            let hashed = hash(rss, rest[0]);
            let queue = rss.table[hashed.0 as usize & (rss.table.len() - 1)];
            (1, queues.fill(env, queue, &Run { frames: &rest[..1], ..*run }, |_| hashed))
        })
    }
}

impl<R: Region> Queues<'_, R> {
    /// Delivers frames to a queue; returns the number of accepted frames.
    #[inline]
    fn fill(
        &mut self,
        env: &mut Env<'_>,
        queue: ObjectId,
        run: &Run<'_>,
        mut hash: impl FnMut(&[u8]) -> (u32, HashType),
    ) -> usize {
        let Self { keys, rqs, cqs, port, device, at, tunnels, lossless } = self;
        let Some(rq) = rqs.get_mut(queue) else { return 0 };
        let Some(cq) = cqs.get_mut(rq.cq) else { return 0 };
        let Some(first) = run.frames.first() else { return 0 };
        let mut form: Option<FrameInfo> = None;
        let (mut taken, mut completed) = (0, 0);
        for bytes in run.frames {
            if rq.state != State::Ready || cq.is_overrun() || !(1..=rq.entries).contains(&rq.posted()) {
                check_posted(rq, env, device);
                if *lossless {
                    break;
                }
                rq.no_buffer += 1;
                port.no_buffer += 1;
                continue;
            }
            // Each frame of a run may contain a different tunnel.
            let inner = if *tunnels { tunnel::inner(bytes, run.layers) } else { None };
            let form = match &form {
                Some(known) if inner.is_none() && !known.in_tunnel => known,
                _ => form.insert(FrameInfo::of(rq, run.layers, bytes, inner)),
            };
            let (hash, hash_type) = hash(bytes);
            let arrival = Arrival { bytes, run, form, hash, hash_type, at: *at };
            let ordered = if env.faults.is_empty() { None } else { injected_error(env) };
            let by_order = ordered.is_some();
            let result = match (ordered, rq.layout) {
                (Some(failure), _) => Err(failure),
                (None, Layout::Linear) => linear(keys, rq, cq, env, &arrival),
                (None, Layout::Striding { log_bytes, log_strides }) => {
                    striding(keys, rq, cq, env, &arrival, log_bytes, log_strides)
                }
            };
            let took = match result {
                Ok(true) => {
                    completed += 1;
                    true
                }
                Ok(false) => {
                    rq.no_buffer += u64::from(!*lossless);
                    port.no_buffer += u64::from(!*lossless);
                    false
                }
                Err(failure) => failed(rq, cq, env, device, &failure, by_order),
            };
            taken += usize::from(took);
            if *lossless && !took {
                break;
            }
        }
        rq.received += completed;
        rq.received_bytes += completed * first.len() as u64;
        port.received += completed;
        port.received_bytes += completed * first.len() as u64;
        taken
    }
}

/// Moves a queue to the error state if more entries are posted than its ring has.
#[cold]
fn check_posted<R: Region>(rq: &mut Rq<R>, env: &mut Env<'_>, device: &str) {
    let posted = rq.posted();
    if rq.state == State::Ready && posted > rq.entries {
        env.log.line(format_args!(
            "{device} rq {:#x}: {posted} entries posted, but the ring has {}",
            rq.number, rq.entries
        ));
        rq.state = State::Error;
        env.events.push(Event::Object(event_target(rq), EVENT_WQ_FATAL));
    }
}

/// Syndrome and reason of an error.
type Failure = (u8, String);
type Outcome = Result<bool, Failure>;
/// Target of a scatter entry: region, offset and length in bytes.
type ScatterTarget<'k, R> = (&'k R, u64, u32);

/// Completes the entry at the head with a syndrome.
fn complete_in_error<R: Region>(rq: &mut Rq<R>, cq: &mut Cq<R>, env: &mut Env<'_>, syndrome: u8) {
    let mut entry: Entry = [0; CQE_BYTES];
    entry[0x20..0x24].copy_from_slice(&(rq.user_index & 0xff_ffff).to_be_bytes());
    entry[0x36] = 0x52;
    entry[0x37] = syndrome;
    entry[0x3c..0x3e].copy_from_slice(&rq.head.to_be_bytes());
    cq.complete(&entry, CqeOwner::default().with_opcode(defs::CQE_RESPONDER_ERROR), env.events);
    rq.head = rq.head.wrapping_add(1);
}

/// Completes the entry at the head with an error; returns true if the queue continues.
///
/// A frame that is too long for a linear entry consumes the entry, and the queue continues. Other errors stop
/// the queue. Source: Linux drivers/net/ethernet/mellanox/mlx5/core/en/health.h, `cqe_syndrome_needs_recover`.
#[cold]
fn failed<R: Region>(
    rq: &mut Rq<R>,
    cq: &mut Cq<R>,
    env: &mut Env<'_>,
    device: &str,
    (syndrome, why): &Failure,
    by_order: bool,
) -> bool {
    let goes_on = *syndrome == defs::SYNDROME_LOCAL_LENGTH && rq.layout == Layout::Linear && !by_order;
    let end = if goes_on { "" } else { "; the queue is in error" };
    env.log.line(format_args!("{device} rq {:#x}: entry {:#x}: {why}{end}", rq.number, rq.head));
    rq.errors += 1;
    if goes_on {
        complete_in_error(rq, cq, env, *syndrome);
        return true;
    }
    // All other posted entries complete as flushed.
    rq.read_record();
    let posted = rq.posted().min(rq.entries);
    for i in 0..posted {
        complete_in_error(rq, cq, env, if i == 0 { *syndrome } else { defs::SYNDROME_FLUSHED });
    }
    rq.state = State::Error;
    env.events.push(Event::Object(event_target(rq), EVENT_WQ_FATAL));
    false
}

/// Returns the memory of a scatter segment.
#[inline]
fn translate<'k, R: Region>(
    keys: &'k MkeyTable<R>,
    pd: u32,
    (i, segment): (usize, &Segment),
) -> Result<(&'k R, u64), Failure> {
    let found = keys.find(segment.key, segment.address, u64::from(segment.size), pd, true);
    found.map_err(|why| untranslated(i, *segment, why))
}

#[cold]
fn untranslated(i: usize, Segment { address, key, size }: Segment, why: KeyError) -> Failure {
    let what = format!("segment {i}: address {address:#x}, {size} bytes, key {key:#x}: {why}");
    (defs::SYNDROME_LOCAL_PROTECTION, what)
}

/// Fetches the entry at the head of a linear queue; returns its first segment. All segments are translated,
/// even if the frame does not reach them.
#[inline(always)]
fn fetch<'k, R: Region>(keys: &'k MkeyTable<R>, rq: &mut Rq<R>) -> Result<Option<ScatterTarget<'k, R>>, Failure> {
    rq.fetch();
    let mut first = None;
    for segment in rq.scatter_list().iter().enumerate() {
        let (region, start) = translate(keys, rq.pd, segment)?;
        first.get_or_insert((region, start, segment.1.size));
    }
    Ok(first)
}

/// Writes pieces to a scatter list, starting at an offset in one of its segments.
#[inline]
fn scatter<R: Region>(
    keys: &MkeyTable<R>,
    pd: u32,
    list: &[Segment],
    (from, mut offset): (usize, usize),
    pieces: [&[u8]; 2],
) -> Result<(), Failure> {
    if let (Some(segment), [whole, []]) = (list.get(from), pieces)
        && offset + whole.len() <= segment.size as usize
    {
        let (region, start) = translate(keys, pd, (from, segment))?;
        let _ = region.write(start + offset as u64, whole);
        return Ok(());
    }
    let mut at = 0;
    let mut pieces = pieces.into_iter().filter(|piece| !piece.is_empty());
    let mut rest = pieces.next().unwrap_or_default();
    for (i, segment) in list.iter().enumerate().skip(from) {
        let size = segment.size as usize;
        let (region, start) = translate(keys, pd, (i, segment))?;
        let mut used = offset;
        offset = 0;
        while used < size && !rest.is_empty() {
            let n = rest.len().min(size - used);
            let _ = region.write(start + used as u64, &rest[..n]);
            rest = &rest[n..];
            used += n;
            at += n;
            if rest.is_empty() {
                rest = pieces.next().unwrap_or_default();
            }
        }
        if rest.is_empty() {
            return Ok(());
        }
    }
    let left = rest.len() + pieces.map(<[u8]>::len).sum::<usize>();
    Err((defs::SYNDROME_LOCAL_LENGTH, format!("{left} bytes of the frame do not fit behind {at}")))
}

#[inline(always)]
fn linear<R: Region>(
    keys: &MkeyTable<R>,
    rq: &mut Rq<R>,
    cq: &mut Cq<R>,
    env: &mut Env<'_>,
    arrival: &Arrival<'_>,
) -> Outcome {
    let first = fetch(keys, rq)?;
    let pieces = frame::split_vlan(arrival.bytes, arrival.form.vlan.is_some());
    match first {
        Some((region, start, size)) if pieces[1].is_empty() && pieces[0].len() <= size as usize => {
            let _ = region.write(start, pieces[0]);
        }
        _ => scatter(keys, rq.pd, rq.scatter_list(), (0, 0), pieces)?,
    }
    let length = pieces[0].len() + pieces[1].len();
    let cqe = rx_cqe(rq, arrival, 0, length as u32, rq.head);
    rq.head = rq.head.wrapping_add(1);
    post_cqe(cq, env, &cqe);
    Ok(true)
}

fn striding<R: Region>(
    keys: &MkeyTable<R>,
    rq: &mut Rq<R>,
    cq: &mut Cq<R>,
    env: &mut Env<'_>,
    arrival: &Arrival<'_>,
    log_bytes: u32,
    log_strides: u32,
) -> Outcome {
    let pieces = frame::split_vlan(arrival.bytes, arrival.form.vlan.is_some());
    let length = pieces[0].len() + pieces[1].len();
    let wanted = (length as u32).div_ceil(1 << log_bytes);
    let all = 1u32 << log_strides;
    if wanted > all {
        return Err((
            defs::SYNDROME_LOCAL_LENGTH,
            format!("{length} bytes need {wanted} strides, but an entry has {all}"),
        ));
    }
    if all - rq.strides < wanted {
        // The remaining strides of the entry are skipped by a filler completion.
        let count = StrideCount::default().with_filler(1).with_strides(all - rq.strides);
        let filler = rx_cqe(rq, arrival, rq.head, count.0, rq.strides as u16).entry();
        cq.complete(&filler, CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND), env.events);
        rq.fillers += 1;
        rq.strides = 0;
        rq.head = rq.head.wrapping_add(1);
        if rq.posted() == 0 {
            return Ok(false);
        }
    }
    if rq.strides == 0 {
        // Segments are translated only when a frame is written to them.
        rq.fetch();
    }
    scatter(keys, rq.pd, rq.scatter_list(), rq.scatter_position, pieces)?;
    let strides = StrideCount::default().with_length(length as u32).with_strides(wanted);
    let cqe = rx_cqe(rq, arrival, rq.head, strides.0, rq.strides as u16);
    rq.consume_strides(wanted, log_bytes);
    if rq.strides == all {
        rq.strides = 0;
        rq.head = rq.head.wrapping_add(1);
    }
    post_cqe(cq, env, &cqe);
    Ok(true)
}

/// Returns the error of an injected fault.
#[cold]
fn injected_error(env: &mut Env<'_>) -> Option<Failure> {
    let concerns = |what: &FaultKind| matches!(what, FaultKind::CompletionError { transmit: false, .. });
    match env.faults.trigger(env.device, concerns) {
        Some(FaultKind::CompletionError { code, .. }) => {
            Some((code as u8, "injected fault: completion error".to_owned()))
        }
        _ => None,
    }
}

#[inline(always)]
fn post_cqe<R: Region>(cq: &mut Cq<R>, env: &mut Env<'_>, cqe: &RxCqe) {
    if !env.faults.is_empty()
        && let Some(FaultKind::CorruptCqe { corruption, .. }) =
            env.faults.trigger(env.device, |what| matches!(what, FaultKind::CorruptCqe { transmit: false, .. }))
    {
        env.log.line(format_args!("cq {:#x}: injected fault: corrupt completion ({corruption})", cq.number));
        cq.complete_corrupted(
            &cqe.entry(),
            CqeOwner::default().with_opcode(defs::CQE_RESPONDER_SEND),
            corruption,
            env.events,
        );
        return;
    }
    cq.receive(cqe, env.events);
}

impl FrameInfo {
    /// Returns the properties of a frame and of the packet in its tunnel.
    #[inline(never)]
    fn of<R>(rq: &Rq<R>, outer: &HeaderOffsets, bytes: &[u8], inner: Option<(usize, HeaderOffsets)>) -> Self {
        let in_tunnel = inner.is_some();
        let (start, layers) = inner.unwrap_or((0, *outer));
        let mut flags = CqeFlags::default().with_l2_ok(1);
        match layers.network {
            Some(Network::V4) => {
                let header = &bytes[start + layers.l3..];
                flags = flags.with_l3_type(defs::L3_IPV4).with_ip_options(u16::from(header[0] & 0xf > 5));
                flags = flags.with_fragment(u16::from(u16::from_be_bytes([header[6], header[7]]) & 0x3fff != 0));
            }
            Some(Network::V6) => {
                flags = flags.with_l3_type(defs::L3_IPV6).with_l3_ok(1);
                flags = flags.with_ip_options(u16::from(layers.l4 > layers.l3 + 40));
            }
            None => {}
        }
        match layers.protocol {
            TCP => flags = flags.with_l4_type(defs::L4_TCP),
            UDP => flags = flags.with_l4_type(defs::L4_UDP),
            _ => {}
        }
        let vlan = outer.vlan.filter(|_| rq.strip);
        if vlan.is_some() {
            flags = flags.with_vlan_stripped(1);
        }
        let packet_info = if in_tunnel { 1 | u8::from(outer.network == Some(Network::V6)) << 1 } else { 0 };
        Self { start, layers, in_tunnel, packet_info, flags, vlan }
    }
}

/// Returns the content of the completion of a frame.
#[inline(always)]
fn rx_cqe<R: Region>(rq: &Rq<R>, arrival: &Arrival<'_>, request: u16, count: u32, position: u16) -> RxCqe {
    let Arrival { bytes, run, form, .. } = arrival;
    let checks = form.layers.checksums(&bytes[form.start..]);
    let mut flags = form.flags;
    if checks.ip == Some(true) {
        flags = flags.with_l3_ok(1);
    }
    // A UDP datagram without checksum counts as correct.
    if matches!(form.layers.protocol, TCP | UDP) && checks.transport != Some(false) {
        flags = flags.with_l4_ok(1);
    }
    RxCqe {
        packet_info: form.packet_info,
        hash: arrival.hash,
        hash_type: arrival.hash_type.0,
        // The sum covers the IP packet without VLAN tags and padding. Linux adds these itself
        // (drivers/net/ethernet/mellanox/mlx5/core/en_rx.c, `mlx5e_handle_csum`).
        checksum: if form.in_tunnel { run.layers.checksums(bytes).sum } else { checks.sum },
        flags_and_vlan: u32::from(flags.0) << 16 | u32::from(form.vlan.unwrap_or(0)),
        user_index: rq.user_index & 0xff_ffff,
        metadata: run.metadata,
        time: arrival.at,
        tag: run.tag & 0xff_ffff,
        request,
        count,
        position,
    }
}

/// Returns offset and hash type of addresses and ports, if a queue pair hashes both and the packet is IPv4
/// without options. This is the most frequent case.
fn plain(rss: &Rss, layers: &HeaderOffsets) -> Option<(usize, HashType)> {
    let (_, hash_type) = rss.tuples.filter(|(protocol, _)| layers.protocol == *protocol)?;
    Some((layers.tuple_at()?, hash_type))
}

/// Returns protocol and hash type if exactly the addresses and ports of IPv4 are hashed.
pub(super) fn tuples(fields: u64) -> Option<(u8, HashType)> {
    const ADDRESSES: u64 = uverbs::RX_HASH_SRC_IPV4 | uverbs::RX_HASH_DST_IPV4;
    let of = |protocol, l4, ports: u64| {
        (fields == ADDRESSES | ports).then(|| (protocol, HashType::default().with_ip(1).with_l4(l4)))
    };
    of(TCP, 1, uverbs::RX_HASH_SRC_PORT_TCP | uverbs::RX_HASH_DST_PORT_TCP)
        .or_else(|| of(UDP, 2, uverbs::RX_HASH_SRC_PORT_UDP | uverbs::RX_HASH_DST_PORT_UDP))
}

/// Returns the RSS hash of a frame and its type.
fn hash(rss: &Rss, layers: &HeaderOffsets, bytes: &[u8]) -> (u32, HashType) {
    let none = (0, HashType::default());
    let Some(toeplitz) = &rss.hash else { return none };
    let inner = if rss.fields & abi::RX_HASH_INNER != 0 { tunnel::inner(bytes, layers) } else { None };
    let (start, layers) = inner.as_ref().map_or((0, layers), |(start, inner)| (*start, inner));
    let bytes = &bytes[start..];
    let Some(network) = layers.network else { return none };
    let (src, dst, kind) = match network {
        Network::V4 => (uverbs::RX_HASH_SRC_IPV4, uverbs::RX_HASH_DST_IPV4, 1),
        Network::V6 => (uverbs::RX_HASH_SRC_IPV6, uverbs::RX_HASH_DST_IPV6, 2),
    };
    if rss.fields & (src | dst) == 0 {
        return none;
    }
    let (sport, dport, l4) = match layers.protocol {
        TCP => (uverbs::RX_HASH_SRC_PORT_TCP, uverbs::RX_HASH_DST_PORT_TCP, 1),
        UDP => (uverbs::RX_HASH_SRC_PORT_UDP, uverbs::RX_HASH_DST_PORT_UDP, 2),
        _ => (0, 0, 0),
    };
    // TCP and UDP headers are complete, so the ports are inside the frame.
    let ports = if l4 == 0 { &[] } else { &bytes[layers.l4..layers.l4 + 4] };
    // Selects source, destination or both, as requested; both is the most frequent case.
    let wanted = |source, destination, both| -> &[u8] {
        let (from, to) = <[u8]>::split_at(both, both.len() / 2);
        match (rss.fields & source != 0, rss.fields & destination != 0) {
            (true, true) => both,
            (true, false) => from,
            (false, true) => to,
            (false, false) => &[],
        }
    };
    let input = [wanted(src, dst, layers.addresses(bytes)), wanted(sport, dport, ports)];
    let mut hash_type = HashType::default().with_ip(kind);
    if rss.fields & (sport | dport) != 0 {
        hash_type = hash_type.with_l4(l4);
    }
    (toeplitz.hash(input), hash_type)
}
