//! Scenarios of users. Every scenario runs on any cluster: on the test server with `make test`, on a real one with
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
    ("added and removed backends reach the gateways", |user| {
        Box::pin(lifecycle::added_and_removed_backends_reach_the_gateways(user))
    }),
    ("a deleted Service is withdrawn and its object is removed", |user| {
        Box::pin(lifecycle::a_deleted_service_is_withdrawn(user))
    }),
    ("a Service that is no longer a LoadBalancer is withdrawn, and later gets its address again", |user| {
        Box::pin(lifecycle::a_service_changes_its_type(user))
    }),
    ("a change to a VIP mode reaches the status first, and a change back the gateways first", |user| {
        Box::pin(lifecycle::a_service_changes_its_mode(user))
    }),
    ("conditions show whether gateways serve a Service", |user| Box::pin(lifecycle::conditions_follow_the_gateways(user))),
    ("conditions and an Event show why a Service is not served", |user| {
        Box::pin(lifecycle::a_refused_service_shows_the_reason(user))
    }),
    ("a new Service that gets its slice a moment later causes no Warning", |user| {
        Box::pin(status_and_events::a_new_service_causes_no_warning(user))
    }),
    ("reasons distinguish why a Service has no backends", |user| {
        Box::pin(status_and_events::missing_backends_have_distinct_reasons(user))
    }),
    ("each port is listed in the status, with an error if it is not served", |user| {
        Box::pin(status_and_events::every_port_is_in_the_status(user))
    }),
    ("a refusal is reported before routine Events", |user| {
        Box::pin(status_and_events::a_refusal_is_reported_before_routine_events(user))
    }),
    ("a typing error interrupts no traffic", |user| Box::pin(status_and_events::a_typing_error_interrupts_no_traffic(user))),
    ("an outage of the API server withdraws nothing, and changes made meanwhile arrive", |user| {
        Box::pin(lifecycle::the_api_server_is_unreachable(user))
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
        Box::pin(service_fields::endpoints_of_a_deleted_slice_stay_for_two_seconds(user))
    }),
    ("externalIPs are served where they are allowed", |user| {
        Box::pin(service_fields::external_ips_are_served_where_they_are_allowed(user))
    }),
    ("one port number is served on three protocols", |user| Box::pin(service_fields::one_port_number_on_three_protocols(user))),
    ("an l2 pool tells which gateways cannot announce it", |user| {
        Box::pin(addresses::an_l2_pool_tells_which_gateways_cannot_announce_it(user))
    }),
    ("a pool tells which gateways its freed addresses wait for", |user| {
        Box::pin(addresses::a_pool_tells_which_gateways_its_freed_addresses_wait_for(user))
    }),
    ("a restarted controller changes no address", |user| Box::pin(addresses::a_restarted_controller_changes_no_address(user))),
    ("a Service gets the address that it requests", |user| Box::pin(addresses::a_requested_address_is_assigned(user))),
    ("an AddressPool provides addresses and shows how many are left, and deleting it withdraws nothing", |user| {
        Box::pin(addresses::a_pool_provides_addresses_and_shows_its_usage(user))
    }),
    ("a renamed Service gets the address that it names as soon as gateways have removed it", |user| {
        Box::pin(addresses::a_renamed_service_gets_the_address_that_it_names(user))
    }),
    ("a request for an address that cannot be read gets no other address", |user| {
        Box::pin(addresses::an_unreadable_request_gets_no_other_address(user))
    }),
    ("of two Services that request one address the older one gets it", |user| {
        Box::pin(addresses::the_older_service_gets_a_contested_address(user))
    }),
    ("a Service reports an exhausted pool, and is served once an address is free", |user| {
        Box::pin(addresses::an_exhausted_pool_is_reported_until_it_grows(user))
    }),
    ("editing or deleting a pool changes no address", |user| {
        Box::pin(addresses::a_changed_or_deleted_pool_changes_no_address(user))
    }),
    ("an address that another writer put into a status is not adopted where it does not belong", |user| {
        Box::pin(addresses::a_foreign_address_is_not_adopted(user))
    }),
    ("the address of a Service that is being deleted is not reused before the Service is deleted", |user| {
        Box::pin(addresses::an_address_is_not_reused_until_its_service_is_deleted(user))
    }),
    ("a freed address is allocated again when nothing else is free", |user| {
        Box::pin(addresses::a_reserved_address_is_used_when_no_other_is_free(user))
    }),
    ("a new controller keeps table sizes and reserved addresses", |user| {
        Box::pin(addresses::a_restarted_controller_keeps_table_sizes_and_reservations(user))
    }),
    ("Services of one sharing key have one address as long as their ports differ", |user| {
        Box::pin(addresses::services_with_one_sharing_key_share_an_address(user))
    }),
];

/// Runs a scenario and deletes its cluster-scoped objects. Returns false if it failed.
async fn succeeds(sentence: &str, scenario: Scenario, user: &User) -> bool {
    let start = Instant::now();
    let result = AssertUnwindSafe(scenario(user)).catch_unwind().await;
    user.clean_up().await;
    let verdict = if result.is_ok() { "ok" } else { "FAILED" };
    println!("scenario: {sentence}: {verdict} ({:.1} s)", start.elapsed().as_secs_f32());
    result.is_ok()
}

/// One after another, as on a real cluster, and next to another installation. Its pools and Services must not change.
#[tokio::test]
async fn every_scenario_holds_on_the_test_server_beside_another_installation() {
    let server = ApiServer::start().await;
    let before = cluster::create_other_installation(&server);
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(kubeconfig.path());
    let mut failed = Vec::new();
    for (sentence, scenario) in SCENARIOS {
        let run = async |user: &User| succeeds(sentence, *scenario, user).await;
        if !cluster::in_new_namespace(kubeconfig.path(), run).await {
            failed.push((*sentence).to_owned());
        }
        let changed = cluster::changed_objects(&server, &before);
        if !changed.is_empty() {
            failed.push(format!("{sentence}: it created, changed or deleted {changed:?}, or wrote Events about them"));
            break;
        }
    }
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

#[tokio::test]
async fn every_scenario_holds_on_a_real_cluster() {
    let Some(kubeconfig) = cluster::real_cluster_kubeconfig() else {
        let sentences: Vec<_> = SCENARIOS.iter().map(|(sentence, _)| *sentence).collect();
        let what = format!("{} scenarios on a real cluster ({})", sentences.len(), sentences.join("; "));
        skip(&what, "`make e2e-k8s KUBECONFIG=...` names one");
        return;
    };
    let mut failed = Vec::new();
    cluster::with_installed_kinds(&kubeconfig, async || {
        for (sentence, scenario) in SCENARIOS {
            let succeeded = cluster::in_new_namespace(&kubeconfig, async |user| succeeds(sentence, *scenario, user).await).await;
            if !succeeded {
                failed.push(sentence);
            }
        }
    })
    .await;
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
