//! Attending to the ports while the gateway runs: devices that come are attached and their queues handed to the worker,
//! those that go are detached; twins follow their ports; the engine hears of links and addresses.
//!
//! Invariant: each port stands for itself, and what fails at one is tried again without the others. A device is detached only after the worker has given its queues back, and its Ethernet address is told before
//! its link. Deliberately not here: workers, and what they do with a port (`berth`).

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use dataplane::{Mac, PortIndex};
use dpdk_sys::{Device, Eal, Mempool};
use tokio::sync::watch;
use tokio::time::Instant;

use super::steering::{Standing, Wanted, reason};
use super::twin::AttendedTwin;
use super::{HardwareError, Opened, Ports, PortsNow, lock};
use crate::ports::af_packet::{self, Prepared};
use crate::ports::dpdk::{self, OpenedPort};
use crate::ports::handover::{Berth, Queues};
use crate::settings::PortSettings;

/// How often links and devices are looked at.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Waits before a device that is present and cannot be attached is tried again: 1 s first, doubled up to the limit.
const BACKOFF: ExponentialBuilder =
    ExponentialBuilder::new().with_min_delay(Duration::from_secs(1)).with_max_delay(RETRY_MAX).without_max_times();
const RETRY_MAX: Duration = Duration::from_secs(16);

/// A port, as the one sees it who attends to it.
pub(super) struct Attended {
    eal: Eal,
    pool: Mempool,
    settings: PortSettings,
    device: Device,
    /// One for each worker, in their order.
    berths: Vec<Berth>,
    wanted: Wanted,
    /// Transmit queues that the workers count on.
    transmit: u8,
    pub(super) prepared: Option<Prepared>,
    pub(super) twin: Option<AttendedTwin>,
    /// What stood for the device when it was attached; none: it is not attached.
    pub(super) presence: Option<u64>,
    /// Workers that were asked for their queues and have not given them back; none: nobody is asked.
    leaving: Option<Vec<usize>>,
    retry: Retry,
    link: Option<bool>,
    /// The active member of a bond, as it was found last.
    member: Option<Device>,
    /// How often it has changed.
    moves: u64,
}

pub(super) struct Retry {
    not_before: Option<Instant>,
    waits: ExponentialBackoff,
}

impl Retry {
    pub(super) fn new() -> Self {
        Self { not_before: None, waits: BACKOFF.build() }
    }

    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.not_before.is_none_or(|at| at <= now)
    }

    /// Returns the wait before the next attempt.
    pub(super) fn failed(&mut self, now: Instant) -> Duration {
        let wait = self.waits.next().unwrap_or(RETRY_MAX);
        self.not_before = Some(now + wait);
        wait
    }
}

impl Attended {
    pub(super) fn new(
        eal: Eal,
        pool: Mempool,
        settings: PortSettings,
        device: Device,
        berths: Vec<Berth>,
        wanted: Wanted,
        transmit: u8,
    ) -> Self {
        Self {
            eal,
            pool,
            settings,
            device,
            berths,
            wanted,
            transmit,
            prepared: None,
            twin: None,
            presence: None,
            leaving: None,
            retry: Retry::new(),
            link: None,
            member: None,
            moves: 0,
        }
    }

    /// Gives the queues of an attached device to the workers.
    pub(super) fn hand_over(&self, queues: Vec<Queues>) -> Result<(), HardwareError> {
        let mut given = self.berths.iter().zip(queues).map(|(berth, queues)| berth.give(queues));
        given.try_for_each(|given| given.map_err(|_| HardwareError::Worker))
    }

    /// One look at the device: attaches one that has come, detaches one that has gone.
    async fn look(&mut self, opened: &Ports, position: usize) {
        let present = self.device.presence();
        if self.leaving.is_some() {
            self.finish_leaving(opened, position);
        } else if self.presence.is_some() && present != self.presence {
            tracing::warn!(port = self.settings.name, device = %self.device, "the port's device is gone; it is attached again when it is back");
            self.leaving = Some((0..self.berths.len()).filter(|&worker| self.berths[worker].call_back()).collect());
        } else if self.presence.is_none() && present.is_some() && self.retry.is_due(Instant::now()) {
            match self.attach(opened, position).await {
                Ok(()) => {
                    self.presence = present;
                    self.retry = Retry::new();
                    tracing::info!(port = self.settings.name, device = %self.device, "the port's device has come and is attached");
                }
                Err(error) => {
                    let wait = self.retry.failed(Instant::now());
                    tracing::warn!(port = self.settings.name, %error, again_s = wait.as_secs(), "the port's device is there and cannot be attached");
                }
            }
        }
    }

    async fn attach(&mut self, opened: &Ports, position: usize) -> Result<(), HardwareError> {
        self.prepared = af_packet::prepare(self.settings.device.as_str()).await?;
        let OpenedPort { port: handle, queues, found } = dpdk::open(self.eal, &self.settings, self.pool, &self.wanted)?;
        if found.transmit < self.transmit.into() {
            return Err(HardwareError::TransmitQueues { found: found.transmit, needed: self.transmit });
        }
        let mac = Mac(handle.mac());
        if let Some(twin) = &mut self.twin {
            twin.want_mac(mac);
        }
        self.hand_over(queues)?;
        if let Some(opened) = lock(opened).get_mut(position) {
            (opened.mac, opened.port) = (Some(mac), Some(handle));
        }
        Ok(())
    }

    /// When all workers have given their queues back, they and the port's handle go, and with the last of them the device.
    fn finish_leaving(&mut self, opened: &Ports, position: usize) {
        let Some(leaving) = &mut self.leaving else { return };
        leaving.retain(|&worker| self.berths[worker].returned().is_none());
        if !leaving.is_empty() {
            return;
        }
        if let Some(opened) = lock(opened).get_mut(position) {
            opened.port = None;
        }
        // The interface is gone, and with it what was changed on it.
        (self.prepared, self.presence, self.leaving) = (None, None, None);
    }

    /// Has the first worker send what an 802.3ad bond has to say: four times a second, while LACP's shorter timeout is 3 s.
    fn speak(&self) {
        if let (true, Some(berth)) = (self.device.speaks_lacp(), self.berths.first()) {
            berth.use_once(|queues| {
                if let Some(tx) = &mut queues.tx {
                    tx.speak();
                }
            });
        }
    }

    /// Tells of a bond that has another active member. The first one is no move, nor is the one after the device was away.
    fn follow_member(&mut self, active: Option<Device>) {
        if self.member == active {
            return;
        }
        if let (Some(before), Some(now)) = (&self.member, &active) {
            self.moves += 1;
            tracing::info!(port = self.settings.name, %before, %now, "the bond has another active member");
        }
        self.member = active;
    }

    /// Tells of a changed link, and makes the twin follow.
    async fn follow_link(&mut self, is_up: bool) {
        if self.link.replace(is_up) != Some(is_up) {
            tracing::info!(port = self.settings.name, link = if is_up { "up" } else { "down" }, "the port's link");
        }
        if let Some(twin) = &mut self.twin {
            twin.want_carrier(is_up);
            twin.look().await;
        }
    }
}

/// Who attends to the ports.
#[derive(Clone)]
pub struct Attendant {
    pub(super) ports: Ports,
    pub(super) attended: Arc<tokio::sync::Mutex<Vec<Attended>>>,
}

impl Attendant {
    /// Attends until its future is dropped. `now` says how the ports are.
    pub async fn attend(self, now: watch::Sender<PortsNow>) -> Infallible {
        let mut attended = self.attended.lock().await;
        attended.iter_mut().for_each(|one| one.link = None);
        let mut ticks = tokio::time::interval(LOOK_EVERY);
        loop {
            ticks.tick().await;
            for (position, one) in attended.iter_mut().enumerate() {
                one.look(&self.ports, position).await;
                one.speak();
            }
            lock(&self.ports).iter_mut().for_each(tell_of_steering);
            let links: Vec<(bool, Option<Device>)> =
                lock(&self.ports).iter().map(|one| (is_up(one), active_member(one))).collect();
            for (one, (is_up, member)) in attended.iter_mut().zip(links) {
                one.follow_member(member);
                // A device that is going has no link, whatever its driver says.
                one.follow_link(is_up && one.leaving.is_none()).await;
            }
            let there = ports_now(&lock(&self.ports), &attended);
            now.send_if_modified(|last| {
                *last != there && {
                    *last = there;
                    true
                }
            });
        }
    }
}

/// Logs when live packets have proven, or refuted, that a port spreads them as it was told.
fn tell_of_steering(opened: &mut Opened) {
    let now = opened.steering.standing();
    let port = &opened.name;
    match (opened.standing, now) {
        (before, now) if before == now => {}
        (_, Standing::Proven) => tracing::info!(port, "the device spreads packets by RSS as it was told: its queues are trusted"),
        (_, Standing::Refuted(why)) => {
            tracing::warn!(port, why = reason(why), "the device's queues are not trusted; workers find owners themselves");
        }
        (_, Standing::Settled | Standing::Observing { .. }) => {}
    }
    opened.standing = now;
}

fn is_up(opened: &Opened) -> bool {
    opened.port.as_ref().is_some_and(|port| port.link().is_ok_and(|link| link.is_up))
}

fn active_member(opened: &Opened) -> Option<Device> {
    opened.port.as_ref()?.active_member()
}

fn ports_now(opened: &[Opened], attended: &[Attended]) -> PortsNow {
    let indexed = || (0..=u8::MAX).map(PortIndex).zip(opened).zip(attended);
    PortsNow {
        down: indexed().filter(|(_, attended)| attended.link != Some(true)).map(|((port, _), _)| port).collect(),
        moves: attended.iter().map(|attended| attended.moves).collect(),
        macs: indexed().filter_map(|((port, opened), _)| opened.port.as_ref().and(opened.mac).map(|mac| (port, mac))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_attached_is_tried_less_and_less_often_up_to_a_limit() {
        let (start, mut retry) = (Instant::now(), Retry::new());
        assert!(retry.is_due(start), "the first time at once");
        let mut waits = Vec::new();
        for _ in 0..7 {
            retry.failed(start);
            let wait = (0..).find(|s| retry.is_due(start + Duration::from_secs(*s))).unwrap();
            waits.push(wait);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 16, 16]);
    }
}
