//! What the workers were last given to forward by, as far as somebody asks: a copy, so that nobody who asks keeps a
//! snapshot alive.

use std::sync::Arc;

use dataplane::Snapshot;
use dataplane::snapshot::ServiceView;

/// The part of a snapshot that is told to an operator.
#[derive(Clone, Debug, Default)]
pub struct Served {
    /// Whether it was made of a complete state, live or persisted.
    pub ready: bool,
    /// The services, by name.
    pub services: Vec<Arc<ServiceView>>,
}

impl From<&Snapshot> for Served {
    fn from(snapshot: &Snapshot) -> Self {
        Self { ready: snapshot.ready(), services: snapshot.services().to_vec() }
    }
}
