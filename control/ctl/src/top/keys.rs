//! The keys, as the help page and the last line name them.
//!
//! Not here: what they do (`model`).

/// The keys of the last line.
pub(super) const FOOTER: [(&str, &str); 8] = [
    ("F1", "Help"),
    ("F3", "Search"),
    ("F4", "Filter"),
    ("F6", "Sort"),
    ("Enter", "Open"),
    ("Esc", "Back"),
    ("Space", "Pause"),
    ("F10", "Quit"),
];

/// All keys.
pub(super) const HELP: [(&str, &str); 15] = [
    ("1 to 8, Tab", "view"),
    ("Up Down, k j", "select a row"),
    ("PgUp PgDn Home End", "select a row further away"),
    ("Enter, Right", "open: a Service's backends, a backend's flows, a gateway"),
    ("f", "the flows of the selected Service or backend"),
    ("Esc, Left", "show all rows again, or go back"),
    ("F3, /", "search: select the next row with a text; F3 or n: the next"),
    ("F4, \\", "filter: hide rows without a text"),
    ("F6", "choose the column to sort by"),
    ("< >", "sort by the column before or after"),
    ("I", "invert the order"),
    ("F5, r", "ask now"),
    ("Space", "pause: keep these figures"),
    ("F1, h, ?", "this page"),
    ("F10, q, Ctrl-C", "quit"),
];

/// What the figures mean.
pub(super) const NOTES: [&str; 4] = [
    "PKT/s and BIT/s: both directions, from the IP header on. UP: healthy of all.",
    "FAIL/s: connections that ended before they were established; RST/s: reset later.",
    "BUSY: share of a worker's time spent on packets. FULL: of its flow table.",
    "HISTORY: a bar for each sample, the newest at the right. -: not known yet.",
];
