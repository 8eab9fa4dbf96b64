//! What users observe, each written once and run on any cluster: on the test server by `make test`, on a real one by
//! `make e2e-k8s`. They need no kubelet: Nodes, Pods and EndpointSlices are made as objects. Each has class, group, pools and
//! namespace of its own, since a cluster may have an installation already.
//!
//! A new scenario is one function of a [`User`] and one row of [`SCENARIOS`].

mod addresses;
mod clusters;
mod lives;
mod moving;
mod ownership;
mod services;
mod told;

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::time::Instant;

use futures::FutureExt;

use crate::api_server::ApiServer;
use crate::skip::skip;
use crate::user::User;

type Scenario = for<'a> fn(&'a User) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

/// Sentence and function.
const SCENARIOS: &[(&str, Scenario)] = &[
    ("a new Service has its address within a second", |user| Box::pin(lives::a_new_service_has_its_address(user))),
    ("backends that come and go reach the gateways", |user| Box::pin(lives::backends_come_and_go(user))),
    ("a deleted Service is withdrawn and gone", |user| Box::pin(lives::a_deleted_service_is_withdrawn(user))),
    ("a Service that is no LoadBalancer any more is withdrawn, and comes back to its address", |user| {
        Box::pin(lives::a_type_changes(user))
    }),
    ("towards a VIP mode the status comes first, and back from it the gateways", |user| Box::pin(lives::a_mode_changes(user))),
    ("conditions tell whether gateways forward for a Service", |user| Box::pin(lives::conditions_follow_the_gateways(user))),
    ("conditions and an Event tell why a Service is not served", |user| Box::pin(lives::a_refusal_says_why(user))),
    ("a new Service whose slice comes a moment later raises no alarm", |user| {
        Box::pin(told::a_new_service_raises_no_alarm(user))
    }),
    ("what a Service lacks to have backends is told apart", |user| Box::pin(told::what_is_lacking_is_told_apart(user))),
    ("each port stands in the status, one that is not served with an error", |user| {
        Box::pin(told::every_port_stands_in_the_status(user))
    }),
    ("a refusal is told before what is routine", |user| Box::pin(told::a_refusal_overtakes_routine(user))),
    ("a typing error cuts no traffic", |user| Box::pin(told::a_typing_error_cuts_no_traffic(user))),
    ("an outage of the API server withdraws nothing, and what changed meanwhile arrives", |user| {
        Box::pin(lives::the_api_server_is_away(user))
    }),
    ("a controller that starts during an outage serves once it is over", |user| {
        Box::pin(lives::a_controller_starts_during_an_outage(user))
    }),
    ("Services of others are left alone", |user| Box::pin(ownership::services_of_others_are_left_alone(user))),
    ("Services without class are left alone until they are claimed", |user| {
        Box::pin(ownership::classless_services_are_claimed(user))
    }),
    ("a Service that another controller gave its address is taken over with it", |user| {
        Box::pin(moving::an_address_of_another_controller_is_kept(user))
    }),
    ("the endpoints of a deleted EndpointSlice count for two seconds more", |user| {
        Box::pin(services::a_deleted_slice_counts_on(user))
    }),
    ("externalIPs are served where they are allowed", |user| {
        Box::pin(services::external_ips_are_served_where_they_are_allowed(user))
    }),
    ("one port number is served on three protocols", |user| Box::pin(services::one_number_on_three_protocols(user))),
    ("a controller that starts anew renumbers nobody", |user| Box::pin(addresses::a_new_controller_renumbers_nobody(user))),
    ("a Service gets the address that it asks for", |user| Box::pin(addresses::an_address_is_asked_for(user))),
    ("an AddressPool gives its addresses and says how many are left, and deleting it withdraws nothing", |user| {
        Box::pin(addresses::a_pool_gives_and_tells(user))
    }),
    ("of two that ask for one address the older one has it", |user| Box::pin(addresses::the_older_claim_wins(user))),
    ("a Service that finds its pool exhausted is told so, and served once there is room", |user| {
        Box::pin(addresses::an_exhausted_pool_grows(user))
    }),
    ("an edited or deleted pool renumbers nobody", |user| Box::pin(addresses::a_pool_edit_renumbers_nobody(user))),
    ("an address that somebody else wrote into a status is not taken over from where it does not belong", |user| {
        Box::pin(addresses::a_foreign_address_is_not_taken_over(user))
    }),
    ("the address of a Service that is being deleted is given to nobody before it is gone", |user| {
        Box::pin(addresses::an_address_is_held_until_its_service_is_gone(user))
    }),
    ("an address that was given up is given to the next one when nothing else is free", |user| {
        Box::pin(addresses::a_reserved_address_is_used(user))
    }),
    ("a new controller keeps table sizes and reserved addresses", |user| {
        Box::pin(addresses::a_new_controller_keeps_what_was_decided(user))
    }),
    ("Services of one sharing key have one address as long as their ports differ", |user| {
        Box::pin(addresses::an_address_is_shared(user))
    }),
];

/// Runs a scenario to its end, and removes what it made outside of its namespace. False when it failed.
async fn holds(sentence: &str, scenario: Scenario, user: &User) -> bool {
    let start = Instant::now();
    let result = AssertUnwindSafe(scenario(user)).catch_unwind().await;
    user.clean_up().await;
    let verdict = if result.is_ok() { "ok" } else { "FAILED" };
    println!("scenario: {sentence}: {verdict} ({:.1} s)", start.elapsed().as_secs_f32());
    result.is_ok()
}

/// As on a real cluster: one after another, beside an installation with pools and Services of its own, which stays as it is.
#[tokio::test]
async fn every_scenario_holds_on_the_test_server_beside_what_a_cluster_has() {
    let server = ApiServer::start().await;
    let before = clusters::in_production(&server);
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    server.write_kubeconfig(kubeconfig.path());
    let mut failed = Vec::new();
    for (sentence, scenario) in SCENARIOS {
        let act = async |user: &User| holds(sentence, *scenario, user).await;
        if !clusters::in_own_namespace(kubeconfig.path(), act).await {
            failed.push((*sentence).to_owned());
        }
        let touched = clusters::touched(&server, &before);
        if !touched.is_empty() {
            failed.push(format!("{sentence}: it left behind, changed or told {touched:?}"));
            break;
        }
    }
    assert!(failed.is_empty(), "failed: {failed:#?}");
}

#[tokio::test]
async fn every_scenario_holds_on_a_real_cluster() {
    let Some(kubeconfig) = clusters::real() else {
        let sentences: Vec<_> = SCENARIOS.iter().map(|(sentence, _)| *sentence).collect();
        let what = format!("{} scenarios on a real cluster ({})", sentences.len(), sentences.join("; "));
        skip(&what, "`make e2e-k8s KUBECONFIG=...` names one");
        return;
    };
    let mut failed = Vec::new();
    clusters::with_kinds(&kubeconfig, async || {
        for (sentence, scenario) in SCENARIOS {
            let is_held = clusters::in_own_namespace(&kubeconfig, async |user| holds(sentence, *scenario, user).await).await;
            if !is_held {
                failed.push(sentence);
            }
        }
    })
    .await;
    assert!(failed.is_empty(), "failed: {failed:#?}");
}
