use std::path::{Path, PathBuf};

use wirepath_control_socket::Access;
use wirepath_flow::rule_file::{self, FileFormat, FileRule};
use wirepath_flow::{Action, Field, MaskedValue, Ports, Rule, list_from_settings};
use wirepath_packet::PortId;
use wirepath_pmd::drivers::PortSettings;
use wirepath_settings::{ConfigError, Settings, Source, Span};

/// A rule and its position in a file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Position of the rule.
    pub span: Span,
    /// The rule.
    pub rule: Rule,
}

/// Flow rules of a configuration: the `[[rule]]` tables, followed by the rules of a separate file.
///
/// ```toml
/// [rules]
/// file = "acl.rules"      # relative to the configuration; text, TOML or JSON; reloaded on SIGHUP
/// socket = "l2fwd.sock"   # used by `wirepath flow list`, `add` and `remove`
/// socket_mode = 0o660     # mode of the socket file; default: 0o600
/// socket_group = "netops" # group of the socket file: a name of /etc/group or a number; default: the program's
/// socket_change = "all"   # who may change rules: "owner" (the program's user and root) or "all" that may connect
/// hardware = "auto"       # NICs run the rules that they support; "off": the workers run all rules
///
/// [[rule]]
/// rule = "ingress prio 10: port id wan / ipv4 dst 10.0.0.0/8 => drop"
/// ```
#[derive(Clone, Debug, Default)]
pub struct RuleSettings {
    /// The rules in evaluation order among rules of equal priority.
    pub entries: Vec<Entry>,
    /// Number of rules in the configuration itself. They come first.
    pub config_count: usize,
    /// File of the other rules.
    pub file: Option<PathBuf>,
    /// Socket on which the program accepts requests.
    pub socket: Option<SocketSettings>,
    /// Use of rule hardware.
    pub hardware: Hardware,
}

/// Settings of the socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketSettings {
    /// Path of the socket file.
    pub path: PathBuf,
    /// Mode and group of the file. Who may connect may look at the rules.
    pub access: Access,
    /// Users that may change the rules.
    pub change: MayChange,
}

/// Users that may change the rules of a running program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum MayChange {
    /// The program's own user and root.
    #[default]
    Owner,
    /// Everyone who may connect.
    All,
}

/// Use of NICs that can run rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Hardware {
    /// NICs run the rules that they support.
    #[default]
    Auto,
    /// The workers run all rules.
    Off,
}

/// Returns the names of the ports, for parsing rules.
pub fn port_names(ports: &[PortSettings]) -> Vec<(&str, PortId)> {
    ports.iter().zip(0..).map(|(port, id)| (port.name.as_str(), PortId::new(id))).collect()
}

impl RuleSettings {
    /// Reads the rules from a configuration's top-level table. `ports` are the names of the ports, in order. The errors
    /// of all invalid rules are recorded, and one of them is returned.
    pub fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError> {
        let names: Vec<(&str, PortId)> =
            ports.iter().zip(0..).map(|(name, id)| (name.as_str(), PortId::new(id))).collect();
        let mut settings = Self::default();
        let table = RulesTable::read(top);
        let mut failed = None;
        for listed in list_from_settings(top, Ports(&names))? {
            match top.collect(listed.rule) {
                Ok(rule) => settings.entries.push(Entry { span: listed.span, rule }),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        settings.config_count = settings.entries.len();
        RulesTable { file: settings.file, socket: settings.socket, hardware: settings.hardware } = table?;
        settings.entries.extend(top.collect(settings.read_file(&names))?);
        failed.map_or(Ok(settings), Err)
    }

    /// Returns whether there are no rules and no file or socket that could add some.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.file.is_none() && self.socket.is_none()
    }

    /// Returns whether a rule names the port, in its pattern or as the target of `redirect` or `mirror`.
    pub fn use_port(&self, port: PortId) -> bool {
        let exact = MaskedValue::exact(port.number().into(), 16);
        let matches = |rule: &Rule| {
            rule.pattern()
                .iter()
                .any(|item| item.fields().iter().any(|(field, value)| *field == Field::PortId && *value == exact))
        };
        let sends = |rule: &Rule| {
            rule.actions()
                .iter()
                .any(|action| matches!(action, Action::Redirect(to) | Action::Mirror(to) if *to == port))
        };
        self.entries.iter().any(|entry| matches(&entry.rule) || sends(&entry.rule))
    }

    /// Reads the rule file again. Returns no rules if there is no file.
    pub fn read_file(&self, names: &[(&str, PortId)]) -> Result<Vec<Entry>, ConfigError> {
        let Some(file) = &self.file else { return Ok(Vec::new()) };
        let rules = rule_file::read_all(&Source::load_regular(file)?, Ports(names))?;
        Ok(rules.into_iter().map(|(span, rule)| Entry { span, rule }).collect())
    }

    /// Reads all rules like [`Self::read`], but continues after invalid rules. Also returns the text of the
    /// file.
    pub fn list(top: &Settings<'_>, names: &[(&str, PortId)]) -> Result<(Vec<FileRule>, Option<Source>), ConfigError> {
        let mut listed = list_from_settings(top, Ports(names))?;
        let Some(file) = RulesTable::read(top)?.file else { return Ok((listed, None)) };
        let source = Source::load_regular(&file)?;
        listed.extend(rule_file::read(&source, FileFormat::of(&source), Ports(names))?);
        Ok((listed, Some(source)))
    }
}

/// The table `[rules]`.
#[derive(Default)]
struct RulesTable {
    file: Option<PathBuf>,
    socket: Option<SocketSettings>,
    hardware: Hardware,
}

impl RulesTable {
    fn read(top: &Settings<'_>) -> Result<Self, ConfigError> {
        match top.table("rules")? {
            Some(table) => table.complete(Self::read_table),
            None => Ok(Self::default()),
        }
    }

    fn read_table(table: &Settings<'_>) -> Result<Self, ConfigError> {
        let path = |key: &'static str, what: &str| {
            let span = table.span(key);
            let beside = Path::new(span.file()).parent().unwrap_or_else(|| "".as_ref());
            match table.get::<String>(key)? {
                Some(path) if path.is_empty() => Err(span.error(format!("found \"\", expected the path of {what}"))),
                path => Ok(path.map(|path| beside.join(path))),
            }
        };
        let hardware = table.choice("hardware", &[("auto", Hardware::Auto), ("off", Hardware::Off)])?;
        let file = path("file", "a file of rules")?;
        let socket = path("socket", "a socket")?;
        let mode = table.integer("socket_mode", 0..=0o777)?;
        let group = group(table)?;
        let change = table.choice("socket_change", &[("owner", MayChange::Owner), ("all", MayChange::All)])?;
        if socket.is_none() && (mode.is_some() || group.is_some() || change.is_some()) {
            return Err(table.error("socket: missing, expected the path of a socket"));
        }
        let access = Access { mode: mode.unwrap_or(Access::default().mode), group };
        let socket = socket.map(|path| SocketSettings { path, access, change: change.unwrap_or_default() });
        Ok(Self { file, socket, hardware: hardware.unwrap_or_default() })
    }
}

/// Reads `socket_group`: the name of a group in `/etc/group`, or its number.
fn group(table: &Settings<'_>) -> Result<Option<u32>, ConfigError> {
    let Some(name) = table.get::<String>("socket_group")? else { return Ok(None) };
    if let Ok(number) = name.parse() {
        return Ok(Some(number));
    }
    let groups = Source::load_regular(Path::new("/etc/group"))?;
    // The form of a line: name, password, number and members (group(5)).
    let number = groups.text().lines().find_map(|line| {
        let mut fields = line.split(':');
        (fields.next() == Some(&*name)).then(|| fields.nth(1)?.parse().ok())?
    });
    let unknown = || table.span("socket_group").error(format!("there is no group \"{name}\" in /etc/group"));
    number.ok_or_else(unknown).map(Some)
}

#[cfg(test)]
mod tests {
    use wirepath_pipeline::RuntimeConfig;

    use super::*;

    const PORTS: &str = "[[port]]\nname = 'lan'\ndriver = 'null'\n[[port]]\nname = 'wan'\ndriver = 'null'\n";

    fn read(folder: &std::path::Path, text: &str) -> Result<RuleSettings, String> {
        let config = folder.join("c.toml");
        std::fs::write(&config, format!("{PORTS}{text}")).unwrap();
        let source = Source::load(&config).unwrap();
        let document = source.parse().unwrap();
        document.read(|top| RuleSettings::read(top, &RuntimeConfig::port_names(top))).map_err(|error| error.to_string())
    }

    #[test]
    fn tables_first_then_the_file() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("acl.rules"), "ingress: port id wan => drop\n").unwrap();
        let rules = read(
            folder.path(),
            "[rules]\nfile = 'acl.rules'\n[[rule]]\nrule = 'ingress: port id lan => redirect wan'\n",
        )
        .unwrap();
        let texts: Vec<String> = rules.entries.iter().map(|entry| entry.rule.to_string()).collect();
        assert_eq!(texts, ["ingress prio 0: port id 0 => redirect 1", "ingress prio 0: port id 1 => drop"]);
        assert_eq!((rules.config_count, rules.entries[1].span.position()), (1, (1, 1)));
        assert!(read(folder.path(), "").unwrap().entries.is_empty());
    }

    #[test]
    fn errors_name_the_file_that_has_them() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("acl.rules"), "\ningress: port id wam => drop\n").unwrap();
        let error = read(folder.path(), "[rules]\nfile = 'acl.rules'\n").unwrap_err();
        assert!(error.ends_with("acl.rules:2:18: no port is called \"wam\"; did you mean \"wan\"?"), "{error}");
        let error = read(folder.path(), "[rules]\nfile = 'none.rules'\n").unwrap_err();
        assert!(error.contains("none.rules: cannot read this"), "{error}");
        let error = read(folder.path(), "[rules]\nfiel = 'acl.rules'\n").unwrap_err();
        assert!(error.contains("did you mean \"file\"?"), "{error}");
        assert!(
            read(folder.path(), "[rules]\nhardware = 'on'\n")
                .unwrap_err()
                .contains("expected one of \"auto\", \"off\"")
        );
        assert!(read(folder.path(), "[rules]\nfile = ''\n").unwrap_err().contains("expected the path"));
    }

    #[test]
    fn sockets_have_a_mode_and_a_group() {
        let folder = tempfile::tempdir().unwrap();
        let read = |text: &str| read(folder.path(), &format!("[rules]\n{text}"));
        let path = folder.path().join("a.sock");
        let plain = SocketSettings { path: path.clone(), access: Access::default(), change: MayChange::Owner };
        assert_eq!(read("socket = 'a.sock'").unwrap().socket, Some(plain));
        let text = "socket = 'a.sock'\nsocket_mode = 0o660\nsocket_group = 'root'\nsocket_change = 'all'\n";
        let group = SocketSettings { path, access: Access { mode: 0o660, group: Some(0) }, change: MayChange::All };
        assert_eq!(read(text).unwrap().socket, Some(group));
        let number = read("socket = 'a.sock'\nsocket_group = '77'\n").unwrap().socket.unwrap();
        assert_eq!(number.access.group, Some(77));
        for (text, why) in [
            ("socket_mode = 0o660", "expected the path of a socket"),
            ("socket = 'a'\nsocket_mode = 0o1777", "expected an integer from 0 to 511"),
            ("socket = 'a'\nsocket_group = 'no-such'", "there is no group \"no-such\" in /etc/group"),
            ("socket = 'a'\nsocket_change = 'group'", "expected one of \"owner\", \"all\""),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn rule_files_are_regular_files() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe.rules");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let error = read(folder.path(), "[rules]\nfile = 'pipe.rules'\n").unwrap_err();
        assert!(error.contains("pipe.rules: cannot read this configuration: expected a regular file"), "{error}");
    }
}
