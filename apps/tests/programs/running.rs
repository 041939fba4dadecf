//! A program that runs for a test.

use std::fs::File;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;
use wirepath_nic_emulator::launch;
use wirepath_testlab::eventually;

/// Generous: other programs may use the processors.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// A running program with its configuration and log in a folder of its own. It is killed at the end.
pub(crate) struct Running {
    folder: TempDir,
    child: Child,
    socket: &'static str,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Running {
    /// Starts `binary --json --config config.toml` with this text. Returns when it listens on `socket`, a name in the
    /// folder.
    #[track_caller]
    pub(crate) fn start(folder: TempDir, binary: &str, text: &str, socket: &'static str) -> Self {
        Self::start_command(folder, Command::new(binary), text, socket)
    }

    /// Starts the program like [`Self::start`], on emulated NICs.
    #[track_caller]
    pub(crate) fn start_emulated(binary: &str, topology: &str, text: &str, socket: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("nics.toml"), topology).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
        command.arg("emulate").arg("--topology").arg(folder.path().join("nics.toml")).args(["--", binary]);
        command.env(launch::PRELOAD, launch::build_library());
        Self::start_command(folder, command, text, socket)
    }

    #[track_caller]
    fn start_command(folder: TempDir, mut command: Command, text: &str, socket: &'static str) -> Self {
        let config = folder.path().join("config.toml");
        std::fs::write(&config, text).unwrap();
        command.args(["--json", "--config"]).arg(config).stdin(Stdio::null()).stdout(Stdio::piped());
        let child = command.stderr(File::create(folder.path().join("log")).unwrap()).spawn().unwrap();
        let it = Self { folder, child, socket };
        assert!(eventually(WAIT_LIMIT, || UnixStream::connect(it.socket()).is_ok()), "it listens: {}", it.log());
        it
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path of a file in the folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.path(self.socket)
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    /// Returns the process ID.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Stops the program, which must end with exit code 0, and returns its summary.
    #[track_caller]
    pub(crate) fn stop(mut self) -> Value {
        self.signal(Signal::TERM);
        let mut text = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{}", self.log());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }
}
