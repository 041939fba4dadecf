//! Programs on a terminal: `wirepath top`, and the rates of a running program. The tests need no privilege.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use wirepath_testlab::eventually;

use crate::control::terminal;
use crate::show::{L2FWD, PORTS, Program};

const WAIT_LIMIT: Duration = Duration::from_secs(60);
/// A rule that drops what one port receives, for a drop reason with figures.
const RULE: &str = "[[rule]]\nrule = 'ingress prio 1: port id east => count, drop'\n";

/// A terminal of 80 columns and 24 lines, and what was written to it.
struct Terminal {
    master: File,
    slave: File,
    written: Arc<Mutex<Vec<u8>>>,
    settings: String,
}

impl Terminal {
    fn new() -> Self {
        let (master, slave) = terminal();
        let master = File::from(master);
        let written = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, to) = (master.try_clone().unwrap(), Arc::clone(&written));
        // The thread ends with the process, because this value holds both ends.
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(n) = reader.read(&mut bytes) {
                to.lock().unwrap().extend_from_slice(&bytes[..n]);
            }
        });
        let it = Self { settings: format!("{:?}", tcgetattr(&slave).unwrap()), master, slave, written };
        it.resize(80, 24);
        it
    }

    fn resize(&self, columns: u16, rows: u16) {
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).unwrap();
    }

    /// Starts a program on the terminal.
    fn start(&self, command: &mut Command) -> Child {
        self.written.lock().unwrap().clear();
        let slave = || Stdio::from(self.slave.try_clone().unwrap());
        command.env("TERM", "xterm").env_remove("NO_COLOR");
        command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap()
    }

    fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.written.lock().unwrap()).into_owned()
    }

    fn screen(&self) -> Vec<String> {
        screen(&self.text())
    }

    /// Waits until the screen is as wanted.
    fn expect(&self, what: &str, wanted: impl Fn(&[String]) -> bool) {
        let found = eventually(WAIT_LIMIT, || wanted(&self.screen()));
        assert!(found, "{what}: {:#?}", self.screen());
    }

    fn has_settings_of_the_start(&self) -> bool {
        format!("{:?}", tcgetattr(&self.slave).unwrap()) == self.settings
    }
}

/// Returns the lines of the screen after this output: text, line ends, and the sequences CUP, CUU and ED of ECMA-48.
/// Other sequences change no text.
fn screen(output: &str) -> Vec<String> {
    let mut lines: Vec<Vec<char>> = Vec::new();
    let (mut x, mut y) = (0, 0);
    let mut chars = output.chars();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => {
                if chars.next() != Some('[') {
                    continue;
                }
                let mut numbers = String::new();
                let end = chars.by_ref().find(|c| {
                    numbers.push(*c);
                    ('@'..='~').contains(c)
                });
                numbers.pop();
                let number = |i: usize, default| {
                    numbers.split(';').nth(i).and_then(|number| number.parse::<usize>().ok()).unwrap_or(default)
                };
                match end {
                    Some('H') => (y, x) = (number(0, 1) - 1, number(1, 1) - 1),
                    Some('A') => y = y.checked_sub(number(0, 1)).expect("the cursor stays on the screen"),
                    Some('J') if number(0, 0) == 0 => {
                        lines.truncate(y + 1);
                        lines.get_mut(y).map(|line| line.truncate(x)).unwrap_or_default();
                    }
                    Some('J') => lines.clear(),
                    _ => {}
                }
            }
            '\r' => x = 0,
            '\n' => y += 1,
            c => {
                if lines.len() <= y {
                    lines.resize(y + 1, Vec::new());
                }
                if lines[y].len() <= x {
                    lines[y].resize(x + 1, ' ');
                }
                lines[y][x] = c;
                x += 1;
            }
        }
    }
    lines.into_iter().map(|line| line.into_iter().collect::<String>().trim_end().to_owned()).collect()
}

fn top(program: &Program) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_wirepath"));
    command.args(["top", "--interval", "0.2", "--socket"]).arg(program.socket());
    command
}

/// Waits for the end of a program and returns its exit code.
fn end(mut child: Child) -> Option<i32> {
    assert!(eventually(WAIT_LIMIT, || child.try_wait().unwrap().is_some()), "the program ends");
    child.wait().unwrap().code()
}

fn has(lines: &[String], start: &str, text: &str) -> bool {
    lines.iter().any(|line| line.starts_with(start) && line.contains(text))
}

#[test]
fn top_shows_a_program_and_obeys_keys() {
    let program = Program::start(L2FWD, &(PORTS.to_owned() + RULE));
    let mut terminal = Terminal::new();
    let child = terminal.start(&mut top(&program));
    let is_rate = |text: Option<&str>| text.is_some_and(|text| text.parse::<f64>().is_ok_and(|rate| rate > 0.0));
    terminal.expect("rates of ports", |lines| {
        let east = lines.iter().find(|line| line.starts_with("east "));
        east.is_some_and(|line| line.contains(" up ") && is_rate(line.split_whitespace().nth(2)))
    });
    let lines = terminal.screen();
    assert!(lines[0].starts_with("l2fwd  pid ") && lines[0].contains("config.toml"), "{lines:#?}");
    assert!(lines[1].starts_with("rx ") && lines[2].starts_with("[1 ports]"), "{lines:#?}");
    assert!(lines.len() == 24 && lines.iter().all(|line| line.chars().count() <= 80), "{lines:#?}");
    let modes = tcgetattr(&terminal.slave).unwrap().local_modes;
    assert!(!modes.intersects(LocalModes::ICANON | LocalModes::ECHO), "keys come one by one");
    terminal.press("2");
    terminal.expect("workers", |lines| {
        let heading = lines.get(3).is_some_and(|line| ["LOAD", "CYC/PKT", "FILL"].iter().all(|it| line.contains(it)));
        let row = lines.iter().find(|line| line.starts_with("0 ") && line.contains('%'));
        let column = |line: &str| line.split_whitespace().position(|it| it == "CYC/PKT");
        let figure = |row: &String| row.split_whitespace().nth(column(&lines[3])?).map(str::to_owned);
        heading && is_rate(row.and_then(figure).as_deref())
    });
    assert!(terminal.screen().iter().all(|line| line.chars().count() <= 80), "{:#?}", terminal.screen());
    terminal.press("3");
    terminal.expect("drops", |lines| has(lines, "rule_drop", "") && has(lines, " 1 ports  2 workers [3 drops]", ""));
    terminal.press("\r");
    terminal.expect("places of drops", |lines| has(lines, "worker ", "rule_drop"));
    terminal.press("6");
    terminal.expect("rules", |lines| has(lines, "", "prio 1: port id east"));
    terminal.press("1/wes\r");
    terminal
        .expect("a filter", |lines| has(lines, "west ", "up") && !has(lines, "east ", "") && has(lines, "/wes", ""));
    terminal.press("\x1b");
    terminal.resize(150, 30);
    terminal.expect("a larger terminal", |lines| lines.len() == 30 && has(lines, "PORT", "DEVICE"));
    terminal.press("q");
    assert_eq!(end(child), Some(0));
    assert!(terminal.has_settings_of_the_start());
    // Another thread reads what the program wrote.
    let has_both_screens = || ["\x1b[?1049h", "\x1b[?1049l"].iter().all(|it| terminal.text().contains(it));
    assert!(eventually(WAIT_LIMIT, has_both_screens));
    program.stop();
}

#[test]
fn top_restores_the_terminal_on_every_exit() {
    let program = Program::start(L2FWD, PORTS);
    let terminal = Terminal::new();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let child = terminal.start(top(&program).env("NO_COLOR", "1"));
        terminal.expect("a screen", |lines| has(lines, "east ", "up"));
        assert!(!terminal.has_settings_of_the_start());
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(end(child), Some(0), "{signal:?}");
        assert!(terminal.has_settings_of_the_start(), "{signal:?}");
        assert!(eventually(WAIT_LIMIT, || terminal.text().contains("\x1b[?1049l")), "{signal:?}");
    }
    let child = terminal.start(&mut top(&program));
    terminal.expect("a screen", |lines| has(lines, "east ", "up"));
    program.stop();
    assert_eq!(end(child), Some(0));
    assert!(terminal.has_settings_of_the_start());
    let said = || {
        let text = terminal.text();
        text.rsplit_once("\x1b[?1049l")
            .is_some_and(|(_, after)| after.contains("l2fwd, pid ") && after.contains("has ended"))
    };
    assert!(eventually(WAIT_LIMIT, said), "{:?}", terminal.text());
}

#[test]
fn top_names_what_to_use_without_a_terminal() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_wirepath")).args(arguments).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [&["top"][..], &["top", "--json"]] {
        let (code, error) = run(arguments);
        assert!(
            code == Some(2) && error.contains("`wirepath show TABLE --watch`") && error.contains("--json"),
            "{error}"
        );
    }
}

#[test]
fn a_program_redraws_its_rates_below_its_log() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    std::fs::write(&file, format!("{PORTS}[control]\nsocket = 'control.sock'\n[rules]\n")).unwrap();
    let terminal = Terminal::new();
    let child = terminal.start(Command::new(L2FWD).arg("--config").arg(&file));
    terminal.expect("rates", |lines| has(lines, "east ", "M") || has(lines, "east ", "k"));
    let output = Command::new(env!("CARGO_BIN_EXE_wirepath"))
        .args(["add", "rule", "rule=ingress: udp dst 9 => drop", "--socket"])
        .arg(folder.path().join("control.sock"))
        .output()
        .unwrap();
    assert!(output.status.success());
    let frames = || terminal.text().matches("RX pps").count();
    let before = frames();
    assert!(eventually(WAIT_LIMIT, || frames() > before + 2));
    // Each line once: the log above, the rates below it.
    terminal.expect("a log line above the rates", |lines| {
        let of = |text: &str| {
            lines.iter().enumerate().filter(|(_, line)| line.contains(text)).map(|(i, _)| i).collect::<Vec<_>>()
        };
        let (log, rates, east) = (of("rule 0 added by"), of("RX pps"), of("east  "));
        log.len() == 1 && rates.len() == 1 && east.len() == 1 && log[0] < rates[0] && rates[0] < east[0]
    });
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(end(child), Some(0));
    terminal.expect("the summary instead of the rates", |lines| {
        has(lines, "", "received") && !has(lines, "", "RX pps") && has(lines, "", "rule 0 added by")
    });
}

#[test]
fn generators_and_receivers_redraw_their_rates() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    std::fs::write(&file, "[[port]]\nname = 'in'\ndriver = 'null'\n[port.null]\nsource = 'udp4'\n").unwrap();
    let receiver = ["receive", "--port", "in", "--config", file.to_str().unwrap()];
    for (arguments, row) in
        [(&["--tx", "null:", "--seconds", "600", "--no-self-check"][..], "sent "), (&receiver, "in ")]
    {
        let terminal = Terminal::new();
        let child = terminal.start(Command::new(env!("CARGO_BIN_EXE_wirepath")).arg("pktgen").args(arguments));
        terminal
            .expect("rates", |lines| has(lines, "", "bit/s (L2)") && (has(lines, row, " k") || has(lines, row, " M")));
        let frames = || terminal.text().matches("PACKETS ").count();
        assert!(eventually(WAIT_LIMIT, || frames() > 2));
        terminal.expect("the ports above one table", |lines| {
            let tables = lines.iter().filter(|line| line.contains("PACKETS ")).count();
            tables == 1 && lines.first().is_some_and(|line| line.starts_with("port "))
        });
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        assert_eq!(end(child), Some(0));
        terminal.expect("the result", |lines| has(lines, "", "packets") && !has(lines, "", "PACKETS "));
    }
}
