//! The checkpoint in ConfigMaps: who may overwrite whose.

use control::config::settings::MaglevSeed;
use control::store::{Storage, checkpoints};
use control::world::checkpoint::{Checkpoint, Decided};
use proto::ServiceName;
use serde_json::Value;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

use crate::api_server::Kind;
use crate::user::{User, wait_for};

/// A controller that has read the checkpoint, as far as it keeps one.
struct Keeper {
    newest: watch::Sender<Checkpoint>,
    task: JoinHandle<()>,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Keeper {
    async fn start(user: &User, group: &str) -> Self {
        let (newest, seen) = watch::channel(Checkpoint::default());
        let (sender, mut changes) = mpsc::channel(1);
        let storage = Storage::in_cluster(&user.cluster, group);
        let task = tokio::spawn(async move { checkpoints::keep(storage, MaglevSeed::Public, seen, sender).await });
        changes.recv().await.unwrap();
        Self { newest, task }
    }

    /// Decides about one more Service.
    fn decide(&self, address: &str) {
        let decided = Decided { addresses: vec![address.parse().unwrap()], ..Decided::default() };
        let mut checkpoint = Checkpoint::default();
        checkpoint.services.insert(ServiceName::new("shop", "web"), decided.into());
        self.newest.send_replace(checkpoint);
    }
}

#[tokio::test]
async fn a_deposed_leader_does_not_overwrite_its_successor_and_other_installations_delay_nobody() {
    let (server, user) = User::with_test_server().await;
    let texts = |group: &str| -> String {
        let maps = server.list(Kind::ConfigMap, &user.cluster.namespace);
        let text = |map: &Value| map["data"][group].as_str().map(str::to_owned);
        maps.iter().filter_map(text).collect()
    };
    let stored = async |group: &str, address: &str| {
        wait_for("the checkpoint", async || texts(group), |text| text.contains(address)).await;
    };
    let deposed = Keeper::start(&user, "east").await;
    deposed.decide("192.0.2.1");
    stored("east", "192.0.2.1").await;
    let other = Keeper::start(&user, "west").await;
    other.decide("198.51.100.1");
    stored("west", "198.51.100.1").await;
    deposed.decide("192.0.2.2");
    stored("east", "192.0.2.2").await;
    let successor = Keeper::start(&user, "east").await;
    successor.decide("192.0.2.3");
    stored("east", "192.0.2.3").await;
    let before = server.log().len();
    deposed.decide("192.0.2.4");
    let reads = || server.log().split_off(before).iter().any(|logged| logged.method == "GET");
    wait_for("a conflict, after which it reads again", async || reads(), |reads| *reads).await;
    assert!(texts("east").contains("192.0.2.3"), "{}", texts("east"));
}
