//! Settings of the controller. They contain only valid values, wherever they were read from.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use kube::core::Selector;
use objects::scalar::url::{HostPort, ServerUrl};
use proto::{GatewayProfile, HealthCheck, Mode, Scheduler};

use objects::PoolSpec;

/// Source of Services and EndpointSlices, and destination of their status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// `*.yaml` and `*.yml` directly in a directory, which is watched; status is written to files.
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
        /// The namespace of the Lease and of our ConfigMaps; none: that of the pod, or of the kubeconfig's context.
        namespace: Option<String>,
    },
}

/// PEM files of one side of TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFiles {
    /// The authority that must have issued the certificate of the peer.
    pub ca: PathBuf,
    /// Our certificate and its chain up to the authority.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Source of a controller's certificates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Certificates {
    /// Files.
    Files(CertificateFiles),
    /// Name of a Secret in our own namespace with `ca.crt`, `tls.crt` and `tls.key`.
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
    pub advertise: Option<ServerUrl>,
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

    /// Advertises this host with the port of TCP, unless a URL is advertised already.
    ///
    /// # Errors
    /// If nothing listens on TCP, or `host` is neither a name nor an address.
    pub fn advertise_at(&mut self, host: &str) -> Result<(), String> {
        let Some(tcp) = &mut self.tcp else {
            return Err("key `listen` has no TCP address that could be advertised; add one, or leave the option out".to_owned());
        };
        let server = HostPort::new(host, tcp.address.port()).map_err(|error| error.to_string())?;
        tcp.advertise.get_or_insert(ServerUrl::Https(server));
        Ok(())
    }

    /// URL under which gateways reach this controller and no other, if one is advertised.
    #[must_use]
    pub fn advertised(&self) -> Option<String> {
        self.tcp.as_ref()?.advertise.as_ref().map(ToString::to_string)
    }
}

/// Where the admin API is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminListen {
    /// The socket for everything; beside it is one that only shows.
    pub unix: PathBuf,
    /// TCP, for operators with certificates.
    pub tcp: Option<(SocketAddr, CertificateFiles)>,
}

impl AdminListen {
    /// On unix sockets alone.
    #[must_use]
    pub const fn unix(path: PathBuf) -> Self {
        Self { unix: path, tcp: None }
    }
}

/// Settings of Services that do not request any.
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnershipRules {
    /// Key `serveUnassigned`: whether Services and pools that name no group of gateways are ours.
    pub serves_unassigned: bool,
    /// Key `kubernetes.claimClassless`.
    pub classless: ClaimClassless,
    /// Key `nodePortNamespaceSelector`: namespaces whose node ports are served.
    pub node_port_namespaces: Selector,
    /// Key `externalIPs.allowed`: where `spec.externalIPs` may lie. Empty: `externalIPs` have no effect.
    pub external_ips_allowed: Vec<IpNet>,
    /// Key `poolSelector`: labels of the `AddressPool` objects that are used and written to. All others belong to
    /// other installations.
    pub pools: Selector,
}

impl Default for OwnershipRules {
    /// Those of an empty configuration.
    fn default() -> Self {
        Self {
            serves_unassigned: true,
            classless: ClaimClassless::default(),
            node_port_namespaces: Selector::default(),
            external_ips_allowed: Vec::new(),
            pools: Selector::default(),
        }
    }
}

/// Which `LoadBalancer` Services without class are ours: those that both selectors match.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClaimClassless {
    /// Whether any is. Otherwise only those that are ours already stay ours.
    pub enabled: bool,
    /// Over the labels of the namespace.
    pub namespaces: Selector,
    /// Over the labels of the Service.
    pub services: Selector,
}

/// Key `maglevSeed`: the seed of all Maglev tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MaglevSeed {
    /// What the installation has; a new one draws its own.
    #[default]
    Kept,
    /// One of its own. An installation that has the public one draws.
    Random,
    /// The public one, unless another was drawn before.
    Public,
    /// This one.
    Given(u64),
}

/// Settings of a controller, embedded or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerSettings {
    /// Where `sluice.v1.Config` is served.
    pub listen: Listen,
    /// Name of the gateway group.
    pub group: String,
    /// Source of objects.
    pub source: Source,
    /// The class of Services that are ours.
    pub load_balancer_class: String,
    /// Which other Services are ours, and which pools are used.
    pub ownership: OwnershipRules,
    /// Settings of Services that do not request any.
    pub defaults: Defaults,
    /// Health checks of Services that do not request any.
    pub health: HealthCheck,
    /// Where backends may lie; none: anywhere that CONTROL section 2 does not forbid.
    pub backends_allowed: Option<Vec<IpNet>>,
    /// Service CIDRs: never pool addresses, never backends.
    pub cluster_cidrs: Vec<IpNet>,
    /// Pools of the configuration, without overlaps, in its order. `AddressPool` objects come beside them.
    pub pools: Vec<PoolSpec>,
    /// What the gateway that embeds the controller says about itself; nothing otherwise.
    pub profile: GatewayProfile,
    /// The seed of the Maglev tables.
    pub maglev_seed: MaglevSeed,
    /// Directory on this machine for the lock files of controllers of one cluster. By these a restarted controller
    /// knows that its predecessor has ended. It is the gateway's `stateDir`, or the directory of a controller's admin
    /// socket; `None`: no lock files.
    pub lock_dir: Option<PathBuf>,
}

impl ControllerSettings {
    /// Whether a Service or pool that names this group of gateways, or none, is for our group.
    #[must_use]
    pub fn is_of_our_group(&self, named: Option<&str>) -> bool {
        named.map_or(self.ownership.serves_unassigned, |group| group == self.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_advertised_with_the_port_of_listen_unless_the_file_has_a_url() {
        let files = CertificateFiles { ca: "ca".into(), cert: "cert".into(), key: "key".into() };
        let address = "0.0.0.0:9443".parse().unwrap();
        let tcp = ListenTcp { address, certificates: Certificates::Files(files), advertise: None };
        let listen = Listen { unix: None, tcp: Some(tcp) };
        for (host, url) in [("192.0.2.1", "https://192.0.2.1:9443"), ("2001:db8::1", "https://[2001:db8::1]:9443")] {
            let mut listen = listen.clone();
            listen.advertise_at(host).unwrap();
            assert_eq!(listen.advertised().as_deref(), Some(url));
            listen.advertise_at("192.0.2.9").unwrap();
            assert_eq!(listen.advertised().as_deref(), Some(url), "the first one counts");
        }
        assert!(listen.clone().advertise_at("192.0.2.1:9443").unwrap_err().contains("without a port"));
        assert!(Listen::default().advertise_at("192.0.2.1").unwrap_err().contains("`listen`"));
    }
}
