//! The query of `/status.json`: which Services, in which order, how many.
//!
//! Not here: carrying it out (`document`).

use std::str::FromStr;

/// Number of Services without `limit`, and at most.
const LIMIT: usize = 50;
pub(super) const LIMIT_MAX: usize = 500;
/// Longest text to search for, in bytes; names of Services are shorter.
const SEARCH_MAX: usize = 200;

/// Order of Services.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ServiceOrder {
    /// Packets a second, descending.
    #[default]
    Rate,
    /// Services with trouble first, then by rate.
    Trouble,
    /// Name.
    Name,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct StatusQuery {
    /// In lower case; empty: every Service.
    pub(super) search: String,
    pub(super) order: ServiceOrder,
    pub(super) limit: usize,
    /// Only Services with trouble.
    pub(super) only_trouble: bool,
    /// The Service, as `namespace/name`, that is shown with its backends.
    pub(super) service: Option<String>,
}

/// A query that cannot be answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum StatusQueryError {
    #[error("`{0}`: expected the parameters search, sort, only, limit and service")]
    Parameter(String),
    #[error("`sort`: found `{0}`, expected rate, trouble or name")]
    Order(String),
    #[error("`only`: found `{0}`, expected trouble")]
    Only(String),
    #[error("`limit`: found `{0}`, expected a number from 1 to {LIMIT_MAX}")]
    Limit(String),
    #[error("`{0}`: expected at most {SEARCH_MAX} bytes")]
    TooLong(&'static str),
}

impl FromStr for StatusQuery {
    type Err = StatusQueryError;

    fn from_str(text: &str) -> Result<Self, StatusQueryError> {
        let mut query =
            Self { search: String::new(), order: ServiceOrder::default(), limit: LIMIT, only_trouble: false, service: None };
        let short = |name, value: &str| {
            if value.len() > SEARCH_MAX { Err(StatusQueryError::TooLong(name)) } else { Ok(value.to_owned()) }
        };
        for (name, value) in form_urlencoded::parse(text.as_bytes()) {
            match &*name {
                "search" => query.search = short("search", value.trim())?.to_lowercase(),
                "service" => query.service = Some(short("service", &value)?),
                "only" if value == "trouble" => query.only_trouble = true,
                "only" => return Err(StatusQueryError::Only(value.into_owned())),
                "sort" => {
                    query.order = match &*value {
                        "rate" => ServiceOrder::Rate,
                        "trouble" => ServiceOrder::Trouble,
                        "name" => ServiceOrder::Name,
                        _ => return Err(StatusQueryError::Order(value.into_owned())),
                    }
                }
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                    query.limit = limit.ok_or_else(|| StatusQueryError::Limit(value.into_owned()))?;
                }
                _ => return Err(StatusQueryError::Parameter(name.into_owned())),
            }
        }
        Ok(query)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_read_and_bad_ones_say_what_is_expected() {
        let all = StatusQuery { search: String::new(), order: ServiceOrder::Rate, limit: 50, only_trouble: false, service: None };
        assert_eq!("".parse(), Ok(all.clone()));
        let search = StatusQuery { search: "de mo/".to_owned(), order: ServiceOrder::Trouble, limit: 7, ..all.clone() };
        assert_eq!("search=%20De+mo%2F&sort=trouble&limit=7".parse(), Ok(search));
        assert_eq!("only=trouble".parse(), Ok(StatusQuery { only_trouble: true, ..all.clone() }));
        assert_eq!("service=demo/web".parse(), Ok(StatusQuery { service: Some("demo/web".to_owned()), ..all }));
        let long = format!("search={}", "a".repeat(SEARCH_MAX + 1));
        let rows = [
            ("limit=501", "`limit`: found `501`, expected a number from 1 to 500"),
            ("limit=0", "`limit`: found `0`, expected a number from 1 to 500"),
            ("sort=size", "`sort`: found `size`, expected rate, trouble or name"),
            ("only=a", "`only`: found `a`, expected trouble"),
            ("find=a", "`find`: expected the parameters search, sort, only, limit and service"),
            (&long, "`search`: expected at most 200 bytes"),
        ];
        for (text, error) in rows {
            assert_eq!(text.parse::<StatusQuery>().unwrap_err().to_string(), error);
        }
    }
}
