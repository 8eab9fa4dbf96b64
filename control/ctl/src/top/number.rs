//! Numbers in five characters.

/// A count: `999`, `1.2k`, `12.3M`.
pub(super) fn count(number: u64) -> String {
    if number < 1_000 { number.to_string() } else { scaled(number as f64) }
}

/// A rate: `0`, `0.3`, `42`, `1.23k`.
pub(super) fn rate(number: f64) -> String {
    match number {
        n if n < 0.05 => "0".to_owned(),
        n if n < 9.95 => format!("{n:.1}"),
        n if n < 999.5 => format!("{n:.0}"),
        n => scaled(n),
    }
}

/// A share of 1 in percent: `7%`, `99.5%`.
pub(super) fn percent(share: f64) -> String {
    match share * 100.0 {
        p if p < 0.05 => "0%".to_owned(),
        p if p < 9.95 => format!("{p:.1}%"),
        p => format!("{p:.0}%"),
    }
}

/// A duration: `59s`, `12m`, `3h`, `40d`.
pub(super) fn duration(seconds: u64) -> String {
    match seconds {
        0..=99 => format!("{seconds}s"),
        100..=5_999 => format!("{}m", seconds / 60),
        6_000..=359_999 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// The time of day, UTC, of a time since 1970 in seconds: `14:03:22Z`.
pub(super) fn clock(seconds: u64) -> String {
    format!("{:02}:{:02}:{:02}Z", seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60)
}

/// Three digits and a unit.
fn scaled(number: f64) -> String {
    let mut scaled = number;
    for unit in ["", "k", "M", "G", "T", "P"] {
        if scaled < 999.5 {
            let digits = if scaled < 9.995 { 2 } else { usize::from(scaled < 99.95) };
            return format!("{scaled:.digits$}{unit}");
        }
        scaled /= 1_000.0;
    }
    format!("{number:.0e}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_take_at_most_five_characters() {
        let counts = [(0, "0"), (999, "999"), (1_000, "1.00k"), (12_345, "12.3k"), (999_499, "999k"), (999_500, "1.00M")];
        counts.iter().for_each(|(number, text)| assert_eq!(count(*number), *text));
        assert_eq!(count(u64::MAX), "2e19");
        let rates = [(0.0, "0"), (0.04, "0"), (0.3, "0.3"), (9.96, "10"), (999.4, "999"), (999.6, "1.00k"), (9.6e9, "9.60G")];
        rates.iter().for_each(|(number, text)| assert_eq!(rate(*number), *text));
        let shares = [(0.0, "0%"), (0.012, "1.2%"), (0.5, "50%"), (1.0, "100%")];
        shares.iter().for_each(|(share, text)| assert_eq!(percent(*share), *text));
        let durations = [(99, "99s"), (100, "1m"), (5_999, "99m"), (6_000, "1h"), (359_999, "99h"), (360_000, "4d")];
        durations.iter().for_each(|(seconds, text)| assert_eq!(duration(*seconds), *text));
        assert_eq!(clock(1_700_000_000), "22:13:20Z");
    }
}
