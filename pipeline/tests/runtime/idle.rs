//! Workers that sleep: no packet is lost or reordered, and everything that concerns them wakes them.

use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use wirepath_packet::{Batch, Pool, PortId};
use wirepath_pipeline::{Context, Runtime};
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;

use crate::programs::{cross, frame, number, open, stop};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Longest sleep of a worker. What wakes it takes much less.
const MAX_SLEEP: Duration = Duration::from_millis(250);

/// Settings of `[workers]`, and whether the worker sleeps when nothing comes.
const MODES: [(&str, &str, bool); 4] = [
    ("busy", "idle = 'busy'", false),
    ("adaptive", "idle = 'adaptive'", true),
    ("always", "idle = 'sleep'\nsleep_below = 4294967295", true),
    ("sometimes", "idle = 'sleep'\nsleep_below = 1000", true),
];

fn cables(test: &str, keys: &str, workers: usize, pool: &Pool) -> (Runtime, Endpoint, Endpoint) {
    let port = |name: &str| format!("[[port]]\nname = '{name}'\ndriver = 'memory'\ndevice = '{test}-{name}'\n");
    let text = format!("test_workers = {workers}\n[workers]\n{keys}\n{}{}", port("a"), port("b"));
    let runtime = open(&text).unwrap();
    let end = |name: &str| {
        Endpoint::named(&format!("{test}-{name}"), &PortConfig::new(PortId::new(9), pool.clone())).unwrap()
    };
    (runtime, end("a"), end("b"))
}

#[test]
fn packets_in_bursts_arrive_in_order() {
    for (name, keys, sleeps) in MODES {
        let pool = Pool::new("test", 2048).unwrap();
        let (runtime, mut a, mut b) = cables(&format!("bursts {name}"), keys, 1, &pool);
        let running = runtime.start(|_| cross).unwrap();
        let mut random = fastrand::Rng::with_seed(3);
        let (mut sent, mut got, begin) = (0, 0, Instant::now());
        while got < 3000 {
            for _ in 0..random.u64(1..40) {
                assert!(a.send_bytes(&frame(sent)));
                sent += 1;
            }
            while got < sent {
                assert!(begin.elapsed() < TIMEOUT, "{name}: {sent} sent, {got} came");
                match b.receive() {
                    Some(packet) => {
                        assert_eq!(number(&packet), got, "{name}");
                        got += 1;
                    }
                    None => std::thread::yield_now(),
                }
            }
            // The worker finds nothing for a time that may be shorter or longer than its patience.
            std::thread::sleep(Duration::from_micros(random.u64(0..1000)));
        }
        let summary = stop(running);
        assert_eq!((summary.rx().packets, summary.tx().packets), (sent, sent), "{name}");
        assert_eq!(summary.workers[0].sleeps > 10, sleeps, "{name}: {} sleeps", summary.workers[0].sleeps);
    }
}

#[test]
fn a_sleeping_worker_runs_jobs_and_stops() {
    for (name, keys, _) in MODES {
        let pool = Pool::new("test", 2048).unwrap();
        let (runtime, mut a, _b) = cables(&format!("jobs {name}"), keys, 2, &pool);
        // Worker 0 receives, and worker 1 owns the queue of port 1.
        let running = runtime
            .start(|_| {
                |context: &mut Context<'_>, batch: &mut Batch| {
                    batch.drain_front(batch.len(), |mut packet| {
                        packet.set_out_port(PortId::new(1));
                        if context.in_port().is_some() { context.enqueue_to_worker(1, packet) } else { drop(packet) }
                    });
                }
            })
            .unwrap();
        let begin = Instant::now();
        for n in 0..100 {
            let (done, is_done) = channel();
            assert!(running.on_worker(n % 2, move |_| done.send(n).unwrap()));
            assert_eq!(is_done.recv_timeout(TIMEOUT), Ok(n));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(begin.elapsed() < MAX_SLEEP * 50, "{name}: jobs wait for the end of a sleep");
        // Packets that one worker hands to another, and the stop while both sleep.
        assert!((0..300).all(|n| a.send_bytes(&frame(n))));
        std::thread::sleep(Duration::from_millis(20));
        let summary = stop(running);
        assert_eq!((summary.rx().packets, summary.workers[0].handed_over), (300, 300), "{name}");
        assert!(summary.drops().is_empty(), "{name}: {:?}", summary.drops());
    }
}
