//! Which module imports what from which other module of its package.
//!
//! An import of a name that a module re-exports is an import of the module that defines the name. A module that only
//! re-exports a name of a module below it does not import that module.

use std::collections::{BTreeMap, BTreeSet};

use super::source::{Module, Named, Package};

/// How many re-exports a name may pass through.
const REEXPORTS: usize = 16;

/// One name that one file takes from another file.
pub(crate) struct Import {
    /// Index of the importing file in `Package::modules`.
    pub from: usize,
    /// Index of the file that defines the name.
    pub to: usize,
    /// The name, with the path of its module: `flow::FlowTable`.
    pub name: String,
    /// Line in the importing file where it is first named.
    pub line: usize,
}

#[derive(Clone, PartialEq)]
struct Target {
    module: usize,
    item: Option<String>,
}

/// The imports between the files of a package, each name once for each importing file.
pub(crate) fn imports(package: &Package) -> Vec<Import> {
    let mut found: BTreeMap<(usize, usize, String), usize> = BTreeMap::new();
    for (index, module) in package.modules.iter().enumerate() {
        let heads: BTreeSet<&str> = module.paths.iter().filter_map(|path| path.segments.first()).map(String::as_str).collect();
        let mut add = |path: &Named, is_reexport: bool| {
            let Some(target) = resolve(package, index, &path.segments, 0) else { return };
            let from = module.file_module;
            let to = package.modules[target.module].file_module;
            let is_module_above = target.item.is_none() && is_below(package, from, to);
            if from == to || is_module_above || (is_reexport && is_below(package, to, from)) {
                return;
            }
            let mut name = package.modules[target.module].path.clone();
            name.extend(target.item);
            let line = found.entry((from, to, name.join("::"))).or_insert(path.line);
            *line = path.line.min(*line);
        };
        for import in &module.uses {
            let is_used_here = import.name.as_deref().is_some_and(|name| heads.contains(name));
            add(&import.path, import.is_public && !is_used_here);
        }
        // A path of one segment names what a `use` brought in.
        module.paths.iter().filter(|path| path.segments.len() > 1).for_each(|path| add(path, false));
    }
    found.into_iter().map(|((from, to, name), line)| Import { from, to, name, line }).collect()
}

fn is_below(package: &Package, module: usize, above: usize) -> bool {
    let (module, above) = (&package.modules[module], &package.modules[above]);
    module.root == above.root && module.path.len() > above.path.len() && module.path.starts_with(&above.path)
}

/// What a path means that is written in a module; none if it leads out of the package.
fn resolve(package: &Package, from: usize, segments: &[String], depth: usize) -> Option<Target> {
    let module = &package.modules[from];
    let (first, rest) = segments.split_first()?;
    let start = match first.as_str() {
        "crate" => module.root,
        "self" => from,
        "super" => module.parent,
        name => match library(package, module, name) {
            Some(library) => library,
            None => return look_up(package, from, segments, depth),
        },
    };
    look_up(package, start, rest, depth).or_else(|| Some(nearest(package, start, rest)))
}

/// The library, if the module belongs to a program of the package and the name is the library's.
fn library(package: &Package, module: &Module, name: &str) -> Option<usize> {
    module.library.filter(|library| *library != module.root && package.modules[*library].krate == name)
}

/// Follows a path through the modules and their re-exports.
fn look_up(package: &Package, at: usize, segments: &[String], depth: usize) -> Option<Target> {
    let module = &package.modules[at];
    let Some((first, rest)) = segments.split_first() else { return Some(Target { module: at, item: None }) };
    if depth > REEXPORTS {
        return None;
    }
    match first.as_str() {
        "super" => return look_up(package, module.parent, rest, depth),
        "self" => return look_up(package, at, rest, depth),
        _ => {}
    }
    let child = module.children.get(first);
    if let (Some(child), false) = (child, rest.is_empty()) {
        return look_up(package, *child, rest, depth).or_else(|| Some(nearest(package, *child, rest)));
    }
    if module.items.contains(first) {
        return Some(Target { module: at, item: Some(first.clone()) });
    }
    let named = module.uses.iter().filter(|import| import.name.as_ref() == Some(first));
    let imported = named.filter_map(|import| {
        let path: Vec<_> = import.path.segments.iter().chain(rest).cloned().collect();
        // `use a::a` names the child `a` here, not itself.
        (path.as_slice() != segments).then(|| resolve(package, at, &path, depth + 1)).flatten()
    });
    if let Some(target) = imported.into_iter().next() {
        return Some(target);
    }
    if let Some(child) = child {
        return Some(Target { module: *child, item: None });
    }
    let globs = module.uses.iter().filter(|import| import.name.is_none());
    globs
        .filter_map(|glob| resolve(package, at, &glob.path.segments, depth + 1))
        .filter(|target| target.item.is_none() && target.module != at)
        .find_map(|target| look_up(package, target.module, segments, depth + 1))
}

/// The deepest module of a path, and the name after it, which the sources do not show (a macro generates it).
fn nearest(package: &Package, start: usize, segments: &[String]) -> Target {
    let mut module = start;
    for segment in segments {
        match package.modules[module].children.get(segment) {
            Some(child) => module = *child,
            None => return Target { module, item: Some(segment.clone()) },
        }
    }
    Target { module, item: None }
}
