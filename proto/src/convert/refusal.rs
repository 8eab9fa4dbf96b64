//! Conversions of refusals.

use super::error::ConvertError;
use crate::limits::{REFUSAL_BYTES_MAX, cut_bytes};
use crate::{Reason, Refusal, Service, ServiceName, v1};

impl From<&Refusal> for v1::Refusal {
    fn from(refusal: &Refusal) -> Self {
        // Earlier gateways do not know it, and accept no state with an unknown reason.
        let reason = if refusal.reason == Reason::AddressReleasing { Reason::Conflict } else { refusal.reason };
        Self { reason: reason.as_str().to_owned(), message: refusal.message.clone() }
    }
}

impl TryFrom<v1::Refusal> for Refusal {
    type Error = ConvertError;

    fn try_from(message: v1::Refusal) -> Result<Self, ConvertError> {
        let reason: Reason = message.reason.parse().map_err(ConvertError::Reason)?;
        Ok(Self { reason, message: message.message })
    }
}

/// A refusal as a gateway reports it, with its message cut to [`REFUSAL_BYTES_MAX`].
#[must_use]
pub fn reported_refusal(refusal: &Refusal) -> v1::Refusal {
    v1::Refusal { message: cut(&refusal.message).to_owned(), ..v1::Refusal::from(refusal) }
}

/// Placeholder for a Service that cannot be converted. Its policy is meaningless, because it has no port.
#[must_use]
pub fn refused_service(name: ServiceName, error: &ConvertError) -> Service {
    Service {
        refusal: Some(Refusal { reason: Reason::Unsupported, message: error.to_string() }),
        ..Service::new(name, Vec::new())
    }
}

/// A reported refusal as a controller reads it; a reason of a newer version becomes [`Reason::Refused`].
#[must_use]
pub fn read_reported_refusal(message: &v1::Refusal) -> Refusal {
    let reason = message.reason.parse().unwrap_or(Reason::Refused);
    Refusal { reason, message: cut(&message.message).to_owned() }
}

/// At most [`REFUSAL_BYTES_MAX`] bytes of a text.
pub(super) fn cut(text: &str) -> &str {
    cut_bytes(text, REFUSAL_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_earlier_gateways_do_not_know_is_sent_as_one_that_they_know() {
        let refusal = Refusal { reason: Reason::AddressReleasing, message: "m".to_owned() };
        let read = Refusal::try_from(v1::Refusal::from(&refusal)).unwrap();
        assert_eq!((read.reason, read.message.as_str()), (Reason::Conflict, "m"));
    }

    #[test]
    fn a_reported_refusal_is_cut_and_read_whatever_its_reason() {
        let refusal = |message: String| Refusal { reason: Reason::Exhausted, message };
        let short = refusal("no room".to_owned());
        assert_eq!(read_reported_refusal(&reported_refusal(&short)), short);
        let long = reported_refusal(&refusal("é".repeat(1000)));
        assert_eq!(long.message, "é".repeat(REFUSAL_BYTES_MAX / 2));
        let newer = v1::Refusal { reason: "Weather".to_owned(), message: "x".repeat(1000) };
        let read = read_reported_refusal(&newer);
        assert_eq!((read.reason, read.message.len()), (Reason::Refused, REFUSAL_BYTES_MAX));
    }
}
