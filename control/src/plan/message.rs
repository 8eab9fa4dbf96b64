//! Lists in messages to people.

/// The first `max` items with `separator` between them, then how many more there are.
pub(super) fn shortened<S: AsRef<str>>(items: &[S], max: usize, separator: &str, before_rest: &str) -> String {
    let named: Vec<&str> = items.iter().take(max).map(AsRef::as_ref).collect();
    let named = named.join(separator);
    match items.len().saturating_sub(max) {
        0 => named,
        rest => format!("{named}{before_rest}{rest} more"),
    }
}
