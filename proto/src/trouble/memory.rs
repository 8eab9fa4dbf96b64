//! Since when troubles last, which have lasted long enough to be one, and how many of a kind are listed.
//!
//! Invariant: a trouble is dated whether it is listed or not, so that one that moves up the list keeps its beginning.

use std::collections::BTreeMap;

use super::findings::Trouble;
use super::kind::Kind;

/// Maximum number of troubles of one kind that are listed; the others are one line. A node that fails may concern every
/// Service.
pub const OF_A_KIND_MAX: usize = 50;
/// The object of the line for the others of a kind. It has no number, so that lines of several gateways are about the same.
pub const OTHERS: &str = "Others";

/// Since when each trouble has been found without a break. It has as many entries as troubles were found last.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    since_s: BTreeMap<(Kind, String), u64>,
}

impl Memory {
    /// Dates what was found now, which is sorted by kind, leaves out what has not lasted for its grace, and keeps at most
    /// [`OF_A_KIND_MAX`] of a kind, with the number of the others.
    pub fn settle(&mut self, found: Vec<Trouble>, now_s: u64) -> Vec<Trouble> {
        let mut dated = self.date(found, now_s);
        dated.retain(|trouble| now_s.saturating_sub(trouble.since_s) >= trouble.kind.facts().grace_s);
        bounded(&dated)
    }

    /// Dates what was found now. What is no longer found is forgotten. A clock that was set back lets a trouble begin now.
    pub fn date(&mut self, mut found: Vec<Trouble>, now_s: u64) -> Vec<Trouble> {
        let mut since_s = BTreeMap::new();
        for trouble in &mut found {
            let key = (trouble.kind, trouble.object.clone());
            trouble.since_s = self.since_s.get(&key).map_or(trouble.since_s, |first_s| trouble.since_s.min(*first_s)).min(now_s);
            since_s.insert(key, trouble.since_s);
        }
        self.since_s = since_s;
        found
    }
}

fn bounded(troubles: &[Trouble]) -> Vec<Trouble> {
    let mut all = Vec::with_capacity(troubles.len());
    for of_kind in troubles.chunk_by(|one, other| one.kind == other.kind) {
        let (listed, others) = of_kind.split_at(of_kind.len().min(OF_A_KIND_MAX));
        all.extend_from_slice(listed);
        if let Some(since_s) = others.iter().map(|other| other.since_s).min() {
            let (kind, cause) = (others[0].kind, format!("{} more, as those above", others.len()));
            all.push(Trouble { kind, object: OTHERS.to_owned(), cause, since_s });
        }
    }
    all
}
