//! Packets that follow the flow of another packet: a later fragment that of its first fragment, an ICMP error that of
//! the packet that it quotes.
//!
//! Not here: the memory of datagrams (`fragment`), and the bytes of errors (`icmp`).

mod fragments;
mod icmp_errors;

pub(super) use fragments::handle_fragment;
pub(super) use icmp_errors::handle_error;
