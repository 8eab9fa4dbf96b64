//! The election as operators and the controller see it.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::SystemTime;

use dataplane::Mac;

/// A group of VIPs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStatus {
    /// Whether this gateway owns it.
    pub is_owner: bool,
    /// When that changed last.
    pub since: Option<SystemTime>,
    /// How often this gateway has taken it.
    pub takeovers: u64,
}

/// The election as operators see it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElectionStatus {
    /// The groups, in their order; none without an election.
    pub groups: Vec<GroupStatus>,
    /// Why the gateway leaves its groups to others, if it does.
    pub unfit: Option<&'static str>,
    /// Whether it is still waiting for what it forwards by.
    pub is_joining: bool,
    /// How often the election was given up and begun anew.
    pub restarts: u64,
    /// VIPs that another station announces too, with its Ethernet address.
    pub duplicates: BTreeMap<IpAddr, Mac>,
    /// Announcements of others for VIPs of this gateway since its start.
    pub claims: u64,
    /// Groups that other gateways claim, too, and are not heard: bit N is group N.
    pub contested: u64,
}

/// What a gateway may own, as far as VRRP knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VrrpClaims {
    /// The groups: bit N is group N.
    pub groups: u64,
    /// How fit the gateway is for them, 0 to 255; higher is better.
    pub rank: u8,
}
