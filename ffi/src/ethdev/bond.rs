//! Members that leave a started bond, because the kernel asks for them or they left their bus, and members that come back.
//!
//! Invariant: the members of a bond change only while no thread uses a queue of it: the driver reads its list of members
//! without a lock for each burst. Which members a bond has is kept in its [`Port`]: a walk over DPDK's devices is for the
//! thread alone that attaches or removes one.
//!
//! Not here: when a bond changes its active member, which the driver decides.

use std::path::Path;

use super::hotplug;
use super::owned_port::OwnedPort;
use super::port::Port;
use super::queue::{RxQueue, TxQueue};
use crate::device::Device;
use crate::eal::{device_requests, log};
use crate::error::Error;
use crate::pci::{self, Verdict};
use crate::raw;

/// Members that have to leave a bond, and members that can be added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberChanges {
    /// Members that the kernel asks for, or that left their bus.
    pub leaving: Vec<Device>,
    /// Configured members that exist, are not in the bond, and can be added.
    pub joining: Vec<Device>,
    /// Configured members that exist and cannot be added, with the reason: a kernel driver keeps them from DPDK.
    pub unusable: Vec<(Device, String)>,
}

impl MemberChanges {
    /// Whether no member leaves or joins.
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
            if self.members().iter().any(|(_, attached)| *attached == member) {
                if device_requests::contains(&member.port_name()) || matches!(presence, Ok(None)) {
                    changes.leaving.push(member);
                }
            } else if matches!(presence, Ok(Some(_))) {
                match why_unusable(Path::new("/"), &member) {
                    Some(reason) => changes.unusable.push((member, reason)),
                    None => changes.joining.push(member),
                }
            }
        }
        changes
    }

    /// Takes members out of the bond and closes them, and adds others. The exclusive references to all queues of the port
    /// prove that no thread uses one. Returns the members that could not be changed.
    pub fn change_members(&mut self, changes: &MemberChanges, rx: &[&mut RxQueue], tx: &[&mut TxQueue]) -> Vec<(Device, Error)> {
        let (owned, mac) = (self.owned(), self.mac());
        let in_hand =
            (rx.iter().filter(|queue| queue.is_of(&owned)).count(), tx.iter().filter(|queue| queue.is_of(&owned)).count());
        let mut failed = Vec::new();
        if in_hand != self.queue_counts() {
            let busy = |member: &Device| (member.clone(), hotplug::refused(member, "stop the queues of its bond", -libc::EBUSY));
            return changes.leaving.iter().chain(&changes.joining).map(busy).collect();
        }
        // A bond takes the address of its first member, and would change it with that member.
        // SAFETY: the port is a bond; six bytes are read.
        unsafe { raw::sluice_bond_set_mac(owned.id, mac.as_ptr()) };
        let members = self.members_mut();
        for member in &changes.leaving {
            // The driver logs errors when it removes a member without a fault; they do not explain a later failure.
            log::take_errors();
            let Some(at) = members.iter().position(|(_, attached)| attached == member) else { continue };
            match release(&owned, members[at].0, member) {
                Ok(()) => drop(members.remove(at)),
                Err(error) => failed.push((member.clone(), error)),
            }
        }
        for member in &changes.joining {
            log::take_errors();
            match add(&owned, member) {
                Ok(id) => members.push((id, member.clone())),
                Err(error) => failed.push((member.clone(), error)),
            }
        }
        log::take_errors();
        // The driver opens the filter of its primary member alone, which may be another one now.
        if let Err(error) = owned.reopen_filter(mac, members) {
            failed.push((owned.device.clone(), error));
        }
        failed
    }
}

/// Takes a member out of a bond whose queues nobody uses, and closes it.
fn release(bond: &OwnedPort, id: u16, member: &Device) -> Result<(), Error> {
    // SAFETY: both ports are attached, and no queue of the bond is in use.
    let code = unsafe { raw::sluice_bond_remove_member(bond.id, id) };
    if code != 0 {
        return Err(hotplug::refused(member, "take it out of its bond", code));
    }
    // SAFETY: the port is attached, the bond has given it up, and nothing else uses it.
    unsafe { hotplug::close(id, member) };
    Ok(())
}

/// Attaches a member and adds it to a bond whose queues nobody uses. Returns its port number.
fn add(bond: &OwnedPort, member: &Device) -> Result<u16, Error> {
    let id = hotplug::attach_member(member)?;
    // SAFETY: both ports are attached, and no queue of the bond is in use.
    let code = unsafe { raw::sluice_bond_add_member(bond.id, id) };
    if code != 0 {
        let error = hotplug::refused(member, "add it to its bond", code);
        // SAFETY: the port is attached, the bond did not take it, and nothing else uses it.
        unsafe { hotplug::close(id, member) };
        return Err(error);
    }
    Ok(id)
}

/// Why DPDK cannot take an existing member, on the machine below `root`, and the next step. None: it can, as far as Linux
/// says.
fn why_unusable(root: &Path, member: &Device) -> Option<String> {
    if !member.is_pci() {
        return None;
    }
    let Verdict { is_usable, found, advice } = pci::judge(root, &member.port_name());
    (!is_usable).then(|| format!("it is {found}; {advice}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_member_that_a_kernel_driver_keeps_cannot_be_added() {
        let why = |driver: &str| {
            let root = tempfile::tempdir().unwrap();
            let device = root.path().join("sys/bus/pci/devices/0000:3b:00.0");
            fs::create_dir_all(&device).unwrap();
            symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
            why_unusable(root.path(), &"0000:3b:00.0".parse().unwrap())
        };
        assert_eq!((why("vfio-pci"), why("mlx5_core")), (None, None));
        assert!(why("ixgbe").unwrap().starts_with("it is bound to ixgbe, which keeps it from DPDK; "));
        assert_eq!(why_unusable(Path::new("/nothing"), &"net_null1".parse().unwrap()), None, "it is on no bus");
    }
}
