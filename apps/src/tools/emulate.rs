//! `wirepath emulate`: any program on emulated NICs.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::time::Duration;

use wirepath_nic_emulator::launch::{self, Launch, LaunchError};
use wirepath_nic_emulator::topology::Topology;

use crate::cli::{Failure, Stop, print};

/// How often a running program is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Runs a program on the NICs of a topology file, to its end; its exit code is ours, 128 and the signal's number if one ended it.
pub fn run(topology: &Path, doorbells: Option<&str>, program: &[OsString]) -> Result<(), Failure> {
    let (name, arguments) = program.split_first().ok_or_else(|| Failure::usage("no program to run"))?;
    let launch = Launch::new(topology).map_err(|error| match error {
        wrong @ (LaunchError::Topology(_) | LaunchError::File { .. }) => Failure::usage(wrong),
        other => Failure::failed(other),
    })?;
    // The program gets the terminal's signals itself, and may take its time to end: only then is there an end here.
    let stop = Stop::on_signals()?;
    let mut command = launch.command(name);
    command.args(arguments);
    if let Some(doorbells) = doorbells {
        command.env(launch::DOORBELLS, doorbells);
    }
    let failed = |error| Failure::failed(format!("cannot run {}: {error}", name.display()));
    // As a shell has it: a program that is not there, and one that cannot be run.
    let mut child = command.spawn().map_err(|error| Failure::NotRun {
        code: if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 },
        message: format!("cannot run {}: {error}", name.display()),
    })?;
    let mut told = false;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            break status;
        }
        if stop.requested() {
            if !told && let Some(pid) = rustix::process::Pid::from_raw(child.id() as i32) {
                told = true;
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
            std::thread::sleep(LOOK);
        } else {
            stop.wait(LOOK);
        }
    };
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    if code == 0 { Ok(()) } else { Err(Failure::Ended(code as u8)) }
}

/// Asks the NICs of a running program, through the control socket of its topology: `counters`, or a fault as a topology file has it.
pub fn ask(topology: &Path, request: &str) -> Result<(), Failure> {
    let read = Topology::load(topology).map_err(|error| Failure::usage(error.to_string()))?;
    let socket = read.control.ok_or_else(|| {
        Failure::usage(format!(
            "{}: there is no control = \"FILE\", the socket by which a running program is asked",
            topology.display()
        ))
    })?;
    let failed = |error| {
        Failure::failed(format!(
            "{}: {error}; is a program running on these NICs, and from this folder?",
            socket.display()
        ))
    };
    let mut stream = UnixStream::connect(&socket).map_err(failed)?;
    stream.write_all(request.as_bytes()).map_err(failed)?;
    stream.shutdown(Shutdown::Write).map_err(failed)?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).map_err(failed)?;
    print(&answer)?;
    if answer.starts_with("refused") { Err(Failure::Ended(2)) } else { Ok(()) }
}
