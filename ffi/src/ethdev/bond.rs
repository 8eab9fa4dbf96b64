//! Members that leave a started bond, because the kernel asks for them or they left their bus, and members that come back.
//!
//! Invariant: the members of a bond change only while no thread uses a queue of it: the driver reads its list of members
//! without a lock for each burst.
//!
//! Not here: when a bond changes its active member, which the driver decides.

use super::hotplug;
use super::owned_port::OwnedPort;
use super::port::Port;
use super::queue::{RxQueue, TxQueue};
use crate::device::Device;
use crate::eal::device_requests;
use crate::error::Error;
use crate::raw;

/// Members that have to leave a bond, and members that can be added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberChanges {
    /// Members that the kernel asks for, or that left their bus.
    pub leaving: Vec<Device>,
    /// Configured members that exist and are not in the bond.
    pub joining: Vec<Device>,
}

impl MemberChanges {
    /// Whether nothing changes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leaving.is_empty() && self.joining.is_empty()
    }
}

impl Port {
    /// The members of a bond that have to leave it, and those that are not in it although they exist.
    #[must_use]
    pub fn member_changes(&self) -> MemberChanges {
        let mut changes = MemberChanges::default();
        for member in self.device().members() {
            let presence = member.presence();
            match hotplug::id_of(&member) {
                Some(_) if device_requests::contains(&member.port_name()) || matches!(presence, Ok(None)) => {
                    changes.leaving.push(member);
                }
                None if matches!(presence, Ok(Some(_))) => changes.joining.push(member),
                _ => {}
            }
        }
        changes
    }

    /// Takes members out of the bond and closes them, and adds others. The exclusive references to all queues of the port
    /// prove that no thread uses one. Returns the members that could not be changed.
    pub fn change_members(&self, changes: &MemberChanges, rx: &[&mut RxQueue], tx: &[&mut TxQueue]) -> Vec<(Device, Error)> {
        let owned = self.owned();
        let in_hand =
            (rx.iter().filter(|queue| queue.is_of(owned)).count(), tx.iter().filter(|queue| queue.is_of(owned)).count());
        let mut failed = Vec::new();
        if in_hand != self.queue_counts() {
            let busy = |member: &Device| (member.clone(), hotplug::refused(member, "stop the queues of its bond", -libc::EBUSY));
            return changes.leaving.iter().chain(&changes.joining).map(busy).collect();
        }
        // A bond takes the address of its first member, and would change it with that member.
        // SAFETY: the port is a bond; six bytes are read.
        unsafe { raw::sluice_bond_set_mac(owned.id, self.mac().as_ptr()) };
        for member in &changes.leaving {
            if let Err(error) = release(owned, member) {
                failed.push((member.clone(), error));
            }
        }
        for member in &changes.joining {
            if let Err(error) = add(owned, member, self.mac()) {
                failed.push((member.clone(), error));
            }
        }
        failed
    }
}

/// Takes a member out of a bond whose queues nobody uses, and closes it.
fn release(bond: &OwnedPort, member: &Device) -> Result<(), Error> {
    let Some(id) = hotplug::id_of(member) else { return Ok(()) };
    // SAFETY: both ports are attached, and no queue of the bond is in use.
    let code = unsafe { raw::sluice_bond_remove_member(bond.id, id) };
    if code != 0 {
        return Err(hotplug::refused(member, "take it out of its bond", code));
    }
    // SAFETY: the port is attached, the bond has given it up, and nothing else uses it.
    unsafe { hotplug::close(id, member) };
    Ok(())
}

/// Attaches a member and adds it to a bond whose queues nobody uses.
fn add(bond: &OwnedPort, member: &Device, mac: [u8; 6]) -> Result<(), Error> {
    let id = hotplug::attach_member(member)?;
    // SAFETY: both ports are attached, and no queue of the bond is in use.
    let code = unsafe { raw::sluice_bond_add_member(bond.id, id) };
    if code != 0 {
        let error = hotplug::refused(member, "add it to its bond", code);
        // SAFETY: the port is attached, the bond did not take it, and nothing else uses it.
        unsafe { hotplug::close(id, member) };
        return Err(error);
    }
    bond.reopen_filter(mac)
}
