//! The copy of all flows of a gateway that last, also of groups of VIPs that it has lost just now.
//!
//! **Invariant:** one copy is listed at a time, at the pace of inquiries and at most [`BYTES_PER_SECOND`]; pages wait in
//! the connection, not in memory. Not here: what a follower makes of it (`window`).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dataplane::flow::{FlowMode, FlowReplica, FlowState, FlowView, ReplicaEvent};
use dataplane::snapshot::Frontend;
use dataplane::{OwnedGroups, Snapshot};
use proto::vip_group;
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep, sleep_until};

use super::channel::SessionError;
use super::hub::Hub;
use super::message::PartnerMessage;
use super::record::{self, RECORD_MAX};
use crate::worker_threads::inquiries::FlowPosition;

/// Bytes of records in a page.
const PAGE_BYTES: usize = 8 * 1024;
/// Flows that are listed at once: 2,048 of 82 B are 21 pages.
const FLOWS_AT_ONCE: usize = 2048;
/// Most bytes of copies in a second, to whichever follower: 16 MB are 128 Mbit/s. A million flows of IPv4, 34 MB, take
/// 2.1 s, four times what a worker's inquiries take of its time at their own limit.
const BYTES_PER_SECOND: u32 = 16_000_000;
/// Interval of looks for a cause of another copy.
const LOOK: Duration = Duration::from_millis(500);
/// Shortest time between a copy and another one for lost news: workers that tell more than fits lose some again.
const PAUSE: Duration = Duration::from_secs(10);

/// The last copy that a follower was sent.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LastCopy {
    /// Its number, from 1; 0: there was none.
    pub(super) number: u32,
    /// Bit n: it has the flows of group n of VIPs.
    pub(super) owned: u64,
}

/// Looks for a cause of another copy.
#[derive(Debug)]
struct NextCopy {
    /// The groups of the last copy.
    copied: u64,
    /// The groups at the last look.
    looked: u64,
    /// Number of lost news when the last copy began.
    dropped: u64,
    /// When the last copy ended.
    ended: Instant,
}

impl NextCopy {
    /// Whether there is one: the gateway has taken groups over, and none more since the last look, or news was lost.
    fn is_due(&mut self, owned: u64, dropped: u64, now: Instant) -> bool {
        let is_settled = owned == std::mem::replace(&mut self.looked, owned);
        let has_more_groups = owned & !self.copied != 0;
        (has_more_groups && is_settled) || (dropped != self.dropped && now - self.ended >= PAUSE)
    }
}

/// Which flows are copied.
#[derive(Clone, Debug)]
struct Selection {
    /// Of these groups of VIPs.
    groups: OwnedGroups,
    /// Of these, also young ones, as bits: the gateway has lost them just now, so the next owner cannot learn them later.
    lost: u64,
    snat: Vec<IpAddr>,
    after: Duration,
}

impl Selection {
    /// The group of a SNAT address is its position among those of its family. Those beyond the groups are never copied.
    fn group_of_snat(&self, address: IpAddr) -> Option<u8> {
        let of_family = self.snat.iter().filter(|other| other.is_ipv4() == address.is_ipv4());
        let position = of_family.zip(0_u64..).find(|(other, _)| **other == address).map(|(_, position)| position);
        position.and_then(|position| u8::try_from(position).ok()).filter(|group| *group < self.groups.groups)
    }

    /// The flow as it is sent to partners, if it is copied: it is confirmed and lasts, and its backend has the header that it
    /// gets. Of one-way modes only those are sent
    /// whose backend was chosen by affinity: others go on through any gateway by the hash.
    fn replica(
        &self,
        view: &FlowView,
        is_elected: impl FnOnce(IpAddr) -> bool,
        has_affinity: impl FnOnce(&FlowView) -> bool,
    ) -> Option<FlowReplica> {
        let vip = view.frontend.ip();
        let group_of_vip = || is_elected(vip).then(|| vip_group(vip, self.groups.groups));
        let group = match view.mode {
            FlowMode::Nat => self.group_of_snat(view.snat?.ip()),
            FlowMode::Dnat => group_of_vip(),
            FlowMode::Dsr | FlowMode::Ipip | FlowMode::Gue => group_of_vip().filter(|_| has_affinity(view)),
        };
        let group = group.filter(|group| self.groups.has(*group))?;
        let is_confirmed = view.state.is_confirmed();
        let ends = matches!(view.state, FlowState::TcpClosing | FlowState::SctpClosing);
        let lasts = Duration::from_nanos(view.age.nanoseconds()) >= self.after || self.lost >> group & 1 == 1;
        let is_whole = view.shift.is_none_or(|shift| shift.is_taken());
        (is_confirmed && !ends && lasts && is_whole).then(|| FlowReplica::of(view))
    }
}

fn has_affinity(snapshot: &Snapshot, view: &FlowView) -> bool {
    let frontend = match view.frontend {
        SocketAddr::V4(at) => snapshot.frontend(u32::from(*at.ip()), view.protocol, at.port()),
        SocketAddr::V6(at) => snapshot.frontend(u128::from(*at.ip()), view.protocol, at.port()),
    };
    frontend.is_some_and(Frontend::has_affinity)
}

/// Sends a copy, and another one when this gateway has taken groups of VIPs over, or could not tell all news. `begun`
/// is the number of the copy for which the follower is ready, `first` that of the session's first batch. `last` is the
/// output.
pub(super) async fn run(
    hub: Arc<Hub>,
    messages: mpsc::Sender<Vec<u8>>,
    mut begun: watch::Receiver<u32>,
    first: u64,
    last: watch::Sender<LastCopy>,
) -> Result<(), SessionError> {
    for number in 1..=u32::MAX {
        send(&messages, PartnerMessage::CopyBegins(number, first)).await?;
        begun.wait_for(|begun| *begun >= number).await.map_err(|_| SessionError::Closed)?;
        let ((groups, lost), dropped) = (hub.copied(), hub.exchange.dropped());
        {
            let _turn = hub.copying.acquire().await.map_err(|_| SessionError::Closed)?;
            list(&hub, groups, lost, &messages).await?;
        }
        last.send_replace(LastCopy { number, owned: groups.owned });
        send(&messages, PartnerMessage::CopyEnds(number)).await?;
        hub.exchange.copies_sent.fetch_add(1, Ordering::Relaxed);
        let mut next = NextCopy { copied: groups.owned, looked: groups.owned, dropped, ended: Instant::now() };
        while !next.is_due(hub.owned().owned, hub.exchange.dropped(), Instant::now()) {
            sleep(LOOK).await;
        }
    }
    Ok(())
}

async fn send(messages: &mpsc::Sender<Vec<u8>>, message: PartnerMessage<'_>) -> Result<(), SessionError> {
    messages.send(message.encode()).await.map_err(|_| SessionError::Closed)
}

/// Lists the flows of groups of VIPs, and young ones of those that were lost.
async fn list(hub: &Arc<Hub>, groups: OwnedGroups, lost: u64, messages: &mpsc::Sender<Vec<u8>>) -> Result<(), SessionError> {
    let selection = Selection { groups, lost, snat: hub.snat(), after: hub.after };
    let (mut position, mut next) = (Some(FlowPosition::FIRST), Instant::now());
    while let Some(from) = position {
        // Before the listing, so that no news since then has a lower number.
        let mark = hub.sent().next();
        let (inquiries, selection) = (Arc::clone(&hub.inquiries), selection.clone());
        let listed = tokio::task::spawn_blocking(move || {
            let snapshot = inquiries.snapshot();
            let mut pages = vec![Vec::with_capacity(PAGE_BYTES)];
            let next = inquiries.flows(from, FLOWS_AT_ONCE, |_, view| {
                let is_elected = |vip| snapshot.is_elected(vip);
                let flow = selection.replica(view, is_elected, |view| has_affinity(&snapshot, view));
                let Some(flow) = flow else { return false };
                if let Some(page) = pages.last_mut() {
                    record::encode(&ReplicaEvent::Holds(flow), page);
                    if page.len() + RECORD_MAX > PAGE_BYTES {
                        pages.push(Vec::with_capacity(PAGE_BYTES));
                    }
                }
                true
            });
            next.map(|next| (next, pages))
        });
        let (after, pages) = listed.await.map_err(std::io::Error::other)??;
        position = after;
        for page in pages.iter().filter(|page| !page.is_empty()) {
            sleep_until(next).await;
            let bytes = u32::try_from(page.len()).unwrap_or(u32::MAX);
            next = next.max(Instant::now()) + Duration::from_secs(1) * bytes / BYTES_PER_SECOND;
            send(messages, PartnerMessage::Page(mark, page)).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use dataplane::flow::{BackendId, Tick, Ticks};
    use dataplane::{Tunables, VipAnswers};
    use tokio::net::UdpSocket;

    use super::super::agreement::Agreement;
    use super::super::exchange::ReplicaExchange;
    use super::super::hub::HubParts;
    use super::super::seal::Identity;
    use super::*;

    fn second(n: u64) -> Ticks {
        Tick::at(n * 1_000_000_000).since(Tick::at(0))
    }

    fn view() -> FlowView {
        FlowView {
            protocol: 6,
            client: "198.51.100.7:5555".parse().unwrap(),
            frontend: "192.0.2.100:80".parse().unwrap(),
            backend: BackendId { slot: 0, generation: 1 },
            backend_address: "10.0.0.11:8080".parse().unwrap(),
            snat: Some("10.0.0.4:1024".parse().unwrap()),
            mode: FlowMode::Nat,
            state: FlowState::TcpEstablished,
            age: second(5),
            idle: second(2),
            shift: None,
        }
    }

    #[tokio::test]
    async fn a_group_that_was_lost_just_now_is_copied() {
        let settings = crate::settings::Replication::default();
        let exchange = Arc::new(ReplicaExchange::new(Some(&settings), 1));
        let agreement = Agreement { groups: 2, first_vrid: 51 };
        let own = Identity { name: "edge-1".into(), address: settings.listen, process: [1; 8], agreement: agreement.digest(&[]) };
        let flows = dataplane::FlowLimits::default();
        let tunables = watch::Sender::new(Tunables {
            snat: Vec::new(),
            node_port_addresses: Vec::new(),
            flows,
            targets_max: dataplane::flow::TARGETS_MAX,
        });
        let answers = watch::Sender::<VipAnswers>::default();
        let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let inquiries = Arc::new(crate::worker_threads::inquiries::tests::without_workers());
        let hub = Arc::new(Hub::new(HubParts {
            own,
            agreement,
            keys: None,
            after: settings.after,
            exchange,
            inquiries,
            answers: answers.subscribe(),
            tunables: tunables.subscribe(),
            socket,
        }));
        for owned in [0b11, 0b01] {
            let groups = Some(OwnedGroups { groups: 2, owned });
            answers.send_replace(VipAnswers { groups, ..VipAnswers::default() });
            hub.note_owned();
        }
        let (messages, _received) = mpsc::channel(16);
        let (begun, last) = (watch::Sender::new(1), watch::Sender::new(LastCopy::default()));
        let mut copied = last.subscribe();
        let copies = tokio::spawn(run(hub, messages, begun.subscribe(), 0, last));
        let first = *copied.wait_for(|copy| copy.number == 1).await.unwrap();
        copies.abort();
        assert_eq!(first.owned, 0b11);
    }

    #[test]
    fn groups_that_were_taken_over_are_copied_once_no_more_come_and_lost_news_after_a_pause() {
        let ended = Instant::now();
        let mut next = NextCopy { copied: 0b001, looked: 0b001, dropped: 5, ended };
        assert!(!next.is_due(0b001, 5, ended) && !next.is_due(0b000, 5, ended), "none was taken over");
        assert!(!next.is_due(0b001, 5, ended + 2 * PAUSE), "the copy has the group that comes back");
        assert!(!next.is_due(0b011, 5, ended), "it came just now");
        assert!(!next.is_due(0b111, 5, ended), "and another one");
        assert!(next.is_due(0b111, 5, ended), "no more come");
        let mut next = NextCopy { copied: 0b001, looked: 0b001, dropped: 5, ended };
        assert!(!next.is_due(0b001, 6, ended + PAUSE / 2) && next.is_due(0b001, 6, ended + PAUSE));
    }

    #[test]
    fn own_flows_that_last_are_copied_and_others_are_not() {
        let snat = ["10.0.0.3", "fd00::3", "10.0.0.4", "10.0.0.5"].map(|ip| ip.parse().unwrap()).to_vec();
        let owned = |owned| Selection {
            groups: OwnedGroups { groups: 2, owned },
            lost: 0,
            snat: snat.clone(),
            after: Duration::from_secs(1),
        };
        // The second address of its family is of group 1, the third of no group.
        let (all, first, second_only) = (owned(0b11), owned(0b01), owned(0b10));
        let replica = all.replica(&view(), |_| true, |_| false).unwrap();
        assert_eq!((replica.backend, replica.snat), (view().backend_address, view().snat));
        // Ticks of 134 ms.
        assert!((1865..=2000).contains(&replica.idle.as_millis()), "{:?}", replica.idle);
        let third = FlowView { snat: Some("10.0.0.5:1024".parse().unwrap()), ..view() };
        assert!(
            first.replica(&view(), |_| true, |_| false).is_none() && second_only.replica(&view(), |_| true, |_| false).is_some()
        );
        assert!(all.replica(&third, |_| true, |_| false).is_none(), "an address of the gateway's own");
        let group = vip_group("192.0.2.100".parse().unwrap(), 2);
        let dnat = FlowView { mode: FlowMode::Dnat, snat: None, ..view() };
        assert!(
            owned(1 << group).replica(&dnat, |_| true, |_| false).is_some()
                && owned(2 >> group).replica(&dnat, |_| true, |_| false).is_none()
        );
        assert!(all.replica(&dnat, |_| false, |_| false).is_none(), "no election moves it");
        let dsr = FlowView { mode: FlowMode::Dsr, state: FlowState::TcpOneWay, snat: None, ..view() };
        assert!(all.replica(&dsr, |_| true, |_| true).is_some() && all.replica(&dsr, |_| true, |_| false).is_none());
        let others = [
            FlowView { snat: Some("10.0.0.9:1024".parse().unwrap()), ..view() },
            FlowView { state: FlowState::TcpAnswered, ..view() },
            FlowView { state: FlowState::TcpClosing, ..view() },
            FlowView { age: second(0), ..view() },
        ];
        let with_lost = Selection { lost: 0b10, ..owned(0b11) };
        let young = FlowView { age: second(0), ..view() };
        let of_first = FlowView { snat: Some("10.0.0.3:1024".parse().unwrap()), ..young };
        assert!(with_lost.replica(&young, |_| true, |_| false).is_some(), "a young one of a lost group");
        assert!(with_lost.replica(&of_first, |_| true, |_| false).is_none(), "of a group that it owns");
        for other in others {
            assert_eq!(all.replica(&other, |_| true, |_| false), None, "{other:?}");
        }
    }
}
