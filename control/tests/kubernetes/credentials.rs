//! Credentials that end and are replaced: in the kubeconfig, in the file that it names, and from a plugin.

use std::path::Path;

use control::kubernetes::{Cluster, connect};
use k8s_openapi::api::core::v1::Service;
use kube::Api;
use kube::api::ListParams;
use serde_json::{Value, json};

use crate::api_server::{Account, ApiServer};
use crate::installation::Installation;
use crate::user::{User, wait_for};

/// The user in a kubeconfig, for a token.
type UserOfToken<'a> = &'a dyn Fn(&str) -> Value;

/// A kubeconfig with this user.
fn write_kubeconfig(server: &ApiServer, user: &Value, file: &Path) {
    let config = json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server.url()}}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    });
    std::fs::write(file, config.to_string()).unwrap();
}

fn account(server: &ApiServer, token: &str) {
    server.add_account(token, Account { name: token.to_owned(), grants: None });
}

async fn list(cluster: &Cluster) -> Result<usize, String> {
    let services: Api<Service> = Api::all(cluster.client.clone());
    services.list(&ListParams::default()).await.map(|list| list.items.len()).map_err(|error| error.to_string())
}

#[tokio::test]
async fn a_token_that_was_replaced_is_read_again_from_wherever_it_comes() {
    let server = ApiServer::start().await;
    let directory = tempfile::tempdir().unwrap();
    let [kubeconfig, token] = ["kubeconfig", "token"].map(|name| directory.path().join(name));
    let in_file = |token: &str| json!({"token": token});
    let by_name = |_: &str| json!({"tokenFile": token});
    let by_plugin = |_: &str| {
        json!({"exec": {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never", "command": "sh",
            "args": ["-c", format!("printf '{{\"apiVersion\":\"client.authentication.k8s.io/v1\",\"kind\":\"ExecCredential\",\
                \"status\":{{\"token\":\"%s\"}}}}' \"$(cat {})\"", token.display())]}})
    };
    let sources: [(&str, UserOfToken); 3] = [("token", &in_file), ("tokenFile", &by_name), ("exec", &by_plugin)];
    for (source, user) in sources {
        let provide = |now: &str| {
            std::fs::write(&token, now).unwrap();
            write_kubeconfig(&server, &user(now), &kubeconfig);
        };
        account(&server, "first");
        provide("first");
        let cluster = connect(Some(&kubeconfig)).await.unwrap();
        assert_eq!(list(&cluster).await, Ok(0), "{source}");
        server.remove_account("first");
        let refused = list(&cluster).await.unwrap_err();
        assert!(refused.contains("Unauthorized"), "{source}: {refused}");
        account(&server, "second");
        provide("second");
        wait_for(&format!("an answer by {source}"), async || list(&cluster).await, Result::is_ok).await.unwrap();
        server.remove_account("second");
    }
}

#[tokio::test]
async fn a_kubeconfig_that_cannot_be_read_at_the_moment_does_no_harm() {
    let server = ApiServer::start().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    account(&server, "first");
    write_kubeconfig(&server, &json!({"token": "first"}), file.path());
    let cluster = connect(Some(file.path())).await.unwrap();
    server.remove_account("first");
    std::fs::write(file.path(), "users: [").unwrap();
    assert!(list(&cluster).await.is_err());
    account(&server, "first");
    assert_eq!(list(&cluster).await, Ok(0), "the last credentials stay in use");
}

#[tokio::test]
async fn a_controller_goes_on_with_the_new_token_of_its_kubeconfig() {
    let (server, user) = User::with_test_server().await;
    let provide = |token: &str| {
        account(&server, token);
        write_kubeconfig(&server, &json!({"token": token}), &user.kubeconfig);
    };
    provide("first");
    let installation = Installation::start(&user).await;
    user.add("before", &json!({})).await;
    user.wait_for_ingress("before").await;
    server.remove_account("first");
    provide("second");
    user.add("after", &json!({})).await;
    user.wait_for_ingress("after").await;
    let received = installation.wait_until_served(&user, "after", 1).await;
    assert!(received.removed.is_empty(), "{:?}", received.removed);
}
