//! Attaches devices to DPDK and removes them, with the members of bonds, and says why a driver refused.
//!
//! Virtual devices are attached one by one after EAL's start instead of on its command line, so that an error names its
//! device.

use std::path::Path;

use crate::device::{self, Device};
use crate::eal::{device_requests, log};
use crate::error::Error;
use crate::pci;
use crate::raw;
use linux::interface;

/// -EFAULT: what `rte_dev_probe` returns for a name that no driver takes.
const NO_SUCH_DRIVER: i32 = -libc::EFAULT;

/// DPDK's port number of an attached device. EAL must run, and no other thread attaches or removes a device.
fn id_of(device: &Device) -> Option<u16> {
    let (name, mut id) = (raw::c_string(&device.port_name()), 0);
    if device.is_pci() {
        // SAFETY: EAL runs, because an `Eal` or a port exists; the name is terminated and copied by DPDK.
        return u16::try_from(unsafe { raw::sluice_port_of_device(name.as_ptr()) }).ok();
    }
    // SAFETY: EAL runs, because an `Eal` or a port exists; the name is terminated; `id` is written only in this call.
    (unsafe { raw::rte_eth_dev_get_port_by_name(name.as_ptr(), &raw mut id) } == 0).then_some(id)
}

/// Attaches a device, and first the members of a bond. Returns its port number.
pub(super) fn attach(device: &Device) -> Result<u16, Error> {
    let name = device.port_name();
    let find = || id_of(device);
    if device.is_pci() {
        return attach_pci(device, &name, find);
    }
    if find().is_some() {
        return Err(Error::DeviceInUse { device: device.to_string(), name });
    }
    if let Some(interface) = device.interface()
        && interface::index(interface).map_err(|error| refused(device, "find its interface", -error.raw_os_error()))?.is_none()
    {
        return Err(Error::NoInterface { device: device.to_string(), interface: interface.to_owned() });
    }
    device_requests::forget(&name);
    let members = BondMembers::attach(device)?;
    let arguments = raw::c_string(&device.to_attach(&members.devices()));
    // SAFETY: EAL runs; the string is terminated and copied by DPDK.
    let code = unsafe { raw::rte_dev_probe(arguments.as_ptr()) };
    if code != 0 {
        return Err(refused(device, "attach it", code));
    }
    let id = find().ok_or_else(|| refused(device, "find the port that it should have made", -libc::ENODEV))?;
    members.keep();
    Ok(id)
}

/// Attaches a device that is to become a member of a bond. Returns its port number.
pub(super) fn attach_member(member: &Device) -> Result<u16, Error> {
    let id = attach(member)?;
    if member.lacks_link_interrupts() {
        // SAFETY: the port is attached and not configured, and only this thread uses it.
        unsafe { raw::sluice_port_disclaim_link_interrupt(id) };
    }
    Ok(id)
}

/// The members of a bond that are attached, with their port numbers. No other thread attaches or removes a device.
pub(super) fn attached_members(bond: &Device) -> Vec<(u16, Device)> {
    bond.members().into_iter().filter_map(|member| Some((id_of(&member)?, member))).collect()
}

/// Attached members of a bond. Dropping this closes them.
pub(super) struct BondMembers(Vec<(u16, Device)>);

impl BondMembers {
    /// Attaches the members of a bond that exist. Without any it is an error.
    fn attach(bond: &Device) -> Result<Self, Error> {
        let mut attached = Self(Vec::new());
        let mut absence = None;
        for member in bond.members() {
            match attach_member(&member) {
                Ok(id) => attached.0.push((id, member)),
                Err(error) if matches!(member.presence(), Ok(None)) => {
                    tracing::warn!(%bond, %error, "a member of the bond is missing; it is added when it appears");
                    absence = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        match absence {
            Some(error) if attached.0.is_empty() => Err(error),
            _ => Ok(attached),
        }
    }

    fn devices(&self) -> Vec<Device> {
        self.0.iter().map(|(_, member)| member.clone()).collect()
    }

    /// Leaves the members to the bond.
    fn keep(mut self) {
        self.0.clear();
    }

    /// The members of a closed bond.
    pub(super) fn of_closed(bond: &Device) -> Self {
        Self(attached_members(bond))
    }
}

impl Drop for BondMembers {
    fn drop(&mut self) {
        for (id, member) in &self.0 {
            // SAFETY: the port is attached, no bond owns it, and nothing else uses it.
            unsafe { close(*id, member) };
        }
    }
}

/// Stops and closes a port, and removes its device from its bus. A device that returns while its bus still holds the
/// old one would be refused as already attached. Other ports of the device are removed with it; nothing uses them,
/// because no two ports are configured with one device.
///
/// # Safety
/// The port is attached, and no queue or handle of it remains.
pub(super) unsafe fn close(id: u16, device: &Device) {
    // SAFETY: as the caller promises. Stopping a port that did not start is an error without effect.
    unsafe {
        raw::rte_eth_dev_stop(id);
        let on_bus = raw::sluice_port_device(id);
        raw::rte_eth_dev_close(id);
        let code = if on_bus.is_null() { 0 } else { raw::rte_dev_remove(on_bus) };
        device_requests::forget(&device.port_name());
        if code < 0 {
            let reason = raw::error_text(code);
            tracing::warn!(%device, reason, "the device stays on its bus; if it returns, it cannot be attached before a restart of the gateway");
        }
    }
}

/// Finds the port that EAL created at its start, or probes the bus for a device that was added later.
fn attach_pci(device: &Device, name: &str, find: impl Fn() -> Option<u16>) -> Result<u16, Error> {
    if let Some(id) = find() {
        return Ok(id);
    }
    if !matches!(device.presence(), Ok(None)) {
        device_requests::forget(name);
        let arguments = raw::c_string(&device.to_string());
        // SAFETY: EAL runs; the string is terminated and copied by DPDK. Success is checked below.
        unsafe { raw::rte_dev_probe(arguments.as_ptr()) };
    }
    find().ok_or_else(|| {
        let logged = log::take_errors();
        let found = pci::refusal(Path::new("/"), name, &logged, has_physical_addresses());
        Error::NoSuchDevice { device: name.to_owned(), found, logged }
    })
}

/// Whether this thread may read physical addresses from `/proc/self/pagemap`.
fn has_physical_addresses() -> bool {
    use rustix::thread::{CapabilitySet, capabilities};
    capabilities(None).is_ok_and(|sets| sets.effective.contains(CapabilitySet::SYS_ADMIN))
}

/// The error of a refusal: a missing privilege, if the process lacks one that the driver needs.
pub(super) fn refused(device: &Device, step: &'static str, code: i32) -> Error {
    let logged = log::take_errors();
    if !device.is_pci() && code == NO_SUCH_DRIVER {
        let found = "DPDK has no driver of that name; `sluiced doctor` shows where drivers are looked for".into();
        return Error::NoSuchDevice { device: device.to_string(), found, logged };
    }
    match missing_capability(device) {
        Some(capability) => Error::Privilege { device: device.to_string(), capability, logged },
        // Drivers return -1 for any error that they have logged.
        None if code == -1 => Error::Device { device: device.to_string(), step, reason: "the driver refuses".into(), logged },
        None => Error::Device { device: device.to_string(), step, reason: raw::error_text(code), logged },
    }
}

/// The capability that the driver needs and this thread lacks.
fn missing_capability(device: &Device) -> Option<&'static str> {
    use rustix::thread::{CapabilitySet, capabilities};
    let drivers = [
        (device::AF_PACKET, CapabilitySet::NET_RAW, "CAP_NET_RAW"),
        (device::AF_XDP, CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF"),
        (device::TAP, CapabilitySet::NET_ADMIN, "CAP_NET_ADMIN"),
    ];
    let (_, needed, text) = drivers.into_iter().find(|(driver, ..)| device.has_driver(driver))?;
    capabilities(None).is_ok_and(|sets| !sets.effective.contains(needed)).then_some(text)
}
