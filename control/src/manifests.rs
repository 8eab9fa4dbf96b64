//! The manifests source: a watched directory of YAML files with the objects that a cluster would have, and status
//! files.
//!
//! Invariant: a read error withdraws nothing. A file that cannot be parsed keeps its last valid content, a missing
//! directory keeps all of them, and each error is logged once. Deliberately not here: parsing objects (`objects`).

mod directory;
mod status_files;
mod watch;

pub use directory::Directory;
pub use status_files::{StatusFileError, StatusFiles};
pub use watch::{FollowError, follow};
