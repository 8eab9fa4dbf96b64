//! Key `static.links`: links with VLAN tags, like VLAN devices of Linux, for `replay` and for ports without a twin.

use control::config::{Field, Location, Section};
use dataplane::{Link, TagKind, Vlan, VlanLink};

use super::port::{self, LocatedPort, port_index};

/// Maximum number of links with tags: the identifiers of one tag. The same limit applies to VLAN devices of Linux.
const LINKS_MAX: usize = 4094;
/// Description of valid tags for messages.
const TAGS: &str =
    "one VLAN tag or two, the outer first, each a number from 1 to 4094 (IEEE 802.1Q), or 802.1ad:NUMBER for a service tag";

/// A link with tags and the locations of its addresses.
#[derive(Clone, Debug)]
pub(super) struct LocatedLink {
    pub(super) settings: VlanLink,
    pub(super) address_locations: Vec<Location>,
}

/// Reads key `links` of `static`. An address belongs to one port or one link.
pub(super) fn take(section: &mut Section<'_>, ports: &[LocatedPort]) -> Vec<LocatedLink> {
    let mut links: Vec<LocatedLink> = Vec::new();
    let items = section.items("links", "links");
    if let Some(item) = items.get(LINKS_MAX) {
        item.problem(format!("found {} links, expected at most {LINKS_MAX}", items.len()));
    }
    for item in items {
        if let Some(link) = take_link(&item, ports, &links) {
            links.push(link);
        }
    }
    links
}

fn take_link(item: &Field<'_>, ports: &[LocatedPort], others: &[LocatedLink]) -> Option<LocatedLink> {
    let mut section = item.section();
    let port = port_index(&mut section, ports);
    let vlan = section.required("tags", format!("a list of {TAGS}")).and_then(|field| parse_tags(&field));
    let of_links = others.iter().flat_map(|link| &link.settings.addresses);
    let used: Vec<_> = ports.iter().flat_map(|port| &port.settings.addresses).chain(of_links).copied().collect();
    let (addresses, address_locations) = port::take_addresses(&mut section, &used);
    let default_mtu = port.and_then(|port| ports.get(usize::from(port.0))).map_or(1500, |port| port.settings.mtu_bytes);
    let mtu = port::take_mtu(&mut section, &addresses, default_mtu, item);
    section.finish();
    let link = Link::new(port?, vlan?);
    if others.iter().any(|other| other.settings.link == link) {
        item.problem(format!("found the link with tags {} of this port a second time; keep one", link.vlan()));
    }
    Some(LocatedLink { settings: VlanLink { link, mtu, addresses }, address_locations })
}

/// Reads keys `port` and `tags` of a route or a neighbour: the untagged frames of a port, or a link.
pub(super) fn link_of(section: &mut Section<'_>, ports: &[LocatedPort], links: &[LocatedLink]) -> Option<Link> {
    let port = port_index(section, ports);
    let Some(field) = section.field("tags") else { return port.map(Link::from) };
    let link = Link::new(port?, parse_tags(&field)?);
    if links.iter().all(|known| known.settings.link != link) {
        field.problem(format!("found tags {} of a link that is not in `static.links`; name it there", link.vlan()));
    }
    Some(link)
}

fn parse_tags(field: &Field<'_>) -> Option<Vlan> {
    let items = field.items(TAGS);
    let mut vlan = Vlan::NONE;
    for item in &items {
        let (kind, id) = item.parse(TAGS, parse_tag)?;
        let Some(longer) = vlan.with(kind, id) else {
            field.problem(format!("found {} tags, expected a list of {TAGS}", items.len()));
            return None;
        };
        vlan = longer;
    }
    if field.is_empty() {
        field.unexpected(format!("a list of {TAGS}"));
    }
    (!items.is_empty()).then_some(vlan)
}

fn parse_tag(text: &str) -> Option<(TagKind, u16)> {
    let (kind, id) = match text.strip_prefix("802.1ad:") {
        Some(id) => (TagKind::Service, id),
        None => (TagKind::Customer, text),
    };
    let id = id.parse().ok()?;
    Vlan::NONE.with(kind, id).map(|_| (kind, id))
}

/// The tags of a link in the form of key `tags`; none for untagged frames.
pub(super) fn tag_texts(link: Link) -> Vec<String> {
    let text = |(kind, id): (TagKind, u16)| match kind {
        TagKind::Customer => id.to_string(),
        TagKind::Service => format!("802.1ad:{id}"),
    };
    link.vlan().tags().map(text).collect()
}
