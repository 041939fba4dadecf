//! Qualification of the machine: does it leave the processors of the run alone, and are its clocks steady?
//!
//! A throughput is a property of the device only if the generator has its processors to itself. Each thread of the run
//! reads the clock in a loop, on its own processor, and notes the time that it did not get. Trials are judged by the
//! same limits, as far as their counts go.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wirepath::Failure;

use crate::machine::{self, Machine};
use crate::pktgen::TrialResult;
use crate::pktgen::clock::Clock;
use crate::pktgen::report::time;
use crate::pktgen::usage::{ThreadUsage, pin};

/// Gap between two reads of the clock that counts as lost time, in nanoseconds. Timer ticks of the kernel are shorter.
const GAP: u64 = 10_000;
/// Interval at which the clocks are compared, in nanoseconds.
const COMPARISON: u64 = 1_000_000;
/// Longest time between the two reads of a comparison, in nanoseconds. A longer one was interrupted.
const BRACKET: u64 = 5_000;
/// Difference of the frequencies of two clocks that is no step. The time-stamp counter is measured to 10 ppm.
const DRIFT: f64 = 1e-4;
/// Time of the loop before the counts begin: the first turns touch new pages.
const WARM_UP: u64 = 10_000_000;

/// Limits above which a machine disturbs a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Share of the time of a processor that is lost.
    pub lost_share: f64,
    /// Longest gap. Rings of 1024 packets take up a millisecond at 1 Mpps.
    pub longest_gap: Duration,
    /// Involuntary context switches per second.
    pub switches_per_second: f64,
    /// Page faults per second.
    pub faults_per_second: f64,
    /// Step between the time-stamp counter and `CLOCK_MONOTONIC`.
    pub clock_step: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            lost_share: 0.01,
            longest_gap: Duration::from_millis(1),
            switches_per_second: 10.0,
            faults_per_second: 10.0,
            clock_step: Duration::from_micros(20),
        }
    }
}

/// Disturbances of a processor.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ProcessorNoise {
    /// Number of the processor; `None` if the thread was not pinned.
    pub core: Option<usize>,
    /// Length of the observation.
    pub time: Duration,
    /// Gaps above 10 microseconds.
    pub gaps: u64,
    /// Sum of these gaps.
    pub lost: Duration,
    /// Longest gap.
    pub longest_gap: Duration,
    /// Interruptions and page faults; `None` if the kernel does not report them.
    pub usage: Option<ThreadUsage>,
    /// Largest step between the clocks.
    pub clock_step: Duration,
}

/// Settings of the machine that explain disturbances.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Processors that the kernel keeps free of other programs, such as `2-5`.
    pub isolated: String,
    /// Frequency governors of the processors of the run; empty if there are none.
    pub governors: Vec<String>,
    /// Free huge pages.
    pub free_huge_pages: u64,
    /// Clock source of the kernel.
    pub clock_source: String,
    /// Processors that the program may use.
    pub processors: usize,
}

/// A disturbance above its limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Finding, with the limit.
    pub cause: String,
    /// Way out.
    pub remedy: String,
}

/// Result of a qualification.
#[derive(Clone, Debug)]
pub struct Qualification {
    /// One entry for each thread of the run.
    pub processors: Vec<ProcessorNoise>,
    /// Settings of the machine.
    pub settings: Settings,
    /// Time that the hypervisor gave to other machines; `None` if the kernel does not report it.
    pub stolen: Option<Duration>,
    /// Limits.
    pub limits: Limits,
}

impl Settings {
    /// Reads the settings below `root`, which is `/` except in tests.
    pub fn read(root: &Path, cores: &[usize]) -> Self {
        let Machine { isolated, free_huge_pages, .. } = Machine::read(root);
        let all = if cores.is_empty() { &[0][..] } else { cores };
        let governors = all.iter().map(|core| machine::governor(root, *core)).filter(|name| !name.is_empty());
        Self {
            isolated,
            governors: governors.collect(),
            free_huge_pages: free_huge_pages.unwrap_or(0),
            clock_source: machine::text(root, "sys/devices/system/clocksource/clocksource0/current_clocksource"),
            processors: thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Returns settings that often disturb, with their remedies.
    fn hints(&self) -> Vec<String> {
        let mut hints = Vec::new();
        if let Some(name) = self.governors.iter().find(|name| *name != "performance") {
            hints.push(format!("the governor is {name}: cpupower frequency-set -g performance"));
        }
        if self.free_huge_pages == 0 {
            hints.push("no huge pages are free: sysctl -w vm.nr_hugepages=512".to_owned());
        }
        hints
    }
}

/// Returns the time that the hypervisor gave to other machines, of these processors or of all. `/proc/stat` has it in
/// hundredths of a second.
fn stolen(stat: &str, cores: &[usize]) -> Option<Duration> {
    let of = |name: &str| {
        let line = stat.lines().find(|line| line.split_whitespace().next() == Some(name))?;
        line.split_whitespace().nth(8)?.parse().ok().map(|ticks: u64| Duration::from_millis(ticks * 10))
    };
    match cores {
        [] => of("cpu"),
        cores => cores.iter().map(|core| of(&format!("cpu{core}"))).sum(),
    }
}

/// Reads the clock for a time, and notes the gaps.
fn observe(clock: Clock, core: Option<usize>, length: Duration, stop: &AtomicBool) -> ProcessorNoise {
    pin(core);
    let epoch = Instant::now();
    let mut noise = ProcessorNoise { core, ..ProcessorNoise::default() };
    let warm = clock.now() + WARM_UP;
    while clock.now() < warm {
        std::hint::spin_loop();
    }
    let before = ThreadUsage::read();
    let start = clock.now();
    let end = start.saturating_add(u64::try_from(length.as_nanos()).unwrap_or(u64::MAX));
    let (mut last, mut due) = (start, start);
    let (mut lost, mut longest) = (0, 0);
    // Offset of the clocks, and the time at which it was measured.
    let mut offset: Option<(f64, u64)> = None;
    while last < end && !stop.load(Ordering::Relaxed) {
        let now = clock.now();
        let gap = now.saturating_sub(last);
        if gap > GAP {
            noise.gaps += 1;
            lost += gap;
            longest = longest.max(gap);
        }
        last = now;
        if now < due {
            continue;
        }
        due = now + COMPARISON;
        let monotonic = epoch.elapsed().as_nanos() as f64;
        let after = clock.now();
        if after.saturating_sub(now) < BRACKET {
            let found = (now as f64 + after as f64) / 2.0 - monotonic;
            if let Some((before, at)) = offset {
                let step = (found - before).abs() - (now - at) as f64 * DRIFT;
                noise.clock_step = noise.clock_step.max(Duration::from_nanos(step.max(0.0) as u64));
            }
            offset = Some((found, now));
        }
    }
    noise.usage = ThreadUsage::read().zip(before).map(|(now, before)| now.since(before));
    noise.time = Duration::from_nanos(last.saturating_sub(start));
    noise.lost = Duration::from_nanos(lost);
    noise.longest_gap = Duration::from_nanos(longest);
    noise
}

impl Qualification {
    /// Observes the processors of a run for a time, all at once. `cores` are those of the threads, if they are pinned.
    ///
    /// # Errors
    /// If a thread panics.
    pub fn measure(threads: u16, cores: &[usize], length: Duration, stop: &AtomicBool) -> Result<Self, Failure> {
        let clock = Clock::start();
        let stolen = || std::fs::read_to_string("/proc/stat").ok().and_then(|stat| stolen(&stat, cores));
        let before = stolen();
        let processors = thread::scope(|scope| {
            let handles: Vec<_> = (0..usize::from(threads.max(1)))
                .map(|i| scope.spawn(move || observe(clock, cores.get(i).copied(), length, stop)))
                .collect();
            handles.into_iter().map(thread::ScopedJoinHandle::join).collect::<Result<Vec<_>, _>>()
        });
        let processors = processors.map_err(|_| Failure::failed("a thread of the qualification has panicked"))?;
        let stolen = stolen().zip(before).map(|(now, before)| now.saturating_sub(before));
        let settings = Settings::read(Path::new("/"), cores);
        Ok(Self { processors, settings, stolen, limits: Limits::default() })
    }

    /// Returns what exceeds the limits.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if self.settings.processors < self.processors.len() {
            problems.push(Problem {
                cause: format!(
                    "the run has {} threads, and the program may use {} processors",
                    self.processors.len(),
                    self.settings.processors
                ),
                remedy: "fewer --threads, or more processors".to_owned(),
            });
        }
        for noise in &self.processors {
            self.problems_of(noise, &mut problems);
        }
        problems
    }

    fn problems_of(&self, noise: &ProcessorNoise, problems: &mut Vec<Problem>) {
        let limits = &self.limits;
        let seconds = noise.time.as_secs_f64().max(1e-9);
        let name = noise.core.map_or_else(|| "the processor".to_owned(), |core| format!("processor {core}"));
        let mut add = |cause: String, remedy: String| problems.push(Problem { cause, remedy });
        let usage = noise.usage.unwrap_or_default();
        let switches = usage.involuntary_switches as f64 / seconds;
        let lost_share = noise.lost.as_secs_f64() / seconds;
        if switches > limits.switches_per_second {
            add(
                format!(
                    "other threads took {name} {} times in {seconds:.1} s; {:.0} per second are allowed",
                    usage.involuntary_switches, limits.switches_per_second
                ),
                self.isolation(),
            );
        }
        if lost_share > limits.lost_share || noise.longest_gap > limits.longest_gap {
            let stolen = self.stolen.filter(|stolen| !stolen.is_zero());
            let by_host =
                stolen.map(|it| format!("; the hypervisor took {}", time(it.as_nanos() as f64))).unwrap_or_default();
            add(
                format!(
                    "{name} lost {:.2} % of the time in {} gaps, the longest of {}; {} % and {} are allowed{by_host}",
                    lost_share * 100.0,
                    noise.gaps,
                    time(noise.longest_gap.as_nanos() as f64),
                    limits.lost_share * 100.0,
                    time(limits.longest_gap.as_nanos() as f64),
                ),
                // The hypervisor has a part in most gaps, but is the cause only if it took most of the time.
                match stolen.filter(|stolen| *stolen * 2 >= noise.lost) {
                    Some(_) => "give the virtual machine processors of its own".to_owned(),
                    None => self.isolation(),
                },
            );
        }
        let faults = (usage.minor_faults + usage.major_faults) as f64 / seconds;
        if faults > limits.faults_per_second {
            add(
                format!(
                    "{faults:.0} page faults per second without new memory; {:.0} are allowed",
                    limits.faults_per_second
                ),
                "use huge pages (sysctl -w vm.nr_hugepages=512) and sysctl -w kernel.numa_balancing=0".to_owned(),
            );
        }
        if noise.clock_step > limits.clock_step {
            add(
                format!(
                    "the time-stamp counter and CLOCK_MONOTONIC moved apart by {} at once; {} are allowed",
                    time(noise.clock_step.as_nanos() as f64),
                    time(limits.clock_step.as_nanos() as f64)
                ),
                format!(
                    "use a machine with an invariant time-stamp counter (clock source now: {})",
                    self.settings.clock_source
                ),
            );
        }
    }

    /// Returns the remedy against other threads on the processors of the run.
    fn isolation(&self) -> String {
        let cores: Vec<String> = self.processors.iter().filter_map(|it| Some(it.core?.to_string())).collect();
        let mut remedy = match (self.settings.isolated.as_str(), cores.is_empty()) {
            ("", true) => "end other programs, or isolate processors (kernel parameters isolcpus=N nohz_full=N) and \
                           name them with --cores N"
                .to_owned(),
            ("", false) => {
                let list = cores.join(",");
                let isolate = format!("isolcpus={list} nohz_full={list}");
                format!("end other programs, or isolate processors: kernel parameters {isolate}")
            }
            (isolated, true) => format!("name isolated processors with --cores: {isolated}"),
            (isolated, false) => format!(
                "name processors of the isolated ones ({isolated}), and move interrupts away from them \
                 (/proc/irq/*/smp_affinity_list)"
            ),
        };
        for hint in self.settings.hints() {
            remedy += "; ";
            remedy += &hint;
        }
        remedy
    }

    /// Returns the figures as text, one line for each processor.
    pub fn text(&self) -> String {
        let line = |noise: &ProcessorNoise| {
            let name = noise.core.map_or_else(|| "any".to_owned(), |core| core.to_string());
            let usage = noise.usage.unwrap_or_default();
            format!(
                "processor {name}: {} gaps above 10 us in {}, {} lost, longest {}; {} involuntary switches; {} page \
                 faults; clock step {}\n",
                noise.gaps,
                time(noise.time.as_nanos() as f64),
                time(noise.lost.as_nanos() as f64),
                time(noise.longest_gap.as_nanos() as f64),
                usage.involuntary_switches,
                usage.minor_faults + usage.major_faults,
                time(noise.clock_step.as_nanos() as f64),
            )
        };
        self.processors.iter().map(line).collect()
    }

    /// Returns the figures as JSON.
    pub fn to_json(&self) -> Value {
        let processors: Vec<Value> = self
            .processors
            .iter()
            .map(|noise| {
                json!({
                    "core": noise.core,
                    "seconds": noise.time.as_secs_f64(),
                    "gaps": noise.gaps,
                    "lost_ns": noise.lost.as_nanos() as u64,
                    "longest_gap_ns": noise.longest_gap.as_nanos() as u64,
                    "involuntary_switches": noise.usage.map(|usage| usage.involuntary_switches),
                    "minor_faults": noise.usage.map(|usage| usage.minor_faults),
                    "major_faults": noise.usage.map(|usage| usage.major_faults),
                    "clock_step_ns": noise.clock_step.as_nanos() as u64,
                })
            })
            .collect();
        json!({
            "processors": processors,
            "stolen_ns": self.stolen.map(|stolen| stolen.as_nanos() as u64),
            "isolated": self.settings.isolated,
            "governors": self.settings.governors,
            "free_huge_pages": self.settings.free_huge_pages,
            "clock_source": self.settings.clock_source,
            "problems": problems_json(&self.problems()),
        })
    }

    /// Returns what disturbed a trial above the limits. Minor page faults do not count: a trial takes new memory.
    pub fn problems_of_trial(&self, result: &TrialResult) -> Vec<Problem> {
        let limits = &self.limits;
        let usage = result.usage.unwrap_or_default();
        let seconds = result.duration.as_secs_f64();
        let mut problems = Vec::new();
        // A single switch of a short trial is no rate.
        if usage.involuntary_switches as f64 > (limits.switches_per_second * seconds).max(1.0) {
            problems.push(Problem {
                cause: format!(
                    "other threads took the processors {} times in a trial of {seconds:.1} s",
                    usage.involuntary_switches
                ),
                remedy: self.isolation(),
            });
        }
        if result.longest_stall > limits.longest_gap {
            problems.push(Problem {
                cause: format!(
                    "a thread did not run for {} of a trial; {} are allowed",
                    time(result.longest_stall.as_nanos() as f64),
                    time(limits.longest_gap.as_nanos() as f64)
                ),
                remedy: self.isolation(),
            });
        }
        if usage.major_faults > 0 {
            problems.push(Problem {
                cause: format!("{} page faults of a trial read a disk", usage.major_faults),
                remedy: "use huge pages (sysctl -w vm.nr_hugepages=512), and do without swap (swapoff -a)".to_owned(),
            });
        }
        problems
    }
}

/// Returns problems as JSON.
pub fn problems_json(problems: &[Problem]) -> Value {
    problems.iter().map(|it| json!({ "cause": it.cause, "remedy": it.remedy })).collect()
}

/// Returns problems as text, each with its remedy in the line after it.
pub fn problems_text(problems: &[Problem]) -> String {
    problems.iter().map(|it| format!("noise: {}\n  > {}\n", it.cause, it.remedy)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quiet() -> Qualification {
        let noise = ProcessorNoise {
            core: Some(3),
            time: Duration::from_secs(1),
            usage: Some(ThreadUsage::default()),
            ..ProcessorNoise::default()
        };
        let settings = Settings { processors: 2, free_huge_pages: 8, ..Settings::default() };
        Qualification { processors: vec![noise], settings, stolen: Some(Duration::ZERO), limits: Limits::default() }
    }

    /// Returns the cause and the remedy of the only problem.
    #[track_caller]
    fn only(qualification: &Qualification) -> (String, String) {
        let problems = qualification.problems();
        assert_eq!(problems.len(), 1, "{problems:?}");
        (problems[0].cause.clone(), problems[0].remedy.clone())
    }

    #[test]
    fn each_disturbance_has_cause_and_remedy() {
        assert_eq!(quiet().problems(), []);
        let with = |change: fn(&mut ProcessorNoise)| {
            let mut it = quiet();
            change(&mut it.processors[0]);
            only(&it)
        };
        let usage = |involuntary_switches, minor_faults| {
            Some(ThreadUsage { involuntary_switches, minor_faults, major_faults: 0 })
        };
        assert_eq!(
            {
                let mut it = quiet();
                it.processors[0].usage = usage(10, 10);
                it.problems()
            },
            []
        );
        let mut it = quiet();
        it.processors[0].usage = usage(11, 0);
        let (cause, remedy) = only(&it);
        assert!(cause.contains("processor 3 11 times in 1.0 s; 10 per second"), "{cause}");
        assert!(remedy.contains("isolcpus=3 nohz_full=3"), "{remedy}");
        it.processors[0].usage = usage(0, 11);
        let (cause, remedy) = only(&it);
        assert!(cause.contains("11 page faults per second") && remedy.contains("vm.nr_hugepages"), "{cause} {remedy}");
        let (cause, _) = with(|it| it.lost = Duration::from_millis(11));
        assert!(cause.contains("lost 1.10 % of the time"), "{cause}");
        let (cause, _) = with(|it| it.longest_gap = Duration::from_micros(1001));
        assert!(cause.contains("the longest of 1.00 ms; 1 % and 1.00 ms are allowed"), "{cause}");
        let (cause, remedy) = with(|it| it.clock_step = Duration::from_micros(21));
        assert!(cause.contains("CLOCK_MONOTONIC") && remedy.contains("invariant"), "{cause} {remedy}");
    }

    #[test]
    fn remedies_follow_the_settings() {
        let mut it = quiet();
        it.processors[0].longest_gap = Duration::from_millis(5);
        it.settings.governors = vec!["powersave".to_owned()];
        it.settings.free_huge_pages = 0;
        let (_, remedy) = only(&it);
        for part in ["isolcpus=3", "cpupower frequency-set -g performance", "vm.nr_hugepages"] {
            assert!(remedy.contains(part), "{remedy}");
        }
        it.stolen = Some(Duration::from_millis(20));
        let (cause, remedy) = only(&it);
        assert!(cause.ends_with("the hypervisor took 20.00 ms") && remedy.contains("virtual machine"), "{cause}");
        it.stolen = None;
        it.settings.isolated = "4-5".to_owned();
        assert!(only(&it).1.contains("isolated ones (4-5)"));
        it.processors[0].core = None;
        assert!(only(&it).1.contains("--cores: 4-5"));
        it.processors = vec![quiet().processors[0]; 3];
        assert!(only(&it).0.contains("3 threads, and the program may use 2 processors"));
    }

    #[test]
    fn settings_are_those_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| wirepath_testlab::write_below(root.path(), path, text);
        write("proc/meminfo", "HugePages_Total:      64\nHugePages_Free:       60\n");
        write("sys/devices/system/cpu/isolated", "1-3\n");
        write("sys/devices/system/cpu/cpu2/cpufreq/scaling_governor", "powersave\n");
        write("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc\n");
        let found = Settings::read(root.path(), &[1, 2]);
        assert_eq!((found.isolated.as_str(), found.free_huge_pages, found.clock_source.as_str()), ("1-3", 60, "tsc"));
        assert_eq!(found.governors, ["powersave"]);
        let stat = "cpu  1 2 3 4 5 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 50 9 10\ncpu1 1 2 3 4 5 6 7 30 9 10\n";
        assert_eq!(stolen(stat, &[]), Some(Duration::from_millis(800)));
        assert_eq!(stolen(stat, &[1]), Some(Duration::from_millis(300)));
        assert_eq!(stolen(stat, &[2]), None);
    }

    #[test]
    fn an_observation_lasts_as_long_as_asked() {
        let stop = AtomicBool::new(false);
        let it = Qualification::measure(2, &[], Duration::from_millis(50), &stop).unwrap();
        assert_eq!(it.processors.len(), 2);
        for noise in &it.processors {
            assert!(noise.time >= Duration::from_millis(50) && noise.lost <= noise.time, "{noise:?}");
            assert!(noise.longest_gap <= noise.lost && noise.usage.is_some(), "{noise:?}");
            assert_eq!(noise.gaps == 0, noise.lost.is_zero());
        }
        stop.store(true, Ordering::Relaxed);
        let it = Qualification::measure(1, &[], Duration::from_secs(3600), &stop).unwrap();
        assert!(it.processors[0].time < Duration::from_secs(1800));
    }
}
