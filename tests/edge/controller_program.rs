//! The other programs, for tests of programs together.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Whether a program is newer than all its sources.
fn is_current(program: &Path) -> bool {
    let modified = |path: &Path| fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
    let Ok(sources) = fs::read_to_string(program.with_extension("d")) else { return false };
    let built = modified(program);
    sources.split_whitespace().skip(1).all(|source| modified(Path::new(source)) <= built)
}

/// `sluice-controller`, built from the current sources.
pub fn controller_program() -> PathBuf {
    built_program("sluice-controller", "control")
}

/// A program of a package, built from the current sources. The tests of the package build it; if this test runs alone, it
/// builds it here.
pub fn built_program(name: &str, package: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_BIN_EXE_sluiced")).with_file_name(name);
    if !is_current(&program) {
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "-p", package, "--bins"]).current_dir(env!("CARGO_MANIFEST_DIR"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        assert!(build.status().unwrap().success(), "{name} builds");
    }
    program
}
