//! State of the live view, and what keys do to it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::model::{Grid, Pane, Scope, Totals, grid, totals};
use super::sample::{Program, Sample, Sampler};

/// State of the live view.
#[derive(Debug)]
pub(super) struct App {
    pub(super) program: Program,
    pub(super) interval: Duration,
    pub(super) pane: Pane,
    pub(super) scope: Scope,
    /// The column that the user chose for each pane.
    chosen: [Option<usize>; Pane::ALL.len()],
    reversed: [bool; Pane::ALL.len()],
    /// Text that rows must contain.
    pub(super) filter: String,
    /// True while the filter is typed.
    pub(super) typing: bool,
    pub(super) paused: bool,
    pub(super) help: bool,
    /// Index of the selected row.
    pub(super) selected: usize,
    before: Option<Sample>,
    now: Option<Sample>,
    /// Time of the last answer.
    answered: Instant,
    pub(super) quit: bool,
}

impl App {
    pub(super) fn new(program: Program, interval: Duration) -> Self {
        Self {
            program,
            interval,
            pane: Pane::Ports,
            scope: Scope::All,
            chosen: [None; Pane::ALL.len()],
            reversed: [false; Pane::ALL.len()],
            filter: String::new(),
            typing: false,
            paused: false,
            help: false,
            selected: 0,
            before: None,
            now: None,
            answered: Instant::now(),
            quit: false,
        }
    }

    /// Returns the panes for which the program has tables, with their keys.
    pub(super) fn panes(&self) -> impl Iterator<Item = (usize, Pane)> {
        Pane::ALL.into_iter().enumerate().filter(|(_, pane)| self.program.has(pane.table())).map(|(i, it)| (i + 1, it))
    }

    /// Takes a sample. A paused view stays as it is.
    pub(super) fn take(&mut self, sample: Sample) {
        self.answered = Instant::now();
        if !self.paused {
            self.before = self.now.replace(sample);
        }
    }

    /// Returns the time without an answer, if it is longer than it should be.
    pub(super) fn silence(&self) -> Option<Duration> {
        Some(self.answered.elapsed()).filter(|silence| *silence > self.interval * 2 + Duration::from_secs(1))
    }

    pub(super) fn totals(&self) -> Totals {
        self.now.as_ref().map(|now| totals(self.before.as_ref(), now)).unwrap_or_default()
    }

    /// Returns the rows to show, and the column and direction by which they are sorted.
    pub(super) fn grid(&self) -> (Grid, usize, bool) {
        let Some(now) = &self.now else { return (Grid::default(), 0, false) };
        let mut grid = grid(self.pane, &self.scope, self.before.as_ref(), now);
        let (column, reversed) = (self.chosen[self.index()].unwrap_or(grid.sorted_by), self.reversed[self.index()]);
        grid.filter(&self.filter);
        grid.sort(column, reversed);
        (grid, column, reversed)
    }

    fn index(&self) -> usize {
        self.pane as usize
    }

    fn open(&mut self, pane: Pane, scope: Scope) {
        // The columns of the same pane differ between scopes.
        if self.pane == pane && self.scope != scope {
            self.chosen[self.index()] = None;
        }
        (self.pane, self.scope, self.selected) = (pane, scope, 0);
    }

    /// Opens the pane that is `step` panes further.
    fn next(&mut self, step: usize) {
        let panes: Vec<Pane> = self.panes().map(|(_, pane)| pane).collect();
        let at = panes.iter().position(|pane| *pane == self.pane).unwrap_or(0);
        if let Some(pane) = panes.get((at + step) % panes.len().max(1)) {
            self.open(*pane, Scope::All);
        }
    }

    /// Handles a key.
    pub(super) fn key(&mut self, key: KeyEvent) {
        if key.kind == KeyEventKind::Release {
            return;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            self.quit |= key.code == KeyCode::Char('c');
            return;
        }
        if self.typing {
            return self.type_filter(key.code);
        }
        if self.help {
            self.quit |= key.code == KeyCode::Char('q');
            self.help = false;
            return;
        }
        match key.code {
            KeyCode::Char('q') => self.quit = true,
            KeyCode::Char('h' | '?') => self.help = true,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('r') => self.reversed[self.index()] ^= true,
            KeyCode::Char('s') => {
                let (grid, column, _) = self.grid();
                self.chosen[self.index()] = Some((column + 1) % grid.columns.len().max(1));
            }
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Char(digit @ '1'..='6') => {
                let pane = self.panes().find(|(key, _)| char::from_digit(*key as u32, 10) == Some(digit));
                if let Some((_, pane)) = pane {
                    self.open(pane, Scope::All);
                }
            }
            KeyCode::Tab => self.next(1),
            KeyCode::BackTab => self.next(self.panes().count().saturating_sub(1)),
            KeyCode::Enter => {
                let (grid, ..) = self.grid();
                if let Some((pane, scope)) = grid.lines.get(self.selected).and_then(|line| line.opens.clone()) {
                    self.filter.clear();
                    self.open(pane, scope);
                }
            }
            KeyCode::Esc | KeyCode::Backspace => self.back(),
            KeyCode::Up | KeyCode::Char('k') => self.selected = self.selected.saturating_sub(1),
            KeyCode::Down | KeyCode::Char('j') => self.selected += 1,
            KeyCode::PageUp => self.selected = self.selected.saturating_sub(10),
            KeyCode::PageDown => self.selected += 10,
            KeyCode::Home => self.selected = 0,
            KeyCode::End => self.selected = usize::MAX / 2,
            _ => {}
        }
        self.clamp();
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.typing = false,
            KeyCode::Esc => {
                self.typing = false;
                self.filter.clear();
            }
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(c) if self.filter.len() < 64 => self.filter.push(c),
            _ => {}
        }
        self.clamp();
    }

    /// Leaves what Enter opened, or removes the filter.
    fn back(&mut self) {
        match &self.scope {
            Scope::Port(_) => self.open(Pane::Ports, Scope::All),
            Scope::Reason(_) => self.open(Pane::Drops, Scope::All),
            Scope::All => self.filter.clear(),
        }
    }

    /// Keeps the selection on a row.
    pub(super) fn clamp(&mut self) {
        self.selected = self.selected.min(self.grid().0.lines.len().saturating_sub(1));
    }

    /// Tells the sampler which tables the view needs.
    pub(super) fn tell(&self, sampler: &Sampler) {
        sampler.with_rules.store(self.pane == Pane::Rules, Ordering::Relaxed);
    }
}
