//! Conversions between `sluice.v1` messages and the domain types.
