//! Election leases: ownership of VIP groups by election. A lease says until when this gateway answers for the VIPs of a
//! group, on the workers' clock.
//!
//! VRRP advertisements that Linux sends by a twin pass through a worker, and each renews the lease of its group. So a
//! lease ends [`LEASE_INTERVALS`] advertisements after the last one that other gateways could hear, which is before any
//! of them takes over (RFC 9568 section 6.1: Active_Down_Interval). A worker that was stopped finds its leases expired,
//! and drops the packets that it was about to send for them (`workers::egress`).
//!
//! **Invariant:** an expired lease is never renewed by an advertisement: advertisements that have waited in queues
//! while the gateway was stopped are dropped. Only the agent begins a lease, once it has a fresh answer of the
//! election.
//!
//! Not here: the election (keepalived), and which VIPs a snapshot answers for.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use proto::limits::VIP_GROUPS_MAX;
use proto::vip_group;

use crate::port::{Link, Port, PortIndex};
use crate::snapshot::{AddressRole, Snapshot};
use crate::stats::Tally;
use crate::wire::{Address, Headers, Mac, Tags, protocol, transport_bytes};
use crate::workers::Egress;

/// Length of a lease in intervals of advertisements. Other gateways wait for at least as many (RFC 9568 section 6.1).
pub const LEASE_INTERVALS: u32 = 3;
/// Claims of other stations that wait for the agent, without an election; more are not needed to report one.
const CLAIMS_MAX: usize = 64;
/// Version 3, type 1: advertisement (RFC 9568 section 5.2).
const ADVERTISEMENT: u8 = 0x31;

/// The leases, and claims of other stations to VIPs of this gateway. Workers and the agent share it.
#[derive(Debug)]
pub struct VipOwnership {
    /// `None`: there is no election, and this gateway owns every group.
    election: Option<VipElection>,
    /// Of addresses without a group.
    claims: ArrayQueue<VipClaim>,
}

#[derive(Debug)]
struct VipElection {
    first_vrid: u8,
    lease_ns: u64,
    /// Whether advertisements of Linux pass.
    is_open: AtomicBool,
    /// For each group the end of the lease, ns; 0: this gateway does not own the group.
    leases: Box<[AtomicU64]>,
    /// Groups of which another station announced an address, until the agent takes them: bit N is group N.
    announced: AtomicU64,
    /// Groups of which another station asked for an address.
    asked: AtomicU64,
}

/// Groups of this gateway that other stations claimed: bit N is group N. A set has room for all, however many addresses
/// were claimed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupsClaimed {
    /// Another station announced one of their addresses.
    pub announced: u64,
    /// Another station asked for one of their addresses by a probe, as one does that has lost it.
    pub asked: u64,
}

/// Until when a packet that speaks for an address may leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Permission {
    /// No election moves the address.
    Always,
    /// The lease of its group ends then, ns by the worker's clock.
    Until(u64),
}

impl Permission {
    /// Sends a packet by a port, unless it is too late then.
    pub(crate) fn send<P: Port>(self, egress: &mut Egress<P>, port: PortIndex, tags: Tags, buffer: P::Buffer, tally: &mut Tally) {
        match self {
            Self::Always => egress.send_tagged(port, tags, buffer, tally),
            Self::Until(until_ns) => egress.send_tagged_until(until_ns, port, tags, buffer, tally),
        }
    }
}

/// Another station announces a VIP for which this gateway answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VipClaim {
    /// Where it was heard.
    pub link: Link,
    /// The VIP, or the SNAT address of a VIP group.
    pub vip: IpAddr,
    /// The Ethernet address of the other station.
    pub other: Mac,
    /// The Ethernet address of this gateway's port.
    pub own: Mac,
}

impl Default for VipOwnership {
    /// Without an election.
    fn default() -> Self {
        Self { election: None, claims: ArrayQueue::new(CLAIMS_MAX) }
    }
}

impl VipOwnership {
    /// With an election that has not begun. Group 0 has VRID `first_vrid`, and so on; `advertisement_ns` is the
    /// interval of advertisements.
    #[must_use]
    pub fn elected(groups: u8, first_vrid: u8, advertisement_ns: u64) -> Self {
        let leases = (0..groups.clamp(1, VIP_GROUPS_MAX)).map(|_| AtomicU64::new(0)).collect();
        let lease_ns = advertisement_ns.saturating_mul(LEASE_INTERVALS.into());
        let [announced, asked] = [AtomicU64::new(0), AtomicU64::new(0)];
        let election = VipElection { first_vrid, lease_ns, is_open: AtomicBool::new(false), leases, announced, asked };
        Self { election: Some(election), ..Self::default() }
    }

    /// Whether gateways elect the owner of each VIP.
    pub(crate) const fn is_elected(&self) -> bool {
        self.election.is_some()
    }

    /// Lets advertisements of Linux pass from now on.
    pub fn open(&self) {
        if let Some(election) = &self.election {
            election.is_open.store(true, Ordering::SeqCst);
        }
    }

    /// Ends all leases, and drops the advertisements of Linux until [`Self::open`].
    pub fn close(&self) {
        if let Some(election) = &self.election {
            election.is_open.store(false, Ordering::SeqCst);
            election.leases.iter().for_each(|lease| lease.store(0, Ordering::SeqCst));
        }
    }

    /// Begins the lease of a group, whose election this gateway has just won.
    pub fn begin(&self, group: u8, now_ns: u64) {
        if let Some(election) = self.election.as_ref().filter(|election| election.is_open.load(Ordering::SeqCst))
            && let Some(lease) = election.leases.get(usize::from(group))
        {
            lease.store(now_ns.saturating_add(election.lease_ns).max(1), Ordering::SeqCst);
        }
    }

    /// Ends the lease of a group at once.
    pub fn end(&self, group: u8) {
        if let Some(lease) = self.election.as_ref().and_then(|election| election.leases.get(usize::from(group))) {
            lease.store(0, Ordering::SeqCst);
        }
    }

    /// The groups whose lease has expired although nothing has ended it: the gateway was stopped, or sends nothing.
    pub fn expired(&self, now_ns: u64) -> impl Iterator<Item = u8> {
        let leases = self.election.iter().flat_map(|election| &election.leases);
        (0..)
            .zip(leases)
            .filter(move |(_, lease)| matches!(lease.load(Ordering::SeqCst), 1.. if !is_valid(lease, now_ns)))
            .map(|(group, _)| group)
    }

    /// The group of a VIP; `None` without an election.
    pub(crate) fn group_of_vip(&self, vip: IpAddr) -> Option<u8> {
        let election = self.election.as_ref()?;
        Some(vip_group(vip, u8::try_from(election.leases.len()).unwrap_or(VIP_GROUPS_MAX)))
    }

    /// The groups whose lease is valid, as bits; all without an election.
    pub(crate) fn valid_groups(&self, now_ns: u64) -> u64 {
        let Some(election) = &self.election else { return u64::MAX };
        let valid = (0_u32..).zip(&election.leases).filter(|(_, lease)| is_valid(lease, now_ns));
        valid.fold(0, |groups, (group, _)| groups | 1_u64.checked_shl(group).unwrap_or(0))
    }

    /// Whether this gateway may answer for, and announce, an address that the snapshot answers for: a VIP, or a SNAT
    /// address that belongs to a VIP group, only while it owns the group.
    pub(crate) fn may_speak_for<A: Address>(&self, snapshot: &Snapshot, address: A, now_ns: u64) -> Option<Permission> {
        let group = match snapshot.role(address) {
            AddressRole::Vip => self.group_of_vip(address.ip()),
            AddressRole::Snat => snapshot.group_of_snat(address),
            AddressRole::Twin(_) | AddressRole::Broadcast | AddressRole::PoolUnused | AddressRole::Elsewhere => None,
        };
        let Some((election, group)) = self.election.as_ref().zip(group) else { return Some(Permission::Always) };
        let until_ns = election.leases.get(usize::from(group))?.load(Ordering::SeqCst);
        (now_ns < until_ns).then_some(Permission::Until(until_ns))
    }

    /// [`VipOwnership::may_speak_for`], for an address of either family.
    pub(crate) fn may_speak_for_ip(&self, snapshot: &Snapshot, address: IpAddr, now_ns: u64) -> Option<Permission> {
        match address {
            IpAddr::V4(address) => self.may_speak_for(snapshot, u32::from(address), now_ns),
            IpAddr::V6(address) => self.may_speak_for(snapshot, u128::from(address), now_ns),
        }
    }

    /// Whether a packet that Linux sends may leave. An advertisement of a valid lease renews it; the last one of an
    /// owner that resigns (priority 0) ends it.
    pub(crate) fn may_pass<A: Address>(&self, frame: &[u8], headers: &Headers<A>, now_ns: u64) -> Option<Permission> {
        let always = Some(Permission::Always);
        let Some(election) = self.election.as_ref().filter(|_| headers.tuple.protocol == protocol::VRRP) else { return always };
        let Some([ADVERTISEMENT, vrid, priority, ..]) = transport_bytes(frame, headers) else { return always };
        let group = vrid.checked_sub(election.first_vrid).map(usize::from);
        let Some(lease) = group.and_then(|group| election.leases.get(group)) else { return always };
        let until = lease.load(Ordering::SeqCst);
        if !election.is_open.load(Ordering::SeqCst) || (until > 0 && now_ns >= until) {
            return None;
        }
        if until == 0 {
            // This gateway has just won, and the agent has yet to begin the lease.
            return Some(Permission::Until(now_ns.saturating_add(election.lease_ns)));
        }
        let renewed = if *priority == 0 { 0 } else { until.max(now_ns.saturating_add(election.lease_ns)) };
        // Fails if the agent has just ended the lease, which then stays ended.
        let _ = lease.compare_exchange(until, renewed, Ordering::SeqCst, Ordering::SeqCst);
        Some(Permission::Until(until))
    }

    /// Remembers a claim for the agent: in an election for the group of the address, since the other station may be the
    /// next owner, or have been the last one.
    pub(crate) fn note(&self, claim: VipClaim, group: Option<u8>, is_question: bool) {
        let Some((election, group)) = self.election.as_ref().zip(group) else {
            // If the queue is full, others are reported already.
            let _ = self.claims.push(claim);
            return;
        };
        let groups = if is_question { &election.asked } else { &election.announced };
        groups.fetch_or(1_u64.checked_shl(group.into()).unwrap_or(0), Ordering::SeqCst);
    }

    /// The oldest claim of an address without a group that was not taken yet.
    #[must_use]
    pub fn take_claim(&self) -> Option<VipClaim> {
        self.claims.pop()
    }

    /// The groups that were claimed since they were taken last.
    #[must_use]
    pub fn take_claimed_groups(&self) -> GroupsClaimed {
        let take = |groups: &AtomicU64| groups.swap(0, Ordering::SeqCst);
        let taken = |election: &VipElection| GroupsClaimed { announced: take(&election.announced), asked: take(&election.asked) };
        self.election.as_ref().map(taken).unwrap_or_default()
    }
}

fn is_valid(lease: &AtomicU64, now_ns: u64) -> bool {
    now_ns < lease.load(Ordering::SeqCst)
}
