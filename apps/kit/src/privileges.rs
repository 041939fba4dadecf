//! Privileges of a program after its start: the table `[privileges]`.
//!
//! A program needs privileges to open its ports. Before its workers start, it gives up those that it does not need any
//! more, in all threads: see [`wirepath_privileges`]. An [`App`](crate::App) inside another program
//! ([`with_stop`](crate::App::with_stop)) leaves the privileges of the process as they are.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use wirepath_pipeline::Runtime;
use wirepath_pmd::drivers::{DRIVERS, Driver};
use wirepath_privileges::{
    CapabilitySet, PrivilegeError, Restriction, User, allowed_calls, capability_names, refused_calls, restrict,
};
use wirepath_settings::{Choice, ConfigError, ConfigTable, Flag, Key, List, Settings, Text, WithDefault};

use crate::cli::Failure;

pub use wirepath_privileges as linux;

const DROP: Key<WithDefault<Flag>> = Key::flag("drop").default(true).about(
    "Gives up all capabilities when the ports are started, except those that the ports need when a device returns.",
);
const USER: Key<Text> = Key::text("user", "name of a user in /etc/passwd, or a number")
    .when("drop = true")
    .absent("the user that starts the program")
    .about(
        "User that the program becomes. Only root may become another user. It must be able to read the configuration.",
    );
const KEEP: Key<List<Choice<&'static dyn Driver>>> =
    Key::choice_of("keep", || DRIVERS.iter().map(|driver| (driver.name(), *driver, driver.about())).collect())
        .list()
        .absent("none: ports of other drivers than those of the start may be refused")
        .about("Drivers whose capabilities are kept too, so that ports of them can be added later.");
const SYSTEM_CALLS: Key<WithDefault<Choice<bool>>> = Key::choice(
    "system_calls",
    &[
        ("listed", true, "those that programs of Wirepath need; others fail with EPERM and are logged by name"),
        ("any", false, "all"),
    ],
)
.default_word("listed")
.about("System calls that the program may use when its ports are started.");

/// Description of the table `[privileges]`.
pub static PRIVILEGES: ConfigTable = ConfigTable {
    name: "privileges",
    about: "Privileges that the program keeps when its ports are started.",
    absent: "every key has its default",
    keys: &[&DROP, &USER, &KEEP, &SYSTEM_CALLS],
    example: "[privileges]\nuser = \"nobody\"\nkeep = [\"tap\"]\n",
    ..ConfigTable::EMPTY
};

/// Shortest time between two records about the same refused call.
const REPORT_EVERY: Duration = Duration::from_secs(10);

/// The table `[privileges]` of a configuration, which [`PRIVILEGES`] describes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrivilegeSettings {
    /// Give up capabilities.
    pub drop: bool,
    /// User that the program becomes.
    pub user: Option<User>,
    /// Capabilities that are kept for ports that are added later.
    pub keep: CapabilitySet,
    /// Refuse all system calls that are not on the list.
    pub filter: bool,
}

impl Default for PrivilegeSettings {
    fn default() -> Self {
        let (drop, filter) = (DROP.default_value(), SYSTEM_CALLS.default_value());
        Self { drop, user: None, keep: CapabilitySet::empty(), filter }
    }
}

impl PrivilegeSettings {
    /// Reads the table from a configuration's top-level table.
    ///
    /// # Errors
    /// If a value is wrong. The error has its position.
    pub fn read(top: &Settings<'_>) -> Result<Self, ConfigError> {
        top.read_table(&PRIVILEGES, |table| {
            let drop = table.read(&DROP)?;
            let name = table.read(&USER)?;
            if name.is_some() && !drop {
                return Err(table.error_in(&USER, "applies only with drop = true"));
            }
            let unknown = |name: &str| table.error_in(&USER, format!("there is no user \"{name}\" in /etc/passwd"));
            let user = name.map(|name| User::find(&name).ok_or_else(|| unknown(&name))).transpose()?;
            let drivers = table.read(&KEEP)?;
            let keep = drivers.iter().fold(CapabilitySet::empty(), |all, driver| all | driver.value.privileges());
            Ok(Self { drop, user, keep, filter: table.read(&SYSTEM_CALLS)? })
        })
    }

    /// Prepares the sockets that the program is about to open for its later user.
    pub fn before_open(&self) {
        if let Some(user) = &self.user {
            wirepath_control_socket::set_owner(user.uid.as_raw(), user.gid.as_raw());
        }
    }

    /// Makes the program give up its privileges when its ports are started. `also` are further capabilities that it
    /// needs. `configuration` is the file that reloads read.
    pub fn apply_to(self, runtime: &mut Runtime, also: CapabilitySet, configuration: Option<&Path>) {
        let configuration = configuration.map(PathBuf::from);
        runtime.set_before_workers(move |needed| self.give_up(needed | also, configuration.as_deref()));
    }

    /// Gives up all but the needed privileges.
    fn give_up(self, needed: CapabilitySet, configuration: Option<&Path>) -> Result<(), String> {
        if !self.drop && !self.filter {
            return Ok(());
        }
        let keep = if self.drop { needed | self.keep } else { CapabilitySet::all() };
        let becomes = self.user.as_ref().map_or_else(String::new, |user| format!(", user {}", user.name));
        let calls = match self.filter {
            true => format!("{} system calls", allowed_calls(keep).len()),
            false => "all system calls".to_owned(),
        };
        match restrict(Restriction { keep, user: self.user, filter: self.filter }) {
            Ok(kept) => tracing::info!("privileges: {}{becomes}, {calls}", capability_names(kept)),
            // A second program in the same process.
            Err(error @ PrivilegeError::Repeated) => tracing::debug!("privileges: {error}"),
            Err(error @ PrivilegeError::Filter(_)) => {
                return Err(format!(
                    "{error}; the program starts without it with system_calls = \"any\" in [privileges]"
                ));
            }
            Err(error) => return Err(format!("{error}; with drop = false in [privileges] the program keeps them")),
        }
        if let Some((path, error)) = configuration.and_then(|path| File::open(path).err().map(|error| (path, error))) {
            tracing::warn!("reloads will fail, because the program cannot read {} any more: {error}", path.display());
        }
        Ok(())
    }
}

/// Records of the system calls that were refused. The control thread of a program calls [`Self::tick`] and, at the end,
/// [`Self::finish`].
#[derive(Debug, Default)]
pub struct RefusalLog {
    calls: BTreeMap<String, Refusals>,
}

/// Refusals of one call.
#[derive(Debug, Default)]
struct Refusals {
    total: u64,
    reported: u64,
    last: Option<Instant>,
}

impl RefusalLog {
    /// Logs refused calls by name: at once for the first time, then at most every ten seconds.
    pub fn tick(&mut self) {
        for (name, total) in self.due(Instant::now(), REPORT_EVERY) {
            report(&name, total);
        }
    }

    /// Logs what was not logged yet.
    pub fn finish(&mut self) {
        for (name, total) in self.due(Instant::now(), Duration::ZERO) {
            report(&name, total);
        }
    }

    fn due(&mut self, now: Instant, every: Duration) -> Vec<(String, u64)> {
        for call in refused_calls() {
            self.calls.entry(call.name).or_default().total += u64::from(call.count);
        }
        let mut due = Vec::new();
        for (name, refusals) in &mut self.calls {
            let is_due = refusals.last.is_none_or(|last| now.saturating_duration_since(last) >= every);
            if refusals.total > refusals.reported && is_due {
                (refusals.reported, refusals.last) = (refusals.total, Some(now));
                due.push((name.clone(), refusals.total));
            }
        }
        due
    }
}

fn report(name: &str, total: u64) {
    let times = if total == 1 { "once".to_owned() } else { format!("{total} times") };
    tracing::warn!(
        "the system call {name} was refused ({times}), because it is not on the list; a program that needs it has \
         system_calls = \"any\" in [privileges]"
    );
}

/// Returns an error if the program has given up a capability that `what` needs.
///
/// # Errors
/// The capability and the remedy.
pub fn check_kept(what: &str, needed: CapabilitySet, driver: &str) -> Result<(), Failure> {
    let missing = needed & wirepath_privileges::given_up();
    if missing.is_empty() {
        return Ok(());
    }
    let names = capability_names(missing);
    Err(Failure::failed(format!(
        "{what} needs {names}, which the program gave up after its start; start the program again, or first with \
         keep = [\"{driver}\"] in [privileges]"
    )))
}

#[cfg(test)]
mod tests {
    use wirepath_settings::Source;

    use super::*;

    fn read(text: &str) -> Result<PrivilegeSettings, String> {
        let source = Source::new("c.toml", format!("[privileges]\n{text}\n"));
        let document = source.parse().unwrap();
        document.read(PrivilegeSettings::read).map_err(|error| error.to_string())
    }

    #[test]
    fn privileges_are_given_up_by_default() {
        assert_eq!(read("").unwrap(), PrivilegeSettings::default());
        let default = PrivilegeSettings::default();
        assert!(default.drop && default.filter && default.user.is_none() && default.keep.is_empty());
        let kept = read("keep = ['tap', 'null']\nsystem_calls = 'any'").unwrap();
        assert_eq!((kept.keep, kept.filter), (CapabilitySet::NET_ADMIN, false));
        let root = read("user = 'root'").unwrap().user.unwrap();
        assert_eq!((root.name.as_str(), root.uid.as_raw()), ("root", 0));
        assert_eq!(read("user = '0'").unwrap().user, Some(root));
        for (text, why) in [
            ("user = 'no-such-user'", "c.toml:2:8: privileges.user: there is no user \"no-such-user\" in /etc/passwd"),
            ("drop = false\nuser = 'root'", "c.toml:3:8: privileges.user: applies only with drop = true"),
            ("keep = ['tun']", "\"tap\""),
            ("system_calls = 'none'", "expected one of \"listed\", \"any\""),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
