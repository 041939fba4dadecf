//! Checks of `wirepath doctor`. Each turns facts about the machine into one finding with a remedy.

use wirepath_pmd::drivers::nic::rdma::{MIN_RDMA_CORE, NicKind};
use wirepath_pmd::drivers::setcap_command;
use wirepath_pmd::drivers::{DRIVERS, DeviceKind};

use super::{Facts, Finding, Level};

/// Bit numbers of capabilities (linux/capability.h).
const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_BPF: u32 = 39;

/// Huge pages in bytes that the default pools of two ports need.
const MIN_HUGE_PAGE_BYTES: u64 = 64 << 20;
/// Limit of locked memory in bytes that AF_XDP needs for these pools.
const MIN_LOCKED_BYTES: u64 = 64 << 20;

/// Runs all checks on the facts. The findings are in report order.
pub fn run_checks(facts: &Facts) -> Vec<Finding> {
    let mut findings = vec![
        processor(facts),
        kernel(facts),
        capabilities(facts),
        huge_pages(facts),
        locked_memory(facts),
        bpf_jit(facts),
        tap_devices(facts),
        rdma_libraries(facts),
        rdma_devices(facts),
        rdma_encapsulation(facts),
        default_route(facts),
        cores(facts),
        clock_rate(facts),
        isolated_cores(facts),
    ];
    findings.extend(super::evpn::run_checks(facts));
    findings
}

pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Finding {
    Finding { check, level: Level::Ok, found: found.into(), remedy: None }
}

pub(super) fn warn(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { check, level: Level::Warn, found: found.into(), remedy: Some(remedy.into()) }
}

fn fail(check: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
    Finding { check, level: Level::Fail, found: found.into(), remedy: Some(remedy.into()) }
}

fn processor(facts: &Facts) -> Finding {
    if facts.missing_cpu_features.is_empty() {
        return ok("processor", "has everything that the programs are built for");
    }
    let missing = facts.missing_cpu_features.join(", ");
    fail(
        "processor",
        format!("lacks {missing}, which the programs are built for"),
        "RUSTFLAGS=\"-C target-cpu=native\" cargo build --release",
    )
}

fn kernel(facts: &Facts) -> Finding {
    const UPGRADE: &str = "apt install -t bookworm-backports linux-image-amd64   # or any Linux from 6.6 on";
    let Some((major, minor)) = facts.kernel else {
        return warn("kernel", "does not report its version", "cat /proc/sys/kernel/osrelease");
    };
    let found = format!("Linux {major}.{minor}");
    match (major, minor) {
        version if version >= (6, 6) => ok("kernel", format!("{found}: AF_XDP with fragments, tcx")),
        version if version >= (5, 4) => {
            warn("kernel", format!("{found}: AF_XDP without fragments (since 6.6), so no jumbo frames"), UPGRADE)
        }
        _ => fail("kernel", format!("{found}: too old for the AF_XDP driver, which needs 5.4 or later"), UPGRADE),
    }
}

/// Returns the names of the drivers for a kind of device, as a list for messages.
fn driver_names(kind: DeviceKind) -> String {
    let names: Vec<_> =
        DRIVERS.iter().filter(|driver| driver.device_kind() == kind).map(|driver| driver.name()).collect();
    names.join(", ")
}

fn has_capability(facts: &Facts, capability: u32) -> bool {
    facts.capabilities.is_some_and(|bits| bits >> capability & 1 == 1)
}

fn capabilities(facts: &Facts) -> Finding {
    let remedy = format!("{}   # or run as root", setcap_command(&facts.programs));
    let bpf = has_capability(facts, CAP_BPF) || has_capability(facts, CAP_SYS_ADMIN);
    let missing: Vec<&str> = [
        (has_capability(facts, CAP_NET_RAW), "CAP_NET_RAW"),
        (has_capability(facts, CAP_NET_ADMIN), "CAP_NET_ADMIN"),
        (bpf, "CAP_BPF"),
    ]
    .into_iter()
    .filter_map(|(present, name)| (!present).then_some(name))
    .collect();
    if missing.is_empty() {
        return ok("capabilities", "CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF");
    }
    let names = missing.join(", ");
    if has_capability(facts, CAP_NET_RAW) {
        return warn("capabilities", format!("{names} missing: no AF_XDP and no TAP; AF_PACKET works"), remedy);
    }
    fail("capabilities", format!("{names} missing: only {} ports work", driver_names(DeviceKind::Virtual)), remedy)
}

fn huge_pages(facts: &Facts) -> Finding {
    let (size, free) = facts.huge_pages.unwrap_or((2048, 0));
    let bytes = size.saturating_mul(free).saturating_mul(1024);
    if bytes >= MIN_HUGE_PAGE_BYTES {
        return ok("huge pages", format!("{free} of {size} KiB are free"));
    }
    let pages = MIN_HUGE_PAGE_BYTES.div_ceil(size.saturating_mul(1024).max(1));
    let fallback = if facts.transparent_huge_pages {
        "pools use transparent huge pages if the kernel finds some"
    } else {
        "pools use normal pages, and transparent ones are off"
    };
    warn("huge pages", format!("{free} of {size} KiB are free: {fallback}"), format!("sysctl vm.nr_hugepages={pages}"))
}

fn locked_memory(facts: &Facts) -> Finding {
    match facts.locked_memory {
        _ if has_capability(facts, CAP_IPC_LOCK) => ok("locked memory", "not limited, by CAP_IPC_LOCK"),
        None => ok("locked memory", "not limited"),
        Some(bytes) if bytes >= MIN_LOCKED_BYTES => ok("locked memory", format!("{} MiB", bytes >> 20)),
        Some(bytes) => warn(
            "locked memory",
            format!("{} KiB: too little for the pools of AF_XDP and RDMA ports", bytes >> 10),
            format!("{}   # or, as root: ulimit -l unlimited", setcap_command(&facts.programs)),
        ),
    }
}

fn bpf_jit(facts: &Facts) -> Finding {
    match facts.bpf_jit {
        Some(false) => warn(
            "BPF compiler",
            "off: XDP programs are interpreted for every frame",
            "sysctl net.core.bpf_jit_enable=1",
        ),
        Some(true) => ok("BPF compiler", "on"),
        None => ok("BPF compiler", "the kernel has no setting for it"),
    }
}

fn tap_devices(facts: &Facts) -> Finding {
    if facts.tun {
        return ok("TAP devices", "/dev/net/tun exists");
    }
    warn("TAP devices", "no /dev/net/tun: tap ports do not work", "modprobe tun")
}

fn rdma_libraries(facts: &Facts) -> Finding {
    const CHECK: &str = "RDMA libraries";
    let rdma = &facts.rdma;
    let install = match &rdma.directory {
        // The variable overrides the system's libraries.
        Some(directory) => format!(
            "unset WIREPATH_RDMA_LIB_DIR   # it is {}; or name a directory with the libraries of rdma-core {} or later",
            directory.display(),
            MIN_RDMA_CORE.major
        ),
        None => format!("apt install libibverbs1 ibverbs-providers   # rdma-core {} or later", MIN_RDMA_CORE.major),
    };
    let libraries = match &rdma.libraries {
        Err(missing) => {
            return warn(CHECK, format!("{missing}: no {} ports", driver_names(DeviceKind::RdmaPort)), install);
        }
        Ok(libraries) => libraries,
    };
    let found = libraries.iter().map(|library| library.text.clone()).collect::<Vec<_>>().join(", ");
    let is_missing = |kind: &&NicKind| libraries.iter().all(|library| library.name != kind.library);
    if let Some(kind) = rdma.kinds.iter().find(is_missing) {
        return warn(CHECK, format!("{found}, but no {}: no {} ports", kind.library, kind.driver), install);
    }
    if let Some(old) = libraries.iter().find(|library| library.version.is_some_and(|version| version < MIN_RDMA_CORE)) {
        return warn(CHECK, format!("{found}: {} is older than {MIN_RDMA_CORE}, the oldest tested", old.name), install);
    }
    ok(CHECK, found)
}

fn rdma_devices(facts: &Facts) -> Finding {
    const CHECK: &str = "RDMA devices";
    let rdma = &facts.rdma;
    let unusable_port = |kind: &NicKind| kind.ports.iter().find_map(|(port, why)| Some((port.clone(), why.clone()?)));
    if let Some((port, why)) = rdma.kinds.iter().find_map(unusable_port) {
        let remedy = if let Some(at) = why.find("ip link set") {
            // The reason ends with the command.
            why[at..].to_owned()
        } else if why.contains("CAP_NET_RAW") {
            format!("{}   # or run as root", setcap_command(&facts.programs))
        } else {
            "wirepath devices".to_owned()
        };
        return warn(CHECK, format!("{port} cannot be used: {why}"), remedy);
    }
    if let Some(kind) = rdma.kinds.iter().find(|kind| kind.ports.is_empty() && kind.adapters > 0) {
        let found = format!("{} adapter(s) for {} without an RDMA device", kind.adapters, kind.driver);
        return warn(CHECK, found, format!("modprobe {}   # Linux {} or later", kind.module, kind.since));
    }
    if let Some(port) = rdma.down.first() {
        return warn(CHECK, format!("{} down: no link", rdma.down.join(", ")), format!("ip link set dev {port} up"));
    }
    match rdma.devices.as_slice() {
        [] => ok(CHECK, "none"),
        names => ok(CHECK, names.join(", ")),
    }
}

/// Reports whether RDMA queue pairs can encapsulate (libhbl). No program of Wirepath needs it, so it never warns.
fn rdma_encapsulation(facts: &Facts) -> Finding {
    const CHECK: &str = "RDMA encapsulation";
    match &facts.rdma.encapsulation {
        Err(why) => ok(CHECK, format!("none: {why}")),
        Ok(pairs) if pairs.devices.is_empty() => ok(CHECK, "none: libhbl drives no device here"),
        Ok(pairs) => {
            let (devices, over) = (pairs.devices.join(", "), pairs.over.join(" or "));
            ok(CHECK, format!("{devices}: by queue pair, over {over}, headers of at most {} bytes", pairs.max_header))
        }
    }
}

fn default_route(facts: &Facts) -> Finding {
    match facts.default_routes.as_slice() {
        [] => ok("default route", "none: driver = \"auto\" may use every interface"),
        names => ok(
            "default route",
            format!("on {}: driver = \"auto\" refuses this interface unless force = true", names.join(", ")),
        ),
    }
}

fn cores(facts: &Facts) -> Finding {
    match facts.cores {
        1 => warn("cores", "1: workers share it with all other programs", "lscpu   # then give the machine more"),
        n => ok("cores", format!("{n} available to this program")),
    }
}

fn clock_rate(facts: &Facts) -> Finding {
    match facts.governor.as_deref() {
        None => ok("clock rate", "the system has no frequency governor"),
        Some("performance") => ok("clock rate", "governor performance"),
        Some(name) => warn(
            "clock rate",
            format!("governor {name}: the clock rate follows the load and distorts measurements"),
            "cpupower frequency-set -g performance",
        ),
    }
}

fn isolated_cores(facts: &Facts) -> Finding {
    if !facts.isolated.is_empty() {
        return ok("isolated cores", format!("{}: pin workers there ([workers] cores = [...])", facts.isolated));
    }
    let mut finding =
        ok("isolated cores", "none; for steady latency isolate the cores of the workers with kernel parameters");
    if facts.cores > 2 {
        finding.remedy = Some(format!("isolcpus=1-{0} nohz_full=1-{0}   # kernel parameters", facts.cores - 1));
    }
    finding
}

#[cfg(test)]
mod tests {
    use wirepath_pmd::drivers::nic::rdma::{FoundLibrary, QueuePairEncapsulation, Rdma, Version};

    use super::*;

    fn library(name: &str, major: u32) -> FoundLibrary {
        let version = Some(Version { major, minor: 0 });
        FoundLibrary { name: name.to_owned(), version, text: format!("{name} {major}.0") }
    }

    fn kinds() -> Vec<NicKind> {
        let kind =
            |driver, library| NicKind { driver, library, module: "x_ib", since: "6.2", adapters: 0, ports: Vec::new() };
        vec![kind("mana", "libmana"), kind("mlx5", "libmlx5")]
    }

    fn facts_without_problems() -> Facts {
        Facts {
            kernel: Some((6, 6)),
            capabilities: Some(u64::MAX),
            huge_pages: Some((2048, 32)),
            transparent_huge_pages: true,
            bpf_jit: Some(true),
            cores: 4,
            tun: true,
            rdma: Rdma {
                libraries: Ok(["libibverbs", "libmana", "libmlx5"].map(|name| library(name, 44)).to_vec()),
                kinds: kinds(),
                ..Rdma::default()
            },
            programs: vec!["/usr/bin/wirepath".into()],
            isolated: "1-3".into(),
            ..Facts::default()
        }
    }

    #[test]
    fn queue_pair_encapsulation_is_reported() {
        let found = |encapsulation| {
            let mut facts = facts_without_problems();
            facts.rdma.encapsulation = encapsulation;
            run_checks(&facts).into_iter().find(|finding| finding.check == "RDMA encapsulation").unwrap().found
        };
        let pairs = |devices: &[&str]| QueuePairEncapsulation {
            devices: devices.iter().map(ToString::to_string).collect(),
            over: &["ipv4", "udp"],
            max_header: 32,
        };
        assert_eq!(found(Err("libhbl is not there".to_owned())), "none: libhbl is not there");
        assert_eq!(found(Ok(pairs(&[]))), "none: libhbl drives no device here");
        assert_eq!(found(Ok(pairs(&["hbl_0"]))), "hbl_0: by queue pair, over ipv4 or udp, headers of at most 32 bytes");
    }

    fn level(facts: &Facts, check: &str) -> Level {
        run_checks(facts).into_iter().find(|finding| finding.check == check).unwrap().level
    }

    #[test]
    fn facts_without_problems_give_no_warnings() {
        for finding in run_checks(&facts_without_problems()) {
            assert_eq!((finding.level, &finding.remedy), (Level::Ok, &None), "{finding:?}");
        }
    }

    #[test]
    fn each_problem_is_found_with_its_remedy() {
        type Problem = (&'static str, Level, fn(&mut Facts));
        let problems: [Problem; 21] = [
            ("processor", Level::Fail, |f| f.missing_cpu_features = vec!["avx2"]),
            ("kernel", Level::Warn, |f| f.kernel = Some((6, 5))),
            ("kernel", Level::Fail, |f| f.kernel = Some((4, 19))),
            ("kernel", Level::Warn, |f| f.kernel = None),
            ("capabilities", Level::Fail, |f| f.capabilities = Some(0)),
            ("capabilities", Level::Fail, |f| f.capabilities = None),
            ("capabilities", Level::Warn, |f| f.capabilities = Some(1 << CAP_NET_RAW)),
            ("huge pages", Level::Warn, |f| f.huge_pages = Some((2048, 31))),
            ("huge pages", Level::Warn, |f| f.huge_pages = None),
            ("locked memory", Level::Warn, |f| {
                f.locked_memory = Some(8 << 20);
                f.capabilities = Some(!(1 << CAP_IPC_LOCK));
            }),
            ("BPF compiler", Level::Warn, |f| f.bpf_jit = Some(false)),
            ("TAP devices", Level::Warn, |f| f.tun = false),
            ("RDMA libraries", Level::Warn, |f| f.rdma.libraries = Err("libibverbs.so.1 is not there".into())),
            ("RDMA libraries", Level::Warn, |f| f.rdma.libraries = Ok(vec![library("libibverbs", 44)])),
            ("RDMA libraries", Level::Warn, |f| {
                f.rdma.libraries = Ok(["libibverbs", "libmana", "libmlx5"].map(|name| library(name, 39)).to_vec());
            }),
            ("RDMA devices", Level::Warn, |f| f.rdma.kinds[1].adapters = 1),
            ("RDMA devices", Level::Warn, |f| f.rdma.down = vec!["eth2".into()]),
            ("RDMA devices", Level::Warn, |f| {
                f.rdma.kinds[1].ports = vec![("eth2".into(), Some("needs CAP_NET_RAW".into()))];
            }),
            ("RDMA devices", Level::Warn, |f| {
                f.rdma.kinds[0].ports = vec![("eth1".into(), Some("held; free it: ip link set dev eth1 down".into()))];
            }),
            ("cores", Level::Warn, |f| f.cores = 1),
            ("clock rate", Level::Warn, |f| f.governor = Some("powersave".into())),
        ];
        for (check, want, introduce) in problems {
            let mut facts = facts_without_problems();
            introduce(&mut facts);
            let finding = run_checks(&facts).into_iter().find(|finding| finding.check == check).unwrap();
            assert_eq!(finding.level, want, "{finding:?}");
            assert!(finding.remedy.is_some(), "{finding:?}");
        }
    }

    #[test]
    fn equivalent_settings_are_accepted() {
        let mut facts = facts_without_problems();
        facts.capabilities = Some(1 << CAP_NET_RAW | 1 << CAP_NET_ADMIN | 1 << CAP_SYS_ADMIN);
        assert_eq!(level(&facts, "capabilities"), Level::Ok, "CAP_SYS_ADMIN includes what CAP_BPF allows");
        facts.locked_memory = Some(64 << 20);
        assert_eq!(level(&facts, "locked memory"), Level::Ok);
        facts.huge_pages = Some((1 << 20, 1));
        assert_eq!(level(&facts, "huge pages"), Level::Ok, "one page of 1 GiB");
    }
}
