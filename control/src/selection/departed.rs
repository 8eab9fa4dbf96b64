//! Slices that were deleted while their Service remains. kube-controller-manager writes a managed slice anew when somebody
//! deletes it, a second later (its retry delay; recorded: 1.005 s). Were its endpoints gone meanwhile, every new flow would
//! go elsewhere or be refused, and Maglev tables change twice.
//!
//! Invariant: what any other slice of the Service says of an address counts more; an endpoint that is taken out of a slice
//! is gone at once, and so is everything when the Service goes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proto::ServiceName;

use crate::spec::SliceSpec;
use crate::world::World;

/// How long the endpoints of a deleted slice still count: twice the time until a managed one is there again.
pub const SLICE_KEPT: Duration = Duration::from_secs(2);

/// The deleted slices of one Service.
#[derive(Clone, Debug, Default)]
pub struct Departed {
    /// Those that still count, with the endpoints that no other slice knows.
    pub counting: Vec<SliceSpec>,
    /// Since when each of all of them is known to be deleted.
    pub since: BTreeMap<ServiceName, Instant>,
    /// When the first of those that count stops to.
    pub until: Option<Instant>,
}

impl Departed {
    /// Those of `service`; `before` is [`Departed::since`] of the last time.
    #[must_use]
    pub fn of(world: &World, service: &ServiceName, before: Option<&BTreeMap<ServiceName, Instant>>, now: Instant) -> Self {
        let mut departed = Self::default();
        for slice in world.departed_slices_of(service) {
            let since = before.and_then(|before| before.get(&slice.name)).copied().unwrap_or(now);
            departed.since.insert(slice.name.clone(), since);
            let until = since + SLICE_KEPT;
            if until > now {
                departed.until = departed.until.into_iter().chain([until]).min();
                departed.counting.push(slice.clone());
            }
        }
        if !departed.counting.is_empty() {
            let known: BTreeSet<IpAddr> =
                world.slices_of(service).flat_map(|slice| &slice.endpoints).map(|e| e.address).collect();
            for slice in &mut departed.counting {
                slice.endpoints.retain(|endpoint| !known.contains(&endpoint.address));
            }
        }
        departed
    }
}
