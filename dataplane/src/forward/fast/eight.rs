//! Plans and writes the packets of a part of a burst: eight at a time where they are of one family, at one offset, of live flows
//! in one mode, and all leave; else one at a time.
//!
//! **Invariant:** eight packets at a time leave as the same bytes as one at a time, or stay as they are
//! (`tests/packets/eight.rs`).
//!
//! Not here: how one packet is planned (`hits`) and written (`execute`).

use super::execute::{ExecutedFamily, Executor, count};
use super::hits::{Hit, Hits, operations_of};
use super::plan::{Plan, operation};
use crate::flow::{Candidate, Direction, HotFlow, HotFlows, SeenWords, Tick};
use crate::forward::observer::Observe;
use crate::forward::rewrite::encapsulate::{self, EightOuters};
use crate::forward::rewrite::translate::EightOfFlows;
use crate::snapshot::{Exit, Tunnels};
use crate::wire::plain::head::{Head, Start, Starts, TAGGED, UNTAGGED, starts};
use crate::wire::processor::{Avx2, LANES, Lanes, Vectorised};
use crate::wire::{Buffer, Shape, TupleKey};

/// The packets of a part of a burst, to be planned by their flows and written.
pub(super) struct ForwardPart<'e, 'p, 's, B, O> {
    pub(super) hits: &'e Hits<'s>,
    pub(super) executor: Executor<'e, O>,
    /// Flows, by [`Plan::flow_bit`], of which a packet was left.
    pub(super) left: &'e mut u64,
    pub(super) part: &'p mut [B],
    pub(super) plans: &'p mut [Plan],
}

/// Packets of a part that are not planned yet, but may be: positions as bits.
#[derive(Clone, Copy, Default)]
pub(super) struct Unplanned {
    /// They open connections and have no flow.
    pub(super) opening: u32,
    /// See [`Hit::OtherFlow`].
    pub(super) of_other_flows: u32,
}

impl<B: Buffer, O: Observe<B>> Vectorised for ForwardPart<'_, '_, '_, B, O> {
    type Output = Unplanned;

    #[inline(always)]
    fn run(self, avx2: Avx2) -> Unplanned {
        let Self { hits, mut executor, left, part, plans } = self;
        let ((groups, rest), (of_groups, of_rest)) = (part.as_chunks_mut(), plans.as_chunks_mut());
        let (mut unplanned, mut position) = (Unplanned::default(), 0);
        for (group, plans) in groups.iter_mut().zip(of_groups) {
            if !executor.eight(avx2, hits, *left, group, plans) {
                executor.each(hits, left, group, plans, position, &mut unplanned);
            }
            position += LANES;
        }
        executor.each(hits, left, rest, of_rest, position, &mut unplanned);
        unplanned
    }
}

impl<B: Buffer, O: Observe<B>> ForwardPart<'_, '_, '_, B, O> {
    /// The same one packet at a time.
    pub(super) fn one_by_one(mut self) -> Unplanned {
        let mut unplanned = Unplanned::default();
        self.executor.each(self.hits, self.left, self.part, self.plans, 0, &mut unplanned);
        unplanned
    }
}

impl<O> Executor<'_, O> {
    /// Plans and writes packets one at a time, of which the first is at a position of the part.
    #[inline(never)]
    fn each<'s, B: Buffer>(
        &mut self,
        hits: &Hits<'s>,
        left: &mut u64,
        part: &mut [B],
        plans: &mut [Plan],
        position: usize,
        unplanned: &mut Unplanned,
    ) where
        O: Observe<B>,
    {
        for (position, (buffer, plan)) in (position..).zip(part.iter_mut().zip(plans)) {
            let hit = match plan.head.shape.family() {
                0 => continue,
                _ if *left & plan.flow_bit() != 0 || plan.flow == Candidate::NONE => Hit::Stays,
                Shape::V4 => self.forward::<u32, B>(hits, buffer, plan),
                _ => self.forward::<u128, B>(hits, buffer, plan),
            };
            match hit {
                Hit::Planned(_) => {}
                Hit::OtherFlow => unplanned.of_other_flows |= 1 << position,
                Hit::Stays if plan.flow == Candidate::NONE && plan.opens() => unplanned.opening |= 1 << position,
                Hit::Stays => *left |= plan.flow_bit(),
            }
        }
    }

    /// Plans and writes one packet.
    #[inline(always)]
    pub(super) fn forward<'s, A: ExecutedFamily, B: Buffer>(
        &mut self,
        hits: &Hits<'s>,
        buffer: &mut B,
        plan: &mut Plan,
    ) -> Hit<'s>
    where
        O: Observe<B>,
    {
        let hit = hits.plan::<A>(A::hot(&mut self.tables), buffer.bytes(), plan);
        if let Hit::Planned(exit) = hit
            && self.one::<A, B>(buffer, plan, exit).is_none()
        {
            plan.stays();
            return Hit::Stays;
        }
        hit
    }

    /// Plans and writes eight packets. Returns false, and leaves them as they are, unless they are alike and all leave.
    #[inline(always)]
    fn eight<'s, B: Buffer>(
        &mut self,
        avx2: Avx2,
        hits: &Hits<'s>,
        left: u64,
        group: &mut [B; LANES],
        plans: &mut [Plan; LANES],
    ) -> bool
    where
        O: Observe<B>,
    {
        let (first, shapes) = (plans[0].head.shape, Shapes::of(avx2, plans));
        if !shapes.agree(avx2, first) || left != 0 && plans.iter().any(|plan| left & plan.flow_bit() != 0) {
            return false;
        }
        match (first.family(), usize::from(first.network_offset)) {
            (Shape::V4, UNTAGGED) => self.alike::<u32, UNTAGGED, B>(avx2, hits, &shapes, group, plans),
            (Shape::V6, UNTAGGED) => self.alike::<u128, UNTAGGED, B>(avx2, hits, &shapes, group, plans),
            (Shape::V4, TAGGED) => self.alike::<u32, TAGGED, B>(avx2, hits, &shapes, group, plans),
            (Shape::V6, TAGGED) => self.alike::<u128, TAGGED, B>(avx2, hits, &shapes, group, plans),
            _ => false,
        }
    }

    /// The same for packets of one family at the offset `AT`.
    #[inline(always)]
    fn alike<'s, A: ExecutedFamily, const AT: usize, B: Buffer>(
        &mut self,
        avx2: Avx2,
        hits: &Hits<'s>,
        shapes: &Shapes,
        group: &mut [B; LANES],
        plans: &mut [Plan; LANES],
    ) -> bool
    where
        O: Observe<B>,
    {
        let of = &*A::hot(&mut self.tables);
        let Some(first) = of.flows.first() else { return false };
        let (is_udp, is_renumbered) = (shapes.are_udp(avx2), shapes.may_fragment(avx2));
        let are_to_client = Candidate::are_to_client(avx2, plans.each_ref().map(|plan| plan.flow));
        let mut eight = EightOfFlows { flows: [first; LANES], are_to_client, is_udp, is_renumbered };
        let mut exits = [&Exit::NOWHERE; LANES];
        if find_flows::<A>(hits, of, plans, &mut eight.flows, &mut exits).is_none() {
            return false;
        }
        let Some(mut starts) = starts::<AT, A::Head, _>(group) else { return false };
        let Some(live) = LiveFlows::<A>::of::<AT>(avx2, hits, &eight, &starts) else { return false };
        let operations = operations_of(eight.flows[0]);
        let measures = avx2.lanes(exits.map(Exit::measures));
        if !shapes.fit::<AT>(avx2, measures, outer_bytes::<A>(operations)) {
            return false;
        }
        let mut at = AT;
        if operations & operation::TRANSLATE != 0 {
            A::translate_eight(avx2, &eight, &live.read, &mut starts, self.identifications);
            write_links(&mut starts, &exits);
        } else if operations == operation::HOP {
            if !exits.iter().all(|exit| exit.is_on_link()) {
                return false;
            }
            A::lower_hop_limits(avx2, &live.read, &mut starts);
            write_links(&mut starts, &exits);
        } else {
            let tunnels = &self.snapshot.tunnels;
            let tunnelled = Tunnelled::<A> { tunnels, shapes, eight: &eight, read: live.read, exits: &exits, measures };
            if AT != UNTAGGED || !tunnelled.write(avx2, operations, group) {
                return false;
            }
            at = encapsulate::bytes_before(A::NETWORK, operations & operation::IN_UDP != 0);
        }
        let not_seen_now = live.not_seen_now;
        let departures = Plan::departures(avx2, measures, operations).to_array();
        for (lane, plan) in plans.iter_mut().enumerate() {
            plan.depart(departures[lane]);
            count(self.counters, eight.flows[lane], plan.flow.entry().1, plan.head.shape.packet_len);
        }
        if shapes.any_padded(avx2) {
            for (buffer, plan) in group.iter_mut().zip(&*plans) {
                buffer.truncate(at + usize::from(plan.head.shape.packet_len));
            }
        }
        self.note_eight::<A, B>(group, plans, not_seen_now, hits.now);
        true
    }

    /// Notes eight packets that were written: for the observer, and in flows that were not seen in this tick.
    #[inline(always)]
    fn note_eight<A: ExecutedFamily, B: Buffer>(&mut self, group: &[B; LANES], plans: &[Plan; LANES], not_seen_now: u8, now: Tick)
    where
        O: Observe<B>,
    {
        if O::OBSERVES || O::METERS {
            for (buffer, plan) in group.iter().zip(plans) {
                self.show::<A, B>(buffer, plan);
            }
        }
        if not_seen_now != 0 {
            see(A::hot(&mut self.tables).flows, plans, not_seen_now, now);
        }
    }
}

/// Finds the flows of eight packets by their candidates, and the exits that these lead to; `None` if one stays.
#[inline(always)]
fn find_flows<'f, 's, A: ExecutedFamily>(
    hits: &Hits<'s>,
    of: &'f HotFlows<'_, A::Key>,
    plans: &[Plan; LANES],
    flows: &mut [&'f HotFlow<A::Key>; LANES],
    exits: &mut [&'s Exit; LANES],
) -> Option<()> {
    for (lane, plan) in plans.iter().enumerate() {
        let flow = of.flows.get(plan.flow.entry().0)?;
        (flows[lane], exits[lane]) = (flow, hits.exit::<A>(flow, of.routes, plan)?);
    }
    Some(())
}

/// Eight packets of live flows that go into tunnels.
struct Tunnelled<'e, A: ExecutedFamily> {
    tunnels: &'e Tunnels,
    shapes: &'e Shapes,
    eight: &'e EightOfFlows<'e, A::Key>,
    read: A::Read,
    exits: &'e [&'e Exit; LANES],
    /// See [`Exit::measures`].
    measures: Lanes,
}

impl<A: ExecutedFamily> Tunnelled<'_, A> {
    /// Puts outer headers before the packets. Returns false, and leaves them as they are, where that takes a longer look.
    #[inline(always)]
    fn write<B: Buffer>(&self, avx2: Avx2, operations: u8, group: &mut [B; LANES]) -> bool {
        if operations & operation::IN_UDP != 0 { self.put::<true, B>(avx2, group) } else { self.put::<false, B>(avx2, group) }
    }

    #[inline(always)]
    fn put<const IN_UDP: bool, B: Buffer>(&self, avx2: Avx2, group: &mut [B; LANES]) -> bool {
        let Self { tunnels, shapes, eight, read, exits, measures } = *self;
        let of_port = A::tunnel_sources(tunnels, exits[0].port);
        let is_to_other_family = |flow: &&HotFlow<A::Key>| flow.key(Direction::ToClient).has_no_source();
        let has_sum = |buffer: &B| A::Head::of(buffer.bytes(), UNTAGGED).is_some_and(|head| A::has_inner_sum(head));
        let (ports, first_port) = (measures & avx2.splat(Exit::PORT), exits[0].measures() & Exit::PORT);
        if ports.equals(avx2.splat(first_port)).bits() != u8::MAX
            || eight.is_renumbered.bits() != 0
            || eight.flows.iter().any(is_to_other_family)
            || IN_UDP && eight.is_udp.bits() != 0 && !group.iter().all(has_sum)
        {
            return false;
        }
        let Some(sources) = encapsulate::outer_sources(of_port, shapes.entropy, IN_UDP) else { return false };
        if !encapsulate::prepend(group, encapsulate::bytes_before(A::NETWORK, IN_UDP) - UNTAGGED) {
            return false;
        }
        let of = EightOuters {
            flows: eight.flows,
            read,
            exits: *exits,
            packet_lens: shapes.packet_lens(avx2),
            entropy: shapes.entropy,
            sources: &sources,
            has_one_source: of_port.len() == 1,
            gue: tunnels.gue_destination_port,
        };
        A::write_outers::<IN_UDP>(avx2, &of, group);
        true
    }
}

/// Bytes of the outer headers that packets get.
#[inline(always)]
#[allow(clippy::cast_possible_truncation)] // at most 48
fn outer_bytes<A: ExecutedFamily>(operations: u8) -> u32 {
    match operations & (operation::ENCAPSULATE | operation::IN_UDP) {
        0 => 0,
        operation::ENCAPSULATE => (encapsulate::bytes_before(A::NETWORK, false) - UNTAGGED) as u32,
        _ => (encapsulate::bytes_before(A::NETWORK, true) - UNTAGGED) as u32,
    }
}

/// Writes the link headers of eight packets, of `AT` bytes.
#[inline(always)]
fn write_links<const AT: usize, H: Head>(starts: &mut Starts<'_, AT, H>, exits: &[&Exit; LANES]) {
    for (Start { link, .. }, exit) in starts.iter_mut().zip(exits) {
        if AT == UNTAGGED {
            let _ = exit.write_addresses(link); // it is long enough
        } else {
            exit.write_link(link);
        }
    }
}

/// Marks the flows of some packets as seen.
#[inline(never)]
fn see<K: TupleKey>(flows: &mut [HotFlow<K>], plans: &[Plan; LANES], lanes: u8, now: Tick) {
    for (_, plan) in (0..).zip(plans).filter(|(lane, _)| lanes >> lane & 1 != 0) {
        if let Some(flow) = flows.get_mut(plan.flow.entry().0) {
            flow.see(now);
        }
    }
}

/// The flows of eight packets, which have their addresses and ports and one mode, and are not over.
struct LiveFlows<A: ExecutedFamily> {
    read: A::Read,
    /// The flows of which the last packet was in another tick, as bits.
    not_seen_now: u8,
}

impl<A: ExecutedFamily> LiveFlows<A> {
    /// `None` if they are not so.
    #[inline(always)]
    fn of<const AT: usize>(
        avx2: Avx2,
        hits: &Hits<'_>,
        eight: &EightOfFlows<'_, A::Key>,
        starts: &Starts<'_, AT, A::Head>,
    ) -> Option<Self> {
        let read = A::read(avx2, eight, starts);
        let seen = A::seen(&read);
        let elapsed = avx2.splat(SeenWords::minuend(hits.now)) - seen;
        let are_recent = elapsed.min(avx2.splat(SeenWords::below(hits.shortest))).equals(elapsed);
        let mode = avx2.splat(eight.flows[0].seen_word() & SeenWords::MODE);
        let are_live = A::are_of_flows(avx2, &read) & are_recent & (seen & avx2.splat(SeenWords::MODE)).equals(mode);
        let seen_now = (elapsed & avx2.splat(!SeenWords::BELOW)).equals(avx2.splat(0)).bits();
        (are_live.bits() == u8::MAX).then_some(Self { read, not_seen_now: !seen_now })
    }
}

/// The [`Shape`]s of eight packets, a word of each in one register.
struct Shapes {
    /// Bytes of the packets (bits 0 to 15), their offsets (16 to 23) and [`Shape::kind`] (24 to 31).
    heads: Lanes,
    /// The upper halves of hashes.
    entropy: Lanes,
    /// [`Shape::PADDED`] and [`Shape::FRAGMENTABLE`] (bits 0 to 7).
    more: Lanes,
}

impl Shapes {
    #[inline(always)]
    fn of(avx2: Avx2, plans: &[Plan; LANES]) -> Self {
        let [_, entropy, heads, more] = avx2.columns(plans.each_ref().map(Plan::row));
        Self { heads, entropy, more }
    }

    /// Whether the packets are of one family, at one offset: those of the first.
    #[inline(always)]
    fn agree(&self, avx2: Avx2, first: Shape) -> bool {
        let word = |kind, offset| avx2.splat(u32::from(kind) << 24 | u32::from(offset) << 16);
        let of_first: Lanes = word(first.family(), first.network_offset);
        (self.heads & word(Shape::FAMILY, u8::MAX)).equals(of_first).bits() == u8::MAX
    }

    /// Bytes of the packets.
    #[inline(always)]
    fn packet_lens(&self, avx2: Avx2) -> Lanes {
        self.heads & avx2.splat(0xffff)
    }

    /// All ones for packets of UDP.
    #[inline(always)]
    fn are_udp(&self, avx2: Avx2) -> Lanes {
        let bit = avx2.splat(u32::from(Shape::UDP) << 24);
        (self.heads & bit).equals(bit)
    }

    /// All ones for packets that routers may fragment.
    #[inline(always)]
    fn may_fragment(&self, avx2: Avx2) -> Lanes {
        let bit = avx2.splat(Shape::FRAGMENTABLE.into());
        (self.more & bit).equals(bit)
    }

    /// Whether bytes follow any packet in its frame.
    #[inline(always)]
    fn any_padded(&self, avx2: Avx2) -> bool {
        (self.more & avx2.splat(Shape::PADDED.into())).equals(avx2.splat(0)).bits() != u8::MAX
    }

    /// Whether each packet with this many `more` bytes is no longer than the MTU of its exit, and the link header of this has
    /// `AT` bytes. `measures` are those of the exits ([`Exit::measures`]).
    #[inline(always)]
    #[allow(clippy::cast_possible_truncation)] // at most eighteen
    fn fit<const AT: usize>(&self, avx2: Avx2, measures: Lanes, more: u32) -> bool {
        let word = |value| avx2.splat(value);
        let too_long = (self.packet_lens(avx2) + word(more)).exceeds(measures & word(0xffff));
        let other_header = (measures ^ word((AT as u32) << 24)) & word(0xff << 24);
        (too_long | other_header).equals(word(0)).bits() == u8::MAX
    }
}
