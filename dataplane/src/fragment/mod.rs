//! TODO: docs.

mod datagrams;
mod early;
mod header;
mod identification;
mod split;

pub(crate) use datagrams::{Course, Datagrams, Early, Slot};
pub use header::{Datagram, Fragment, Part};
pub(crate) use identification::Identifications;
pub(crate) use split::cut;
