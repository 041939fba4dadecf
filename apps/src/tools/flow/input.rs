use std::io::Read;
use std::path::Path;

use wirepath_pmd::flow::list::{self, Form, Listed};
use wirepath_pmd::flow::{Ports, list_from_settings};
use wirepath_pmd::settings::{ConfigError, Source};

use super::InputArguments;
use crate::cli::Failure;
use crate::gateway::Setup;
use crate::l2fwd::Config;
use crate::rules::{Entry, Hardware, RuleSettings};

/// Which program a configuration is for.
#[derive(Debug)]
pub enum Program {
    /// `l2fwd`.
    L2fwd(Config),
    /// `tunnel-gateway`.
    Gateway(Setup),
}

impl Program {
    /// Whether its rules go into NICs.
    pub(super) fn hardware(&self) -> Hardware {
        match self {
            Self::L2fwd(config) => config.rules.hardware,
            Self::Gateway(setup) => setup.rules.hardware,
        }
    }
}

/// Ports that rules name.
#[derive(Clone, Debug, Default)]
pub struct Origin {
    /// Names of the ports and how many receive queues each has, if that is known.
    pub ports: Vec<(String, Option<u16>)>,
}

/// What came of reading a file.
#[derive(Debug)]
pub(super) struct Input {
    /// The file, and those that it names.
    pub(super) sources: Vec<Source>,
    pub(super) entries: Vec<Entry>,
    pub(super) errors: Vec<ConfigError>,
    pub(super) origin: Origin,
    /// Of a configuration that is in order.
    pub(super) program: Option<Program>,
}

/// Most bytes read from standard input.
const MOST: u64 = 16 << 20;

fn load(file: &Path) -> Result<Source, Failure> {
    if file != Path::new("-") {
        return Ok(Source::load(file)?);
    }
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .take(MOST + 1)
        .read_to_string(&mut text)
        .map_err(|error| Failure::usage(format!("standard input: {error}")))?;
    if text.len() as u64 > MOST {
        return Err(Failure::usage("standard input: at most 16 MiB are read"));
    }
    Ok(Source::new("-", text))
}

/// Reads rules and, of a configuration, everything else. Only a file that cannot be read at all is an `Err`.
pub(super) fn read(arguments: &InputArguments) -> Result<Input, Failure> {
    let source = load(&arguments.file)?;
    let form = arguments.form.map_or_else(|| Form::of(&source), Form::from);
    let origin = Origin { ports: arguments.ports.iter().map(|name| (name.clone(), None)).collect() };
    let mut input =
        Input { sources: vec![source.clone()], entries: Vec::new(), errors: Vec::new(), origin, program: None };
    let listed = match form {
        Form::Toml => input.toml(&source),
        form => list::read(&source, form, Ports(&input.names())),
    };
    match listed {
        Ok(listed) => {
            for Listed { place, rule } in listed {
                match rule {
                    Ok(rule) => input.entries.push(Entry { place, rule }),
                    Err(error) => input.errors.push(error),
                }
            }
        }
        Err(error) => input.errors.push(error),
    }
    Ok(input)
}

impl Input {
    fn names(&self) -> Vec<(&str, u16)> {
        self.origin.ports.iter().zip(0..).map(|((name, _), id)| (name.as_str(), id)).collect()
    }

    fn toml(&mut self, source: &Source) -> Result<Vec<Listed>, ConfigError> {
        let document = source.parse()?;
        let top = document.settings();
        if !["port", "l2fwd", "underlay", "segment", "workers", "pool", "rules"].iter().any(|key| top.has(key)) {
            let rules = list_from_settings(&top, Ports(&self.names()))?;
            top.finish()?;
            return Ok(rules);
        }
        // A rule that is wrong is told with the others of its kind, not by the program.
        let ports = wirepath_pipeline::RuntimeConfig::ports_from_settings(&document.settings());
        if let Ok(ports) = &ports {
            self.origin.ports = ports.iter().map(|port| (port.name.clone(), Some(port.queues))).collect();
        }
        let (rules, file) = RuleSettings::list(&top, &self.names())?;
        self.sources.extend(file);
        let sound = rules.iter().all(|listed| listed.rule.is_ok());
        if ports.is_ok() && !sound {
            return Ok(rules);
        }
        let program = if ["underlay", "segment"].iter().any(|key| top.has(key)) {
            Setup::read(source).map(Program::Gateway)
        } else {
            Config::read(source).map(Program::L2fwd)
        };
        match program {
            Ok(program) => self.program = Some(program),
            Err(error) => self.errors.push(error),
        }
        Ok(rules)
    }
}
