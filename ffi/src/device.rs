//! Parses the device of a configuration: a PCI address, or a DPDK virtual device with its arguments.
//!
//! Not here: whether the device exists. That is checked when it is attached.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::str::FromStr;

use linux::interface;

/// The text is neither a PCI address nor a virtual device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "device {found:?} is neither a PCI address (0000:3b:00.0) nor a DPDK virtual device (net_af_packet0,iface=eth1): {reason}"
)]
pub struct BadDevice {
    /// The text found.
    pub found: String,
    /// The error in it.
    pub reason: &'static str,
}

/// Address of a device on the PCI bus.
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

/// A device that DPDK can use as a port.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Device {
    /// A device on the PCI bus.
    Pci {
        /// Its address.
        address: PciAddress,
        /// Arguments for its driver, after the first comma.
        arguments: String,
    },
    /// A virtual device, created by a driver: `net_null0`, `net_af_packet0,iface=eth1`.
    Virtual {
        /// Driver and number; also the name of the port in DPDK.
        name: String,
        /// Arguments for its driver, after the first comma.
        arguments: String,
    },
}

impl Device {
    /// Whether it is on the PCI bus.
    #[must_use]
    pub const fn is_pci(&self) -> bool {
        matches!(self, Self::Pci { .. })
    }

    /// Whether DPDK makes it with a virtual driver whose name begins so (`net_af_packet`). DPDK, too, compares
    /// beginnings.
    #[must_use]
    pub fn has_driver(&self, driver: &str) -> bool {
        matches!(self, Self::Virtual { name, .. } if name.starts_with(driver))
    }

    /// The interface that the arguments of a virtual device name: one that it works on, or one that it makes
    /// (`net_tap`). A bond has none; its members have.
    #[must_use]
    pub fn named_interface(&self) -> Option<&str> {
        match self {
            Self::Virtual { arguments, .. } if !self.is_bond() => {
                arguments.split(',').find_map(|argument| argument.strip_prefix("iface="))
            }
            _ => None,
        }
    }

    /// The Linux interface that the device works on; not one that it makes, as `net_tap` does.
    #[must_use]
    pub fn interface(&self) -> Option<&str> {
        self.named_interface().filter(|_| self.has_driver(AF_PACKET) || self.has_driver(AF_XDP))
    }

    /// The files that the arguments of a virtual device name by absolute paths: sockets (`net_memif`, `net_vhost`),
    /// captures (`net_pcap`), `/dev/vhost-net` (`net_virtio_user`). A bond has none; its members have.
    #[must_use]
    pub fn files(&self) -> Vec<&Path> {
        let Self::Virtual { arguments, .. } = self else { return Vec::new() };
        let values = pieces(arguments).filter_map(|piece| Some(Path::new(piece.split_once('=')?.1)));
        values.filter(|path| path.is_absolute()).collect()
    }

    /// The NUMA node of the device, if the machine has several and reports it.
    #[must_use]
    pub fn node(&self) -> Option<u32> {
        let sys = Path::new("/sys");
        let device = match self {
            Self::Pci { address, .. } => sys.join("bus/pci/devices").join(address.to_string()),
            Self::Virtual { .. } => sys.join("class/net").join(self.interface()?).join("device"),
        };
        // -1 if there is only one node.
        std::fs::read_to_string(device.join("numa_node")).ok()?.trim().parse().ok()
    }

    /// The device with this number of receive and transmit queues, and with rings of `AF_PACKET_FRAMES`, as far as its
    /// driver needs arguments for it that are not there. af_xdp has at most as many queues as its interface.
    ///
    /// af_packet sends by the queueing discipline of the interface. DPDK's default goes past it: frames that are sent while
    /// the interface has no carrier then stay in the ring, and leave when the carrier returns, seconds or hours later.
    /// Among them are answers for addresses that belong to another gateway by then. A queueing discipline drops them. It
    /// costs 20 ns of 700 ns a frame on veth.
    #[must_use]
    pub fn with_queues(self, queues: u16) -> Self {
        let interface_queues = || self.interface().map_or(0, |name| count_queues(Path::new("/sys/class/net"), name));
        if self.has_driver(AF_PACKET) {
            let queues = (queues > 1).then_some(("qpairs", queues));
            let arguments = [("framecnt", AF_PACKET_FRAMES), ("qdisc_bypass", 0)].into_iter().chain(queues);
            return arguments.fold(self, |device, (argument, value)| device.with_argument(argument, value));
        }
        if self.has_driver(AF_XDP) {
            let possible = queues.min(interface_queues());
            return if possible > 1 { self.with_argument("queue_count", possible) } else { self };
        }
        self
    }

    /// The virtual device with another argument, unless it has one of that name.
    fn with_argument(self, argument: &str, value: u16) -> Self {
        match self {
            Self::Virtual { name, arguments } if !arguments.contains(&format!("{argument}=")) => {
                Self::Virtual { name, arguments: format!("{arguments},{argument}={value}") }
            }
            other => other,
        }
    }

    /// The members of a bonding device (`net_bonding0,mode=1,slave=0000:3b:00.0,slave=(net_tap1,iface=x)`).
    #[must_use]
    pub fn members(&self) -> Vec<Self> {
        let Self::Virtual { arguments, .. } = self else { return Vec::new() };
        if !self.is_bond() {
            return Vec::new();
        }
        pieces(arguments).filter_map(member).filter_map(|text| text.parse().ok()).collect()
    }

    /// The device, and behind it the members that a bond is made of.
    #[must_use]
    pub fn parts(&self) -> Vec<Self> {
        std::iter::once(self.clone()).chain(self.members()).collect()
    }

    /// Whether it is a bond of DPDK devices.
    #[must_use]
    pub fn is_bond(&self) -> bool {
        self.has_driver(BONDING)
    }

    /// Whether it is an 802.3ad bond, which sends LACP frames to its partner.
    #[must_use]
    pub fn uses_lacp(&self) -> bool {
        matches!(self, Self::Virtual { arguments, .. } if self.is_bond() && pieces(arguments).any(|piece| piece == "mode=4"))
    }

    /// Whether its driver claims to interrupt on link changes but does not notify anyone (DPDK 22.11: it only stores
    /// the new state). A bond would wait forever, so it polls instead, every 10 ms or `lsc_poll_period_ms`.
    pub(crate) fn lacks_link_interrupts(&self) -> bool {
        self.has_driver(TAP)
    }

    /// The text for DPDK, with the members `attached` of a bond. It names a member by its port, because the member is
    /// attached separately with its arguments.
    pub(crate) fn to_attach(&self, attached: &[Self]) -> String {
        let Self::Virtual { name, arguments } = self else { return self.to_string() };
        if !self.is_bond() {
            return self.to_string();
        }
        let named = |piece: &str| match member(piece).map(str::parse::<Self>) {
            Some(Ok(member)) => attached.contains(&member).then(|| format!("{MEMBER}{}", member.port_name())),
            // Without the preferred member the bond is made without a preference.
            _ => match piece.strip_prefix(PRIMARY) {
                Some(name)
                    if !attached.iter().any(|member| name.parse().is_ok_and(|of: Self| of.port_name() == member.port_name())) =>
                {
                    None
                }
                _ => Some(piece.to_owned()),
            },
        };
        let arguments: Vec<String> = pieces(arguments).filter_map(named).collect();
        format!("{name},{}", arguments.join(","))
    }

    /// Identifies the device that exists on this machine now: the index of the interface that it uses, the inode of a
    /// PCI device in sysfs, or 0 for others. None if the interface does not exist in the network namespace of this
    /// process, or the device is not on the PCI bus. A device that is removed and created again has another
    /// identity.
    ///
    /// # Errors
    /// If Linux does not say whether it exists. This is not its absence.
    pub fn presence(&self) -> io::Result<Option<u64>> {
        match (self, self.interface()) {
            (Self::Pci { address, .. }, _) => {
                let entry = Path::new("/sys/bus/pci/devices").join(address.to_string());
                match std::fs::metadata(entry) {
                    Ok(found) => Ok(Some(found.ino())),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(error) => Err(error),
                }
            }
            (_, Some(interface)) => Ok(interface::index(interface)?.map(u64::from)),
            (Self::Virtual { .. }, None) => Ok(Some(0)),
        }
    }

    /// Identifies the binding of a PCI device to its kernel driver: the inode of the link that Linux makes anew each time.
    /// None: no driver has it, or the device is not on the PCI bus.
    #[must_use]
    pub fn binding(&self) -> Option<u64> {
        let Self::Pci { address, .. } = self else { return None };
        binding(Path::new("/sys"), &address.to_string())
    }

    /// Whether the kernel uses the packet memory directly, and accepts no packet that crosses a page boundary of
    /// ordinary pages.
    pub(crate) fn shares_packet_memory(&self) -> bool {
        self.has_driver(AF_XDP)
    }

    /// The device without its arguments, which is the name of its port within DPDK: a PCI address with its domain, or
    /// driver and number.
    #[must_use]
    pub fn port_name(&self) -> String {
        match self {
            Self::Pci { address, .. } => address.to_string(),
            Self::Virtual { name, .. } => name.clone(),
        }
    }
}

/// Drivers over a Linux interface.
pub(crate) const AF_PACKET: &str = "net_af_packet";
pub(crate) const AF_XDP: &str = "net_af_xdp";
/// The driver that creates a Linux interface.
pub(crate) const TAP: &str = "net_tap";
/// Frames that a ring of af_packet holds, instead of the driver's 512: a worker that is kept from its core for 10 ms loses
/// nothing at 200,000 packets a second. A receive and a transmit ring of 2,048-byte frames take 8 MiB a queue pair.
const AF_PACKET_FRAMES: u16 = 2048;
/// Bytes of a device name: `RTE_DEV_NAME_MAX_LEN` with the terminating zero is 64.
const NAME_BYTES_MAX: usize = 63;
/// The driver of bonding devices, and its argument for a member (DPDK 22.11).
const BONDING: &str = "net_bonding";
const MEMBER: &str = "slave=";
/// And its argument for the preferred member.
const PRIMARY: &str = "primary=";

fn binding(sys: &Path, address: &str) -> Option<u64> {
    let link = sys.join("bus/pci/devices").join(address).join("driver");
    std::fs::symlink_metadata(link).ok().map(|link| link.ino())
}

/// The arguments, split at commas outside parentheses.
fn pieces(arguments: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    arguments.split(move |c| {
        depth = match c {
            '(' => depth + 1,
            ')' => depth.saturating_sub(1),
            _ => depth,
        };
        c == ',' && depth == 0
    })
}

/// The device in the argument of a member.
fn member(piece: &str) -> Option<&str> {
    let text = piece.strip_prefix(MEMBER)?;
    Some(text.strip_prefix('(').and_then(|text| text.strip_suffix(')')).unwrap_or(text))
}

/// Checks that a bond is active backup or 802.3ad, and that its members report their link: drivers over a Linux
/// interface always report it as up.
fn check_bond(arguments: &str) -> Result<(), &'static str> {
    if !pieces(arguments).any(|piece| piece == "mode=1" || piece == "mode=4") {
        return Err("a bond has mode=1 (active backup) or mode=4 (802.3ad)");
    }
    let members: Vec<&str> = pieces(arguments).filter_map(member).collect();
    if members.is_empty() {
        return Err("a bond has members: slave=0000:3b:00.0, or slave=(net_tap1,iface=x)");
    }
    for text in members {
        let member: Device = text.parse().map_err(|_| "a member is no device")?;
        if member.interface().is_some() || !member.members().is_empty() {
            return Err(
                "a member is a PCI address or net_tap; bonds and devices over a Linux interface do not report the link: \
                        bond such interfaces in Linux",
            );
        }
    }
    Ok(())
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
            let address =
                parse_pci(name).ok_or_else(|| bad("it does not have the form dddd:bb:dd.f and does not begin with net_"))?;
            return Ok(Self::Pci { address, arguments });
        }
        let is_legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        if name.len() > NAME_BYTES_MAX || !name.bytes().all(is_legal) {
            return Err(bad("a name has at most 63 lowercase letters, digits and _"));
        }
        if name.starts_with(BONDING) {
            check_bond(&arguments).map_err(bad)?;
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

/// `dddd:bb:dd.f` as Linux writes it, in either case, or without the domain, which then is 0.
fn parse_pci(text: &str) -> Option<PciAddress> {
    let (rest, function) = text.rsplit_once('.')?;
    let (rest, device) = rest.rsplit_once(':')?;
    let (domain, bus) = rest.rsplit_once(':').unwrap_or(("0000", rest));
    let hex = |part: &str, digits: usize| {
        let is_hex = part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit());
        u16::from_str_radix(part, 16).ok().filter(|_| is_hex)
    };
    let byte = |part: &str, digits, limit: u8| u8::try_from(hex(part, digits)?).ok().filter(|value| *value <= limit);
    Some(PciAddress {
        domain: hex(domain, 4)?,
        bus: byte(bus, 2, 0xff)?,
        device: byte(device, 2, 0x1f)?,
        function: byte(function, 1, 7)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_bound_again_has_another_binding() {
        let sys = tempfile::tempdir().unwrap();
        let device = sys.path().join("bus/pci/devices/0000:3b:00.0");
        std::fs::create_dir_all(&device).unwrap();
        let now = || binding(sys.path(), "0000:3b:00.0");
        assert_eq!(now(), None, "bound to no driver");
        std::os::unix::fs::symlink("../../drivers/vfio-pci", device.join("driver")).unwrap();
        let first = now();
        assert!(first.is_some());
        std::fs::rename(device.join("driver"), device.join("before")).unwrap();
        std::os::unix::fs::symlink("../../drivers/vfio-pci", device.join("driver")).unwrap();
        assert!(now().is_some() && now() != first);
    }

    #[test]
    fn virtual_devices_name_files_by_their_absolute_paths() {
        let rows: [(&str, &[&str]); 5] = [
            ("net_virtio_user0,path=/dev/vhost-net,queues=2,iface=v0", &["/dev/vhost-net"]),
            ("net_memif0,role=server,socket=/run/memif/a.sock,id=1", &["/run/memif/a.sock"]),
            ("net_pcap0,rx_pcap=/srv/in.pcap,tx_pcap=/srv/out.pcap", &["/srv/in.pcap", "/srv/out.pcap"]),
            ("net_pcap0,tx_pcap=out.pcap", &[]),
            ("0000:3b:00.0,firmware=/x", &[]),
        ];
        for (text, files) in rows {
            assert_eq!(text.parse::<Device>().unwrap().files(), files.iter().map(Path::new).collect::<Vec<_>>(), "{text}");
        }
    }

    #[test]
    fn devices_read_back_as_written_with_their_names_and_interfaces() {
        // As configured, canonical text, name of the port, interface that it works on, interface that its arguments
        // name.
        let rows = [
            ("0000:3b:00.0", "0000:3b:00.0", "0000:3b:00.0", None, None),
            ("3b:00.1", "0000:3b:00.1", "0000:3b:00.1", None, None),
            ("3B:1f.7,dv_flow_en=0", "0000:3b:1f.7,dv_flow_en=0", "0000:3b:1f.7", None, None),
            ("net_null0", "net_null0", "net_null0", None, None),
            ("net_tap0,iface=dtap0", "net_tap0,iface=dtap0", "net_tap0", None, Some("dtap0")),
            ("net_af_xdp0,iface=x", "net_af_xdp0,iface=x", "net_af_xdp0", Some("x"), Some("x")),
            ("net_af_packet0", "net_af_packet0", "net_af_packet0", None, None),
            (
                "net_af_packet12,qpairs=1,iface=veth-a,blocksz=4096",
                "net_af_packet12,qpairs=1,iface=veth-a,blocksz=4096",
                "net_af_packet12",
                Some("veth-a"),
                Some("veth-a"),
            ),
            (
                "net_bonding0,mode=1,slave=(net_tap1,iface=a)",
                "net_bonding0,mode=1,slave=(net_tap1,iface=a)",
                "net_bonding0",
                None,
                None,
            ),
        ];
        for (text, canonical, name, interface, named) in rows {
            let device: Device = text.parse().unwrap();
            assert_eq!(device.to_string(), canonical);
            assert_eq!(device.to_string().parse(), Ok(device.clone()));
            assert_eq!((device.port_name().as_str(), device.interface(), device.named_interface()), (name, interface, named));
            assert_eq!((device.is_pci(), device.is_bond()), (!name.starts_with("net_"), name == "net_bonding0"), "{text}");
        }
    }

    #[test]
    fn drivers_over_sockets_get_queues_and_rings_unless_the_arguments_contain_them() {
        let with_queues = |text: &str, queues| text.parse::<Device>().unwrap().with_queues(queues).to_string();
        assert_eq!(with_queues("net_af_packet0,iface=eth1", 1), "net_af_packet0,iface=eth1,framecnt=2048,qdisc_bypass=0");
        let two = "net_af_packet0,iface=eth1,framecnt=2048,qdisc_bypass=0,qpairs=2";
        assert_eq!(with_queues("net_af_packet0,iface=eth1", 2), two);
        let own = "net_af_packet0,iface=eth1,qpairs=4,framecnt=512,qdisc_bypass=1";
        assert_eq!(with_queues(own, 2), own);
        for text in ["net_tap0,iface=dtap0", "net_af_xdp0,iface=no-such", "0000:3b:00.0"] {
            assert_eq!(with_queues(text, 2), text);
        }
        assert_eq!(count_queues(Path::new("/sys/class/net"), "lo"), 1);
    }

    #[test]
    fn a_bond_has_members_which_dpdk_knows_by_their_names() {
        let text = "net_bonding0,mode=1,slave=3b:00.0,slave=(net_tap1,iface=a,mac=fixed),primary=net_tap1";
        let bond: Device = text.parse().unwrap();
        let members: Vec<String> = bond.members().iter().map(Device::to_string).collect();
        assert_eq!(members, ["0000:3b:00.0", "net_tap1,iface=a,mac=fixed"]);
        let members = bond.members();
        assert_eq!(bond.to_attach(&members), "net_bonding0,mode=1,slave=0000:3b:00.0,slave=net_tap1,primary=net_tap1");
        assert_eq!(bond.to_attach(&members[..1]), "net_bonding0,mode=1,slave=0000:3b:00.0", "without the one that is missing");
        assert!("net_null0".parse::<Device>().unwrap().members().is_empty());
        let no_members =
            ["", ",slave=eth0", ",slave=(net_af_packet0,iface=eth0)", ",slave=(net_bonding1,mode=1,slave=net_null0)"];
        for bad in no_members.map(|members| format!("mode=1{members}")).into_iter().chain(["mode=0,slave=net_tap1".into()]) {
            assert!(format!("net_bonding0,{bad}").parse::<Device>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_no_device_is_refused_with_the_reason() {
        let (space, form, name) =
            ("there is a space in it", "does not have the form dddd:bb:dd.f", "lowercase letters, digits and _");
        let too_long = format!("net_{}", "a".repeat(60));
        let rows = [
            ("", form),
            (",", form),
            ("eth0", form),
            ("eth_af_packet0,iface=eth1", form),
            ("0000:3b:20.0", form),
            ("0000:3b:00.8", form),
            ("0000:0000:3b:00.0", form),
            ("3b:00", form),
            ("3b.0", form),
            ("b:0.0", form),
            ("+3b:00.0", form),
            ("\u{fc}.0", form),
            ("net_null0, x=1", space),
            ("net_a b0", space),
            ("net_A0", name),
            (&too_long, name),
            ("net_bonding0,mode=1", "a bond has members"),
        ];
        for (text, reason) in rows {
            let error = text.parse::<Device>().unwrap_err();
            assert!(error.reason.contains(reason) && error.to_string().contains(&format!("{text:?}")), "{text}: {error}");
        }
    }
}
