//! Figures of workers: the accounts that always run, and measurements.

use std::time::{Duration, Instant};

use serde_json::Value;
use wirepath_packet::{Batch, Pool};
use wirepath_pipeline::measure::Measurement;
use wirepath_pipeline::registry::{Registry, TABLES};
use wirepath_pipeline::{Context, Running, Stage};

use crate::programs::{cables, cross, frame, open, pass, stop};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Ends a measurement, and returns the recordings of the workers.
fn end<S>(running: &mut Running<S>, measurement: &Measurement) -> Vec<Value> {
    let begin = Instant::now();
    loop {
        if let Some(recordings) = running.plane().end_measurement(measurement) {
            return recordings.iter().enumerate().map(|(i, it)| it.to_json(i, true)).collect();
        }
        assert!(begin.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns a row of a table of the runtime, as an object.
fn rows<S>(running: &mut Running<S>, table: &str) -> Vec<Value> {
    let table = TABLES.iter().find(|it| it.name == table).unwrap();
    let rows = Registry { control: &mut (), plane: running.plane() }.rows(table);
    let object = |row: Vec<Value>| table.columns.iter().map(|column| column.name.to_owned()).zip(row).collect();
    rows.into_iter().map(object).collect()
}

struct Slow;

impl Stage for Slow {
    fn process(&mut self, _: &mut Context<'_>, _: &mut Batch) {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_micros(200) {}
    }
}

#[test]
fn recordings_have_the_packets_and_stages_of_their_time() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("recordings", 1, &pool);
    let mut running = runtime.start(|_| (Slow, cross)).unwrap();
    pass(500, &mut a, &mut b, || ());
    let first = running.plane().start_measurement(None).unwrap();
    // The worker takes the order at its next turn, and begins a few turns later.
    std::thread::sleep(Duration::from_millis(50));
    pass(1000, &mut a, &mut b, || ());
    let second = running.plane().start_measurement(Some(Duration::from_secs(3600))).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    pass(700, &mut b, &mut a, || ());
    let of_second = end(&mut running, &second);
    pass(300, &mut a, &mut b, || ());
    let of_first = end(&mut running, &first);
    assert_eq!((of_first.len(), of_second.len()), (1, 1));
    let (one, two) = (&of_first[0], &of_second[0]);
    assert_eq!(two["packets"], 700);
    // Up to a few turns are missing where one recording follows another.
    let packets = one["packets"].as_u64().unwrap();
    assert!((1700..=2000).contains(&packets), "{packets}");
    for it in [one, two] {
        let names: Vec<&str> = it["stages"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["receive", "Slow", "cross", "transmit", "other"]);
        let sum: u64 = it["stages"].as_array().unwrap().iter().map(|it| it["cycles"].as_u64().unwrap()).sum();
        assert_eq!(it["busy_cycles"], sum, "every cycle of a busy turn belongs to one part");
        assert!(it["stages"][1]["share"].as_f64().unwrap() > 0.5, "the stage that waits: {it}");
        let turns = it["busy_turns"].as_u64().unwrap();
        for name in ["cycles_per_turn", "packets_per_turn", "cycles_per_packet", "punts_per_turn"] {
            assert_eq!(it["histograms"][name]["n"], turns, "{name}");
        }
        assert_eq!(it["histograms"]["packets_per_batch"]["n"], it["batches"]);
        assert!(it["measurement"]["cycles"].as_u64().unwrap() > 0 && it["idle_turns"].as_u64().unwrap() > 0);
        let list = it["turns"].as_array().unwrap();
        assert_eq!(list.len() as u64, turns.min(1000));
        assert!(list.windows(2).all(|two| two[0]["time"].as_f64() < two[1]["time"].as_f64()));
    }
    let list = two["turns"].as_array().unwrap();
    assert_eq!(list.iter().map(|turn| turn["packets"].as_u64().unwrap()).sum::<u64>(), 700);
    // Each busy turn waits 200 microseconds. The limit of the second measurement is in force while it runs.
    assert_eq!((&two["suspicious_turns"], two["slow_turns"].as_array().unwrap().len()), (&0.into(), 0));
    assert!(one["suspicious_turns"].as_u64() > Some(10), "{one}");
    assert_eq!(one["slow_turns"][0]["longest"], "Slow");
    stop(running);
}

#[test]
fn workers_measure_only_while_somebody_wants_it() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("wanted", 1, &pool);
    let mut running = runtime.start(|_| cross).unwrap();
    let measurements: Vec<Measurement> = (0..8).map(|_| running.plane().start_measurement(None).unwrap()).collect();
    assert!(running.plane().start_measurement(None).is_err(), "too many");
    // The worker takes its orders at its next turn, which comes late on a busy machine. Before, it does not measure.
    let begin = Instant::now();
    while running.plane().measuring() == 0 {
        assert!(begin.elapsed() < TIMEOUT, "the worker has not taken its orders");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(measurements);
    // It returns its recording in the same way.
    let deadline = Instant::now() + Duration::from_secs(30);
    while running.plane().measuring() > 0 {
        assert!(Instant::now() < deadline, "the workers have not given all recordings back");
        std::thread::sleep(Duration::from_millis(11));
        running.tick(&mut ());
        pass(100, &mut a, &mut b, || ());
    }
    let measurement = running.plane().start_measurement(None).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    pass(100, &mut a, &mut b, || ());
    assert_eq!(running.plane().measuring(), 1);
    assert_eq!(end(&mut running, &measurement)[0]["packets"], 100);
    // A second end of the same measurement has nothing.
    assert!(end(&mut running, &measurement).is_empty());
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(running.plane().measuring(), 0);
    stop(running);
}

#[test]
fn workers_count_cycles_and_packets() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, mut b) = cables("accounts", 1, &pool);
    let mut running = runtime.start(|_| (Slow, cross)).unwrap();
    pass(1000, &mut a, &mut b, || ());
    std::thread::sleep(Duration::from_millis(300));
    let row = rows(&mut running, "workers").remove(0);
    let of = |name: &str| row[name].as_u64().unwrap_or_else(|| panic!("{name}: {row}"));
    assert_eq!(of("packets"), 1000);
    let busy_turns = of("turns") - of("idle_turns");
    // A turn waits 200 microseconds; a tick of the counter is shorter than two nanoseconds.
    assert!(busy_turns > 0 && of("busy_cycles") > busy_turns * 100_000, "{row}");
    assert!(of("idle_cycles") > 0 && of("sleeps") > 0 && of("sleep_cycles") > 100_000_000, "{row}");
    stop(running);
}

#[test]
fn waiting_packets_are_a_gauge() {
    let pool = Pool::new("test", 2048).unwrap();
    let (runtime, mut a, _b) = cables("waiting", 1, &pool);
    let mut running = runtime.start(|_| (Slow, cross)).unwrap();
    let waiting = |running: &mut Running<_>| rows(running, "queues")[0]["waiting"].as_u64();
    let begin = Instant::now();
    // The stage takes a full batch in 200 microseconds, and the ring holds more than that.
    let mut n = 0;
    while waiting(&mut running).is_none_or(|waiting| waiting == 0) {
        assert!(begin.elapsed() < TIMEOUT);
        while a.send_bytes(&frame(n)) {
            n += 1;
        }
    }
    while waiting(&mut running) != Some(0) {
        assert!(begin.elapsed() < TIMEOUT);
        std::thread::sleep(Duration::from_millis(1));
    }
    stop(running);
}

#[test]
fn a_queue_that_cannot_tell_has_no_waiting_packets() {
    let text = "[[port]]\nname = 'a'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n";
    let mut running = open(text).unwrap().start(|_| cross).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    assert!(rows(&mut running, "queues").iter().all(|row| row["waiting"].is_null()));
    stop(running);
}
