//! Rules of the repository that neither the compiler nor clippy sees.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::path::{Path, PathBuf};

/// Lines of a source file, its tests included. Past it, a file has a second responsibility.
const LINES_PER_FILE: usize = 700;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn files(dir: &Path, ending: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() && name != "target" && name != ".git" {
            files(&path, ending, found);
        } else if name.to_string_lossy().ends_with(ending) {
            found.push(path);
        }
    }
}

fn rust_files() -> Vec<(String, String)> {
    let mut found = Vec::new();
    for dir in ["src", "dataplane", "control", "proto", "ffi", "tests"] {
        files(&root().join(dir), ".rs", &mut found);
    }
    let relative = |path: &PathBuf| path.strip_prefix(root()).unwrap().to_string_lossy().into_owned();
    found.iter().map(|path| (relative(path), fs::read_to_string(path).unwrap())).collect()
}

fn assert_none(what: &str, offences: &[String]) {
    assert!(offences.is_empty(), "{what}:\n{}", offences.join("\n"));
}

#[test]
fn unsafe_stands_in_ffi_and_in_one_named_module() {
    let allowed = |name: &str| name.starts_with("ffi/") || name == "dataplane/src/prefetch.rs" || name == "tests/tidy.rs";
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
fn the_engine_knows_no_dpdk_and_the_control_plane_knows_no_engine() {
    let manifest = |package: &str| fs::read_to_string(root().join(package).join("Cargo.toml")).unwrap();
    let rules: [(&str, &[&str]); 5] = [
        ("dataplane", &["dpdk-sys", "control", "tokio", "kube", "tonic", "tracing", "rustix"]),
        ("control", &["dpdk-sys", "dataplane"]),
        ("control/objects", &["dpdk-sys", "dataplane", "control", "tokio", "kube"]),
        ("control/ctl", &["dpdk-sys", "dataplane", "control", "kube"]),
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
fn files_are_of_one_idea() {
    let offences: Vec<_> = rust_files()
        .into_iter()
        .filter(|(_, text)| text.lines().count() > LINES_PER_FILE)
        .map(|(name, text)| format!("{name}: {} lines", text.lines().count()))
        .collect();
    assert_none("files over the limit", &offences);
}

#[test]
fn every_module_opens_with_its_purpose() {
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
    let entry = |name: &str| {
        ["build.rs", "/lib.rs", "/main.rs"].iter().any(|e| name.ends_with(e))
            || name.contains("/bin/")
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
fn every_drop_reason_is_explained_to_operators() {
    let page = fs::read_to_string(root().join("docs/operations.md")).unwrap();
    let reasons = dataplane::DropReason::ALL.iter().map(|reason| reason.as_str());
    let offences: Vec<_> = reasons.filter(|reason| !page.contains(&format!("| `{reason}` |"))).map(str::to_owned).collect();
    assert_none("drop reasons without a row in docs/operations.md", &offences);
}

#[test]
fn links_of_documents_lead_somewhere() {
    let mut pages = vec![root().join("README.md"), root().join("CHANGELOG.md")];
    files(&root().join("docs"), ".md", &mut pages);
    let mut offences = Vec::new();
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        let targets = text.split("](").skip(1).filter_map(|rest| rest.split([')', '#']).next());
        let here = targets.filter(|target| !target.is_empty() && !target.contains("://"));
        let missing = here.filter(|target| !page.parent().unwrap().join(target).exists());
        offences.extend(missing.map(|target| format!("{}: {target}", page.display())));
    }
    assert_none("links to files that are not there", &offences);
}

#[test]
fn every_decision_has_its_four_parts() {
    let mut found = Vec::new();
    files(&root().join("docs/adr"), ".md", &mut found);
    assert!(!found.is_empty());
    for path in found {
        let text = fs::read_to_string(&path).unwrap();
        for part in ["Status", "Context", "Decision", "Consequences"] {
            assert!(text.contains(&format!("## {part}")), "{}: no section {part}", path.display());
        }
    }
}
