//! Trials through a device whose faults are known: the test forwards between two cables in memory.

use std::sync::atomic::AtomicBool;

use wirepath_packet::PortId;
use wirepath_pmd::drivers::r#virtual::memory::Endpoint;
use wirepath_pmd::port::PortConfig;

use super::*;
use crate::pktgen::flows::{FlowSet, Pick};
use crate::pktgen::headers::Stack;
use crate::pktgen::ports::PortName;
use crate::pktgen::signature::LEN;

const SENDS: Role = Role { sends: true, receives: false };
const RECEIVES: Role = Role { sends: false, receives: true };

fn flows(text: &str, sizes: &str) -> FlowSet {
    FlowSet {
        stacks: vec![Stack::parse(text).unwrap()],
        flows: None,
        sizes: sizes.parse().unwrap(),
        pick: Pick::Turn,
        seed: 1,
    }
}

fn trial(rate: &str, limit: Limit) -> Trial {
    Trial {
        traffic: Traffic::Flows(flows("ipv4 / udp", "100")),
        rate: Some(rate.parse().unwrap()),
        limit,
        drain: Duration::from_secs(5),
        reorder_threshold: None,
    }
}

fn open(ports: &[(&str, Role)], threads: u16) -> Generator {
    let names: Vec<_> = ports.iter().map(|(name, role)| (name.parse::<PortName>().unwrap(), *role)).collect();
    Generator::open(PortName::settings(&names, Vec::new()).unwrap(), threads, Vec::new()).unwrap()
}

/// Frames of a device for one frame that it got.
struct Forwarded {
    /// Sent to the port that receives.
    onward: Vec<Vec<u8>>,
    /// Sent back to the port that sends.
    back: Vec<Vec<u8>>,
}

impl From<Vec<Vec<u8>>> for Forwarded {
    fn from(onward: Vec<Vec<u8>>) -> Self {
        Self { onward, back: Vec::new() }
    }
}

/// Runs a trial through a device that turns frame `n` into the frames of `forward`.
fn through<R: Into<Forwarded>>(
    trial: &Trial,
    threads: u16,
    mut forward: impl FnMut(u64, Vec<u8>) -> R + Send,
) -> TrialResult {
    let name = format!("pktgen-{}", fastrand::u64(..));
    let pool = Pool::new("device", 8192).unwrap();
    let end = |side: &str| {
        Endpoint::named(&format!("{name}-{side}"), &PortConfig::new(PortId::new(0), pool.clone())).unwrap()
    };
    let (mut near, mut far) = (end("near"), end("far"));
    let ports = [format!("memory:{name}-near"), format!("memory:{name}-far")];
    let mut generator = open(&[(&ports[0], SENDS), (&ports[1], RECEIVES)], threads);
    let done = AtomicBool::new(false);
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            let mut n = 0;
            while !done.load(Ordering::Relaxed) {
                let Some(frame) = near.receive_bytes() else {
                    thread::yield_now();
                    continue;
                };
                let Forwarded { onward, back } = forward(n, frame).into();
                n += 1;
                let send = |end: &mut Endpoint, frames: &[Vec<u8>]| {
                    for frame in frames {
                        while !end.send_bytes(frame) && !done.load(Ordering::Relaxed) {
                            thread::yield_now();
                        }
                    }
                };
                send(&mut far, &onward);
                send(&mut near, &back);
            }
        });
        let result = generator.run(trial, &AtomicBool::new(false), |_| {});
        done.store(true, Ordering::Relaxed);
        result
    });
    generator.close().unwrap();
    let result = result.unwrap();
    assert_eq!(result.failure, None);
    result
}

const COUNT: u64 = 5000;

fn counted() -> Trial {
    trial("50kpps", Limit::Packets(COUNT))
}

/// Counts that each fault changes: lost, duplicates, reordered, distance, corrupt, foreign, looped.
fn counts(result: &TrialResult) -> [u64; 7] {
    let order = &result.order;
    assert_eq!((result.sent, order.beyond_window, order.unknown_stream), (COUNT, 0, 0));
    assert_eq!(result.latency.len(), order.distinct);
    [
        result.lost().unwrap(),
        order.duplicates,
        order.reordered,
        order.max_distance,
        result.corrupt,
        result.foreign(),
        result.looped(),
    ]
}

#[test]
fn a_perfect_device_has_no_fault() {
    for threads in [1, 2] {
        let result = through(&counted(), threads, |_, frame| vec![frame]);
        assert_eq!(counts(&result), [0; 7]);
        assert_eq!((result.received(), result.received_bytes), (COUNT, COUNT * 100));
        assert_eq!((result.sent_bytes, result.departures.len()), (COUNT * 100, COUNT - 1));
        assert!(result.latency.max() < 5_000_000_000 && result.latency.min() > 0);
        assert!(result.jitter.is_some() && result.streams == 1);
    }
}

#[test]
fn loss_is_counted_exactly() {
    let result = through(&counted(), 1, |n, frame| if n % 10 == 3 { vec![] } else { vec![frame] });
    assert_eq!(counts(&result), [COUNT / 10, 0, 0, 0, 0, 0, 0]);
    assert_eq!(result.ports[0].delivered, [0, COUNT - COUNT / 10]);
    assert_eq!(result.ports[1].delivered, [0, 0]);
    let json = result.to_json();
    assert_eq!(json["ports"][0]["delivered"][&result.ports[1].name], COUNT - COUNT / 10, "{json}");
    assert!(json["ports"][1]["delivered"].is_null(), "{json}");
    assert_eq!(result.loss_ratio(), Some(0.1));
}

#[test]
fn drops_before_the_receive_queues_are_named() {
    let mut result = through(&counted(), 1, |_, frame| vec![frame]);
    let json = result.to_json();
    assert_eq!(json["ports"][1]["device_drops"], serde_json::json!({}), "{json}");
    result.ports[1].device_drops = vec![(DropReason::RxFull, 7)];
    assert_eq!(result.to_json()["ports"][1]["device_drops"]["rx_full"], 7);
    let line = format!("dropped      7 by port {} before the receive queues: rx_full\n", result.ports[1].name);
    assert!(result.text().contains(&line), "{line}: {}", result.text());
}

#[test]
fn duplicates_are_counted_exactly() {
    let result = through(&counted(), 1, |n, frame| if n % 7 == 0 { vec![frame; 3] } else { vec![frame] });
    assert_eq!(counts(&result), [0, 2 * COUNT.div_ceil(7), 0, 0, 0, 0, 0]);
}

#[test]
fn reordering_is_counted_exactly() {
    let mut held: Option<Vec<u8>> = None;
    let result = through(&counted(), 1, move |n, frame| match n % 8 {
        0 => {
            held = Some(frame);
            vec![]
        }
        3 => vec![frame].into_iter().chain(held.take()).collect(),
        _ => vec![frame],
    });
    assert_eq!(counts(&result), [0, 0, COUNT / 8, 4, 0, 0, 0]);
}

#[test]
fn corruption_is_counted_exactly() {
    let mut bit = 0;
    let result = through(&counted(), 1, move |n, mut frame| {
        if n % 5 == 0 {
            // All bits of the payload but those of the magic number, in turn. Headers have 42 bytes.
            let at = 42 + bit / 8 % (frame.len() - 42);
            let magic = frame.len() - LEN..frame.len() - LEN + 2;
            let at = if magic.contains(&at) { 42 } else { at };
            frame[at] ^= 1 << (bit % 8);
            bit += 1;
        }
        vec![frame]
    });
    assert_eq!(counts(&result), [COUNT / 5, 0, 0, 0, COUNT / 5, 0, 0]);
}

#[test]
fn loops_and_foreign_packets_are_apart() {
    let result = through(&counted(), 1, |n, frame| Forwarded {
        onward: if n % 4 == 0 { vec![vec![0x5a; 64], frame.clone()] } else { vec![frame.clone()] },
        back: if n % 10 == 0 { vec![frame] } else { vec![] },
    });
    assert_eq!(counts(&result), [0, 0, 0, 0, 0, COUNT / 4, COUNT / 10]);
    assert_eq!(result.ports[0].looped, COUNT / 10);
}

#[test]
fn all_faults_together_are_told_apart() {
    let mut held: Option<Vec<u8>> = None;
    let result = through(&counted(), 2, move |n, mut frame| match n % 10 {
        0 => vec![],
        1 => vec![frame.clone(), frame],
        2 => {
            held = Some(frame);
            vec![]
        }
        4 => vec![frame].into_iter().chain(held.take()).collect(),
        6 => {
            frame[50] ^= 4;
            vec![frame]
        }
        _ => vec![frame],
    });
    let tenth = COUNT / 10;
    assert_eq!(counts(&result), [2 * tenth, tenth, tenth, 3, tenth, 0, 0]);
}

#[test]
fn flows_and_sizes_are_measured_with_many_senders() {
    let mut trial = counted();
    trial.traffic = Traffic::Flows(flows("ipv4 src 10.0.0.1-10.0.0.7 / udp dst 1-5", "64-4000"));
    // The MTU of memory ports is 1500.
    let mut generator = open(&[("memory:pktgen-flows", SENDS), ("memory:pktgen-flows", RECEIVES)], 1);
    let error = generator.run(&trial, &AtomicBool::new(false), |_| {}).unwrap_err();
    assert!(error.to_string().contains("size 4000 is too long: port"), "{error}");
    drop(generator);
    trial.traffic = Traffic::Flows(flows("ipv4 src 10.0.0.1-10.0.0.7 / udp dst 1-5", "64-1518"));
    let mut generator = open(&[("memory:pktgen-flows2", SENDS), ("memory:pktgen-flows2", RECEIVES)], 4);
    let result = generator.run(&trial, &AtomicBool::new(false), |_| {}).unwrap();
    generator.close().unwrap();
    assert_eq!((counts(&result), result.streams), ([0; 7], 35));
    let mean = result.sent_bytes as f64 / COUNT as f64;
    assert!((mean - 791.0).abs() < 30.0, "{mean}");
}

#[test]
fn ports_that_send_and_receive_measure_both_directions() {
    let both = Role { sends: true, receives: true };
    let mut generator = open(&[("memory:pktgen-both", both), ("memory:pktgen-both", both)], 1);
    let result = generator.run(&counted(), &AtomicBool::new(false), |_| {}).unwrap();
    generator.close().unwrap();
    assert_eq!((result.sent, result.received(), result.streams), (2 * COUNT, 2 * COUNT, 2));
    assert_eq!((result.lost(), result.looped(), result.foreign()), (Some(0), 0, 0));
}

#[test]
fn asked_rates_are_offered() {
    for (rate, pps) in [("20kpps", 20_000.0), ("16Mbps", 20_000.0), ("9.6Mbpsl1", 10_000.0)] {
        let trial = trial(rate, Limit::Time(Duration::from_millis(500)));
        let mut generator = open(&[("memory:pktgen-rates", SENDS), ("memory:pktgen-rates", RECEIVES)], 1);
        let result = generator.run(&trial, &AtomicBool::new(false), |_| {}).unwrap();
        generator.close().unwrap();
        assert!((result.asked_pps.unwrap() - pps).abs() < 1.0, "{:?}", result.asked_pps);
        // A machine whose processors are taken away for longer skips a part of the schedule, which is counted.
        let skipped = result.skipped.as_secs_f64() * pps;
        assert!((result.sent as f64 + skipped - pps / 2.0).abs() < pps / 2.0 * 0.02 + 2.0, "{rate}: {}", result.sent);
        assert_eq!(result.lost(), Some(0));
    }
}

#[test]
fn a_stop_ends_the_trial_with_its_result() {
    let stop = AtomicBool::new(false);
    let mut generator = open(&[("memory:pktgen-stop", SENDS), ("memory:pktgen-stop", RECEIVES)], 1);
    let result = thread::scope(|scope| {
        scope.spawn(|| {
            // A loaded machine needs a while to start the threads.
            thread::sleep(Duration::from_secs(2));
            stop.store(true, Ordering::Relaxed);
        });
        generator.run(&trial("10kpps", Limit::None), &stop, |_| {}).unwrap()
    });
    assert!(result.is_stopped && result.sent > 0 && result.lost() == Some(0), "{}", result.text());
}

#[test]
fn nothing_is_measured_without_a_receiver() {
    let mut generator = open(&[("null:", SENDS)], 1);
    let result = generator.run(&trial("max", Limit::Packets(100_000)), &AtomicBool::new(false), |_| {}).unwrap();
    assert_eq!((result.sent, result.lost(), result.loss_ratio()), (100_000, None, None));
    assert!(!result.text().contains("lost") && result.to_json()["lost"].is_null());
}

#[test]
fn histograms_are_written_as_a_log() {
    let result = through(&counted(), 1, |_, frame| vec![frame]);
    let mut log = Vec::new();
    result.write_hlog(&mut log, std::time::SystemTime::now()).unwrap();
    let read = wirepath_testlab::read_histogram_log(&log);
    assert_eq!(read, [("latency".to_owned(), result.latency), ("departures".to_owned(), result.departures)]);
}
