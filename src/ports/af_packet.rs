//! Prepares the Linux interface of an af_packet port, and restores it.
//!
//! af_packet copies frames that Linux also receives, so Linux would answer ARP and send RSTs beside the gateway
//! (measured). Therefore IPv6 is disabled on the interface, and a clsact ingress filter drops all frames for Linux,
//! behind the point where af_packet takes its copy. It is the filter of `tc qdisc add dev X clsact; tc filter add dev X
//! ingress pref 49021 handle H bpf da bytecode '1,6 0 0 2'`.
//!
//! Invariant: the handle H of our filter records the former state of the interface, and the filter is removed last.
//! After a crash at any point, the next start or stop knows what to restore. Deliberately not here: af_xdp and real
//! NICs, whose frames Linux does not see, and the offloads of a veth's peer, which may be in another namespace.

use std::process::Command;

use dataplane::{Link, TagKind};
use dpdk_sys::Device;
use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkFlags, LinkMessage};
use netlink_packet_route::tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use rustix::io::Errno;
use rustix::net::netdevice::name_to_index;

use super::setting::{self, SettingError};
use crate::netlink::{NetlinkError, Socket, link_named};

/// Priority of our filter, which identifies it.
const PRIORITY: u16 = 49021;
/// Every EtherType (ETH_P_ALL), in network order as the kernel expects it.
const PROTOCOL_ALL: u16 = 0x0003_u16.to_be();
/// Ingress and egress of clsact.
const INGRESS: TcHandle = TcHandle { major: 0xffff, minor: TcHandle::MIN_INGRESS };
const EGRESS: TcHandle = TcHandle { major: 0xffff, minor: TcHandle::MIN_EGRESS };
/// One classic BPF instruction, "return 2": in direct action mode, TC_ACT_SHOT. As `struct sock_filter`: code 6 (RET |
/// K), no jumps, k 2.
const RETURN_SHOT: (u16, u8, u8, u32) = (6, 0, 0, 2);
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;

/// Whether frames of a link arrive with another tag than they had on the wire: DPDK's driver over packet sockets puts the
/// outer tag, which the kernel took off, back as one of IEEE 802.1Q.
#[must_use]
pub fn changes_outer_tag(device: &Device, link: Link) -> bool {
    device.has_driver("net_af_packet") && link.vlan().tags().next().is_some_and(|(kind, _)| kind == TagKind::Service)
}

/// Why an interface could not be prepared or restored.
#[derive(Debug, thiserror::Error)]
pub enum AfPacketError {
    /// No such interface.
    #[error("device {device}: there is no interface {interface} here; `ip link` lists those there are")]
    NoInterface {
        /// The port's device.
        device: String,
        /// The interface that it names.
        interface: String,
    },
    /// The kernel refused.
    #[error("interface {interface}: {source}; the gateway needs CAP_NET_ADMIN, and a kernel with cls_bpf and sch_ingress")]
    Netlink {
        /// The interface.
        interface: String,
        /// Why.
        source: NetlinkError,
    },
    /// IPv6 could not be switched.
    #[error(transparent)]
    Setting(#[from] SettingError),
}

/// The former state of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SavedState {
    ipv6_disabled: bool,
    promiscuous: bool,
    clsact: bool,
}

impl SavedState {
    /// A filter's handle may not be 0.
    fn handle(self) -> u32 {
        1 + u32::from(self.ipv6_disabled) + 2 * u32::from(self.promiscuous) + 4 * u32::from(self.clsact)
    }

    fn from_handle(handle: u32) -> Self {
        let bits = handle.wrapping_sub(1);
        Self { ipv6_disabled: bits & 1 != 0, promiscuous: bits & 2 != 0, clsact: bits & 4 != 0 }
    }
}

/// An interface on which Linux gets no frames. Dropping this changes nothing; [`PreparedInterface::restore`] restores
/// it.
#[derive(Debug)]
pub struct PreparedInterface {
    interface: String,
    index: u32,
    before: SavedState,
    socket: Socket,
}

/// Prepares the interface of an af_packet device, in the network namespace of the calling thread. `None` for any other
/// device. It may be called again after a crash.
///
/// # Errors
/// See [`AfPacketError`].
pub async fn prepare(device: &Device) -> Result<Option<PreparedInterface>, AfPacketError> {
    let interface = device.interface().filter(|_| device.has_driver("net_af_packet"));
    let Some(interface) = interface else { return Ok(None) };
    let failed = |source| AfPacketError::Netlink { interface: interface.to_owned(), source };
    let mut socket = Socket::open(0).map_err(failed)?;
    let link = link_named(&mut socket, interface)
        .await
        .map_err(failed)?
        .ok_or_else(|| AfPacketError::NoInterface { device: device.to_string(), interface: interface.to_owned() })?;
    let index = link.header.index;
    let before = match our_filter(&mut socket, index).await.map_err(failed)? {
        Some(before) => {
            tracing::info!(interface, "found the filter of a gateway that did not exit cleanly; adopting it");
            before
        }
        None => {
            let before = SavedState {
                ipv6_disabled: read_ipv6_disabled(interface)?,
                promiscuous: link.header.flags.contains(LinkFlags::Promisc),
                clsact: has_clsact(&mut socket, index).await.map_err(failed)?,
            };
            if !before.clsact {
                add_clsact(&mut socket, index).await.map_err(failed)?;
            }
            add_filter(&mut socket, index, before).await.map_err(failed)?;
            before
        }
    };
    if !link.header.flags.contains(LinkFlags::Up) {
        tracing::warn!(interface, "the interface is down: `ip link set {interface} up`");
    }
    warn_of_offloads(interface);
    write_ipv6_disabled(interface, true)?;
    set_promiscuous(&mut socket, index, true).await.map_err(failed)?;
    Ok(Some(PreparedInterface { interface: interface.to_owned(), index, before, socket }))
}

impl PreparedInterface {
    /// Puts back what another program undid: the filter, disabled IPv6 and, if it is also to look at the link, promiscuous
    /// mode. Returns what was missing. To look at the link takes a list of all interfaces.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub async fn put_back(&mut self, looks_at_link: bool) -> Result<Vec<&'static str>, AfPacketError> {
        let interface = self.interface.clone();
        let failed = |source| AfPacketError::Netlink { interface: interface.clone(), source };
        let (socket, index, mut missing) = (&mut self.socket, self.index, Vec::new());
        // An interface that was removed or renamed is the matter of the hotplug task.
        if name_to_index(&*socket, &interface) != Ok(index) {
            return Ok(missing);
        }
        if our_filter(socket, index).await.map_err(failed)?.is_none() {
            let clsact = has_clsact(socket, index).await.map_err(failed)?;
            // A queue discipline of another program that is gone is replaced by one of ours.
            self.before.clsact &= clsact;
            if !clsact {
                add_clsact(socket, index).await.map_err(failed)?;
            }
            add_filter(socket, index, self.before).await.map_err(failed)?;
            missing.push("ingress filter");
        }
        if !read_ipv6_disabled(&interface)? {
            write_ipv6_disabled(&interface, true)?;
            missing.push("disabled IPv6");
        }
        let link = if looks_at_link { link_named(socket, &interface).await.map_err(failed)? } else { None };
        if link.is_some_and(|link| !link.header.flags.contains(LinkFlags::Promisc)) {
            set_promiscuous(socket, index, true).await.map_err(failed)?;
            missing.push("promiscuous mode");
        }
        Ok(missing)
    }

    /// Restores the former state of the interface.
    ///
    /// # Errors
    /// If the kernel refuses, or the interface no longer exists.
    pub async fn restore(mut self) -> Result<(), AfPacketError> {
        let interface = self.interface.clone();
        let failed = |source| AfPacketError::Netlink { interface: interface.clone(), source };
        if !self.before.ipv6_disabled {
            write_ipv6_disabled(&self.interface, false)?;
        }
        if !self.before.promiscuous {
            set_promiscuous(&mut self.socket, self.index, false).await.map_err(failed)?;
        }
        // Removed last, because the handle of the filter records what is still to be restored.
        let mut filter = filter_message(self.index);
        filter.header.handle = self.before.handle().into();
        let request = RouteNetlinkMessage::DelTrafficFilter(filter);
        self.socket.request(request, 0, "remove our ingress filter").await.map_err(failed)?;
        if !self.before.clsact && !has_filters(&mut self.socket, self.index).await.map_err(failed)? {
            let request = RouteNetlinkMessage::DelQueueDiscipline(clsact_message(self.index));
            self.socket.request(request, 0, "remove qdisc clsact").await.map_err(failed)?;
        }
        Ok(())
    }
}

async fn set_promiscuous(socket: &mut Socket, index: u32, on: bool) -> Result<(), NetlinkError> {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.header.flags = if on { LinkFlags::Promisc } else { LinkFlags::empty() };
    message.header.change_mask = LinkFlags::Promisc;
    socket.request(RouteNetlinkMessage::SetLink(message), 0, "switch promiscuous mode").await
}

async fn filters(socket: &mut Socket, index: u32, parent: TcHandle) -> Result<Vec<TcMessage>, NetlinkError> {
    let mut request = TcMessage::with_index(index.cast_signed());
    request.header.parent = parent;
    let found = socket.list(RouteNetlinkMessage::GetTrafficFilter(request), "list filters", |message| match message {
        RouteNetlinkMessage::NewTrafficFilter(filter) => Some(filter.clone()),
        _ => None,
    });
    match found.await {
        // Without a qdisc to hold filters there are none.
        Err(error) if error.is_refusal(Errno::INVAL) => Ok(Vec::new()),
        outcome => outcome,
    }
}

/// The former state as recorded by our filter, if there is one.
async fn our_filter(socket: &mut Socket, index: u32) -> Result<Option<SavedState>, NetlinkError> {
    let filters = filters(socket, index, INGRESS).await?;
    // The kernel lists each priority a second time, with handle 0, for the classifier itself.
    let ours = filters.iter().find(|f| f.header.info >> 16 == u32::from(PRIORITY) && u32::from(f.header.handle) != 0);
    Ok(ours.map(|f| SavedState::from_handle(f.header.handle.into())))
}

async fn has_filters(socket: &mut Socket, index: u32) -> Result<bool, NetlinkError> {
    Ok(!filters(socket, index, INGRESS).await?.is_empty() || !filters(socket, index, EGRESS).await?.is_empty())
}

async fn has_clsact(socket: &mut Socket, index: u32) -> Result<bool, NetlinkError> {
    let index = index.cast_signed();
    let request = RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(index));
    let clsact = socket.list(request, "list queue disciplines", |message| match message {
        RouteNetlinkMessage::NewQueueDiscipline(qdisc) => {
            (qdisc.header.index == index && qdisc.header.parent == TcHandle::CLSACT).then_some(())
        }
        _ => None,
    });
    Ok(!clsact.await?.is_empty())
}

async fn add_clsact(socket: &mut Socket, index: u32) -> Result<(), NetlinkError> {
    let request = RouteNetlinkMessage::NewQueueDiscipline(clsact_message(index));
    socket.request(request, NLM_F_CREATE | NLM_F_EXCL, "add qdisc clsact").await
}

/// Adds our filter to the qdisc, which exists.
async fn add_filter(socket: &mut Socket, index: u32, before: SavedState) -> Result<(), NetlinkError> {
    let (code, jump_true, jump_false, k) = RETURN_SHOT;
    let mut instruction = code.to_ne_bytes().to_vec();
    instruction.extend([jump_true, jump_false]);
    instruction.extend(k.to_ne_bytes());
    let mut filter = filter_message(index);
    filter.header.handle = before.handle().into();
    filter.attributes.push(TcAttribute::Options(vec![
        TcOption::Bpf(TcFilterBpfOption::Other(DefaultNla::new(TCA_BPF_OPS_LEN, 1_u16.to_ne_bytes().to_vec()))),
        TcOption::Bpf(TcFilterBpfOption::Other(DefaultNla::new(TCA_BPF_OPS, instruction))),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    let request = RouteNetlinkMessage::NewTrafficFilter(filter);
    socket.request(request, NLM_F_CREATE | NLM_F_EXCL, "add our ingress filter").await
}

fn filter_message(index: u32) -> TcMessage {
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.parent = INGRESS;
    message.header.info = u32::from(PRIORITY) << 16 | u32::from(PROTOCOL_ALL);
    message.attributes.push(TcAttribute::Kind("bpf".to_owned()));
    message
}

fn clsact_message(index: u32) -> TcMessage {
    let mut message = TcMessage::with_index(index.cast_signed());
    message.header.parent = TcHandle::CLSACT;
    message.header.handle = TcHandle { major: 0xffff, minor: 0 };
    message.attributes.push(TcAttribute::Kind("clsact".to_owned()));
    message
}

/// Whether IPv6 is disabled; a kernel without IPv6 counts as disabled.
fn read_ipv6_disabled(interface: &str) -> Result<bool, SettingError> {
    Ok(setting::read("ipv6", interface, "disable_ipv6")?.is_none_or(|value| value.trim() != "0"))
}

fn write_ipv6_disabled(interface: &str, disabled: bool) -> Result<(), SettingError> {
    setting::write("ipv6", interface, "disable_ipv6", if disabled { "1" } else { "0" })
}

/// Warns of offloads. With them af_packet receives packets with a partial checksum, or longer than the MTU, which
/// cannot be forwarded. Without `ethtool` there is no warning.
fn warn_of_offloads(interface: &str) {
    let Some(on) = harmful_offloads(interface) else {
        tracing::debug!(interface, "`ethtool` is not installed; offloads are not checked");
        return;
    };
    if !on.is_empty() {
        tracing::warn!(
            interface,
            on = on.join(", "),
            "offloads make frames that cannot be forwarded; on a veth its other end counts too: \
             `ethtool -K {interface} tx off tso off gso off gro off`"
        );
    }
}

/// The offloads of an interface that make frames that cannot be forwarded; `None` without `ethtool`.
#[must_use]
pub fn harmful_offloads(interface: &str) -> Option<Vec<String>> {
    let output = Command::new("ethtool").args(["-k", interface]).output().ok()?;
    Some(offloads_on(&String::from_utf8_lossy(&output.stdout)).into_iter().map(str::to_owned).collect())
}

/// The harmful offloads in the output of `ethtool -k`.
fn offloads_on(features: &str) -> Vec<&str> {
    const DISTURBING: [&str; 5] = [
        "tx-checksumming",
        "tcp-segmentation-offload",
        "generic-segmentation-offload",
        "generic-receive-offload",
        "large-receive-offload",
    ];
    let on = features.lines().filter_map(|line| line.trim().split_once(": ")).filter(|(_, value)| value.starts_with("on"));
    on.map(|(name, _)| name).filter(|name| DISTURBING.contains(name)).collect()
}

#[cfg(test)]
mod tests {
    use dataplane::{PortIndex, Vlan};

    use super::*;

    #[test]
    fn only_an_outer_service_tag_over_packet_sockets_changes() {
        let link = |kind| Link::new(PortIndex(0), Vlan::NONE.with(kind, 7).unwrap());
        let device = |text: &str| text.parse::<Device>().unwrap();
        let (af_packet, tap) = (device("net_af_packet0,iface=eth1"), device("net_tap0"));
        assert!(changes_outer_tag(&af_packet, link(TagKind::Service)));
        assert!(!changes_outer_tag(&af_packet, link(TagKind::Customer)));
        assert!(!changes_outer_tag(&tap, link(TagKind::Service)));
        assert!(!changes_outer_tag(&af_packet, Link::from(PortIndex(0))));
    }

    #[test]
    fn the_handle_says_how_the_interface_was() {
        for bits in 0..8_u32 {
            let before = SavedState { ipv6_disabled: bits & 1 != 0, promiscuous: bits & 2 != 0, clsact: bits & 4 != 0 };
            assert_ne!(before.handle(), 0);
            assert_eq!(SavedState::from_handle(before.handle()), before);
        }
    }

    #[test]
    fn offloads_that_are_on_are_named() {
        let features = "Features for veth0:\nrx-checksumming: on\ntx-checksumming: on\n\ttx-checksum-ipv4: off [fixed]\n\
                        tcp-segmentation-offload: off\ngeneric-receive-offload: on\nlarge-receive-offload: off [fixed]\n";
        assert_eq!(offloads_on(features), ["tx-checksumming", "generic-receive-offload"]);
    }
}
