//! The sockets of an admin API: one for everything, one beside it that only shows, and TCP for operators with
//! certificates.
//!
//! Invariant: members of the group `sluice` may open the second one only. Neither certificates nor the TCP address keep
//! the unix sockets from being served.

use std::net::SocketAddr;
use std::os::unix::fs::chown;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nix::unistd::Group;
use tokio::net::{TcpListener, UnixListener};

use crate::config::settings::AdminListen;
use crate::gateways::listener::ServerTls;
use crate::gateways::socket::{ListenError, SocketGuard, listen, listen_tcp};

/// The group that may look, if the machine has it.
const VIEWERS: &str = "sluice";
/// Delay before listening on a TCP address is tried again.
const LISTEN_RETRY: Duration = Duration::from_secs(1);
/// Maximum length of the path of a socket (unix(7)).
const PATH_BYTES_MAX: usize = 107;

/// The sockets. Those of unix are removed when this is dropped.
#[derive(Debug)]
pub struct AdminSockets {
    pub(super) all: UnixListener,
    pub(super) read_only: Option<UnixListener>,
    pub(super) tcp: Option<(SocketAddr, Arc<ServerTls>)>,
    pub(super) guards: Vec<SocketGuard>,
}

impl AdminSockets {
    /// Listens on the unix socket, and on [`read_only_path`] beside it. `tls` is for TCP ([`ServerTls::of_admin`]).
    /// Certificates that cannot be used are logged.
    ///
    /// # Errors
    /// If one of the unix sockets is in use or cannot be created.
    pub async fn listen(at: &AdminListen, tls: Option<Arc<ServerTls>>) -> Result<Self, ListenError> {
        let path = &at.unix;
        let all = listen(path).await?;
        let tcp = at.tcp.as_ref().map(|(address, _)| *address).zip(tls);
        let mut sockets = Self { all, read_only: None, tcp, guards: vec![SocketGuard(path.to_owned())] };
        if let Some((_, tls)) = &sockets.tcp {
            let _ = tls.newest().await;
        }
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

/// Listens on a TCP address as soon as that is possible: an address of a twin exists only once its port is open.
pub(super) async fn listen_patiently(address: SocketAddr) -> TcpListener {
    let mut is_logged = false;
    loop {
        match listen_tcp(address).await {
            Ok(listener) => {
                tracing::info!(%address, "the admin API is served over TCP");
                return listener;
            }
            Err(error) if !is_logged => {
                tracing::warn!(%error, "the admin API is not served over TCP yet; trying again every second");
                is_logged = true;
            }
            Err(_) => {}
        }
        tokio::time::sleep(LISTEN_RETRY).await;
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
    if let Ok(Some(group)) = Group::from_name(VIEWERS)
        && let Err(error) = chown(path, None, Some(group.gid.as_raw()))
    {
        tracing::warn!(path = %path.display(), %error, "group {VIEWERS} cannot open the read-only admin socket");
    }
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

    #[tokio::test]
    async fn both_sockets_exist_until_the_api_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        let sockets = AdminSockets::listen(&AdminListen::unix(path.clone()), None).await.unwrap();
        assert!(sockets.read_only.is_some() && path.exists() && read_only_path(&path).exists());
        drop(sockets);
        assert!(!path.exists() && !read_only_path(&path).exists());
        let long = dir.path().join("x".repeat(PATH_BYTES_MAX - 3 - dir.path().as_os_str().len()));
        assert!(
            AdminSockets::listen(&AdminListen::unix(long), None).await.unwrap().read_only.is_none(),
            "there is no room for its name"
        );
    }
}
