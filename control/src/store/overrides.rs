//! Storage of overrides: the ConfigMap `sluice-overrides` in the controller's own namespace, under the name of the
//! group; with manifests, a file beside the status files.
//!
//! Invariant: a write replaces exactly the version that was read. A ConfigMap that changed in the meantime is a
//! conflict, and a text that cannot be parsed is never overwritten.

use kube::api::Patch;
use kube::core::response::reason::NOT_FOUND;
use serde_json::json;

use super::files::{self, FileError};
use super::{Storage, create, write_file};
use crate::kubernetes::{ApiError, patch_params};
use crate::world::overrides::Overrides;
use crate::world::overrides::document::DocumentError;

/// Name of the ConfigMap.
pub const CONFIG_MAP: &str = "sluice-overrides";
/// Name of the file in the status directory, where everything else is a directory.
pub const FILE: &str = "overrides.yaml";

/// Version that was read, which the next write must name: the resourceVersion of the ConfigMap; `None` if there was
/// none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version(Option<String>);

/// Why the overrides cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum OverrideStoreError {
    /// The file.
    #[error(transparent)]
    File(#[from] FileError),
    /// The request to the API server failed.
    #[error("ConfigMap {CONFIG_MAP}: {0}")]
    Cluster(ApiError),
    /// The stored text has an unknown format.
    #[error("{place} holds no overrides: {error}; correct it, or remove it to start with none")]
    Broken {
        /// Where.
        place: String,
        /// What is wrong.
        error: DocumentError,
    },
    /// They cannot be serialized.
    #[error("they cannot be written: {0}")]
    Unwritable(DocumentError),
    /// Another process wrote in the meantime.
    #[error("ConfigMap {CONFIG_MAP} was changed in the meantime; try again")]
    Conflict,
}

/// Reads the overrides.
///
/// # Errors
/// See [`OverrideStoreError`]. A missing ConfigMap is no error, but only if the API server itself says so: a 404 of a
/// proxy is one.
pub async fn load(storage: &Storage) -> Result<(Overrides, Version), OverrideStoreError> {
    match storage {
        Storage::File(path) => {
            let text = files::read_text(path, |text| Overrides::from_text(text).map(drop))?.unwrap_or_default();
            Ok((read(&text, || path.display().to_string())?, Version(None)))
        }
        Storage::ConfigMaps { api, group } => {
            let found = match api.get(CONFIG_MAP).await {
                Err(kube::Error::Api(status)) if status.reason == NOT_FOUND => return Ok((Overrides::default(), Version(None))),
                answer => answer.map_err(|error| OverrideStoreError::Cluster(ApiError::from(&error)))?,
            };
            let text = found.data.unwrap_or_default().remove(group).unwrap_or_default();
            let overrides = read(&text, || format!("key {group} of ConfigMap {CONFIG_MAP}"))?;
            Ok((overrides, Version(found.metadata.resource_version)))
        }
    }
}

/// Replaces the version that was read.
///
/// # Errors
/// See [`OverrideStoreError`].
pub async fn save(storage: &Storage, overrides: &Overrides, version: Version) -> Result<(), OverrideStoreError> {
    let text = overrides.to_text().map_err(OverrideStoreError::Unwritable)?;
    match storage {
        Storage::File(path) => Ok(write_file(path, text).await?),
        Storage::ConfigMaps { api, group } => {
            let answer = match version.0 {
                None => create(api, CONFIG_MAP, group, text).await,
                Some(version) => {
                    let patch = json!({"metadata": {"resourceVersion": version}, "data": {group: text}});
                    api.patch(CONFIG_MAP, &patch_params(), &Patch::Merge(patch)).await
                }
            };
            answer.map(drop).map_err(|error| match &error {
                // It was created, changed or deleted since it was read.
                kube::Error::Api(status) if matches!(status.code, 404 | 409) => OverrideStoreError::Conflict,
                other => OverrideStoreError::Cluster(ApiError::from(other)),
            })
        }
    }
}

fn read(text: &str, place: impl Fn() -> String) -> Result<Overrides, OverrideStoreError> {
    Overrides::from_text(text).map_err(|error| OverrideStoreError::Broken { place: place(), error })
}
