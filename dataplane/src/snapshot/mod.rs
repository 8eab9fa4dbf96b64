//! The tables that workers forward by, the inputs that they are compiled from, and their publication.
//!
//! **Invariant:** a snapshot never changes once it is published.
//!
//! Not here: compilation (`compiler`).

mod backends;
mod earlier;
mod family;
mod frontend;
mod input;
mod prefixes;
mod publish;
mod routes;
mod shared_chunks;
mod snat_groups;
mod tables;
mod tunnels;

pub use backends::Backend;
pub(crate) use backends::{BackendTable, ExitsOfFlows};
pub(crate) use earlier::{EarlierTable, EarlierTables};
pub use family::{AddressRole, DnatFrontend, FamilyTables};
pub(crate) use family::{AddressRoles, FrontendAt};
pub(crate) use frontend::{Affinity, Policy};
pub use frontend::{BackendView, Frontend, FrontendAddress, FrontendView, PortView, ServiceView};
pub use input::{
    BackendsByService, Config, GUE_PORT, Health, Neighbour, Network, OwnedGroups, PortConfig, Route, Tunables, Tunnel,
    VipAnswers, VlanLink,
};
pub(crate) use prefixes::{Prefix, Prefixes};
pub use publish::{Publisher, SnapshotReader, Subscriber};
pub(crate) use routes::{ClientExits, Exits, GROUP_TABLE, Group, NextHopKey, RouteTarget, Routes};
pub use routes::{Exit, NextHop, RouteLookup, RouteTo};
pub(crate) use shared_chunks::Pieces;
pub(crate) use snat_groups::{SnatGroups, snat_group};
pub(crate) use tables::Announced;
pub use tables::{RemovedBackend, RemovedBackends, Snapshot, TargetUse, Views};
pub use tunnels::Ends;
pub(crate) use tunnels::{Tunnels, source_of};
