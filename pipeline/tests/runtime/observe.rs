//! Captures and traces of whole programs on in-process cables.

use wirepath_packet::drops::DropReason;
use wirepath_packet::{Batch, Packet, Pool, PortId};
use wirepath_pipeline::observe::{
    CaptureReader, CaptureSpec, LeftOut, MAX_SESSIONS, ObserveError, Point, TraceEnd, TraceReader, TraceSpec,
};
use wirepath_pipeline::{Context, Running, Stage};
use wirepath_wire::Parser;

use super::programs::{TIMEOUT, cables, frame, number, pass, stop};

const A: PortId = PortId::new(0);
const B: PortId = PortId::new(1);

fn everything() -> CaptureSpec {
    CaptureSpec {
        rx: true,
        tx: true,
        drops: true,
        reason: None,
        port: None,
        segment: None,
        pattern: None,
        snap: 65_535,
        rate: None,
    }
}

/// Numbers of the frames that a capture has by now, by point.
#[derive(Default, Debug)]
struct Seen {
    rx: Vec<u64>,
    tx: Vec<u64>,
    drops: Vec<(u64, DropReason)>,
}

impl Seen {
    fn read(&mut self, reader: &mut CaptureReader) {
        while let Some((point, number)) = reader.read_next(|packet| {
            let bytes: Vec<u8> = packet.data().flatten().copied().collect();
            assert_eq!((packet.len, packet.captured(), bytes.len()), (64, 64, 64));
            assert_eq!(packet.port, Some(if packet.point == Point::Tx { B } else { A }));
            (packet.point, u64::from_be_bytes(*bytes.first_chunk().unwrap()))
        }) {
            match point {
                Point::Rx => self.rx.push(number),
                Point::Tx => self.tx.push(number),
                Point::Drop(reason) => self.drops.push((number, reason)),
            }
        }
    }
}

/// Sends nine of ten frames from port `a` to port `b`, and drops the others.
fn thin(context: &mut Context<'_>, batch: &mut Batch) {
    batch.filter_map(|mut packet| {
        if number(&packet) % 10 == 9 {
            context.drop(packet, DropReason::RuleDrop);
            return None;
        }
        packet.set_out_port(B);
        Some(packet)
    });
}

fn send(from: &mut wirepath_pmd::drivers::r#virtual::memory::Endpoint, frames: std::ops::Range<u64>) {
    for frame_number in frames {
        while !from.send_bytes(&frame(frame_number)) {
            std::thread::yield_now();
        }
    }
}

fn is_ascending(numbers: &[u64]) -> bool {
    numbers.windows(2).all(|pair| pair[0] < pair[1])
}

#[test]
fn what_is_captured_and_left_out_is_what_is_counted() {
    const FRAMES: u64 = 30_000;
    let pool = Pool::new("test", 4096).unwrap();
    let (runtime, mut a, mut b) = cables("captured", 1, &pool);
    let mut reader = runtime.start_capture(everything(), Parser::default()).unwrap();
    let running = runtime.start(|_| thin).unwrap();
    let mut seen = Seen::default();
    let begin = std::time::Instant::now();
    let mut received: Vec<u64> = Vec::new();
    for part in 0..30 {
        send(&mut a, part * FRAMES / 30..(part + 1) * FRAMES / 30);
        while received.len() < ((part + 1) * FRAMES / 30 * 9 / 10) as usize {
            assert!(begin.elapsed() < TIMEOUT);
            received.extend(b.receive().iter().map(number));
        }
        // The reader pauses in the middle, until there is no memory.
        if !(5..=25).contains(&part) {
            seen.read(&mut reader);
        }
    }
    let summary = stop(running);
    assert!(reader.has_ended());
    seen.read(&mut reader);
    let [left_a, left_b] = [reader.left_out(Some(A)), reader.left_out(Some(B))];
    assert!(left_a.queue_full > 0 && left_b.queue_full > 0, "{left_a:?} {left_b:?}");
    assert_eq!((left_a.rate, left_a.no_packet, reader.left_out(None)), (0, 0, LeftOut::default()));
    let (rx, dropped) = (summary.rx().packets, summary.drops()[&DropReason::RuleDrop]);
    assert_eq!((rx, dropped, summary.tx().packets), (FRAMES, FRAMES / 10, FRAMES * 9 / 10));
    assert_eq!((seen.rx.len() + seen.drops.len()) as u64 + left_a.queue_full, rx + dropped);
    assert_eq!(seen.tx.len() as u64 + left_b.queue_full, summary.tx().packets);
    assert!(is_ascending(&seen.rx) && is_ascending(&seen.tx));
    assert!(seen.drops.iter().all(|(number, reason)| number % 10 == 9 && *reason == DropReason::RuleDrop));
    // Before the pause, nothing is missing.
    assert_eq!(seen.rx[..5000], (0..5000).collect::<Vec<_>>());
    assert_eq!(seen.tx[..4500], received[..4500]);
    drop((a, b));
    assert_eq!(pool.outstanding(), 0);
}

#[test]
fn a_capture_has_a_length_a_rate_and_a_port() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("limits", 1, &pool);
    let start = |spec| runtime.start_capture(spec, Parser::default()).unwrap();
    let mut short = start(CaptureSpec { snap: 10, tx: false, ..everything() });
    let mut slow = start(CaptureSpec { rate: Some(1), tx: false, ..everything() });
    let mut other = start(CaptureSpec { port: Some(B), ..everything() });
    let mut reason = start(CaptureSpec { rx: false, tx: false, reason: Some(DropReason::NoBuffer), ..everything() });
    let running =
        runtime.start(|_| |context: &mut Context<'_>, batch: &mut Batch| context.send_batch(B, batch)).unwrap();
    pass(1000, &mut a, &mut b, || ());
    stop(running);
    let mut lengths = 0;
    while let Some(it) = short.read_next(|packet| (packet.len, packet.captured())) {
        assert_eq!(it, (64, 10));
        lengths += 1;
    }
    assert_eq!(lengths, 1000);
    let passed = std::iter::from_fn(|| slow.read_next(|_| ())).count() as u64;
    // The machine may be slow: each second lets another packet pass.
    assert!((1..100).contains(&passed) && passed + slow.left_out(Some(A)).rate == 1000, "{passed}");
    assert_eq!(std::iter::from_fn(|| other.read_next(|packet| assert_eq!(packet.point, Point::Tx))).count(), 1000);
    assert!(reason.read_next(|_| ()).is_none());
}

#[test]
fn captures_end_with_their_readers_while_packets_flow() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("ends", 1, &pool);
    let mut running =
        runtime.start(|_| |context: &mut Context<'_>, batch: &mut Batch| context.send_batch(B, batch)).unwrap();
    let mut kept: Vec<CaptureReader> = Vec::new();
    let (mut begun, mut refused, mut turn) = (0, 0, 0u64);
    let mut meanwhile = |running: &mut Running<_>| {
        turn += 1;
        match running.plane().start_capture(everything(), Parser::default()) {
            Ok(reader) => kept.push(reader),
            Err(ObserveError::TooMany(_)) => {
                assert_eq!(kept.len(), MAX_SESSIONS);
                refused += 1;
                kept.swap_remove((turn % MAX_SESSIONS as u64) as usize);
            }
            Err(error) => panic!("{error}"),
        }
        begun += u32::from(kept.iter().any(CaptureReader::has_begun));
        running.tick(&mut ());
    };
    pass(20_000, &mut a, &mut b, || meanwhile(&mut running));
    assert!(begun > 0 && refused > 0, "{begun} {refused}");
    drop(kept);
    stop(running);
}

/// Passes frames through a program while each of them is traced, and returns the traces.
fn trace_all(
    running: &mut Running<impl Stage>,
    frames: u64,
    from: &mut wirepath_pmd::drivers::r#virtual::memory::Endpoint,
    mut sink: impl FnMut(),
) -> Vec<wirepath_pipeline::observe::Trace> {
    let spec = TraceSpec { port: None, pattern: None, count: frames as u32 };
    let mut reader: TraceReader = running.plane().start_trace(spec, Parser::default()).unwrap();
    let begin = std::time::Instant::now();
    while !reader.has_begun() {
        assert!(begin.elapsed() < TIMEOUT);
        running.tick(&mut ());
    }
    let mut traces = Vec::new();
    for n in 0..frames {
        send(from, n..n + 1);
        while traces.len() <= n as usize {
            assert!(begin.elapsed() < TIMEOUT, "{} traces", traces.len());
            traces.extend(reader.next_trace());
            sink();
        }
    }
    assert!(reader.is_complete() && reader.left_out() == 0);
    traces
}

#[test]
fn the_end_of_each_trace_is_what_was_counted_and_arrived() {
    const FRAMES: u64 = 500;
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("traced", 1, &pool);
    let chain = |context: &mut Context<'_>, batch: &mut Batch| {
        context.trace("mine", |text| std::fmt::Write::write_str(text, "looked at"));
        batch.iter_mut().for_each(|packet: &mut Packet| packet.data_mut()[20] = 7);
    };
    let mut running = runtime.start(|_| (chain, thin)).unwrap();
    let mut arrived = Vec::new();
    let traces = trace_all(&mut running, FRAMES, &mut a, || arrived.extend(b.receive().iter().map(number)));
    // Frames behind the last one that is traced take the fast way.
    send(&mut a, FRAMES..FRAMES + 5);
    let begin = std::time::Instant::now();
    while arrived.len() < (FRAMES * 9 / 10 + 5) as usize {
        assert!(begin.elapsed() < TIMEOUT);
        arrived.extend(b.receive().iter().map(number));
    }
    let summary = stop(running);
    let sent = TraceEnd::Sent { port: B, queue: 0, packets: 1 };
    let dropped = TraceEnd::Dropped { reason: DropReason::RuleDrop, packets: 1 };
    for (n, trace) in traces.iter().enumerate() {
        assert_eq!((trace.worker, trace.port, trace.queue, trace.truncated), (0, A, 0, false));
        assert_eq!(trace.ends, [if n % 10 == 9 { dropped } else { sent }], "{trace:?}");
        let has = |stage: &str, part: &str| trace.steps.iter().any(|it| it.stage == stage && it.text.contains(part));
        assert!(has("receive", "port a queue 0 worker 0, 64 bytes") && has("mine", "looked at"), "{trace:?}");
        assert!(trace.steps.iter().any(|it| it.text.starts_with("now eth")), "{trace:?}");
    }
    let of = |end: TraceEnd| traces.iter().filter(|trace| trace.ends == [end]).count() as u64;
    assert_eq!(of(dropped), summary.drops()[&DropReason::RuleDrop]);
    assert_eq!(of(sent) + 5, summary.tx().packets);
    assert!(is_ascending(&arrived));
}

#[test]
fn a_trace_says_that_another_worker_has_the_packet() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, _b) = cables("others", 2, &pool);
    // Worker 0 polls port a, whose only transmit queue it owns. That of port b belongs to worker 1.
    let mut running = runtime
        .start(|_| {
            |context: &mut Context<'_>, batch: &mut Batch| {
                let is_received = context.in_port().is_some();
                batch.drain_front(batch.len(), |packet| match number(&packet) {
                    0 if is_received => context.enqueue_to_worker(1, packet),
                    1 => context.send(B, packet),
                    2 => context.punt(packet, 77),
                    3 => context.count_drops(DropReason::NoBuffer, 1),
                    _ => drop(packet),
                });
            }
        })
        .unwrap();
    let traces = trace_all(&mut running, 5, &mut a, || ());
    let ends: Vec<&[TraceEnd]> = traces.iter().map(|trace| &trace.ends[..]).collect();
    let expected: [&[TraceEnd]; 5] = [
        &[TraceEnd::HandedOver { worker: 1 }],
        &[TraceEnd::SentByWorker { worker: 1, port: B }],
        &[TraceEnd::Punted { code: 77 }],
        &[TraceEnd::Dropped { reason: DropReason::NoBuffer, packets: 1 }],
        &[],
    ];
    assert_eq!(ends, expected);
    drop(running);
}
