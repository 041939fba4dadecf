//! `wirepath ndr`: the Python package MLRsearch judges the search, devices with a known rate judge what it measures.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde::Deserialize;
use serde_json::Value;
use wirepath_apps::ndr::search::{Goal, GoalResult, Request, Search, State};
use wirepath_testlab::{Requirement, require};

use super::pktgen::{assert_refused, memory_cable, shaped_bridge};

const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");

/// Simulated devices, and the results of the package for them:
///
/// ```sh
/// pip install MLRsearch==1.2.1
/// python3 mlrsearch.py <mlrsearch.json >new.json && mv new.json mlrsearch.json
/// ```
const SCENARIOS: &str = include_str!("mlrsearch.json");
const ORACLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/mlrsearch.py");

#[derive(Clone, Debug, Deserialize, PartialEq)]
struct Scenario {
    name: String,
    #[serde(flatten)]
    device: Device,
    min_load: f64,
    max_load: f64,
    exceed_ratio: f64,
    width: f64,
    initial_seconds: f64,
    final_seconds: f64,
    duration_sum: f64,
    goals: Vec<Expected>,
    /// Sum of the durations of the trials of the package.
    trial_seconds: f64,
}

/// Results of the package for a goal.
#[derive(Clone, Debug, Deserialize, PartialEq)]
struct Expected {
    loss_ratio: f64,
    lower: Option<f64>,
    upper: Option<f64>,
    throughput: Option<f64>,
}

/// A simulated device, as in `mlrsearch.py`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
struct Device {
    /// Packets per second that it forwards.
    capacity: f64,
    /// Share of the packets that it always loses.
    background: f64,
    /// Largest relative deviation of the capacity in a trial.
    jitter: f64,
    /// Share of the trials that lose `burst_loss` of the packets.
    burst_probability: f64,
    burst_loss: f64,
    seed: u64,
}

/// Number `n` of a sequence (SplitMix64), from 0 to below 1.
fn random(seed: u64, n: u64) -> f64 {
    let mut z = seed.wrapping_add((n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

impl Device {
    /// Returns the loss ratio of trial `n`.
    fn loss(&self, n: u64, trial: Request) -> f64 {
        let capacity = self.capacity * (1.0 + self.jitter * (2.0 * random(self.seed, 2 * n) - 1.0));
        let mut share = self.background.max(1.0 - capacity / trial.load);
        if random(self.seed, 2 * n + 1) < self.burst_probability {
            share = share.max(self.burst_loss);
        }
        let sent = (trial.load * trial.duration.as_secs_f64()) as u64;
        (sent as f64 * share) as u64 as f64 / sent as f64
    }

    /// Returns the highest load with this loss ratio at most; `None` if there is none.
    fn truth(&self, loss_ratio: f64) -> Option<f64> {
        (self.background <= loss_ratio).then(|| self.capacity / (1.0 - loss_ratio))
    }
}

impl Scenario {
    /// Searches with the own library. Returns the results and the sum of the durations of the trials.
    fn search(&self) -> (Vec<GoalResult>, f64) {
        let goal = |expected: &Expected| Goal {
            loss_ratio: expected.loss_ratio,
            exceed_ratio: self.exceed_ratio,
            width: self.width,
            initial_duration: Duration::from_secs_f64(self.initial_seconds),
            final_duration: Duration::from_secs_f64(self.final_seconds),
            duration_sum: Duration::from_secs_f64(self.duration_sum),
        };
        let goals: Vec<Goal> = self.goals.iter().map(goal).collect();
        let mut search = Search::new(&goals, (self.min_load, self.max_load)).unwrap();
        let (mut n, mut seconds) = (0, 0.0);
        search.run(|trial| {
            n += 1;
            seconds += trial.duration.as_secs_f64();
            assert!(n < 10_000, "{}: the search does not end", self.name);
            Some(self.device.loss(n - 1, trial))
        });
        (search.results(), seconds)
    }
}

fn scenarios(text: &str) -> Vec<Scenario> {
    serde_json::from_str(text).unwrap()
}

#[test]
fn bounds_are_those_of_the_python_package() {
    let mut compared = 0;
    for scenario in scenarios(SCENARIOS) {
        let (results, _) = scenario.search();
        for (found, package) in results.iter().zip(&scenario.goals) {
            let about = format!("{}, loss {}: {found:?} {package:?}", scenario.name, package.loss_ratio);
            let truth = scenario.device.truth(package.loss_ratio);
            let expected = match truth {
                Some(truth) if truth >= scenario.max_load => State::AtLeast,
                Some(truth) if truth > scenario.min_load => State::Reached,
                _ => State::Below,
            };
            assert_eq!(found.state, expected, "{about}");
            // Each search may be off by its width. Noise moves the truth, and a trial has whole packets.
            let one_packet = 1.0 / (scenario.min_load * scenario.initial_seconds);
            let tolerance = scenario.width + scenario.device.jitter + one_packet;
            let near = |a: Option<f64>, b: Option<f64>| match (a, b) {
                (Some(a), Some(b)) => (a - b).abs() <= tolerance * a.max(b),
                (a, b) => a == b,
            };
            assert!(near(found.lower, package.lower), "lower: {about}");
            assert!(near(found.upper, package.upper), "upper: {about}");
            assert!(near(found.throughput, package.throughput), "throughput: {about}");
            if expected == State::Reached {
                assert!(found.width().unwrap() <= scenario.width * 1.000_001, "{about}");
                assert!(near(found.lower, truth) && near(found.upper, truth), "{about}");
            }
            compared += 1;
        }
    }
    assert!(compared > 25, "{compared}");
}

#[test]
fn a_search_takes_no_more_time_than_the_package() {
    // The package is the measure of the effort. Single searches may take longer, all together must not.
    let (mut own, mut package) = (0.0, 0.0);
    for scenario in scenarios(SCENARIOS) {
        let seconds = scenario.search().1;
        assert!(seconds < scenario.trial_seconds * 2.0, "{}: {seconds} s", scenario.name);
        own += seconds;
        package += scenario.trial_seconds;
    }
    assert!(own < package * 1.1, "{own} s and {package} s");
}

#[test]
fn the_recorded_results_are_those_of_the_package() {
    let has_package = |python: &str| {
        let version = "import MLRsearch, importlib.metadata as m; print(m.version('MLRsearch'))";
        let output = Command::new(python).args(["-c", version]).output();
        output.is_ok_and(|output| output.status.success() && output.stdout.starts_with(b"1.2.1"))
    };
    if !has_package("python3") {
        // The recorded results stand for it: Debian has no package of it.
        eprintln!("not compared: python3 has no MLRsearch 1.2.1");
        return;
    }
    let mut child = Command::new("python3").arg(ORACLE).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(SCENARIOS.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(scenarios(&String::from_utf8(output.stdout).unwrap()), scenarios(SCENARIOS));
}

fn output(arguments: &[&str]) -> Output {
    Command::new(WIREPATH).args(["-q", "ndr"]).args(arguments).output().unwrap()
}

/// Returns the JSON of a run that ends with this exit code.
#[track_caller]
fn json(output: &Output, code: i32) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{error}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{error}"))
}

/// Options of short searches.
const SHORT: [&str; 12] = [
    "--initial-seconds",
    "0.2",
    "--final-seconds",
    "0.2",
    "--duration-sum",
    "1",
    "--qualify-seconds",
    "0.1",
    "--latency-seconds",
    "0.2",
    "--allow-noise",
    "--json",
];

#[test]
fn impossible_requests_are_refused_with_the_limit() {
    let (_folder, config) = memory_cable("");
    let ports = ["--config", &config, "--tx", "out", "--rx", "in"];
    let max = ["--max-rate", "100kpps"];
    for (arguments, error) in [
        (&["--tx", "null:"][..], "no port receives; give --rx PORT or --port PORT"),
        (&["--rx", "null:"], "no port sends"),
        (&ports, "reports no speed"),
        (&ports, "--max-rate sets the highest load"),
        (&[&ports[..], &["--max-rate", "max"]].concat(), "must be a number, not \"max\""),
        (&[&ports[..], &["--max-rate", "2Gpps"]].concat(), "at most 1000000000 packets per second"),
        (&[&ports[..], &["--max-rate", "50%"]].concat(), "reports no speed"),
        (&[&ports[..], &max, &["--min-rate", "100kpps"]].concat(), "100000.0 pps is not below the highest one"),
        (&[&ports[..], &max, &["--min-rate", "0.5"]].concat(), "has no packet; at least 1 pps"),
        (&[&ports[..], &max, &["--size", "63"]].concat(), "from 64 to 9216"),
        (&[&ports[..], &max, &["--size", "64", "--size", "9216"]].concat(), "sends at most 1526 bytes"),
        (&[&ports[..], &max, &["--headers", "ipv6 / udp"]].concat(), "so at least 84"),
        (&[&ports[..], &max, &["--loss-ratio", "1"]].concat(), "from 0 to below 1"),
        (&[&ports[..], &max, &["--loss-ratio", "0", "--loss-ratio", "0%"]].concat(), "given twice"),
        (&[&ports[..], &max, &["--width", "0"]].concat(), "from 0.01 % to 50 %"),
        (&[&ports[..], &max, &["--final-seconds", "0.5"]].concat(), "at most the final one of 0.5 s"),
        (&[&ports[..], &max, &["--final-seconds", "30"]].concat(), "at least the final trial duration of 30 s"),
        (&[&ports[..], &max, &["--exceed-ratio", "100%"]].concat(), "from 0 to below 1"),
        (&[&ports[..], &max, &["--cores", "4095"]].concat(), "core 4095 is not one of"),
    ] {
        assert_refused(&output(arguments), error);
    }
}

#[test]
fn a_cable_can_do_at_least_the_limit() {
    let (_folder, config) = memory_cable("");
    let ports = ["--config", &config, "--tx", "out", "--rx", "in", "--max-rate", "5kpps"];
    // With this precision, a trial may last longer on a loaded machine.
    let sizes = ["--width", "30%", "--size", "64", "--size", "imix"];
    let all = json(&output(&[&ports[..], &sizes, &SHORT].concat()), 0);
    let searches = all["searches"].as_array().unwrap();
    assert_eq!(searches.len(), 2, "{all}");
    for (search, (size, mean)) in searches.iter().zip([("64", 64.0), ("imix", 4246.0 / 12.0)]) {
        assert_eq!((&search["size"], &search["end"]), (&size.into(), &"complete".into()), "{all}");
        assert!((search["mean_size"].as_f64().unwrap() - mean).abs() < 0.01, "{search}");
        for (goal, name) in search["goals"].as_array().unwrap().iter().zip(["NDR", "PDR 0.5 %"]) {
            assert_eq!((&goal["name"], &goal["state"]), (&name.into(), &"at_least".into()), "{search}");
            assert_eq!((&goal["throughput_pps"], &goal["upper_pps"]), (&5000.0.into(), &Value::Null), "{search}");
        }
        let latency = search["latency"].as_array().unwrap();
        let loads: Vec<f64> = latency.iter().map(|it| it["load_pps"].as_f64().unwrap()).collect();
        assert_eq!(loads, [500.0, 2500.0, 4500.0]);
        assert!(latency.iter().all(|it| it["latency_ns"]["p50"].as_u64().unwrap() > 0), "{search}");
        assert!(search["faults"].as_object().unwrap().values().all(|n| n == 0), "{search}");
    }
    assert_eq!(all["machine"]["processors"].as_array().unwrap().len(), 1, "{all}");
}

#[test]
fn faulty_packets_are_reported_and_do_not_count() {
    let (_folder, config) =
        memory_cable("[port.faults]\nseed = 3\nrx = { duplicate = 0.05, reorder = 0.02, corrupt = 0.02 }\n");
    let ports = ["--config", &config, "--tx", "out", "--rx", "in", "--max-rate", "10kpps", "--min-rate", "5kpps"];
    let goals = ["--loss-ratio", "0", "--loss-ratio", "20%", "--width", "30%"];
    let all = json(&output(&[&ports[..], &goals, &SHORT].concat()), 0);
    let search = &all["searches"][0];
    // Each trial has a thousand packets, of which some are out of order or corrupt.
    let [strict, lax] = [&search["goals"][0], &search["goals"][1]];
    assert_eq!((&strict["state"], &strict["throughput_pps"]), (&"below".into(), &Value::Null), "{all}");
    assert_eq!((&lax["state"], &lax["lower_pps"]), (&"at_least".into(), &10_000.0.into()), "{all}");
    let throughput = lax["throughput_pps"].as_f64().unwrap();
    assert!(throughput < 10_000.0 && throughput > 8_000.0, "{lax}");
    let faults = |name: &str| search["faults"][name].as_u64().unwrap();
    assert!(faults("duplicates") > 0 && faults("reordered") > 0 && faults("corrupt") > 0, "{search}");
    let trials = search["trials"].as_array().unwrap();
    for trial in trials {
        let number = |name: &str| trial[name].as_u64().unwrap();
        let lost = number("intended") - number("received");
        assert!(lost >= trial["faults"]["reordered"].as_u64().unwrap(), "{trial}");
    }
}

#[test]
fn a_shared_processor_is_refused_with_cause_and_remedy() {
    let core = core_affinity::get_core_ids().unwrap()[0];
    let (_folder, config) = memory_cable("");
    let id = core.id.to_string();
    let ports = ["--config", &config, "--tx", "out", "--rx", "in", "--max-rate", "5kpps", "--cores", &id];
    let goals = ["--initial-seconds", "0.2", "--final-seconds", "0.2", "--duration-sum", "0.2", "--no-latency"];
    let run = |more: &[&str]| output(&[&ports[..], &goals, &["--qualify-seconds", "0.5"], more].concat());
    let done = AtomicBool::new(false);
    let (refused, text, allowed) = std::thread::scope(|scope| {
        scope.spawn(|| {
            assert!(core_affinity::set_for_current(core));
            while !done.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let results = (run(&["--json"]), run(&[]), run(&["--json", "--allow-noise"]));
        done.store(true, Ordering::Relaxed);
        results
    });
    let json_of = json(&refused, 1);
    assert_eq!((&json_of["searches"], &json_of["disturbed"]), (&Value::Array(Vec::new()), &true.into()), "{json_of}");
    let noise = json_of["noise"].to_string();
    assert!(noise.contains(&format!("processor {id}")) && noise.contains("cause"), "{noise}");
    let text = format!("{}{}", String::from_utf8_lossy(&text.stdout), String::from_utf8_lossy(&text.stderr));
    assert!(text.contains("\n  > ") && text.contains("--allow-noise") && !text.contains("THROUGHPUT"), "{text}");
    let search = &json(&allowed, 0)["searches"][0];
    assert_eq!((&search["disturbed"], &search["goals"][0]["disturbed"]), (&true.into(), &true.into()), "{search}");
}

#[test]
fn an_interrupted_search_prints_the_known_bounds() {
    let (_folder, config) = memory_cable("[port.faults]\nrx = { loss = 0.5 }\n");
    let ports = ["--config", &config, "--tx", "out", "--rx", "in", "--max-rate", "10kpps"];
    // The second goal passes at once, and then takes minutes of trials at the highest load.
    let goals = ["--loss-ratio", "0.9", "--initial-seconds", "0.5", "--final-seconds", "60", "--duration-sum", "600"];
    let mut child = Command::new(WIREPATH)
        .args(["-q", "ndr"])
        .args([&ports[..], &goals, &["--qualify-seconds", "0.1", "--allow-noise", "--json"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.starts_with("size 64: trial ") && line.contains("PDR 90 % 10000.."), "{line}");
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let output = child.wait_with_output().unwrap();
    let search = &json(&output, 0)["searches"][0];
    let goal = &search["goals"][0];
    assert_eq!((&search["end"], &goal["state"]), (&"stopped".into(), &"unfinished".into()), "{search}");
    assert_eq!(goal["lower_pps"], 10_000.0, "{search}");
}

/// Options of searches through a device that passes 1000 packets per second.
pub(super) const BUCKET: [&str; 23] = [
    "--json",
    "-q",
    "ndr",
    "--tx",
    "af_packet:east",
    "--rx",
    "af_packet:west",
    "--size",
    "1004",
    "--max-rate",
    "4kpps",
    "--min-rate",
    "200",
    "--width",
    "4%",
    "--initial-seconds",
    "0.5",
    "--final-seconds",
    "0.5",
    "--duration-sum",
    "1",
    "--qualify-seconds",
    "0.1",
];

#[test]
fn the_rate_of_a_token_bucket_is_found() {
    require!(all Requirement::LAB);
    // Besides the rate, the bucket passes 5 packets and its queue 100 in each trial.
    let (_lab, [left, right, _bridge]) = shaped_bridge("ndr-tbf", "rate 8mbit burst 5000 limit 100000");
    right.ip(&format!("link set west netns {}", left.name()));
    left.ip("link set west up");
    std::thread::sleep(Duration::from_secs(1));
    let goals = ["--allow-noise", "--loss-ratio", "0", "--loss-ratio", "20%", "--latency-seconds", "0.5"];
    let run = left.run(&[&[WIREPATH], &BUCKET[..], &goals].concat());
    let all: Value = serde_json::from_str(&run.expect()).unwrap();
    let search = &all["searches"][0];
    let passed = 1000.0 + 105.0 / 0.5;
    for (goal, truth) in search["goals"].as_array().unwrap().iter().zip([passed, passed / 0.8]) {
        let number = |name: &str| goal[name].as_f64().unwrap_or_else(|| panic!("{name}: {all}"));
        assert_eq!(goal["state"], "reached", "{all}");
        assert!(number("width") <= 0.04 + 1e-9, "{all}");
        // A width on either side: the queue drains while packets arrive, and counts whole packets.
        assert!(number("lower_pps") <= truth * 1.04 && number("upper_pps") >= truth * 0.96, "{truth}: {all}");
        assert_eq!(goal["limited_by_sender"], false, "{all}");
    }
    // At 90 % the packets are still more than the bucket passes, so that the queue fills up.
    let latency = |at: usize| search["latency"][at]["latency_ns"]["p50"].as_u64().unwrap();
    assert!(latency(0) < latency(2) && search["latency"].as_array().unwrap().len() == 3, "{all}");
}

#[test]
fn a_device_that_loops_is_reported() {
    require!(all Requirement::LAB);
    let (_lab, [left, right, bridge]) = shaped_bridge("ndr-loop", "rate 800mbit burst 1mb limit 4mb");
    right.ip(&format!("link set west netns {}", left.name()));
    left.ip("link set west up");
    // The bridge sends broadcasts back to the port that they came from.
    bridge.run(&["bridge", "link", "set", "dev", "p1", "hairpin", "on"]).expect();
    std::thread::sleep(Duration::from_secs(1));
    let ports = ["-q", "ndr", "--tx", "af_packet:east", "--rx", "af_packet:west", "--max-rate", "1kpps"];
    let stack = ["--headers", "eth dst ff:ff:ff:ff:ff:ff / ipv4 / udp", "--loss-ratio", "0"];
    let run = left.run(&[&[WIREPATH], &ports[..], &stack, &SHORT].concat());
    let all: Value = serde_json::from_str(&run.expect()).unwrap();
    let search = &all["searches"][0];
    // Each packet comes back once, and arrives once at the right port, where it counts.
    let trials = search["trials"].as_array().unwrap();
    let number = |trial: &Value, name: &str| trial[name].as_u64().unwrap();
    assert!(search["faults"]["looped"].as_u64().unwrap() > 100, "{all}");
    for trial in trials {
        // The ends of a schedule are rounded.
        let looped = trial["faults"]["looped"].as_u64().unwrap();
        assert!(looped <= number(trial, "intended") + 2, "{trial}");
        assert!(number(trial, "received") <= number(trial, "intended"), "{trial}");
    }
    assert!(trials.iter().any(|trial| number(trial, "received") > 0), "{all}");
}
