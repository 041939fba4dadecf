//! `wirepath config reference`: all tables and keys of configurations.

use clap::Args;
use wirepath::Config;
use wirepath::cli::{Failure, print, print_json};
use wirepath::reference::{Reference, Selected, markdown, text};

use crate::gateway;
use crate::l2fwd::Mode;

/// Explains the tables and keys of configurations: values, defaults, ranges, units
///
/// Without NAME, it lists all tables with the names of their keys. NAME is a table (workers, port.af_xdp, af_xdp), a
/// key of a table (port.mtu), or a key of any table (mtu).
#[derive(Clone, Debug, Args)]
pub struct Options {
    /// Table, key of a table (TABLE.KEY), or key
    #[arg(value_name = "NAME", conflicts_with = "markdown")]
    name: Option<String>,

    /// Print the whole reference as a page in Markdown
    #[arg(long)]
    markdown: bool,
}

/// Returns the tables of all programs.
pub fn reference() -> Reference {
    Reference::new(&[("tunnel-gateway", &gateway::TABLES), ("l2fwd", Config::tables::<Mode>())])
}

/// Command that writes the page of the guide.
pub const PAGE_COMMAND: &str = "wirepath config reference --markdown >apps/guide/configuration.md";

/// Prints the reference.
///
/// # Errors
/// If no table and no key has the name.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let reference = reference();
    if options.markdown {
        return print(markdown::page(&reference, PAGE_COMMAND));
    }
    let all = || reference.tables.iter().map(|listed| Selected { listed, key: None }).collect();
    let selected = match &options.name {
        Some(name) => reference.find(name).map_err(|why| {
            Failure::usage(format!("{why}; `wirepath config reference` lists all tables with their keys"))
        })?,
        None => all(),
    };
    if json {
        return print_json(&reference.to_json(&selected));
    }
    if options.name.is_some() { print(text::details(&reference, &selected)) } else { print(text::overview(&reference)) }
}
