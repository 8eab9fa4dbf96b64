//! The kinds of objects that the server stores, and how they differ.

/// A kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Service,
    EndpointSlice,
    Pod,
    Node,
    Namespace,
    ConfigMap,
    Secret,
    Lease,
    Event,
    CustomResourceDefinition,
    AddressPool,
    EdgeGateway,
}

/// Names and properties of a kind.
struct Properties {
    name: &'static str,
    plural: &'static str,
    group: &'static str,
    version: &'static str,
    is_namespaced: bool,
    has_status: bool,
    /// A PUT must contain the version that it replaces.
    needs_version: bool,
}

impl Kind {
    pub const ALL: [Self; 12] = [
        Self::Service,
        Self::EndpointSlice,
        Self::Pod,
        Self::Node,
        Self::Namespace,
        Self::ConfigMap,
        Self::Secret,
        Self::Lease,
        Self::Event,
        Self::CustomResourceDefinition,
        Self::AddressPool,
        Self::EdgeGateway,
    ];

    fn properties(self) -> Properties {
        let core = |name, plural, is_namespaced, has_status| Properties {
            name,
            plural,
            group: "",
            version: "v1",
            is_namespaced,
            has_status,
            needs_version: false,
        };
        let custom = |name, plural| Properties {
            name,
            plural,
            group: "sluice.dev",
            version: "v1beta1",
            is_namespaced: false,
            has_status: true,
            needs_version: true,
        };
        let extra = |name, plural, group, needs_version| Properties {
            name,
            plural,
            group,
            version: "v1",
            is_namespaced: true,
            has_status: false,
            needs_version,
        };
        match self {
            Self::Service => core("Service", "services", true, true),
            Self::Pod => core("Pod", "pods", true, true),
            Self::Node => core("Node", "nodes", false, true),
            Self::Namespace => core("Namespace", "namespaces", false, true),
            Self::ConfigMap => core("ConfigMap", "configmaps", true, false),
            Self::Secret => core("Secret", "secrets", true, false),
            Self::EndpointSlice => extra("EndpointSlice", "endpointslices", "discovery.k8s.io", false),
            Self::Lease => extra("Lease", "leases", "coordination.k8s.io", true),
            Self::Event => extra("Event", "events", "events.k8s.io", false),
            Self::CustomResourceDefinition => Properties {
                is_namespaced: false,
                has_status: true,
                ..extra("CustomResourceDefinition", "customresourcedefinitions", "apiextensions.k8s.io", true)
            },
            Self::AddressPool => custom("AddressPool", "addresspools"),
            Self::EdgeGateway => custom("EdgeGateway", "edgegateways"),
        }
    }

    pub fn name(self) -> &'static str {
        self.properties().name
    }

    pub fn plural(self) -> &'static str {
        self.properties().plural
    }

    pub fn group(self) -> &'static str {
        self.properties().group
    }

    pub fn api_version(self) -> String {
        let Properties { group, version, .. } = self.properties();
        if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
    }

    /// Prefix of the kind's paths.
    pub fn prefix(self) -> String {
        let root = if self.group().is_empty() { "/api/" } else { "/apis/" };
        format!("{root}{}/", self.api_version())
    }

    pub fn is_namespaced(self) -> bool {
        self.properties().is_namespaced
    }

    pub fn has_status(self) -> bool {
        self.properties().has_status
    }

    pub fn needs_version(self) -> bool {
        self.properties().needs_version
    }

    /// Whether a definition installs the kind, so that a server may not have it.
    pub fn is_custom(self) -> bool {
        self.group() == "sluice.dev"
    }

    /// Whether the object has `metadata.generation`.
    pub fn has_generation(self) -> bool {
        self.is_custom() || matches!(self, Self::EndpointSlice | Self::Pod)
    }
}
