//! Replication of flows to partners: the partners, their progress, and the task.
//!
//! Each gateway *follows* each partner by a session: a TCP connection, by which the partner first sends all its flows that
//! last, and sealed datagrams with the news of them. So between two gateways there are two sessions, one in each
//! direction (docs/internals/replication.md).
//!
//! Invariant: workers never wait for it; what does not fit into a queue is counted. Memory is bounded: 11 MB of batches
//! that were sent, and 18 MB for each partner at most (`window`, `hub`).
//! Not here: which flows a worker reports, and what it makes of those of partners (`dataplane`).

mod agreement;
mod channel;
mod copy;
mod exchange;
mod follower;
mod hub;
mod message;
mod record;
mod seal;
mod sender;
mod sent;
mod window;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane::{Tunables, VipAnswers};
use proto::limits::PARTNERS_MAX;
use proto::{GatewayState, Generation, GroupKey, Membership, Origin};
use rustix::net::sockopt;
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval};

use crate::agent::supervisor::Failure;
use crate::agent::watch::send_if_changed;
use crate::settings::Replication;
use crate::worker_threads::inquiries::Inquiries;
use agreement::Agreement;
use channel::SessionError;
pub use exchange::ReplicaExchange;
use hub::{Hub, HubParts, PARTNER_LEFT, PartnerState};
use seal::Identity;

/// Interval at which news of the workers is taken: less than a packet of TCP takes through a wide network.
const TAKE_EVERY: Duration = Duration::from_millis(10);
/// Interval at which acknowledgements of partners are compared with what was sent; they come every 100 ms.
const ARRIVALS_EVERY: Duration = Duration::from_millis(100);
/// Interval at which the status is published.
const STATUS_EVERY: Duration = Duration::from_millis(500);
/// A partner that the controller no longer names is dialled for this time more: a controller that has just started names
/// gateways one by one as they connect.
const UNNAMED_MAX: Duration = Duration::from_secs(600);
/// Longest wait for the state of a controller. Without one the gateway forwards by its last state, and follows partners
/// for the backends in it.
const STATE_MAX: Duration = Duration::from_secs(30);
/// Longest datagram that is read.
const DATAGRAM_BYTES_MAX: usize = 2048;
/// Bytes of the socket's receive buffer: 100 ms of 40 MB a second.
const RECEIVE_BUFFER: usize = 4 << 20;

/// Most sessions: twice as many as there may be partners, as an old session of a partner ends a second after its new one
/// has begun.
const SESSIONS_MAX: usize = 2 * PARTNERS_MAX;
/// Most handshakes at once, and of one address. A partner makes one, which takes milliseconds.
const HANDSHAKES_MAX: usize = 256;
const HANDSHAKES_OF_ADDRESS_MAX: usize = 4;
/// Most causes that are logged of one address.
const CAUSES_MAX: usize = 8;

/// A partner as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartnerStatus {
    /// Its name, once it is known.
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
    /// Whether a partner that is reached has not sent all of its flows yet. The gateway takes no VIPs meanwhile.
    pub awaits_copies: bool,
}

impl ReplicationStatus {
    /// The status at the start: flows of partners are awaited, if there may be any.
    #[must_use]
    pub fn at_start(settings: Option<&Replication>) -> Self {
        Self { awaits_copies: settings.is_some(), ..Self::default() }
    }
}

/// The task that replicates flows. Cloned for each start.
#[derive(Clone, Debug)]
pub struct FlowReplicator {
    /// This gateway's name.
    pub gateway: String,
    /// Its settings.
    pub settings: Replication,
    /// The keys of `fleet.key`, as they change; the first one is preferred.
    pub keys: watch::Receiver<Vec<GroupKey>>,
    /// Number of groups of VIPs.
    pub groups: u8,
    /// The VRID of the first.
    pub first_vrid: u8,
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
    /// The current state.
    pub state: watch::Receiver<Option<GatewayState>>,
    /// The generation that every worker has applied.
    pub applied: watch::Receiver<Option<Generation>>,
    /// Output.
    pub status: watch::Sender<ReplicationStatus>,
}

impl FlowReplicator {
    /// Replicates flows.
    ///
    /// # Errors
    /// If the address is in use, or is not of this machine.
    pub async fn run(self) -> Result<(), Failure> {
        let listen = self.settings.listen;
        let failed = |error: io::Error| format!("fleet.listen {listen}: {error}; is it an address of this machine, and free?");
        let listener = TcpListener::bind(listen).await.map_err(failed)?;
        let socket = UdpSocket::bind(listen).await.map_err(failed)?;
        enlarge_buffer(&socket);
        let agreement = Agreement { groups: self.groups, first_vrid: self.first_vrid };
        let digest = agreement.digest(&self.tunables.borrow().snat);
        let own = Identity { name: self.gateway, address: listen, process: seal::random()?, agreement: digest };
        let hub = Arc::new(Hub::new(HubParts {
            own,
            agreement,
            keys: self.settings.key.is_some().then(|| self.keys.borrow().clone()),
            after: self.settings.after,
            exchange: self.exchange,
            inquiries: self.inquiries,
            answers: self.answers,
            tunables: self.tunables,
            socket,
        }));
        let (named, partners) = watch::channel(None);
        let mut tasks = JoinSet::new();
        tasks.spawn(take_news(Arc::clone(&hub)));
        tasks.spawn(note_arrivals(Arc::clone(&hub)));
        tasks.spawn(receive(Arc::clone(&hub)));
        tasks.spawn(serve(Arc::clone(&hub), listener));
        let inputs = FollowInputs {
            settings: self.settings,
            keys: self.keys,
            membership: self.membership,
            state: self.state,
            applied: self.applied,
            named,
        };
        tasks.spawn(follow(Arc::clone(&hub), inputs));
        tasks.spawn(publish(hub, partners, self.status));
        match tasks.join_next().await {
            Some(Err(error)) => Err(error.into()),
            Some(Ok(Err(error))) => Err(failed(error).into()),
            Some(Ok(Ok(()))) | None => Err("a task of the replication has ended".into()),
        }
    }
}

/// Gives the socket its receive buffer. Without the right to pass the kernel's limit, `net.core.rmem_max`, it is as long as
/// that; what overflows is asked for again.
fn enlarge_buffer(socket: &UdpSocket) {
    if sockopt::set_socket_recv_buffer_size_force(socket, RECEIVE_BUFFER).is_err() {
        let _ = sockopt::set_socket_recv_buffer_size(socket, RECEIVE_BUFFER);
    }
}

/// Makes batches of the news of the workers, and notes which groups of VIPs the gateway owns.
async fn take_news(hub: Arc<Hub>) -> io::Result<()> {
    let mut every = interval(TAKE_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        every.tick().await;
        hub.note_owned();
        let head = {
            let mut sent = hub.sent();
            sent.add(hub.exchange.events(), Instant::now());
            sent.next()
        };
        send_if_changed(&hub.head, head);
    }
}

/// Notes until when partners have everything that this gateway sent.
async fn note_arrivals(hub: Arc<Hub>) -> io::Result<()> {
    let mut every = interval(ARRIVALS_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let (now, head) = (Instant::now(), hub.sent().next());
        every.tick().await;
        if hub.have_until(head) {
            hub.exchange.arrived.send_replace(Some(now));
        }
    }
}

/// Dispatches datagrams to their sessions.
async fn receive(hub: Arc<Hub>) -> io::Result<()> {
    let mut buffer = vec![0; DATAGRAM_BYTES_MAX];
    loop {
        // A partner without a socket makes an error of the last datagram to it.
        if let Ok((length, _)) = hub.socket.recv_from(&mut buffer).await {
            hub.dispatch(&buffer[..length]);
        }
    }
}

/// Sends flows to partners that dial this gateway. Who has not proven yet that it is one takes no place of a session.
async fn serve(hub: Arc<Hub>, listener: TcpListener) -> io::Result<()> {
    let (mut greetings, mut sessions) = (JoinSet::new(), JoinSet::new());
    let (mut greeted, mut logged) = (BTreeMap::<IpAddr, usize>::new(), Logged::new());
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (stream, from) = match accepted {
                    Ok((stream, from)) => (stream, from.ip()),
                    Err(error) => {
                        tracing::warn!(%error, "a connection of a partner cannot be accepted");
                        tokio::time::sleep(Duration::from_secs(1)).await;
                        continue;
                    }
                };
                if greetings.len() >= HANDSHAKES_MAX || greeted.get(&from).is_some_and(|count| *count >= HANDSHAKES_OF_ADDRESS_MAX) {
                    note_refusal(&mut logged, from, "too many handshakes at once".to_owned());
                    continue;
                }
                *greeted.entry(from).or_default() += 1;
                let hub = Arc::clone(&hub);
                greetings.spawn(async move { (from, sender::greet(&hub, stream).await) });
            }
            Some(Ok((from, result))) = greetings.join_next() => {
                greeted.entry(from).and_modify(|count| *count -= 1);
                greeted.retain(|_, count| *count > 0);
                match result {
                    Ok(_) if sessions.len() >= SESSIONS_MAX => {
                        note_refusal(&mut logged, from, "too many sessions".to_owned());
                    }
                    Ok(greeting) => {
                        logged.remove(&from);
                        let hub = Arc::clone(&hub);
                        sessions.spawn(async move {
                            let (gateway, address) = (greeting.follower().name.clone(), greeting.follower().address);
                            let Err(error) = sender::serve(hub, greeting).await;
                            note_end(&gateway, address, &error);
                        });
                    }
                    Err(error) => {
                        note_refusal(&mut logged, from, error.to_string());
                    }
                }
            }
            Some(_) = sessions.join_next() => {}
        }
    }
}

/// Logs the end of a session by which a partner followed this gateway.
fn note_end(gateway: &str, address: SocketAddr, error: &SessionError) {
    // A partner that ended its session as a matter of routine dials again; of one that does not, troubles and Events tell.
    if error.is_routine() || matches!(error, SessionError::Closed) {
        tracing::info!(gateway, %address, reason = %error, "a session with a partner has ended, and a new one follows");
    } else {
        tracing::warn!(gateway, %address, %error, "a partner no longer follows the flows of this gateway");
    }
}

/// What was logged of strangers, by address.
type Logged = BTreeMap<IpAddr, BTreeSet<String>>;

/// Logs a refused connection: each cause once by address, of the last thousand addresses. True if it was logged.
fn note_refusal(logged: &mut Logged, from: IpAddr, error: String) -> bool {
    let causes = logged.entry(from).or_default();
    let is_new = causes.len() < CAUSES_MAX && causes.insert(error.clone());
    if is_new {
        tracing::warn!(%from, error, "a connection to `fleet.listen` was refused");
    }
    if logged.len() > 1000 {
        logged.pop_first();
    }
    is_new
}

/// Whether every worker forwards by the state of a controller. In one from disk, backends of earlier still have to pass a
/// probe.
fn has_state(state: &Option<GatewayState>, applied: &Option<Generation>) -> bool {
    let current = state.as_ref().filter(|current| current.origin != Origin::Disk);
    current.is_some_and(|current| Some(&current.state.generation) == applied.as_ref())
}

/// Inputs and output of [`follow`].
struct FollowInputs {
    settings: Replication,
    keys: watch::Receiver<Vec<GroupKey>>,
    membership: watch::Receiver<Option<Membership>>,
    state: watch::Receiver<Option<GatewayState>>,
    applied: watch::Receiver<Option<Generation>>,
    /// Output: the partners that are followed; `None` before they are known.
    named: watch::Sender<Option<Vec<SocketAddr>>>,
}

/// Follows the partners, as they are configured or named by the controller. A gateway that starts first waits for its
/// state: it would refuse flows to backends that it does not know yet.
async fn follow(hub: Arc<Hub>, inputs: FollowInputs) -> io::Result<()> {
    let FollowInputs { settings, mut keys, mut membership, state, mut applied, named } = inputs;
    let (mut sessions, mut followed) = (JoinSet::new(), BTreeMap::<SocketAddr, (AbortHandle, Instant)>::new());
    let mut every = interval(STATUS_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (started, mut has_state_now) = (Instant::now(), false);
    loop {
        has_state_now |= has_state(&state.borrow(), &applied.borrow_and_update()) || started.elapsed() > STATE_MAX;
        hub.set_keys(&keys.borrow_and_update());
        let members = membership.borrow_and_update().clone();
        if let Some(members) = members.as_ref().filter(|_| settings.key.is_none()) {
            hub.take_key(members);
        }
        let others = members.iter().flat_map(|members| &members.others).map(|other| other.replication);
        let wanted: Vec<_> = if settings.partners.is_empty() { others.collect() } else { settings.partners.clone() };
        let now = Instant::now();
        let others = wanted.into_iter().filter(|partner| has_state_now && *partner != settings.listen);
        for partner in others.take(PARTNERS_MAX) {
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
        send_if_changed(&named, has_state_now.then(|| followed.keys().copied().collect()));
        tokio::select! {
            changed = membership.changed() => changed.map_err(io::Error::other)?,
            changed = applied.changed() => changed.map_err(io::Error::other)?,
            changed = keys.changed() => changed.map_err(io::Error::other)?,
            _ = every.tick() => {}
            // Only those that were aborted end, unless one panics.
            Some(Err(error)) = sessions.join_next() => if error.is_panic() { return Err(io::Error::other(error)) },
        }
    }
}

/// Publishes the status. Before partners are known, and before one was tried, its flows are awaited.
async fn publish(
    hub: Arc<Hub>,
    partners: watch::Receiver<Option<Vec<SocketAddr>>>,
    status: watch::Sender<ReplicationStatus>,
) -> io::Result<()> {
    let mut every = interval(STATUS_EVERY);
    every.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last_session: Option<Instant> = None;
    loop {
        every.tick().await;
        let named = partners.borrow().clone();
        let partner_states = hub.partner_states(named.as_deref().unwrap_or_default());
        if partner_states.values().any(|state| state.is_followed || state.follows.is_some()) {
            last_session = Some(Instant::now());
        }
        hub.exchange.set_partners(last_session.is_some_and(|last| last.elapsed() < PARTNER_LEFT));
        let awaits = |partner: &SocketAddr| partner_states.get(partner).is_some_and(|one| !one.is_followed && !one.has_failed);
        let awaits_copies = named.is_none_or(|named| named.iter().any(awaits));
        let followed = partner_states.values().filter(|state| state.is_followed).count();
        hub.exchange.followed.store(followed as u64, Ordering::Relaxed);
        let partner = |(address, state): (SocketAddr, PartnerState)| PartnerStatus {
            name: state.name,
            address,
            is_in_sync: state.follows.is_some_and(|follower| follower.is_in_sync),
            lag: state.follows.map(|follower| hub.lag(follower.acknowledged)),
        };
        let partners = partner_states.into_iter().map(partner).collect();
        send_if_changed(&status, ReplicationStatus { partners, shadow_flows: hub.exchange.shadow_flows(), awaits_copies });
    }
}

#[cfg(test)]
mod tests {
    use dataplane::OwnedGroups;
    use proto::{Member, State};
    use tokio::io::AsyncReadExt as _;
    use tokio::net::TcpStream;

    use super::seal::SealError;
    use super::*;
    use crate::settings::KeyFile;
    use crate::worker_threads::inquiries::tests::without_workers;

    const LONG: Duration = Duration::from_secs(120);

    fn group_keys(keys: &[u8]) -> Vec<GroupKey> {
        keys.iter().map(|key| GroupKey::new([*key; 32])).collect()
    }

    /// A gateway whose worker does nothing.
    struct Gateway {
        name: &'static str,
        listen: SocketAddr,
        answers: watch::Sender<VipAnswers>,
        membership: watch::Sender<Option<Membership>>,
        keys: watch::Sender<Vec<GroupKey>>,
        known: watch::Sender<Option<GatewayState>>,
        _reached: watch::Sender<Option<Generation>>,
        exchange: Arc<ReplicaExchange>,
        status: watch::Receiver<ReplicationStatus>,
        task: tokio::task::JoinHandle<Result<(), Failure>>,
    }

    impl Gateway {
        fn start(name: &'static str) -> Self {
            Self::start_with(name, None)
        }

        /// With the keys of a file, if there are some.
        fn start_with(name: &'static str, keys: Option<&[u8]>) -> Self {
            // A port that is free now, for UDP too.
            let listen = std::net::UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
            let key = keys.map(|keys| KeyFile { path: "/fleet.key".into(), keys: group_keys(keys) });
            let settings = Replication { listen, key, ..Replication::default() };
            let keys = watch::Sender::new(keys.map(group_keys).unwrap_or_default());
            let exchange = Arc::new(ReplicaExchange::new(Some(&settings), 1));
            let (answers, membership, known) = (watch::Sender::default(), watch::Sender::default(), watch::Sender::new(None));
            let reached = watch::Sender::new(Some(Generation::default()));
            let (status, published) = watch::channel(ReplicationStatus::default());
            let limits = dataplane::FlowLimits::default();
            let tunables = Tunables {
                snat: Vec::new(),
                node_port_addresses: Vec::new(),
                flows: limits,
                targets_max: dataplane::flow::TARGETS_MAX,
            };
            let task = FlowReplicator {
                gateway: name.to_owned(),
                settings,
                keys: keys.subscribe(),
                groups: 2,
                first_vrid: 101,
                exchange: Arc::clone(&exchange),
                inquiries: Arc::new(without_workers()),
                answers: answers.subscribe(),
                tunables: watch::Sender::new(tunables).subscribe(),
                membership: membership.subscribe(),
                state: known.subscribe(),
                applied: reached.subscribe(),
                status,
            };
            let task = tokio::spawn(task.run());
            Self { name, listen, answers, membership, keys, known, _reached: reached, exchange, status: published, task }
        }

        fn member(&self) -> Member {
            Member { gateway: self.name.to_owned(), replication: self.listen }
        }

        fn names(&self, key: u8, other: &Self) {
            let others = vec![other.member()];
            self.membership.send_replace(Some(Membership { key: GroupKey::new([key; 32]), others }));
        }

        fn has_state(&self) {
            self.known.send_replace(Some(GatewayState { state: Arc::new(State::default()), origin: Origin::Controller }));
        }

        async fn has(&mut self, what: impl FnMut(&ReplicationStatus) -> bool) {
            tokio::time::timeout(LONG, self.status.wait_for(what)).await.unwrap().unwrap();
        }
    }

    impl Drop for Gateway {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    fn in_sync(status: &ReplicationStatus) -> bool {
        status.partners.iter().any(|partner| partner.is_in_sync)
    }

    /// Two gateways, each of which has the flows of the other.
    async fn gateways_in_sync() -> [Gateway; 2] {
        let (mut one, mut two) = (Gateway::start("edge-1"), Gateway::start("edge-2"));
        one.names(1, &two);
        two.names(1, &one);
        one.has_state();
        two.has_state();
        one.has(in_sync).await;
        two.has(in_sync).await;
        [one, two]
    }

    #[tokio::test]
    async fn gateways_that_a_controller_names_follow_each_other_also_while_one_has_a_newer_key() {
        let [mut one, two] = gateways_in_sync().await;
        assert_eq!(two.status.borrow().partners[0].name.as_deref(), Some("edge-1"));
        // A new leader sends its key to the first gateway only. The second one starts again, and has the old key at first.
        one.names(2, &two);
        let listen = two.listen;
        drop(two);
        one.has(|status| status.partners.iter().all(|partner| partner.lag.is_none())).await;
        let mut again = Gateway::start("edge-2");
        assert_ne!(again.listen, listen);
        again.names(1, &one);
        again.has_state();
        one.names(2, &again);
        again.has(in_sync).await;
        one.has(in_sync).await;
        assert!(again.exchange.copies().iter().all(|(_, copies)| *copies > 0), "{:?}", again.exchange.copies());
    }

    /// Why a gateway refuses a partner that has this key alone, once it does: keys change between two looks of its task.
    async fn refusal(gateway: &Gateway, key: u8) -> SessionError {
        let partner = Identity { name: "edge-3".to_owned(), address: gateway.listen, process: [3; 8], agreement: [0; 32] };
        let refused = async {
            loop {
                let mut stream = TcpStream::connect(gateway.listen).await.unwrap();
                match channel::follow(&mut stream, &partner, &group_keys(&[key]), 2).await {
                    Err(refusal @ SessionError::Refused(_)) => return refusal,
                    // It has another digest than this partner.
                    _ => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            }
        };
        tokio::time::timeout(LONG, refused).await.unwrap()
    }

    #[tokio::test]
    async fn a_fleet_changes_its_key_one_gateway_after_the_other() {
        let (old, new) = (1, 2);
        let (mut one, mut two) = (Gateway::start_with("edge-1", Some(&[old])), Gateway::start_with("edge-2", Some(&[old])));
        one.names(9, &two);
        two.names(9, &one);
        one.has_state();
        two.has_state();
        one.has(in_sync).await;
        two.has(in_sync).await;
        let copies = |gateway: &Gateway| gateway.exchange.copies().map(|(_, copies)| copies);
        // Both keys, the new one first. Then one gateway takes the old key out: the sessions by it end, and others begin by
        // the new one, which both have.
        one.keys.send_replace(group_keys(&[new, old]));
        two.keys.send_replace(group_keys(&[new, old]));
        let before = [copies(&one), copies(&two)].concat();
        one.keys.send_replace(group_keys(&[new]));
        let again = async {
            while [copies(&one), copies(&two)].concat().iter().zip(&before).any(|(now, before)| now <= before) {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, again).await.unwrap();
        two.keys.send_replace(group_keys(&[new]));
        assert!(matches!(refusal(&two, old).await, SessionError::Refused(SealError::Key)));
        // The flows of a group that is taken over are copied by the sessions of the new key.
        let before = copies(&one)[0];
        let groups = Some(OwnedGroups { groups: 2, owned: 0b10 });
        one.answers.send_replace(VipAnswers { groups, ..VipAnswers::default() });
        let again = async {
            while copies(&one)[0] <= before {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, again).await.unwrap();
        one.has(in_sync).await;
        two.has(in_sync).await;
        // A gateway that still has only the old key loses its sessions, and each refuses the other.
        one.keys.send_replace(group_keys(&[old]));
        let is_apart = |status: &ReplicationStatus| status.partners.iter().all(|partner| partner.lag.is_none());
        one.has(is_apart).await;
        two.has(is_apart).await;
        assert!(matches!(refusal(&two, old).await, SessionError::Refused(SealError::Key)));
        assert!(matches!(refusal(&one, new).await, SessionError::Refused(SealError::Key)));
    }

    #[tokio::test]
    async fn a_partner_gets_another_copy_when_a_group_was_taken_over() {
        let [mut one, two] = gateways_in_sync().await;
        let copies = |gateway: &Gateway| gateway.exchange.copies().map(|(_, copies)| copies);
        assert_eq!(copies(&one), [1, 1]);
        let groups = Some(OwnedGroups { groups: 2, owned: 0b10 });
        one.answers.send_replace(VipAnswers { groups, ..VipAnswers::default() });
        let again = async {
            while copies(&one) != [2, 1] || copies(&two) != [1, 2] {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(LONG, again).await.unwrap();
        one.has(in_sync).await;
    }

    #[tokio::test]
    async fn the_receive_buffer_has_its_length_where_the_kernel_allows_it() {
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let before = sockopt::socket_recv_buffer_size(&socket).unwrap();
        let may_force = sockopt::set_socket_recv_buffer_size_force(&socket, before).is_ok();
        enlarge_buffer(&socket);
        let after = sockopt::socket_recv_buffer_size(&socket).unwrap();
        assert!(if may_force { after >= RECEIVE_BUFFER } else { after >= before }, "{before} {after} {may_force}");
    }

    #[tokio::test]
    async fn strangers_who_say_nothing_keep_no_partner_of_another_address_away() {
        let (mut one, mut two) = (Gateway::start("edge-1"), Gateway::start("edge-2"));
        one.names(1, &two);
        two.names(1, &one);
        while TcpStream::connect(one.listen).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let mut strangers = Vec::new();
        let mut closed = 0;
        for _ in 0..4 * HANDSHAKES_OF_ADDRESS_MAX {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
            strangers.push(socket.connect(one.listen).await.unwrap());
        }
        // Those beyond the limit are closed at once, before a handshake takes too long.
        for stranger in &mut strangers {
            let read = tokio::time::timeout(Duration::from_millis(50), stranger.read_u8()).await;
            closed += usize::from(read.is_ok());
        }
        assert!(closed >= HANDSHAKES_OF_ADDRESS_MAX, "{closed}");
        one.has_state();
        two.has_state();
        one.has(in_sync).await;
        two.has(in_sync).await;
    }

    #[test]
    fn a_cause_is_logged_once_by_address() {
        let mut logged = Logged::new();
        let mut note = |address: [u8; 4], cause: &str| note_refusal(&mut logged, address.into(), cause.to_owned());
        assert!(note([192, 0, 2, 1], "a") && note([192, 0, 2, 1], "b") && note([192, 0, 2, 2], "a"));
        assert!(!note([192, 0, 2, 1], "a") && !note([192, 0, 2, 1], "b"));
        let noted = (0..100).filter(|n| note([192, 0, 2, 3], &n.to_string())).count();
        assert_eq!(noted, CAUSES_MAX);
    }

    #[test]
    fn only_the_state_of_a_controller_that_every_worker_has_counts() {
        let known = |origin| Some(GatewayState { state: Arc::new(State::default()), origin });
        let reached = Some(Generation::default());
        assert!(has_state(&known(Origin::Controller), &reached));
        assert!(!has_state(&known(Origin::Controller), &None));
        assert!(!has_state(&known(Origin::Disk), &reached));
        assert!(!has_state(&None, &reached));
    }
}
