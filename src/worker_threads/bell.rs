//! The doorbell of a thread of this program: an eventfd that others write, once for each sleep.
//!
//! Not here: when a thread sleeps (`idle`), and what else wakes it (`sleep`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use dataplane::Doorbell;
use rustix::event::{EventfdFlags, eventfd};

/// A doorbell, and the descriptor that becomes readable when it rings.
#[derive(Debug)]
pub struct Bell {
    doorbell: Arc<Doorbell>,
    event: Arc<OwnedFd>,
}

impl Bell {
    /// A doorbell that nobody has rung.
    ///
    /// # Errors
    /// When the process has too many open files.
    pub fn new() -> io::Result<Self> {
        let event = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
        let written = Arc::clone(&event);
        // The only failure of a write is a counter at its maximum, and then the descriptor is readable.
        let doorbell = Doorbell::new(move || {
            let _ = rustix::io::write(&written, &1_u64.to_ne_bytes());
        });
        Ok(Self { doorbell: Arc::new(doorbell), event })
    }

    /// The side that rings.
    #[must_use]
    pub fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }

    /// Makes the descriptor unreadable again.
    pub fn quiet(&self) {
        // It fails if nobody has rung.
        let _ = rustix::io::read(&self.event, &mut [0_u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
