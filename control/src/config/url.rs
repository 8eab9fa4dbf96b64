//! The URL of a controller: a unix socket, or TCP with TLS.
//!
//! Deliberately not here: connecting to it, which the gateway does (`dial` in its agent).

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use rustls::pki_types::ServerName;

use objects::scalar;

/// Where a controller is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControllerUrl {
    /// `unix:PATH`.
    Unix(PathBuf),
    /// `https://HOST:PORT`.
    Https {
        /// A name or an address, without brackets.
        host: String,
        /// The port.
        port: u16,
    },
}

impl ControllerUrl {
    /// Parses one; a relative path is taken from `base`.
    ///
    /// # Errors
    /// What is expected instead, as the end of a message after "found X, ".
    pub fn parse(text: &str, base: &Path) -> Result<Self, String> {
        if text.starts_with("unix:") { scalar::socket(text, base).map(Self::Unix) } else { text.parse() }
    }
}

impl FromStr for ControllerUrl {
    type Err = String;

    /// Parses `https://HOST:PORT`: what a leader may say of itself to another machine.
    fn from_str(text: &str) -> Result<Self, String> {
        let error = || "expected https://HOST:PORT".to_owned();
        let (host, port) = text.strip_prefix("https://").and_then(|rest| rest.rsplit_once(':')).ok_or_else(error)?;
        let port = port.parse().ok().filter(|port| *port > 0).ok_or_else(error)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_right = match bare {
            Some(bare) => matches!(bare.parse(), Ok(IpAddr::V6(_))),
            None => !host.contains(':') && ServerName::try_from(host).is_ok(),
        };
        if is_right { Ok(Self::Https { host: bare.unwrap_or(host).to_owned(), port }) } else { Err(error()) }
    }
}

impl fmt::Display for ControllerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Https { host, port } if host.contains(':') => write!(f, "https://[{host}]:{port}"),
            Self::Https { host, port } => write!(f, "https://{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_formatted_url_parses_to_the_same_url() {
        let base = Path::new("/etc/sluice");
        for text in ["unix:/run/a.sock", "https://192.0.2.1:9443", "https://[2001:db8::1]:9443", "https://controller.example:1"] {
            assert_eq!(ControllerUrl::parse(text, base).unwrap().to_string(), text);
        }
        for text in [
            "",
            "192.0.2.1:9",
            "http://a:1",
            "https://a",
            "https://a:0",
            "https://a:1/x",
            "https://2001:db8::1:9",
            "https://[a]:1",
            "unix:",
        ] {
            assert!(ControllerUrl::parse(text, base).is_err(), "{text}");
        }
        assert!("unix:/run/a.sock".parse::<ControllerUrl>().is_err(), "a path of another machine");
    }
}
