//! The settings as keys with values: what `sluiced check` prints and `reload` compares.

use std::path::Path;

use control::config::listen::{admin_key_values, files_key_values};
use control::config::scalar::DurationText;
use control::config::{KeyValues, controller};
use dataplane::{FlowLimits, Link};

use super::links::tag_texts;
use super::{Election, PortSettings, Replication, Settings, StateSource};
use crate::netlink::RouteTable;

impl Settings {
    /// Every key with its value, as YAML that [`Settings::read`] takes.
    #[must_use]
    pub fn effective(&self) -> String {
        self.key_values().to_string()
    }

    /// Every key with its value.
    pub(crate) fn key_values(&self) -> KeyValues {
        let records = self.flow_records.as_ref().map_or_else(String::new, ToString::to_string);
        let workers = KeyValues::default().with("cores", &self.cores).with("poll", self.poll);
        let tunnel = KeyValues::default()
            .with("sources", &self.tunnel.sources)
            .with("gueDestinationPort", self.tunnel.gue_destination_port);
        KeyValues::default()
            .with("name", &self.name)
            .items("ports", self.ports.iter().map(port_key_values))
            .section("workers", workers)
            .section("memory", KeyValues::default().with("hugepages", self.hugepages))
            .section("snat", KeyValues::default().with("addresses", &self.snat))
            .section("tunnel", tunnel)
            .with("nodePortAddresses", &self.node_port_addresses)
            .section("flows", flows_key_values(&self.flows))
            .section("limits", KeyValues::default().with("targets", self.targets_max))
            .with("zone", self.zone.as_deref().unwrap_or_default())
            .with("stateDir", &self.state_dir)
            .with("maxStateAge", DurationText(self.max_state_age))
            .with("logs", self.logs)
            .section("flowRecords", KeyValues::default().with("to", records))
            .section("admin", admin_key_values(&self.admin_listen))
            .section("metrics", KeyValues::default().with("listen", controller::address_text(self.metrics_listen)))
            .section("announce", self.announce_key_values())
            .section("fleet", self.fleet_key_values())
            .with("drainOnStop", DurationText(self.drain_on_stop))
            .block("static", self.static_key_values())
            .then(self.source_key_values())
    }

    fn announce_key_values(&self) -> KeyValues {
        let RouteTable { table, protocol } = self.announce;
        let Election { elector, groups, port, first_vrid, advertisement, preempt } = &self.election;
        KeyValues::default()
            .with("routeTable", table)
            .with("routeProtocol", protocol)
            .with("withoutBackends", self.without_backends)
            .with("election", elector)
            .with("groups", groups)
            .with("port", self.ports.get(*port).map_or("", |port| port.name.as_str()))
            .with("firstVrid", first_vrid)
            .with("advertisement", DurationText(*advertisement))
            .with("preempt", preempt)
            .with("daemon", self.daemon_sockets.daemon)
            .with("daemonSocket", self.daemon_sockets.socket.as_deref().unwrap_or(Path::new("")))
    }

    fn fleet_key_values(&self) -> KeyValues {
        let built = Replication::default();
        let Replication { listen, after, partners, key } = self.replication.as_ref().unwrap_or(&built);
        KeyValues::default()
            .with("listen", controller::address_text(self.replication.as_ref().map(|_| *listen)))
            .with("replicate", DurationText(*after))
            .with_texts("partners", partners)
            .with("key", key.as_ref().map(|key| &key.path))
    }

    fn static_key_values(&self) -> KeyValues {
        let on = |keys: KeyValues, link: Link| {
            let port = self.ports.get(usize::from(link.port().0)).map_or("", |port| port.name.as_str());
            let tags = tag_texts(link);
            let keys = keys.with("port", port);
            if tags.is_empty() { keys } else { keys.with("tags", tags) }
        };
        let links = self
            .links
            .iter()
            .map(|link| on(KeyValues::default(), link.link).with("mtu", link.mtu).with_texts("addresses", &link.addresses));
        let routes = self
            .routes
            .iter()
            .map(|route| on(KeyValues::default().with("to", route.to.to_string()).with("via", route.via), route.link));
        let neighbours = self.neighbours.iter().map(|neighbour| {
            on(KeyValues::default().with("address", neighbour.address).with("mac", neighbour.mac.to_string()), neighbour.link)
        });
        KeyValues::default().items("links", links).items("routes", routes).items("neighbours", neighbours)
    }

    fn source_key_values(&self) -> KeyValues {
        let (urls, tls, embedded) = match &self.source {
            StateSource::Remote(urls, tls) => (urls.as_slice(), tls, None),
            StateSource::Embedded(settings, tls) => (&[][..], tls, Some(settings)),
        };
        let tls = tls.as_ref().map(files_key_values).unwrap_or_default();
        let keys = KeyValues::default().section("controller", KeyValues::default().with_texts("urls", urls).section("tls", tls));
        keys.then(embedded.map_or_else(KeyValues::default, |settings| controller::key_values(settings, None)))
    }
}

fn port_key_values(port: &PortSettings) -> KeyValues {
    KeyValues::default()
        .with("name", &port.name)
        .with("device", port.device.to_string())
        .with_texts("addresses", &port.addresses)
        .with("mac", port.mac.map(|mac| mac.to_string()))
        .with("mtu", port.mtu_bytes)
        .with("rxDescriptors", port.descriptors.rx)
        .with("txDescriptors", port.descriptors.tx)
        .with("twin", port.twin)
}

fn flows_key_values(flows: &FlowLimits) -> KeyValues {
    KeyValues::default()
        .with("maxPerWorker", flows.max_per_worker)
        .with("tcpEstablished", DurationText(flows.tcp_established))
        .with("tcpOpening", DurationText(flows.tcp_opening))
        .with("tcpHalfClosed", DurationText(flows.tcp_half_closed))
        .with("tcpReset", DurationText(flows.tcp_reset))
        .with("tcpClosing", DurationText(flows.tcp_closing))
        .with("tcpOneWay", DurationText(flows.tcp_one_way))
        .with("udp", DurationText(flows.udp))
        .with("udpExchange", DurationText(flows.udp_exchange))
        .with("udpUnreplied", DurationText(flows.udp_unreplied))
        .with("sctp", DurationText(flows.sctp))
        .with("tableGrace", DurationText(flows.table_grace))
}
