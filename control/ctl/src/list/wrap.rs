//! Lines that are no wider than a terminal.
//!
//! Not here: tables, whose columns stay whole (`list`).

/// Columns of a line.
pub(crate) const COLUMNS: usize = 80;

/// Lines of words behind a margin, in whose first line `mark` stands.
pub(crate) fn wrapped(mark: &str, words: &str, margin: usize) -> String {
    let mut lines = format!("{mark:<margin$}");
    let mut column = margin;
    for (at, word) in words.split_whitespace().enumerate() {
        let length = word.chars().count();
        if at > 0 && column + 1 + length > COLUMNS {
            lines.push_str(&format!("\n{:margin$}", ""));
            column = margin;
        } else if at > 0 {
            lines.push(' ');
            column += 1;
        }
        lines.push_str(word);
        column += length;
    }
    lines.truncate(lines.trim_end().len());
    lines.push('\n');
    lines
}
