//! Settings of the machine that decide about speed, from files of the kernel.

use std::path::Path;

/// Settings of a machine. What the kernel does not show is `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Memory in KiB.
    pub memory_kib: Option<u64>,
    /// Size of a huge page in KiB.
    pub huge_page_kib: Option<u64>,
    /// Number of reserved huge pages.
    pub huge_pages: Option<u64>,
    /// Number of free huge pages.
    pub free_huge_pages: Option<u64>,
    /// Mode of transparent huge pages: `always`, `madvise` or `never`.
    pub transparent_huge_pages: String,
    /// Processors that the kernel keeps free of other programs, such as `2-5`.
    pub isolated: String,
}

impl Machine {
    /// Reads the settings below `root`, which is `/` except in tests.
    pub fn read(root: &Path) -> Self {
        let meminfo = text(root, "proc/meminfo");
        let number = |name: &str| field(&meminfo, name)?.split_whitespace().next()?.parse().ok();
        let modes = text(root, "sys/kernel/mm/transparent_hugepage/enabled");
        let mode = modes.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(mode, _)| mode);
        Self {
            memory_kib: number("MemTotal"),
            huge_page_kib: number("Hugepagesize"),
            huge_pages: number("HugePages_Total"),
            free_huge_pages: number("HugePages_Free"),
            transparent_huge_pages: mode.to_owned(),
            isolated: text(root, "sys/devices/system/cpu/isolated"),
        }
    }
}

/// Returns the frequency governor of a processor; empty if the system does not control the frequency.
pub fn governor(root: &Path, processor: usize) -> String {
    text(root, &format!("sys/devices/system/cpu/cpu{processor}/cpufreq/scaling_governor"))
}

/// Returns the text of a file without the space around it; empty if it cannot be read.
pub fn text(root: &Path, path: &str) -> String {
    std::fs::read_to_string(root.join(path)).unwrap_or_default().trim().to_owned()
}

/// Returns the value of the first line `name: value`.
pub fn field<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_start().strip_prefix(':')?.trim()))
}
