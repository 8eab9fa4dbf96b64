//! YAML text as a tree with the line of each node. Scalars keep their text as written: the reader of a key decides what
//! `off`, `1e3` or `0000:3b:00.0` mean, not a YAML schema.
//!
//! Deliberately not here: anchors, aliases, tags and merge keys, which are refused with their line. A configuration
//! needs none of them, and with each of them a file can mean something else than it appears to. serde-saphyr, which is
//! built on the same parser, accepts them silently and stops at the first mistake (decision 40).

use std::collections::HashMap;

use granit_parser::{Event, Parser, ScalarStyle, ScanError, Span, Tag};

/// A value with its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Counted from 1.
    pub line: usize,
    /// The value.
    pub value: Value,
}

/// A YAML value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Nothing, `~` or `null`: the same as an absent key.
    Null,
    /// Any other scalar, unquoted and unescaped.
    Scalar(String),
    /// A sequence.
    List(Vec<Node>),
    /// A mapping, in the order of the file, without duplicate keys.
    Map(Vec<Entry>),
}

/// A key of a mapping and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// The line of the key, counted from 1.
    pub line: usize,
    /// The value.
    pub node: Node,
}

/// Invalid YAML, or a refused construct of YAML.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct SyntaxError {
    /// Counted from 1.
    pub line: usize,
    /// What was found and what to do.
    pub message: String,
}

/// Parses one YAML document. An empty file is an empty mapping. Duplicate keys and refused constructs are returned
/// beside the tree, in the order of the file, so that the rest of the file can be checked too.
///
/// # Errors
/// The first syntax error; the text behind it cannot be interpreted.
pub fn parse(text: &str) -> Result<(Node, Vec<SyntaxError>), SyntaxError> {
    let options = granit_parser::options! { emit_comments: false };
    let mut builder = Builder { parser: Parser::new_from_str_with_options(text, options), errors: Vec::new() };
    match builder.document() {
        Ok(node) => Ok((node, builder.errors)),
        Err(scan) => Err(SyntaxError { line: scan.marker().line(), message: format!("this is not valid YAML: {}", scan.info()) }),
    }
}

struct Builder<'input> {
    parser: Parser<'input, granit_parser::StrInput<'input>>,
    errors: Vec<SyntaxError>,
}

impl<'input> Builder<'input> {
    fn next(&mut self) -> Result<(Event<'input>, Span), ScanError> {
        self.parser.next_event().unwrap_or_else(|| Ok((Event::StreamEnd, Span::default())))
    }

    fn refuse(&mut self, line: usize, message: impl Into<String>) {
        self.errors.push(SyntaxError { line, message: message.into() });
    }

    fn document(&mut self) -> Result<Node, ScanError> {
        let mut document = None;
        loop {
            let (event, span) = self.next()?;
            match event {
                Event::StreamEnd => break,
                Event::StreamStart | Event::DocumentStart(..) | Event::DocumentEnd => {}
                other => {
                    let line = span.start.line();
                    let node = self.node(other, &span)?;
                    if document.is_some() {
                        self.refuse(line, "found a second YAML document, expected one; remove it, and the `---` before it");
                    } else {
                        document = Some(node);
                    }
                }
            }
        }
        let empty = Node { line: 1, value: Value::Map(Vec::new()) };
        Ok(document.filter(|node| node.value != Value::Null).unwrap_or(empty))
    }

    fn node(&mut self, event: Event<'input>, span: &Span) -> Result<Node, ScanError> {
        let line = span.start.line();
        let value = match event {
            Event::Scalar(text, style, anchor, tag) => {
                self.plain_only(line, anchor, tag.as_deref());
                match (style, text.as_ref()) {
                    (ScalarStyle::Plain, "" | "~" | "null" | "Null" | "NULL") => Value::Null,
                    (_, text) => Value::Scalar(text.to_owned()),
                }
            }
            Event::SequenceStart(_, anchor, tag) => {
                self.plain_only(line, anchor, tag.as_deref());
                Value::List(self.list()?)
            }
            Event::MappingStart(_, anchor, tag) => {
                self.plain_only(line, anchor, tag.as_deref());
                Value::Map(self.map()?)
            }
            _ => {
                self.refuse(line, "found a YAML alias, which is not supported; write the value out");
                Value::Null
            }
        };
        Ok(Node { line, value })
    }

    fn plain_only(&mut self, line: usize, anchor: usize, tag: Option<&Tag>) {
        if anchor != 0 {
            self.refuse(line, "found a YAML anchor, which is not supported; write the value out");
        }
        if let Some(tag) = tag {
            self.refuse(line, format!("found the YAML tag `{}`, which is not supported; leave it out", tag.original()));
        }
    }

    fn list(&mut self) -> Result<Vec<Node>, ScanError> {
        let mut items = Vec::new();
        loop {
            match self.next()? {
                (Event::SequenceEnd | Event::StreamEnd, _) => return Ok(items),
                (event, span) => items.push(self.node(event, &span)?),
            }
        }
    }

    fn map(&mut self) -> Result<Vec<Entry>, ScanError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut first_lines: HashMap<String, usize> = HashMap::new();
        loop {
            let (event, span) = self.next()?;
            if matches!(event, Event::MappingEnd | Event::StreamEnd) {
                return Ok(entries);
            }
            let key = self.node(event, &span)?;
            let (event, span) = self.next()?;
            let node = self.node(event, &span)?;
            let Value::Scalar(name) = key.value else {
                self.refuse(key.line, "found a key that is no text, expected a name");
                continue;
            };
            match first_lines.get(&name) {
                Some(first) => {
                    let message = format!("duplicate key `{name}`, first on line {first}; keep one of the two");
                    self.refuse(key.line, message);
                }
                None => {
                    first_lines.insert(name.clone(), key.line);
                    entries.push(Entry { key: name, line: key.line, node });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn errors(text: &str) -> Vec<(usize, String)> {
        parse(text).unwrap().1.into_iter().map(|e| (e.line, e.message)).collect()
    }

    #[test]
    fn nodes_have_their_lines_and_scalars_keep_their_text() {
        let (tree, errors) = parse("# comment\na: 0x1f\nb:\n  - \"off\"\n  - ~\n").unwrap();
        assert_eq!(errors, []);
        let Value::Map(entries) = tree.value else { panic!("no mapping") };
        assert_eq!(entries[0], Entry { key: "a".into(), line: 2, node: Node { line: 2, value: Value::Scalar("0x1f".into()) } });
        let off = Node { line: 4, value: Value::Scalar("off".into()) };
        assert_eq!(entries[1].node.value, Value::List(vec![off, Node { line: 5, value: Value::Null }]));
    }

    #[test]
    fn an_empty_file_is_an_empty_mapping() {
        for text in ["", "# only a comment\n", "---\n", "---\n...\n", "~"] {
            assert_eq!(parse(text).unwrap().0.value, Value::Map(Vec::new()), "{text:?}");
        }
    }

    #[test]
    fn every_duplicate_key_is_reported() {
        let found = errors("a: 1\nb: {c: 1, c: 2}\na: 3\n");
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(found[0], (2, "duplicate key `c`, first on line 2; keep one of the two".into()));
        assert_eq!(found[1], (3, "duplicate key `a`, first on line 1; keep one of the two".into()));
    }

    #[test]
    fn anchors_aliases_tags_and_second_documents_are_refused_by_line() {
        let found = errors("a: &x 1\nb: *x\nc: !!str 3\n---\nd: 1\n");
        let lines: Vec<_> = found.iter().map(|(line, _)| *line).collect();
        assert_eq!(lines, [1, 2, 3, 5], "{found:?}");
    }

    #[test]
    fn an_error_for_invalid_yaml_has_its_line() {
        let found = parse("a: 1\nb: [1, 2\nc: 3\n").unwrap_err();
        assert!(found.message.starts_with("this is not valid YAML: ") && found.line >= 2, "{found:?}");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[\\x00-\\x7f]{0,80}") {
            let _ = parse(&text);
        }
    }
}
