//! Filters of lists: rows of a Service, of a namespace, of a gateway, or with a reason.
//!
//! Invariant: where no row matches because nothing has the name, the answer is an error that says what there is, the most
//! similar names first. A list without rows of something that exists is no error.

use std::collections::BTreeSet;

use objects::spelling::most_similar;
use objects::text::listed;
use proto::v1;
use proto::v1::admin_client::AdminClient;
use tonic::Status;
use tonic::transport::Channel;

use crate::args::Selection;

/// Names that an error lists.
const NAMES_MAX: usize = 10;

/// What filters know of a row.
#[derive(Clone, Debug, Default)]
pub(crate) struct RowSubject {
    /// The Services that it is about, `NAMESPACE/NAME`.
    pub(crate) services: Vec<String>,
    /// The gateways that it is of.
    pub(crate) gateways: Vec<String>,
    /// Its reason; empty: none.
    pub(crate) reason: String,
}

impl Selection {
    /// Whether all rows are wanted.
    pub(crate) fn is_all(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a row is wanted.
    pub(crate) fn has(&self, RowSubject { services, gateways, reason }: &RowSubject) -> bool {
        let by_service = self.service.is_none() && self.namespace.is_none() || services.iter().any(|name| self.has_service(name));
        by_service
            && self.gateway.as_ref().is_none_or(|wanted| gateways.contains(wanted))
            && self.reason.as_ref().is_none_or(|wanted| wanted == reason)
    }

    fn has_service(&self, service: &str) -> bool {
        let (namespace, name) = service.split_once('/').unwrap_or(("", service));
        self.service.as_ref().is_none_or(|wanted| wanted == service || wanted == name)
            && self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
    }

    /// Checks that what is wanted exists, where no row is left. `reasons`: those of all rows, if every reason has a row.
    ///
    /// # Errors
    /// `NOT_FOUND` with the names that there are; or a list cannot be fetched.
    pub(crate) async fn expect_known(&self, client: &mut AdminClient<Channel>, reasons: &BTreeSet<String>) -> Result<(), Status> {
        if self.service.is_some() || self.namespace.is_some() {
            let services = client.list_services(v1::ListServicesRequest::default()).await?.into_inner().services;
            let names: BTreeSet<_> = services.iter().map(|one| format!("{}/{}", one.namespace, one.name)).collect();
            let spaces: BTreeSet<_> = services.into_iter().map(|one| one.namespace).collect();
            let of_space: BTreeSet<String> = match &self.namespace {
                Some(space) if spaces.contains(space) => {
                    names.into_iter().filter(|name| name.starts_with(&format!("{space}/"))).collect()
                }
                Some(space) => return Err(unknown("namespace with a Service", space, &spaces)),
                None => names,
            };
            if let Some(service) = self.service.as_ref().filter(|_| !of_space.iter().any(|name| self.has_service(name))) {
                return Err(unknown("Service", service, &of_space));
            }
        }
        if let Some(gateway) = &self.gateway {
            let own = client.get_status(v1::GetStatusRequest {}).await?.into_inner().gateway;
            let names: BTreeSet<String> = if own.is_empty() {
                let gateways = client.list_gateways(v1::ListGatewaysRequest {}).await?.into_inner().gateways;
                gateways.into_iter().map(|gateway| gateway.name).collect()
            } else {
                // A gateway with an embedded controller knows the others, too.
                let others = client.list_gateways(v1::ListGatewaysRequest {}).await;
                let others = others.map(|answer| answer.into_inner().gateways).unwrap_or_default();
                others.into_iter().map(|gateway| gateway.name).chain([own]).collect()
            };
            if !names.contains(gateway) {
                return Err(unknown("gateway", gateway, &names));
            }
        }
        match &self.reason {
            Some(reason) if !reasons.is_empty() && !reasons.contains(reason) => {
                Err(unknown("row with the reason", reason, reasons))
            }
            _ => Ok(()),
        }
    }
}

fn unknown(kind: &str, found: &str, known: &BTreeSet<String>) -> Status {
    let names = most_similar(found, known.iter().map(String::as_str));
    Status::not_found(format!("no {kind} {found:?}; there are: {}", listed(names, NAMES_MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_must_match_all_that_is_given() {
        let text = |text: &str| Some(text.to_owned());
        let row = RowSubject {
            services: vec!["shop/web".to_owned(), "shop/api".to_owned()],
            gateways: vec!["edge-1".to_owned()],
            reason: "NoEndpoints".to_owned(),
        };
        let rows = [
            (Selection::default(), true),
            (Selection { service: text("web"), ..Default::default() }, true),
            (Selection { service: text("shop/api"), namespace: text("shop"), ..Default::default() }, true),
            (Selection { service: text("web"), namespace: text("default"), ..Default::default() }, false),
            (Selection { service: text("shop"), ..Default::default() }, false),
            (Selection { gateway: text("edge-1"), reason: text("NoEndpoints"), ..Default::default() }, true),
            (Selection { gateway: text("edge-2"), ..Default::default() }, false),
            (Selection { reason: text("Refused"), ..Default::default() }, false),
        ];
        for (selection, is_wanted) in rows {
            assert_eq!(selection.has(&row), is_wanted, "{selection:?}");
        }
        assert!(Selection::default().has(&RowSubject::default()));
        assert!(!Selection { namespace: text("shop"), ..Default::default() }.has(&RowSubject::default()));
    }

    #[test]
    fn the_most_similar_names_come_first_and_the_list_is_bounded() {
        let known: BTreeSet<String> =
            (0..300).map(|number| format!("shop/app-{number}")).chain(["shop/web".to_owned()]).collect();
        let message = unknown("Service", "shop/wbe", &known).message().to_owned();
        assert!(message.starts_with("no Service \"shop/wbe\"; there are: shop/web, "), "{message}");
        assert!(message.ends_with(" and 291 more"), "{message}");
    }
}
