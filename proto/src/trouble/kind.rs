//! Kinds of trouble: how bad each is, after how long it counts, and what to do.
//!
//! Invariant: a kind has one row in [`TABLE`], at its place in the declaration.

/// How bad a trouble is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Packets of clients are lost, or soon will be.
    Critical,
    /// Something works less well than it should, or will stop to.
    Warning,
    /// It is as an operator wants it, and easily forgotten.
    Notice,
}

impl Severity {
    /// All of them, the worst first.
    pub const ALL: [Self; 3] = [Self::Critical, Self::Warning, Self::Notice];

    /// The severity as a word.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Critical => "critical",
            Self::Warning => "warning",
            Self::Notice => "notice",
        }
    }
}

/// What is the trouble; in the order of what it does to clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "the table says what each means")]
pub enum Kind {
    NotReady,
    StateExpired,
    WorkerStalled,
    PortDown,
    ControllerStarting,
    NoGateway,
    GatewayAway,
    GatewaySilent,
    GatewayNotReady,
    VipUnowned,
    VipOwnedTwice,
    VipDuplicate,
    NoHealthyBackend,
    FailOpen,
    NotServed,
    SnatExhausted,
    FlowTableFull,
    CertificateUnusable,
    CertificateExpired,
    NoEndpoints,
    SomeUnhealthy,
    BackendFlaps,
    Limited,
    NotAsAsked,
    FlowTableNearlyFull,
    WorkerBusy,
    PacketsMissed,
    Drops,
    TargetsScarce,
    SessionDown,
    Unfit,
    ElectionRestarts,
    PartnerBehind,
    ControllerAway,
    GatewayBehind,
    VersionDiffers,
    PoolConflict,
    PoolUnannounced,
    CertificateExpires,
    ReloadFailed,
    RestartNeeded,
    TaskFails,
    PoolExhausted,
    Drained,
}

/// What is known of a kind.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    /// The kind.
    pub kind: Kind,
    /// The kind as a word.
    pub word: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// It is a trouble once it has lasted for so long, in seconds: what passes by itself at a start or a takeover is none.
    pub grace_s: u64,
    /// What to do.
    pub remedy: &'static str,
}

impl Kind {
    /// What is known of it.
    #[must_use]
    pub const fn facts(self) -> &'static Facts {
        &TABLE[self as usize]
    }

    /// Facts of all kinds, the worst first.
    #[must_use]
    pub const fn table() -> &'static [Facts] {
        &TABLE
    }
}

const fn critical(kind: Kind, word: &'static str, grace_s: u64, remedy: &'static str) -> Facts {
    Facts { kind, word, severity: Severity::Critical, grace_s, remedy }
}

const fn warning(kind: Kind, word: &'static str, grace_s: u64, remedy: &'static str) -> Facts {
    Facts { kind, word, severity: Severity::Warning, grace_s, remedy }
}

const fn notice(kind: Kind, word: &'static str, grace_s: u64, remedy: &'static str) -> Facts {
    Facts { kind, word, severity: Severity::Notice, grace_s, remedy }
}

static TABLE: [Facts; 44] = [
    critical(
        Kind::NotReady,
        "not-ready",
        0,
        "the gateway forwards nothing yet; its log says what it waits for: manifests, API server or controller",
    ),
    critical(
        Kind::StateExpired,
        "state-expired",
        0,
        "bring the controller back: endpoints of a state older than `maxStateAge` are not used",
    ),
    critical(
        Kind::WorkerStalled,
        "worker-stalled",
        0,
        "its core is taken from it or the driver hangs; runbook SluiceWorkerStalled",
    ),
    critical(
        Kind::PortDown,
        "port-down",
        0,
        "cable, switch port, `ip link` of the twin; `sluicectl ports`; runbook SluicePortDown",
    ),
    critical(
        Kind::ControllerStarting,
        "controller-starting",
        0,
        "ask again in a moment; if it stays, the log of the controller says which objects it cannot read",
    ),
    critical(
        Kind::NoGateway,
        "no-gateway",
        5,
        "`systemctl status sluiced` on the gateways: do they run, and dial this controller? Their log has the reason",
    ),
    critical(
        Kind::GatewayAway,
        "gateway-away",
        5,
        "`systemctl status sluiced` there; drain a gateway that is away for good: `sluicectl drain gateway/NAME`",
    ),
    critical(Kind::GatewaySilent, "gateway-silent", 5, "ask it there: `sluicectl status`; its log says what it does"),
    critical(Kind::GatewayNotReady, "gateway-not-ready", 5, "ask it there: `sluicectl status`; its log says what it waits for"),
    critical(
        Kind::VipUnowned,
        "vip-unowned",
        5,
        "`sluicectl vips`, `sluicectl gateways`: no gateway answers for it; runbook SluiceVipsWithoutOwner",
    ),
    critical(
        Kind::VipOwnedTwice,
        "vip-owned-twice",
        5,
        "gateways do not hear each other, or share a link without `election`; runbook SluiceGatewaysApart",
    ),
    critical(
        Kind::VipDuplicate,
        "vip-duplicate",
        5,
        "find the station with this Ethernet address and take the VIP off it; runbook SluiceDuplicateVip",
    ),
    critical(
        Kind::NoHealthyBackend,
        "no-healthy-backend",
        0,
        "`sluicectl backends` has what each probe found; are the Pods ready, does the health check fit?",
    ),
    critical(
        Kind::FailOpen,
        "fail-open",
        0,
        "all probes fail, so traffic goes to all (`failOpen`); `sluicectl backends`: is the check wrong, or are the Pods down?",
    ),
    critical(
        Kind::NotServed,
        "not-served",
        3,
        "change the Service or the configuration as the cause says; `kubectl describe service` has the Event",
    ),
    critical(Kind::SnatExhausted, "snat-exhausted", 0, "add an address to `snat.addresses`; runbook SluiceSnatPortsExhausted"),
    critical(
        Kind::FlowTableFull,
        "flow-table-full",
        0,
        "raise `flows.maxPerWorker` or shorten timeouts; runbook SluiceFlowTableNearlyFull",
    ),
    critical(
        Kind::CertificateUnusable,
        "certificate-unusable",
        0,
        "`sluiced check` or `sluice-controller check` says what is wrong with the files",
    ),
    critical(
        Kind::CertificateExpired,
        "certificate-expired",
        0,
        "renew it; files are read again for each connection; runbook SluiceCertificateExpires",
    ),
    warning(Kind::NoEndpoints, "no-endpoints", 3, "does the selector match Pods, are they ready? `kubectl get endpointslices`"),
    warning(
        Kind::SomeUnhealthy,
        "some-unhealthy",
        0,
        "`sluicectl backends` has what each probe found; `sluicectl drain ADDRESS` takes one out on purpose",
    ),
    warning(
        Kind::BackendFlaps,
        "backend-flaps",
        0,
        "its load or its timeout is at the limit: raise `health-check-timeout` or `-fall`, or give the Pod more",
    ),
    warning(
        Kind::Limited,
        "limited",
        0,
        "`sluicectl flows --service NAME` shows who uses it up; runbooks SluiceShareReached, SluiceSnatPortsShort",
    ),
    warning(Kind::NotAsAsked, "not-as-asked", 3, "the Service is served otherwise than it asks for; change it as the cause says"),
    warning(
        Kind::FlowTableNearlyFull,
        "flow-table-nearly-full",
        0,
        "`sluicectl top` shows which Service grows; runbook SluiceFlowTableNearlyFull",
    ),
    warning(Kind::WorkerBusy, "worker-busy", 30, "more workers, or another gateway; runbook SluiceWorkerBusy"),
    warning(
        Kind::PacketsMissed,
        "packets-missed",
        0,
        "workers do not empty the receive queue in time; runbook SluicePacketsMissed",
    ),
    warning(Kind::Drops, "drops", 0, "`sluicectl drops`, and the reason in docs/reference/drop-reasons.md"),
    warning(Kind::TargetsScarce, "targets-scarce", 5, "raise `limits.targets`; runbook SluiceTargetsScarce"),
    warning(
        Kind::SessionDown,
        "session-down",
        10,
        "`birdc show protocols` or `vtysh -c 'show bgp summary'` there; runbook SluiceRoutingSessionDown",
    ),
    warning(Kind::Unfit, "unfit", 5, "others answer for its VIPs until the cause is gone; `sluicectl gateways -o json`"),
    warning(
        Kind::ElectionRestarts,
        "election-restarts",
        0,
        "the machine was stopped or overloaded, so others defended its VIPs; look for stolen cores and snapshots of the VM",
    ),
    warning(
        Kind::PartnerBehind,
        "partner-behind",
        30,
        "connections break if this gateway fails now; runbook SluicePartnerBehind",
    ),
    warning(
        Kind::ControllerAway,
        "controller-away",
        10,
        "the gateway forwards by its last state; runbook SluiceControllerDisconnected",
    ),
    warning(
        Kind::GatewayBehind,
        "gateway-behind",
        10,
        "its log says why it does not apply the newest state; runbook SluiceNetworkProgrammingSlow",
    ),
    warning(
        Kind::VersionDiffers,
        "version-differs",
        0,
        "its own troubles are not listed here: ask it there, `sluicectl status`; give all the same version",
    ),
    warning(Kind::PoolConflict, "pool-conflict", 5, "change the addresses of one of the pools; until then this one is not used"),
    warning(
        Kind::PoolUnannounced,
        "pool-unannounced",
        5,
        "give the port an address in the prefix of the pool, or announce the pool as `routed`",
    ),
    warning(
        Kind::CertificateExpires,
        "certificate-expires",
        0,
        "renew it; files are read again for each connection; runbook SluiceCertificateExpires",
    ),
    warning(
        Kind::ReloadFailed,
        "reload-failed",
        0,
        "`sluiced check` names every error of the file; the next start fails by it, too",
    ),
    warning(
        Kind::RestartNeeded,
        "restart-needed",
        0,
        "restart sluiced (`systemctl restart sluiced` keeps flows), or put the keys back",
    ),
    warning(Kind::TaskFails, "task-fails", 0, "the log has each failure; workers go on; runbook SluiceTaskRestarts"),
    notice(
        Kind::PoolExhausted,
        "pool-exhausted",
        5,
        "add addresses before the next Service asks for one; runbook SluicePoolExhausted",
    ),
    notice(Kind::Drained, "drained", 0, "`sluicectl undrain gateway/NAME`, if it is to come back"),
];
