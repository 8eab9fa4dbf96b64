//! Since when troubles last, and which have lasted long enough to be one.

use std::collections::BTreeMap;

use super::findings::Trouble;
use super::kind::Kind;

/// Since when each trouble has been found without a break. It has as many entries as troubles were found last.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    since_s: BTreeMap<(Kind, String), u64>,
}

impl Memory {
    /// Dates what was found now, and leaves out what has not lasted for its grace. What is no longer found is forgotten. A
    /// clock that was set back lets a trouble begin now.
    pub fn settle(&mut self, found: Vec<Trouble>, now_s: u64) -> Vec<Trouble> {
        let mut since_s = BTreeMap::new();
        let mut settled = Vec::with_capacity(found.len());
        for trouble in found {
            let key = (trouble.kind, trouble.object.clone());
            let first_s = self.since_s.get(&key).map_or(trouble.since_s, |first_s| trouble.since_s.min(*first_s)).min(now_s);
            since_s.insert(key, first_s);
            if now_s - first_s >= trouble.kind.facts().grace_s {
                settled.push(Trouble { since_s: first_s, ..trouble });
            }
        }
        self.since_s = since_s;
        settled
    }
}
