//! What a configuration names outside of itself, looked at without starting a controller: certificates, manifests, the
//! API server.
//!
//! Invariant: it only reads, and takes a few seconds at most. A machine that cannot see something, such as one that only
//! checks configurations, is told so ([`Level::Unseen`]) and nothing worse.
//! Deliberately not here: the file itself (`config`), and the machine of a gateway (`sluiced doctor`).

mod certificates;
mod cluster;
mod manifest_files;

use std::fmt;

pub use certificates::Bearer;

use crate::config::settings::{AdminListen, CertificateFiles, Certificates, ControllerSettings, Source};

/// What was found about something that a configuration names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// All is well.
    Ok,
    /// It cannot be looked at from here.
    Unseen,
    /// It works, and may not do what is expected of it.
    Warning,
    /// It cannot work.
    Fault,
}

/// One finding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How bad it is.
    pub level: Level,
    /// The key that names what was looked at.
    pub key: &'static str,
    /// What was found, and what to do.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            Level::Ok => "ok",
            Level::Unseen => "note",
            Level::Warning => "warning",
            Level::Fault => "error",
        };
        write!(f, "{level}: {}: {}", self.key, self.text)
    }
}

impl Finding {
    /// A finding about a key.
    pub fn new(level: Level, key: &'static str, text: impl Into<String>) -> Self {
        Self { level, key, text: text.into() }
    }
}

/// Looks at what the settings of a controller name.
pub async fn examine(settings: &ControllerSettings) -> Vec<Finding> {
    let mut findings = Vec::new();
    match settings.listen.tcp.as_ref().map(|tcp| &tcp.certificates) {
        Some(Certificates::Files(files)) => {
            findings.extend(examine_certificates("tls", files, Bearer::Controller(&settings.group)).await);
        }
        Some(Certificates::Secret(name)) => {
            findings.push(Finding::new(
                Level::Unseen,
                "tls.secret",
                format!("Secret {name} is not looked at; it is read at runtime"),
            ));
        }
        None => {}
    }
    match &settings.source {
        Source::Manifests { dir, .. } => findings.extend(manifest_files::examine(dir, settings)),
        Source::Kubernetes { kubeconfig: Some(file), namespace } => {
            findings.extend(cluster::examine(file, namespace.as_deref(), settings).await);
        }
        Source::Kubernetes { kubeconfig: None, .. } => {
            let text = "none: the service account of the Pod is used, which is not looked at";
            findings.push(Finding::new(Level::Unseen, "kubernetes.kubeconfig", text));
        }
    }
    findings
}

/// Looks at the certificates of the admin API, if it listens on TCP.
pub async fn examine_admin(listen: &AdminListen) -> Vec<Finding> {
    match &listen.tcp {
        Some((_, files)) => examine_certificates("admin.tls", files, Bearer::AdminServer).await,
        None => Vec::new(),
    }
}

/// Looks at the certificates that a key names.
pub async fn examine_certificates(key: &'static str, files: &CertificateFiles, bearer: Bearer<'_>) -> Vec<Finding> {
    vec![certificates::examine(key, files, bearer).await]
}
