//! The API server of a kubeconfig: whether it answers, and whether it grants what a controller does
//! (SelfSubjectAccessReview, which every authenticated user may ask).

use std::error::Error as StdError;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::Api;
use kube::api::PostParams;
use tokio::time::{Instant, timeout_at};

use super::finding::{Finding, Level};
use crate::config::settings::{Certificates, ControllerSettings};
use crate::kubernetes::{self, ApiError, Cluster, ConnectError};
use crate::store::checkpoints::CONFIG_MAPS;
use crate::store::overrides::CONFIG_MAP;

const KEY: &str = "kubernetes.kubeconfig";
/// Longest time that the plugin of a kubeconfig and the API server are waited for. A connection takes 5 s at most.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(8);
/// The user whom an API server sees behind a request without credentials.
const ANONYMOUS: &str = "system:anonymous";

/// A right in the terms of RBAC.
#[derive(Clone, Debug)]
struct Right {
    verb: &'static str,
    group: &'static str,
    /// With the subresource, such as `services/status`.
    resource: &'static str,
    /// The namespace and, unless the right is about all objects, the name; `None`: in the whole cluster.
    of: Option<(String, Option<String>)>,
}

/// The rights on the whole cluster, by API group.
const CLUSTER_RIGHTS: [(&str, &[&str], &[&str]); 7] = [
    ("", &["services", "nodes", "namespaces"], &["list", "watch"]),
    ("", &["services/status"], &["patch"]),
    ("discovery.k8s.io", &["endpointslices"], &["list", "watch"]),
    ("sluice.dev", &["addresspools"], &["list", "watch"]),
    ("sluice.dev", &["edgegateways"], &["list", "watch", "create", "delete"]),
    ("sluice.dev", &["addresspools/status", "edgegateways/status"], &["patch"]),
    ("events.k8s.io", &["events"], &["create", "patch"]),
];

/// All rights that a controller with these settings needs: those of deploy/rbac.yaml.
fn rights(settings: &ControllerSettings, namespace: &str) -> Vec<Right> {
    let everywhere = CLUSTER_RIGHTS.iter().flat_map(|(group, resources, verbs)| {
        let right = |resource, verb| Right { verb, group, resource, of: None };
        resources.iter().flat_map(move |resource| verbs.iter().map(move |verb| right(*resource, *verb)))
    });
    let own = |verb, group, resource, name: Option<&str>| {
        let of = Some((namespace.to_owned(), name.map(str::to_owned)));
        Right { verb, group, resource, of }
    };
    let lease = format!("sluice-controller-{}", settings.group);
    let mut own_rights = vec![own("create", "coordination.k8s.io", "leases", None), own("create", "", "configmaps", None)];
    own_rights.extend(["get", "update"].map(|verb| own(verb, "coordination.k8s.io", "leases", Some(&lease))));
    for name in CONFIG_MAPS.iter().chain([&CONFIG_MAP]) {
        own_rights.extend(["get", "patch"].map(|verb| own(verb, "", "configmaps", Some(name))));
    }
    if let Some(Certificates::Secret(name)) = settings.listen.tcp.as_ref().map(|tcp| &tcp.certificates) {
        own_rights.push(own("get", "", "secrets", Some(name)));
    }
    everywhere.chain(own_rights).collect()
}

/// Why something cannot be seen from a machine.
const NOT_HERE: &str = "not checked on this machine";

/// A plugin (`exec`) that the kubeconfig names runs meanwhile, in a thread that nobody can end.
pub(super) async fn examine(file: &Path, namespace: Option<&str>, settings: &ControllerSettings) -> Vec<Finding> {
    vec![examine_within(ANSWER_TIMEOUT, file, namespace, settings).await]
}

async fn examine_within(limit: Duration, file: &Path, namespace: Option<&str>, settings: &ControllerSettings) -> Finding {
    if let Err(error) = fs::File::open(file) {
        return Finding::new(Level::Unseen, KEY, format!("{}: {error}; {NOT_HERE}", file.display()));
    }
    let deadline = Instant::now() + limit;
    let mut cluster = match timeout_at(deadline, kubernetes::connect(Some(file))).await {
        Ok(Ok(cluster)) => cluster,
        Ok(Err(error)) => return of_connect(&error),
        Err(_) => {
            let text =
                format!("{}: nothing was read within {limit:?}; does the plugin (`exec`) hang? {NOT_HERE}", file.display());
            return Finding::new(Level::Unseen, KEY, text);
        }
    };
    if let Some(namespace) = namespace {
        namespace.clone_into(&mut cluster.namespace);
    }
    let wanted = rights(settings, &cluster.namespace);
    let answers = try_join_all(wanted.iter().map(|right| is_granted(&cluster, right)));
    match timeout_at(deadline, answers).await {
        Err(_) => unreachable(&cluster.server, "it does not answer"),
        Ok(Err(error)) => of_request(&cluster.server, &error),
        Ok(Ok(granted)) => {
            let missing: Vec<_> = wanted.iter().zip(granted).filter(|(_, granted)| !granted).map(|(right, _)| right).collect();
            of_rights(&cluster, &missing)
        }
    }
}

/// A kubeconfig from which no client can be made. Files and programs of the gateway need not be on this machine.
fn of_connect(error: &ConnectError) -> Finding {
    let elsewhere = match error {
        ConnectError::Kubeconfig { cause, .. } => cause_of::<io::Error>(&**cause),
        ConnectError::Unusable { cause, .. } => cause_of::<io::Error>(&**cause),
        ConnectError::NoPod(_) => None,
    };
    match elsewhere.map(io::Error::kind) {
        Some(ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Finding::new(Level::Unseen, KEY, format!("{error}; {NOT_HERE}"))
        }
        _ => Finding::new(Level::Fault, KEY, error.to_string()),
    }
}

/// A question that got no answer. Only a server that cannot be reached now is no fault.
fn of_request(server: &str, error: &kube::Error) -> Finding {
    let fault = |why: String| Finding::new(Level::Fault, KEY, format!("{server}: {why}"));
    if let Some(error) = cause_of::<rustls::Error>(error) {
        return fault(format!(
            "TLS fails ({error}); correct the address, `certificate-authority` or the client certificate in the kubeconfig"
        ));
    }
    match ApiError::from(error) {
        ApiError::Forbidden(message) if message.contains(ANONYMOUS) => {
            fault(format!("the kubeconfig has no credentials that it accepts (403: {message}); give it a token or certificate"))
        }
        ApiError::Forbidden(message) => {
            let text = format!(
                "{server} does not say which rights it grants (403: {message}); rights are not checked: bind ClusterRole \
                 system:basic-user to system:authenticated, or ask by `kubectl auth can-i --as`"
            );
            Finding::new(Level::Warning, KEY, text)
        }
        error @ (ApiError::Busy { .. } | ApiError::Unreachable(_)) => unreachable(server, &error.to_string()),
        error => fault(error.to_string()),
    }
}

/// The innermost errors of `io::Error` are not among its sources, so that these are looked into, too.
fn cause_of<'a, T: StdError + 'static>(error: &'a (dyn StdError + 'static)) -> Option<&'a T> {
    let inner = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
    let inner = inner.and_then(|inner| cause_of::<T>(inner));
    error.downcast_ref::<T>().or(inner).or_else(|| error.source().and_then(cause_of::<T>))
}

fn unreachable(server: &str, why: &str) -> Finding {
    Finding::new(Level::Unseen, KEY, format!("{server} cannot be asked from this machine: {why}; rights are not checked"))
}

/// The finding about the rights that are missing.
fn of_rights(cluster: &Cluster, missing: &[&Right]) -> Finding {
    if missing.is_empty() {
        return Finding::new(Level::Ok, KEY, format!("{} answers and grants all rights", cluster.server));
    }
    let text = |right: &&Right| match &right.of {
        None => format!("{} {}", right.verb, right.resource),
        Some((namespace, None)) => format!("{} {} in {namespace}", right.verb, right.resource),
        Some((namespace, Some(name))) => format!("{} {} {namespace}/{name}", right.verb, right.resource),
    };
    let list = missing.iter().map(text).collect::<Vec<_>>().join(", ");
    let text =
        format!("{} does not grant: {list}; apply deploy/rbac.yaml, or correct the user of the kubeconfig", cluster.server);
    Finding::new(Level::Fault, KEY, text)
}

async fn is_granted(cluster: &Cluster, right: &Right) -> Result<bool, kube::Error> {
    let (resource, subresource) = match right.resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (right.resource, None),
    };
    let (namespace, name) = match &right.of {
        Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
        None => (None, None),
    };
    let attributes = ResourceAttributes {
        verb: Some(right.verb.to_owned()),
        group: Some(right.group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        namespace,
        name,
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..SelfSubjectAccessReviewSpec::default() };
    let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
    let answer = Api::all(cluster.client.clone()).create(&PostParams::default(), &review).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use kube::core::Status;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;

    use super::*;
    use crate::config::controller::ControllerFile;
    use crate::gateways::tls::acceptance;
    use crate::gateways::tls::tests::Authority;

    /// A kubeconfig in a directory, and settings that name it.
    struct Lab {
        dir: tempfile::TempDir,
        settings: ControllerSettings,
    }

    impl Lab {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let config = dir.path().join("controller.yaml");
            fs::write(&config, "kubernetes: {kubeconfig: kubeconfig}\n").unwrap();
            Self { settings: ControllerFile::read(&config).unwrap().settings, dir }
        }

        async fn examine(&self, limit: Duration, text: Option<&str>) -> Finding {
            let file = self.dir.path().join("kubeconfig");
            if let Some(text) = text {
                fs::write(&file, text).unwrap();
            }
            examine_within(limit, &file, None, &self.settings).await
        }
    }

    fn kubeconfig(cluster: &str, user: &str) -> String {
        format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: a\nclusters: [{{name: a, cluster: {{{cluster}}}}}]\n\
             contexts: [{{name: a, context: {{cluster: a, user: a}}}}]\nusers: [{{name: a, user: {{{user}}}}}]\n"
        )
    }

    fn plugin(command: &str) -> String {
        let fields = "apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never";
        kubeconfig("server: 'http://127.0.0.1:9'", &format!("exec: {{{fields}, command: {command}}}"))
    }

    #[tokio::test]
    async fn what_is_not_on_this_machine_or_unreachable_is_no_fault_and_a_broken_kubeconfig_is() {
        let lab = Lab::new();
        // Port 9 of this machine, where nobody listens.
        let server = "server: 'http://127.0.0.1:9'";
        let rows = [
            (None, Level::Unseen, "not checked on this machine"),
            (Some(kubeconfig(server, "token: t")), Level::Unseen, "http://127.0.0.1:9/ cannot be asked from this machine"),
            (Some("clusters: [".to_owned()), Level::Fault, "expected a readable kubeconfig"),
            (
                Some(kubeconfig("server: 'https://127.0.0.1:9', certificate-authority: none.pem", "token: t")),
                Level::Unseen,
                "none.pem",
            ),
            (
                Some(kubeconfig("server: 'https://127.0.0.1:9'", "client-certificate: no.crt, client-key: no.key")),
                Level::Unseen,
                "no.",
            ),
            (Some(kubeconfig(server, "tokenFile: no-token")), Level::Unseen, "no-token"),
            (Some(plugin("./no-plugin")), Level::Unseen, "not checked on this machine"),
            (Some(plugin("'false'")), Level::Fault, "failed with status"),
        ];
        for (text, level, expected) in rows {
            let found = lab.examine(Duration::from_secs(60), text.as_deref()).await;
            assert!(found.level == level && found.text.contains(expected), "{expected}: {found}");
        }
    }

    #[test]
    fn a_plugin_that_hangs_is_waited_for_no_longer_than_the_server() {
        let lab = Lab::new();
        let text = plugin("sleep, args: ['5']");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let found = runtime.block_on(lab.examine(Duration::from_millis(100), Some(&text)));
        runtime.shutdown_background();
        assert!(found.level == Level::Unseen && found.text.contains("does the plugin (`exec`) hang?"), "{found}");
    }

    #[tokio::test]
    async fn a_server_of_another_authority_is_a_fault() {
        let (lab, theirs, ours) = (Lab::new(), Authority::new(), Authority::new());
        let material = theirs.issue(&["sluice://east/controller"]);
        let acceptor = TlsAcceptor::from(acceptance(&material, "east").unwrap().config);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(acceptor.accept(stream));
            }
        });
        fs::write(lab.dir.path().join("ca.pem"), ours.issue(&["sluice://east/edge-1"]).ca).unwrap();
        let text = kubeconfig(&format!("server: 'https://{address}', certificate-authority: ca.pem"), "token: t");
        let found = lab.examine(Duration::from_secs(60), Some(&text)).await;
        assert!(found.level == Level::Fault && found.text.contains("TLS fails (invalid peer certificate"), "{found}");
    }

    #[test]
    fn an_answer_of_another_kind_than_the_expected_one_has_its_level_and_text() {
        let rows = [
            (401, "", Level::Fault, "does not accept our credentials"),
            (403, "User \"a\" cannot create", Level::Warning, "does not say which rights it grants"),
            (403, "User \"system:anonymous\" cannot create", Level::Fault, "no credentials"),
            (404, "", Level::Fault, "answered 404"),
            (503, "", Level::Unseen, "busy or starting"),
        ];
        for (code, message, level, expected) in rows {
            let error = kube::Error::Api(Box::new(Status::failure(message, "").with_code(code)));
            let found = of_request("https://a", &error);
            assert!(found.level == level && found.text.contains(expected), "{expected}: {found}");
        }
    }
}
