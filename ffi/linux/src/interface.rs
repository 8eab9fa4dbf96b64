//! State of a Linux interface in the network namespace of the process.
//!
//! Invariant: only the kernel's answer that there is no such interface counts as its absence. Any other error, such as
//! one for want of memory, is passed on. The socket for requests is opened once, so that a process that has no free
//! descriptor still sees its interfaces.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;

use rustix::io::{Errno, Result};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// The index of an interface; none if no interface has this name.
///
/// # Errors
/// If the kernel does not answer.
pub fn index(name: &str) -> Result<Option<u32>> {
    or_absent(name_to_index(socket()?, name))
}

/// Whether an interface is up and has a carrier. An interface that does not exist has none.
///
/// # Errors
/// If the kernel does not answer.
pub fn is_running(name: &str) -> Result<bool> {
    Ok(or_absent(flags(name))?.is_some_and(|flags| {
        let wanted = libc::IFF_UP | libc::IFF_RUNNING;
        flags & wanted == wanted
    }))
}

/// Absence, if the kernel says that there is no such interface. Every other error stays one.
fn or_absent<T>(found: Result<T>) -> Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The socket for requests about interfaces, in the network namespace of the thread that asked first.
fn socket() -> Result<&'static OwnedFd> {
    static SOCKET: OnceLock<OwnedFd> = OnceLock::new();
    if let Some(socket) = SOCKET.get() {
        return Ok(socket);
    }
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(SOCKET.get_or_init(|| socket))
}

/// A request about the interface `name`, of which at most 15 bytes are used.
pub(crate) fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is a C struct of integers, for which all-zero bytes are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// The flags of an interface.
fn flags(name: &str) -> Result<libc::c_int> {
    let (socket, mut request) = (socket()?, request(name));
    // SAFETY: the descriptor is open, and SIOCGIFFLAGS reads and writes one ifreq, which `request` is.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } < 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    // SAFETY: the kernel has written the flags.
    Ok(libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_does_not_exist_has_neither_index_nor_carrier() {
        assert_eq!((index("no-such-if"), is_running("no-such-if")), (Ok(None), Ok(false)));
        assert!(index("lo").unwrap().is_some() && is_running("lo").is_ok());
    }

    #[test]
    fn only_the_answer_that_there_is_no_such_interface_is_its_absence() {
        assert_eq!(or_absent(Ok(7)), Ok(Some(7)));
        assert_eq!(or_absent::<u32>(Err(Errno::NODEV)), Ok(None));
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::PERM] {
            assert_eq!(or_absent::<u32>(Err(error)), Err(error));
        }
    }
}
