//! Who makes a request to the admin API, and whether they may change something.
//!
//! Invariant: a change is made only for a [`Caller`], and one exists only on the socket that allows changes, and over TCP
//! for a certificate that allows them. Over TCP nothing is answered to a certificate without a role.

use std::fmt;
use std::net::SocketAddr;

use nix::unistd::{Uid, User};
use rustls::pki_types::UnixTime;
use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

use crate::gateways::listener::Peer;
use crate::gateways::tls::{Operator, Role};

/// What to do about a certificate without the role.
const ADVICE: &str = "issue it with the organisation (O) sluice:viewers to look, or sluice:admins to look and change";

/// Marks the requests of the read-only socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadOnly;

/// An operator over TCP, whose certificate is valid and has a role.
#[derive(Clone, Debug)]
struct Remote {
    operator: Operator,
    from: SocketAddr,
}

/// What a caller who may only look is told.
struct Refusal {
    /// In the log.
    logged: &'static str,
    on_socket: &'static str,
    /// After the name of the certificate.
    by_certificate: &'static str,
}

/// Who may change something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Caller {
    /// The process at the other end of the socket, as the kernel names it (`SO_PEERCRED`): user ID and process ID; `None`
    /// if the kernel does not know them.
    Process(Option<(u32, Option<i32>)>),
    /// The holder of a certificate of this common name, and the address.
    Operator(String, SocketAddr),
}

impl Caller {
    /// The caller of a request that changes something.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` on the read-only socket, and for a certificate that only allows to look.
    pub fn changing<T>(request: &Request<T>) -> Result<Self, Status> {
        let refusal = Refusal {
            logged: "a change was refused, because the caller may only look",
            on_socket: "this socket only shows; changes are made through the socket of `admin.listen`, by a user who may open it",
            by_certificate: "only allows to look",
        };
        Self::unless_viewer(request, refusal)
    }

    /// The caller of a request that shows packets, which contain data of users.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` on the read-only socket, and for a certificate that only allows to look.
    pub fn seeing_packets<T>(request: &Request<T>) -> Result<Self, Status> {
        let refusal = Refusal {
            logged: "a capture was refused, because the caller may only look at state",
            on_socket: "packets contain data of users, and this socket shows none; capture and trace need the socket of \
                        `admin.listen`, by a user who may open it",
            by_certificate: "does not allow to see packets, which contain data of users",
        };
        Self::unless_viewer(request, refusal)
    }

    fn unless_viewer<T>(request: &Request<T>, refusal: Refusal) -> Result<Self, Status> {
        let extensions = request.extensions();
        let (caller, message) = match extensions.get::<Remote>() {
            Some(Remote { operator: Operator { name, role }, from }) => {
                let refused = || format!("the certificate of {name:?} {}; {ADVICE}", refusal.by_certificate);
                (Self::Operator(name.clone(), *from), (*role != Role::Change).then(refused))
            }
            None => {
                let credentials = extensions.get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
                let refused = |_: &ReadOnly| refusal.on_socket.to_owned();
                let caller = Self::Process(credentials.map(|one| (one.uid(), one.pid())));
                (caller, extensions.get::<ReadOnly>().map(refused))
            }
        };
        let Some(message) = message else { return Ok(caller) };
        tracing::info!(%caller, "{}", refusal.logged);
        Err(Status::permission_denied(message))
    }
}

/// Admits a request over TCP if its certificate is still valid and has a role.
///
/// # Errors
/// `UNAUTHENTICATED` or `PERMISSION_DENIED` with what to do.
pub(super) fn admit(mut request: Request<()>) -> Result<Request<()>, Status> {
    let Peer::Named(credential, from) = Peer::of(&request)? else {
        return Err(Status::internal("a connection over TCP has no certificate"));
    };
    let operator = credential.operator();
    let refuse = |status: Status| {
        tracing::warn!(name = operator.name, %from, error = status.message(), "a request over TCP was refused");
        Err(status)
    };
    if let Err(error) = credential.check(UnixTime::now()) {
        let message = format!("the certificate of {:?} is no longer accepted: {error}; renew it", operator.name);
        return refuse(Status::unauthenticated(message));
    }
    if operator.role == Role::None {
        return refuse(Status::permission_denied(format!("the certificate of {:?} has no role; {ADVICE}", operator.name)));
    }
    request.extensions_mut().insert(Remote { operator, from });
    Ok(request)
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (user, process) = match self {
            Self::Operator(name, from) => return write!(f, "{name} (certificate), from {from}"),
            Self::Process(None) => return f.write_str("unknown"),
            Self::Process(Some(process)) => *process,
        };
        match User::from_uid(Uid::from_raw(user)) {
            Ok(Some(account)) => write!(f, "{} (uid {user})", account.name)?,
            Ok(None) | Err(_) => write!(f, "uid {user}")?,
        }
        process.map_or(Ok(()), |process| write!(f, ", pid {process}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixStream;
    use tonic::Code;
    use tonic::transport::server::Connected as _;

    #[tokio::test]
    async fn the_kernel_names_the_caller_of_a_change() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut request = Request::new(());
        request.extensions_mut().insert(ours.connect_info());
        let caller = Caller::changing(&request).unwrap();
        let Caller::Process(Some((user, process))) = caller else { panic!("no process: {caller}") };
        assert_eq!(process.unwrap().unsigned_abs(), std::process::id());
        let text = caller.to_string();
        assert!(text.contains(&format!("uid {user}")) && text.ends_with(&format!("pid {}", std::process::id())), "{text}");
        assert_eq!(Caller::changing(&Request::new(())).unwrap().to_string(), "unknown");
    }

    #[test]
    fn a_certificate_changes_something_only_with_the_role() {
        let changing = |role| {
            let operator = Operator { name: "alice".to_owned(), role };
            let mut request = Request::new(());
            request.extensions_mut().insert(Remote { operator, from: "192.0.2.7:5555".parse().unwrap() });
            Caller::changing(&request)
        };
        assert_eq!(changing(Role::Change).unwrap().to_string(), "alice (certificate), from 192.0.2.7:5555");
        for role in [Role::Look, Role::None] {
            let status = changing(role).unwrap_err();
            assert!(status.code() == Code::PermissionDenied && status.message().contains("sluice:admins"), "{status}");
        }
    }

    #[test]
    fn the_read_only_socket_changes_nothing() {
        let mut request = Request::new(());
        request.extensions_mut().insert(ReadOnly);
        assert_eq!(Caller::changing(&request).unwrap_err().code(), Code::PermissionDenied);
        let refused = Caller::seeing_packets(&request).unwrap_err();
        assert_eq!(refused.code(), Code::PermissionDenied);
        assert!(refused.message().contains("packets contain data of users"), "{refused}");
    }

    #[test]
    fn a_user_has_the_name_of_the_account_database() {
        let text = |user| Caller::Process(Some((user, Some(7)))).to_string();
        assert_eq!(text(0), "root (uid 0), pid 7");
        assert_eq!(text(u32::MAX - 1), format!("uid {}, pid 7", u32::MAX - 1));
    }
}
