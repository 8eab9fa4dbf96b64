//! The numbers of a packet by which the state of its flow may change: sequence numbers of TCP, tags of SCTP.
//!
//! Not here: the changes that packets make.

use zerocopy::network_endian::U32;

use crate::flow::state::{Direction, Shift};
use crate::wire::{Address, Chunk, Headers, Sctp, Tcp, Transport, sctp_chunk, take, tcp_flags};

/// The numbers of a TCP segment, or of an SCTP packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Segment {
    /// Sequence number of its first byte. SCTP: the verification tag.
    pub sequence: u32,
    /// The acknowledgement number, whether or not the flag ACK is set. SCTP: the initiate tag of INIT and INIT ACK; of
    /// ABORT and SHUTDOWN COMPLETE the flag T, that the sender reflects a tag (RFC 9260 section 8.5.1); otherwise 0.
    pub acknowledgement: u32,
    /// The sequence number after it, which acknowledges its data, SYN and FIN. SCTP: 0.
    pub end: u32,
}

impl Segment {
    /// The numbers of a parsed frame; zeros if it is neither TCP nor SCTP.
    #[must_use]
    pub fn of<A: Address>(frame: &[u8], headers: &Headers<A>) -> Self {
        match headers.transport {
            Transport::Tcp { flags } => Self::of_tcp(frame, headers, flags),
            Transport::Sctp { .. } => frame.get(usize::from(headers.transport_offset)..).and_then(Self::of_sctp),
            _ => None,
        }
        .unwrap_or_default()
    }

    /// The numbers as the client knows them, by which flows keep numbers: the backend's include what the gateway has
    /// inserted.
    #[must_use]
    pub(crate) fn seen_by_client(self, shift: Option<&Shift>, direction: Direction) -> Self {
        match (shift, direction) {
            (Some(shift), Direction::ToClient) => {
                Self { acknowledgement: shift.numbers().client.to_sender(self.acknowledgement), ..self }
            }
            _ => self,
        }
    }

    /// The numbers of a packet in a direction as its receiver knows them.
    #[must_use]
    pub(crate) fn seen_by_receiver(self, shift: Option<&Shift>, direction: Direction) -> Self {
        match (shift, direction) {
            (Some(shift), Direction::ToBackend) => Self { sequence: shift.numbers().client.to_receiver(self.sequence), ..self },
            _ => self.seen_by_client(shift, direction),
        }
    }

    fn of_tcp<A: Address>(frame: &[u8], headers: &Headers<A>, flags: u8) -> Option<Self> {
        let (tcp, _) = frame.get(usize::from(headers.transport_offset)..).and_then(take::<Tcp>)?;
        let before = headers.transport_offset.wrapping_sub(headers.network_offset) + u16::from(tcp.data_offset >> 4) * 4;
        let data = u32::from(headers.packet_len.saturating_sub(before));
        let signs = u32::from(flags & tcp_flags::SYN != 0) + u32::from(flags & tcp_flags::FIN != 0);
        let (sequence, acknowledgement) = (tcp.sequence.get(), tcp.acknowledgement.get());
        Some(Self { sequence, acknowledgement, end: sequence.wrapping_add(data).wrapping_add(signs) })
    }

    fn of_sctp(packet: &[u8]) -> Option<Self> {
        let (sctp, chunks) = take::<Sctp>(packet)?;
        let (chunk, value) = take::<Chunk>(chunks)?;
        let acknowledgement = match chunk.kind {
            sctp_chunk::INIT | sctp_chunk::INIT_ACK => take::<U32>(value).map_or(0, |(tag, _)| tag.get()),
            sctp_chunk::ABORT | sctp_chunk::SHUTDOWN_COMPLETE => (chunk.flags & Chunk::REFLECTED).into(),
            _ => 0,
        };
        Some(Self { sequence: sctp.tag.get(), acknowledgement, end: 0 })
    }
}
