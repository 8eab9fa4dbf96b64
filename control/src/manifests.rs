//! The manifests source: a directory of YAML files that hold what a cluster would hold, followed as they change, and
//! status files beside it.
//!
//! Invariant: what cannot be read withdraws nothing. A file that does not parse keeps its last good content, a directory
//! that is gone keeps all of them, and both are said once.
//! Deliberately not here: what the objects mean (`spec`), and kinds that come from elsewhere (pools are configuration).

mod directory;
pub(crate) mod documents;
mod follow;
mod status_files;

pub use directory::Directory;
pub use documents::{Document, DocumentError, Object, documents};
pub use follow::{FollowError, follow};
pub use status_files::{StatusFileError, StatusFiles};
