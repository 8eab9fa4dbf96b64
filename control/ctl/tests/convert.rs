//! `sluicectl convert` as a program: output and exit codes.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

const POOL: &str = "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: first, namespace: metallb-system}\n\
                    spec: {addresses: [192.0.2.0/24]}\n";

fn convert(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_sluicectl"))
        .arg("convert")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A program that rejected its arguments does not read standard input.
    let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
    child.wait_with_output().unwrap()
}

fn texts(output: &Output) -> (String, String) {
    (String::from_utf8_lossy(&output.stdout).into_owned(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn pools_are_printed_to_stdout_and_notes_to_stderr() {
    for arguments in [&["metallb"][..], &["metallb", "-"]] {
        let output = convert(arguments, POOL);
        let (out, notes) = texts(&output);
        assert_eq!(output.status.code(), Some(0), "{notes}");
        assert!(out.starts_with("---\n# From IPAddressPool metallb-system/first, - line 1 (document 1).\n"), "{out}");
        assert!(out.contains("kind: AddressPool") && out.contains("sluice.dev/v1beta1"), "{out}");
        assert!(
            notes.starts_with("note: - line 1 (document 1): IPAddressPool metallb-system/first: no advertisement"),
            "{notes}"
        );
    }
}

#[test]
fn several_files_are_converted_together() {
    let dir = tempfile::tempdir().unwrap();
    let (pools, lan) = (dir.path().join("pools.yaml"), dir.path().join("lan.yaml"));
    std::fs::write(&pools, POOL).unwrap();
    std::fs::write(&lan, "apiVersion: metallb.io/v1beta1\nkind: L2Advertisement\nmetadata: {name: lan}\n").unwrap();
    let output = convert(&["metallb", pools.to_str().unwrap(), lan.to_str().unwrap()], "");
    assert_eq!((output.status.code(), texts(&output).1.as_str()), (Some(0), ""));
}

#[test]
fn wrong_input_exits_with_2_and_prints_no_pool() {
    let output = convert(&["metallb"], &format!("{POOL}---\n{}", POOL.replace("192.0.2.0/24", "192.0.2.0/99")));
    let (out, error) = texts(&output);
    assert_eq!((output.status.code(), out.as_str()), (Some(2), ""));
    assert!(error.contains("- line 6 (document 2): IPAddressPool metallb-system/first"), "{error}");
    assert_eq!(convert(&["metallb", "--wrong"], "").status.code(), Some(2));
    assert_eq!(convert(&["keepalived"], "").status.code(), Some(2));
}

#[test]
fn a_missing_file_exits_with_2() {
    let output = convert(&["cilium", "/does/not/exist.yaml"], "");
    assert_eq!(output.status.code(), Some(2));
    assert!(texts(&output).1.contains("cannot read /does/not/exist.yaml"));
}
