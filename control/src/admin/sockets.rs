//! The sockets of an admin API: one for everything, and one beside it that only shows.
//!
//! Invariant: members of the group `sluice` may open the second one only.

use std::fs;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

use crate::gateways::socket::{ListenError, SocketGuard, listen};

/// The group that may look, if the machine has it.
const VIEWERS: &str = "sluice";
/// Maximum length of the path of a socket (unix(7)).
const PATH_BYTES_MAX: usize = 107;

/// Both sockets. They are removed when this is dropped.
#[derive(Debug)]
pub struct AdminSockets {
    pub(super) all: UnixListener,
    pub(super) read_only: Option<UnixListener>,
    pub(super) guards: Vec<SocketGuard>,
}

impl AdminSockets {
    /// Listens on the socket `path`, and on [`read_only_path`] beside it.
    ///
    /// # Errors
    /// If one of them is in use or cannot be created.
    pub async fn listen(path: &Path) -> Result<Self, ListenError> {
        let all = listen(path).await?;
        let mut sockets = Self { all, read_only: None, guards: vec![SocketGuard(path.to_owned())] };
        let read_only = read_only_path(path);
        if read_only.as_os_str().len() > PATH_BYTES_MAX {
            tracing::warn!(path = %read_only.display(), "the path of the read-only admin socket is too long; there is none");
            return Ok(sockets);
        }
        sockets.read_only = Some(listen(&read_only).await?);
        admit_viewers(&read_only);
        sockets.guards.push(SocketGuard(read_only));
        Ok(sockets)
    }
}

/// The read-only socket of an admin socket: `admin-view.sock` beside `admin.sock`.
#[must_use]
pub fn read_only_path(path: &Path) -> PathBuf {
    let name = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map_or_else(String::new, |extension| format!(".{}", extension.to_string_lossy()));
    path.with_file_name(format!("{name}-view{extension}"))
}

/// Lets the group open the socket, if there is such a group and this process may.
fn admit_viewers(path: &Path) {
    let groups = fs::read_to_string("/etc/group").unwrap_or_default();
    if let Some(group) = group_id(&groups, VIEWERS)
        && let Err(error) = chown(path, None, Some(group))
    {
        tracing::warn!(path = %path.display(), %error, "group {VIEWERS} cannot open the read-only admin socket");
    }
}

/// The ID of a group in group(5).
fn group_id(groups: &str, name: &str) -> Option<u32> {
    groups.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (found, _, id) = (fields.next()?, fields.next()?, fields.next()?);
        if found == name { id.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_read_only_socket_is_beside_the_other_one() {
        let rows = [("/run/sluice/admin.sock", "/run/sluice/admin-view.sock"), ("/a b/s", "/a b/s-view")];
        for (path, expected) in rows {
            assert_eq!(read_only_path(Path::new(path)), Path::new(expected));
        }
    }

    #[test]
    fn a_group_has_the_id_of_the_group_database() {
        let groups = "root:x:0:\nsluices:x:7:\nsluice:x:998:alice,bob\n";
        assert_eq!([group_id(groups, "sluice"), group_id(groups, "wheel")], [Some(998), None]);
    }

    #[tokio::test]
    async fn both_sockets_exist_until_the_api_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let sockets = AdminSockets::listen(&path).await.unwrap();
        assert!(sockets.read_only.is_some() && path.exists() && read_only_path(&path).exists());
        drop(sockets);
        assert!(!path.exists() && !read_only_path(&path).exists());
        let long = dir.path().join("x".repeat(PATH_BYTES_MAX - 3 - dir.path().as_os_str().len()));
        assert!(AdminSockets::listen(&long).await.unwrap().read_only.is_none(), "there is no room for its name");
    }
}
