//! Manual overrides of operators in a ConfigMap: they survive restarts, affect only their group, and no change is lost.

use control::store::Storage;
use control::store::override_editor::OverridesState;
use control::store::overrides::{OverrideStoreError, load, save};
use control::world::overrides::{Author, DrainTarget, Overrides};
use serde_json::json;

use crate::api_server::{ApiServer, Fault, FaultRule, Kind};
use crate::installation::Installation;
use crate::user::{User, connect_to, wait_for};

const NAME: &str = "sluice-overrides";

async fn store(server: &ApiServer, group: &str) -> Storage {
    Storage::in_cluster(&connect_to(server).await, group)
}

fn drained(node: &str) -> Overrides {
    let mut overrides = Overrides::default();
    overrides.drain(DrainTarget::Node(node.to_owned()), Author { by: "alice".to_owned(), at_s: 0 }).unwrap();
    overrides
}

#[tokio::test]
async fn a_group_reads_back_its_overrides_and_leaves_other_groups_unchanged() {
    let server = ApiServer::start().await;
    let [east, west] = [store(&server, "east").await, store(&server, "west").await];
    let (none, version) = load(&east).await.unwrap();
    assert!(none.is_empty());
    save(&east, &drained("a"), version).await.unwrap();
    let (none, version) = load(&west).await.unwrap();
    assert!(none.is_empty());
    save(&west, &drained("b"), version).await.unwrap();
    assert_eq!(load(&east).await.unwrap().0, drained("a"));
    assert_eq!(load(&west).await.unwrap().0, drained("b"));
}

#[tokio::test]
async fn a_concurrent_change_is_a_conflict_and_loses_nothing() {
    let server = ApiServer::start().await;
    let store = store(&server, "east").await;
    let (_, nothing) = load(&store).await.unwrap();
    save(&store, &drained("a"), nothing.clone()).await.unwrap();
    assert!(matches!(save(&store, &drained("b"), nothing).await, Err(OverrideStoreError::Conflict)), "the object already exists");
    let (_, version) = load(&store).await.unwrap();
    save(&store, &drained("c"), version.clone()).await.unwrap();
    assert!(matches!(save(&store, &drained("d"), version).await, Err(OverrideStoreError::Conflict)), "the object is newer");
    assert_eq!(load(&store).await.unwrap().0, drained("c"));
}

#[tokio::test]
async fn an_invalid_text_is_reported_with_its_key() {
    let server = ApiServer::start().await;
    let broken = json!({"metadata": {"name": NAME, "namespace": "default"}, "data": {"east": "version: 7"}});
    server.create(Kind::ConfigMap, broken);
    let error = load(&store(&server, "east").await).await.unwrap_err();
    assert!(matches!(error, OverrideStoreError::Broken { .. }) && error.to_string().contains("key east"), "{error}");
    assert!(load(&store(&server, "west").await).await.unwrap().0.is_empty());
}

/// A user with a Service of one backend. A controller served it and stopped, and then the backend was drained by hand.
async fn drained_backend(server: &ApiServer) -> User {
    let user = User::of_test_server(server).await;
    user.add("web", &json!({})).await;
    let installation = Installation::start(&user).await;
    user.wait_for_ingress("web").await;
    installation.stop().await;
    let drain = "version: 1\ndrains: [{what: 'backend/10.0.0.11:8080', by: alice, at: '2026-01-31T12:00:00Z'}]";
    server
        .create(Kind::ConfigMap, json!({"metadata": {"name": NAME, "namespace": user.namespace}, "data": {user.group(): drain}}));
    user
}

/// Waits until the gateway of a controller that just started has its first state, in which the backend must be drained.
async fn first_state_is_drained(installation: &Installation, user: &User) {
    let received = installation.wait_for_state("a first state", |received| received.messages > 0).await;
    let web = &received.services[&user.full_name("web")];
    assert!(web.ports[0].backends.iter().all(|backend| backend.draining), "{web:?}");
}

#[tokio::test]
async fn an_api_error_at_a_leaders_start_undoes_no_drain() {
    for fault in
        [Fault::Forbidden, Fault::Unauthorized, Fault::Internal, Fault::PageNotFound, Fault::TooMany { retry_after_s: 0 }]
    {
        println!("{fault:?}");
        let server = ApiServer::start().await;
        let user = drained_backend(&server).await;
        server.inject(FaultRule { fault, times: 3, method: "GET", path_contains: "/configmaps", watch: false });
        let installation = Installation::start(&user).await;
        first_state_is_drained(&installation, &user).await;
    }
}

#[tokio::test]
async fn invalid_overrides_undo_no_drain_and_apply_once_they_are_repaired() {
    let server = ApiServer::start().await;
    let user = drained_backend(&server).await;
    let before = server.get(Kind::ConfigMap, &user.namespace, NAME).unwrap()["data"].clone();
    server.update(Kind::ConfigMap, &user.namespace, NAME, &json!({"data": {user.group(): "version: 7"}}));
    let installation = Installation::start(&user).await;
    let state = async || installation.running().view.editor.state();
    wait_for("unreadable overrides", state, |state| matches!(state, OverridesState::Unreadable(_))).await;
    server.update(Kind::ConfigMap, &user.namespace, NAME, &json!({"data": before}));
    first_state_is_drained(&installation, &user).await;
}
