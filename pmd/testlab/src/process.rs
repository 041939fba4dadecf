use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::requirements::find_program;

/// Maximum run time in [`run`]. It only ends a hopeless wait.
const LIMIT: Duration = Duration::from_secs(300);

/// Result of a program.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The command line, for messages.
    pub command: String,
    /// True if the exit code is 0.
    pub success: bool,
    /// Exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Outcome {
    /// Returns the standard output. Panics with the whole output if the program failed.
    #[track_caller]
    pub fn expect(self) -> String {
        assert!(self.success, "{} failed ({:?}):\n{}{}", self.command, self.code, self.stdout, self.stderr);
        self.stdout
    }
}

/// Runs a program to its end, at most five minutes, without standard input.
#[track_caller]
pub fn run(arguments: &[&str]) -> Outcome {
    spawn(arguments).wait(LIMIT)
}

/// Starts a program in the background, without standard input.
#[track_caller]
pub fn spawn(arguments: &[&str]) -> Background {
    Background::start(arguments)
}

/// Copies a program that the test is going to start. Another process writes the copy: a child of another test could
/// hold a descriptor of this process that is open for writing, and then the copy cannot be executed (`ETXTBSY`).
#[track_caller]
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    let text = |path: &Path| path.to_str().expect("a path of UTF-8").to_owned();
    run(&["cp", &text(from.as_ref()), &text(to.as_ref())]).expect();
}

/// A running program, which is killed when dropped.
#[derive(Debug)]
pub struct Background {
    command: String,
    child: Child,
    stdout: Option<JoinHandle<Vec<u8>>>,
    stderr: Option<JoinHandle<Vec<u8>>>,
}

impl Background {
    #[track_caller]
    fn start(arguments: &[&str]) -> Self {
        let text = arguments.join(" ");
        let (program, rest) = arguments.split_first().expect("a program to run");
        let program = if program.contains('/') {
            PathBuf::from(program)
        } else {
            find_program(program).unwrap_or_else(|| panic!("no program '{program}' in PATH"))
        };
        let mut child = Command::new(&program)
            .args(rest)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {text}: {error}"));
        let stdout = collect(child.stdout.take().expect("was piped"));
        let stderr = collect(child.stderr.take().expect("was piped"));
        Self { command: text, child, stdout: Some(stdout), stderr: Some(stderr) }
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns whether the program still runs.
    pub fn running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Sends a signal (`libc::SIGTERM` and the like).
    pub fn signal(&self, signal: rustix::process::Signal) {
        let id = rustix::process::Pid::from_child(&self.child);
        // This fails only if the program has ended, which the caller notices.
        let _ = rustix::process::kill_process(id, signal);
    }

    /// Sends SIGTERM and waits for the end.
    #[track_caller]
    pub fn terminate(self, limit: Duration) -> Outcome {
        self.signal(rustix::process::Signal::TERM);
        self.wait(limit)
    }

    /// Sends SIGKILL and waits for the end.
    #[track_caller]
    pub fn kill(self) -> Outcome {
        self.signal(rustix::process::Signal::KILL);
        self.wait(LIMIT)
    }

    /// Waits for the end. Kills the program and panics after `limit`.
    #[track_caller]
    pub fn wait(mut self, limit: Duration) -> Outcome {
        let end = Instant::now() + limit;
        let mut pause = Duration::from_micros(200);
        let status: Option<ExitStatus> = loop {
            match self.child.try_wait().expect("a child can be waited for") {
                Some(status) => break Some(status),
                None if Instant::now() >= end => break None,
                None => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(20));
        };
        if status.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        let [stdout, stderr] = [self.stdout.take(), self.stderr.take()].map(|reader| {
            let bytes = reader.map(|thread| thread.join().unwrap_or_default()).unwrap_or_default();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        let Some(status) = status else {
            panic!("{} still ran after {limit:?}; killed. It printed:\n{stdout}{stderr}", self.command);
        };
        Outcome { command: self.command.clone(), success: status.success(), code: status.code(), stdout, stderr }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if self.running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.read_to_end(&mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_code_and_signal() {
        let outcome = run(&["sh", "-c", "echo out; echo err >&2; exit 3"]);
        assert_eq!((outcome.code, &*outcome.stdout, &*outcome.stderr), (Some(3), "out\n", "err\n"));
        let outcome = spawn(&["sleep", "60"]).terminate(Duration::from_secs(20));
        assert_eq!((outcome.success, outcome.code), (false, None));
    }

    #[test]
    #[should_panic(expected = "still ran after")]
    fn too_long() {
        spawn(&["sleep", "60"]).wait(Duration::from_millis(50));
    }
}
