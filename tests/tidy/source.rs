//! The modules of a package as its sources declare them: what each file defines, and which paths it names.
//!
//! Code under `#[cfg(test)]` is left out. A module under `#[cfg(any(test, feature = ".."))]` counts as a module, but
//! its types do not count as product code. Not seen: what a macro generates. Names inside a macro call, a macro
//! definition and an attribute are seen as far as they are written as paths (`crate::a::b`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, Meta, UseTree, Visibility};

/// The modules of all crates (library and programs) of a package.
pub(crate) struct Package {
    /// Name in Cargo.toml.
    pub name: String,
    /// Files and inline modules; parents stand before their children.
    pub modules: Vec<Module>,
}

/// A crate of a package: the library, or a program.
pub(crate) struct Crate {
    /// Name of the target, with underscores.
    pub name: String,
    /// Whether it is the library.
    pub is_library: bool,
    /// Its first file, absolute.
    pub file: PathBuf,
}

/// A file, or an inline module of a file.
pub(crate) struct Module {
    /// Name of the crate that it belongs to.
    pub krate: String,
    /// Index of the root module of this crate.
    pub root: usize,
    /// Index of the root module of the library of the package, if there is one.
    pub library: Option<usize>,
    /// Path below the crate; empty for the root.
    pub path: Vec<String>,
    /// Path of the file, relative to the root of the workspace.
    pub file: String,
    /// Index of the module that is the file: itself, unless it is inline.
    pub file_module: usize,
    /// Index of the parent; the root is its own parent.
    pub parent: usize,
    /// Child modules.
    pub children: BTreeMap<String, usize>,
    /// Names of what it defines, modules aside.
    pub items: BTreeSet<String>,
    /// Its `use` declarations, one for each name.
    pub uses: Vec<Use>,
    /// Paths that its code names.
    pub paths: Vec<Named>,
    /// Product types that it defines, with their lines.
    pub types: Vec<(String, usize)>,
    /// Whether only tests use it (`cfg(any(test, ..))`).
    pub is_for_tests: bool,
}

/// One name that a `use` declaration brings in.
pub(crate) struct Use {
    /// The name in this module; none for `*`.
    pub name: Option<String>,
    /// What is imported.
    pub path: Named,
    /// Whether other modules may import it from here.
    pub is_public: bool,
}

/// A path as it is written.
pub(crate) struct Named {
    /// Its segments.
    pub segments: Vec<String>,
    /// Line of the file, from 1.
    pub line: usize,
}

impl Package {
    /// Reads the crates of a package. `root` is the root of the workspace.
    ///
    /// # Errors
    ///
    /// The file that cannot be read or parsed, and why.
    pub(crate) fn read(root: &Path, name: &str, crates: &[Crate]) -> Result<Self, String> {
        let mut reader = Reader { root, modules: Vec::new(), library: None };
        for krate in crates {
            let is_for_tests = false;
            let module = reader.add(&krate.name, None, String::new(), &krate.file, is_for_tests);
            if krate.is_library {
                reader.library = Some(module);
                reader.modules[module].library = Some(module);
            }
            let children = krate.file.parent().unwrap_or(root).to_path_buf();
            reader.read_file(module, &krate.file, &children)?;
        }
        Ok(Self { name: name.to_owned(), modules: reader.modules })
    }

    /// The modules that are files, with their indices.
    pub(crate) fn files(&self) -> impl Iterator<Item = (usize, &Module)> {
        self.modules.iter().enumerate().filter(|(index, module)| module.file_module == *index)
    }
}

struct Reader<'a> {
    root: &'a Path,
    modules: Vec<Module>,
    library: Option<usize>,
}

impl Reader<'_> {
    fn add(&mut self, krate: &str, parent: Option<usize>, name: String, file: &Path, is_for_tests: bool) -> usize {
        let index = self.modules.len();
        let mut path = parent.map(|parent| self.modules[parent].path.clone()).unwrap_or_default();
        if let Some(parent) = parent {
            path.push(name.clone());
            self.modules[parent].children.insert(name, index);
        }
        self.modules.push(Module {
            krate: krate.to_owned(),
            root: parent.map_or(index, |parent| self.modules[parent].root),
            library: self.library,
            path,
            file: file.strip_prefix(self.root).unwrap_or(file).to_string_lossy().into_owned(),
            file_module: index,
            parent: parent.unwrap_or(index),
            children: BTreeMap::new(),
            items: BTreeSet::new(),
            uses: Vec::new(),
            paths: Vec::new(),
            types: Vec::new(),
            is_for_tests: is_for_tests || parent.is_some_and(|parent| self.modules[parent].is_for_tests),
        });
        index
    }

    /// Reads the file of a module. Its child modules stand in the folder `children`.
    fn read_file(&mut self, module: usize, file: &Path, children: &Path) -> Result<(), String> {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: cannot be read: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| {
            let line = error.span().start().line;
            format!("{}:{line}: cannot be parsed: {error}", file.display())
        })?;
        self.read_items(module, &parsed.items, children)
    }

    fn read_items(&mut self, module: usize, items: &[Item], children: &Path) -> Result<(), String> {
        for item in items {
            if is_test_only(attributes(item)) {
                continue;
            }
            match item {
                Item::Mod(child) => self.read_child(module, child, children)?,
                item => {
                    self.modules[module].items.extend(name_of(item));
                    Names { module: &mut self.modules[module] }.visit_item(item);
                }
            }
        }
        Ok(())
    }

    fn read_child(&mut self, parent: usize, item: &syn::ItemMod, folder: &Path) -> Result<(), String> {
        let name = item.ident.to_string();
        let krate = self.modules[parent].krate.clone();
        let for_tests = is_for_tests(&item.attrs);
        if let Some((_, items)) = &item.content {
            let file = self.root.join(&self.modules[parent].file);
            let module = self.add(&krate, Some(parent), name.clone(), &file, for_tests);
            self.modules[module].file_module = self.modules[parent].file_module;
            return self.read_items(module, items, &folder.join(name));
        }
        let below = folder.join(&name);
        let candidates = [folder.join(format!("{name}.rs")), below.join("mod.rs")];
        let Some(file) = candidates.iter().find(|file| file.exists()) else {
            let parent = &self.modules[parent].file;
            return Err(format!("{parent}: the file of module {name} is missing: expected {}", candidates[0].display()));
        };
        let module = self.add(&krate, Some(parent), name, file, for_tests);
        self.read_file(module, file, &below)
    }
}

/// Collects the names that the items of one module use.
struct Names<'a> {
    module: &'a mut Module,
}

impl Names<'_> {
    fn define(&mut self, name: &syn::Ident) {
        if !self.module.is_for_tests {
            self.module.types.push((name.to_string(), name.span().start().line));
        }
    }

    fn name(&mut self, segments: Vec<String>, line: usize) {
        self.module.paths.push(Named { segments, line });
    }

    fn import(&mut self, tree: &UseTree, prefix: &[String], is_public: bool) {
        let joined = |name: &syn::Ident| prefix.iter().cloned().chain([name.to_string()]).collect::<Vec<_>>();
        let (name, segments, line) = match tree {
            UseTree::Path(path) => return self.import(&path.tree, &joined(&path.ident), is_public),
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, prefix, is_public));
            }
            UseTree::Name(name) if name.ident == "self" => (prefix.last().cloned(), prefix.to_vec(), line_of(&name.ident)),
            UseTree::Name(name) => (Some(name.ident.to_string()), joined(&name.ident), line_of(&name.ident)),
            UseTree::Rename(name) if name.ident == "self" => {
                (Some(name.rename.to_string()), prefix.to_vec(), line_of(&name.ident))
            }
            UseTree::Rename(name) => (Some(name.rename.to_string()), joined(&name.ident), line_of(&name.ident)),
            UseTree::Glob(glob) => (None, prefix.to_vec(), glob.star_token.spans[0].start().line),
        };
        self.module.uses.push(Use { name, path: Named { segments, line }, is_public });
    }

    /// Finds the paths in the tokens of a macro or an attribute.
    fn scan(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let mut colons = 0;
        let mut line = 0;
        for token in tokens {
            match &token {
                TokenTree::Punct(colon) if colon.as_char() == ':' => {
                    colons += 1;
                    continue;
                }
                TokenTree::Ident(name) => {
                    if colons != 2 || path.is_empty() {
                        self.flush(&mut path, line);
                        line = name.span().start().line;
                    }
                    path.push(name.to_string());
                }
                TokenTree::Group(group) => {
                    self.flush(&mut path, line);
                    self.scan(group.stream());
                }
                TokenTree::Literal(text) => {
                    self.flush(&mut path, line);
                    let inner = text.to_string();
                    // `#[serde(with = "crate::a::b")]`
                    if let Some(text) = inner.strip_prefix("\"crate::").and_then(|text| text.strip_suffix('"')) {
                        let segments = ["crate"].into_iter().chain(text.split("::")).map(str::to_owned).collect();
                        self.name(segments, token.span().start().line);
                    }
                }
                TokenTree::Punct(_) => self.flush(&mut path, line),
            }
            colons = 0;
        }
        self.flush(&mut path, line);
    }

    fn flush(&mut self, path: &mut Vec<String>, line: usize) {
        if !path.is_empty() {
            self.name(std::mem::take(path), line);
        }
    }
}

impl<'ast> Visit<'ast> for Names<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if is_test_only(attributes(item)) {
            return;
        }
        match item {
            Item::Struct(item) => self.define(&item.ident),
            Item::Enum(item) => self.define(&item.ident),
            Item::Trait(item) => self.define(&item.ident),
            Item::Type(item) => self.define(&item.ident),
            Item::Union(item) => self.define(&item.ident),
            Item::Use(item) if item.leading_colon.is_none() => {
                let is_public = !matches!(item.vis, Visibility::Inherited);
                self.import(&item.tree, &[], is_public);
            }
            _ => {}
        }
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        let is_left_out = matches!(item, syn::ImplItem::Fn(function) if is_test_only(&function.attrs));
        if !is_left_out {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none()
            && let Some(first) = path.segments.first()
        {
            let segments = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.name(segments, line_of(&first.ident));
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, call: &'ast syn::Macro) {
        self.scan(call.tokens.clone());
        visit::visit_macro(self, call);
    }

    fn visit_meta_list(&mut self, meta: &'ast syn::MetaList) {
        self.scan(meta.tokens.clone());
        visit::visit_meta_list(self, meta);
    }
}

fn line_of(name: &syn::Ident) -> usize {
    name.span().start().line
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

fn name_of(item: &Item) -> Option<String> {
    Some(match item {
        Item::Const(item) => item.ident.to_string(),
        Item::Enum(item) => item.ident.to_string(),
        Item::Fn(item) => item.sig.ident.to_string(),
        Item::Macro(item) => item.ident.as_ref()?.to_string(),
        Item::Static(item) => item.ident.to_string(),
        Item::Struct(item) => item.ident.to_string(),
        Item::Trait(item) => item.ident.to_string(),
        Item::Type(item) => item.ident.to_string(),
        Item::Union(item) => item.ident.to_string(),
        _ => return None,
    })
}

/// The condition of a `#[cfg(..)]`, without blanks.
fn condition(attribute: &Attribute) -> Option<String> {
    match &attribute.meta {
        Meta::List(list) if list.path.is_ident("cfg") => {
            Some(list.tokens.to_string().chars().filter(|c| !c.is_whitespace()).collect())
        }
        _ => None,
    }
}

fn is_test_only(attributes: &[Attribute]) -> bool {
    attributes.iter().filter_map(condition).any(|condition| condition == "test" || condition.starts_with("all(test,"))
}

fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().filter_map(condition).any(|condition| condition.starts_with("any(test,"))
}
