//! The state of a port's device as the hotplug task knows it: the call into its driver that runs, its queues on their
//! way back, and the active member of a bond.
//!
//! Not here: the steps from one state to the next (`hotplug`).

use std::collections::{BTreeMap, HashMap};

use dpdk_port::QueuePair;
use dpdk_sys::{Device, MemberChanges};

use super::driver_call::DriverCall;
use super::released_device::ReleasedDevice;
use crate::ports::dpdk::OpenedPort;
use crate::ports::retry::Retry;

/// The state of a port's device as the task knows it.
#[derive(Default)]
pub(in crate::ports) struct DeviceState {
    /// The queues are on their way back from the workers; `None`: they are not called back.
    pub(super) recall: Option<Recall>,
    /// A call into the driver that has not returned.
    pub(super) call: Option<RunningCall>,
    /// Devices that the kernel asked for: the port's own and members of a bond.
    pub(super) released: HashMap<Device, ReleasedDevice>,
    /// Linux does not say whether the device exists.
    pub(super) is_unknown: bool,
    /// The interface's frames may not be hidden from Linux.
    pub(super) is_exposed: bool,
    /// Delays attempts to open the device, or to add members to a bond.
    pub(super) retry: Retry,
    /// Delays attempts to change the members of a bond after one could not leave it.
    pub(super) leave_retry: Retry,
    /// The members that exist and cannot be added to the bond, and why: those that were logged last.
    pub(super) unusable: Vec<(Device, String)>,
    pub(super) link: Option<bool>,
    /// The last known active member of a bond.
    pub(super) member: Option<Device>,
    /// Number of its changes.
    pub(super) moves: u64,
}

impl DeviceState {
    /// The state of a device whose driver had not opened it when the gateway started.
    pub(in crate::ports) fn opening(call: OpeningCall, presence: Option<u64>) -> Self {
        Self { call: Some(RunningCall::Opening(call, presence)), ..Self::default() }
    }

    /// Whether members of a bond change, and the driver is not late.
    pub(super) fn changes_members(&self) -> bool {
        matches!(&self.call, Some(RunningCall::Members(call)) if !call.is_late())
    }

    /// Counts a change of a bond's active member. Returns the member before it and the one after it. The first member
    /// after the device appears is not a change. An attached bond keeps the last known member while none is known, as
    /// while its members change.
    pub(super) fn change_member(&mut self, active: Option<Device>, is_attached: bool) -> Option<(Device, Device)> {
        if self.member == active || (active.is_none() && is_attached) {
            return None;
        }
        let change = std::mem::replace(&mut self.member, active.clone()).zip(active);
        self.moves += u64::from(change.is_some());
        change
    }
}

/// The opening of a device.
pub(in crate::ports) type OpeningCall = DriverCall<Result<OpenedPort, dpdk_sys::Error>>;

/// A call into the driver of a port. Meanwhile the task leaves the port alone.
pub(super) enum RunningCall {
    /// The device, which has this [`Device::presence`], is being opened.
    Opening(OpeningCall, Option<u64>),
    /// Members leave a bond or are added to it.
    Members(DriverCall<ChangedBond>),
    /// The device is being closed.
    Closing(DriverCall<()>),
}

impl RunningCall {
    /// What the call returns, to be dropped on a thread of a driver. It waits until the call is late at most.
    pub(super) async fn result(self) -> Box<dyn Send> {
        match self {
            Self::Opening(mut call, _) => Box::new(call.wait().await),
            Self::Members(mut call) => Box::new(call.wait().await),
            Self::Closing(mut call) => Box::new(call.wait().await),
        }
    }
}

/// A bond whose members changed: its port, the queues by worker, and the members that could not be changed.
pub(super) type ChangedBond = (dpdk_sys::Port, BTreeMap<usize, QueuePair>, Vec<(Device, dpdk_sys::Error)>);

/// The queues of a port are called back from the workers.
pub(super) struct Recall {
    /// Workers that have not returned them.
    pub(super) workers: Vec<usize>,
    /// The queues of the others, by worker.
    pub(super) returned: BTreeMap<usize, QueuePair>,
    /// The members of a bond that change once all queues are here; `None`: the device is closed then.
    pub(super) members: Option<MemberChanges>,
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::driver_call::{CallState, LIMIT};
    use super::*;

    #[test]
    fn a_member_that_takes_over_while_the_members_change_is_counted() {
        let member = |name: &str| Some(name.parse::<Device>().unwrap());
        let (first, second) = (member("net_null1"), member("net_null2"));
        let mut state = DeviceState::default();
        assert_eq!(state.change_member(first.clone(), true), None, "the first one after the device appeared");
        assert_eq!(state.change_member(None, true), None, "its driver cannot be asked");
        assert_eq!(state.change_member(second.clone(), true), first.clone().zip(second.clone()));
        assert_eq!(state.change_member(second, true), None);
        assert_eq!(state.moves, 1);
        assert_eq!((state.change_member(None, false), state.change_member(first, true)), (None, None), "it was detached");
        assert_eq!(state.moves, 1);
    }

    #[tokio::test]
    async fn the_members_of_a_bond_change_until_the_driver_is_late() {
        let changing = |limit| {
            let call = DriverCall::start(limit, || -> ChangedBond {
                loop {
                    std::thread::park();
                }
            });
            DeviceState { call: Some(RunningCall::Members(call.unwrap())), ..DeviceState::default() }
        };
        assert!(!DeviceState::default().changes_members());
        assert!(changing(LIMIT).changes_members());
        let mut late = changing(Duration::ZERO);
        let Some(RunningCall::Members(call)) = &mut late.call else { unreachable!() };
        assert!(matches!(call.look(), CallState::BecameLate));
        assert!(!late.changes_members());
    }
}
