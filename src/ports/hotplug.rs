//! The hotplug task: while the gateway runs, it attaches devices that appear and hands their queues to the workers, and
//! detaches devices that disappear. It also updates the twins of the ports, and publishes links and Ethernet addresses
//! for the engine.
//!
//! Invariant: each port is handled separately; a failure at one is retried and does not affect the others. A device is
//! detached only after the workers have given its queues back, and its Ethernet address is published before its link.
//! Nothing here waits for a driver: calls that open or close a device run on threads of their own.
//! Deliberately not here: how workers take and return queues (`dpdk_port`).

mod device_state;
mod driver_call;
mod released_device;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use dataplane::workers::RssKind;
use dataplane::{Mac, PortIndex};
use dpdk_port::{QueuePair, QueueSender};
use dpdk_sys::{Device, DeviceEvent, Eal, MemberChanges, Mempool};
use tokio::sync::watch;
use tokio::time::Instant;

use super::af_packet::{self, PreparedInterface};
use super::dpdk::{self, OpenedPort, QueueRequest};
use super::error::PortsError;
use super::handle::{PortHandle, PortHandles, lock};
use super::retry::Retry;
use super::steering::{KindState, name, reason};
use super::twin::TwinReconciler;
use crate::agent::watch::send_if_changed;
use crate::settings::PortSettings;
use device_state::{ChangedBond, Recall, RunningCall};
pub(super) use device_state::{DeviceState, OpeningCall};
pub(super) use driver_call::{CallState, DriverCall};
use released_device::ReleasedDevice;

/// How often links and devices are checked.
const CHECK_INTERVAL: Duration = Duration::from_millis(250);

/// The interfaces of devices are checked once in so many checks of the devices: every second.
const INTERFACE_CHECK_TICKS: u32 = 4;
/// And their links so often: every 10 s, because it takes a list of all interfaces, which are thousands on some nodes.
const LINK_CHECK_TICKS: u32 = 10 * INTERFACE_CHECK_TICKS;

/// The state of the ports that the engine needs besides Linux's tables and the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortStates {
    /// Ports without a link or a device.
    pub down: Vec<PortIndex>,
    /// Number of changes of the active member, by port; 0 for a port that is not a bond.
    pub moves: Vec<u64>,
    /// Ethernet addresses of the ports whose device is present.
    pub macs: Vec<(PortIndex, Mac)>,
}

/// A port, with all that is needed to attach and detach its device.
pub(super) struct HotplugPort {
    pub(super) eal: Eal,
    pub(super) pool: Mempool,
    pub(super) settings: PortSettings,
    /// One for each worker, in their order.
    pub(super) senders: Vec<QueueSender>,
    pub(super) request: QueueRequest,
    /// Transmit queues that the workers use.
    pub(super) transmit: u8,
    pub(super) prepared: Option<PreparedInterface>,
    pub(super) twin: Option<TwinReconciler>,
    /// The device's [`Device::presence`] when it was attached; none: it is not attached.
    pub(super) presence: Option<u64>,
    pub(super) state: DeviceState,
}

/// Opens a device on a thread of its own, after a line in the log.
pub(super) fn start_opening(
    eal: Eal,
    settings: &PortSettings,
    pool: Mempool,
    request: &QueueRequest,
) -> Result<OpeningCall, PortsError> {
    tracing::info!(port = settings.name, device = %settings.device, "opening the port's device");
    let (settings, request) = (settings.clone(), request.clone());
    let open = move || dpdk::open(eal, &settings, pool, &request);
    DriverCall::start(driver_call::LIMIT, open).map_err(PortsError::DriverThread)
}

/// The error of a driver that has not returned in time.
pub(super) fn is_late(device: &Device, step: &'static str) -> PortsError {
    PortsError::Late { device: device.to_string(), step, limit_s: driver_call::LIMIT.as_secs() }
}

impl HotplugPort {
    /// Gives the queues of an attached device to the workers.
    pub(super) fn hand_over(&self, queues: Vec<QueuePair>) -> Result<(), PortsError> {
        let mut sent = self.senders.iter().zip(queues).map(|(sender, queues)| sender.send(queues));
        sent.try_for_each(|sent| sent.map_err(|_| PortsError::Worker))
    }

    /// Whether a call into the driver runs that is not late.
    fn is_calling(&self) -> bool {
        self.state.call.as_ref().is_some_and(|call| match call {
            RunningCall::Opening(call, _) => !call.is_late(),
            RunningCall::Members(call) => !call.is_late(),
            RunningCall::Closing(call) => !call.is_late(),
        })
    }

    /// Checks the device once: attaches it if it appeared, and detaches it if it disappeared, is asked for or has to be
    /// opened anew. `may_call`: no other port calls into its driver. DPDK's lists of devices are for one caller at a time.
    async fn check(&mut self, handles: &PortHandles, position: usize, may_call: bool) {
        let present = self.look_for_device();
        if self.state.call.is_some() {
            return self.follow_call(handles, position);
        }
        let event = lock(handles).get(position).and_then(|handle| handle.port.as_ref()?.event());
        if self.state.recall.is_some() {
            self.follow_recall(handles, position, may_call);
        } else if let Some(cause) = must_detach(self.presence, present, event) {
            self.detach(cause, event);
        } else if self.presence.is_some() {
            if may_call {
                self.recall_for_members(handles, position);
            }
        } else if may_call
            && present.is_some()
            && self.may_open()
            && let Err(error) = self.open(present).await
        {
            self.opening_failed(handles, position, &error);
        }
    }

    /// The [`Device::presence`] now. If Linux does not say, that of the attached device.
    fn look_for_device(&mut self) -> Option<u64> {
        let (port, device) = (&self.settings.name, &self.settings.device);
        match device.presence() {
            Ok(present) => {
                self.state.is_unknown = false;
                present
            }
            Err(error) => {
                if !std::mem::replace(&mut self.state.is_unknown, true) {
                    tracing::warn!(port, %device, %error, "it is unknown whether the port's device exists; it stays as it is");
                }
                self.presence
            }
        }
    }

    /// Whether the device may be opened now: it was not released because the kernel asked for it, or has come back since.
    fn may_open(&mut self) -> bool {
        self.forget_returned();
        !self.state.released.contains_key(&self.settings.device) && self.state.retry.is_due(Instant::now())
    }

    /// Forgets that devices were released that have come back.
    fn forget_returned(&mut self) {
        self.state.released.retain(|device, released| !released.has_returned(ReleasedDevice::of(device)));
    }

    /// Starts to detach the device.
    fn detach(&mut self, cause: &str, event: Option<DeviceEvent>) {
        let (port, device) = (&self.settings.name, &self.settings.device);
        tracing::warn!(port, %device, "{cause}; it is attached again when it returns");
        match event {
            Some(DeviceEvent::Requested) => {
                self.state.released.insert(device.clone(), ReleasedDevice::of(device));
            }
            // The bus shows it until it is released.
            Some(DeviceEvent::Removed) => drop(self.state.retry.failed(Instant::now())),
            Some(DeviceEvent::Reset) | None => {}
        }
        self.recall(None);
    }

    /// Calls the queues back from the workers.
    fn recall(&mut self, members: Option<MemberChanges>) {
        let workers = (0..self.senders.len()).filter(|&worker| self.senders[worker].recall()).collect();
        self.state.recall = Some(Recall { workers, returned: BTreeMap::new(), members });
    }

    /// Calls the queues of a bond back if members have to leave it or can be added.
    fn recall_for_members(&mut self, handles: &PortHandles, position: usize) {
        if !self.settings.device.is_bond() {
            return;
        }
        let Some(mut changes) = lock(handles).get(position).and_then(|handle| Some(handle.port.as_ref()?.member_changes()))
        else {
            return;
        };
        self.forget_returned();
        let (released, now) = (&self.state.released, Instant::now());
        changes.unusable.retain(|(member, _)| !released.contains_key(member));
        let may_join = self.state.retry.is_due(now);
        changes.joining.retain(|member| may_join && !released.contains_key(member));
        self.log_unusable(std::mem::take(&mut changes.unusable));
        if changes.is_empty() || !self.state.leave_retry.is_due(now) {
            return;
        }
        let names = |members: &[Device]| members.iter().map(Device::port_name).collect::<Vec<_>>().join(" ");
        let (port, leaving, joining) = (&self.settings.name, names(&changes.leaving), names(&changes.joining));
        tracing::warn!(
            port,
            leaving,
            joining,
            "members leave the bond, because the kernel asks for them or they are gone, or join it"
        );
        for member in &changes.leaving {
            self.state.released.insert(member.clone(), ReleasedDevice::of(member));
        }
        self.recall(Some(changes));
    }

    /// Logs the members that exist and cannot be added, if they are others than the last time.
    fn log_unusable(&mut self, unusable: Vec<(Device, String)>) {
        if self.state.unusable == unusable {
            return;
        }
        for (member, reason) in &unusable {
            tracing::warn!(port = self.settings.name, %member, reason, "a member of the bond is there and cannot be added");
        }
        self.state.unusable = unusable;
    }

    /// Puts back what another program undid at the interface of the device. The first of several failures is logged.
    async fn check_interface(&mut self, looks_at_link: bool) {
        let Some(prepared) = self
            .prepared
            .as_mut()
            .filter(|_| self.presence.is_some() && self.state.recall.is_none() && self.state.call.is_none())
        else {
            return;
        };
        let (port, device) = (&self.settings.name, &self.settings.device);
        match prepared.put_back(looks_at_link).await {
            Ok(missing) => {
                self.state.is_exposed = false;
                if !missing.is_empty() {
                    let missing = missing.join(", ");
                    tracing::warn!(port, %device, missing, "another program undid what hides the interface's frames from Linux; it is done again");
                }
            }
            Err(error) => {
                if !std::mem::replace(&mut self.state.is_exposed, true) {
                    tracing::warn!(port, %error, "it is unknown whether the interface's frames are hidden from Linux; retrying");
                }
            }
        }
    }

    /// Starts to open the device.
    async fn open(&mut self, present: Option<u64>) -> Result<(), PortsError> {
        self.prepared = af_packet::prepare(&self.settings.device).await?;
        let call = start_opening(self.eal, &self.settings, self.pool, &self.request)?;
        self.state.call = Some(RunningCall::Opening(call, present));
        Ok(())
    }

    /// Uses what a call into the driver returned, or reports that it is late.
    fn follow_call(&mut self, handles: &PortHandles, position: usize) {
        let late = |port: &Self, step| port.failed(handles, position, &is_late(&port.settings.device, step));
        match self.state.call.take() {
            Some(RunningCall::Opening(mut call, present)) => match call.look() {
                CallState::Returned(opened) => self.opened(opened, present, handles, position),
                CallState::Panicked => self.opening_failed(handles, position, &PortsError::DriverPanicked),
                state => {
                    if matches!(state, CallState::BecameLate) {
                        late(self, "open");
                    }
                    self.state.call = Some(RunningCall::Opening(call, present));
                }
            },
            Some(RunningCall::Members(mut call)) => match call.look() {
                CallState::Returned(changed) => self.resume(changed, handles, position),
                CallState::Panicked => self.detached(handles, position),
                state => {
                    if matches!(state, CallState::BecameLate) {
                        late(self, "change the members of");
                    }
                    self.state.call = Some(RunningCall::Members(call));
                }
            },
            Some(RunningCall::Closing(mut call)) => match call.look() {
                // A device that was refused was not attached, and keeps the reason.
                CallState::Returned(()) | CallState::Panicked if self.presence.is_none() => {}
                CallState::Returned(()) | CallState::Panicked => self.detached(handles, position),
                state => {
                    if matches!(state, CallState::BecameLate) {
                        late(self, "close");
                    }
                    self.state.call = Some(RunningCall::Closing(call));
                }
            },
            None => {}
        }
    }

    /// Hands the queues of the opened device to the workers.
    fn opened(
        &mut self,
        opened: Result<OpenedPort, dpdk_sys::Error>,
        present: Option<u64>,
        handles: &PortHandles,
        position: usize,
    ) {
        let attached = opened.map_err(PortsError::from).and_then(|opened| self.attach(opened, handles, position));
        if let Err(error) = attached {
            return self.opening_failed(handles, position, &error);
        }
        self.presence = present;
        self.state.retry = Retry::default();
        let (port, device) = (&self.settings.name, &self.settings.device);
        tracing::info!(port, %device, "the port's device appeared and was attached");
    }

    fn attach(&mut self, opened: OpenedPort, handles: &PortHandles, position: usize) -> Result<(), PortsError> {
        let found = opened.found.transmit;
        if found < self.transmit.into() {
            let close = DriverCall::start(driver_call::LIMIT, move || drop(opened)).map_err(PortsError::DriverThread)?;
            self.state.call = Some(RunningCall::Closing(close));
            return Err(PortsError::TransmitQueues { found, needed: self.transmit });
        }
        let OpenedPort { port, queues, found } = opened;
        let mac = Mac(port.mac());
        if let Some(twin) = &mut self.twin {
            twin.want_mac(mac);
        }
        self.hand_over(queues)?;
        if let Some(handle) = lock(handles).get_mut(position) {
            (handle.mac, handle.port, handle.failure) = (Some(mac), Some(port), None);
            handle.steering.attached(found);
        }
        Ok(())
    }

    fn opening_failed(&mut self, handles: &PortHandles, position: usize, error: &PortsError) {
        let again_s = self.state.retry.failed(Instant::now()).as_secs();
        let port = &self.settings.name;
        tracing::warn!(port, %error, again_s, "the port's device cannot be attached");
        // A device that exists is not absent, even if DPDK does not find it.
        let has_failed = !error.is_absence() || matches!(self.settings.device.presence(), Ok(Some(_)));
        if let Some(handle) = lock(handles).get_mut(position) {
            handle.failure = has_failed.then(|| error.to_string());
        }
    }

    /// The port has no usable device until a call into its driver returns.
    fn failed(&self, handles: &PortHandles, position: usize, error: &PortsError) {
        tracing::error!(port = self.settings.name, %error, "the port has failed");
        if let Some(handle) = lock(handles).get_mut(position) {
            handle.failure = Some(error.to_string());
        }
    }

    /// Once all workers have given their queues back: closes the device, or changes the members of the bond.
    fn follow_recall(&mut self, handles: &PortHandles, position: usize, may_call: bool) {
        let Some(recall) = &mut self.state.recall else { return };
        let (senders, returned) = (&self.senders, &mut recall.returned);
        recall
            .workers
            .retain(|&worker| senders[worker].returned().is_none_or(|queues| returned.insert(worker, queues).is_some()));
        if !recall.workers.is_empty() || !may_call {
            return;
        }
        let Some(Recall { returned, members, .. }) = self.state.recall.take() else { return };
        let port = lock(handles).get_mut(position).and_then(|handle| handle.port.take());
        let started = match (members, port) {
            (Some(changes), Some(port)) => {
                DriverCall::start(driver_call::LIMIT, move || change_members(port, returned, &changes)).map(RunningCall::Members)
            }
            // The last of them closes the device.
            (_, port) => DriverCall::start(driver_call::LIMIT, move || drop((returned, port))).map(RunningCall::Closing),
        };
        match started {
            Ok(call) => self.state.call = Some(call),
            Err(error) => {
                // What the call would have closed was closed with it.
                tracing::warn!(port = self.settings.name, %error, "a thread for the driver of the port cannot be started");
                self.detached(handles, position);
            }
        }
    }

    /// The device is closed.
    fn detached(&mut self, handles: &PortHandles, position: usize) {
        // The interface is gone, and with it what was changed on it.
        (self.prepared, self.presence) = (None, None);
        if let Some(handle) = lock(handles).get_mut(position) {
            handle.failure = None;
        }
        tracing::info!(port = self.settings.name, device = %self.settings.device, "the port's device is detached");
    }

    /// Gives a bond whose members changed back to the workers.
    fn resume(&mut self, (port, queues, failed): ChangedBond, handles: &PortHandles, position: usize) {
        let state = &mut self.state;
        // The members that had to leave are in `released`.
        let (leaving, joining): (Vec<_>, Vec<_>) =
            failed.into_iter().partition(|(member, _)| state.released.contains_key(member));
        for (failed, retry) in [(leaving, &mut state.leave_retry), (joining, &mut state.retry)] {
            if failed.is_empty() {
                *retry = Retry::default();
                continue;
            }
            let again_s = retry.failed(Instant::now()).as_secs();
            for (member, error) in failed {
                tracing::warn!(port = self.settings.name, %member, %error, again_s, "a member of the bond cannot be changed");
            }
        }
        for (worker, queues) in queues {
            if self.senders[worker].send(queues).is_err() {
                tracing::error!(port = self.settings.name, worker, "the worker did not accept the port's queues");
            }
        }
        if let Some(handle) = lock(handles).get_mut(position) {
            (handle.port, handle.failure) = (Some(port), None);
        }
        tracing::info!(port = self.settings.name, "the members of the bond have changed");
    }

    /// Whether the device is on its way from the workers to its end.
    fn is_detaching(&self) -> bool {
        self.state.recall.as_ref().is_some_and(|recall| recall.members.is_none())
    }

    /// Whether the port keeps its link although its device cannot be asked: the members of the bond change, and the
    /// driver is not late.
    fn keeps_link(&self) -> bool {
        self.state.changes_members()
    }

    /// Has the first worker run the timers of a driver that needs it: four times a second, while ena looks at its card
    /// once a second.
    fn run_timers(&self, handles: &PortHandles) {
        let needs_timers = |handle: &PortHandle| handle.port.as_ref().is_some_and(dpdk_sys::Port::needs_timers);
        if !lock(handles).iter().any(needs_timers) {
            return;
        }
        if let Some(sender) = self.senders.first() {
            sender.run(|queues| {
                if let Some(rx) = &mut queues.rx {
                    rx.run_timers();
                }
            });
        }
    }

    /// Has the first worker send the LACP frames of an 802.3ad bond: four times a second, while LACP's shorter timeout
    /// is 3 s.
    fn send_lacp(&self) {
        if let (true, Some(sender)) = (self.settings.device.uses_lacp(), self.senders.first()) {
            sender.run(|queues| {
                if let Some(tx) = &mut queues.tx {
                    tx.send_lacp();
                }
            });
        }
    }

    /// Counts and logs a change of a bond's active member, whose packets are to prove their queues anew.
    fn follow_member(&mut self, active: Option<Device>, handles: &PortHandles, position: usize) {
        let Some((before, now)) = self.state.change_member(active, self.presence.is_some()) else { return };
        tracing::info!(port = self.settings.name, %before, %now, "the bond changed its active member");
        if let Some(handle) = lock(handles).get(position) {
            handle.steering.prove_again();
        }
    }

    /// Logs a changed link, and applies it to the twin.
    async fn follow_link(&mut self, is_up: bool) {
        if self.state.link.replace(is_up) != Some(is_up) {
            tracing::info!(port = self.settings.name, link = if is_up { "up" } else { "down" }, "the port's link");
        }
        if let Some(twin) = &mut self.twin {
            twin.want_carrier(is_up);
            twin.reconcile().await;
        }
    }
}

/// Changes the members of a bond whose queues the workers have given back.
fn change_members(mut port: dpdk_sys::Port, mut queues: BTreeMap<usize, QueuePair>, changes: &MemberChanges) -> ChangedBond {
    let (mut rx, mut tx) = (Vec::new(), Vec::new());
    for pair in queues.values_mut() {
        rx.extend(pair.rx.as_mut());
        tx.extend(pair.tx.as_mut());
    }
    let failed = port.change_members(changes, &rx, &tx);
    (port, queues, failed)
}

/// Closes what is left of the ports at the end of the gateway, once calls into drivers have returned. It waits for each
/// of both no longer than a driver may take.
pub(super) async fn close(ports: Vec<HotplugPort>, handles: Vec<PortHandle>) {
    let (mut queues, mut results) = (Vec::new(), Vec::new());
    for HotplugPort { senders, state, .. } in ports {
        // With the last queues, which wait in a hand-over if a worker ended first, a port stops.
        queues.push((senders, state.recall));
        if let Some(call) = state.call {
            results.push(call.result().await);
        }
    }
    let closed = match DriverCall::start(driver_call::LIMIT, move || drop((queues, handles, results))) {
        Ok(mut call) => call.wait().await,
        Err(_) => CallState::Returned(()),
    };
    if !matches!(closed, CallState::Returned(())) {
        let limit_s = driver_call::LIMIT.as_secs();
        tracing::error!(limit_s, "a driver does not close its device: the gateway ends without waiting for it");
    }
}

/// Why an attached device must be detached, if so. A device that was reset is closed and attached again, which
/// `rte_eth_dev_reset` would do in fewer steps: so its queues return to the workers in the one way in which they leave
/// them.
fn must_detach(attached: Option<u64>, present: Option<u64>, event: Option<DeviceEvent>) -> Option<&'static str> {
    attached?;
    match event {
        Some(DeviceEvent::Reset) => Some("the port's device was reset"),
        Some(DeviceEvent::Removed) => Some("the driver reports that the port's device is being removed"),
        Some(DeviceEvent::Requested) => Some("the kernel asks for the port's device, which is unplugged or unbound"),
        None => (present != attached).then_some("the port's device disappeared"),
    }
}

/// The hotplug task of all ports.
#[derive(Clone)]
pub struct Hotplug {
    pub(super) handles: PortHandles,
    pub(super) ports: Arc<tokio::sync::Mutex<Vec<HotplugPort>>>,
}

impl Hotplug {
    /// Runs until its future is dropped. The states of the ports go to `states`.
    pub async fn run(self, states: watch::Sender<PortStates>) -> Infallible {
        let mut ports = self.ports.lock().await;
        ports.iter_mut().for_each(|port| port.state.link = None);
        let mut ticks = tokio::time::interval(CHECK_INTERVAL);
        let mut round = 0;
        loop {
            ticks.tick().await;
            round = (round + 1) % LINK_CHECK_TICKS;
            let mut may_call = !ports.iter().any(HotplugPort::is_calling);
            for (position, port) in ports.iter_mut().enumerate() {
                port.check(&self.handles, position, may_call).await;
                may_call &= !port.is_calling();
                port.send_lacp();
                port.run_timers(&self.handles);
                if round % INTERFACE_CHECK_TICKS == 0 {
                    port.check_interface(round == 0).await;
                }
            }
            lock(&self.handles).iter_mut().for_each(log_proof);
            let links: Vec<_> = lock(&self.handles).iter().map(|handle| (handle.is_up(), handle.active_member())).collect();
            for (position, (port, (is_up, member))) in ports.iter_mut().zip(links).enumerate() {
                port.follow_member(member, &self.handles, position);
                // A device that is being detached has no link, whatever its driver reports.
                let before = port.state.link == Some(true);
                let is_up = if port.keeps_link() { before } else { is_up.unwrap_or(before) };
                port.follow_link(is_up && !port.is_detaching()).await;
            }
            send_if_changed(&states, port_states(&lock(&self.handles), &ports));
        }
    }
}

/// Logs when live packets of a kind have proven, or refuted, that a port spreads them by RSS as it was configured.
fn log_proof(handle: &mut PortHandle) {
    let now = handle.steering.kind_states();
    let port = &handle.name;
    for ((kind, before), now) in RssKind::ALL.into_iter().zip(handle.logged).zip(now) {
        let packets = name(kind);
        match now {
            now if before == now => {}
            KindState::Proven => {
                tracing::info!(port, packets, "the device leads packets to their workers by RSS, as it was configured");
            }
            KindState::Refuted(why) => {
                let why = reason(why);
                tracing::warn!(
                    port,
                    packets,
                    why,
                    "the device does not lead packets to their workers by RSS as configured; they are handed over"
                );
            }
            KindState::Settled | KindState::NotOffered | KindState::Observing { .. } => {}
        }
    }
    handle.logged = now;
}

fn port_states(handles: &[PortHandle], ports: &[HotplugPort]) -> PortStates {
    let indexed = || (0..=u8::MAX).map(PortIndex).zip(handles).zip(ports);
    PortStates {
        down: indexed().filter(|(_, port)| port.state.link != Some(true)).map(|((index, _), _)| index).collect(),
        moves: ports.iter().map(|port| port.state.moves).collect(),
        macs: indexed()
            .filter(|((_, handle), port)| handle.port.is_some() || port.keeps_link())
            .filter_map(|((index, handle), _)| handle.mac.map(|mac| (index, mac)))
            .collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_detached_when_it_disappeared_or_its_driver_says_so() {
        use DeviceEvent::{Removed, Requested, Reset};
        let rows = [
            ("it is there", (Some(7), Some(7), None), false),
            ("it disappeared", (Some(7), None, None), true),
            ("another one is in its place", (Some(7), Some(8), None), true),
            ("it was reset", (Some(7), Some(7), Some(Reset)), true),
            ("its driver says that it is gone", (Some(7), Some(7), Some(Removed)), true),
            ("the kernel asks for it", (Some(7), Some(7), Some(Requested)), true),
            ("it is not attached", (None, Some(7), Some(Reset)), false),
        ];
        for (sentence, (attached, present, event), expected) in rows {
            assert_eq!(must_detach(attached, present, event).is_some(), expected, "{sentence}");
        }
    }
}
