//! The envelope of the files of a gateway: format, checksum, and the time at which they were written.
//!
//! A file is a name and the digit 2, a SHA-256 of the rest, the number of the machine's boot (16 bytes), the time since
//! that boot, suspended time included (8 bytes, ns), the time of day (8 bytes, seconds since 1970), and the content.
//! Older versions wrote the digit 1 and no boot.
//!
//! Invariant: within a boot, an age comes from the time since the boot, which no setting of the clock changes. Only a
//! file of another boot has its age from the time of day. Not here: the flows, whose checksum is made for their size
//! ([`dataplane::SavedFlows`]).

use std::fs;
use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dataplane::SavedAt;
use rustix::time::{ClockId, clock_gettime};
use sha2::{Digest as _, Sha256};

/// The kernel's number of the present boot, 32 hexadecimal digits with hyphens.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
const HASH_BYTES: usize = 32;
/// Enough bytes of a file for the time at which it was written: name and version, checksum, boot, uptime, time of day.
pub const HEAD_BYTES: usize = 128;

/// A time, by both clocks of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Moment {
    /// The time since boot; none: it is unknown which boot it is.
    pub uptime: Option<SavedAt>,
    /// The time of day, which may be set at any time.
    pub time_of_day: SystemTime,
}

/// How old a file is. The smallest is the newest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Age {
    /// It was written in this boot, so long ago.
    OfThisBoot(Duration),
    /// It was written in another boot, so long ago by the time of day.
    ByTimeOfDay(Duration),
    /// It is dated so far in the future: its age is unknown.
    Unknown(Duration),
}

/// Why a file cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FileDamage {
    /// It belongs to another program or a later version.
    #[error("it does not begin with \"{0}2\"")]
    Format(&'static str),
    /// It is truncated or modified.
    #[error("its checksum does not match")]
    Checksum,
    /// The checksum is correct, but it has no time.
    #[error("it has no time")]
    Time,
}

/// Now, since boot: what [`dataplane::SavedFlows`] are dated by.
///
/// # Errors
/// If the kernel does not tell which boot it is.
pub fn uptime() -> io::Result<SavedAt> {
    let now = clock_gettime(ClockId::Boottime);
    let boottime_ns = now.tv_sec.unsigned_abs() * 1_000_000_000 + now.tv_nsec.unsigned_abs();
    let text = fs::read_to_string(BOOT_ID)?.replace('-', "");
    let number = u128::from_str_radix(text.trim(), 16).map_err(io::Error::other)?;
    Ok(SavedAt { boot: number.to_be_bytes(), boottime_ns })
}

impl Moment {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        Self { uptime: uptime().ok(), time_of_day: SystemTime::now() }
    }

    /// The age of what was written `then`.
    #[must_use]
    pub fn age_of(&self, then: &Self) -> Age {
        if let (Some(now), Some(then)) = (self.uptime, then.uptime)
            && now.boot == then.boot
            && let Some(age_ns) = now.boottime_ns.checked_sub(then.boottime_ns)
        {
            return Age::OfThisBoot(Duration::from_nanos(age_ns));
        }
        match self.time_of_day.duration_since(then.time_of_day) {
            Ok(age) => Age::ByTimeOfDay(age),
            Err(ahead) => Age::Unknown(ahead.duration()),
        }
    }

    /// Whether of two files, as of now, `this` is newer than `other`. The time of day decides if one has no other time,
    /// as those of older versions.
    #[must_use]
    pub fn is_newer(&self, this: &Self, other: &Self) -> bool {
        let by_day = Self { uptime: None, ..*self };
        let now = if this.uptime.is_some() && other.uptime.is_some() { self } else { &by_day };
        now.age_of(this) < now.age_of(other)
    }
}

/// A file with this content. `name` is that of its format.
#[must_use]
pub fn seal(name: &'static str, written: Moment, content: &[u8]) -> Vec<u8> {
    let uptime = written.uptime.unwrap_or(SavedAt { boot: [0; 16], boottime_ns: 0 });
    let seconds = written.time_of_day.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let rest = [&uptime.boot[..], &uptime.boottime_ns.to_be_bytes(), &seconds.to_be_bytes(), content].concat();
    [name.as_bytes(), b"2", &Sha256::digest(&rest), &rest].concat()
}

/// When a file was written, and its content.
///
/// # Errors
/// Why it cannot be used.
pub fn unseal<'a>(name: &'static str, bytes: &'a [u8]) -> Result<(Moment, &'a [u8]), FileDamage> {
    let (&version, sealed) = bytes.strip_prefix(name.as_bytes()).and_then(<[u8]>::split_first).ok_or(FileDamage::Format(name))?;
    if !matches!(version, b'1' | b'2') {
        return Err(FileDamage::Format(name));
    }
    let (hash, rest) = sealed.split_at_checked(HASH_BYTES).ok_or(FileDamage::Checksum)?;
    if *hash != *Sha256::digest(rest) {
        return Err(FileDamage::Checksum);
    }
    split_moment(version, rest).ok_or(FileDamage::Time)
}

/// When a file was written, from its first [`HEAD_BYTES`] alone. The checksum is not examined.
#[must_use]
pub fn written(name: &'static str, head: &[u8]) -> Option<Moment> {
    let (&version, sealed) = head.strip_prefix(name.as_bytes())?.split_first()?;
    Some(split_moment(version, sealed.get(HASH_BYTES..)?)?.0)
}

fn split_moment(version: u8, bytes: &[u8]) -> Option<(Moment, &[u8])> {
    let (uptime, rest) = if version == b'1' { (None, bytes) } else { split_uptime(bytes)? };
    let (seconds, content) = rest.split_first_chunk()?;
    let time_of_day = UNIX_EPOCH.checked_add(Duration::from_secs(u64::from_be_bytes(*seconds)))?;
    Some((Moment { uptime, time_of_day }, content))
}

fn split_uptime(bytes: &[u8]) -> Option<(Option<SavedAt>, &[u8])> {
    let (&boot, rest) = bytes.split_first_chunk()?;
    let (&boottime_ns, rest) = rest.split_first_chunk()?;
    let uptime = SavedAt { boot, boottime_ns: u64::from_be_bytes(boottime_ns) };
    Some(((boot != [0; 16]).then_some(uptime), rest))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    const NAME: &str = "sluice test ";

    /// A time of day, so long after the start of a boot.
    pub(crate) fn moment(boot: u8, uptime_s: u64, day_s: u64) -> Moment {
        let uptime = Some(SavedAt { boot: [boot; 16], boottime_ns: uptime_s * 1_000_000_000 });
        Moment { uptime, time_of_day: UNIX_EPOCH + Duration::from_secs(1_800_000_000 + day_s) }
    }

    #[test]
    fn within_a_boot_no_setting_of_the_clock_changes_an_age() {
        let written = moment(1, 100, 50_000);
        let (year, second) = (365 * 86_400, Duration::from_secs(2));
        for day_s in [50_002, 50_000 + year, 0] {
            assert_eq!(moment(1, 102, day_s).age_of(&written), Age::OfThisBoot(second));
        }
        assert_eq!(moment(2, 5, 50_002).age_of(&written), Age::ByTimeOfDay(second));
        assert_eq!(moment(2, 5, 49_998).age_of(&written), Age::Unknown(second));
        let unknown = Moment { uptime: None, ..written };
        assert_eq!(moment(1, 102, 50_002).age_of(&unknown), Age::ByTimeOfDay(second));
        assert_eq!(unknown.age_of(&unknown), Age::ByTimeOfDay(Duration::ZERO), "two unknown boots are not one boot");
        // Another time namespace has another time since boot.
        assert_eq!(moment(1, 99, 50_002).age_of(&written), Age::ByTimeOfDay(second));
        let long = Duration::from_secs(year);
        assert!(Age::OfThisBoot(long) < Age::ByTimeOfDay(second) && Age::ByTimeOfDay(long) < Age::Unknown(second));
    }

    #[test]
    fn a_file_of_an_older_version_is_newer_than_one_of_this_boot_if_the_time_of_day_says_so() {
        let (now, mine) = (moment(1, 200, 50_100), moment(1, 100, 50_000));
        let older_version = |day_s| Moment { uptime: None, ..moment(0, 0, day_s) };
        for (day_s, is_newer) in [(50_050, true), (49_950, false), (50_200, false)] {
            let other = older_version(day_s);
            assert_eq!((now.is_newer(&other, &mine), now.is_newer(&mine, &other)), (is_newer, !is_newer), "{day_s}");
        }
        assert!(now.is_newer(&mine, &moment(2, 100, 50_050)), "a file of this boot is newer than one of another");
    }

    #[test]
    fn what_was_sealed_is_unsealed_and_a_file_cut_short_or_changed_anywhere_is_not() {
        let written = moment(1, 100, 50_000);
        for written in [written, Moment { uptime: None, ..written }] {
            let good = seal(NAME, written, b"content");
            assert_eq!(unseal(NAME, &good), Ok((written, &b"content"[..])));
            for i in 0..good.len() {
                assert!(unseal(NAME, &good[..i]).is_err(), "cut at {i}");
                let mut changed = good.clone();
                changed[i] ^= 4;
                assert!(unseal(NAME, &changed).is_err(), "changed at {i}");
            }
        }
        assert_eq!(unseal(NAME, b"").unwrap_err(), FileDamage::Format(NAME));
        assert_eq!(unseal(NAME, b"sluice test 3").unwrap_err().to_string(), "it does not begin with \"sluice test 2\"");
    }

    #[test]
    fn a_file_of_an_older_version_has_the_time_of_day_only() {
        let rest = [&1_800_000_007u64.to_be_bytes()[..], b"content"].concat();
        let old = [NAME.as_bytes(), b"1", &Sha256::digest(&rest), &rest].concat();
        assert_eq!(unseal(NAME, &old), Ok((Moment { uptime: None, ..moment(0, 0, 7) }, &b"content"[..])));
    }

    #[test]
    fn the_kernel_tells_which_boot_it_is() {
        let (now, then) = (uptime().unwrap(), uptime().unwrap());
        assert!(now.boot != [0; 16] && now.boot == then.boot);
    }
}
