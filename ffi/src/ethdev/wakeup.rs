//! What wakes a thread that sleeps until packets arrive at a receive queue: a descriptor that becomes readable then.
//!
//! - net_af_packet: the queue's socket. DPDK has no call for it, but it is the first field of the driver's queue, in
//!   every release. What is found there is taken only if it is an AF_PACKET socket bound to the port's interface.
//! - A device that interrupts for received packets (PCI devices over VFIO, Mellanox, net_tap): an epoll instance with
//!   the queue's interrupt.
//!
//! Invariant: the descriptor is our own, so it stays valid whatever the driver does, and it is closed before the port.
//!
//! Not here: waiting for it.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use super::owned_port::OwnedPort;
use crate::device::{AF_PACKET, Device};
use crate::eal::log;
use crate::raw;

/// Whether to configure the device to interrupt. Virtual devices do not, except for net_tap.
pub(super) fn may_interrupt(device: &Device) -> bool {
    matches!(device, Device::Pci { .. }) || device.has_driver("net_tap")
}

/// The descriptor of one receive queue.
#[derive(Debug)]
pub(super) struct Wakeup {
    port: u16,
    queue: u16,
    pub(super) readable: Arc<OwnedFd>,
    /// It is an epoll instance with the queue's interrupt.
    interrupts: bool,
}

impl Wakeup {
    /// For a queue of a started port; `None` if it wakes nobody. `interrupts`: the device was configured to interrupt.
    pub(super) fn of(port: &OwnedPort, queue: u16, interrupts: bool) -> Option<Self> {
        let is_socket = port.device.has_driver(AF_PACKET);
        // SAFETY: the port is started, and has the queue; its driver is the one that the call expects.
        let fd = unsafe {
            match (is_socket, interrupts) {
                (true, _) => raw::sluice_af_packet_socket(port.id, queue),
                (false, true) => raw::sluice_rx_interrupt(port.id, queue),
                (false, false) => -1,
            }
        };
        // A queue without interrupts is no error.
        log::take_errors();
        // SAFETY: the call made this descriptor for us.
        let readable = (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })?;
        Some(Self { port: port.id, queue, readable: Arc::new(readable), interrupts: !is_socket })
    }

    /// Switches the interrupt of the queue, if it has one, and forgets one that came.
    pub(super) fn arm(&mut self, armed: bool) {
        if self.interrupts {
            // SAFETY: the port is started and has the queue, whose only user is this thread; the descriptor is that of
            // `sluice_rx_interrupt`.
            unsafe { raw::sluice_rx_interrupt_arm(self.port, self.queue, self.readable.as_raw_fd(), armed.into()) };
        }
    }
}

impl Drop for Wakeup {
    fn drop(&mut self) {
        if self.interrupts {
            // SAFETY: the port is started: the queue that owns this drops it before its share of the port.
            unsafe { raw::sluice_rx_interrupt_remove(self.port, self.queue, self.readable.as_raw_fd()) };
        }
    }
}
