//! Rules for documents, and a bad example for each.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::{assert_none, files, relative, root};

/// Columns of a line of prose.
const COLUMNS: usize = 120;
const DECISIONS: &str = "docs/internals/decisions";
const DROP_REASONS: &str = "docs/reference/drop-reasons.md";

fn pages() -> Vec<PathBuf> {
    let mut pages = files(&root().join("docs"), ".md");
    pages.extend(["README.md", "CONTRIBUTING.md", "SECURITY.md"].map(|page| root().join(page)));
    pages
}

fn read(page: &Path) -> String {
    fs::read_to_string(page).map_err(|error| format!("{}: {error}", page.display())).unwrap()
}

/// Lines of prose that are too long. Rows of tables and blocks of code are not prose.
fn long_lines(page: &str, text: &str) -> Vec<String> {
    let mut fence: Option<String> = None;
    let mut offences = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let start = line.trim_start();
        let marks: String = start.chars().take_while(|c| *c == '`').collect();
        match &fence {
            Some(open) if marks.len() >= open.len() => fence = None,
            Some(_) => {}
            None if marks.len() >= 3 => fence = Some(marks),
            None => {
                let columns = line.chars().count();
                if columns > COLUMNS && !start.starts_with('|') {
                    let number = index + 1;
                    offences.push(format!("{page}:{number}: {columns} columns: break the line at {COLUMNS}"));
                }
            }
        }
    }
    offences
}

#[test]
fn lines_of_prose_have_at_most_120_columns() {
    let offences: Vec<_> = pages().iter().flat_map(|page| long_lines(&relative(page), &read(page))).collect();
    assert_none("lines of prose that are too long", &offences);
}

#[test]
fn a_long_line_of_prose_is_an_offence() {
    let long = "word ".repeat(30);
    let text = format!("short\n| {long} |\n```text\n{long}\n```\n{}\n{long}\n", "é".repeat(COLUMNS));
    assert_eq!(long_lines("page.md", &text), ["page.md:7: 150 columns: break the line at 120"]);
}

/// Targets of the links of a page, without the part after `#`; links to other hosts left out.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
    targets.filter(|target| !target.is_empty() && !target.contains("://") && !target.starts_with("mailto:"))
}

/// Decision records that the index does not list, and links of the index without a target.
fn index_offences(index: &str, records: &[String]) -> Vec<String> {
    let linked: BTreeSet<&str> = links(index).filter(|target| target.ends_with(".md") && !target.contains('/')).collect();
    let unlisted = records.iter().filter(|record| !linked.contains(record.as_str()));
    let unlisted =
        unlisted.map(|record| format!("{DECISIONS}/{record}: {DECISIONS}/README.md does not list it: add a line with a link"));
    let missing = linked.iter().filter(|target| !records.iter().any(|record| record == *target));
    let missing = missing.map(|target| format!("{DECISIONS}/README.md: there is no record {target}: correct or remove the link"));
    unlisted.chain(missing).collect()
}

fn records() -> Vec<String> {
    let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let names = files(&root().join(DECISIONS), ".md").iter().map(name).collect::<Vec<_>>();
    names.into_iter().filter(|name| name != "README.md").collect()
}

#[test]
fn the_index_lists_every_decision() {
    let index = read(&root().join(DECISIONS).join("README.md"));
    assert_none("decision records and their index differ", &index_offences(&index, &records()));
}

#[test]
fn a_decision_without_a_line_in_the_index_is_an_offence() {
    let index = "- [Steering](0001-steering.md#context)\n- [Gone](0003-gone.md)\n- [Design](../design.md)";
    let records = ["0001-steering.md", "0002-snapshots.md"].map(str::to_owned);
    let expected = [
        "docs/internals/decisions/0002-snapshots.md: docs/internals/decisions/README.md does not list it: add a line with a link",
        "docs/internals/decisions/README.md: there is no record 0003-gone.md: correct or remove the link",
    ];
    assert_eq!(index_offences(index, &records), expected);
}

#[test]
fn every_decision_has_its_four_parts() {
    let records = records();
    assert!(!records.is_empty());
    let mut offences = Vec::new();
    for record in records {
        let text = read(&root().join(DECISIONS).join(&record));
        let missing = ["Status", "Context", "Decision", "Consequences"].into_iter();
        let missing = missing.filter(|part| !text.contains(&format!("## {part}")));
        offences.extend(missing.map(|part| format!("{DECISIONS}/{record}: no section {part}")));
    }
    assert_none("decision records without a section", &offences);
}

#[test]
fn every_drop_reason_is_explained_to_operators() {
    let page = read(&root().join(DROP_REASONS));
    let reasons = dataplane::DropReason::ALL.iter().map(|reason| reason.as_str());
    let offences: Vec<_> = reasons.filter(|reason| !page.contains(&format!("| `{reason}` |"))).map(str::to_owned).collect();
    assert_none(&format!("drop reasons without a row in {DROP_REASONS}"), &offences);
}

#[test]
fn links_of_documents_have_targets() {
    let mut pages = pages();
    pages.push(root().join("CHANGELOG.md"));
    let mut offences = Vec::new();
    for page in pages {
        let text = read(&page);
        let missing = links(&text).filter(|target| !page.parent().unwrap().join(target).exists());
        offences.extend(missing.map(|target| format!("{}: {target}", relative(&page))));
    }
    assert_none("links to files that do not exist", &offences);
}

/// Paths of files in backticks, each with its line number.
fn quoted_files(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let quoted = line.split('`').skip(1).step_by(2);
        let is_file = |quote: &&str| {
            let folder = quote.split('/').next().unwrap_or_default();
            let has_ending = [".rs", ".proto"].iter().any(|ending| quote.ends_with(ending));
            has_ending && ["control", "dataplane", "ffi", "proto", "src", "tests", "demo"].contains(&folder)
        };
        found.extend(quoted.filter(is_file).map(|quote| (index + 1, quote)));
    }
    found
}

#[test]
fn source_files_that_documents_name_exist() {
    let mut offences = Vec::new();
    let is_history = |page: &Path| page.ends_with("graph-before.md");
    for page in pages().into_iter().filter(|page| !is_history(page)) {
        let text = read(&page);
        let missing = quoted_files(&text).into_iter().filter(|(_, file)| !root().join(file).exists());
        offences.extend(missing.map(|(line, file)| format!("{}:{line}: there is no {file}", relative(&page))));
    }
    assert_none("files that documents name and that do not exist", &offences);
}

/// Files that the tables of a page name in their first column more than once.
fn repeated_rows(text: &str) -> Vec<String> {
    let mut seen = BTreeSet::new();
    let rows = quoted_files(text).into_iter();
    let first_columns = rows.filter(|(line, file)| {
        text.lines().nth(line - 1).is_some_and(|row| row.strip_prefix("| `").is_some_and(|row| row.starts_with(file)))
    });
    first_columns.filter(|(_, file)| !seen.insert(*file)).map(|(line, file)| format!("line {line}: {file}")).collect()
}

#[test]
fn the_walks_through_the_code_name_each_file_once() {
    let page = read(&root().join("docs/internals/architecture.md"));
    assert!(quoted_files(&page).len() > 60, "the page walks through a SYN and a Service");
    assert_none("files that the walks name twice", &repeated_rows(&page));
}

#[test]
fn a_file_that_a_walk_repeats_is_an_offence() {
    let text = "| `src/run.rs` | starts `src/cli.rs` |\n| `src/cli.rs` | reads |\n| `src/run.rs` | again |";
    assert_eq!(quoted_files(text).len(), 4);
    assert_eq!(repeated_rows(text), ["line 3: src/run.rs"]);
}
