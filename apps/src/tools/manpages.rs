//! `wirepath manpages`: writes the manual pages, for packages.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};

use super::programs;
use wirepath::cli::Failure;

/// Writes the manual pages of all programs and subcommands to a folder
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
    Ok(())
}

/// Writes the page of a command and those of its subcommands.
fn write(command: &Command, folder: &Path) -> std::io::Result<()> {
    for subcommand in command.get_subcommands().filter(|it| !it.is_hide_set()) {
        write(subcommand, folder)?;
    }
    // The notes are examples, whose lines must stay as they are.
    let notes = command.get_after_long_help().or_else(|| command.get_after_help()).map(ToString::to_string);
    let plain = command.clone().after_help(None::<&str>).after_long_help(None::<&str>);
    let version = concat!("Wirepath ", env!("CARGO_PKG_VERSION"));
    let man = Man::new(plain).source(version).manual("Wirepath");
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
