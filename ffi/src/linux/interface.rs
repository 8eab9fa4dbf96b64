//! State of a Linux interface in the network namespace of the calling thread.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::raw;

/// The index of an interface, if one with this name exists.
pub(crate) fn index(name: &str) -> Option<u32> {
    let name = raw::c_string(name);
    // SAFETY: the name is terminated.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

/// Whether an interface is up and has a carrier; none if Linux does not say.
pub(crate) fn is_running(name: &str) -> Option<bool> {
    // SAFETY: no pointer is passed.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return None;
    }
    // SAFETY: the descriptor was just opened, and nothing else owns it.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: ifreq is a C struct of integers, for which all-zero bytes are a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    let room = request.ifr_name.len() - 1;
    for (to, from) in request.ifr_name[..room].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
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
