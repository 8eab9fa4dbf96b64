//! Draws the screen: a pure function of the model, the size and the time.
//!
//! Invariant: no colour says what a word does not say.

use std::time::Duration;

use ratatui::Frame;
use ratatui::layout::Rect;
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::columns::{Value, View};
use super::figures::Tone;
use super::keys;
use super::model::{Connection, Dialog, Model, seconds_since};
use super::number;

/// Smallest screen, in columns and lines.
const LEAST: (u16, u16) = (60, 12);
/// Widest column of names while there is room for a history, widest first column, and widest history.
const NAME_MAX: u16 = 30;
const FIRST_MAX: u16 = 44;
const HISTORY_MAX: u16 = 60;

/// Look of the screen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Whether it has colours.
    pub(super) has_colours: bool,
    /// The time between two samples.
    pub(super) delay: Duration,
}

impl Look {
    fn tone(self, tone: Tone) -> Style {
        let colour = match tone {
            Tone::Plain => return Style::new(),
            Tone::Notice => Color::Yellow,
            Tone::Alarm => Color::Red,
        };
        let style = Style::new().add_modifier(Modifier::BOLD);
        if self.has_colours { style.fg(colour) } else { style }
    }

    fn faint(self) -> Style {
        if self.has_colours { Style::new().fg(Color::Cyan) } else { Style::new() }
    }
}

/// Draws at `now`, since 1970.
pub(super) fn draw(frame: &mut Frame, model: &Model, look: Look, now: Duration) {
    let Rect { width, height, .. } = frame.area();
    if width < LEAST.0 || height < LEAST.1 {
        let text = format!("{width}x{height} is too small: top needs {}x{}; q quits", LEAST.0, LEAST.1);
        frame.render_widget(Paragraph::new(wrap(&text, usize::from(width))), frame.area());
        return;
    }
    if model.dialog == Some(Dialog::Help) {
        return draw_help(frame);
    }
    let line = |at: u16| Rect { x: 0, y: at, width, height: 1 };
    frame.render_widget(state(model, look, now, width), line(0));
    for (at, text) in (1..).zip(totals(model, look, width)) {
        frame.render_widget(text, line(at));
    }
    frame.render_widget(views(model), line(3));
    frame.render_widget(scope(model, look), line(4));
    draw_rows(frame, model, look, Rect { x: 0, y: 5, width, height: height - 8 });
    let detail = model.order.get(model.selected).map(|row| model.table().detail(*row)).unwrap_or_default();
    let detail = Paragraph::new(wrap(&detail, usize::from(width))).style(look.faint());
    frame.render_widget(detail, Rect { y: height - 3, height: 2, ..line(0) });
    frame.render_widget(footer(model), line(height - 1));
    if let Some(Dialog::Sort { at }) = &model.dialog {
        draw_sort(frame, model, *at);
    }
}

/// Who answers, and whether.
fn state(model: &Model, look: Look, now: Duration, width: u16) -> Line<'static> {
    let status = &model.figures.status;
    let who = if status.gateway.is_empty() { "controller" } else { &status.gateway };
    if let Connection::Lost { since_s, reason } = &model.connection {
        let (since, ago) = (number::clock(*since_s), number::duration(seconds_since(*since_s, now)));
        let text = format!("{who} disconnected since {since} ({ago}), retrying: {reason}");
        return Line::styled(cut(&text, width), look.tone(Tone::Alarm).add_modifier(Modifier::REVERSED));
    }
    let mut words = vec![format!("{who} {}", status.version)];
    let is_gateway = !status.gateway.is_empty();
    words.push(if status.ready { "ready" } else { "not ready" }.to_owned());
    words.extend(status.draining.then(|| "draining".to_owned()));
    words.extend((is_gateway && !status.controller_connected).then(|| "no controller".to_owned()));
    words.extend(status.state_expired.then(|| "state older than maxStateAge: nodes only".to_owned()));
    words.extend(status.generation.as_ref().map(|generation| format!("generation {}", generation.counter)));
    let restarts: u64 = status.tasks.iter().map(|task| task.restarts).sum();
    words.extend((restarts > 0).then(|| format!("{restarts} task restarts")));
    let silent = model.figures.silent.iter().map(|silent| format!("no answer from {}", silent.gateway));
    words.extend(silent);
    let tone = if status.ready && !status.state_expired && model.figures.silent.is_empty() { Tone::Plain } else { Tone::Alarm };
    let every = format!("every {} s", look.delay.as_secs_f64());
    let right = format!("{}  {}", if model.is_paused { "PAUSED" } else { every.as_str() }, number::clock(now.as_secs()));
    let room = width.saturating_sub(u16::try_from(right.len()).unwrap_or(0) + 1);
    let left = format!("{:<1$}", cut(&words.join("  "), room), usize::from(room));
    let right = Span::styled(format!(" {right}"), if model.is_paused { look.tone(Tone::Notice) } else { Style::new() });
    Line::from(vec![Span::styled(left, look.tone(tone)), right])
}

/// The five figures of all Services, and their histories below them.
fn totals(model: &Model, look: Look, width: u16) -> [Line<'static>; 2] {
    let totals = &model.figures.totals;
    let rate = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), number::rate);
    let texts = [
        format!("Pkt/s {}", rate(totals.traffic.packets)),
        format!("Bit/s {}", rate(totals.traffic.bits)),
        format!("New/s {}", rate(totals.traffic.new_flows)),
        format!("Drops/s {}", rate(totals.drops)),
        format!("Flows {}", number::count(totals.traffic.flows)),
    ];
    let cell = usize::from(width) / texts.len();
    let figures: String = texts.iter().map(|text| format!("{text:<cell$}")).collect();
    let bars: String = totals.histories.iter().map(|history| format!("{:<cell$}", left(&history.bars(cell - 2)))).collect();
    [Line::styled(figures, Style::new().add_modifier(Modifier::BOLD)), Line::styled(bars, look.faint())]
}

/// Bars from the left, while there are few.
fn left(bars: &str) -> String {
    let trimmed = bars.trim_start();
    format!("{trimmed:<width$}", width = bars.chars().count())
}

fn views(model: &Model) -> Line<'static> {
    let mut spans = Vec::new();
    for (number, view) in (1..).zip(View::ALL) {
        let is_shown = view == model.view;
        // With a blank before the first one they would have 81 columns.
        let before = if number == 1 { "" } else { " " };
        let text = if is_shown { format!("[{number} {}]", view.title()) } else { format!("{before}{number} {} ", view.title()) };
        let style = if is_shown { Style::new().add_modifier(Modifier::BOLD) } else { Style::new() };
        spans.push(Span::styled(text, style));
    }
    Line::from(spans)
}

/// What is listed, and what is not.
fn scope(model: &Model, look: Look) -> Line<'static> {
    let (title, scope, shown) = (model.view.title(), &model.scope, model.order.len());
    let parts = [("backend", &scope.backend), ("service", &scope.service), ("gateway", &scope.gateway)];
    let of = parts.iter().filter(|(_, name)| !name.is_empty()).map(|(kind, name)| format!(" of {kind} {name}"));
    let mut text = format!("{title}{}: {shown}", of.collect::<String>());
    if !model.filter.is_empty() {
        text.push_str(&format!("; only with \"{}\" (Esc: all)", model.filter));
    }
    let flows = model.figures.flow_sample.as_ref().filter(|_| model.view == View::Flows);
    if flows.is_some_and(|flows| flows.is_cut) {
        text.push_str("; there are more, `sluicectl flows --limit 0` lists all");
    }
    Line::styled(text, look.faint())
}

/// Widths of the visible columns that fit.
fn widths(model: &Model, width: u16) -> Vec<(usize, u16)> {
    let table = model.table();
    let mut columns: Vec<(usize, u16)> = Vec::new();
    let mut used = 0;
    for column in model.visible_columns() {
        let of = table.column(column).1;
        let gap = u16::from(!columns.is_empty());
        if used + gap + of > width {
            break;
        }
        columns.push((column, of));
        used += gap + of;
    }
    // The room that is left goes to the names, then to the history.
    let mut rest = width - used;
    let mut grow = |column: &mut (usize, u16), max: u16| {
        let more = rest.min(max.saturating_sub(column.1));
        column.1 += more;
        rest -= more;
    };
    for column in &mut columns {
        if matches!(table.column(column.0).0, "SERVICE" | "BACKEND" | "CLIENT" | "FRONTEND") {
            grow(column, NAME_MAX);
        }
    }
    columns.iter_mut().filter(|column| table.column(column.0).0 == "HISTORY").for_each(|column| grow(column, HISTORY_MAX));
    if let Some(first) = columns.first_mut() {
        grow(first, FIRST_MAX);
    }
    columns
}

fn draw_rows(frame: &mut Frame, model: &Model, look: Look, area: Rect) {
    let (table, sort, columns) = (model.table(), model.sort(), widths(model, area.width));
    let line = |at: u16| Rect { y: area.y + at, height: 1, ..area };
    let title = |(column, width): &(usize, u16)| {
        let (title, _, is_number) = table.column(*column);
        let arrow = if sort.is_descending { "↓" } else { "↑" };
        let text = if *column == sort.column && title.len() < usize::from(*width) {
            format!("{title}{arrow}")
        } else {
            title.to_owned()
        };
        let style =
            if *column == sort.column { Modifier::REVERSED | Modifier::BOLD | Modifier::UNDERLINED } else { Modifier::REVERSED };
        Span::styled(padded(&text, *width, is_number), Style::new().add_modifier(style))
    };
    let mut spans = Vec::new();
    for column in &columns {
        if !spans.is_empty() {
            spans.push(Span::styled(" ", Style::new().add_modifier(Modifier::REVERSED)));
        }
        spans.push(title(column));
    }
    frame.render_widget(Line::from(spans), line(0));
    if model.order.is_empty() {
        let why = wrap(&emptiness(model), usize::from(area.width));
        frame.render_widget(Paragraph::new(why), Rect { y: area.y + 1, height: area.height - 1, ..area });
    }
    let shown = model.order.iter().enumerate().skip(model.first);
    for (at, (position, row)) in (1..area.height).zip(shown) {
        let is_selected = position == model.selected;
        let mut spans: Vec<Span> = Vec::new();
        for (column, width) in &columns {
            let value = table.value(*row, *column);
            let style = match value {
                Value::State(_, tone) => look.tone(tone),
                Value::History(_) => look.faint(),
                _ => Style::new(),
            };
            if !spans.is_empty() {
                spans.push(" ".into());
            }
            let text = value.text(usize::from(*width));
            // Names of one namespace, and of one Deployment, have the same beginning.
            let text = if matches!(value, Value::Text(_)) { cut_middle(&text, *width) } else { text.into_owned() };
            spans.push(Span::styled(
                padded(&text, *width, table.column(*column).2),
                if is_selected { Style::new() } else { style },
            ));
        }
        let style = if is_selected { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        frame.render_widget(Line::from(spans).style(style), line(at));
    }
}

/// Why no rows are shown.
fn emptiness(model: &Model) -> String {
    let figures = &model.figures;
    let flows = figures.flow_sample.as_ref();
    match model.view {
        _ if !model.filter.is_empty() => "No row has this text. Esc shows all.".to_owned(),
        View::Flows if flows.is_none() => "Asking for flows ...".to_owned(),
        View::Flows => flows.and_then(|flows| flows.refusal.clone()).unwrap_or_else(|| "No flows.".to_owned()),
        View::Heaviest => match &figures.heaviest_sample {
            None => "Looking at packets ...".to_owned(),
            Some(sample) => sample.refusal.clone().unwrap_or_else(|| "No packet of a flow in the last second.".to_owned()),
        },
        View::Workers if figures.status.gateway.is_empty() => {
            "A controller has no workers. Ask a gateway: sluicectl --server unix:PATH top".to_owned()
        }
        View::Gateways => figures.gateways_refusal.clone().unwrap_or_else(|| "No gateway is connected.".to_owned()),
        View::Drops => "No packet was dropped.".to_owned(),
        view => format!("No {}.", view.title().to_lowercase()),
    }
}

fn footer(model: &Model) -> Line<'static> {
    let cursor = || Span::styled(" ", Style::new().add_modifier(Modifier::REVERSED));
    let input = |name: &str, text: &str, keys: &str| {
        Line::from(vec![format!("{name}: {text}").into(), cursor(), format!("  {keys}").into()])
    };
    match &model.dialog {
        Some(Dialog::Search(text)) => input("Search", text, "F3 next  Enter done  Esc cancel"),
        Some(Dialog::Filter { .. }) => input("Filter", &model.filter, "Enter done  Esc cancel"),
        Some(Dialog::Sort { .. }) => Line::from("Up Down choose  Enter sort  Esc cancel"),
        _ => {
            let mut spans: Vec<Span> = Vec::new();
            for (key, name) in keys::FOOTER {
                spans.push(format!(" {key} ").into());
                spans.push(Span::styled(name, Style::new().add_modifier(Modifier::REVERSED)));
            }
            Line::from(spans)
        }
    }
}

fn draw_help(frame: &mut Frame) {
    let mut lines = vec![Line::styled("sluicectl top: keys", Style::new().add_modifier(Modifier::BOLD))];
    lines.extend(keys::HELP.iter().map(|(keys, does)| Line::from(format!("  {keys:<20}{does}"))));
    lines.extend(keys::NOTES.iter().map(|note| Line::from(*note)));
    lines.push(Line::styled("Any key closes this page.", Style::new().add_modifier(Modifier::BOLD)));
    frame.render_widget(Paragraph::new(lines), frame.area());
}

fn draw_sort(frame: &mut Frame, model: &Model, at: usize) {
    let (columns, table) = (model.sortable_columns(), model.table());
    let height = u16::try_from(columns.len() + 2).unwrap_or(u16::MAX).min(frame.area().height - 5);
    let area = Rect { x: 0, y: 5, width: 16.min(frame.area().width), height };
    let first = (at + 3).saturating_sub(usize::from(height));
    let line = |(position, column): (usize, &usize)| {
        let style = if position == at { Style::new().add_modifier(Modifier::REVERSED) } else { Style::new() };
        Line::styled(format!("{:<14}", table.column(*column).0), style)
    };
    let lines: Vec<Line> = columns.iter().enumerate().skip(first).map(line).collect();
    frame.render_widget(Clear, area);
    frame.render_widget(Paragraph::new(lines).block(Block::bordered().title("Sort by")), area);
}

/// The text in a cell of a table, cut if it is longer.
fn padded(text: &str, width: u16, is_number: bool) -> String {
    let (text, width) = (cut(text, width), usize::from(width));
    if is_number { format!("{text:>width$}") } else { format!("{text:<width$}") }
}

/// The text, or its begin and an ellipsis.
fn cut(text: &str, width: u16) -> String {
    if text.chars().count() <= usize::from(width) {
        return text.to_owned();
    }
    let begin: String = text.chars().take(usize::from(width).saturating_sub(1)).collect();
    format!("{begin}…")
}

/// The text, or its begin and its end with an ellipsis between them.
fn cut_middle(text: &str, width: u16) -> String {
    let (count, width) = (text.chars().count(), usize::from(width));
    if count <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (begin, end) = (kept / 2, kept - kept / 2);
    text.chars().take(begin).chain(['…']).chain(text.chars().skip(count - end)).collect()
}

/// Lines of whole words.
fn wrap(text: &str, width: usize) -> Vec<Line<'static>> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last_mut().filter(|last| last.is_empty() || last.chars().count() + 1 + word.chars().count() <= width);
        match last {
            Some(last) if last.is_empty() => last.push_str(word),
            Some(last) => {
                last.push(' ');
                last.push_str(word);
            }
            None => lines.push(word.to_owned()),
        }
    }
    lines.into_iter().map(Line::from).collect()
}
