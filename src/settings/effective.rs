//! The settings as YAML, every key with its value: what `sluiced check` prints.

use std::fmt::{self, Write};

use control::config::controller;
use control::config::listen::written_files;
use control::config::scalar::{Written, quoted, quoted_list};

use control::settings::CertificateFiles;
use dataplane::VlanLink;

use crate::netlink::RouteTable;

use super::links::written_tags;
use super::{Hugepages, Poll, PortSettings, Settings, StateSource, Twin};

impl Settings {
    /// Every key with its value, as YAML that [`Settings::read`] takes.
    #[must_use]
    pub fn effective(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_gateway(&mut out).and_then(|()| self.write_source(&mut out));
        out
    }

    fn write_gateway(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "name: {}", quoted(&self.name))?;
        writeln!(out, "ports:")?;
        for port in &self.ports {
            write_port(out, port)?;
        }
        let poll = match self.poll {
            Poll::Busy => "busy",
            Poll::Adaptive => "adaptive",
        };
        let hugepages = match self.hugepages {
            Hugepages::Auto => "auto",
            Hugepages::Require => "require",
            Hugepages::Off => "off",
        };
        writeln!(out, "workers: {{cores: {:?}, poll: {poll}}}", self.cores)?;
        writeln!(out, "memory: {{hugepages: {hugepages}}}")?;
        writeln!(out, "snat: {{addresses: {}}}", quoted_list(&self.snat))?;
        let sources = quoted_list(&self.tunnel.sources);
        writeln!(out, "tunnel: {{sources: {sources}, gueDestinationPort: {}}}", self.tunnel.gue_destination_port)?;
        writeln!(out, "nodePortAddresses: {}", quoted_list(&self.node_port_addresses))?;
        self.write_flows(out)?;
        writeln!(out, "zone: {}", quoted(self.zone.as_deref().unwrap_or_default()))?;
        writeln!(out, "stateDir: {}", quoted(&self.state_dir.display().to_string()))?;
        writeln!(out, "maxStateAge: {}", Written(self.max_state_age))?;
        writeln!(out, "logs: {}", self.logs)?;
        writeln!(out, "flowRecords: {{to: \"\"}}")?;
        writeln!(out, "admin: {{listen: {}}}", quoted(&format!("unix:{}", self.admin_listen.display())))?;
        writeln!(out, "metrics: {{listen: \"\"}}")?;
        let RouteTable { table, protocol } = self.announce;
        writeln!(out, "announce: {{routeTable: {table}, routeProtocol: {protocol}}}")?;
        writeln!(out, "drainOnStop: {}", Written(self.drain_on_stop))?;
        self.write_fixed_network(out)
    }

    fn write_flows(&self, out: &mut String) -> fmt::Result {
        let flows = &self.flows;
        let limits = [
            ("tcpEstablished", flows.tcp_established),
            ("tcpOpening", flows.tcp_opening),
            ("tcpHalfClosed", flows.tcp_half_closed),
            ("tcpClosing", flows.tcp_closing),
            ("tcpOneWay", flows.tcp_one_way),
            ("udp", flows.udp),
            ("udpExchange", flows.udp_exchange),
            ("udpUnreplied", flows.udp_unreplied),
            ("sctp", flows.sctp),
            ("tableGrace", flows.table_grace),
        ];
        write!(out, "flows: {{maxPerWorker: {}", flows.max_per_worker)?;
        for (key, limit) in limits {
            write!(out, ", {key}: {}", Written(limit))?;
        }
        writeln!(out, "}}")
    }

    fn write_fixed_network(&self, out: &mut String) -> fmt::Result {
        let port = |index: usize| quoted(self.ports.get(index).map_or("", |port| port.name.as_str()));
        writeln!(out, "static:")?;
        writeln!(out, "  links:{}", if self.links.is_empty() { " []" } else { "" })?;
        for VlanLink { link, mtu, addresses } in &self.links {
            let (port, tags) = (port(link.port().0.into()), written_tags(*link));
            writeln!(out, "    - {{port: {port}{tags}, mtu: {mtu}, addresses: {}}}", quoted_list(addresses))?;
        }
        writeln!(out, "  routes:{}", if self.routes.is_empty() { " []" } else { "" })?;
        for route in &self.routes {
            let via = route.via.map_or_else(|| "null".to_owned(), |via| quoted(&via.to_string()));
            let (to, port) = (quoted(&route.to.to_string()), port(route.link.port().0.into()));
            writeln!(out, "    - {{to: {to}, via: {via}, port: {port}{}}}", written_tags(route.link))?;
        }
        writeln!(out, "  neighbours:{}", if self.neighbours.is_empty() { " []" } else { "" })?;
        for neighbour in &self.neighbours {
            let (address, mac) = (quoted(&neighbour.address.to_string()), quoted(&neighbour.mac.to_string()));
            let (port, tags) = (port(neighbour.link.port().0.into()), written_tags(neighbour.link));
            writeln!(out, "    - {{address: {address}, mac: {mac}, port: {port}{tags}}}")?;
        }
        Ok(())
    }

    fn write_source(&self, out: &mut String) -> fmt::Result {
        match &self.source {
            StateSource::Remote(urls, tls) => {
                writeln!(out, "controller: {{urls: {}, tls: {}}}", quoted_list(urls), written(tls.as_ref()))
            }
            StateSource::Embedded(settings, tls) => {
                writeln!(out, "controller: {{urls: [], tls: {}}}", written(tls.as_ref()))?;
                out.write_str(&controller::effective(settings))
            }
        }
    }
}

fn written(tls: Option<&CertificateFiles>) -> String {
    tls.map_or_else(|| "{}".to_owned(), written_files)
}

fn write_port(out: &mut String, port: &PortSettings) -> fmt::Result {
    let mac = port.mac.map_or_else(|| "null".to_owned(), |mac| quoted(&mac.to_string()));
    let twin = match port.twin {
        Twin::Tap => "tap",
        Twin::None => "none",
    };
    writeln!(out, "  - name: {}", quoted(&port.name))?;
    writeln!(out, "    device: {}", quoted(&port.device.to_string()))?;
    writeln!(out, "    addresses: {}", quoted_list(&port.addresses))?;
    writeln!(out, "    mac: {mac}")?;
    writeln!(out, "    mtu: {}", port.mtu_bytes)?;
    writeln!(out, "    twin: {twin}")
}
