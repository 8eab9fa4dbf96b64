//! The history of a target's results, and its form in the file for the next process.
//!
//! The file has a record for each target, [`sealed`](seal) with the time. Invariant: bytes that are damaged, of another
//! format, from the future or older than [`AGE_MAX`] are of no use, and their targets start as new ones. A target is found
//! again by a hash of all that it is, its settings included, whichever services asked it. Not here: the file.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

use super::{ProbeSettings, Target};
use crate::agent::persist::sealed::{Age, FileDamage, Moment, seal, unseal};

/// Name of the format.
const FORMAT: &str = "sluice health ";
/// Bytes of the hash by which a target is found: two of a million targets agree by chance once in 10^26.
const KEY_BYTES: usize = 16;
/// A record without the text of its cause: key, flags, `contrary`, `doublings`, time of health, length of the text.
const RECORD_BYTES: usize = KEY_BYTES + 1 + 4 + 1 + 8 + 2;
/// Maximum number of saved targets: those of a million backends, 100 MB with the texts.
const SAVED_MAX: usize = 1 << 20;
/// Maximum length of a saved cause, bytes.
const CAUSE_MAX: usize = 256;
/// How old saved health may be: a machine starts again within that time, and no address of a Pod matters that was given
/// to another one meanwhile, since a new target that fails wrongly returns after `rise` probes.
const AGE_MAX: Duration = Duration::from_secs(600);

/// How long a target stays healthy before its earlier failures are forgotten: as long as a drain.
pub(super) const STEADY_AFTER: Duration = Duration::from_secs(300);
/// Maximum number of doublings of `rise`, to 16 times as many: a target that flaps at the default settings is out for
/// 32 s at a time, of 3 s that a failure takes.
pub(super) const DOUBLINGS_MAX: u32 = 4;

/// A change of a target's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HealthChange {
    /// It became unhealthy, and needs this many passed probes to return.
    Failing(u32),
    /// It became healthy.
    Healthy,
    /// It passed its first probe after a start from disk.
    Proven,
}

/// What the results of a target say. It outlives a change of the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Whether the target is unhealthy.
    pub failing: bool,
    /// Whether it passed a probe.
    pub proven: bool,
    /// Consecutive results that contradict `failing`.
    pub contrary: u32,
    /// How often the passes of a return were doubled.
    pub doublings: u32,
    /// Since when it is healthy after a failure.
    pub healthy_since: Option<Instant>,
    /// What the last failed probe found.
    pub cause: Option<Arc<str>>,
}

impl History {
    /// Passed probes that the target needs to return.
    pub(super) fn rise(&self, settings: &ProbeSettings) -> u32 {
        settings.rise.saturating_mul(1 << self.doublings.min(DOUBLINGS_MAX))
    }

    /// Forgets how often the target failed, not whether it does: those who asked it are gone, and others ask it now.
    pub(super) fn forget_flapping(&mut self) {
        (self.doublings, self.healthy_since) = (0, None);
    }

    pub(super) fn turn(&mut self, settings: &ProbeSettings, now: Instant) -> HealthChange {
        self.failing = !self.failing;
        self.contrary = 0;
        if !self.failing {
            self.healthy_since = Some(now);
            return HealthChange::Healthy;
        }
        let is_flapping = self.healthy_since.is_some_and(|since| now.duration_since(since) < STEADY_AFTER);
        self.doublings = if is_flapping { (self.doublings + 1).min(DOUBLINGS_MAX) } else { 0 };
        HealthChange::Failing(self.rise(settings))
    }
}

/// Why saved health is of no use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableHealth {
    /// Of another format, truncated or modified.
    #[error(transparent)]
    Sealed(#[from] FileDamage),
    /// The checksum is correct, but the content cannot be decoded.
    #[error("it cannot be decoded")]
    Encoding,
    /// Too old, or dated in the future.
    #[error("it is not of the last {} s", AGE_MAX.as_secs())]
    Age,
}

/// The health that the process before has saved.
#[derive(Debug, Default)]
pub struct SavedHealth {
    histories: HashMap<[u8; KEY_BYTES], History>,
    written: Option<Moment>,
}

impl SavedHealth {
    /// The bytes that stand for the health of these targets.
    pub(super) fn encode<'a>(targets: impl Iterator<Item = (&'a Target, &'a History)>, now: Instant, moment: Moment) -> Vec<u8> {
        let mut rest = Vec::new();
        for (target, history) in targets.take(SAVED_MAX) {
            let flags = [history.failing, history.proven, history.healthy_since.is_some()];
            let healthy_ms = history.healthy_since.map_or(0, |since| now.duration_since(since).as_millis());
            let cause = history.cause.as_deref().unwrap_or_default();
            let end = (0..=cause.len().min(CAUSE_MAX)).rev().find(|&end| cause.is_char_boundary(end)).unwrap_or_default();
            let cause = &cause[..end];
            rest.extend(key(target));
            rest.push(flags.iter().zip(0..).map(|(flag, bit)| u8::from(*flag) << bit).sum());
            rest.extend(history.contrary.to_be_bytes());
            rest.push(u8::try_from(history.doublings).unwrap_or_default());
            rest.extend(u64::try_from(healthy_ms).unwrap_or(u64::MAX).to_be_bytes());
            rest.extend(u16::try_from(cause.len()).unwrap_or_default().to_be_bytes());
            rest.extend(cause.as_bytes());
        }
        seal(FORMAT, moment, &rest)
    }

    /// Reads what `SavedHealth::encode` wrote.
    ///
    /// # Errors
    /// If it is of no use.
    pub fn decode(bytes: &[u8], now: Instant, moment: Moment) -> Result<Self, UnusableHealth> {
        let (saved_at, mut rest) = unseal(FORMAT, bytes)?;
        let age = match moment.age_of(&saved_at) {
            Age::OfThisBoot(age) | Age::ByTimeOfDay(age) if age <= AGE_MAX => age,
            _ => return Err(UnusableHealth::Age),
        };
        let mut histories = HashMap::new();
        while !rest.is_empty() && histories.len() < SAVED_MAX {
            let (key, history, after) = record(rest, now, age).ok_or(UnusableHealth::Encoding)?;
            histories.insert(key, history);
            rest = after;
        }
        Ok(Self { histories, written: Some(saved_at) })
    }

    /// What is known of a target.
    pub(super) fn of(&self, target: &Target) -> Option<&History> {
        // Most starts find nothing, and then no hash is needed.
        if self.is_empty() { None } else { self.histories.get(&key(target)) }
    }

    /// When it was saved, if it was.
    #[must_use]
    pub const fn written(&self) -> Option<Moment> {
        self.written
    }

    /// Number of targets.
    #[must_use]
    pub fn len(&self) -> usize {
        self.histories.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.histories.is_empty()
    }
}

/// The first record of `bytes`, and the rest.
fn record(bytes: &[u8], now: Instant, age: Duration) -> Option<([u8; KEY_BYTES], History, &[u8])> {
    let (fixed, rest) = bytes.split_first_chunk::<RECORD_BYTES>()?;
    let (key, fixed) = fixed.split_first_chunk::<KEY_BYTES>()?;
    let (&[flags], fixed) = fixed.split_first_chunk()?;
    let (contrary, fixed) = fixed.split_first_chunk()?;
    let (&[doublings], fixed) = fixed.split_first_chunk()?;
    let (healthy_ms, cause_len) = fixed.split_first_chunk()?;
    let (cause, rest) = rest.split_at_checked(u16::from_be_bytes(cause_len.try_into().ok()?).into())?;
    let cause = std::str::from_utf8(cause).ok()?;
    let has = |bit: u8| flags >> bit & 1 == 1;
    let healthy_for = Duration::from_millis(u64::from_be_bytes(*healthy_ms)).checked_add(age)?;
    let history = History {
        failing: has(0),
        proven: has(1),
        contrary: u32::from_be_bytes(*contrary),
        doublings: u32::from(doublings).min(DOUBLINGS_MAX),
        // A clock that did not run then is older than what flapping means.
        healthy_since: has(2).then(|| now.checked_sub(healthy_for)).flatten(),
        cause: (!cause.is_empty()).then(|| cause.into()),
    };
    Some((*key, history, rest))
}

/// The hash of a target. It covers the text of its debug form, which a later version may write in another way; then
/// nothing is found.
fn key(target: &Target) -> [u8; KEY_BYTES] {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write!(text, "{target:?}");
    let mut key = [0; KEY_BYTES];
    key.copy_from_slice(&Sha256::digest(text.as_bytes())[..KEY_BYTES]);
    key
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;
    use proto::HealthCheck;

    use super::super::target::tests::{tcp, under};
    use super::*;
    use crate::agent::persist::sealed::tests::moment;

    fn any_history(now: Instant) -> impl Strategy<Value = History> {
        let times = prop::option::of(0u64..1_000);
        (any::<bool>(), any::<bool>(), any::<u32>(), 0..=DOUBLINGS_MAX, times, prop::option::of("[a-zü ]{1,90}")).prop_map(
            move |(failing, proven, contrary, doublings, healthy_ms, cause)| History {
                failing,
                proven,
                contrary,
                doublings,
                healthy_since: healthy_ms.and_then(|ms| now.checked_sub(Duration::from_millis(ms))),
                cause: cause.map(Into::into),
            },
        )
    }

    /// A time of day in another boot.
    fn at(seconds: u64) -> Moment {
        Moment { uptime: None, ..moment(0, 0, seconds) }
    }

    /// The saved health of so many targets.
    pub(crate) fn saved(count: u32, moment: Moment) -> Vec<u8> {
        let histories = vec![History::default(); count as usize];
        SavedHealth::encode(targets(count).iter().zip(&histories), Instant::now(), moment)
    }

    fn targets(count: u32) -> Vec<Target> {
        (0..count).map(|n| tcp(&format!("10.0.{}.{}:80", n / 256, n % 256))).collect()
    }

    proptest! {
        #[test]
        fn what_is_saved_is_known_to_the_next_process_a_little_older(
            histories in prop::collection::vec(any_history(Instant::now()), 0..20), age_s in 0u64..600,
        ) {
            let targets = targets(20);
            let (now, age) = (Instant::now(), Duration::from_secs(age_s));
            let bytes = SavedHealth::encode(targets.iter().zip(&histories), now, at(0));
            let saved = SavedHealth::decode(&bytes, now + age, at(age_s)).unwrap();
            prop_assert_eq!(saved.len(), histories.len());
            for (target, history) in targets.iter().zip(&histories) {
                let found = saved.of(target).unwrap();
                let by = |since: Option<Instant>| since.map(|since| (now.duration_since(since)).as_millis());
                prop_assert_eq!(by(found.healthy_since), by(history.healthy_since));
                prop_assert_eq!(&History { healthy_since: history.healthy_since, ..found.clone() }, history);
            }
        }

        #[test]
        fn saved_health_that_was_changed_anywhere_is_not_used(
            bit in any::<prop::sample::Index>(), end in any::<prop::sample::Index>(),
        ) {
            let (targets, now) = (targets(3), Instant::now());
            let histories = vec![History { failing: true, cause: Some("refused".into()), ..History::default() }; 3];
            let good = SavedHealth::encode(targets.iter().zip(&histories), now, at(0));
            prop_assert!(SavedHealth::decode(&good, now, at(0)).is_ok());
            let mut changed = good.clone();
            let bit = bit.index(8 * good.len());
            changed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(SavedHealth::decode(&changed, now, at(0)).is_err());
            prop_assert!(SavedHealth::decode(&good[..end.index(good.len())], now, at(0)).is_err());
        }

        /// Bytes whose checksum somebody made right.
        #[test]
        fn any_records_are_decoded_or_refused(records in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = SavedHealth::decode(&seal(FORMAT, at(0), &records), Instant::now(), at(0));
        }
    }

    #[test]
    fn saved_health_is_used_for_ten_minutes_and_never_before_it_was_saved() {
        let now = Instant::now();
        let bytes = SavedHealth::encode(std::iter::empty(), now, at(100));
        let read = |seconds| SavedHealth::decode(&bytes, now, at(seconds)).map(|saved| saved.is_empty());
        assert_eq!([read(100), read(700)], [Ok(true); 2]);
        assert_eq!([read(99), read(701)], [Err(UnusableHealth::Age); 2]);
        let bytes = SavedHealth::encode(std::iter::empty(), now, moment(101, 0, 100));
        let of_this_boot = |uptime_s, day_s| SavedHealth::decode(&bytes, now, moment(101, uptime_s, day_s)).is_ok();
        assert_eq!(
            [of_this_boot(600, 0), of_this_boot(600, 9_999), of_this_boot(601, 100)],
            [true, true, false],
            "whatever the clock says"
        );
        let other = SavedHealth::decode(b"sluice health 3", now, at(0)).unwrap_err();
        assert_eq!(other, UnusableHealth::Sealed(FileDamage::Format(FORMAT)));
    }

    #[test]
    fn a_target_under_other_settings_is_another_one() {
        let (target, history) = (tcp("10.0.0.1:80"), History { failing: true, ..History::default() });
        let bytes = SavedHealth::encode([(&target, &history)].into_iter(), Instant::now(), at(0));
        let saved = SavedHealth::decode(&bytes, Instant::now(), at(0)).unwrap();
        assert!(saved.of(&target).is_some_and(|history| history.failing));
        assert!(saved.of(&under(&HealthCheck { fall: 9, ..HealthCheck::default() }, target)).is_none());
        assert!(saved.of(&tcp("10.0.0.1:81")).is_none());
    }
}
