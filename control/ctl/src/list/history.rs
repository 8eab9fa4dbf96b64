//! `sluicectl history`: since when backends are as they are, how they changed and why, and their last check.
//!
//! Not here: what is kept, and for how long (`sluiced`).

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, SocketAddr};

use objects::text::listed;
use proto::v1;

use super::wrap::wrapped;
use super::{format_error, silent_text, write_yaml};
use crate::args::{HistoryArguments, StatusOutput};
use crate::client::{Server, ask};
use crate::error::CtlError;

/// What stands before the last check.
const LAST_CHECK: &str = "  last check ";
/// Names of Services in a message.
const NAMES_MAX: usize = 20;

/// Prints the history of the backends of a Service, or of one backend.
pub(crate) async fn print(server: &Server, arguments: &HistoryArguments, out: &mut impl Write) -> Result<(), CtlError> {
    let object = arguments.object.as_str();
    let ip = object.parse::<SocketAddr>().map(|address| address.ip()).or_else(|_| object.parse::<IpAddr>()).ok();
    let addresses: Vec<_> = ip.iter().map(ToString::to_string).collect();
    let request = v1::ListBackendsRequest { addresses, history: true, ..v1::ListBackendsRequest::default() };
    let v1::ListBackendsResponse { backends, silent } = ask(server, async |mut admin| admin.list_backends(request).await).await?;
    let services: BTreeSet<String> = backends.iter().map(|row| row.service.clone()).collect();
    let rows: Vec<_> = backends.into_iter().filter(|row| is_about(row, object, ip)).collect();
    if rows.is_empty() && silent.is_empty() {
        let names: Vec<_> = services.into_iter().collect();
        let known = if ip.is_some() { String::new() } else { format!("; there are: {}", listed(&names, NAMES_MAX)) };
        return Err(CtlError::NoHistory { object: object.to_owned(), known });
    }
    match arguments.output {
        StatusOutput::Text => {
            let texts: Vec<_> = rows.iter().map(text).collect();
            out.write_all(texts.join("\n").as_bytes())?;
        }
        StatusOutput::Json => writeln!(out, "{}", serde_json::to_string_pretty(&rows).map_err(format_error)?)?,
        StatusOutput::Yaml => write_yaml(&rows, out)?,
    }
    out.flush()?;
    if silent.is_empty() { Ok(()) } else { Err(CtlError::Silent(silent_text(&silent))) }
}

/// Whether a row is of this Service (`NAMESPACE/NAME` or `NAME`), or of this backend (`ADDRESS:PORT` or `ADDRESS`).
fn is_about(row: &v1::BackendStatus, object: &str, ip: Option<IpAddr>) -> bool {
    let name = row.service.split_once('/').map_or("", |(_, name)| name);
    let address = row.address.parse::<SocketAddr>();
    match (object.parse::<SocketAddr>(), ip) {
        (Ok(wanted), _) => address == Ok(wanted),
        (Err(_), Some(ip)) => address.is_ok_and(|address| address.ip() == ip),
        (Err(_), None) => row.service == object || name == object,
    }
}

fn text(row: &v1::BackendStatus) -> String {
    let at = if row.gateway.is_empty() { String::new() } else { format!(" at {}", row.gateway) };
    let mut lines = vec![wrapped("", &format!("{} {} of {}{at}", row.protocol, row.address, row.service), 0)];
    match row.changes.first() {
        None => lines.push("  no history: the gateway keeps none of it, or is of an older version\n".to_owned()),
        Some(now) => {
            let down_s = row.down_today_s.unwrap_or(0);
            let down = if down_s > 0 { format!(", unhealthy for {} today", span(down_s)) } else { String::new() };
            lines.push(wrapped("", &format!("{} since {}{down}", now.state, row.since), 2));
        }
    }
    if let Some(check) = &row.last_check {
        lines.push(wrapped(LAST_CHECK, &check_text(check), LAST_CHECK.len()));
    }
    let state = row.changes.iter().map(|change| change.state.len()).max().unwrap_or(0);
    for v1::BackendChange { at, state: to, cause } in &row.changes {
        let mark = format!("  {at}  {to:<state$}  ");
        lines.push(wrapped(&mark, cause, mark.len()));
    }
    lines.concat()
}

fn check_text(check: &v1::LastCheck) -> String {
    let result = if check.passed { "passed".to_owned() } else { format!("failed: {}", check.found) };
    let took = format!("{}.{:01} ms", check.duration_us / 1000, check.duration_us % 1000 / 100);
    // The backend may differ from the target of this check in health: another of its targets fails.
    let next = match (check.contrary, check.passed) {
        (0, _) => String::new(),
        (contrary, true) => format!("; {contrary} of {} passed checks after which it is healthy", check.needed),
        (contrary, false) => format!("; {contrary} of {} failed checks after which it is unhealthy", check.needed),
    };
    format!("{}, {took}, {result}{next}", check.at)
}

/// `1h5m`, `5m10s` or `10s`.
fn span(seconds: u64) -> String {
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds}s"),
        (hours, minutes, _) => format!("{hours}h{minutes}m"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(address: &str) -> v1::BackendStatus {
        v1::BackendStatus {
            service: "default/web".into(),
            address: address.into(),
            protocol: "tcp".into(),
            gateway: "edge-1".into(),
            ..Default::default()
        }
    }

    #[test]
    fn a_backend_tells_its_state_its_last_check_and_its_changes() {
        let change =
            |at: &str, state: &str, cause: &str| v1::BackendChange { at: at.into(), state: state.into(), cause: cause.into() };
        let check = v1::LastCheck {
            at: "2026-01-31T12:01:00Z".into(),
            passed: true,
            duration_us: 1234,
            contrary: 1,
            needed: 2,
            ..Default::default()
        };
        let failing = v1::BackendStatus {
            since: "2026-01-31T12:00:00Z".into(),
            down_today_s: Some(310),
            last_check: Some(check),
            changes: vec![
                change("2026-01-31T12:00:00Z", "unhealthy", "tcp 10.0.0.1:80 refused, as the gateway was told by its host"),
                change("2026-01-31T11:00:00Z", "healthy", "its Service lists it"),
            ],
            ..row("10.0.0.1:80")
        };
        let expected = "\
tcp 10.0.0.1:80 of default/web at edge-1
  unhealthy since 2026-01-31T12:00:00Z, unhealthy for 5m10s today
  last check 2026-01-31T12:01:00Z, 1.2 ms, passed; 1 of 2 passed checks after
             which it is healthy
  2026-01-31T12:00:00Z  unhealthy  tcp 10.0.0.1:80 refused, as the gateway was
                                   told by its host
  2026-01-31T11:00:00Z  healthy    its Service lists it
";
        assert_eq!(text(&failing), expected);
        assert!(text(&row("10.0.0.2:80")).contains("no history"));
        let check = v1::LastCheck { found: "late".into(), contrary: 1, needed: 3, ..Default::default() };
        assert!(check_text(&check).ends_with("failed: late; 1 of 3 failed checks after which it is unhealthy"));
    }

    #[test]
    fn an_object_is_a_service_or_a_backend() {
        let row = row("[fd00::1]:80");
        let about = |object: &str| {
            let ip = object.parse::<SocketAddr>().map(|address| address.ip()).or_else(|_| object.parse::<IpAddr>()).ok();
            is_about(&row, object, ip)
        };
        for object in ["web", "default/web", "[fd00::1]:80", "[FD00:0::1]:80", "fd00::1", "FD00::1"] {
            assert!(about(object), "{object}");
        }
        for object in ["default", "other/web", "[fd00::1]:81", "fd00::2"] {
            assert!(!about(object), "{object}");
        }
    }
}
