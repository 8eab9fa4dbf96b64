//! Certificates in a Secret of the controller's own namespace, read by polling, which needs only the right to `get`
//! that one Secret.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use tokio::sync::watch;
use tracing::error;

use crate::gateways::tls::Material;
use crate::kubernetes::{ApiError, Cluster, Retry};

/// Polling interval, after which a renewed certificate is used at the latest; the kubelet uses the same for mounted
/// Secrets.
const POLL_INTERVAL: Duration = Duration::from_secs(60);

/// A Secret to read.
#[derive(Debug)]
pub struct FollowedSecret {
    /// Its name.
    pub name: String,
    /// Receives its newest content.
    pub sender: watch::Sender<Option<Material>>,
}

impl FollowedSecret {
    /// Reads it repeatedly while this is polled. The last content stays while the Secret cannot be read or does not
    /// exist.
    pub async fn follow(self, cluster: &Cluster) {
        let secrets = Api::<Secret>::namespaced(cluster.client.clone(), &cluster.namespace);
        let mut retry = Retry::new("get the Secret of key `tls.secret`", &cluster.server);
        let mut is_missed = false;
        loop {
            let wait = match secrets.get_opt(&self.name).await {
                Ok(Some(secret)) => {
                    retry.succeeded();
                    is_missed = false;
                    let material = Some(self.material(secret));
                    self.sender.send_if_modified(|kept| {
                        *kept != material && {
                            *kept = material;
                            true
                        }
                    });
                    POLL_INTERVAL
                }
                Ok(None) => {
                    retry.succeeded();
                    if !std::mem::replace(&mut is_missed, true) {
                        error!(
                            name = self.name,
                            namespace = cluster.namespace,
                            "there is no such Secret for key `tls.secret`; create it"
                        );
                    }
                    POLL_INTERVAL / 12
                }
                Err(error) => retry.failed(ApiError::from(&error), Instant::now()),
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// Reads the keys that cert-manager and `kubectl create secret` write. A missing key becomes an empty text, which
    /// is reported when it is used.
    fn material(&self, secret: Secret) -> Material {
        let mut data = secret.data.unwrap_or_default();
        let mut take = |key: &str| data.remove(key).unwrap_or_default().0;
        Material { from: format!("Secret {}", self.name), ca: take("ca.crt"), certificate: take("tls.crt"), key: take("tls.key") }
    }
}
