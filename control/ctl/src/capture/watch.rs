//! `sluicectl watch`: flows of a gateway as they begin and end, and packets as they are dropped.
//!
//! Invariant: at the end it says how many events are missing. Not here: which events there are, which the gateway says.

use std::io::Write;

use proto::v1;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::sleep;

use super::FOREVER;
use crate::args::{Selection, TraceOutput, WatchArguments};
use crate::client::{ClientError, Server, connect};
use crate::error::CtlError;
use crate::list::format_error;

/// Prints events until the wanted number or time is reached, or a signal ends it.
pub(crate) async fn print(
    server: &Server,
    arguments: &WatchArguments,
    out: &mut impl Write,
    notes: &mut impl Write,
) -> Result<(), CtlError> {
    let WatchArguments { services, verdict, count, duration, output } = arguments;
    let mut client = connect(server).await?;
    let error = |status| ClientError::from_status(server, &status, false);
    let names = Selection::from(services);
    if !names.is_all() {
        names.expect_known(&mut client, &std::collections::BTreeSet::new()).await.map_err(error)?;
    }
    let request = v1::WatchFlowsRequest {
        service: services.service.clone().unwrap_or_default(),
        namespace: services.namespace.clone().unwrap_or_default(),
        verdicts: verdict.clone(),
    };
    let mut stream = client.watch_flows(request).await.map_err(error)?.into_inner();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut end = std::pin::pin!(sleep(duration.map_or(FOREVER, |duration| duration.0)));
    let (mut left, mut lost) = (count.unwrap_or(u64::MAX), 0);
    let mut watched = Ok(());
    while left > 0 {
        let reply = tokio::select! {
            reply = stream.message() => reply,
            () = &mut end => break,
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
        };
        let gone = || ClientError::Gone { server: server.name() };
        let reply = reply.map_err(|status| ClientError::from_status(server, &status, true)).and_then(|one| one.ok_or_else(gone));
        let v1::WatchFlowsReply { events, lost: lost_now } = match reply {
            Ok(reply) => reply,
            Err(error) => {
                watched = Err(error.into());
                break;
            }
        };
        lost = lost_now;
        for event in events.iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
            left -= 1;
            match output {
                TraceOutput::Text => writeln!(out, "{}", text(event))?,
                TraceOutput::Json => writeln!(out, "{}", serde_json::to_string(event).map_err(format_error)?)?,
            }
        }
        out.flush()?;
    }
    if lost > 0 {
        writeln!(notes, "{lost} events are missing: there were too many, so this is a sample")?;
    }
    watched
}

/// The line of an event.
fn text(event: &v1::WatchEvent) -> String {
    let v1::WatchEvent { time, verdict, reason, protocol, source, destination, service, backend, .. } = event;
    let ends = if protocol.is_empty() {
        "a frame of another protocol, or malformed".to_owned()
    } else {
        format!("{protocol} {source} -> {destination}")
    };
    let backend = if backend.is_empty() { String::new() } else { format!(" -> {backend}") };
    let service = if service.is_empty() { String::new() } else { format!(" {service}") };
    let reason = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    format!("{time} {verdict:<5} {ends}{backend}{service}{reason}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_what_is_known() {
        let text_of = |text: &str| text.to_owned();
        let start = v1::WatchEvent {
            time: text_of("2026-01-31T12:00:00.123456Z"),
            verdict: text_of("start"),
            protocol: text_of("tcp"),
            source: text_of("198.51.100.7:5555"),
            destination: text_of("192.0.2.100:80"),
            service: text_of("default/web"),
            backend: text_of("10.0.0.11:8080"),
            ..Default::default()
        };
        let flow = "tcp 198.51.100.7:5555 -> 192.0.2.100:80 -> 10.0.0.11:8080 default/web";
        assert_eq!(text(&start), format!("2026-01-31T12:00:00.123456Z start {flow}"));
        let end = v1::WatchEvent { verdict: text_of("end"), reason: text_of("fin"), ..start.clone() };
        assert_eq!(text(&end), format!("2026-01-31T12:00:00.123456Z end   {flow}: fin"));
        let (verdict, reason) = (text_of("drop"), text_of("malformed"));
        let drop = v1::WatchEvent { time: start.time, verdict, reason, ..Default::default() };
        let expected = "2026-01-31T12:00:00.123456Z drop  a frame of another protocol, or malformed: malformed";
        assert_eq!(text(&drop), expected);
    }
}
