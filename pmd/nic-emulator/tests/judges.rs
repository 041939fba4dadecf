//! Programs that are not ours, or only speak C, on emulated NICs: what they find must be what a real NIC shows.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use wirepath_nic_emulator::launch::{self, Launch};
use wirepath_testlab::{Need, require};

const LOOP: &str = "log = 'nic.log'\n[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'loop'\n[[device.port]]\nlink = 'sink'\nmtu = 1500\n\
                    [[device]]\nkind = 'mana'\nname = 'mana_b'\n[[device.port]]\n";

const HEADERS: [Need; 3] =
    [Need::Program("cc"), Need::File("/usr/include/infiniband/manadv.h"), Need::File("/etc/libibverbs.d/mana.driver")];

/// Every way of the kernel interface and of doorbells.
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

struct Ran {
    success: bool,
    stdout: String,
    stderr: String,
    log: String,
}

impl Ran {
    /// Of a program that has ended, in this folder.
    fn of(output: &Output, folder: &tempfile::TempDir) -> Self {
        Self {
            success: output.status.success(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            log: std::fs::read_to_string(folder.path().join("nic.log")).unwrap_or_default(),
        }
    }
}

/// Runs a program on the NICs, in a folder of its own so that relative paths of the topology lie there.
fn run(launch: &Launch, program: impl AsRef<std::ffi::OsStr>, arguments: &[&str], environment: &[(&str, &str)]) -> Ran {
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch.command(program);
    let output = command.args(arguments).envs(environment.iter().copied()).current_dir(&folder).output().unwrap();
    Ran::of(&output, &folder)
}

#[test]
fn ibv_devinfo_lists_the_devices() {
    require!(Need::Program("ibv_devinfo"), Need::File("/etc/libibverbs.d/mana.driver"));
    let launch = launch::prepare(LOOP);
    for abi in ["ioctl", "write"] {
        let ran = run(&launch, "ibv_devinfo", &["-v"], &[(launch::ABI, abi)]);
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
fn a_c_program_against_manadv_in_every_way() {
    require!(all HEADERS);
    let launch = launch::prepare(LOOP);
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "manadv");
    for (abi, doorbells) in WAYS {
        let ran = run(&launch, &program, &[doorbells], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!(ran.stdout, "all good\n");
        // Each refusal has its reason, with device, queue and entry.
        let has = |text: &str| assert!(ran.log.contains(text), "{abi}, {doorbells}: no {text:?} in\n{}", ran.log);
        has("mana0 sq 1040: wqe at 0x");
        has("virtual port 6, and the queue's is 5");
        has("entry 0: address 0x");
        has("no memory region has this key; the queue stops");
        has("entry 1: address 0x");
        has("outside its memory region 0x");
        has("reg_mr: 64 bytes at 0x10 are not all mapped");
        has("which the program has unmapped since");
        if doorbells != "scan" {
            has("is not a multiple of 32 bytes");
            has("backwards, or an overrun");
            has("which this context does not have");
        }
    }
}

#[test]
fn a_c_program_against_mlx5dv_in_every_way() {
    require!(
        Need::Program("cc"),
        Need::File("/usr/include/infiniband/mlx5dv.h"),
        Need::File("/etc/libibverbs.d/mlx5.driver")
    );
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "mlx5dv");
    for device in ["", "cqe_version = 0\n", "doorbell_pages = 'static'\n"] {
        let topology = format!("[[device]]\nkind = 'mlx5'\n{device}[[device.port]]\nlink = 'loop'\n");
        let launch = launch::prepare(&format!("log = 'nic.log'\n{topology}"));
        for (abi, doorbells) in WAYS {
            // Doorbell pages that are objects need the ioctl form.
            if abi == "write" && !device.contains("static") {
                continue;
            }
            let ran = run(&launch, &program, &[], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
            assert!(ran.success, "{device}{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
            assert_eq!(ran.stdout, "all good\n");
            // Each refusal has its reason, with device, queue and descriptor.
            let has = |text: &str| assert!(ran.log.contains(text), "{abi}, {doorbells}: no {text:?} in\n{}", ran.log);
            has("its index is 0x4d, and it lies at 0x0");
            has("opcode 0x7f");
            has("0 segments");
            has("16 blocks long, and the record posted 1");
            has("an inline header of 1000 bytes reaches beyond the descriptor");
            has("a packet of 5 bytes");
            has("IPv4 and IPv6 in one hash");
            has("with a key of 39 bytes");
        }
    }
}

/// In every mode; the program waits for no events where the device looks at queues and does not see that one is armed.
#[test]
fn events_faults_and_a_second_process() {
    require!(all HEADERS);
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "processes");
    let socket = folder.path().join("control").display().to_string();
    let launch = launch::prepare(&format!(
        "log = 'nic.log'\ncontrol = '{socket}'\n[[device]]\nkind = 'mana'\n[[device.port]]\nlink = 'sink'\n\
         [[fault]]\nkind = 'refuse'\ncommand = 'create_qp'\nerrno = 'EBUSY'\nafter = 1\n"
    ));
    for (abi, doorbells) in WAYS {
        let ran = run(&launch, &program, &[&socket], &[(launch::ABI, abi), (launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{abi}, {doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!(ran.stdout, "all good\n");
        assert!(ran.log.contains("create_qp refused as ordered"), "{}", ran.log);
        // Both processes rang for what they had written, and for nothing else.
        assert!(!ran.log.contains("doorbell"), "{abi}, {doorbells}: {}", ran.log);
    }
}

/// The registers of a ConnectX do not lie at the start of its file.
#[test]
fn a_second_process_has_a_send_queue_of_a_connectx() {
    require!(
        Need::Program("cc"),
        Need::File("/usr/include/infiniband/mlx5dv.h"),
        Need::File("/etc/libibverbs.d/mlx5.driver")
    );
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "mlx5_processes");
    let launch = launch::prepare("log = 'nic.log'\n[[device]]\nkind = 'mlx5'\n[[device.port]]\nlink = 'sink'\n");
    for doorbells in ["trap", "queue", "scan"] {
        let ran = run(&launch, &program, &[], &[(launch::DOORBELLS, doorbells)]);
        assert!(ran.success, "{doorbells}: {}{}\n{}", ran.stdout, ran.stderr, ran.log);
        assert_eq!((&*ran.stdout, &*ran.log), ("all good\n", ""), "{doorbells}");
    }
}

/// The late fetch changes nothing for a program that waits for completions.
#[test]
fn fetching_late_is_not_seen_by_a_correct_program() {
    require!(all HEADERS);
    let launch = launch::prepare(&format!("fetch = 'late'\n{LOOP}"));
    let folder = tempfile::tempdir().unwrap();
    let ran = run(&launch, compile(&folder, "manadv"), &["trap"], &[]);
    assert!(ran.success, "{}{}\n{}", ran.stdout, ran.stderr, ran.log);
}

#[test]
fn rules_of_libmlx5_meet_real_packets() {
    require!(
        Need::Program("cc"),
        Need::File("/usr/include/infiniband/mlx5dv.h"),
        Need::File("/etc/libibverbs.d/mlx5.driver")
    );
    let folder = tempfile::tempdir().unwrap();
    let program = compile(&folder, "steering");
    let launch = launch::prepare(
        "log = 'nic.log'\n[[device]]\nkind = 'mlx5'\nsteering = { devx = true }\n[[device.port]]\nlink = 'loop'\n",
    );
    for (abi, doorbells) in WAYS {
        // Matchers have no write form.
        if abi == "write" {
            continue;
        }
        let ran = run(&launch, &program, &[], &[(launch::DOORBELLS, doorbells)]);
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

/// Year and month of DPDK's testpmd.
fn testpmd_version() -> Option<(u32, u32)> {
    let output = Command::new("dpdk-testpmd").arg("--version").output().ok()?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let mut numbers = text.split("DPDK ").nth(1)?.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

/// Has DPDK's testpmd send back what it gets, on a looped port, for some seconds: packets sent and received.
fn circulate(launch: &Launch, doorbells: &str, device: &str, seconds: u64) -> (u64, u64, Ran) {
    const INSIDE: &str = "ip link set lo up; ip link add nic0 address 02:00:00:00:01:01 up type veth peer name far; \
                          ip link set far up; exec \"$@\"";
    let folder = tempfile::tempdir().unwrap();
    let mut command = launch.command("unshare");
    // The port's interface must be there, with a carrier.
    command.args(["-n", "sh", "-c", INSIDE, "sh", "dpdk-testpmd", "--no-huge", "-m", "512", "--lcores=0@0,1@0"]);
    command.args([&format!("--file-prefix=wirepath-{}", std::process::id()), "-a", &format!("0000:00:10.0,{device}")]);
    command.args(["--", "--forward-mode=io", "--tx-first", "--total-num-mbufs=4096"]);
    command.env(launch::DOORBELLS, doorbells).current_dir(&folder);
    let pipes = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = pipes.spawn().unwrap();
    std::thread::sleep(Duration::from_secs(seconds));
    // It ends when a line comes.
    let _ = program.stdin.take().unwrap().write_all(b"\n");
    let ran = Ran::of(&program.wait_with_output().unwrap(), &folder);
    let count = |name: &str| -> u64 {
        let last = ran.stdout.rsplit(name).next().filter(|rest| rest.len() < ran.stdout.len());
        last.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
    };
    (count("TX-packets:"), count("RX-packets:"), ran)
}

/// DPDK as the distribution has it.
#[test]
fn testpmd_of_the_distribution_drives_a_connectx() {
    require!(Need::Root, Need::Program("dpdk-testpmd"), Need::Program("unshare"), Need::Program("ip"));
    let launch = launch::prepare(
        "log = 'nic.log'\n[[device]]\nkind = 'mlx5'\nname = 'nic0'\n[[device.port]]\nmac = '02:00:00:00:01:01'\nlink = 'loop'\n\
         netdev = 'nic0'\nmtu = 1500\n",
    );
    let ways = [
        ("scan", "dv_flow_en=0"),
        ("scan", "dv_flow_en=0,mprq_en=1,rxqs_min_mprq=1"),
        ("scan", "dv_flow_en=0,txq_mpw_en=0,rxq_cqe_comp_en=0"),
        ("queue", "dv_flow_en=0"),
        ("trap", "dv_flow_en=0"),
    ];
    // Newer ones make memory of send queues by firmware commands, unless told not to.
    let legacy = if testpmd_version() >= Some((25, 7)) { ",txq_mem_algn=0" } else { "" };
    for (doorbells, device) in ways {
        let device = &format!("{device}{legacy}");
        // A slow machine gets more time: what is asked for is that packets go round, not how many in a second.
        let mut waits = [2, 8, 30].into_iter();
        let (sent, received, ran) = loop {
            let (sent, received, ran) = circulate(&launch, doorbells, device, waits.next().expect("some packets"));
            assert!(ran.success, "{doorbells}, {device}: {}{}", ran.stdout, ran.stderr);
            if received > 1000 {
                break (sent, received, ran);
            }
        };
        assert!(ran.stdout.contains("RX-dropped: 0 "), "{doorbells}, {device}: {}", ran.stdout);
        assert!(ran.stdout.contains("TX-dropped: 0 "), "{doorbells}, {device}: {}", ran.stdout);
        // The first burst is sent and goes round; what is on its way at the end is not received.
        assert!(sent.wrapping_sub(received) <= 512, "{doorbells}, {device}: {sent} sent, {received} received");
        assert_eq!(ran.log, "", "{doorbells}, {device}: something was refused");
        eprintln!("testpmd, {doorbells}, {device}: {received} packets went round");
    }
}

#[test]
fn without_a_topology_nothing_changes() {
    require!(Need::Program("ibv_devinfo"));
    let output = Command::new("ibv_devinfo").env("LD_PRELOAD", launch::build_library()).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stdout).contains("mana"));
    let plain = Command::new("ibv_devinfo").output().unwrap();
    assert_eq!((output.status, output.stdout, output.stderr), (plain.status, plain.stdout, plain.stderr));
}

/// VPP looks at memory of its own before it puts an allocator of its own in place: what the emulator had allocated by then could not be freed.
#[test]
fn no_nics_are_made_for_a_file_that_is_none() {
    require!(Need::Program("python3"));
    let output = Command::new("python3")
        .args(["-c", "import os; os.fstat(os.memfd_create('heap'))"])
        .env("LD_PRELOAD", launch::build_library())
        .env(launch::TOPOLOGY, "/that/would/be/missed.toml")
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

/// The names that the library puts in front of libc's, and no others.
#[test]
fn the_library_shows_nothing_else() {
    require!(Need::Program("nm"));
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
