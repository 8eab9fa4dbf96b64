//! Overrides as text that people can read: the content of a ConfigMap or a file.

use std::net::SocketAddr;

use k8s_openapi::jiff::Timestamp;
use proto::ServiceName;
use proto::convert::service_name;
use serde::{Deserialize, Serialize};

use super::{Author, DrainTarget, DrainTargetError, Overrides, TooManyOverrides, Weight};

/// Version of the text.
const VERSION: u32 = 1;

/// Why a text cannot be parsed as overrides.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// It is not YAML of this shape.
    #[error("{0}")]
    Yaml(String),
    /// A later version wrote it.
    #[error("it is of version {0}, this program reads version {VERSION}")]
    Version(u32),
    /// A drain has an invalid target.
    #[error(transparent)]
    DrainTarget(#[from] DrainTargetError),
    /// A weight has an invalid Service or backend.
    #[error("{service} {backend} is no Service and backend; expected namespace/name and ADDRESS:PORT")]
    InvalidWeight {
        /// Text in place of the Service.
        service: String,
        /// Text in place of the backend.
        backend: String,
    },
    /// An invalid time.
    #[error("{0:?} is no time such as 2026-01-31T12:00:00Z")]
    Time(String),
    /// It has too many overrides.
    #[error(transparent)]
    Full(#[from] TooManyOverrides),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    #[serde(default)]
    drains: Vec<Drain>,
    #[serde(default)]
    weights: Vec<WeightEntry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Drain {
    what: String,
    by: String,
    at: String,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct WeightEntry {
    service: String,
    backend: String,
    weight: u16,
    by: String,
    at: String,
}

impl Author {
    /// Its time as text: `2026-01-31T12:00:00Z`.
    #[must_use]
    pub fn at(&self) -> String {
        Timestamp::from_second(self.at_s).unwrap_or(Timestamp::UNIX_EPOCH).to_string()
    }

    fn parse(by: String, at: &str) -> Result<Self, DocumentError> {
        let time: Timestamp = at.parse().map_err(|_| DocumentError::Time(at.to_owned()))?;
        Ok(Self { by, at_s: time.as_second() })
    }
}

impl Overrides {
    /// Parses the output of [`Overrides::to_text`]. An empty text is an empty set.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_text(text: &str) -> Result<Self, DocumentError> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let document: Document =
            serde_saphyr::from_str(text).map_err(|error| DocumentError::Yaml(error.without_snippet().to_string()))?;
        if document.version != VERSION {
            return Err(DocumentError::Version(document.version));
        }
        let mut overrides = Self::default();
        for Drain { what, by, at } in document.drains {
            overrides.drain(what.parse::<DrainTarget>()?, Author::parse(by, &at)?)?;
        }
        for WeightEntry { service, backend, weight, by, at } in document.weights {
            let Some((name, address)) = parse_backend(&service, &backend) else {
                return Err(DocumentError::InvalidWeight { service, backend });
            };
            overrides.set_weight(name, address, Weight { weight, author: Author::parse(by, &at)? })?;
        }
        Ok(overrides)
    }

    /// Writes them as YAML.
    ///
    /// # Errors
    /// [`DocumentError::Yaml`].
    pub fn to_text(&self) -> Result<String, DocumentError> {
        let drain =
            |(what, author): (&DrainTarget, &Author)| Drain { what: what.to_string(), by: author.by.clone(), at: author.at() };
        let weights = self.weights().iter().flat_map(|(service, of)| of.iter().map(move |one| (service, one)));
        let entry = |(service, (backend, set)): (&ServiceName, (&SocketAddr, &Weight))| WeightEntry {
            service: service.to_string(),
            backend: backend.to_string(),
            weight: set.weight,
            by: set.author.by.clone(),
            at: set.author.at(),
        };
        let drains = self.drains().iter().map(drain).collect();
        let document = Document { version: VERSION, drains, weights: weights.map(entry).collect() };
        serde_saphyr::to_string(&document).map_err(|error| DocumentError::Yaml(error.to_string()))
    }
}

fn parse_backend(service: &str, backend: &str) -> Option<(ServiceName, SocketAddr)> {
    Some((service_name(service).ok()?, backend.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::world::overrides::tests::{author, drained};

    #[test]
    fn formatted_overrides_parse_to_the_same_overrides() {
        let mut overrides = drained(&["backend/10.0.0.1:80", "backend/fd00::1", "node/worker-1", "gateway/edge: 1 #"]);
        let weight = Weight { weight: 7, author: author("bob \"x\"\n: y") };
        overrides.set_weight(ServiceName::new("shop", "web"), "[fd00::1]:80".parse().unwrap(), weight).unwrap();
        let text = overrides.to_text().unwrap();
        assert_eq!(Overrides::from_text(&text).unwrap(), overrides, "{text}");
        assert!(text.contains("2023-11-14T22:13:20Z"), "{text}");
        assert_eq!(Overrides::from_text("").unwrap(), Overrides::default());
    }

    #[test]
    fn errors_name_the_invalid_value() {
        let rows = [
            ("version: 2", "version 2"),
            ("drains: []", "version"),
            ("version: 1\nrains: []", "rains"),
            ("version: 1\ndrains: [{what: web, by: a, at: '2026-01-31T12:00:00Z'}]", "\"web\" names nothing"),
            ("version: 1\ndrains: [{what: node/a, by: a, at: yesterday}]", "\"yesterday\" is no time"),
            (
                "version: 1\nweights: [{service: web, backend: '1.1.1.1:1', weight: 1, by: a, at: '2026-01-31T12:00:00Z'}]",
                "web 1.1.1.1:1",
            ),
        ];
        for (text, expected) in rows {
            let error = Overrides::from_text(text).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
