//! Rows of annotations, and the headers of ports that they ask for.

use super::*;

const NONE: Option<ProxyProtocol> = None;
const FIRST: Option<ProxyProtocol> = Some(V1);
const SECOND: Option<ProxyProtocol> = Some(V2);

/// Annotations, and what is expected of them.
type Row<'a, T> = (&'a [(&'a str, &'a str)], T);

/// Ports 80 (http), 443 (https), UDP 443 (h3) and SCTP 9 of a Service.
fn ports() -> Vec<PortSpec> {
    let port = |name: &str, protocol, port| PortSpec {
        name: name.to_owned(),
        protocol,
        port,
        node_port: None,
        port_of_nodes: None,
        app_protocol: None,
        proxy_protocol: None,
    };
    vec![
        port("http", Protocol::Tcp, 80),
        port("https", Protocol::Tcp, 443),
        port("h3", Protocol::Udp, 443),
        port("", Protocol::Sctp, 9),
    ]
}

struct Applied {
    headers: Vec<Option<ProxyProtocol>>,
    notes: Vec<String>,
}

fn apply_to(annotations: &[(&str, &str)]) -> Result<Applied, String> {
    let annotations = annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let (mut ports, mut notes) = (ports(), Vec::new());
    apply(&annotations, &mut ports, &mut notes).map_err(|error| error.to_string())?;
    let headers = ports.into_iter().map(|port| port.proxy_protocol).collect();
    Ok(Applied { headers, notes: notes.into_iter().map(|note| note.text).collect() })
}

fn headers(annotations: &[(&str, &str)]) -> Vec<Option<ProxyProtocol>> {
    let applied = apply_to(annotations).unwrap_or_else(|error| panic!("{annotations:?}: {error}"));
    assert_eq!(applied.notes, Vec::<String>::new(), "{annotations:?}");
    applied.headers
}

#[test]
fn ours_choose_ports_by_number_and_name() {
    let with = |version: &str, ports: &str| headers(&[(OURS, version), (OUR_PORTS, ports)]);
    assert_eq!(with("v1", "80, https"), [FIRST, FIRST, NONE, NONE]);
    assert_eq!(with(" V2 ", "443,443,"), [NONE, SECOND, SECOND, NONE], "a number is for all protocols");
    assert_eq!(with("v2", "h3"), [NONE, NONE, SECOND, NONE]);
    assert_eq!(headers(&[(OURS, " "), (OUR_PORTS, "")]), [NONE; 4]);
}

/// Rows: annotations, and what the message must contain.
#[test]
fn what_ours_cannot_mean_is_an_error_with_the_remedy() {
    let rows: [Row<'_, &[&str]>; 8] = [
        (&[(OURS, "v3")], &[OURS, "\"v3\"", "v1 or v2"]),
        (&[(OURS, "*")], &[OURS, "\"*\"", "v1 or v2"]),
        (&[(OUR_PORTS, "443")], &[OUR_PORTS, "sluice.dev/proxy-protocol with v1 or v2"]),
        (&[(OURS, "v2"), (OUR_PORTS, "8443")], &[OUR_PORTS, "\"8443\"", "80 (http), 443 (https), 443 (h3), 9"]),
        (&[(OURS, "v2"), (OUR_PORTS, "http;https")], &["\"http;https\"", "commas"]),
        (&[(OURS, "v2"), (OUR_PORTS, ",")], &["\",\"", "80 (http)"]),
        (&[(OURS, "v1"), (OUR_PORTS, "443")], &["v1 is for TCP only", "udp port 443", "or use v2"]),
        (&[(OURS, "v2")], &["v2 is for TCP and UDP only", "sctp port 9", OUR_PORTS]),
    ];
    for (annotations, expected) in rows {
        let error = apply_to(annotations).err().unwrap_or_else(|| panic!("{annotations:?} is no error"));
        assert!(expected.iter().all(|part| error.to_ascii_lowercase().contains(&part.to_ascii_lowercase())), "{error}");
    }
}

#[test]
fn the_annotations_of_aws_mean_what_its_controller_does() {
    let of_80 = format!("{AWS_ATTRIBUTES}.80");
    let placement = "proxy_protocol_v2.enabled=true,proxy_protocol_v2.client_to_server.header_placement=on_first_ack";
    let rows: [Row<'_, [Option<ProxyProtocol>; 4]>; 6] = [
        (&[(AWS_ALL, "*")], [SECOND, SECOND, SECOND, NONE]),
        (&[(AWS_PORTS, "80, 9")], [SECOND, NONE, NONE, NONE]),
        (&[(AWS_ATTRIBUTES, placement)], [SECOND, SECOND, SECOND, NONE]),
        (
            &[(AWS_ATTRIBUTES, "proxy_protocol_v2.enabled = True"), (&of_80, "proxy_protocol_v2.enabled=false")],
            [NONE, SECOND, SECOND, NONE],
        ),
        (&[(&of_80, "deregistration_delay.timeout_seconds=9,proxy_protocol_v2.enabled=true")], [SECOND, NONE, NONE, NONE]),
        (&[(AWS_ATTRIBUTES, "stickiness.enabled=true")], [NONE; 4]),
    ];
    for (annotations, expected) in rows {
        assert_eq!(headers(annotations), expected, "{annotations:?}");
    }
    let unknown = apply_to(&[(AWS_PORTS, "80,8080")]).unwrap();
    assert_eq!(unknown.headers, [SECOND, NONE, NONE, NONE]);
    assert!(unknown.notes[0].contains("no port 8080"), "{:?}", unknown.notes);
    for (key, value) in [
        (AWS_ALL, "true"),
        (AWS_PORTS, "https"),
        (AWS_ATTRIBUTES, "proxy_protocol_v2.enabled=yes"),
        (AWS_ATTRIBUTES, "proxy_protocol_v2.enable=true"),
        (AWS_ATTRIBUTES, "stickiness.enabled=true, proxy_protocol_v2.enabled"),
        (AWS_ATTRIBUTES, "proxy_protocol_v2.enabled=true, proxy_protocol_v2.client_to_server.header_placement"),
        (&of_80, "proxy_protocol_v2.enable=true"),
    ] {
        let error = apply_to(&[(key, value)]).err().unwrap_or_else(|| panic!("{value} is no error"));
        assert!(error.contains(key), "{error}");
    }
}

#[test]
fn a_port_that_the_service_does_not_have_is_a_remark() {
    let scw = "service.beta.kubernetes.io/scw-loadbalancer-proxy-protocol-v2";
    let attributes = |port: &str| format!("{AWS_ATTRIBUTES}.{port}");
    for (key, value, expected) in [
        (attributes("8443"), "proxy_protocol_v2.enabled=true", "no port 8443"),
        (attributes("https"), "proxy_protocol_v2.enabled=true", "no port https"),
        (format!("{LINODE_PORT}8443"), r#"{"proxy-protocol": "v2"}"#, "no port 8443"),
        (format!("{LINODE_PORT}8443"), r#"{"proxy-protocol": v2"#, "no port 8443"),
        (scw.to_owned(), "8443", "no port 8443"),
    ] {
        let applied = apply_to(&[(&key, value)]).unwrap();
        assert_eq!(applied.headers, [NONE; 4], "{key}");
        assert!(applied.notes.len() == 1 && applied.notes[0].contains(expected), "{key}: {:?}", applied.notes);
    }
    let both = apply_to(&[(scw, "443, 8443")]).unwrap();
    assert_eq!((both.headers, both.notes.len()), (vec![NONE, SECOND, NONE, NONE], 1));
    headers(&[(&attributes("8443"), "stickiness.enabled=true"), (&format!("{LINODE_PORT}8443"), r#"{"protocol": "tcp"}"#)]);
}

/// A row for each annotation of another product: what switches it on, the headers, and what switches it off.
#[test]
fn aliases_of_other_products_are_for_tcp_in_their_version() {
    let first = [FIRST, FIRST, NONE, NONE];
    let second = [SECOND, SECOND, NONE, NONE];
    let with_udp = [SECOND, SECOND, SECOND, NONE];
    let scw = |name: &str| format!("service.beta.kubernetes.io/scw-loadbalancer-{name}");
    let beta = |name: &str| format!("service.beta.kubernetes.io/{name}");
    let rows = [
        ("loxilb.io/useproxyprotov2".to_owned(), "yes", second, "no"),
        ("loadbalancer.openstack.org/proxy-protocol".to_owned(), "true", first, "false"),
        ("loadbalancer.openstack.org/proxy-protocol".to_owned(), "v2", second, "false"),
        (beta("do-loadbalancer-enable-proxy-protocol"), "true", first, "false"),
        (scw("proxy-protocol-v1"), "true", first, "false"),
        (scw("proxy-protocol-v2"), "*", second, "false"),
        (scw("send-proxy-v2"), "443", [NONE, SECOND, NONE, NONE], "false"),
        ("load-balancer.hetzner.cloud/uses-proxyprotocol".to_owned(), "TRUE", first, "false"),
        (beta("linode-loadbalancer-proxy-protocol"), "v1", first, "none"),
        (beta("linode-loadbalancer-default-proxy-protocol"), "v2", second, "none"),
        (format!("{LINODE_PORT}80"), r#"{"proxy-protocol": "v1"}"#, [FIRST, NONE, NONE, NONE], r#"{"protocol": "tcp"}"#),
        (beta("vultr-loadbalancer-proxy-protocol"), "true", first, "false"),
        (beta("alibaba-cloud-loadbalancer-proxy-protocol"), "on", with_udp, "off"),
        (beta("alicloud-loadbalancer-proxy-protocol"), "on", with_udp, "off"),
        (beta("oci-load-balancer-connection-proxy-protocol-version"), "1", first, ""),
        ("oci-network-load-balancer.oraclecloud.com/is-ppv2-enabled".to_owned(), "true", second, "false"),
    ];
    for (key, on, expected, off) in &rows {
        assert_eq!(headers(&[(key, on)]), *expected, "{key}");
        assert_eq!(headers(&[(key, off)]), [NONE; 4], "{key}");
        assert_eq!(reading(key, on), Reading::All, "{key}");
        let error = apply_to(&[(key, r#""proxy-protocol"?"#)]).err().unwrap_or_else(|| panic!("{key}"));
        assert!(error.contains(key.as_str()), "{error}");
    }
    let keys: Vec<_> = PRODUCTS.iter().flat_map(|aliases| aliases.iter()).map(|alias| alias.key).collect();
    assert!(keys.iter().all(|key| rows.iter().any(|(row, ..)| row.starts_with(key))), "an alias without a row");
}

#[test]
fn annotations_of_one_product_are_for_the_ports_that_they_name() {
    let [first, second] =
        ["v1", "v2"].map(|version| format!("service.beta.kubernetes.io/scw-loadbalancer-proxy-protocol-{version}"));
    assert_eq!(headers(&[(&first, "80"), (&second, "true")]), [FIRST, SECOND, NONE, NONE]);
    let default = "service.beta.kubernetes.io/linode-loadbalancer-default-proxy-protocol";
    let port = format!("{LINODE_PORT}80");
    assert_eq!(headers(&[(default, "v2"), (&port, r#"{"proxy-protocol": "none"}"#)]), [NONE, SECOND, NONE, NONE]);
}

#[test]
fn ours_beat_aliases_and_a_difference_is_named() {
    let hetzner = "load-balancer.hetzner.cloud/uses-proxyprotocol";
    let both = apply_to(&[(OURS, "v2"), (OUR_PORTS, "https"), (AWS_ALL, "*"), (hetzner, "true")]).unwrap();
    assert_eq!(both.headers, [NONE, SECOND, NONE, NONE]);
    assert_eq!(both.notes.len(), 2);
    assert!(both.notes[0].contains(OURS) && both.notes[0].contains(AWS_ALL), "{:?}", both.notes);
    assert!(both.notes[1].contains(hetzner) && both.notes[1].ends_with(&format!("{OURS} counts")), "{:?}", both.notes);
    assert_eq!(headers(&[(OURS, "v2"), (OUR_PORTS, "80,443"), (AWS_ALL, "*")]), [SECOND, SECOND, SECOND, NONE]);
    assert_eq!(headers(&[(hetzner, "true"), ("loxilb.io/useproxyprotov2", "no")]), [FIRST, FIRST, NONE, NONE]);
    let within = apply_to(&[(AWS_ALL, "*"), (AWS_PORTS, "80")]).unwrap();
    assert_eq!((within.headers, within.notes.len()), (vec![SECOND, SECOND, SECOND, NONE], 1));
}

#[test]
fn attributes_of_aws_beside_ours_are_read_in_part() {
    let rows = [
        ("proxy_protocol_v2.enabled=true", Reading::All),
        ("proxy_protocol_v2.enabled=true, stickiness.enabled=true", Reading::Part),
        ("stickiness.enabled=true", Reading::None),
    ];
    for (value, expected) in rows {
        assert_eq!(reading(AWS_ATTRIBUTES, value), expected);
        assert_eq!(reading(&format!("{AWS_ATTRIBUTES}.443"), value), expected);
    }
    assert_eq!(reading(&format!("{AWS_ATTRIBUTES}x"), "proxy_protocol_v2.enabled=true"), Reading::None);
}
