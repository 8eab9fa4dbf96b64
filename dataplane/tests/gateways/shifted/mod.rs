//! Flows whose numbers shift: backends that get the PROXY protocol. Rows of packets, flows on their way to other workers,
//! processes and gateways, and two real TCP state machines that talk through the gateway over a bad network.
//! Deliberately not here: which Services have such flows (`control`).

mod bridge;
mod errors;
mod rows;
mod streams;
mod transfer;
