//! Tests: filters of lists, flows that end, the heaviest flows, and the stream of events.

use super::*;

/// Runs a command against its own server.
async fn of(arguments: &str) -> (String, String, Result<(), CtlError>) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("admin.sock");
    serve(&socket, Canned::default());
    ctl(&socket, arguments).await
}

fn lines(out: &str) -> Vec<&str> {
    out.lines().skip(1).map(|line| line.split_whitespace().next().unwrap_or_default()).collect()
}

#[tokio::test]
async fn a_list_has_the_rows_that_match_its_filters() {
    let rows = [
        ("services --service web", vec!["default"]),
        ("services --namespace default", vec!["default", "default"]),
        ("services --reason Unsupported", vec!["default"]),
        ("services --service default/web --reason Unsupported", vec![]),
        ("backends --service web", vec!["default/web"]),
        ("backends --service sticky", vec![]),
        ("drops --reason malformed", vec!["malformed"]),
        ("gateways --gateway edge-1", vec!["edge-1"]),
        ("ports --gateway edge-2", vec![]),
    ];
    for (command, expected) in rows {
        let (out, notes, result) = of(command).await;
        result.unwrap_or_else(|error| panic!("{command}: {error}"));
        assert_eq!(lines(&out), expected, "{command}: {out}");
        assert_eq!(notes == "(none)\n", expected.is_empty(), "{command}");
    }
}

#[tokio::test]
async fn an_unknown_name_says_what_there_is() {
    let rows = [
        ("services --service default/wbe", "no Service \"default/wbe\"; there are: default/web, default/sticky"),
        ("backends --namespace shop", "no namespace with a Service \"shop\"; there are: default"),
        ("frontends --service sticki", "no Service \"sticki\"; there are: default/"),
        ("events --service default/wbe", "no Service \"default/wbe\"; there are: default/web"),
        ("ports --gateway edge-9", "no gateway \"edge-9\"; there are: edge-1, edge-2"),
        ("drops --reason no_flwo", "no row with the reason \"no_flwo\"; there are: no_flow, malformed"),
        ("flows --service default/wbe", "no Service \"default/wbe\"; there are: default/web"),
        ("flows end --service default/wbe --yes", "no Service \"default/wbe\"; there are: default/web"),
        ("watch --service default/wbe", "no Service \"default/wbe\"; there are: default/web"),
    ];
    for (command, expected) in rows {
        let (.., result) = of(command).await;
        let error = result.expect_err(command);
        assert!(error.to_string().contains(expected), "{command}: {error}");
        assert_eq!(error.exit_code(), 1, "{command}");
    }
}

#[tokio::test]
async fn flows_end_with_yes_and_are_counted_without() {
    let (out, _, result) = of("flows end --service web").await;
    let error = result.unwrap_err();
    assert_eq!((out.as_str(), error.exit_code()), ("4 flows match\n", 1));
    assert!(error.to_string().contains("no flow was ended; --yes"), "{error}");
    let (out, _, result) = of("flows end --client 198.51.100.0/24 --yes").await;
    result.unwrap();
    assert!(out.starts_with("3 of 4 flows end; the others had ended already"), "{out}");
    let (_, _, result) = of("flows end --yes").await;
    let error = result.unwrap_err();
    assert!(error.to_string().contains("found no filter") && error.exit_code() == 2, "{error}");
}

#[tokio::test]
async fn the_heaviest_flows_stand_before_the_heaviest_clients() {
    let (out, _, result) = of("flows --top 5 --service web").await;
    result.unwrap();
    let expected = "\
PROTOCOL  CLIENT             FRONTEND        BACKEND         SERVICE  PACKETS-PER-SECOND  BITS-PER-SECOND
tcp       198.51.100.7:5555  192.0.2.100:80  10.0.0.11:8080  web      5                   12000

CLIENT        SERVICE  PACKETS-PER-SECOND  BITS-PER-SECOND
198.51.100.7  web      5                   12000
";
    assert_eq!(out, expected);
    let (out, _, result) = of("flows --top 5 -o json").await;
    result.unwrap();
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&json["flows"][0]["bits_per_second"], &json["clients"][0]["client"]), (&12_000.into(), &"198.51.100.7".into()));
    for wrong in ["flows --top 101", "flows --top 0", "flows --top 5 --client 198.51.100.7"] {
        let words = std::iter::once("sluicectl").chain(wrong.split(' '));
        assert_eq!(Arguments::try_parse_from(words).unwrap_err().exit_code(), 2, "{wrong}");
    }
}

#[tokio::test]
async fn events_are_lines_and_what_is_missing_is_told() {
    let (out, notes, result) = of("watch --service web --verdict drop -c 2").await;
    result.unwrap();
    let line = |port| format!(" drop  tcp 198.51.100.7:{port} -> 192.0.2.100:80 web: no_flow\n");
    assert_eq!(out, line(1) + &line(2));
    assert!(notes.starts_with("1 events are missing"), "{notes}");
    let (out, _, result) = of("watch --verdict drop -o json").await;
    assert_eq!(result.unwrap_err().exit_code(), 1, "the gateway ended");
    let json: Vec<serde_json::Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((json.len(), &json[1]["source"]), (2, &"198.51.100.7:2".into()));
    let words = ["sluicectl", "watch", "--verdict", "forward"];
    assert_eq!(Arguments::try_parse_from(words).unwrap_err().exit_code(), 2);
}
