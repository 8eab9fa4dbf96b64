//! Rules for source files and packages.

use std::fs;
use std::path::Path;

use super::{assert_none, files, relative, root};

/// Lines of a source file, its tests included. A longer file has a second responsibility.
const LINES_PER_FILE: usize = 700;

/// Every source file, by its path relative to the root of the repository.
fn rust_files() -> Vec<(String, String)> {
    let folders = ["src", "dataplane", "control", "proto", "ffi", "tests"];
    let found = folders.into_iter().flat_map(|folder| files(&root().join(folder), ".rs"));
    found.map(|path| (relative(&path), fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn unsafe_code_is_only_in_ffi_and_in_one_module() {
    let processor = |name: &str| name.starts_with("dataplane/src/wire/processor/");
    let allowed = |name: &str| name.starts_with("ffi/") || processor(name) || name == "tests/tidy/repository.rs";
    let offences: Vec<_> = rust_files()
        .into_iter()
        .filter(|(name, _)| !allowed(name))
        .flat_map(|(name, text)| {
            let unsafe_code = |line: &&str| ["unsafe {", "unsafe fn", "unsafe impl"].iter().any(|word| line.contains(word));
            text.lines().filter(unsafe_code).map(|line| format!("{name}: {}", line.trim())).collect::<Vec<_>>()
        })
        .collect();
    assert_none("unsafe outside ffi/", &offences);
}

#[test]
fn packages_have_no_forbidden_dependencies() {
    let manifest = |package: &str| fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
    let rules: [(&str, &[&str]); 8] = [
        ("dataplane", &["dpdk-sys", "control", "tokio", "kube", "tonic", "tracing", "rustix"]),
        ("control", &["dpdk-sys", "dataplane"]),
        ("control/ctl", &["control", "kube", "dpdk-sys", "dataplane"]),
        ("control/objects", &["control", "kube", "tokio", "dpdk-sys", "dataplane"]),
        ("dataplane/bench", &["control", "sluice", "tokio", "kube"]),
        ("dataplane/dpdk", &["control", "sluice", "bench", "tokio", "kube"]),
        ("ffi/linux", &["dpdk-sys", "proto", "dataplane", "control", "tokio", "kube"]),
        ("proto", &["dpdk-sys", "dataplane", "control", "tokio", "kube"]),
    ];
    let mut offences = Vec::new();
    for (package, forbidden) in rules {
        let text = manifest(package);
        let dependencies = text.split("[dependencies]").nth(1).unwrap_or_default();
        let names: Vec<_> = dependencies.lines().filter_map(|line| line.split(['.', ' ', '=']).next()).collect();
        offences.extend(forbidden.iter().filter(|f| names.contains(f)).map(|f| format!("{package} depends on {f}")));
    }
    assert_none("dependencies that DESIGN forbids", &offences);
}

#[test]
fn files_have_at_most_700_lines() {
    let offences: Vec<_> = rust_files()
        .into_iter()
        .filter(|(_, text)| text.lines().count() > LINES_PER_FILE)
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    assert_none("files over the limit", &offences);
}

/// A shell makes such files of patterns that match nothing.
#[test]
fn no_file_is_empty_or_named_like_a_pattern() {
    let is_pattern = |path: &Path| relative(path).contains(['*', '?', '[']);
    let is_empty = |path: &Path| fs::metadata(path).unwrap().len() == 0;
    let folders = ["src", "dataplane", "control", "proto", "ffi", "tests", "deploy", "docs", "demo", ".ci"];
    let all = folders.into_iter().flat_map(|folder| files(&root().join(folder), ""));
    let offences: Vec<_> = all.filter(|path| is_pattern(path) || is_empty(path)).map(|path| relative(&path)).collect();
    assert_none("files to remove", &offences);
}

#[test]
fn every_file_begins_with_a_module_comment() {
    let offences: Vec<_> = rust_files().into_iter().filter(|(_, text)| !text.starts_with("//!")).map(|(name, _)| name).collect();
    assert_none("modules without a first line of documentation", &offences);
}

#[test]
fn every_source_file_is_part_of_a_crate() {
    let sources = rust_files();
    let declared = |dir: &str, module: &str| {
        let parents = [format!("{dir}/mod.rs"), format!("{dir}/lib.rs"), format!("{dir}/main.rs"), format!("{dir}.rs")];
        let names = [format!("mod {module};"), format!("/{module}.rs")];
        sources
            .iter()
            .filter(|(name, _)| parents.contains(name) || name.starts_with("tests/") || name.contains("/tests/"))
            .any(|(_, text)| names.iter().any(|n| text.contains(n.as_str())))
    };
    let manifests: String = files(root(), "Cargo.toml").into_iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let entry = |name: &str| {
        ["build.rs", "/lib.rs", "/main.rs"].iter().any(|e| name.ends_with(e))
            || name.contains("/bin/")
            || manifests.contains(&format!("path = \"{name}\""))
            || Path::new(name).parent().is_some_and(|p| p.ends_with("tests") || p.ends_with("benches"))
    };
    let offences: Vec<_> = sources
        .iter()
        .map(|(name, _)| name)
        .filter(|name| !entry(name))
        .filter(|name| {
            let path = Path::new(name);
            let dir = path.parent().unwrap_or(Path::new("")).to_string_lossy().into_owned();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let (dir, stem) = if stem == "mod" {
                let parent = Path::new(&dir).parent().unwrap_or(Path::new("")).to_string_lossy().into_owned();
                (parent, Path::new(&dir).file_name().unwrap_or_default().to_string_lossy().into_owned())
            } else {
                (dir, stem)
            };
            !declared(&dir, &stem)
        })
        .cloned()
        .collect();
    assert_none("files that no module names", &offences);
}

#[test]
fn the_engine_does_not_log() {
    let macros = ["println!", "eprintln!", "info!(", "warn!(", "error!(", "debug!("];
    let offences: Vec<_> = rust_files()
        .into_iter()
        .filter(|(name, text)| name.starts_with("dataplane/src/") && macros.iter().any(|m| text.contains(m)))
        .map(|(name, _)| name)
        .collect();
    assert_none("log or print macros in the engine", &offences);
}

#[test]
fn rustup_gives_the_compiler_that_the_guard_was_counted_with() {
    let baseline = fs::read_to_string(root().join("dataplane/benches/instructions")).unwrap();
    let counted = baseline.lines().next().unwrap().rsplit_once(" with rustc ").unwrap().1;
    let pinned = fs::read_to_string(root().join("rust-toolchain.toml")).unwrap();
    assert!(pinned.lines().any(|line| line == format!("channel = \"{counted}\"")), "{counted}:\n{pinned}");
}
