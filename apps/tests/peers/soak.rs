//! The long run: traffic that nothing may disturb, beside disturbances that follow each other.
//!
//! `wirepath pktgen` sends around a ring of ports: each port sends to the next one. A run consists of windows. Each
//! window has a trial of its own and one disturbance, so each lost packet has a time and a disturbance. The order of
//! the disturbances and their random numbers come from a seed, which is printed.
//!
//! [`MINUTES`] is the length of a run. Without it, a run has one window for each disturbance.

mod fabric;
mod gateway;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use serde_json::Value;
use tempfile::TempDir;
use wirepath_testlab::{Background, Namespace, eventually, print_uncaptured, read_histogram_log};

pub(crate) use self::fabric::leaves_restart_and_hosts_move;
pub(crate) use self::gateway::all_ports_at_once;
use crate::faults::{GROWTH, Usage, WIREPATH};
use crate::program::Program;
use crate::world::WAIT_LIMIT;

/// Variable with the length of a run in minutes.
const MINUTES: &str = "WIREPATH_SOAK_MINUTES";
/// Variable with the seed of a run.
const SEED: &str = "WIREPATH_SOAK_SEED";
/// Seed without the variable.
const DEFAULT_SEED: u64 = 1;
/// Least time of traffic in a window, in the short form and in a run of minutes.
const WINDOW: [Duration; 2] = [Duration::from_millis(700), Duration::from_secs(8)];
/// Length of a trial of the search for the rate.
const SEARCH: [Duration; 2] = [Duration::from_millis(700), Duration::from_secs(3)];
/// Rate at which the search begins, and its highest ones, in packets per second of each port. In the short form other
/// tests run at the same time and take the processors after the search. So its highest rate is low.
const FIRST_RATE: u64 = 250;
const MOST: [u64; 2] = [500, 64_000];
/// Time at the begin and at the end of a run whose delays are compared.
const COMPARED: Duration = Duration::from_secs(60);
/// Shortest run whose delays are asserted. Shorter ones have no minute before the last one.
const LEAST_COMPARED: Duration = Duration::from_secs(180);
/// Percentiles of the delays, and the delay that each may have in any case: some time slices of the kernel's scheduler,
/// which the generator, the gateway, the kernel's devices and the disturbances share.
const PERCENTILES: [(f64, Duration); 2] = [(50.0, Duration::from_millis(10)), (99.9, Duration::from_millis(30))];
/// Share of the processors that other programs may take in both compared minutes. With a compiler beside the run, the
/// delays are those of the scheduler: the highest thousandth was 120 ms in one minute and 550 ms in another one, while
/// no packet was lost. Then the delays are printed and not asserted.
const OTHERS: f64 = 0.1;
/// Bytes of memory by which a gateway may grow. The first tenth of the short form is over before each disturbance was
/// there once. So what they fill at their first time counts: 5 MiB at rest, 10 MiB on a busy machine. By smaps, 4 MiB
/// of the 5 are two huge pages of a mapping that exists since the start, and 1 MiB is the heap.
const GROWTHS: [u64; 2] = [2 * GROWTH, GROWTH];
/// Frames that a disturbance sends in one millisecond.
const PER_MILLISECOND: usize = 3;
/// Longest time that the generator runs if nothing ends it.
const LIMIT: &str = "86400";

/// Length, windows and seed of a run.
struct Plan {
    /// `None`: one window for each disturbance.
    length: Option<Duration>,
    seed: u64,
}

impl Plan {
    fn read() -> Self {
        let number = |name: &str| {
            let text = std::env::var(name).ok()?;
            Some(text.parse::<u64>().unwrap_or_else(|_| panic!("{name}={text}: expected a number")))
        };
        let length = number(MINUTES).map(|minutes| {
            assert!(minutes > 0, "{MINUTES}=0: expected a number above 0");
            Duration::from_secs(60 * minutes)
        });
        Self { length, seed: number(SEED).unwrap_or(DEFAULT_SEED) }
    }

    /// Returns the value for the short form, or that for a run of minutes.
    fn choose<T: Copy>(&self, values: [T; 2]) -> T {
        values[usize::from(self.length.is_some())]
    }
}

/// Ports of the generator in one namespace. Each sends to the next one, and the last one to the first one.
struct Ring {
    tester: Namespace,
    ports: Vec<String>,
    folder: TempDir,
}

/// Packets of a port, and those of them that arrived first at the next one.
#[derive(Clone, Copy, Debug)]
struct Flow {
    sent: u64,
    delivered: u64,
}

/// Result of a trial.
struct Trial {
    seconds: f64,
    /// In the order of the ports.
    flows: Vec<Flow>,
    duplicates: u64,
    corrupt: u64,
    /// Seconds of the schedule that the generator left out.
    skipped: f64,
    latency: Histogram<u64>,
    /// Drops of the generator's own ports.
    drops: BTreeMap<String, u64>,
}

impl Trial {
    fn lost(&self) -> u64 {
        self.flows.iter().map(|flow| flow.sent - flow.delivered).sum()
    }
}

impl Ring {
    fn new(tester: Namespace, ports: &[&str]) -> Self {
        let ports = ports.iter().map(|&port| port.to_owned()).collect();
        Self { tester, ports, folder: tempfile::tempdir().expect("a folder") }
    }

    fn hlog(&self) -> String {
        self.folder.path().join("hlog").display().to_string()
    }

    /// Starts to send at a rate in packets per second of each port.
    fn start(&self, rate: u64, seconds: &str) -> Background {
        let (rate, hlog) = (rate.to_string(), self.hlog());
        let ports: Vec<String> = self.ports.iter().map(|port| format!("af_packet:{port}")).collect();
        let mut arguments = vec![WIREPATH, "--json", "-q", "pktgen", "--no-self-check", "--drain", "2"];
        ports.iter().for_each(|port| arguments.extend(["--port", port]));
        arguments.extend(["--rate", &rate, "--seconds", seconds, "--hlog", &hlog, "--size", "64,300,1400"]);
        self.tester.spawn(&arguments)
    }

    /// Ends the sending and waits for the result.
    #[track_caller]
    fn finish(&self, generator: Background) -> Trial {
        self.read(&generator.terminate(WAIT_LIMIT * 3).expect())
    }

    #[track_caller]
    fn trial(&self, rate: u64, time: Duration) -> Trial {
        self.read(&self.start(rate, &time.as_secs_f64().to_string()).wait(time + WAIT_LIMIT * 3).expect())
    }

    #[track_caller]
    fn read(&self, text: &str) -> Trial {
        let json: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let result = &json["result"];
        assert!(result["failure"].is_null(), "{result}");
        let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or_else(|| panic!("{key}: {value}"));
        let ports = result["ports"].as_array().expect("ports");
        let mut drops = BTreeMap::new();
        for port in ports {
            for direction in ["rx_drops", "tx_drops"] {
                for (reason, count) in port[direction].as_object().expect("drops") {
                    let name = format!("{} {direction} {reason}", port["name"].as_str().expect("a name"));
                    drops.insert(name, count.as_u64().expect("a number"));
                }
            }
        }
        let dropped = |port: &Value| -> u64 {
            port["tx_drops"].as_object().expect("drops").values().filter_map(Value::as_u64).sum()
        };
        let flow = |(n, port): (usize, &Value)| {
            let next = &ports[(n + 1) % ports.len()];
            let to = next["name"].as_str().expect("a name");
            Flow {
                sent: number(port, "tx_packets") - dropped(port),
                delivered: port["delivered"][to].as_u64().unwrap_or_default(),
            }
        };
        let flows: Vec<Flow> = ports.iter().enumerate().map(flow).collect();
        assert_eq!(flows.iter().map(|flow| flow.sent).sum::<u64>(), number(result, "sent"), "{result}");
        let log = read_histogram_log(&std::fs::read(self.hlog()).expect("the histograms"));
        let (_, latency) = log.into_iter().find(|(tag, _)| tag == "latency").expect("the delays");
        let trial = Trial {
            seconds: result["seconds"].as_f64().expect("a time"),
            flows,
            duplicates: number(result, "duplicates"),
            corrupt: number(result, "corrupt") + number(result, "unknown_stream"),
            skipped: result["skipped_seconds"].as_f64().expect("a time"),
            latency,
            drops,
        };
        assert!(trial.lost() >= number(result, "lost"), "{result}");
        trial
    }

    /// Waits until no packet is lost or flooded.
    #[track_caller]
    fn wait_until_known(&self) {
        let mut last = (Vec::new(), 0);
        // Each trial takes some seconds, and the first ones may be flooded.
        let is_known = eventually(WAIT_LIMIT * 3, || {
            let trial = self.trial(100, Duration::from_millis(300));
            last = (trial.flows, trial.duplicates);
            last.0.iter().all(|flow| flow.sent == flow.delivered) && trial.duplicates == 0
        });
        assert!(is_known, "packets are lost or flooded: {last:?}");
    }

    /// Searches the highest rate without loss: in steps of a factor 2, and then between the last two.
    fn search(&self, plan: &Plan) -> u64 {
        let (time, most) = (plan.choose(SEARCH), plan.choose(MOST));
        let passes = |rate: u64| {
            let trial = self.trial(rate, time);
            // The low rate of the short form leaves room for a generator that is late.
            trial.lost() == 0 && (plan.length.is_none() || trial.skipped == 0.0)
        };
        let mut rate = FIRST_RATE;
        while !passes(rate) {
            assert!(rate > 10, "packets are lost at every rate");
            rate /= 2;
        }
        let mut above = None;
        loop {
            let next = match above {
                None => 2 * rate,
                Some(above) => (rate + above) / 2,
            };
            if next > most || above.is_some_and(|above| above - rate <= rate / 4) {
                return rate;
            }
            if passes(next) { rate = next } else { above = Some(next) }
        }
    }

    fn name(&self, flow: usize) -> String {
        format!("{} to {}", self.ports[flow], self.ports[(flow + 1) % self.ports.len()])
    }
}

/// Sends frames at an even pace. A thread that was not scheduled does not catch up.
fn send_paced(from: &Namespace, frames: impl Iterator<Item = Vec<u8>>) {
    let port = from.frames("eth0");
    for (n, frame) in frames.enumerate() {
        port.send(&frame).expect("sent");
        if n % PER_MILLISECOND == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A gateway whose resources and counters are watched.
struct Watched<'a> {
    name: &'static str,
    program: &'a Program,
    id: u32,
    /// Flows of the ring, and the ports of the gateway that receive them. Nothing else is received there.
    inputs: Vec<(usize, &'static str)>,
    /// Free buffers before the run.
    free: u64,
    usage: Vec<(Duration, Usage)>,
}

impl<'a> Watched<'a> {
    fn new(name: &'static str, program: &'a Program, id: u32, inputs: &[(usize, &'static str)]) -> Self {
        let mut watched = Self { name, program, id, inputs: inputs.to_vec(), free: 0, usage: Vec::new() };
        watched.free = watched.free_buffers();
        watched
    }

    fn free_buffers(&self) -> u64 {
        self.program.rows("memory").iter().map(|row| row["available"].as_u64().expect("a number")).sum()
    }

    fn received(&self) -> BTreeMap<String, u64> {
        let rows = self.program.rows("ports");
        let count = |row: &serde_json::Map<String, Value>| {
            Some((row["port"].as_str()?.to_owned(), row["rx_packets"].as_u64()?))
        };
        rows.iter().filter_map(count).collect()
    }

    /// Returns the drops by place and reason.
    fn drops(&self) -> BTreeMap<String, u64> {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        let mut drops = BTreeMap::new();
        for row in self.program.rows("drops") {
            let place =
                format!("{} {} {} {}", self.name, text(&row["place"]), text(&row["name"]), text(&row["reason"]));
            *drops.entry(place).or_default() += row["packets"].as_u64().unwrap_or_default();
        }
        drops
    }

    /// Waits until each packet that the program received or made is sent, dropped with a reason, or consumed.
    fn balances(&self) -> Result<(), String> {
        let mut row = serde_json::Map::new();
        let is_even = eventually(WAIT_LIMIT, || {
            row = self.program.rows("balance").swap_remove(0);
            row["in_flight"] == 0
        });
        if is_even { Ok(()) } else { Err(format!("the packets of {} have no destination: {row:?}", self.name)) }
    }
}

/// Names the window if a disturbance panics.
struct During(String);

impl Drop for During {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}: the disturbance failed", self.0);
        }
    }
}

/// Times of all processors since the start of the machine, in ticks of the kernel.
#[derive(Clone, Copy)]
struct Processors {
    total: u64,
    /// Time of processes and of the hypervisor, which is no time of this process and of those that it started.
    others: u64,
}

impl Processors {
    /// Reads the times of all processes (proc(5)).
    fn read() -> Self {
        // Some fields are negative, such as the terminal of a process that has none.
        let numbers = |text: &str| -> Vec<u64> {
            let all = text.split_whitespace().map_while(|word| word.parse::<i64>().ok());
            all.map(|number| number.max(0).cast_unsigned()).collect()
        };
        let text = std::fs::read_to_string("/proc/stat").expect("the times of the processors");
        let all = numbers(text.lines().next().and_then(|line| line.strip_prefix("cpu ")).expect("a first line"));
        // Each process: its parent, and its own time with that of the ended processes that it started.
        let mut processes = BTreeMap::new();
        for entry in std::fs::read_dir("/proc").expect("processes").filter_map(Result::ok) {
            let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<u64>().ok()) else { continue };
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            // The name of the process may have spaces and brackets.
            let Some((_, fields)) = stat.rsplit_once(") ") else { continue };
            let fields = numbers(&fields[1..]);
            processes.insert(id, (fields[0], fields[10..14].iter().sum::<u64>()));
        }
        let own = u64::from(std::process::id());
        let is_own = |id: u64| {
            std::iter::successors(Some(id), |id| processes.get(id).map(|(parent, _)| *parent)).any(|id| id == own)
        };
        let time: u64 = processes.iter().filter(|(id, _)| is_own(**id)).map(|(_, (_, time))| *time).sum();
        // Fields of the first line: user, nice, system, idle, iowait, irq, softirq, steal.
        let busy = all[0] + all[1] + all[2] + all[7];
        Self { total: all[..8].iter().sum(), others: busy.saturating_sub(time) }
    }

    /// Returns the share that others took after an earlier moment.
    fn others_since(self, before: Self) -> f64 {
        self.others.saturating_sub(before.others) as f64 / (self.total - before.total).max(1) as f64
    }
}

/// Returns the packets that the kernel dropped because the backlog of a processor was full. All namespaces share these
/// backlogs.
fn backlog_drops() -> u64 {
    let text = std::fs::read_to_string("/proc/net/softnet_stat").expect("the backlogs of the processors");
    text.lines().filter_map(|line| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok()).sum()
}

/// A window of a run.
struct Window {
    at: Duration,
    end: Duration,
    /// At the begin and at the end.
    processors: [Processors; 2],
    latency: Histogram<u64>,
}

/// A run.
struct Soak<'a> {
    name: &'static str,
    plan: Plan,
    ring: &'a Ring,
    gateways: Vec<Watched<'a>>,
    rate: u64,
    random: fastrand::Rng,
    begin: Instant,
    windows: Vec<Window>,
    rounds: u32,
    sent: u64,
    /// Packets of flows that the disturbances of their windows hit, and those of them that arrived.
    hit: (u64, u64),
    skipped: f64,
    failures: Vec<String>,
}

impl<'a> Soak<'a> {
    /// Waits until no packet is flooded, and searches the rate.
    fn new(name: &'static str, ring: &'a Ring, gateways: Vec<Watched<'a>>) -> Self {
        let plan = Plan::read();
        ring.wait_until_known();
        let rate = (ring.search(&plan) / 2).max(1);
        let random = fastrand::Rng::with_seed(plan.seed);
        print_uncaptured(&format!(
            "{name}: seed {}, {rate} packets per second of each of {} ports, half of the rate without loss",
            plan.seed,
            ring.ports.len()
        ));
        let mut soak = Self {
            name,
            plan,
            ring,
            gateways,
            rate,
            random,
            begin: Instant::now(),
            windows: Vec::new(),
            rounds: 0,
            sent: 0,
            hit: (0, 0),
            skipped: 0.0,
            failures: Vec::new(),
        };
        for gateway in &mut soak.gateways {
            let free = gateway.free_buffers();
            gateway.free = free.min(gateway.free);
        }
        soak.measure();
        soak
    }

    /// Returns the next round of disturbances, or `None` at the end of the run.
    fn round<T: Clone>(&mut self, all: &[T]) -> Option<Vec<T>> {
        let goes_on = match self.plan.length {
            None => self.rounds == 0,
            Some(length) => self.begin.elapsed() < length,
        };
        self.rounds += 1;
        goes_on.then(|| {
            let mut all = all.to_vec();
            self.random.shuffle(&mut all);
            all
        })
    }

    /// Returns whether the time of the run is over. The short form has no such time.
    fn is_over(&self) -> bool {
        self.plan.length.is_some_and(|length| self.begin.elapsed() >= length)
    }

    fn measure(&mut self) {
        for gateway in &mut self.gateways {
            let mut usage = Usage::of(gateway.id);
            // Clients and threads of a disturbance need a moment to end.
            if let Some(&(_, first)) = gateway.usage.first() {
                eventually(WAIT_LIMIT, || {
                    usage = Usage::of(gateway.id);
                    usage.descriptors <= first.descriptors && usage.threads <= first.threads
                });
            }
            gateway.usage.push((self.begin.elapsed(), usage));
        }
    }

    fn drops(&self) -> BTreeMap<String, u64> {
        self.gateways.iter().flat_map(Watched::drops).collect()
    }

    /// Runs a disturbance beside a trial. `is_hit` names the flows that it hits. What the others lose is a failure.
    fn window(&mut self, what: &str, is_hit: impl Fn(usize) -> bool, disturb: impl FnOnce(&mut fastrand::Rng)) {
        let before = backlog_drops();
        let Some(failure) = self.try_window(what, is_hit, disturb) else { return };
        let by_backlog = backlog_drops() - before;
        print_uncaptured(&format!("{}: {failure}; {by_backlog} dropped by the kernel's backlog", self.name));
        // Other tests beside the short form flood the same processors.
        if by_backlog == 0 || self.plan.length.is_some() {
            self.failures.push(failure);
        }
    }

    /// Runs a window, and returns what was lost meanwhile.
    fn try_window(
        &mut self,
        what: &str,
        is_hit: impl Fn(usize) -> bool,
        disturb: impl FnOnce(&mut fastrand::Rng),
    ) -> Option<String> {
        let (at, processors) = (self.begin.elapsed(), Processors::read());
        let before: Vec<_> = self.gateways.iter().map(Watched::received).collect();
        let drops = self.drops();
        let generator = self.ring.start(self.rate, LIMIT);
        let (first, (input, port)) = (&self.gateways[0], self.gateways[0].inputs[0]);
        let sends = eventually(WAIT_LIMIT, || first.received()[port] > before[0][port] + self.rate / 20);
        assert!(sends, "{}: {} does not begin", self.name, self.ring.name(input));
        let begin = Instant::now();
        let during =
            During(format!("{}: window {} ({:.1} s, {what})", self.name, self.windows.len(), at.as_secs_f64()));
        disturb(&mut self.random);
        drop(during);
        std::thread::sleep(self.plan.choose(WINDOW).saturating_sub(begin.elapsed()));
        let trial = self.ring.finish(generator);
        let end = self.begin.elapsed();

        let mut found = Vec::new();
        for (n, flow) in trial.flows.iter().enumerate() {
            self.sent += flow.sent;
            if is_hit(n) {
                self.hit = (self.hit.0 + flow.sent, self.hit.1 + flow.delivered);
            } else if flow.sent != flow.delivered {
                let lost = flow.sent - flow.delivered;
                found.push(format!("{lost} of {} packets from {} do not arrive there", flow.sent, self.ring.name(n)));
            }
        }
        // A known destination is never flooded. Flows that are hit may be.
        if trial.duplicates > 0 && !(0..trial.flows.len()).any(&is_hit) {
            found.push(format!("{} packets arrive twice", trial.duplicates));
        }
        if trial.corrupt > 0 {
            found.push(format!("{} packets are corrupt", trial.corrupt));
        }
        for (gateway, before) in self.gateways.iter().zip(&before) {
            for &(flow, port) in &gateway.inputs {
                let (sent, mut received) = (trial.flows[flow].sent, 0);
                let is_equal = eventually(WAIT_LIMIT, || {
                    received = gateway.received()[port] - before[port];
                    received == sent
                });
                if !is_equal {
                    found.push(format!("{} sent {sent} packets, {} received {received}", self.ring.ports[flow], port));
                }
            }
            found.extend(gateway.balances().err());
        }
        let failure = (!found.is_empty()).then(|| {
            let mut text = format!(
                "window {} ({:.1} s to {:.1} s, {what}, {:.1} s of traffic): {}",
                self.windows.len(),
                at.as_secs_f64(),
                end.as_secs_f64(),
                trial.seconds,
                found.join("; ")
            );
            let changed = self.drops().into_iter().filter_map(|(place, count)| {
                let more = count - drops.get(&place).copied().unwrap_or_default();
                (more > 0).then_some((place, more))
            });
            for (place, count) in changed.chain(trial.drops.clone()) {
                write!(text, "; {count} dropped by {place}").expect("a string grows");
            }
            write!(text, "; longest delay {:.1} ms", trial.latency.max() as f64 / 1e6).expect("a string grows");
            text
        });
        self.skipped += trial.skipped;
        let processors = [processors, Processors::read()];
        self.windows.push(Window { at, end, processors, latency: trial.latency });
        self.measure();
        failure
    }

    /// Checks memory, descriptors and delays, and fails if a window had failures.
    fn end(mut self) {
        self.measure();
        let length = self.begin.elapsed();
        for gateway in &self.gateways {
            let mut now = 0;
            // Buffers that a thread caches are not free.
            let is_back = eventually(WAIT_LIMIT, || {
                now = gateway.free_buffers();
                now >= gateway.free
            });
            if !is_back {
                self.failures.push(format!("{}: {now} free buffers, {} before", gateway.name, gateway.free));
            }
            let tenth = length / 10;
            let most = |is_in: &dyn Fn(Duration) -> bool| {
                let part = gateway.usage.iter().filter(|(at, _)| is_in(*at)).map(|(_, usage)| *usage);
                part.reduce(Usage::max).expect("a measurement")
            };
            let (first, last) = (most(&|at| at <= tenth), most(&|at| at >= length - tenth));
            print_uncaptured(&format!(
                "{}: {}: {now} free buffers ({} before); resident {} KiB in the first tenth, {} KiB in the last; \
                 descriptors {} and {}; threads {} and {}",
                self.name,
                gateway.name,
                gateway.free,
                first.memory >> 10,
                last.memory >> 10,
                first.descriptors,
                last.descriptors,
                first.threads,
                last.threads
            ));
            if last.memory > first.memory + self.plan.choose(GROWTHS) {
                self.failures.push(format!("{}: {first:?} in the first tenth, {last:?} in the last", gateway.name));
            }
            if last.descriptors > first.descriptors || last.threads > first.threads {
                self.failures.push(format!("{}: {first:?} in the first tenth, {last:?} in the last", gateway.name));
            }
        }

        let compared = COMPARED.min(length / 2);
        let [first, last] = [0, 1].map(|part| {
            let is_in = |window: &&Window| match part {
                0 => window.at < compared,
                _ => window.end > length - compared,
            };
            let windows: Vec<&Window> = self.windows.iter().filter(is_in).collect();
            let (Some(begin), Some(end)) = (windows.first(), windows.last()) else { panic!("no windows") };
            let mut all: Histogram<u64> = Histogram::new(3).expect("a histogram");
            windows.iter().for_each(|window| all.add(&window.latency).expect("room"));
            let delays = PERCENTILES.map(|(percent, _)| Duration::from_nanos(all.value_at_percentile(percent)));
            (delays, end.processors[1].others_since(begin.processors[0]))
        });
        print_uncaptured(&format!(
            "{}: {} windows in {:.0} s, {} packets sent, {} of them by flows that were hit ({} arrived); {:.3} s of \
             the schedule left out",
            self.name,
            self.windows.len(),
            length.as_secs_f64(),
            self.sent,
            self.hit.0,
            self.hit.1,
            self.skipped,
        ));
        print_uncaptured(&format!(
            "{}: delays p50 and p99.9: {:?} in the first {:.0} s with {:.0} % of the processors taken by others, {:?} \
             in the last with {:.0} %",
            self.name,
            first.0,
            compared.as_secs_f64(),
            first.1 * 100.0,
            last.0,
            last.1 * 100.0
        ));
        if length >= LEAST_COMPARED && first.1.max(last.1) < OTHERS {
            for ((percent, noise), (first, last)) in PERCENTILES.into_iter().zip(first.0.into_iter().zip(last.0)) {
                if last > (first * 2).max(noise) {
                    self.failures.push(format!("the delay p{percent} grows from {first:?} to {last:?}"));
                }
            }
        }
        assert!(self.failures.is_empty(), "{}: seed {}:\n{}", self.name, self.plan.seed, self.failures.join("\n"));
    }
}
