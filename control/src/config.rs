//! Reading configuration files: YAML text becomes a tree with positions ([`tree`]), sections are taken from it key by
//! key ([`Section`]), and every mistake is collected, so that one run names all of them with file, line and key.
//!
//! Invariant: a value that leaves here is valid; whatever was wrong is a [`Problem`], and a reader with problems gives
//! no settings. Deliberately not here: what only a running machine knows (devices, cores, free addresses).

pub mod controller;
mod key_values;
pub mod listen;
pub mod logging;
mod logs;
mod pools;
mod problem;
mod section;
mod selector;
pub mod settings;
pub mod tree;
pub mod url;

pub use key_values::KeyValues;
pub use logs::{LogFormat, LogLevel, Logs};
pub use objects::scalar;
pub use pools::PlacedRange;
pub use problem::{Invalid, Place, Placed, Problem};
pub use section::{Field, Reader, Section};
pub use selector::is_label_value;
