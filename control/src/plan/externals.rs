//! `spec.externalIPs`: which of them a Service may use. Any tenant may write any address there (CVE-2020-8554), so only
//! addresses inside the configured `externalIPs.allowed` count.
//!
//! Invariant: no two Services get the same (address, protocol, port); the older Service wins. No Service gets an
//! address that a pool, a gateway or the cluster uses otherwise. Deliberately not here: how packets for such an address
//! reach a gateway. As with kube-proxy, the operator routes them there; gateways do not answer ARP for these addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use proto::{Family, Protocol, Reason, Refusal, ServiceName};

use crate::config::settings::ControllerSettings;
use crate::plan::selection::{Fence, special};
use crate::world::World;
use objects::note::{Cause, Remark};
use objects::{Candidate, Kind, ServiceSpec};

/// Maximum number of `externalIPs` per Service, so that no Service can fill the gateways' tables: 65,536 Services with
/// one port each make a million frontends.
const EXTERNAL_IPS_MAX: usize = 16;

/// The result for one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Externals {
    /// Permitted addresses in the order of the field.
    pub addresses: Vec<IpAddr>,
    /// Why the others are refused.
    pub remarks: Vec<Remark>,
}

impl Externals {
    /// Why a Service that has only `externalIPs` is not served; `None` if it got any.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        let remark = self.remarks.first().filter(|_| self.addresses.is_empty())?;
        let Cause::Reason(reason) = remark.cause else { return None };
        Some(Refusal { reason, message: remark.text.clone() })
    }
}

/// The frontends that older Services have.
type TakenFrontends<'a> = BTreeMap<(IpAddr, Protocol, u16), &'a ServiceName>;

/// The result for each Service. Services must come in order of age, oldest first. The VIPs outside every pool of
/// `fence` are those of load balancers.
pub fn assign<'a>(candidates: impl Iterator<Item = &'a Candidate>, fence: &Fence<'_>) -> Vec<Externals> {
    let mut taken = TakenFrontends::new();
    candidates.map(|candidate| assign_to(candidate, fence, &mut taken)).collect()
}

fn assign_to<'a>(candidate: &'a Candidate, fence: &Fence<'_>, taken: &mut TakenFrontends<'a>) -> Externals {
    let mut got = Externals::default();
    let Ok(spec) = &candidate.wanted else { return got };
    if fence.settings.ownership.external_ips_allowed.is_empty() {
        if !spec.external_ips.is_empty() {
            let text = "spec.externalIPs has no effect: none is allowed (`externalIPs.allowed`), since any tenant could \
                        claim any address by it (CVE-2020-8554)";
            got.remarks.push(Remark::new(Cause::FieldIgnored, text));
        }
        return got;
    }
    for (index, &address) in spec.external_ips.iter().enumerate() {
        let why = if index < EXTERNAL_IPS_MAX { refusal(address, spec, fence, taken) } else { Some(too_many()) };
        match why {
            None => {
                taken.extend(spec.ports.iter().map(|port| ((address, port.protocol, port.port), &candidate.object.name)));
                got.addresses.push(address);
            }
            Some((reason, why)) => {
                let text = format!("{address} of spec.externalIPs is not served: {why}");
                got.remarks.push(Remark::new(Cause::Reason(reason), text));
            }
        }
    }
    got
}

fn refusal(address: IpAddr, spec: &ServiceSpec, fence: &Fence<'_>, taken: &TakenFrontends<'_>) -> Option<(Reason, String)> {
    let refused = |why: String| Some((Reason::Refused, why));
    if !fence.settings.ownership.external_ips_allowed.iter().any(|net| net.contains(&address)) {
        return refused("it lies outside `externalIPs.allowed`".to_owned());
    }
    if let Some(what) = special(address) {
        return refused(format!("it is {what}"));
    }
    if let Some(why) = fence.forbidden.why(address) {
        return refused(why);
    }
    if let Some(pool) = fence.pools.holding(address) {
        return refused(format!("it lies in pool {}; ask for it by sluice.dev/addresses", pool.name));
    }
    if let Some(pool) = fence.pools.elsewhere(address) {
        return refused(format!("it lies in pool {pool} of another installation"));
    }
    if fence.is_vip_outside_pools(address) {
        return refused("it is the address of a load balancer".to_owned());
    }
    let family = Family::of(address);
    if !spec.families.contains(&family) {
        return refused(format!("the Service has no family {family}"));
    }
    let (port, holder) = spec.ports.iter().find_map(|port| Some((port, taken.get(&(address, port.protocol, port.port))?)))?;
    Some((Reason::Conflict, format!("{} {} of it is held by {holder}, which is older", port.protocol, port.port)))
}

fn too_many() -> (Reason, String) {
    (Reason::Exhausted, format!("a Service gets {EXTERNAL_IPS_MAX} of them at most"))
}

/// Services with `externalIPs` that are not served because none is allowed, and that are not ours otherwise, as already
/// logged. The reason goes to the log and not to an Event, because in most clusters another product serves them.
#[derive(Debug, Default)]
pub struct DisallowedExternalIps {
    logged: BTreeSet<ServiceName>,
    /// The revision of the world that was examined last.
    seen: u64,
}

impl DisallowedExternalIps {
    /// Logs each new one and returns them.
    pub fn log_new(&mut self, world: &World, settings: &ControllerSettings) -> Vec<ServiceName> {
        let since = std::mem::replace(&mut self.seen, world.revision());
        if !settings.ownership.external_ips_allowed.is_empty() {
            return Vec::new();
        }
        let asks = |name: &&ServiceName| {
            let candidate = world.services().get(*name).map(|entry| &entry.candidate);
            let is_other = candidate.filter(|candidate| candidate.kind == Kind::ClusterIp);
            is_other.is_some_and(|candidate| candidate.wanted.as_ref().is_ok_and(|spec| !spec.external_ips.is_empty()))
        };
        self.logged.retain(|name| world.services().contains_key(name));
        let new: Vec<ServiceName> =
            world.changed_since(since).filter(asks).filter(|name| !self.logged.contains(*name)).cloned().collect();
        for service in &new {
            tracing::info!(%service, "spec.externalIPs has no effect: none is allowed (`externalIPs.allowed`)");
        }
        self.logged.extend(new.iter().cloned());
        new
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use serde_json::json;

    use super::*;
    use crate::plan::forbidden::Forbidden;
    use crate::plan::tests::settings;
    use crate::world::change::Change;

    fn candidate(name: &str, ips: &[&str], port: u16, protocol: &str) -> Candidate {
        let service: Service = serde_json::from_value(json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"type": "ClusterIP", "externalIPs": ips, "ports": [{"port": port, "protocol": protocol}]}}))
        .unwrap();
        Candidate::try_from(&service).unwrap()
    }

    /// Results for `candidates`, one after another.
    fn given(settings: &ControllerSettings, outside: &[IpAddr], candidates: &[Candidate]) -> Vec<Externals> {
        let pools = crate::plan::addresses::tests::pools(&settings.pools);
        let forbidden = Forbidden::new(&[(None, &settings.profile)], [].iter(), &settings.cluster_cidrs);
        let fence = Fence { settings, pools: &pools, forbidden: &forbidden, vips_outside_pools: outside };
        assign(candidates.iter(), &fence)
    }

    fn rules() -> ControllerSettings {
        let mut settings = settings();
        settings.ownership.external_ips_allowed =
            ["192.0.0.0/16", "127.0.0.0/8", "2001:db8::/32"].map(|net| net.parse().unwrap()).into();
        settings.cluster_cidrs = vec!["192.0.96.0/24".parse().unwrap()];
        settings.profile = vec!["192.0.2.2".parse().unwrap()].into();
        settings
    }

    #[test]
    fn an_external_ip_counts_only_if_it_is_allowed_and_not_used_otherwise() {
        let rows = [
            ("192.0.2.9", None),
            ("203.0.113.1", Some("outside `externalIPs.allowed`")),
            ("127.0.0.1", Some("loopback")),
            ("192.0.2.2", Some("gateway itself")),
            ("192.0.2.150", Some("pool default")),
            ("192.0.7.7", Some("address of a load balancer")),
            ("192.0.96.1", Some("clusterCIDRs")),
            ("2001:db8::1", Some("no family IPv6")),
        ];
        let (settings, outside) = (rules(), ["192.0.7.7".parse().unwrap()]);
        for (address, expected) in rows {
            let got = given(&settings, &outside, &[candidate("web", &[address], 80, "TCP")]).remove(0);
            assert_eq!(got.addresses.is_empty(), expected.is_some(), "{address}: {got:?}");
            let text = got.remarks.first().map(|remark| remark.text.as_str()).unwrap_or_default();
            assert!(text.contains(expected.unwrap_or_default()), "{address}: {text}");
        }
    }

    #[test]
    fn of_two_services_that_claim_one_frontend_the_first_gets_it_and_other_ports_stay_free() {
        let settings = rules();
        let all = [
            candidate("first", &["192.0.2.9", "192.0.2.10"], 80, "TCP"),
            candidate("second", &["192.0.2.9", "192.0.2.11"], 80, "TCP"),
            candidate("udp", &["192.0.2.9"], 80, "UDP"),
            candidate("tls", &["192.0.2.9"], 443, "TCP"),
        ];
        let got = given(&settings, &[], &all);
        let counts: Vec<_> = got.iter().map(|got| (got.addresses.len(), got.remarks.len())).collect();
        assert_eq!(counts, [(2, 0), (1, 1), (1, 0), (1, 0)]);
        assert_eq!(got[1].remarks[0].cause, Cause::Reason(Reason::Conflict));
        assert!(got[1].remarks[0].text.contains("shop/first"), "{}", got[1].remarks[0].text);
    }

    #[test]
    fn while_none_is_allowed_none_is_served_and_the_owner_gets_a_remark() {
        let settings = settings();
        let got = given(&settings, &[], &[candidate("web", &["192.0.2.9"], 80, "TCP")]).remove(0);
        assert!(got.addresses.is_empty() && got.remarks[0].text.contains("CVE-2020-8554"), "{got:?}");
    }

    #[test]
    fn a_service_gets_at_most_the_maximum_number_of_external_ips() {
        let (settings, ips) = (rules(), (1..=20).map(|last| format!("192.0.2.{}", last + 10)).collect::<Vec<_>>());
        let ips: Vec<&str> = ips.iter().map(String::as_str).collect();
        let got = given(&settings, &[], &[candidate("web", &ips, 80, "TCP")]).remove(0);
        assert_eq!((got.addresses.len(), got.remarks.len()), (EXTERNAL_IPS_MAX, 20 - EXTERNAL_IPS_MAX));
    }

    fn service(name: &str, kind: &str, ips: &[&str]) -> Change {
        let object = json!({"metadata": {"name": name, "namespace": "shop"},
            "spec": {"type": kind, "externalIPs": ips, "ports": [{"port": 80}]}});
        Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(object).unwrap().into()))
    }

    #[test]
    fn while_none_is_allowed_external_ips_of_a_cluster_ip_service_are_logged_once() {
        let (mut world, mut disallowed, mut settings) = (World::default(), DisallowedExternalIps::default(), settings());
        world.apply(service("inner", "ClusterIP", &["192.0.2.9"]));
        world.apply(service("outer", "LoadBalancer", &["192.0.2.9"]));
        assert_eq!(
            disallowed.log_new(&world, &settings),
            [ServiceName::new("shop", "inner")],
            "the other one is ours and gets a note"
        );
        world.apply(service("inner", "ClusterIP", &["192.0.2.10"]));
        assert_eq!(disallowed.log_new(&world, &settings), []);
        settings.ownership.external_ips_allowed = vec!["192.0.2.0/24".parse().unwrap()];
        world.apply(service("next", "ClusterIP", &["192.0.2.11"]));
        assert_eq!(disallowed.log_new(&world, &settings), []);
    }
}
