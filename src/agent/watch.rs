//! Watch channels, whose receivers wake only at changes.

use tokio::sync::watch::Sender;

/// Sends a value unless it equals the last one.
pub(crate) fn send_if_changed<T: PartialEq>(sender: &Sender<T>, new: T) {
    sender.send_if_modified(|last| {
        let is_changed = *last != new;
        *last = new;
        is_changed
    });
}
