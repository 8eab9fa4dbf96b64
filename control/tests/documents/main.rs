//! The pages for people, looked at by the programs that they speak of.

#![allow(clippy::unwrap_used)]

mod pages;

use std::fs;
use std::path::Path;
use std::process::Command;

use pages::{Page, pages};
use serde_json::Value;

fn all() -> Vec<Page> {
    pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
}

/// Command lines that `program` does not take; `--help` makes it say so without doing anything.
fn refused(program: &str, name: &str) -> (usize, Vec<String>) {
    let mut seen = 0;
    let mut refused = Vec::new();
    for page in all() {
        for arguments in page.commands(name) {
            seen += 1;
            let output = Command::new(program).args(&arguments).arg("--help").output().unwrap();
            if !output.status.success() {
                let error = String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
                refused.push(format!("{}: {name} {}: {error}", page.name(), arguments.join(" ")));
            }
        }
    }
    (seen, refused)
}

#[test]
fn command_lines_in_documents_are_taken_by_the_programs() {
    let programs =
        [(env!("CARGO_BIN_EXE_sluicectl"), "sluicectl", 8), (env!("CARGO_BIN_EXE_sluice-controller"), "sluice-controller", 8)];
    for (program, name, least) in programs {
        let (seen, refused) = refused(program, name);
        assert!(seen >= least, "only {seen} of {name} were found");
        assert!(refused.is_empty(), "{}", refused.join("\n"));
    }
}

#[test]
fn blocks_of_yaml_in_documents_are_yaml() {
    let mut seen = 0;
    for page in all() {
        for block in page.yaml() {
            seen += 1;
            for document in block.split("\n---\n") {
                let read = serde_saphyr::from_str::<Value>(document);
                assert!(read.is_ok(), "{}: {read:?}\n{document}", page.name());
            }
        }
    }
    assert!(seen > 4, "only {seen} were found");
}

#[test]
fn links_to_headings_lead_to_one() {
    let mut wrong = Vec::new();
    for page in all() {
        for link in page.links() {
            let Some((file, anchor)) = link.split_once('#') else { continue };
            let target = if file.is_empty() { page.file.clone() } else { page.file.parent().unwrap().join(file) };
            let target = Page { text: fs::read_to_string(&target).unwrap_or_default(), file: target };
            if !target.anchors().iter().any(|heading| heading == anchor) {
                wrong.push(format!("{}: {link}", page.name()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
