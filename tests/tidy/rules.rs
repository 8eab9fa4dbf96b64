//! The rules for the modules of a package. Each returns one message for each offence: where, what, and what to do.

use std::collections::{BTreeMap, BTreeSet};

use super::graph::{Graph, top_level_name};
use super::order::{Orders, PAGE};
use super::source::{Module, Package};

/// How many modules stand side by side in a folder.
pub(crate) const MODULES_PER_FOLDER: usize = 12;

/// What every rule finds in a package.
pub(crate) fn problems(package: &Package, orders: &Orders) -> Vec<String> {
    let found = [circles(package), against_the_order(package, orders), full_folders(package), duplicate_types(package)];
    found.into_iter().flatten().collect()
}

/// Files, or top-level modules, that import each other.
pub(crate) fn circles(package: &Package) -> Vec<String> {
    let top = Graph::of_top_level(package);
    let files = Graph::of_files(package);
    let mut found = circles_of(package, "files", &files);
    found.extend(circles_of(package, "top-level modules", &top));
    found
}

fn circles_of(package: &Package, what: &str, graph: &Graph) -> Vec<String> {
    let message = |nodes: &[usize], cuts: &[(usize, usize)]| {
        let names: Vec<_> = nodes.iter().map(|node| graph.nodes[*node].as_str()).collect();
        let imports = cuts.iter().flat_map(|cut| &graph.arrows[cut]);
        let lines: Vec<_> = imports
            .map(|import| {
                let (from, to) = (&package.modules[import.from].file, &package.modules[import.to].file);
                format!("\n    {from}:{}: imports `{}` of {to}", import.line, import.name)
            })
            .collect();
        format!(
            "package {}: {} {what} import each other: {}. Move what these imports name to a module below both sides:{}",
            package.name,
            names.len(),
            names.join(", "),
            lines.concat()
        )
    };
    graph.circles().iter().map(|circle| message(&circle.nodes, &circle.cuts)).collect()
}

/// Imports from a module to one that the documented order names above it; modules that the order does not name.
pub(crate) fn against_the_order(package: &Package, orders: &Orders) -> Vec<String> {
    let top = Graph::of_top_level(package);
    let roots = roots(package);
    let modules: Vec<_> = top.nodes.iter().filter(|name| !roots.contains(*name)).collect();
    let Some(names) = orders.get(&package.name) else {
        if modules.len() < 2 {
            return Vec::new();
        }
        let block = format!("```modules {}", package.name);
        return vec![format!("{PAGE}: no block {block}: list the modules of the package there, importers first")];
    };
    let mut found = Vec::new();
    for module in modules.iter().filter(|module| !names.contains(module)) {
        found.push(format!("{PAGE}: package {}: module {module} is not listed: add it to the block", package.name));
    }
    for (index, name) in names.iter().enumerate() {
        if !modules.contains(&name) {
            found.push(format!("{PAGE}: package {}: there is no module {name}: remove the line", package.name));
        }
        if names[..index].contains(name) {
            found.push(format!("{PAGE}: package {}: module {name} is listed twice: remove one line", package.name));
        }
    }
    let Some(order) = documented_order(package, &top, names) else { return found };
    for arrow in top.upward(&order) {
        let (from, to) = (&top.nodes[arrow.0], &top.nodes[arrow.1]);
        found.extend(top.arrows[&arrow].iter().map(|import| {
            let (file, line) = (&package.modules[import.from].file, import.line);
            format!(
                "{file}:{line}: `{}` is imported upward: {PAGE} lists {to} above {from}. Move the name to a lower module, \
                 or change the order there",
                import.name
            )
        }));
    }
    found
}

/// Nodes of the top level in the documented order, the first files of the crates above them; none if a module is
/// missing.
pub(crate) fn documented_order(package: &Package, top: &Graph, names: &[String]) -> Option<Vec<usize>> {
    let is_library = |name: &String| name == "lib";
    let (libraries, programs): (Vec<_>, Vec<_>) = roots(package).into_iter().partition(is_library);
    let above = programs.iter().chain(&libraries).filter(|root| !names.contains(root));
    let order: Vec<usize> = above.chain(names).filter_map(|name| top.nodes.binary_search(name).ok()).collect();
    (order.len() == top.nodes.len()).then_some(order)
}

/// Names of the first files of the crates.
pub(crate) fn roots(package: &Package) -> BTreeSet<String> {
    package.files().filter(|(_, module)| module.path.is_empty()).map(|(_, module)| top_level_name(module)).collect()
}

/// Folders with too many modules.
pub(crate) fn full_folders(package: &Package) -> Vec<String> {
    let message = |(folder, modules): (String, Vec<String>)| {
        let count = modules.len();
        format!(
            "{folder}: {count} modules side by side, at most {MODULES_PER_FOLDER} are allowed: group some in a folder: {}",
            modules.join(", ")
        )
    };
    folders_over_the_limit(package).into_iter().map(message).collect()
}

/// Folders of sources with too many modules side by side, and the names of these. Modules that only tests use do not count.
pub(crate) fn folders_over_the_limit(package: &Package) -> Vec<(String, Vec<String>)> {
    let mut folders: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (_, module) in package.files().filter(|(_, module)| !module.is_for_tests) {
        if let Some(name) = module.path.last() {
            folders.entry(folder(module)).or_default().insert(name.clone());
        }
    }
    let full = folders.into_iter().filter(|(_, modules)| modules.len() > MODULES_PER_FOLDER);
    full.map(|(folder, modules)| (folder, modules.into_iter().collect())).collect()
}

/// The folder in which a module stands: `a/mod.rs` stands in the folder that holds `a`.
fn folder(module: &Module) -> String {
    let parts = if module.file.ends_with("/mod.rs") { 3 } else { 2 };
    module.file.rsplitn(parts, '/').nth(parts - 1).unwrap_or(".").to_owned()
}

/// Types of one name.
pub(crate) fn duplicate_types(package: &Package) -> Vec<String> {
    let message = |(name, places): (String, Vec<(String, usize)>)| {
        let places: Vec<_> = places.iter().map(|(file, line)| format!("{file}:{line}")).collect();
        let (package, count) = (&package.name, places.len());
        format!("{}: package {package} has {count} types of the name {name}: rename all but one", places.join(", "))
    };
    repeated_types(package).into_iter().map(message).collect()
}

/// Type names that a package defines more than once, with the files and lines of the definitions.
pub(crate) fn repeated_types(package: &Package) -> Vec<(String, Vec<(String, usize)>)> {
    let mut places: BTreeMap<&str, Vec<(String, usize)>> = BTreeMap::new();
    for module in &package.modules {
        for (name, line) in &module.types {
            places.entry(name).or_default().push((module.file.clone(), *line));
        }
    }
    let repeated = places.into_iter().filter(|(_, places)| places.len() > 1);
    repeated.map(|(name, places)| (name.to_owned(), places)).collect()
}
