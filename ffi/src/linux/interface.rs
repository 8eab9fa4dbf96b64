//! State of a Linux interface in the network namespace of the calling thread.

use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// The index of an interface, if one with this name exists.
pub(crate) fn index(name: &str) -> Option<u32> {
    name_to_index(socket()?, name).ok()
}

/// A socket for requests about interfaces.
fn socket() -> Option<OwnedFd> {
    socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None).ok()
}

/// A request about the interface `name`, of which at most 15 bytes are used.
pub(super) fn request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is a C struct of integers, for which all-zero bytes are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    request
}

/// Whether an interface is up and has a carrier; none if Linux does not say.
pub(crate) fn is_running(name: &str) -> Option<bool> {
    let (socket, mut request) = (socket()?, request(name));
    // SAFETY: the descriptor is open, and SIOCGIFFLAGS reads and writes one ifreq, which `request` is.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } < 0 {
        return None;
    }
    // SAFETY: the kernel has written the flags.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    let wanted = libc::IFF_UP | libc::IFF_RUNNING;
    Some(flags & wanted == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interface_that_does_not_exist_has_neither_index_nor_carrier() {
        assert_eq!((index("no-such-if"), is_running("no-such-if")), (None, None));
        assert!(index("lo").is_some() && is_running("lo").is_some());
    }
}
