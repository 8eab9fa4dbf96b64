//! Forwarding policy of a Service: requested settings, defaults, and combinations that are impossible (CONTROL section
//! 3).
//!
//! Invariant: an impossible combination is refused with the field to change. No packet is forwarded in another way than
//! requested.

use proto::{Backend, BackendState, Mode, Reason, Refusal, Target};

use crate::config::settings::ControllerSettings;
use crate::world::checkpoint::Policy;
use objects::note::{Cause, Remark};
use objects::service::Unread;
use objects::status::IpMode;
use objects::{Kind, PortSpec, ServiceSpec};

impl Policy {
    /// The policy of a Service of this kind; `spec` is `None` if it cannot be parsed. What is `in_force` stays for settings
    /// whose annotation has an unknown word.
    #[must_use]
    pub fn of(spec: Option<&ServiceSpec>, kind: Kind, settings: &ControllerSettings, in_force: Option<Self>) -> Self {
        let defaults = &settings.defaults;
        let kept = |what| in_force.filter(|_| spec.is_some_and(|spec| spec.unread.contains(&what)));
        // A node port is at the gateway's own address, for which no backend accepts packets.
        let can_default = kind != Kind::NodePort || defaults.mode.is_two_way();
        let default_mode = if can_default { defaults.mode } else { Mode::Nat };
        let kept_mode = kept(Unread::Mode).map(|kept| kept.mode);
        let mode = kept_mode.or(spec.and_then(|spec| spec.mode)).unwrap_or(default_mode);
        let default_target = if mode.is_two_way() { Target::Endpoint } else { Target::Node };
        // In all modes but `nat` nodes see the VIP; in `nat` they see the addresses of the gateway and of the backend. Nodes
        // that took packets for the VIP themselves would send no PROXY header.
        let is_proxy = mode == Mode::Nat || spec.is_some_and(ServiceSpec::has_proxy_header);
        let default_ip_mode = if is_proxy { IpMode::Proxy } else { IpMode::Vip };
        let target = kept(Unread::Target).map(|kept| kept.target).or(spec.and_then(|spec| spec.target));
        let scheduler = kept(Unread::Scheduler).map(|kept| kept.scheduler).or(spec.and_then(|spec| spec.scheduler));
        let ip_mode = kept(Unread::IpMode).map(|kept| kept.ip_mode).or(spec.and_then(|spec| spec.ip_mode));
        let scope = kept(Unread::AffinityScope).map(|kept| kept.affinity_scope).or(spec.and_then(|spec| spec.affinity_scope));
        let probe = kept(Unread::Probe).map(|kept| kept.probe).or(spec.and_then(|spec| spec.health.probe));
        Self {
            mode,
            target: target.unwrap_or(default_target),
            scheduler: scheduler.unwrap_or(defaults.scheduler),
            ip_mode: ip_mode.unwrap_or(default_ip_mode),
            affinity_scope: scope.unwrap_or_default(),
            probe: probe.unwrap_or(settings.health.probe),
        }
    }

    /// Why the policy is impossible, regardless of endpoints and nodes.
    #[must_use]
    pub fn refusal(&self, spec: &ServiceSpec, kind: Kind) -> Option<Refusal> {
        let mode = self.mode;
        if kind == Kind::NodePort && !mode.is_two_way() {
            return refused(format!(
                "Mode {mode} needs an address that backends accept packets for, and type NodePort has none; use nat or dnat, or type LoadBalancer"
            ));
        }
        if let Some(port) = spec.ports.iter().find(|port| port.proxy_protocol.is_some()).filter(|_| !mode.is_two_way()) {
            let message = format!(
                "Mode {mode} cannot send the PROXY header that port {} asks for: the gateway sees one direction only; use nat or dnat, or remove the annotations (backends see the client's address in mode {mode} without)",
                port.port
            );
            return Some(Refusal { reason: Reason::Unsupported, message });
        }
        if self.target == Target::Endpoint {
            return None;
        }
        if let Some(name) = &spec.proxy_name {
            return refused(format!(
                "Target node needs kube-proxy on the nodes, and the label service.kubernetes.io/service-proxy-name ({name:?}) takes the Service from it; use target endpoint"
            ));
        }
        let without = spec.ports.iter().find(|port| port.port_of_nodes.is_none()).filter(|_| mode.is_two_way())?;
        let port = without.port;
        let remedy = match kind {
            Kind::ClusterIp => "use type NodePort",
            Kind::LoadBalancer | Kind::NodePort => "set spec.allocateLoadBalancerNodePorts to true",
        };
        refused(format!(
            "Mode {mode} to nodes needs a nodePort for each port, and port {port} has none; {remedy}, or use target endpoint"
        ))
    }

    /// Whether backends see an address of the gateway, although the Service asks for that of the client
    /// (`externalTrafficPolicy: Local`).
    #[must_use]
    pub fn loses_client_address(&self, spec: &ServiceSpec) -> bool {
        self.mode == Mode::Nat && spec.local && spec.ports.iter().any(|port| port.proxy_protocol.is_none())
    }

    /// What the owner of such a Service is told.
    #[must_use]
    pub fn client_address_remark(&self, spec: &ServiceSpec) -> Option<Remark> {
        let text = "Backends see an address of the gateway, not that of the client that externalTrafficPolicy: Local asks for: \
                    mode nat replaces it. Set annotation sluice.dev/mode to dnat (replies of backends must pass the gateway), or \
                    to dsr, ipip or gue (backends must take packets for the VIP); let sluice.dev/proxy-protocol send it in a PROXY \
                    header (backends must expect one); or set externalTrafficPolicy to Cluster";
        self.loses_client_address(spec).then(|| Remark::new(Cause::ClientAddressLost, text))
    }

    /// What the owner is told who has nodes send packets for the VIP past the gateway, to backends that expect a header.
    #[must_use]
    pub fn missing_header_remark(&self, spec: &ServiceSpec) -> Option<Remark> {
        let text = "Clients in the cluster reach backends without the PROXY header that these expect: kube-proxy sends packets \
                    for an address with ipMode VIP to backends itself. Remove annotation sluice.dev/ip-mode, or set it to Proxy";
        let is_past = self.ip_mode == IpMode::Vip && spec.has_proxy_header();
        is_past.then(|| Remark::new(Cause::ClientAddressLost, text))
    }

    /// The port at which a node accepts packets for `port` of the Service: that of the VIP if addresses are not
    /// rewritten.
    #[must_use]
    pub fn port_at_nodes(&self, port: &PortSpec) -> u16 {
        port.port_of_nodes.filter(|_| self.mode.is_two_way()).unwrap_or(port.port)
    }

    /// Why these endpoints cannot serve `port`: in modes that keep the destination, the endpoint port must equal that
    /// of the Service.
    #[must_use]
    pub fn refuses_endpoints(&self, port: &PortSpec, backends: &[Backend]) -> Option<Refusal> {
        if self.mode.is_two_way() || self.target == Target::Node {
            return None;
        }
        let mut takes_new = backends.iter().filter(|backend| backend.state == BackendState::Active);
        let other = takes_new.find(|backend| backend.address.port() != port.port)?;
        refused(format!(
            "Mode {} changes no port, and endpoint {} of port {} listens on another one; set targetPort to {}, or use nat or dnat",
            self.mode, other.address, port.port, port.port
        ))
    }
}

fn refused(message: String) -> Option<Refusal> {
    Some(Refusal { reason: Reason::Refused, message })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use proto::{AffinityScope, Probe, Scheduler};
    use serde_json::{Value, json};

    use super::*;
    use crate::plan::tests::settings;
    use objects::Candidate;

    /// A Service with these annotations below `sluice.dev/`.
    fn candidate(kind: &str, annotations: &[(&str, &str)], port: Value) -> Candidate {
        let annotations: serde_json::Map<_, _> =
            annotations.iter().map(|(key, value)| (format!("sluice.dev/{key}"), (*value).into())).collect();
        let service: Service = serde_json::from_value(json!({"metadata": {"name": "web", "annotations": annotations},
            "spec": {"type": kind, "ports": [port], "externalIPs": ["192.0.2.9"]}}))
        .unwrap();
        Candidate::try_from(&service).unwrap()
    }

    fn policy(candidate: &Candidate, mode: Mode) -> Policy {
        let mut settings = settings();
        settings.defaults.mode = mode;
        Policy::of(candidate.wanted.as_ref().ok(), candidate.kind, &settings, None)
    }

    #[test]
    fn target_and_ip_mode_follow_from_the_mode() {
        let rows = [
            (Mode::Nat, Target::Endpoint, IpMode::Proxy),
            (Mode::Dnat, Target::Endpoint, IpMode::Vip),
            (Mode::Dsr, Target::Node, IpMode::Vip),
            (Mode::Ipip, Target::Node, IpMode::Vip),
            (Mode::Gue, Target::Node, IpMode::Vip),
        ];
        let usual = policy(&candidate("LoadBalancer", &[], json!({"port": 80})), Mode::Nat);
        assert_eq!((usual.affinity_scope, usual.probe), (AffinityScope::Port, Probe::Tcp));
        for (mode, target, ip_mode) in rows {
            let expected = Policy { mode, target, scheduler: Scheduler::Maglev, ip_mode, ..usual };
            let annotated = candidate("LoadBalancer", &[("mode", mode.as_str())], json!({"port": 80}));
            assert_eq!(policy(&annotated, Mode::Nat), expected, "by annotation");
            assert_eq!(policy(&candidate("LoadBalancer", &[], json!({"port": 80})), mode), expected, "by default");
        }
    }

    #[test]
    fn annotations_override_each_of_them() {
        let all = [("mode", "dsr"), ("target", "endpoint"), ("ip-mode", "Proxy"), ("scheduler", "rr")];
        let found = policy(&candidate("LoadBalancer", &all, json!({"port": 80})), Mode::Gue);
        let expected = (Mode::Dsr, Target::Endpoint, Scheduler::RoundRobin, IpMode::Proxy);
        assert_eq!((found.mode, found.target, found.scheduler, found.ip_mode), expected);
    }

    #[test]
    fn impossible_combinations_are_refused_with_the_field() {
        let (plain, allocated) = (json!({"port": 80}), json!({"port": 80, "nodePort": 30080}));
        type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a Value, Option<&'a str>);
        let rows: [Row<'_>; 9] = [
            ("LoadBalancer", &[("target", "node")], &plain, Some("port 80 has none")),
            ("LoadBalancer", &[("target", "node"), ("mode", "dnat")], &plain, Some("allocateLoadBalancerNodePorts")),
            ("LoadBalancer", &[("target", "node")], &allocated, None),
            ("LoadBalancer", &[("mode", "dsr")], &plain, None),
            ("LoadBalancer", &[("mode", "gue"), ("target", "endpoint")], &plain, None),
            ("ClusterIP", &[("target", "node")], &plain, Some("use type NodePort")),
            ("NodePort", &[("mode", "dsr")], &allocated, Some("type NodePort")),
            ("NodePort", &[("mode", "dnat")], &allocated, None),
            ("NodePort", &[("target", "node")], &allocated, None),
        ];
        for (kind, annotations, port, expected) in rows {
            let candidate = candidate(kind, annotations, port.clone());
            let refusal = policy(&candidate, Mode::Nat).refusal(candidate.wanted.as_ref().unwrap(), candidate.kind);
            assert_eq!(refusal.is_some(), expected.is_some(), "{kind} {annotations:?}: {refusal:?}");
            assert!(refusal.is_none_or(|r| r.reason == Reason::Refused && r.message.contains(expected.unwrap())));
        }
    }

    #[test]
    fn a_proxy_header_needs_both_directions_and_hides_the_vip_from_nodes() {
        for mode in Mode::ALL {
            let annotations = [("mode", mode.as_str()), ("proxy-protocol", "v2")];
            let candidate = candidate("LoadBalancer", &annotations, json!({"port": 80}));
            let (policy, spec) = (policy(&candidate, Mode::Nat), candidate.wanted.as_ref().unwrap());
            assert_eq!(policy.ip_mode, IpMode::Proxy, "{mode}");
            assert!(!policy.loses_client_address(&ServiceSpec { local: true, ..spec.clone() }));
            match policy.refusal(spec, candidate.kind) {
                Some(refusal) => {
                    assert!(!mode.is_two_way() && refusal.reason == Reason::Unsupported, "{refusal:?}");
                    assert!(refusal.message.contains(mode.as_str()) && refusal.message.contains("port 80"), "{refusal:?}");
                }
                None => assert!(mode.is_two_way(), "{mode}"),
            }
        }
        let by_hand = candidate("LoadBalancer", &[("proxy-protocol", "v1"), ("ip-mode", "VIP")], json!({"port": 80}));
        let spec = by_hand.wanted.as_ref().unwrap();
        assert_eq!(policy(&by_hand, Mode::Dnat).ip_mode, IpMode::Vip);
        let remark = policy(&by_hand, Mode::Dnat).missing_header_remark(spec).expect("a remark");
        assert!(remark.text.contains("Remove annotation sluice.dev/ip-mode"), "{}", remark.text);
        for usual in [[("proxy-protocol", "v1"), ("ip-mode", "Proxy")], [("mode", "dnat"), ("ip-mode", "VIP")]] {
            let candidate = candidate("LoadBalancer", &usual, json!({"port": 80}));
            let spec = candidate.wanted.as_ref().unwrap();
            assert_eq!(policy(&candidate, Mode::Dnat).missing_header_remark(spec).map(|remark| remark.text), None);
        }
    }

    #[test]
    fn a_service_that_kube_proxy_does_not_see_has_no_nodes() {
        let mut candidate = candidate("LoadBalancer", &[("mode", "dsr")], json!({"port": 80}));
        candidate.wanted.as_mut().unwrap().proxy_name = Some("other".to_owned());
        let spec = candidate.wanted.as_ref().unwrap();
        let message = policy(&candidate, Mode::Nat).refusal(spec, candidate.kind).unwrap().message;
        assert!(message.contains("service-proxy-name") && message.contains("other"), "{message}");
        let to_endpoints = Policy { target: Target::Endpoint, ..policy(&candidate, Mode::Nat) };
        assert_eq!(to_endpoints.refusal(spec, candidate.kind), None);
    }

    #[test]
    fn a_default_for_load_balancers_leaves_node_ports_with_nat() {
        let candidate = candidate("NodePort", &[], json!({"port": 80, "nodePort": 30080}));
        assert_eq!(policy(&candidate, Mode::Dsr).mode, Mode::Nat);
        assert_eq!(policy(&candidate, Mode::Dnat).mode, Mode::Dnat);
    }

    #[test]
    fn modes_that_change_no_port_need_endpoints_at_the_services_port() {
        let candidate = candidate("LoadBalancer", &[], json!({"port": 80}));
        let port = &candidate.wanted.as_ref().unwrap().ports[0];
        let at = |port: u16| Backend { address: ([10, 0, 0, 1], port).into(), weight: 1, state: BackendState::Active };
        for mode in Mode::ALL {
            let policy = Policy { mode: *mode, target: Target::Endpoint, ..policy(&candidate, Mode::Nat) };
            assert_eq!(policy.refuses_endpoints(port, &[at(80)]), None);
            let refusal = policy.refuses_endpoints(port, &[at(80), at(8080)]);
            assert_eq!(refusal.is_some(), !mode.is_two_way(), "{mode}");
            assert!(refusal.is_none_or(|r| r.message.contains("10.0.0.1:8080") && r.message.contains("targetPort to 80")));
        }
    }
}
