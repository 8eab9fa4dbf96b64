//! The map from backends of mode `dnat` to the frontends that they answer for, by which a reply without a flow is
//! rewritten (FORWARDING 4).

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hashbrown::HashMap;

use super::services::{Served, ServedPort};
use crate::Address;
use crate::flow::BackendId;
use crate::hash::TableHash;
use crate::snapshot::{Front, FrontendKey};

type Fronts<A> = HashMap<FrontendKey<A>, Option<Front<A>>, TableHash>;

/// The maps of both families. A backend behind several frontends, of one service or several, maps to `None`.
pub(super) fn fronts<'a>(services: impl Iterator<Item = &'a Served>) -> (Arc<Fronts<u32>>, Arc<Fronts<u128>>) {
    let (mut v4, mut v6) = (Fronts::default(), Fronts::default());
    for port in services.filter(|served| served.is_dnat()).flat_map(|served| &served.ports) {
        for (backend, id) in port.backends() {
            match backend.ip() {
                IpAddr::V4(_) => put(&mut v4, port, backend, id),
                IpAddr::V6(_) => put(&mut v6, port, backend, id),
            }
        }
    }
    (Arc::new(v4), Arc::new(v6))
}

fn put<A: Address>(fronts: &mut Fronts<A>, port: &ServedPort, backend: SocketAddr, id: BackendId) {
    let Some(address) = A::from_ip(backend.ip()) else { return };
    for at in &port.listens {
        let Some(vip) = A::from_ip(at.ip()) else { continue };
        let key = FrontendKey { address, port: backend.port(), protocol: port.protocol.number() };
        let front = Some(Front { vip, port: at.port(), backend: id });
        fronts.entry(key).and_modify(|known| *known = None).or_insert(front);
    }
}
