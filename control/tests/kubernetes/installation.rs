//! A controller and its only gateway, in the cluster of a user.

use std::path::PathBuf;

use control::config::settings::{ControllerSettings, Listen, OwnershipRules, Source};
use control::controller::{self, Running};
use objects::PoolSpec;
use proto::v1::FleetReport;
use tokio_util::sync::CancellationToken;

use crate::gateway::{Gateway, ReceivedState};
use crate::user::{User, wait_for};

pub struct Installation {
    /// `None` while no gateway is connected.
    gateway: Option<Gateway>,
    gateway_name: String,
    socket: PathBuf,
    shutdown: CancellationToken,
    running: Running,
}

impl Installation {
    /// With a pool of a hundred addresses.
    pub async fn start(user: &User) -> Self {
        Self::start_with(user, |_| {}).await
    }

    /// With changed settings.
    pub async fn start_with(user: &User, change: impl FnOnce(&mut ControllerSettings)) -> Self {
        let mut installation = Self::without_gateway(user, change).await;
        installation.connect_gateway();
        installation
    }

    /// Only the controller.
    pub async fn without_gateway(user: &User, change: impl FnOnce(&mut ControllerSettings)) -> Self {
        let socket = user.directory().join("config.sock");
        let shutdown = CancellationToken::new();
        let mut settings = settings(user, socket.clone());
        change(&mut settings);
        let running = controller::start(settings, shutdown.clone()).await.unwrap();
        Self { gateway: None, gateway_name: user.gateway.clone(), socket, shutdown, running }
    }

    /// An additional group of gateways on the same cluster, with a gateway and a pool of its own.
    pub async fn start_group(user: &User, group: &str, addresses: &str) -> Self {
        let socket = user.directory().join(format!("{group}.sock"));
        let mut installation = Self::without_gateway(user, |settings| {
            settings.listen = Listen::unix(socket.clone());
            settings.group = group.to_owned();
            settings.ownership.serves_unassigned = false;
            settings.pools = vec![PoolSpec::new(group, vec![addresses.parse().unwrap()])];
        })
        .await;
        (installation.socket, installation.gateway_name) = (socket, format!("{}-{group}", user.gateway));
        installation.connect_gateway();
        installation
    }

    /// A second installation on the same cluster, with a class, a group, a gateway and a pool of its own. Its pools are
    /// those of the first, too, if their objects name no class.
    pub async fn start_beside(user: &User, name: &str, addresses: &str) -> Self {
        let socket = user.directory().join(format!("{name}.sock"));
        let mut installation = Self::without_gateway(user, |settings| {
            settings.listen = Listen::unix(socket.clone());
            settings.group = format!("{}-{name}", user.group());
            settings.load_balancer_class = Self::class_beside(user, name);
            settings.pools = vec![PoolSpec::new(name, vec![addresses.parse().unwrap()])];
        })
        .await;
        (installation.socket, installation.gateway_name) = (socket, format!("{}-{name}", user.gateway));
        installation.connect_gateway();
        installation
    }

    /// The class of a second installation.
    pub fn class_beside(user: &User, name: &str) -> String {
        format!("{}-{name}", user.class())
    }

    /// Another gateway of this installation.
    pub fn add_gateway(&self, name: &str) -> Gateway {
        Gateway::start_as(name, &self.socket)
    }

    /// The gateway.
    pub fn gateway(&self) -> &Gateway {
        self.gateway.as_ref().expect("a gateway is connected")
    }

    pub fn connect_gateway(&mut self) {
        self.gateway = Some(Gateway::start_as(&self.gateway_name, &self.socket));
    }

    /// The running controller.
    pub fn running(&self) -> &Running {
        &self.running
    }

    /// With a gateway that reports the health of backends, as real ones do.
    pub async fn start_reporting(user: &User) -> Self {
        let mut installation = Self::without_gateway(user, |_| {}).await;
        installation.gateway = Some(Gateway::start_reporting(&installation.gateway_name, &installation.socket));
        installation
    }

    /// Lets the gateway report this about the fleet.
    pub fn report_fleet(&self, fleet: FleetReport) {
        self.gateway().report_fleet(fleet);
    }

    /// The state that the gateway received.
    pub fn received(&self) -> ReceivedState {
        self.gateway().received()
    }

    /// Stops the controller and waits until it has stopped.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.running.stopped().await.unwrap();
    }

    /// Waits until the state that the gateway received satisfies `is_wanted`.
    pub async fn wait_for_state(&self, what: &str, is_wanted: impl Fn(&ReceivedState) -> bool) -> ReceivedState {
        wait_for(what, async || self.received(), is_wanted).await
    }

    /// Waits until the gateway has a Service with this many backends.
    pub async fn wait_until_served(&self, user: &User, name: &str, backends: usize) -> ReceivedState {
        let service = user.full_name(name);
        self.wait_for_state(&format!("{backends} backends of {name}"), |received| received.backends(&service) == backends).await
    }

    /// Waits until the gateway no longer has a Service.
    pub async fn wait_until_withdrawn(&self, user: &User, name: &str) -> ReceivedState {
        let service = user.full_name(name);
        self.wait_for_state(&format!("the end of {name}"), |received| !received.services.contains_key(&service)).await
    }
}

/// Nothing else in the cluster belongs to this installation: its class, group, pools and node ports are unique.
fn settings(user: &User, listen: PathBuf) -> ControllerSettings {
    let namespace = ("kubernetes.io/metadata.name".to_owned(), user.namespace.clone());
    let ownership = OwnershipRules {
        node_port_namespaces: [namespace].into_iter().collect(),
        pools: user.own_pools().into_iter().collect(),
        ..OwnershipRules::default()
    };
    let source = Source::Kubernetes { kubeconfig: Some(user.kubeconfig.clone()), namespace: Some(user.namespace.clone()) };
    ControllerSettings {
        listen: Listen::unix(listen),
        group: user.group(),
        load_balancer_class: user.class(),
        ownership,
        ..crate::settings::settings(source, &["192.0.2.100-192.0.2.199"])
    }
}
