//! The order of the modules of each package, as docs/internals/architecture.md lists it.
//!
//! The page has one block for each package. A line has a module and its purpose. A module imports only modules
//! below it:
//!
//! ````text
//! ```modules dataplane
//! forward   the way of a packet
//! wire      header views and checksums
//! ```
//! ````

use std::collections::BTreeMap;

/// The page that holds the blocks.
pub(crate) const PAGE: &str = "docs/internals/architecture.md";

/// The names of the top-level modules of each package, from top to bottom.
pub(crate) type Orders = BTreeMap<String, Vec<String>>;

/// Reads the blocks of a page.
pub(crate) fn parse(page: &str) -> Orders {
    let mut orders = Orders::new();
    let mut package = None;
    for line in page.lines() {
        match (&package, line.strip_prefix("```")) {
            (None, Some(info)) => package = Some(info.strip_prefix("modules ").unwrap_or_default().trim().to_owned()),
            (Some(_), Some(_)) => package = None,
            (Some(name), None) if !name.is_empty() => {
                let module = line.split_whitespace().next().map(str::to_owned);
                orders.entry(name.clone()).or_default().extend(module);
            }
            _ => {}
        }
    }
    orders
}
