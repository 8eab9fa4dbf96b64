//! IP fragments: the headers of received fragments, the memory of their datagrams, fragmentation of packets that do not
//! fit, and identifications.
//!
//! Not here: the verdict on a fragment (`forward`), and reassembly: fragments are forwarded as fragments.

mod header;
mod identification;
mod split;
mod virtual_reassembly;
mod waiting;

pub use header::{Datagram, Fragment, Part};
pub(crate) use identification::Identifications;
pub(crate) use split::split;
pub(crate) use virtual_reassembly::{Datagrams, EarlyFragment, LaterFragments, Slot};
