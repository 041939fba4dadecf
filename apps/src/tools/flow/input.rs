use std::io::Read;
use std::path::Path;
use wirepath_packet::PortId;

use wirepath_flow::rule_file::{self, FileFormat, FileRule};
use wirepath_flow::{Ports, Rule, list_from_settings};
use wirepath_pipeline::rules::{RuleLimits, RuleLocations, judge};
use wirepath_settings::{ConfigError, Source};

use super::InputArguments;
use crate::gateway::Setup;
use crate::l2fwd::Mode;
use wirepath::cli::Failure;
use wirepath::rules::{Entry, Hardware, RuleSettings, UnopenedPorts};
use wirepath::{AppSettings, Config};

/// The program that a configuration is for.
#[derive(Debug)]
pub enum Program {
    /// `l2fwd`.
    L2fwd(Box<(Config, Mode)>),
    /// `tunnel-gateway`.
    Gateway(Box<Setup>),
}

impl Program {
    /// Returns whether the program's rules may run in NICs.
    pub(super) fn hardware(&self) -> Hardware {
        match self {
            Self::L2fwd(program) => program.0.rules.hardware,
            Self::Gateway(setup) => setup.common.rules.hardware,
        }
    }
}

/// Ports that rules can name.
#[derive(Clone, Debug, Default)]
pub struct PortNames {
    /// Name of each port and its number of receive queues, if known.
    pub ports: Vec<(String, Option<u16>)>,
}

impl PortNames {
    /// Returns the names with the numbers of the ports, for reading and printing rules.
    pub(super) fn names(&self) -> Vec<(&str, PortId)> {
        self.ports.iter().zip(0..).map(|((name, _), id)| (name.as_str(), PortId::new(id))).collect()
    }
}

/// Content of a file.
#[derive(Debug)]
pub(super) struct Input {
    /// The file and the files that it refers to.
    pub(super) sources: Vec<Source>,
    pub(super) entries: Vec<Entry>,
    pub(super) errors: Vec<ConfigError>,
    pub(super) ports: PortNames,
    /// The program, if the configuration is valid.
    pub(super) program: Option<Program>,
}

/// Maximum number of bytes read from standard input.
const MAX_STDIN: u64 = 16 << 20;

fn load(file: &Path) -> Result<Source, Failure> {
    if file != Path::new("-") {
        return Ok(Source::load(file)?);
    }
    let mut text = String::new();
    std::io::stdin()
        .lock()
        .take(MAX_STDIN + 1)
        .read_to_string(&mut text)
        .map_err(|error| Failure::usage(format!("standard input: {error}")))?;
    if text.len() as u64 > MAX_STDIN {
        return Err(Failure::usage("standard input: at most 16 MiB are read"));
    }
    Ok(Source::new("-", text))
}

/// Reads rules and the rest of a configuration. Returns `Err` only if the file cannot be read at all.
pub(super) fn read(arguments: &InputArguments) -> Result<Input, Failure> {
    let source = load(&arguments.file)?;
    let form = arguments.form.map_or_else(|| FileFormat::of(&source), FileFormat::from);
    let ports = PortNames { ports: arguments.ports.iter().map(|name| (name.clone(), None)).collect() };
    let mut input =
        Input { sources: vec![source.clone()], entries: Vec::new(), errors: Vec::new(), ports, program: None };
    let listed = match form {
        FileFormat::Toml => input.toml(&source),
        form => rule_file::read(&source, form, Ports(&input.ports.names())),
    };
    match listed {
        Ok(listed) => {
            for FileRule { span, rule } in listed {
                match rule {
                    Ok(rule) => input.entries.push(Entry { span, rule }),
                    Err(error) => input.errors.extend(error.split().0),
                }
            }
            if input.program.is_none() {
                input.refuse_beyond_limits();
            }
        }
        Err(error) => input.errors.extend(error.split().0),
    }
    Ok(input)
}

impl Input {
    /// Moves rules that the program would refuse from the entries to the errors.
    pub(super) fn refuse(&mut self, judged: Vec<Result<RuleLocations, String>>) {
        let entries = std::mem::take(&mut self.entries);
        for (entry, judged) in entries.into_iter().zip(judged) {
            match judged {
                Ok(_) => self.entries.push(entry),
                Err(why) => self.errors.push(entry.span.error(why)),
            }
        }
    }

    fn rules(&self) -> Vec<Rule> {
        self.entries.iter().map(|entry| entry.rule.clone()).collect()
    }

    /// Refuses rules beyond the limits of a list, which hold on any ports.
    fn refuse_beyond_limits(&mut self) {
        self.refuse(judge(&self.rules(), None, &[], &RuleLimits::default()));
    }

    /// Refuses rules that the program would refuse on its ports.
    pub(super) fn refuse_on_ports(&mut self) -> Result<(), Failure> {
        let ports = match &self.program {
            Some(Program::L2fwd(program)) => &program.0.ports,
            Some(Program::Gateway(setup)) => &setup.common.ports,
            None => return Ok(()),
        };
        let rules = self.rules();
        self.refuse(UnopenedPorts::ask(ports, &rules)?.judge(&rules));
        Ok(())
    }

    fn toml(&mut self, source: &Source) -> Result<Vec<FileRule>, ConfigError> {
        let document = source.parse()?;
        let top = document.settings();
        if !["port", "l2fwd", "underlay", "segment", "workers", "pool", "rules"].iter().any(|key| top.has(*key)) {
            let rules = list_from_settings(&top, Ports(&self.ports.names()))?;
            top.finish()?;
            return Ok(rules);
        }
        // Invalid rules are reported together, not by the program's reader, which stops at the first one.
        let ports = wirepath_pipeline::RuntimeConfig::ports_from_settings(&document.settings());
        if let Ok(ports) = &ports {
            self.ports.ports = ports.iter().map(|port| (port.name.clone(), Some(port.queues))).collect();
        }
        let (rules, file) = RuleSettings::list(&top, &self.ports.names())?;
        self.sources.extend(file);
        let sound = rules.iter().all(|listed| listed.rule.is_ok());
        if ports.is_ok() && !sound {
            return Ok(rules);
        }
        let program = if ["underlay", "segment"].iter().any(|key| top.has(*key)) {
            Setup::read(source).map(|setup| Program::Gateway(Box::new(setup)))
        } else {
            Config::read(source, Config::tables::<Mode>(), Mode::read).map(|program| Program::L2fwd(Box::new(program)))
        };
        match program {
            Ok(program) => self.program = Some(program),
            Err(error) => self.errors.extend(error.split().0),
        }
        Ok(rules)
    }
}
