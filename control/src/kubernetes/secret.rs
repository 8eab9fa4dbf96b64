//! Certificates in a Secret of our own namespace, read again and again: a right to get the one is all that it takes.

use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use tokio::sync::watch;
use tracing::error;

use super::{Cluster, Outage, Trouble};
use crate::tls::Material;

/// A renewed certificate counts after this time at the latest: the kubelet's own time for Secrets in files.
const READ_EVERY: Duration = Duration::from_secs(60);

/// A Secret whose content is wanted.
#[derive(Debug)]
pub struct FollowedSecret {
    /// Its name.
    pub name: String,
    /// Where its newest content goes.
    pub sender: watch::Sender<Option<Material>>,
}

impl FollowedSecret {
    /// Reads it for as long as this is polled. What was read last stays while it cannot be read, or is not there.
    pub async fn follow(self, cluster: &Cluster) {
        let secrets = Api::<Secret>::namespaced(cluster.client.clone(), &cluster.namespace);
        let mut trouble = Trouble::new("get the Secret of key `tls.secret`", &cluster.server);
        let mut is_missed = false;
        loop {
            let wait = match secrets.get_opt(&self.name).await {
                Ok(Some(secret)) => {
                    trouble.over();
                    is_missed = false;
                    let material = Some(self.material(secret));
                    self.sender.send_if_modified(|kept| {
                        *kept != material && {
                            *kept = material;
                            true
                        }
                    });
                    READ_EVERY
                }
                Ok(None) => {
                    trouble.over();
                    if !std::mem::replace(&mut is_missed, true) {
                        error!(
                            name = self.name,
                            namespace = cluster.namespace,
                            "there is no such Secret for key `tls.secret`; create it"
                        );
                    }
                    READ_EVERY / 12
                }
                Err(error) => trouble.met(Outage::from(&error), Instant::now()),
            };
            tokio::time::sleep(wait).await;
        }
    }

    /// In the keys that cert-manager and `kubectl create secret` use. A key that is missing is an empty text, which is told when it is used.
    fn material(&self, secret: Secret) -> Material {
        let mut data = secret.data.unwrap_or_default();
        let mut take = |key: &str| data.remove(key).unwrap_or_default().0;
        Material { from: format!("Secret {}", self.name), ca: take("ca.crt"), certificate: take("tls.crt"), key: take("tls.key") }
    }
}
