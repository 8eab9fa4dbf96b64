//! Troubles of the group, as the controller that leads sees them, together with those of all its gateways.
//!
//! Invariant: a look costs no request to a gateway. What a gateway sees of itself comes from the gateway when it is asked
//! for; one that does not answer is a trouble.
//! Not here: what a trouble is (`proto::trouble`).

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use objects::text;
use proto::trouble::{Kind, Memory, Observed, ObservedCertificate, ObservedGroup, Trouble, find};
use proto::v1::{answer::Reply, question::Query};
use proto::{ServiceName, v1};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tonic::Status;

use super::gateway_rows::seconds;
use super::view::View;
use crate::gateways::listener::KeyCertificates;
use crate::plan::WantedStatus;
use crate::status::conditions::{not_served, shortcomings};

/// How often the group is looked at. A generation is older than that when gateways are expected to have it.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Keeps the troubles of the group current.
pub(crate) async fn watch(view: View, troubles: watch::Sender<Vec<Trouble>>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let (mut memory, mut newest) = (Memory::default(), None);
    loop {
        ticks.tick().await;
        let now_s = now_s();
        troubles.send_replace(memory.settle(find(&view.observed(now_s, newest)), now_s));
        newest = view.state().map(|state| state.generation.counter);
    }
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
    /// What is known without asking gateways. `newest` is the generation of the last look.
    fn observed(&self, now_s: u64, newest: Option<u64>) -> Observed {
        let mut observed = Observed { now_s, ..Observed::default() };
        if let Ok(gateways) = self.list_gateways() {
            observed.group = Some(ObservedGroup {
                gateways: gateways.gateways,
                silent: Vec::new(),
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
        let certificates = observed_certificates(&self.certificates);
        let mut troubles = find(&Observed { now_s: now_s(), certificates, ..Observed::default() });
        troubles.extend(self.troubles.borrow().iter().cloned());
        let mut all = v1::ListTroublesResponse {
            troubles: trouble_messages(&troubles, None),
            gateways: Vec::new(),
            services: u32::try_from(self.wanted.borrow().len()).unwrap_or(u32::MAX),
        };
        let others = self.connected().into_iter().filter(|name| own != Some(name.as_str())).collect();
        for (gateway, answer) in self.fleet.ask(others, &Query::Troubles(v1::ListTroublesRequest {})).await {
            let of_gateway = match answer {
                Ok(Reply::Troubles(mut answer)) => {
                    answer.troubles.iter_mut().for_each(|trouble| trouble.gateways = vec![gateway.clone()]);
                    v1::ListTroublesResponse { gateways: vec![gateway], ..answer }
                }
                Ok(_) => silent(&gateway, "its answer belongs to another request"),
                Err(error) => silent(&gateway, &error.to_string()),
            };
            all = combine(all, of_gateway);
        }
        Ok(all)
    }
}

fn silent(gateway: &str, reason: &str) -> v1::ListTroublesResponse {
    let (object, cause) = (format!("Gateway {gateway}"), reason.to_owned());
    let troubles = trouble_messages(&[Trouble { kind: Kind::GatewaySilent, object, cause, since_s: now_s() }], None);
    v1::ListTroublesResponse { troubles, ..v1::ListTroublesResponse::default() }
}

/// The troubles of `group` and of one gateway. What both see is one trouble, and what several gateways see alike. What
/// the group sees of a gateway that tells of itself is left out.
#[must_use]
pub fn combine(group: v1::ListTroublesResponse, gateway: v1::ListTroublesResponse) -> v1::ListTroublesResponse {
    let v1::ListTroublesResponse { mut troubles, gateways, services } = group;
    let tells = |object: &str| gateway.gateways.iter().any(|name| object.strip_prefix("Gateway ") == Some(name));
    let of_itself = [Kind::GatewayNotReady, Kind::Drained].map(|kind| kind.facts().word);
    troubles.retain(|trouble| !(of_itself.contains(&trouble.kind.as_str()) && tells(&trouble.object)));
    for new in gateway.troubles {
        let is_same = |known: &&mut v1::Trouble| {
            (&known.kind, &known.object) == (&new.kind, &new.object) && (known.gateways.is_empty() || known.cause == new.cause)
        };
        match troubles.iter_mut().find(is_same) {
            Some(known) => {
                known.since = known.since.clone().min(new.since);
                if !known.gateways.is_empty() {
                    known.gateways.extend(new.gateways);
                }
            }
            None => troubles.push(new),
        }
    }
    let place = |trouble: &v1::Trouble| Kind::table().iter().position(|facts| facts.word == trouble.kind);
    troubles.sort_by_cached_key(|trouble| (place(trouble).unwrap_or(usize::MAX), trouble.object.clone()));
    let gateways = gateways.into_iter().chain(gateway.gateways).collect();
    v1::ListTroublesResponse { troubles, gateways, services: services.max(gateway.services) }
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
