//! The outputs of a worker: its ports, their twins and the other workers, with packets collected into bursts.
//!
//! **Invariant:** packets that a port or a ring refuses are freed and counted by reason. A packet that may leave only until
//! a time is compared with the clock right before it leaves: the process may be stopped at any point of a poll.
//!
//! Not here: the decision by which output a packet leaves.

use std::sync::Arc;

use arrayvec::ArrayVec;

use super::handover::{HANDED_OVER_MAX, Handed, HandedOver, HandoverQueue, HandoverTask, Peers};
use super::id::WorkerId;
use crate::port::{Arrival, BURST, Burst, Class, Port, PortIndex, TwinQueues, class};
use crate::stats::{DropReason, Tally};
use crate::wire::{Address, Headers, Tags};

/// The port, and the queue to the worker that transmits for this one.
type Sender<B> = (PortIndex, Arc<HandoverQueue<B>>);

/// One port with its twin, and the bursts collected for both.
#[derive(Debug)]
pub(crate) struct EgressPort<P: Port> {
    pub(crate) device: P,
    twin: Option<Arc<TwinQueues<P::Buffer>>>,
    /// The worker that transmits for this one, if it has no transmit queue of its own.
    sender: Option<(PortIndex, Arc<HandoverQueue<P::Buffer>>)>,
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

    fn transmit(&mut self, tally: &mut Tally) {
        let Self { device, sender, out, .. } = self;
        match sender {
            None => transmit(device, out, tally),
            Some(sender) => hand_over(device, sender, out, tally),
        }
    }

    /// Transmits a burst that need not wait for others.
    #[inline(always)]
    fn transmit_at_once(&mut self, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
        match &self.sender {
            None => transmit(&mut self.device, burst, tally),
            Some(sender) => hand_over(&mut self.device, sender, burst, tally),
        }
    }

    /// Transmits the packets that may leave only until a time, and drops those that are too late. None waits behind
    /// others after the look at the clock, except in the queue to the worker that transmits for this one.
    #[cold]
    fn transmit_in_time(&mut self, clock: fn() -> u64, tally: &mut Tally) {
        if !self.out.is_empty() {
            self.transmit(tally);
        }
        let (mut in_time, mut late) = (Burst::new(), Burst::new());
        let now_ns = clock();
        for (until_ns, buffer) in self.out_until.drain(..) {
            if now_ns < until_ns { in_time.push(buffer) } else { late.push(buffer) }
        }
        if !in_time.is_empty() {
            self.transmit_at_once(&mut in_time, tally);
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
fn hand_over<P: Port>(device: &mut P, (port, queue): &Sender<P::Buffer>, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
    while !burst.is_empty() {
        let packets: Handed<_> = burst.drain(..burst.len().min(HANDED_OVER_MAX)).collect();
        let count = packets.len() as u64;
        match queue.push(HandedOver { port: *port, task: HandoverTask::Send, packets }) {
            Ok(()) => tally.handed_out += count,
            Err(refused) => release_refused(device, refused, tally),
        }
    }
}

/// Frees and counts packets that a queue to another worker refused.
#[cold]
fn release_refused<P: Port>(device: &mut P, refused: HandedOver<P::Buffer>, tally: &mut Tally) {
    tally.drop_many(DropReason::HandoverFull, refused.packets.len() as u64);
    device.release(&mut refused.packets.into_iter().collect());
}

impl<P: Port> Egress<P> {
    pub(crate) fn new(mut ports: Vec<EgressPort<P>>, peers: Option<Peers<P::Buffer>>) -> Self {
        if let Some(peers) = &peers {
            for (index, port) in (0..=u8::MAX).map(PortIndex).zip(&mut ports) {
                port.sender = peers.sender(index).map(|queue| (index, queue));
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

    /// The class of a packet that arrived on the port, for the rate limit towards the kernel.
    pub(crate) fn class(&self, port: PortIndex, frame: &[u8]) -> Class {
        let twin = self.ports.get(usize::from(port.0)).and_then(|port| port.twin.as_ref());
        twin.map_or(Class::Rest, |twin| class(frame, &twin.begun))
    }

    /// Records a packet that the kernel sends by the port, since an answer may follow.
    pub(crate) fn sent_by_linux<A: Address>(&self, port: PortIndex, headers: &Headers<A>) {
        if let Some(twin) = self.ports.get(usize::from(port.0)).and_then(|port| port.twin.as_ref()) {
            twin.begun.sent(headers);
        }
    }

    /// Adds a packet to the burst of a port.
    #[inline]
    pub(crate) fn send(&mut self, port: PortIndex, buffer: P::Buffer, tally: &mut Tally) {
        let Some(port) = self.port_mut(port) else { return tally.drop(DropReason::TxFull) };
        port.out.push(buffer);
        if port.out.is_full() {
            port.transmit(tally);
        }
    }

    /// Sends all packets of a burst by a port: at once if none is collected for the port, otherwise behind those.
    #[inline]
    pub(crate) fn send_burst(&mut self, index: PortIndex, burst: &mut Burst<P::Buffer>, tally: &mut Tally) {
        match self.port_mut(index) {
            Some(port) if port.out.is_empty() => port.transmit_at_once(burst, tally),
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
        let Some(port) = self.port_mut(port).filter(|_| is_tagged) else {
            tally.drop(DropReason::TxFull);
            return self.discard(buffer);
        };
        port.out_until.push((until_ns, buffer));
        if port.out_until.is_full() {
            port.transmit_in_time(clock, tally);
        }
    }

    /// Adds a packet, as it arrived, to those for another worker.
    #[inline]
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
        let Some(peers) = &mut self.peers else { return self.discard(buffer) };
        if let Some(handed) = peers.gathered.put(owner, task, arrival.link.port(), buffer) {
            self.push_to(owner, handed, tally);
        }
    }

    fn push_to(&mut self, owner: WorkerId, handed: HandedOver<P::Buffer>, tally: &mut Tally) {
        let Some(peers) = &self.peers else { return };
        let count = handed.packets.len() as u64;
        match peers.push(owner, handed) {
            Ok(()) => tally.handed_out += count,
            Err(refused) => {
                if let Some(port) = self.ports.first_mut() {
                    release_refused(&mut port.device, refused, tally);
                }
            }
        }
    }

    /// Hands over all collected bursts.
    fn flush_to_peers(&mut self, tally: &mut Tally) {
        while let Some((owner, handed)) = self.peers.as_mut().and_then(|peers| peers.gathered.take()) {
            self.push_to(owner, handed, tally);
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
                port.transmit(tally);
            }
            if !port.out_until.is_empty() {
                port.transmit_in_time(self.clock, tally);
            }
            if !port.to_linux.is_empty() {
                port.hand_to_linux(tally);
            }
        }
    }
}
