//! The terminal: it is prepared once, and restored on every way out.

use std::io::{self, Stdout};

use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::{Frame, Terminal};

use crate::cli::Failure;

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
