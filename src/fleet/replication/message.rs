//! Messages between the two sides of a session, before they are sealed.
//!
//! The *sender* owns flows and sends their changes, the *follower* keeps copies of them. News is in numbered batches. A
//! copy of all flows that last is in pages, each with the number of the batch that was next before its flows were listed:
//! its mark.
//!
//! **Invariant:** reading never panics; a message of an unknown kind reads as `None`. Not here: sealing (`seal`).

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PartnerMessage<'a> {
    /// By UDP from the sender, or by TCP when the follower asked for it again: a batch and its number.
    Batch(u64, &'a [u8]),
    /// By UDP from the sender: the number of the next batch.
    Heartbeat(u64),
    /// By UDP from the follower: every batch before this number has arrived; how many copies have begun and are complete.
    Acknowledge(u64, u32, u32),
    /// By TCP from the sender: copy number n begins when the follower has acknowledged it; the number of the first batch of
    /// the session.
    CopyBegins(u32, u64),
    /// By TCP from the sender: a page of a copy, and its mark.
    Page(u64, &'a [u8]),
    /// By TCP from the sender: copy number n is complete.
    CopyEnds(u32),
    /// By TCP from the follower: it misses this batch and as many after it.
    Missing(u64, u32),
    /// By TCP from the sender: it has a missing batch no longer.
    Gone,
}

const BATCH: u8 = 1;
const HEARTBEAT: u8 = 2;
const ACKNOWLEDGE: u8 = 3;
const COPY_BEGINS: u8 = 4;
const PAGE: u8 = 5;
const COPY_ENDS: u8 = 6;
const MISSING: u8 = 7;
const GONE: u8 = 8;

/// Bytes of a message beside its records, at most: kind and number.
pub(super) const MESSAGE_HEAD: usize = 1 + 8;

impl<'a> PartnerMessage<'a> {
    /// Its bytes.
    pub(super) fn encode(&self) -> Vec<u8> {
        let parts = |kind: u8, parts: [&[u8]; 3]| [&[kind][..], parts[0], parts[1], parts[2]].concat();
        match *self {
            Self::Batch(number, records) => parts(BATCH, [&number.to_be_bytes(), records, &[]]),
            Self::Heartbeat(next) => parts(HEARTBEAT, [&next.to_be_bytes(), &[], &[]]),
            Self::Acknowledge(next, begun, complete) => {
                parts(ACKNOWLEDGE, [&next.to_be_bytes(), &begun.to_be_bytes(), &complete.to_be_bytes()])
            }
            Self::CopyBegins(copy, first) => parts(COPY_BEGINS, [&copy.to_be_bytes(), &first.to_be_bytes(), &[]]),
            Self::Page(mark, records) => parts(PAGE, [&mark.to_be_bytes(), records, &[]]),
            Self::CopyEnds(copy) => parts(COPY_ENDS, [&copy.to_be_bytes(), &[], &[]]),
            Self::Missing(first, count) => parts(MISSING, [&first.to_be_bytes(), &count.to_be_bytes(), &[]]),
            Self::Gone => vec![GONE],
        }
    }

    /// Reads a message.
    pub(super) fn decode(bytes: &'a [u8]) -> Option<Self> {
        let (kind, rest) = bytes.split_first()?;
        match *kind {
            BATCH => wide(rest).map(|(number, records)| Self::Batch(number, records)),
            HEARTBEAT => Some(Self::Heartbeat(wide(rest)?.0)),
            ACKNOWLEDGE => {
                let (next, rest) = wide(rest)?;
                let (begun, rest) = narrow(rest)?;
                Some(Self::Acknowledge(next, begun, narrow(rest)?.0))
            }
            COPY_BEGINS => {
                let (copy, rest) = narrow(rest)?;
                Some(Self::CopyBegins(copy, wide(rest)?.0))
            }
            PAGE => wide(rest).map(|(mark, records)| Self::Page(mark, records)),
            COPY_ENDS => Some(Self::CopyEnds(narrow(rest)?.0)),
            MISSING => {
                let (first, rest) = wide(rest)?;
                Some(Self::Missing(first, narrow(rest)?.0))
            }
            GONE => Some(Self::Gone),
            _ => None,
        }
    }
}

fn wide(bytes: &[u8]) -> Option<(u64, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u64::from_be_bytes(*number), rest))
}

fn narrow(bytes: &[u8]) -> Option<(u32, &[u8])> {
    bytes.split_first_chunk().map(|(number, rest)| (u32::from_be_bytes(*number), rest))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_read_back_and_unknown_or_short_ones_do_not() {
        let all = [
            PartnerMessage::Batch(7, b"records"),
            PartnerMessage::Heartbeat(8),
            PartnerMessage::Acknowledge(9, 2, 1),
            PartnerMessage::CopyBegins(3, 12),
            PartnerMessage::Page(10, b""),
            PartnerMessage::CopyEnds(3),
            PartnerMessage::Missing(11, 4),
            PartnerMessage::Gone,
        ];
        for message in all {
            let bytes = message.encode();
            assert_eq!(PartnerMessage::decode(&bytes), Some(message));
            let head = if matches!(message, PartnerMessage::Batch(..)) { MESSAGE_HEAD } else { bytes.len() };
            assert_eq!(PartnerMessage::decode(&bytes[..head - 1]), None, "{message:?}");
        }
        assert_eq!(PartnerMessage::decode(&[99, 1, 2, 3]), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Some(message) = PartnerMessage::decode(&bytes) {
                prop_assert!(message.encode().len() <= bytes.len());
            }
        }
    }
}
