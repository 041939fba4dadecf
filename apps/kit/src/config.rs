//! The configuration of a packet program.

use std::marker::PhantomData;
use std::path::{Path, PathBuf};

use wirepath_pipeline::{Runtime, RuntimeConfig, tables};
use wirepath_pmd::drivers::{PORT, PortSettings};
use wirepath_settings::{ConfigError, ConfigTable, Settings, Source};

use crate::cli::Failure;
use crate::cli::log::{LOG, LogSettings};
use crate::configuration::PortNumbers;
use crate::control_socket::{CONTROL, ControlSettings};
use crate::privileges::{PRIVILEGES, PrivilegeSettings};
use crate::rules::{RULES, RuleSettings};

/// The tables that every packet program has. Nothing is opened yet.
///
/// ```
/// use wirepath::Config;
/// use wirepath::settings::Source;
///
/// let text = "[[port]]\nname = 'a'\ndriver = 'null'\n\n[wokers]\ncores = [1]\n";
/// let error = Config::parse(&Source::new("ports.toml", text)).unwrap_err();
/// assert_eq!(error.to_string(), "ports.toml:5:2: wokers: unknown key; did you mean \"workers\"?");
/// ```
#[derive(Debug)]
pub struct Config {
    /// The tables `[[port]]`, in order; at least one.
    pub ports: Vec<PortSettings>,
    /// The tables `[workers]` and `[pool]`.
    pub runtime: RuntimeConfig,
    /// The tables `[[rule]]` and `[rules]`.
    pub rules: RuleSettings,
    /// The table `[control]`.
    pub control: ControlSettings,
    /// The table `[privileges]`.
    pub privileges: PrivilegeSettings,
    /// The table `[log]`.
    pub log: LogSettings,
    /// Names of the ports by number.
    names: Vec<String>,
    source: Source,
    path: Option<PathBuf>,
}

/// The tables of a configuration that belong to one program.
pub trait AppSettings: Sized + Send + 'static {
    /// Returns the descriptions of the program's tables, for its reference. A program describes all of its tables or
    /// none.
    fn tables() -> Vec<&'static ConfigTable> {
        Vec::new()
    }

    /// Reads the tables that [`Self::tables`] describes from the top-level table. `ports` are the names of the ports,
    /// in order. All keys that are not read are refused.
    ///
    /// # Errors
    /// If a value is wrong. The error has its position.
    fn read(top: &Settings<'_>, ports: &[String]) -> Result<Self, ConfigError>;

    /// Finds why these settings and the opened ports do not fit. Nothing is started yet.
    ///
    /// # Errors
    /// The reason.
    fn check_opened(&self, runtime: &Runtime) -> Result<(), Failure> {
        let _ = runtime;
        Ok(())
    }
}

/// A program without tables of its own.
impl AppSettings for () {
    fn read(_: &Settings<'_>, _: &[String]) -> Result<Self, ConfigError> {
        Ok(())
    }
}

/// Returns the descriptions of the tables that every packet program has.
pub fn common_tables() -> Vec<&'static ConfigTable> {
    vec![&PORT, &tables::WORKERS, &tables::POOL, &CONTROL, &PRIVILEGES, &LOG, &RULES, &wirepath_flow::RULE]
}

/// All tables of a program.
struct Program<T>(PhantomData<T>);

impl<T: AppSettings> Program<T> {
    const TABLES: ConfigTable = ConfigTable { tables: Self::tables, ..ConfigTable::EMPTY };
    /// For a program that describes none of its tables.
    const WITH_OTHERS: ConfigTable = ConfigTable { others: "Tables of the program.", ..Self::TABLES };

    fn tables() -> Vec<&'static ConfigTable> {
        [common_tables(), T::tables()].concat()
    }
}

impl Config {
    /// Returns the description of all tables of a program, for [`crate::reference::Reference`].
    pub fn tables<T: AppSettings>() -> &'static ConfigTable {
        if T::tables().is_empty() { &Program::<T>::WITH_OTHERS } else { &Program::<T>::TABLES }
    }

    /// Reads a configuration file. The program has no tables of its own.
    ///
    /// # Errors
    /// If the file cannot be read, a key is unknown or a value is wrong. All mistakes are reported at once, each with
    /// its position.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, Failure> {
        Self::load_with(path).map(|(config, ())| config)
    }

    /// Reads a configuration file with the program's own tables.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn load_with<T: AppSettings>(path: impl AsRef<Path>) -> Result<(Self, T), Failure> {
        let path = path.as_ref();
        let (mut config, own) = Self::parse_with(&Source::load(path)?)?;
        config.path = Some(path.to_owned());
        Ok((config, own))
    }

    /// Reads a configuration from a text. The program has no tables of its own.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse(source: &Source) -> Result<Self, Failure> {
        Self::parse_with(source).map(|(config, ())| config)
    }

    /// Reads a configuration from a text with the program's own tables.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn parse_with<T: AppSettings>(source: &Source) -> Result<(Self, T), Failure> {
        Self::parse_numbered(source, &PortNumbers::default())
    }

    /// Reads a configuration from a text for a running program, whose ports keep their numbers.
    pub(crate) fn parse_numbered<T: AppSettings>(source: &Source, numbers: &PortNumbers) -> Result<(Self, T), Failure> {
        let (config, own) = Self::read_numbered(source, Self::tables::<T>(), numbers, T::read)?;
        config.check_rules()?;
        Ok((config, own))
    }

    /// Checks the rules as far as possible without opening a port.
    ///
    /// # Errors
    /// The first rule that cannot run.
    pub fn check_rules(&self) -> Result<(), Failure> {
        self.rules.check((0..self.names.len()).map(|number| self.port(number)))
    }

    /// Reads all tables, which `tables` describes; `own` reads those of the program. It does not look at what the rules
    /// need of the ports.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read<T>(
        source: &Source,
        tables: &'static ConfigTable,
        own: impl FnOnce(&Settings<'_>, &[String]) -> Result<T, ConfigError>,
    ) -> Result<(Self, T), ConfigError> {
        Self::read_numbered(source, tables, &PortNumbers::default(), own)
    }

    /// Reads all tables like [`Self::read`], for a program whose ports have these numbers. The names that `own` gets
    /// are in the order of the numbers; a number without a port has an empty name.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn read_numbered<T>(
        source: &Source,
        tables: &'static ConfigTable,
        numbers: &PortNumbers,
        own: impl FnOnce(&Settings<'_>, &[String]) -> Result<T, ConfigError>,
    ) -> Result<(Self, T), ConfigError> {
        source.parse()?.read_as(tables, |top| {
            let ports = RuntimeConfig::ports_from_settings(top);
            let runtime = RuntimeConfig::from_settings(top);
            let names = numbers.names(RuntimeConfig::port_names(top));
            let rules = top.collect(RuleSettings::read(top, &names));
            let control = top.collect(ControlSettings::read(top));
            let privileges = top.collect(PrivilegeSettings::read(top));
            let log = top.collect(LogSettings::read(top));
            if names.is_empty() {
                let missing = || top.error_in(&PORT, "missing, expected at least one table [[port]]");
                return Err(top.misspelt(&PORT).unwrap_or_else(missing));
            }
            let own = top.collect(own(top, &names));
            top.check_keys()?;
            let config = Self {
                ports: ports?,
                runtime: runtime?,
                rules: rules?,
                control: control?,
                privileges: privileges?,
                log: log?,
                names,
                source: source.clone(),
                path: None,
            };
            Ok((config, own?))
        })
    }

    /// Returns the names of the ports by number. Numbers without a port have an empty name.
    pub fn port_names(&self) -> &[String] {
        &self.names
    }

    /// Returns the port with this number.
    pub fn port(&self, number: usize) -> Option<&PortSettings> {
        let name = self.names.get(number)?;
        self.ports.iter().find(|port| port.name == *name)
    }

    /// The text that was read.
    pub fn source(&self) -> &Source {
        &self.source
    }

    /// The file that was read, if it was one.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Opens the ports. Nothing moves yet.
    ///
    /// # Errors
    /// If a port or the packet memory cannot be had.
    pub fn open(self) -> Result<Runtime, Failure> {
        Ok(Runtime::open(self.ports, self.runtime)?)
    }
}
