//! A trouble, and the list that rules add to.

use super::kind::Kind;

/// A trouble.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Its kind.
    pub kind: Kind,
    /// What it is about: "Service default/web".
    pub object: String,
    /// What was found.
    pub cause: String,
    /// Since when it lasts, seconds since 1970.
    pub since_s: u64,
}

impl Trouble {
    /// A gateway that has just started.
    #[must_use]
    pub fn starting(gateway: &str, now_s: u64) -> Self {
        let (object, cause) = (format!("Gateway {gateway}"), "it starts".to_owned());
        Self { kind: Kind::NotReady, object, cause, since_s: now_s }
    }

    /// A controller that does not know its group yet.
    #[must_use]
    pub fn controller_starting(now_s: u64) -> Self {
        let (object, cause) = ("Controller".to_owned(), "it starts".to_owned());
        Self { kind: Kind::ControllerStarting, object, cause, since_s: now_s }
    }
}

/// Collects troubles.
#[derive(Debug)]
pub(super) struct Findings {
    pub(super) now_s: u64,
    pub(super) found: Vec<Trouble>,
}

impl Findings {
    pub(super) fn add(&mut self, kind: Kind, object: impl Into<String>, cause: impl Into<String>) {
        self.add_since(self.now_s, kind, object, cause);
    }

    pub(super) fn add_since(&mut self, since_s: u64, kind: Kind, object: impl Into<String>, cause: impl Into<String>) {
        self.found.push(Trouble { kind, object: object.into(), cause: cause.into(), since_s });
    }
}
