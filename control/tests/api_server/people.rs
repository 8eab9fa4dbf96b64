//! Who may do what: bearer tokens, and the rules of RBAC that they are bound to.

use std::collections::BTreeMap;

use serde_json::Value;

use super::answer::Answer;

/// The token that may do everything.
pub const ADMIN: &str = "test";

/// Rules of a Role in its namespace, or of a ClusterRole.
#[derive(Clone, Debug)]
pub struct Grant {
    /// None: everywhere.
    pub namespace: Option<String>,
    /// `rules` of the role, as its manifest has them.
    pub rules: Vec<Value>,
}

/// Somebody with a token.
#[derive(Clone, Debug)]
pub struct Person {
    pub name: String,
    /// None: everything is allowed.
    pub grants: Option<Vec<Grant>>,
}

/// What is asked, in the words of RBAC.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attributes {
    pub verb: &'static str,
    pub group: &'static str,
    /// With the subresource, as `services/status`.
    pub resource: String,
    pub namespace: String,
    /// Empty for lists, watches of all, and creation.
    pub name: String,
}

impl Attributes {
    /// Whether a rule allows this.
    pub fn is_allowed_by(&self, rule: &Value) -> bool {
        let has = |field: &str, wanted: &str| {
            rule[field].as_array().is_some_and(|all| all.iter().any(|entry| entry == wanted || entry == "*"))
        };
        let is_named = rule["resourceNames"].as_array().is_none_or(|names| names.iter().any(|name| *name == self.name));
        has("apiGroups", self.group) && has("resources", &self.resource) && has("verbs", self.verb) && is_named
    }
}

/// Everybody by token.
pub struct People(BTreeMap<String, Person>);

impl People {
    pub fn new() -> Self {
        Self([(ADMIN.to_owned(), Person { name: "admin".to_owned(), grants: None })].into())
    }

    pub fn admit(&mut self, token: &str, person: Person) {
        self.0.insert(token.to_owned(), person);
    }

    /// Who comes with this `Authorization`.
    pub fn identify(&self, authorization: &str) -> Result<&Person, Answer> {
        authorization.strip_prefix("Bearer ").and_then(|token| self.0.get(token)).ok_or_else(Answer::unauthorized)
    }
}

impl Person {
    pub fn check(&self, asked: &Attributes) -> Result<(), Answer> {
        let Some(grants) = &self.grants else { return Ok(()) };
        let is_allowed = grants
            .iter()
            .filter(|grant| grant.namespace.as_ref().is_none_or(|namespace| *namespace == asked.namespace))
            .any(|grant| grant.rules.iter().any(|rule| asked.is_allowed_by(rule)));
        if is_allowed { Ok(()) } else { Err(Answer::forbidden(&self.name, asked)) }
    }
}
