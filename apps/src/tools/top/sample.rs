//! Samples of a running program, taken by a thread of their own, so that a program that does not answer never
//! holds the keyboard.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use wirepath::cli::Failure;
use wirepath::control_socket::{Client, Rows};

/// Rows of a table that are asked for at most. A program may have a million rules.
pub(super) const MAX_ROWS: u64 = 4096;
/// Tables that every sample has.
const ALWAYS: [&str; 4] = ["ports", "workers", "drops", "queues"];
/// Time until the second sample at most, so that the first rates appear soon.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);

/// Properties of the program that do not change.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    pub(super) name: String,
    pub(super) pid: String,
    pub(super) configuration: String,
    /// Time at which the program started, by the clock of this machine.
    pub(super) started: Option<Instant>,
    /// Names of its tables.
    pub(super) tables: Vec<String>,
}

/// Rows of all watched tables, each with the time at which it was read.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample(pub(super) HashMap<&'static str, (Instant, Rows)>);

/// The thread that takes samples.
#[derive(Debug)]
pub(super) struct Sampler {
    /// Samples; an error is the last message.
    pub(super) samples: Receiver<Result<Sample, Failure>>,
    /// True if samples have the table of rules, which may be long.
    pub(super) with_rules: Arc<AtomicBool>,
    /// Ends the thread when it is dropped.
    _end: SyncSender<()>,
}

impl Program {
    /// Asks the program for its properties.
    pub(super) fn ask(client: &mut Client) -> Result<Self, Failure> {
        let status = client.ask(&json!({ "request": "status" }))?;
        let tables = client.ask(&json!({ "request": "tables" }))?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let uptime = status["uptime"].as_f64().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let names = tables["tables"].as_array().into_iter().flatten().filter_map(|table| text(&table["name"]));
        Ok(Self {
            name: text(&status["program"]).unwrap_or_else(|| "?".to_owned()),
            pid: status["pid"].to_string(),
            configuration: text(&status["configuration"]).unwrap_or_else(|| "no configuration".to_owned()),
            started: uptime.and_then(|uptime| Instant::now().checked_sub(uptime)),
            tables: names.collect(),
        })
    }

    pub(super) fn has(&self, table: &str) -> bool {
        self.tables.iter().any(|name| name == table)
    }
}

impl Sampler {
    /// Starts the thread.
    pub(super) fn start(mut client: Client, program: &Program, interval: Duration) -> Result<Self, Failure> {
        let (sender, samples) = sync_channel(1);
        let (end, ended) = sync_channel::<()>(0);
        let with_rules = Arc::new(AtomicBool::new(false));
        let wanted = Arc::clone(&with_rules);
        let mut tables = ALWAYS.to_vec();
        tables.extend(program.has("segments").then_some("segments"));
        let body = move || {
            let mut wait = interval.min(FIRST_INTERVAL);
            loop {
                let begun = Instant::now();
                let rules = wanted.load(Ordering::Relaxed).then_some("rules");
                let sample = take(&mut client, tables.iter().copied().chain(rules));
                let failed = sample.is_err();
                if sender.send(sample).is_err() || failed {
                    return;
                }
                let left = wait.saturating_sub(begun.elapsed());
                if ended.recv_timeout(left) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                wait = interval;
            }
        };
        let thread = std::thread::Builder::new().name("samples".to_owned()).spawn(body);
        thread.map_err(|error| Failure::failed(format!("cannot start a thread: {error}")))?;
        Ok(Self { samples, with_rules, _end: end })
    }
}

fn take(client: &mut Client, tables: impl Iterator<Item = &'static str>) -> Result<Sample, Failure> {
    let table = |table| Ok((table, (Instant::now(), client.show(table, &[], Some(MAX_ROWS))?)));
    tables.map(table).collect::<Result<_, _>>().map(Sample)
}
