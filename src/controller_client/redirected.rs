//! Tests with two controllers over TCP, of which the configured one does not lead.

use std::path::Path;

use control::gateways::listener::{CertificateSource, Listeners, ServerTls};
use control::gateways::publish::Published;
use control::gateways::registry::Gateways;
use control::gateways::server::{ConfigService, serve};
use control::kubernetes::lease::{Leader, Leadership};
use objects::scalar::url::HostPort;
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType};
use tokio::net::TcpListener;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::agent::served::Served;
use crate::controller_client::received::tests::{service, state};

const LONG: Duration = Duration::from_secs(120);

/// Certificates of one authority for each of these names, as `NAME.crt` and `NAME.key` beside `ca.crt`.
fn issue(dir: &Path, names: &[&str]) {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    std::fs::write(dir.join("ca.crt"), params.self_signed(&key).unwrap().pem()).unwrap();
    let authority = Issuer::new(params, key);
    for name in names {
        let (mut params, key) = (CertificateParams::default(), KeyPair::generate().unwrap());
        params.subject_alt_names = vec![SanType::URI(format!("sluice://east/{name}").try_into().unwrap())];
        std::fs::write(dir.join(format!("{name}.crt")), params.signed_by(&key, &authority).unwrap().pem()).unwrap();
        std::fs::write(dir.join(format!("{name}.key")), key.serialize_pem()).unwrap();
    }
}

fn files(dir: &Path, name: &str) -> CertificateFiles {
    let file = |name: String| dir.join(name);
    CertificateFiles { ca: file("ca.crt".to_owned()), cert: file(format!("{name}.crt")), key: file(format!("{name}.key")) }
}

/// The URL of a port of this machine.
fn https(port: u16) -> ServerUrl {
    ServerUrl::Https(HostPort::new("127.0.0.1", port).unwrap())
}

/// A controller and its address. Its state has epoch `e`.
async fn controller(dir: &Path, leadership: Leadership, stop: &CancellationToken) -> ServerUrl {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = https(listener.local_addr().unwrap().port());
    let services = state("", 0, &[service("web", &["10.0.0.1:80"])]).services;
    let (states, states_in) = watch::channel(Some(std::sync::Arc::new(Published::first("e".to_owned(), services, Vec::new()))));
    let service = ConfigService {
        fleet: control::gateways::fleet_queries::Fleet::default(),
        arbiter: control::gateways::arbiter::Arbiter::default(),
        states: states_in,
        gateways: watch::channel(Gateways::default()).0,
        leadership: watch::channel(leadership).1,
        group: "east".to_owned(),
        key: proto::GroupKey::new([7; 32]),
        shutdown: stop.clone(),
    };
    let tls = ServerTls::new(CertificateSource::Files(files(dir, "controller")), "east");
    tokio::spawn(async move {
        let _states = states;
        serve(Listeners { unix: None, tcp: Some((listener, std::sync::Arc::new(tls))) }, service).await
    });
    url
}

/// A gateway that dials `urls`, and what it knows.
fn gateway(
    dir: &Path,
    urls: Vec<ServerUrl>,
) -> (tokio::task::JoinHandle<Result<(), Failure>>, watch::Receiver<Option<GatewayState>>) {
    let settings = ClientSettings {
        urls,
        certificates: Some(files(dir, "edge-1")),
        group: None,
        gateway: "edge-1".to_owned(),
        version: "0.1.0".to_owned(),
        profile: watch::Sender::default().subscribe(),
        replication: None,
        needs_membership: false,
    };
    let (known, known_in) = watch::channel(None);
    let facts = Facts {
        served: watch::channel(Served::default()).1,
        applied: watch::channel(None).1,
        fleet: watch::Sender::default().subscribe(),
        workers: Vec::new(),
    };
    let (connected, draining) = (watch::Sender::new(false), watch::Sender::new(false));
    let answering = std::sync::Arc::new(|_: &_| v1::answer::Reply::Refusal("nobody asks".to_owned()));
    let membership = watch::Sender::default();
    let channels = ClientChannels { state: known, connected, draining, membership, contender: None, answering, facts };
    (tokio::spawn(ControllerClient { settings, channels }.run()), known_in)
}

#[tokio::test]
async fn a_gateway_that_dials_a_follower_goes_on_to_the_leader() {
    let (dir, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    issue(dir.path(), &["controller", "edge-1"]);
    let leads = controller(dir.path(), Leadership::Leading { epoch: "e".to_owned() }, &stop).await;
    let leader = Leader { identity: "b".to_owned(), address: Some(leads.to_string()) };
    let follows = controller(dir.path(), Leadership::Following(Some(leader)), &stop).await;
    let (client, mut known) = gateway(dir.path(), vec![follows]);
    let is_there = |known: &Option<GatewayState>| known.as_ref().is_some_and(|known| known.state.services.len() == 1);
    timeout(LONG, known.wait_for(is_there)).await.unwrap().unwrap();
    client.abort();
    stop.cancel();
}

/// Counts the connections to a listener, and passes them on to `target` if there is one.
async fn counted(target: Option<ServerUrl>) -> (ServerUrl, watch::Receiver<usize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            count.send_modify(|count| *count += 1);
            let Some(ServerUrl::Https(server)) = target.clone() else { continue };
            tokio::spawn(async move {
                let mut to = tokio::net::TcpStream::connect((server.host(), server.port())).await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
            });
        }
    });
    (https(port), counted)
}

#[tokio::test]
async fn the_address_of_a_leader_that_cannot_be_reached_is_not_dialled_again_and_again() {
    let (dir, stop) = (tempfile::tempdir().unwrap(), CancellationToken::new());
    issue(dir.path(), &["controller", "edge-1"]);
    let (unreachable, dials_of_leader) = counted(None).await;
    let leader = Leader { identity: "b".to_owned(), address: Some(unreachable.to_string()) };
    let follows = controller(dir.path(), Leadership::Following(Some(leader)), &stop).await;
    let (follows, mut dials) = counted(Some(follows)).await;
    let (client, _known) = gateway(dir.path(), vec![follows]);
    timeout(LONG, dials.wait_for(|count| *count >= 4)).await.unwrap().unwrap();
    assert_eq!(*dials_of_leader.borrow(), 1);
    client.abort();
    stop.cancel();
}
