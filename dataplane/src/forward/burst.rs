//! The stages of a burst: the fast path; then, for what it leaves, parse, sort by kind, look up flows, and process
//! packet by packet. Bursts of tagged frames return here without their tags.
//!
//! **Invariant:** a burst is empty afterwards; every packet went to one function of the engine, or to another worker.
//! Packets of a flow and direction went there in the order of the burst.
//!
//! Not here: the verdict on a packet.

use arrayvec::ArrayVec;

use super::engine::Engine;
use super::observer::Observe;
use super::sort::{Ingress, Kind, Lookups, RunKind, Sorted, sample_queue, sort, steer};
use crate::forward::decide::FlowFamily;
use crate::port::{Arrival, Burst, FrameFilter, Link, Origin, Port};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::DropReason;
use crate::wire::{Address, Buffer, Headers, Parsed, Tags, Tuple, is_group_address, parse};

impl<P: Port, O: Observe<P::Buffer>> Engine<P, O> {
    /// Processes a burst. While a capture runs, or somebody watches, its packets may be observed.
    pub(super) fn process(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
        if let (Some(peers), Origin::Port) = (&mut self.egress.peers, at.arrival.origin) {
            sample_queue(peers, at.arrival.link.port(), burst);
        }
        if self.is_looked_at {
            return self.process_captured(at, burst);
        }
        self.process_unobserved(at, burst);
    }

    /// Processes a burst: the fast path first, then the stages for what it leaves.
    #[inline(always)]
    pub(super) fn process_unobserved(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
        self.forward_known(at, burst);
        if !burst.is_empty() {
            self.process_left(at, burst);
        }
    }

    /// The stages of a burst of packets that the fast path leaves.
    #[inline(never)]
    pub(super) fn process_left(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
        let mut sorted = Sorted { kinds: ArrayVec::new(), v4: Lookups::new(), v6: Lookups::new() };
        let filter = FrameFilter::new(at.snapshot.port(at.arrival.link.port()).mac);
        sort(&self.tables, filter, burst, &mut sorted);
        if sorted.is_mixed(self.egress.peers.is_some()) {
            return self.process_in_order(at, burst, &sorted);
        }
        if matches!(at.arrival.origin, Origin::Port | Origin::OwnerUnknown) && self.egress.peers.is_some() {
            steer(&mut self.egress, at, burst, &mut sorted, &mut self.tally);
        }
        sorted.v4.iter_mut().for_each(|lookup| lookup.candidate = self.tables.v4.candidate(lookup.hash));
        sorted.v6.iter_mut().for_each(|lookup| lookup.candidate = self.tables.v6.candidate(lookup.hash));
        if sorted.v4.len() == burst.len() {
            return self.handle_all(at, burst, &sorted.v4);
        }
        if sorted.kinds.iter().all(|kind| matches!(kind, Kind::V6)) {
            return self.handle_all(at, burst, &sorted.v6);
        }
        let (mut v4, mut v6) = (sorted.v4.iter(), sorted.v6.iter());
        for (buffer, kind) in burst.drain(..).zip(sorted.kinds) {
            match kind {
                Kind::V4 => {
                    if let Some(lookup) = v4.next() {
                        self.handle(at, buffer, lookup);
                    }
                }
                Kind::V6 => {
                    if let Some(lookup) = v6.next() {
                        self.handle(at, buffer, lookup);
                    }
                }
                Kind::Solicitation => {
                    if let Some(lookup) = v6.next() {
                        self.solicited(at, buffer, &lookup.headers);
                    }
                }
                Kind::Arp => self.arp(at, buffer),
                // Taken out by `process_in_order`.
                Kind::Tagged | Kind::Other => self.give_to_linux(at, buffer),
                Kind::Foreign => self.foreign(at, buffer),
                Kind::Bad(reason) => self.drop(buffer, reason),
            }
        }
    }

    /// Processes the frames of a mixed burst in runs: those with VLAN tags, fragments, and others. Packets of a flow may be
    /// in all of them, and a run is handed over or sent before the next one begins.
    #[inline(never)]
    fn process_in_order(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>, sorted: &Sorted) {
        let (mut run, mut of_run) = (Burst::new(), RunKind::Others);
        for (buffer, kind) in burst.drain(..).zip(sorted.runs()) {
            if kind != of_run {
                self.process_run(at, of_run, &mut run);
                of_run = kind;
            }
            run.push(buffer);
        }
        self.process_run(at, of_run, &mut run);
    }

    fn process_run(&mut self, at: Ingress<'_>, kind: RunKind, run: &mut Burst<P::Buffer>) {
        match kind {
            _ if run.is_empty() => {}
            RunKind::Tagged => self.process_tagged(at, run),
            RunKind::Fragments | RunKind::Others => self.process_left(at, run),
        }
    }

    /// Removes the VLAN tags from frames, and processes the frames of one link after another as bursts of their own.
    /// Frames with a third tag go to the kernel, so the recursion ends.
    #[inline(never)]
    fn process_tagged(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>) {
        let mut run = Burst::new();
        let mut of_run = at;
        for mut buffer in burst.drain(..) {
            if !at.arrival.tags.is_none() {
                self.give_to_linux(at, buffer);
                continue;
            }
            let tags = Tags::of(buffer.bytes());
            let link = tags.vlan().map(|vlan| Link::new(at.arrival.link.port(), vlan));
            let Some(link) = link.filter(|link| at.snapshot.knows(*link)) else {
                self.unknown_link(at, buffer);
                continue;
            };
            if tags != of_run.arrival.tags {
                if !run.is_empty() {
                    self.process_left(of_run, &mut run);
                }
                of_run = Ingress { arrival: Arrival { link, tags, ..at.arrival }, ..at };
            }
            tags.take_off(&mut buffer);
            run.push(buffer);
        }
        if !run.is_empty() {
            self.process_left(of_run, &mut run);
        }
    }

    /// A frame of a VLAN that the kernel has no interface for. It goes to the kernel unchanged, unless it is for an
    /// address of the engine: on that VLAN the owner of the address is unknown.
    fn unknown_link(&mut self, at: Ingress<'_>, buffer: P::Buffer) {
        match destination(buffer.bytes(), at.snapshot) {
            Ok(Some(AddressRole::Vip | AddressRole::PoolUnused)) => self.drop(buffer, DropReason::UnknownVip),
            Ok(Some(AddressRole::Snat)) => self.drop(buffer, DropReason::SnatWrongPort),
            // As for untagged packets: VIPs are not known yet, nor the set of VLANs.
            Ok(Some(_)) if !at.snapshot.ready() => self.drop(buffer, DropReason::UnknownVip),
            Ok(_) => self.give_to_linux(at, buffer),
            Err(reason) => self.drop(buffer, reason),
        }
    }

    /// A frame for another station. The kernel may have an interface with that address on top of the twin, or a bridge;
    /// then it gets the frame, unless it is for an address or frontend of the gateway.
    #[cold]
    fn foreign(&mut self, at: Ingress<'_>, buffer: P::Buffer) {
        let may_be_for_kernel = || match parse(buffer.bytes()) {
            Ok(Parsed::V4(headers)) => is_for_kernel(&headers, at.snapshot),
            Ok(Parsed::V6(headers)) => is_for_kernel(&headers, at.snapshot),
            Ok(Parsed::Arp | Parsed::Other) => true,
            Err(_) => false,
        };
        if at.snapshot.is_promiscuous(at.arrival.link.port()) && may_be_for_kernel() {
            self.give_to_linux(at, buffer);
        } else {
            self.drop(buffer, DropReason::NotOurMac);
        }
    }

    /// The third stage for a burst of one family, which most bursts are.
    #[inline(never)]
    fn handle_all<A: FlowFamily>(&mut self, at: Ingress<'_>, burst: &mut Burst<P::Buffer>, lookups: &Lookups<A>) {
        for (buffer, lookup) in burst.drain(..).zip(lookups) {
            self.handle(at, buffer, lookup);
        }
    }
}

/// Whether a packet is for no address or frontend of the engine.
fn is_for_kernel<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> bool {
    let Tuple { destination, destination_port, protocol, .. } = headers.tuple;
    let is_frontend = || snapshot.frontend(destination, protocol, destination_port).is_some();
    is_group_address(destination)
        || match snapshot.role(destination) {
            AddressRole::Elsewhere | AddressRole::Broadcast => true,
            AddressRole::Twin(_) => !is_frontend(),
            AddressRole::Vip | AddressRole::Snat | AddressRole::PoolUnused => false,
        }
}

/// The role of a frame's destination address; `None` for a group, and for frames without IP.
fn destination(frame: &[u8], snapshot: &Snapshot) -> Result<Option<AddressRole>, DropReason> {
    fn role<A: Address>(headers: &Headers<A>, snapshot: &Snapshot) -> Option<AddressRole> {
        let address = headers.tuple.destination;
        (!is_group_address(address)).then(|| snapshot.role(address))
    }
    Ok(match parse(frame)? {
        Parsed::V4(headers) => role(&headers, snapshot),
        Parsed::V6(headers) => role(&headers, snapshot),
        Parsed::Arp | Parsed::Other => None,
    })
}
