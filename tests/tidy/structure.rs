//! The packages follow the rules for modules, and each rule finds a bad example.

use std::fs;
use std::sync::LazyLock;

use super::order::{self, Orders, PAGE};
use super::report::{Report, page};
use super::source::{Crate, Package};
use super::{assert_none, imports, root, rules, workspace};

/// The page that `make module-graph` writes.
const GRAPH: &str = "docs/internals/graph-after.md";

static PACKAGES: LazyLock<Vec<Package>> = LazyLock::new(|| workspace::read(root()).unwrap());

fn documented_orders() -> Orders {
    order::parse(&fs::read_to_string(root().join(PAGE)).unwrap_or_default())
}

fn of_every_package(rule: impl Fn(&Package) -> Vec<String>) -> Vec<String> {
    PACKAGES.iter().flat_map(rule).collect()
}

#[test]
fn no_modules_import_each_other() {
    assert_none("import circles", &of_every_package(rules::circles));
}

#[test]
fn imports_follow_the_documented_order_of_modules() {
    let orders = documented_orders();
    let mut offences = of_every_package(|package| rules::against_the_order(package, &orders));
    let is_unknown = |name: &&String| PACKAGES.iter().all(|package| package.name != **name);
    offences.extend(orders.keys().filter(is_unknown).map(|name| format!("{PAGE}: there is no package {name}: remove its block")));
    assert_none("imports or modules that differ from the documented order", &offences);
}

#[test]
fn folders_have_at_most_12_modules() {
    assert_none("folders with too many modules", &of_every_package(rules::full_folders));
}

#[test]
fn type_names_are_unique_in_a_package() {
    assert_none("type names that stand more than once", &of_every_package(rules::duplicate_types));
}

#[test]
fn the_page_with_the_module_graph_is_current() {
    let orders = documented_orders();
    let reports: Vec<_> = PACKAGES.iter().map(|package| Report::new(package, &orders)).collect();
    let written = fs::read_to_string(root().join(GRAPH)).unwrap_or_default();
    assert!(written == page(&reports), "{GRAPH} does not show the imports of the sources: run `make module-graph`");
}

/// A package in a temporary folder. `src/lib.rs` and `src/main.rs` are crates; a child is declared by its parent's
/// text.
fn package(files: &[(&str, &str)]) -> Package {
    let folder = tempfile::tempdir().unwrap();
    for (file, text) in files {
        let path = folder.path().join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let has = |name: &str| files.iter().any(|(file, _)| *file == name);
    let mut crates = Vec::new();
    for (name, file, is_library) in [("example", "src/lib.rs", true), ("program", "src/main.rs", false)] {
        if has(file) {
            crates.push(Crate { name: name.to_owned(), is_library, file: folder.path().join(file) });
        }
    }
    Package::read(folder.path(), "example", &crates).unwrap()
}

/// The imports of a package, as `from to name`.
fn imports_of(files: &[(&str, &str)]) -> Vec<String> {
    let package = package(files);
    let file = |index: usize| package.modules[index].file.trim_start_matches("src/").to_owned();
    imports::imports(&package).iter().map(|i| format!("{} {} {}", file(i.from), file(i.to), i.name)).collect()
}

fn assert_one(offences: &[String], parts: &[&str]) {
    assert_eq!(offences.len(), 1, "{offences:?}");
    for part in parts {
        assert!(offences[0].contains(part), "{part:?} is not in {:?}", offences[0]);
    }
}

#[test]
fn imports_are_found_in_use_declarations_and_in_paths() {
    let a = "use crate::b::Grouped as Renamed; use super::b::{self, Super};
        fn f() { use crate::b::Inner; crate::b::in_path(); b::through_module(); println!(\"{}\", b::in_macro()); }
        #[serde(with = \"crate::b::in_attribute\")] struct S(Renamed, Super, Inner, std::fmt::Error);";
    let b = "pub struct Grouped; pub struct Super; pub struct Inner; pub struct Unused;";
    let found = imports_of(&[("src/lib.rs", "mod a; mod b;"), ("src/a.rs", a), ("src/b.rs", b)]);
    let names = ["b", "b::Grouped", "b::Inner", "b::Super", "b::in_attribute", "b::in_macro", "b::in_path", "b::through_module"];
    assert_eq!(found, names.map(|name| format!("a.rs b.rs {name}")));
}

#[test]
fn an_import_of_a_reexported_name_leads_to_the_file_that_defines_it() {
    let found = imports_of(&[
        ("src/lib.rs", "mod user; mod folder; mod other; pub use folder::Deep; pub use other::*;"),
        ("src/user.rs", "use crate::{Deep, FromGlob}; use crate::folder::Named; fn f() { crate::folder::inline::g() }"),
        ("src/folder/mod.rs", "mod child; pub use child::{Deep, Named}; pub mod inline { pub fn g() {} }"),
        ("src/folder/child.rs", "pub struct Deep; pub struct Named;"),
        ("src/other.rs", "pub struct FromGlob;"),
    ]);
    let expected = [
        "user.rs folder/mod.rs folder::inline::g",
        "user.rs folder/child.rs folder::child::Deep",
        "user.rs folder/child.rs folder::child::Named",
        "user.rs other.rs other::FromGlob",
    ];
    assert_eq!(found, expected);
}

#[test]
fn code_for_tests_is_left_out() {
    let tests = "#[cfg(test)] mod tests { use crate::b::B; } #[cfg(test)] use crate::b::C;
        #[cfg(test)] struct B; struct S; impl S { #[cfg(test)] fn f() { crate::b::B } }";
    let files = [
        ("src/lib.rs", "mod a; mod b; #[cfg(any(test, feature = \"testing\"))] pub mod testing;"),
        ("src/a.rs", tests),
        ("src/b.rs", "pub struct B; pub struct C;"),
        ("src/testing.rs", "pub struct C;"),
    ];
    assert_eq!(imports_of(&files), [""; 0]);
    assert_eq!(rules::duplicate_types(&package(&files)), [""; 0]);
}

#[test]
fn a_program_imports_the_library_of_its_package() {
    let files = [("src/lib.rs", "pub mod a;"), ("src/a.rs", "pub fn f() {}"), ("src/main.rs", "fn main() { example::a::f() }")];
    assert_eq!(imports_of(&files), ["main.rs a.rs a::f"]);
}

#[test]
fn two_files_that_import_each_other_are_an_offence() {
    let offences = rules::circles(&package(&[
        ("src/lib.rs", "mod top;"),
        ("src/top.rs", "mod child; mod other; pub struct Input; fn f() {\n child::parse() }"),
        ("src/top/child.rs", "use super::Input; pub fn parse() {} struct Output(Input);"),
        ("src/top/other.rs", "use super::child::parse; fn f() { parse() }"),
    ]));
    let message = "package example: 2 files import each other: src/top.rs, src/top/child.rs. Move";
    assert_one(&offences, &[message, "\n    src/top/child.rs:1: imports `top::Input` of src/top.rs"]);
}

#[test]
fn a_circle_through_a_third_module_is_an_offence() {
    let offences = rules::circles(&package(&[
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "pub mod one; pub mod two;"),
        ("src/a/one.rs", "use crate::b::B;"),
        ("src/a/two.rs", "pub struct A;"),
        ("src/b.rs", "pub struct B; fn f(c: crate::c::C) {}"),
        ("src/c.rs", "use crate::a::two::A; pub struct C(A);"),
    ]));
    assert_one(&offences, &["3 top-level modules import each other: a, b, c."]);
}

#[test]
fn an_upward_import_is_an_offence() {
    let package = package(&[
        ("src/lib.rs", "mod above; mod below; pub use above::A;"),
        ("src/above.rs", "pub struct A;"),
        ("src/below.rs", "fn f() {}\nuse crate::A;"),
    ]);
    let orders = |page: &str| order::parse(page);
    let good = orders("text\n\n```modules example\nbelow\nabove   what it is for\n```\n");
    assert_eq!(rules::against_the_order(&package, &good), [""; 0]);
    let bad = orders("```modules example\nabove\nbelow\n```\n");
    let message = "src/below.rs:2: `above::A` is imported upward: docs/internals/architecture.md lists above above below";
    assert_one(&rules::against_the_order(&package, &bad), &[message]);
    let short = orders("```text\nbelow\n```\n```modules example\nabove\n```\n");
    assert_one(&rules::against_the_order(&package, &short), &["module below is not listed"]);
    let long = orders("```modules example\nbelow\nabove\nabove\nold\n```\n");
    let offences = rules::against_the_order(&package, &long);
    assert!(
        offences[0].contains("module above is listed twice") && offences[1].contains("there is no module old"),
        "{offences:?}"
    );
    assert_one(&rules::against_the_order(&package, &orders("")), &["no block ```modules example"]);
}

#[test]
fn a_thirteenth_module_in_a_folder_is_an_offence() {
    let for_tests = "#[cfg(test)] mod tests; #[cfg(any(test, feature = \"testing\"))] pub mod testing;";
    let declared = |count: usize| (0..count).map(|n| format!("mod m{n};")).collect::<String>() + for_tests;
    let folder = |count: usize| {
        let mut files = vec![("src/lib.rs".to_owned(), "mod full;".to_owned()), ("src/full/mod.rs".to_owned(), declared(count))];
        files.push(("src/full/testing.rs".to_owned(), String::new()));
        files.extend((0..count).map(|n| (format!("src/full/m{n}.rs"), String::new())));
        let files: Vec<_> = files.iter().map(|(file, text)| (file.as_str(), text.as_str())).collect();
        rules::full_folders(&package(&files))
    };
    assert_eq!(folder(12), [""; 0]);
    assert_one(&folder(13), &["src/full: 13 modules side by side, at most 12 are allowed"]);
}

#[test]
fn a_second_type_of_one_name_is_an_offence() {
    let offences = rules::duplicate_types(&package(&[
        ("src/lib.rs", "mod a; struct Once;\nfn f() { enum Twice {} }"),
        ("src/a.rs", "type Twice = u8; impl Iterator for A { type Once = u8; }"),
    ]));
    assert_one(&offences, &["src/lib.rs:2, src/a.rs:1: package example has 2 types of the name Twice: rename"]);
}

#[test]
fn the_check_of_a_package_applies_every_rule() {
    let package = package(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "use crate::b::B; pub struct A; struct Twice;"),
        ("src/b.rs", "use crate::a::A; pub struct B; struct Twice;"),
    ]);
    let found = rules::problems(&package, &Orders::new());
    let parts = ["2 files import each other", "2 top-level modules import each other", "no block", "2 types of the name Twice"];
    assert_eq!(found.len(), parts.len(), "{found:?}");
    found.iter().zip(parts).for_each(|(problem, part)| assert!(problem.contains(part), "{part:?} is not in {problem:?}"));
}

#[test]
fn the_page_shows_arrows_figures_and_circles() {
    let package = package(&[
        ("src/lib.rs", "mod a; mod b;"),
        ("src/a.rs", "use crate::b::{B, C}; pub struct A;"),
        ("src/b.rs", "use crate::a::A; pub struct B; pub struct C;"),
    ]);
    let page = page(&[Report::new(&package, &Orders::new())]);
    for part in [
        "| example | 2 | 3 | 2 | 3 | 1 | 1 | 1 | 0 | 0 |",
        "  m_a -->|2| m_b\n  m_b -.->|1| m_a\n",
        "Circle of files: `src/a.rs`, `src/b.rs` (2).",
        "- `b` imports from `a`: `a::A` in src/b.rs",
    ] {
        assert!(page.contains(part), "{part:?} is not in\n{page}");
    }
}
