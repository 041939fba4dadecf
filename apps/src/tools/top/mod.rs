//! `wirepath top`: a live view of a running program.

mod app;
mod keys;
mod model;
mod sample;
mod screen;
#[cfg(test)]
mod tests;
mod view;

use std::io::IsTerminal;
use std::sync::mpsc::TryRecvError;
use std::time::Duration;

use clap::Args;

use self::app::App;
use self::sample::{Program, Sampler};
use self::screen::Screen;
use wirepath::cli::{Failure, Stop, hangup_flag, print};
use wirepath::control_socket::{Client, SocketArgument};

/// Shows rates of ports, workers, drops, queues, segments and rules of a running program, live
///
/// It needs a terminal. The program is the only one that runs, or the one whose control socket --socket names.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// Seconds between two looks at the program
    #[arg(short, long, value_name = "N", default_value = "1", value_parser = wirepath::cli::seconds)]
    interval: Duration,

    #[command(flatten)]
    socket: SocketArgument,
}

const HELP: &str = "\
Keys: Tab or 1-6 pane, s sort column, r reverse, / filter, Enter open, Esc back, p pause, h help, q quit.
Colours are left out if the variable NO_COLOR is set.

Examples:
  wirepath top
  wirepath top --interval 5 --socket gateway.sock
  wirepath show ports --rates --watch          # the same figures without a terminal";

/// Longest wait for a key, after which samples and signals are looked at.
const WAIT: Duration = Duration::from_millis(50);

/// Runs the subcommand.
///
/// # Errors
/// If the output is no terminal, or the program does not answer.
pub fn run(options: &Options, json: bool) -> Result<(), Failure> {
    let instead = "`wirepath show TABLE --watch` prints figures elsewhere, with --json for programs";
    if json {
        return Err(Failure::usage(format!("top has no JSON form: {instead}")));
    }
    if !std::io::stdin().is_terminal() {
        return Err(Failure::usage(format!("standard input is no terminal: {instead}")));
    }
    if !std::io::stdout().is_terminal() || std::env::var_os("TERM").is_none_or(|term| term == "dumb") {
        return Err(Failure::usage(format!("standard output is no terminal that can be redrawn: {instead}")));
    }
    let mut client = options.socket.connect()?;
    let program = Program::ask(&mut client)?;
    let path = client.path().to_owned();
    let sampler = Sampler::start(client, &program, options.interval)?;
    let app = App::new(program, options.interval);
    let ended = format!("{}, pid {}, has ended\n", app.program.name, app.program.pid);
    match watch(app, &sampler)? {
        // A program that still listens has not ended, but failed to answer.
        Some(failure) if Client::connect(&path).is_ok() => Err(failure),
        Some(_) => print(ended),
        None => Ok(()),
    }
}

/// Shows the program until the user or a signal ends it, or until the program fails to answer.
fn watch(mut app: App, sampler: &Sampler) -> Result<Option<Failure>, Failure> {
    let (stop, hangup) = (Stop::on_signals()?, hangup_flag());
    let color = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut screen = Screen::enter()?;
    loop {
        match sampler.samples.try_recv() {
            Ok(Ok(sample)) => app.take(sample),
            Ok(Err(failure)) => return Ok(Some(failure)),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return Err(Failure::failed("the thread that takes samples has ended")),
        }
        app.clamp();
        screen.draw(|frame| view::draw(frame, &app, color))?;
        // A resize needs no more than the next drawing.
        match keys::read(WAIT) {
            Some(keys) => keys.into_iter().for_each(|key| app.key(key)),
            None => return Ok(None),
        }
        app.tell(sampler);
        if app.quit || stop.requested() || hangup.load(std::sync::atomic::Ordering::SeqCst) {
            return Ok(None);
        }
    }
}
