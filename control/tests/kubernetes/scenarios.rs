//! What users observe. Every scenario runs on any cluster: on the test server with `make test`, on a real one with
//! `make e2e-k8s`. Scenarios need no kubelet: Nodes, Pods and EndpointSlices are created as objects. Each scenario has
//! its own class, group, pools and namespace, since a cluster may already have an installation.
//!
//! A new scenario is one function of a [`User`] and one row of [`SCENARIOS`].

mod addresses;
mod cluster;
mod lifecycle;
mod migration;
mod ownership;
mod service_fields;
mod status_and_events;

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Instant;

use futures::FutureExt;

use crate::api_server::ApiServer;
use crate::skip::skip;
use crate::user::User;

type Scenario = for<'a> fn(&'a User) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Description and function.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("a new Service has its address within a second", |user| Box::pin(lifecycle::a_new_service_has_its_address(user))),
    ("added and removed backends reach the gateways", |user| Box::pin(lifecycle::backends_come_and_go(user))),
    ("a deleted Service is withdrawn and gone", |user| Box::pin(lifecycle::a_deleted_service_is_withdrawn(user))),
    ("a Service that is no longer a LoadBalancer is withdrawn, and later gets its address again", |user| {
        Box::pin(lifecycle::a_type_changes(user))
    }),
    ("a change to a VIP mode reaches the status first, and a change back the gateways first", |user| {
        Box::pin(lifecycle::a_mode_changes(user))
    }),
    ("conditions show whether gateways serve a Service", |user| Box::pin(lifecycle::conditions_follow_the_gateways(user))),
    ("conditions and an Event show why a Service is not served", |user| Box::pin(lifecycle::a_refusal_says_why(user))),
    ("a new Service whose slice follows a moment later causes no Warning", |user| {
        Box::pin(status_and_events::a_new_service_raises_no_alarm(user))
    }),
    ("reasons distinguish why a Service has no backends", |user| {
        Box::pin(status_and_events::missing_backends_have_distinct_reasons(user))
    }),
    ("each port is listed in the status, with an error if it is not served", |user| {
        Box::pin(status_and_events::every_port_is_in_the_status(user))
    }),
    ("a refusal is reported before routine Events", |user| Box::pin(status_and_events::a_refusal_overtakes_routine(user))),
    ("a typing error interrupts no traffic", |user| Box::pin(status_and_events::a_typing_error_cuts_no_traffic(user))),
    ("an outage of the API server withdraws nothing, and changes made meanwhile arrive", |user| {
        Box::pin(lifecycle::the_api_server_is_away(user))
    }),
    ("a controller that starts during an outage serves once it is over", |user| {
        Box::pin(lifecycle::a_controller_starts_during_an_outage(user))
    }),
    ("Services of others are left alone", |user| Box::pin(ownership::services_of_others_are_left_alone(user))),
    ("Services without class are left alone until they are claimed", |user| {
        Box::pin(ownership::classless_services_are_claimed(user))
    }),
    ("a Service with an address from another controller is taken over and keeps it", |user| {
        Box::pin(migration::an_address_of_another_controller_is_kept(user))
    }),
    ("the endpoints of a deleted EndpointSlice are used for two more seconds", |user| {
        Box::pin(service_fields::a_deleted_slice_counts_on(user))
    }),
    ("externalIPs are served where they are allowed", |user| {
        Box::pin(service_fields::external_ips_are_served_where_they_are_allowed(user))
    }),
    ("one port number is served on three protocols", |user| Box::pin(service_fields::one_number_on_three_protocols(user))),
    ("a restarted controller changes no address", |user| Box::pin(addresses::a_new_controller_renumbers_nobody(user))),
    ("a Service gets the address that it requests", |user| Box::pin(addresses::an_address_is_asked_for(user))),
    ("an AddressPool provides addresses and shows how many are left, and deleting it withdraws nothing", |user| {
        Box::pin(addresses::a_pool_provides_addresses_and_shows_its_usage(user))
    }),
    ("of two Services that request one address the older one gets it", |user| Box::pin(addresses::the_older_claim_wins(user))),
    ("a Service reports an exhausted pool, and is served once an address is free", |user| {
        Box::pin(addresses::an_exhausted_pool_grows(user))
    }),
    ("editing or deleting a pool changes no address", |user| Box::pin(addresses::a_pool_edit_renumbers_nobody(user))),
    ("an address that another writer put into a status is not adopted where it does not belong", |user| {
        Box::pin(addresses::a_foreign_address_is_not_taken_over(user))
    }),
    ("the address of a Service that is being deleted is not allocated before it is gone", |user| {
        Box::pin(addresses::an_address_is_held_until_its_service_is_gone(user))
    }),
    ("a freed address is allocated again when nothing else is free", |user| {
        Box::pin(addresses::a_reserved_address_is_used(user))
    }),
    ("a new controller keeps table sizes and reserved addresses", |user| {
        Box::pin(addresses::a_new_controller_keeps_what_was_decided(user))
    }),
    ("Services of one sharing key have one address as long as their ports differ", |user| {
        Box::pin(addresses::an_address_is_shared(user))
    }),
];

/// Runs a scenario and removes what it created outside its namespace. Returns false if it failed.
async fn holds(sentence: &str, scenario: Scenario, user: &User) -> bool {
    let start = Instant::now();
    let result = AssertUnwindSafe(scenario(user)).catch_unwind().await;
    user.clean_up().await;
    let verdict = if result.is_ok() { "ok" } else { "FAILED" };
    println!("scenario: {sentence}: {verdict} ({:.1} s)", start.elapsed().as_secs_f32());
    result.is_ok()
}

/// As on a real cluster: one after another, beside an installation with its own pools and Services, which must stay
/// unchanged.
#[tokio::test]
async fn every_scenario_holds_on_the_test_server_beside_another_installation() {
    let server = ApiServer::start().await;
    let before = cluster::in_production(&server);
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(kubeconfig.path());
    let mut failed = Vec::new();
    for (sentence, scenario) in SCENARIOS {
        let act = async |user: &User| holds(sentence, *scenario, user).await;
        if !cluster::in_own_namespace(kubeconfig.path(), act).await {
            failed.push((*sentence).to_owned());
        }
        let touched = cluster::touched(&server, &before);
        if !touched.is_empty() {
            failed.push(format!("{sentence}: it left behind, changed or told {touched:?}"));
            break;
        }
    }
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

#[tokio::test]
async fn every_scenario_holds_on_a_real_cluster() {
    let Some(kubeconfig) = cluster::real() else {
        let sentences: Vec<_> = SCENARIOS.iter().map(|(sentence, _)| *sentence).collect();
        let what = format!("{} scenarios on a real cluster ({})", sentences.len(), sentences.join("; "));
        skip(&what, "`make e2e-k8s KUBECONFIG=...` names one");
        return;
    };
    let mut failed = Vec::new();
    cluster::with_kinds(&kubeconfig, async || {
        for (sentence, scenario) in SCENARIOS {
            let is_held = cluster::in_own_namespace(&kubeconfig, async |user| holds(sentence, *scenario, user).await).await;
            if !is_held {
                failed.push(sentence);
            }
        }
    })
    .await;
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
