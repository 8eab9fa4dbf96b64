//! A worker's flows on their way from one process to the next: a worker saves them at its end, and its successor
//! restores them with the first complete snapshot (docs/internals/decisions/0050-flows-outlive-a-restart.md).
//!
//! Each worker reads all parts and takes the flows that it owns now. Owners are the same as before where the seed, the
//! number of workers and the method of steering are. Otherwise two workers may own the two directions of a `nat` flow:
//! the owner of the replies, whose share has the SNAT port, keeps the flow, and the owner of the client's packets gets
//! a copy, except of UDP, whose next datagram makes a new flow.
//!
//! **Invariants:** before its first packet under a complete snapshot, a worker has all flows that it will get. The two
//! halves of a flow end independently, so neither gives its port back: it stays used until the process ends.
//!
//! Not here: the format (`saved_flows`).

use std::collections::BTreeMap;
use std::net::IpAddr;

use arrayvec::ArrayVec;
use hashbrown::{HashMap, HashSet};
use proto::limits::{SNAT_PORT_FIRST, SNAT_PORT_LAST};

use super::saved_flows::{BackendName, FlowFate, PartWriter, SavedFlows, SavedPart};
use super::shadow_flows::{Owned, ReceivingFlows, is_owned};
use crate::flow::{
    BackendId, Direction, Flow, FlowMode, HeaderStage, PoolId, Shift, SnatPorts, SnatTarget, TargetSlot, Tick, Ticks, UsedPort,
};
use crate::forward::decide::{FlowFamily, WorkerFlows};
use crate::snapshot::{Backend, Snapshot};
use crate::wire::{Address, TableHash, Tuple, protocol};

/// Idle times above this are past every limit: entries store times of 24 bits.
const IDLE_MAX: u32 = 1 << 23;

/// Flows that are inserted together, so that the memory of one is fetched while others are decoded.
const TOGETHER: usize = 16;

/// The fates of the flows of one worker.
type Fates = [u64; FlowFate::ALL.len()];

/// The ports that were in use and that no pool took over.
#[derive(Default)]
struct RefusedPorts {
    /// Whole pools.
    pools: HashSet<u32, TableHash>,
    /// Single ports of pools that hold others. Their flows go on.
    ports: HashSet<(u32, u16), TableHash>,
}

/// The used ports of one pool, and what they are used towards.
struct AdoptedPool<A> {
    target: SnatTarget<A>,
    snat: A,
    used: Vec<UsedPort>,
}

/// The pools to adopt, in the order of their numbers.
type AdoptedPools<A> = BTreeMap<u32, AdoptedPool<A>>;

/// A part whose backends get their numbers when they are first named.
struct NumberedPart<'s> {
    part: PartWriter,
    snapshot: &'s Snapshot,
    numbers: HashMap<BackendId, u32, TableHash>,
}

impl NumberedPart<'_> {
    /// The number of a backend; `None` of one that is gone.
    fn number(&mut self, id: BackendId) -> Option<u32> {
        if let Some(number) = self.numbers.get(&id) {
            return Some(*number);
        }
        let backend = self.snapshot.backend(id)?;
        self.part.backend(&backend.service, backend.protocol, backend.address);
        let number = u32::try_from(self.numbers.len()).ok()?;
        self.numbers.insert(id, number);
        Some(number)
    }
}

/// The flows of this worker, its resting ports, and, from the first worker, the clients of session affinity.
pub(in crate::forward) fn save(flows: &WorkerFlows, owned: Owned<'_>, snapshot: &Snapshot, now: Tick, is_first: bool) -> Vec<u8> {
    let mut part = NumberedPart { part: PartWriter::default(), snapshot, numbers: HashMap::default() };
    save_family::<u32>(flows, owned, &mut part, snapshot, now);
    save_family::<u128>(flows, owned, &mut part, snapshot, now);
    save_resting_ports(&flows.ports, &mut part, snapshot, now);
    if let Some(affinity) = snapshot.affinity.as_ref().filter(|_| is_first) {
        for (client, backend, left) in affinity.clients(now) {
            if let Some(number) = part.number(backend) {
                part.part.client(client, number, left);
            }
        }
    }
    part.part.finish()
}

fn save_family<A: FlowFamily>(
    flows: &WorkerFlows,
    owned: Owned<'_>,
    part: &mut NumberedPart<'_>,
    snapshot: &Snapshot,
    now: Tick,
) {
    for flow in A::table(&flows.tables).flows() {
        // The owner of the replies saves a flow that two workers share.
        let is_copy = flow.has_foreign_port() && !is_owned(owned, snapshot, &flow.tuple(Direction::ToClient));
        let idle_timeout = snapshot.backend(flow.backend).and_then(|backend| backend.idle_timeout);
        if is_copy || flows.limits.is_over(&flow, idle_timeout, now) {
            continue;
        }
        if let Some(number) = part.number(flow.backend) {
            part.part.flow(&flow, number, now);
        }
    }
}

fn save_resting_ports(ports: &SnatPorts, part: &mut NumberedPart<'_>, snapshot: &Snapshot, now: Tick) {
    let mut pools: BTreeMap<u32, Vec<(u16, u16)>> = BTreeMap::new();
    ports.resting(now, |pool, port, age| {
        pools.entry(pool.0).or_default().push((port, u16::try_from(age.0).unwrap_or(u16::MAX)));
    });
    let backends = snapshot.backends.all().map(|(id, backend)| (backend.target, (id, backend.address.ip())));
    let of_target: HashMap<TargetSlot, (BackendId, IpAddr), TableHash> =
        if pools.is_empty() { HashMap::default() } else { backends.collect() };
    for (pool, ports) in pools {
        let (target, address) = PoolId(pool).parts();
        let Some(&(backend, ip)) = of_target.get(&target) else { continue };
        let snat = if ip.is_ipv4() { snat_at::<u32>(snapshot, address) } else { snat_at::<u128>(snapshot, address) };
        if let Some((number, snat)) = part.number(backend).zip(snat) {
            part.part.pool(number, snat, &ports);
        }
    }
}

impl ReceivingFlows<'_> {
    /// Takes the flows that this worker owns, and reports what became of them.
    #[cold]
    pub(in crate::forward) fn restore<'s>(&mut self, snapshot: &'s Snapshot, saved: &SavedFlows, now: Tick, is_first: bool) {
        let named = |(id, backend): (BackendId, &'s Backend)| {
            ((&*backend.service, backend.protocol, backend.address), (id, backend.target))
        };
        let known: HashMap<_, (BackendId, TargetSlot), TableHash> = snapshot.backends.all().map(named).collect();
        let known_as = |name: BackendName| Some((*known.get(&(&name.service, name.protocol, name.address))?, name));
        let parts: Vec<(SavedPart<'_>, KnownBackends)> =
            saved.parts().map(|part| (part, part.backends().unwrap_or_default().into_iter().map(known_as).collect())).collect();
        let mut fates = Fates::default();
        self.restore_family::<u32>(snapshot, saved.saved(), &parts, now, &mut fates);
        self.restore_family::<u128>(snapshot, saved.saved(), &parts, now, &mut fates);
        if let Some(affinity) = snapshot.affinity.as_ref().filter(|_| is_first) {
            let elapsed = now.since(saved.saved()).0.div_ceil(8);
            for (part, backends) in &parts {
                for (client, number, left) in part.clients() {
                    if let Some(Some(((id, _), _))) = backends.get(number as usize) {
                        affinity.restore(client, *id, left.saturating_sub(elapsed), now);
                    }
                }
            }
        }
        saved.report().add(fates);
    }

    /// First adopts the pools of all SNAT ports in use, then inserts the flows whose pools could be adopted.
    fn restore_family<A: FlowFamily>(
        &mut self,
        snapshot: &Snapshot,
        saved: Tick,
        parts: &[(SavedPart<'_>, KnownBackends)],
        now: Tick,
        fates: &mut Fates,
    ) {
        let mut pools = AdoptedPools::<A>::new();
        let mut flows = 0;
        for (part, backends) in parts {
            for (flow, number) in part.flows::<A>(saved).flatten() {
                flows += 1;
                if let Ok((flow, target, pool)) = self.mine(snapshot, flow, backends.get(number as usize), now)
                    && pool != PoolId::NONE
                {
                    use_port(&mut pools, pool, target, flow.snat, (flow.snat_port, None));
                }
            }
            self.resting_ports(snapshot, part, backends, now.since(saved), &mut pools);
        }
        let refused = self.adopt_pools(pools, now);
        if flows == 0 {
            return;
        }
        let mut together = ArrayVec::<Flow<A>, TOGETHER>::new();
        for (part, backends) in parts {
            for saved_flow in part.flows::<A>(saved) {
                let fate = match saved_flow.map(|(flow, number)| self.mine(snapshot, flow, backends.get(number as usize), now)) {
                    Some(Ok((_, _, pool))) if refused.pools.contains(&pool.0) => FlowFate::PortGone,
                    Some(Ok((mut flow, _, pool))) => {
                        if refused.ports.contains(&(pool.0, flow.snat_port)) {
                            flow.snat_pool = PoolId::NONE;
                        }
                        let table = A::table(&self.flows.tables);
                        for direction in [Direction::ToBackend, Direction::ToClient] {
                            table.prefetch(table.hash(&flow.tuple(direction)));
                        }
                        together.push(flow);
                        if together.is_full() {
                            self.insert_restored(&mut together, fates);
                        }
                        continue;
                    }
                    Some(Err(Some(fate))) => fate,
                    Some(Err(None)) => continue,
                    None => FlowFate::Invalid,
                };
                fates[fate as usize] += 1;
            }
        }
        self.insert_restored(&mut together, fates);
    }

    /// Takes over pools. Where flows are replicated, a pool has its own ports only: ports of partners lie anywhere,
    /// which a pool in its order cannot hold. New flows leave out those that are in use or rest.
    fn adopt_pools<A: FlowFamily>(&mut self, pools: AdoptedPools<A>, now: Tick) -> RefusedPorts {
        let (mut refused, is_replicated) = (RefusedPorts::default(), A::table(&self.flows.tables).is_replicated());
        for (id, AdoptedPool { target, snat, mut used }) in pools {
            used.sort_unstable();
            used.dedup_by_key(|(port, _)| *port); // `None` sorts first: a port in use does not rest
            if !is_replicated {
                if !self.flows.ports.adopt(PoolId(id), &target, snat, &used, now) {
                    refused.pools.insert(id);
                }
                continue;
            }
            let (own, mut others) = self.flows.ports.split_by_order(&target, snat, used);
            if !self.flows.ports.adopt(PoolId(id), &target, snat, &own, now) {
                others.extend(own);
            }
            for (port, rested) in others {
                refused.ports.insert((id, port));
                if let Some(age) = rested {
                    let SnatTarget { address: source, port: source_port, protocol, .. } = target;
                    let reply = Tuple { source, destination: snat, source_port, destination_port: port, protocol };
                    self.flows.table::<A>().rest_port(&reply, Tick(now.0.wrapping_sub(age.0)));
                }
            }
        }
        refused
    }

    /// Adds the ports that rest, as far as they are in this worker's share.
    fn resting_ports<A: FlowFamily>(
        &self,
        snapshot: &Snapshot,
        part: &SavedPart<'_>,
        backends: &KnownBackends,
        elapsed: Ticks,
        pools: &mut AdoptedPools<A>,
    ) {
        for (number, snat, ports) in part.pools() {
            let Some(Some(((_, slot), name))) = backends.get(number as usize) else { continue };
            let (Some(snat), Some(address)) = (A::from_ip(snat), A::from_ip(name.address.ip())) else { continue };
            let Some(index) = snat_index(snapshot, snat) else { continue };
            let (port, protocol) = (name.address.port(), name.protocol.number());
            let target = SnatTarget { slot: *slot, address, port, protocol };
            for (snat_port, age) in ports {
                let reply =
                    Tuple { source: address, destination: snat, source_port: port, destination_port: snat_port, protocol };
                if is_owned(self.owned, snapshot, &reply) {
                    let age = Ticks(u32::from(age).saturating_add(elapsed.0));
                    use_port(pools, PoolId::new(*slot, index), target, snat, (snat_port, Some(age)));
                }
            }
        }
    }

    /// The flow as this worker has it, the target of its SNAT port, and the pool in which this worker counts the port
    /// as used. `Err`: it does not go on; without a fate, because another worker counts it.
    fn mine<A: FlowFamily>(
        &self,
        snapshot: &Snapshot,
        mut flow: Flow<A>,
        backend: Option<&KnownBackend>,
        now: Tick,
    ) -> Result<(Flow<A>, SnatTarget<A>, PoolId), Option<FlowFate>> {
        let to_backend = is_owned(self.owned, snapshot, &flow.tuple(Direction::ToBackend));
        let to_client =
            if flow.mode.is_two_way() { is_owned(self.owned, snapshot, &flow.tuple(Direction::ToClient)) } else { to_backend };
        if !to_backend && !to_client {
            return Err(None);
        }
        let Some(((id, slot), name)) = backend.ok_or(FlowFate::Invalid)? else { return Err(Some(FlowFate::BackendGone)) };
        let is_towards = (flow.backend_address.ip(), flow.backend_port) == (name.address.ip(), name.address.port());
        if flow.protocol != name.protocol.number() || flow.mode.is_two_way() && !is_towards {
            return Err(Some(FlowFate::Invalid));
        }
        let idle_timeout = snapshot.backend(*id).and_then(|backend| backend.idle_timeout);
        let is_old = now.0.wrapping_sub(flow.last_seen.0) > IDLE_MAX;
        if is_old || self.flows.limits.is_over(&flow, idle_timeout, now) {
            return Err(Some(FlowFate::Idle));
        }
        flow.backend = *id;
        flow.frontend = snapshot.number_of(flow.vip, flow.protocol, flow.vip_port);
        let mut pool = PoolId::NONE;
        if flow.mode == FlowMode::Nat {
            let index = snat_index(snapshot, flow.snat).filter(|_| (SNAT_PORT_FIRST..=SNAT_PORT_LAST).contains(&flow.snat_port));
            let index = index.ok_or(FlowFate::PortGone)?;
            let (is_shared, is_udp) = (to_backend != to_client, flow.protocol == protocol::UDP);
            // A worker sees only half of a split handshake, which the client repeats, or of a header on its way.
            let is_half_known = flow.state.shakes_hands() || flow.shift.is_some_and(|shift| !shift.is_taken());
            if is_shared && (is_half_known || is_udp && to_backend) {
                return Err(Some(FlowFate::PortGone));
            }
            if is_shared && let Some(shift) = flow.shift {
                // The half of the client's packets sees no acknowledgement that would settle it.
                flow.shift = Some(Shift::new(shift.version(), shift.header_len(), HeaderStage::Settled, 0));
            }
            if to_client && !(is_shared && A::table(&self.flows.tables).is_replicated()) {
                pool = PoolId::new(*slot, index);
            }
            // The other half may outlive this one, so the flow does not give the port back at its end.
            flow.snat_pool = if is_shared && !is_udp { PoolId::NONE } else { pool };
        }
        let target = SnatTarget { slot: *slot, address: flow.backend_address, port: flow.backend_port, protocol: flow.protocol };
        Ok((flow, target, pool))
    }

    fn insert_restored<A: FlowFamily>(&mut self, together: &mut ArrayVec<Flow<A>, TOGETHER>, fates: &mut Fates) {
        for flow in together.drain(..) {
            fates[self.insert_one(&flow) as usize] += 1;
        }
    }

    fn insert_one<A: FlowFamily>(&mut self, flow: &Flow<A>) -> FlowFate {
        if self.flows.room() == 0 {
            self.release_restored(flow);
            return FlowFate::NoRoom;
        }
        let table = self.flows.table::<A>();
        let (to_backend, to_client) = (flow.tuple(Direction::ToBackend), flow.tuple(Direction::ToClient));
        // A flow with the same replies holds the port, and one flow cannot have the same packets in both directions.
        if flow.mode.is_two_way() && (table.search(table.hash(&to_client), &to_client).is_some() || to_backend == to_client) {
            return FlowFate::Invalid;
        }
        if table.search(table.hash(&to_backend), &to_backend).is_some() {
            self.release_restored(flow);
            return FlowFate::Invalid;
        }
        if table.insert(*flow).is_err() {
            self.release_restored(flow);
            return FlowFate::NoRoom;
        }
        self.counters.flow_joined(flow.counter_slot());
        FlowFate::Restored
    }

    fn release_restored<A: Address>(&mut self, flow: &Flow<A>) {
        if let Some(lease) = flow.snat_lease() {
            self.flows.ports.release(lease.pool, lease.port, flow.last_seen);
        }
    }
}

/// A backend of the process before, as it is called now; `None` if it is gone.
type KnownBackend = Option<((BackendId, TargetSlot), BackendName)>;
type KnownBackends = Vec<KnownBackend>;

fn use_port<A: Address>(pools: &mut AdoptedPools<A>, id: PoolId, target: SnatTarget<A>, snat: A, port: UsedPort) {
    pools.entry(id.0).or_insert_with(|| AdoptedPool { target, snat, used: Vec::new() }).used.push(port);
}

/// The index of a SNAT address.
fn snat_index<A: Address>(snapshot: &Snapshot, snat: A) -> Option<u16> {
    A::of(snapshot).snat.iter().flatten().find(|one| one.address == snat).map(|one| one.index)
}

/// The SNAT address with an index.
fn snat_at<A: Address>(snapshot: &Snapshot, index: u16) -> Option<IpAddr> {
    A::of(snapshot).snat.iter().flatten().find(|one| one.index == index).map(|one| one.address.ip())
}
