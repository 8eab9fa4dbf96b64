//! Usage figures of pools.

use super::*;

#[test]
fn usage_figures_count_available_addresses() {
    let mut v6 = pool("v6", &["2001:db8::/64"]);
    v6.avoid_buggy_ips = true;
    let mut lab = Lab::new(&[pool("default", &["192.0.2.100-192.0.2.109"]), v6]);
    lab.forbidden = forbidden(&["192.0.2.109", "192.0.2.110"], &[], &[], &[]);
    lab.assign(&[claim("a", 1), claim("b", 2)]);
    lab.assign(&[claim("a", 1)]);
    let figures = |lab: &mut Lab| -> Vec<(u128, u128, u128)> {
        let uses = lab.account(&[]);
        uses.iter().flat_map(|one| &one.families).map(|(_, one)| (one.total, one.used, one.available)).collect()
    };
    // One is held and one belongs to the gateway. The one reserved for b counts as available.
    assert_eq!(figures(&mut lab), [(10, 1, 8), (1 << 64, 0, 1 << 64)]);
}

/// Freed addresses wait while a gateway may forward them, and the figures say so.
#[test]
fn a_pool_counts_the_addresses_that_wait_for_gateways_and_names_those_that_are_away() {
    let mut lab = Lab::small();
    let gateway = |name: &str, acknowledged| AbsentGateway { name: name.to_owned(), acknowledged };
    let absent = [gateway("edge-2", 0), gateway("edge-3", 1)];
    let away = vec!["edge-2".to_owned()];
    let mut figures = |claims: &[Claim], reached, absent: &[AbsentGateway]| {
        lab.reached = reached;
        lab.assign(claims);
        lab.all.published(1);
        let one = lab.account(absent).remove(0);
        let exhausted: Vec<u128> = one.exhausted().map(|(_, awaiting)| awaiting).collect();
        let waits = lab.all.waits_for_gateways(lab.now);
        (one.families[0].1.available, one.awaiting(), exhausted, one.awaited, waits)
    };
    let all = [claim("a", 1), claim("b", 2), claim("c", 3)];
    assert_eq!(figures(&all, Some(0), &[]), (0, 0, vec![0], vec![], false));
    assert_eq!(figures(&all[..2], Some(0), &absent), (1, 1, vec![1], away.clone(), true), "edge-3 has removed it");
    assert_eq!(figures(&all[..1], Some(0), &absent), (2, 2, vec![2], away.clone(), true));
    assert_eq!(figures(&all[..1], Some(1), &absent), (2, 0, vec![], vec![], false), "all have removed both");
    assert_eq!(figures(&[], None, &[]), (3, 0, vec![], vec![], false), "no gateway forwards anything");
}
