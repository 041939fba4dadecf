use std::collections::BTreeMap;
use std::time::Instant;

use wirepath_pmd::packet::Batch;
use wirepath_testlab::announce;

use crate::bench::{Bench, PATIENCE, frame, identify, packet, poll_queue};

const FLOWS: u32 = 64;
const EACH: u32 = 20;

/// Two queues carry together what one would: nothing is lost or doubled, and the packets of a flow stay in order.
pub(crate) fn share_the_flows(bench: &mut Bench) {
    let frames: Vec<_> = (0..EACH).flat_map(|n| (0..FLOWS).map(move |flow| frame(flow, n, 200))).collect();
    bench.start_with(&frames, |config| (config.rx_queues, config.tx_queues) = (1, 1));
    let can = bench.started().port.capabilities();
    let most = (can.max_rx_queues.min(2), can.max_tx_queues.min(2));
    bench.stop();
    if most == (1, 1) {
        announce(&format!("one queue each way: {} has no more ({})", can.driver, can.mode));
        return;
    }
    bench.start_with(&frames, |config| (config.rx_queues, config.tx_queues) = most);

    let (mut received, mut offered, mut last_move) = (Vec::new(), 0, Instant::now());
    let mut used = vec![0; most.0.into()];
    while received.len() < frames.len() && last_move.elapsed() < PATIENCE {
        while offered < frames.len()
            && offered.saturating_sub(received.len()) < bench.nature.capacity
            && bench.rig.offer(&frames[offered])
        {
            offered += 1;
        }
        let feeds = bench.nature.feeds;
        for (at, queue) in bench.started().rx.iter_mut().enumerate() {
            let mut got = Vec::new();
            poll_queue(queue, &mut got);
            got.retain(|frame| !feeds || identify(frame).is_some());
            used[at] += got.len();
            if !got.is_empty() {
                last_move = Instant::now();
            }
            received.append(&mut got);
        }
    }
    announce(&format!("frames by receive queue: {used:?}"));
    if bench.nature.feeds {
        assert_complete(&received, &bench.story());
    } else {
        assert!(used.iter().all(|n| *n > 0), "{used:?}");
    }

    let pool = bench.pool.clone();
    let (mut batch, mut sent) = (Batch::new(), 0);
    last_move = Instant::now();
    while sent < frames.len() {
        assert!(last_move.elapsed() < PATIENCE, "only {sent} sent: {}", bench.story());
        let live = bench.nature.shows && !bench.nature.shows_after_stop;
        if live && sent - bench.arrived.len().min(sent) >= bench.nature.capacity {
            bench.started().tx.iter_mut().for_each(|queue| queue.reclaim());
            bench.take_arrived();
            continue;
        }
        let (_, number) = identify(&frames[sent]).expect("ours");
        let flow = sent as u32 % FLOWS;
        batch.push(packet(&pool, &frame(flow, number, 200))).expect("room");
        let queue = flow as usize % usize::from(most.1);
        while bench.started().tx[queue].transmit(&mut batch) == 0 {
            assert!(last_move.elapsed() < PATIENCE, "queue {queue} is stuck: {}", bench.story());
            bench.take_arrived();
        }
        last_move = Instant::now();
        sent += 1;
    }
    let by_queue: u64 = bench.started().port.tx_statistics().iter().map(|queue| queue.packets).sum();
    assert_eq!(by_queue, frames.len() as u64);
    let story = bench.story();
    let arrived = bench.take_sent(frames.len());
    if bench.nature.shows {
        assert_complete(&arrived, &story);
    }
}

fn assert_complete(frames: &[Vec<u8>], story: &str) {
    let mut flows: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (flow, number) in frames.iter().filter_map(|frame| identify(frame)) {
        flows.entry(flow).or_default().push(number);
    }
    assert_eq!(flows.len(), FLOWS as usize, "flows: {story}");
    for (flow, numbers) in flows {
        assert_eq!(numbers, (0..EACH).collect::<Vec<_>>(), "flow {flow}: {story}");
    }
}
