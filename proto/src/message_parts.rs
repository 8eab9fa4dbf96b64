//! Splits a change that is too large for one message into several, which the gateway applies as one.
//!
//! Invariant: reassembly returns the change that was split, as a whole or not at all.

use std::mem::take;

use prost::Message;

use crate::v1::{Service, WatchResponse};

/// Bytes of Services in one message: a quarter of [`crate::limits::MESSAGE_BYTES_MAX`]. The largest possible Service,
/// 100 ports of 6,553 backends of 45 bytes, has 30 MB and is sent alone; removed names, 65,536 of 320 bytes, have 21 MB
/// and are sent with the first part.
pub const PART_BYTES: usize = 16 * 1024 * 1024;
/// Maximum parts of a change: 64 of 16 MiB are a gigabyte, or ten million backends.
pub const PARTS_MAX: usize = 64;

/// A change has more parts than [`PARTS_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the controller sent one change in more than {PARTS_MAX} messages")]
pub struct TooManyParts;

/// A change as messages of about `part_bytes` of Services each; at least one.
#[must_use]
pub fn split(mut whole: WatchResponse, part_bytes: usize) -> Vec<WatchResponse> {
    let counts = full_parts(&whole.services, part_bytes);
    if counts.is_empty() {
        return vec![whole];
    }
    let mut parts = Vec::with_capacity(counts.len() + 1);
    let mut services = take(&mut whole.services).into_iter();
    for count in counts {
        let services = services.by_ref().take(count).collect();
        let (generation, removed) = (whole.generation.clone(), take(&mut whole.removed));
        parts.push(WatchResponse { generation, full: whole.full, services, removed, more: true, ..WatchResponse::default() });
        // Applies to all parts together, so only the first has it.
        whole.full = false;
    }
    parts.push(WatchResponse { services: services.collect(), ..whole });
    parts
}

/// The number of Services in each part but the last.
fn full_parts(services: &[Service], part_bytes: usize) -> Vec<usize> {
    let (mut counts, mut count, mut bytes) = (Vec::new(), 0, 0);
    for size in services.iter().map(Message::encoded_len) {
        if bytes + size > part_bytes && count > 0 {
            counts.push(count);
            (count, bytes) = (0, 0);
        }
        (count, bytes) = (count + 1, bytes + size);
    }
    counts
}

/// The parts of a change received so far.
#[derive(Clone, Debug, Default)]
pub struct Reassembly {
    so_far: Option<WatchResponse>,
    parts: usize,
}

impl Reassembly {
    /// Adds a message. Returns the whole change if the message is its last or only part.
    ///
    /// # Errors
    /// When there are more than [`PARTS_MAX`] parts.
    pub fn add(&mut self, mut message: WatchResponse) -> Result<Option<WatchResponse>, TooManyParts> {
        let is_last = !take(&mut message.more);
        self.parts += 1;
        if self.parts > PARTS_MAX {
            return Err(TooManyParts);
        }
        if let Some(before) = self.so_far.take() {
            let (mut services, mut removed) = (before.services, before.removed);
            services.append(&mut message.services);
            removed.append(&mut message.removed);
            message = WatchResponse { full: before.full || message.full, services, removed, ..message };
        }
        if is_last {
            self.parts = 0;
            return Ok(Some(message));
        }
        self.so_far = Some(message);
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1::{Generation, Pool};

    fn whole(services: usize) -> WatchResponse {
        let service = |n| Service { namespace: "shop".to_owned(), name: format!("{n:0100}"), ..Service::default() };
        WatchResponse {
            generation: Some(Generation { epoch: "e".to_owned(), counter: 7 }),
            full: true,
            services: (0..services).map(service).collect(),
            removed: vec!["shop/gone".to_owned()],
            pools: vec![Pool::default()],
            ..WatchResponse::default()
        }
    }

    #[test]
    fn what_is_split_is_joined_again_and_only_at_the_last_part() {
        for (services, part_bytes, expected) in [(0, 1000, 1), (9, 1000, 1), (10, 1000, 2), (100, 1000, 12), (3, 1, 3)] {
            let parts = split(whole(services), part_bytes);
            assert_eq!(parts.len(), expected, "{services} services");
            let mut reassembly = Reassembly::default();
            // One value joins several changes.
            for _ in 0..2 {
                let (last, before) = parts.split_last().unwrap();
                for part in before {
                    assert_eq!(reassembly.add(part.clone()), Ok(None));
                }
                assert_eq!(reassembly.add(last.clone()), Ok(Some(whole(services))));
            }
        }
    }

    #[test]
    fn a_change_without_end_is_refused() {
        let mut reassembly = Reassembly::default();
        let part = WatchResponse { more: true, ..WatchResponse::default() };
        let results: Vec<_> = (0..=PARTS_MAX).map(|_| reassembly.add(part.clone())).collect();
        assert!(results[..PARTS_MAX].iter().all(|result| *result == Ok(None)));
        assert_eq!(results[PARTS_MAX], Err(TooManyParts));
    }

    /// A later version sends unknown fields, in a message and in a nested one.
    #[test]
    fn fields_of_a_later_version_are_ignored() {
        // Field 1000, a varint; field 1001, a text.
        let unknown = [0xc0, 0x3e, 0x07, 0xca, 0x3e, 0x02, b'h', b'i'];
        let service = Service { namespace: "shop".to_owned(), name: "web".to_owned(), ..Service::default() };
        let inner = [service.encode_to_vec(), unknown.to_vec()].concat();
        let length = u8::try_from(inner.len()).unwrap();
        let bytes = [&[0x1a, length][..], &inner, &unknown].concat();
        let read = WatchResponse::decode(&bytes[..]).unwrap();
        assert_eq!(read, WatchResponse { services: vec![service], ..WatchResponse::default() });
    }
}
