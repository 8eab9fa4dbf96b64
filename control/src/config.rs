//! Reads configuration files. YAML text becomes a tree with lines ([`yaml_tree`]), sections are read from it key by key
//! ([`Section`]), and every mistake is collected, so that one run reports all of them with file, line and key. Settings
//! are printed and compared as keys with values ([`KeyValues`]).
//!
//! Invariant: a reader with a [`Problem`] returns no settings, so settings are always valid.
//! Deliberately not here: facts of a running machine (devices, cores, free addresses).

pub mod command_pages;
pub mod controller;
mod key_values;
pub mod listen;
pub mod logging;
mod pools;
mod problem;
mod section;
mod selector;
pub mod settings;
pub mod yaml_tree;

pub use key_values::KeyValues;
pub use logging::{LogFormat, LogLevel, Logs};
pub use objects::scalar;
pub use pools::LocatedRange;
pub use problem::{Invalid, Located, Location, Problem};
pub use section::{Field, Reader, Section, alternatives};
