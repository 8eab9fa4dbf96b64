//! Listening sockets of sluice's programs.
//!
//! Invariant: a unix socket with a listening process is never replaced; a stale one, whose process was killed, is.
//! Owner and group of the socket may connect.

use std::fs::{self, Permissions};
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener, UnixStream};

/// Pause after a failed accept.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Why listening failed.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another process answers on it.
    #[error("{0} is in use: another process listens there; stop it, or configure another path")]
    InUse(PathBuf),
    /// The path exists and is not a socket.
    #[error("{0} exists and is no socket; move it away, or configure another path")]
    NotASocket(PathBuf),
    /// The address cannot be bound.
    #[error("cannot listen on {address}: {error}; another process may listen there, or the address is none of this machine")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Its error.
        error: io::Error,
    },
    /// The operating system refused.
    #[error("cannot listen on {path}: {error}; the directory must exist or be creatable, and be writable for this process")]
    System {
        /// The path.
        path: PathBuf,
        /// Its error.
        error: io::Error,
    },
}

/// Listens on `path`. Creates the directory and replaces a stale socket.
///
/// # Errors
/// If it is in use or cannot be created.
pub async fn listen(path: &Path) -> Result<UnixListener, ListenError> {
    match UnixStream::connect(path).await {
        Ok(_) => return Err(ListenError::InUse(path.to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => remove_stale(path)?,
        Err(error) => return Err(system(path)(error)),
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).map_err(system(path))?;
    }
    let listener = UnixListener::bind(path).map_err(system(path))?;
    fs::set_permissions(path, Permissions::from_mode(0o660)).map_err(system(path))?;
    Ok(listener)
}

/// Listens on a TCP address.
///
/// # Errors
/// If it cannot be bound.
pub async fn listen_tcp(address: SocketAddr) -> Result<TcpListener, ListenError> {
    TcpListener::bind(address).await.map_err(|error| ListenError::Tcp { address, error })
}

/// Pauses after a connection could not be accepted: while descriptors are short, the next attempt would fail as well.
pub(crate) async fn not_accepted(error: &io::Error) {
    tracing::warn!(%error, "a connection could not be accepted");
    tokio::time::sleep(ACCEPT_RETRY).await;
}

/// Removes the socket of this process when its server ends. The next process replaces a socket that a crash left
/// behind.
#[derive(Debug)]
pub struct SocketGuard(pub PathBuf);

impl Drop for SocketGuard {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!(path = %self.0.display(), %error, "cannot remove a socket of ours");
        }
    }
}

/// Linux refuses connections also to files that are not sockets.
fn remove_stale(path: &Path) -> Result<(), ListenError> {
    use std::os::unix::fs::FileTypeExt as _;
    if !fs::symlink_metadata(path).map_err(system(path))?.file_type().is_socket() {
        return Err(ListenError::NotASocket(path.to_owned()));
    }
    fs::remove_file(path).map_err(system(path))
}

fn system(path: &Path) -> impl Fn(io::Error) -> ListenError {
    move |error| ListenError::System { path: path.to_owned(), error }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_in_use_is_left_alone_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run").join("s.sock");
        let first = listen(&path).await.unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(matches!(listen(&path).await, Err(ListenError::InUse(_))));
        drop(first);
        assert!(path.exists());
        listen(&path).await.unwrap();
    }

    #[tokio::test]
    async fn a_file_that_is_not_a_socket_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("precious");
        fs::write(&path, "kept").unwrap();
        assert!(matches!(listen(&path).await, Err(ListenError::NotASocket(_))));
        assert_eq!(fs::read_to_string(&path).unwrap(), "kept");
    }
}
