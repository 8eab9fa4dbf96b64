//! A configured port of DPDK, which is stopped and closed when its last owner is dropped, and the state of the device
//! that closing restores: its Ethernet address and its receive filter.

use super::hotplug::{self, BondMembers};
use crate::device::Device;
use crate::error::Error;
use crate::raw;

/// -ENOTSUP
const NOT_SUPPORTED: i32 = -libc::ENOTSUP;

/// An attached port, shared by the handle and the queues. Dropping the last of them stops and closes the port.
#[derive(Debug)]
pub(super) struct OwnedPort {
    pub(super) id: u16,
    pub(super) device: Device,
    /// The device's original Ethernet address, to be restored if it was changed: drivers over a Linux interface change
    /// it there.
    own_mac: Option<[u8; 6]>,
}

impl OwnedPort {
    /// Takes ownership of an attached port.
    pub(super) fn new(id: u16, device: Device) -> Self {
        Self { id, device, own_mac: None }
    }

    /// Sets the wanted Ethernet address, if there is one.
    pub(super) fn set_mac(&mut self, wanted: Option<[u8; 6]>) -> Result<Option<[u8; 6]>, Error> {
        let own = self.current_mac()?;
        let Some(mac) = wanted.filter(|mac| *mac != own) else { return Ok(wanted) };
        // SAFETY: the port is configured; six bytes are read.
        let code = unsafe {
            match self.device.is_bond() {
                // A bond loses an address that is set only on the port when it starts.
                true => raw::sluice_bond_set_mac(self.id, mac.as_ptr()),
                false => raw::sluice_port_set_mac(self.id, mac.as_ptr()),
            }
        };
        match code {
            // Such a port (af_xdp) receives promiscuously, so frames to an address that the device does not know arrive
            // as well.
            NOT_SUPPORTED => {}
            code => {
                self.check("set the Ethernet address", code)?;
                self.own_mac = Some(own);
            }
        }
        Ok(wanted)
    }

    /// The current Ethernet address of the device.
    fn current_mac(&self) -> Result<[u8; 6], Error> {
        let mut mac = [0; 6];
        // SAFETY: the port is configured; six bytes are written.
        let code = unsafe { raw::sluice_port_mac(self.id, mac.as_mut_ptr()) };
        self.check("read the Ethernet address", code)?;
        Ok(mac)
    }

    /// Opens the receive filter for frames to our address and to groups (neighbour discovery). Frames for others, which
    /// a switch floods, stay outside. If the device does not know our address or has no filter for groups, it receives
    /// all frames. Returns our address: the wanted one, or else that of the device. (A bond takes that of its first
    /// member when it starts.)
    pub(super) fn open_filter(&self, wanted: Option<[u8; 6]>, members: &[(u16, Device)]) -> Result<[u8; 6], Error> {
        let current = self.current_mac()?;
        let mac = wanted.unwrap_or(current);
        if self.device.uses_lacp() {
            members.iter().try_for_each(|(id, member)| open_member(*id, member, mac))?;
        }
        // SAFETY: the port is started.
        if current == mac && unsafe { raw::rte_eth_allmulticast_enable(self.id) } == 0 {
            return Ok(mac);
        }
        // SAFETY: the port is started.
        match unsafe { raw::rte_eth_promiscuous_enable(self.id) } {
            // A virtual device without promiscuous mode has no filter.
            NOT_SUPPORTED => {}
            code => self.check("receive promiscuously", code)?,
        }
        Ok(mac)
    }

    /// Opens the receive filter again, for a member that a bond did not have when it was opened: ethdev does not pass on
    /// what it believes to be set.
    pub(super) fn reopen_filter(&self, mac: [u8; 6], members: &[(u16, Device)]) -> Result<(), Error> {
        // SAFETY: the port is started.
        unsafe {
            raw::rte_eth_promiscuous_disable(self.id);
            raw::rte_eth_allmulticast_disable(self.id);
        }
        self.open_filter(Some(mac), members).map(|_| ())
    }

    /// The error of a step that returned another code than 0.
    pub(super) fn check(&self, step: &'static str, code: i32) -> Result<(), Error> {
        if code == 0 { Ok(()) } else { Err(hotplug::refused(&self.device, step, code)) }
    }
}

/// Has a member of an 802.3ad bond receive frames to the bond's address: the bond's driver leaves each member its own,
/// and a card receives nothing else. A member that takes no second address receives all frames, of which the bond drops
/// those for others.
fn open_member(id: u16, member: &Device, mac: [u8; 6]) -> Result<(), Error> {
    // SAFETY: the member is attached; six bytes are read.
    if unsafe { raw::sluice_port_add_mac(id, mac.as_ptr()) } == 0 {
        return Ok(());
    }
    // SAFETY: the member is attached.
    match unsafe { raw::rte_eth_promiscuous_enable(id) } {
        // It has no filter.
        0 | NOT_SUPPORTED => Ok(()),
        code => Err(hotplug::refused(member, "receive frames to the address of its bond", code)),
    }
}

impl Drop for OwnedPort {
    fn drop(&mut self) {
        // SAFETY: the port is attached, and no queue or handle of it remains. Stopping a port that did not start is an
        // error without effect. Packets of its pool that others hold stay valid, because pools are never freed.
        unsafe {
            // A driver over a Linux interface sets both there, where they would remain.
            raw::rte_eth_promiscuous_disable(self.id);
            raw::rte_eth_allmulticast_disable(self.id);
            if let Some(mac) = self.own_mac {
                raw::sluice_port_set_mac(self.id, mac.as_ptr());
            }
            hotplug::close(self.id, &self.device);
        }
        drop(BondMembers::of_closed(&self.device));
    }
}
