//! Who makes a request to the admin API, and whether they may change something.
//!
//! Invariant: a change is made only for a [`Caller`], and one exists only on the socket that allows changes.

use std::fmt;
use std::fs;

use tonic::transport::server::UdsConnectInfo;
use tonic::{Request, Status};

/// Marks the requests of the read-only socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadOnly;

/// Who may change something: the process at the other end of the socket, as the kernel names it (`SO_PEERCRED`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caller {
    /// User ID and process ID; `None` if the kernel does not know them.
    process: Option<(u32, Option<i32>)>,
}

impl Caller {
    /// The caller of a request that changes something.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` on the read-only socket.
    pub fn changing<T>(request: &Request<T>) -> Result<Self, Status> {
        let caller = Self::of(request);
        if request.extensions().get::<ReadOnly>().is_some() {
            tracing::info!(%caller, "a change through the read-only socket was refused");
            return Err(Status::permission_denied(
                "this socket only shows; changes are made through the socket of `admin.listen`, by a user who may open it",
            ));
        }
        Ok(caller)
    }

    /// The caller of a request that shows packets, which contain data of users.
    ///
    /// # Errors
    /// `PERMISSION_DENIED` on the read-only socket.
    pub fn seeing_packets<T>(request: &Request<T>) -> Result<Self, Status> {
        let caller = Self::of(request);
        if request.extensions().get::<ReadOnly>().is_some() {
            tracing::info!(%caller, "a capture through the read-only socket was refused");
            return Err(Status::permission_denied(
                "packets contain data of users, and this socket shows none; capture and trace need the socket of `admin.listen`, \
                 by a user who may open it",
            ));
        }
        Ok(caller)
    }

    fn of<T>(request: &Request<T>) -> Self {
        let credentials = request.extensions().get::<UdsConnectInfo>().and_then(|info| info.peer_cred);
        Self { process: credentials.map(|one| (one.uid(), one.pid())) }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((user, process)) = self.process else { return f.write_str("unknown") };
        match fs::read_to_string("/etc/passwd").ok().and_then(|accounts| user_name(&accounts, user).map(str::to_owned)) {
            Some(name) => write!(f, "{name} (uid {user})")?,
            None => write!(f, "uid {user}")?,
        }
        process.map_or(Ok(()), |process| write!(f, ", pid {process}"))
    }
}

/// The name of a user in passwd(5).
fn user_name(accounts: &str, user: u32) -> Option<&str> {
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let (name, _, id) = (fields.next()?, fields.next()?, fields.next()?);
        (id.parse() == Ok(user)).then_some(name)
    })
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
        let (user, process) = caller.process.unwrap();
        assert_eq!(process.unwrap().unsigned_abs(), std::process::id());
        let text = caller.to_string();
        assert!(text.contains(&format!("uid {user}")) && text.ends_with(&format!("pid {}", std::process::id())), "{text}");
        assert_eq!(Caller::changing(&Request::new(())).unwrap().to_string(), "unknown");
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
        let accounts = "root:x:0:0:root:/root:/bin/bash\nbroken\nalice:x:1000:1000::/home/alice:/bin/sh\n";
        assert_eq!([0, 1000, 7].map(|user| user_name(accounts, user)), [Some("root"), Some("alice"), None]);
    }
}
