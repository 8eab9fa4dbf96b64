//! What an unknown key or name may have been meant as.

/// Names with at least this Jaro-Winkler similarity are suggested: `adress` and `addresses` score 0.91, `poll` and
/// `ports` 0.63.
const SIMILAR: f64 = 0.8;

/// The known name that is most similar, if one is similar at all.
#[must_use]
pub fn nearest<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let scores = known.into_iter().map(|name| (name, strsim::jaro_winkler(found, name)));
    let best = scores.max_by(|(_, a), (_, b)| a.total_cmp(b));
    best.filter(|(_, score)| *score >= SIMILAR).map(|(name, _)| name)
}

/// The known names, the most similar first.
#[must_use]
pub fn most_similar<'a>(found: &str, known: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let mut scores: Vec<_> = known.into_iter().map(|name| (strsim::jaro_winkler(found, name), name)).collect();
    scores.sort_by(|(a, one), (b, other)| b.total_cmp(a).then(one.cmp(other)));
    scores.into_iter().map(|(_, name)| name).collect()
}
