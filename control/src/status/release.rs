//! `sluice-controller release` and `uninstall`: remove our addresses, conditions and finalizer from Services while no
//! controller runs.
//!
//! Invariant: Services of another class or group are not changed, nor addresses that another controller wrote to a
//! Service of a former class, and nothing is changed while a controller leads. Deliberately not here: the release of
//! Services by a running controller (`life`), and the output of the command.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Service};
use kube::api::{DeleteParams, ListParams, ObjectList, Patch};
use kube::{Api, ResourceExt};
use proto::ServiceName;
use serde_json::json;

use super::accepted;
use super::life::removal;
use crate::config::settings::ControllerSettings;
use crate::kubernetes::lease::{LeaseCandidate, RENEW_DEADLINE, RETRY_PERIOD};
use crate::kubernetes::{ApiError, Cluster, PatchOutcome, StatusError, patch, patch_params};
use crate::plan::tenure::Tenure;
use crate::world::World;
use crate::world::change::Change;
use objects::crd::EdgeGateway;
use objects::status::StatusWrite;
use objects::{Candidate, OwnedParts, ServiceObject};

mod paced;

use paced::PacedRequests;
pub use paced::RequestError;

/// Observation time of the Lease. A leader that does not renew it for [`RENEW_DEADLINE`] steps down; the second is for
/// the time that a read takes.
const LEADER_OBSERVED_FOR: Duration = Duration::from_secs(RENEW_DEADLINE.as_secs() + 1);
/// Longest wait for the end of controllers that were told to end: the grace period of their Pods, twice.
const SCALED_DOWN_MAX: Duration = Duration::from_secs(60);
/// Objects per request of a list.
const PAGE: u32 = 500;
/// Maximum number of attempts for a Service that changes all the time.
const ATTEMPTS_MAX: usize = 5;

/// Scope of a release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Services that the configuration does not claim: without class, or no longer of type `LoadBalancer`.
    Unclaimed,
    /// These, and the Services of a former class of ours.
    Class(String),
    /// All Services of this installation.
    All,
}

/// Why a release failed or is incomplete.
#[derive(Debug, thiserror::Error)]
pub enum ReleaseError {
    /// A controller leads and would revert the release.
    #[error("{holder} leads (Lease {namespace}/{lease}) and would revert the release; stop every controller of the group first")]
    Led {
        /// Who.
        holder: String,
        /// Where.
        namespace: String,
        /// Its name.
        lease: String,
    },
    /// The API server.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// One Service could not be written.
    #[error("{service}: {cause}")]
    Service {
        /// Which.
        service: ServiceName,
        /// Why.
        cause: String,
    },
}

fn api(what: &'static str) -> impl Fn(kube::Error) -> ReleaseError {
    move |error| RequestError::Failed { what, outage: ApiError::from(&error) }.into()
}

/// Checks that no controller leads the group.
///
/// # Errors
/// If one does, or the Lease cannot be read.
pub async fn check_no_leader(cluster: &Cluster, group: &str) -> Result<(), ReleaseError> {
    let lease = LeaseCandidate::new(group, None).lease;
    let leases = Api::<Lease>::namespaced(cluster.client.clone(), &cluster.namespace);
    let read_lease = async || leases.get_opt(&lease).await.map_err(api("get the Lease"));
    let mut first = None;
    let until = Instant::now() + LEADER_OBSERVED_FOR;
    while Instant::now() < until {
        let Some(now) = read_lease().await? else { return Ok(()) };
        let version = now.resource_version();
        let holder = now.spec.and_then(|spec| spec.holder_identity).unwrap_or_default();
        if holder.is_empty() {
            return Ok(());
        }
        if *first.get_or_insert_with(|| version.clone()) != version {
            return Err(ReleaseError::Led { holder, namespace: cluster.namespace.clone(), lease });
        }
        tokio::time::sleep(RETRY_PERIOD).await;
    }
    Ok(())
}

/// Scales a Deployment of controllers, in our own namespace, to no replicas, and waits until none leads.
///
/// # Errors
/// If it cannot be scaled, or a controller still leads a minute after it.
pub async fn scale_down(cluster: &Cluster, group: &str, deployment: &str) -> Result<(), ReleaseError> {
    let deployments = Api::<Deployment>::namespaced(cluster.client.clone(), &cluster.namespace);
    let patch = Patch::Merge(json!({"spec": {"replicas": 0}}));
    let mut requests = PacedRequests::new(cluster);
    let scale = async || accepted(deployments.patch_scale(deployment, &patch_params(), &patch).await, &[]);
    requests.send("patch deployments/scale", 0, scale).await?;
    let until = Instant::now() + SCALED_DOWN_MAX;
    loop {
        match check_no_leader(cluster, group).await {
            Err(ReleaseError::Led { .. }) if Instant::now() < until => tokio::time::sleep(RETRY_PERIOD).await,
            ended => return ended,
        }
    }
}

/// Releases Services and passes each to `report`. With `is_dry` it changes nothing.
///
/// # Errors
/// The first error that does not pass. Services passed to `report` before it are released.
pub async fn release(
    cluster: &Cluster,
    settings: &ControllerSettings,
    extent: &Extent,
    is_dry: bool,
    mut report: impl FnMut(&ServiceName),
) -> Result<(), ReleaseError> {
    let mut requests = PacedRequests::new(cluster);
    let namespaces = all::<Namespace>(&mut requests, &Api::all(cluster.client.clone()), "list namespaces").await?;
    let mut world = World::default();
    world.apply(Change::NamespacesReplaced(namespaces));
    let write = |service: &Service| write(service, &world, settings, extent);
    let services = all::<Service>(&mut requests, &Api::all(cluster.client.clone()), "list services").await?;
    let mut due: VecDeque<StatusWrite> = services.iter().filter_map(write).collect();
    while let Some(next) = due.pop_front() {
        let service = next.service.clone();
        if !is_dry {
            release_one(cluster, &mut requests, due.len(), next, write).await?;
        }
        report(&service);
    }
    Ok(())
}

/// Deletes the `EdgeGateway` objects of a group and passes the name of each to `report`.
///
/// # Errors
/// The first error that does not pass.
pub async fn delete_gateways(
    cluster: &Cluster,
    group: &str,
    is_dry: bool,
    mut report: impl FnMut(&str),
) -> Result<(), ReleaseError> {
    let mut requests = PacedRequests::new(cluster);
    let gateways = Api::<EdgeGateway>::all(cluster.client.clone());
    let list = async || match gateways.list(&ListParams::default()).await {
        Ok(list) => Ok(list.items),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Vec::new()),
        Err(error) => Err(ApiError::from(&error)),
    };
    let list = requests.send("list edgegateways.sluice.dev", 0, list).await?;
    for gateway in list.iter().filter(|gateway| gateway.spec.group == group) {
        let name = gateway.name_any();
        if !is_dry {
            let delete = async || accepted(gateways.delete(&name, &DeleteParams::default()).await, &[404]);
            requests.send("delete edgegateways.sluice.dev", 0, delete).await?;
        }
        report(&name);
    }
    Ok(())
}

/// All objects, page by page.
async fn all<K>(requests: &mut PacedRequests, objects: &Api<K>, what: &'static str) -> Result<Vec<K>, ReleaseError>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let (mut found, mut next) = (Vec::new(), None);
    loop {
        let parameters = ListParams { continue_token: next, limit: Some(PAGE), ..ListParams::default() };
        let page = requests.send(what, 0, async || list(objects, &parameters).await).await?;
        next = page.metadata.continue_.filter(|token| !token.is_empty());
        found.extend(page.items);
        if next.is_none() {
            return Ok(found);
        }
    }
}

async fn list<K>(objects: &Api<K>, parameters: &ListParams) -> Result<ObjectList<K>, ApiError>
where
    K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    objects.list(parameters).await.map_err(|error| ApiError::from(&error))
}

/// Releases one Service, while `waiting` others wait for it.
async fn release_one(
    cluster: &Cluster,
    requests: &mut PacedRequests,
    waiting: usize,
    mut next: StatusWrite,
    write: impl Fn(&Service) -> Option<StatusWrite>,
) -> Result<(), ReleaseError> {
    let services = Api::<Service>::namespaced(cluster.client.clone(), &next.service.namespace);
    for _ in 0..ATTEMPTS_MAX {
        let patch = async || match patch(&cluster.client, &next).await {
            Err(StatusError::Later(outage)) => Err(outage),
            decided => Ok(decided),
        };
        match requests.send("patch services/status", waiting, patch).await? {
            Ok(PatchOutcome::Written | PatchOutcome::Gone) => return Ok(()),
            Ok(PatchOutcome::Stale) => {
                // The role has no right to `get` a single object.
                let this = ListParams::default().fields(&format!("metadata.name={}", next.service.name));
                let newer = requests.send("list services", waiting, async || list(&services, &this).await).await?.items.pop();
                let Some(newer) = newer.as_ref().and_then(&write) else { return Ok(()) };
                next = newer;
            }
            Err(error) => return Err(ReleaseError::Service { service: next.service, cause: error.to_string() }),
        }
    }
    let cause = format!("it changed {ATTEMPTS_MAX} times while it was released; try again");
    Err(ReleaseError::Service { service: next.service, cause })
}

/// What must be removed from a Service, if anything.
fn write(service: &Service, world: &World, settings: &ControllerSettings, extent: &Extent) -> Option<StatusWrite> {
    let object = ServiceObject::of(service).filter(|object| !object.uid.is_empty() && !object.resource_version.is_empty())?;
    let (held, class) = (&object.held, object.class.as_deref());
    let candidate = Candidate::try_from(service).ok();
    let was_ours = candidate.as_ref().is_some_and(|candidate| candidate.is_held_by(&settings.group));
    let has_our_addresses = match (extent, class) {
        // Another controller may have the class now.
        (Extent::Class(_), Some(_)) => object.status_is_ours,
        (_, Some(_)) => true,
        (_, None) => was_ours,
    };
    let has_our_addresses = object.is_load_balancer && !held.ingress.is_empty() && has_our_addresses;
    let is_extent = match (extent, class) {
        _ if held.is_of_another(&settings.group) => false,
        (Extent::All, Some(class)) => class == settings.load_balancer_class,
        (Extent::Class(left), Some(class)) => class == left,
        (Extent::Unclaimed, Some(_)) => false,
        (Extent::All, None) => true,
        // A running controller also keeps Services that were ours before; here only the configured rules count.
        (Extent::Unclaimed | Extent::Class(_), None) => !candidate.is_some_and(|candidate| {
            let unheld = ServiceObject { held: OwnedParts::default(), status_is_ours: false, ..object.clone() };
            let unheld = Candidate { object: Arc::new(unheld), ..candidate };
            object.is_load_balancer && Tenure::of_candidate(&unheld, world, settings) == Tenure::Ours
        }),
    };
    (is_extent && (held.has_marks() || has_our_addresses)).then(|| removal(&object, held, has_our_addresses))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::plan::tests::settings;

    /// A Service of a former class, with an address that `manager` wrote.
    fn service(finalizers: &[&str], group: Option<&str>, manager: &str) -> Service {
        let fields = json!({"f:status": {"f:loadBalancer": {"f:ingress": {}}}});
        let annotations = group.map(|group| json!({"sluice.dev/group": group}));
        serde_json::from_value(json!({
            "metadata": {"name": "web", "namespace": "shop", "uid": "u", "resourceVersion": "7", "finalizers": finalizers,
                "annotations": annotations,
                "managedFields": [{"manager": manager, "operation": "Update", "subresource": "status", "fieldsV1": fields}]},
            "spec": {"type": "LoadBalancer", "loadBalancerClass": "example.com/former", "ports": [{"port": 80}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "192.0.2.100"}]}},
        }))
        .unwrap()
    }

    #[test]
    fn of_a_former_class_only_what_this_installation_wrote_is_removed() {
        let ours = &["sluice.dev/load-balancer-cleanup"][..];
        // Whether the addresses are removed; `None`: nothing is written.
        let rows = [
            ("ours", service(ours, Some("default"), "sluice"), Some(true)),
            ("ours, of a version without groups", service(ours, None, "sluice"), Some(true)),
            ("of another group", service(ours, Some("other"), "sluice"), None),
            ("ours, and another controller wrote the address", service(ours, Some("default"), "rival"), Some(false)),
            ("of another controller", service(&[], None, "rival"), None),
            ("with our address, without other marks", service(&[], None, "sluice"), Some(true)),
        ];
        let class = Extent::Class("example.com/former".to_owned());
        for (sentence, service, expected) in rows {
            let write = write(&service, &World::default(), &settings(), &class);
            assert_eq!(write.map(|write| write.ingress == Some(Vec::new())), expected, "{sentence}");
        }
        let mut deleted = service(ours, Some("default"), "sluice");
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        let write = write(&deleted, &World::default(), &settings(), &class).unwrap();
        assert_eq!((write.ingress, write.finalizer), (Some(Vec::new()), Some(false)), "it is being deleted");
    }
}
