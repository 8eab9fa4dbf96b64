//! The outputs of a worker: its ports, their twins and the other workers, with packets collected into bursts.
//!
//! **Invariant:** packets that a port or a ring refuses are freed and counted by reason. A packet that may leave only
//! until a time is compared with the clock right before it leaves: the process may be stopped at any point of a poll.
//!
//! Not here: the decision by which output a packet leaves.

use std::net::IpAddr;
use std::sync::Arc;

use arrayvec::ArrayVec;

use super::handover::{HandoverTask, Outbox, Peers};
use super::id::WorkerId;
use crate::port::{Arrival, BURST, Burst, Class, ForeignExchange, Port, PortIndex, TwinQueues, class};
use crate::stats::{DropReason, Tally};
use crate::wire::{Address, Headers, Tags};

/// One port with its twin, and the bursts collected for both.
#[derive(Debug)]
pub(crate) struct EgressPort<P: Port> {
    pub(crate) device: P,
    twin: Option<Arc<TwinQueues<P::Buffer>>>,
    /// The port, and the worker that transmits for this one, if it has no transmit queue of its own.
    sender: Option<(PortIndex, WorkerId)>,
    out: Burst<P::Buffer>,
    /// Packets that may leave only until a time, ns.
    out_until: ArrayVec<(u64, P::Buffer), BURST>,
    to_linux: Burst<P::Buffer>,
}

/// All outputs of a worker.
#[derive(Debug)]
pub(crate) struct Egress<P: Port> {
    pub(crate) ports: Vec<EgressPort<P>>,
    /// `None` with a single worker.
    pub(crate) peers: Option<Peers<P::Buffer>>,
    discarded: Burst<P::Buffer>,
    /// Monotonic time, ns.
    clock: fn() -> u64,
}

impl<P: Port> EgressPort<P> {
    pub(crate) fn new(device: P, twin: Option<Arc<TwinQueues<P::Buffer>>>) -> Self {
        Self { device, twin, sender: None, out: Burst::new(), out_until: ArrayVec::new(), to_linux: Burst::new() }
    }

    fn transmit(&mut self, peers: &mut Option<Peers<P::Buffer>>, tally: &mut Tally) {
        let Self { device, sender, out, .. } = self;
        match sender {
            None => transmit(device, out, tally),
            &mut Some((port, sender)) => hand_over(device, peers, port, sender, out, tally),
        }
    }

    /// Transmits a burst that need not wait for others.
    #[inline(always)]
    fn transmit_at_once(&mut self, peers: &mut Option<Peers<P::Buffer>>, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
        match self.sender {
            None => transmit(&mut self.device, burst, tally),
            Some((port, sender)) => hand_over(&mut self.device, peers, port, sender, burst, tally),
        }
    }

    /// Transmits the packets that may leave only until a time, and drops those that are too late. No packet waits
    /// behind others after the clock was read, except in the queue to the worker that transmits for this one.
    #[cold]
    fn transmit_in_time(&mut self, peers: &mut Option<Peers<P::Buffer>>, clock: fn() -> u64, tally: &mut Tally) {
        if !self.out.is_empty() {
            self.transmit(peers, tally);
        }
        let (mut in_time, mut late) = (Burst::new(), Burst::new());
        let now_ns = clock();
        for (until_ns, buffer) in self.out_until.drain(..) {
            if now_ns < until_ns { in_time.push(buffer) } else { late.push(buffer) }
        }
        if !in_time.is_empty() {
            self.transmit_at_once(peers, &mut in_time, tally);
        }
        if !late.is_empty() {
            tally.drop_many(DropReason::StaleAdvertisement, late.len() as u64);
            self.device.release(&mut late);
        }
    }

    fn hand_to_linux(&mut self, tally: &mut Tally) {
        let burst = std::mem::take(&mut self.to_linux);
        let count = burst.len() as u64;
        let refused = match &self.twin {
            Some(twin) => twin.push_to_linux(burst).err(),
            None => Some(burst),
        };
        match refused {
            None => tally.transmitted += count,
            Some(mut burst) => {
                tally.drop_many(DropReason::TwinFull, count);
                self.device.release(&mut burst);
            }
        }
    }
}

#[inline(always)]
fn transmit<P: Port>(device: &mut P, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
    let offered = burst.len();
    device.transmit(burst);
    let refused = burst.len();
    tally.transmitted += (offered - refused) as u64;
    if refused > 0 {
        tally.drop_many(DropReason::TxFull, refused as u64);
        device.release(burst);
    }
}

/// Hands a burst to the worker that transmits for this one.
#[cold]
fn hand_over<P: Port>(
    device: &mut P,
    peers: &mut Option<Peers<P::Buffer>>,
    port: PortIndex,
    sender: WorkerId,
    burst: &mut Burst<P::Buffer>,
    tally: &mut Tally,
) {
    let Some(outbox) = peers.as_mut().and_then(|peers| peers.outbox(sender)) else {
        tally.drop_many(DropReason::HandoverFull, burst.len() as u64);
        return device.release(burst);
    };
    for buffer in burst.drain(..) {
        collect(device, outbox, HandoverTask::Send, port, buffer, tally);
    }
    push(device, outbox, tally);
}

/// Collects a packet for another worker, after those that there is no room beside.
#[inline(always)]
fn collect<P: Port>(
    device: &mut P,
    outbox: &mut Outbox<P::Buffer>,
    task: HandoverTask,
    port: PortIndex,
    buffer: P::Buffer,
    tally: &mut Tally,
) {
    if let Err(buffer) = outbox.put(task, port, buffer) {
        push(device, outbox, tally);
        if let Err(buffer) = outbox.put(task, port, buffer) {
            tally.drop(DropReason::HandoverFull);
            device.release(&mut Burst::from_iter([buffer]));
        }
    }
}

/// Pushes what is collected for another worker. Frees and counts packets that the queue refuses.
#[inline(never)]
fn push<P: Port>(device: &mut P, outbox: &mut Outbox<P::Buffer>, tally: &mut Tally) {
    tally.handed_out += outbox.push();
    for refused in outbox.refused() {
        tally.drop_many(DropReason::HandoverFull, refused.packets.len() as u64);
        device.release(&mut refused.packets.into_iter().collect());
    }
}

impl<P: Port> Egress<P> {
    pub(crate) fn new(mut ports: Vec<EgressPort<P>>, peers: Option<Peers<P::Buffer>>) -> Self {
        if let Some(peers) = &peers {
            for (index, port) in (0..=u8::MAX).map(PortIndex).zip(&mut ports) {
                port.sender = peers.sender(index).map(|worker| (index, worker));
            }
        }
        // Read only for packets that may leave only until a time, which an election brings together with its clock.
        Self { ports, peers, discarded: Burst::new(), clock: || 0 }
    }

    /// Takes its time from this clock: monotonic, ns.
    pub(crate) fn set_clock(&mut self, clock: fn() -> u64) {
        self.clock = clock;
    }

    fn port_mut(&mut self, port: PortIndex) -> Option<&mut EgressPort<P>> {
        self.ports.get_mut(usize::from(port.0))
    }

    pub(crate) fn receive(&mut self, port: PortIndex, burst: &mut Burst<P::Buffer>) {
        if let Some(port) = self.port_mut(port) {
            port.device.receive(burst);
        }
    }

    /// The oldest burst that the kernel sends out of the port, if this worker serves the twin.
    pub(crate) fn burst_of_linux(&mut self, port: PortIndex) -> Option<Burst<P::Buffer>> {
        if self.peers.as_ref().is_some_and(|peers| !peers.serves_twin_of(port)) {
            return None;
        }
        self.port_mut(port)?.twin.as_ref()?.from_linux.pop()
    }

    /// The class of a packet that arrived on the port, for the rate limit towards the kernel, and the exchange that it
    /// begins with the kernel. `is_from_link`: whether a sender with this address is on the link.
    pub(crate) fn class(
        &self,
        port: PortIndex,
        frame: &[u8],
        is_from_link: impl Fn(IpAddr) -> bool,
    ) -> (Class, Option<ForeignExchange>) {
        let twin = self.ports.get(usize::from(port.0)).and_then(|port| port.twin.as_ref());
        twin.map_or((Class::Rest, None), |twin| class(frame, &twin.begun, is_from_link))
    }

    /// Records a packet that the kernel sends by the port, since an answer may follow.
    pub(crate) fn sent_by_linux<A: Address>(&self, port: PortIndex, frame: &[u8], headers: &Headers<A>) {
        if let Some(twin) = self.ports.get(usize::from(port.0)).and_then(|port| port.twin.as_ref()) {
            twin.begun.sent(frame, headers);
        }
    }

    /// Records that a packet for the kernel begins an exchange, since the kernel may reply.
    pub(crate) fn heard(&self, port: PortIndex, exchange: ForeignExchange) {
        if let Some(twin) = self.ports.get(usize::from(port.0)).and_then(|port| port.twin.as_ref()) {
            twin.begun.heard(exchange);
        }
    }

    /// Adds a packet to the burst of a port.
    #[inline]
    pub(crate) fn send(&mut self, port: PortIndex, buffer: P::Buffer, tally: &mut Tally) {
        let Some(port) = self.ports.get_mut(usize::from(port.0)) else { return tally.drop(DropReason::TxFull) };
        port.out.push(buffer);
        if port.out.is_full() {
            port.transmit(&mut self.peers, tally);
        }
    }

    /// Sends all packets of a burst by a port: at once if none is collected for the port, otherwise behind those.
    #[inline]
    pub(crate) fn send_burst(&mut self, index: PortIndex, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
        match self.ports.get_mut(usize::from(index.0)) {
            Some(port) if port.out.is_empty() => port.transmit_at_once(&mut self.peers, burst, tally),
            _ => burst.drain(..).for_each(|buffer| self.send(index, buffer, tally)),
        }
    }

    /// Adds VLAN tags to a packet, and the packet to the burst of a port.
    pub(crate) fn send_tagged(&mut self, port: PortIndex, tags: Tags, mut buffer: P::Buffer, tally: &mut Tally) {
        if tags.put_on(&mut buffer) {
            self.send(port, buffer, tally);
        } else {
            tally.drop(DropReason::TxFull);
            self.discard(buffer);
        }
    }

    /// The same for a packet that may leave only until a time, ns by the worker's clock.
    pub(crate) fn send_tagged_until(
        &mut self,
        until_ns: u64,
        port: PortIndex,
        tags: Tags,
        mut buffer: P::Buffer,
        tally: &mut Tally,
    ) {
        let (clock, is_tagged) = (self.clock, tags.put_on(&mut buffer));
        let Some(port) = self.ports.get_mut(usize::from(port.0)).filter(|_| is_tagged) else {
            tally.drop(DropReason::TxFull);
            return self.discard(buffer);
        };
        port.out_until.push((until_ns, buffer));
        if port.out_until.is_full() {
            port.transmit_in_time(&mut self.peers, clock, tally);
        }
    }

    /// Adds a packet, as it arrived, to those for another worker.
    #[inline(always)]
    pub(crate) fn hand_over(
        &mut self,
        owner: WorkerId,
        task: HandoverTask,
        arrival: Arrival,
        mut buffer: P::Buffer,
        tally: &mut Tally,
    ) {
        if !arrival.tags.put_on(&mut buffer) {
            tally.drop(DropReason::HandoverFull);
            return self.discard(buffer);
        }
        let outbox = self.peers.as_mut().and_then(|peers| peers.outbox(owner));
        match (outbox, self.ports.first_mut()) {
            (Some(outbox), Some(port)) => collect(&mut port.device, outbox, task, arrival.link.port(), buffer, tally),
            _ => {
                tally.drop(DropReason::HandoverFull);
                self.discard(buffer);
            }
        }
    }

    /// Hands over all that is collected for other workers.
    fn flush_to_peers(&mut self, tally: &mut Tally) {
        let (Some(peers), Some(port)) = (&mut self.peers, self.ports.first_mut()) else { return };
        for outbox in peers.collected() {
            push(&mut port.device, outbox, tally);
        }
    }

    /// Adds a packet to the burst for the twin of a port.
    pub(crate) fn queue_for_linux(&mut self, port: PortIndex, buffer: P::Buffer, tally: &mut Tally) {
        let Some(port) = self.port_mut(port) else { return tally.drop(DropReason::TwinFull) };
        port.to_linux.push(buffer);
        if port.to_linux.is_full() {
            port.hand_to_linux(tally);
        }
    }

    /// Collects a dropped packet, to free many at once. Any port can free the buffers of all: they come from one pool.
    pub(crate) fn discard(&mut self, buffer: P::Buffer) {
        self.discarded.push(buffer);
        if self.discarded.is_full() {
            self.release();
        }
    }

    fn release(&mut self) {
        if let Some(port) = self.ports.first_mut() {
            port.device.release(&mut self.discarded);
        }
    }

    /// An empty buffer of a port.
    pub(crate) fn allocate(&mut self, port: PortIndex) -> Option<P::Buffer> {
        self.port_mut(port)?.device.allocate()
    }

    /// Passes on every packet that is collected for a port or its twin: its port, whether it goes to the twin, and the
    /// packet.
    pub(crate) fn for_each_collected(&self, mut each: impl FnMut(PortIndex, bool, &P::Buffer)) {
        for (index, port) in (0..=u8::MAX).map(PortIndex).zip(&self.ports) {
            port.out.iter().for_each(|buffer| each(index, false, buffer));
            port.out_until.iter().for_each(|(_, buffer)| each(index, false, buffer));
            port.to_linux.iter().for_each(|buffer| each(index, true, buffer));
        }
    }

    /// Sends and frees all collected packets.
    pub(crate) fn flush(&mut self, tally: &mut Tally) {
        if !self.discarded.is_empty() {
            self.release();
        }
        if self.peers.is_some() {
            self.flush_to_peers(tally);
        }
        self.flush_ports(tally);
    }

    /// Sends the packets that are collected for ports and their twins.
    #[inline(always)]
    pub(crate) fn flush_ports(&mut self, tally: &mut Tally) {
        for port in &mut self.ports {
            if !port.out.is_empty() {
                port.transmit(&mut self.peers, tally);
            }
            if !port.out_until.is_empty() {
                port.transmit_in_time(&mut self.peers, self.clock, tally);
            }
            if !port.to_linux.is_empty() {
                port.hand_to_linux(tally);
            }
        }
    }
}
