//! Priorities of lines that a program writes to systemd's journal (sd-daemon(3), systemd.exec(5) `SyslogLevelPrefix=`).
//!
//! systemd makes an entry of each line that a unit writes to stderr. A line that begins with `<4>` has priority 4, any
//! other one the priority of the unit, 6.

use std::ffi::OsStr;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;

/// Environment variable with device and inode of the stream to the journal, `8:12345`. A program inherits it also when
/// its own stderr leads elsewhere.
pub const STREAM_VARIABLE: &str = "JOURNAL_STREAM";
/// Priority of an error.
pub const ERROR: u8 = 3;
/// Priority of a warning.
pub const WARNING: u8 = 4;
/// Priority of ordinary messages.
pub const INFO: u8 = 6;
/// Priority of messages for a closer look.
pub const DEBUG: u8 = 7;

/// Whether the file with this metadata is the stream that the value of [`STREAM_VARIABLE`] names.
#[must_use]
pub fn is_stream(value: Option<&OsStr>, file: &Metadata) -> bool {
    let numbers = value.and_then(OsStr::to_str).and_then(|value| value.split_once(':'));
    numbers.is_some_and(|(device, inode)| device.parse() == Ok(file.dev()) && inode.parse() == Ok(file.ino()))
}

/// The text with a priority before each of its lines.
#[must_use]
pub fn with_priority(priority: u8, text: &[u8]) -> Vec<u8> {
    let prefix = format!("<{priority}>");
    text.split_inclusive(|byte| *byte == b'\n').flat_map(|line| [prefix.as_bytes(), line]).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_has_the_priority() {
        assert_eq!(with_priority(WARNING, b"a\n\nb\n"), b"<4>a\n<4>\n<4>b\n");
        assert_eq!(with_priority(ERROR, b"a"), b"<3>a");
        assert_eq!(with_priority(ERROR, b""), b"");
    }

    #[test]
    fn only_the_named_stream_is_the_journal() {
        let file = std::fs::metadata("/").unwrap();
        let (device, inode) = (file.dev(), file.ino());
        let is = |value: String| is_stream(Some(OsStr::new(&value)), &file);
        assert!(is(format!("{device}:{inode}")));
        for other in [format!("{device}:{}", inode + 1), format!("{}:{inode}", device + 1), inode.to_string(), ":".to_owned()] {
            assert!(!is(other));
        }
        assert!(!is_stream(None, &file));
    }
}
