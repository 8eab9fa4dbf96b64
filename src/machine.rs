//! The machine under the gateway: its files below `/sys`, `/proc` and `/dev`, what a configuration needs of it, and its
//! free huge pages.
//!
//! Deliberately not here: findings for an operator (`commands::doctor`), and privileges (`commands::run`).

mod hugepages;
mod needs;
mod root;

pub(crate) use hugepages::{HUGEPAGES, free_hugepages_mb, hugepage_sizes};
pub use needs::Needs;
pub(crate) use needs::needs_raw_io;
pub use root::Root;
pub(crate) use root::show_list;
#[cfg(test)]
pub(crate) use root::tests::Machine;
