//! `sluicectl capture`, `sluicectl trace` and `sluicectl watch`: packets of a gateway as they pass, as pcapng or as text.
//!
//! Invariant: at the end it says how many packets the workers looked at, and how many copies are missing.
//! Deliberately not here: what becomes of a packet, which the gateway says.

mod pcapng;
mod trace;
pub(super) mod watch;

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::time::Duration;

use proto::v1;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;
use tonic::Streaming;

use crate::args::{CaptureArguments, PacketSelection, TraceArguments, TraceOutput};
use crate::client::{ClientError, Server, connect};
use crate::error::CtlError;
use crate::filter::compile;
use crate::list::{Screen, format_error};
use pcapng::PacketFile;

/// The name of the standard output.
const STDOUT: &str = "-";
/// A time that no command reaches, for a command without end.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Writes packets to a file, or to `out`.
pub(super) async fn capture(
    server: &Server,
    arguments: &CaptureArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
    screen: Screen,
) -> Result<(), CtlError> {
    let CaptureArguments { selection, write, snaplen } = arguments;
    let file = write.as_deref().filter(|file| file.as_os_str() != STDOUT);
    if file.is_none() && screen.redraw {
        return Err(CtlError::Terminal);
    }
    let mut packets = Packets::begin(server, selection, *snaplen).await?;
    let written = |error| match file {
        Some(file) => CtlError::Written { file: file.to_owned(), error },
        None => CtlError::Output(error),
    };
    let to: Box<dyn Write + '_> = match file {
        Some(file) => Box::new(BufWriter::new(File::create(file).map_err(written)?)),
        None => Box::new(out),
    };
    let mut to = PacketFile::new(to, &packets.interfaces, *snaplen).map_err(written)?;
    packets.announce(notes)?;
    let ended = packets.each(|packet| to.write(packet).map_err(written), || Ok(())).await;
    to.flush().map_err(written)?;
    packets.summary("captured", notes)?;
    ended
}

/// Prints packets.
pub(super) async fn trace(
    server: &Server,
    arguments: &TraceArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
) -> Result<(), CtlError> {
    let mut packets = Packets::begin(server, &arguments.selection, 0).await?;
    packets.announce(notes)?;
    let out = std::cell::RefCell::new(out);
    let print = |packet: &v1::CapturedPacket| {
        let Some(traced) = &packet.packet else { return Ok(()) };
        let text = match arguments.output {
            TraceOutput::Text => trace::text(traced),
            TraceOutput::Json => serde_json::to_string(traced).map_err(format_error)? + "\n",
        };
        Ok(out.borrow_mut().write_all(text.as_bytes())?)
    };
    let ended = packets.each(print, || Ok(out.borrow_mut().flush()?)).await;
    packets.summary("traced", notes)?;
    ended
}

/// The packets of a capture that runs.
struct Packets<'a> {
    server: &'a Server,
    selection: &'a PacketSelection,
    stream: Streaming<v1::CaptureReply>,
    interfaces: Vec<String>,
    progress: v1::CaptureProgress,
    /// Packets so far.
    count: u64,
}

impl<'a> Packets<'a> {
    /// Begins a capture on the gateway.
    async fn begin(server: &'a Server, selection: &'a PacketSelection, snap_bytes: u32) -> Result<Self, CtlError> {
        let expression = selection.filter.join(" ");
        let request = v1::CaptureRequest { filter: compile(&expression)?, expression, snap_bytes };
        let error = |status| ClientError::from_status(server, &status, false);
        let mut stream = connect(server).await?.capture(request).await.map_err(error)?.into_inner();
        let first = stream.message().await.map_err(error)?.unwrap_or_default();
        let progress = first.progress.unwrap_or_default();
        Ok(Self { server, selection, stream, interfaces: first.interfaces, progress, count: 0 })
    }

    fn announce(&self, notes: &mut impl Write) -> io::Result<()> {
        writeln!(notes, "capturing on {}; Ctrl-C ends it", self.interfaces.join(", "))
    }

    /// Passes on each packet, and calls `pause` when there is none for the moment, until the wanted number of packets or
    /// time is reached, or a signal ends it.
    async fn each(
        &mut self,
        mut each: impl FnMut(&v1::CapturedPacket) -> Result<(), CtlError>,
        mut pause: impl FnMut() -> Result<(), CtlError>,
    ) -> Result<(), CtlError> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut end = std::pin::pin!(sleep(self.selection.duration.map_or(FOREVER, |duration| duration.0)));
        let limit = self.selection.count.unwrap_or(u64::MAX);
        while self.count < limit {
            let reply = tokio::select! {
                reply = self.stream.message() => reply,
                () = &mut end => return Ok(()),
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
            };
            let gone = || ClientError::Gone { server: self.server.name() };
            let reply = reply.map_err(|status| ClientError::from_status(self.server, &status, true))?.ok_or_else(gone)?;
            self.progress = reply.progress.unwrap_or(self.progress);
            let wanted = usize::try_from(limit - self.count).unwrap_or(usize::MAX);
            for packet in reply.packets.iter().take(wanted) {
                self.count += 1;
                each(packet)?;
            }
            pause()?;
        }
        Ok(())
    }

    /// Says how much was seen.
    fn summary(&self, done: &str, notes: &mut impl Write) -> io::Result<()> {
        let v1::CaptureProgress { seen, unseen, lost, .. } = self.progress;
        writeln!(notes, "{} packets {done}; the workers looked at {seen} of {} packets", self.count, seen + unseen)?;
        if unseen > 0 {
            writeln!(notes, "{unseen} packets passed without a look while workers were busy, so this is a sample")?;
        }
        if lost > 0 {
            writeln!(notes, "{lost} packets that matched are missing: they came faster than this program took them")?;
        }
        Ok(())
    }
}
