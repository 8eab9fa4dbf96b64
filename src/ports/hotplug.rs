//! The hotplug task: while the gateway runs, it attaches devices that appear and hands their queues to the workers, and
//! detaches devices that disappear. It also updates the twins of the ports, and publishes links and Ethernet addresses
//! for the engine.
//!
//! Invariant: each port is handled separately; a failure at one is retried and does not affect the others. A device is
//! detached only after the workers have given its queues back, and its Ethernet address is published before its link.
//! Deliberately not here: how workers take and return queues (`queue_handover`).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use dataplane::workers::RssKind;
use dataplane::{Mac, PortIndex};
use dpdk_sys::{Device, DeviceEvent, Eal, Mempool};
use tokio::sync::watch;
use tokio::time::Instant;

use super::af_packet::{self, PreparedInterface};
use super::dpdk::{self, OpenedPort, QueueRequest};
use super::error::PortsError;
use super::handle::{PortHandle, PortHandles, lock};
use super::queue_handover::{QueuePair, QueueSender};
use super::retry::Retry;
use super::steering::{KindState, name, reason};
use super::twin::TwinReconciler;
use crate::settings::PortSettings;
use crate::watch::send_if_changed;

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

/// The state of a port's device as the task knows it.
#[derive(Default)]
pub(super) struct DeviceState {
    /// Workers that were asked for their queues and have not returned them; `None`: the device is not being detached.
    detaching: Option<Vec<usize>>,
    /// Linux does not say whether the device exists.
    is_unknown: bool,
    /// The interface's frames may not be hidden from Linux.
    is_exposed: bool,
    retry: Retry,
    link: Option<bool>,
    /// The last known active member of a bond.
    member: Option<Device>,
    /// Number of its changes.
    moves: u64,
}

impl HotplugPort {
    /// Gives the queues of an attached device to the workers.
    pub(super) fn hand_over(&self, queues: Vec<QueuePair>) -> Result<(), PortsError> {
        let mut sent = self.senders.iter().zip(queues).map(|(sender, queues)| sender.send(queues));
        sent.try_for_each(|sent| sent.map_err(|_| PortsError::Worker))
    }

    /// Checks the device once: attaches it if it appeared, and detaches it if it disappeared or has to be opened anew.
    async fn check(&mut self, handles: &PortHandles, position: usize) {
        let (port, device) = (&self.settings.name, &self.settings.device);
        let present = match device.presence() {
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
        };
        let event = lock(handles).get(position).and_then(|handle| handle.port.as_ref()?.event());
        if self.state.detaching.is_some() {
            self.finish_detaching(handles, position);
        } else if let Some(reason) = must_detach(self.presence, present, event) {
            tracing::warn!(port, %device, "{reason}; it is attached again when it returns");
            self.state.detaching = Some((0..self.senders.len()).filter(|&worker| self.senders[worker].recall()).collect());
            if event == Some(DeviceEvent::Removed) {
                // The bus shows it until it is released.
                self.state.retry.failed(Instant::now());
            }
        } else if self.presence.is_none() && present.is_some() && self.state.retry.is_due(Instant::now()) {
            match self.attach(handles, position).await {
                Ok(()) => {
                    self.presence = present;
                    self.state.retry = Retry::default();
                    let (port, device) = (&self.settings.name, &self.settings.device);
                    tracing::info!(port, %device, "the port's device appeared and was attached");
                }
                Err(error) => {
                    let again_s = self.state.retry.failed(Instant::now()).as_secs();
                    let port = &self.settings.name;
                    tracing::warn!(port, %error, again_s, "the port's device cannot be attached");
                }
            }
        }
    }

    /// Puts back what another program undid at the interface of the device. The first of several failures is logged.
    async fn check_interface(&mut self, looks_at_link: bool) {
        let Some(prepared) = self.prepared.as_mut().filter(|_| self.presence.is_some() && self.state.detaching.is_none()) else {
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

    async fn attach(&mut self, handles: &PortHandles, position: usize) -> Result<(), PortsError> {
        self.prepared = af_packet::prepare(&self.settings.device).await?;
        let OpenedPort { port, queues, found } = dpdk::open(self.eal, &self.settings, self.pool, &self.request)?;
        if found.transmit < self.transmit.into() {
            return Err(PortsError::TransmitQueues { found: found.transmit, needed: self.transmit });
        }
        let mac = Mac(port.mac());
        if let Some(twin) = &mut self.twin {
            twin.want_mac(mac);
        }
        self.hand_over(queues)?;
        if let Some(handle) = lock(handles).get_mut(position) {
            (handle.mac, handle.port) = (Some(mac), Some(port));
            handle.steering.attached(found);
        }
        Ok(())
    }

    /// Drops the queues and the port's handle once all workers have given their queues back; the last of them closes
    /// the device.
    fn finish_detaching(&mut self, handles: &PortHandles, position: usize) {
        let Some(workers) = &mut self.state.detaching else { return };
        workers.retain(|&worker| self.senders[worker].returned().is_none());
        if !workers.is_empty() {
            return;
        }
        if let Some(handle) = lock(handles).get_mut(position) {
            handle.port = None;
        }
        // The interface is gone, and with it what was changed on it.
        (self.prepared, self.presence, self.state.detaching) = (None, None, None);
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

    /// Counts and logs a change of a bond's active member, whose packets are to prove their queues anew. The first member
    /// after the device appears is not a change.
    fn follow_member(&mut self, active: Option<Device>, handles: &PortHandles, position: usize) {
        let state = &mut self.state;
        if state.member == active {
            return;
        }
        if let (Some(before), Some(now)) = (&state.member, &active) {
            state.moves += 1;
            tracing::info!(port = self.settings.name, %before, %now, "the bond changed its active member");
            if let Some(handle) = lock(handles).get(position) {
                handle.steering.prove_again();
            }
        }
        state.member = active;
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

/// Why an attached device must be detached, if so. A device that was reset is closed and attached again, which
/// `rte_eth_dev_reset` would do in fewer steps: so its queues return to the workers in the one way in which they leave
/// them.
fn must_detach(attached: Option<u64>, present: Option<u64>, event: Option<DeviceEvent>) -> Option<&'static str> {
    attached?;
    match event {
        Some(DeviceEvent::Reset) => Some("the port's device was reset"),
        Some(DeviceEvent::Removed) => Some("the driver reports that the port's device is being removed"),
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
            for (position, port) in ports.iter_mut().enumerate() {
                port.check(&self.handles, position).await;
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
                let is_up = is_up.unwrap_or(port.state.link == Some(true));
                port.follow_link(is_up && port.state.detaching.is_none()).await;
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
                tracing::warn!(port, packets, why, "the device's queues are not trusted; workers find owners themselves");
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
        macs: indexed().filter_map(|((index, handle), _)| handle.port.as_ref().and(handle.mac).map(|mac| (index, mac))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_detached_when_it_disappeared_or_its_driver_says_so() {
        use DeviceEvent::{Removed, Reset};
        let rows = [
            ("it is there", (Some(7), Some(7), None), false),
            ("it disappeared", (Some(7), None, None), true),
            ("another one is in its place", (Some(7), Some(8), None), true),
            ("it was reset", (Some(7), Some(7), Some(Reset)), true),
            ("Linux asks to release it", (Some(7), Some(7), Some(Removed)), true),
            ("it is not attached", (None, Some(7), Some(Reset)), false),
        ];
        for (sentence, (attached, present, event), expected) in rows {
            assert_eq!(must_detach(attached, present, event).is_some(), expected, "{sentence}");
        }
    }
}
