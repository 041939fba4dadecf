//! `wirepath manpages`: writes the manual pages, for packages.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use super::config::reference;
use super::programs;
use wirepath::cli::Failure;
use wirepath::reference::{Listed, Missing, describe};
use wirepath::settings::{Form, KeySpec};

/// Writes the manual pages of all programs and subcommands, and that of configurations, to a folder
#[derive(Debug, Args)]
pub struct Options {
    /// The folder
    #[arg(value_name = "FOLDER")]
    folder: PathBuf,
}

/// Writes the pages.
pub fn run(options: &Options, _: bool) -> Result<(), Failure> {
    let at = |error| Failure::failed(format!("{}: {error}", options.folder.display()));
    fs::create_dir_all(&options.folder).map_err(at)?;
    for program in programs() {
        let mut program = program.disable_help_subcommand(true);
        program.build();
        write(&program, &options.folder).map_err(at)?;
    }
    write_configuration(&options.folder).map_err(at)?;
    write_topology(&options.folder).map_err(at)
}

const MANUAL: &str = "Wirepath";
const VERSION: &str = concat!("Wirepath ", env!("CARGO_PKG_VERSION"));

/// Writes the page of all tables and keys of configurations, for section 5.
fn write_configuration(folder: &Path) -> std::io::Result<()> {
    let mut page = Roff::default();
    page.control("TH", ["wirepath-configuration", "5", "", VERSION, MANUAL]);
    page.control("SH", ["NAME"]);
    page.text([roman("wirepath-configuration - configuration files of tunnel-gateway(1) and l2fwd(1)")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([roman(
        "A configuration is a file in TOML. Unknown keys and wrong values are errors, and one run reports all of them. \
         A key that is left out has its default. ",
    )]);
    page.text([bold("wirepath config reference NAME"), roman(" shows a table or key of this page.")]);
    for listed in &reference::reference().tables {
        write_table(&mut page, listed);
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([roman("tunnel-gateway(1), l2fwd(1), wirepath-config(1), wirepath-config-reference(1)")]);
    fs::write(folder.join("wirepath-configuration.5"), page.to_roff())
}

/// Writes the page of all tables and keys of topologies, for section 5.
fn write_topology(folder: &Path) -> std::io::Result<()> {
    let mut page = Roff::default();
    page.control("TH", ["wirepath-topology", "5", "", VERSION, MANUAL]);
    page.control("SH", ["NAME"]);
    page.text([roman("wirepath-topology - files of emulated NICs for wirepath-emulate(1)")]);
    page.control("SH", ["DESCRIPTION"]);
    page.text([roman(
        "A topology is a file in TOML. Unknown keys and wrong values are errors. A key that is left out has its \
         default. ",
    )]);
    page.text([bold("wirepath config reference --topology NAME"), roman(" shows a table or key of this page.")]);
    for listed in &reference::topology().tables {
        write_table(&mut page, listed);
    }
    page.control("SH", ["SEE ALSO"]);
    page.text([roman("wirepath-emulate(1), wirepath-config-reference(1), wirepath-configuration(5)")]);
    fs::write(folder.join("wirepath-topology.5"), page.to_roff())
}

fn write_table(page: &mut Roff, listed: &Listed) {
    let table = listed.table;
    page.control("SH", [listed.heading().as_str()]);
    page.text([roman(table.about), roman(format!(" Programs: {}.", listed.programs.join(", ")))]);
    if !table.absent.is_empty() {
        page.text([roman(format!("Without the table: {}.", table.absent))]);
    }
    if !table.others.is_empty() {
        page.text([roman(format!("Further keys: {}.", table.others))]);
    }
    table.keys.iter().for_each(|key| write_key(page, *key));
    if !table.example.is_empty() {
        page.control("PP", []).text([roman("Example:")]).control("nf", []);
        table.example.lines().for_each(|line| _ = page.text([roman(format!("  {line}"))]));
        page.control("fi", []);
    }
}

fn write_key(page: &mut Roff, key: &dyn KeySpec) {
    let form = key.form();
    let heading: Vec<Inline> = vec![bold(key.name()), roman(": "), italic(describe(&form))];
    page.control("TP", []).text(heading);
    page.text([roman(key.about())]);
    page.control("br", []).text([roman(format!("({})", Missing::of(key)))]);
    if !key.when().is_empty() {
        page.text([roman(format!("With {}.", key.when()))]);
    }
    if let Form::Choice(words) = form {
        page.control("RS", []);
        for word in words {
            page.control("TP", []).text([bold(format!("\"{}\"", word.word))]).text([roman(word.about)]);
        }
        page.control("RE", []);
    }
}

/// Writes the page of a command and those of its subcommands.
fn write(command: &Command, folder: &Path) -> std::io::Result<()> {
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write(subcommand, folder)?;
    }
    // The notes are examples, whose lines must stay as they are.
    let notes = command.get_after_long_help().or_else(|| command.get_after_help()).map(ToString::to_string);
    let plain = command.clone().after_help(None::<&str>).after_long_help(None::<&str>);
    let man = Man::new(plain).source(VERSION).manual(MANUAL);
    let mut page = Vec::new();
    man.render(&mut page)?;
    if let Some(notes) = notes {
        let mut roff = Roff::default();
        roff.control("SH", ["NOTES"]).control("nf", []);
        notes.lines().for_each(|line| _ = roff.text([roman(line)]));
        roff.control("fi", []).to_writer(&mut page)?;
    }
    fs::write(folder.join(man.get_filename()), page)
}
