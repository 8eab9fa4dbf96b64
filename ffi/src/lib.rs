//! DPDK for sluice: private bindings of the functions in use, and a safe layer over them.
//!
//! [`Eal`] proves that DPDK runs in this process, and creates [`Mempool`]s and [`Port`]s. A port has [`RxQueue`]s and
//! [`TxQueue`]s, which move bursts of [`Mbuf`]s and belong to one thread at a time.
//!
//! Invariant: each `unsafe` block says why it is sound. An [`Mbuf`] can be a single
//! pointer because neither DPDK nor a pool is freed before the process ends.
//!
//! Not here: the meaning of packets, offloads (none is requested in either direction), and system calls of Linux that
//! have nothing to do with DPDK (`linux`).

mod device;
mod eal;
mod error;
mod ethdev;
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
pub use mbuf::{Mbuf, release};
pub use mempool::{Mempool, MempoolConfig};
