//! Status files `<statusDir>/<namespace>/<name>.yaml`, which replace the status of Service objects.
//!
//! Invariant: a file is complete or absent, also after a power cut ([`files::replace`]). Addresses in it are adopted at
//! start, so that a restart moves no Service.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use k8s_openapi::api::core::v1::{LoadBalancerIngress, LoadBalancerStatus, PortStatus, Service, ServiceStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::jiff::Timestamp;
use proto::ServiceName;

use objects::status::{self, Ingress, StatusWrite};

use crate::store::files::{self, Survives};

/// Mode of new directories, as far as the umask of the process allows.
const DIRECTORY: u32 = 0o777;

/// The status files of one directory.
#[derive(Debug)]
pub struct StatusFiles {
    dir: PathBuf,
    known: BTreeMap<ServiceName, StatusFile>,
    /// Set once all manifests are known. Before that, the manifest of a Service may exist but not be readable yet.
    may_forget: Arc<AtomicBool>,
}

/// Content of a file.
#[derive(Debug, Default)]
struct StatusFile {
    text: String,
    status: ServiceStatus,
}

/// Why a status file could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StatusFileError {
    /// The operating system refused.
    #[error("{path}: {error}; the directory must be writable for this process (key `statusDir`)")]
    System {
        /// Which file or directory.
        path: PathBuf,
        /// Its error.
        error: io::Error,
    },
    /// It cannot be serialized as YAML.
    #[error("the status of {service} cannot be written as YAML: {error}")]
    Yaml {
        /// Which Service.
        service: ServiceName,
        /// Why.
        error: String,
    },
}

impl StatusFiles {
    /// Reads all files, and the status of each Service. A file that cannot be parsed is ignored.
    ///
    /// # Errors
    /// If the directory cannot be created or listed.
    pub fn open(dir: &Path) -> Result<(Self, BTreeMap<ServiceName, ServiceStatus>), StatusFileError> {
        files::create_dir(dir, DIRECTORY).map_err(system(dir))?;
        let mut files = Self { dir: dir.to_owned(), known: BTreeMap::new(), may_forget: Arc::default() };
        let mut statuses = BTreeMap::new();
        for (namespace, path) in children(dir)?.into_iter().filter(|(_, path)| path.is_dir()) {
            for (file, path) in children(&path)? {
                let Some(name) = file.strip_suffix(".yaml") else { continue };
                let text = String::from_utf8_lossy(&fs::read(&path).map_err(system(&path))?).into_owned();
                let service = ServiceName::new(&namespace, name);
                let status = match parse(&text) {
                    Ok(status) => Some(status),
                    Err(error) => {
                        tracing::warn!(path = %path.display(), error, "status file not readable; its addresses are not kept");
                        None
                    }
                };
                statuses.extend(status.clone().map(|status| (service.clone(), status)));
                files.known.insert(service, StatusFile { text, status: status.unwrap_or_default() });
            }
        }
        Ok((files, statuses))
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes a status, unless the file already has it.
    ///
    /// # Errors
    /// If the operating system refuses.
    pub fn write(&mut self, write: &StatusWrite) -> Result<(), StatusFileError> {
        let yaml = |error: serde_saphyr::SerializeError| StatusFileError::Yaml {
            service: write.service.clone(),
            error: error.to_string(),
        };
        let known = self.known.get(&write.service);
        let status = changed(known.map(|known| known.status.clone()).unwrap_or_default(), write, Timestamp::now());
        let text = serde_saphyr::to_string(&object(&write.service, status.clone())).map_err(yaml)?;
        if known.is_some_and(|known| known.text == text) {
            return Ok(());
        }
        let path = self.path(&write.service);
        if let Some(parent) = path.parent() {
            files::create_dir(parent, DIRECTORY).map_err(system(parent))?;
        }
        files::replace(&path, files::READABLE, Survives::PowerCut, [text.as_bytes()]).map_err(system(&path))?;
        self.known.insert(write.service.clone(), StatusFile { text, status });
        Ok(())
    }

    /// Flag to set once every manifest was read. From then on files of deleted Services are removed.
    #[must_use]
    pub fn may_forget(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.may_forget)
    }

    /// Removes the files of Services that are not `kept`, and directories that become empty.
    pub fn forget_all_but(&mut self, kept: impl Fn(&ServiceName) -> bool) {
        if !self.may_forget.load(Ordering::Relaxed) {
            return;
        }
        let deleted: Vec<ServiceName> = self.known.keys().filter(|name| !kept(name)).cloned().collect();
        for service in deleted {
            let path = self.path(&service);
            if let Err(error) = fs::remove_file(&path).or_else(not_found_is_fine) {
                tracing::warn!(path = %path.display(), %error, "status file not removed; remove it by hand");
            }
            // This fails while other Services of the namespace have files, as intended.
            let _ = path.parent().map(fs::remove_dir);
            self.known.remove(&service);
        }
    }

    fn path(&self, service: &ServiceName) -> PathBuf {
        self.dir.join(&service.namespace).join(format!("{}.yaml", service.name))
    }
}

fn parse(text: &str) -> Result<ServiceStatus, String> {
    let object = serde_saphyr::from_str::<Service>(text).map_err(|error| error.without_snippet().to_string())?;
    object.status.ok_or_else(|| "it has no status".to_owned())
}

fn not_found_is_fine(error: io::Error) -> io::Result<()> {
    if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Entries with UTF-8 names; others cannot be ours.
fn children(dir: &Path) -> Result<Vec<(String, PathBuf)>, StatusFileError> {
    let entries = fs::read_dir(dir).and_then(Iterator::collect::<io::Result<Vec<_>>>).map_err(system(dir))?;
    Ok(entries.into_iter().filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path()))).collect())
}

fn object(name: &ServiceName, status: ServiceStatus) -> Service {
    let (namespace, name) = (Some(name.namespace.clone()), Some(name.name.clone()));
    Service { metadata: ObjectMeta { name, namespace, ..ObjectMeta::default() }, spec: None, status: Some(status) }
}

fn port(status: &status::PortStatus) -> PortStatus {
    let (port, protocol) = (i32::from(status.port), status.protocol.to_string().to_uppercase());
    PortStatus { port, protocol, error: status.error.as_deref().map(str::to_owned) }
}

/// Applies a write to a status at time `now`.
fn changed(mut status: ServiceStatus, write: &StatusWrite, now: Timestamp) -> ServiceStatus {
    if let Some(ingress) = &write.ingress {
        let entry = |ingress: &Ingress| LoadBalancerIngress {
            ip: Some(ingress.ip.to_string()),
            ip_mode: Some(ingress.ip_mode.as_str().to_owned()),
            ports: (!ingress.ports.is_empty()).then(|| ingress.ports.iter().map(port).collect()),
            ..LoadBalancerIngress::default()
        };
        status.load_balancer = Some(LoadBalancerStatus { ingress: Some(ingress.iter().map(entry).collect()) });
    }
    for (kind, change) in &write.conditions {
        let list = status.conditions.get_or_insert_default();
        list.retain(|condition| condition.type_ != kind.as_str());
        list.extend(change.as_ref().map(|condition| Condition {
            type_: kind.as_str().to_owned(),
            status: if condition.holds { "True" } else { "False" }.to_owned(),
            reason: condition.reason.to_string(),
            message: condition.message.to_string(),
            last_transition_time: Time(condition.since.unwrap_or(now)),
            observed_generation: None,
        }));
    }
    status
}

fn system(path: &Path) -> impl Fn(io::Error) -> StatusFileError {
    move |error| StatusFileError::System { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use objects::ConditionType;
    use objects::status::IpMode;

    fn write(name: &str, last: u8) -> StatusWrite {
        let condition = objects::Condition::new(true, "Programmed", "Gateways forward for it.");
        StatusWrite {
            service: ServiceName::new("shop", name),
            uid: String::new(),
            resource_version: String::new(),
            ingress: Some(vec![Ingress::new([192, 0, 2, last].into(), IpMode::Proxy)]),
            conditions: [(ConditionType::Programmed, Some(condition))].into(),
            finalizer: None,
            group: None,
        }
    }

    #[test]
    fn a_status_is_restored_after_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, before) = StatusFiles::open(&dir.path().join("status")).unwrap();
        assert!(before.is_empty());
        files.write(&write("web", 100)).unwrap();
        let text = fs::read_to_string(dir.path().join("status/shop/web.yaml")).unwrap();
        for line in [
            "apiVersion: v1",
            "kind: Service",
            "namespace: shop",
            "ip: \"192.0.2.100\"",
            "ipMode: Proxy",
            "sluice.dev/Programmed",
        ] {
            assert!(text.contains(line), "{text}");
        }
        let (_, statuses) = StatusFiles::open(&dir.path().join("status")).unwrap();
        let status = &statuses[&ServiceName::new("shop", "web")];
        let ingress = status.load_balancer.as_ref().unwrap().ingress.as_ref().unwrap();
        assert_eq!(ingress[0].ip.as_deref(), Some("192.0.2.100"));
    }

    #[test]
    fn a_write_changes_only_its_fields() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, _) = StatusFiles::open(dir.path()).unwrap();
        files.write(&write("web", 100)).unwrap();
        let without = StatusWrite { ingress: None, conditions: [(ConditionType::Programmed, None)].into(), ..write("web", 0) };
        files.write(&without).unwrap();
        let status = StatusFiles::open(dir.path()).unwrap().1.remove(&ServiceName::new("shop", "web")).unwrap();
        assert_eq!(status.conditions.unwrap_or_default(), []);
        assert_eq!(status.load_balancer.unwrap().ingress.unwrap()[0].ip.as_deref(), Some("192.0.2.100"));
    }

    #[test]
    fn the_file_of_a_deleted_service_and_its_empty_directory_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (mut files, _) = StatusFiles::open(dir.path()).unwrap();
        files.write(&write("a", 100)).unwrap();
        files.write(&write("b", 101)).unwrap();
        let kept = ServiceName::new("shop", "a");
        files.forget_all_but(|_| false);
        assert!(dir.path().join("shop/a.yaml").exists(), "not all manifests are known yet");
        files.may_forget().store(true, Ordering::Relaxed);
        files.forget_all_but(|name| *name == kept);
        assert!(dir.path().join("shop/a.yaml").exists() && !dir.path().join("shop/b.yaml").exists());
        files.forget_all_but(|_| false);
        assert!(!dir.path().join("shop").exists());
    }

    #[test]
    fn an_invalid_status_file_is_ignored_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("shop")).unwrap();
        for broken in [&b"status: ["[..], b"", b"\xff\xfe"] {
            fs::write(dir.path().join("shop/web.yaml"), broken).unwrap();
            let (_, statuses) = StatusFiles::open(dir.path()).unwrap();
            assert!(statuses.is_empty() && parse(&String::from_utf8_lossy(broken)).is_err());
        }
        let (mut files, _) = StatusFiles::open(dir.path()).unwrap();
        files.write(&write("web", 100)).unwrap();
        assert_eq!(StatusFiles::open(dir.path()).unwrap().1.len(), 1);
    }
}
