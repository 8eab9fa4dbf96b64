//! Keys `listen`, `tls` and `advertise`: the addresses and certificates that a controller serves gateways with; and key
//! `admin`, those of the admin API.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};

use proto::limits::CONFIG_LISTEN;

use super::key_values::KeyValues;
use super::problem::Location;
use super::section::{Field, Section};
use crate::config::settings::{AdminListen, CertificateFiles, Certificates, Listen, ListenTcp};
use objects::scalar::is_dns_name;
use objects::scalar::url::{REMOTE_EXPECTED, SERVER_EXPECTED, ServerUrl, default_socket, socket};

const EXPECTED: &str = "unix:PATH, IP:PORT or [IP]:PORT";

/// One address to listen on.
enum Address {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// Reads the three keys.
pub(super) fn take(top: &mut Section<'_>) -> Listen {
    let field = top.field("listen");
    let location = field.as_ref().map(|field| field.location.clone());
    let (mut unix, tcp) = take_addresses(field.as_ref(), &top.reader.base());
    let (certificates, tls_location) = take_certificates(top);
    let advertise = top.field("advertise");
    let advertise = advertise.and_then(|field| Some((field.location.clone(), field.try_parse(REMOTE_EXPECTED, str::parse)?)));
    let no_effect = |location: &Location| {
        top.reader.problem(
            location,
            "found without a TCP address in `listen`, where it would have no effect; add one, or leave it out",
        );
    };
    let tcp = match (tcp, certificates) {
        (Some(address), Some(certificates)) => {
            Some(ListenTcp { address, certificates, advertise: advertise.map(|(_, url)| url) })
        }
        (Some(address), None) => {
            if let Some(location) = location.filter(|_| tls_location.is_none()) {
                top.reader.problem(
                    &location,
                    format!("found {address}, and no certificates; name them by `tls`, or use a unix socket"),
                );
            }
            None
        }
        (None, _) => {
            tls_location.iter().for_each(no_effect);
            advertise.iter().for_each(|(location, _)| no_effect(location));
            None
        }
    };
    if unix.is_none() && tcp.is_none() {
        unix = Some(default_socket(CONFIG_LISTEN));
    }
    Listen { unix, tcp }
}

/// Reads one or more addresses: at most one unix socket, and at most one of TCP.
fn take_addresses(field: Option<&Field<'_>>, base: &Path) -> (Option<PathBuf>, Option<SocketAddr>) {
    let (mut unix, mut tcp): (Option<PathBuf>, Option<SocketAddr>) = (None, None);
    for item in field.iter().flat_map(|field| field.one_or_more()) {
        let parse = |text: &str| match text.parse::<SocketAddr>() {
            Ok(address) if address.port() == 0 => Err("expected a port from 1 to 65535".to_owned()),
            Ok(address) => Ok(Address::Tcp(address)),
            Err(_) if text.starts_with("unix:") => socket(text, base).map(Address::Unix).map_err(|error| error.to_string()),
            Err(_) => Err(format!("expected {EXPECTED}")),
        };
        let second = match item.try_parse(EXPECTED, parse) {
            Some(Address::Unix(path)) => unix.replace(path).is_some(),
            Some(Address::Tcp(address)) => tcp.replace(address).is_some(),
            None => false,
        };
        if second {
            item.problem("found a second address of its kind; keep one unix socket and one TCP address at most");
        }
    }
    (unix, tcp)
}

/// Reads key `admin`; `default` is the socket if the key names none.
pub fn take_admin(top: &mut Section<'_>, default: &'static str) -> AdminListen {
    let mut section = top.section("admin");
    let field = section.field("listen");
    let (unix, address) = take_addresses(field.as_ref(), &section.reader.base());
    let mut tls = section.section("tls");
    let files = take_files(&mut tls);
    let is_tls_empty = section.field("tls").is_none_or(|field| field.is_empty());
    if let (Some(field), None, Some(address)) = (&field, &unix, address) {
        field.problem(format!("found {address} alone; add unix:PATH, by which sluice itself asks on this machine"));
    }
    match (address, &files) {
        (Some(address), None) if is_tls_empty => section.problem_of(
            "tls",
            format!("missing, expected `ca`, `cert` and `key`, which {address} needs: over TCP operators show certificates"),
        ),
        (None, _) if !is_tls_empty => {
            tls.problem("found without a TCP address in `admin.listen`, where it would have no effect; add one, or leave it out");
        }
        _ => {}
    }
    tls.finish();
    section.finish();
    AdminListen { unix: unix.unwrap_or_else(|| default_socket(default)), tcp: address.zip(files) }
}

/// Reports keys whose TCP addresses cannot be listened on together. Of two keys the one that comes later is reported.
pub fn check_listeners(top: &mut Section<'_>, listeners: &[(&'static str, Option<SocketAddr>)]) {
    let all: Vec<_> = listeners.iter().filter_map(|(key, address)| Some((*key, (*address)?))).collect();
    for (index, (key, address)) in all.iter().enumerate() {
        for (earlier, other) in all[..index].iter().filter(|(_, other)| excludes(*address, *other)) {
            let location = location_of(top, key);
            let message = format!("found {address}, the port of `{earlier}` ({other}); give each a port of its own");
            top.reader.problem(&location, message);
        }
    }
}

/// Whether Linux lets only one of two sockets listen. `[::]` includes the addresses of IPv4.
fn excludes(one: SocketAddr, other: SocketAddr) -> bool {
    let (first, second) = (one.ip().to_canonical(), other.ip().to_canonical());
    let holds = |whole: IpAddr, address: IpAddr| whole.is_unspecified() && (whole.is_ipv6() || address.is_ipv4());
    one.port() == other.port() && (first == second || holds(first, second) || holds(second, first))
}

/// The location of a key, or of its section if the file does not have it.
fn location_of(top: &mut Section<'_>, key: &'static str) -> Location {
    let line = match key.split_once('.') {
        Some((section, name)) => line_of(&mut top.section(section), name),
        None => line_of(top, key),
    };
    Location { line, key: key.to_owned() }
}

fn line_of(section: &mut Section<'_>, key: &'static str) -> usize {
    section.field(key).map_or(section.location.line, |field| field.location.line)
}

/// Key `admin` with its values.
#[must_use]
pub fn admin_key_values(listen: &AdminListen) -> KeyValues {
    let unix = ServerUrl::Unix(listen.unix.clone()).to_string();
    match &listen.tcp {
        None => KeyValues::default().with("listen", unix).section("tls", KeyValues::default()),
        Some((address, files)) => {
            KeyValues::default().with("listen", [unix, address.to_string()]).section("tls", files_key_values(files))
        }
    }
}

/// Reads key `tls`. The location is that of a key that is not empty.
fn take_certificates(top: &mut Section<'_>) -> (Option<Certificates>, Option<Location>) {
    let location = top.field("tls").filter(|field| !field.is_empty()).map(|field| field.location);
    let mut section = top.section("tls");
    let secret = section.field("secret").filter(|field| !field.is_empty());
    let certificates = match secret {
        Some(field) => {
            let name =
                field.parse("the name of a Secret in our own namespace", |text| is_dns_name(text).then(|| text.to_owned()));
            for key in ["ca", "cert", "key"] {
                if let Some(file) = section.field(key) {
                    file.problem("found beside `tls.secret`; keep one of the two");
                }
            }
            name.map(Certificates::Secret)
        }
        None => take_files(&mut section).map(Certificates::Files),
    };
    section.finish();
    (certificates, location)
}

/// Reads keys `ca`, `cert` and `key` of a section: all, or none.
pub fn take_files(section: &mut Section<'_>) -> Option<CertificateFiles> {
    let paths = ["ca", "cert", "key"].map(|key| section.path_of(key));
    if paths.iter().all(Option::is_none) {
        return None;
    }
    if let [Some(ca), Some(cert), Some(key)] = paths {
        return Some(CertificateFiles { ca, cert, key });
    }
    section.problem("expected all of `ca`, `cert` and `key`: paths of PEM files");
    None
}

/// The three keys with their values.
pub(super) fn key_values(listen: &Listen) -> KeyValues {
    let unix = listen.unix.iter().map(|path| ServerUrl::Unix(path.clone()).to_string());
    let all: Vec<_> = unix.chain(listen.tcp.iter().map(|tcp| tcp.address.to_string())).collect();
    let keys = match all.as_slice() {
        [one] => KeyValues::default().with("listen", one),
        all => KeyValues::default().with("listen", all),
    };
    let tls = match listen.tcp.as_ref().map(|tcp| &tcp.certificates) {
        None => KeyValues::default(),
        Some(Certificates::Secret(name)) => KeyValues::default().with("secret", name),
        Some(Certificates::Files(files)) => files_key_values(files),
    };
    keys.section("tls", tls).with("advertise", listen.advertised())
}

/// Keys `ca`, `cert` and `key` with their values.
#[must_use]
pub fn files_key_values(CertificateFiles { ca, cert, key }: &CertificateFiles) -> KeyValues {
    KeyValues::default().with("ca", ca).with("cert", cert).with("key", key)
}

/// Reads the URL of a controller, as a gateway dials it.
pub fn take_url(field: &Field<'_>, base: &Path) -> Option<ServerUrl> {
    field.try_parse(SERVER_EXPECTED, |text| ServerUrl::parse(text, base))
}
