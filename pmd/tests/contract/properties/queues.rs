use std::collections::BTreeMap;
use std::time::Instant;

use wirepath_packet::Batch;
use wirepath_testlab::print_uncaptured;

use crate::bench::{Bench, TIMEOUT, frame, identify, poll_queue};
use crate::common::packet;

const FLOWS: u32 = 64;
const EACH: u32 = 20;

/// Two queues together carry the frames of one: none is lost or duplicated, and the packets of a flow stay in
/// order.
pub(crate) fn share_the_flows(bench: &mut Bench) {
    let frames: Vec<_> = (0..EACH).flat_map(|n| (0..FLOWS).map(move |flow| frame(flow, n, 200))).collect();
    bench.start_with(&frames, |config| (config.rx_queues, config.tx_queues) = (1, 1));
    let can = bench.started().port.capabilities();
    let max_queues = (can.max_rx_queues.min(2), can.max_tx_queues.min(2));
    bench.stop();
    if max_queues == (1, 1) {
        print_uncaptured(&format!("one queue each way: {} has no more ({})", can.driver, can.mode));
        return;
    }
    bench.start_with(&frames, |config| (config.rx_queues, config.tx_queues) = max_queues);

    let (mut received, mut offered, mut last_move) = (Vec::new(), 0, Instant::now());
    let mut used = vec![0; max_queues.0.into()];
    while received.len() < frames.len() && last_move.elapsed() < TIMEOUT {
        while offered < frames.len()
            && offered.saturating_sub(received.len()) < bench.traits.capacity
            && bench.wire.offer(&frames[offered])
        {
            offered += 1;
        }
        let delivers = bench.traits.delivers;
        for (at, queue) in bench.started().rx.iter_mut().enumerate() {
            let mut got = Vec::new();
            poll_queue(queue, &mut got);
            got.retain(|frame| !delivers || identify(frame).is_some());
            used[at] += got.len();
            if !got.is_empty() {
                last_move = Instant::now();
            }
            received.append(&mut got);
        }
    }
    print_uncaptured(&format!("frames by receive queue: {used:?}"));
    if bench.traits.delivers {
        assert_complete(&received, &bench.diagnostics());
    } else {
        assert!(used.iter().all(|n| *n > 0), "{used:?}");
    }

    let pool = bench.pool.clone();
    let (mut batch, mut sent) = (Batch::new(), 0);
    last_move = Instant::now();
    while sent < frames.len() {
        assert!(last_move.elapsed() < TIMEOUT, "only {sent} sent: {}", bench.diagnostics());
        let live = bench.traits.shows_sent && !bench.traits.shows_sent_after_stop;
        if live && sent - bench.arrived.len().min(sent) >= bench.traits.capacity {
            bench.started().tx.iter_mut().for_each(|queue| queue.reclaim());
            bench.take_arrived();
            continue;
        }
        let (_, number) = identify(&frames[sent]).expect("ours");
        let flow = sent as u32 % FLOWS;
        batch.push(packet(&pool, &frame(flow, number, 200))).expect("room");
        let queue = flow as usize % usize::from(max_queues.1);
        while bench.started().tx[queue].transmit(&mut batch) == 0 {
            assert!(last_move.elapsed() < TIMEOUT, "queue {queue} is stuck: {}", bench.diagnostics());
            bench.take_arrived();
        }
        last_move = Instant::now();
        sent += 1;
    }
    let by_queue: u64 = bench.started().port.tx_statistics().iter().map(|queue| queue.packets).sum();
    assert_eq!(by_queue, frames.len() as u64);
    let diagnostics = bench.diagnostics();
    let arrived = bench.take_sent(frames.len());
    if bench.traits.shows_sent {
        assert_complete(&arrived, &diagnostics);
    }
}

fn assert_complete(frames: &[Vec<u8>], diagnostics: &str) {
    let mut flows: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (flow, number) in frames.iter().filter_map(|frame| identify(frame)) {
        flows.entry(flow).or_default().push(number);
    }
    assert_eq!(flows.len(), FLOWS as usize, "flows: {diagnostics}");
    for (flow, numbers) in flows {
        assert_eq!(numbers, (0..EACH).collect::<Vec<_>>(), "flow {flow}: {diagnostics}");
    }
}
