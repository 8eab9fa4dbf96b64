//! `sluice-controller` as its user meets it: exit codes and what it prints.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Command, Output};

fn sluice_controller(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sluice-controller")).args(arguments).output().unwrap()
}

fn check(text: &str) -> Output {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), text).unwrap();
    sluice_controller(&["check", "--config", file.path().to_str().unwrap()])
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn a_good_configuration_is_printed_in_full_and_can_be_read_again() {
    let output = check("pools: [{name: default, addresses: [192.0.2.100-192.0.2.199]}]\n");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let effective = text(&output.stdout);
    assert!(effective.contains("loadBalancerClass"), "{effective}");
    let again = check(effective);
    assert_eq!((again.status.code(), text(&again.stdout)), (Some(0), effective));
}

#[test]
fn every_mistake_is_named_at_once_with_exit_code_2() {
    let output = check("group: [1]\nnonsense: 1\n");
    assert_eq!(output.status.code(), Some(2));
    let errors = text(&output.stderr);
    assert!(errors.contains("group") && errors.contains("nonsense"), "{errors}");
}

#[test]
fn wrong_usage_ends_with_exit_code_2() {
    assert_eq!(sluice_controller(&["fly"]).status.code(), Some(2));
    assert_eq!(sluice_controller(&["check"]).status.code(), Some(2));
    assert_eq!(sluice_controller(&["check", "--config", "/nonexistent"]).status.code(), Some(2));
}
