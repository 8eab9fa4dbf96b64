//! URLs of the configuration, of command lines and of what a leader says of itself: of a controller, of an admin API and
//! of a collector; and the unix sockets that both sides name alike.
//!
//! Invariant: past this module a host is a DNS name or an address, never with brackets, and a port is never 0. Only what
//! is printed has brackets. `http::Uri` splits a URL (RFC 3986); this module adds what a server to dial must have.
//! Deliberately not here: the `Host` of requests, which `http::uri::Authority` is, and connecting.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use http::Uri;

/// Bytes of a unix socket path that fit `sockaddr_un` on Linux: 108 with the terminating zero.
pub const SOCKET_PATH_BYTES_MAX: usize = 107;

/// Why a URL is not one that sluice can use. The texts continue a sentence that begins with "found X, ".
#[derive(Debug, thiserror::Error)]
pub enum UrlError {
    /// Another scheme, or no URL at all.
    #[error("expected {0}")]
    Form(&'static str),
    /// HTTP without TLS.
    #[error("without TLS; over TCP both sides show certificates, so write https://HOST:PORT")]
    Plain,
    /// An IPv6 address whose last group may be a port.
    #[error("expected brackets around an IPv6 address, such as {0}://[2001:db8::1]:9443")]
    Brackets(&'static str),
    /// A user, a path, a query or a fragment.
    #[error("expected nothing but a host and a port: {0}://HOST:PORT")]
    More(&'static str),
    /// No port, or an impossible one.
    #[error("expected a port from 1 to 65535 behind the host: {0}://HOST:PORT")]
    Port(&'static str),
    /// Neither a name nor an address.
    #[error("expected a DNS name or an address, without a port, and found `{0}` as host")]
    Host(String),
    /// A path that Linux cannot bind.
    #[error("{0} bytes; expected a path of at most {SOCKET_PATH_BYTES_MAX} bytes, which is Linux's limit")]
    SocketPath(usize),
    /// A relative path of a command line cannot be completed.
    #[error("whose directory is unknown: the current one cannot be read ({0}); give an absolute path")]
    Directory(io::Error),
}

/// A host and a port of it, as a client dials it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HostPort {
    host: String,
    port: u16,
}

impl HostPort {
    /// A name or an address with or without brackets, and a port.
    ///
    /// # Errors
    /// [`UrlError::Host`] or [`UrlError::Port`].
    pub fn new(host: &str, port: u16) -> Result<Self, UrlError> {
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(bracketed) => bracketed.parse::<Ipv6Addr>().ok().map(|address| address.to_string()),
            None => host.parse::<IpAddr>().ok().map(|ip| ip.to_string()).or_else(|| is_name(host).then(|| host.to_owned())),
        }
        .ok_or_else(|| UrlError::Host(host.to_owned()))?;
        if port == 0 { Err(UrlError::Port("https")) } else { Ok(Self { host, port }) }
    }

    /// Parses `SCHEME://HOST:PORT`.
    ///
    /// # Errors
    /// See [`UrlError`].
    pub fn of_url(text: &str, scheme: &'static str, form: &'static str) -> Result<Self, UrlError> {
        let behind = text.split_once("://").filter(|(found, _)| found.eq_ignore_ascii_case(scheme)).map(|(_, rest)| rest);
        let Some(behind) = behind.filter(|rest| !rest.is_empty()) else { return Err(UrlError::Form(form)) };
        let host_and_port = behind.split(['/', '?', '#']).next().and_then(|authority| authority.rsplit('@').next());
        if host_and_port.is_some_and(|text| !text.contains('[') && text.matches(':').count() > 1) {
            return Err(UrlError::Brackets(scheme));
        }
        let uri: Uri = text.parse().map_err(|_| UrlError::Form(form))?;
        let Some(authority) = uri.authority() else { return Err(UrlError::Form(form)) };
        let has_path = uri.path_and_query().is_some_and(|path| path != "/");
        if has_path || authority.as_str().contains('@') || text.contains('#') {
            return Err(UrlError::More(scheme));
        }
        // A sign would parse as a part of the number.
        let digits = authority.port().filter(|port| port.as_str().bytes().all(|byte| byte.is_ascii_digit()));
        let port = digits.map(|port| port.as_u16()).filter(|port| *port > 0).ok_or(UrlError::Port(scheme))?;
        Self::new(authority.host(), port)
    }

    /// The name or the address, without brackets.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The port, which is not 0.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Where a controller or an admin API is served: on a unix socket, or on TCP with TLS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerUrl {
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `https://HOST:PORT`.
    Https(HostPort),
}

/// The formats of [`ServerUrl::parse`].
pub const SERVER_EXPECTED: &str = "unix:PATH or https://HOST:PORT";

/// The format of the part of a [`ServerUrl`] that other machines can use.
pub const REMOTE_EXPECTED: &str = "https://HOST:PORT";

impl ServerUrl {
    /// Parses one; a relative path is taken from `base`.
    ///
    /// # Errors
    /// See [`UrlError`].
    pub fn parse(text: &str, base: &Path) -> Result<Self, UrlError> {
        if text.starts_with("unix:") { socket(text, base).map(Self::Unix) } else { Self::remote(text, SERVER_EXPECTED) }
    }

    /// Parses one of a command line; a relative path is taken from the current directory.
    ///
    /// # Errors
    /// See [`UrlError`].
    pub fn of_argument(text: &str) -> Result<Self, UrlError> {
        Self::parse(text, &std::env::current_dir().map_err(UrlError::Directory)?)
    }

    fn remote(text: &str, form: &'static str) -> Result<Self, UrlError> {
        if text.starts_with("http://") {
            return Err(UrlError::Plain);
        }
        HostPort::of_url(text, "https", form).map(Self::Https)
    }
}

impl FromStr for ServerUrl {
    type Err = UrlError;

    /// Parses `https://HOST:PORT`: what a leader may say of itself to another machine.
    fn from_str(text: &str) -> Result<Self, UrlError> {
        Self::remote(text, REMOTE_EXPECTED)
    }
}

impl fmt::Display for ServerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Https(server) => write!(f, "https://{server}"),
        }
    }
}

/// Parses `unix:PATH`; a relative path is relative to `base`.
///
/// # Errors
/// [`UrlError::Form`] or [`UrlError::SocketPath`].
pub fn socket(text: &str, base: &Path) -> Result<PathBuf, UrlError> {
    let path = text.strip_prefix("unix:").filter(|path| !path.is_empty()).ok_or(UrlError::Form("unix:PATH"))?;
    let path = base.join(path);
    let bytes = path.as_os_str().len();
    if bytes > SOCKET_PATH_BYTES_MAX { Err(UrlError::SocketPath(bytes)) } else { Ok(path) }
}

/// The path in a `unix:PATH` of this program's own defaults.
#[must_use]
pub fn default_socket(url: &'static str) -> PathBuf {
    PathBuf::from(url.strip_prefix("unix:").unwrap_or(url))
}

/// Whether a text is a host name: labels of RFC 1123 section 2.1, also with `_`, which names of containers have, and
/// not a number at its end, which is an IPv4 address gone wrong (WHATWG URL, section 3.5).
fn is_name(text: &str) -> bool {
    let legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let is_label = |label: &str| {
        (1..=63).contains(&label.len()) && label.bytes().all(legal) && !label.starts_with('-') && !label.ends_with('-')
    };
    let name = text.strip_suffix('.').unwrap_or(text);
    let ends_in_number = name.rsplit('.').next().is_some_and(|last| last.bytes().all(|byte| byte.is_ascii_digit()));
    text.len() <= 253 && name.split('.').all(is_label) && !ends_in_number
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "/etc/sluice";

    #[test]
    fn a_formatted_url_parses_to_the_same_url() {
        for text in ["unix:/run/a.sock", "https://192.0.2.1:9443", "https://[2001:db8::1]:9443", "https://controller.example:1"] {
            assert_eq!(ServerUrl::parse(text, Path::new(BASE)).unwrap().to_string(), text);
        }
        for (text, canonical) in [
            ("unix:a.sock", "unix:/etc/sluice/a.sock"),
            ("https://[2001:DB8:0::1]:9443", "https://[2001:db8::1]:9443"),
            ("https://a:1/", "https://a:1"),
            ("https://sluice_controller_1:1", "https://sluice_controller_1:1"),
        ] {
            assert_eq!(ServerUrl::parse(text, Path::new(BASE)).unwrap().to_string(), canonical);
        }
    }

    #[test]
    fn a_wrong_url_says_what_is_wrong_with_it() {
        let error = |text| ServerUrl::parse(text, Path::new(BASE)).unwrap_err().to_string();
        for (text, why) in [
            ("", "expected unix:PATH or https://HOST:PORT"),
            ("192.0.2.1:9", "expected unix:PATH or https://HOST:PORT"),
            ("/a", "expected unix:PATH or https://HOST:PORT"),
            ("ftp://a:1", "expected unix:PATH or https://HOST:PORT"),
            ("https://", "expected unix:PATH or https://HOST:PORT"),
            ("https://a b:1", "expected unix:PATH or https://HOST:PORT"),
            ("unix:", "expected unix:PATH"),
            ("http://a:1", "without TLS"),
            ("https://a", "expected a port from 1 to 65535"),
            ("https://a:", "expected a port from 1 to 65535"),
            ("https://a:0", "expected a port from 1 to 65535"),
            ("https://a:65536", "expected a port from 1 to 65535"),
            ("https://[2001:db8::1]", "expected a port from 1 to 65535"),
            ("https://a:1/x", "expected nothing but a host and a port"),
            ("https://a:1?x", "expected nothing but a host and a port"),
            ("https://a:1#x", "expected nothing but a host and a port"),
            ("https://user@a:1", "expected nothing but a host and a port"),
            ("https://user:pw@a:9443", "expected nothing but a host and a port"),
            ("https://a:1/x:y", "expected nothing but a host and a port"),
            ("https://a:1?x:y:z", "expected nothing but a host and a port"),
            ("https://a:+9443", "expected a port from 1 to 65535"),
            ("https://2001:db8::1:9", "expected brackets around an IPv6 address"),
            ("https://192.0.2.300:9", "found `192.0.2.300` as host"),
            ("https://[192.0.2.1]:9", "found `[192.0.2.1]` as host"),
            ("https://a..b:9", "found `a..b` as host"),
            ("https://-a:9", "found `-a` as host"),
        ] {
            assert!(error(text).contains(why), "{text}: {}", error(text));
        }
        let remote = "unix:/run/a.sock".parse::<ServerUrl>().unwrap_err();
        assert_eq!(remote.to_string(), "expected https://HOST:PORT", "a path of another machine");
    }

    #[test]
    fn a_host_and_a_port_are_checked_and_canonical() {
        for (host, expected) in [("a.example.", "a.example.:9"), ("[fd00:0::1]", "[fd00::1]:9"), ("fd00::1", "[fd00::1]:9")] {
            assert_eq!(HostPort::new(host, 9).unwrap().to_string(), expected);
        }
        for (host, port) in [("a:1", 9), ("", 9), ("[a]", 9), ("a", 0), (&*"x".repeat(64), 9)] {
            assert!(HostPort::new(host, port).is_err(), "{host} {port}");
        }
    }

    #[test]
    fn sockets_are_unix_paths_that_fit_linux() {
        let base = Path::new(BASE);
        assert_eq!(socket("unix:/run/a.sock", base).unwrap(), PathBuf::from("/run/a.sock"));
        assert_eq!(socket("unix:a.sock", base).unwrap(), PathBuf::from("/etc/sluice/a.sock"));
        assert!(socket("127.0.0.1:80", base).unwrap_err().to_string().contains("unix:PATH"));
        assert!(socket("unix:", base).is_err());
        let longest = format!("unix:/{}", "x".repeat(106));
        assert!(socket(&longest, base).is_ok());
        assert!(socket(&format!("{longest}x"), base).unwrap_err().to_string().contains("at most 107"));
        assert_eq!(default_socket("unix:/run/sluice/admin.sock"), PathBuf::from("/run/sluice/admin.sock"));
    }
}
