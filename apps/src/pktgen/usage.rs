//! The processor of a thread, and its interruptions and page faults, from the files of the kernel (proc(5)).

use std::fs;

use wirepath::Failure;

/// Checks that this program may use these cores.
pub(super) fn check_cores(cores: &[usize]) -> Result<(), Failure> {
    let allowed = core_affinity::get_core_ids().unwrap_or_default();
    match cores.iter().find(|core| !allowed.iter().any(|it| it.id == **core)) {
        None => Ok(()),
        Some(core) => {
            Err(Failure::usage(format!("core {core} is not one of the {} that this program may use", allowed.len())))
        }
    }
}

/// Pins the calling thread to a core, if there is one. Logs a failure: the thread then runs on any core.
pub fn pin(core: Option<usize>) {
    if let Some(core) = core
        && !core_affinity::set_for_current(core_affinity::CoreId { id: core })
    {
        tracing::warn!("a thread could not be pinned to core {core} and runs on any core");
    }
}

/// Counts of a thread since its start, or between two moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadUsage {
    /// Times at which the kernel gave the processor to another thread although this one could run.
    pub involuntary_switches: u64,
    /// Page faults without input.
    pub minor_faults: u64,
    /// Page faults that read a device.
    pub major_faults: u64,
}

impl ThreadUsage {
    /// Reads the counts of the calling thread; `None` if the kernel does not show them.
    pub fn read() -> Option<Self> {
        let status = fs::read_to_string("/proc/thread-self/status").ok()?;
        let stat = fs::read_to_string("/proc/thread-self/stat").ok()?;
        Self::parse(&status, &stat)
    }

    fn parse(status: &str, stat: &str) -> Option<Self> {
        let switches = status.lines().find_map(|line| line.strip_prefix("nonvoluntary_ctxt_switches:"))?;
        // The name of the thread, field 2, may have spaces and brackets. Fields 10 and 12 are the page faults.
        let (_, after_name) = stat.rsplit_once(')')?;
        let mut fields = after_name.split_whitespace().skip(7);
        let minor_faults = fields.next()?.parse().ok()?;
        let major_faults = fields.nth(1)?.parse().ok()?;
        Some(Self { involuntary_switches: switches.trim().parse().ok()?, minor_faults, major_faults })
    }

    /// Returns the counts between an earlier moment and this one.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            involuntary_switches: self.involuntary_switches.saturating_sub(before.involuntary_switches),
            minor_faults: self.minor_faults.saturating_sub(before.minor_faults),
            major_faults: self.major_faults.saturating_sub(before.major_faults),
        }
    }

    /// Returns the sum of the counts of two threads.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            involuntary_switches: self.involuntary_switches + other.involuntary_switches,
            minor_faults: self.minor_faults + other.minor_faults,
            major_faults: self.major_faults + other.major_faults,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_proc() {
        let stat = "7 (a) b (c)) R 1 7 7 0 -1 4194304 301 5 2 6 10 3 0 0 20 0 1 0 9 1000 200";
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t9\nnonvoluntary_ctxt_switches:\t42\n";
        let expected = ThreadUsage { involuntary_switches: 42, minor_faults: 301, major_faults: 2 };
        assert_eq!(ThreadUsage::parse(status, stat), Some(expected));
        assert_eq!(ThreadUsage::parse("", stat), None);
        assert_eq!(ThreadUsage::parse(status, "7 (a) R 1"), None);
        assert_eq!(expected.plus(expected).since(expected), expected);
    }

    #[test]
    fn new_memory_causes_page_faults() {
        let before = ThreadUsage::read().unwrap();
        // The allocator takes less than 32 MiB from memory that another test has touched, if there is some.
        let memory = vec![1u8; 64 << 20];
        std::hint::black_box(&memory);
        let faults = ThreadUsage::read().unwrap().since(before).minor_faults;
        assert!(faults > 0, "{faults}");
    }
}
