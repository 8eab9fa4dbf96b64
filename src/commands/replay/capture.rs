//! Capture files: pcap and pcapng in, merged by time; pcap out.
//!
//! Invariant: the times in the merged stream never decrease. Files are read packet by packet, never as a whole.
//! Deliberately not here: processing the packets.

use std::fs::File;
use std::io::{self, BufWriter, Cursor, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use dataplane::PortIndex;
use pcap_file::pcap::{PcapHeader, PcapPacket, PcapReader, PcapWriter};
use pcap_file::pcapng::PcapNgReader;
use pcap_file::pcapng::blocks::Block;
use pcap_file::pcapng::blocks::interface_description::{InterfaceDescriptionBlock, InterfaceDescriptionOption};
use pcap_file::{DataLink, Endianness, PcapError, TsResolution};

/// Maximum captured length of a packet, in bytes, the same as tcpdump's.
const SNAPLEN: u32 = 262_144;
/// First bytes of a pcapng file, in either byte order (draft-ietf-opsawg-pcapng section 4.1).
const PCAPNG_MAGIC: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];

/// Why a capture file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// It cannot be opened.
    #[error("cannot open {}: {error}; --in names a readable capture file", file.display())]
    Unreadable {
        /// Which.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It cannot be created.
    #[error("cannot create {}: {error}", file.display())]
    Uncreatable {
        /// Which.
        file: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// It is not a capture file, or is damaged.
    #[error("{}: after {packets} packets: expected pcap or pcapng, found: {error}; a cut file can be repaired with `editcap`", file.display())]
    Broken {
        /// Which.
        file: PathBuf,
        /// Number of packets read before the error.
        packets: u64,
        /// What is wrong.
        error: PcapError,
    },
    /// Its packets are not Ethernet frames.
    #[error("{}: expected Ethernet frames, found link type {found:?}; capture on an Ethernet interface, not on `any`", file.display())]
    LinkType {
        /// Which.
        file: PathBuf,
        /// Its link type.
        found: DataLink,
    },
    /// A packet was not captured completely.
    #[error("{}: packet {packet}: only {captured} of {original} bytes were captured; capture with `tcpdump -s 0`", file.display())]
    Truncated {
        /// Which.
        file: PathBuf,
        /// The packet, counted from 1.
        packet: u64,
        /// Captured bytes.
        captured: usize,
        /// Original bytes.
        original: u32,
    },
    /// It cannot be written.
    #[error("cannot write {}: {error}", file.display())]
    Write {
        /// Which.
        file: PathBuf,
        /// Why.
        error: PcapError,
    },
}

impl CaptureError {
    /// Whether a capture that was given is unusable, rather than the output.
    pub(super) const fn is_of_input(&self) -> bool {
        match self {
            Self::Unreadable { .. } | Self::Broken { .. } | Self::LinkType { .. } | Self::Truncated { .. } => true,
            Self::Uncreatable { .. } | Self::Write { .. } => false,
        }
    }
}

/// A captured frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    /// ns since 1970.
    pub(super) time_ns: u64,
    pub(super) bytes: Vec<u8>,
}

type Bytes = io::Chain<Cursor<[u8; 4]>, File>;

enum Format {
    Pcap(Box<PcapReader<Bytes>>),
    PcapNg(Box<PcapNgReader<Bytes>>),
}

/// A packet from a file, before validation.
struct Raw {
    frame: Frame,
    original_len: u32,
}

/// A capture file open for reading.
struct Capture {
    file: PathBuf,
    format: Format,
    packets: u64,
    last_ns: u64,
}

impl Capture {
    fn open(file: &Path) -> Result<Self, CaptureError> {
        let cannot = |error| CaptureError::Unreadable { file: file.to_owned(), error };
        let mut opened = File::open(file).map_err(cannot)?;
        let mut magic = [0; 4];
        opened.read_exact(&mut magic).map_err(cannot)?;
        let bytes = Cursor::new(magic).chain(opened);
        let broken = |error| CaptureError::Broken { file: file.to_owned(), packets: 0, error };
        let format = if magic == PCAPNG_MAGIC {
            Format::PcapNg(Box::new(PcapNgReader::new(bytes).map_err(broken)?))
        } else {
            let reader = PcapReader::new(bytes).map_err(broken)?;
            check_link_type(file, reader.header().datalink)?;
            Format::Pcap(Box::new(reader))
        };
        Ok(Self { file: file.to_owned(), format, packets: 0, last_ns: 0 })
    }

    fn next(&mut self) -> Result<Option<Frame>, CaptureError> {
        let raw = match &mut self.format {
            Format::Pcap(reader) => next_pcap(reader).map_err(|error| CaptureError::Broken {
                file: self.file.clone(),
                packets: self.packets,
                error,
            })?,
            Format::PcapNg(reader) => next_pcapng(reader, &self.file, self.packets, self.last_ns)?,
        };
        let Some(Raw { frame, original_len }) = raw else { return Ok(None) };
        self.packets += 1;
        self.last_ns = frame.time_ns;
        let captured = frame.bytes.len();
        if u32::try_from(captured).is_ok_and(|captured| captured < original_len) {
            return Err(CaptureError::Truncated {
                file: self.file.clone(),
                packet: self.packets,
                captured,
                original: original_len,
            });
        }
        Ok(Some(frame))
    }
}

fn check_link_type(file: &Path, found: DataLink) -> Result<(), CaptureError> {
    match found {
        DataLink::ETHERNET => Ok(()),
        _ => Err(CaptureError::LinkType { file: file.to_owned(), found }),
    }
}

/// Raw packets, because the validating reader refuses files whose snap length is 0 or less than the captured length.
fn next_pcap(reader: &mut PcapReader<Bytes>) -> Result<Option<Raw>, PcapError> {
    let unit_ns = if reader.header().ts_resolution == TsResolution::NanoSecond { 1 } else { 1_000 };
    let Some(packet) = reader.next_raw_packet().transpose()? else { return Ok(None) };
    let time_ns = u64::from(packet.ts_sec) * 1_000_000_000 + u64::from(packet.ts_frac) * unit_ns;
    Ok(Some(Raw { frame: Frame { time_ns, bytes: packet.data.into_owned() }, original_len: packet.orig_len }))
}

/// The next packet among the blocks. A packet without a time gets that of the previous one.
fn next_pcapng(reader: &mut PcapNgReader<Bytes>, file: &Path, packets: u64, last_ns: u64) -> Result<Option<Raw>, CaptureError> {
    let broken = |error| CaptureError::Broken { file: file.to_owned(), packets, error };
    loop {
        let Some(block) = reader.next_block().transpose().map_err(broken)?.map(Block::into_owned) else { return Ok(None) };
        let (interface, units, original_len, data) = match block {
            // The reader treats the time as nanoseconds regardless of the interface's resolution.
            Block::EnhancedPacket(p) => (p.interface_id, Some(p.timestamp.as_nanos()), p.original_len, p.data),
            Block::Packet(p) => (p.interface_id.into(), Some(p.timestamp.into()), p.original_len, p.data),
            Block::SimplePacket(p) => (0, None, p.original_len, p.data),
            _ => continue,
        };
        let missing = || broken(PcapError::InvalidInterfaceId(interface));
        let interface = usize::try_from(interface).ok().and_then(|i| reader.interfaces().get(i)).ok_or_else(missing)?;
        check_link_type(file, interface.linktype)?;
        let time_ns = units.map_or(last_ns, |units| time_ns(units, interface));
        let mut bytes = data.into_owned();
        if units.is_none() {
            // A simple packet block has no captured length; its data is padded to 32 bits.
            bytes.truncate(usize::try_from(original_len).unwrap_or(usize::MAX));
        }
        return Ok(Some(Raw { frame: Frame { time_ns, bytes }, original_len }));
    }
}

/// Converts a time in the interface's units to ns; the default unit is a microsecond (`if_tsresol`, `if_tsoffset`).
fn time_ns(units: u128, interface: &InterfaceDescriptionBlock<'_>) -> u64 {
    let mut per_second: u128 = 1_000_000;
    let mut offset_s: u64 = 0;
    for option in &interface.options {
        match option {
            InterfaceDescriptionOption::IfTsResol(r) if r & 0x80 != 0 => per_second = 1 << (r & 0x7f).min(63),
            InterfaceDescriptionOption::IfTsResol(r) => per_second = 10_u128.pow(u32::from(*r).min(18)),
            InterfaceDescriptionOption::IfTsOffset(seconds) => offset_s = *seconds,
            _ => {}
        }
    }
    let ns = units * 1_000_000_000 / per_second + u128::from(offset_s) * 1_000_000_000;
    u64::try_from(ns).unwrap_or(u64::MAX)
}

/// Capture files merged by time, and by their order on the command line for equal times.
pub(super) struct MergedCaptures {
    inputs: Vec<(PortIndex, Capture, Option<Frame>)>,
    clock_ns: u64,
}

impl MergedCaptures {
    pub(super) fn open<'a>(files: impl IntoIterator<Item = (PortIndex, &'a Path)>) -> Result<Self, CaptureError> {
        let open = |(port, file): (PortIndex, &Path)| {
            let mut capture = Capture::open(file)?;
            let first = capture.next()?;
            Ok((port, capture, first))
        };
        Ok(Self { inputs: files.into_iter().map(open).collect::<Result<_, CaptureError>>()?, clock_ns: 0 })
    }

    /// The next frame and its port. A time that decreases is replaced by that of the previous frame.
    pub(super) fn next(&mut self) -> Result<Option<(PortIndex, Frame)>, CaptureError> {
        let first = self.inputs.iter_mut().filter(|(_, _, frame)| frame.is_some());
        let first = first.min_by_key(|(_, _, frame)| frame.as_ref().map(|f| f.time_ns));
        let Some((port, capture, slot)) = first else { return Ok(None) };
        let following = capture.next()?;
        let Some(mut frame) = std::mem::replace(slot, following) else { return Ok(None) };
        self.clock_ns = self.clock_ns.max(frame.time_ns);
        frame.time_ns = self.clock_ns;
        Ok(Some((*port, frame)))
    }
}

/// A pcap file open for writing, with times in ns.
pub(super) struct CaptureWriter {
    file: PathBuf,
    writer: PcapWriter<BufWriter<File>>,
}

impl CaptureWriter {
    pub(super) fn create(file: PathBuf) -> Result<Self, CaptureError> {
        let created = match File::create(&file) {
            Ok(created) => created,
            Err(error) => return Err(CaptureError::Uncreatable { file, error }),
        };
        let header = PcapHeader {
            snaplen: SNAPLEN,
            datalink: DataLink::ETHERNET,
            ts_resolution: TsResolution::NanoSecond,
            endianness: Endianness::Little,
            ..PcapHeader::default()
        };
        match PcapWriter::with_header(BufWriter::new(created), header) {
            Ok(writer) => Ok(Self { file, writer }),
            Err(error) => Err(CaptureError::Write { file, error }),
        }
    }

    pub(super) fn write(&mut self, time_ns: u64, frame: &[u8]) -> Result<(), CaptureError> {
        let len = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        let written = self.writer.write_packet(&PcapPacket::new(Duration::from_nanos(time_ns), len, frame));
        written.map(drop).map_err(|error| CaptureError::Write { file: self.file.clone(), error })
    }

    /// Flushes the buffer.
    pub(super) fn finish(self) -> Result<(), CaptureError> {
        let flushed = self.writer.into_writer().flush();
        flushed.map_err(|error| CaptureError::Write { file: self.file, error: PcapError::IoError(error) })
    }
}

#[cfg(test)]
mod tests {
    use pcap_file::pcapng::PcapNgWriter;
    use pcap_file::pcapng::blocks::enhanced_packet::EnhancedPacketBlock;

    use super::*;

    fn pcap(dir: &Path, name: &str, frames: &[(u64, &[u8])]) -> PathBuf {
        let file = dir.join(name);
        let mut output = CaptureWriter::create(file.clone()).unwrap();
        for (time_ns, bytes) in frames {
            output.write(*time_ns, bytes).unwrap();
        }
        output.finish().unwrap();
        file
    }

    fn all(files: &[(u8, &Path)]) -> Result<Vec<(u8, u64, Vec<u8>)>, CaptureError> {
        let mut merged = MergedCaptures::open(files.iter().map(|(port, file)| (PortIndex(*port), *file)))?;
        let mut found = Vec::new();
        while let Some((port, frame)) = merged.next()? {
            found.push((port.0, frame.time_ns, frame.bytes));
        }
        Ok(found)
    }

    #[test]
    fn files_merge_by_time_and_then_by_their_order() {
        let dir = tempfile::tempdir().unwrap();
        let a = pcap(dir.path(), "a", &[(10, b"a1"), (30, b"a2"), (30, b"a3")]);
        let b = pcap(dir.path(), "b", &[(20, b"b1"), (30, b"b2"), (1_700_000_000_000_000_001, b"b3")]);
        let found = all(&[(1, &b), (0, &a)]).unwrap();
        let expected: [(u8, u64, &[u8]); 6] = [
            (0, 10, b"a1"),
            (1, 20, b"b1"),
            (1, 30, b"b2"),
            (0, 30, b"a2"),
            (0, 30, b"a3"),
            (1, 1_700_000_000_000_000_001, b"b3"),
        ];
        assert_eq!(found, expected.map(|(port, time, bytes)| (port, time, bytes.to_vec())));
    }

    #[test]
    fn time_never_goes_back() {
        let dir = tempfile::tempdir().unwrap();
        let a = pcap(dir.path(), "a", &[(50, b"1"), (20, b"2"), (60, b"3")]);
        let times: Vec<u64> = all(&[(0, &a)]).unwrap().into_iter().map(|(_, time, _)| time).collect();
        assert_eq!(times, [50, 50, 60]);
    }

    #[test]
    fn microseconds_are_read_as_such() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("us.pcap");
        let mut writer = PcapWriter::new(File::create(&file).unwrap()).unwrap();
        writer.write_packet(&PcapPacket::new(Duration::from_micros(1_000_007), 3, b"abc")).unwrap();
        drop(writer);
        assert_eq!(all(&[(0, &file)]).unwrap(), [(0, 1_000_007_000, b"abc".to_vec())]);
    }

    #[test]
    fn pcapng_times_go_by_the_resolution_of_their_interface() {
        let resolution = InterfaceDescriptionOption::IfTsResol;
        let rows = [
            ("microseconds by default", vec![], 7_000_000),
            ("microseconds", vec![resolution(6)], 7_000_000),
            ("nanoseconds", vec![resolution(9)], 7_000),
            ("milliseconds and an offset", vec![resolution(3), InterfaceDescriptionOption::IfTsOffset(2)], 9_000_000_000),
            ("1/512 s", vec![resolution(0x89)], 13_671_875_000),
        ];
        for (sentence, options, time_ns) in rows {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("x.pcapng");
            let mut writer = PcapNgWriter::new(File::create(&file).unwrap()).unwrap();
            let interface = InterfaceDescriptionBlock { linktype: DataLink::ETHERNET, snaplen: 0, options };
            writer.write_pcapng_block(interface).unwrap();
            let packet = EnhancedPacketBlock {
                interface_id: 0,
                timestamp: Duration::from_nanos(7_000),
                original_len: 5,
                data: b"hello".as_slice().into(),
                options: vec![],
            };
            writer.write_pcapng_block(packet).unwrap();
            drop(writer);
            assert_eq!(all(&[(0, &file)]).unwrap(), [(0, time_ns, b"hello".to_vec())], "{sentence}");
        }
    }

    #[test]
    fn a_capture_that_cannot_be_replayed_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let message = |file: &Path| all(&[(0, file)]).unwrap_err().to_string();
        assert!(message(&dir.path().join("none")).contains("cannot open"));

        let file = dir.path().join("text");
        std::fs::write(&file, b"no capture, but a text of some length").unwrap();
        assert!(message(&file).contains("expected pcap or pcapng"), "{}", message(&file));

        let file = dir.path().join("cooked");
        let header = PcapHeader { datalink: DataLink::LINUX_SLL, ..PcapHeader::default() };
        drop(PcapWriter::with_header(File::create(&file).unwrap(), header).unwrap());
        assert!(message(&file).contains("expected Ethernet frames, found link type LINUX_SLL"), "{}", message(&file));

        let file = dir.path().join("short");
        let mut writer = PcapWriter::new(File::create(&file).unwrap()).unwrap();
        writer.write_packet(&PcapPacket::new(Duration::ZERO, 100, b"only this")).unwrap();
        drop(writer);
        assert!(message(&file).contains("packet 1: only 9 of 100 bytes"), "{}", message(&file));

        let whole = pcap(dir.path(), "cut", &[(1, b"first"), (2, b"second")]);
        let bytes = std::fs::read(&whole).unwrap();
        std::fs::write(&whole, &bytes[..bytes.len() - 2]).unwrap();
        assert!(message(&whole).contains("after 1 packets"), "{}", message(&whole));
    }
}
