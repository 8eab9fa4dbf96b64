//! The server's clock. It runs from the time that a test sets.

use std::time::Instant;

pub struct Clock {
    date: String,
    /// Seconds since midnight of that day, at `since`.
    seconds: u64,
    since: Instant,
}

impl Clock {
    /// `time` is RFC 3339 with seconds, in UTC.
    pub fn at(time: &str) -> Self {
        let (date, rest) = time.split_once('T').unwrap();
        let parts: Vec<u64> = rest.trim_end_matches('Z').split(':').map(|part| part.parse().unwrap()).collect();
        let [hours, minutes, seconds] = parts[..] else { panic!("{time} has no valid time of day") };
        Self { date: date.to_owned(), seconds: hours * 3_600 + minutes * 60 + seconds, since: Instant::now() }
    }

    /// RFC 3339 with seconds. Tests do not run past midnight.
    pub fn now(&self) -> String {
        let seconds = self.seconds + self.since.elapsed().as_secs();
        format!("{}T{:02}:{:02}:{:02}Z", self.date, seconds / 3_600, seconds / 60 % 60, seconds % 60)
    }
}
