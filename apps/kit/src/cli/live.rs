//! The rates of a running program on its terminal, redrawn in place. Log lines scroll by above them.
//!
//! The rates are a block of lines above the cursor. Each frame moves the cursor up, erases what is below it, and
//! writes the block again (ECMA-48: CUU and ED). A log line does the same, with the line before the block. Both go
//! through one queue, which never waits for the terminal.

use std::io::{self, IsTerminal};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::termios::{tcgetpgrp, tcgetwinsize};
use wirepath_pipeline::Rates;

use super::outbox::{STDERR, STDOUT};
use super::output::{Rate, Table, sanitized};

static BLOCK: Mutex<Block> = Mutex::new(Block { lines: Vec::new(), ended: false });

#[derive(Debug)]
struct Block {
    /// The lines on the terminal.
    lines: Vec<String>,
    /// True if results follow, and no more rates.
    ended: bool,
}

fn block() -> MutexGuard<'static, Block> {
    BLOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns whether standard output is a terminal on which text can be redrawn in place.
pub fn can_redraw() -> bool {
    io::stdout().is_terminal() && std::env::var_os("TERM").is_some_and(|term| term != "dumb")
}

/// Redraws the rates in place. On anything but a terminal, nothing is written. If the terminal has not taken the
/// frame before, this one is left out.
pub fn show_live(text: &str) {
    if !can_redraw() || !is_in_foreground() {
        // A shell may have written to the terminal, so the place of the last frame is unknown.
        block().lines.clear();
        return;
    }
    let (width, height) = size();
    let lines: Vec<String> = sanitized(text).lines().take(height - 1).map(|line| cut(line, width)).collect();
    let mut block = block();
    if block.ended || !STDOUT.is_idle() {
        return;
    }
    let frame = erase(&block.lines, width) + &joined(&lines);
    if STDOUT.try_offer(frame.as_bytes()) {
        block.lines = lines;
    }
}

/// Writes lines of the log, above the rates if there are any. Never waits.
pub(super) fn log(text: &[u8]) {
    let block = block();
    if block.lines.is_empty() || !is_same_terminal() {
        drop(block);
        return STDERR.offer(text);
    }
    let mut frame = erase(&block.lines, size().0).into_bytes();
    frame.extend_from_slice(text);
    frame.extend_from_slice(joined(&block.lines).as_bytes());
    if !STDOUT.try_offer(&frame) {
        STDERR.offer(text);
    }
}

/// Removes the rates, because a result or an error follows.
pub(super) fn end() {
    let mut block = block();
    block.ended = true;
    let lines = std::mem::take(&mut block.lines);
    if !lines.is_empty() {
        STDOUT.try_offer(erase(&lines, size().0).as_bytes());
        drop(block);
        // Errors come on standard error, after this.
        let _ = STDOUT.flush();
    }
}

/// Columns and lines of the terminal.
fn size() -> (usize, usize) {
    let size = tcgetwinsize(io::stdout().as_fd());
    let (width, height) = size.map_or((0, 0), |size| (size.ws_col.into(), size.ws_row.into()));
    // A serial line has no size.
    (if width == 0 { 80 } else { width }, if height == 0 { 24 } else { height })
}

/// Returns whether the program may draw. A shell owns the terminal while it runs the program in the background.
fn is_in_foreground() -> bool {
    // A terminal that is not the controlling one belongs to no shell of this session.
    tcgetpgrp(io::stdout().as_fd()).map_or_else(
        |error| error == rustix::io::Errno::NOTTY && tcgetwinsize(io::stdout().as_fd()).is_ok(),
        |group| group == rustix::process::getpgrp(),
    )
}

/// Returns whether standard error is the terminal of standard output.
fn is_same_terminal() -> bool {
    let device = |status: rustix::io::Result<rustix::fs::Stat>| status.ok().map(|status| status.st_rdev);
    let (stdout, stderr) = (rustix::fs::fstat(io::stdout()), rustix::fs::fstat(io::stderr()));
    io::stderr().is_terminal() && device(stdout) == device(stderr)
}

/// Cuts a line to less than the width, so that it never wraps.
fn cut(line: &str, width: usize) -> String {
    line.chars().take(width.saturating_sub(1)).collect()
}

fn joined(lines: &[String]) -> String {
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Returns what moves the cursor to the first of these lines and erases them. A terminal that has become narrower
/// has wrapped them.
fn erase(lines: &[String], width: usize) -> String {
    let rows: usize = lines.iter().map(|line| line.chars().count().div_ceil(width.max(1)).max(1)).sum();
    if rows == 0 { String::new() } else { format!("\r\x1b[{rows}A\x1b[J") }
}

/// Returns the table of the rates of all ports, with the time since the start.
pub fn rates_table(rates: &Rates) -> String {
    let names = ["RX pps", "RX bit/s", "TX pps", "TX bit/s", "DROPS/s"];
    let time = format!("{:.0} s", rates.elapsed.as_secs_f64());
    let headings = names.map(|name| (name.to_owned(), true));
    let mut table = Table::with_columns([(time, false)].into_iter().chain(headings));
    let cell = |rate: f64| Rate(rate).to_string().trim_end().to_owned();
    for port in &rates.ports {
        let figures = [port.rx_pps, port.rx_bps, port.tx_pps, port.tx_bps, port.drop_pps].map(cell);
        table.push([port.name.clone()].into_iter().chain(figures));
    }
    if rates.worker_drop_pps > 0.0 {
        let none = [const { String::new() }; 4];
        table.push(["workers".to_owned()].into_iter().chain(none).chain([cell(rates.worker_drop_pps)]));
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_erased_also_if_they_have_wrapped() {
        let lines = ["x".repeat(70), "y".repeat(10), String::new()].to_vec();
        assert_eq!(erase(&lines, 80), "\r\x1b[3A\x1b[J");
        assert_eq!(erase(&lines, 35), "\r\x1b[4A\x1b[J");
        assert_eq!(erase(&[], 80), "");
        assert_eq!(cut("abc\u{e4}", 4), "abc");
    }

    #[test]
    fn rates_are_a_table() {
        let port = wirepath_pipeline::PortRates {
            name: "east".to_owned(),
            rx_pps: 1e6,
            rx_bps: 8e8,
            tx_pps: 7.0,
            tx_bps: 0.0,
            drop_pps: 0.0,
        };
        let rates = Rates { elapsed: std::time::Duration::from_secs(3), ports: vec![port], worker_drop_pps: 5.0 };
        let expected = "3 s      RX pps  RX bit/s  TX pps  TX bit/s  DROPS/s\n\
                        east     1.00 M  800.00 M       7         0        0\n\
                        workers                                            5\n";
        assert_eq!(rates_table(&rates), expected);
    }
}
