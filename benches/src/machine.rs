//! The machine of a measurement, and what disturbed the run.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use wirepath_apps::machine;
use wirepath_pipeline::clock;

use crate::measure::cpu_time;

/// Share of the time below which the program did not have its core. `scripts/compare` has the same limits.
const CPU_SHARE: f64 = 0.97;
/// Processors' worth of other programs.
const OTHERS: f64 = 0.15;
/// Share of the time that the hypervisor gives to other guests.
const STEAL: f64 = 0.01;
/// Range of the rounds as a fraction of their median.
const SPREAD: f64 = 0.1;
/// Ticks of the kernel per second in `/proc/stat` (proc(5)), the same on every x86-64 system.
const TICKS: f64 = 100.0;

/// Description of a machine.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Machine {
    /// Model name of the processor.
    processor: String,
    /// Number of processors.
    processors: usize,
    /// True for a virtual machine.
    is_virtual: bool,
    memory_bytes: u64,
    /// Release of the kernel.
    kernel: String,
    /// Huge pages, reserved and free.
    huge_pages: u64,
    free_huge_pages: u64,
    /// Mode of transparent huge pages.
    transparent_huge_pages: String,
    /// Processors that the kernel keeps free of other programs.
    isolated_processors: String,
    /// Frequency governor of the first processor; empty if the kernel shows none.
    governor: String,
    /// Programs that wanted a processor in the last minute, on average.
    load: f64,
}

impl Machine {
    /// Reads the description below `root`, which is `/` except in tests.
    fn read(root: &Path) -> Self {
        let settings = machine::Machine::read(root);
        let processors = machine::text(root, "proc/cpuinfo");
        let of_processor = |name| machine::field(&processors, name).unwrap_or_default();
        Self {
            processor: of_processor("model name").to_owned(),
            processors: processors.lines().filter(|line| line.starts_with("processor")).count(),
            is_virtual: of_processor("flags").split_whitespace().any(|flag| flag == "hypervisor"),
            memory_bytes: settings.memory_kib.unwrap_or(0) << 10,
            kernel: machine::text(root, "proc/sys/kernel/osrelease"),
            huge_pages: settings.huge_pages.unwrap_or(0),
            free_huge_pages: settings.free_huge_pages.unwrap_or(0),
            transparent_huge_pages: settings.transparent_huge_pages,
            isolated_processors: settings.isolated,
            governor: machine::governor(root, 0),
            load: machine::text(root, "proc/loadavg")
                .split_whitespace()
                .next()
                .and_then(|load| load.parse().ok())
                .unwrap_or(0.0),
        }
    }

    fn text(&self) -> String {
        let word = |text: &str, otherwise: &str| if text.is_empty() { otherwise.to_owned() } else { text.to_owned() };
        format!(
            "{}, {} processors{}, {:.0} GiB, Linux {}, isolated {}, governor {}, {} huge pages, load {:.1}",
            word(&self.processor, "unknown processor"),
            self.processors,
            if self.is_virtual { " of a virtual machine" } else { "" },
            self.memory_bytes as f64 / f64::from(1 << 30),
            word(&self.kernel, "unknown"),
            word(&self.isolated_processors, "none"),
            word(&self.governor, "not visible"),
            self.huge_pages,
            self.load
        )
    }
}

/// Cause of a disturbance, and the way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Disturbance {
    cause: String,
    remedy: &'static str,
}

/// Conditions of a run.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Conditions {
    /// Frequency of the time-stamp counter in hertz.
    tsc_hz: f64,
    machine: Machine,
    /// Processors' worth of other programs during the run.
    others: f64,
    /// Share of the time that the hypervisor gave to other guests during the run.
    steal: f64,
    /// Disturbances; empty if there were none.
    disturbed: Vec<Disturbance>,
}

impl Conditions {
    /// Returns a line for the machine, and one for each disturbance.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("machine: {}, TSC {:.3} GHz\n", self.machine.text(), self.tsc_hz / 1e9);
        for Disturbance { cause, remedy } in &self.disturbed {
            text += &format!("disturbed: {cause}; {remedy}\n");
        }
        text
    }
}

/// Returns what disturbed a run. Figures that are not known are `None`.
fn disturbances(cpu_share: Option<f64>, others: f64, steal: f64, spread: Option<f64>) -> Vec<Disturbance> {
    let mut found = Vec::new();
    let mut add = |cause, remedy| found.push(Disturbance { cause, remedy });
    if let Some(share) = cpu_share.filter(|share| *share < CPU_SHARE) {
        add(
            format!("the program had its core for {:.0} % of the time", 100.0 * share),
            "keep other programs away from that core: --core, isolcpus",
        );
    }
    if others > OTHERS {
        add(format!("other programs used {others:.1} processors"), "end builds and other measurements on this machine");
    }
    if steal > STEAL {
        add(
            format!("the hypervisor took {:.0} % of the time", 100.0 * steal),
            "use a machine with processors of its own, or a quieter hour",
        );
    }
    if let Some(spread) = spread.filter(|spread| *spread > SPREAD) {
        add(
            format!("the rounds differ by {:.0} % of their median", 100.0 * spread),
            "compare with a peer in turn, or measure longer: --seconds, --rounds",
        );
    }
    found
}

/// Busy and stolen seconds of all processors since the start of the machine, from the text of `/proc/stat`.
fn processor_times(stat: &str) -> (f64, f64) {
    let fields: Vec<f64> =
        stat.lines().next().unwrap_or_default().split_whitespace().skip(1).map(|n| n.parse().unwrap_or(0.0)).collect();
    // user, nice, system, idle, iowait, irq, softirq, steal.
    let of = |range: std::ops::Range<usize>| fields.get(range).unwrap_or_default().iter().sum::<f64>() / TICKS;
    (of(0..3) + of(5..7), of(7..8))
}

/// Observes the machine during a run.
pub(crate) struct Observer {
    root: PathBuf,
    machine: Machine,
    started: Instant,
    busy: f64,
    steal: f64,
    own: f64,
}

impl Observer {
    /// Begins to observe.
    pub(crate) fn start() -> Self {
        let root = PathBuf::from("/");
        let (busy, steal) = processor_times(&std::fs::read_to_string(root.join("proc/stat")).unwrap_or_default());
        Self { machine: Machine::read(&root), root, started: Instant::now(), busy, steal, own: cpu_time() }
    }

    /// Returns the conditions since the start. `cpu_share` and `spread` are those of the figures.
    pub(crate) fn conditions(&self, cpu_share: Option<f64>, spread: Option<f64>) -> Conditions {
        let stat = std::fs::read_to_string(self.root.join("proc/stat")).unwrap_or_default();
        let ((busy, steal), own) = (processor_times(&stat), cpu_time() - self.own);
        let seconds = self.started.elapsed().as_secs_f64().max(1e-3);
        let others = ((busy - self.busy - own) / seconds).max(0.0);
        let steal = (steal - self.steal) / seconds / self.machine.processors.max(1) as f64;
        Conditions {
            tsc_hz: clock::tick_hz(),
            machine: self.machine.clone(),
            others,
            steal,
            disturbed: disturbances(cpu_share, others, steal, spread),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_read_from_the_files_of_the_kernel() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| wirepath_testlab::write_below(root.path(), path, text);
        let one = "processor\t: 0\nmodel name\t: A Processor\nflags\t\t: fpu hypervisor avx2\n\n";
        write("proc/cpuinfo", &(one.to_owned() + one));
        write("proc/meminfo", "MemTotal:       16777216 kB\nHugePages_Total:      64\nHugePages_Free:       60\n");
        write("proc/sys/kernel/osrelease", "6.1.0\n");
        write("proc/loadavg", "0.50 0.40 0.30 1/200 99\n");
        write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        let machine = Machine::read(root.path());
        assert_eq!((machine.processor.as_str(), machine.processors, machine.is_virtual), ("A Processor", 2, true));
        assert_eq!((machine.memory_bytes, machine.huge_pages, machine.free_huge_pages), (16 << 30, 64, 60));
        assert_eq!((machine.transparent_huge_pages.as_str(), machine.load), ("madvise", 0.5));
        assert_eq!(
            machine.text(),
            "A Processor, 2 processors of a virtual machine, 16 GiB, Linux 6.1.0, isolated none, governor not \
             visible, 64 huge pages, load 0.5"
        );
        assert_eq!(Machine::read(Path::new("/nothing/there")), Machine::default());
    }

    #[test]
    fn a_disturbance_has_a_cause_and_a_remedy() {
        assert_eq!(disturbances(Some(0.98), 0.1, 0.005, Some(0.05)), []);
        assert_eq!(disturbances(None, 0.0, 0.0, None), []);
        let causes = |share, others, steal, spread| -> Vec<String> {
            disturbances(share, others, steal, spread).into_iter().map(|it| it.cause).collect()
        };
        assert_eq!(causes(Some(0.5), 0.0, 0.0, None), ["the program had its core for 50 % of the time"]);
        assert_eq!(causes(None, 1.25, 0.0, None), ["other programs used 1.2 processors"]);
        assert_eq!(causes(None, 0.0, 0.2, None), ["the hypervisor took 20 % of the time"]);
        assert_eq!(causes(None, 0.0, 0.0, Some(0.3)), ["the rounds differ by 30 % of their median"]);
    }

    #[test]
    fn processor_times_are_those_of_proc() {
        assert_eq!(processor_times("cpu  100 200 300 999 999 10 20 50 0 0\ncpu0 1\n"), (6.3, 0.5));
        assert_eq!(processor_times(""), (0.0, 0.0));
        assert_eq!(processor_times("cpu  100"), (0.0, 0.0));
    }

    #[test]
    fn own_work_is_not_that_of_others() {
        let observer = Observer::start();
        let start = Instant::now();
        while start.elapsed().as_millis() < 200 {
            std::hint::spin_loop();
        }
        let conditions = observer.conditions(Some(0.2), None);
        let (busy, _) = processor_times(&std::fs::read_to_string("/proc/stat").unwrap());
        // All processor time of the machine, without that of this program.
        assert!(conditions.others <= (busy - observer.busy) / 0.2, "{conditions:?}");
        assert!(conditions.tsc_hz > 1e8 && conditions.machine.processors > 0, "{conditions:?}");
        assert!(conditions.text().contains("\ndisturbed: the program had its core for 20 % of the time; keep "));
    }
}
