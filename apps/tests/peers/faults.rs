//! Faults of the machine below a running gateway. It goes on, says what happened, and takes no more memory,
//! descriptors and threads than before.

use std::io::{ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use wirepath::control_socket::Client;
use wirepath_testlab::{Outcome, Requirement, copy_program, eventually, print_uncaptured, run, skip_or_fail, spawn};
use wirepath_wire::MacAddr;

use crate::bfd;
use crate::cgroup::Cgroup;
use crate::program::Program;
use crate::world::{GATEWAY, Variant, WAIT_LIMIT, World, host_address, pings, remote_address};

pub(crate) const WIREPATH: &str = env!("CARGO_BIN_EXE_wirepath");
pub(crate) const CONTROL: &str = "[control]\nsocket = 'operators.sock'\n";
/// Bytes of memory that a program may take in addition during a fault. Tables and caches fill once. AddressSanitizer
/// keeps freed memory for some time.
pub(crate) const GROWTH: u64 = if cfg!(asan) { 1 << 30 } else { 8 << 20 };
/// Time for which the processor time of the control thread is measured.
const WINDOW: Duration = Duration::from_millis(1500);

/// A gateway with two hosts and a remote, which know each other.
struct Site {
    world: World,
    program: Program,
    config: String,
}

/// Resources of a process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Usage {
    pub(crate) descriptors: usize,
    pub(crate) threads: usize,
    /// Resident memory in bytes.
    pub(crate) memory: u64,
}

impl Usage {
    /// Reads the resources of a running process.
    pub(crate) fn of(id: u32) -> Self {
        let folder = PathBuf::from(format!("/proc/{id}"));
        let count = |name| std::fs::read_dir(folder.join(name)).expect("a running program").count();
        let status = std::fs::read_to_string(folder.join("status")).expect("a running program");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
        let kib: u64 = resident.trim().trim_end_matches(" kB").parse().expect("a number");
        Self { descriptors: count("fd"), threads: count("task"), memory: kib << 10 }
    }

    /// Returns the largest of both values of each resource.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
            memory: self.memory.max(other.memory),
        }
    }
}

impl Site {
    /// Starts the gateway by way of a program that executes its arguments. `tables` are added to the configuration.
    fn start(variant: Variant, tables: &str, wrapper: &[&str]) -> Self {
        Self::start_by(variant, tables, |world, config| {
            Program::start_under(&world.gateway, wrapper, GATEWAY, config, "")
        })
    }

    fn start_by(variant: Variant, tables: &str, start: impl FnOnce(&World, &str) -> Program) -> Self {
        let world = World::new(variant, 2, 1, 1500);
        let config = world.one_segment() + CONTROL + tables;
        let program = start(&world, &config);
        let mut site = Self { world, program, config };
        site.assert_carries();
        site
    }

    /// Checks that both hosts and the remote reach each other, and that an operator is answered.
    #[track_caller]
    fn assert_carries(&mut self) {
        let Self { world, program, .. } = self;
        for host in &world.hosts {
            world.wait_for(program, host, &remote_address(0));
        }
        let carries = |from, to: &str| pings(from, to, 1200, 50) || pings(from, to, 1200, 50);
        assert!(carries(&world.hosts[0], &remote_address(0)), "a host does not reach the remote");
        assert!(carries(&world.remotes[0], &host_address(1)), "the remote does not reach a host");
        self.assert_shows();
    }

    /// Checks that `wirepath show` answers.
    #[track_caller]
    fn assert_shows(&self) {
        let socket = self.program.path("operators.sock").display().to_string();
        let shown = run(&[WIREPATH, "show", "ports", "--socket", &socket]).expect();
        assert!(["wan", "lan0", "lan1"].iter().all(|port| shown.contains(port)), "{shown}");
    }

    fn ask(&self, request: &Value) -> Result<Value, String> {
        let mut client = Client::connect(&self.program.path("operators.sock")).map_err(|error| format!("{error:?}"))?;
        client.ask(request).map_err(|error| format!("{error:?}"))
    }

    /// Reads the configuration again, in which a timer has another value.
    fn reload(&self, ageing: u32) -> Result<Value, String> {
        self.program.write_config(&self.config.replace("vni = 42", &format!("vni = 42\nageing = {ageing}")));
        self.ask(&json!({ "request": "reload" }))
    }

    fn number(&self, table: &str, column: &str) -> u64 {
        let rows = self.program.rows(table);
        rows[0][column].as_u64().unwrap_or_else(|| panic!("no number {column}: {rows:?}"))
    }

    /// Path of a file as the program sees it. The program has mounts of its own.
    fn inside(&mut self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.program.id()));
        root.join(path.strip_prefix("/").expect("an absolute path"))
    }

    fn usage(&mut self) -> Usage {
        Usage::of(self.program.id())
    }

    /// Checks that nothing has grown. Clients and threads of the fault need a moment to end.
    #[track_caller]
    fn assert_flat(&mut self, before: Usage) {
        let mut now = before;
        let is_flat = eventually(WAIT_LIMIT, || {
            now = self.usage();
            now.descriptors <= before.descriptors
                && now.threads <= before.threads
                && now.memory <= before.memory + GROWTH
        });
        assert!(is_flat, "{before:?}, now {now:?}");
    }

    /// Checks that the control thread waits, and does not run in circles.
    #[track_caller]
    fn assert_control_thread_waits(&mut self) {
        let file = format!("/proc/{0}/task/{0}/schedstat", self.program.id());
        // Time on a processor, and time of waiting for one: a thread that never rests has both of them all the time.
        let used = || {
            let text = std::fs::read_to_string(&file).expect("a running program");
            let times = text.split_whitespace().take(2).map(|time| time.parse::<u64>().expect("a time"));
            Duration::from_nanos(times.sum())
        };
        let (begin, before) = (Instant::now(), used());
        std::thread::sleep(WINDOW);
        let (time, all) = (used() - before, begin.elapsed());
        assert!(time < all / 2, "the control thread has run for {time:?} of {all:?}");
    }
}

/// Starts a capture of all packets, and returns when it has begun.
fn capture(socket: &Path, file: &Path) -> Child {
    let mut command = Command::new(WIREPATH);
    command.args(["capture", "--rule", "icmp"]).arg("--socket").arg(socket).arg("-w").arg(file);
    let child = command.stderr(Stdio::null()).spawn().expect("the tool starts");
    assert!(eventually(WAIT_LIMIT, || file.metadata().is_ok_and(|data| data.len() > 0)), "it begins");
    child
}

/// Returns whether the test cannot run for want of something, and reports it.
fn is_missing(variant: Variant, needs: &[Requirement]) -> bool {
    let missing = needs.iter().find_map(|need| need.check().err());
    missing.is_some_and(|why| {
        skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
        true
    })
}

/// Creates a group of processes, or reports why there is none.
fn cgroup(variant: Variant, controller: &str) -> Option<Cgroup> {
    let report = |why| skip_or_fail(file!(), line!(), &format!("{}: {why}", variant.name));
    Cgroup::new(controller).map_err(report).ok()
}

/// Adds seconds from a file to the clock that the program reads. The machine keeps its time.
const SHIFTED_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static const volatile long *shift;
__attribute__((constructor)) static void begin(void) {
    int file = open(getenv("SHIFT_FILE"), O_RDONLY | O_CLOEXEC);
    shift = mmap(0, 4096, PROT_READ, MAP_SHARED, file, 0);
}
int clock_gettime(clockid_t id, struct timespec *time) {
    int (*next)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int result = next(id, time);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) time->tv_sec += *shift;
    return result;
}
int gettimeofday(struct timeval *time, void *zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return to ? *to = now.tv_sec : now.tv_sec;
}
"#;
/// Jumps of the wall clock in seconds, from the real time.
const JUMPS: [i64; 2] = [5 * 3600, -10 * 3600];
/// Pings after each jump.
const PINGS: u32 = 20;

/// The wall clock jumps by hours in both directions. Flows, learned addresses and the state file do not depend on it,
/// captures and the log follow it. A state file of another boot time is not used.
pub(crate) fn the_wall_clock_jumps(variant: Variant) {
    if is_missing(variant, &[Requirement::Program("cc"), Requirement::Program("unshare")]) {
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("clock.c"), SHIFTED_CLOCK).expect("a source");
    run(&["cc", "-shared", "-fPIC", "-o", &path("clock.so"), &path("clock.c"), "-ldl"]).expect();
    std::fs::write(path("shift"), [0; 4096]).expect("a shift");
    let shift_file = std::fs::File::options().write(true).open(path("shift")).expect("the shift");
    let (preload, shift) = (format!("LD_PRELOAD={}", path("clock.so")), format!("SHIFT_FILE={}", path("shift")));
    let wrapper = ["env", &*preload, &*shift];
    let state = format!("[state]\nfile = '{}'\ninterval = 1\nmax_age = 600\n", path("state"));
    let mut site = Site::start(variant, &state, &wrapper);
    let before = site.usage();
    let learned = site.number("segments", "learned");
    assert!(learned >= 3, "two hosts and a remote: {learned}");

    let file = folder.path().join("icmp.pcapng");
    let mut capture = capture(&site.program.path("operators.sock"), &file);
    for seconds in JUMPS {
        shift_file.write_all_at(&seconds.to_ne_bytes(), 0).expect("a jump");
        let written = site.number("state", "written");
        // The capture follows within a tenth of a second, so it has the new time of the second half at least.
        assert!(pings(&site.world.hosts[0], &remote_address(0), 56, PINGS), "pings beside a jump of {seconds} s");
        let goes_on = eventually(WAIT_LIMIT, || site.number("state", "written") > written + 1);
        assert!(goes_on, "the state file is written after a jump of {seconds} s");
        assert!(site.number("state", "age") <= WAIT_LIMIT.as_secs(), "a jump of {seconds} s");
        assert_eq!(site.number("segments", "learned"), learned, "a jump of {seconds} s");
        assert!(pings(&site.world.hosts[0], &remote_address(0), 56, PINGS), "pings after a jump of {seconds} s");
    }
    kill_process(Pid::from_child(&capture), Signal::INT).expect("a signal");
    assert_eq!(capture.wait().expect("an end").code(), Some(0));
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs_f64();
    let times = run(&["tshark", "-n", "-r", &path("icmp.pcapng"), "-T", "fields", "-e", "frame.time_epoch"]).expect();
    let times: Vec<f64> = times.lines().map(|line| line.parse().expect("a time")).collect();
    for seconds in JUMPS {
        let near = times.iter().filter(|time| (**time - now - seconds as f64).abs() < 600.0).count();
        // Requests and answers beside the host, which have no tunnel header.
        assert!(near >= 2 * PINGS as usize, "{near} packets of a jump of {seconds} s, of {times:?}");
    }
    site.assert_carries();
    site.assert_flat(before);
    let written = site.number("state", "written");
    assert!(eventually(WAIT_LIMIT, || site.number("state", "written") > written + 1));
    let Site { world, program, config } = site;
    program.kill();

    // The next process has the wrong time too, and goes on with what is known.
    let program = Program::start_under(&world.gateway, &wrapper, GATEWAY, &config, "");
    let mut site = Site { world, program, config };
    site.assert_carries();
    assert!(site.number("state", "restored_addresses") >= 3, "{:?}", site.program.rows("state"));
    let Site { world, program, config } = site;
    let (_, log) = program.stop_with_log();
    assert!(!log.contains("panic"), "{log}");

    // From Linux 6.3 on, execve enters a new time namespace without a fork.
    if Requirement::Kernel(6, 3).check().is_ok() {
        let later = ["unshare", "--time", "--boottime", "7200"];
        let program = Program::start_under(&world.gateway, &later, GATEWAY, &config, "");
        let mut site = Site { world, program, config };
        site.assert_carries();
        assert_eq!(site.number("state", "restored_addresses"), 0);
        let (_, log) = site.program.stop_with_log();
        let says =
            |line: &str| line.contains("state is not used: it is 72") && line.contains("more than state.max_age");
        assert!(log.lines().any(says), "{log}");
    }
}

/// The disk of the state file, the log and captures is full, and then has room again.
pub(crate) fn the_disk_is_full(variant: Variant) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    let script =
        "mount -t tmpfs -o size=1m none \"$0\" && exec \"$@\" --capture-drops \"$0\"/drops.pcapng 2>\"$0\"/log";
    let at = folder.path().display().to_string();
    let wrapper = ["sh", "-c", script, &at];
    let state = format!("[state]\nfile = '{}'\ninterval = 1\n", path("state").display());
    let mut site = Site::start(variant, &state, &wrapper);
    assert!(eventually(WAIT_LIMIT, || site.number("state", "written") > 0), "{:?}", site.program.rows("state"));
    let before = site.usage();
    let [state, log, drops, fill] = ["state", "log", "drops.pcapng", "fill"].map(|name| site.inside(&path(name)));

    let full = std::fs::write(&fill, vec![0; 2 << 20]).expect_err("there is no room");
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    let failures = site.number("state", "failures");
    // Many lines of the log, and many packets of the capture.
    for _ in 0..200 {
        site.ask(&json!({ "request": "log", "level": "info" })).expect("an answer");
    }
    let wire = site.world.remotes[0].frames("eth0");
    let us = MacAddr(site.world.gateway.mac("wan"));
    for n in 0..5000 {
        wire.send(&crate::floods::hostile(variant.vtep(), us, 2, n)).expect("sent");
    }
    let fails = eventually(WAIT_LIMIT, || site.number("state", "failures") >= failures + 2);
    assert!(fails, "{:?}", site.program.rows("state"));
    let text = std::fs::read_to_string(&state).expect("the former file");
    let facts = text.lines().count() as u64 - 2;
    assert_eq!(text.lines().last(), Some(&*json!({ "facts": facts }).to_string()), "the former file is whole");
    let socket = site.program.path("operators.sock").display().to_string();
    let (id, target) = (site.program.id().to_string(), path("new.pcapng").display().to_string());
    let captured = |site: &Site| -> Outcome {
        let command = ["nsenter", "-m", "-t", &id, WIREPATH, "capture", "--socket", &socket, "-w", &target, "-n", "2"];
        let mut tool = spawn(&command);
        while tool.running() {
            pings(&site.world.hosts[0], &remote_address(0), 56, 1);
        }
        tool.wait(WAIT_LIMIT)
    };
    let refused = captured(&site);
    assert_eq!(refused.code, Some(1), "{refused:?}");
    assert!(refused.stderr.contains("new.pcapng: No space left on device"), "{}", refused.stderr);
    site.assert_carries();
    site.assert_control_thread_waits();

    std::fs::remove_file(&fill).expect("room");
    let written = site.number("state", "written");
    let back = eventually(WAIT_LIMIT, || site.number("state", "written") > written + 1);
    assert!(back, "{:?}", site.program.rows("state"));
    let done = captured(&site);
    assert!(done.success, "{done:?}");
    site.assert_carries();
    site.assert_flat(Usage { threads: before.threads, ..before });
    let log = std::fs::read_to_string(log).expect("a log");
    // The first line of each message begins with the time.
    let lost = log.lines().filter(|line| line.contains(" lines of the log are lost: No space left on device"));
    assert!(lost.clone().count() > 0, "{log}");
    assert!(lost.clone().all(|line| line.get(26..33) == Some("Z WARN ")), "{log}");
    assert!(log.lines().any(|line| line.ends_with("state is written again")), "{log}");
    let records = packets_of(&drops);
    let summary = site.program.stop();
    assert!(summary.number("lost_lines") > 100, "{}", summary.json);
    assert!(summary.drops("not_for_us") >= 5000, "{}", summary.json);
    assert!(records < 5000, "the capture of drops has ended: {records} packets");
}

/// Returns the number of packets of a capture that may end inside a block.
fn packets_of(file: &Path) -> usize {
    run(&["tshark", "-n", "-r", &file.display().to_string()]).stdout.lines().count()
}

/// Descriptors that the limit leaves to a program.
const FREE: usize = 3;

/// The program has no free descriptor. Operators are answered, and what needs a descriptor is refused with the reason.
pub(crate) fn no_descriptor_is_free(variant: Variant) {
    let mut site = Site::start(variant, "", &[]);
    // New rings of an interface fill with traffic, which is no growth.
    site.world.replace_interfaces(&mut site.program);
    site.assert_carries();
    let before = site.usage();
    let id = site.program.id().to_string();
    let limit = |soft: usize| run(&["prlimit", "--pid", &id, &format!("--nofile={soft}:")]).expect();
    let open = std::fs::read_dir(format!("/proc/{id}/fd")).expect("a running program");
    let open: Vec<usize> = open.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
    // Descriptors that the program inherited may have higher numbers.
    let free = (0..).filter(|number| !open.contains(number)).nth(FREE).expect("a number");
    let former = run(&["prlimit", "--pid", &id, "--nofile", "--output", "SOFT", "--noheadings"]).expect();
    limit(free);
    let socket = site.program.path("operators.sock");
    // Silent clients take what is left, and wait in the queue of the socket.
    let crowd = || -> Vec<UnixStream> { (0..60).map(|_| UnixStream::connect(&socket).expect("a place")).collect() };
    let silent = crowd();
    site.assert_carries();
    site.assert_control_thread_waits();
    site.assert_carries();

    let mut answer = Value::Null;
    site.program.write_config(&site.config.replace("vni = 42", "vni = 42\nageing = 77"));
    let is_refused = eventually(WAIT_LIMIT, || {
        // Those behind the operator take what becomes free before the operator is served.
        let before = crowd();
        let mut operator = Client::connect(&socket).expect("a connection");
        let behind = crowd();
        answer = operator
            .ask(&json!({ "request": "reload" }))
            .unwrap_or_else(|error| json!({ "error": format!("{error:?}") }));
        drop((before, behind));
        answer["error"].as_str().is_some_and(|error| error.contains("Too many open files"))
    });
    assert!(is_refused, "{answer}");

    // A device that leaves and returns meanwhile is taken back when there are descriptors.
    let more = crowd();
    site.world.gateway.ip("link del lan1");
    site.world.plug_host(1);
    site.world.wait_for(&mut site.program, &site.world.hosts[0], &remote_address(0));
    site.assert_control_thread_waits();
    drop((silent, more));
    limit(former.trim().parse().expect("a number"));
    site.assert_carries();
    let answer = site.reload(78).expect("an answer");
    assert_eq!(answer["applied"], true, "{answer}");
    site.assert_carries();
    site.assert_flat(before);
    let (_, log) = site.program.stop_with_log();
    assert!(log.contains("the control socket has no room for a client: Too many open files"), "{log}");
}

/// The program can start no thread (`pids.max`). What needs one is refused with the reason.
pub(crate) fn no_thread_can_start(variant: Variant) {
    let Some(group) = cgroup(variant, "pids") else { return };
    let mut site = Site::start(variant, "", &[]);
    site.world.replace_interfaces(&mut site.program);
    // The allocator keeps some memory of former captures.
    for _ in 0..10 {
        let begun = site.ask(&json!({ "request": "capture", "count": 1 }));
        assert!(begun.is_ok_and(|answer| answer["ok"] == true), "a capture");
    }
    site.assert_carries();
    let before = site.usage();
    group.add(site.program.id());
    group.set(["pids.max"; 2], &group.get(["pids.current"; 2]));
    let says = |answer: Result<Value, String>| {
        let text = format!("{answer:?}");
        assert!(text.contains("cannot start a thread: ") && text.contains("TasksMax="), "{text}");
    };
    for _ in 0..50 {
        says(site.reload(77));
        says(site.ask(&json!({ "request": "capture", "count": 1 })));
    }
    site.assert_carries();
    site.assert_control_thread_waits();
    site.world.replace_interfaces(&mut site.program);
    site.assert_carries();

    group.set(["pids.max"; 2], "max");
    let answer = site.reload(77).expect("an answer");
    assert_eq!(answer["applied"], true, "{answer}");
    site.assert_carries();
    site.assert_flat(before);
    let (_, log) = site.program.stop_with_log();
    assert!(log.contains("capture: cannot start a thread: "), "{log}");
    assert!(!log.contains("panic"), "{log}");
}

/// Starts the gateway as a process of a group, into which the test moves it.
fn start_in(group: &Cgroup, world: &World, config: &str) -> Program {
    // The program's /sys is of its network namespace, and lacks the groups at first.
    let script = "folder=/sys/fs/cgroup; mount -t tmpfs none $folder && mkdir $folder/memory; \
                  mount -t cgroup -o memory none $folder/memory 2>/dev/null || mount -t cgroup2 none $folder; \
                  kill -STOP $$; exec \"$@\"";
    let wrapper = ["sh", "-c", script, "sh"];
    let mut program = Program::start_under(&world.gateway, &wrapper, GATEWAY, config, "");
    let stat = format!("/proc/{}/stat", program.id());
    let waits = || std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(" (sh) T "));
    assert!(eventually(WAIT_LIMIT, waits), "the shell waits");
    group.add(program.id());
    program.signal(Signal::CONT);
    program
}

/// Memory of the program's group is short: the kernel ends the neighbour that takes it, and the gateway goes on. A
/// gateway that the kernel ends has a successor, which goes on with what was known.
pub(crate) fn memory_is_short(variant: Variant) {
    let Some(group) = cgroup(variant, "memory") else { return };
    let usage = ["memory.usage_in_bytes", "memory.current"];
    let limit = ["memory.limit_in_bytes", "memory.max"];
    let folder = tempfile::tempdir().expect("a folder");
    let state = folder.path().join("state");
    let tables = format!("[state]\nfile = '{}'\ninterval = 1\nmax_age = 600\n", state.display());
    let processes = group.processes().display().to_string();
    let start = |world: &World, config: &str| start_in(&group, world, config);
    let mut site = Site::start_by(variant, &tables, start);
    assert!(eventually(WAIT_LIMIT, || site.number("state", "written") > 1));
    let before = site.usage();
    let used: u64 = group.get(usage).parse().expect("a number");
    group.set(limit, &(used + (128 << 20)).to_string());

    // The neighbour takes more than is left, and then has more than the gateway, so the kernel chooses it.
    let hog = "echo $$ >\"$0\" && exec head -c 1G /dev/zero | tail";
    let outcome = run(&["sh", "-c", hog, &processes]);
    assert!(group.killed_for_memory() >= 1, "{outcome:?}");
    assert!(site.program.running(), "the kernel has ended the gateway");
    for ageing in 0..20 {
        let answer = site.reload(100 + ageing).expect("an answer");
        assert_eq!(answer["applied"], true, "{answer}");
    }
    site.assert_carries();
    site.assert_flat(before);
    site.assert_control_thread_waits();
    let killed = group.killed_for_memory();
    assert!(eventually(WAIT_LIMIT, || site.number("state", "age") < 3), "{:?}", site.program.rows("state"));

    // The kernel ends a gateway that has less than its buffers need. The warning may come too late for the log.
    let Site { world, program, config } = site;
    program.kill();
    let empty = eventually(WAIT_LIMIT, || group.get(["cgroup.procs"; 2]).is_empty());
    assert!(empty, "the group still has processes");
    group.set(limit, &(8_u64 << 20).to_string());
    let mut log = String::new();
    let is_named = (0..10).any(|_| {
        let mut program = start(&world, &config);
        assert!(eventually(WAIT_LIMIT, || !program.running()), "it has enough");
        log = program.wait_for_kill();
        log.contains("MiB do not fit in the 8 MiB of the program's control group")
    });
    assert!(is_named, "{log}");
    assert!(group.killed_for_memory() > killed, "{log}");
    group.set(limit, "1g");
    let program = start(&world, &config);
    let mut site = Site { world, program, config };
    site.assert_carries();
    assert!(site.number("state", "restored_addresses") >= 3, "{:?}", site.program.rows("state"));
    site.program.stop();
}

/// The processor to which a worker is pinned is taken away, by affinity and by cpuset, and given back.
pub(crate) fn a_processor_is_taken_away(variant: Variant) {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    if allowed < 2 {
        return skip_or_fail(file!(), line!(), &format!("{}: needs two processors", variant.name));
    }
    let Some(group) = cgroup(variant, "cpuset") else { return };
    let own = std::fs::read_to_string("/proc/self/status").expect("a status");
    let list = |name: &str| own.lines().find_map(|line| line.strip_prefix(name)).expect("a list").trim().to_owned();
    let (processors, nodes) = (list("Cpus_allowed_list:"), list("Mems_allowed_list:"));
    let number = |text: &str| text.parse::<u32>().expect("a number");
    let first = processors.split([',', '-']).next().map(number).expect("a processor");
    let last = processors.split([',', '-']).next_back().map(number).expect("a processor");
    let mut site = Site::start(variant, &format!("[workers]\ncores = [{last}]\n"), &[]);
    let before = site.usage();
    let id = site.program.id();
    // Processors of the worker's thread.
    let of_worker = || {
        let tasks = std::fs::read_dir(format!("/proc/{id}/task")).expect("a running program");
        let mut lists = tasks.filter_map(|task| {
            let status = std::fs::read_to_string(task.ok()?.path().join("status")).ok()?;
            let value = |key| status.lines().find_map(|line| line.strip_prefix(key)).map(|it| it.trim().to_owned());
            (value("Name:")? == "worker-0").then(|| value("Cpus_allowed_list:")).flatten()
        });
        lists.next().expect("a worker")
    };
    assert_eq!(of_worker(), last.to_string());

    run(&["taskset", "-a", "-c", "-p", &first.to_string(), &id.to_string()]).expect();
    assert_eq!(of_worker(), first.to_string());
    site.assert_carries();
    run(&["taskset", "-a", "-c", "-p", &processors, &id.to_string()]).expect();
    site.assert_carries();

    group.set(["cpuset.mems"; 2], &nodes);
    group.set(["cpuset.cpus"; 2], &first.to_string());
    group.add(id);
    assert_eq!(of_worker(), first.to_string());
    site.assert_carries();
    site.assert_control_thread_waits();
    group.set(["cpuset.cpus"; 2], &processors);
    site.assert_carries();
    site.assert_flat(before);
    let rows = site.program.rows("workers");
    assert!(rows.len() == 1 && rows[0]["core"] == last, "{rows:?}");
    site.program.stop();
}

/// Time for which the program is stopped. A session of BFD ends after less than a second.
const STOP: Duration = Duration::from_secs(20);

/// SIGSTOP for 20 s under traffic and BFD. The other end ends the session meanwhile. Afterwards the session and the
/// flows return, and no learned address is lost.
pub(crate) fn stopped_for_twenty_seconds(variant: Variant) {
    if bfd::is_missing(variant) {
        return;
    }
    let world = World::new(variant, 1, 2, 1500);
    let host = &world.hosts[0];
    let (local, other) = (variant.remote(0).to_string(), variant.remote(1).to_string());
    let mut gateway = bfd::Gateway::start(&world, &format!("{}except = [\"{other}\"]\n", bfd::SETTINGS));
    let frr = bfd::Frr::start(&world.remotes[0], &variant.vtep().to_string(), &local, "");
    gateway.wait(&local, "up");
    frr.wait("up");
    for n in 0..2 {
        world.wait_for(&mut gateway.program, host, &remote_address(n));
    }
    let known = gateway.program.rows("segments")[0]["learned"].as_u64();
    let fds = |program: &mut Program| {
        std::fs::read_dir(format!("/proc/{}/fd", program.id())).expect("a running program").count()
    };
    let descriptors = fds(&mut gateway.program);
    let socket = gateway.program.path("operators.sock");

    let traffic = [0, 1].map(|n| host.spawn(&["ping", "-n", "-i", "0.005", &remote_address(n)]));
    let begin = Instant::now();
    gateway.program.signal(Signal::STOP);
    frr.wait("down");
    // Clients come meanwhile, and leave without an answer.
    for _ in 0..100 {
        let mut client = UnixStream::connect(&socket).expect("a place in the queue");
        client.write_all(b"{\"request\":\"show\",\"table\":\"ports\"}\n").expect("sent");
    }
    std::thread::sleep(STOP.saturating_sub(begin.elapsed()));
    gateway.program.signal(Signal::CONT);

    gateway.wait(&local, "up");
    frr.wait("up");
    drop(traffic);
    for n in 0..2 {
        world.wait_for(&mut gateway.program, host, &remote_address(n));
        // Some answers were lost for a second after the burst that had waited. The gateway had counted no drop of them.
        let carries = || pings(host, &remote_address(n), 1200, 50);
        assert!(eventually(WAIT_LIMIT, carries), "flows to remote {n} go on");
    }
    let now = gateway.program.rows("segments")[0]["learned"].as_u64();
    assert!(now >= known, "{now:?} addresses, {known:?} before");
    assert!(gateway.session(&local)["downs"].as_u64() >= Some(1), "{}", gateway.session(&local));
    let closed = eventually(WAIT_LIMIT, || fds(&mut gateway.program) <= descriptors);
    assert!(closed, "{} descriptors, {descriptors} before", fds(&mut gateway.program));
    let (_, log) = gateway.program.stop_with_log();
    let says = |what: &str| log.lines().any(|line| line.contains(&local) && line.contains(what));
    assert!(says("down") && says("up"), "{log}");
    print_uncaptured(&format!("{}: stopped for {:?}", variant.name, begin.elapsed()));
}

/// The names of namespaces are deleted (`ip netns delete`) while the program runs. A host's cable goes with its
/// namespace. The program's namespace stays without a name, because the program uses it.
pub(crate) fn the_name_of_the_namespace_is_deleted(variant: Variant) {
    let mut site = Site::start(variant, "", &[]);
    site.world.replace_interfaces(&mut site.program);
    site.assert_carries();
    let before = site.usage();
    let (host, own) = (site.world.hosts[1].name().to_owned(), site.world.gateway.name().to_owned());
    run(&["ip", "netns", "delete", &host]).expect();
    let lost = eventually(WAIT_LIMIT, || {
        !site.world.gateway.run(&["ip", "link", "show", "lan1"]).success
            && site.program.rows("ports").iter().any(|row| row["port"] == "lan1" && row["losses"] == 1)
    });
    assert!(lost, "{:?}", site.program.rows("ports"));
    let (world, program) = (&site.world, &mut site.program);
    world.wait_for(program, &world.hosts[0], &remote_address(0));
    assert!(pings(&world.hosts[0], &remote_address(0), 1200, 50) || pings(&world.hosts[0], &remote_address(0), 56, 50));
    run(&["ip", "netns", "add", &host]).expect();
    world.hosts[1].sysctl("net.ipv6.conf.default.disable_ipv6", "1");
    world.plug_host(1);
    site.assert_carries();

    run(&["ip", "netns", "delete", &own]).expect();
    site.assert_carries();
    let answer = site.reload(77).expect("an answer");
    assert_eq!(answer["applied"], true, "{answer}");
    site.assert_carries();
    // The name is needed to make interfaces, not to use them.
    run(&["ip", "netns", "attach", &own, &site.program.id().to_string()]).expect();
    site.world.replace_interfaces(&mut site.program);
    site.assert_carries();
    site.assert_flat(before);
    let (summary, log) = site.program.stop_with_log();
    assert_eq!(summary.json["leaked_buffers"], 0);
    for text in ["port lan1 is lost: interface lan1 was removed; it waits", "port lan1 is back after"] {
        assert!(log.contains(text), "{text}: {log}");
    }
}

/// rdma-core is upgraded under a running program: new files replace its libraries, as with a package manager, and then
/// broken ones. The NIC is reset, and a port is removed and added. The files of the system stay as they are.
pub(crate) fn rdma_core_is_upgraded(variant: Variant) {
    let places = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let Some(system) = places.iter().map(Path::new).find(|folder| folder.join("libibverbs").is_dir()) else {
        return skip_or_fail(file!(), line!(), &format!("{}: needs the providers of libibverbs", variant.name));
    };
    let folder = Library::copy(system);
    let (providers, of_system) = (folder.path("providers"), system.join("libibverbs").display().to_string());
    let search = format!("LD_LIBRARY_PATH={}", folder.path(""));
    let script = "mount --bind \"$0\" \"$1\" && shift && exec env \"$@\"";
    let wrapper = ["sh", "-c", script, &providers, &of_system, &search];
    // A NIC that holds flow rules keeps its port.
    let mut site = Site::start(variant, "[rules]\nhardware = 'off'\n", &wrapper);
    let before = site.usage();
    let maps = format!("/proc/{}/maps", site.program.id());
    let mapped = |is_deleted: bool| {
        let text = std::fs::read_to_string(&maps).expect("a running program");
        let lines = text.lines().filter(|line| line.contains(&folder.path("")));
        lines.filter(|line| line.ends_with(" (deleted)") == is_deleted).count()
    };
    assert!(mapped(false) > 0 && mapped(true) == 0, "the program uses the copies");

    for is_broken in [false, true] {
        folder.replace(is_broken);
        assert!(mapped(false) == 0 && mapped(true) > 0, "the program uses the former files");
        site.assert_carries();
        site.program.reset_nic("lan0");
        site.program.reset_nic("wan");
        site.assert_carries();
        let config = site.config.clone();
        let (lan1, rest) = config
            .split_once("name = \"lan1\"")
            .map(|(head, tail)| {
                let head = head.trim_end().trim_end_matches("[[port]]");
                let end = tail.find("[underlay]").expect("the underlay follows");
                (&tail[..end], format!("{head}{}", &tail[end..]))
            })
            .expect("a second host");
        assert!(lan1.contains("driver = \"mlx5\""), "{lan1}");
        for text in [&rest.replace(", { port = \"lan1\" }", ""), &config] {
            site.program.write_config(text);
            let answer = site.ask(&json!({ "request": "reload" })).expect("an answer");
            assert_eq!(answer["applied"], true, "{answer}");
        }
        site.assert_carries();
    }
    site.assert_flat(before);
    let summary = site.program.stop();
    assert_eq!(summary.json["ports"][0]["losses"], 2, "{}", summary.json);
}

/// A copy of the libraries of rdma-core that a program loads for an mlx5 NIC.
struct Library {
    folder: TempDir,
    names: Vec<String>,
}

impl Library {
    fn copy(system: &Path) -> Self {
        let it = Self { folder: tempfile::tempdir().expect("a folder"), names: Vec::new() };
        let mut names = Vec::new();
        for link in ["libibverbs.so.1", "libmlx5.so.1"] {
            let file = std::fs::canonicalize(system.join(link)).expect("a library");
            let name = file.file_name().and_then(|name| name.to_str()).expect("a name").to_owned();
            copy_program(&file, it.folder.path().join(&name));
            std::os::unix::fs::symlink(&name, it.folder.path().join(link)).expect("a link");
            names.push(name);
        }
        let providers = it.folder.path().join("providers");
        std::fs::create_dir(&providers).expect("a folder");
        for provider in std::fs::read_dir(system.join("libibverbs")).expect("providers").filter_map(Result::ok) {
            let name = provider.file_name().into_string().expect("a name");
            if name.starts_with("libmlx5-") {
                std::os::unix::fs::symlink(it.path("libmlx5.so.1"), providers.join(name)).expect("a link");
            }
        }
        Self { names, ..it }
    }

    fn path(&self, name: &str) -> String {
        self.folder.path().join(name).display().to_string().trim_end_matches('/').to_owned()
    }

    /// Puts new files in place of the old ones: copies of them, or the beginning of copies.
    fn replace(&self, is_broken: bool) {
        for name in &self.names {
            let (new, old) = (self.path(&format!("{name}.new")), self.path(name));
            copy_program(&old, &new);
            if is_broken {
                std::fs::File::options()
                    .write(true)
                    .open(&new)
                    .and_then(|file| file.set_len(4096))
                    .expect("a cut file");
            }
            std::fs::rename(&new, &old).expect("a new file");
        }
    }
}
