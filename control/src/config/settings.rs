//! What the controller is configured with: valid values, whoever read them.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::config::url::ControllerUrl;
use ipnet::IpNet;
use kube::core::Selector;
use proto::{HealthCheck, Mode, Scheduler};

use objects::PoolSpec;

/// Where Services and EndpointSlices come from and their status goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `*.yaml` and `*.yml` directly in a directory, followed as they change; status is written as files.
    Manifests {
        /// The directory.
        dir: PathBuf,
        /// Where `<namespace>/<name>.yaml` is written.
        status_dir: PathBuf,
    },
    /// A Kubernetes API server.
    Kubernetes {
        /// The kubeconfig; none: the service account of the pod.
        kubeconfig: Option<PathBuf>,
        /// The namespace of the Lease and of what else is ours alone; none: the pod's, or that of the kubeconfig's
        /// context.
        namespace: Option<String>,
    },
}

/// PEM files of one side of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The authority that the other side's certificate must be of.
    pub ca: PathBuf,
    /// Our certificate and its chain up to the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Where a controller's certificates are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificates {
    /// In files.
    Files(CertificateFiles),
    /// In a Secret of our own namespace, under `ca.crt`, `tls.crt` and `tls.key`: its name.
    Secret(String),
}

/// A TCP address that gateways are served on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenTcp {
    /// The address.
    pub address: SocketAddr,
    /// Key `tls`: without it nothing listens on TCP.
    pub certificates: Certificates,
    /// Key `advertise`: the URL under which gateways reach this controller and no other.
    pub advertise: Option<ControllerUrl>,
}

/// Where gateways are served: on one or both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    /// A unix socket.
    pub unix: Option<PathBuf>,
    /// TCP with TLS.
    pub tcp: Option<ListenTcp>,
}

impl Listen {
    /// On a unix socket alone.
    #[must_use]
    pub fn unix(path: PathBuf) -> Self {
        Self { unix: Some(path), tcp: None }
    }

    /// Where gateways reach this controller and no other, if it says so.
    #[must_use]
    pub fn advertised(&self) -> Option<String> {
        self.tcp.as_ref()?.advertise.as_ref().map(ToString::to_string)
    }
}

/// What a Service gets that does not say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Defaults {
    /// Key `defaults.mode`.
    pub mode: Mode,
    /// Key `defaults.scheduler`.
    pub scheduler: Scheduler,
    /// Key `defaults.drainTimeout`.
    pub drain_timeout: Duration,
}

/// Which Services are ours besides those of our class (CONTROL section 4), and which pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnershipRules {
    /// Key `kubernetes.claimClassless`.
    pub classless: ClaimClassless,
    /// Key `nodePortNamespaceSelector`: namespaces whose node ports are served.
    pub node_port_namespaces: Selector,
    /// Key `externalIPs.allowed`: where `spec.externalIPs` may lie. Empty: they have no effect.
    pub external_ips_allowed: Vec<IpNet>,
    /// Key `poolSelector`: labels of the `AddressPool` objects that are used and written to. The others are somebody
    /// else's.
    pub pools: Selector,
}

/// Which `LoadBalancer` Services without class are ours: those that both select.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimClassless {
    /// Whether any is. Otherwise they are somebody else's, but for those that are ours already.
    pub enabled: bool,
    /// Over the labels of the namespace.
    pub namespaces: Selector,
    /// Over the labels of the Service.
    pub services: Selector,
}

/// Settings of a controller, embedded or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerSettings {
    /// Where `sluice.v1.Config` is served.
    pub listen: Listen,
    /// Name of the gateway group.
    pub group: String,
    /// Where objects come from.
    pub source: Source,
    /// The class of Services that are ours.
    pub load_balancer_class: String,
    /// Which others are.
    pub ownership: OwnershipRules,
    /// What a Service gets that does not say.
    pub defaults: Defaults,
    /// Health checks of Services that do not say.
    pub health: HealthCheck,
    /// Where backends may lie; none: anywhere that CONTROL section 2 does not forbid.
    pub backends_allowed: Option<Vec<IpNet>>,
    /// Service CIDRs: never pool addresses, never backends.
    pub cluster_cidrs: Vec<IpNet>,
    /// Pools of the configuration, without overlaps, in its order. `AddressPool` objects come beside them.
    pub pools: Vec<PoolSpec>,
    /// Addresses that are never a VIP and never a backend: of ports, SNAT, node ports, next hops. Known when embedded.
    pub reserved: Vec<IpAddr>,
    /// A directory of this machine where controllers of a cluster keep locks, by which one that starts again knows that
    /// the one before it has ended: the gateway's `stateDir`, or that of a controller's admin socket. None: none is
    /// kept.
    pub lock_dir: Option<PathBuf>,
}
