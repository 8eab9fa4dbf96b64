//! Compares the tables of docs/reference/service-api.md with the API and with the Events that sluice writes. The page,
//! and sluice, must cover every field that Kubernetes adds.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ServicePort, ServiceSpec};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointPort, EndpointSlice};
use proto::{LimitKind, Reason};
use schemars::{JsonSchema, schema_for};

const PAGE: &str = include_str!("../../docs/reference/service-api.md");

/// The names in the first column of the table below `title`.
fn documented(title: &str) -> BTreeSet<String> {
    let table = PAGE.split_once(&format!("| {title} | |\n|---|---|\n")).unwrap().1;
    let rows = table.lines().take_while(|line| line.starts_with('|'));
    let cells = rows.map(|row| row.split('|').nth(1).unwrap());
    cells.flat_map(|cell| cell.split(',').map(|name| name.trim().trim_matches('`').to_owned())).collect()
}

/// The fields of a type, each after `prefix`.
fn fields<T: JsonSchema>(prefix: &str) -> Vec<String> {
    let schema = schema_for!(T);
    let properties = schema.get("properties").unwrap().as_object().unwrap();
    properties.keys().map(|name| format!("{prefix}{name}")).collect()
}

#[test]
fn the_table_has_exactly_the_fields_of_a_service() {
    assert_eq!(documented("field of a Service"), fields::<ServiceSpec>("").into_iter().collect());
    assert_eq!(documented("field of a port"), fields::<ServicePort>("").into_iter().collect());
}

#[test]
fn the_table_has_exactly_the_fields_of_an_endpoint_slice() {
    let of_lists = [fields::<EndpointPort>("ports[]."), fields::<Endpoint>("endpoints[].")].concat();
    let own = fields::<EndpointSlice>("");
    let own = own.into_iter().filter(|name| !["apiVersion", "kind", "metadata", "ports", "endpoints"].contains(&name.as_str()));
    assert_eq!(documented("field of an EndpointSlice"), own.chain(of_lists).collect());
}

/// The words of `Cause`, from its source: a list of them could lack one as well. Those of limits are words of `proto`.
fn causes() -> BTreeSet<String> {
    let words = include_str!("../objects/src/note.rs").split_once("fn as_str").unwrap().1.split_once("\n    }\n").unwrap().0;
    let own = words.lines().filter_map(|line| Some(line.split_once("=> \"")?.1.split_once('"')?.0.to_owned()));
    own.chain(LimitKind::ALL.map(|kind| kind.as_str().to_owned())).collect()
}

#[test]
fn every_reason_of_an_event_is_in_a_table_or_beside_it() {
    let table = PAGE.split_once("| reason of the Event | what happened | what to do |\n|---|---|---|\n").unwrap().1;
    let rows = table.lines().take_while(|line| line.starts_with('|')).map(|row| row.split('|').nth(1).unwrap());
    let documented: BTreeSet<String> =
        rows.flat_map(|cell| cell.split(',').map(|name| name.trim().trim_matches('`').to_owned())).collect();
    assert!(causes().contains("BackendRefused") && causes().contains("SessionDown"), "{:?}", causes());
    assert_eq!(documented, causes());
    for reason in Reason::ALL {
        assert!(PAGE.contains(&format!("`{}`", reason.as_str())), "{}", reason.as_str());
    }
}
