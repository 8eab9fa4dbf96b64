//! The task that follows Linux: it reads the sockets, publishes the network, and sends neighbour requests to Linux.
//!
//! Invariant: nothing is published before the first complete dump, and a partly read dump is never published. Not here:
//! clean-up at exit. The twins stay, and Linux does not probe neighbours on an interface without carrier.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_queue::ArrayQueue;
use dataplane::{Link, Network};
use netlink_packet_core::{NLM_F_CREATE, NLM_F_MULTIPART, NLM_F_REPLACE, NetlinkPayload};
use netlink_packet_route::address::AddressMessage;
use netlink_packet_route::link::LinkMessage;
use netlink_packet_route::neighbour::NeighbourMessage;
use netlink_packet_route::route::RouteMessage;
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::groups::{GroupMemberships, solicited_node};
use super::neighbours::{NeighbourKey, NeighbourRequests, RequestKind, message};
use super::routes::ROUTES_MAX;
use super::socket::{DumpOutcome, NetlinkError, Socket};
use super::tables::{Effect, Tables};
use crate::agent::compile_loop::AnsweredAddresses;
use crate::agent::watch::send_if_changed;

/// Multicast groups, group n as bit n - 1: links, neighbours, IPv4 and IPv6 addresses and routes, next hop objects.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 0x8000_0000;
/// RTM_DELNEXTHOP. Routes through a next hop object are removed with it, without messages of their own. (FRR creates
/// such objects. When an object changes, Linux sends its routes.)
const NEXT_HOP_REMOVED: u16 = 105;
/// Changes within this time are published together.
const COALESCE: Duration = Duration::from_millis(2);
/// Pause after publishing and after reading all tables, in multiples of the time that it took: publishing takes at most
/// a tenth of the time, and reading a third. (Measured with a million routes in a debug build: 0.3 s to publish, 11 s
/// to read, 175 MB in all.)
const REST_PER_PUBLISHING: u32 = 9;
const REST_PER_READING: u32 = 2;
/// Poll interval of the workers' requests, which cannot wake this task. A packet waits up to a second for its
/// neighbour.
const REQUESTS_EVERY: Duration = Duration::from_millis(5);
/// The same after [`REQUESTS_IDLE_AFTER`] without requests: 5 ms would keep an idle gateway at more than 1 % of a core.
const REQUESTS_EVERY_WHEN_IDLE: Duration = Duration::from_millis(20);
const REQUESTS_IDLE_AFTER: Duration = Duration::from_secs(1);
/// How often next hops are compared with the managed neighbours if nothing else triggers it.
const NEXT_HOPS_EVERY: Duration = Duration::from_secs(1);

/// Capacity of the workers' request queue: twice the number of requests that may be pending.
pub const REQUESTS_MAX: usize = 1024;

/// The task that follows Linux. Cloned for each start.
#[derive(Clone, Debug)]
pub struct NetlinkFollower {
    /// Port names in the order of [`dataplane::PortIndex`]. A twin has the name of its port.
    pub ports: Vec<String>,
    /// Next hops of the snapshots, which Linux keeps resolved.
    pub next_hops: watch::Receiver<BTreeSet<(Link, IpAddr)>>,
    /// Addresses for which the engine answers. Linux joins the multicast groups in which neighbours ask for them.
    pub answered: watch::Receiver<AnsweredAddresses>,
    /// On-link clients whose neighbour entry a worker needs. Workers push and never wait.
    pub requests: Arc<ArrayQueue<(Link, IpAddr)>>,
    /// The published network; first changed when all tables have been read.
    pub network: watch::Sender<Network>,
}

impl NetlinkFollower {
    /// Follows Linux until its future is dropped. Runs in the network namespace of the thread that polls it first.
    ///
    /// # Errors
    /// When a socket fails. A new start is safe and reads all tables again.
    pub async fn run(mut self) -> Result<Infallible, NetlinkError> {
        let mut changes = Socket::open(GROUPS)?;
        let mut follower = Follower {
            tables: Tables::new(&self.ports),
            names: self.ports.clone(),
            requests: Socket::open(0)?,
            neighbour_requests: NeighbourRequests::default(),
            groups: GroupMemberships::default(),
            reading: Debounce { pending: true, not_before: Instant::now() },
            publishing: Debounce { pending: false, not_before: Instant::now() },
            complete: false,
            excess_logged: false,
        };
        let (mut ask_clients_at, mut last_request) = (Instant::now(), Instant::now());
        let mut ask_next_hops = interval(NEXT_HOPS_EVERY);
        ask_next_hops.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut next_hops_open, mut answered_open) = (true, true);
        loop {
            let (read, publish) = (follower.reading, follower.publishing);
            let groups_pending = follower.groups.is_pending();
            tokio::select! {
                outcome = changes.receive(|m| follower.apply(&m)) => match outcome {
                    Err(NetlinkError::Overrun) => {
                        tracing::info!("the kernel dropped netlink messages; reading its tables again");
                        // Before reading, so that no older message is applied on top of the new tables.
                        changes.drain()?;
                        follower.reading.request();
                    }
                    outcome => outcome?,
                },
                () = sleep_until(read.not_before), if read.pending => {
                    follower.read().await?;
                    follower.update_groups(&mut self.answered);
                }
                () = std::future::ready(()), if groups_pending => follower.groups.advance(),
                changed = self.answered.changed(), if answered_open => {
                    answered_open = changed.is_ok();
                    follower.update_groups(&mut self.answered);
                }
                () = sleep_until(publish.not_before), if publish.pending && follower.complete => {
                    follower.publish(&self.network);
                    follower.request_next_hops(&mut self.next_hops).await?;
                }
                changed = self.next_hops.changed(), if next_hops_open => {
                    next_hops_open = changed.is_ok();
                    follower.request_next_hops(&mut self.next_hops).await?;
                }
                _ = ask_next_hops.tick() => {
                    follower.request_next_hops(&mut self.next_hops).await?;
                    follower.request_twins(&mut changes).await?;
                    if follower.groups.is_refused() {
                        follower.update_groups(&mut self.answered);
                    }
                }
                () = sleep_until(ask_clients_at) => {
                    if !self.requests.is_empty() {
                        last_request = Instant::now();
                    }
                    follower.request_clients(&self.requests).await?;
                    let is_idle = last_request.elapsed() > REQUESTS_IDLE_AFTER;
                    ask_clients_at = Instant::now() + if is_idle { REQUESTS_EVERY_WHEN_IDLE } else { REQUESTS_EVERY };
                }
            }
        }
    }
}

/// Coalesces triggers of an action, and limits its share of the time.
#[derive(Clone, Copy)]
struct Debounce {
    pending: bool,
    not_before: Instant,
}

impl Debounce {
    fn request(&mut self) {
        if !self.pending {
            self.pending = true;
            self.not_before = self.not_before.max(Instant::now() + COALESCE);
        }
    }

    fn done(&mut self, start: Instant, rest_per_work: u32) {
        self.pending = false;
        self.not_before = Instant::now() + start.elapsed() * rest_per_work;
    }
}

struct Follower {
    names: Vec<String>,
    tables: Tables,
    requests: Socket,
    neighbour_requests: NeighbourRequests,
    groups: GroupMemberships,
    /// Reading all tables again.
    reading: Debounce,
    publishing: Debounce,
    /// All tables have been read once.
    complete: bool,
    /// The warning about too many routes was logged.
    excess_logged: bool,
}

impl Follower {
    fn apply(&mut self, message: &netlink_packet_core::NetlinkMessage<RouteNetlinkMessage>) {
        let effect = match &message.payload {
            // A change is not part of a dump, even if its flags say so.
            NetlinkPayload::InnerMessage(inner) => self.tables.apply(inner, message.header.flags & !NLM_F_MULTIPART),
            _ if message.header.message_type == NEXT_HOP_REMOVED => Effect::Stale,
            _ => Effect::Nothing,
        };
        match effect {
            Effect::Nothing => {}
            Effect::Changed => self.publishing.request(),
            Effect::Stale => self.reading.request(),
        }
    }

    /// Reads the kernel's tables into new ones, which replace the old ones.
    async fn read(&mut self) -> Result<(), NetlinkError> {
        let start = Instant::now();
        let mut tables = Tables::new(&self.names);
        let mut outcome = DumpOutcome::Consistent;
        for (message, what) in dumps() {
            let dump = self.requests.dump(message, what, |m| {
                tables.apply(m, NLM_F_MULTIPART);
            });
            if dump.await? == DumpOutcome::Interrupted {
                outcome = DumpOutcome::Interrupted;
            }
        }
        self.tables = tables;
        self.complete = true;
        self.neighbour_requests.forget_next_hops();
        self.reading.done(start, REST_PER_READING);
        if outcome == DumpOutcome::Interrupted {
            self.reading.request();
        }
        self.publishing.request();
        Ok(())
    }

    fn publish(&mut self, network: &watch::Sender<Network>) {
        let start = Instant::now();
        self.log_excess();
        let new = self.tables.network();
        send_if_changed(network, new);
        self.publishing.done(start, REST_PER_PUBLISHING);
    }

    fn log_excess(&mut self) {
        let excess = self.tables.routes().excess();
        if excess > 0 && !self.excess_logged {
            tracing::warn!(excess, "Linux has more than {ROUTES_MAX} routes over the gateway's ports; further ones are ignored");
        }
        self.excess_logged = excess > 0;
    }

    /// Sets the wanted multicast groups: those of the answered IPv6 addresses, on the interfaces that exist.
    fn update_groups(&mut self, answered: &mut watch::Receiver<AnsweredAddresses>) {
        let answered = answered.borrow_and_update();
        let mut indices = BTreeMap::new();
        let v6_groups = answered.iter().filter_map(|&(link, address, _)| match address {
            IpAddr::V6(address) => Some((link, solicited_node(address))),
            IpAddr::V4(_) => None,
        });
        let wanted = v6_groups
            .filter_map(|(link, group)| Some(((*indices.entry(link).or_insert_with(|| self.tables.index_of(link)))?, group)));
        self.groups.set_wanted(&wanted.collect());
    }

    async fn request_next_hops(&mut self, next_hops: &mut watch::Receiver<BTreeSet<NeighbourKey>>) -> Result<(), NetlinkError> {
        let wanted = next_hops.borrow_and_update().clone();
        for (kind, key) in self.neighbour_requests.next_hops(Instant::now().into_std(), &wanted, self.tables.neighbours()) {
            self.request_neighbour(kind, key).await?;
        }
        Ok(())
    }

    /// Requests the state of the twins: an interface in another namespace that is stacked on a twin makes it
    /// promiscuous without a message (measured on Linux 6.18, macvlan).
    async fn request_twins(&self, changes: &mut Socket) -> Result<(), NetlinkError> {
        for index in self.tables.twins() {
            let mut message = LinkMessage::default();
            message.header.index = index;
            changes.ask(RouteNetlinkMessage::GetLink(message)).await?;
        }
        Ok(())
    }

    async fn request_clients(&mut self, requests: &ArrayQueue<NeighbourKey>) -> Result<(), NetlinkError> {
        // At most one queue's worth at a time, so that the kernel's changes are read in between.
        for _ in 0..REQUESTS_MAX {
            let Some(key) = requests.pop() else { break };
            if self.neighbour_requests.client(Instant::now().into_std(), key, self.tables.neighbours()) {
                self.request_neighbour(RequestKind::Resolve, key).await?;
            }
        }
        Ok(())
    }

    async fn request_neighbour(&mut self, kind: RequestKind, (link, address): NeighbourKey) -> Result<(), NetlinkError> {
        let Some(index) = self.tables.index_of(link) else { return Ok(()) };
        let message = RouteNetlinkMessage::NewNeighbour(message(kind, index, address));
        match self.requests.request(message, NLM_F_CREATE | NLM_F_REPLACE, "resolve a neighbour").await {
            // The interface may be down or gone, or the neighbour table full. The request is repeated later anyway.
            Err(NetlinkError::Refused { source, .. }) => {
                tracing::debug!(%address, ?kind, %source, "Linux refused a request for a neighbour");
                Ok(())
            }
            outcome => outcome,
        }
    }
}

/// The dumps in their order. Links come first, because every other entry refers to one.
fn dumps() -> [(RouteNetlinkMessage, &'static str); 6] {
    let route = |family| {
        let mut message = RouteMessage::default();
        message.header.address_family = family;
        RouteNetlinkMessage::GetRoute(message)
    };
    let neighbour = |family| {
        let mut message = NeighbourMessage::default();
        message.header.family = family;
        RouteNetlinkMessage::GetNeighbour(message)
    };
    [
        (RouteNetlinkMessage::GetLink(LinkMessage::default()), "list links"),
        (RouteNetlinkMessage::GetAddress(AddressMessage::default()), "list addresses"),
        (route(AddressFamily::Inet), "list IPv4 routes"),
        (route(AddressFamily::Inet6), "list IPv6 routes"),
        (neighbour(AddressFamily::Inet), "list IPv4 neighbours"),
        (neighbour(AddressFamily::Inet6), "list IPv6 neighbours"),
    ]
}
