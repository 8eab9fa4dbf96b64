//! A gateway and a controller over TCP, with valid, invalid and renewed certificates.

use std::path::Path;

use hyper_util::rt::TokioIo;
use proto::limits::LEADER_METADATA;
use proto::v1::config_client::ConfigClient;
use proto::v1::watch_request::Message;
use proto::v1::{Hello, WatchRequest, WatchResponse};
use rustls::pki_types::ServerName;
use tokio_rustls::TlsConnector;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status, Streaming};

use super::*;
use crate::gateways::publish::{Published, tests::services};
use crate::gateways::registry::Gateways;
use crate::gateways::server::{ConfigService, serve};
use crate::gateways::tls::tests::Authority;
use crate::gateways::tls::{client_config, identities};
use crate::kubernetes::lease::{Leader, Leadership};
use objects::scalar::url::{HostPort, ServerUrl};

const WAIT: Duration = Duration::from_secs(20);

/// A channel to a controller as a gateway opens it, and the group of the certificate. Of an error: its text with its
/// causes.
async fn dial(url: &ServerUrl, gateway: &str, material: &Material) -> Result<(Channel, String), String> {
    let ServerUrl::Https(server) = url.clone() else { panic!("not over TCP") };
    let (config, group) = client_config(material, gateway).map_err(|error| error.to_string())?;
    let connector = TlsConnector::from(Arc::new(config));
    let connect = tower::service_fn(move |_: http::Uri| {
        let (connector, server) = (connector.clone(), server.clone());
        async move {
            let stream = TcpStream::connect((server.host(), server.port())).await?;
            connector.connect(ServerName::try_from(server.host().to_owned()).unwrap(), stream).await.map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_static("http://controller");
    let channel = endpoint.connect_with_connector(connect).await.map_err(|error| chain(&error))?;
    Ok((channel, group))
}

/// A controller of group east on a free port.
struct Lab {
    dir: tempfile::TempDir,
    authority: Authority,
    url: ServerUrl,
    leadership: watch::Sender<Leadership>,
    _states: watch::Sender<Option<Arc<Published>>>,
    shutdown: CancellationToken,
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.shutdown.cancel();
    }
}

fn write(dir: &Path, name: &str, material: &Material) -> CertificateFiles {
    let file = |end: &str, content: &[u8]| {
        let path = dir.join(format!("{name}.{end}"));
        std::fs::write(&path, content).unwrap();
        path
    };
    CertificateFiles { ca: file("ca", &material.ca), cert: file("crt", &material.certificate), key: file("key", &material.key) }
}

impl Lab {
    async fn new() -> Self {
        let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
        let files = write(dir.path(), "controller", &authority.issue(&["sluice://east/controller"]));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = ServerUrl::Https(HostPort::new("127.0.0.1", listener.local_addr().unwrap().port()).unwrap());
        let published = Published::first("e".to_owned(), services(&[("web", 1)]), Vec::new());
        let (_states, states) = watch::channel(Some(Arc::new(published)));
        let (leadership, led) = watch::channel(Leadership::Leading { epoch: "e".to_owned() });
        let shutdown = CancellationToken::new();
        let service = ConfigService {
            fleet: crate::gateways::fleet_queries::Fleet::default(),
            arbiter: crate::gateways::arbiter::Arbiter::default(),
            states,
            gateways: watch::channel(Gateways::default()).0,
            leadership: led,
            group: "east".to_owned(),
            key: proto::GroupKey::new([7; 32]),
            shutdown: shutdown.clone(),
        };
        let tls = Arc::new(ServerTls::new(CertificateSource::Files(files), "east"));
        tokio::spawn(serve(Listeners { unix: None, tcp: Some((listener, tls)) }, service));
        Self { dir, authority, url, leadership, _states, shutdown }
    }

    /// The answer to a gateway of this name with this certificate: a stream and its first message, or an error.
    async fn dial(&self, gateway: &str, material: &Material) -> Result<(Streaming<WatchResponse>, WatchResponse), Status> {
        // The channel uses the name in the certificate; the Hello claims `gateway`.
        let (channel, group) = dial(&self.url, &named(material), material).await.map_err(Status::unavailable)?;
        let hello = Hello { gateway: gateway.to_owned(), version: "test".to_owned(), group, ..Hello::default() };
        let requests = tokio_stream::once(WatchRequest { message: Some(Message::Hello(hello)) }).chain(tokio_stream::pending());
        let mut stream = ConfigClient::new(channel).watch(requests).await?.into_inner();
        let first = tokio::time::timeout(WAIT, stream.message()).await.unwrap()?;
        first.map(|first| (stream, first)).ok_or_else(|| Status::aborted("the stream ended"))
    }

    async fn refuses(&self, gateway: &str, material: &Material) -> Status {
        self.dial(gateway, material).await.err().unwrap()
    }
}

/// The name in a certificate.
fn named(material: &Material) -> String {
    use rustls::pki_types::pem::PemObject as _;
    let certificate = rustls::pki_types::CertificateDer::from_pem_slice(&material.certificate).unwrap();
    identities(&certificate)[0].name.clone()
}

/// The message of a status with its causes.
fn words(status: &Status) -> String {
    let cause = std::error::Error::source(status).map(chain).unwrap_or_default();
    format!("{} {cause}", status.message())
}

#[tokio::test]
async fn a_gateway_with_its_certificate_is_served_over_tcp() {
    let lab = Lab::new().await;
    let (_stream, first) = lab.dial("edge-1", &lab.authority.issue(&["sluice://east/edge-1"])).await.unwrap();
    assert!(first.full && first.services.len() == 1);
}

#[tokio::test]
async fn a_gateway_speaks_only_for_itself() {
    let lab = Lab::new().await;
    let status = lab.refuses("edge-2", &lab.authority.issue(&["sluice://east/edge-1"])).await;
    assert_eq!(status.code(), Code::PermissionDenied);
    let expected = "the gateway's certificate is for sluice://east/edge-1; expected sluice://east/edge-2: correct";
    assert!(status.message().starts_with(expected), "{status}");
    let status = lab.refuses("controller", &lab.authority.issue(&["sluice://east/controller"])).await;
    assert_eq!(status.code(), Code::PermissionDenied, "{status}");
}

#[tokio::test]
async fn a_gateway_rejects_a_controller_of_another_group() {
    let lab = Lab::new().await;
    let status = lab.refuses("edge-1", &lab.authority.issue(&["sluice://west/edge-1"])).await;
    let expected =
        "the certificate is for sluice://east/controller; expected sluice://west/controller, a controller of our own group";
    assert!(words(&status).contains(expected), "{}", words(&status));
}

#[tokio::test]
async fn certificates_of_other_authorities_and_expired_ones_are_refused_with_a_reason_on_both_sides() {
    let lab = Lab::new().await;
    let own = lab.authority.issue(&["sluice://east/edge-1"]);
    let expired = lab.authority.issue_until(&["sluice://east/edge-1"], 2020);
    assert!(words(&lab.refuses("edge-1", &expired).await).contains("certificate expired"));
    let stranger = Authority::new().issue(&["sluice://east/edge-1"]);
    assert!(words(&lab.refuses("edge-1", &stranger).await).contains("UnknownIssuer"));
    // It trusts our authority, but the controller does not know the authority of its certificate.
    let ca = Material { ca: [own.ca.clone(), stranger.ca.clone()].concat(), ..stranger };
    let message = words(&lab.refuses("edge-1", &ca).await);
    assert!(message.contains("UnknownCA") || message.contains("DecryptError"), "{message}");
}

#[tokio::test]
async fn peers_without_tls_or_certificate_are_not_served() {
    let lab = Lab::new().await;
    let ServerUrl::Https(ref server) = lab.url else { panic!("not over TCP") };
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{server}")).unwrap();
    match endpoint.connect().await {
        Err(_) => {}
        Ok(channel) => {
            let requests = tokio_stream::once(WatchRequest { message: Some(Message::Hello(Hello::default())) });
            assert!(tokio::time::timeout(WAIT, ConfigClient::new(channel).watch(requests)).await.unwrap().is_err());
        }
    }
}

#[tokio::test]
async fn renewed_certificates_count_from_the_next_connection_on_and_open_streams_stay() {
    let lab = Lab::new().await;
    let own = lab.authority.issue(&["sluice://east/edge-1"]);
    let (mut open, _) = lab.dial("edge-1", &own).await.unwrap();
    // From another authority: gateways that trust only the old one cannot connect.
    let next = Authority::new();
    write(lab.dir.path(), "controller", &next.issue(&["sluice://east/controller"]));
    lab.refuses("edge-1", &own).await;
    let (_stream, _) = lab.dial("edge-1", &next.issue(&["sluice://east/edge-1"])).await.unwrap();
    // An invalid certificate is not used: the last valid one stays.
    std::fs::write(lab.dir.path().join("controller.crt"), "half").unwrap();
    let (_stream, _) = lab.dial("edge-1", &next.issue(&["sluice://east/edge-1"])).await.unwrap();
    lab.leadership.send_replace(Leadership::Following(None));
    let end = tokio::time::timeout(WAIT, open.message()).await.unwrap().unwrap_err();
    assert_eq!(end.code(), Code::FailedPrecondition, "the first stream was open until now");
}

#[tokio::test]
async fn the_expiration_is_that_of_the_certificates_in_use_also_after_unusable_ones_were_written() {
    let (dir, authority) = (tempfile::tempdir().unwrap(), Authority::new());
    let issued = |until_s| authority.issue_until_unix(&["sluice://east/controller"], Duration::from_secs(until_s));
    let first = issued(1_900_000_000);
    let files = write(dir.path(), "controller", &first);
    let tls = Arc::new(ServerTls::new(CertificateSource::Files(files.clone()), "east"));
    let shown = KeyCertificates { key: "tls", shown_by: ShownBy::Server(Arc::clone(&tls)) };
    let until_s = || shown.validity().map(|validity| validity.until_s);
    tls.read().await.unwrap();
    assert_eq!(until_s(), Some(1_900_000_000));
    // The key of another certificate remains.
    std::fs::write(&files.cert, &issued(1_950_000_000).certificate).unwrap();
    assert!(tls.read().await.is_err() && tls.newest().await.is_some());
    assert_eq!(until_s(), Some(1_900_000_000), "the first one stays in use");
    write(dir.path(), "controller", &issued(1_960_000_000));
    assert_eq!(until_s(), Some(1_960_000_000), "whether or not anybody has connected since");
    std::fs::remove_file(&files.ca).unwrap();
    assert_eq!(until_s(), Some(1_960_000_000));
}

#[tokio::test]
async fn a_gateway_that_dials_a_follower_gets_the_address_of_the_leader() {
    let lab = Lab::new().await;
    let leader = Leader { identity: "b".to_owned(), address: Some("https://192.0.2.9:9443".to_owned()) };
    lab.leadership.send_replace(Leadership::Following(Some(leader)));
    let status = lab.refuses("edge-1", &lab.authority.issue(&["sluice://east/edge-1"])).await;
    assert_eq!(status.code(), Code::FailedPrecondition);
    assert_eq!(status.metadata().get(LEADER_METADATA).unwrap(), "https://192.0.2.9:9443");
}

#[tokio::test]
async fn a_gateway_whose_certificate_has_expired_loses_its_stream() {
    let lab = Lab::new().await;
    // On a busy machine a short one may have expired before the handshake.
    let mut valid_s = 4;
    let (mut stream, channel) = loop {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        let material = lab.authority.issue_until_unix(&["sluice://east/edge-1"], now + Duration::from_secs(valid_s));
        if let Ok((stream, _)) = lab.dial("edge-1", &material).await {
            let (channel, _) = dial(&lab.url, "edge-1", &material).await.unwrap();
            break (stream, channel);
        }
        assert!(valid_s < 60, "it is not served");
        valid_s *= 2;
    };
    let end = tokio::time::timeout(WAIT + Duration::from_secs(valid_s), stream.message()).await.unwrap().unwrap_err();
    assert_eq!(end.code(), Code::Unauthenticated, "{end}");
    assert!(end.message().contains("certificate expired"), "{end}");
    // A new stream on the existing connection is not served either.
    let requests =
        tokio_stream::once(WatchRequest { message: Some(Message::Hello(Hello::default())) }).chain(tokio_stream::pending());
    let mut stream = ConfigClient::new(channel.clone()).watch(requests).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap_err().code(), Code::Unauthenticated);
    let offers = tokio_stream::pending::<proto::v1::Answer>();
    let mut questions = proto::v1::fleet_client::FleetClient::new(channel).serve(offers).await.unwrap().into_inner();
    assert_eq!(questions.message().await.unwrap_err().code(), Code::Unauthenticated);
}

/// A dial has 5 s; the handshakes of the idle connections would last 10 s.
#[tokio::test]
async fn idle_connections_block_no_gateway() {
    let lab = Lab::new().await;
    let ServerUrl::Https(ref server) = lab.url else { panic!("not over TCP") };
    let mut idle = Vec::new();
    for _ in 0..2 * HANDSHAKES_MAX {
        idle.push(TcpStream::connect((server.host(), server.port())).await.unwrap());
    }
    let (_stream, first) = lab.dial("edge-1", &lab.authority.issue(&["sluice://east/edge-1"])).await.unwrap();
    assert!(first.full, "{first:?}");
    let mut byte = [0];
    let end = tokio::time::timeout(WAIT, tokio::io::AsyncReadExt::read(&mut idle[0], &mut byte)).await.unwrap();
    assert!(matches!(end, Ok(0) | Err(_)), "the oldest gave way: {end:?}");
}
