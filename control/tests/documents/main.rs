//! Checks the documentation with the programs that it describes.

#![allow(clippy::unwrap_used)]

mod pages;

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::Parser as _;
use pages::{Page, pages};
use serde_json::Value;

fn all() -> Vec<Page> {
    pages(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
}

/// The number of command lines of the program `name`, and those that `parse` rejects, with their errors.
fn refused(name: &str, parse: impl Fn(&[String]) -> Result<(), String>) -> (usize, Vec<String>) {
    let mut seen = 0;
    let mut refused = Vec::new();
    for page in all() {
        for arguments in page.commands(name) {
            seen += 1;
            // With `--help` a program only checks its command line.
            let arguments: Vec<String> = arguments.into_iter().chain(["--help".to_owned()]).collect();
            if let Err(error) = parse(&arguments) {
                refused.push(format!("{}: {name} {}: {error}", page.name(), arguments.join(" ")));
            }
        }
    }
    (seen, refused)
}

fn sluicectl(arguments: &[String]) -> Result<(), String> {
    let line = std::iter::once("sluicectl").chain(arguments.iter().map(String::as_str));
    match ctl::Arguments::try_parse_from(line) {
        Err(error) if error.use_stderr() => Err(error.to_string().lines().next().unwrap_or_default().to_owned()),
        _ => Ok(()),
    }
}

fn controller(arguments: &[String]) -> Result<(), String> {
    let output = Command::new(env!("CARGO_BIN_EXE_sluice-controller")).args(arguments).output().unwrap();
    let first = || String::from_utf8_lossy(&output.stderr).lines().next().unwrap_or_default().to_owned();
    if output.status.success() { Ok(()) } else { Err(first()) }
}

#[test]
fn command_lines_in_documents_are_accepted_by_the_programs() {
    for (name, (seen, refused)) in
        [("sluicectl", refused("sluicectl", sluicectl)), ("sluice-controller", refused("sluice-controller", controller))]
    {
        assert!(seen >= 8, "only {seen} command lines of {name} found");
        assert!(refused.is_empty(), "{}", refused.join("\n"));
    }
}

#[test]
fn yaml_blocks_in_documents_are_valid() {
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
    assert!(seen > 4, "only {seen} blocks of YAML found");
}

#[test]
fn links_to_headings_have_a_target() {
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

#[test]
fn the_page_of_the_admin_api_has_every_request_with_its_role() {
    let page = include_str!("../../../docs/reference/admin-api.md");
    let requests = include_str!("../../../proto/proto/sluice/v1/admin.proto").lines();
    let names: Vec<_> = requests.filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next()).collect();
    assert!(names.len() >= 17, "{names:?}");
    for name in names {
        let is_row = |role: &str| page.contains(&format!("| `{name}` | {role} |"));
        assert!(is_row("look") != is_row("change"), "{name} has no row with its role");
    }
}
