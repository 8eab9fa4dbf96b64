//! A device that the gateway released because the kernel asked for it. It must not be taken again at once: between the
//! release and its end on the bus, or while an operator binds another driver, it is still there.
//!
//! Not here: PCI devices that disappear without a request, and resets, after which a device is attached as soon as it can
//! be.

use dpdk_sys::Device;

/// What identified the device when it was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReleasedDevice {
    /// [`Device::presence`].
    presence: Option<u64>,
    /// [`Device::binding`]. Linux removes the link before it asks, so this is usually none.
    binding: Option<u64>,
}

impl ReleasedDevice {
    /// The device as it is now.
    pub(super) fn of(device: &Device) -> Self {
        Self { presence: device.presence().ok().flatten(), binding: device.binding() }
    }

    /// Whether the device was gone and is back since it was released, or was bound to a driver again.
    pub(super) fn has_returned(self, now: Self) -> bool {
        now.presence.is_some() && (now.presence != self.presence || (now.binding.is_some() && now.binding != self.binding))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_released_device_is_taken_again_only_after_it_was_gone_or_bound_again() {
        let released = |presence, binding| ReleasedDevice { presence, binding };
        let rows = [
            ("the kernel has not removed it yet", (Some(7), None), (Some(7), None), false),
            ("its driver is still listed", (Some(7), Some(1)), (Some(7), Some(1)), false),
            ("it is unbound", (Some(7), Some(1)), (Some(7), None), false),
            ("it is gone", (Some(7), None), (None, None), false),
            ("another one is in its place", (Some(7), None), (Some(8), None), true),
            ("it came back with its driver", (Some(7), None), (Some(8), Some(2)), true),
            ("it was bound again", (Some(7), None), (Some(7), Some(2)), true),
            ("it was bound to another driver", (Some(7), Some(1)), (Some(7), Some(2)), true),
        ];
        for (sentence, before, now, expected) in rows {
            assert_eq!(released(before.0, before.1).has_returned(released(now.0, now.1)), expected, "{sentence}");
        }
    }
}
