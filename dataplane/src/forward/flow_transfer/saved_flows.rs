//! The flows of a gateway as bytes, from one process to the next: their format, and its checks.
//!
//! A header with a checksum over everything, then one part for each worker that saved. A part names backends by
//! Service, protocol and address, because slots mean nothing in another process, and gives times as ages. All numbers
//! are little-endian.
//!
//! **Invariant:** [`SavedFlows::read`] accepts only bytes that this version, or a version before, wrote since the
//! machine started, complete and unchanged. Reading never panics, whatever the bytes are.
//!
//! Not here: the choice of flows that are saved, their restoration in the next process (`restore`), and files.

use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use proto::{Protocol, ServiceName};

use crate::flow::{BackendId, Flow, FlowMode, FlowState, PoolId, Shift, Tick, VerificationTags};
use crate::stats::FrontendNumber;
use crate::wire::protocol::SCTP;
use crate::wire::{Address, split_mix};

const MAGIC: [u8; 8] = *b"sluiceFL";
/// To be increased with every change of the format, of [`FlowState`] or of [`FlowMode`].
const FORMAT: u32 = 4;
/// The oldest format that is read. Before format 4 no flow had a shift, and in format 2 there were fewer states, with the
/// same numbers.
const FORMAT_OLDEST: u32 = 2;
/// Sections of a part: backends, resting ports, flows of both families, clients, and, from format 4 on, shifts of the
/// flows of both families.
const SECTIONS: usize = 7;
/// Their number in the formats before.
const SECTIONS_BEFORE_SHIFTS: usize = 5;
/// Bytes of a shift.
const SHIFT_LEN: usize = 16;
/// Bytes of the header: magic, format, number of parts, seed, boot, time, whether the state was confirmed, length,
/// checksum.
const HEADER: usize = 72;
/// Position of the checksum in the header.
const CHECKSUM: usize = HEADER - 8;
/// Parts are padded to this many bytes, so that the checksum adds whole words.
const WORD: usize = 8;
/// Maximum number of parts: more than there may be workers.
const PARTS_MAX: u32 = 4096;

/// When flows were saved, in terms that mean the same to every process of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SavedAt {
    /// The machine's present boot: the kernel's random `boot_id`.
    pub boot: [u8; 16],
    /// Time since boot, ns, suspended time included.
    pub boottime_ns: u64,
}

/// Why saved flows are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedFlowsError {
    /// Other bytes.
    #[error("it does not begin as a file of saved flows does")]
    Magic,
    /// Another version of the program.
    #[error("expected format {FORMAT}, found {found}: another version of sluiced wrote it")]
    Format {
        /// Its format.
        found: u32,
    },
    /// Cut off, or longer than written.
    #[error("expected {expected} bytes, found {found}: it was not written to its end")]
    Length {
        /// As the header says.
        expected: u64,
        /// As it is.
        found: u64,
    },
    /// Changed.
    #[error("its checksum does not match")]
    Checksum,
    /// The machine was restarted since.
    #[error("it was written before the machine started")]
    Boot,
    /// From the future.
    #[error("it was written later than now")]
    Future,
    /// The checksum matches, but the content makes no sense.
    #[error("its content cannot be decoded")]
    Content,
}

/// The fates of saved flows, summed over all workers that have restored.
#[derive(Debug, Default)]
pub struct RestoreReport {
    workers: AtomicU32,
    counts: [AtomicU64; FlowFate::ALL.len()],
}

/// The fate of a saved flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FlowFate {
    /// It goes on.
    Restored,
    /// Its idle limit has passed.
    Idle,
    /// Its Service or backend is gone.
    BackendGone,
    /// Its SNAT address is gone, or its port is of no use to the worker that owns it now.
    PortGone,
    /// The flow table is full.
    NoRoom,
    /// Its values make no sense, or another flow has the same addresses and ports.
    Invalid,
}

impl FlowFate {
    /// Every value, in the order of their numbers.
    pub const ALL: [Self; 6] = [Self::Restored, Self::Idle, Self::BackendGone, Self::PortGone, Self::NoRoom, Self::Invalid];
}

impl RestoreReport {
    /// Number of workers that have restored their flows.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers.load(Ordering::Acquire)
    }

    /// Number of flows with this fate. A flow whose directions two workers own now counts at both.
    #[must_use]
    pub fn count(&self, fate: FlowFate) -> u64 {
        self.counts[fate as usize].load(Ordering::Relaxed)
    }

    /// Adds the counts of a worker that has restored its flows.
    pub(super) fn add(&self, counts: [u64; FlowFate::ALL.len()]) {
        for (sum, count) in self.counts.iter().zip(counts) {
            sum.fetch_add(count, Ordering::Relaxed);
        }
        self.workers.fetch_add(1, Ordering::Release);
    }
}

/// The checked flows of the process before.
#[derive(Debug)]
pub struct SavedFlows {
    bytes: Vec<u8>,
    parts: Vec<Range<usize>>,
    /// Sections of each part.
    sections: usize,
    seed: u64,
    is_confirmed: bool,
    age_ns: u64,
    saved: Tick,
    report: RestoreReport,
}

impl SavedFlows {
    /// The header and table for these parts, each of which a worker saved. They are written in order after it.
    /// `is_confirmed`: a controller sent the state by which this process forwarded to this process.
    #[must_use]
    pub fn header(seed: u64, is_confirmed: bool, at: SavedAt, parts: &[Vec<u8>]) -> Vec<u8> {
        let lengths = parts.iter().map(|part| part.len() as u64);
        let total = (HEADER + WORD * parts.len()) as u64 + lengths.clone().sum::<u64>();
        let mut header = Vec::with_capacity(HEADER + WORD * parts.len());
        header.extend(MAGIC);
        header.extend(FORMAT.to_le_bytes());
        header.extend(u32::try_from(parts.len()).unwrap_or(u32::MAX).to_le_bytes());
        header.extend(seed.to_le_bytes());
        header.extend(at.boot);
        header.extend(at.boottime_ns.to_le_bytes());
        header.extend(u64::from(is_confirmed).to_le_bytes());
        header.extend(total.to_le_bytes());
        let mut checksum = checksum(0, &header);
        let table: Vec<u8> = lengths.flat_map(u64::to_le_bytes).collect();
        for bytes in [&table].into_iter().chain(parts) {
            checksum = self::checksum(checksum, bytes);
        }
        header.extend(checksum.to_le_bytes());
        header.extend(table);
        header
    }

    /// Checks the bytes that were written, at `now`, which is `monotonic_ns` by the clock of this process's workers.
    ///
    /// # Errors
    /// Why they are not used; see [`SavedFlowsError`].
    pub fn read(bytes: Vec<u8>, now: SavedAt, monotonic_ns: u64) -> Result<Self, SavedFlowsError> {
        let mut header = Fields(bytes.get(..HEADER).unwrap_or(&bytes));
        if header.array() != Some(MAGIC) {
            return Err(SavedFlowsError::Magic);
        }
        let format = header.u32().ok_or(SavedFlowsError::Magic)?;
        if !(FORMAT_OLDEST..=FORMAT).contains(&format) {
            return Err(SavedFlowsError::Format { found: format });
        }
        let cut_off = SavedFlowsError::Length { expected: HEADER as u64, found: bytes.len() as u64 };
        let mut fields = || {
            let (parts, seed, boot, boottime_ns) = (header.u32()?, header.u64()?, header.array()?, header.u64()?);
            Some((parts, seed, boot, boottime_ns, header.u64()?, header.u64()?, header.u64()?))
        };
        let (parts, seed, boot, boottime_ns, confirmed, expected, sum) = fields().ok_or(cut_off)?;
        let found = bytes.len() as u64;
        if expected != found || !bytes.len().is_multiple_of(WORD) {
            return Err(SavedFlowsError::Length { expected, found });
        }
        if checksum(checksum(0, &bytes[..CHECKSUM]), &bytes[HEADER..]) != sum {
            return Err(SavedFlowsError::Checksum);
        }
        if boot != now.boot {
            return Err(SavedFlowsError::Boot);
        }
        let age_ns = now.boottime_ns.checked_sub(boottime_ns).ok_or(SavedFlowsError::Future)?;
        let sections = if format < 4 { SECTIONS_BEFORE_SHIFTS } else { SECTIONS };
        let parts = part_ranges(&bytes, parts, sections).ok_or(SavedFlowsError::Content)?;
        let age = Tick::at(age_ns);
        let saved = Tick(Tick::at(monotonic_ns).0.wrapping_sub(age.0));
        let is_confirmed = confirmed == 1;
        Ok(Self { bytes, parts, sections, seed, is_confirmed, age_ns, saved, report: RestoreReport::default() })
    }

    /// The bytes that were read.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The seed of the workers' hashes. With the same seed the same workers own the flows.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }

    /// Whether the process that saved the flows had the state of a controller.
    #[must_use]
    pub const fn is_confirmed(&self) -> bool {
        self.is_confirmed
    }

    /// Time since the flows were saved, ns, at the time of reading.
    #[must_use]
    pub const fn age_ns(&self) -> u64 {
        self.age_ns
    }

    /// The fates of the flows so far.
    #[must_use]
    pub const fn report(&self) -> &RestoreReport {
        &self.report
    }

    /// Number of flows.
    #[must_use]
    pub fn flows(&self) -> usize {
        self.parts().map(|part| part.v4.len() / record_len::<u32>() + part.v6.len() / record_len::<u128>()).sum()
    }

    /// When they were saved, in ticks of this process.
    pub(super) const fn saved(&self) -> Tick {
        self.saved
    }

    /// The parts of the workers that saved.
    pub(super) fn parts(&self) -> impl Iterator<Item = SavedPart<'_>> {
        self.parts.iter().filter_map(|range| SavedPart::split(self.bytes.get(range.clone())?, self.sections))
    }
}

/// The positions of the parts, if all of them can be decoded.
fn part_ranges(bytes: &[u8], parts: u32, sections: usize) -> Option<Vec<Range<usize>>> {
    if parts > PARTS_MAX {
        return None;
    }
    let mut table = Fields(bytes.get(HEADER..)?);
    let mut start = HEADER + WORD * parts as usize;
    let mut ranges = Vec::new();
    for _ in 0..parts {
        let end = start.checked_add(usize::try_from(table.u64()?).ok()?)?;
        SavedPart::split(bytes.get(start..end)?, sections)?.backends()?;
        ranges.push(start..end);
        start = end;
    }
    (start == bytes.len()).then_some(ranges)
}

/// Continues a checksum over whole words. Each step is a bijection of the sum, so a change of one word always shows.
fn checksum(sum: u64, bytes: &[u8]) -> u64 {
    bytes.as_chunks::<WORD>().0.iter().fold(sum, |sum, word| split_mix(sum ^ u64::from_le_bytes(*word)))
}

/// A backend, as it is called in every process.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct BackendName {
    pub(super) service: ServiceName,
    pub(super) protocol: Protocol,
    pub(super) address: SocketAddr,
}

/// The flows of one worker, being saved.
#[derive(Debug, Default)]
pub(super) struct PartWriter {
    backends: Vec<u8>,
    pools: Vec<u8>,
    v4: Vec<u8>,
    v6: Vec<u8>,
    clients: Vec<u8>,
    shifts_v4: Vec<u8>,
    shifts_v6: Vec<u8>,
}

impl PartWriter {
    /// Adds a backend. They are numbered in the order in which they are added.
    pub(super) fn backend(&mut self, service: &ServiceName, protocol: Protocol, address: SocketAddr) {
        let to = &mut self.backends;
        put_ip(to, address.ip());
        to.extend(address.port().to_le_bytes());
        to.push(protocol.number());
        for text in [&service.namespace, &service.name] {
            to.extend(u16::try_from(text.len()).unwrap_or(u16::MAX).to_le_bytes());
            to.extend(text.as_bytes());
        }
    }

    /// Adds ports of a SNAT address that rest, towards the target of a backend: each with the ticks for which it has
    /// rested.
    pub(super) fn pool(&mut self, backend: u32, snat: IpAddr, ports: &[(u16, u16)]) {
        self.pools.extend(backend.to_le_bytes());
        put_ip(&mut self.pools, snat);
        self.pools.extend(u32::try_from(ports.len()).unwrap_or(u32::MAX).to_le_bytes());
        for (port, age) in ports {
            self.pools.extend(port.to_le_bytes());
            self.pools.extend(age.to_le_bytes());
        }
    }

    /// Adds a flow of a backend with this number.
    pub(super) fn flow<A: Address>(&mut self, flow: &Flow<A>, backend: u32, now: Tick) {
        let to = if A::BYTES == <u32 as Address>::BYTES { &mut self.v4 } else { &mut self.v6 };
        for address in [flow.client, flow.vip, flow.backend_address, flow.snat] {
            to.extend(&address.wide().to_le_bytes()[..A::BYTES]);
        }
        for port in [flow.client_port, flow.vip_port, flow.backend_port, flow.snat_port] {
            to.extend(port.to_le_bytes());
        }
        let unanswered = flow.unanswered_since.map_or(0, |since| now.since(since).0 + 1);
        let idle = now.since(flow.last_seen).0;
        // Of SCTP the tags are kept where TCP has its numbers.
        let numbers = if flow.protocol == SCTP {
            [flow.tags.client, flow.tags.backend]
        } else {
            [flow.initial_sequence, flow.acknowledgement]
        };
        for number in [backend, idle, numbers[0], numbers[1], unanswered] {
            to.extend(number.to_le_bytes());
        }
        let [mode, ..] = flow.mode.number(flow.shift.is_some()).to_le_bytes();
        to.extend([flow.state as u8, mode, flow.packets, flow.tags.proven.into()]);
        if let Some(shift) = flow.shift {
            (if A::BYTES == <u32 as Address>::BYTES { &mut self.shifts_v4 } else { &mut self.shifts_v6 }).extend(shift.saved());
        }
    }

    /// Adds a client that session affinity remembers.
    pub(super) fn client(&mut self, client: u64, backend: u32, left: u32) {
        self.clients.extend(client.to_le_bytes());
        self.clients.extend(backend.to_le_bytes());
        self.clients.extend(left.to_le_bytes());
    }

    /// The part: the length of each section, the sections, padding.
    pub(super) fn finish(self) -> Vec<u8> {
        let Self { backends, pools, v4, v6, clients, shifts_v4, shifts_v6 } = self;
        let sections: [_; SECTIONS] = [backends, pools, v4, v6, clients, shifts_v4, shifts_v6];
        let mut part: Vec<u8> = sections.iter().flat_map(|section| (section.len() as u64).to_le_bytes()).collect();
        part.reserve_exact(sections.iter().map(Vec::len).sum::<usize>() + WORD);
        sections.iter().for_each(|section| part.extend(section));
        part.resize(part.len().next_multiple_of(WORD), 0);
        part
    }
}

/// Bytes of a flow of one family.
const fn record_len<A: Address>() -> usize {
    4 * A::BYTES + 4 * 2 + 5 * 4 + 4
}

fn put_ip(to: &mut Vec<u8>, ip: IpAddr) {
    match ip {
        IpAddr::V4(ip) => {
            to.push(4);
            to.extend(ip.octets());
        }
        IpAddr::V6(ip) => {
            to.push(6);
            to.extend(ip.octets());
        }
    }
}

/// The part of one worker, in sections.
#[derive(Clone, Copy, Debug)]
pub(super) struct SavedPart<'a> {
    backends: &'a [u8],
    pools: &'a [u8],
    v4: &'a [u8],
    v6: &'a [u8],
    clients: &'a [u8],
    /// The shifts of its flows of a family that have one, in their order.
    shifts_v4: &'a [u8],
    shifts_v6: &'a [u8],
}

impl<'a> SavedPart<'a> {
    /// The part in these bytes, which has this many sections: those at the end are empty in older formats.
    fn split(bytes: &'a [u8], sections: usize) -> Option<Self> {
        let mut fields = Fields(bytes);
        let mut lengths = [0; SECTIONS];
        for length in lengths.iter_mut().take(sections) {
            *length = usize::try_from(fields.u64()?).ok()?;
        }
        let [backends, pools, v4, v6, clients, shifts_v4, shifts_v6] = lengths;
        let part = Self {
            backends: fields.take(backends)?,
            pools: fields.take(pools)?,
            v4: fields.take(v4)?,
            v6: fields.take(v6)?,
            clients: fields.take(clients)?,
            shifts_v4: fields.take(shifts_v4)?,
            shifts_v6: fields.take(shifts_v6)?,
        };
        let is_whole = part.v4.len().is_multiple_of(record_len::<u32>()) && part.v6.len().is_multiple_of(record_len::<u128>());
        (is_whole && fields.0.len() < WORD).then_some(part)
    }

    /// Its backends, by number.
    pub(super) fn backends(&self) -> Option<Vec<BackendName>> {
        let (mut fields, mut backends) = (Fields(self.backends), Vec::new());
        while !fields.0.is_empty() {
            let address = SocketAddr::new(fields.ip()?, fields.u16()?);
            let [number] = fields.array()?;
            let mut text = || {
                let length = fields.u16()?;
                std::str::from_utf8(fields.take(length.into())?).ok()
            };
            let service = ServiceName::new(text()?, text()?);
            backends.push(BackendName { service, protocol: Protocol::from_number(number)?, address });
        }
        Some(backends)
    }

    /// Its resting ports: for each pool the number of a backend, the SNAT address, and each port with the ticks for
    /// which it had rested.
    pub(super) fn pools(&self) -> impl Iterator<Item = (u32, IpAddr, impl Iterator<Item = (u16, u16)>)> {
        let mut fields = Fields(self.pools);
        std::iter::from_fn(move || {
            let (backend, snat, count) = (fields.u32()?, fields.ip()?, fields.u32()?);
            let ports = fields.take((count as usize).checked_mul(4)?)?;
            let port = |[a, b, c, d]: &[u8; 4]| (u16::from_le_bytes([*a, *b]), u16::from_le_bytes([*c, *d]));
            Some((backend, snat, ports.as_chunks().0.iter().map(port)))
        })
    }

    /// Its flows of a family, each with the number of its backend; `None` for one whose values make no sense. `backend`
    /// and the pool of the SNAT port are not set. `saved`: when they were saved.
    pub(super) fn flows<A: Address>(&self, saved: Tick) -> impl Iterator<Item = Option<(Flow<A>, u32)>> {
        let is_v4 = A::BYTES == <u32 as Address>::BYTES;
        let (records, shifts) = if is_v4 { (self.v4, self.shifts_v4) } else { (self.v6, self.shifts_v6) };
        let mut shifts = shifts.as_chunks::<SHIFT_LEN>().0.iter().map(|saved| Shift::restored(*saved));
        records.chunks_exact(record_len::<A>()).map(move |record| flow(&mut Fields(record), saved, &mut shifts))
    }

    /// Its clients of session affinity: each with the number of its backend, and how long it was still remembered.
    pub(super) fn clients(&self) -> impl Iterator<Item = (u64, u32, u32)> {
        let mut fields = Fields(self.clients);
        std::iter::from_fn(move || Some((fields.u64()?, fields.u32()?, fields.u32()?)))
    }
}

/// A flow without backend, frontend and pool, and the number of its backend. `shifts`: of the flows from this one on.
fn flow<A: Address>(fields: &mut Fields<'_>, saved: Tick, shifts: &mut impl Iterator<Item = Shift>) -> Option<(Flow<A>, u32)> {
    let [client, vip, backend_address, snat] = [fields.address()?, fields.address()?, fields.address()?, fields.address()?];
    let [client_port, vip_port, backend_port, snat_port] = [fields.u16()?, fields.u16()?, fields.u16()?, fields.u16()?];
    let (backend, idle, initial_sequence, acknowledgement, unanswered) =
        (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    let [state, mode, packets, proven] = fields.array()?;
    let shift = if FlowMode::is_shifted_number(mode.into()) { Some(shifts.next()?) } else { None };
    let state = FlowState::ALL.get(usize::from(state)).copied()?;
    let is_sctp = state.protocol() == SCTP;
    let tags = VerificationTags { client: initial_sequence, backend: acknowledgement, proven: proven == 1 };
    let ago = |ticks: u32| Tick(saved.0.wrapping_sub(ticks));
    let flow = Flow {
        client,
        vip,
        backend_address,
        snat,
        client_port,
        vip_port,
        backend_port,
        snat_port,
        backend: BackendId::default(),
        frontend: FrontendNumber::NONE,
        last_seen: ago(idle),
        since: ago(idle),
        snat_pool: PoolId::NONE,
        route_to_client: crate::flow::UNRESOLVED,
        route_epoch: 0,
        initial_sequence: if is_sctp { 0 } else { initial_sequence },
        acknowledgement: if is_sctp { 0 } else { acknowledgement },
        tags: if is_sctp { tags } else { VerificationTags::default() },
        unanswered_since: unanswered.checked_sub(1).map(ago),
        protocol: state.protocol(),
        state,
        shift,
        mode: (shift.is_some() || mode <= FlowMode::Gue as u8).then(|| FlowMode::of_number(mode.into()))?,
        packets,
    };
    Some((flow, backend))
}

/// Bytes that are read from their beginning.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn address<A: Address>(&mut self) -> Option<A> {
        let mut wide = [0; 16];
        wide[..A::BYTES].copy_from_slice(self.take(A::BYTES)?);
        Some(A::from_wide(u128::from_le_bytes(wide)))
    }

    fn ip(&mut self) -> Option<IpAddr> {
        match self.array()? {
            [4] => Some(IpAddr::from(self.array::<4>()?)),
            [6] => Some(IpAddr::from(self.array::<16>()?)),
            _ => None,
        }
    }
}
