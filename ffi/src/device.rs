//! What a configuration calls a device: a PCI address, or a DPDK virtual device with its arguments.
//!
//! Not here: whether the device exists. That is asked when it is attached.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::interface;

/// Neither a PCI address nor a virtual device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "device {found:?} is neither a PCI address (0000:3b:00.0) nor a DPDK virtual device (net_af_packet0,iface=eth1): {reason}"
)]
pub struct BadDevice {
    /// What was written.
    pub found: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// Where a device sits on the PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PciAddress {
    domain: u16,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04x}:{:02x}:{:02x}.{}", self.domain, self.bus, self.device, self.function)
    }
}

/// A device that DPDK can make a port of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// On the PCI bus.
    Pci {
        /// Where.
        address: PciAddress,
        /// Arguments for its driver, after the first comma.
        arguments: String,
    },
    /// Made by a driver: `net_null0`, `net_af_packet0,iface=eth1`.
    Virtual {
        /// Driver and number; the name of the port within DPDK.
        name: String,
        /// Arguments for its driver, after the first comma.
        arguments: String,
    },
}

impl Device {
    /// The interface that the device works on (not: one that it makes, as net_tap does).
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        match self {
            Self::Virtual { name, arguments } if name.starts_with("net_af_packet") || name.starts_with("net_af_xdp") => {
                arguments.split(',').find_map(|argument| argument.strip_prefix("iface="))
            }
            _ => None,
        }
    }

    /// The NUMA node that the device is on, where the machine has several and says so.
    #[must_use]
    pub fn node(&self) -> Option<u32> {
        let sys = Path::new("/sys");
        let device = match self {
            Self::Pci { address, .. } => sys.join("bus/pci/devices").join(address.to_string()),
            Self::Virtual { .. } => sys.join("class/net").join(self.interface()?).join("device"),
        };
        // -1 where there is only one.
        std::fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
    }

    /// The device with so many queues of each direction, where its driver must be told and its arguments leave that open.
    /// af_xdp has no more than its interface.
    #[must_use]
    pub fn with_queues(self, queues: u16) -> Self {
        let interface_queues = || self.interface().map_or(0, |name| count_queues(Path::new("/sys/class/net"), name));
        let (argument, possible) = match &self {
            Self::Virtual { name, .. } if name.starts_with("net_af_packet") => ("qpairs", queues),
            Self::Virtual { name, .. } if name.starts_with("net_af_xdp") => ("queue_count", queues.min(interface_queues())),
            _ => return self,
        };
        match self {
            Self::Virtual { name, arguments } if possible > 1 && !arguments.contains(&format!("{argument}=")) => {
                Self::Virtual { name, arguments: format!("{arguments},{argument}={possible}") }
            }
            other => other,
        }
    }

    /// What stands for the device on this machine now: the index of the interface that it works on, 0 for others; none
    /// while there is no such interface in the network namespace of the calling thread, or no such device on the PCI bus. An
    /// interface that is removed and made anew is another one.
    #[must_use]
    pub fn presence(&self) -> Option<u32> {
        match (self, self.interface()) {
            (Self::Pci { address, .. }, _) => Path::new("/sys/bus/pci/devices").join(address.to_string()).exists().then_some(0),
            (_, Some(interface)) => interface::index(interface),
            (Self::Virtual { .. }, None) => Some(0),
        }
    }

    /// Whether the kernel works in the packets' own memory, and takes no packet that lies across ordinary pages.
    pub(crate) fn shares_packet_memory(&self) -> bool {
        matches!(self, Self::Virtual { name, .. } if name.starts_with("net_af_xdp"))
    }

    /// The name of its port within DPDK.
    pub(crate) fn port_name(&self) -> String {
        match self {
            Self::Pci { address, .. } => address.to_string(),
            Self::Virtual { name, .. } => name.clone(),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Pci { arguments, .. } | Self::Virtual { arguments, .. }) = self;
        f.write_str(&self.port_name())?;
        if arguments.is_empty() { Ok(()) } else { write!(f, ",{arguments}") }
    }
}

impl FromStr for Device {
    type Err = BadDevice;

    fn from_str(text: &str) -> Result<Self, BadDevice> {
        let bad = |reason| BadDevice { found: text.to_owned(), reason };
        let (name, arguments) = text.split_once(',').unwrap_or((text, ""));
        let arguments = arguments.to_owned();
        if text.contains(|c: char| c.is_whitespace() || c == '\0') {
            return Err(bad("there is a space in it"));
        }
        if !name.starts_with("net_") {
            let address = parse_pci(name).ok_or_else(|| bad("it has not the form dddd:bb:dd.f and does not begin with net_"))?;
            return Ok(Self::Pci { address, arguments });
        }
        if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            return Err(bad("a name has letters, digits and _ only"));
        }
        Ok(Self::Virtual { name: name.to_owned(), arguments })
    }
}

/// Receive queues of an interface.
fn count_queues(interfaces: &Path, name: &str) -> u16 {
    let entries = std::fs::read_dir(interfaces.join(name).join("queues")).into_iter().flatten().flatten();
    let count = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with("rx-")).count();
    u16::try_from(count).unwrap_or(u16::MAX)
}

/// `dddd:bb:dd.f`, or without the domain, which then is 0.
fn parse_pci(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0", rest));
    let hex = |part: &str, limit: u16| {
        let digits = !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        u16::from_str_radix(part, 16).ok().filter(|value| digits && *value <= limit)
    };
    let byte = |part: &str, limit: u16| hex(part, limit).and_then(|value| u8::try_from(value).ok());
    Some(PciAddress {
        domain: hex(domain, 0xffff)?,
        bus: byte(bus, 0xff)?,
        device: byte(device, 0x1f)?,
        function: byte(function, 7)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pci_address_may_leave_out_the_domain() {
        for text in ["0000:3b:00.0", "3b:00.0"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), "0000:3b:00.0");
        }
    }

    #[test]
    fn a_pci_device_keeps_its_arguments() {
        let device: Device = "3B:00.0,dv_flow_en=0".parse().unwrap();
        assert_eq!((device.port_name().as_str(), device.to_string().as_str()), ("0000:3b:00.0", "0000:3b:00.0,dv_flow_en=0"));
    }

    #[test]
    fn a_virtual_device_keeps_its_arguments() {
        let device: Device = "net_af_packet0,iface=eth1,qdisc_bypass=1".parse().unwrap();
        assert_eq!(device.interface(), Some("eth1"));
        assert_eq!(device.port_name(), "net_af_packet0");
        assert_eq!(device.to_string(), "net_af_packet0,iface=eth1,qdisc_bypass=1");
    }

    #[test]
    fn drivers_over_sockets_are_told_how_many_queues_unless_the_arguments_say() {
        let with_queues = |text: &str, queues| text.parse::<Device>().unwrap().with_queues(queues).to_string();
        assert_eq!(with_queues("net_af_packet0,iface=eth1", 2), "net_af_packet0,iface=eth1,qpairs=2");
        for text in ["net_af_packet0,iface=eth1,qpairs=4", "net_tap0,iface=dtap0", "net_af_xdp0,iface=no-such", "0000:3b:00.0"] {
            assert_eq!(with_queues(text, 2), text);
        }
        assert_eq!(with_queues("net_af_packet0,iface=eth1", 1), "net_af_packet0,iface=eth1");
        assert_eq!(count_queues(Path::new("/sys/class/net"), "lo"), 1);
    }

    #[test]
    fn a_tap_is_made_by_its_driver_and_need_not_exist() {
        assert_eq!("net_tap0,iface=dtap0".parse::<Device>().unwrap().interface(), None);
    }

    #[test]
    fn what_is_no_device_is_refused_with_the_reason() {
        for text in ["", "eth0", "0000:3b:20.0", "0000:3b:00.8", "3b.0", "net_null0, x=1", "net_a b0", "+3b:00.0"] {
            let error = text.parse::<Device>().unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }
}
