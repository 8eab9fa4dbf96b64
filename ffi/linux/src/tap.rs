//! Opens TAP interfaces: Linux Ethernet interfaces whose frames a process reads and writes through a file descriptor.
//! And TUN interfaces that exist only as long as their descriptor is open.
//!
//! Not here: addresses, MTU and administrative state (set by netlink), and reading and writing (done on the
//! descriptor). docs/internals/decisions/0041 says why this is not a library.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::interface;

const DEVICE: &str = "/dev/net/tun";

/// Errors of opening a tap.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The name is not a legal interface name.
    #[error("{name:?} cannot name an interface: 1 to 15 characters, no space, no '/' and no ':', neither '.' nor '..'")]
    BadName {
        /// The name.
        name: String,
    },
    /// `/dev/net/tun` cannot be opened.
    #[error("{DEVICE} cannot be opened: {source}; load the module with `modprobe tun`, and give a container the device")]
    NoDevice {
        /// The cause.
        source: io::Error,
    },
    /// An interface with this name exists and is not a tap.
    #[error("interface {name} exists and is not a tap; give the port another name, or remove it with `ip link del {name}`")]
    NotATap {
        /// The interface.
        name: String,
    },
    /// Another process has the tap open.
    #[error("tap {name} is in use by another process; is another gateway running?")]
    InUse {
        /// The interface.
        name: String,
    },
    /// The process lacks the privilege.
    #[error("tap {name} cannot be opened: this process lacks CAP_NET_ADMIN")]
    Privilege {
        /// The interface.
        name: String,
    },
    /// Any other error.
    #[error("tap {name}: {step} failed: {source}")]
    Kernel {
        /// The interface.
        name: String,
        /// The failed request.
        step: &'static str,
        /// The cause.
        source: io::Error,
    },
}

/// Opens the persistent tap `name` in the network namespace of the calling thread, and creates it if it does not exist.
/// Each read of the descriptor returns one frame and each write sends one, without any header; neither blocks.
///
/// The interface outlives the descriptor with its addresses and routes.
///
/// # Errors
/// See [`TapError`].
pub fn open(name: &str) -> Result<OwnedFd, TapError> {
    let file = attach(name, libc::IFF_TAP)?;
    // SAFETY: the descriptor is open, and TUNSETPERSIST takes an integer.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST, 1 as libc::c_ulong) } < 0 {
        return Err(TapError::Kernel { name: name.into(), step: "TUNSETPERSIST", source: io::Error::last_os_error() });
    }
    Ok(file.into())
}

/// Creates the TUN interface `name` in the network namespace of the calling thread. The kernel removes it, with its
/// addresses and routes, when the descriptor is closed, also by the end of the process.
///
/// # Errors
/// See [`TapError`].
pub fn open_transient(name: &str) -> Result<OwnedFd, TapError> {
    attach(name, libc::IFF_TUN).map(Into::into)
}

/// Opens the interface of this kind, and creates it if it does not exist.
fn attach(name: &str, kind: libc::c_int) -> Result<File, TapError> {
    let mut request = request(name, kind)?;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open(DEVICE)
        .map_err(|source| TapError::NoDevice { source })?;
    // SAFETY: the descriptor is open, and TUNSETIFF reads and writes one ifreq, which `request` is.
    if unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) } < 0 {
        return Err(refused(name, io::Error::last_os_error()));
    }
    Ok(file)
}

/// The TUNSETIFF request for an interface of this kind without a packet information header.
fn request(name: &str, kind: libc::c_int) -> Result<libc::ifreq, TapError> {
    let bad = name.is_empty()
        || name.len() >= libc::IFNAMSIZ
        || name == "."
        || name == ".."
        // With '%' the kernel would choose a number.
        || name.bytes().any(|byte| byte == b'/' || byte == b':' || byte == b'%' || byte == 0 || byte.is_ascii_whitespace());
    if bad {
        return Err(TapError::BadName { name: name.into() });
    }
    let mut request = interface::request(name);
    #[allow(clippy::cast_possible_truncation)] // 0x1001 or 0x1002
    let flags = (kind | libc::IFF_NO_PI) as libc::c_short;
    request.ifr_ifru.ifru_flags = flags;
    Ok(request)
}

fn refused(name: &str, source: io::Error) -> TapError {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EINVAL) => TapError::NotATap { name },
        Some(libc::EBUSY) => TapError::InUse { name },
        Some(libc::EPERM) => TapError::Privilege { name },
        _ => TapError::Kernel { name, step: "TUNSETIFF", source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn illegal_names_are_refused_before_any_system_call() {
        for name in ["", "..", "a b", "a/b", "a:b", "tap%d", "sixteen-letters-"] {
            assert!(matches!(open(name), Err(TapError::BadName { .. })), "{name}");
            assert!(matches!(open_transient(name), Err(TapError::BadName { .. })), "{name}");
        }
    }

    #[test]
    fn each_refusal_of_the_kernel_says_what_to_do() {
        let text = |errno| refused("uplink", io::Error::from_raw_os_error(errno)).to_string();
        assert!(text(libc::EINVAL).contains("exists and is not a tap"));
        assert!(text(libc::EBUSY).contains("in use by another process"));
        assert!(text(libc::EPERM).contains("CAP_NET_ADMIN"));
        assert!(text(libc::ENOMEM).contains("TUNSETIFF failed"));
    }
}
