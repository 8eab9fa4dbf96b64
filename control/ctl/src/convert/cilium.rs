//! Cilium's objects: CiliumLoadBalancerIPPool and the policies that announce its addresses.

use ipnet::IpNet;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};
use serde::Deserialize;

use super::input::{ConvertError, Found};
use super::pool::{ConvertedPool, addresses};
use super::selectors::NAMESPACE_NAME;
use objects::crd::{AddressPoolSpec, AnnounceKind};

const GROUP: &str = "cilium.io";
/// Labels that Cilium derives from a Service's namespace and name.
const NAMESPACE: &str = "io.kubernetes.service.namespace";
const NAME: &str = "io.kubernetes.service.name";

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct CiliumPool {
    /// `cidrs` until 1.15.
    #[serde(default, alias = "cidrs")]
    blocks: Vec<Block>,
    #[serde(default)]
    service_selector: Option<LabelSelector>,
    #[serde(default, rename = "allowFirstLastIPs")]
    allow_first_last_ips: Option<String>,
    #[serde(default)]
    disabled: bool,
}

#[derive(Deserialize)]
struct Block {
    #[serde(default)]
    cidr: Option<String>,
    #[serde(default)]
    start: Option<String>,
    #[serde(default)]
    stop: Option<String>,
}

/// Converts the pools; adds notes for settings without equivalent.
pub(super) fn pools(found: &[Found], notes: &mut Vec<String>) -> Result<Vec<ConvertedPool>, ConvertError> {
    let of = |kind: &str| found.iter().any(|object| object.is(GROUP, kind));
    let l2 = of("CiliumL2AnnouncementPolicy");
    let routed = of("CiliumBGPAdvertisement") || of("CiliumBGPPeeringPolicy") || of("CiliumBGPClusterConfig");
    let announce = if routed { AnnounceKind::Routed } else { AnnounceKind::L2 };
    for object in found.iter().filter(|object| object.group == GROUP) {
        if let Some(instead) = no_equivalent(&object.kind) {
            notes.push(object.note(format_args!(" has no equivalent: {instead}")));
        }
    }
    if l2 && routed {
        notes.push(
            "Cilium announces Services in both ways, a pool of sluice has one: all become `announce: routed`; make those `l2` whose \
             addresses are of a network that the gateways are on"
                .to_owned(),
        );
    }
    let mut pools = Vec::new();
    for object in found.iter().filter(|object| object.is(GROUP, "CiliumLoadBalancerIPPool")) {
        pools.extend(pool(object, announce, notes)?);
    }
    if !pools.is_empty() && !l2 && !routed {
        notes.push("no policy or advertisement was read: pools become `announce: l2`".to_owned());
    }
    Ok(pools)
}

fn no_equivalent(kind: &str) -> Option<&'static str> {
    Some(match kind {
        "CiliumL2AnnouncementPolicy" => {
            "the gateways answer for all VIPs of `l2` pools, on the port whose network they are of; what it selects by labels of \
             Services is replaced by pools and by the class"
        }
        "CiliumBGPClusterConfig" | "CiliumBGPPeeringPolicy" | "CiliumBGPPeerConfig" | "CiliumBGPNodeConfigOverride" => {
            "gateways are neighbours of routers by FRR or BIRD on them, see docs/operate/bgp.md"
        }
        "CiliumBGPAdvertisement" => "FRR or BIRD announces the VIPs of `routed` pools out of the gateway's table",
        _ => return None,
    })
}

fn pool(object: &Found, announce: AnnounceKind, notes: &mut Vec<String>) -> Result<Option<ConvertedPool>, ConvertError> {
    let pool: CiliumPool = object.spec()?;
    let mut note = |text: &str| notes.push(object.note(text));
    let Some((namespace_selector, service_selector)) = divide(pool.service_selector) else {
        note(
            " is left out: it selects by `io.kubernetes.service.name`, and a pool of sluice selects by labels; give the Service a \
             label, and select that",
        );
        return Ok(None);
    };
    if pool.disabled {
        note(": `disabled` becomes `autoAssign: false`: a Service that asks for the pool or an address of it still gets one");
    }
    let keeps_ends = pool.allow_first_last_ips.as_deref() != Some("No");
    let wrong = |message| object.place.error(format!("{}: {message}", object.title()));
    let texts: Vec<_> = pool.blocks.iter().map(|block| range(block, keeps_ends).map_err(wrong)).collect::<Result<_, _>>()?;
    if texts.is_empty() {
        note(" is left out: it has no addresses");
        return Ok(None);
    }
    let spec = AddressPoolSpec {
        addresses: addresses(object, texts.iter().map(String::as_str))?,
        auto_assign: !pool.disabled,
        namespace_selector,
        service_selector,
        announce,
        ..AddressPoolSpec::default()
    };
    Ok(Some(ConvertedPool::new(object, spec)))
}

/// A block as a range in our format.
fn range(block: &Block, keeps_ends: bool) -> Result<String, String> {
    match block {
        Block { cidr: Some(cidr), start: None, stop: None } if keeps_ends => Ok(cidr.clone()),
        Block { cidr: Some(cidr), start: None, stop: None } => {
            let net: IpNet = cidr.trim().parse().map_err(|_| format!("expected a CIDR, found {cidr:?}"))?;
            Ok(without_ends(net))
        }
        Block { cidr: None, start: Some(start), stop: Some(stop) } => Ok(format!("{start}-{stop}")),
        Block { cidr: None, start: Some(start), stop: None } => Ok(start.clone()),
        _ => Err("expected a block of `cidr`, or of `start` and perhaps `stop`".to_owned()),
    }
}

/// `allowFirstLastIPs: No`, which does not apply to networks of one or two addresses.
fn without_ends(net: IpNet) -> String {
    match net {
        IpNet::V4(net) if net.prefix_len() < 31 => {
            let last = u32::from(net.broadcast()) - 1;
            format!("{}-{}", std::net::Ipv4Addr::from(u32::from(net.network()) + 1), std::net::Ipv4Addr::from(last))
        }
        IpNet::V6(net) if net.prefix_len() < 127 => {
            let last = u128::from(net.broadcast()) - 1;
            format!("{}-{}", std::net::Ipv6Addr::from(u128::from(net.network()) + 1), std::net::Ipv6Addr::from(last))
        }
        net => net.to_string(),
    }
}

/// Selectors of namespaces and Services; `None` if it selects the name of a Service.
fn divide(selector: Option<LabelSelector>) -> Option<(Option<LabelSelector>, Option<LabelSelector>)> {
    let LabelSelector { match_labels, match_expressions } = selector.unwrap_or_default();
    let (mut namespaces, mut services) = (LabelSelector::default(), LabelSelector::default());
    for (key, value) in match_labels.into_iter().flatten() {
        let (selector, key) = match key.as_str() {
            NAME => return None,
            NAMESPACE => (&mut namespaces, NAMESPACE_NAME.to_owned()),
            _ => (&mut services, key),
        };
        selector.match_labels.get_or_insert_default().insert(key, value);
    }
    for requirement in match_expressions.into_iter().flatten() {
        let (selector, key) = match requirement.key.as_str() {
            NAME => return None,
            NAMESPACE => (&mut namespaces, NAMESPACE_NAME.to_owned()),
            _ => (&mut services, requirement.key.clone()),
        };
        selector.match_expressions.get_or_insert_default().push(LabelSelectorRequirement { key, ..requirement });
    }
    let unless_empty = |selector: LabelSelector| (selector != LabelSelector::default()).then_some(selector);
    Some((unless_empty(namespaces), unless_empty(services)))
}
