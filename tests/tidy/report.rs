//! The graph of the modules as a page of Markdown, with figures.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::graph::Graph;
use super::imports::Import;
use super::order::Orders;
use super::rules::{self, MODULES_PER_FOLDER};
use super::source::Package;

const COLUMNS: usize = 120;

const HEAD: &str = "\
# Modules and their imports

`make module-graph` writes this page from the sources; a test compares the two. An arrow points from a module to one that it \
imports; its number says how many names, each counted once for each importing file. A dotted arrow points upward. The names \
that a macro generates are not seen.

| package | modules at the top | files | levels | imports between modules at the top | upward imports | circles of modules at \
the top | circles of files | folders of more than 12 modules | type names that stand more than once |
|---|---|---|---|---|---|---|---|---|---|
";

/// What was found in one package.
pub(crate) struct Report<'a> {
    package: &'a Package,
    files: usize,
    top: Graph,
    /// The top-level modules, importers first.
    order: Vec<usize>,
    is_documented: bool,
    within_files: Graph,
    folders: Vec<(String, Vec<String>)>,
    types: Vec<(String, Vec<(String, usize)>)>,
}

impl<'a> Report<'a> {
    /// Reads a package. `orders` are the documented orders of modules.
    pub(crate) fn new(package: &'a Package, orders: &Orders) -> Self {
        let top = Graph::of_top_level(package);
        let documented = orders.get(&package.name).and_then(|names| rules::documented_order(package, &top, names));
        Self {
            package,
            files: package.files().count(),
            is_documented: documented.is_some(),
            order: documented.unwrap_or_else(|| top.best_order()),
            top,
            within_files: Graph::of_files(package),
            folders: rules::folders_over_the_limit(package),
            types: rules::repeated_types(package),
        }
    }

    fn top_level_modules(&self) -> usize {
        self.top.nodes.len() - rules::roots(self.package).len()
    }

    fn upward_imports(&self) -> usize {
        self.top.upward(&self.order).iter().map(|arrow| self.top.arrows[arrow].len()).sum()
    }

    fn row(&self) -> String {
        let modules = self.top_level_modules();
        format!(
            "| {} | {modules} | {} | {} | {} | {} | {} | {} | {} | {} |\n",
            self.package.name,
            self.files,
            self.top.levels(&self.order),
            self.top.import_count(),
            self.upward_imports(),
            self.top.circles().len(),
            self.within_files.circles().len(),
            self.folders.len(),
            self.types.len()
        )
    }

    fn section(&self) -> String {
        let mut text = format!("## {}\n\n", self.package.name);
        text += &self.mermaid();
        text += &circles("Circle of top-level modules", self.package, &self.top);
        text += &circles("Circle of files", self.package, &self.within_files);
        for (folder, modules) in &self.folders {
            let _ = write!(text, "\nFolder with more than {MODULES_PER_FOLDER} modules: `{folder}` has {}\n", modules.len());
        }
        if !self.types.is_empty() {
            text += "\nType names that stand more than once:\n\n";
            for (name, places) in &self.types {
                let files: Vec<_> = places.iter().map(|(file, _)| file.as_str()).collect();
                let _ = writeln!(text, "- `{name}`: {}", files.join(", "));
            }
        }
        text
    }

    fn mermaid(&self) -> String {
        let upward: BTreeSet<_> = self.top.upward(&self.order).into_iter().collect();
        let mut text = "```mermaid\ngraph TD\n".to_owned();
        for node in self.shown() {
            let _ = writeln!(text, "  {}[{}]", id(&self.top.nodes[*node]), self.top.nodes[*node]);
        }
        for ((from, to), imports) in &self.top.arrows {
            let arrow = if upward.contains(&(*from, *to)) { "-.->" } else { "-->" };
            let (from, to) = (id(&self.top.nodes[*from]), id(&self.top.nodes[*to]));
            let _ = writeln!(text, "  {from} {arrow}|{}| {to}", imports.len());
        }
        let order = if self.is_documented { "in the documented order" } else { "in the order with the fewest upward imports" };
        text + "```\n\nModules from top to bottom, " + order + ": " + &self.names_in_order() + ".\n"
    }

    fn names_in_order(&self) -> String {
        self.shown().map(|node| format!("`{}`", self.top.nodes[*node])).collect::<Vec<_>>().join(", ")
    }

    /// The nodes of the picture: a first file of a crate that only declares modules is left out.
    fn shown(&self) -> impl Iterator<Item = &usize> {
        let has_arrow = |node: usize| self.top.arrows.keys().any(|(from, to)| *from == node || *to == node);
        let roots = rules::roots(self.package);
        self.order.iter().filter(move |node| has_arrow(**node) || !roots.contains(&self.top.nodes[**node]))
    }
}

/// The whole page: figures of every package, then a section for each.
pub(crate) fn page(reports: &[Report]) -> String {
    let mut text = HEAD.to_owned();
    reports.iter().for_each(|report| text += &report.row());
    for report in reports {
        text += "\n";
        text += &report.section();
    }
    text.lines().map(fold).collect()
}

/// Breaks a line of prose at [`COLUMNS`].
fn fold(line: &str) -> String {
    let indent = if line.starts_with("- ") { "  " } else { "" };
    let mut text = String::new();
    let mut columns = 0;
    for word in line.split_inclusive(' ') {
        if columns + word.trim_end().chars().count() > COLUMNS && columns > 0 && !line.starts_with('|') {
            text.truncate(text.trim_end().len());
            text += "\n";
            text += indent;
            columns = indent.len();
        }
        text += word;
        columns += word.chars().count();
    }
    text + "\n"
}

fn id(node: &str) -> String {
    format!("m_{}", node.replace('-', "_"))
}

/// The arrows of each circle that are cheapest to cut, with the names that tie them.
fn circles(what: &str, package: &Package, graph: &Graph) -> String {
    let mut text = String::new();
    for circle in graph.circles() {
        let names: Vec<_> = circle.nodes.iter().map(|node| format!("`{}`", graph.nodes[*node])).collect();
        let _ = write!(text, "\n{what}: {} ({}). It opens without these imports:\n\n", names.join(", "), names.len());
        for (from, to) in &circle.cuts {
            let names: Vec<_> = by_file(package, &graph.arrows[&(*from, *to)])
                .into_iter()
                .map(|(file, names)| if *file == graph.nodes[*from] { names } else { format!("{names} in {file}") })
                .collect();
            let _ = writeln!(text, "- `{}` imports from `{}`: {}", graph.nodes[*from], graph.nodes[*to], names.join("; "));
        }
    }
    text
}

/// The imported names, by the file that imports them.
fn by_file<'a>(package: &'a Package, imports: &[Import]) -> BTreeMap<&'a str, String> {
    let mut files: BTreeMap<&str, String> = BTreeMap::new();
    for import in imports {
        let names = files.entry(&package.modules[import.from].file).or_default();
        let separator = if names.is_empty() { "" } else { ", " };
        let _ = write!(names, "{separator}`{}`", import.name);
    }
    files
}
