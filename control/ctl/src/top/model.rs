//! The state of the screen, and how samples and keys change it: pure functions, with time as an argument.
//!
//! Invariants: the selection stays on its row while rows move. Without an answer the last figures stay.
//! Not here: asking for samples (`top`), and drawing (`draw`).

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::columns::{Scope, Table, View};
use super::figures::Figures;
use super::rate::Tracker;
use super::sample::{FlowQuery, Sample, Wanted};

/// Lines beside the rows: state, figures and their history, views, scope, titles; two of details, keys.
pub(super) const OTHER_LINES: u16 = 9;

/// What the program does after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Nothing,
    /// Take a sample now.
    Refresh,
    Quit,
}

/// Whether the last request was answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Connection {
    Answered,
    Lost {
        /// Time of day of the first request without an answer, in seconds since 1970.
        since_s: u64,
        reason: String,
    },
}

/// What takes the keys instead of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Dialog {
    Help,
    /// Chooses one of the visible columns.
    Sort {
        at: usize,
    },
    Search(String),
    /// The text is `Model::filter`; `before` comes back if it is given up.
    Filter {
        before: String,
    },
}

/// How a view is sorted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sort {
    pub(super) column: usize,
    pub(super) is_descending: bool,
}

/// A view to come back to.
#[derive(Debug)]
struct Place {
    view: View,
    scope: Scope,
    filter: String,
    selected: Option<String>,
}

/// The state of the screen.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) connection: Connection,
    pub(super) figures: Figures,
    pub(super) view: View,
    pub(super) scope: Scope,
    pub(super) dialog: Option<Dialog>,
    /// Rows without this text are hidden.
    pub(super) filter: String,
    pub(super) is_paused: bool,
    /// The rows that are shown, in their order.
    pub(super) order: Vec<usize>,
    /// Positions in `order` of the selected row and of the first one on the screen.
    pub(super) selected: usize,
    pub(super) first: usize,
    selected_key: Option<String>,
    sorts: [Sort; View::ALL.len()],
    back: Vec<Place>,
    tracker: Tracker,
    last_search: String,
    page_rows: usize,
    /// The next sample is shown although the screen is paused.
    shows_next: bool,
}

impl Model {
    /// The screen after the first sample.
    pub(super) fn new(sample: Sample) -> Self {
        let mut tracker = Tracker::default();
        let figures = Figures::new(sample, &mut tracker);
        let sort = |view: View| {
            let table = view.table(&figures);
            let column = (0..table.columns()).find(|column| table.column(*column).0 == view.first_sort()).unwrap_or(0);
            Sort { column, is_descending: is_descending_at_first(table, column) }
        };
        let sorts = View::ALL.map(sort);
        let mut model = Self {
            connection: Connection::Answered,
            figures,
            view: View::Services,
            scope: Scope::default(),
            dialog: None,
            filter: String::new(),
            is_paused: false,
            order: Vec::new(),
            selected: 0,
            first: 0,
            selected_key: None,
            sorts,
            back: Vec::new(),
            tracker,
            last_search: String::new(),
            page_rows: 1,
            shows_next: false,
        };
        model.arrange();
        model
    }

    /// A request was answered, or not. `now_s` is the time of day in seconds since 1970.
    pub(super) fn answered(&mut self, sample: Result<Sample, String>, now_s: u64) {
        match sample {
            Ok(mut sample) => {
                self.connection = Connection::Answered;
                if !self.is_paused || self.shows_next {
                    // Flows of another view, which was left since.
                    sample.flows = sample.flows.filter(|flows| Some(&flows.query) == self.flows_needed().as_ref());
                    self.figures = Figures::new(sample, &mut self.tracker);
                    self.shows_next = self.lacks_rows();
                    self.arrange();
                }
            }
            Err(reason) => {
                let since_s = match self.connection {
                    Connection::Answered => now_s,
                    Connection::Lost { since_s, .. } => since_s,
                };
                self.connection = Connection::Lost { since_s, reason };
            }
        }
    }

    /// The flows that the view needs.
    pub(super) fn flows_needed(&self) -> Option<FlowQuery> {
        let Scope { service, backend, .. } = self.scope.clone();
        (self.view == View::Flows).then_some(FlowQuery { service, backend })
    }

    /// What the view needs beside what every view does.
    pub(super) fn wanted(&self) -> Wanted {
        Wanted { flows: self.flows_needed(), heaviest: self.view == View::Heaviest }
    }

    /// Whether the view shows rows that were not asked for yet.
    pub(super) fn lacks_rows(&self) -> bool {
        let lacks = match self.view {
            View::Flows => self.figures.flow_sample.is_none(),
            View::Heaviest => self.figures.heaviest_sample.is_none(),
            _ => false,
        };
        lacks && self.connection == Connection::Answered
    }

    /// The height of the screen, in lines.
    pub(super) fn resize(&mut self, lines: u16) {
        self.page_rows = usize::from(lines.saturating_sub(OTHER_LINES)).max(1);
        self.scroll();
    }

    /// The rows of the view.
    pub(super) fn table(&self) -> &dyn Table {
        self.view.table(&self.figures)
    }

    pub(super) fn sort(&self) -> Sort {
        self.sorts[self.view as usize]
    }

    /// The columns that have something to tell: not those that are equal in all rows.
    pub(super) fn visible_columns(&self) -> Vec<usize> {
        let table = self.table();
        let is_visible = |column: &usize| match (table.column(*column).0, self.view) {
            ("GATEWAY", View::Gateways) => true,
            ("GATEWAY", _) => self.figures.of_several && self.scope.gateway.is_empty(),
            ("SERVICE", View::Backends | View::Flows | View::Heaviest) => self.scope.service.is_empty(),
            ("BACKEND", View::Flows) => self.scope.backend.is_empty(),
            _ => true,
        };
        (0..table.columns()).filter(is_visible).collect()
    }

    /// The visible columns that rows can be sorted by.
    pub(super) fn sortable_columns(&self) -> Vec<usize> {
        let table = self.table();
        self.visible_columns().into_iter().filter(|column| table.column(*column).0 != "HISTORY").collect()
    }

    /// A key was pressed.
    pub(super) fn press(&mut self, key: KeyEvent) -> Action {
        if key.kind == KeyEventKind::Release {
            return Action::Nothing;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return if key.code == KeyCode::Char('c') { Action::Quit } else { Action::Nothing };
        }
        match self.dialog.take() {
            None => self.press_in_list(key.code),
            Some(Dialog::Help) => Action::Nothing, // any key closes it
            Some(Dialog::Sort { at }) => self.press_in_sort(at, key.code),
            Some(Dialog::Search(text)) => self.press_in_search(text, key.code),
            Some(Dialog::Filter { before }) => self.press_in_filter(before, key.code),
        }
    }

    fn press_in_list(&mut self, key: KeyCode) -> Action {
        let page = self.page_rows;
        match key {
            KeyCode::F(10) | KeyCode::Char('q') => return Action::Quit,
            KeyCode::F(1) | KeyCode::Char('h' | '?') => self.dialog = Some(Dialog::Help),
            KeyCode::F(3) | KeyCode::Char('/') => self.dialog = Some(Dialog::Search(String::new())),
            KeyCode::F(4) | KeyCode::Char('\\') => self.dialog = Some(Dialog::Filter { before: self.filter.clone() }),
            KeyCode::F(5) | KeyCode::Char('r') => return self.refresh(),
            KeyCode::F(6) => {
                let columns = self.sortable_columns();
                let at = columns.iter().position(|column| *column == self.sort().column).unwrap_or(0);
                self.dialog = Some(Dialog::Sort { at });
            }
            KeyCode::Char('<') => self.sort_beside(false),
            KeyCode::Char('>') => self.sort_beside(true),
            KeyCode::Char('I') => {
                self.sorts[self.view as usize].is_descending ^= true;
                self.arrange();
            }
            KeyCode::Char('n') => self.search_next(&self.last_search.clone(), 1),
            KeyCode::Char(' ') => self.is_paused ^= true,
            KeyCode::Up | KeyCode::Char('k') => self.select(self.selected.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.select(self.selected + 1),
            KeyCode::PageUp => self.select(self.selected.saturating_sub(page)),
            KeyCode::PageDown => self.select(self.selected + page),
            KeyCode::Home => self.select(0),
            KeyCode::End => self.select(usize::MAX),
            KeyCode::Enter | KeyCode::Right => return self.open(false),
            KeyCode::Char('f') => return self.open(true),
            KeyCode::Esc | KeyCode::Left | KeyCode::Backspace => return self.leave(),
            KeyCode::Tab => return self.show(View::ALL[(self.view as usize + 1) % View::ALL.len()]),
            KeyCode::BackTab => return self.show(View::ALL[(self.view as usize + View::ALL.len() - 1) % View::ALL.len()]),
            KeyCode::Char(digit @ '1'..='9') => {
                let at = digit as usize - '1' as usize;
                return View::ALL.get(at).map_or(Action::Nothing, |view| self.show(*view));
            }
            _ => {}
        }
        Action::Nothing
    }

    fn press_in_sort(&mut self, at: usize, key: KeyCode) -> Action {
        let columns = self.sortable_columns();
        let at = at.min(columns.len() - 1);
        match key {
            KeyCode::Esc | KeyCode::F(6) => {}
            KeyCode::Enter => self.sort_by(columns[at]),
            KeyCode::Up | KeyCode::Char('k') => self.dialog = Some(Dialog::Sort { at: at.saturating_sub(1) }),
            KeyCode::Down | KeyCode::Char('j') => self.dialog = Some(Dialog::Sort { at: (at + 1).min(columns.len() - 1) }),
            _ => self.dialog = Some(Dialog::Sort { at }),
        }
        Action::Nothing
    }

    fn press_in_search(&mut self, mut text: String, key: KeyCode) -> Action {
        match key {
            KeyCode::Esc => return Action::Nothing,
            KeyCode::Enter => {
                self.last_search = text;
                return Action::Nothing;
            }
            KeyCode::F(3) | KeyCode::Down => self.search_next(&text, 1),
            KeyCode::Backspace => {
                text.pop();
            }
            KeyCode::Char(char) => {
                text.push(char);
                self.search_next(&text, 0);
            }
            _ => {}
        }
        self.dialog = Some(Dialog::Search(text));
        Action::Nothing
    }

    fn press_in_filter(&mut self, before: String, key: KeyCode) -> Action {
        match key {
            KeyCode::Enter => return Action::Nothing,
            KeyCode::Esc => self.filter.clone_from(&before),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Char(char) => self.filter.push(char),
            _ => {}
        }
        self.arrange();
        if key != KeyCode::Esc {
            self.dialog = Some(Dialog::Filter { before });
        }
        Action::Nothing
    }

    const fn refresh(&mut self) -> Action {
        self.shows_next = true;
        Action::Refresh
    }

    /// Sorts by the next visible column, or by the one before.
    fn sort_beside(&mut self, is_next: bool) {
        let columns = self.sortable_columns();
        let at = columns.iter().position(|column| *column == self.sort().column).unwrap_or(0);
        let beside = if is_next { at + 1 } else { at + columns.len() - 1 };
        self.sort_by(columns[beside % columns.len()]);
    }

    fn sort_by(&mut self, column: usize) {
        let is_descending = is_descending_at_first(self.table(), column);
        self.sorts[self.view as usize] = Sort { column, is_descending };
        self.arrange();
    }

    /// Selects the next row, from the selected one or the `from`th after it, that has the text.
    fn search_next(&mut self, text: &str, from: usize) {
        let (text, table, count) = (text.to_lowercase(), self.table(), self.order.len());
        let positions = (0..count).map(|n| (self.selected + from + n) % count);
        let found = positions.into_iter().find(|at| table.has(self.order[*at], &text));
        if let Some(at) = found.filter(|_| !text.is_empty()) {
            self.select(at);
        }
    }

    /// Opens the selected row: a gateway's Services, a Service's backends, a backend's flows; or the flows at once.
    fn open(&mut self, flows: bool) -> Action {
        let Some(row) = self.order.get(self.selected).copied() else { return Action::Nothing };
        let gateway = self.scope.gateway.clone();
        let (view, scope) = match (self.view, flows) {
            (View::Gateways, false) => {
                (View::Services, Scope { gateway: self.figures.gateways[row].status.name.clone(), ..Scope::default() })
            }
            (View::Services, flows) => {
                let of = &self.figures.services[row];
                let view = if flows { View::Flows } else { View::Backends };
                let gateway = if self.figures.of_several { of.status.gateway.clone() } else { gateway };
                (view, Scope { gateway, service: of.name.clone(), backend: String::new() })
            }
            (View::Backends, _) => {
                let of = &self.figures.backends[row].status;
                (View::Flows, Scope { gateway, service: of.service.clone(), backend: of.address.clone() })
            }
            _ => return Action::Nothing,
        };
        let place = Place {
            view: self.view,
            scope: std::mem::replace(&mut self.scope, scope),
            filter: std::mem::take(&mut self.filter),
            selected: self.selected_key.take(),
        };
        self.back.push(place);
        self.enter(view)
    }

    /// Removes the filter, or goes back to where the view was opened from.
    fn leave(&mut self) -> Action {
        if !self.filter.is_empty() {
            self.filter.clear();
            self.arrange();
            return Action::Nothing;
        }
        let Some(place) = self.back.pop() else { return Action::Nothing };
        (self.scope, self.filter, self.selected_key) = (place.scope, place.filter, place.selected);
        self.enter(place.view)
    }

    /// Shows all rows of a view.
    fn show(&mut self, view: View) -> Action {
        (self.scope, self.filter, self.selected_key) = (Scope::default(), String::new(), None);
        self.back.clear();
        self.enter(view)
    }

    /// Flows and the heaviest of them are fetched at once; everything else is there.
    fn enter(&mut self, view: View) -> Action {
        self.view = view;
        (self.selected, self.first) = (0, 0);
        if view == View::Flows {
            (self.figures.flows, self.figures.flow_sample) = (Vec::new(), None);
        }
        if view == View::Heaviest {
            (self.figures.heaviest, self.figures.heaviest_sample) = (Vec::new(), None);
        }
        self.arrange();
        if matches!(view, View::Flows | View::Heaviest) { self.refresh() } else { Action::Nothing }
    }

    /// Finds the rows to show and their order, and the selected one among them.
    fn arrange(&mut self) {
        let (table, sort, filter) = (self.view.table(&self.figures), self.sort(), self.filter.to_lowercase());
        let is_shown = |row: &usize| table.is_in(*row, &self.scope) && (filter.is_empty() || table.has(*row, &filter));
        let mut order: Vec<usize> = (0..table.len()).filter(is_shown).collect();
        // Equal rows keep the order in which the API lists them: by name.
        order.sort_by(|a, b| {
            let ordering = table.value(*a, sort.column).compare(&table.value(*b, sort.column));
            if sort.is_descending { ordering.reverse() } else { ordering }
        });
        let place = self.selected_key.as_ref().and_then(|key| order.iter().position(|row| table.key(*row) == *key));
        self.order = order;
        match place {
            Some(at) => self.select(at),
            // The cursor stays where it is until it is moved: on the first row, whichever that is.
            None => {
                self.selected = self.selected.min(self.order.len().saturating_sub(1));
                self.scroll();
            }
        }
    }

    fn select(&mut self, at: usize) {
        self.selected = at.min(self.order.len().saturating_sub(1));
        self.selected_key = self.order.get(self.selected).map(|row| self.table().key(*row));
        self.scroll();
    }

    /// Scrolls so that the selected row is on the screen.
    fn scroll(&mut self) {
        let last_first = self.order.len().saturating_sub(self.page_rows);
        let lowest = (self.selected + 1).saturating_sub(self.page_rows);
        self.first = self.first.clamp(lowest, self.selected.max(lowest)).min(last_first);
    }
}

/// Numbers are sorted from high to low at first, words from A to Z.
fn is_descending_at_first(table: &dyn Table, column: usize) -> bool {
    let (title, _, is_number) = table.column(column);
    is_number && !matches!(title, "WORKER" | "IDLE")
}

/// The time since an event at `since_s`, in seconds.
pub(super) const fn seconds_since(since_s: u64, now: Duration) -> u64 {
    now.as_secs().saturating_sub(since_s)
}
