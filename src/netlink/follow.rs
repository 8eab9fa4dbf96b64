//! The task: sockets in, the published network out, requests for neighbours back to Linux.
//!
//! Invariant: nothing is published before the first complete dump, and never a half-read one. Deliberately not here:
//! cleaning up at exit. The twins stay, and Linux probes nothing on an interface without carrier.

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

use super::groups::{Groups, solicited_node};
use super::neighbours::{Ask, Asked, Key, message};
use super::routes::ROUTES_MAX;
use super::socket::{Dump, NetlinkError, Socket};
use super::tables::{Effect, Tables};

/// Multicast groups, group n as bit n - 1: links, neighbours, IPv4 and IPv6 addresses and routes, next hop objects.
const GROUPS: u32 = 0x1 | 0x4 | 0x10 | 0x40 | 0x100 | 0x400 | 0x8000_0000;
/// RTM_DELNEXTHOP: routes by a next hop object go with it, without a message of their own. (FRR makes such objects; a
/// changed one is followed by its routes.)
const NEXT_HOP_REMOVED: u16 = 105;
/// Changes within this time are published together.
const COALESCE: Duration = Duration::from_millis(2);
/// Publishing takes at most a tenth of the time and reading anew a third. (Measured with a million routes in a debug build:
/// 0.3 s to publish, 11 s to read, 175 MB in all.)
const REST_PER_PUBLISHING: u32 = 9;
const REST_PER_READING: u32 = 2;
/// How often the workers' requests are looked at: they cannot wake us. A packet that waits may wait for a second.
const REQUESTS_EVERY: Duration = Duration::from_millis(5);
/// How often next hops are compared with what is managed, when nothing else happens.
const NEXT_HOPS_EVERY: Duration = Duration::from_secs(1);

/// Room for requests of the workers: twice what may be pending.
pub const REQUESTS_MAX: usize = 1024;

/// Links and addresses, as [`dataplane::Snapshot::announced`] has them.
pub type Answered = Arc<[(Link, IpAddr, u64)]>;

/// What [`follow`] works on. Cloned for each start of the task.
#[derive(Clone, Debug)]
pub struct Follow {
    /// Names of the ports, whose twins are named alike; [`dataplane::PortIndex`] counts them.
    pub ports: Vec<String>,
    /// Next hops that snapshots use: Linux is to keep their addresses resolved.
    pub next_hops: watch::Receiver<BTreeSet<(Link, IpAddr)>>,
    /// What the engine answers for, as [`dataplane::Snapshot::announced`] has it: Linux is to be a member of the groups in which
    /// it is asked for.
    pub answered: watch::Receiver<Answered>,
    /// On-link clients that workers wait for. Pushed by workers, never waited on.
    pub requests: Arc<ArrayQueue<(Link, IpAddr)>>,
    /// Where the network is published; changed first when all of it has been read.
    pub network: watch::Sender<Network>,
}

/// Follows Linux until its future is dropped. Runs in the network namespace of the thread that polls it first.
///
/// # Errors
/// When the sockets fail. Starting it again is safe and reads everything anew.
pub async fn follow(mut follow: Follow) -> Result<Infallible, NetlinkError> {
    let mut changes = Socket::open(GROUPS)?;
    let mut task = Task {
        tables: Tables::new(&follow.ports),
        names: follow.ports.clone(),
        requests: Socket::open(0)?,
        asked: Asked::default(),
        groups: Groups::default(),
        reading: Job { wanted: true, not_before: Instant::now() },
        publishing: Job { wanted: false, not_before: Instant::now() },
        complete: false,
        told: Told::default(),
    };
    let mut ask_clients = interval(REQUESTS_EVERY);
    let mut ask_next_hops = interval(NEXT_HOPS_EVERY);
    ask_clients.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ask_next_hops.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut next_hops_followed, mut answered_followed) = (true, true);
    loop {
        let (read, publish) = (task.reading, task.publishing);
        let groups_are_behind = task.groups.is_behind();
        tokio::select! {
            outcome = changes.receive(|m| task.heard(&m)) => match outcome {
                Err(NetlinkError::Overrun) => {
                    tracing::info!("the kernel dropped netlink messages; reading its tables anew");
                    // Before reading, so that no older message is applied on top of what is read.
                    changes.drain()?;
                    task.reading.want();
                }
                outcome => outcome?,
            },
            () = sleep_until(read.not_before), if read.wanted => {
                task.read().await?;
                task.want_groups(&mut follow.answered);
            }
            () = std::future::ready(()), if groups_are_behind => task.groups.advance(),
            changed = follow.answered.changed(), if answered_followed => {
                answered_followed = changed.is_ok();
                task.want_groups(&mut follow.answered);
            }
            () = sleep_until(publish.not_before), if publish.wanted && task.complete => {
                task.publish(&follow.network);
                task.ask_next_hops(&mut follow.next_hops).await?;
            }
            changed = follow.next_hops.changed(), if next_hops_followed => {
                next_hops_followed = changed.is_ok();
                task.ask_next_hops(&mut follow.next_hops).await?;
            }
            _ = ask_next_hops.tick() => {
                task.ask_next_hops(&mut follow.next_hops).await?;
                task.ask_twins(&mut changes).await?;
                if task.groups.is_refused() {
                    task.want_groups(&mut follow.answered);
                }
            }
            _ = ask_clients.tick() => task.ask_clients(&follow.requests).await?,
        }
    }
}

/// Something to be done, not too often.
#[derive(Clone, Copy)]
struct Job {
    wanted: bool,
    not_before: Instant,
}

impl Job {
    fn want(&mut self) {
        if !self.wanted {
            self.wanted = true;
            self.not_before = self.not_before.max(Instant::now() + COALESCE);
        }
    }

    fn done(&mut self, start: Instant, rest_per_work: u32) {
        self.wanted = false;
        self.not_before = Instant::now() + start.elapsed() * rest_per_work;
    }
}

/// What has been logged, to be said once.
#[derive(Default)]
struct Told {
    excess: bool,
}

struct Task {
    names: Vec<String>,
    tables: Tables,
    requests: Socket,
    asked: Asked,
    groups: Groups,
    /// Reading all tables anew.
    reading: Job,
    publishing: Job,
    /// All tables have been read once.
    complete: bool,
    told: Told,
}

impl Task {
    fn heard(&mut self, message: &netlink_packet_core::NetlinkMessage<RouteNetlinkMessage>) {
        let effect = match &message.payload {
            // A change is no part of a dump, even if its flags say so.
            NetlinkPayload::InnerMessage(inner) => self.tables.apply(inner, message.header.flags & !NLM_F_MULTIPART),
            _ if message.header.message_type == NEXT_HOP_REMOVED => Effect::Stale,
            _ => Effect::Nothing,
        };
        match effect {
            Effect::Nothing => {}
            Effect::Changed => self.publishing.want(),
            Effect::Stale => self.reading.want(),
        }
    }

    /// Reads the kernel's tables into new ones, which take the place of the old.
    async fn read(&mut self) -> Result<(), NetlinkError> {
        let start = Instant::now();
        let mut tables = Tables::new(&self.names);
        let mut outcome = Dump::Consistent;
        for (message, what) in dumps() {
            let dump = self.requests.dump(message, what, |m| {
                tables.apply(m, NLM_F_MULTIPART);
            });
            if dump.await? == Dump::Interrupted {
                outcome = Dump::Interrupted;
            }
        }
        self.tables = tables;
        self.complete = true;
        self.asked.forget_next_hops();
        self.reading.done(start, REST_PER_READING);
        if outcome == Dump::Interrupted {
            self.reading.want();
        }
        self.publishing.want();
        Ok(())
    }

    fn publish(&mut self, network: &watch::Sender<Network>) {
        let start = Instant::now();
        self.tell();
        let new = self.tables.network();
        network.send_if_modified(|old| {
            let changed = *old != new;
            *old = new;
            changed
        });
        self.publishing.done(start, REST_PER_PUBLISHING);
    }

    fn tell(&mut self) {
        let excess = self.tables.routes().excess();
        if excess > 0 && !self.told.excess {
            tracing::warn!(excess, "Linux holds more than {ROUTES_MAX} routes by our ports; those beyond are not followed");
        }
        self.told.excess = excess > 0;
    }

    /// Has Linux listen to the groups in which what we answer for is asked for, on interfaces that are there.
    fn want_groups(&mut self, answered: &mut watch::Receiver<Answered>) {
        let answered = answered.borrow_and_update();
        let mut indices = BTreeMap::new();
        let of_v6 = answered.iter().filter_map(|&(link, address, _)| match address {
            IpAddr::V6(address) => Some((link, solicited_node(address))),
            IpAddr::V4(_) => None,
        });
        let wanted = of_v6
            .filter_map(|(link, group)| Some(((*indices.entry(link).or_insert_with(|| self.tables.index_of(link)))?, group)));
        self.groups.want(&wanted.collect());
    }

    async fn ask_next_hops(&mut self, next_hops: &mut watch::Receiver<BTreeSet<Key>>) -> Result<(), NetlinkError> {
        let wanted = next_hops.borrow_and_update().clone();
        for (ask, key) in self.asked.next_hops(Instant::now().into_std(), &wanted, self.tables.neighbours()) {
            self.ask(ask, key).await?;
        }
        Ok(())
    }

    /// Asks what the twins are now: an interface above one that lies in another namespace makes it promiscuous without a
    /// message (measured on Linux 6.18, macvlan).
    async fn ask_twins(&self, changes: &mut Socket) -> Result<(), NetlinkError> {
        for index in self.tables.twins() {
            let mut message = LinkMessage::default();
            message.header.index = index;
            changes.ask(RouteNetlinkMessage::GetLink(message)).await?;
        }
        Ok(())
    }

    async fn ask_clients(&mut self, requests: &ArrayQueue<Key>) -> Result<(), NetlinkError> {
        // At most one queue's worth at a time, so that the kernel's changes are heard in between.
        for _ in 0..REQUESTS_MAX {
            let Some(key) = requests.pop() else { break };
            if self.asked.client(Instant::now().into_std(), key, self.tables.neighbours()) {
                self.ask(Ask::Resolve, key).await?;
            }
        }
        Ok(())
    }

    async fn ask(&mut self, ask: Ask, (link, address): Key) -> Result<(), NetlinkError> {
        let Some(index) = self.tables.index_of(link) else { return Ok(()) };
        let message = RouteNetlinkMessage::NewNeighbour(message(ask, index, address));
        match self.requests.request(message, NLM_F_CREATE | NLM_F_REPLACE, "resolve a neighbour").await {
            // The interface may be down or gone by now, or the neighbour table full: the next try is due anyway.
            Err(NetlinkError::Refused { source, .. }) => {
                tracing::debug!(%address, ?ask, %source, "Linux refused a request for a neighbour");
                Ok(())
            }
            outcome => outcome,
        }
    }
}

/// What is read, in this order: without links nothing else can be placed.
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
