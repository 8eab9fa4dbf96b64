//! DPDK for sluice: private bindings of the functions in use, and a safe layer over them.
//!
//! [`Eal`] proves that DPDK runs in this process, and creates [`Mempool`]s and [`Port`]s. A port has [`RxQueue`]s and
//! [`TxQueue`]s, which move bursts of [`Mbuf`]s and belong to one thread at a time. The package also contains the few
//! system calls that need `unsafe`: [`tap`] and [`memory`].
//!
//! Invariant: `unsafe` is used in this package only, and each block says why it is sound. An [`Mbuf`] can be a single
//! pointer because neither DPDK nor a pool is freed before the process ends.
//!
//! Not here: the meaning of packets, and offloads (none is requested in either direction).

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
