//! `wirepath config reference`: all tables and keys of configurations and topologies.

use clap::Args;
use wirepath::Config;
use wirepath::cli::{Failure, print, print_json};
use wirepath::reference::{Reference, Selected, markdown, text};
use wirepath_nic_emulator::topology::TOPOLOGY;

use crate::gateway;
use crate::l2fwd::Mode;

/// Explains the tables and keys of configurations: values, defaults, ranges, units
///
/// Without NAME, it lists all tables with the names of their keys. NAME is a table (workers, port.af_xdp, af_xdp), a
/// key of a table (port.mtu), or a key of any table (mtu). A name that no configuration has is looked up in the
/// topologies of `wirepath emulate`.
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Table, key of a table (TABLE.KEY), or key
    #[arg(value_name = "NAME", conflicts_with = "markdown")]
    name: Option<String>,

    /// Explain the topologies of `wirepath emulate` instead
    #[arg(long)]
    topology: bool,

    /// Print the whole reference as a page in Markdown
    #[arg(long)]
    markdown: bool,
}

/// Returns the tables of configurations of all programs.
pub fn reference() -> Reference {
    Reference::new(&[("tunnel-gateway", &gateway::TABLES), ("l2fwd", Config::tables::<Mode>())])
}

/// Returns the tables of topologies.
pub fn topology() -> Reference {
    Reference::new(&[("wirepath emulate", &TOPOLOGY)])
}

/// Command that writes the page of configurations in the guide.
pub const PAGE_COMMAND: &str = "wirepath config reference --markdown >apps/guide/configuration.md";

/// Command that writes the page of topologies in the guide.
pub const TOPOLOGY_PAGE_COMMAND: &str = "wirepath config reference --topology --markdown >apps/guide/topology.md";

/// Prints the reference.
///
/// # Errors
/// If no table and no key has the name.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let (configurations, topologies) = (reference(), topology());
    if options.markdown {
        return print(match options.topology {
            true => markdown::page(&topologies, "Topology", "a topology of `wirepath emulate`", TOPOLOGY_PAGE_COMMAND),
            false => markdown::page(&configurations, "Configuration", "a configuration", PAGE_COMMAND),
        });
    }
    let reference = if options.topology { &topologies } else { &configurations };
    let Some(name) = &options.name else {
        let all: Vec<Selected<'_>> = reference.tables.iter().map(|listed| Selected { listed, key: None }).collect();
        return if json { print_json(&reference.to_json(&all)) } else { print(text::overview(reference)) };
    };
    let (reference, selected) = match (reference.find(name), topologies.find(name)) {
        (Ok(selected), _) => (reference, selected),
        (Err(_), Ok(selected)) => (&topologies, selected),
        (Err(why), Err(_)) => {
            let remedy = "`wirepath config reference` lists all tables with their keys";
            return Err(Failure::usage(format!("{why}; {remedy}")));
        }
    };
    if json { print_json(&reference.to_json(&selected)) } else { print(text::details(reference, &selected)) }
}
