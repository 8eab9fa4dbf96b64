//! Scripts, configurations and the Vagrantfile of the repository: looked at by the programs that read them.

#![allow(clippy::unwrap_used)]

mod edge;
#[path = "../control/tests/documents/pages.rs"]
mod pages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use edge::skip;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

fn check(config: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sluiced")).args(["check", "--config"]).arg(config).output().unwrap()
}

#[test]
fn every_script_is_correct_bash() {
    let mut scripts: Vec<PathBuf> = Vec::new();
    for dir in [".ci", "demo"] {
        let files = fs::read_dir(root().join(dir)).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
        scripts.extend(files.filter(|path| {
            let is_script = fs::read_to_string(path).unwrap().starts_with("#!/usr/bin/env bash");
            is_script || path.extension().is_some_and(|extension| extension == "sh")
        }));
    }
    assert!(scripts.len() >= 6, "{scripts:?}");
    for script in scripts {
        let output = Command::new("bash").arg("-n").arg(&script).output().unwrap();
        assert!(output.status.success(), "{}: {}", script.display(), text(&output));
    }
}

#[test]
fn configurations_of_the_repository_are_accepted() {
    for file in ["deploy/sluice.example.yaml", "demo/vagrant.yaml"] {
        let output = check(&root().join(file));
        assert!(output.status.success(), "{file}: {}", text(&output));
    }
}

#[test]
fn the_first_configuration_of_the_readme_is_accepted() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let blocks = readme.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let first = blocks.into_iter().find(|block| block.starts_with("name:")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sluice.yaml");
    fs::write(&file, first).unwrap();
    let output = check(&file);
    assert!(output.status.success(), "{}", text(&output));
}

#[test]
fn command_lines_in_documents_are_taken_by_sluiced() {
    let mut seen = 0;
    for page in pages::pages(root()) {
        for arguments in page.commands("sluiced") {
            seen += 1;
            // Says so without doing anything.
            let output = Command::new(env!("CARGO_BIN_EXE_sluiced")).args(&arguments).arg("--help").output().unwrap();
            assert!(output.status.success(), "{}: {arguments:?}: {}", page.name(), text(&output));
        }
    }
    assert!(seen > 10, "only {seen} were found");
}

#[test]
fn the_vagrantfile_is_valid() {
    if Command::new("vagrant").arg("--version").output().is_err() {
        return skip("the_vagrantfile_is_valid", "no `vagrant` here (Debian: apt-get install vagrant)");
    }
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("vagrant")
        .args(["validate", "--ignore-provider"])
        .current_dir(root())
        .env("VAGRANT_HOME", dir.path().join("home"))
        .env("VAGRANT_DOTFILE_PATH", dir.path().join("dot"))
        .env("VAGRANT_CHECKPOINT_DISABLE", "1")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output));
}
