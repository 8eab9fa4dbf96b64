//! The gateways that are connected, and the generation that each forwards by.

use std::collections::BTreeMap;

use tokio::sync::watch;

/// One connected gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gateway {
    /// Its name.
    pub name: String,
    /// Version of its program.
    pub version: String,
    /// Counter of the newest generation of our epoch that all its workers forward by.
    pub acknowledged: Option<u64>,
}

/// All that are connected, by connection: while a gateway reconnects it may be there twice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gateways {
    connected: BTreeMap<u64, Gateway>,
    last_connection: u64,
}

impl Gateways {
    /// The connected gateways.
    pub fn iter(&self) -> impl Iterator<Item = &Gateway> {
        self.connected.values()
    }

    /// Whether any gateway forwards by `counter` or a newer generation.
    #[must_use]
    pub fn any_reached(&self, counter: u64) -> bool {
        self.iter().any(|gateway| gateway.acknowledged >= Some(counter))
    }

    /// Whether there are gateways and all forward by `counter` or a newer generation.
    #[must_use]
    pub fn all_reached(&self, counter: u64) -> bool {
        !self.connected.is_empty() && self.iter().all(|gateway| gateway.acknowledged >= Some(counter))
    }
}

/// A gateway's place in the list, which it leaves when this is dropped.
#[derive(Debug)]
pub struct Connection {
    gateways: watch::Sender<Gateways>,
    number: u64,
}

impl Connection {
    /// Adds a gateway.
    #[must_use]
    pub fn open(gateways: &watch::Sender<Gateways>, name: &str, version: &str) -> Self {
        let mut number = 0;
        gateways.send_modify(|all| {
            all.last_connection += 1;
            number = all.last_connection;
            let gateway = Gateway { name: name.to_owned(), version: version.to_owned(), acknowledged: None };
            all.connected.insert(number, gateway);
        });
        Self { gateways: gateways.clone(), number }
    }

    /// Notes what the gateway forwards by.
    pub fn acknowledge(&self, counter: u64) {
        self.gateways.send_if_modified(|all| match all.connected.get_mut(&self.number) {
            Some(gateway) if gateway.acknowledged < Some(counter) => {
                gateway.acknowledged = Some(counter);
                true
            }
            _ => false,
        });
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.gateways.send_modify(|all| drop(all.connected.remove(&self.number)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_reached_a_generation_when_the_slowest_did_and_nobody_did_when_nobody_is_there() {
        let gateways = watch::Sender::new(Gateways::default());
        assert!(!gateways.borrow().all_reached(0));
        let one = Connection::open(&gateways, "edge-1", "0.1.0");
        let two = Connection::open(&gateways, "edge-2", "0.1.0");
        one.acknowledge(5);
        assert!(gateways.borrow().any_reached(5) && !gateways.borrow().all_reached(5));
        two.acknowledge(6);
        assert!(gateways.borrow().all_reached(5) && !gateways.borrow().all_reached(6));
        drop(one);
        assert!(gateways.borrow().all_reached(6));
        drop(two);
        assert!(!gateways.borrow().any_reached(0));
    }
}
