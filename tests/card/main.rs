//! A whole gateway over `net_card`, a network card in software with the rules of named drivers: what each offers and
//! refuses at the start, links, resets, removal, and cards with one queue.
//!
//! The card hashes as the specification of RSS says. What a physical card does is not tried here: its driver may accept a
//! table, and the card lead packets elsewhere.

#![allow(clippy::unwrap_used, clippy::panic)]

mod driver;
#[path = "../edge/mod.rs"]
mod edge;
mod failures;
mod profiles;
mod traffic;

use edge::{Edge, skip};

/// The devices of the two ports, with these arguments.
fn cards(arguments: &str) -> [String; 2] {
    ["net_card0,iface=uplink0", "net_card1,iface=cluster0"].map(|device| format!("{device},{arguments}"))
}

/// A gateway with two workers over two cards, and its Services; not started.
fn gateway(test: &str, name: &str, cards: &[String; 2]) -> Option<Edge> {
    if std::thread::available_parallelism().unwrap().get() < 2 {
        skip(test, "needs two cores");
        return None;
    }
    let edge = driver::edge(test, name)?;
    edge.configure_on(&[0, 1], &cards[0], &cards[1], "");
    traffic::serve(&edge);
    Some(edge)
}
