//! The file with what the gateway has learned, for its next process.
//!
//! The control thread collects facts in parts, and a thread of its own writes the file. It replaces the former one only
//! when it is complete, so a process that is killed leaves a whole file. The first line has the format and the time of
//! the writing, the last one the number of facts. Each line between them is one fact.
//!
//! The time is that of the clock since boot, with the boot's identifier, so a changed system clock does not matter.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, BufWriter, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use wirepath_pipeline::registry::{Column, Row, TableSpec, Unit};
use wirepath_pipeline::tunnel::{Fact, GatewayControl, Restored, StatePass};
use wirepath_pipeline::{ControlPlane, PortInfo};
use wirepath_settings::{ConfigError, ConfigTable, Integer, Key, Required, Settings, Text, WithDefault};

use super::exchange::lock;
use wirepath::cli::Failure;

/// Version of the file. A file of another version is not read.
const FORMAT: u64 = 1;
/// Longest file in bytes that is read. All tables together have fewer than 300 000 facts of about 100 bytes.
const MAX_LEN: u64 = 64 << 20;
/// Minimum time between two log messages about a file that cannot be written.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

const FILE: Key<Required<Text>> = Key::text("file", "a path")
    .required()
    .about("Path of the file. Its folder must exist, and the program's user must be able to write there.");
const INTERVAL: Key<WithDefault<Integer<u32>>> = Key::integer("interval", 1..=3600)
    .unit("s")
    .default(5)
    .about("Seconds from one writing of the file to the next. A program that stops writes it once more.");
const MAX_AGE: Key<WithDefault<Integer<u32>>> = Key::integer("max_age", 1..=86_400)
    .unit("s")
    .default(60)
    .about("Age in seconds up to which a file is read at the start. An older one is ignored.");

/// Description of the table `[state]`.
pub static STATE: ConfigTable = ConfigTable {
    name: "state",
    about: "A file with learned addresses, remotes, bindings and path MTUs. A gateway that is started again goes on \
            with them, so frames to known stations are not flooded. A file from before the last boot is ignored.",
    absent: "what was learned is lost with the process",
    keys: &[&FILE, &INTERVAL, &MAX_AGE],
    example: "[state]\nfile = \"/run/wirepath/tunnel-gateway.state\"\ninterval = 5\nmax_age = 60\n",
    ..ConfigTable::EMPTY
};

/// The table `[state]` of a configuration, which [`STATE`] describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSettings {
    file: PathBuf,
    interval: Duration,
    max_age: Duration,
}

impl StateSettings {
    /// Reads the table from the top-level table; `None`: there is none.
    ///
    /// # Errors
    /// If a value is wrong.
    pub fn read(top: &Settings<'_>) -> Result<Option<Self>, ConfigError> {
        let Some(table) = top.subtable(&STATE)? else { return Ok(None) };
        table.complete(|table| {
            let seconds = |value: u32| Duration::from_secs(value.into());
            let (interval, max_age) = (seconds(table.read(&INTERVAL)?), seconds(table.read(&MAX_AGE)?));
            Ok(Some(Self { file: table.read(&FILE)?.into(), interval, max_age }))
        })
    }

    /// Checks that the file can be written.
    ///
    /// # Errors
    /// The reason why it cannot.
    pub fn check(&self) -> Result<(), Failure> {
        let folder = folder(&self.file);
        let says = |why: &dyn std::fmt::Display| Failure::failed(format!("state.file: {}: {why}", folder.display()));
        if !folder.is_dir() {
            return Err(says(&"the folder does not exist"));
        }
        rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)
            .map_err(|error| says(&io::Error::from(error)))
    }
}

/// Returns the folder of a file.
fn folder(file: &Path) -> &Path {
    match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

pub(super) static TABLE: TableSpec = TableSpec {
    name: "state",
    about: "File with what the gateway has learned, for its next process",
    metric: Some("state"),
    columns: &[
        Column::key("file", "Path of the file"),
        Column::gauge("age", Unit::Seconds, "Seconds since it was written; empty before the first time"),
        Column::gauge("facts", Unit::None, "Addresses, remotes, bindings and path MTUs in it"),
        Column::counter("written", Unit::None, "Times that it was written"),
        Column::counter("failures", Unit::None, "Times that it could not be written"),
        Column::counter("skipped", Unit::None, "Times that the writing before took too long"),
        Column::gauge("restored_addresses", Unit::None, "Ethernet addresses known from the former process"),
        Column::gauge("restored_remotes", Unit::None, "Learned remotes known from it"),
        Column::gauge("restored_bindings", Unit::None, "IP addresses known from it"),
        Column::gauge("restored_path_mtus", Unit::None, "Path MTUs known from it"),
        Column::gauge("left_out", Unit::None, "Facts of it that were too old, had no place or exceeded a limit"),
    ],
};

/// Reports of the writing thread.
#[derive(Debug, Default)]
struct Status {
    written_at: Option<Instant>,
    facts: usize,
    written: u64,
    failures: u64,
}

/// The file of a running gateway.
#[derive(Debug)]
pub(super) struct StateFile {
    settings: StateSettings,
    restored: Restored,
    next: Instant,
    pass: Option<StatePass>,
    skipped: u64,
    status: Arc<Mutex<Status>>,
    sender: Option<SyncSender<Vec<Fact>>>,
    thread: Option<JoinHandle<()>>,
}

impl StateFile {
    /// Restores what a young file has, and begins to write the file. Call this before the workers start.
    ///
    /// # Errors
    /// If the folder cannot be written, or there is no room for a thread.
    pub(super) fn start(
        settings: StateSettings,
        gateway: &mut GatewayControl,
        ports: &[PortInfo],
    ) -> Result<Self, Failure> {
        settings.check()?;
        let mut restored = Restored::default();
        let name = settings.file.display();
        match read(&settings.file, settings.max_age) {
            Ok(Some((facts, age))) => {
                let elapsed = u32::try_from(age.as_secs()).unwrap_or(u32::MAX);
                restored = gateway.restore(&facts, ports, elapsed, 0);
                let Restored { addresses, remotes, bindings, left_out, .. } = restored;
                tracing::info!(
                    "{name}, {} ms old: {addresses} addresses, {remotes} remotes and {bindings} bindings are known, \
                     {left_out} facts are left out",
                    age.as_millis()
                );
            }
            Ok(None) => {}
            Err(why) => tracing::warn!("{name} is not used: {why}"),
        }
        let status = Arc::new(Mutex::new(Status::default()));
        let (sender, receiver) = mpsc::sync_channel::<Vec<Fact>>(1);
        let (file, shared) = (settings.file.clone(), Arc::clone(&status));
        let work = move || {
            let mut logged = None::<Instant>;
            let mut is_failing = false;
            for facts in receiver {
                let result = write(&file, &facts);
                let mut status = lock(&shared);
                match result {
                    Ok(()) => {
                        (status.written_at, status.facts) = (Some(Instant::now()), facts.len());
                        status.written += 1;
                        if std::mem::take(&mut is_failing) {
                            tracing::info!("{} is written again", file.display());
                            logged = None;
                        }
                    }
                    Err(error) => {
                        status.failures += 1;
                        is_failing = true;
                        if logged.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                            logged = Some(Instant::now());
                            tracing::warn!("{} cannot be written: {error}", file.display());
                        }
                    }
                }
            }
        };
        let thread = std::thread::Builder::new().name("state".to_owned()).spawn(work);
        let thread = thread.map_err(|error| Failure::failed(format!("thread for the state file: {error}")))?;
        Ok(Self {
            next: Instant::now() + settings.interval,
            settings,
            restored,
            pass: None,
            skipped: 0,
            status,
            sender: Some(sender),
            thread: Some(thread),
        })
    }

    /// Collects a part of the facts when it is time.
    pub(super) fn tick(&mut self, gateway: &mut GatewayControl, plane: &ControlPlane) {
        if self.pass.is_none() {
            let now = Instant::now();
            if now < self.next {
                return;
            }
            self.next = now + self.settings.interval;
            self.pass = Some(StatePass::default());
        }
        let Some(pass) = &mut self.pass else { return };
        if !gateway.collect_state(pass, plane.ports(), plane.seconds()) {
            return;
        }
        if let (Some(pass), Some(sender)) = (self.pass.take(), &self.sender)
            && let Err(TrySendError::Full(_)) = sender.try_send(pass.into_facts())
        {
            self.skipped += 1;
        }
    }

    /// Writes the file for the last time, while the workers still run.
    pub(super) fn finish(&mut self, gateway: &mut GatewayControl, plane: &ControlPlane) {
        let mut pass = StatePass::default();
        while !gateway.collect_state(&mut pass, plane.ports(), plane.seconds()) {}
        if let Some(sender) = self.sender.take() {
            // It only fails if the thread has ended.
            let _ = sender.send(pass.into_facts());
        }
    }

    /// Returns the row of [`TABLE`].
    pub(super) fn row(&self) -> Row {
        let status = lock(&self.status);
        vec![
            self.settings.file.display().to_string().into(),
            status.written_at.map(|at| at.elapsed().as_secs()).into(),
            status.facts.into(),
            status.written.into(),
            status.failures.into(),
            self.skipped.into(),
            self.restored.addresses.into(),
            self.restored.remotes.into(),
            self.restored.bindings.into(),
            self.restored.path_mtus.into(),
            self.restored.left_out.into(),
        ]
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by itself.
            let _ = thread.join();
        }
    }
}

/// Identifier of this boot, and milliseconds since it.
fn boot_time() -> io::Result<(String, u64)> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let now = clock_gettime(ClockId::Boottime);
    let millis = now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000;
    Ok((boot.trim().to_owned(), millis))
}

/// Writes facts to a new file, which then replaces the other one.
fn write(path: &Path, facts: &[Fact]) -> io::Result<()> {
    let (boot, at) = boot_time()?;
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    // A process that was killed while it wrote has left one.
    match std::fs::remove_file(&new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
    let written = (|| {
        let mut out = BufWriter::with_capacity(1 << 16, file);
        writeln!(out, "{}", json!({ "format": FORMAT, "boot": boot, "at": at }))?;
        for fact in facts {
            writeln!(out, "{}", fact.to_json())?;
        }
        writeln!(out, "{}", json!({ "facts": facts.len() }))?;
        out.flush()
    })();
    let renamed = written.and_then(|()| std::fs::rename(&new, path));
    if renamed.is_err() {
        // The disk may be full.
        let _ = std::fs::remove_file(&new);
    }
    renamed
}

/// Reads a file. Returns its facts and its age, or `None` if there is no file. Facts of another form are left out.
fn read(path: &Path, max_age: Duration) -> Result<Option<(Vec<Fact>, Duration)>, String> {
    let text = |error: io::Error| error.to_string();
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(text(error)),
    };
    check_owner(&file, path)?;
    let mut lines = BufReader::new(io::Read::take(file, MAX_LEN)).lines();
    let mut next = || -> Result<Value, String> {
        let line = lines.next().ok_or("it is not complete")?.map_err(text)?;
        serde_json::from_str(&line).map_err(|_| "it is not complete".to_owned())
    };
    let header = next()?;
    if header["format"].as_u64() != Some(FORMAT) {
        return Err("it has another format".to_owned());
    }
    let (boot, now) = boot_time().map_err(text)?;
    if header["boot"].as_str() != Some(&boot) {
        return Err("it was written before the last boot".to_owned());
    }
    let age = header["at"].as_u64().and_then(|at| now.checked_sub(at)).map(Duration::from_millis);
    let age = age.ok_or("it has no valid time")?;
    if age > max_age {
        return Err(format!("it is {} s old, more than state.max_age", age.as_secs()));
    }
    let (mut facts, mut count) = (Vec::new(), 0_u64);
    loop {
        let line = next()?;
        if line.is_object() {
            return if line["facts"].as_u64() == Some(count) {
                Ok(Some((facts, age)))
            } else {
                Err("it has lost lines".to_owned())
            };
        }
        count += 1;
        facts.extend(Fact::from_json(&line));
    }
}

/// Checks that nobody but root, the program's user and the owner of the folder has written a file.
fn check_owner(file: &File, path: &Path) -> Result<(), String> {
    let about = file.metadata().map_err(|error| error.to_string())?;
    if !about.is_file() {
        return Err("it is no regular file".to_owned());
    }
    let of_folder = std::fs::metadata(folder(path)).map_err(|error| error.to_string())?.uid();
    if ![0, rustix::process::geteuid().as_raw(), of_folder].contains(&about.uid()) || about.mode() & 0o022 != 0 {
        return Err("another user can write it".to_owned());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use wirepath_pipeline::tunnel::Place;
    use wirepath_wire::MacAddr;

    use super::*;

    const YOUNG: Duration = Duration::from_secs(60);

    fn facts(count: u64) -> Vec<Fact> {
        let mac = |n| MacAddr::from_u64(0x0200_0000_0000 | n);
        let address = |n| Fact::Address {
            segment: "blue".to_owned(),
            mac: mac(n),
            place: Place::Port("lan".to_owned(), None),
            age: 3,
        };
        (0..count).map(address).collect()
    }

    #[test]
    fn a_file_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        assert_eq!(read(&path, YOUNG), Ok(None));
        for count in [0, 1, 70_000] {
            write(&path, &facts(count)).unwrap();
            let (found, age) = read(&path, YOUNG).unwrap().unwrap();
            assert_eq!(found, facts(count));
            assert!(age < YOUNG);
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        }
        std::fs::write(folder.path().join("state.new"), "a rest").unwrap();
        write(&path, &facts(2)).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        write(&path, &facts(3)).unwrap();
        let whole = std::fs::read_to_string(&path).unwrap();
        let why = |text: &str| {
            std::fs::write(&path, text).unwrap();
            read(&path, YOUNG).unwrap_err()
        };
        for end in 0..whole.len() - 1 {
            let why = why(&whole[..end]);
            assert!(["it is not complete", "it has another format"].contains(&why.as_str()), "{end}: {why}");
        }
        let lines: Vec<&str> = whole.lines().collect();
        assert_eq!(why(&[&lines[..2], &lines[3..]].concat().join("\n")), "it has lost lines");
        let header: Value = serde_json::from_str(lines[0]).unwrap();
        let with = |key: &str, value: Value| {
            let mut header = header.clone();
            header[key] = value;
            format!("{header}\n{}", lines[1..].join("\n"))
        };
        assert_eq!(why(&with("format", 2.into())), "it has another format");
        assert_eq!(why(&with("boot", "another".into())), "it was written before the last boot");
        let at = header["at"].as_u64().unwrap();
        assert_eq!(why(&with("at", (at + 3_600_000).into())), "it has no valid time", "from the future");
        assert_eq!(why(&with("at", Value::Null)), "it has no valid time");
        let old = why(&with("at", at.saturating_sub(61_000).into()));
        assert!(old.ends_with("more than state.max_age") || at < 61_000, "{old}");
        std::fs::write(&path, format!("{}\n[\"a later fact\",1]\n{{\"facts\":1}}\n", lines[0])).unwrap();
        assert_eq!(read(&path, YOUNG).unwrap().unwrap().0, [], "facts of later versions are left out");

        std::fs::write(&path, &whole).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o620)).unwrap();
        assert_eq!(read(&path, YOUNG), Err("another user can write it".to_owned()));
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(read(&path, YOUNG).is_err(), "a link");
        assert_eq!(read(folder.path(), YOUNG), Err("it is no regular file".to_owned()));
    }
}
