//! The packages of a workspace, as cargo lists them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::source::{Crate, Package};

/// Reads the sources of every package of the workspace in `root`; the modules of libraries and programs only.
///
/// # Errors
///
/// Why cargo or a source file cannot be read.
pub(crate) fn read(root: &Path) -> Result<Vec<Package>, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1", "--manifest-path"])
        .arg(root.join("Cargo.toml"))
        .output()
        .map_err(|error| format!("cargo metadata cannot be run: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo metadata failed in {}: {}", root.display(), String::from_utf8_lossy(&output.stderr)));
    }
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(|error| format!("cargo metadata: {error}"))?;
    let workspace = metadata["workspace_root"].as_str().map_or(root.to_path_buf(), PathBuf::from);
    let mut packages = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        packages.push(Package::read(&workspace, name, &crates(package))?);
    }
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(packages)
}

/// The library first, because the programs import it.
fn crates(package: &Value) -> Vec<Crate> {
    let has_kind = |target: &Value, kind: &str| target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|k| k == kind));
    let mut crates: Vec<_> = package["targets"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|target| has_kind(target, "lib") || has_kind(target, "bin"))
        .map(|target| Crate {
            name: target["name"].as_str().unwrap_or_default().replace('-', "_"),
            is_library: has_kind(target, "lib"),
            file: PathBuf::from(target["src_path"].as_str().unwrap_or_default()),
        })
        .collect();
    crates.sort_by_key(|krate| (!krate.is_library, krate.name.clone()));
    crates
}
