//! Ethernet devices (DPDK's ethdev): ports with their receive and transmit queues.
//!
//! [`Port::start`] attaches a device and configures it; its [`RxQueue`]s and [`TxQueue`]s move packets. A [`RingPort`]
//! is a port over two rings in memory.

mod bond;
mod hotplug;
mod owned_port;
mod port;
mod queue;
mod queue_mode;
mod ring;
mod rss;
mod wakeup;

pub use bond::MemberChanges;
pub use port::{Descriptors, DeviceEvent, Link, Port, PortConfig, PortStats, StartedPort};
pub use queue::{BURST, RxQueue, TxQueue};
pub use queue_mode::{QueueMode, QueueModes};
pub use ring::{RingInput, RingOutput, RingPort};
pub use rss::{HashedKind, NoSpread, RefusedPart, Spread, Spreading};
