//! What operators set by hand, in a ConfigMap: it survives, it is no other group's, and nobody's change is lost.

use control::kubernetes::connect;
use control::overrides::store::{Store, StoreError};
use control::overrides::{Drained, Overrides, Said};
use serde_json::json;

use crate::api_server::{ApiServer, Kind};

const NAME: &str = "sluice-overrides";

async fn store(server: &ApiServer, group: &str) -> Store {
    let file = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(file.path());
    Store::config_map(&connect(Some(file.path())).await.unwrap(), group)
}

fn drained(node: &str) -> Overrides {
    let mut overrides = Overrides::default();
    overrides.drain(Drained::Node(node.to_owned()), Said { by: "alice".to_owned(), at_s: 0 }).unwrap();
    overrides
}

#[tokio::test]
async fn what_one_group_writes_is_read_again_and_leaves_the_other_groups_alone() {
    let server = ApiServer::start().await;
    let [east, west] = [store(&server, "east").await, store(&server, "west").await];
    let (none, version) = east.load().await.unwrap();
    assert!(none.is_empty());
    east.save(&drained("a"), version).await.unwrap();
    let (none, version) = west.load().await.unwrap();
    assert!(none.is_empty());
    west.save(&drained("b"), version).await.unwrap();
    assert_eq!(east.load().await.unwrap().0, drained("a"));
    assert_eq!(west.load().await.unwrap().0, drained("b"));
}

#[tokio::test]
async fn a_change_that_somebody_was_faster_than_is_a_conflict_and_loses_nothing() {
    let server = ApiServer::start().await;
    let store = store(&server, "east").await;
    let (_, nothing) = store.load().await.unwrap();
    store.save(&drained("a"), nothing.clone()).await.unwrap();
    assert!(matches!(store.save(&drained("b"), nothing).await, Err(StoreError::Conflict)), "it exists");
    let (_, version) = store.load().await.unwrap();
    store.save(&drained("c"), version.clone()).await.unwrap();
    assert!(matches!(store.save(&drained("d"), version).await, Err(StoreError::Conflict)), "it is newer");
    assert_eq!(store.load().await.unwrap().0, drained("c"));
}

#[tokio::test]
async fn a_text_that_a_person_broke_is_named_by_its_key() {
    let server = ApiServer::start().await;
    let broken = json!({"metadata": {"name": NAME, "namespace": "default"}, "data": {"east": "version: 7"}});
    server.create(Kind::ConfigMap, broken);
    let error = store(&server, "east").await.load().await.unwrap_err();
    assert!(matches!(error, StoreError::Broken { .. }) && error.to_string().contains("key east"), "{error}");
    assert!(store(&server, "west").await.load().await.unwrap().0.is_empty());
}
