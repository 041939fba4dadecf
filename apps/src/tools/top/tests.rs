//! The view over samples that are made here: figures, order, filter, columns and screens.

use std::time::{Duration, Instant};

use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use serde_json::{Value, json};

use super::app::App;
use super::model::{Cell, Pane, Scope, grid, totals};
use super::sample::{Program, Sample};
use super::view;
use wirepath::control_socket::Rows;

fn rows(columns: &str, rows: Value) -> Rows {
    let columns = columns.split(' ').map(str::to_owned).collect();
    Rows { columns, rows: serde_json::from_value(rows).unwrap() }
}

/// A sample in which each counter is `n` times that of one second.
fn sample(at: Instant, n: u64) -> Sample {
    let port = |name: &str, state: &str, pps: u64| {
        json!([name, "null", "none", "generator", state, pps * n, pps * n * 100, pps * n, pps * n * 100, 3 * n, 0, 0])
    };
    let ports = json!([port("lan10", "up", 1_000_000), port("lan9", "down", 20), port("wan\u{1b}[31m", "up", 5)]);
    let queue = |port: &str, direction: &str, queue: u64, packets: u64, bursts: u64| {
        json!([port, direction, queue, packets * n, packets * n * 100, bursts * n, 7 * n, 0, 5 + queue])
    };
    let queues = json!([
        queue("lan10", "rx", 0, 1_000_000, 31_250),
        queue("lan10", "tx", 0, 500, 500),
        queue("lan9", "rx", 0, 0, 0),
    ]);
    let workers = json!([
        [0, 3, "lan10/0 lan9/0", 40_000 * n, 8_750 * n, 1_000_000 * n, 45_500_000 * n, 2 * n, 0, 0, 0],
        [1, null, "gone/0", 0, 0, 0, 0, 0, 0, 0, 0],
    ]);
    let drops = json!([
        ["rx", "lan10", 0, "no_buffer", 3 * n, "no buffer was free"],
        ["rx", "lan9", 0, "no_buffer", 4 * n, "no buffer was free"],
        ["worker", 0, null, "rule_drop", 900 * n, "a rule drops it"],
    ]);
    let rules = json!([[0, "any => count", 10 * n, 1000 * n, "software"], [1, "udp => drop", 70 * n, 7 * n, "xdp"]]);
    let tables = [
        (
            "ports",
            "port driver device mode state rx_packets rx_bytes tx_packets tx_bytes rx_drops tx_drops device_drops",
            ports,
        ),
        ("queues", "port direction queue packets bytes bursts empty drops waiting", queues),
        ("workers", "worker core queues turns idle_turns packets busy_cycles sleeps handed_over punted drops", workers),
        ("drops", "place name queue reason packets text", drops),
        ("rules", "id rule packets bytes where", rules),
    ];
    Sample(tables.into_iter().map(|(name, columns, cells)| (name, (at, rows(columns, cells)))).collect())
}

/// Two samples, two seconds apart.
fn samples() -> (Sample, Sample) {
    let now = Instant::now();
    (sample(now, 10), sample(now + Duration::from_secs(2), 12))
}

fn app() -> App {
    let program = Program {
        name: "l2fwd".to_owned(),
        pid: "4711".to_owned(),
        configuration: "/etc/wirepath/l2fwd.toml".to_owned(),
        started: Instant::now().checked_sub(Duration::from_secs(5)),
        tables: ["ports", "queues", "workers", "drops", "rules"].map(str::to_owned).to_vec(),
    };
    let mut app = App::new(program, Duration::from_secs(1));
    let (before, now) = samples();
    app.take(before);
    app.take(now);
    app
}

fn press(app: &mut App, keys: &str) {
    for c in keys.chars() {
        let code = match c {
            '\n' => KeyCode::Enter,
            '\t' => KeyCode::Tab,
            '\x1b' => KeyCode::Esc,
            '^' => KeyCode::Up,
            'v' => KeyCode::Down,
            c => KeyCode::Char(c),
        };
        app.key(KeyEvent::new(code, KeyModifiers::NONE));
    }
}

/// Returns the rows of a pane as texts.
fn texts(pane: Pane, scope: &Scope) -> Vec<Vec<String>> {
    let (before, now) = samples();
    let grid = grid(pane, scope, Some(&before), &now);
    grid.lines.iter().map(|line| line.cells.iter().map(Cell::text).collect()).collect()
}

fn screen(app: &App, width: u16, height: u16, color: bool) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(frame, app, color)).unwrap();
    terminal
}

fn lines(terminal: &Terminal<TestBackend>) -> Vec<String> {
    let buffer = terminal.backend().buffer();
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui::buffer::Cell]| cells.iter().map(ratatui::buffer::Cell::symbol).collect::<String>();
    buffer.content.chunks(width).map(|cells| line(cells).trim_end().to_owned()).collect()
}

#[test]
fn figures_are_rates_between_two_samples() {
    assert_eq!(
        texts(Pane::Ports, &Scope::All)[0][..7],
        ["lan10", "up", "1.00 M", "800.00 M", "1.00 M", "800.00 M", "3"]
    );
    let workers = texts(Pane::Workers, &Scope::All);
    // 31250 of 40000 turns found packets, 32 in each. Both queues have 5 waiting packets.
    assert_eq!(workers[0][..9], ["0", "3", "78%", "40.00 k", "2", "32.0", "45.5", "32.0", "10"]);
    assert_eq!(workers[1][..9], ["1", "-", "-", "0", "0", "-", "-", "-", "-"]);
    let queues = texts(Pane::Queues, &Scope::All);
    assert_eq!(queues[0][..7], ["lan10", "rx", "0", "1.00 M", "800.00 M", "31.25 k", "32.0"]);
    assert_eq!((queues[2][6].as_str(), queues[2][7].as_str()), ("-", "5"), "no burst has no fill");
    assert_eq!(texts(Pane::Queues, &Scope::Port("lan9".to_owned())).len(), 1);
    let reasons = texts(Pane::Drops, &Scope::All);
    assert_eq!(reasons[0][..3], ["no_buffer", "7", "84"], "both places together");
    let places = texts(Pane::Drops, &Scope::Reason("no_buffer".to_owned()));
    assert_eq!(places.iter().map(|row| row[1].as_str()).collect::<Vec<_>>(), ["lan10", "lan9"]);
    let (before, now) = samples();
    let totals_now = totals(Some(&before), &now);
    assert_eq!((totals_now.rx_pps, totals_now.drop_pps), (Some(1_000_025.0), Some(907.0)));
    assert_eq!(totals_now.tx_bps, Some(1_000_025.0 * 800.0));
}

#[test]
fn without_a_sample_before_there_are_no_rates() {
    let (_, now) = samples();
    assert_eq!(totals(None, &now), super::model::Totals::default());
    for pane in [Pane::Ports, Pane::Queues, Pane::Workers, Pane::Drops, Pane::Rules] {
        let grid = grid(pane, &Scope::All, None, &now);
        let of_rates = |cell: &Cell| matches!(cell, Cell::Rate(_) | Cell::Ratio(_) | Cell::Percent(_));
        assert!(!grid.lines.is_empty() && !grid.lines.iter().flat_map(|line| &line.cells).any(of_rates), "{grid:?}");
    }
    // A counter that began again has not gone backwards.
    let (before, now) = samples();
    assert_eq!(totals(Some(&now), &before).rx_pps, Some(0.0));
    // A drop reason that is new began with 0.
    let mut early = before;
    early.0.get_mut("drops").unwrap().1.rows.clear();
    assert_eq!(totals(Some(&early), &now).drop_pps, Some((84 + 900 * 12) as f64 / 2.0));
}

#[test]
fn rows_are_sorted_and_filtered() {
    let mut app = app();
    let firsts = |app: &App| app.grid().0.lines.iter().map(|line| line.cells[0].text()).collect::<Vec<_>>();
    assert_eq!(firsts(&app), ["lan9", "lan10", "wan\u{fffd}[31m"], "in natural order");
    press(&mut app, "r");
    assert_eq!(firsts(&app)[0], "wan\u{fffd}[31m");
    // The third column has the packets received, highest first.
    press(&mut app, "rss");
    assert_eq!(firsts(&app), ["lan10", "lan9", "wan\u{fffd}[31m"]);
    press(&mut app, "r");
    assert_eq!(firsts(&app)[0], "wan\u{fffd}[31m");
    press(&mut app, "/LAN\n");
    assert_eq!(firsts(&app), ["lan9", "lan10"]);
    press(&mut app, "\x1b");
    assert_eq!(firsts(&app).len(), 3);
    press(&mut app, "3");
    assert_eq!(firsts(&app), ["rule_drop", "no_buffer"], "by rate");
}

#[test]
fn keys_open_panes_and_rows() {
    let mut app = app();
    press(&mut app, "\t");
    assert_eq!(app.pane, Pane::Workers);
    // There are no segments, so 5 opens nothing.
    press(&mut app, "5");
    assert_eq!(app.pane, Pane::Workers);
    press(&mut app, "1v\n");
    assert_eq!((app.pane, &app.scope), (Pane::Queues, &Scope::Port("lan10".to_owned())));
    press(&mut app, "\x1b");
    assert_eq!((app.pane, &app.scope), (Pane::Ports, &Scope::All));
    press(&mut app, "3v\n");
    assert_eq!(app.scope, Scope::Reason("no_buffer".to_owned()));
    press(&mut app, "\x1b1vvvvvvv");
    assert_eq!(app.selected, 2, "the last row");
    press(&mut app, "p");
    let before = app.totals();
    app.take(sample(Instant::now() + Duration::from_secs(9), 99));
    assert_eq!(app.totals(), before, "paused");
    // Every other key leaves the help, but is not carried out.
    press(&mut app, "hp");
    assert!(app.paused && !app.help);
    press(&mut app, "/q");
    assert!(!app.quit, "a letter of the filter");
    app.key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert!(app.quit);
}

#[test]
fn columns_are_left_out_by_priority() {
    let (before, now) = samples();
    let grid = grid(Pane::Ports, &Scope::All, Some(&before), &now);
    let widths = vec![8; grid.columns.len()];
    let titles = |width| grid.fitting(&widths, width).into_iter().map(|i| grid.columns[i].title).collect::<Vec<_>>();
    assert_eq!(titles(1000).len(), grid.columns.len());
    let important = ["PORT", "STATE", "RX pps", "RX bit/s", "TX pps", "TX bit/s", "DROPS/s"];
    assert_eq!(titles(7 * 10 - 2), important);
    assert_eq!(titles(7 * 10 - 3), ["PORT", "STATE", "RX pps", "RX bit/s", "TX pps", "DROPS/s"]);
    assert_eq!(titles(1), ["PORT"], "never none");
}

#[test]
fn a_small_screen_shows_what_matters() {
    let app = app();
    let lines = lines(&screen(&app, 80, 24, false));
    assert_eq!(lines[0], "l2fwd  pid 4711  up 00:00:05  /etc/wirepath/l2fwd.toml");
    assert_eq!(lines[1], "rx 1.00 Mpps 800.02 Mbit/s   tx 1.00 Mpps 800.02 Mbit/s   drops 907/s");
    assert_eq!(lines[2], "[1 ports] 2 workers  3 drops  4 queues  6 rules");
    assert_eq!(lines[3], "PORT^     STATE  RX pps  RX bit/s  TX pps  TX bit/s  DROPS/s  DRIVER  RX TOTAL");
    assert_eq!(lines[4], "lan9      down       20   16.00 k      20   16.00 k        3  null         240");
    assert_eq!(lines[5], "lan10     up     1.00 M  800.00 M  1.00 M  800.00 M        3  null    12000000");
    assert!(lines[23].starts_with("Tab pane") && lines[23].ends_with("q quit"), "{}", lines[23]);
    assert!(lines.iter().all(|line| !line.contains('\u{1b}')));
}

#[test]
fn a_large_screen_shows_all_columns() {
    let lines = lines(&screen(&app(), 200, 50, false));
    for title in ["PORT^", "DRIVER", "RX TOTAL", "TX TOTAL", "DEVICE", "MODE"] {
        assert!(lines[3].contains(title), "{title}: {}", lines[3]);
    }
    assert!(lines[5].ends_with("12000000  12000000  none    generator"), "{}", lines[5]);
}

#[test]
fn every_pane_fits_every_screen() {
    for keys in ["1", "2", "3", "4", "6", "1\n", "3\n", "h", "/x", "p"] {
        for (width, height) in [(0, 0), (1, 1), (20, 3), (40, 4), (80, 24), (200, 50)] {
            let mut app = app();
            press(&mut app, keys);
            screen(&app, width, height, true);
        }
    }
    let empty = App::new(Program::default(), Duration::from_secs(1));
    assert!(lines(&screen(&empty, 80, 24, false))[4].contains("waiting for figures"));
    let mut nothing = app();
    press(&mut nothing, "/zzz");
    let lines = lines(&screen(&nothing, 80, 24, false));
    assert_eq!((lines[4].as_str(), lines[23].as_str()), ("no row contains the text", "/zzz_"));
}

#[test]
fn the_selected_row_stays_visible() {
    let mut app = app();
    press(&mut app, "vv");
    let lines = lines(&screen(&app, 80, 6, false));
    assert!(lines[4].starts_with("wan"), "{lines:?}");
}

#[test]
fn colour_is_optional_and_never_alone() {
    let colors = |color: bool| {
        let terminal = screen(&app(), 80, 24, color);
        let cells = terminal.backend().buffer().content.iter();
        cells.filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
    };
    assert_eq!(colors(false), 0);
    assert!(colors(true) > 0);
    // The text is the same.
    assert_eq!(lines(&screen(&app(), 80, 24, true)), lines(&screen(&app(), 80, 24, false)));
}
