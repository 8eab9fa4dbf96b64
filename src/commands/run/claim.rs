//! Claims that keep two gateways of one network namespace from the same interface, or the same table of routes.
//!
//! A claim is an abstract unix socket with the name of what is claimed. Such names belong to a network namespace, as
//! interfaces do, whichever files a process sees; and Linux releases them when the process ends, however it ends.
//!
//! Invariant: an interface is claimed before anything of it is changed, and until it was given back. Any user may take a
//! name, so only the claim of root, or of the gateway's own user, keeps another gateway out; one of anybody else is logged.
//! Not here: PCI devices, which VFIO gives to one process only.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::thread::sleep;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;

use crate::settings::{PortSettings, Twin};

/// Attempts to learn who holds a claim: between binding and listening, its holder refuses connections.
const ATTEMPTS: u32 = 20;
const ATTEMPT_EVERY: Duration = Duration::from_millis(10);
/// How often the holder of a claim empties its queue of connections: systemd starts a gateway that is refused again every
/// second, and each start leaves a connection.
const EMPTIED_EVERY: Duration = Duration::from_secs(60);
/// Maximum number of connections that are taken from the queue at once: its usual length (net.core.somaxconn).
const EMPTIED_AT_ONCE: usize = 4096;

/// Why something could not be claimed.
#[derive(Debug, thiserror::Error)]
pub enum ClaimError {
    /// Another gateway holds it.
    #[error(
        "{what} is in use by another gateway in this network namespace, process {process}; nothing was changed: stop it, \
         or give this gateway other interfaces"
    )]
    InUse {
        /// What is claimed: `interface eth1`.
        what: String,
        /// Its process ID; 0 if it is in another PID namespace.
        process: i32,
    },
    /// The operating system refused.
    #[error("{what} cannot be claimed: {source}")]
    System {
        /// What is claimed.
        what: String,
        /// Why.
        source: io::Error,
    },
}

/// A claim of this process, until it is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    /// None: a user without privileges holds the name.
    _name: Option<Arc<UnixListener>>,
}

impl Claim {
    /// Claims the interfaces of these ports: those that devices work on or make, and twins. It must be called within
    /// the runtime.
    ///
    /// # Errors
    /// If another gateway holds one of them; then none is claimed.
    pub(super) fn interfaces(ports: &[PortSettings]) -> Result<Vec<Self>, ClaimError> {
        let mut names = BTreeSet::new();
        for port in ports {
            let parts = port.device.parts();
            names.extend(parts.iter().filter_map(|part| part.named_interface().map(str::to_owned)));
            names.extend((port.twin == Twin::Tap).then(|| port.name.clone()));
        }
        names.into_iter().map(|name| Self::take(&format!("interface {name}"))).collect()
    }

    /// Claims the routes of gateways in a table.
    ///
    /// # Errors
    /// If another gateway holds it.
    pub(super) fn route_table(table: u32) -> Result<Self, ClaimError> {
        Self::take(&format!("route table {table}"))
    }

    fn take(what: &str) -> Result<Self, ClaimError> {
        let refused = |source| ClaimError::System { what: what.to_owned(), source };
        let name = format!("sluice/{what}");
        let address = SocketAddr::from_abstract_name(&name).map_err(refused)?;
        for _ in 0..ATTEMPTS {
            match UnixListener::bind_addr(&address) {
                Ok(listener) => {
                    listener.set_nonblocking(true).map_err(refused)?;
                    let listener = Arc::new(listener);
                    tokio::spawn(empty(Arc::downgrade(&listener)));
                    return Ok(Self { _name: Some(listener) });
                }
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                Err(error) => return Err(refused(error)),
            }
            match holder(&name) {
                Ok((user, process)) if user == 0 || user == geteuid().as_raw() => {
                    return Err(ClaimError::InUse { what: what.to_owned(), process });
                }
                Ok((user, process)) => {
                    tracing::warn!(what, user, process, "a user without privileges holds the claim; it is ignored");
                    return Ok(Self { _name: None });
                }
                // It ended meanwhile, or does not listen yet.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => sleep(ATTEMPT_EVERY),
                // Its queue of connections is full, although a gateway empties its own.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(refused(error)),
            }
        }
        tracing::warn!(what, "a process that does not say whose it is holds the claim; it is ignored");
        Ok(Self { _name: None })
    }
}

/// Empties the queue of connections of a claim until the claim ends: with a full one it would not tell its holder.
async fn empty(claim: Weak<UnixListener>) {
    while let Some(listener) = claim.upgrade() {
        (0..EMPTIED_AT_ONCE).take_while(|_| listener.accept().is_ok()).for_each(drop);
        drop(listener);
        tokio::time::sleep(EMPTIED_EVERY).await;
    }
}

/// User and process of the listener on an abstract name.
fn holder(name: &str) -> io::Result<(u32, i32)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    let peer = tokio::net::UnixStream::from_std(UnixStream::from(socket))?.peer_cred()?;
    Ok((peer.uid(), peer.pid().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(text: &str) -> String {
        format!("{text} of test {}", std::process::id())
    }

    #[tokio::test]
    async fn what_is_claimed_is_refused_to_others_until_the_claim_ends() {
        let (one, two) = (named("one"), named("two"));
        let claim = Claim::take(&one).unwrap();
        let _other = Claim::take(&two).unwrap();
        let refused = Claim::take(&one).unwrap_err().to_string();
        assert!(refused.contains(&format!("{one} is in use")) && refused.contains(&std::process::id().to_string()), "{refused}");
        drop(claim);
        Claim::take(&one).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_claim_outlasts_any_number_of_gateways_that_are_refused() {
        let what = named("many");
        let _claim = Claim::take(&what).unwrap();
        for n in 0..2 * EMPTIED_AT_ONCE {
            assert!(Claim::take(&what).is_err(), "attempt {n}");
            if n % 100 == 0 {
                tokio::time::sleep(2 * EMPTIED_EVERY).await;
            }
        }
    }

    #[tokio::test]
    async fn a_name_that_does_not_tell_its_owner_keeps_no_gateway_out() {
        let what = named("silent");
        let flags = SocketFlags::CLOEXEC;
        let bound = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        let name = format!("sluice/{what}");
        rustix::net::bind(&bound, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
        assert!(format!("{:?}", Claim::take(&what).unwrap()).contains("None"), "it goes on without the name");
    }
}
