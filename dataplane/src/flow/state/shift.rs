//! Shifted flows: the gateway adds bytes of its own to a stream, so the numbers of the two ends differ from there on.
//!
//! [`NumberShift`] is what changes in the segments of a connection, whatever the reason: per side an offset of its
//! stream and one of its clock. [`Shift`] is the state of a flow whose backend gets a PROXY header in front of the
//! client's first byte. The header is repeated in front of whatever begins there until the backend has acknowledged it:
//! there is no timer and no copy of a packet (docs/internals/decisions/0166-the-header-is-repeated.md).
//!
//! **Invariant:** an acknowledgement that reaches the client never covers a byte that the client did not send, and of
//! a byte that the client sent neither the order nor the number of copies changes.
//!
//! Not here: the bytes of segments and of the header (`forward::rewrite::shift`).

use proto::ProxyProtocol;
use zerocopy::FromZeros;

use super::states::Direction;
use crate::wire::tcp_flags::{ACK, FIN, RST, SYN};

/// Bytes that the gateway has inserted into the stream of one side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamShift {
    /// Their number, modulo 2^32: what the receiver's numbers of the stream are ahead.
    pub offset: u32,
    /// The number of the first of them, while numbers before them or inside them may be seen.
    pub begins: Option<u32>,
}

impl StreamShift {
    /// The number by which the receiver knows a byte of the sender.
    #[must_use]
    pub const fn to_receiver(self, number: u32) -> u32 {
        number.wrapping_add(self.offset)
    }

    /// The number by which the sender knows a byte of the receiver. Inserted bytes are unknown to the sender: they get
    /// the number of the first byte behind them.
    #[must_use]
    pub const fn to_sender(self, number: u32) -> u32 {
        let Some(begins) = self.begins else { return number.wrapping_sub(self.offset) };
        let distance = number.wrapping_sub(begins);
        match distance {
            _ if distance < self.offset => begins,
            _ if distance > u32::MAX / 2 => number,
            _ => number.wrapping_sub(self.offset),
        }
    }
}

/// What changes in the segments of a connection: the streams of both sides, and the clocks of their timestamps
/// (RFC 7323), each as the other side sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NumberShift {
    /// The stream from the client to the backend.
    pub client: StreamShift,
    /// The stream from the backend to the client.
    pub backend: StreamShift,
    /// Added to the client's timestamps, subtracted from their echoes.
    pub client_clock: u32,
    /// The same for the backend's.
    pub backend_clock: u32,
}

impl NumberShift {
    /// The stream that segments in a direction carry.
    #[must_use]
    pub const fn carried(&self, direction: Direction) -> StreamShift {
        match direction {
            Direction::ToBackend => self.client,
            Direction::ToClient => self.backend,
        }
    }

    /// The stream that segments in a direction acknowledge.
    #[must_use]
    pub const fn acknowledged(&self, direction: Direction) -> StreamShift {
        self.carried(direction.opposite())
    }

    /// Added to the timestamp of segments in a direction, and subtracted from the echo in them.
    #[must_use]
    pub const fn clocks(&self, direction: Direction) -> ClockShift {
        match direction {
            Direction::ToBackend => ClockShift { added: self.client_clock, subtracted: self.backend_clock },
            Direction::ToClient => ClockShift { added: self.backend_clock, subtracted: self.client_clock },
        }
    }
}

/// The change of the timestamps of a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ClockShift {
    /// Added to the sender's timestamp.
    pub added: u32,
    /// Subtracted from the echo of the receiver's.
    pub subtracted: u32,
}

/// The fields of a TCP segment by which it is decided what becomes of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SegmentHead {
    /// See [`crate::wire::tcp_flags`].
    pub flags: u8,
    /// Sequence number.
    pub sequence: u32,
    /// Acknowledgement number, whether or not the flag is set.
    pub acknowledgement: u32,
    /// The window, not scaled.
    pub window: u16,
    /// Bytes of data.
    pub data_len: u16,
}

impl SegmentHead {
    const fn has(&self, flags: u8) -> bool {
        self.flags & flags != 0
    }
}

/// How far the header of a flow has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum HeaderStage {
    /// No packet has carried it yet.
    Owed,
    /// It was sent, and the backend has not acknowledged it.
    Sent,
    /// The backend has acknowledged it. Late packets may still be about it.
    Taken,
    /// The backend is so far beyond it that no packet is about it any more: only its length counts. The same of UDP,
    /// where each datagram has a header of its own.
    Settled,
}

impl HeaderStage {
    /// Its name in commands, which never changes.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Owed => "owed",
            Self::Sent => "sent",
            Self::Taken => "taken",
            Self::Settled => "settled",
        }
    }
}

/// What becomes of a packet of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientStep {
    /// Its numbers stay.
    Unchanged,
    /// The header becomes the first bytes of its data.
    Prefixed,
    /// Its numbers are shifted.
    Shifted,
    /// The header leaves by itself, then the packet with shifted numbers.
    BehindHeader,
    /// A RST without ACK, which cannot say what a header would have to: it leaves once for a backend that lacks the
    /// header, and once, with shifted numbers, for one that has it. Each ignores the other's.
    Twice,
}

/// What becomes of a packet of the backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendStep {
    /// It goes on with shifted numbers.
    Passes {
        /// By how much its window shrinks, not scaled, so that its right edge stays.
        window_less: u16,
        /// Its SACK blocks, which are about the header, become padding.
        without_sack: bool,
    },
    /// It says nothing but that the header is missing, which is none of the client's business.
    Consumed {
        /// Whether the header leaves again.
        is_repeated: bool,
    },
}

/// What a header needs that no packet of the client carries: the last that the client said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastSaid {
    /// Acknowledgement number.
    pub acknowledgement: u32,
    /// Window.
    pub window: u16,
}

/// The state of a flow whose backend gets a header: 16 bytes, which only packets of such flows read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromZeros)]
#[repr(C)]
pub struct Shift {
    /// The number of the header's first byte: the client's initial sequence number plus one.
    first: u32,
    /// Until it is taken, what the client said last.
    acknowledgement: u32,
    window: u16,
    /// Bytes of the header.
    header_len: u8,
    /// Stage (2 bits), version, whether the backend has sent data, scale of its windows (4 bits).
    bits: u8,
    /// When the header last left by itself for a packet that did not begin it, in ms.
    repeated_ms: u32,
}

const _: () = assert!(size_of::<Shift>() == 16);

const STAGE: u8 = 3;
const VERSION_2: u8 = 1 << 2;
const IS_ANSWERED: u8 = 1 << 3;
const SCALE_SHIFT: u32 = 4;

/// A flow repeats its header by itself at most this often: what a stranger sends in its client's name costs one more
/// packet in this time.
const REPEAT_MS: u32 = 10;
/// Acknowledgements beyond this many bytes settle a flow: half of what comparisons of numbers allow, and more than may
/// be under way (RFC 7323 section 2.3: windows are below 2^30).
const SETTLED_AT: u32 = 1 << 30;

impl Shift {
    /// For a connection that begins with this sequence number, or for datagrams.
    #[must_use]
    pub const fn new(version: ProxyProtocol, header_len: u8, stage: HeaderStage, initial_sequence: u32) -> Self {
        let version = match version {
            ProxyProtocol::V1 => 0,
            ProxyProtocol::V2 => VERSION_2,
        };
        Self {
            first: initial_sequence.wrapping_add(1),
            acknowledgement: 0,
            window: 0,
            header_len,
            bits: stage as u8 | version,
            repeated_ms: 0,
        }
    }

    /// The version of the header.
    #[must_use]
    pub const fn version(&self) -> ProxyProtocol {
        if self.bits & VERSION_2 == 0 { ProxyProtocol::V1 } else { ProxyProtocol::V2 }
    }

    /// Bytes of the header.
    #[must_use]
    pub const fn header_len(&self) -> u8 {
        self.header_len
    }

    /// How far it has come.
    #[must_use]
    pub const fn stage(&self) -> HeaderStage {
        match self.bits & STAGE {
            0 => HeaderStage::Owed,
            1 => HeaderStage::Sent,
            2 => HeaderStage::Taken,
            _ => HeaderStage::Settled,
        }
    }

    /// Whether the backend has the header: both directions then change by constants.
    #[must_use]
    pub const fn is_taken(&self) -> bool {
        matches!(self.stage(), HeaderStage::Taken | HeaderStage::Settled)
    }

    /// The number of the header's first byte.
    #[must_use]
    pub const fn first(&self) -> u32 {
        self.first
    }

    /// Whether a SYN with this number is that of the connection itself, which comes late: the client has gone on since.
    #[must_use]
    pub const fn is_late_syn(&self, sequence: u32) -> bool {
        matches!(self.stage(), HeaderStage::Sent | HeaderStage::Taken) && sequence.wrapping_add(1) == self.first
    }

    /// The last that the client said.
    #[must_use]
    pub const fn last_said(&self) -> LastSaid {
        LastSaid { acknowledgement: self.acknowledgement, window: self.window }
    }

    /// Sets the stage.
    fn enter(&mut self, stage: HeaderStage) {
        self.bits = self.bits & !STAGE | stage as u8;
    }

    /// What changes in segments now.
    #[must_use]
    pub fn numbers(&self) -> NumberShift {
        let offset = self.header_len.into();
        let client = match self.stage() {
            HeaderStage::Owed => StreamShift::default(),
            HeaderStage::Sent | HeaderStage::Taken => StreamShift { offset, begins: Some(self.first) },
            HeaderStage::Settled => StreamShift { offset, begins: None },
        };
        NumberShift { client, ..NumberShift::default() }
    }

    /// Decides on a packet of the client. `has_room`: it may grow by the header.
    pub fn of_client(&mut self, head: &SegmentHead, has_room: bool, now_ms: u32) -> ClientStep {
        let stage = self.stage();
        if head.has(SYN) {
            return ClientStep::Unchanged;
        }
        match stage {
            HeaderStage::Taken | HeaderStage::Settled => return ClientStep::Shifted,
            // Receivers discard what has no ACK (RFC 9293 section 3.10.7.4).
            HeaderStage::Owed if head.has(RST) || !head.has(ACK) => return ClientStep::Unchanged,
            HeaderStage::Sent if head.has(RST) && !head.has(ACK) => return ClientStep::Twice,
            HeaderStage::Sent if head.has(RST) => return ClientStep::BehindHeader,
            HeaderStage::Sent if !head.has(ACK) => return ClientStep::Shifted,
            HeaderStage::Owed | HeaderStage::Sent => {}
        }
        (self.acknowledgement, self.window) = (head.acknowledgement, head.window);
        self.enter(HeaderStage::Sent);
        let is_first = head.sequence == self.first;
        if is_first && has_room && (head.data_len > 0 || !head.has(FIN)) {
            ClientStep::Prefixed
        } else if stage == HeaderStage::Owed || self.may_repeat(now_ms) {
            ClientStep::BehindHeader
        } else {
            ClientStep::Shifted
        }
    }

    /// Decides on a packet of the backend. `scale`: that of its windows, which a SYN-ACK says.
    pub fn of_backend(&mut self, head: &SegmentHead, scale: u8, now_ms: u32) -> BackendStep {
        let passes = |window_less, without_sack| BackendStep::Passes { window_less, without_sack };
        if head.data_len > 0 {
            self.bits |= IS_ANSWERED;
        }
        if head.flags & (SYN | ACK) == SYN | ACK {
            return passes(self.answered_syn(head, scale), false);
        }
        if !head.has(ACK) || self.stage() == HeaderStage::Owed || self.stage() == HeaderStage::Settled {
            return passes(0, false);
        }
        let (distance, header_len) = (head.acknowledgement.wrapping_sub(self.first), u32::from(self.header_len));
        if distance >= header_len {
            let is_beyond = distance <= u32::MAX / 2;
            match self.stage() {
                HeaderStage::Taken if is_beyond && distance >= SETTLED_AT => self.enter(HeaderStage::Settled),
                HeaderStage::Sent if is_beyond => self.enter(HeaderStage::Taken),
                _ => {}
            }
            return passes(0, false);
        }
        if self.stage() == HeaderStage::Sent && head.data_len == 0 && !head.has(SYN | FIN | RST) {
            return BackendStep::Consumed { is_repeated: self.may_repeat(now_ms) };
        }
        // Bytes of the header that the window still has room for are no room for the client.
        let units = (header_len - distance).div_ceil(1 << (self.bits >> SCALE_SHIFT));
        passes(u16::try_from(units).unwrap_or(u16::MAX), true)
    }

    /// The backend accepts a connection. Returns by how much its window shrinks: the header is in it.
    fn answered_syn(&mut self, head: &SegmentHead, scale: u8) -> u16 {
        if head.acknowledgement != self.first {
            self.first = head.acknowledgement;
            self.enter(HeaderStage::Owed);
            self.bits &= !IS_ANSWERED;
        }
        // RFC 7323 section 2.3: no scale is above 14.
        self.bits = self.bits & ((1 << SCALE_SHIFT) - 1) | scale.min(14) << SCALE_SHIFT;
        let header_len = self.header_len.into();
        if head.window > header_len { header_len } else { 0 }
    }

    /// Whether this packet of the backend refuses the header: it closes or resets a connection before the backend has
    /// sent a byte of data. True once.
    pub fn is_refusal(&mut self, head: &SegmentHead) -> bool {
        let is_refusal = head.has(FIN | RST) && self.bits & IS_ANSWERED == 0 && self.stage() != HeaderStage::Owed;
        if is_refusal {
            self.bits |= IS_ANSWERED;
        }
        is_refusal
    }

    /// Whether the header may leave by itself now; notes that it does.
    fn may_repeat(&mut self, now_ms: u32) -> bool {
        let may = now_ms.wrapping_sub(self.repeated_ms) >= REPEAT_MS;
        if may {
            self.repeated_ms = now_ms;
        }
        may
    }

    /// The bytes by which a process saves it for the next one.
    #[must_use]
    pub fn saved(&self) -> [u8; 16] {
        let mut saved = [0; 16];
        saved[..4].copy_from_slice(&self.first.to_le_bytes());
        saved[4..8].copy_from_slice(&self.acknowledgement.to_le_bytes());
        saved[8..10].copy_from_slice(&self.window.to_le_bytes());
        saved[10] = self.header_len;
        saved[11] = self.bits;
        saved
    }

    /// The same state from [`Shift::saved`]. The header may leave by itself at once.
    #[must_use]
    pub const fn restored(saved: [u8; 16]) -> Self {
        let [a, b, c, d, e, f, g, h, i, j, header_len, bits, ..] = saved;
        Self {
            first: u32::from_le_bytes([a, b, c, d]),
            acknowledgement: u32::from_le_bytes([e, f, g, h]),
            window: u16::from_le_bytes([i, j]),
            header_len,
            bits,
            repeated_ms: 0,
        }
    }
}

#[cfg(test)]
mod tests;
