//! The lines of the table, and how it is printed.

use std::io;

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Good, or merely a fact.
    Ok,
    /// It could be better.
    Note,
    /// The configuration needs it.
    Missing,
}

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Its severity.
    pub level: Level,
    /// The item.
    pub subject: String,
    /// What was found.
    pub found: String,
    /// What to do; empty if nothing.
    pub advice: String,
}

impl Finding {
    pub(in crate::commands) fn ok(subject: impl Into<String>, found: impl Into<String>) -> Self {
        Self { level: Level::Ok, subject: subject.into(), found: found.into(), advice: String::new() }
    }

    pub(in crate::commands) fn note(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Note, subject: subject.into(), found: found.into(), advice: advice.into() }
    }

    pub(in crate::commands) fn missing(subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { level: Level::Missing, subject: subject.into(), found: found.into(), advice: advice.into() }
    }

    /// Missing if it is required, else a note.
    pub(super) fn lacking(needed: bool, subject: impl Into<String>, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let level = if needed { Level::Missing } else { Level::Note };
        Self { level, subject: subject.into(), found: found.into(), advice: advice.into() }
    }
}

/// Whether all requirements are met: exit code 0.
#[must_use]
pub fn is_ready(findings: &[Finding]) -> bool {
    findings.iter().all(|finding| finding.level != Level::Missing)
}

/// Prints the table, with advice below each line, and a summary.
///
/// # Errors
/// Errors of `out`.
pub fn print(findings: &[Finding], out: &mut impl io::Write) -> io::Result<()> {
    let width = findings.iter().map(|finding| finding.subject.len()).max().unwrap_or(0);
    for Finding { level, subject, found, advice } in findings {
        let level = match level {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Missing => "missing",
        };
        writeln!(out, "{level:<8} {subject:<width$}  {found}")?;
        if !advice.is_empty() {
            writeln!(out, "{:8} {:width$}  -> {advice}", "", "")?;
        }
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    writeln!(out, "missing: {}, notes: {}", count(Level::Missing), count(Level::Note))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_puts_advice_below_its_line_and_ends_with_a_sum() {
        let findings = [
            Finding::ok("dpdk", "22.11"),
            Finding::note("cores", "none isolated", "isolate some"),
            Finding::missing("hugepages", "none", "reserve some"),
        ];
        let mut out = Vec::new();
        print(&findings, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "ok       dpdk       22.11\n\
             note     cores      none isolated\n                    -> isolate some\n\
             missing  hugepages  none\n                    -> reserve some\n\
             missing: 1, notes: 1\n"
        );
    }
}
