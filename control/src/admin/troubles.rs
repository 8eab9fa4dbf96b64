//! Troubles of the group, as the controller that leads sees them, together with those of all its gateways.
//!
//! Invariant: a look costs no request to a gateway. What a gateway sees of itself comes from the gateway when it is asked
//! for; one that does not answer is a trouble. Nothing is well before the group is known: in each term until all objects
//! are read and gateways had time to connect.
//! Not here: what a trouble is (`proto::trouble`).

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use objects::text;
use proto::trouble::{
    Kind, Memory, OF_A_KIND_MAX, OTHERS, Observed, ObservedCertificate, ObservedGroup, Severity, Trouble, find,
};
use proto::v1::{answer::Reply, question::Query};
use proto::{ServiceName, v1};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::gateway_rows::seconds;
use super::view::View;
use crate::gateways::fleet_queries::SilentError;
use crate::gateways::listener::KeyCertificates;
use crate::plan::WantedStatus;
use crate::status::conditions::{not_served, shortcomings};

/// How often the group is looked at. A generation is older than that when gateways are expected to have it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Time for gateways to connect once the first state of a term is there. They wait 2.5 s at most before they dial again.
const CONNECT_TIME: Duration = Duration::from_secs(5);

/// Keeps the troubles of the group current.
pub(crate) async fn watch(view: View, troubles: watch::Sender<Vec<Trouble>>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut memory, mut newest, mut term) = (Memory::default(), None, None);
    loop {
        ticks.tick().await;
        if view.leads().is_err() {
            (memory, term) = (Memory::default(), None);
            troubles.send_replace(troubles_at_start());
            continue;
        }
        let (now_s, state) = (now_s(), view.state());
        let why = why_unknown(&mut term, state.as_ref().map(|state| state.generation.epoch.as_str()), Instant::now());
        troubles.send_replace(memory.settle(find(&view.observed(now_s, newest, why)), now_s));
        newest = state.map(|state| state.generation.counter);
    }
}

/// The troubles of a group of which nothing is known yet.
pub(crate) fn troubles_at_start() -> Vec<Trouble> {
    vec![Trouble::controller_starting(now_s())]
}

/// Why the group is not known yet: there is no state of this term, or gateways have had no time to connect. `term` is the
/// epoch of the last look, and when it was first seen.
fn why_unknown(term: &mut Option<(String, Instant)>, epoch: Option<&str>, now: Instant) -> Option<&'static str> {
    let Some(epoch) = epoch else {
        *term = None;
        return Some("it has not read all objects yet");
    };
    let (_, since) = match term.take().filter(|(known, _)| known == epoch) {
        Some(known) => term.insert(known),
        None => term.insert((epoch.to_owned(), now)),
    };
    (now.duration_since(*since) < CONNECT_TIME).then_some("it has only just read all objects, and gateways may still connect")
}

fn now_s() -> u64 {
    u64::try_from(seconds(SystemTime::now())).unwrap_or_default()
}

/// The certificates as they are now; files are read.
#[must_use]
pub fn observed_certificates<'a>(all: impl IntoIterator<Item = &'a KeyCertificates>) -> Vec<ObservedCertificate> {
    let one = |certificates: &KeyCertificates| ObservedCertificate {
        key: certificates.key.to_owned(),
        until_s: certificates.validity().map(|validity| validity.until_s),
    };
    all.into_iter().map(one).collect()
}

/// The troubles that `gateway` sees, or without it a controller, as messages.
#[must_use]
pub fn trouble_messages(troubles: &[Trouble], gateway: Option<&str>) -> Vec<v1::Trouble> {
    let message = |trouble: &Trouble| {
        let facts = trouble.kind.facts();
        v1::Trouble {
            severity: facts.severity.as_str().to_owned(),
            kind: facts.word.to_owned(),
            object: trouble.object.clone(),
            cause: trouble.cause.clone(),
            since: text::of_time(trouble.since_s),
            remedy: facts.remedy.to_owned(),
            gateways: gateway.map(str::to_owned).into_iter().collect(),
        }
    };
    troubles.iter().map(message).collect()
}

impl View {
    /// What is known without asking gateways. `newest` is the generation of the last look, `starting` is why not all is
    /// known yet.
    fn observed(&self, now_s: u64, newest: Option<u64>, starting: Option<&str>) -> Observed {
        let mut observed = Observed { now_s, ..Observed::default() };
        if let Ok(gateways) = self.list_gateways() {
            let (connected, registered) = (self.connected(), self.fleet.registered());
            let silent = |gateway| v1::Silent { gateway, reason: SilentError::NoOffer.to_string() };
            observed.group = Some(ObservedGroup {
                starting: starting.map(str::to_owned),
                gateways: gateways.gateways,
                silent: connected.into_iter().filter(|name| !registered.contains(name)).map(silent).collect(),
                vips: self.list_vips().map(|listed| listed.vips).unwrap_or_default(),
                pools: self.list_pools().map(|listed| listed.pools).unwrap_or_default(),
                newest,
            });
            observed.services = self.services_with_causes();
        }
        observed
    }

    /// Services that are not served, or not as they ask, as far as gateways do not know it.
    fn services_with_causes(&self) -> Vec<v1::ServiceStatus> {
        let wanted = self.wanted.borrow();
        let row = |(name, wanted): (&ServiceName, &Arc<WantedStatus>)| {
            let cause = wanted.refusal().map(not_served).or_else(|| shortcomings(wanted).into_iter().next())?;
            // Gateways count backends.
            let (namespace, name, backends, healthy) = (name.namespace.clone(), name.name.clone(), 1, 1);
            let (reason, message) = (cause.reason.into_owned(), cause.message.into_owned());
            Some(v1::ServiceStatus { namespace, name, backends, healthy, reason, message, ..v1::ServiceStatus::default() })
        };
        wanted.iter().filter_map(row).collect()
    }

    /// Troubles of the group and of its gateways, except `own`, which adds its own by [`combine`].
    ///
    /// # Errors
    /// [`View::leads`].
    pub async fn list_troubles(&self, own: Option<&str>) -> Result<v1::ListTroublesResponse, Status> {
        self.leads()?;
        let (now_s, certificates) = (now_s(), observed_certificates(&self.certificates));
        let mut found = find(&Observed { now_s, certificates, ..Observed::default() });
        let others = self.connected().into_iter().filter(|name| own != Some(name.as_str())).collect();
        let mut answers = Vec::new();
        for (gateway, answer) in self.fleet.ask(others, &Query::Troubles(v1::ListTroublesRequest {})).await {
            match answer {
                Ok(Reply::Troubles(mut answer)) => {
                    answer.troubles.iter_mut().for_each(|trouble| trouble.gateways = vec![gateway.clone()]);
                    answers.push(v1::ListTroublesResponse { gateways: vec![gateway], ..answer });
                }
                Ok(_) => found.push(silent(&gateway, "its answer belongs to another request".to_owned(), now_s)),
                Err(error) => found.extend(unanswered(&gateway, error, now_s)),
            }
        }
        let found = self.found_by_requests.lock().unwrap_or_else(PoisonError::into_inner).date(found, now_s);
        let services = u32::try_from(self.wanted.borrow().len()).unwrap_or(u32::MAX);
        let seen_here = |troubles: &[Trouble]| v1::ListTroublesResponse {
            troubles: trouble_messages(troubles, None),
            gateways: Vec::new(),
            services,
        };
        let of_group = combine(seen_here(&self.troubles.borrow()), seen_here(&found));
        Ok(answers.into_iter().fold(of_group, combine))
    }
}

fn silent(gateway: &str, cause: String, now_s: u64) -> Trouble {
    Trouble { kind: Kind::GatewaySilent, object: format!("Gateway {gateway}"), cause, since_s: now_s }
}

/// The trouble of a gateway that did not answer. The looks find one that is not registered, once it had time for it.
fn unanswered(gateway: &str, error: SilentError, now_s: u64) -> Option<Trouble> {
    match error {
        SilentError::NoOffer => None,
        SilentError::Refused(cause) => Some(Trouble { kind: Kind::VersionDiffers, ..silent(gateway, cause, now_s) }),
        other => Some(silent(gateway, other.to_string(), now_s)),
    }
}

/// The cause of a line for the others of a kind whose number is not known, because several gateways see some of them.
const UNCOUNTED: &str = "there are more, as those above: `sluicectl status` at a gateway lists its own";

/// The troubles of `group` and of one gateway. What both see is one trouble, and what several gateways see alike. What
/// the group sees of a gateway that tells of itself is left out. Of a kind at most [`OF_A_KIND_MAX`] are kept, and a line
/// for the others.
#[must_use]
pub fn combine(group: v1::ListTroublesResponse, gateway: v1::ListTroublesResponse) -> v1::ListTroublesResponse {
    let v1::ListTroublesResponse { mut troubles, gateways, services } = group;
    let tells = |object: &str| gateway.gateways.iter().any(|name| object.strip_prefix("Gateway ") == Some(name));
    let of_itself = [Kind::GatewaySilent, Kind::GatewayNotReady, Kind::Drained].map(|kind| kind.facts().word);
    troubles.retain(|trouble| !(of_itself.contains(&trouble.kind.as_str()) && tells(&trouble.object)));
    for new in gateway.troubles {
        let is_same = |known: &&mut v1::Trouble| {
            let is_of_one_cause = known.gateways.is_empty() || known.cause == new.cause || new.object == OTHERS;
            (&known.kind, &known.object) == (&new.kind, &new.object) && is_of_one_cause
        };
        match troubles.iter_mut().find(is_same) {
            Some(known) => {
                known.since = known.since.clone().min(new.since);
                if new.object == OTHERS && known.cause != new.cause {
                    known.cause = UNCOUNTED.to_owned();
                }
                if !known.gateways.is_empty() {
                    known.gateways.extend(new.gateways);
                }
            }
            None => troubles.push(new),
        }
    }
    troubles.sort_by_cached_key(place);
    let gateways = gateways.into_iter().chain(gateway.gateways).collect();
    v1::ListTroublesResponse { troubles: bounded(&troubles), gateways, services: services.max(gateway.services) }
}

/// The worst first, then by kind; kinds of a newer gateway last among those of their severity. The line for the others of
/// a kind is the last of it. A severity that is not known counts as a warning.
fn place(trouble: &v1::Trouble) -> (Severity, usize, String, bool, String) {
    let severity = Severity::ALL.into_iter().find(|severity| severity.as_str() == trouble.severity);
    let kind = Kind::table().iter().position(|facts| facts.word == trouble.kind).unwrap_or(usize::MAX);
    let (word, object) = (trouble.kind.clone(), trouble.object.clone());
    (severity.unwrap_or(Severity::Warning), kind, word, object == OTHERS, object)
}

/// At most [`OF_A_KIND_MAX`] of a kind, and a line for the others.
fn bounded(sorted: &[v1::Trouble]) -> Vec<v1::Trouble> {
    let mut all = Vec::with_capacity(sorted.len());
    for of_kind in sorted.chunk_by(|one, other| one.kind == other.kind) {
        let (listed, others) = of_kind.split_at(of_kind.len().min(OF_A_KIND_MAX));
        all.extend_from_slice(listed);
        match others.first() {
            Some(first) if first.object != OTHERS => {
                let since = others.iter().map(|other| other.since.clone()).min().unwrap_or_default();
                let (object, cause, gateways) = (OTHERS.to_owned(), UNCOUNTED.to_owned(), Vec::new());
                all.push(v1::Trouble { object, cause, since, gateways, ..first.clone() });
            }
            _ => all.extend_from_slice(others),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trouble(kind: Kind, object: &str, cause: &str, gateway: Option<&str>) -> v1::Trouble {
        let trouble = Trouble { kind, object: object.to_owned(), cause: cause.to_owned(), since_s: 1_800_000_000 };
        trouble_messages(&[trouble], gateway).remove(0)
    }

    fn answer(troubles: Vec<v1::Trouble>, gateway: Option<&str>) -> v1::ListTroublesResponse {
        v1::ListTroublesResponse { troubles, gateways: gateway.map(str::to_owned).into_iter().collect(), services: 1 }
    }

    #[test]
    fn the_group_is_not_known_before_its_objects_and_not_before_gateways_could_connect() {
        let first = troubles_at_start();
        assert!(first.len() == 1 && first[0].kind.facts().severity == Severity::Critical, "{first:?}");
        let (mut term, start) = (None, Instant::now());
        let mut is_known = |epoch, after_s| why_unknown(&mut term, epoch, start + Duration::from_secs(after_s)).is_none();
        let rows = [
            (None, 0, false),
            (None, 100, false),
            (Some("1"), 101, false),
            (Some("1"), 105, false),
            (Some("1"), 106, true),
            (Some("2"), 107, false),
            (Some("2"), 112, true),
            (None, 113, false),
            (Some("2"), 114, false),
        ];
        for (epoch, after_s, expected) in rows {
            assert_eq!(is_known(epoch, after_s), expected, "{epoch:?} after {after_s} s");
        }
    }

    #[test]
    fn a_gateway_that_does_not_answer_is_silent_and_one_of_an_older_version_a_warning() {
        let found = |error| unanswered("a", error, 7).map(|trouble| trouble.kind);
        assert_eq!(found(SilentError::TimedOut), Some(Kind::GatewaySilent));
        assert_eq!(found(SilentError::Refused("this gateway does not know the question".to_owned())), Some(Kind::VersionDiffers));
        assert_eq!(found(SilentError::NoOffer), None, "it may have connected just now");
        assert_eq!(Kind::VersionDiffers.facts().severity, Severity::Warning);
        let mut memory = Memory::default();
        let mut since =
            |now_s| memory.date(unanswered("a", SilentError::TimedOut, now_s).into_iter().collect(), now_s)[0].since_s;
        assert_eq!([since(100), since(160)], [100, 100], "it has been silent since the first request");
    }

    #[test]
    fn kinds_of_a_newer_gateway_stand_by_their_severity() {
        let newer = |severity: Severity, kind: &str| v1::Trouble {
            severity: severity.as_str().to_owned(),
            kind: kind.to_owned(),
            ..trouble(Kind::Drained, "Gateway b", "it is new", Some("b"))
        };
        let of_b = vec![
            newer(Severity::Notice, "news"),
            newer(Severity::Critical, "meteorite"),
            trouble(Kind::Drained, "Gateway b", "it is drained", Some("b")),
            trouble(Kind::SomeUnhealthy, "Service default/web", "1 of 3", Some("b")),
            trouble(Kind::PortDown, "Port uplink", "it has no link", Some("b")),
        ];
        let all = combine(answer(Vec::new(), None), answer(of_b, Some("b")));
        let kinds: Vec<_> = all.troubles.iter().map(|trouble| trouble.kind.as_str()).collect();
        assert_eq!(kinds, ["port-down", "meteorite", "some-unhealthy", "drained", "news"]);
    }

    #[test]
    fn of_many_troubles_of_a_kind_in_several_gateways_some_are_kept() {
        let of = |name: &str, numbers: std::ops::Range<usize>, more: usize| {
            let service =
                |number| trouble(Kind::SomeUnhealthy, &format!("Service default/web-{number:03}"), "1 of 3", Some(name));
            let others = trouble(Kind::SomeUnhealthy, OTHERS, &format!("{more} more, as those above"), Some(name));
            answer(
                numbers.map(service).chain([others, trouble(Kind::Drained, "Gateway x", "", Some(name))]).collect(),
                Some(name),
            )
        };
        let alike = combine(combine(answer(Vec::new(), None), of("a", 0..50, 9)), of("b", 0..50, 9));
        assert_eq!(alike.troubles.len(), OF_A_KIND_MAX + 2);
        assert_eq!((&*alike.troubles[50].object, &*alike.troubles[50].cause), (OTHERS, "9 more, as those above"));
        let all = [of("b", 20..70, 8), of("c", 60..110, 8)].into_iter().fold(of("a", 0..50, 9), combine);
        let objects: Vec<_> = all.troubles.iter().map(|trouble| trouble.object.as_str()).collect();
        assert_eq!(objects.len(), OF_A_KIND_MAX + 2, "{objects:?}");
        assert_eq!((objects[0], objects[49]), ("Service default/web-000", "Service default/web-049"));
        assert_eq!((objects[50], &*all.troubles[50].cause, objects[51]), (OTHERS, UNCOUNTED, "Gateway x"));
    }

    #[test]
    fn what_several_see_is_one_trouble_and_the_worst_comes_first() {
        let web = "Service default/web";
        let group = answer(
            vec![
                trouble(Kind::NoEndpoints, web, "of the controller", None),
                trouble(Kind::GatewayNotReady, "Gateway a", "of the controller", None),
                trouble(Kind::GatewayNotReady, "Gateway c", "of the controller", None),
            ],
            None,
        );
        let of = |name: &str, failing: &str| {
            let some = trouble(Kind::SomeUnhealthy, "Service default/api", failing, Some(name));
            let none = trouble(Kind::NoEndpoints, web, "of a gateway", Some(name));
            answer(vec![trouble(Kind::PortDown, "Port uplink", "it has no link", Some(name)), some, none], Some(name))
        };
        let all = combine(combine(group, of("a", "1 of 3")), of("b", "1 of 3"));
        let shown: Vec<_> = all.troubles.iter().map(|t| (&*t.kind, &*t.object, &*t.cause, t.gateways.join(" "))).collect();
        let expected = [
            ("port-down", "Port uplink", "it has no link", "a b".to_owned()),
            ("gateway-not-ready", "Gateway c", "of the controller", String::new()),
            ("no-endpoints", web, "of the controller", String::new()),
            ("some-unhealthy", "Service default/api", "1 of 3", "a b".to_owned()),
        ];
        assert_eq!(shown, expected);
        assert_eq!(all.gateways, ["a", "b"]);
        let two = combine(answer(of("a", "1 of 3").troubles, Some("a")), of("b", "2 of 3"));
        assert_eq!(two.troubles.iter().filter(|trouble| trouble.kind == "some-unhealthy").count(), 2, "they see it differently");
    }
}
