//! The terminal: it is prepared once, and restored on every way out.

use std::io::{self, Stdout};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::{Frame, Terminal};

use wirepath::cli::Failure;

/// The alternate screen of the terminal, without echo and line editing. Dropping it restores the terminal.
#[derive(Debug)]
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
}

impl Screen {
    /// Prepares the terminal. From here on, a panic restores it before its message is written.
    ///
    /// # Errors
    /// If the terminal does not allow it.
    pub(super) fn enter() -> Result<Self, Failure> {
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()));
        let terminal = terminal.map_err(|error| failed(&error))?;
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
        }));
        // The value exists before the first change, so an error on the way restores what was changed.
        let screen = Self { terminal };
        enable_raw_mode().map_err(|error| failed(&error))?;
        execute!(io::stdout(), EnterAlternateScreen).map_err(|error| failed(&error))?;
        Ok(screen)
    }

    /// Draws a frame. The size is that of the terminal at this moment.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> Result<(), Failure> {
        self.terminal.draw(draw).map(|_| ()).map_err(|error| failed(&error))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn failed(error: &io::Error) -> Failure {
    Failure::failed(format!("the terminal: {error}"))
}

/// Restores the terminal. Errors are ignored: a terminal that is gone needs no restoring.
fn restore() {
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::process::{Command, Stdio};

    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::tcgetattr;

    use super::*;

    /// Set in the process that panics.
    const PLANTED: &str = "WIREPATH_TEST_PANIC";

    fn clone(slave: &File) -> Stdio {
        slave.try_clone().unwrap().into()
    }

    #[test]
    fn a_panic_restores_the_terminal() {
        if std::env::var_os(PLANTED).is_some() {
            let _screen = Screen::enter().unwrap();
            panic!("planted");
        }
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let before = format!("{:?}", tcgetattr(&slave).unwrap());
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "tools::top::screen::tests::a_panic_restores_the_terminal", "--nocapture"]);
        command.env(PLANTED, "1").env("RUST_BACKTRACE", "0");
        let status = command.stdin(clone(&slave)).stdout(clone(&slave)).stderr(clone(&slave)).status().unwrap();
        assert!(!status.success());
        assert_eq!(format!("{:?}", tcgetattr(&slave).unwrap()), before);
        // Without a slave, the master ends with an error behind the last output.
        drop((command, slave));
        let (mut master, mut text, mut bytes) = (File::from(master), String::new(), [0; 4096]);
        while let Ok(n @ 1..) = master.read(&mut bytes) {
            text += &String::from_utf8_lossy(&bytes[..n]);
        }
        let at = |what: &str| text.find(what).unwrap_or_else(|| panic!("{what:?}: {text:?}"));
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l") && at("\x1b[?1049l") < at("planted"), "{text:?}");
    }
}
