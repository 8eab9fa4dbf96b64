//! DPDK for sluice: narrow bindings, private, and a safe layer over them.
//!
//! [`Eal`] is the proof that DPDK runs in this process; it makes [`Mempool`]s and [`Port`]s. A port comes with one
//! [`RxQueue`] and one [`TxQueue`], which move bursts of [`Mbuf`]s and belong to one thread at a time. Beside DPDK live here
//! the few system calls that need `unsafe`: [`tap`] and [`memory`].
//!
//! Invariant: `unsafe` stands in this package only, and each block says why it is sound. What lets an [`Mbuf`] be one
//! pointer is that neither DPDK nor a pool is ever torn down before the process ends.
//!
//! Not here: what a packet means, RSS and several queues, offloads (none is requested in either direction).

mod cycles;
mod device;
mod eal;
mod error;
mod interface;
mod log;
mod mbuf;
pub mod memory;
mod mempool;
mod port;
mod queue;
mod raw;
mod ring;
mod runtime_dir;
pub mod tap;

pub use cycles::cycles;
pub use device::{BadDevice, Device, PciAddress};
pub use eal::{Eal, EalConfig, Hugepages, RegisteredThread, version};
pub use error::Error;
pub use mbuf::{Mbuf, release};
pub use mempool::{Mempool, MempoolConfig};
pub use port::{Link, NoSpread, Port, PortConfig, PortStats, Spread, StartedPort};
pub use queue::{BURST, RxQueue, TxQueue};
pub use ring::{RingInput, RingOutput, RingPort};
