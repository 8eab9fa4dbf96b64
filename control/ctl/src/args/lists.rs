//! Options of lists: the output, and filters of rows. A list has the filters that its rows can match.

use clap::{Args, ValueEnum};

/// Output options of a list.
#[derive(Clone, Debug, Args)]
pub struct ListArguments {
    /// Output format.
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value = "table")]
    pub output: Output,
    /// Keep watching: redraw the table once a second, or print each new or changed object.
    #[arg(long)]
    pub watch: bool,
}

/// Output formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// A table for people.
    Table,
    /// A table with more columns, where a list has more.
    Wide,
    /// One array; with --watch, one object a line.
    Json,
    /// One list; with --watch, one document per object.
    Yaml,
}

/// A filter by Service.
#[derive(Clone, Debug, Default, Args)]
pub struct ServiceFilter {
    /// Of this Service: NAMESPACE/NAME, or NAME.
    #[arg(long, value_name = "SERVICE")]
    pub service: Option<String>,
    /// Of Services in this namespace.
    #[arg(long, value_name = "NAMESPACE")]
    pub namespace: Option<String>,
}

/// A filter by gateway.
#[derive(Clone, Debug, Default, Args)]
pub struct GatewayFilter {
    /// Of this gateway. Default: of all gateways of a controller.
    #[arg(long, value_name = "GATEWAY")]
    pub gateway: Option<String>,
}

/// A filter by reason.
#[derive(Clone, Debug, Default, Args)]
pub struct ReasonFilter {
    /// With this reason, as the list shows it.
    #[arg(long, value_name = "REASON")]
    pub reason: Option<String>,
}

/// Options of `services`.
#[derive(Clone, Debug, Args)]
pub struct ServicesArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
    /// See there.
    #[command(flatten)]
    pub gateways: GatewayFilter,
    /// See there.
    #[command(flatten)]
    pub reasons: ReasonFilter,
}

/// Options of `frontends`, `backends` and `vips`.
#[derive(Clone, Debug, Args)]
pub struct OfServicesArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
    /// See there.
    #[command(flatten)]
    pub gateways: GatewayFilter,
}

/// Options of `ports` and `gateways`.
#[derive(Clone, Debug, Args)]
pub struct OfGatewaysArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub gateways: GatewayFilter,
}

/// Options of `drops`.
#[derive(Clone, Debug, Args)]
pub struct DropsArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub gateways: GatewayFilter,
    /// See there.
    #[command(flatten)]
    pub reasons: ReasonFilter,
}

/// Options of `events`.
#[derive(Clone, Debug, Args)]
pub struct EventsArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
    /// See there.
    #[command(flatten)]
    pub reasons: ReasonFilter,
}

/// Options of `overrides`.
#[derive(Clone, Debug, Args)]
pub struct OverridesArguments {
    /// Output options.
    #[command(flatten)]
    pub list: ListArguments,
    /// See there.
    #[command(flatten)]
    pub services: ServiceFilter,
}

/// The rows that are wanted; a row must match all that is given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selection {
    /// `NAMESPACE/NAME`, or `NAME`.
    pub(crate) service: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) gateway: Option<String>,
    pub(crate) reason: Option<String>,
}

/// The filters of a list.
pub(crate) trait Filters {
    /// The output options.
    fn list(&self) -> &ListArguments;
    /// The rows that are wanted.
    fn selection(&self) -> Selection;
}

impl From<&ServiceFilter> for Selection {
    fn from(ServiceFilter { service, namespace }: &ServiceFilter) -> Self {
        Self { service: service.clone(), namespace: namespace.clone(), ..Self::default() }
    }
}

impl Filters for ServicesArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        let (gateway, reason) = (self.gateways.gateway.clone(), self.reasons.reason.clone());
        Selection { gateway, reason, ..Selection::from(&self.services) }
    }
}

impl Filters for OfServicesArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        Selection { gateway: self.gateways.gateway.clone(), ..Selection::from(&self.services) }
    }
}

impl Filters for OfGatewaysArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        Selection { gateway: self.gateways.gateway.clone(), ..Selection::default() }
    }
}

impl Filters for DropsArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        let (gateway, reason) = (self.gateways.gateway.clone(), self.reasons.reason.clone());
        Selection { gateway, reason, ..Selection::default() }
    }
}

impl Filters for EventsArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        Selection { reason: self.reasons.reason.clone(), ..Selection::from(&self.services) }
    }
}

impl Filters for OverridesArguments {
    fn list(&self) -> &ListArguments {
        &self.list
    }

    fn selection(&self) -> Selection {
        Selection::from(&self.services)
    }
}

impl Filters for ListArguments {
    fn list(&self) -> &ListArguments {
        self
    }

    fn selection(&self) -> Selection {
        Selection::default()
    }
}
