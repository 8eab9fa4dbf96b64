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

mod device;
mod eal;
mod error;
mod ethdev;
mod linux;
mod mbuf;
mod mempool;
pub mod pci;
mod raw;

pub use device::{BadDevice, Device, PciAddress};
pub use eal::{Eal, EalConfig, Hugepages, RegisteredThread, cycles, last_message, version};
pub use error::Error;
pub use ethdev::{
    BURST, Descriptors, DeviceEvent, HashedKind, Link, MemberChanges, NoSpread, Port, PortConfig, PortStats, QueueMode,
    QueueModes, RefusedPart, RingInput, RingOutput, RingPort, RxQueue, Spread, Spreading, StartedPort, TxQueue,
};
pub use linux::{memory, process, tap};
pub use mbuf::{Mbuf, release};
pub use mempool::{Mempool, MempoolConfig};
