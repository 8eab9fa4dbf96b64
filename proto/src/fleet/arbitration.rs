//! VIP groups that several gateways of a link claim at once, because they do not hear each other's advertisements: what
//! each says to the controller, and what the controller decides.
//!
//! Bit N of a set is group N. Not here: the decision (the controller), and what follows from it (the gateway's agent).

/// The VIP groups that VRRP gives to a gateway.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GroupClaims {
    /// The groups.
    pub groups: u64,
    /// The link and its election, in the same words by all gateways on it.
    pub link: String,
    /// Whether frames have arrived from the link lately.
    pub hears_link: bool,
    /// How fit the gateway is to own groups, 0 to 255; higher is better.
    pub rank: u8,
    /// Of the groups, what the controller has told it last to keep.
    pub keeps: u64,
    /// Counts the claims of a stream.
    pub number: u64,
}

/// What is decided about the claims of one gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Arbitration {
    /// Groups that this gateway and another one claim.
    pub contested: u64,
    /// Of these, what it keeps, as decided.
    pub keeps: u64,
    /// Of these, what it leaves to another one, as decided.
    pub yields: u64,
    /// The number of the claims that it answers.
    pub answers: u64,
}
