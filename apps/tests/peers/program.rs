//! A program of ours under test.

use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use wirepath_testlab::{Background, Namespace, Outcome};

/// How long a program may take to stop.
const STOPPING: Duration = Duration::from_secs(30);

/// A running program with its configuration. If the test panics, what the program logged is shown.
pub(crate) struct Program {
    process: Option<Background>,
    _folder: TempDir,
}

impl Program {
    /// Starts `binary --config FILE --json` in a namespace.
    pub(crate) fn start(place: &Namespace, binary: &str, config: &str) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("config.toml");
        std::fs::write(&file, config).expect("write the configuration");
        let process = place.spawn(&[binary, "--config", file.to_str().expect("a plain path"), "--json"]);
        Self { process: Some(process), _folder: folder }
    }

    fn process(&mut self) -> &mut Background {
        self.process.as_mut().expect("not stopped yet")
    }

    /// Whether it still runs.
    pub(crate) fn running(&mut self) -> bool {
        self.process().running()
    }

    /// Process id.
    pub(crate) fn id(&mut self) -> u32 {
        self.process().id()
    }

    /// Stops it as an operator would; it must end with 0 and a summary.
    pub(crate) fn stop(self) -> Summary {
        self.stop_with(0).0
    }

    /// Stops it after a failure: it must end with 1 and a summary. The summary, and what it logged.
    pub(crate) fn stop_after_failure(self) -> (Summary, String) {
        self.stop_with(1)
    }

    fn stop_with(mut self, code: i32) -> (Summary, String) {
        let outcome = self.process.take().expect("not stopped yet").terminate(STOPPING);
        (Summary::read(&outcome, code), outcome.stderr)
    }

    /// Kills it.
    pub(crate) fn kill(mut self) {
        let outcome = self.process.take().expect("not stopped yet").kill();
        assert_eq!(outcome.code, None, "it had ended by itself: {}{}", outcome.stdout, outcome.stderr);
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(process) = self.process.take()
            && std::thread::panicking()
        {
            process.signal(rustix::process::Signal::TERM);
            std::thread::sleep(Duration::from_secs(2));
            let outcome = process.kill();
            eprintln!(
                "{} ended with {:?} and said:\n{}{}",
                outcome.command, outcome.code, outcome.stdout, outcome.stderr
            );
        }
    }
}

/// The figures that a program ends with.
#[derive(Debug)]
pub(crate) struct Summary {
    pub(crate) json: Value,
}

impl Summary {
    fn read(outcome: &Outcome, code: i32) -> Self {
        assert_eq!(outcome.code, Some(code), "{}:\n{}{}", outcome.command, outcome.stdout, outcome.stderr);
        let json = serde_json::from_str(outcome.stdout.trim()).unwrap_or_else(|error| {
            panic!("{error}: the summary is no JSON object:\n{}{}", outcome.stdout, outcome.stderr)
        });
        let summary = Self { json };
        for key in ["rx_packets", "tx_packets", "pps", "drops"] {
            assert!(summary.json.get(key).is_some(), "the summary has no {key}: {}", summary.json);
        }
        assert_eq!(summary.number("leaked_buffers"), 0, "{}", summary.json);
        summary
    }

    /// A figure of the top level.
    pub(crate) fn number(&self, key: &str) -> u64 {
        self.json[key].as_u64().unwrap_or_else(|| panic!("no number {key}: {}", self.json))
    }

    /// Drops for a reason.
    pub(crate) fn drops(&self, reason: &str) -> u64 {
        self.json["drops"].get(reason).map_or(0, |n| n.as_u64().expect("a number"))
    }
}
