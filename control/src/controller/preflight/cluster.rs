//! The API server of a kubeconfig: whether it answers, and whether it grants what a controller does
//! (SelfSubjectAccessReview, which every authenticated user may ask).

use std::fs;
use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;
use tokio::time::timeout;

use super::finding::{Finding, Level};
use crate::config::settings::{Certificates, ControllerSettings};
use crate::kubernetes::{self, ApiError, Cluster};
use crate::store::checkpoints::CONFIG_MAPS;
use crate::store::overrides::CONFIG_MAP;

const KEY: &str = "kubernetes.kubeconfig";
/// Longest time that the API server is waited for. A connection takes 5 s at most.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);

/// A right in the terms of RBAC.
#[derive(Clone, Debug)]
struct Right {
    verb: &'static str,
    group: &'static str,
    /// With the subresource, such as `services/status`.
    resource: &'static str,
    /// The namespace and, unless the right is about all objects, the name; `None`: in the whole cluster.
    of: Option<(String, Option<String>)>,
}

/// The rights on the whole cluster, by API group.
const CLUSTER_RIGHTS: [(&str, &[&str], &[&str]); 7] = [
    ("", &["services", "nodes", "namespaces"], &["list", "watch"]),
    ("", &["services/status"], &["patch"]),
    ("discovery.k8s.io", &["endpointslices"], &["list", "watch"]),
    ("sluice.dev", &["addresspools"], &["list", "watch"]),
    ("sluice.dev", &["edgegateways"], &["list", "watch", "create", "delete"]),
    ("sluice.dev", &["addresspools/status", "edgegateways/status"], &["patch"]),
    ("events.k8s.io", &["events"], &["create", "patch"]),
];

/// All rights that a controller with these settings needs: those of deploy/rbac.yaml.
fn rights(settings: &ControllerSettings, namespace: &str) -> Vec<Right> {
    let everywhere = CLUSTER_RIGHTS.iter().flat_map(|(group, resources, verbs)| {
        let right = |resource, verb| Right { verb, group, resource, of: None };
        resources.iter().flat_map(move |resource| verbs.iter().map(move |verb| right(*resource, *verb)))
    });
    let own = |verb, group, resource, name: Option<&str>| {
        let of = Some((namespace.to_owned(), name.map(str::to_owned)));
        Right { verb, group, resource, of }
    };
    let lease = format!("sluice-controller-{}", settings.group);
    let mut own_rights = vec![own("create", "coordination.k8s.io", "leases", None), own("create", "", "configmaps", None)];
    own_rights.extend(["get", "update"].map(|verb| own(verb, "coordination.k8s.io", "leases", Some(&lease))));
    for name in CONFIG_MAPS.iter().chain([&CONFIG_MAP]) {
        own_rights.extend(["get", "patch"].map(|verb| own(verb, "", "configmaps", Some(name))));
    }
    if let Some(Certificates::Secret(name)) = settings.listen.tcp.as_ref().map(|tcp| &tcp.certificates) {
        own_rights.push(own("get", "", "secrets", Some(name)));
    }
    everywhere.chain(own_rights).collect()
}

pub(super) async fn examine(file: &Path, namespace: Option<&str>, settings: &ControllerSettings) -> Vec<Finding> {
    if let Err(error) = fs::File::open(file) {
        let text = format!("{}: {error}; not checked on this machine", file.display());
        return vec![Finding::new(Level::Unseen, KEY, text)];
    }
    let mut cluster = match kubernetes::connect(Some(file)).await {
        Ok(cluster) => cluster,
        Err(error) => return vec![Finding::new(Level::Fault, KEY, error.to_string())],
    };
    if let Some(namespace) = namespace {
        namespace.clone_into(&mut cluster.namespace);
    }
    let wanted = rights(settings, &cluster.namespace);
    let answers = try_join_all(wanted.iter().map(|right| is_granted(&cluster, right)));
    let finding = match timeout(ANSWER_TIMEOUT, answers).await {
        Err(_) => unreachable(&cluster, "it does not answer"),
        Ok(Err(error)) => match ApiError::from(&error) {
            error @ ApiError::Unauthorized(_) => Finding::new(Level::Fault, KEY, format!("{}: {error}", cluster.server)),
            error => unreachable(&cluster, &error.to_string()),
        },
        Ok(Ok(granted)) => {
            let missing: Vec<_> = wanted.iter().zip(granted).filter(|(_, granted)| !granted).map(|(right, _)| right).collect();
            of_rights(&cluster, &missing)
        }
    };
    vec![finding]
}

fn unreachable(cluster: &Cluster, why: &str) -> Finding {
    Finding::new(Level::Note, KEY, format!("{} cannot be asked from this machine: {why}; rights are not checked", cluster.server))
}

/// The finding about the rights that are missing.
fn of_rights(cluster: &Cluster, missing: &[&Right]) -> Finding {
    if missing.is_empty() {
        return Finding::new(Level::Ok, KEY, format!("{} answers and grants all rights", cluster.server));
    }
    let text = |right: &&Right| match &right.of {
        None => format!("{} {}", right.verb, right.resource),
        Some((namespace, None)) => format!("{} {} in {namespace}", right.verb, right.resource),
        Some((namespace, Some(name))) => format!("{} {} {namespace}/{name}", right.verb, right.resource),
    };
    let list = missing.iter().map(text).collect::<Vec<_>>().join(", ");
    let text =
        format!("{} does not grant: {list}; apply deploy/rbac.yaml, or correct the user of the kubeconfig", cluster.server);
    Finding::new(Level::Fault, KEY, text)
}

async fn is_granted(cluster: &Cluster, right: &Right) -> Result<bool, kube::Error> {
    let (resource, subresource) = match right.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (right.resource, None),
    };
    let (namespace, name) = match &right.of {
        Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
        None => (None, None),
    };
    let attributes = ResourceAttributes {
        verb: Some(right.verb.to_owned()),
        group: Some(right.group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        namespace,
        name,
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let answer = Api::all(cluster.client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::controller::ControllerFile;

    #[tokio::test]
    async fn a_kubeconfig_that_is_missing_or_unreachable_is_no_fault_and_a_broken_one_is() {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("controller.yaml");
        fs::write(&config, "kubernetes: {kubeconfig: kubeconfig}\n").unwrap();
        let settings = ControllerFile::read(&config).unwrap().settings;
        let file = dir.path().join("kubeconfig");
        // Port 9 of this machine, where nobody listens.
        let unreachable = "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{name: a, cluster: {server: 'http://127.0.0.1:9'}}]\n\
                           contexts: [{name: a, context: {cluster: a, user: a}}]\nusers: [{name: a, user: {token: t}}]\n";
        let rows = [
            (None, Level::Unseen, "not checked on this machine"),
            (Some(unreachable), Level::Note, "http://127.0.0.1:9/ cannot be asked from this machine"),
            (Some("clusters: ["), Level::Fault, "expected a readable kubeconfig"),
        ];
        for (text, level, expected) in rows {
            if let Some(text) = text {
                fs::write(&file, text).unwrap();
            }
            let found = examine(&file, None, &settings).await.remove(0);
            assert!(found.level == level && found.text.contains(expected), "{expected}: {found}");
        }
    }
}
