//! Where records of flows go: key `flowRecords.to`.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};

/// A target of flow records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordTarget {
    /// A collector of IPFIX over UDP.
    Ipfix {
        /// Its name or address, without brackets.
        host: String,
        /// Its UDP port.
        port: u16,
    },
    /// A file of JSON lines.
    File(PathBuf),
}

impl RecordTarget {
    /// Reads `ipfix://HOST:PORT` or `file:PATH`; relative paths start at `base`.
    pub(super) fn parse(text: &str, base: &Path) -> Option<Self> {
        if let Some(path) = text.strip_prefix("file:") {
            let is_file = !path.is_empty() && !path.starts_with("//") && !path.ends_with('/');
            let path = is_file.then(|| std::path::absolute(base.join(path)).ok()).flatten()?;
            // The gateway may write to the whole directory (`run::privileges`), so that must not be the system's.
            let has_directory = path.parent().is_some_and(|dir| dir.parent().is_some() && !is_of_system(dir));
            return (has_directory && path.file_name().is_some()).then_some(Self::File(path));
        }
        let (host, port) = text.strip_prefix("ipfix://")?.rsplit_once(':')?;
        let port = port.parse().ok().filter(|port| *port != 0)?;
        let host = match host.strip_prefix('[') {
            Some(address) => address.strip_suffix(']')?.parse::<Ipv6Addr>().ok()?.to_string(),
            None => Some(host).filter(|host| is_host(host))?.to_owned(),
        };
        Some(Self::Ipfix { host, port })
    }
}

/// Whether the system's own files and programs are in a directory.
fn is_of_system(dir: &Path) -> bool {
    let trees = ["/bin", "/boot", "/dev", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr"];
    trees.iter().any(|tree| dir.starts_with(tree)) || ["/etc", "/run", "/var"].iter().any(|own| dir == Path::new(own))
}

/// Whether a text is an IPv4 address, or a host name (RFC 1123 section 2.1).
fn is_host(text: &str) -> bool {
    let is_label = |label: &str| {
        let is_legal = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        (1..=63).contains(&label.len()) && label.bytes().all(is_legal) && !label.starts_with('-') && !label.ends_with('-')
    };
    text.len() <= 253 && text.strip_suffix('.').unwrap_or(text).split('.').all(is_label)
}

impl fmt::Display for RecordTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipfix { host, port } if host.contains(':') => write!(f, "ipfix://[{host}]:{port}"),
            Self::Ipfix { host, port } => write!(f, "ipfix://{host}:{port}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_collectors_and_files() {
        let read = |text| RecordTarget::parse(text, Path::new("/etc/sluice")).map(|target| target.to_string());
        let rows = [
            ("ipfix://192.0.2.9:4739", "ipfix://192.0.2.9:4739"),
            ("ipfix://[2001:db8:0::9]:4739", "ipfix://[2001:db8::9]:4739"),
            ("ipfix://collector.example.org:9995", "ipfix://collector.example.org:9995"),
            ("file:/var/log/sluice/flows.jsonl", "file:/var/log/sluice/flows.jsonl"),
            ("file:flows.jsonl", "file:/etc/sluice/flows.jsonl"),
        ];
        for (text, expected) in rows {
            let printed = read(text);
            assert_eq!(printed.as_deref(), Some(expected), "{text}");
            assert_eq!(read(expected).as_deref(), Some(expected), "{expected} reads back");
        }
        let wrong = [
            "192.0.2.9:4739",
            "ipfix://192.0.2.9",
            "ipfix://192.0.2.9:0",
            "ipfix://192.0.2.9:65536",
            "ipfix://2001:db8::9:4739",
            "ipfix://[192.0.2.9]:4739",
            "ipfix://:4739",
            "ipfix://a_b:4739",
            "ipfix://user@host:4739",
            "udp://192.0.2.9:4739",
            "file:",
            "file:/",
            "file:/flows.jsonl",
            "file:/dev/flows",
            "file:/usr/local/bin/flows",
            "file:/etc/flows.jsonl",
            "file:///var/log/flows",
            "/var/log/flows",
        ];
        for text in wrong {
            assert_eq!(read(text), None, "{text}");
        }
    }
}
