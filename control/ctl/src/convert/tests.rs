//! Tests: converted pools and Services of other products, and notes about settings without equivalent.

#![allow(clippy::unwrap_used, clippy::panic)]

use super::*;

fn run(product: Product, text: &str) -> Conversion {
    convert(product, &[Input { name: "in.yaml", text }]).unwrap()
}

fn refused(product: Product, text: &str) -> String {
    convert(product, &[Input { name: "in.yaml", text }]).unwrap_err().to_string()
}

/// The documents of what is printed, read as objects.
fn pools(converted: &Conversion) -> Vec<AddressPool> {
    let documents = converted.yaml.split("---\n").filter(|text| !text.is_empty());
    documents.map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

/// As `kubectl get ipaddresspools,l2advertisements,... -A -o yaml` prints, from the guides of MetalLB.
const METALLB: &str = "\
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata:
  name: first
  namespace: metallb-system
  labels: {zone: edge}
spec:
  addresses:
  - 192.0.2.0/24
  - 198.51.100.10 - 198.51.100.20
  autoAssign: true
  avoidBuggyIPs: true
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: tenants, namespace: metallb-system}
spec:
  addresses: [\"2001:db8:1::/64\"]
  autoAssign: false
  serviceAllocation:
    priority: 50
    namespaces: [shop, bank]
    namespaceSelectors:
    - matchLabels: {kubernetes.io/metadata.name: post}
    serviceSelectors:
    - matchExpressions: [{key: app, operator: In, values: [web]}]
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
spec:
  ipAddressPoolSelectors: [{matchLabels: {zone: edge}}]
  interfaces: [eth1]
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: fabric, namespace: metallb-system}
spec: {ipAddressPools: [tenants], aggregationLength: 32, localPref: 150, communities: [65535:65282, edge, \"large:65000:1:2\"], peers: [tor]}
---
apiVersion: metallb.io/v1beta1
kind: Community
metadata: {name: names, namespace: metallb-system}
spec: {communities: [{name: edge, value: \"65000:100\"}]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 10.0.0.1}
";

#[test]
fn pools_of_metallb_keep_addresses_selectors_and_announcement() {
    let converted = run(Product::Metallb, METALLB);
    let pools = pools(&converted);
    assert_eq!(pools.iter().map(|pool| pool.metadata.name.as_deref().unwrap()).collect::<Vec<_>>(), ["first", "tenants"]);
    let first = &pools[0].spec;
    assert_eq!(first.addresses, ["192.0.2.0/24", "198.51.100.10-198.51.100.20"]);
    assert_eq!((first.auto_assign, first.avoid_buggy_ips, first.priority), (true, true, 0));
    assert_eq!((first.announce, pools[1].spec.announce), (objects::crd::AnnounceKind::L2, objects::crd::AnnounceKind::Routed));
    let tenants = serde_json::to_value(&pools[1].spec).unwrap();
    assert_eq!((&tenants["autoAssign"], &tenants["priority"]), (&json!(false), &json!(50)));
    let namespaces = json!([{"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["bank", "post", "shop"]}]);
    assert_eq!(tenants["namespaceSelector"]["matchExpressions"], namespaces);
    assert_eq!(tenants["serviceSelector"]["matchExpressions"][0]["values"], json!(["web"]));
    let bgp = json!({"communities": ["65535:65282", "65000:100", "65000:1:2"], "localPref": 150});
    assert_eq!((&tenants["bgp"], &first.bgp), (&bgp, &None));
    assert!(
        converted.yaml.contains("# From IPAddressPool metallb-system/tenants, in.yaml line 14 (document 2)."),
        "{}",
        converted.yaml
    );
    assert!(!converted.yaml.contains("autoAssign: true"), "defaults are not printed:\n{}", converted.yaml);
}

#[test]
fn settings_without_equivalent_are_noted_with_advice() {
    let notes = run(Product::Metallb, METALLB).notes;
    let has = |words: &[&str]| notes.iter().any(|note| words.iter().all(|word| note.contains(word)));
    assert!(has(&["L2Advertisement metallb-system/lan", "interfaces", "port"]), "{notes:?}");
    assert!(has(&["BGPAdvertisement metallb-system/fabric", "no equivalent of peers:", "FRR or BIRD"]), "{notes:?}");
    assert!(
        has(&["BGPPeer metallb-system/tor", "10.0.0.1 (AS 64501, from AS 64500)", "see docs/operate/bgp.md", "line 45"]),
        "{notes:?}"
    );
    assert_eq!(notes.len(), 3, "{notes:?}");
}

#[test]
fn a_list_of_kubectl_is_read_item_by_item() {
    let item =
        "- apiVersion: metallb.io/v1beta1\n  kind: IPAddressPool\n  metadata: {name: a}\n  spec: {addresses: [192.0.2.0/28]}\n";
    let list =
        format!("apiVersion: v1\nkind: List\nitems:\n{item}{}", item.replace("name: a", "name: b").replace(".0/28", ".16/28"));
    assert_eq!(pools(&run(Product::Metallb, &list)).len(), 2);
    let wrong = list.replace(".16/28", ".16/33");
    let error = refused(Product::Metallb, &wrong);
    assert!(error.starts_with("in.yaml line 8 (document 1): IPAddressPool b: ") && error.contains("192.0.2.16/33"), "{error}");
    let json = r#"{"apiVersion":"v1","kind":"List","items":[{"apiVersion":"metallb.io/v1beta1","kind":"IPAddressPool","metadata":{"name":"a"},"spec":{"addresses":["192.0.2.0/28"]}}]}"#;
    assert_eq!(pools(&run(Product::Metallb, json)).len(), 1);
}

#[test]
fn a_pool_of_which_any_selector_suffices_is_left_out_rather_than_widened() {
    let text = "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec:\n  addresses: [192.0.2.0/24]\n  serviceAllocation:\n    \
                namespaces: [a]\n    namespaceSelectors: [{matchLabels: {team: b}}]\n";
    let converted = run(Product::Metallb, text);
    assert_eq!(converted.yaml, "");
    assert!(converted.notes[0].contains("IPAddressPool a is left out"), "{:?}", converted.notes);
}

#[test]
fn a_pool_with_a_selector_still_comes_before_those_without() {
    let text = "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec:\n  addresses: [192.0.2.0/24]\n  serviceAllocation: {namespaces: [a]}\n";
    let pools = pools(&run(Product::Metallb, text));
    assert!(pools[0].spec.priority > 0, "0 comes last");
}

#[test]
fn the_pools_before_metallb_0_13_are_read() {
    let text = "apiVersion: metallb.io/v1beta1\nkind: AddressPool\nmetadata: {name: old}\nspec: {protocol: bgp, addresses: [192.0.2.0/24]}\n";
    let converted = run(Product::Metallb, text);
    assert_eq!(pools(&converted)[0].spec.announce, objects::crd::AnnounceKind::Routed);
    assert_eq!(converted.notes, Vec::<String>::new());
    let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: config, namespace: metallb-system}\ndata: {config: ''}\n";
    assert!(run(Product::Metallb, map).notes[0].contains("0.12"));
}

#[test]
fn a_pool_that_is_announced_in_both_ways_or_none_gets_a_note() {
    let pool =
        "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec: {addresses: [192.0.2.0/24]}\n---\n";
    let advertisement = |kind: &str| format!("apiVersion: metallb.io/v1beta1\nkind: {kind}\nmetadata: {{name: x}}\n---\n");
    let both = format!("{pool}{}{}", advertisement("L2Advertisement"), advertisement("BGPAdvertisement"));
    let converted = run(Product::Metallb, &both);
    assert_eq!(pools(&converted)[0].spec.announce, objects::crd::AnnounceKind::Routed);
    assert!(converted.notes[0].contains("L2Advertisement x, BGPAdvertisement x"), "{:?}", converted.notes);
    assert!(run(Product::Metallb, pool).notes[0].contains("no advertisement of it was read"));
    assert_eq!(run(Product::Metallb, &format!("{pool}{}", advertisement("L2Advertisement"))).notes, Vec::<String>::new());
}

#[test]
fn a_pool_has_one_bgp_advertisement_and_says_what_it_loses() {
    let advertisement = |name: &str, spec: &str| {
        format!("apiVersion: metallb.io/v1beta1\nkind: BGPAdvertisement\nmetadata: {{name: {name}}}\nspec: {spec}\n---\n")
    };
    let pool =
        "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec: {addresses: [203.0.113.0/24]}\n---\n";
    let aggregate = advertisement("external", "{aggregationLength: 24, aggregationLengthV6: 128}");
    let local = advertisement("local", "{aggregationLength: 32, communities: [65535:0, vpn, no-export]}");
    let converted = run(Product::Metallb, &format!("{pool}{aggregate}{local}"));
    let bgp = serde_json::to_value(&pools(&converted)[0].spec.bgp).unwrap();
    assert_eq!(bgp, json!({"aggregationLength": 24}));
    let has = |words: &[&str]| converted.notes.iter().any(|note| words.iter().all(|word| note.contains(word)));
    assert!(has(&["IPAddressPool a", "becomes that of BGPAdvertisement external, not that of BGPAdvertisement local"]));
    assert!(has(&["BGPAdvertisement local", "\"65535:0\" is left out", "GRACEFUL_SHUTDOWN"]));
    assert!(has(&["BGPAdvertisement local", "\"vpn\" is left out", "objects of kind Community"]));
    assert_eq!(converted.notes.len(), 3, "{:?}", converted.notes);
    let converted = run(Product::Metallb, &format!("{pool}{local}"));
    assert_eq!(pools(&converted)[0].spec.bgp.as_ref().unwrap().communities, ["65535:65281"]);
    let small = format!("{}{aggregate}", pool.replace("/24", "/25"));
    assert!(run(Product::Metallb, &small).notes[0].contains("IPAddressPool a is left out: spec.bgp.aggregationLength: found 24"));
}

/// From the guides of Cilium.
const CILIUM: &str = "\
apiVersion: \"cilium.io/v2\"
kind: CiliumLoadBalancerIPPool
metadata:
  name: \"blue-pool\"
spec:
  blocks:
  - cidr: \"192.0.2.0/24\"
  - cidr: \"2001:db8::/64\"
  - start: \"198.51.100.100\"
    stop: \"198.51.100.200\"
  - start: \"203.0.113.4\"
  allowFirstLastIPs: \"No\"
  serviceSelector:
    matchLabels: {\"io.kubernetes.service.namespace\": tenant-a}
    matchExpressions:
    - {key: color, operator: In, values: [blue, cyan]}
---
apiVersion: cilium.io/v2alpha1
kind: CiliumLoadBalancerIPPool
metadata: {name: red-pool}
spec: {cidrs: [{cidr: 10.0.10.0/31}], allowFirstLastIPs: \"No\", disabled: true}
---
apiVersion: cilium.io/v2
kind: CiliumBGPAdvertisement
metadata: {name: bgp-advertisements}
spec: {advertisements: [{advertisementType: Service, service: {addresses: [LoadBalancerIP]}}]}
";

#[test]
fn pools_of_cilium_keep_blocks_selectors_and_announcement() {
    let converted = run(Product::Cilium, CILIUM);
    let pools = pools(&converted);
    let blue = &pools[0].spec;
    let blocks =
        ["192.0.2.1-192.0.2.254", "2001:db8::1-2001:db8::ffff:ffff:ffff:fffe", "198.51.100.100-198.51.100.200", "203.0.113.4"];
    assert_eq!(blue.addresses, blocks);
    let spec = serde_json::to_value(blue).unwrap();
    assert_eq!(spec["namespaceSelector"], json!({"matchLabels": {"kubernetes.io/metadata.name": "tenant-a"}}));
    let color = json!({"matchExpressions": [{"key": "color", "operator": "In", "values": ["blue", "cyan"]}]});
    assert_eq!(spec["serviceSelector"], color);
    assert!(pools.iter().all(|pool| pool.spec.announce == objects::crd::AnnounceKind::Routed));
    assert_eq!((pools[1].spec.auto_assign, &pools[1].spec.addresses[..]), (false, &["10.0.10.0/31".to_owned()][..]));
    let has = |words: &[&str]| converted.notes.iter().any(|note| words.iter().all(|word| note.contains(word)));
    assert!(has(&["red-pool", "`disabled`"]) && has(&["CiliumBGPAdvertisement bgp-advertisements"]), "{:?}", converted.notes);
}

#[test]
fn a_pool_of_cilium_for_one_service_by_name_is_left_out() {
    let text = CILIUM.replace("io.kubernetes.service.namespace", "io.kubernetes.service.name");
    let converted = run(Product::Cilium, &text);
    assert_eq!(pools(&converted).len(), 1);
    assert!(converted.notes.iter().any(|note| note.contains("blue-pool is left out")), "{:?}", converted.notes);
}

#[test]
fn annotations_of_services_that_are_not_read_are_named() {
    let service = |product, annotation: &str, class: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: web, namespace: shop, annotations: {{{annotation}}}}}\n\
             spec: {{type: LoadBalancer, {class} ports: [{{port: 80}}]}}\n"
        );
        let mut notes = run(product, &text).notes;
        assert!(notes.pop().unwrap().contains("no pool"));
        notes
    };
    let ours = "loadBalancerClass: sluice.dev/gateway,";
    for read in ["metallb.universe.tf/loadBalancerIPs: 192.0.2.1", "metallb.io/ip-allocated-from-pool: a", "example.com/x: y"] {
        assert_eq!(service(Product::Metallb, read, ours), Vec::<String>::new(), "{read}");
    }
    for read in [
        "lbipam.cilium.io/ips: 192.0.2.1",
        "io.cilium/lb-ipam-ips: 192.0.2.1",
        "lbipam.cilium.io/sharing-cross-namespace: '*'",
        "load-balancer.hetzner.cloud/uses-proxyprotocol: 'true'",
    ] {
        assert_eq!(service(Product::Cilium, read, ours), Vec::<String>::new(), "{read}");
    }
    let rows = [
        ("service.cilium.io/forwarding-mode: dsr", "sluice.dev/mode"),
        ("service.cilium.io/src-ranges-policy: deny", "will not be served"),
        ("service.cilium.io/unheard-of: x", "no effect"),
        ("purelb.io/addresses: 192.0.2.1", "sluice.dev/addresses"),
        ("sluice.dev/proxy-protocol: v3", "will not be served"),
        ("load-balancer.hetzner.cloud/uses-proxyprotocol: v2", "will not be served"),
    ];
    for (annotation, word) in rows {
        let notes = service(Product::Cilium, annotation, ours);
        assert!(notes[0].contains("Service shop/web") && notes[0].contains(word), "{notes:?}");
    }
    let class = service(Product::Cilium, "", "loadBalancerClass: io.cilium/l2-announcer,");
    assert!(class[0].contains("io.cilium/l2-announcer"), "{class:?}");
    assert!(service(Product::Metallb, "", "")[0].contains("claimClassless"));
}

#[test]
fn services_whose_clients_would_lose_their_address_are_named_with_the_modes_that_keep_it() {
    let local = |name: &str, policy: &str| {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}, namespace: shop}}\nspec: {{type: LoadBalancer, \
             loadBalancerClass: sluice.dev/gateway, externalTrafficPolicy: {policy}, ports: [{{port: 80}}]}}\n---\n"
        )
    };
    let notes = |text: &str| run(Product::Metallb, text).notes;
    let found = notes(&[local("a", "Local"), local("b", "Local"), local("c", "Cluster")].concat());
    assert!(found[0].contains("2 Services") && found[0].contains("shop/a"), "{found:?}");
    assert!(["dnat", "dsr", "ipip", "gue"].iter().all(|mode| found[0].contains(mode)), "{found:?}");
    assert!(!notes(&local("c", "Cluster")).iter().any(|note| note.contains("externalTrafficPolicy")));
}

#[test]
fn services_that_share_across_namespaces_need_permission_of_the_pool() {
    let one = "apiVersion: v1\nkind: Service\nmetadata: {name: a, namespace: x, annotations: {metallb.io/allow-shared-ip: k}}\n\
               spec: {type: LoadBalancer, loadBalancerClass: sluice.dev/gateway, ports: [{port: 80}]}\n---\n";
    let notes = run(Product::Metallb, &format!("{one}{}", one.replace("namespace: x", "namespace: y"))).notes;
    assert!(notes[0].contains("x, y") && notes[0].contains("allowCrossNamespaceSharing"), "{notes:?}");
}

#[test]
fn wrong_input_is_named_by_document_and_line() {
    let start = "# a file\napiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {name: a}\nspec:\n";
    let rows = [
        (format!("{start}  addresses: [\n"), "in.yaml line "),
        (format!("{start}  addresses: [192.0.2.0/24]\n---\n{start}  addresses: 192.0.2.0/24\n"), "in.yaml line 13 (document 2)"),
        (format!("{start}  addresses: [192.0.2.9-192.0.2.1]\n"), "IPAddressPool a: "),
        (format!("{start}  addresses: [192.0.2.0/24]\n  autoAssign: perhaps\n"), "in.yaml line 7 (document 1)"),
        ("hello: world\n".to_owned(), "apiVersion"),
        ("apiVersion: v1\nkind: Service\n".to_owned(), "metadata.name"),
    ];
    for (text, words) in rows {
        let error = refused(Product::Metallb, &text);
        assert!(error.contains(words) && !error.contains('\n'), "{text}\n{error}");
    }
}

#[test]
fn two_pools_of_one_name_are_refused_and_overlaps_are_noted() {
    let pool = |namespace: &str, name: &str| {
        format!(
            "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {{name: {name}, namespace: {namespace}}}\nspec: {{addresses: [192.0.2.0/24]}}\n---\n"
        )
    };
    let error = refused(Product::Metallb, &format!("{}{}", pool("x", "a"), pool("y", "a")));
    assert!(error.contains("IPAddressPool y/a") && error.contains("IPAddressPool x/a"), "{error}");
    let notes = run(Product::Metallb, &format!("{}{}", pool("x", "a"), pool("x", "b"))).notes;
    assert!(notes.iter().any(|note| note.contains("pools a and b") && note.contains("overlap")), "{notes:?}");
}

#[test]
fn a_pool_that_our_rules_refuse_is_left_out_and_named() {
    let pool = |addresses: &str| {
        format!(
            "apiVersion: metallb.io/v1beta1\nkind: IPAddressPool\nmetadata: {{name: a}}\nspec: {{addresses: [{addresses}]}}\n"
        )
    };
    for (addresses, word) in [("169.254.7.0/24", "reaches into"), ("192.0.2.0/24, 192.0.2.0/28", "overlaps"), ("", "0 entries")] {
        let converted = run(Product::Metallb, &pool(addresses));
        assert_eq!(converted.yaml, "");
        let left_out = |note: &String| note.contains("IPAddressPool a is left out") && note.contains(word);
        assert!(converted.notes.iter().any(left_out), "{:?}", converted.notes);
    }
}

#[test]
fn the_printed_pools_are_accepted_by_the_controller() {
    for (product, text, count) in [(Product::Metallb, METALLB, 2), (Product::Cilium, CILIUM, 2)] {
        let pools = pools(&run(product, text));
        assert_eq!(pools.iter().filter(|pool| PoolSpec::try_from(*pool).is_ok()).count(), count);
    }
}
