//! The destination of flow records: key `flowRecords.to`.

use std::fmt;
use std::path::{Path, PathBuf};

use objects::scalar::url::HostPort;

/// The formats of [`RecordTarget::parse`].
pub(super) const EXPECTED: &str =
    "ipfix://HOST:PORT, with an IPv6 address in brackets, or file:PATH in a directory that is not the system's";

/// A target of flow records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecordTarget {
    /// A collector of IPFIX over UDP.
    Ipfix(HostPort),
    /// A file of JSON lines.
    File(PathBuf),
}

impl RecordTarget {
    /// Reads `ipfix://HOST:PORT` or `file:PATH`; relative paths start at `base`.
    ///
    /// # Errors
    /// What is expected instead, as the end of a message after "found X, ".
    pub(super) fn parse(text: &str, base: &Path) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("file:") {
            return Self::file(path, base).ok_or_else(|| format!("expected {EXPECTED}"));
        }
        HostPort::of_url(text, "ipfix", EXPECTED).map(Self::Ipfix).map_err(|error| error.to_string())
    }

    fn file(path: &str, base: &Path) -> Option<Self> {
        let is_file = !path.is_empty() && !path.starts_with("//") && !path.ends_with('/');
        let path = is_file.then(|| std::path::absolute(base.join(path)).ok()).flatten()?;
        // The gateway may write to the whole directory (`commands::run::privileges`), so that must not be the system's.
        let has_directory = path.parent().is_some_and(|dir| dir.parent().is_some() && !is_of_system(dir));
        (has_directory && path.file_name().is_some()).then_some(Self::File(path))
    }
}

/// Whether the system's own files and programs are in a directory.
fn is_of_system(dir: &Path) -> bool {
    let trees = ["/bin", "/boot", "/dev", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr"];
    trees.iter().any(|tree| dir.starts_with(tree)) || ["/etc", "/run", "/var"].iter().any(|own| dir == Path::new(own))
}

impl fmt::Display for RecordTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ipfix(collector) => write!(f, "ipfix://{collector}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_collectors_and_files() {
        let read = |text| RecordTarget::parse(text, Path::new("/etc/sluice")).ok().map(|target| target.to_string());
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
            "ipfix://192.0.2.300:4739",
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
        let why = RecordTarget::parse("ipfix://192.0.2.9", Path::new("/etc/sluice")).unwrap_err();
        assert!(why.contains("expected a port"), "{why}");
    }
}
