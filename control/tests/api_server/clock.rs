//! What time it is on the server: it runs, from wherever a test puts it.

use std::time::Instant;

pub struct Clock {
    date: String,
    /// Of that day, when `since` was.
    seconds: u64,
    since: Instant,
}

impl Clock {
    /// `time` is RFC 3339 with seconds, of UTC.
    pub fn at(time: &str) -> Self {
        let (date, rest) = time.split_once('T').unwrap();
        let parts: Vec<u64> = rest.trim_end_matches('Z').split(':').map(|part| part.parse().unwrap()).collect();
        let [hours, minutes, seconds] = parts[..] else { panic!("{time} is no time of day") };
        Self { date: date.to_owned(), seconds: hours * 3_600 + minutes * 60 + seconds, since: Instant::now() }
    }

    /// RFC 3339 with seconds. No test runs past midnight.
    pub fn now(&self) -> String {
        let seconds = self.seconds + self.since.elapsed().as_secs();
        format!("{}T{:02}:{:02}:{:02}Z", self.date, seconds / 3_600, seconds / 60 % 60, seconds % 60)
    }
}
