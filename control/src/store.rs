//! Storage of data that survives a controller: the checkpoint of its decisions, and the overrides of operators.
//!
//! Deliberately not here: the content of both (`world`).

pub mod checkpoints;
pub mod files;
pub mod override_editor;
pub mod overrides;

use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::Api;
use kube::api::ObjectMeta;

use crate::kubernetes::{Cluster, post_params};
use files::FileError;

/// Where texts of this installation are stored.
#[derive(Clone, Debug)]
pub enum Storage {
    /// A file beside the status files.
    File(PathBuf),
    /// ConfigMaps in the controller's own namespace.
    ConfigMaps {
        /// API of that namespace.
        api: Box<Api<ConfigMap>>,
        /// The key of each text: our group.
        group: String,
    },
}

impl Storage {
    /// Storage in the controller's own namespace of a cluster.
    #[must_use]
    pub fn in_cluster(cluster: &Cluster, group: &str) -> Self {
        let api = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        Self::ConfigMaps { api: Box::new(api), group: group.to_owned() }
    }
}

/// Replaces the text of a file, on a thread of its own: a disk may take seconds to store it.
async fn write_file(path: &Path, text: String) -> Result<(), FileError> {
    let file = path.to_owned();
    let written = tokio::task::spawn_blocking(move || files::write_text(&file, &text)).await;
    written.unwrap_or_else(|error| Err(FileError::System { path: path.to_owned(), error: io::Error::other(error) }))
}

/// Creates a ConfigMap with one text.
async fn create(api: &Api<ConfigMap>, name: &str, group: &str, text: String) -> kube::Result<ConfigMap> {
    let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    let data = Some([(group.to_owned(), text)].into());
    api.create(&post_params(), &ConfigMap { metadata, data, ..ConfigMap::default() }).await
}
