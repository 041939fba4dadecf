//! The screen of the live view. State is always said in words or signs; colour only repeats it.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};

use super::app::App;
use super::model::{Cell, Grid, Pane, Scope};
use super::sample::MAX_ROWS;
use wirepath::cli::Rate;

/// Longest text of a cell that has columns after it.
const MAX_CELL: usize = 40;

const HELP: [&str; 16] = [
    "Tab, 1-6   choose a pane; Shift-Tab: the one before",
    "Up, Down   choose a row; also k, j, PgUp, PgDn, Home, End",
    "Enter      open a row: the queues of a port, the places of a drop reason",
    "Esc        go back, or remove the filter",
    "s          sort by the next column; its heading has v (falling) or ^ (rising)",
    "r          reverse the order",
    "/          show only rows that contain a text; Enter keeps it, Esc removes it",
    "p          pause, and continue",
    "h, ?       this help",
    "q, Ctrl-C  quit",
    "",
    "LOAD is the share of turns that found packets. FILL is packets per burst.",
    "PKTS/TURN is packets per turn that found some, CYC/PKT the cycles of such turns",
    "per packet. WAITING is packets in receive queues, or with the device (tx), at the",
    "last look of the worker.",
    "A narrow terminal shows fewer columns; `wirepath show` has all of them.",
];

/// Draws the screen. With `color`, states and the frame of the view are coloured.
pub(super) fn draw(frame: &mut Frame<'_>, app: &App, color: bool) {
    let area = frame.area();
    let style = |foreground: Color| if color { Style::new().fg(foreground) } else { Style::new() };
    let mut row = |y: u16, line: Line<'_>| {
        if y < area.height {
            frame.buffer_mut().set_line(area.x, area.y + y, &line, area.width);
        }
    };
    row(0, head(app, &style));
    row(1, rates(app, &style));
    row(2, panes(app));
    let last = area.height.saturating_sub(1);
    if app.help {
        for (y, text) in (4..last).zip(HELP) {
            row(y, Line::from(text));
        }
        return row(last.max(3), Line::from("any key: back"));
    }
    let (grid, sorted, reversed) = app.grid();
    if app.typing || !app.filter.is_empty() {
        let cursor = if app.typing { "_" } else { "" };
        row(last.max(3), Line::from(format!("/{}{cursor}", app.filter)));
    } else {
        let keys = "Tab pane  s sort  r reverse  / filter  Enter open  Esc back  h help  q quit";
        row(last.max(3), Line::styled(keys, style(Color::DarkGray)));
    }
    let list = Rect { y: area.y + 3.min(area.height), height: last.saturating_sub(3), ..area };
    draw_grid(frame, app, &grid, (sorted, reversed), list, &style);
}

fn head<'a>(app: &App, style: &impl Fn(Color) -> Style) -> Line<'a> {
    let program = &app.program;
    let uptime = program.started.map_or_else(|| "?".to_owned(), |started| clock(started.elapsed()));
    let mut spans = vec![
        Span::styled(program.name.clone(), style(Color::Cyan).add_modifier(Modifier::BOLD)),
        Span::raw(format!("  pid {}  up {uptime}  ", program.pid)),
    ];
    if let Some(silence) = app.silence() {
        spans.push(Span::styled(format!("NO ANSWER for {} s  ", silence.as_secs()), style(Color::Red)));
    }
    if app.paused {
        spans.push(Span::styled("PAUSED  ", style(Color::Yellow).add_modifier(Modifier::BOLD)));
    }
    spans.push(Span::raw(program.configuration.clone()));
    Line::from(spans)
}

/// A time as `1d 02:03:04`.
fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3600 % 24, seconds / 60 % 60);
    let clock = format!("{hours:02}:{minutes:02}:{:02}", seconds % 60);
    if days > 0 { format!("{days}d {clock}") } else { clock }
}

fn rates<'a>(app: &App, style: &impl Fn(Color) -> Style) -> Line<'a> {
    let totals = app.totals();
    let rate = |rate: Option<f64>| rate.map_or_else(|| "- ".to_owned(), |rate| Rate(rate).to_string());
    let (rx, tx) = ((totals.rx_pps, totals.rx_bps), (totals.tx_pps, totals.tx_bps));
    let pair = |(packets, bits)| format!("{}pps {}bit/s", rate(packets), rate(bits));
    let drops = format!("drops {}/s", rate(totals.drop_pps).trim_end());
    let is_dropping = totals.drop_pps.is_some_and(|rate| rate > 0.0);
    let drops = if is_dropping { Span::styled(drops, style(Color::Yellow)) } else { Span::raw(drops) };
    Line::from(vec![Span::raw(format!("rx {}   tx {}   ", pair(rx), pair(tx))), drops])
}

fn panes<'a>(app: &App) -> Line<'a> {
    let mut spans = Vec::new();
    for (key, pane) in app.panes() {
        let name = pane.table();
        spans.push(if pane == app.pane {
            let scope = match &app.scope {
                Scope::All => String::new(),
                Scope::Port(port) => format!(" of {port}"),
                Scope::Reason(reason) => format!(": {reason}"),
            };
            Span::styled(format!("[{key} {name}{scope}]"), Style::new().add_modifier(Modifier::BOLD))
        } else {
            Span::raw(format!(" {key} {name} "))
        });
    }
    Line::from(spans)
}

fn draw_grid(
    frame: &mut Frame<'_>,
    app: &App,
    grid: &Grid,
    (sorted, reversed): (usize, bool),
    area: Rect,
    style: &impl Fn(Color) -> Style,
) {
    if area.height == 0 || area.width == 0 {
        return;
    }
    let title = |i: usize| {
        let column = grid.columns[i];
        let sign = if column.is_number == reversed { "^" } else { "v" };
        if i == sorted { format!("{}{sign}", column.title) } else { column.title.to_owned() }
    };
    let texts: Vec<Vec<String>> = grid.lines.iter().map(|line| line.cells.iter().map(Cell::text).collect()).collect();
    let width_of = |text: &str| Span::raw(text).width();
    let widest = |i: usize| texts.iter().filter_map(|row| row.get(i)).map(|text| width_of(text)).max().unwrap_or(0);
    let last = grid.columns.len().saturating_sub(1);
    let widths: Vec<usize> = (0..grid.columns.len())
        .map(|i| widest(i).min(if i == last { usize::from(area.width) } else { MAX_CELL }).max(width_of(&title(i))))
        .collect();
    let shown = grid.fitting(&needed(grid, &widths), usize::from(area.width));
    let row_text = |cell: &dyn Fn(usize) -> String| {
        let mut line = String::new();
        for i in &shown {
            let text: String = cell(*i).chars().take(if *i == last { usize::MAX } else { MAX_CELL }).collect();
            let blanks = " ".repeat(widths[*i].saturating_sub(width_of(&text)));
            line += &if grid.columns[*i].is_number { blanks + &text } else { text + &blanks };
            line += "  ";
        }
        line
    };
    let buffer = frame.buffer_mut();
    let heading = Line::styled(row_text(&title), Style::new().add_modifier(Modifier::UNDERLINED));
    buffer.set_line(area.x, area.y, &heading, area.width);
    let room = usize::from(area.height) - 1;
    let more = grid.lines.len() as u64 >= MAX_ROWS && app.pane == Pane::Rules;
    // The selected row is always visible.
    let first = (app.selected + 1).saturating_sub(room.max(1));
    for (y, (i, row)) in (area.y + 1..area.bottom()).zip(texts.iter().enumerate().skip(first)) {
        let state = matches!(app.pane, Pane::Ports).then(|| row.get(1).map(String::as_str)).flatten();
        let colored = match state {
            Some("up") => style(Color::Green),
            Some("down" | "away") => style(Color::Yellow),
            Some(_) => style(Color::Red),
            None => Style::new(),
        };
        let text = row_text(&|i| row.get(i).cloned().unwrap_or_default());
        let line = if i == app.selected {
            Line::styled(text, colored.add_modifier(Modifier::REVERSED))
        } else {
            Line::styled(text, colored)
        };
        buffer.set_line(area.x, y, &line, area.width);
    }
    let note = match texts.is_empty() {
        true if !app.filter.is_empty() => "no row contains the text",
        true if grid.columns.is_empty() => "waiting for figures",
        true => "none",
        false if more => "only the first 4096 rules are read",
        false => return,
    };
    let y = area.y + if texts.is_empty() { 1 } else { area.height - 1 };
    if y < area.bottom() {
        buffer.set_line(area.x, y, &Line::from(format!("{note:<width$}", width = usize::from(area.width))), area.width);
    }
}

/// Widths that the columns need to be shown. The last text column may be cut, so it needs only its heading.
fn needed(grid: &Grid, widths: &[usize]) -> Vec<usize> {
    let mut needed = widths.to_vec();
    if let (Some(column), Some(width)) = (grid.columns.last(), needed.last_mut())
        && !column.is_number
    {
        *width = (*width).min(12);
    }
    needed
}
