//! Reads the keys of a mapping. Each key that is read becomes a known key, every mistake is collected, and keys of the
//! file that were never read are reported as unknown.
//!
//! Invariant: a method that returns a default or nothing although the file has a value has reported a problem.

use std::cell::RefCell;
use std::fmt::Display;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::problem::{Invalid, Located, Location, Problem};
use super::yaml_tree::{self, Entry, Node, Value};
use objects::scalar::DurationText;
use objects::spelling;

/// Message about values of features that are not built yet.
const NOT_BUILT: &str = "not built in this version; leave it out";

/// The text of a value as serde serialises it.
fn name(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(text)) => text,
        other => other.unwrap_or_default().to_string(),
    }
}

/// A configuration file that is being read, with the problems and warnings found so far.
#[derive(Debug)]
pub struct Reader {
    file: PathBuf,
    problems: RefCell<Vec<Problem>>,
    warnings: RefCell<Vec<Problem>>,
}

impl Reader {
    /// Reads and parses a file.
    ///
    /// # Errors
    /// When the file cannot be read or is not YAML.
    pub fn open(file: &Path) -> Result<(Self, Node), Invalid> {
        let text = std::fs::read_to_string(file).map_err(|error| {
            let message = format!("cannot be read: {error}; give an existing, readable file of UTF-8 text with --config");
            Invalid::whole(file.to_owned(), message)
        })?;
        Self::parse(file, &text)
    }

    /// Parses a text as the content of `file`.
    ///
    /// # Errors
    /// When the text is not YAML, or not a mapping.
    pub fn parse(file: &Path, text: &str) -> Result<(Self, Node), Invalid> {
        let problem = |line, message| Problem { location: Location { line, key: String::new() }, message };
        let invalid = |problems| Invalid { file: file.to_owned(), problems };
        let (root, errors) = yaml_tree::parse(text).map_err(|error| invalid(vec![problem(error.line, error.message)]))?;
        let mut problems: Vec<_> = errors.into_iter().map(|error| problem(error.line, error.message)).collect();
        if !matches!(root.value, Value::Map(_)) {
            problems.push(problem(root.line, "found a list or a text, expected a mapping of keys to values".to_owned()));
            return Err(invalid(problems));
        }
        Ok((Self { file: file.to_owned(), problems: RefCell::new(problems), warnings: RefCell::default() }, root))
    }

    /// The mapping at the top of the file.
    #[must_use]
    pub fn section<'a>(&'a self, root: &'a Node) -> Section<'a> {
        Field { reader: self, location: Location { line: root.line, key: String::new() }, node: root }.section()
    }

    /// The base of relative paths: the directory of the file as an absolute path, so that the output of `check` means
    /// the same in any directory.
    #[must_use]
    pub fn base(&self) -> PathBuf {
        let dir = self.file.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned())
    }

    /// Records a problem.
    pub fn problem(&self, location: &Location, message: impl Into<String>) {
        self.problems.borrow_mut().push(Problem { location: location.clone(), message: message.into() });
    }

    /// Records a value that is valid, but may not do what is expected of it.
    pub fn warning(&self, location: &Location, message: impl Into<String>) {
        self.warnings.borrow_mut().push(Problem { location: location.clone(), message: message.into() });
    }

    /// Whether a problem with one of these keys was recorded.
    #[must_use]
    pub fn has_problem_with(&self, keys: &[&str]) -> bool {
        self.problems.borrow().iter().any(|problem| keys.contains(&problem.location.key.as_str()))
    }

    /// Whether there is a problem with a key or one below it. What is checked against its value would be a second problem
    /// of the same mistake then.
    #[must_use]
    pub fn has_problem_below(&self, key: &str) -> bool {
        let is_below = |path: &str| path.strip_prefix(key).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']));
        self.problems.borrow().iter().any(|problem| is_below(&problem.location.key))
    }

    /// Ends reading. Returns the warnings in the order of the file, each with its location.
    ///
    /// # Errors
    /// All problems, in the order of the file.
    pub fn finish(self) -> Result<Vec<String>, Invalid> {
        let sorted = |list: RefCell<Vec<Problem>>| {
            let mut list = list.into_inner();
            list.sort();
            list.dedup();
            list
        };
        let problems = sorted(self.problems);
        if !problems.is_empty() {
            return Err(Invalid { file: self.file, problems });
        }
        let text = |warning| Invalid { file: self.file.clone(), problems: vec![warning] }.to_string();
        Ok(sorted(self.warnings).into_iter().map(text).collect())
    }
}

/// The value of one key or one item of a list.
#[derive(Clone, Debug)]
pub struct Field<'a> {
    reader: &'a Reader,
    /// Its line and key.
    pub location: Location,
    node: &'a Node,
}

impl<'a> Field<'a> {
    /// Records a problem with this value.
    pub fn problem(&self, message: impl Into<String>) {
        self.reader.problem(&self.location, message);
    }

    /// Records that the feature it asks for is not built.
    fn not_built(&self) {
        self.problem(NOT_BUILT);
    }

    /// Records that another value was expected.
    pub fn unexpected(&self, expected: impl Display) {
        let found = match &self.node.value {
            Value::Null => "nothing".to_owned(),
            Value::Scalar(text) => format!("`{text}`"),
            Value::List(_) => "a list".to_owned(),
            Value::Map(_) => "a mapping".to_owned(),
        };
        self.problem(format!("found {found}, expected {expected}"));
    }

    /// Whether it is a mapping.
    #[must_use]
    pub const fn is_mapping(&self) -> bool {
        matches!(self.node.value, Value::Map(_))
    }

    /// Whether it is an empty text, list or mapping.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        match &self.node.value {
            Value::Null => true,
            Value::Scalar(text) => text.is_empty(),
            Value::List(items) => items.is_empty(),
            Value::Map(entries) => entries.is_empty(),
        }
    }

    /// Parses its text. If `parse` returns nothing or the value is not a text, records a problem and returns nothing.
    pub fn parse<T>(&self, expected: impl Display, parse: impl FnOnce(&'a str) -> Option<T>) -> Option<T> {
        let value = match &self.node.value {
            Value::Scalar(text) => parse(text),
            _ => None,
        };
        if value.is_none() {
            self.unexpected(expected);
        }
        value
    }

    /// Parses its text with a parser that returns an error message.
    pub fn try_parse<T, E: Display>(&self, expected: impl Display, parse: impl FnOnce(&'a str) -> Result<T, E>) -> Option<T> {
        let text = self.parse(expected, Some)?;
        parse(text).map_err(|error| self.problem(format!("found `{text}`, {error}"))).ok()
    }

    /// Its items. If it is not a list, records a problem and returns none.
    #[must_use]
    pub fn items(&self, expected: impl Display) -> Vec<Self> {
        let Value::List(items) = &self.node.value else {
            self.unexpected(format!("a list of {expected}"));
            return Vec::new();
        };
        let location = |index, node: &Node| Location { line: node.line, key: format!("{}[{index}]", self.location.key) };
        items.iter().enumerate().map(|(i, node)| Self { reader: self.reader, location: location(i, node), node }).collect()
    }

    /// Its keys and values, for mappings with free keys such as labels. If it is not a mapping, records a problem and
    /// returns none.
    #[must_use]
    pub fn entries(&self) -> Vec<(&'a str, Self)> {
        let Section { reader, location, entries, .. } = self.section();
        let field = |entry: &'a Entry| {
            let location = Location { line: entry.line, key: format!("{}.{}", location.key, entry.key) };
            (entry.key.as_str(), Self { reader, location, node: &entry.node })
        };
        entries.iter().map(field).collect()
    }

    /// Its items, or the value itself if it is not a list.
    #[must_use]
    pub fn one_or_more(&self) -> Vec<Self> {
        if matches!(self.node.value, Value::List(_)) { self.items("values") } else { vec![self.clone()] }
    }

    /// The value as a mapping. If it is not a mapping, records a problem and returns an empty one.
    #[must_use]
    pub fn section(&self) -> Section<'a> {
        let entries: &[Entry] = match &self.node.value {
            Value::Map(entries) => entries,
            Value::Null => &[],
            _ => {
                self.unexpected("a mapping of keys to values");
                &[]
            }
        };
        Section { reader: self.reader, location: self.location.clone(), entries, known: Vec::new(), elsewhere: &[] }
    }
}

/// A mapping that is being read. End it with [`Section::finish`].
#[derive(Debug)]
pub struct Section<'a> {
    /// The file.
    pub reader: &'a Reader,
    /// Its line and key; of an absent mapping, those of the parent's line.
    pub location: Location,
    entries: &'a [Entry],
    known: Vec<&'static str>,
    /// Keys that were reported as belonging elsewhere.
    elsewhere: &'static [&'static str],
}

impl<'a> Section<'a> {
    fn path(&self, key: &str) -> String {
        if self.location.key.is_empty() { key.to_owned() } else { format!("{}.{key}", self.location.key) }
    }

    /// Records a problem with the mapping.
    pub fn problem(&self, message: impl Into<String>) {
        self.reader.problem(&self.location, message);
    }

    /// Records a problem with a key at the line of the mapping, for keys that are absent or that have several lines.
    pub fn problem_of(&self, key: &str, message: impl Into<String>) {
        self.reader.problem(&Location { line: self.location.line, key: self.path(key) }, message);
    }

    /// The value of a key; nothing if the key is absent or null.
    pub fn field(&mut self, key: &'static str) -> Option<Field<'a>> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let entry = self.entries.iter().find(|entry| entry.key == key && entry.node.value != Value::Null)?;
        Some(Field { reader: self.reader, location: Location { line: entry.line, key: self.path(key) }, node: &entry.node })
    }

    /// The value of a required key.
    pub fn required(&mut self, key: &'static str, expected: impl Display) -> Option<Field<'a>> {
        let field = self.field(key);
        if field.is_none() {
            self.problem_of(key, format!("missing, expected {expected}"));
        }
        field
    }

    /// Parses the text of a key, like [`Field::parse`]; nothing if the key is absent.
    pub fn parse<T>(&mut self, key: &'static str, expected: impl Display, parse: impl FnOnce(&'a str) -> Option<T>) -> Option<T> {
        self.field(key)?.parse(expected, parse)
    }

    /// [`Section::parse`] for a required key.
    pub fn parse_required<T>(
        &mut self,
        key: &'static str,
        expected: impl Display,
        parse: impl FnOnce(&'a str) -> Option<T>,
    ) -> Option<T> {
        self.required(key, &expected)?.parse(expected, parse)
    }

    /// The text of a key, if it `is_legal`.
    pub fn text(&mut self, key: &'static str, expected: impl Display, is_legal: impl FnOnce(&str) -> bool) -> Option<String> {
        self.parse(key, expected, |text| is_legal(text).then(|| text.to_owned()))
    }

    /// The mapping under a key; an empty one if the key is absent.
    pub fn section(&mut self, key: &'static str) -> Self {
        match self.field(key) {
            Some(field) => field.section(),
            None => Self {
                reader: self.reader,
                location: Location { line: self.location.line, key: self.path(key) },
                entries: &[],
                known: Vec::new(),
                elsewhere: &[],
            },
        }
    }

    /// The items of the list under a key; none if the key is absent.
    pub fn items(&mut self, key: &'static str, expected: impl Display) -> Vec<Field<'a>> {
        self.field(key).map(|field| field.items(expected)).unwrap_or_default()
    }

    /// A whole number within limits.
    pub fn number<N>(&mut self, key: &'static str, limits: RangeInclusive<N>, default: N) -> N
    where
        N: std::str::FromStr + PartialOrd + Display,
    {
        let expected = format!("a number from {} to {}", limits.start(), limits.end());
        let parse = |text: &str| text.parse().ok().filter(|n| limits.contains(n));
        self.parse(key, expected, parse).unwrap_or(default)
    }

    /// A duration within limits.
    pub fn duration(&mut self, key: &'static str, limits: RangeInclusive<Duration>, default: Duration) -> Duration {
        let (first, last) = (DurationText(*limits.start()), DurationText(*limits.end()));
        let expected = format!("a duration from {first} to {last}, such as 500ms, 1s, 15m or 2h");
        let parse = |text: &str| objects::scalar::duration(text).filter(|d| limits.contains(d));
        self.parse(key, expected, parse).unwrap_or(default)
    }

    /// `true` or `false`.
    pub fn flag(&mut self, key: &'static str, default: bool) -> bool {
        self.one_of(key, &[true, false], default)
    }

    /// One of a few values, by the names that serde prints them with.
    pub fn one_of<T: Copy + Serialize>(&mut self, key: &'static str, values: &[T], default: T) -> T {
        self.one_of_built(key, values, &[], default)
    }

    /// [`Section::one_of`] with names that are `unbuilt`: known, but refused.
    pub fn one_of_built<T: Copy + Serialize>(&mut self, key: &'static str, built: &[T], unbuilt: &[&str], default: T) -> T {
        let Some(field) = self.field(key) else { return default };
        let names: Vec<String> = built.iter().map(name).collect();
        let all: Vec<&str> = names.iter().map(String::as_str).chain(unbuilt.iter().copied()).collect();
        let expected = alternatives(&all);
        let value = |text: &str| names.iter().zip(built).find(|(name, _)| *name == text).map(|(_, value)| *value);
        let known = field.parse(expected, |text| value(text).map(Some).or_else(|| unbuilt.contains(&text).then_some(None)));
        match known {
            Some(Some(value)) => return value,
            Some(None) => field.not_built(),
            None => {}
        }
        default
    }

    /// A path; relative paths start at [`Reader::base`].
    pub fn path_of(&mut self, key: &'static str) -> Option<PathBuf> {
        let base = self.reader.base();
        let absolute = |text: &str| std::path::absolute(base.join(text)).ok();
        self.parse(key, "a path", |text| if text.is_empty() { None } else { absolute(text) })
    }

    /// The address and port to listen on over TCP; `None` if the key is absent or empty.
    pub fn listen_tcp(&mut self, key: &'static str) -> Option<Located<SocketAddr>> {
        let address = |text: &str| text.parse().ok().filter(|address: &SocketAddr| address.port() > 0);
        let field = self.field(key).filter(|field| !field.is_empty())?;
        let value = field.parse("IP:PORT or [IP]:PORT", address)?;
        Some(Located { location: field.location, value })
    }

    /// Records, in one problem, that the keys in this file among these belong `elsewhere`: `what` follows their names.
    pub fn refuse_keys(&mut self, elsewhere: &'static [&'static str], what: impl FnOnce(usize) -> String) {
        self.elsewhere = elsewhere;
        let found: Vec<_> = self.entries.iter().filter(|entry| elsewhere.contains(&entry.key.as_str())).collect();
        let Some(first) = found.first() else { return };
        let names: Vec<_> = found.iter().map(|entry| format!("`{}`", entry.key)).collect();
        let location = Location { line: first.line, key: self.location.key.clone() };
        self.reader.problem(&location, format!("{} {}", names.join(", "), what(found.len())));
    }

    /// Ends the section, and records every key that was never read as unknown. The known ones are listed once.
    pub fn finish(self) {
        let is_known = |key: &str| self.known.contains(&key) || self.elsewhere.contains(&key);
        let mut is_listed = false;
        for entry in self.entries.iter().filter(|entry| !is_known(&entry.key)) {
            let advice = match spelling::nearest(&entry.key, self.known.iter().copied()) {
                Some(key) => format!("did you mean `{key}`?"),
                None if is_listed => "the known ones are listed above".to_owned(),
                None => {
                    is_listed = true;
                    format!("known here are {}", self.known.join(", "))
                }
            };
            let location = Location { line: entry.line, key: self.location.key.clone() };
            self.reader.problem(&location, format!("unknown key `{}`, {advice}", entry.key));
        }
    }
}

/// The alternatives as a sentence lists them: `a, b or c`.
#[must_use]
pub fn alternatives(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        names => names.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The messages of everything that `read` finds wrong.
    fn problems(text: &str, read: impl FnOnce(&mut Section<'_>)) -> String {
        let (reader, root) = Reader::parse(Path::new("f.yaml"), text).unwrap();
        let mut section = reader.section(&root);
        read(&mut section);
        section.finish();
        reader.finish().map_or_else(|invalid| invalid.to_string(), |_| String::new())
    }

    #[test]
    fn a_message_has_file_line_key_the_value_found_and_the_allowed_values() {
        let text = "ports:\n  - name: a\n    mtu: abc\n";
        let found = problems(text, |top| {
            for port in top.items("ports", "ports") {
                let mut port = port.section();
                assert_eq!(port.field("name").and_then(|f| f.parse("a name", Some)), Some("a"));
                assert_eq!(port.number("mtu", 68..=9000, 1500), 1500);
                port.finish();
            }
        });
        assert_eq!(found, "f.yaml:3: key `ports[0].mtu`: found `abc`, expected a number from 68 to 9000");
    }

    #[test]
    fn an_unknown_key_error_suggests_the_most_similar_known_key() {
        let found = problems("adress: 1\nzzz: 2\nyyy: 3\n", |top| {
            top.field("addresses");
            top.field("name");
        });
        assert_eq!(
            found,
            "f.yaml:1: unknown key `adress`, did you mean `addresses`?\n\
             f.yaml:2: unknown key `zzz`, known here are addresses, name\n\
             f.yaml:3: unknown key `yyy`, the known ones are listed above"
        );
    }

    #[test]
    fn all_mistakes_are_reported_at_once_in_the_order_of_the_file() {
        let found = problems("b: x\na: 3\nc: [1]\n", |top| {
            top.duration("c", Duration::ZERO..=Duration::from_secs(1), Duration::ZERO);
            top.one_of("b", &[true, false], false);
            top.required("d", "something");
            top.field("a").unwrap().section().finish();
        });
        let lines: Vec<_> = found.lines().collect();
        assert_eq!(lines.len(), 4, "{found}");
        assert_eq!(lines[0], "f.yaml:1: key `b`: found `x`, expected true or false");
        assert_eq!(lines[1], "f.yaml:1: key `d`: missing, expected something");
        assert_eq!(lines[2], "f.yaml:2: key `a`: found `3`, expected a mapping of keys to values");
        assert!(lines[3].starts_with("f.yaml:3: key `c`: found a list, expected a duration from 0ms to 1s"), "{found}");
    }

    #[test]
    fn a_duplicate_key_hides_no_other_mistake() {
        let found = problems("a: x\na: y\n", |top| {
            top.number("a", 0..=1, 0);
        });
        assert_eq!(
            found,
            "f.yaml:1: key `a`: found `x`, expected a number from 0 to 1\n\
             f.yaml:2: duplicate key `a`, first on line 1; keep one of the two"
        );
    }

    #[test]
    fn a_file_that_is_not_a_mapping_has_one_error() {
        let error = Reader::parse(Path::new("f.yaml"), "- a\n").unwrap_err().to_string();
        assert_eq!(error, "f.yaml:1: found a list or a text, expected a mapping of keys to values");
    }

    #[test]
    fn a_null_is_an_absent_key() {
        assert_eq!(problems("a: ~\nb:\n", |top| assert!(top.field("a").is_none() && top.section("b").field("c").is_none())), "");
    }

    #[test]
    fn the_error_for_a_missing_file_says_what_to_do() {
        let error = Reader::open(Path::new("/nonexistent/f.yaml")).unwrap_err().to_string();
        assert!(error.starts_with("/nonexistent/f.yaml: cannot be read: No such file"), "{error}");
    }
}
