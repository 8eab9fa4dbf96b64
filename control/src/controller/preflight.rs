//! What a configuration names outside of itself, looked at without starting a controller: certificates, manifests, the
//! API server.
//!
//! Invariant: it only reads, and takes a few seconds at most. A machine that cannot see something, such as one that only
//! checks configurations, is told so ([`Level::Unseen`]) and nothing worse.
//! Deliberately not here: the file itself (`config`), and the machine of a gateway (`sluiced doctor`).

mod certificates;
mod cluster;
mod finding;
mod manifest_files;

pub use certificates::Bearer;
pub use finding::{Finding, Level};

use crate::config::settings::{AdminListen, CertificateFiles, Certificates, ControllerSettings, Source};

/// Looks at what the settings of a controller name.
pub async fn examine(settings: &ControllerSettings) -> Vec<Finding> {
    let mut findings: Vec<_> = examine_listener(settings).await.into_iter().collect();
    match &settings.source {
        Source::Manifests { dir, .. } => findings.extend(manifest_files::examine(dir, settings)),
        Source::Kubernetes { kubeconfig: Some(file), namespace } => {
            findings.extend(cluster::examine(file, namespace.as_deref(), settings).await);
        }
        Source::Kubernetes { kubeconfig: None, .. } => {
            let text = "none: the service account of the Pod is used, which is not looked at";
            findings.push(Finding::new(Level::Note, "kubernetes.kubeconfig", text));
        }
    }
    findings
}

/// Looks at the certificates that gateways see, if the controller listens on TCP.
pub async fn examine_listener(settings: &ControllerSettings) -> Option<Finding> {
    match &settings.listen.tcp.as_ref()?.certificates {
        Certificates::Files(files) => Some(examine_certificates("tls", files, Bearer::Controller(&settings.group)).await),
        Certificates::Secret(name) => {
            let text = format!("Secret {name} is not looked at; it is read at runtime");
            Some(Finding::new(Level::Note, "tls.secret", text))
        }
    }
}

/// Looks at the certificates of the admin API, if it listens on TCP.
pub async fn examine_admin(listen: &AdminListen) -> Option<Finding> {
    let (_, files) = listen.tcp.as_ref()?;
    Some(examine_certificates("admin.tls", files, Bearer::AdminServer).await)
}

/// Looks at the certificates that a key names.
pub async fn examine_certificates(key: &'static str, files: &CertificateFiles, bearer: Bearer<'_>) -> Finding {
    certificates::examine(key, files, bearer).await
}
