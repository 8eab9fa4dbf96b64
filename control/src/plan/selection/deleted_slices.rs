//! Slices that were deleted while their Service remains. If a managed slice is deleted, kube-controller-manager
//! creates it again one second later (its retry delay; recorded: 1.005 s). Without its endpoints, new flows would go to
//! other backends or be refused in the meantime, and Maglev tables would change twice. The controller also deletes
//! slices whose last endpoints have disappeared; those endpoints were terminating already.
//!
//! Invariant: if another slice of the Service has the same address, that slice counts. Endpoints that are removed from
//! a slice, or that were terminating when their slice was deleted, disappear at once, and all endpoints disappear with
//! the Service. Slices that no controller manages are not kept (`world`).

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::ServiceName;

use crate::world::World;
use objects::SliceSpec;

/// How long the endpoints of a deleted slice still count: twice the time until a managed slice is created again.
pub const SLICE_KEPT: Duration = Duration::from_secs(2);

/// The deleted slices of one Service.
#[derive(Clone, Debug, Default)]
pub struct DeletedSlices {
    /// Slices that still count, with the endpoints that no other slice has.
    pub counting: Vec<SliceSpec>,
    /// When each deletion was noticed.
    pub since: BTreeMap<ServiceName, Instant>,
    /// When the first of them stops counting.
    pub until: Option<Instant>,
}

impl DeletedSlices {
    /// The deleted slices of `service`; `before` is the result of the previous call.
    #[must_use]
    pub fn of(world: &World, service: &ServiceName, before: Option<&Self>, now: Instant) -> Self {
        let mut deleted_slices = Self::default();
        for slice in world.deleted_slices_of(service) {
            let since = before.and_then(|before| before.since.get(&slice.name)).copied().unwrap_or(now);
            deleted_slices.since.insert(slice.name.clone(), since);
            let until = since + SLICE_KEPT;
            if until > now {
                deleted_slices.until = deleted_slices.until.into_iter().chain([until]).min();
                deleted_slices.counting.push(slice.clone());
            }
        }
        if !deleted_slices.counting.is_empty() {
            let known: BTreeSet<IpAddr> =
                world.slices_of(service).flat_map(|slice| &slice.endpoints).map(|e| e.address).collect();
            for slice in &mut deleted_slices.counting {
                slice.endpoints.retain(|endpoint| !endpoint.terminating && !known.contains(&endpoint.address));
            }
        }
        deleted_slices
    }

    /// Whether there are any, and none of them counts any longer.
    #[must_use]
    pub fn are_over(&self) -> bool {
        !self.since.is_empty() && self.until.is_none()
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use k8s_openapi::api::discovery::v1::EndpointSlice;
    use serde_json::{Value, json};

    use super::*;
    use crate::world::change::Change;

    /// How many endpoints of a slice count right after it was deleted.
    fn counting(managed_by: &str, conditions: &[Value]) -> usize {
        let service =
            json!({"metadata": {"name": "a", "namespace": "shop"}, "spec": {"type": "LoadBalancer", "ports": [{"port": 80}]}});
        let labels = json!({"kubernetes.io/service-name": "a", "endpointslice.kubernetes.io/managed-by": managed_by});
        let endpoint =
            |(last, conditions): (usize, &Value)| json!({"addresses": [format!("10.0.0.{last}")], "conditions": conditions});
        let endpoints: Vec<Value> = conditions.iter().enumerate().map(endpoint).collect();
        let slice = json!({"metadata": {"name": "a-1", "namespace": "shop", "labels": labels}, "addressType": "IPv4",
            "ports": [{"port": 8080}], "endpoints": endpoints});
        let mut world = World::default();
        world.apply(Change::ServiceApplied(Box::new(serde_json::from_value::<Service>(service).unwrap().into())));
        world.apply(Change::SliceApplied(Box::new(serde_json::from_value::<EndpointSlice>(slice).unwrap().into())));
        world.apply(Change::SliceDeleted(ServiceName::new("shop", "a-1")));
        let deleted_slices = DeletedSlices::of(&world, &ServiceName::new("shop", "a"), None, Instant::now());
        deleted_slices.counting.iter().map(|slice| slice.endpoints.len()).sum()
    }

    #[test]
    fn a_deleted_slice_counts_only_if_it_is_managed_and_has_ready_endpoints() {
        let (ready, terminating) = (json!({"ready": true}), json!({"ready": false, "serving": true, "terminating": true}));
        let kubernetes = "endpointslice-controller.k8s.io";
        assert_eq!(counting(kubernetes, &[ready.clone(), ready.clone()]), 2);
        assert_eq!(counting(kubernetes, &[ready.clone(), terminating.clone()]), 1, "one terminated");
        assert_eq!(counting(kubernetes, &[terminating]), 0, "deleted with its last endpoints");
        assert_eq!(counting("me", &[ready]), 0, "no controller creates it again");
    }
}
