//! What a port over af_packet needs of Linux, and its undoing.
//!
//! An af_packet port shows the gateway copies of frames that Linux also receives: Linux would answer ARP and send RSTs
//! beside us (measured). So Linux is kept off the interface: no IPv6, and a clsact ingress filter that drops everything
//! for Linux, behind the point where af_packet takes its copy. It is what
//! `tc qdisc add dev X clsact; tc filter add dev X ingress pref 49021 handle H bpf da bytecode '1,6 0 0 2'` does.
//!
//! Invariant: the handle H of our filter says how the interface was before us, and the filter goes last. So whatever dies
//! when, the next start or stop knows what to restore. Deliberately not here: af_xdp and real NICs, whose frames Linux
//! does not see, and the offloads of a veth's other end, which may lie in another namespace.

use std::io;
use std::path::PathBuf;
use std::process::Command;

use netlink_packet_core::{DefaultNla, NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::tc::{TcAttribute, TcBpfFlags, TcFilterBpfOption, TcHandle, TcMessage, TcOption};
use rustix::io::Errno;

use crate::netlink::{NetlinkError, Socket};

/// Priority of our filter, by which it is known again.
const PRIORITY: u16 = 49021;
/// Every EtherType (ETH_P_ALL), in network order as the kernel wants it.
const PROTOCOL_ALL: u16 = 0x0003_u16.to_be();
/// Ingress and egress of clsact.
const INGRESS: TcHandle = TcHandle { major: 0xffff, minor: TcHandle::MIN_INGRESS };
const EGRESS: TcHandle = TcHandle { major: 0xffff, minor: TcHandle::MIN_EGRESS };
/// One classic BPF instruction, "return 2": in direct action mode, TC_ACT_SHOT. As `struct sock_filter`: code 6 (RET | K),
/// no jumps, k 2.
const RETURN_SHOT: (u16, u8, u8, u32) = (6, 0, 0, 2);
const TCA_BPF_OPS_LEN: u16 = 4;
const TCA_BPF_OPS: u16 = 5;

/// Why an interface could not be prepared or restored.
#[derive(Debug, thiserror::Error)]
pub enum AfPacketError {
    /// No such interface.
    #[error("device {device}: there is no interface {interface} here; `ip link` lists those there are")]
    NoInterface {
        /// The port's device.
        device: String,
        /// What it names.
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
    #[error("cannot write {value} to {}: {source}", path.display())]
    Setting {
        /// The file.
        path: PathBuf,
        /// The value.
        value: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// How an interface was before us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Before {
    ipv6_disabled: bool,
    promiscuous: bool,
    clsact: bool,
}

impl Before {
    /// A filter's handle may not be 0.
    fn handle(self) -> u32 {
        1 + u32::from(self.ipv6_disabled) + 2 * u32::from(self.promiscuous) + 4 * u32::from(self.clsact)
    }

    fn from_handle(handle: u32) -> Self {
        let bits = handle.wrapping_sub(1);
        Self { ipv6_disabled: bits & 1 != 0, promiscuous: bits & 2 != 0, clsact: bits & 4 != 0 }
    }
}

/// An interface that Linux is kept off. Dropping it leaves it so; [`Prepared::restore`] undoes it.
#[derive(Debug)]
pub struct Prepared {
    interface: String,
    index: u32,
    before: Before,
    socket: Socket,
}

/// The interface of an af_packet device (`net_af_packet0,iface=eth1`), if it is one.
#[must_use]
pub fn interface_of(device: &str) -> Option<&str> {
    let mut parts = device.split(',');
    let device = parts.next()?;
    // DPDK knows the driver by both names.
    let number = device.strip_prefix("net_af_packet").or_else(|| device.strip_prefix("eth_af_packet"))?;
    let interface = parts.find_map(|argument| argument.strip_prefix("iface="))?;
    number.bytes().all(|b| b.is_ascii_digit()).then_some(interface)
}

/// Keeps Linux off the interface of an af_packet device, in the network namespace of the calling thread. `None` for any
/// other device. To be called again after a crash as if nothing had happened.
///
/// # Errors
/// See [`AfPacketError`].
pub async fn prepare(device: &str) -> Result<Option<Prepared>, AfPacketError> {
    let Some(interface) = interface_of(device) else { return Ok(None) };
    let failed = |source| AfPacketError::Netlink { interface: interface.to_owned(), source };
    let mut socket = Socket::open(0).map_err(failed)?;
    let link = link(&mut socket, interface)
        .await
        .map_err(failed)?
        .ok_or_else(|| AfPacketError::NoInterface { device: device.to_owned(), interface: interface.to_owned() })?;
    let index = link.header.index;
    let before = match standing_filter(&mut socket, index).await.map_err(failed)? {
        Some(before) => {
            tracing::info!(interface, "found the filter of a gateway that did not end properly; taking it over");
            before
        }
        None => {
            let before = Before {
                ipv6_disabled: read_ipv6_disabled(interface),
                promiscuous: link.header.flags.contains(LinkFlags::Promisc),
                clsact: has_clsact(&mut socket, index).await.map_err(failed)?,
            };
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
    Ok(Some(Prepared { interface: interface.to_owned(), index, before, socket }))
}

impl Prepared {
    /// Gives the interface back to Linux as it was.
    ///
    /// # Errors
    /// When the kernel refuses, or the interface is gone.
    pub async fn restore(mut self) -> Result<(), AfPacketError> {
        let interface = self.interface.clone();
        let failed = |source| AfPacketError::Netlink { interface: interface.clone(), source };
        if !self.before.ipv6_disabled {
            write_ipv6_disabled(&self.interface, false)?;
        }
        if !self.before.promiscuous {
            set_promiscuous(&mut self.socket, self.index, false).await.map_err(failed)?;
        }
        // Last: until now the filter's handle says what is still to be done.
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

async fn link(socket: &mut Socket, name: &str) -> Result<Option<LinkMessage>, NetlinkError> {
    let mut found = None;
    let all = RouteNetlinkMessage::GetLink(LinkMessage::default());
    socket
        .dump(all, "list interfaces", |message| {
            if let RouteNetlinkMessage::NewLink(link) = message
                && link.attributes.iter().any(|a| matches!(a, LinkAttribute::IfName(n) if n == name))
            {
                found = Some(link.clone());
            }
        })
        .await?;
    Ok(found)
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
    let mut found = Vec::new();
    let dump = socket.dump(RouteNetlinkMessage::GetTrafficFilter(request), "list filters", |message| {
        if let RouteNetlinkMessage::NewTrafficFilter(filter) = message {
            found.push(filter.clone());
        }
    });
    match dump.await {
        // Without a qdisc to hold filters there are none.
        Err(NetlinkError::Refused { source, .. }) if source.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(Vec::new()),
        outcome => outcome.map(|_| found),
    }
}

async fn standing_filter(socket: &mut Socket, index: u32) -> Result<Option<Before>, NetlinkError> {
    let filters = filters(socket, index, INGRESS).await?;
    // The kernel lists each priority once more, with handle 0, for the classifier itself.
    let ours = filters.iter().find(|f| f.header.info >> 16 == u32::from(PRIORITY) && u32::from(f.header.handle) != 0);
    Ok(ours.map(|f| Before::from_handle(f.header.handle.into())))
}

async fn has_filters(socket: &mut Socket, index: u32) -> Result<bool, NetlinkError> {
    Ok(!filters(socket, index, INGRESS).await?.is_empty() || !filters(socket, index, EGRESS).await?.is_empty())
}

async fn has_clsact(socket: &mut Socket, index: u32) -> Result<bool, NetlinkError> {
    let mut found = false;
    let request = TcMessage::with_index(index.cast_signed());
    socket
        .dump(RouteNetlinkMessage::GetQueueDiscipline(request), "list queue disciplines", |message| {
            if let RouteNetlinkMessage::NewQueueDiscipline(qdisc) = message {
                found |= qdisc.header.index == index.cast_signed() && qdisc.header.parent == TcHandle::CLSACT;
            }
        })
        .await?;
    Ok(found)
}

async fn add_filter(socket: &mut Socket, index: u32, before: Before) -> Result<(), NetlinkError> {
    if !before.clsact {
        let request = RouteNetlinkMessage::NewQueueDiscipline(clsact_message(index));
        socket.request(request, NLM_F_CREATE | NLM_F_EXCL, "add qdisc clsact").await?;
    }
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

fn ipv6_setting(interface: &str) -> PathBuf {
    PathBuf::from(format!("/proc/sys/net/ipv6/conf/{interface}/disable_ipv6"))
}

/// A kernel without IPv6 counts as disabled: there is nothing to write.
fn read_ipv6_disabled(interface: &str) -> bool {
    std::fs::read_to_string(ipv6_setting(interface)).map_or(true, |value| value.trim() != "0")
}

fn write_ipv6_disabled(interface: &str, disabled: bool) -> Result<(), AfPacketError> {
    let path = ipv6_setting(interface);
    let value = if disabled { "1" } else { "0" };
    match std::fs::write(&path, value) {
        Err(source) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        outcome => outcome.map_err(|source| AfPacketError::Setting { path, value, source }),
    }
}

/// Offloads leave packets whose checksum is not there yet, or that are longer than the MTU: af_packet shows them as they
/// are, and they cannot be forwarded. Without `ethtool` nothing can be said.
fn warn_of_offloads(interface: &str) {
    let Ok(output) = Command::new("ethtool").args(["-k", interface]).output() else {
        tracing::debug!(interface, "no `ethtool` here to look at offloads with");
        return;
    };
    let features = String::from_utf8_lossy(&output.stdout);
    let on = offloads_on(&features);
    if !on.is_empty() {
        tracing::warn!(
            interface,
            on = on.join(", "),
            "offloads make frames that cannot be forwarded; on a veth its other end counts too: \
             `ethtool -K {interface} tx off tso off gso off gro off`"
        );
    }
}

/// The offloads in the output of `ethtool -k` that disturb.
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
    use super::*;

    #[test]
    fn only_af_packet_devices_need_this() {
        assert_eq!(interface_of("net_af_packet0,iface=eth1"), Some("eth1"));
        assert_eq!(interface_of("eth_af_packet0,iface=eth1"), Some("eth1"));
        assert_eq!(interface_of("net_af_packet12,qpairs=1,iface=veth-a,blocksz=4096"), Some("veth-a"));
        for other in
            ["0000:3b:00.0", "net_af_xdp0,iface=eth1", "net_tap0,iface=dtap0", "net_af_packet0", "net_af_packetx,iface=a"]
        {
            assert_eq!(interface_of(other), None, "{other}");
        }
    }

    #[test]
    fn the_handle_says_how_the_interface_was() {
        for bits in 0..8_u32 {
            let before = Before { ipv6_disabled: bits & 1 != 0, promiscuous: bits & 2 != 0, clsact: bits & 4 != 0 };
            assert_ne!(before.handle(), 0);
            assert_eq!(Before::from_handle(before.handle()), before);
        }
    }

    #[test]
    fn offloads_that_are_on_are_named() {
        let features = "Features for veth0:\nrx-checksumming: on\ntx-checksumming: on\n\ttx-checksum-ipv4: off [fixed]\n\
                        tcp-segmentation-offload: off\ngeneric-receive-offload: on\nlarge-receive-offload: off [fixed]\n";
        assert_eq!(offloads_on(features), ["tx-checksumming", "generic-receive-offload"]);
    }
}
