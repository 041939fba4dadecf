use std::path::PathBuf;

use wirepath_pmd::drivers::PortSettings;
use wirepath_pmd::flow::list::{self, Form, Listed};
use wirepath_pmd::flow::{Ports, Rule, list_from_settings};
use wirepath_pmd::port::PortId;
use wirepath_pmd::settings::{ConfigError, Place, Settings, Source};

/// A rule and where it was read.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Where it begins.
    pub place: Place,
    /// The rule.
    pub rule: Rule,
}

/// The rules of a configuration: its `[[rule]]` tables, and behind them those of a file of their own.
///
/// ```toml
/// [rules]
/// file = "acl.rules"      # beside the configuration, unless the path is absolute; text, TOML or JSON; read again on SIGHUP
/// socket = "l2fwd.sock"   # where `wirepath flow list`, `add` and `remove` find the program
/// hardware = "auto"       # NICs that can take rules over do; "off": the workers do everything
///
/// [[rule]]
/// rule = "ingress prio 10: port id wan / ipv4 dst 10.0.0.0/8 => drop"
/// ```
#[derive(Clone, Debug, Default)]
pub struct RuleSettings {
    /// The rules, in the order in which they count among equals.
    pub entries: Vec<Entry>,
    /// How many of them stand in the configuration itself; they come first.
    pub own: usize,
    /// Where the others stand.
    pub file: Option<PathBuf>,
    /// Where the program listens for changes.
    pub socket: Option<PathBuf>,
    /// Whether rules go into the hardware of ports that have some.
    pub hardware: Hardware,
}

/// What becomes of rules that a NIC could take over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Hardware {
    /// The NIC does what it can.
    #[default]
    Auto,
    /// The workers do everything.
    Off,
}

/// The ports by name, for the words of rules.
pub fn port_names(ports: &[PortSettings]) -> Vec<(&str, PortId)> {
    ports.iter().zip(0..).map(|(port, id)| (port.name.as_str(), id)).collect()
}

impl RuleSettings {
    /// Reads the rules of a configuration's top table. The first rule that is wrong is an error.
    pub fn read(top: &Settings<'_>, ports: &[PortSettings]) -> Result<Self, ConfigError> {
        let names = port_names(ports);
        let mut settings = Self::default();
        for listed in list_from_settings(top, Ports(&names))? {
            settings.entries.push(Entry { place: listed.place, rule: listed.rule? });
        }
        settings.own = settings.entries.len();
        (settings.file, settings.socket, settings.hardware) = paths(top)?;
        settings.entries.extend(settings.read_file(&names)?);
        Ok(settings)
    }

    /// Whether there are none, and nothing from which some could come.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.file.is_none() && self.socket.is_none()
    }

    /// Reads the file of rules again; empty without one.
    pub fn read_file(&self, names: &[(&str, PortId)]) -> Result<Vec<Entry>, ConfigError> {
        let Some(file) = &self.file else { return Ok(Vec::new()) };
        let rules = list::read_all(&Source::load(file)?, Ports(names))?;
        Ok(rules.into_iter().map(|(place, rule)| Entry { place, rule }).collect())
    }

    /// As [`Self::read`], but goes on behind rules that are wrong. Also gives the file's text.
    pub fn list(top: &Settings<'_>, names: &[(&str, PortId)]) -> Result<(Vec<Listed>, Option<Source>), ConfigError> {
        let mut listed = list_from_settings(top, Ports(names))?;
        let (Some(file), ..) = paths(top)? else { return Ok((listed, None)) };
        let source = Source::load(&file)?;
        listed.extend(list::read(&source, Form::of(&source), Ports(names))?);
        Ok((listed, Some(source)))
    }
}

/// The file, the socket and the use of hardware of the table `[rules]`.
fn paths(top: &Settings<'_>) -> Result<(Option<PathBuf>, Option<PathBuf>, Hardware), ConfigError> {
    let Some(table) = top.table("rules")? else { return Ok((None, None, Hardware::default())) };
    let path = |key: &'static str, what: &str| {
        let place = table.place(key);
        let beside = std::path::Path::new(place.file()).parent().unwrap_or_else(|| "".as_ref());
        match table.get::<String>(key)? {
            Some(path) if path.is_empty() => Err(place.error(format!("found \"\", expected the path of {what}"))),
            path => Ok(path.map(|path| beside.join(path))),
        }
    };
    let hardware = match table.get::<String>("hardware")?.as_deref() {
        None | Some("auto") => Hardware::Auto,
        Some("off") => Hardware::Off,
        Some(other) => {
            let message = format!("found \"{other}\", expected \"auto\" or \"off\"");
            return Err(table.place("hardware").error(message));
        }
    };
    let paths = (path("file", "a file of rules")?, path("socket", "a socket")?, hardware);
    table.finish()?;
    Ok(paths)
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
        let top = document.settings();
        let ports = RuntimeConfig::ports_from_settings(&top).unwrap();
        RuleSettings::read(&top, &ports).map_err(|error| error.to_string())
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
        assert_eq!((rules.own, rules.entries[1].place.position()), (1, (1, 1)));
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
            read(folder.path(), "[rules]\nhardware = 'on'\n").unwrap_err().contains("expected \"auto\" or \"off\"")
        );
        assert!(read(folder.path(), "[rules]\nfile = ''\n").unwrap_err().contains("expected the path"));
    }
}
