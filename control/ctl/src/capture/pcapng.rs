//! Packets as pcapng (draft-ietf-opsawg-pcapng) for Wireshark: an interface per port and per Linux twin, a frame as it
//! arrived, and the frames that left because of it. Comments say what the gateway did with the packet.
//!
//! Invariant: what was written can be read at any time; each block is written whole.

use std::borrow::Cow;
use std::io::{self, Write};
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::{DataLink, PcapError};
use proto::v1;

/// Times are in nanoseconds: 10^-9 s.
const NANOSECONDS: u8 = 9;
/// The direction in `epb_flags`.
const INBOUND: u32 = 1;
const OUTBOUND: u32 = 2;

/// A pcapng file that is written.
pub(super) struct PacketFile<W: Write> {
    file: PcapNgWriter<W>,
}

impl<W: Write> PacketFile<W> {
    /// Begins a file with these interfaces.
    pub(super) fn new(to: W, interfaces: &[String], snaplen: u32) -> io::Result<Self> {
        let mut file = PcapNgWriter::new(to).map_err(io_error)?;
        for name in interfaces {
            let options =
                vec![InterfaceDescriptionOption::IfName(Cow::Borrowed(name)), InterfaceDescriptionOption::IfTsResol(NANOSECONDS)];
            let block = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen, options };
            file.write_pcapng_block(block).map_err(io_error)?;
        }
        file.get_mut().flush()?;
        Ok(Self { file })
    }

    /// Writes the frames of a packet. The frame of one that had waited was written when it arrived.
    pub(super) fn write(&mut self, packet: &v1::CapturedPacket) -> io::Result<()> {
        let comment = packet.packet.as_ref().map(comment).unwrap_or_default();
        let is_known = packet.packet.as_ref().is_some_and(|packet| packet.from == "waited") && !packet.sent.is_empty();
        for frame in packet.received.iter().filter(|_| !is_known) {
            self.frame(packet.time_ns, frame, INBOUND, &comment)?;
        }
        for frame in &packet.sent {
            self.frame(packet.time_ns, frame, OUTBOUND, &comment)?;
        }
        Ok(())
    }

    /// Passes what is buffered on.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        self.file.get_mut().flush()
    }

    fn frame(&mut self, time_ns: u64, frame: &v1::CapturedFrame, direction: u32, comment: &str) -> io::Result<()> {
        let block = EnhancedPacketBlock {
            interface_id: frame.interface,
            timestamp: Duration::from_nanos(time_ns),
            original_len: frame.frame_len,
            data: Cow::Borrowed(&frame.bytes),
            options: vec![EnhancedPacketOption::Comment(Cow::Borrowed(comment)), EnhancedPacketOption::Flags(direction)],
        };
        self.file.write_pcapng_block(block).map(drop).map_err(io_error)
    }
}

fn io_error(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

/// What the gateway did with a packet: `verdict=drop reason=no_flow service=default/web ...`.
fn comment(packet: &v1::TracedPacket) -> String {
    let worker = packet.worker.to_string();
    let shift = if packet.proxy_header.is_empty() { String::new() } else { packet.shift.to_string() };
    let values = [
        ("verdict", &packet.verdict),
        ("reason", &packet.reason),
        ("service", &packet.service),
        ("frontend", &packet.frontend),
        ("backend", &packet.backend),
        ("flow", &packet.flow),
        ("worker", &worker),
        ("proxy_header", &packet.proxy_header),
        ("shift", &shift),
    ];
    let known = values.into_iter().filter(|(_, value)| !value.is_empty());
    known.map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use pcap_file::pcapng::{Block, PcapNgReader};

    use super::*;

    fn frame(interface: u32, byte: u8) -> v1::CapturedFrame {
        v1::CapturedFrame { interface, frame_len: 1500, bytes: vec![byte; 61] }
    }

    #[test]
    fn a_file_has_interfaces_directions_and_comments() {
        let traced = |from: &str, verdict: &str, reason: &str| v1::TracedPacket {
            from: from.into(),
            verdict: verdict.into(),
            reason: reason.into(),
            service: "default/web".into(),
            flow: "none".into(),
            ..Default::default()
        };
        let packet = |traced, sent| v1::CapturedPacket {
            time_ns: 1_700_000_000_123_456_789,
            packet: Some(traced),
            received: Some(frame(0, 1)),
            sent,
        };
        let mut bytes = Vec::new();
        let mut file = PacketFile::new(&mut bytes, &["uplink".to_owned(), "linux-uplink".to_owned()], 65_535).unwrap();
        file.write(&packet(traced("port", "linux", ""), vec![frame(1, 2)])).unwrap();
        file.write(&packet(traced("port", "drop", "no_flow"), Vec::new())).unwrap();
        file.write(&packet(traced("waited", "forward", ""), vec![frame(0, 3)])).unwrap();
        drop(file);
        let mut reader = PcapNgReader::new(bytes.as_slice()).unwrap();
        let mut found = Vec::new();
        while let Some(block) = reader.next_block() {
            if let Block::EnhancedPacket(block) = block.unwrap() {
                assert_eq!(block.timestamp, Duration::from_nanos(1_700_000_000_123_456_789));
                assert_eq!((block.original_len, block.data.len()), (1500, 61));
                let [EnhancedPacketOption::Comment(comment), EnhancedPacketOption::Flags(flags)] = &block.options[..] else {
                    panic!("{:?}", block.options)
                };
                found.push((block.interface_id, *flags, comment.to_string()));
            }
        }
        let linux = "verdict=linux service=default/web flow=none worker=0".to_owned();
        let expected = [
            (0, INBOUND, linux.clone()),
            (1, OUTBOUND, linux),
            (0, INBOUND, "verdict=drop reason=no_flow service=default/web flow=none worker=0".to_owned()),
            (0, OUTBOUND, "verdict=forward service=default/web flow=none worker=0".to_owned()),
        ];
        assert_eq!(found, expected);
    }
}
