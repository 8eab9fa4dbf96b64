//! The errors of `sluicectl` in a unit of systemd, such as the one that reloads the gateway.

#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::io::{Read as _, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

#[test]
fn errors_in_the_journal_have_the_priority_of_errors() {
    for is_journal in [true, false] {
        let (mut reader, writer) = pipe().unwrap();
        let of_pipe = File::from(OwnedFd::from(reader.try_clone().unwrap())).metadata().unwrap();
        let stream = format!("{}:{}", of_pipe.dev(), of_pipe.ino() + u64::from(!is_journal));
        let arguments = ["--server", "unix:/nonexistent/admin.sock", "reload"];
        let status = Command::new(env!("CARGO_BIN_EXE_sluicectl"))
            .args(arguments)
            .env("JOURNAL_STREAM", stream)
            .stderr(writer)
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(1));
        let mut said = String::new();
        reader.read_to_string(&mut said).unwrap();
        assert!(said.lines().all(|line| line.starts_with("<3>") == is_journal), "{said}");
        assert!(said.contains("sluicectl: "), "{said}");
    }
}
