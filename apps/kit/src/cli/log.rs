//! The log: one record for each event, on standard error, by way of the bounded queue.
//!
//! | Format | A record |
//! |---|---|
//! | `text` | `2026-11-23T12:35:37.123456Z INFO  wirepath_pmd::port: message key=value` |
//! | `json` | an object on one line: `time`, `level`, `module`, `message`, and `fields` if there are any |
//! | `journald` | `<6>wirepath_pmd::port: message key=value`; the number is the priority (sd-daemon(3)) |
//!
//! Times are RFC 3339 in UTC with microseconds. The journal records times itself. Control characters are escaped.
//! Further lines of a message are indented in `text` and `journald`, so that no message looks like two.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::io::IsTerminal;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::fstat;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Registry, reload};
use wirepath_settings::{Choice, ConfigError, ConfigTable, Key, Settings, Text};

use super::live;
use super::output::{json_line, sanitized};

/// Form of the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// For people: time, level, module and message
    Text,
    /// One JSON object on each line
    Json,
    /// For the journal of systemd: priority, module and message
    Journald,
}

impl Format {
    const ALL: [Self; 3] = [Self::Text, Self::Json, Self::Journald];

    /// Returns `Journald` if standard error is the stream that systemd connected to the journal (systemd.exec(5),
    /// `JOURNAL_STREAM`), else `Text`.
    pub fn detect() -> Self {
        let stream = std::env::var("JOURNAL_STREAM").ok();
        let journal = stream.as_deref().and_then(device_and_inode);
        let own = fstat(std::io::stderr()).ok().map(|stat| (stat.st_dev, stat.st_ino));
        if journal.is_some() && journal == own { Self::Journald } else { Self::Text }
    }
}

/// Reads a value of `JOURNAL_STREAM`: device and inode in decimal, with a colon between.
fn device_and_inode(text: &str) -> Option<(u64, u64)> {
    let (device, inode) = text.split_once(':')?;
    Some((device.parse().ok()?, inode.parse().ok()?))
}

/// Levels of the log: one for all modules, and others for modules and those inside them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    all: LevelFilter,
    modules: BTreeMap<String, LevelFilter>,
}

impl Levels {
    /// One level for all modules.
    pub fn all(level: LevelFilter) -> Self {
        Self { all: level, modules: BTreeMap::new() }
    }

    /// Sets the level of a module and those inside it, or of all modules that have no level of their own.
    fn set(&mut self, level: LevelFilter, module: Option<&str>) -> Result<(), String> {
        let Some(module) = module else {
            self.all = level;
            return Ok(());
        };
        let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if !module.split("::").all(|part| !part.is_empty() && part.chars().all(word)) {
            return Err(format!("found module \"{module}\", expected a path such as wirepath_pmd::port"));
        }
        if self.modules.len() >= MAX_MODULES && !self.modules.contains_key(module) {
            return Err(format!("{MAX_MODULES} modules have a level already"));
        }
        self.modules.insert(module.to_owned(), level);
        Ok(())
    }

    /// Takes the level of a module from `other`, where it may have none, or all levels.
    fn reset(&mut self, other: &Self, module: Option<&str>) -> Result<(), String> {
        let Some(module) = module else {
            self.clone_from(other);
            return Ok(());
        };
        let old = self.modules.remove(module);
        match other.modules.get(module) {
            Some(level) => self.set(*level, Some(module)),
            None => old.map(drop).ok_or_else(|| format!("module \"{module}\" has no level of its own")),
        }
    }

    fn targets(&self) -> Targets {
        Targets::new().with_default(self.all).with_targets(self.modules.clone())
    }
}

impl Default for Levels {
    fn default() -> Self {
        Self::all(LevelFilter::INFO)
    }
}

/// Maximum number of modules with a level of their own.
const MAX_MODULES: usize = 100;

impl FromStr for Levels {
    type Err = String;

    /// Reads `LEVEL`, or `MODULE=LEVEL`, or several of them with commas between.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut levels = Self::default();
        for part in text.split(',') {
            match part.split_once('=') {
                Some((module, level)) => levels.set(parse_level(level.trim())?, Some(module.trim()))?,
                None => levels.set(parse_level(part.trim())?, None)?,
            }
        }
        Ok(levels)
    }
}

impl fmt::Display for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.all)?;
        self.modules.iter().try_for_each(|(module, level)| write!(f, ",{module}={level}"))
    }
}

/// Reads the name of a level.
pub fn parse_level(name: &str) -> Result<LevelFilter, String> {
    match name {
        "off" => Ok(LevelFilter::OFF),
        "error" => Ok(LevelFilter::ERROR),
        "warn" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        "trace" => Ok(LevelFilter::TRACE),
        _ => Err(format!("found level \"{name}\", expected off, error, warn, info, debug or trace")),
    }
}

const FORMAT_KEY: Key<Choice<Format>> = Key::choice(
    "format",
    &[
        ("text", Format::Text, "time, level, module and message, for people"),
        ("json", Format::Json, "one JSON object on each line"),
        ("journald", Format::Journald, "priority, module and message, for the journal of systemd"),
    ],
)
.absent("\"journald\" if systemd reads the log, else \"text\"")
.about("Form of the records. The option `--log-format` goes before it.");
const LEVEL_KEY: Key<Text> = Key::text(
    "level",
    "off, error, warn, info, debug or trace; also MODULE=LEVEL, with commas",
)
.absent("\"info\"")
.about("Least severe level that is logged, of all modules or of single ones. The option `--log-level` goes before it.");

/// Description of the table `[log]`.
pub static LOG: ConfigTable = ConfigTable {
    name: "log",
    about: "The log, which goes to standard error.",
    absent: "every key has its default",
    keys: &[&FORMAT_KEY, &LEVEL_KEY],
    example: "[log]\nformat = \"json\"\nlevel = \"info,wirepath_pmd=debug\"\n",
    ..ConfigTable::EMPTY
};

/// The table `[log]` of a configuration, which [`LOG`] describes. Options of the command line go before it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogSettings {
    /// Key `format`.
    pub format: Option<Format>,
    /// Key `level`, written as for `--log-level`.
    pub levels: Option<Levels>,
}

impl LogSettings {
    /// Reads the table.
    pub fn read(top: &Settings<'_>) -> Result<Self, ConfigError> {
        top.read_table(&LOG, |table| {
            let format = table.read(&FORMAT_KEY)?;
            let levels = table.read(&LEVEL_KEY)?.map(|text| text.parse());
            let levels = levels.transpose().map_err(|why: String| table.error_in(&LEVEL_KEY, why))?;
            Ok(Self { format, levels })
        })
    }
}

/// The format of the records, an index of [`Format::ALL`].
static FORMAT: AtomicU8 = AtomicU8::new(Format::Text as u8);
/// True if text has colours.
static COLOURS: AtomicBool = AtomicBool::new(false);
/// The levels. They exist once the log was started.
static LEVELS: OnceLock<(Mutex<CurrentLevels>, reload::Handle<Targets, Registry>)> = OnceLock::new();

struct CurrentLevels {
    in_force: Levels,
    /// The levels of the command line or the configuration.
    configured: Levels,
}

/// Returns the format of the records.
pub(super) fn format() -> Format {
    Format::ALL[usize::from(FORMAT.load(Ordering::Relaxed))]
}

/// Sets the format of the records, and the levels in place of all levels in force. The first call starts the log.
pub(super) fn start(format: Format, levels: Levels) {
    FORMAT.store(format as u8, Ordering::Relaxed);
    COLOURS.store(std::io::stderr().is_terminal(), Ordering::Relaxed);
    let mut new = false;
    let (current, handle) = LEVELS.get_or_init(|| {
        new = true;
        let (filter, handle) = reload::Layer::new(levels.targets());
        // This fails only if a test has installed another subscriber before.
        let _ = tracing_subscriber::registry().with(filter).with(Records).try_init();
        (Mutex::new(CurrentLevels { in_force: levels.clone(), configured: levels.clone() }), handle)
    });
    if !new {
        // This fails only if another subscriber is in force.
        let _ = handle.reload(levels.targets());
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        *current = CurrentLevels { in_force: levels.clone(), configured: levels };
    }
}

/// Changes the level of a module and those inside it, or of all modules that have no level of their own. Fails if
/// the name is no module path, if too many modules have a level, or before the log was started.
pub fn set(level: LevelFilter, module: Option<&str>) -> Result<(), String> {
    change(|current| current.in_force.set(level, module))
}

/// Gives a module the level of the command line or the configuration. Without one there, the level of the module
/// around it applies. `None` resets all levels. Fails if the module has no level of its own, or before the log was
/// started.
pub fn reset(module: Option<&str>) -> Result<(), String> {
    change(|current| current.in_force.reset(&current.configured, module))
}

fn change(change: impl FnOnce(&mut CurrentLevels) -> Result<(), String>) -> Result<(), String> {
    let (current, handle) = LEVELS.get().ok_or("the log was not started")?;
    let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
    change(&mut current)?;
    handle.reload(current.in_force.targets()).map_err(|error| error.to_string())
}

/// Returns the levels in force, in the form that `--log-level` takes.
pub fn levels() -> String {
    let current = LEVELS.get().map(|(current, _)| current.lock().unwrap_or_else(PoisonError::into_inner));
    current.map(|current| current.in_force.to_string()).unwrap_or_default()
}

/// Appends a record that is not an event.
pub(super) fn write(level: Level, module: &str, message: String) {
    let record = Record { time: SystemTime::now(), level, module, message, fields: Map::new() };
    live::log(record.render(format(), COLOURS.load(Ordering::Relaxed)).as_bytes());
}

/// The layer that writes records.
struct Records;

impl<S: Subscriber> Layer<S> for Records {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut record = Record {
            time: SystemTime::now(),
            level: *event.metadata().level(),
            module: event.metadata().target(),
            message: String::new(),
            fields: Map::new(),
        };
        event.record(&mut record);
        live::log(record.render(format(), COLOURS.load(Ordering::Relaxed)).as_bytes());
    }
}

/// A record of the log.
struct Record<'a> {
    time: SystemTime,
    level: Level,
    module: &'a str,
    message: String,
    fields: Map<String, Value>,
}

impl Record<'_> {
    /// Returns the lines of the record, with the line feed at the end.
    fn render(self, format: Format, colours: bool) -> String {
        let Self { time, level, module, message, fields } = self;
        let message = message.trim_end();
        if format == Format::Json {
            let mut object = Map::new();
            object.insert("time".to_owned(), timestamp(time).into());
            object.insert("level".to_owned(), level.as_str().to_lowercase().into());
            object.insert("module".to_owned(), module.into());
            object.insert("message".to_owned(), message.into());
            if !fields.is_empty() {
                object.insert("fields".to_owned(), fields.into());
            }
            return json_line(&Value::Object(object).to_string());
        }
        let mut text = format!("{module}: {}", sanitized(message));
        fields.iter().for_each(|(key, value)| write!(text, " {key}={}", sanitized(&value.to_string())).unwrap_or(()));
        if format == Format::Journald {
            let prefix = priority(level);
            return format!("<{prefix}>{}\n", text.replace('\n', &format!("\n<{prefix}>    ")));
        }
        let (begin, end) = if colours { (colour(level), "\x1b[0m") } else { ("", "") };
        format!("{} {begin}{level:5}{end} {}\n", timestamp(time), text.replace('\n', "\n    "))
    }
}

impl Visit for Record<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.add(field, format!("{value:?}"));
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            self.message = value.to_owned();
        } else {
            self.add(field, value);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }
}

impl Record<'_> {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.fields.insert(field.name().to_owned(), value.into());
    }
}

/// Priority of a level (syslog(3)).
fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Escape sequence of a level's colour.
fn colour(level: Level) -> &'static str {
    match level {
        Level::ERROR => "\x1b[31m",
        Level::WARN => "\x1b[33m",
        Level::INFO => "\x1b[32m",
        _ => "\x1b[34m",
    }
}

/// Returns a time as in RFC 3339, in UTC with microseconds. Times before 1970 read as 1970.
fn timestamp(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (days, second) = (since.as_secs() / 86_400, since.as_secs() % 86_400);
    // Years begin in March, so that the leap day is the last day of a year. 719 468 days lie between 1 March of
    // the year 0 and 1970. An era is 400 years, or 146 097 days.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    let (hour, minute, second, micros) = (second / 3600, second / 60 % 60, second % 60, since.subsec_micros());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn record(message: &str) -> Record<'_> {
        let fields = [("port".to_owned(), Value::from("a b")), ("n".to_owned(), 7.into())].into_iter().collect();
        let time = UNIX_EPOCH + Duration::new(1_700_000_000, 1_234_999);
        Record { time, level: Level::WARN, module: "wirepath_pmd::port", message: message.to_owned(), fields }
    }

    #[test]
    fn times_are_those_of_the_calendar() {
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(timestamp(UNIX_EPOCH - Duration::from_secs(1)), "1970-01-01T00:00:00.000000Z");
        // From date -u -d @N.
        for (seconds, expected) in [
            (0, "1970-01-01T00:00:00"),
            (951_782_400, "2000-02-29T00:00:00"),
            (951_868_799, "2000-02-29T23:59:59"),
            (951_868_800, "2000-03-01T00:00:00"),
            (1_735_689_599, "2024-12-31T23:59:59"),
            (1_735_689_600, "2025-01-01T00:00:00"),
            (4_107_542_400, "2100-03-01T00:00:00"),
            (1_700_000_000, "2023-11-14T22:13:20"),
        ] {
            assert_eq!(at(seconds), format!("{expected}.000000Z"));
        }
    }

    #[test]
    fn each_format_keeps_a_record_together() {
        let message = "one\ntwo \x1b[31m\u{9b}\n";
        let text = record(message).render(Format::Text, false);
        let own = "wirepath_pmd::port: one\n    two \\u{1b}[31m\\u{9b} n=7 port=\"a b\"\n";
        assert_eq!(text, format!("2023-11-14T22:13:20.001234Z WARN  {own}"));
        let text = record(message).render(Format::Journald, true);
        assert_eq!(text, format!("<4>{}", own.replace("\n    ", "\n<4>    ")));
        let text = record(message).render(Format::Json, true);
        assert!(text.ends_with('\n') && text.trim_end().chars().all(|c| !c.is_control()), "{text}");
        let json: Value = serde_json::from_str(&text).unwrap();
        let expected = serde_json::json!({
            "time": "2023-11-14T22:13:20.001234Z", "level": "warn", "module": "wirepath_pmd::port",
            "message": message.trim_end(), "fields": { "port": "a b", "n": 7 },
        });
        assert_eq!(json, expected);
        assert!(record("x").render(Format::Text, true).contains("\x1b[33mWARN \x1b[0m wirepath_pmd"));
    }

    #[test]
    fn levels_are_read_and_shown() {
        let levels: Levels = "warn, wirepath_pmd=debug,wirepath_pmd::port=off".parse().unwrap();
        assert_eq!(levels.to_string(), "warn,wirepath_pmd=debug,wirepath_pmd::port=off");
        assert_eq!("wirepath_pmd=trace".parse::<Levels>().unwrap().to_string(), "info,wirepath_pmd=trace");
        let enabled = |target, level| levels.targets().would_enable(target, &level);
        assert!(enabled("wirepath_pmd::drivers", Level::DEBUG) && !enabled("wirepath_pmd::port", Level::ERROR));
        assert!(enabled("other", Level::WARN) && !enabled("other", Level::INFO));
        for wrong in ["", "loud", "INFO", "wirepath_pmd", "=info", "a b=info", "a:::b=info", "a=", "info,,"] {
            assert!(wrong.parse::<Levels>().is_err(), "{wrong}");
        }
        let mut many = Levels::default();
        (0..MAX_MODULES).for_each(|n| many.set(LevelFilter::OFF, Some(&format!("m{n}"))).unwrap());
        assert!(many.set(LevelFilter::OFF, Some("more")).is_err() && many.set(LevelFilter::INFO, Some("m7")).is_ok());
    }

    #[test]
    fn the_journal_is_known_by_device_and_inode() {
        assert_eq!(device_and_inode("8:12345"), Some((8, 12345)));
        for wrong in ["", "8", "8:", ":9", "8:9:1", "a:b"] {
            assert_eq!(device_and_inode(wrong), None);
        }
    }
}
