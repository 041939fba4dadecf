//! External programs and C programs on emulated NICs. They serve as oracles: the emulated devices must behave
//! like real ones.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_testlab::{Requirement, require};

const LOOP: &str = "[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n\
                    [[device.port]]\nlink = 'sink'\nmtu = 1500\n\
                    [[device]]\nkind = 'mana'\nname = 'mana_b'\n[[device.port]]\n";

const HEADERS: [Requirement; 3] = [
    Requirement::Program("cc"),
    Requirement::File("/usr/include/infiniband/manadv.h"),
    Requirement::File("/etc/libibverbs.d/mana.driver"),
];

const MLX5_HEADERS: [Requirement; 3] = [
    Requirement::Program("cc"),
    Requirement::File("/usr/include/infiniband/mlx5dv.h"),
    Requirement::File("/etc/libibverbs.d/mlx5.driver"),
];

/// All combinations of kernel interface and doorbell mode.
const WAYS: [(&str, &str); 6] = [
    ("ioctl", "trap"),
    ("write", "trap"),
    ("ioctl", "queue"),
    ("ioctl", "scan"),
    ("write", "scan"),
    ("write", "queue"),
];

/// Compiles a C program of this folder.
fn compile(folder: &tempfile::TempDir, name: &str) -> PathBuf {
    let program = folder.path().join(name);
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests").join(format!("{name}.c"));
    let output = Command::new("cc")
        .args(["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Werror", "-o"])
        .arg(&program)
        .arg(source)
        .args(["-lmana", "-lmlx5", "-libverbs"])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    program
}

/// Prepares a launch whose log is in a new folder, which is also for the program and its files.
fn prepare(topology: &str) -> (Launch, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("nic.log");
    (launch::prepare(&format!("log = '{}'\n{topology}", log.display())), folder)
}

struct Ran {
    success: bool,
    stdout: String,
    stderr: String,
    log: String,
}

impl Ran {
    /// Collects the output and the log of a program that has ended, and removes the log.
    fn of(output: &Output, folder: &tempfile::TempDir) -> Self {
        let log = folder.path().join("nic.log");
        let text = std::fs::read_to_string(&log).unwrap_or_default();
        let _ = std::fs::remove_file(log);
        Self {
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            log: text,
        }
    }
}

/// Runs a program on the NICs, in the folder of [`prepare`].
fn run(
    (launch, folder): &(Launch, tempfile::TempDir),
    program: impl AsRef<std::ffi::OsStr>,
    arguments: &[&str],
    environment: &[(&str, &str)],
) -> Ran {
    let mut command = launch.command(program);
    let output = command.args(arguments).envs(environment.iter().copied()).current_dir(folder).output().unwrap();
    Ran::of(&output, folder)
}

#[test]
fn ibv_devinfo_lists_the_devices() {
    require!(Requirement::Program("ibv_devinfo"), Requirement::File("/etc/libibverbs.d/mana.driver"));
    let nics = prepare(LOOP);
    for abi in ["ioctl", "write"] {
        let ran = run(&nics, "ibv_devinfo", &["-v"], &[(launch::ABI, abi)]);
        assert!(ran.success, "{abi}: {}", ran.stderr);
        assert!(ran.stderr.is_empty(), "{abi}: {}", ran.stderr);
        let has = |text: &str| assert!(ran.stdout.contains(text), "{abi}: no {text:?} in\n{}", ran.stdout);
        has("hca_id:\tmana0");
        has("hca_id:\tmana_b");
        has("vendor_id:\t\t\t0x1414");
        has("phys_port_cnt:\t\t\t2");
        has("state:\t\t\tPORT_ACTIVE (4)");
        has("link_layer:\t\tEthernet");
        has("IP csum offload");
        has("GID[  0]:\t\tfe80::ff:fe00:101");
        assert_eq!(ran.log, "", "nothing was refused");
    }
}

#[test]
fn manadv_program_in_every_mode() {
    require!(all HEADERS);
    let nics = prepare(LOOP);
    let program = compile(&nics.1, "manadv");
    for (abi, doorbells) in WAYS {
        let ran = run(&nics, &program, &[doorbells], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!(ran.stdout, "all good\n");
        // Every refusal is logged with its reason, device, queue and entry.
        let has = |text: &str| assert!(ran.log.contains(text), "{abi}, {doorbells}: no {text:?} in\n{}", ran.log);
        has("mana0 sq 1040: wqe at 0x");
        has("virtual port 6, but the queue has 5");
        has("entry 0: address 0x");
        has("no memory region has this key; the queue stops");
        has("entry 1: address 0x");
        has("outside its memory region 0x");
        has("reg_mr: 64 bytes at 0x10 are not all mapped");
        has("which the program has since unmapped");
        if doorbells != "scan" {
            has("is not a multiple of 32 bytes");
            has("backwards, or an overrun");
            has("which this context does not have");
        }
    }
}

#[test]
fn mlx5dv_program_in_every_mode() {
    require!(all MLX5_HEADERS);
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "mlx5dv");
    for device in ["", "cqe_version = 0\n", "doorbell_pages = 'static'\n"] {
        let topology = format!("[[device]]\nkind = 'mlx5'\n{device}[[device.port]]\nlink = 'loop'\n");
        let nics = prepare(&topology);
        for (abi, doorbells) in WAYS {
            // Doorbell pages that are objects need the ioctl form.
            if abi == "write" && !device.contains("static") {
                continue;
            }
            let ran = run(&nics, &program, &[], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
            assert!(ran.success, "{device}{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
            assert_eq!(ran.stdout, "all good\n");
            // Every refusal is logged with its reason, device, queue and descriptor.
            let has = |text: &str| assert!(ran.log.contains(text), "{abi}, {doorbells}: no {text:?} in\n{}", ran.log);
            has("its index is 0x4d, but it is at 0x0");
            has("opcode 0x7f");
            has("0 segments");
            has("16 blocks long, but the record posted 1");
            has("an inline header of 1000 bytes reaches beyond the descriptor");
            has("a packet of 5 bytes");
            has("IPv4 and IPv6 in one hash");
            has("with a key of 39 bytes");
        }
    }
}

/// rdma-core reads the clock, converts its time and finds time stamps in completions.
#[test]
fn rdma_core_reads_the_clock_in_every_mode() {
    require!(all MLX5_HEADERS);
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "clock");
    for (keys, pages, khz) in [
        ("", "pages", "156250"),
        ("clock_khz = 1000000\n", "pages", "1000000"),
        ("clock_page = false\n", "none", "156250"),
    ] {
        for (abi, doorbells) in WAYS {
            // Doorbell pages that are objects need the ioctl form.
            let uars = if abi == "write" { "static" } else { "objects" };
            let nics = prepare(&format!(
                "[[device]]\nkind = 'mlx5'\ndoorbell_pages = '{uars}'\n{keys}[[device.port]]\nlink = 'sink'\n"
            ));
            let ran = run(&nics, &program, &[pages, khz], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
            assert!(ran.success, "{keys}{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
            assert_eq!((ran.stdout.as_str(), ran.log.as_str()), ("all good\n", ""), "{abi}, {doorbells}");
        }
    }
}

/// Runs in every mode. In scan mode the program waits for no events, because the device does not see
/// completion queues being armed.
#[test]
fn events_faults_and_a_second_process() {
    require!(all HEADERS);
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "processes");
    let socket = folder.path().join("control").display().to_string();
    let nics = prepare(&format!(
        "control = '{socket}'\n[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'sink'\n\
         [[fault]]\nkind = 'refuse'\ncommand = 'create_qp'\nerrno = 'EBUSY'\nafter = 1\n"
    ));
    for (abi, doorbells) in WAYS {
        let ran = run(&nics, &program, &[&socket], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!(ran.stdout, "all good\n");
        assert!(ran.log.contains("injected fault: create_qp refused"), "{}", ran.log);
        // Both processes have rung only for descriptors that they had written.
        assert!(!ran.log.contains("doorbell"), "{abi}, {doorbells}: {}", ran.log);
    }
}

/// The doorbell registers of a ConnectX are not at the start of its file.
#[test]
fn a_second_process_has_a_send_queue_of_a_connectx() {
    require!(all MLX5_HEADERS);
    let nics = prepare("[[device]]\nkind = 'mlx5'\n[[device.port]]\nlink = 'sink'\n");
    let program = compile(&nics.1, "mlx5_processes");
    for doorbells in ["trap", "queue", "scan"] {
        let ran = run(&nics, &program, &[], &[(launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!((&*ran.stdout, &*ran.log), ("all good\n", ""), "{doorbells}");
    }
}

/// A late fetch has no effect on a program that waits for completions.
#[test]
fn correct_programs_work_with_a_late_fetch() {
    require!(all HEADERS);
    let nics = prepare(&format!("fetch = 'late'\n{LOOP}"));
    let ran = run(&nics, compile(&nics.1, "manadv"), &["trap"], &[]);
    assert!(ran.success, "{}{}\n{}", ran.stdout, ran.stderr, ran.log);
}

#[test]
fn libmlx5_rules_match_packets() {
    require!(all MLX5_HEADERS);
    let nics = prepare("[[device]]\nkind = 'mlx5'\nsteering = { devx = true }\n[[device.port]]\nlink = 'loop'\n");
    let program = compile(&nics.1, "steering");
    for (abi, doorbells) in WAYS {
        // Matchers do not exist in the write form.
        if abi == "write" {
            continue;
        }
        let ran = run(&nics, &program, &[], &[(launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!(ran.stdout, "all good\n");
        let has = |text: &str| assert!(ran.log.contains(text), "{doorbells}: no {text:?} in\n{}", ran.log);
        has("mlx5_0: rule: a rule with this match has tag 0xabcde, not 0x1");
        has("the value has bits at byte 0x3c that the mask does not have");
        has("the device does not compare what is at byte 0x18");
        has("reformat of kind 1 in table 0");
        has("a link header of 16 bytes; 14 or 18");
    }
}

/// Runs DPDK's testpmd on a looped port for some seconds; it forwards what it receives. Returns the numbers
/// of sent and received packets.
fn circulate(
    (launch, folder): &(Launch, tempfile::TempDir),
    doorbells: &str,
    device: &str,
    seconds: u64,
) -> (u64, u64, Ran) {
    const INSIDE: &str = "ip link set lo up; ip link add nic0 address 02:00:00:00:01:01 up type veth peer name far; \
                          ip link set far up; exec \"$@\"";
    let mut command = launch.command("unshare");
    let comma = if device.is_empty() { "" } else { "," };
    // The port's network interface must exist and have a carrier.
    command.args(["-n", "sh", "-c", INSIDE, "sh", "dpdk-testpmd", "--no-huge", "-m", "512", "--lcores=0@0,1@0"]);
    command.args([
        &format!("--file-prefix=wirepath-{}", std::process::id()),
        "-a",
        &format!("0000:00:10.0{comma}{device}"),
    ]);
    command.args(["--", "--forward-mode=io", "--tx-first", "--total-num-mbufs=4096"]);
    command.env(launch::DOORBELLS, doorbells).current_dir(folder);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = pipes.spawn().unwrap();
    std::thread::sleep(Duration::from_secs(seconds));
    // A line on standard input ends testpmd.
    let _ = program.stdin.take().unwrap().write_all(b"\n");
    let ran = Ran::of(&program.wait_with_output().unwrap(), folder);
    let count = |name: &str| -> u64 {
        let last = ran.stdout.rsplit(name).next().filter(|rest| rest.len() < ran.stdout.len());
        last.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    (count("TX-packets:"), count("RX-packets:"), ran)
}

/// Tests DPDK in the version of the distribution.
#[test]
fn testpmd_of_the_distribution_drives_a_connectx() {
    require!(
        Requirement::Root,
        Requirement::Program("dpdk-testpmd"),
        Requirement::Program("unshare"),
        Requirement::Program("ip")
    );
    let nics = prepare(
        "[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\nmac = '02:00:00:00:01:01'\nlink = 'loop'\n\
         netdev = 'nic0'\nmtu = 1500\n",
    );
    let ways = [
        ("scan", "dv_flow_en=0"),
        ("scan", "dv_flow_en=0,mprq_en=1,rxqs_min_mprq=1"),
        ("scan", "dv_flow_en=0,txq_mpw_en=0,rxq_cqe_comp_en=0"),
        ("queue", "dv_flow_en=0"),
        ("trap", "dv_flow_en=0"),
        // Queues are objects of firmware commands.
        ("scan", ""),
        ("scan", "mprq_en=1,rxqs_min_mprq=1"),
        ("scan", "txq_mpw_en=0,rxq_cqe_comp_en=0"),
        ("queue", ""),
        ("trap", ""),
    ];
    for (doorbells, device) in ways {
        // A slow machine gets more time: the test requires that packets circulate, not a certain rate.
        let mut waits = [2, 8, 30].into_iter();
        let (sent, received, ran) = loop {
            let (sent, received, ran) = circulate(&nics, doorbells, device, waits.next().expect("some packets"));
            assert!(ran.success, "{doorbells}, {device}: {}{}", ran.stdout, ran.stderr);
            if received > 1000 {
                break (sent, received, ran);
            }
        };
        assert!(ran.stdout.contains("RX-dropped: 0 "), "{doorbells}, {device}: {}", ran.stdout);
        assert!(ran.stdout.contains("TX-dropped: 0 "), "{doorbells}, {device}: {}", ran.stdout);
        // The first burst is sent and circulates. Packets in flight at the end are not received.
        assert!(sent.wrapping_sub(received) <= 512, "{doorbells}, {device}: {sent} sent, {received} received");
        assert_eq!(ran.log, "", "{doorbells}, {device}: something was refused");
        eprintln!("testpmd, {doorbells}, {device}: {received} packets went round");
    }
}

#[test]
fn without_a_topology_nothing_changes() {
    require!(Requirement::Program("ibv_devinfo"));
    let output = Command::new("ibv_devinfo").env("LD_PRELOAD", launch::build_library()).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("mana"));
    let plain = Command::new("ibv_devinfo").output().unwrap();
    assert_eq!((output.status, output.stdout, output.stderr), (plain.status, plain.stdout, plain.stderr));
}

/// VPP inspects its own memory before it installs its own allocator. Memory that the emulator had allocated
/// by then could not be freed.
#[test]
fn other_files_do_not_create_an_emulator() {
    require!(Requirement::Program("python3"));
    let output = Command::new("python3")
        .args(["-c", "import os; os.fstat(os.memfd_create('heap'))"])
        .env("LD_PRELOAD", launch::build_library())
        .env(launch::TOPOLOGY, "/that/would/be/missed.toml")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// The library defines the replaced functions of libc, and no other symbols.
#[test]
fn the_library_exports_only_libc_functions() {
    require!(Requirement::Program("nm"));
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(launch::build_library()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut names: Vec<&str> = text.lines().filter_map(|line| line.split_whitespace().nth(2)).collect();
    names.sort_unstable();
    let expected = [
        "close", "fstat", "fstat64", "ioctl", "mmap", "mmap64", "munmap", "open", "open64", "openat", "openat64",
        "recvmsg", "sendmsg", "socket", "stat", "stat64", "write",
    ];
    assert_eq!(names, expected);
}
