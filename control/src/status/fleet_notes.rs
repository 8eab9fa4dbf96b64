//! Notes about gateways: takeovers, stations that announce the same VIPs, partners and routing sessions that come and go.
//!
//! Invariant: a burst of takeovers is one note for each gateway that takes part. What a gateway reports first is no
//! change, so that a new leader repeats no takeover; what it reports next is one, however soon, and also if it reports the
//! same as some minutes before: what was in between was another change.
//! Not here: how gateways report, and how notes are written.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use objects::note::{Cause, Note, Remark, Subject};
use proto::{FleetStatus, RoutingSession, ServiceLimit, ServiceName, SessionHealth, SessionProtocol};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::gateway_conditions::named;
use super::queue::Statuses;
use crate::gateways::registry::Gateways;
use crate::kubernetes::recorder::Recorder;

/// A burst is over after this time: gateways report at most once a second.
const SETTLE: Duration = Duration::from_secs(2);
/// Longest wait for the uid of an `EdgeGateway` object that is being created. `kubectl describe` shows no Event without it.
const UID_MAX: Duration = Duration::from_secs(10);
/// Maximum number of VIPs with a note of their own in one burst.
const DUPLICATES_MAX: usize = 16;

/// Maximum number of Services with a note about a limit in one burst.
const LIMITS_MAX: usize = 16;

/// The uids of `EdgeGateway` objects by name, as far as they are known.
pub type GatewayUids = Arc<BTreeMap<String, String>>;

/// A note and the uid of its object.
type Addressed = (Note, Option<String>);
/// A Service and its uid.
type OwnedService = (ServiceName, Option<String>);

/// Records notes while it is polled and `gateways` has a sender.
pub async fn record(
    mut gateways: watch::Receiver<Gateways>,
    statuses: watch::Receiver<Option<Arc<Statuses>>>,
    mut uids: watch::Receiver<GatewayUids>,
    recorder: Arc<Recorder>,
) {
    let (mut seen, mut waiting) = (LastReports::default(), WaitingEvents::default());
    let mut settles = Some(Instant::now());
    loop {
        if settles.take_if(|at| *at <= Instant::now()).is_some() {
            let changes = seen.take(&gateways.borrow());
            let (planned, known) = (statuses.borrow().clone(), uids.borrow().clone());
            for change in &changes {
                let of_services = change.limits(planned.as_deref());
                for (note, uid) in
                    of_services.into_iter().chain(change.notes(&|vip| services_with(vip, planned.as_deref()), &known))
                {
                    // Without Events nobody needs a uid.
                    match (uid.is_some() || recorder.events().is_none(), change.before.is_some()) {
                        (true, true) => recorder.record_change(&note, uid.as_deref()),
                        (true, false) => recorder.record(&note, uid.as_deref()),
                        (false, _) => {
                            recorder.list(&note);
                            waiting.add(note);
                        }
                    }
                }
            }
        }
        for (note, uid) in waiting.take(&uids.borrow_and_update(), Instant::now()) {
            recorder.write_change(&note, uid.as_deref());
        }
        let (settled, due) = (settles, waiting.due());
        tokio::select! {
            changed = gateways.changed() => match changed {
                Ok(()) => {
                    seen.note_first(&gateways.borrow_and_update());
                    settles = settles.or(Some(Instant::now() + SETTLE));
                }
                Err(_) => return,
            },
            Ok(()) = uids.changed() => {}
            () = until(settled) => {}
            () = until(due) => {}
        }
    }
}

/// Waits until then, or without end.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Events about gateways whose objects have no uid yet.
#[derive(Default)]
struct WaitingEvents(Vec<(Note, Instant)>);

impl WaitingEvents {
    fn add(&mut self, note: Note) {
        self.0.push((note, Instant::now() + UID_MAX));
    }

    /// When the first one has waited for too long.
    fn due(&self) -> Option<Instant> {
        self.0.iter().map(|(_, due)| *due).min()
    }

    /// Takes those whose uid is known, or that have waited for too long.
    fn take(&mut self, uids: &BTreeMap<String, String>, now: Instant) -> Vec<Addressed> {
        let uid_of = |note: &Note| match &note.subject {
            Subject::Gateway(name) => uids.get(name).cloned(),
            _ => None,
        };
        let ready = self.0.extract_if(.., |(note, due)| uid_of(note).is_some() || *due <= now);
        let addressed = |(note, _): (Note, Instant)| {
            let uid = uid_of(&note);
            (note, uid)
        };
        ready.map(addressed).collect()
    }
}

/// What a gateway reported when it was looked at last.
struct LastReport {
    fleet: Arc<FleetStatus>,
    /// Whether this was its first report, which is still to be looked at.
    is_first: bool,
}

/// What each gateway reported when it was looked at last, or first since then.
#[derive(Default)]
struct LastReports(BTreeMap<String, LastReport>);

/// What a gateway reported before, and now.
struct ReportChange {
    gateway: String,
    before: Option<Arc<FleetStatus>>,
    now: Arc<FleetStatus>,
    is_drained: bool,
}

impl LastReports {
    /// The changes since the last time.
    fn take(&mut self, gateways: &Gateways) -> Vec<ReportChange> {
        // A gateway that reconnects appears twice; the last connection is in use.
        let reported = gateways.iter().filter_map(|gateway| Some((gateway.name.clone(), Arc::clone(gateway.fleet.as_ref()?))));
        let reported: BTreeMap<_, _> = reported.collect();
        let is_connected = |name: &String| gateways.iter().any(|gateway| gateway.name == *name);
        self.0.retain(|name, _| is_connected(name) || gateways.disconnected().contains_key(name));
        let mut changes = Vec::new();
        for (gateway, now) in reported {
            let is_drained = gateways.is_drained(&gateway);
            let mut change = |before: Option<Arc<FleetStatus>>, now: &Arc<FleetStatus>| {
                changes.push(ReportChange { gateway: gateway.clone(), before, now: Arc::clone(now), is_drained });
            };
            match self.0.insert(gateway.clone(), LastReport { fleet: Arc::clone(&now), is_first: false }) {
                None => change(None, &now),
                Some(LastReport { fleet: before, is_first }) => {
                    if is_first {
                        change(None, &before);
                    }
                    if !Arc::ptr_eq(&before, &now) {
                        change(Some(before), &now);
                    }
                }
            }
        }
        changes
    }

    /// Keeps what gateways report that have not reported before: the next look compares with it.
    fn note_first(&mut self, gateways: &Gateways) {
        for gateway in gateways.iter() {
            if let Some(fleet) = &gateway.fleet {
                let first = || LastReport { fleet: Arc::clone(fleet), is_first: true };
                self.0.entry(gateway.name.clone()).or_insert_with(first);
            }
        }
    }
}

impl ReportChange {
    fn notes(&self, services: &impl Fn(IpAddr) -> Vec<OwnedService>, uids: &BTreeMap<String, String>) -> Vec<Addressed> {
        let mut remarks = Vec::new();
        if let Some(before) = &self.before {
            remarks.extend(ownership(before, &self.now));
            remarks.extend(partners(before, &self.now));
            remarks.extend(sessions(before, &self.now));
        }
        remarks.extend(self.unfit());
        let (about_vips, mut notes) = self.duplicates(services);
        remarks.extend(about_vips);
        let (subject, uid) = (Subject::Gateway(self.gateway.clone()), uids.get(&self.gateway).cloned());
        notes.extend(remarks.into_iter().map(|remark| (Note { subject: subject.clone(), remark }, uid.clone())));
        notes
    }

    /// Services that the gateway begins to limit.
    fn limits(&self, statuses: Option<&Statuses>) -> Vec<Addressed> {
        let before = self.before.as_ref().map_or(&[][..], |before| &before.limits);
        let was = |limit: &ServiceLimit| before.iter().any(|old| (&old.service, old.kind) == (&limit.service, limit.kind));
        let note = |limit: &ServiceLimit| {
            let text = format!("on gateway {}: {}", self.gateway, limit.text);
            let subject = Subject::Service(limit.service.clone());
            let uid = statuses.and_then(|statuses| statuses.wanted.get(&limit.service)).map(|wanted| wanted.object.uid.clone());
            (Note { subject, remark: Remark::new(Cause::Limited(limit.kind), text) }, uid.filter(|uid| !uid.is_empty()))
        };
        self.now.limits.iter().filter(|limit| !was(limit)).take(LIMITS_MAX).map(note).collect()
    }

    /// A gateway that begins to leave its VIPs to others. An operator who drains it knows.
    fn unfit(&self) -> Option<Remark> {
        let unfit = |status: &FleetStatus| status.election.as_ref().and_then(|election| election.unfit.clone());
        let why = unfit(&self.now).filter(|_| !self.is_drained)?;
        let is_new = self.before.as_ref().and_then(|before| unfit(before)).is_none();
        is_new.then(|| Remark::new(Cause::Unfit, format!("the gateway leaves its VIPs to other gateways: {why}")))
    }

    /// VIPs that another station begins to announce: remarks about the gateway, and notes about the Services.
    fn duplicates(&self, services: &impl Fn(IpAddr) -> Vec<OwnedService>) -> (Vec<Remark>, Vec<Addressed>) {
        let before = |vip: &IpAddr| self.before.as_ref().and_then(|before| before.duplicates.get(vip));
        let new = self.now.duplicates.iter().filter(|(vip, station)| before(vip) != Some(station)).take(DUPLICATES_MAX);
        let (mut remarks, mut notes) = (Vec::new(), Vec::new());
        for (vip, station) in new {
            let services = services(*vip);
            let of = if services.is_empty() {
                String::new()
            } else {
                format!(" of Service {}", named(services.iter().map(|(name, _)| name.to_string())))
            };
            let text = format!("the station with Ethernet address {station} announces VIP {vip}{of} too");
            remarks.push(Remark::new(Cause::DuplicateVip, text));
            let text = format!(
                "the station with Ethernet address {station} announces {vip} too, so clients may reach that station instead of \
                 gateway {}",
                self.gateway
            );
            let note = |service: ServiceName| Note {
                subject: Subject::Service(service),
                remark: Remark::new(Cause::DuplicateVip, text.clone()),
            };
            notes.extend(services.into_iter().map(|(service, uid)| (note(service), uid)));
        }
        (remarks, notes)
    }
}

/// The Services that have a VIP.
fn services_with(vip: IpAddr, statuses: Option<&Statuses>) -> Vec<OwnedService> {
    let wanted = statuses.into_iter().flat_map(|statuses| statuses.wanted.values());
    let with_it = wanted.filter(|wanted| wanted.ingress.iter().any(|ingress| ingress.ip == vip));
    let uid = |uid: &String| Some(uid.clone()).filter(|uid| !uid.is_empty());
    with_it.map(|wanted| (wanted.object.name.clone(), uid(&wanted.object.uid))).collect()
}

/// Groups that a gateway has taken over, and those that it owns no longer.
fn ownership(before: &FleetStatus, now: &FleetStatus) -> Vec<Remark> {
    let Some(new) = &now.election else { return Vec::new() };
    let owned_before = before.election.as_ref().filter(|old| old.groups == new.groups).map_or(0, |old| old.owned);
    let of = |cause, what: &str, groups: u64| {
        let owns = new.owned.count_ones();
        let text = format!(
            "{what} {} of {} groups of VIPs ({}); it owns {owns} now, and has taken over {} since its start",
            groups.count_ones(),
            new.groups,
            ranges(groups),
            new.takeovers
        );
        (groups != 0).then(|| Remark::new(cause, text))
    };
    let taken = of(Cause::TookOver, "the gateway has taken over", new.owned & !owned_before);
    let lost = of(Cause::OwnershipLost, "the gateway no longer owns", owned_before & !new.owned);
    taken.into_iter().chain(lost).collect()
}

/// Bits as text: "0-3, 7".
fn ranges(bits: u64) -> String {
    let is_set = |bit: u32| bits >> bit & 1 == 1;
    let (mut texts, mut bit) = (Vec::new(), 0);
    while bit < u64::BITS {
        let first = bit;
        while bit < u64::BITS && is_set(bit) {
            bit += 1;
        }
        match bit - first {
            0 => bit += 1,
            1 => texts.push(first.to_string()),
            _ => texts.push(format!("{first}-{}", bit - 1)),
        }
    }
    texts.join(", ")
}

/// Partners that have all flows now, or no longer.
fn partners(before: &FleetStatus, now: &FleetStatus) -> Vec<Remark> {
    let was_in_sync = |address: &str| Some(before.partners.iter().find(|old| old.address == address)?.is_in_sync);
    let remark = |partner: &proto::FleetPartner| {
        let was = was_in_sync(&partner.address).unwrap_or(false);
        let name = &partner.name;
        match (was, partner.is_in_sync) {
            (false, true) => Some(Remark::new(Cause::PartnerInSync, format!("partner {name} has all flows of the gateway"))),
            (true, false) => {
                let text = format!("partner {name} lacks flows of the gateway; they break if the gateway dies now");
                Some(Remark::new(Cause::PartnerOutOfSync, text))
            }
            _ => None,
        }
    };
    now.partners.iter().filter_map(remark).collect()
}

/// Routing sessions that were up and are down, or the other way round.
fn sessions(before: &FleetStatus, now: &FleetStatus) -> Vec<Remark> {
    let same = |new: &RoutingSession| before.sessions.iter().find(|old| (old.protocol, &old.peer) == (new.protocol, &new.peer));
    let remark = |session: &RoutingSession| {
        let protocol = match session.protocol {
            SessionProtocol::Bgp => "BGP",
            SessionProtocol::Bfd => "BFD",
        };
        let RoutingSession { peer, state, .. } = session;
        match (same(session)?.health, session.health) {
            (SessionHealth::Up, SessionHealth::Down) => {
                Some(Remark::new(Cause::SessionDown, format!("the {protocol} session with {peer} is down ({state})")))
            }
            (SessionHealth::Down, SessionHealth::Up) => {
                Some(Remark::new(Cause::SessionUp, format!("the {protocol} session with {peer} is up")))
            }
            _ => None,
        }
    };
    now.sessions.iter().filter_map(remark).collect()
}

#[cfg(test)]
mod tests {
    use proto::{FleetPartner, LimitKind, VipElection};
    use tokio::time::sleep;

    use super::*;
    use crate::gateways::registry::{Connection, Report};
    use crate::kubernetes::EventWriter;

    fn owning(owned: u64, takeovers: u64) -> FleetStatus {
        let election = VipElection { groups: 16, owned, takeovers, ..VipElection::default() };
        FleetStatus { election: Some(election), ..FleetStatus::default() }
    }

    fn session(health: SessionHealth) -> FleetStatus {
        let (peer, state) = ("192.0.2.1".to_owned(), "Active".to_owned());
        let session = RoutingSession { protocol: SessionProtocol::Bgp, peer, health, state, since_s: 0 };
        FleetStatus { sessions: vec![session], ..FleetStatus::default() }
    }

    fn partner(is_in_sync: bool) -> FleetStatus {
        let partner = FleetPartner { name: "edge-2".into(), address: "a".into(), is_in_sync, lag_ms: None };
        FleetStatus { partners: vec![partner], ..FleetStatus::default() }
    }

    fn duplicate(station: &str) -> FleetStatus {
        FleetStatus { duplicates: [("192.0.2.100".parse().unwrap(), station.to_owned())].into(), ..FleetStatus::default() }
    }

    fn unfit(why: &str) -> FleetStatus {
        let election = VipElection { groups: 16, unfit: Some(why.to_owned()), ..VipElection::default() };
        FleetStatus { election: Some(election), ..FleetStatus::default() }
    }

    fn notes(before: Option<FleetStatus>, now: FleetStatus) -> Vec<(Cause, String)> {
        let change =
            ReportChange { gateway: "edge-1".into(), before: before.map(Arc::new), now: Arc::new(now), is_drained: false };
        change
            .notes(&|_| Vec::new(), &BTreeMap::new())
            .into_iter()
            .map(|(note, _)| (note.remark.cause, note.remark.text))
            .collect()
    }

    fn causes(before: Option<FleetStatus>, now: FleetStatus) -> Vec<Cause> {
        notes(before, now).into_iter().map(|(cause, _)| cause).collect()
    }

    #[test]
    fn a_service_that_a_gateway_begins_to_limit_is_noted_once_with_its_name() {
        let limit = |kind, text: &str| ServiceLimit { service: ServiceName::new("shop", "web"), kind, text: text.to_owned() };
        let status = |limits: &[ServiceLimit]| Arc::new(FleetStatus { limits: limits.to_vec(), ..FleetStatus::default() });
        let change = |before: Option<&[ServiceLimit]>, now: &[ServiceLimit]| {
            let change =
                ReportChange { gateway: "edge-1".to_owned(), before: before.map(status), now: status(now), is_drained: false };
            change.limits(None).into_iter().map(|(note, _)| note).collect::<Vec<_>>()
        };
        let share = limit(LimitKind::FlowShare, "it has its share");
        let first = change(None, std::slice::from_ref(&share));
        assert_eq!(first.len(), 1);
        assert_eq!(first[0].subject, Subject::Service(ServiceName::new("shop", "web")));
        assert_eq!(first[0].remark, Remark::new(Cause::Limited(LimitKind::FlowShare), "on gateway edge-1: it has its share"));
        let newer = limit(LimitKind::FlowShare, "it has its share still");
        assert_eq!(change(Some(std::slice::from_ref(&share)), std::slice::from_ref(&newer)), []);
        let more = change(Some(std::slice::from_ref(&share)), &[share.clone(), limit(LimitKind::SnatPorts, "few ports")]);
        assert_eq!(more.iter().map(|note| note.remark.cause.as_str()).collect::<Vec<_>>(), ["SnatPortsShort"]);
    }

    #[test]
    fn a_takeover_is_one_note_with_all_groups() {
        let notes = notes(Some(owning(0b1, 1)), owning(0b1000_1110, 5));
        assert_eq!(
            notes,
            [
                (
                    Cause::TookOver,
                    "the gateway has taken over 4 of 16 groups of VIPs (1-3, 7); it owns 4 now, and has taken over 5 since its start"
                        .to_owned()
                ),
                (
                    Cause::OwnershipLost,
                    "the gateway no longer owns 1 of 16 groups of VIPs (0); it owns 4 now, and has taken over 5 since its start"
                        .to_owned()
                ),
            ]
        );
        assert_eq!(ranges(u64::MAX), "0-63");
        assert_eq!(ranges(1 << 63 | 1), "0, 63");
    }

    #[test]
    fn what_is_reported_first_is_no_change_but_a_problem_is_one() {
        assert_eq!(causes(None, owning(0xffff, 16)), []);
        assert_eq!(causes(None, session(SessionHealth::Down)), []);
        assert_eq!(causes(None, partner(false)), []);
        assert_eq!(causes(None, duplicate("02:00:00:00:00:09")), [Cause::DuplicateVip]);
        assert_eq!(causes(None, unfit("a port has no link")), [Cause::Unfit]);
    }

    #[test]
    fn changes_of_sessions_partners_and_fitness_are_noted_once() {
        let (up, down, off) = (SessionHealth::Up, SessionHealth::Down, SessionHealth::Disabled);
        assert_eq!(causes(Some(session(up)), session(down)), [Cause::SessionDown]);
        assert_eq!(causes(Some(session(down)), session(up)), [Cause::SessionUp]);
        assert_eq!(causes(Some(session(up)), session(off)), []);
        assert_eq!(causes(Some(session(up)), FleetStatus::default()), []);
        assert_eq!(causes(Some(partner(true)), partner(false)), [Cause::PartnerOutOfSync]);
        assert_eq!(causes(Some(partner(false)), partner(true)), [Cause::PartnerInSync]);
        assert_eq!(causes(Some(FleetStatus::default()), partner(false)), []);
        assert_eq!(causes(Some(unfit("a")), unfit("b")), []);
        assert_eq!(causes(Some(duplicate("x")), duplicate("x")), []);
        assert_eq!(causes(Some(duplicate("x")), duplicate("y")), [Cause::DuplicateVip]);
    }

    #[test]
    fn a_duplicate_vip_is_told_to_the_service_too() {
        let name = ServiceName::new("shop", "a");
        let services = |vip: IpAddr| {
            assert_eq!(vip.to_string(), "192.0.2.100");
            vec![(ServiceName::new("shop", "a"), Some("s".to_owned()))]
        };
        let now = Arc::new(duplicate("02:00:00:00:00:09"));
        let change = ReportChange { gateway: "edge-1".into(), before: None, now, is_drained: false };
        let uids = [("edge-1".to_owned(), "u".to_owned())].into();
        let notes = change.notes(&services, &uids);
        let subjects: Vec<_> = notes.iter().map(|(note, uid)| (note.subject.clone(), uid.as_deref())).collect();
        assert_eq!(subjects, [(Subject::Service(name), Some("s")), (Subject::Gateway("edge-1".to_owned()), Some("u"))]);
        assert!(notes.iter().all(|(note, _)| note.remark.text.contains("02:00:00:00:00:09")));
        assert!(notes[1].0.remark.text.contains("shop/a"));
    }

    #[tokio::test(start_paused = true)]
    async fn a_takeover_right_after_the_first_report_is_an_event() {
        let gateways = watch::Sender::new(Gateways::default());
        let recorder = Arc::new(Recorder::default());
        let task = tokio::spawn(record(
            gateways.subscribe(),
            watch::channel(None).1,
            watch::channel(GatewayUids::default()).1,
            Arc::clone(&recorder),
        ));
        let connections = ["edge-1", "edge-2"].map(|name| Connection::open(&gateways, name, "0.1.0", Vec::new()));
        let report = |n: usize, fleet| connections[n].report(Report { ready: true, fleet: Some(fleet), ..Report::default() });
        sleep(SETTLE / 2).await;
        report(0, owning(0, 0));
        report(1, unfit("a port has no link"));
        sleep(SETTLE / 4).await;
        report(0, owning(0b11, 2));
        sleep(2 * SETTLE).await;
        let noted = || {
            let one = |one: crate::kubernetes::recorder::RecordedNote| (one.note.subject, one.note.remark.cause);
            recorder.newest().into_iter().map(one).collect::<Vec<_>>()
        };
        let gateway = |name: &str| Subject::Gateway(name.to_owned());
        let expected = [(gateway("edge-1"), Cause::TookOver), (gateway("edge-2"), Cause::Unfit)];
        assert_eq!(noted(), expected, "and the problem of the first report is one");
        // A new leader hears of the same gateways, and repeats nothing.
        task.abort();
        let (again, uids) = (Arc::new(Recorder::default()), watch::channel(GatewayUids::default()).1);
        let task = tokio::spawn(record(gateways.subscribe(), watch::channel(None).1, uids, Arc::clone(&again)));
        sleep(2 * SETTLE).await;
        report(0, owning(0b11, 2));
        sleep(2 * SETTLE).await;
        assert!(again.newest().iter().all(|one| one.note.remark.cause != Cause::TookOver));
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_session_that_goes_down_again_within_minutes_is_an_event_again() {
        let gateways = watch::Sender::new(Gateways::default());
        let connection = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let report = |fleet| connection.report(Report { ready: true, fleet: Some(fleet), ..Report::default() });
        let events = Arc::new(EventWriter::new("test"));
        let recorder = Arc::new(Recorder::after(None, Some(Arc::clone(&events))));
        let uids = GatewayUids::new([("edge-1".to_owned(), "u".to_owned())].into());
        let task = tokio::spawn(record(gateways.subscribe(), watch::channel(None).1, watch::channel(uids).1, recorder));
        report(session(SessionHealth::Up));
        sleep(2 * SETTLE).await;
        for count in 1..=3 {
            for (health, cause) in [(SessionHealth::Down, Cause::SessionDown), (SessionHealth::Up, Cause::SessionUp)] {
                report(session(health));
                sleep(2 * SETTLE).await;
                let queued: Vec<_> = events.take_queued().into_iter().map(|(note, count)| (note.remark.cause, count)).collect();
                assert_eq!(queued, [(cause, count)]);
            }
        }
        task.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn an_event_waits_for_the_uid_of_its_gateway() {
        let note = |name: &str| Note {
            subject: Subject::Gateway(name.to_owned()),
            remark: Remark::new(Cause::TookOver, "the gateway has taken over".to_owned()),
        };
        let mut waiting = WaitingEvents::default();
        assert_eq!(waiting.due(), None);
        waiting.add(note("edge-1"));
        waiting.add(note("edge-2"));
        let due = waiting.due().unwrap();
        assert_eq!(due, Instant::now() + UID_MAX);
        let uids = [("edge-1".to_owned(), "u".to_owned())].into();
        assert_eq!(waiting.take(&BTreeMap::new(), Instant::now()), []);
        assert_eq!(waiting.take(&uids, Instant::now()), [(note("edge-1"), Some("u".to_owned()))]);
        assert_eq!(waiting.take(&uids, due), [(note("edge-2"), None)], "its object cannot be created");
        assert_eq!(waiting.due(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_burst_of_takeovers_is_one_event_and_a_drained_gateway_is_not_unfit() {
        let gateways = watch::Sender::new(Gateways::default());
        let connection = Connection::open(&gateways, "edge-1", "0.1.0", Vec::new());
        let report = |fleet| connection.report(Report { ready: true, fleet: Some(fleet), ..Report::default() });
        report(owning(0, 0));
        let recorder = Arc::new(Recorder::default());
        let task = tokio::spawn(record(
            gateways.subscribe(),
            watch::channel(None).1,
            watch::channel(GatewayUids::default()).1,
            Arc::clone(&recorder),
        ));
        sleep(SETTLE).await;
        for groups in 1..=16 {
            report(owning((1 << groups) - 1, groups));
            sleep(Duration::from_millis(60)).await;
        }
        sleep(2 * SETTLE).await;
        let events: Vec<_> = recorder.newest().into_iter().map(|one| (one.note.subject, one.note.remark)).collect();
        assert_eq!(events.len(), 1, "{events:?}");
        assert_eq!(events[0].0, Subject::Gateway("edge-1".to_owned()));
        assert!(events[0].1.text.contains("16 of 16 groups of VIPs (0-15)"), "{events:?}");
        Gateways::drain(&gateways, ["edge-1".to_owned()].into());
        report(unfit("it is drained"));
        sleep(2 * SETTLE).await;
        let causes: Vec<_> = recorder.newest().into_iter().map(|one| one.note.remark.cause).collect();
        assert_eq!(causes, [Cause::TookOver, Cause::OwnershipLost]);
        task.abort();
    }
}
