//! Replication of flows to partners: who they are and what they have, and the task that does it.
//!
//! Each gateway *follows* each partner by a session: a TCP connection, by which the partner first tells all its flows that
//! last, and sealed datagrams with the news of them. So between two gateways there are two sessions, one in each
//! direction (docs/internals/replication.md).
//!
//! Invariant: workers never wait for it; what does not fit into a queue is counted. Memory is bounded: 11 MB of batches
//! that were sent, and 18 MB for each partner at most (`window`, `hub`).
//! Not here: which flows a worker tells, and what it makes of those of partners (`dataplane`).

mod channel;
mod copy;
mod exchange;
mod follower;
mod hub;
mod message;
mod record;
mod seal;
mod sent;
mod teller;
mod window;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane::{Tunables, VipAnswers};
use proto::Membership;
use proto::limits::PARTNERS_MAX;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::{Semaphore, watch};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use super::super::inquiries::Inquiries;
use super::super::supervisor::Failure;
use crate::settings::Replication;
use crate::watch::send_if_changed;
pub use exchange::ReplicaExchange;
use hub::Hub;
use seal::Identity;

/// Interval at which news of the workers is taken: less than a packet of TCP takes through a wide network.
const TAKE_EVERY: Duration = Duration::from_millis(10);
/// Interval at which the status is published.
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// A partner that the controller no longer names is dialled for this time more: a controller that has just started names
/// gateways one by one as they connect.
const UNNAMED_MAX: Duration = Duration::from_secs(600);
/// Longest datagram that is read.
const DATAGRAM_BYTES_MAX: usize = 2048;
/// Bytes of the socket's receive buffer: 100 ms of 40 MB a second.
const RECEIVE_BUFFER: usize = 4 << 20;

/// A partner as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartnerStatus {
    /// Its name, once it has told it.
    pub name: Option<String>,
    /// Where it is reached.
    pub address: SocketAddr,
    /// Whether it has all flows of this gateway, as far as this gateway knows.
    pub is_in_sync: bool,
    /// How old the oldest news is that it has not acknowledged; `None` while it is not reached.
    pub lag: Option<Duration>,
}

/// The replication of flows as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicationStatus {
    /// The partners, ordered by address; none without replication.
    pub partners: Vec<PartnerStatus>,
    /// Shadow flows: flows of partners that this gateway keeps.
    pub shadow_flows: u64,
}

/// The inputs and outputs of the task.
#[derive(Clone, Debug)]
pub struct ReplicationInputs {
    /// This gateway's name.
    pub gateway: String,
    /// Its settings.
    pub settings: Replication,
    /// The queues of the workers.
    pub exchange: Arc<ReplicaExchange>,
    /// Lists flows.
    pub inquiries: Arc<Inquiries>,
    /// The groups of VIPs that this gateway owns.
    pub answers: watch::Receiver<VipAnswers>,
    /// The SNAT addresses.
    pub tunables: watch::Receiver<Tunables>,
    /// What the controller says.
    pub membership: watch::Receiver<Option<Membership>>,
    /// Output.
    pub status: watch::Sender<ReplicationStatus>,
}

/// Replicates flows.
///
/// # Errors
/// If the address is in use, or is not of this machine.
pub async fn run(inputs: ReplicationInputs) -> Result<(), Failure> {
    let ReplicationInputs { gateway, settings, exchange, inquiries, answers, tunables, membership, status } = inputs;
    let listen = settings.listen;
    let failed = |error: io::Error| format!("fleet.listen {listen}: {error}; is it an address of this machine, and free?");
    let listener = TcpListener::bind(listen).await.map_err(failed)?;
    let socket = UdpSocket::bind(listen).await.map_err(failed)?;
    // The kernel gives less if it allows less; what overflows is asked for again.
    let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&socket, RECEIVE_BUFFER);
    let identity = Identity { name: gateway, address: listen };
    let key = settings.key.as_ref().map(|file| file.key);
    let hub = Arc::new(Hub::new((identity, settings.after, key), (exchange, inquiries), (answers, tunables), socket));
    let (named, partners) = watch::channel(Vec::new());
    let mut tasks = JoinSet::new();
    tasks.spawn(take_news(Arc::clone(&hub)));
    tasks.spawn(receive(Arc::clone(&hub)));
    tasks.spawn(serve(Arc::clone(&hub), listener));
    tasks.spawn(follow(Arc::clone(&hub), settings, membership, named));
    tasks.spawn(publish(hub, partners, status));
    match tasks.join_next().await {
        Some(Err(error)) => Err(error.into()),
        Some(Ok(Err(error))) => Err(failed(error).into()),
        Some(Ok(Ok(()))) | None => Err("a task of the replication has ended".into()),
    }
}

/// Makes batches of the news of the workers.
async fn take_news(hub: Arc<Hub>) -> io::Result<()> {
    let mut every = interval(TAKE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let head = {
            let mut sent = hub.sent();
            sent.add(hub.exchange.told(), Instant::now());
            sent.next()
        };
        send_if_changed(&hub.head, head);
    }
}

/// Passes datagrams to their sessions.
async fn receive(hub: Arc<Hub>) -> io::Result<()> {
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        // A partner without a socket makes an error of the last datagram to it.
        if let Ok((length, _)) = hub.socket.recv_from(&mut buffer).await {
            hub.pass(&buffer[..length]);
        }
    }
}

/// Tells partners that dial this gateway.
async fn serve(hub: Arc<Hub>, listener: TcpListener) -> io::Result<()> {
    // Twice as many as there may be partners: an old session of a partner ends a second after its new one has begun.
    let places = Arc::new(Semaphore::new(2 * PARTNERS_MAX));
    let mut sessions = JoinSet::new();
    let mut logged = BTreeMap::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, from) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        tracing::warn!(%error, "a connection of a partner cannot be accepted");
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        continue;
                    }
                };
                let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
                let hub = Arc::clone(&hub);
                sessions.spawn(async move {
                    let _place = place;
                    let mut follower = None;
                    let Err(error) = teller::serve(hub, stream, &mut follower).await;
                    (from.ip(), follower, error.to_string())
                });
            }
            Some(Ok((from, follower, error))) = sessions.join_next() => note_end(&mut logged, from, follower, error),
        }
    }
}

/// Logs the end of a session. What strangers do is logged once by address, of the last thousand.
fn note_end(logged: &mut BTreeMap<IpAddr, String>, from: IpAddr, follower: Option<(String, SocketAddr)>, error: String) {
    if let Some((gateway, address)) = follower {
        logged.remove(&from);
        tracing::warn!(gateway, %address, error, "a partner no longer follows the flows of this gateway");
    } else if logged.insert(from, error.clone()).is_none_or(|before| before != error) {
        tracing::warn!(%from, error, "a connection to `fleet.listen` was refused");
        if logged.len() > 1000 {
            logged.pop_first();
        }
    }
}

/// Follows the partners, as they are configured or named by the controller.
async fn follow(
    hub: Arc<Hub>,
    settings: Replication,
    mut membership: watch::Receiver<Option<Membership>>,
    named: watch::Sender<Vec<SocketAddr>>,
) -> io::Result<()> {
    let (mut sessions, mut followed) = (JoinSet::new(), BTreeMap::<SocketAddr, (AbortHandle, Instant)>::new());
    let mut every = interval(STATUS_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let known = membership.borrow_and_update().clone();
        if let Some(known) = known.as_ref().filter(|_| settings.key.is_none()) {
            hub.take_key(known);
        }
        let others = known.iter().flat_map(|known| &known.others).map(|other| other.replication);
        let wanted: Vec<_> = if settings.partners.is_empty() { others.collect() } else { settings.partners.clone() };
        let now = Instant::now();
        for partner in wanted.into_iter().filter(|partner| *partner != settings.listen).take(PARTNERS_MAX) {
            let start = || (sessions.spawn(follower::run(Arc::clone(&hub), partner)), now);
            followed.entry(partner).or_insert_with(start).1 = now;
        }
        followed.retain(|_, (session, last_named)| {
            let stays = now.saturating_duration_since(*last_named) < UNNAMED_MAX;
            if !stays {
                session.abort();
            }
            stays
        });
        send_if_changed(&named, followed.keys().copied().collect());
        tokio::select! {
            changed = membership.changed() => changed.map_err(io::Error::other)?,
            _ = every.tick() => {}
            // Only those that were aborted end, unless one panics.
            Some(Err(error)) = sessions.join_next() => if error.is_panic() { return Err(io::Error::other(error)) },
        }
    }
}

/// Publishes the status.
async fn publish(
    hub: Arc<Hub>,
    partners: watch::Receiver<Vec<SocketAddr>>,
    status: watch::Sender<ReplicationStatus>,
) -> io::Result<()> {
    let mut every = interval(STATUS_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        let standings = hub.standings(&partners.borrow());
        let followed = standings.values().filter(|standing| standing.is_followed).count();
        hub.exchange.followed.store(followed as u64, Ordering::Relaxed);
        let partner = |(address, standing): (SocketAddr, hub::Standing)| PartnerStatus {
            name: standing.name,
            address,
            is_in_sync: standing.follows.is_some_and(|(is_in_sync, _)| is_in_sync),
            lag: standing.follows.map(|(_, lag)| lag),
        };
        let partners = standings.into_iter().map(partner).collect();
        send_if_changed(&status, ReplicationStatus { partners, shadow_flows: hub.exchange.shadow_flows() });
    }
}
