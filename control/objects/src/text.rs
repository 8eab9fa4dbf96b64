//! Texts of messages: parts of foreign texts, lists, and times.
//!
//! Invariant: no result is longer than what its caller allows, whatever the length of its input.

use std::borrow::Cow;

use k8s_openapi::jiff::Timestamp;

/// The first `max` characters, with `…` for the rest.
#[must_use]
pub fn cut_chars(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The first `max` items, with commas between them, and the number of the others; `none` without any.
#[must_use]
pub fn listed<T: ToString>(items: impl IntoIterator<Item = T>, max: usize) -> String {
    let mut items = items.into_iter().peekable();
    if items.peek().is_none() { "none".to_owned() } else { shortened(items, max, ", ", " and ") }
}

/// The first `max` items with `separator` between them, then `before_rest` and the number of the others, if there are any.
#[must_use]
pub fn shortened<T: ToString>(items: impl IntoIterator<Item = T>, max: usize, separator: &str, before_rest: &str) -> String {
    let mut all = items.into_iter();
    let first: Vec<String> = all.by_ref().take(max).map(|one| one.to_string()).collect();
    let first = first.join(separator);
    match all.count() {
        0 => first,
        rest => format!("{first}{before_rest}{rest} more"),
    }
}

/// A text without the numbers that the standard library puts behind the words of an error of the system: ` (os error 111)`.
#[must_use]
pub fn without_os_errors(text: &str) -> Cow<'_, str> {
    const BEFORE: &str = " (os error ";
    let Some((mut plain, mut rest)) = text.split_once(BEFORE).map(|(before, rest)| (before.to_owned(), rest)) else {
        return Cow::Borrowed(text);
    };
    loop {
        match rest.split_once(')') {
            Some((number, after)) if number.parse::<i32>().is_ok() => rest = after,
            // It is something else.
            _ => plain.push_str(BEFORE),
        }
        match rest.split_once(BEFORE) {
            Some((before, after)) => {
                plain.push_str(before);
                rest = after;
            }
            None => {
                plain.push_str(rest);
                return Cow::Owned(plain);
            }
        }
    }
}

/// A time in seconds since 1970 as RFC 3339, in UTC.
#[must_use]
pub fn of_time(since_epoch_s: u64) -> String {
    let seconds = i64::try_from(since_epoch_s).unwrap_or(i64::MAX);
    Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_cut_at_the_end_of_a_character() {
        assert_eq!((cut_chars("äöü", 2), cut_chars("äö", 2)), ("äö…".to_owned(), "äö".to_owned()));
    }

    #[test]
    fn an_error_of_the_system_is_words_without_a_number() {
        let error = |number| std::io::Error::from_raw_os_error(number).to_string();
        assert_eq!(
            without_os_errors(&format!("tcp: {}; {}.", error(111), error(2))),
            "tcp: Connection refused; No such file or directory."
        );
        for other in ["", "refused", "a (os error x) b", "ends (os error ", "a (os error 1"] {
            assert_eq!(without_os_errors(other), other);
        }
    }

    #[test]
    fn a_list_says_how_many_are_left_out() {
        assert_eq!([listed([1, 2, 3], 3), listed([1, 2, 3], 1), listed([0; 0], 3)], ["1, 2, 3", "1 and 2 more", "none"]);
    }

    #[test]
    fn a_time_is_one_of_rfc_3339() {
        assert_eq!((of_time(0), of_time(u64::MAX)), ("1970-01-01T00:00:00Z".to_owned(), "1970-01-01T00:00:00Z".to_owned()));
    }
}
