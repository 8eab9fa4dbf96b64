//! Authentication and authorisation: bearer tokens, and the RBAC rules that they are bound to.
//!
//! A real server that has just started knows no roles for a moment, and with several servers each request may reach
//! such a server. Therefore the first read of each kind by each user with a role is refused here, once.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::responses::ApiResponse;

/// The token with all rights.
pub const ADMIN: &str = "test";

/// Rules of a Role in its namespace, or of a ClusterRole.
#[derive(Clone, Debug)]
pub struct Grant {
    /// `None`: in all namespaces.
    pub namespace: Option<String>,
    /// `rules` of the role, as in its manifest.
    pub rules: Vec<Value>,
}

/// A user with a token.
#[derive(Clone, Debug)]
pub struct Account {
    pub name: String,
    /// `None`: everything is allowed.
    pub grants: Option<Vec<Grant>>,
}

/// A request in the terms of RBAC.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Attributes {
    pub verb: &'static str,
    pub group: &'static str,
    /// With the subresource, for example `services/status`.
    pub resource: String,
    pub namespace: String,
    /// Empty for lists, watches of all objects, and creation.
    pub name: String,
}

impl Attributes {
    /// Whether a rule allows this request.
    pub fn is_allowed_by(&self, rule: &Value) -> bool {
        let has = |field: &str, wanted: &str| {
            rule[field].as_array().is_some_and(|all| all.iter().any(|entry| entry == wanted || entry == "*"))
        };
        let is_named = rule["resourceNames"].as_array().is_none_or(|names| names.iter().any(|name| *name == self.name));
        has("apiGroups", self.group) && has("resources", &self.resource) && has("verbs", self.verb) && is_named
    }
}

/// All users by token.
pub struct Accounts {
    by_token: BTreeMap<String, Account>,
    /// Users and resources for which the server has loaded the roles since its start.
    cached: BTreeSet<(String, String)>,
}

impl Accounts {
    pub fn new() -> Self {
        let admin = Account { name: "admin".to_owned(), grants: None };
        Self { by_token: [(ADMIN.to_owned(), admin)].into(), cached: BTreeSet::new() }
    }

    pub fn add_account(&mut self, token: &str, account: Account) {
        self.by_token.insert(token.to_owned(), account);
    }

    pub fn remove_account(&mut self, token: &str) {
        self.by_token.remove(token);
    }

    /// The user of an `Authorization` header.
    pub fn identify(&self, authorization: &str) -> Result<&Account, ApiResponse> {
        authorization.strip_prefix("Bearer ").and_then(|token| self.by_token.get(token)).ok_or_else(ApiResponse::unauthorized)
    }

    /// Whether the request is allowed by the roles that the server has loaded.
    pub fn check(&mut self, account: &Account, request: &Attributes) -> Result<(), ApiResponse> {
        let is_read = matches!(request.verb, "get" | "list" | "watch");
        if account.grants.is_some() && is_read && self.cached.insert((account.name.clone(), request.resource.clone())) {
            return Err(ApiResponse::forbidden(&account.name, request));
        }
        account.check(request)
    }
}

impl Account {
    pub fn check(&self, request: &Attributes) -> Result<(), ApiResponse> {
        let Some(grants) = &self.grants else { return Ok(()) };
        let is_allowed = grants
            .iter()
            .filter(|grant| grant.namespace.as_ref().is_none_or(|namespace| *namespace == request.namespace))
            .any(|grant| grant.rules.iter().any(|rule| request.is_allowed_by(rule)));
        if is_allowed { Ok(()) } else { Err(ApiResponse::forbidden(&self.name, request)) }
    }
}
