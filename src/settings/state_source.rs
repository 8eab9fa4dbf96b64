//! The source of the gateway's state: one of `manifests`, `kubernetes.kubeconfig` and `controller.urls`, or the flag of
//! the same meaning.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use control::config::controller::{ControllerKeys, KEYS};
use control::config::listen::{take_files, take_url};
use control::config::settings::{CertificateFiles, ControllerSettings, MaglevSeed, Source};
use control::config::{Located, LocatedRange, Location, Section};
use control::gateways::listener::{KeyCertificates, ShownBy};
use objects::scalar::url::ServerUrl;
use proto::{Announce, GatewayProfile};

/// The source that the command line chooses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SourceChoice {
    /// None: the file names the source.
    #[default]
    File,
    /// `--manifests DIR`.
    Manifests(PathBuf),
    /// `--kubeconfig F`.
    Kubeconfig(PathBuf),
    /// `--controller URL`.
    Controller(ServerUrl),
    /// `replay --manifests DIR`: sources that the file names are ignored.
    Replay(PathBuf),
}

/// The source of the gateway's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateSource {
    /// A controller in this process. With certificates, the gateway also follows another controller that leads.
    Embedded(Box<ControllerSettings>, Option<CertificateFiles>),
    /// Controllers in the order in which they are tried, never empty; certificates if one is reached over TCP.
    Remote(Vec<ServerUrl>, Option<CertificateFiles>),
}

impl StateSource {
    /// The certificates with which the gateway dials controllers.
    pub(super) fn certificates(&self) -> Option<KeyCertificates> {
        let (Self::Embedded(_, files) | Self::Remote(_, files)) = self;
        Some(KeyCertificates { key: "controller.tls", shown_by: ShownBy::Client(files.clone()?) })
    }
}

/// The source as read.
pub(super) enum SourceKeys {
    Embedded(Box<ControllerKeys>, Source, Option<CertificateFiles>),
    /// The file names no source for a controller in this process, and `replay` only plans like one.
    Planned(Box<ControllerKeys>, Source, Option<CertificateFiles>),
    Remote(Vec<ServerUrl>, Option<CertificateFiles>),
}

/// Key `controller` as read.
struct RemoteKeys {
    urls: Option<Located<Vec<ServerUrl>>>,
    tls: Option<CertificateFiles>,
    tls_location: Location,
}

impl SourceKeys {
    /// Ranges of the pools; none if they are in the file of another controller.
    pub(super) fn ranges(&self) -> &[LocatedRange] {
        match self {
            Self::Embedded(keys, ..) | Self::Planned(keys, ..) => &keys.ranges,
            Self::Remote(..) => &[],
        }
    }

    /// The TCP address on which an embedded controller serves gateways.
    pub(super) fn listen(&self) -> Option<SocketAddr> {
        match self {
            Self::Embedded(keys, ..) => keys.settings.listen.tcp.as_ref().map(|tcp| tcp.address),
            Self::Planned(..) | Self::Remote(..) => None,
        }
    }

    /// The source of a gateway with this `state_dir` and this `profile`, which may share VIPs with others.
    pub(super) fn settings(self, profile: GatewayProfile, state_dir: &Path, shares_vips: bool) -> StateSource {
        let embedded = |keys: ControllerKeys, source: Source, tls| {
            let lock_dir = Some(state_dir.to_owned());
            // Of several gateways with manifests each has a controller of its own, which would draw a seed of its own. Routers
            // may spread the flows of routed pools over several.
            let is_routed = keys.settings.pools.iter().any(|pool| pool.announce == Announce::Routed);
            let may_share = matches!(source, Source::Manifests { .. }) && (shares_vips || is_routed);
            let maglev_seed = match keys.settings.maglev_seed {
                MaglevSeed::Kept if may_share => MaglevSeed::Public,
                seed => seed,
            };
            let settings = ControllerSettings { source, profile, maglev_seed, lock_dir, ..keys.settings };
            StateSource::Embedded(Box::new(settings), tls)
        };
        match self {
            Self::Embedded(keys, source, tls) | Self::Planned(keys, source, tls) => embedded(*keys, source, tls),
            Self::Remote(urls, tls) => StateSource::Remote(urls, tls),
        }
    }
}

/// Reads key `controller` and, if the controller is embedded, its keys.
pub(super) fn take(top: &mut Section<'_>, choice: &SourceChoice, admin_listen: &Path) -> SourceKeys {
    let RemoteKeys { urls, tls, tls_location } = take_controller(top);
    if matches!(choice, SourceChoice::Controller(_)) || (*choice == SourceChoice::File && urls.is_some()) {
        refuse_controller_keys(top);
        let urls = match choice {
            SourceChoice::Controller(url) => vec![url.clone()],
            _ => urls.map(|urls| urls.value).unwrap_or_default(),
        };
        if let (Some(url), None) = (urls.iter().find(|url| matches!(url, ServerUrl::Https(_))), &tls) {
            top.reader.problem(&tls_location, format!("missing, expected `ca`, `cert` and `key`, which {url} needs"));
        }
        return SourceKeys::Remote(urls, tls);
    }
    let keys = ControllerKeys::take(top);
    if urls.is_none() {
        check_socket(top, &keys, admin_listen);
    }
    if let Some(listen) = &keys.health_listen {
        let message = format!("found {}, which only sluice-controller serves in this version; leave it out", listen.value);
        top.reader.problem(&listen.location, message);
    }
    let source = choose(top, choice, &keys, urls.as_ref());
    let has_own_source = urls.is_none() && (keys.manifests.is_some() || keys.kubeconfig.is_some());
    if matches!(choice, SourceChoice::Replay(_)) && !has_own_source {
        return SourceKeys::Planned(Box::new(keys), source, tls);
    }
    SourceKeys::Embedded(Box::new(keys), source, tls)
}

/// The embedded controller serves this gateway on a unix socket of its own.
fn check_socket(top: &Section<'_>, keys: &ControllerKeys, admin_listen: &Path) {
    let listen = keys.settings.listen.unix.as_deref();
    if listen.is_none() {
        top.problem_of("listen", "found no unix socket, and this gateway's own connection needs one; add unix:PATH");
    }
    if listen == Some(admin_listen) {
        let message =
            format!("found {}, which is `admin.listen` too; give each its own", ServerUrl::Unix(admin_listen.to_owned()));
        top.problem_of("listen", message);
    }
}

fn take_controller(top: &mut Section<'_>) -> RemoteKeys {
    let base = top.reader.base();
    let mut section = top.section("controller");
    let mut files = section.section("tls");
    let tls = take_files(&mut files);
    files.finish();
    let field = section.field("urls").filter(|field| !field.is_empty());
    let tls_location = Location { line: section.location.line, key: "controller.tls".to_owned() };
    section.finish();
    let urls = field.map(|field| {
        let items = field.items("URLs");
        let value = items.iter().filter_map(|item| take_url(item, &base)).collect();
        Located { location: field.location, value }
    });
    RemoteKeys { urls, tls, tls_location }
}

/// Refuses the keys of a controller in a file that names a remote controller: they belong in that controller's file.
fn refuse_controller_keys(top: &mut Section<'_>) {
    for key in KEYS {
        let Some(field) = top.field(key) else { continue };
        let second = match key {
            "manifests" => Some(field.clone()),
            "kubernetes" if field.is_mapping() => field.section().field("kubeconfig").filter(|file| !file.is_empty()),
            _ => None,
        };
        match second {
            Some(source) => source.problem("found a second source beside `controller`; keep one of the two"),
            None => field.problem("belongs in the controller's own file, since `controller` is the source; move it there"),
        }
    }
}

fn choose(top: &Section<'_>, choice: &SourceChoice, keys: &ControllerKeys, urls: Option<&Located<Vec<ServerUrl>>>) -> Source {
    let manifests = |dir: &PathBuf| Source::Manifests { dir: dir.clone(), status_dir: keys.status_dir.clone() };
    let kubernetes = |file: &PathBuf| Source::Kubernetes { kubeconfig: Some(file.clone()), namespace: keys.namespace.clone() };
    // Every source that the file names, with its key.
    let named = [
        ("manifests", keys.manifests.as_ref().map(|located| (&located.location, manifests(&located.value)))),
        ("kubernetes.kubeconfig", keys.kubeconfig.as_ref().map(|located| (&located.location, kubernetes(&located.value)))),
        // Reached only with a flag for another source, so the value itself is never used.
        ("controller", urls.map(|located| (&located.location, Source::Kubernetes { kubeconfig: None, namespace: None }))),
    ];
    let mut named = named.into_iter().filter_map(|(key, source)| source.map(|(location, source)| (key, location, source)));
    let (flag, key, source) = match choice {
        SourceChoice::Replay(dir) => return manifests(dir),
        SourceChoice::Manifests(dir) => ("--manifests", "manifests", manifests(dir)),
        SourceChoice::Kubeconfig(file) => ("--kubeconfig", "kubernetes.kubeconfig", kubernetes(file)),
        SourceChoice::File | SourceChoice::Controller(_) => {
            let first = named.next();
            if let (Some((first, ..)), Some((_, location, _))) = (&first, named.next()) {
                top.reader.problem(location, format!("found a second source beside `{first}`; keep one of the two"));
            }
            return first.map_or_else(|| missing(top), |(_, _, source)| source);
        }
    };
    for (_, location, _) in named.filter(|(named, ..)| *named != key) {
        top.reader.problem(location, format!("found a second source beside the flag {flag}; leave one of the two out"));
    }
    source
}

fn missing(top: &Section<'_>) -> Source {
    let location = Location { line: 0, key: String::new() };
    let expected = "one of the keys `manifests`, `kubernetes.kubeconfig`, `controller.urls` or of the flags --manifests, --kubeconfig, --controller";
    // A source with a mistake is none yet, and its own message says enough.
    if !top.reader.has_problem_with(&["manifests", "kubernetes", "kubernetes.kubeconfig", "controller", "controller.urls"]) {
        top.reader.problem(&location, format!("found no source of Services, expected {expected}"));
    }
    Source::Kubernetes { kubeconfig: None, namespace: None }
}
