//! Who tells the gateway what to forward: one of `manifests`, `kubernetes.kubeconfig`, `controller.urls`, or the flag
//! of the same meaning.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use control::config::controller::{ControllerKeys, KEYS};
use control::config::listen::{take_files, take_url};
use control::config::settings::{CertificateFiles, Source};
use control::config::url::ControllerUrl;
use control::config::{Place, Placed, PlacedRange, Section};

use super::StateSource;

/// What the command line says about the source.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum SourceChoice {
    /// Nothing: the file says it.
    #[default]
    File,
    /// `--manifests DIR`.
    Manifests(PathBuf),
    /// `--kubeconfig F`.
    Kubeconfig(PathBuf),
    /// `--controller URL`.
    Controller(ControllerUrl),
    /// `replay --manifests DIR`: whatever source the file names is not asked.
    Replay(PathBuf),
}

/// The source as read.
pub(super) enum Chosen {
    Embedded(Box<ControllerKeys>, Source, Option<CertificateFiles>),
    Remote(Vec<ControllerUrl>, Option<CertificateFiles>),
}

impl Chosen {
    /// Ranges of the pools, where the pools are in this file.
    pub(super) fn ranges(&self) -> &[PlacedRange] {
        match self {
            Self::Embedded(keys, ..) => &keys.ranges,
            Self::Remote(..) => &[],
        }
    }

    /// The source of a gateway that keeps its state in `state_dir` and itself uses the `reserved` addresses.
    pub(super) fn settings(self, reserved: Vec<IpAddr>, state_dir: &Path) -> StateSource {
        match self {
            Self::Embedded(keys, source, tls) => {
                StateSource::Embedded(Box::new(keys.settings(source, reserved, Some(state_dir))), tls)
            }
            Self::Remote(urls, tls) => StateSource::Remote(urls, tls),
        }
    }
}

/// Takes key `controller` and, where the controller is embedded, its keys.
pub(super) fn take(top: &mut Section<'_>, choice: &SourceChoice, admin_listen: &Path) -> Chosen {
    let (urls, tls) = take_controller(top);
    if matches!(choice, SourceChoice::Controller(_)) || (*choice == SourceChoice::File && urls.is_some()) {
        refuse_controller_keys(top);
        let urls = match choice {
            SourceChoice::Controller(url) => vec![url.clone()],
            _ => urls.map(|urls| urls.value).unwrap_or_default(),
        };
        if let (Some(url), None) = (urls.iter().find(|url| matches!(url, ControllerUrl::Https { .. })), &tls) {
            let place = Place { line: top.place.line, key: "controller.tls".to_owned() };
            top.reader.problem(&place, format!("missing, expected `ca`, `cert` and `key`, which {url} needs"));
        }
        return Chosen::Remote(urls, tls);
    }
    let keys = ControllerKeys::take(top);
    if keys.listen.unix.is_none() {
        let place = Place { line: top.place.line, key: "listen".to_owned() };
        top.reader.problem(&place, "found no unix socket, and this gateway's own connection needs one; add unix:PATH");
    }
    if keys.listen.unix.as_deref() == Some(admin_listen) {
        let place = Place { line: top.place.line, key: "listen".to_owned() };
        top.reader
            .problem(&place, format!("found unix:{}, which is `admin.listen` too; give each its own", admin_listen.display()));
    }
    if let Some(listen) = &keys.health_listen {
        let message = format!("found {}, which only sluice-controller serves in this version; leave it out", listen.value);
        top.reader.problem(&listen.place, message);
    }
    let source = choose(top, choice, &keys, urls.as_ref());
    Chosen::Embedded(Box::new(keys), source, tls)
}

fn take_controller(top: &mut Section<'_>) -> (Option<Placed<Vec<ControllerUrl>>>, Option<CertificateFiles>) {
    let base = top.reader.base();
    let mut section = top.section("controller");
    let mut files = section.section("tls");
    let tls = take_files(&mut files);
    files.finish();
    let field = section.field("urls").filter(|field| !field.is_empty());
    section.finish();
    let urls = field.map(|field| {
        let items = field.items("URLs");
        let value = items.iter().filter_map(|item| take_url(item, &base)).collect();
        Placed { place: field.place, value }
    });
    (urls, tls)
}

/// With a remote controller its keys stand in its own file, and here they would be ignored.
fn refuse_controller_keys(top: &mut Section<'_>) {
    for key in KEYS {
        match (key, top.field(key)) {
            (_, None) => {}
            ("manifests" | "kubernetes", Some(field)) => {
                field.problem("found a second source beside `controller`; keep one of the two")
            }
            (_, Some(field)) => {
                field.problem("belongs in the controller's own file, since `controller` is the source; move it there")
            }
        }
    }
}

fn choose(top: &Section<'_>, choice: &SourceChoice, keys: &ControllerKeys, urls: Option<&Placed<Vec<ControllerUrl>>>) -> Source {
    let manifests = |dir: &PathBuf| Source::Manifests { dir: dir.clone(), status_dir: keys.status_dir.clone() };
    let kubernetes = |file: &PathBuf| Source::Kubernetes { kubeconfig: Some(file.clone()), namespace: keys.namespace.clone() };
    // Every source that the file names, with the key that names it.
    let named = [
        ("manifests", keys.manifests.as_ref().map(|placed| (&placed.place, manifests(&placed.value)))),
        ("kubernetes.kubeconfig", keys.kubeconfig.as_ref().map(|placed| (&placed.place, kubernetes(&placed.value)))),
        // Reached only with a flag for another source, so that the value itself never counts.
        ("controller", urls.map(|placed| (&placed.place, Source::Kubernetes { kubeconfig: None, namespace: None }))),
    ];
    let mut named = named.into_iter().filter_map(|(key, source)| source.map(|(place, source)| (key, place, source)));
    let (flag, key, source) = match choice {
        SourceChoice::Replay(dir) => return manifests(dir),
        SourceChoice::Manifests(dir) => ("--manifests", "manifests", manifests(dir)),
        SourceChoice::Kubeconfig(file) => ("--kubeconfig", "kubernetes.kubeconfig", kubernetes(file)),
        SourceChoice::File | SourceChoice::Controller(_) => {
            let first = named.next();
            if let (Some((first, ..)), Some((_, place, _))) = (&first, named.next()) {
                top.reader.problem(place, format!("found a second source beside `{first}`; keep one of the two"));
            }
            return first.map_or_else(|| missing(top), |(_, _, source)| source);
        }
    };
    for (_, place, _) in named.filter(|(named, ..)| *named != key) {
        top.reader.problem(place, format!("found a second source beside the flag {flag}; leave one of the two out"));
    }
    source
}

fn missing(top: &Section<'_>) -> Source {
    let place = Place { line: 0, key: String::new() };
    let expected = "one of the keys `manifests`, `kubernetes.kubeconfig`, `controller.urls` or of the flags --manifests, --kubeconfig, --controller";
    top.reader.problem(&place, format!("found no source of Services, expected {expected}"));
    Source::Kubernetes { kubeconfig: None, namespace: None }
}
