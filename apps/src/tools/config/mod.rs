//! `wirepath config`: the configuration of a running program, and the reference of all keys.

pub mod reference;

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;

use wirepath::cli::{Failure, print, print_error, print_json};
use wirepath::control_socket::SocketArgument;

/// Shows or saves the configuration of a running program, or explains the keys of configurations
#[derive(Clone, Debug, Args)]
pub struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// Prints the configuration in force, with all changes since the start
    Show {
        #[command(flatten)]
        socket: SocketArgument,
    },
    /// Writes the configuration in force to a file, from which the program starts to the same state
    ///
    /// An existing file is replaced whole; a device or a pipe gets the text. Without FILE, that is the file with which
    /// the program was started.
    Save {
        /// File to write
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,

        #[command(flatten)]
        socket: SocketArgument,
    },
    Reference(reference::Options),
}

/// Runs the subcommand.
///
/// # Errors
/// If the program does not answer, or the file cannot be written.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    match &options.command {
        Command::Show { socket } => show(socket, json),
        Command::Reference(options) => reference::run(options, json),
        Command::Save { file, socket } => {
            let mut client = socket.connect()?;
            let text = client.configuration()?;
            let own = client.ask(&json!({ "request": "status" }))?["configuration"].as_str().map(PathBuf::from);
            let none = "the program was started without a configuration file; name the file to write";
            let path = file.clone().or_else(|| own.clone()).ok_or_else(|| Failure::usage(none))?;
            replace(&path, &text).map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
            let folder = |path: &Path| path.parent().and_then(|folder| std::fs::canonicalize(folder).ok());
            let canonical = |path: &PathBuf| std::fs::canonicalize(path).ok();
            if own.as_ref().and_then(canonical) == canonical(&path) {
                // What was added while the program ran belongs to the file from now on.
                client.ask(&json!({ "request": "reload" }))?;
            } else if own.as_deref().and_then(folder) != std::path::absolute(&path).ok().as_deref().and_then(folder) {
                let note = "note: the file is in another folder than the program's; relative paths in it refer to its \
                            own folder\n";
                print_error(note);
            }
            if json {
                print_json(&json!({ "file": path, "bytes": text.len() }))
            } else {
                print(format!("{}: {} bytes\n", path.display(), text.len()))
            }
        }
    }
}

/// Prints the configuration in force.
pub(super) fn show(socket: &SocketArgument, json: bool) -> Result<(), Failure> {
    let text = socket.connect()?.configuration()?;
    if json { print_json(&json!({ "text": text })) } else { print(text) }
}

/// Replaces a file by another one at once, so that no reader sees half of it. The new one has the owner and the
/// permissions of the old one.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    match std::fs::metadata(path) {
        // A device or a pipe takes the text; it is not replaced by a file.
        Ok(there) if !there.is_file() => return File::options().write(true).open(path)?.write_all(text.as_bytes()),
        Err(_) if path.is_symlink() => return Err(std::io::Error::other("a link whose target does not exist")),
        _ => {}
    }
    // The target of a link is replaced, not the link.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = path.file_name().ok_or_else(|| std::io::Error::other("expected the name of a file"))?;
    let mut temporary = name.to_owned();
    temporary.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(temporary);
    let written = File::options().write(true).create_new(true).open(&temporary).and_then(|mut file| {
        if let Ok(old) = std::fs::metadata(&path) {
            // Only root can give the file back to another owner.
            let _ = std::os::unix::fs::fchown(&file, Some(old.uid()), Some(old.gid()));
            file.set_permissions(old.permissions())?;
        }
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)
    });
    written.inspect_err(|_| _ = std::fs::remove_file(&temporary))
}
