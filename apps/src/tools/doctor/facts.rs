use std::path::{Path, PathBuf};

use wirepath_pmd::drivers::nic::rdma::Rdma;

use super::evpn::EvpnFacts;
use crate::machine::{self, Machine};

/// Facts about the machine, read from files of the kernel. Any of them may be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Features that this build needs and the processor lacks.
    pub missing_cpu_features: Vec<&'static str>,
    /// Major and minor version of the kernel.
    pub kernel: Option<(u32, u32)>,
    /// Effective capabilities as a bit mask.
    pub capabilities: Option<u64>,
    /// Maximum bytes that the program may lock; `None`: unlimited.
    pub locked_memory: Option<u64>,
    /// Size of a huge page in KiB and the number of free ones.
    pub huge_pages: Option<(u64, u64)>,
    /// True if transparent huge pages are available on request.
    pub transparent_huge_pages: bool,
    /// True if BPF programs are compiled; `None` if the kernel has no such setting.
    pub bpf_jit: Option<bool>,
    /// Interfaces that carry a default route.
    pub default_routes: Vec<String>,
    /// Frequency governor of the first core; `None` if the system does not control the frequency.
    pub governor: Option<String>,
    /// Isolated cores as a list such as `2-5`; empty if there are none.
    pub isolated: String,
    /// Number of cores that this program may use.
    pub cores: usize,
    /// True if TAP devices can be created.
    pub tun: bool,
    /// Libraries and devices of the RDMA drivers.
    pub rdma: Rdma,
    /// Facts about EVPN.
    pub evpn: EvpnFacts,
    /// Paths of this program and of the programs beside it that open ports.
    pub programs: Vec<PathBuf>,
}

impl Facts {
    /// Reads the facts below `root`, which is `/` except in tests.
    pub fn read(root: &Path) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).unwrap_or_default();
        let status = text("proc/self/status");
        let Machine { huge_page_kib, free_huge_pages, transparent_huge_pages, isolated, .. } = Machine::read(root);
        Self {
            missing_cpu_features: wirepath::cli::missing_cpu_features(),
            kernel: version(&text("proc/sys/kernel/osrelease")),
            capabilities: machine::field(&status, "CapEff").and_then(|hex| u64::from_str_radix(hex, 16).ok()),
            locked_memory: locked_memory(&text("proc/self/limits")),
            huge_pages: huge_page_kib.zip(free_huge_pages),
            transparent_huge_pages: matches!(transparent_huge_pages.as_str(), "always" | "madvise"),
            bpf_jit: Some(text("proc/sys/net/core/bpf_jit_enable").trim()).filter(|s| !s.is_empty()).map(|s| s != "0"),
            default_routes: default_routes(&text("proc/self/net/route"), &text("proc/self/net/ipv6_route")),
            governor: Some(machine::governor(root, 0)).filter(|name| !name.is_empty()),
            isolated,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            tun: root.join("dev/net/tun").exists(),
            rdma: Rdma::probe(root),
            evpn: EvpnFacts::read(root),
            programs: programs(),
        }
    }
}

fn programs() -> Vec<PathBuf> {
    let own = std::env::current_exe().unwrap_or_else(|_| "wirepath".into());
    let beside = ["l2fwd", "tunnel-gateway"].map(|name| own.with_file_name(name));
    std::iter::once(own).chain(beside.into_iter().filter(|path| path.is_file())).collect()
}

fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Returns the soft limit from `/proc/self/limits`; `None` if there is no limit.
fn locked_memory(limits: &str) -> Option<u64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Parses the interfaces with a default route. In `/proc/net/route`, columns 2 and 8 are the hexadecimal
/// destination and mask. In `/proc/net/ipv6_route`, columns 1 and 2 are the destination and the prefix length,
/// and the interface is last. The loopback interface is skipped, because it has the kernel's reject route.
fn default_routes(v4: &str, v6: &str) -> Vec<String> {
    let mut interfaces: Vec<String> = Vec::new();
    for line in v4.lines().skip(1) {
        let columns: Vec<_> = line.split_whitespace().collect();
        if let [interface, "00000000", _, _, _, _, _, "00000000", ..] = columns[..] {
            interfaces.push(interface.to_owned());
        }
    }
    for line in v6.lines() {
        let columns: Vec<_> = line.split_whitespace().collect();
        if let [destination, "00", .., interface] = columns[..]
            && destination.bytes().all(|b| b == b'0')
            && interface != "lo"
        {
            interfaces.push(interface.to_owned());
        }
    }
    interfaces.sort_unstable();
    interfaces.dedup();
    interfaces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_read_from_what_the_kernel_shows() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| wirepath_testlab::write_below(root.path(), path, text);
        write("proc/self/status", "Name:\tx\nCapInh:\t0\nCapEff:\t0000000000003000\n");
        write(
            "proc/meminfo",
            "MemTotal: 1 kB\nHugePages_Total:      64\nHugePages_Free:       60\nHugepagesize:       2048 kB\n",
        );
        write("proc/sys/kernel/osrelease", "6.1.0-18-amd64\n");
        write(
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max locked memory         8388608              8388608              bytes     \n",
        );
        write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        write("proc/sys/net/core/bpf_jit_enable", "0\n");
        write(
            "proc/self/net/route",
            "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
             eth0\t00000000\t0100A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
             eth1\t0000A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n",
        );
        let zero = "0".repeat(32);
        write(
            "proc/self/net/ipv6_route",
            &format!(
                "{zero} 00 {zero} 00 {zero} 0 1 0 3     eth2\n{zero} 00 {zero} 00 {zero} ffffffff 1 0 200200       lo\n"
            ),
        );
        write("sys/devices/system/cpu/isolated", "2-3\n");
        write("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n");
        write("dev/net/tun", "");
        let facts = Facts::read(root.path());
        assert_eq!(
            (facts.kernel, facts.capabilities, facts.locked_memory),
            (Some((6, 1)), Some(0x3000), Some(8 << 20))
        );
        assert_eq!((facts.huge_pages, facts.transparent_huge_pages), (Some((2048, 60)), true));
        assert_eq!((facts.bpf_jit, facts.tun, facts.isolated.as_str()), (Some(false), true, "2-3"));
        assert_eq!(
            (facts.default_routes, facts.governor.as_deref()),
            (vec!["eth0".into(), "eth2".into()], Some("powersave"))
        );
    }

    #[test]
    fn nothing_to_read_is_no_panic() {
        let root = tempfile::tempdir().unwrap();
        let facts = Facts::read(root.path());
        assert_eq!((facts.kernel, facts.capabilities, facts.huge_pages), (None, None, None));
        assert!(facts.default_routes.is_empty() && !facts.tun);
    }

    #[test]
    fn versions_of_every_shape() {
        for (text, want) in [("6.18.44-fc-v669", Some((6, 18))), ("5.10\n", Some((5, 10))), ("", None), ("x.y", None)] {
            assert_eq!(version(text), want);
        }
        assert_eq!(locked_memory("Max locked memory         unlimited            unlimited            bytes"), None);
    }
}
