use std::path::{Path, PathBuf};

use wirepath_flow::rule_file::{self, FileFormat, FileRule};
use wirepath_flow::{Action, Field, MaskedValue, Ports, Rule, list_from_settings};
use wirepath_packet::PortId;
use wirepath_pmd::drivers::PortSettings;
use wirepath_settings::{Choice, ConfigError, ConfigTable, Key, Settings, Source, Span, Text, WithDefault};

/// A rule and its position in a file.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Position of the rule.
    pub span: Span,
    /// The rule.
    pub rule: Rule,
}

const FILE: Key<Text> =
    Key::text("file", "path of a file in text, TOML or JSON").absent("no other rules than the tables [[rule]]").about(
        "File with further rules, which follow those of the configuration. It is relative to the configuration file.",
    );
const HARDWARE: Key<WithDefault<Choice<Hardware>>> = Key::choice(
    "hardware",
    &[
        ("auto", Hardware::Auto, "NICs run the rules that they support, the workers all others"),
        ("off", Hardware::Off, "the workers run all rules"),
    ],
)
.default_word("auto")
.about("Use of NICs that can run flow rules.");

/// Description of the table `[rules]`.
pub static RULES: ConfigTable = ConfigTable {
    name: "rules",
    about: "Flow rules of a separate file, and where rules run. An empty table allows rules to be added at run time.",
    absent: "rules can be added at run time only if the configuration has tables [[rule]]; tunnel-gateway allows it \
             always",
    keys: &[&FILE, &HARDWARE],
    example: "[rules]\nhardware = \"off\"\n",
    ..ConfigTable::EMPTY
};

/// Flow rules of a configuration: the tables `[[rule]]` ([`wirepath_flow::RULE`]), followed by the rules of the file
/// that the table `[rules]` names ([`RULES`]).
#[derive(Clone, Debug, Default)]
pub struct RuleSettings {
    /// The rules in evaluation order among rules of equal priority.
    pub entries: Vec<Entry>,
    /// Number of rules in the configuration itself. They come first.
    pub config_count: usize,
    /// File of the other rules.
    pub file: Option<PathBuf>,
    /// True if rules may be added to a program without rules: the configuration has the table `[rules]`.
    pub changeable: bool,
    /// Use of rule hardware.
    pub hardware: Hardware,
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

/// Returns whether a rule names the port, in its pattern or as the target of `redirect` or `mirror`.
pub(super) fn names_port(rule: &Rule, port: PortId) -> bool {
    let exact = MaskedValue::exact(port.number().into(), 16);
    let mut fields = rule.pattern().iter().flat_map(|item| item.fields().iter());
    fields.any(|(field, value)| *field == Field::PortId && *value == exact)
        || rule
            .actions()
            .iter()
            .any(|action| matches!(action, Action::Redirect(to) | Action::Mirror(to) if *to == port))
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
        RulesTable { file: settings.file, hardware: settings.hardware } = table?;
        settings.changeable = top.has(&RULES);
        settings.entries.extend(top.collect(settings.read_file(&names))?);
        failed.map_or(Ok(settings), Err)
    }

    /// Returns whether there are no rules and none can be added.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && !self.changeable
    }

    /// Returns whether a rule names the port, in its pattern or as the target of `redirect` or `mirror`.
    pub fn use_port(&self, port: PortId) -> bool {
        self.entries.iter().any(|entry| names_port(&entry.rule, port))
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
    hardware: Hardware,
}

impl RulesTable {
    fn read(top: &Settings<'_>) -> Result<Self, ConfigError> {
        top.read_table(&RULES, Self::read_table)
    }

    fn read_table(table: &Settings<'_>) -> Result<Self, ConfigError> {
        let hardware = table.read(&HARDWARE)?;
        let (span, path) = (table.span(&FILE), table.read(&FILE)?);
        if path.as_ref().is_some_and(String::is_empty) {
            return Err(span.error("found \"\", expected the path of a file of rules"));
        }
        let beside = Path::new(span.file()).parent().unwrap_or_else(|| "".as_ref());
        let file = path.map(|path| beside.join(path));
        for (old, new) in
            [("socket", "socket"), ("socket_mode", "mode"), ("socket_group", "group"), ("socket_change", "change")]
        {
            table.moved(old, "control", new)?;
        }
        Ok(Self { file, hardware })
    }
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
    fn keys_of_the_socket_are_in_another_table() {
        let folder = tempfile::tempdir().unwrap();
        let error = read(folder.path(), "[rules]\nsocket = 'a.sock'\nsocket_mode = 0o660\n").unwrap_err();
        assert!(error.contains("rules.socket: this key is now \"socket\" in the table [control]"), "{error}");
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
