//! The errors of opening the ports, and of attaching one of them.

use std::io;

use dpdk_sys::Device;

use super::af_packet::AfPacketError;
use super::twin::TwinError;

/// Why the ports could not be opened, or one could not be attached.
#[derive(Debug, thiserror::Error)]
pub enum PortsError {
    /// DPDK refused.
    #[error("{0}")]
    Dpdk(#[from] dpdk_sys::Error),
    /// The interface of an af_packet port could not be prepared.
    #[error(transparent)]
    AfPacket(#[from] AfPacketError),
    /// Linux does not say whether the device of a port exists.
    #[error(
        "device {device}: it is unknown whether it exists: {source}; start the gateway again once the machine has the resource"
    )]
    Presence {
        /// The port's device.
        device: String,
        /// Why.
        source: io::Error,
    },
    /// A twin could not be created.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// The twin thread could not be started.
    #[error("the twin thread cannot be started: {0}")]
    Thread(io::Error),
    /// Workers would lose the transmit queues that they use.
    #[error("the device has {found} transmit queues, and {needed} workers count on one of their own; restart the gateway")]
    TransmitQueues {
        /// What the device has.
        found: usize,
        /// What the workers use.
        needed: u8,
    },
    /// A driver does not return from a call.
    #[error(
        "device {device}: its driver did not {step} it within {limit_s} s: the device does not answer; the port is used once the driver \
         returns, other ports run meanwhile. A virtio device behind an IOMMU needs `iommu_platform=on` (QEMU); otherwise reset the \
         device and restart the gateway"
    )]
    Late {
        /// The port's device.
        device: String,
        /// What the driver does.
        step: &'static str,
        /// The time that it had, seconds.
        limit_s: u64,
    },
    /// A driver's thread ended without a result.
    #[error("the thread that called the driver panicked; this is a bug")]
    DriverPanicked,
    /// A driver's thread could not be started.
    #[error("a thread for the driver cannot be started: {0}")]
    DriverThread(io::Error),
    /// The gateway was stopped before its ports were open.
    #[error("the gateway was stopped before its ports were open")]
    Stopped,
    /// A worker does not poll.
    #[error("the worker did not accept the port's queues")]
    Worker,
}

impl PortsError {
    /// Whether the device is only absent and may appear later. A virtual device without an interface never appears by
    /// itself.
    pub(super) fn is_absence(&self) -> bool {
        match self {
            Self::AfPacket(AfPacketError::NoInterface { .. }) | Self::Dpdk(dpdk_sys::Error::NoInterface { .. }) => true,
            Self::Dpdk(dpdk_sys::Error::NoSuchDevice { device, .. }) => {
                device.parse().is_ok_and(|device: Device| device.is_pci())
            }
            _ => false,
        }
    }
}
