//! Tests: the commands against a server with fixed answers.

mod canned;
mod flows;

use std::path::Path;
use std::time::Duration;

use canned::{CONFIG, Canned, serve};
use clap::{CommandFactory as _, Parser};
use objects::scalar::url::{HostPort, ServerUrl};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;

use super::*;

const SCREEN: Screen = Screen { redraw: false, period: Duration::from_millis(1) };

/// Runs a command; returns both outputs and the result.
async fn ctl(socket: &Path, arguments: &str) -> (String, String, Result<(), CtlError>) {
    let server = format!("unix:{}", socket.display());
    let words = ["sluicectl", "--server", &server].into_iter().chain(arguments.split_whitespace());
    let arguments = Arguments::try_parse_from(words).unwrap();
    let (mut out, mut notes) = (Vec::new(), Vec::new());
    let result = run(&arguments, &mut out, &mut notes, SCREEN).await;
    (String::from_utf8(out).unwrap(), String::from_utf8(notes).unwrap(), result)
}

/// Runs a command against its own server and returns the output.
async fn printed(canned: Canned, arguments: &str) -> (String, String) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, canned);
    let (out, notes, result) = ctl(&socket, arguments).await;
    result.unwrap();
    (out, notes)
}

#[tokio::test]
async fn tables_are_aligned_under_upper_case_titles() {
    let (out, notes) = printed(Canned::default(), "services").await;
    assert_eq!(
        out,
        "\
NAMESPACE  NAME    FRONTENDS                                  MODE  TARGET    SCHEDULER  BACKENDS  HEALTHY  REASON
default    web     tcp 192.0.2.100:80,tcp [2001:db8::1:0]:80  nat   endpoint  maglev     3         2
default    sticky                                             nat   endpoint  maglev     0         0        Unsupported: sessionAffinity
"
    );
    assert_eq!(notes, "");
    let (out, _) = printed(Canned::default(), "backends").await;
    assert_eq!(
        out,
        "SERVICE      PROTOCOL  ADDRESS         STATE   HEALTHY  WEIGHT  FLOWS  REASON\n\
         default/web  tcp       10.0.0.11:8080  active  yes      1       7\n"
    );
}

#[tokio::test]
async fn a_table_of_drops_has_those_that_occurred() {
    let (out, notes) = printed(Canned::default(), "drops").await;
    assert_eq!((out.as_str(), notes.as_str()), ("REASON     WORKER  PACKETS\nmalformed  0       5\n", ""));
}

#[tokio::test]
async fn the_exit_code_of_status_says_whether_all_is_well_and_wait_waits_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let socket = |name: &str, canned| {
        let socket = dir.path().join(name);
        serve(&socket, canned);
        socket
    };
    let heals = socket("heals.sock", Canned::default());
    let (out, notes, result) = ctl(&heals, "status").await;
    assert!(out.contains("critical  Port uplink (port-down), since 2026-01-31T12:00:00Z\n"), "{out}");
    assert!(out.contains("-> cable") && notes.is_empty(), "{out}");
    assert_eq!(result.unwrap_err().exit_code(), 1);
    let (out, _, result) = ctl(&heals, "status").await;
    assert!(result.is_ok() && out == "All is well. 1 gateway (edge-1), 3 Services.\n", "{out}");
    let (out, notes, result) = ctl(&socket("later.sock", Canned::default()), "status --wait --timeout 5m -o json").await;
    assert!(result.is_ok() && notes == "waiting: Port uplink: it has no link\n", "{notes}");
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&parsed["well"], &parsed["critical"], &parsed["services"]), (&true.into(), &0.into(), &3.into()));
    let sick = socket("sick.sock", Canned { empty: true, ..Canned::default() });
    let (out, _, result) = ctl(&sick, "status --wait --timeout 20ms -o json").await;
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&parsed["troubles"][0]["kind"], result.unwrap_err().exit_code()), (&"port-down".into(), 1));
    let (out, _, result) = ctl(&dir.path().join("none.sock"), "status --wait --timeout 20ms").await;
    assert!(out.is_empty() && result.unwrap_err().to_string().contains("found no socket"));
}

#[tokio::test]
async fn a_drain_waits_until_no_flow_is_left_or_time_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let (out, notes, result) = ctl(&socket, "drain edge-1 --wait").await;
    assert!(out.contains("no flow is left at gateway/edge-1"), "{out}{notes}");
    for waiting in ["waiting: no flow is left; it is", "waiting: 1 flow is left", "answered: this controller does not lead"] {
        assert!(notes.contains(waiting), "{notes}");
    }
    result.unwrap();
    let mut notes = Vec::new();
    let server = Server::Unix(socket);
    let timeout = "20ms".parse().ok();
    let result = status::drained(&server, "worker-1", timeout.as_ref(), &mut Vec::new(), &mut notes, SCREEN).await;
    assert!(result.unwrap_err().to_string().starts_with("time is over for worker-1: 12 flows are left; "));
    let result = status::drained(&server, "worker-9", None, &mut Vec::new(), &mut notes, SCREEN).await;
    assert!(result.unwrap_err().to_string().contains("no longer drained"));
    let several = dir.path().join("several.sock");
    serve(&several, Canned { of_several: true, ..Canned::default() });
    let server = Server::Unix(several);
    let result = status::drained(&server, "worker-2", timeout.as_ref(), &mut Vec::new(), &mut notes, SCREEN).await;
    assert!(result.unwrap_err().to_string().contains("for worker-2: flows of edge-3 are not known: it gave no answer; "));
}

#[tokio::test]
async fn flows_of_a_service_that_there_is_not_are_an_error_that_names_those_there_are() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let (_, notes, none) = ctl(&socket, "flows --service sticky").await;
    assert!(none.is_ok() && notes == "(none)\n", "{notes}");
    let error = ctl(&socket, "flows --service default/wbe").await.2.unwrap_err().to_string();
    assert!(error.contains("no Service \"default/wbe\"; there are: default/web, default/sticky"), "{error}");
}

#[test]
fn the_author_of_a_change_is_the_user_that_the_kernel_knows() {
    let nobody = u32::MAX - 1;
    assert_eq!([0, nobody].map(|uid| name_of(Uid::from_raw(uid))), ["root".to_owned(), format!("uid-{nobody}")]);
    let uid = geteuid();
    assert!(uid.is_root() || user().starts_with(&format!("{}@", name_of(uid))), "{}", user());
}

#[tokio::test]
async fn json_is_one_array_with_the_fields_of_the_contract_in_order() {
    let fields = |text: &str| {
        let keys = text.lines().filter_map(|line| line.trim().strip_prefix('"')?.split_once("\":"));
        keys.map(|(key, _)| key.to_owned()).collect::<Vec<_>>().join(" ")
    };
    let (services, _) = printed(Canned::default(), "services -o json").await;
    let one = "namespace name frontends mode target scheduler backends healthy reason app_protocols";
    assert_eq!(fields(&services), format!("{one} tcp 192.0.2.100:80 gateway proxy_protocols {one} gateway proxy_protocols"));
    let parsed: serde_json::Value = serde_json::from_str(&services).unwrap();
    assert_eq!(
        (&parsed[0]["healthy"], &parsed[0]["reason"], &parsed[1]["reason"]),
        (&2.into(), &"".into(), &"Unsupported".into())
    );
    assert_eq!(parsed[0]["app_protocols"], serde_json::json!({"tcp 192.0.2.100:80": "kubernetes.io/h2c"}));
    let (backends, _) = printed(Canned::default(), "backends -o json").await;
    assert_eq!(fields(&backends), "service address state healthy weight flows gateway reason protocol since");
    let (ports, _) = printed(Canned::default(), "ports -o json").await;
    assert_eq!(
        fields(&ports),
        "name device link rx_packets tx_packets rx_missed steering rss rx_bytes tx_bytes rx_errors tx_errors speed_mbps mtu gateway reason \
         driver rx queues descriptors burst_mode offloads tx queues descriptors burst_mode offloads rss_table"
    );
    let parsed: serde_json::Value = serde_json::from_str(&ports).unwrap();
    assert_eq!(parsed[0]["rx_packets"], serde_json::json!(u64::MAX));
    let (drops, _) = printed(Canned::default(), "drops --output json").await;
    assert_eq!(fields(&drops), "reason worker packets gateway reason worker packets gateway");
}

#[tokio::test]
async fn a_wide_table_has_more_columns_where_the_list_has_more() {
    let (ports, _) = printed(Canned::default(), "ports").await;
    assert!(!ports.contains("DRIVER"), "{ports}");
    let (ports, _) = printed(Canned::default(), "ports -o wide").await;
    let (titles, row) = ports.split_once('\n').unwrap();
    assert!(
        titles.ends_with("DRIVER   QUEUES  DESCRIPTORS  RX-MODE      TX-MODE  OFFLOADS                 RSS-TABLE"),
        "{ports}"
    );
    assert!(row.contains("net_ice  2/1     1024/512     Vector AVX2           RSS_HASH,MBUF_FAST_FREE  512"), "{ports}");
    let (drops, _) = printed(Canned::default(), "drops -o wide").await;
    assert_eq!(drops, printed(Canned::default(), "drops").await.0);
}

#[tokio::test]
async fn flows_of_all_pages_are_listed_up_to_a_limit_that_is_announced() {
    let (out, notes) = printed(Canned::default(), "flows").await;
    let row =
        |port| format!("tcp       198.51.100.7:{port}  192.0.2.100:80  10.0.0.11:8080  nat   established  61     2       0\n");
    let titles = "PROTOCOL  CLIENT             FRONTEND        BACKEND         MODE  STATE        AGE-S  IDLE-S  WORKER\n";
    assert_eq!((out, notes), (format!("{titles}{}{}", row(5555), row(5556)), String::new()));
    let (out, notes) = printed(Canned::default(), "flows --limit 1").await;
    assert_eq!(out, format!("{titles}{}", row(5555)));
    assert!(notes.contains("ends after 1 flows") && notes.contains("--limit 0"), "{notes}");
    let (json, _) = printed(Canned::default(), "flows --service web -o json").await;
    let parsed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!((&parsed[1]["age_s"], &parsed[1]["service"], &parsed[2]), (&61.into(), &"web".into(), &serde_json::Value::Null));
}

#[tokio::test]
async fn an_explanation_is_text_for_people_and_an_object_for_programs() {
    let packet = "explain tcp 198.51.100.7:5555 192.0.2.100:80";
    let (out, notes) = printed(Canned::default(), packet).await;
    assert_eq!(
        out,
        "\
packet    tcp 198.51.100.7:5555 -> 192.0.2.100:80, the first of its connection
arrives   on uplink, for worker 1
flow      none
frontend  192.0.2.100:80 of default/web, nat, maglev
source    allowed; the Service has no source ranges
affinity  off
table     entry 17 of 1021: 10.0.0.11:8080
backend   10.0.0.11:8080, by table
          * 10.0.0.11:8080: weight 1
          - 10.0.0.12:8080: takes no new flows: unhealthy
rewrite   10.0.0.3:1024 -> 10.0.0.11:8080
leaves    by cluster to next hop 10.0.0.11, 02:00:00:00:01:0b
verdict   forward; it begins a flow
"
    );
    assert_eq!(notes, "");
    let (json, _) = printed(Canned::default(), &format!("{packet} --in cluster --packet later -o json")).await;
    let parsed: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(
        (&parsed["in"], &parsed["packet"], &parsed["flow"]),
        (&"cluster".into(), &"later".into(), &serde_json::Value::Null)
    );
    assert_eq!(parsed["backends"][1]["why_not"], "unhealthy");
    let (yaml, _) = printed(Canned::default(), &format!("{packet} -o yaml")).await;
    assert!(yaml.starts_with("protocol: tcp\n") && yaml.contains("table_entry: 17\n"), "{yaml}");
}

#[tokio::test]
async fn yaml_is_one_list() {
    let (out, _) = printed(Canned::default(), "drops -o yaml").await;
    assert_eq!(
        out,
        "- reason: malformed\n  worker: 0\n  packets: 5\n  gateway: edge-1\n- reason: no_flow\n  worker: 0\n  packets: 0\n  gateway: edge-1\n"
    );
}

#[tokio::test]
async fn an_empty_list_has_titles_and_a_note() {
    let empty = || Canned { empty: true, ..Default::default() };
    let (out, notes) = printed(empty(), "services").await;
    assert_eq!((out.lines().count(), notes.as_str()), (1, "(none)\n"));
    let (out, notes) = printed(empty(), "services -o json").await;
    assert_eq!((out.as_str(), notes.as_str()), ("[]\n", ""));
    let (out, _) = printed(empty(), "services -o yaml").await;
    assert_eq!(out, "[]\n");
}

#[tokio::test]
async fn watching_prints_an_object_a_line_when_it_changes() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let (out, _, result) = ctl(&socket, "drops -o json --watch").await;
    let line = |reason: &str, packets: u64| {
        format!("{{\"reason\":\"{reason}\",\"worker\":0,\"packets\":{packets},\"gateway\":\"edge-1\"}}\n")
    };
    assert_eq!(out, [line("malformed", 5), line("no_flow", 0), line("no_flow", 1), line("no_flow", 2)].concat());
    let error = result.unwrap_err().to_string();
    assert!(error.ends_with("answered: enough"), "{error}");
}

#[tokio::test]
async fn watching_draws_the_table_again() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let (out, _, _) = ctl(&socket, "drops --watch").await;
    assert_eq!(out.matches("REASON     WORKER  PACKETS\n").count(), 3, "{out}");
}

#[tokio::test]
async fn the_error_for_a_socket_that_does_not_answer_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    let error = |result: Result<(), CtlError>| result.unwrap_err().to_string();
    assert!(error(ctl(&socket, "ports").await.2).contains("is its program (sluiced or sluice-controller) running here?"));
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    assert!(error(ctl(&socket, "ports").await.2).contains("no process listens"));
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "").unwrap();
    assert!(error(ctl(&socket, "ports").await.2).contains("admin.sock"));
}

#[tokio::test]
async fn a_server_of_another_kind_is_named_as_such() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text.sock");
    let listener = UnixListener::bind(&text).unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let _ = stream.try_write(b"220 mail.example SMTP\r\n");
        }
    });
    let (_, _, result) = ctl(&text, "ports").await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("is not the admin API of sluice"), "{error}");

    let other = dir.path().join("grpc.sock");
    let incoming = UnixListenerStream::new(UnixListener::bind(&other).unwrap());
    let (_, health) = tonic_health::server::health_reporter();
    tokio::spawn(tonic::transport::Server::builder().add_service(health).serve_with_incoming(incoming));
    let (_, _, result) = ctl(&other, "ports").await;
    let error = result.unwrap_err().to_string();
    assert!(error.contains("is not the admin API of sluice"), "{error}");
}

#[tokio::test]
async fn every_command_has_its_man_page() {
    let (page, _, result) = ctl(Path::new("/nonexistent"), "man").await;
    assert!(result.is_ok() && page.contains(".TH sluicectl 1"), "{page}");
    let dir = tempfile::tempdir().unwrap();
    let (_, _, result) = ctl(Path::new("/nonexistent"), &format!("man {}", dir.path().display())).await;
    result.unwrap();
    for command in Arguments::command().get_subcommands() {
        let page = fs::read_to_string(dir.path().join(format!("sluicectl-{}.1", command.get_name()))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{page}");
    }
    let error = ctl(Path::new("/a"), "man /nonexistent/man").await.2.unwrap_err().to_string();
    assert!(error.starts_with("cannot write the man pages to /nonexistent/man: ") && error.ends_with("; create the directory"));
}

#[tokio::test]
async fn completion_and_version_need_no_server() {
    for (command, begin) in [("completion bash", "_sluicectl()"), ("version", "sluicectl ")] {
        let (out, _, result) = ctl(Path::new("/nonexistent"), command).await;
        assert!(result.is_ok() && out.starts_with(begin), "{out}");
    }
}

#[test]
fn servers_are_unix_sockets_or_tls() {
    let parse = |server: &str| Arguments::try_parse_from(["sluicectl", "ports", "--server", server]);
    let https = |host: &str, port| ServerUrl::Https(HostPort::new(host, port).unwrap());
    assert_eq!(parse("unix:/a").unwrap().server, ServerUrl::Unix("/a".into()));
    assert_eq!(parse("https://a.example:1").unwrap().server, https("a.example", 1));
    assert_eq!(parse("https://[2001:db8::1]:9").unwrap().server, https("2001:db8::1", 9));
    for wrong in ["https://a", "https://a:0", "https://2001:db8::1:9", "https://[a]:1", "/a", "unix:"] {
        assert_eq!(parse(wrong).unwrap_err().exit_code(), 2, "{wrong}");
    }
    assert!(
        parse("http://a:1")
            .unwrap_err()
            .to_string()
            .contains("without TLS; over TCP both sides show certificates, so write https://")
    );
}

#[tokio::test]
async fn a_reload_prints_the_keys_in_effect_or_the_problems_of_the_file() {
    assert_eq!(printed(Canned::default(), "reload").await.0, "in effect: pools\n");
    assert_eq!(printed(Canned::default(), "config").await.0, CONFIG);
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned { empty: true, ..Canned::default() });
    let error = ctl(&socket, "reload").await.2.unwrap_err();
    assert!(error.exit_code() == 2 && error.to_string().contains("/etc/f.yaml:3: unknown key `snatt`"), "{error}");
}

#[tokio::test]
async fn a_configuration_of_a_routing_daemon_waits_for_the_first_state_of_the_gateway() {
    let (out, _) = printed(Canned::default(), "config bird --local-as 64512 --peer 192.0.2.1=64513").await;
    assert!(out.contains("# Pools now: a."), "{out}");
}

#[tokio::test]
async fn rows_of_several_gateways_name_their_gateway_and_a_silent_one_is_named_with_exit_code_1() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned { of_several: true, ..Canned::default() });
    let (out, _, result) = ctl(&socket, "backends").await;
    assert_eq!(
        out,
        "GATEWAY  SERVICE      PROTOCOL  ADDRESS         STATE   HEALTHY  WEIGHT  FLOWS  REASON\n\
         edge-1   default/web  tcp       10.0.0.11:8080  active  yes      1       7\n\
         edge-2   default/web  tcp       10.0.0.11:8080  active  yes      1       7\n"
    );
    let error = result.unwrap_err().to_string();
    assert_eq!(error, "without gateway edge-3: it gave no answer within 3 s");
    // The gateway that is silent may have it.
    for list in ["backends --service default/other", "flows --service default/wbe"] {
        let error = ctl(&socket, list).await.2.unwrap_err().to_string();
        assert!(error.starts_with("without gateway edge-3: it gave no answer"), "{list}: {error}");
    }
}

#[tokio::test]
async fn the_group_is_listed_with_the_fields_of_the_contract() {
    let (out, _) = printed(Canned::default(), "gateways").await;
    assert_eq!(
        out,
        "NAME    READY  GENERATION  DRAINING  LAST-SEEN             VERSION  FLOWS  GROUPS  SHADOWS  LAG  SESSIONS  AWAITED-BY\n\
         edge-1  yes    1700/4      no        2026-01-31T12:00:00Z  0.1.0    12     5/16    9        4ms  1/2\n\
         edge-2  no                 yes                                      0                                      default\n"
    );
    let (out, _) = printed(Canned::default(), "gateways -o json").await;
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(parsed[0]["draining"], false);
    assert_eq!((&parsed[0]["groups_owned"], &parsed[0]["lag_ms"], &parsed[1]["lag_ms"]), (&5.into(), &4.into(), &().into()));
    let (out, _) = printed(Canned::default(), "vips").await;
    assert_eq!(
        out,
        "VIP          POOL  ANNOUNCE  GROUP  GATEWAYS  SERVICES       STATIONS\n\
         192.0.2.100  link  l2        11     edge-1    shop/a,shop/b\n\
         203.0.113.7  far   routed           edge-1    shop/a,shop/b\n"
    );
    let (out, _) = printed(Canned::default(), "pools -o json").await;
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    let pool = serde_json::json!({"name": "default", "addresses": ["192.0.2.0/24", "2001:db8::/64"],
        "total": "18446744073709551872", "used": "1", "available": "18446744073709551871", "conflict": "", "unannounced_by": [],
        "awaiting": "1", "awaited": ["edge-2"]});
    assert_eq!(parsed[0], pool);
    let (out, _) = printed(Canned::default(), "overrides -o json").await;
    let parsed: serde_json::Value = serde_json::from_str(&out).unwrap();
    let first = serde_json::json!({"kind": "node", "name": "worker-1", "service": "", "weight": null, "by": "alice@edge",
        "at": "2026-01-31T12:00:00Z", "flows": 12});
    assert_eq!((&parsed[0], &parsed[2]["weight"]), (&first, &0.into()));
    let (out, _) = printed(Canned::default(), "overrides").await;
    let flows: Vec<_> = out.lines().map(|line| line.split_whitespace().nth(2)).collect();
    assert_eq!(flows[1..3], [Some("12"), Some("alice@edge")], "of the second they are not known: {out}");
}

#[test]
fn the_error_for_a_negative_weight_has_the_range() {
    let error = Arguments::try_parse_from(["sluicectl", "weight", "web", "10.0.0.1:80", "-5"]).unwrap_err().to_string();
    assert!(error.contains("expected 0 to 65535"), "{error}");
}

#[tokio::test]
async fn a_drain_and_a_weight_print_the_new_state_and_unknown_names_list_the_known_ones() {
    let (out, notes) = printed(Canned::default(), "drain edge-1").await;
    assert!(out.starts_with("drained by ") && out.contains('@'), "{out}");
    assert_eq!(notes, "l2\n");
    assert_eq!(printed(Canned::default(), "undrain node/x").await.0, "node/x is back\n");
    assert_eq!(printed(Canned::default(), "weight web 10.0.0.1:80 7").await.0, "web 10.0.0.1:80 Some(7)\n");
    assert_eq!(printed(Canned::default(), "weight web 10.0.0.1:80 auto").await.0, "web 10.0.0.1:80 None\n");
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let error = ctl(&socket, "drain edge-9").await.2.unwrap_err();
    assert!(error.exit_code() == 1 && error.to_string().contains("edge-9 is neither a gateway (edge-1)"), "{error}");
    for wrong in ["weight web 10.0.0.1 7", "weight web 10.0.0.1:80 65536", "weight web 10.0.0.1:80 -1", "drain", "undrain"] {
        let words = ["sluicectl"].into_iter().chain(wrong.split(' '));
        assert_eq!(Arguments::try_parse_from(words).unwrap_err().exit_code(), 2, "{wrong}");
    }
}

#[tokio::test]
async fn events_are_listed_and_followed_as_they_come() {
    let (out, _) = printed(Canned::default(), "events").await;
    assert!(out.starts_with("TIME                  TYPE     REASON   OBJECT               MESSAGE\n"), "{out}");
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    let (out, _, _) = ctl(&socket, "events -o json --watch").await;
    let lines: Vec<_> = out.lines().collect();
    assert!(lines.last().unwrap().starts_with("{\"time\":\"2026-01-31T12:00:05Z\",\"type\":\"Warning\",\"reason\""), "{out}");
    assert_eq!(lines.len(), 3, "{out}");
}

#[tokio::test]
async fn explanations_of_several_gateways_name_them_and_each_is_an_object_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned { of_several: true, ..Canned::default() });
    let packet = "explain tcp 198.51.100.7:5555 192.0.2.100:80";
    let (out, _, result) = ctl(&socket, packet).await;
    let names: Vec<_> = out.lines().filter(|line| line.starts_with("gateway ")).collect();
    assert_eq!(names.len(), 2, "{out}");
    assert_eq!(names[1], "gateway   edge-2");
    assert_eq!(result.unwrap_err().to_string(), "without gateway edge-3: it gave no answer");
    let (out, _, _) = ctl(&socket, &format!("{packet} -o json")).await;
    let objects: Vec<serde_json::Value> = serde_json::Deserializer::from_str(&out).into_iter().map(Result::unwrap).collect();
    assert_eq!(objects.len(), 2, "{out}");
    assert_eq!(objects[1]["gateway"], "edge-2");
}

#[tokio::test]
async fn a_capture_ends_after_the_wanted_packets_and_says_how_much_it_saw() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, file) = (dir.path().join("admin.sock"), dir.path().join("c.pcapng"));
    serve(&socket, Canned::default());
    let (out, notes, result) = ctl(&socket, &format!("capture -w {} -s 20 --count 2 tcp port 80", file.display())).await;
    result.unwrap();
    assert!(out.is_empty());
    assert_eq!(
        notes,
        "capturing on uplink; Ctrl-C ends it\n2 packets captured; the workers looked at 4 of 10 packets\n\
         6 packets passed without a look while workers were busy, so this is a sample\n\
         1 packets that matched are missing: they came faster than this program took them\n"
    );
    assert!(fs::read(&file).unwrap().starts_with(&[0x0a, 0x0d, 0x0d, 0x0a]), "pcapng");
    let (out, _, _) = ctl(&socket, "trace -c 1").await;
    assert!(out.contains(" tcp 198.51.100.7:5555 -> 192.0.2.100:1, 0 bytes\n"), "{out}");
    let (out, _, _) = ctl(&socket, "trace -o json -c 3").await;
    let reasons = out.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap()["reason"].clone());
    assert_eq!(reasons.collect::<Vec<_>>(), ["no_flow"; 3], "{out}");
    let rows = [
        ("trace".to_owned(), "the gateway ends"),
        (format!("capture -w {}/no/c.pcapng", dir.path().display()), "No such file"),
        ("capture -w /dev/null port nowhere".to_owned(), "the filter \"port nowhere\" is not valid: "),
    ];
    for (arguments, expected) in rows {
        let (_, _, result) = ctl(&socket, &arguments).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{arguments}: {error}");
    }
    for wrong in ["capture -c 0", "capture -d 5", "capture -s 65536", "trace -o yaml"] {
        let words = std::iter::once("sluicectl").chain(wrong.split(' '));
        assert_eq!(Arguments::try_parse_from(words).unwrap_err().exit_code(), 2, "{wrong}");
    }
}
