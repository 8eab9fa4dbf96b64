//! Troubles of one gateway: its state, workers, ports, tasks, part in the fleet, configuration and certificates.

use super::findings::Findings;
use super::kind::Kind;
use super::observed::{ObservedCertificate, ObservedGateway, Recent};
use crate::v1;

/// A flow table is nearly full beyond this, in percent; as in the alert.
const TABLE_PERCENT_MAX: u64 = 90;
/// A worker is busy beyond this, in percent; as in the alert.
const BUSY_PERCENT_MAX: u64 = 90;
/// Places for targets are scarce beyond this, in percent: then shares count.
const TARGETS_PERCENT_MAX: u64 = 75;
/// Certificates are to be renewed this long before they end; as in the alert.
const RENEW_BEFORE_S: i64 = 7 * 86_400;
/// Drops of these reasons are faults of the gateway, its configuration or its network, not of senders.
const FAULTS: [&str; 9] = [
    "no_route",
    "neighbour_unresolved",
    "tx_full",
    "twin_full",
    "handover_full",
    "snat_wrong_port",
    "vip_loop",
    "truncated",
    "ipv4_checksum",
];
/// So many of them within the last minute are no trouble, nor within the part of it that is known so far: a neighbour
/// that is resolved anew costs some.
const FAULTS_MAX: u64 = 60;

pub(super) fn look(gateway: &ObservedGateway, found: &mut Findings) {
    let own = format!("Gateway {}", gateway.status.gateway);
    look_at_state(&gateway.status, &own, found);
    look_at_workers(&gateway.status.accounts, &gateway.recent, found);
    for port in &gateway.ports {
        look_at_port(port, &gateway.recent, found);
    }
    look_at_drops(&gateway.recent, found);
    look_at_fleet(&gateway.fleet, &gateway.recent, &own, found);
    if gateway.targets_held * 100 > gateway.targets_limit * TARGETS_PERCENT_MAX {
        let (held, limit) = (gateway.targets_held, gateway.targets_limit);
        found.add(Kind::TargetsScarce, &own, format!("{held} of {limit} places for backends are held (`limits.targets`)"));
    }
    if !gateway.reload.failure.is_empty() {
        found.add(Kind::ReloadFailed, "Configuration", format!("the last reload changed nothing: {}", gateway.reload.failure));
    }
    if !gateway.reload.at_next_start.is_empty() {
        let keys = gateway.reload.at_next_start.join(", ");
        found.add(Kind::RestartNeeded, "Configuration", format!("these keys of the file are not in effect: {keys}"));
    }
}

fn look_at_state(status: &v1::GetStatusResponse, own: &str, found: &mut Findings) {
    if !status.ready {
        found.add(Kind::NotReady, own, "no complete state has arrived");
    }
    if status.state_expired {
        found.add(Kind::StateExpired, own, "no controller has confirmed the state for longer than `maxStateAge`");
    }
    if !status.controller_connected {
        found.add(Kind::ControllerAway, own, "no controller is connected: changes of Services and endpoints do not arrive");
    }
    if status.draining {
        found.add(Kind::Drained, own, "it is drained");
    }
}

fn look_at_workers(accounts: &[v1::Account], recent: &Recent, found: &mut Findings) {
    for account in accounts {
        let worker = format!("Worker {}", account.worker);
        if account.stalled {
            found.add(Kind::WorkerStalled, &worker, "it has not polled its ports for 2 s or longer");
        }
        if account.flows_max > 0 && account.flows * 100 > account.flows_max * TABLE_PERCENT_MAX {
            let (flows, most) = (account.flows, account.flows_max);
            found.add(Kind::FlowTableNearlyFull, &worker, format!("{flows} of {most} flows (`flows.maxPerWorker`)"));
        }
    }
    for (worker, percent) in recent.busy_percent.iter().enumerate().filter(|(_, percent)| **percent > BUSY_PERCENT_MAX) {
        found.add(Kind::WorkerBusy, format!("Worker {worker}"), format!("it spends {percent} % of its time on packets"));
    }
    for (task, failures) in &recent.failures {
        found.add(
            Kind::TaskFails,
            format!("Task {task}"),
            format!("it failed {} within {} s", counted(*failures, "time"), recent.seconds),
        );
    }
}

/// `1 packet`, `2 packets`.
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn look_at_port(port: &v1::PortStatus, recent: &Recent, found: &mut Findings) {
    let object = format!("Port {}", port.name);
    match port.link.as_str() {
        "up" | "unknown" => {}
        "failed" => found.add(Kind::PortDown, &object, format!("it has failed: {}", port.reason)),
        "absent" => found.add(Kind::PortDown, &object, format!("its device {} is absent", port.device)),
        _ => found.add(Kind::PortDown, &object, "it has no link"),
    }
    if let Some(missed) = recent.missed.get(&port.name).filter(|missed| **missed > 0) {
        let (packets, seconds) = (counted(*missed, "packet"), recent.seconds);
        found.add(Kind::PacketsMissed, object, format!("{packets} found its receive queue full within {seconds} s"));
    }
}

fn look_at_drops(recent: &Recent, found: &mut Findings) {
    let seconds = recent.seconds;
    for (reason, packets) in &recent.drops {
        let kind = match reason.as_str() {
            "snat_exhausted" => Kind::SnatExhausted,
            "flow_table_full" => Kind::FlowTableFull,
            reason if FAULTS.contains(&reason) && *packets > FAULTS_MAX => Kind::Drops,
            _ => continue,
        };
        if *packets > 0 {
            found.add(kind, format!("Drop reason {reason}"), format!("{} within {seconds} s", counted(*packets, "packet")));
        }
    }
}

fn look_at_fleet(fleet: &v1::GatewayStatus, recent: &Recent, own: &str, found: &mut Findings) {
    for v1::DuplicateStatus { vip, station } in &fleet.duplicates {
        found.add(Kind::VipDuplicate, format!("VIP {vip}"), format!("station {station} announces it, too"));
    }
    for session in fleet.sessions.iter().filter(|session| session.status == "down") {
        let (protocol, peer, state) = (&session.protocol, &session.peer, &session.state);
        found.add(Kind::SessionDown, format!("Session {protocol} {peer}"), format!("the routing daemon says: {state}"));
    }
    // A drained gateway leaves its VIPs to others on purpose.
    if !fleet.unfit.is_empty() && !fleet.draining {
        found.add(Kind::Unfit, own, format!("it leaves its VIPs to others: {}", fleet.unfit));
    }
    if recent.election_restarts > 0 {
        let (times, seconds) = (counted(recent.election_restarts, "time"), recent.seconds);
        found.add(Kind::ElectionRestarts, own, format!("it gave up its VIPs {times} within {seconds} s"));
    }
    for partner in fleet.partners.iter().filter(|partner| !partner.in_sync) {
        let lag = partner.lag_ms.map_or_else(|| "it is not reached".to_owned(), |lag_ms| format!("it lags by {lag_ms} ms"));
        found.add(Kind::PartnerBehind, format!("Partner {}", partner.name), format!("it lacks flows of this gateway: {lag}"));
    }
}

pub(super) fn look_at_certificates(certificates: &[ObservedCertificate], found: &mut Findings) {
    for ObservedCertificate { key, until_s } in certificates {
        let object = format!("Certificates {key}");
        let Some(until_s) = until_s else {
            found.add(Kind::CertificateUnusable, object, "they cannot be read");
            continue;
        };
        let left_s = until_s - i64::try_from(found.now_s).unwrap_or(i64::MAX);
        if left_s <= 0 {
            let since_s = u64::try_from(*until_s).unwrap_or_default();
            found.add_since(since_s, Kind::CertificateExpired, object, "one of them has expired: connections by them fail");
        } else if left_s < RENEW_BEFORE_S {
            let since_s = u64::try_from(until_s - RENEW_BEFORE_S).unwrap_or_default();
            found.add_since(since_s, Kind::CertificateExpires, object, format!("one of them expires in {}", time_left(left_s)));
        }
    }
}

fn time_left(seconds: i64) -> String {
    match (seconds / 86_400, seconds / 3600) {
        (0, 0) => "less than an hour".to_owned(),
        (0, hours) => format!("{hours} h"),
        (days, _) => format!("{days} d"),
    }
}
