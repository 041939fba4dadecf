//! `wirepath emulate`: runs any program on emulated NICs.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, getpid, getppid, kill_process, set_child_subreaper, set_parent_process_death_signal, wait,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use wirepath_control_socket::connect;
use wirepath_nic_emulator::launch::{self, Launch, LaunchError};
use wirepath_nic_emulator::topology::Topology;

use wirepath::cli::{Failure, Stop, hangup_flag, print};

/// Interval at which the running program is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Longest time for which the processes of a program whose parent has ended are killed.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

/// Longest wait for the answer to a command.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Longest answer to a command, in bytes.
const LONGEST_ANSWER: u64 = 16 << 20;

/// Runs any program on emulated NICs, with the installed libraries of rdma-core
///
/// The program finds the RDMA devices of the topology file. Their ports are joined by cables or to TAP
/// devices, interfaces and files. The emulator rejects what a real NIC would reject and logs the reason
/// to the file's `log` (default: standard error). The exit code is the program's, or 128 plus the number
/// of the signal that ended it.
#[derive(Debug, Args)]
pub struct Options {
    /// File of devices, ports, links and faults; see configs/ for examples
    #[arg(long, value_name = "FILE")]
    topology: PathBuf,

    /// How doorbells are detected, instead of the file's setting: trap loses none, queue serves them in a
    /// thread, scan is fast
    #[arg(long, value_parser = ["trap", "queue", "scan"])]
    doorbells: Option<String>,

    /// Send a command to a running program through the file's `control` socket: "counters", or a fault such as
    /// "kind = 'port-down'"
    #[arg(long, value_name = "REQUEST", conflicts_with = "program")]
    command: Option<String>,

    /// The former name of `command`
    #[arg(long, hide = true, value_name = "REQUEST")]
    ask: Option<String>,

    /// Process of this program that ends all processes of the program when this parent ends
    #[arg(long, hide = true, value_name = "PID")]
    supervise_for: Option<i32>,

    /// Process that becomes the program, and ends with this parent
    #[arg(long, hide = true, value_name = "PID")]
    parent: Option<i32>,

    /// The program and its arguments
    #[arg(last = true, required_unless_present_any = ["command", "ask"])]
    program: Vec<OsString>,
}

/// Runs a program on emulated NICs, or sends a command to the NICs of a running one.
pub fn run(options: &Options, _: bool) -> Result<(), Failure> {
    let Options { topology, doorbells, command, ask, supervise_for, parent, program } = options;
    if ask.is_some() {
        return Err(Failure::usage("--ask is now called --command"));
    }
    if let Some(parent) = parent {
        return Err(exec_program(*parent, program));
    }
    if let Some(parent) = supervise_for {
        return supervise(*parent, topology, program);
    }
    match command {
        Some(request) => send_command(topology, request),
        None => run_program(topology, doorbells.as_deref(), program),
    }
}

/// Runs a program on the NICs of a topology file until it ends. Returns its exit code, or 128 plus the signal
/// number if a signal ended it.
fn run_program(topology: &Path, doorbells: Option<&str>, program: &[OsString]) -> Result<(), Failure> {
    let name = program.first().ok_or_else(|| Failure::usage("no program to run"))?;
    let launch = Launch::new(topology).map_err(|error| match error {
        wrong @ (LaunchError::Topology(_) | LaunchError::File { .. }) => Failure::usage(wrong),
        other => Failure::failed(other),
    })?;
    // The program receives the terminal's signals itself and may take time to end. This process ends only
    // after it.
    let stop = Stop::on_signals()?;
    let mut command = launch.command("/proc/self/exe");
    command.args(own_arguments("--supervise-for", topology, program));
    if let Some(doorbells) = doorbells {
        command.env(launch::DOORBELLS, doorbells);
    }
    let failed = |error| Failure::failed(format!("cannot run {}: {error}", name.display()));
    let mut child = command.spawn().map_err(failed)?;
    // A hang-up of the terminal reaches the program itself, which may go on.
    hangup_flag();
    let mut signalled = false;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if stop.requested() {
            if !signalled && let Some(pid) = Pid::from_raw(child.id() as i32) {
                signalled = true;
                let _ = kill_process(pid, Signal::TERM);
            }
            std::thread::sleep(POLL_INTERVAL);
        } else {
            stop.wait(POLL_INTERVAL);
        }
    };
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    if code == 0 { Ok(()) } else { Err(Failure::Ended(code as u8)) }
}

/// Arguments with which this program starts itself again, as a child that knows its parent.
fn own_arguments(role: &str, topology: &Path, program: &[OsString]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["emulate".into(), "--topology".into(), topology.into(), role.into()];
    arguments.extend([std::process::id().to_string().into(), "--".into()]);
    arguments.extend(program.iter().cloned());
    arguments
}

/// Runs the program until it ends, and returns its exit code as [`run_program`] does. When `parent` ends, however it
/// ends, this process kills the program and all of its descendants: the parent owns the files of the devices.
///
/// A descendant whose own parent has ended becomes a child of this process (`PR_SET_CHILD_SUBREAPER`, prctl(2)).
fn supervise(parent: i32, topology: &Path, program: &[OsString]) -> Result<(), Failure> {
    let system = |what: &'static str| move |error| Failure::failed(format!("{what}: {error}"));
    let terminate = Arc::new(AtomicBool::new(false));
    let handled = |signal, flag| signal_hook::flag::register(signal, flag).map_err(system("cannot handle signals"));
    handled(SIGTERM, Arc::clone(&terminate))?;
    // The program gets these signals of the terminal itself, and decides when it ends.
    for signal in [SIGINT, SIGQUIT, SIGHUP] {
        handled(signal, Arc::default())?;
    }
    set_child_subreaper(Some(getpid())).map_err(|error| system("cannot keep the processes")(error.into()))?;
    // This program starts itself again, and executes the program there (`exec_program`).
    let mut command = Command::new("/proc/self/exe");
    command.args(own_arguments("--parent", topology, program));
    let child = command.spawn().map_err(system("cannot start a process"))?;
    let child = Pid::from_raw(child.id() as i32);
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some((ended, status))) if Some(ended) == child => {
                let code = status.exit_status().unwrap_or_else(|| 128 + status.terminating_signal().unwrap_or(0));
                return if code == 0 { Ok(()) } else { Err(Failure::Ended(code as u8)) };
            }
            // A descendant has ended.
            Ok(Some(_)) => continue,
            Ok(None) | Err(Errno::INTR) => {}
            Err(error) => return Err(system("cannot wait for the program")(error.into())),
        }
        if Pid::as_raw(getppid()) != parent {
            kill_descendants();
            return Err(Failure::failed("the parent process has ended"));
        }
        if terminate.swap(false, Ordering::Relaxed)
            && let Some(child) = child
        {
            let _ = kill_process(child, Signal::TERM);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Kills all descendants of this process, which becomes the parent of each of them in turn.
fn kill_descendants() {
    let end = Instant::now() + KILL_TIMEOUT;
    while Instant::now() < end {
        for child in children() {
            let _ = kill_process(child, Signal::KILL);
        }
        // Only a process without children gets an error. A child that ends leaves its own children to this process.
        while matches!(wait(WaitOptions::NOHANG), Ok(Some(_))) {}
        if matches!(wait(WaitOptions::NOHANG), Err(Errno::CHILD)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the children of this process. In `/proc/PID/stat`, the parent is the second word behind the name.
fn children() -> Vec<Pid> {
    let own = std::process::id().to_string();
    let is_child = |pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.split_whitespace().nth(1) == Some(&*own))
    };
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(is_child).filter_map(Pid::from_raw).collect()
}

/// Replaces this process by the program. The kernel kills it when `parent` ends, however it ends
/// (`PR_SET_PDEATHSIG`, prctl(2)).
fn exec_program(parent: i32, program: &[OsString]) -> Failure {
    let Some((name, arguments)) = program.split_first() else { return Failure::usage("no program to run") };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Failure::failed(format!("cannot follow the parent process: {error}"));
    }
    // The parent may have ended before the call.
    if Pid::as_raw(getppid()) != parent {
        return Failure::failed("the parent process has ended");
    }
    let error = Command::new(name).args(arguments).exec();
    // Exit codes as in a shell: 127 if the program was not found, 126 if it cannot be executed.
    Failure::NotRun {
        code: if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 },
        message: format!("cannot run {}: {error}", name.display()),
    }
}

/// Sends a command to the NICs of a running program, through the control socket of its topology. The command
/// is `counters` or a fault in topology syntax.
fn send_command(topology: &Path, request: &str) -> Result<(), Failure> {
    let read = Topology::load(topology).map_err(|error| Failure::usage(error.to_string()))?;
    let socket = read.control.ok_or_else(|| {
        Failure::usage(format!(
            "{}: there is no control = \"FILE\", the socket for commands to a running program",
            topology.display()
        ))
    })?;
    let answer = ask(&socket, request)?;
    print(&answer)?;
    if answer.starts_with("refused") { Err(Failure::Ended(2)) } else { Ok(()) }
}

/// Sends a request to the NICs of a running program through their control socket, and returns the answer.
pub(super) fn ask(socket: &Path, request: &str) -> Result<String, Failure> {
    let failed = |error| {
        Failure::failed(format!(
            "{}: {error}; is a program running on these NICs, and from this folder?",
            socket.display()
        ))
    };
    let mut stream = connect(socket, ANSWER_TIMEOUT).map_err(failed)?;
    stream.write_all(request.as_bytes()).map_err(failed)?;
    stream.shutdown(Shutdown::Write).map_err(failed)?;
    let mut answer = String::new();
    stream.take(LONGEST_ANSWER).read_to_string(&mut answer).map_err(failed)?;
    Ok(answer)
}
