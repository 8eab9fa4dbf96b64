//! Packets that need more than a rewrite by their flow: a later fragment follows its first fragment, an ICMP error the
//! packet that it quotes, and packets of shifted flows the header that the gateway has inserted.
//!
//! Not here: the memory of datagrams (`fragment`), and the bytes of errors (`icmp`).

mod fragments;
mod icmp_errors;
pub(super) mod shifted;
