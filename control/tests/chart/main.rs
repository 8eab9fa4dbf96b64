//! deploy/: the Helm chart and the plain files contain the same objects, and both are valid.

#![allow(clippy::unwrap_used, clippy::panic)]

mod helm;
mod schema;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use control::config::controller::ControllerFile;
use helm::{documents_of, merge, read_yaml, render};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Service, ServiceAccount};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use objects::crd::AddressPool;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

fn deploy(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name)
}

fn rendered(values: &Value) -> Vec<Value> {
    render(&deploy("chart"), "sluice", "sluice-system", values).unwrap()
}

fn documents(file: &str) -> Vec<Value> {
    documents_of(&fs::read_to_string(deploy(file)).unwrap()).unwrap()
}

/// Objects by apiVersion, kind, namespace and name.
fn by_name(objects: Vec<Value>) -> BTreeMap<String, Value> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = |object: &Value| {
        let metadata = &object["metadata"];
        [&object["apiVersion"], &object["kind"], &metadata["namespace"], &metadata["name"]].map(text).join(" ")
    };
    objects.into_iter().map(|object| (name(&object), object)).collect()
}

fn find<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects.iter().filter(|object| object["kind"] == kind).collect()
}

/// Whether Helm creates the object only for a step, such as the deletion of the release.
fn is_hook(object: &Value) -> bool {
    object["metadata"]["annotations"]["helm.sh/hook"].is_string()
}

/// The controller's configuration in these objects, parsed as the controller does it.
fn configuration(objects: &[Value]) -> Result<ControllerFile, String> {
    let text = find(objects, "ConfigMap")[0]["data"]["controller.yaml"].as_str().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("controller.yaml");
    fs::write(&file, text).unwrap();
    ControllerFile::read(&file).map_err(|invalid| format!("{invalid}\n{text}"))
}

/// Values that change every line of the templates.
fn all_values_changed() -> Value {
    json!({
        "image": {"repository": "registry.example.com/sluice-controller", "tag": "0.2.0", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "replicas": 3,
        "class": "example.com/edge",
        "group": "east",
        "claimClassless": {"enabled": true, "namespaceSelector": {"matchLabels": {"edge": "yes"}}},
        "config": {"defaults": {"mode": "dsr"}, "clusterCIDRs": ["10.96.0.0/12"], "logs": {"format": "json"}, "health": {"fall": 7}},
        "pools": [
            {"name": "a", "spec": {"addresses": ["192.0.2.0/28"], "announce": "routed"}},
            {"name": "b", "spec": {"addresses": ["192.0.2.16-192.0.2.31"], "maxPerNamespace": 2}},
        ],
        "tls": {"secret": "certificates"},
        "service": {"nodePort": 31000},
        "metrics": {"serviceMonitor": true},
        "gateway": {
            "enabled": true,
            "image": {"repository": "registry.example.com/sluiced", "tag": "0.2.0", "pullPolicy": "Always"},
            "nodeSelector": {"edge": "yes"},
            "tolerations": [{"key": "edge", "operator": "Exists"}],
            "priorityClassName": "edge",
            "capabilities": ["NET_ADMIN", "NET_RAW", "SYS_ADMIN"],
            "routingDaemonSockets": "/run/frr",
            "resources": {"limits": {"hugepages-2Mi": "1Gi", "memory": "4Gi"}},
        },
        "hostNetwork": true,
        "advertise": "pod",
        "resources": {"limits": {"memory": "1Gi"}},
        "priorityClassName": "system-cluster-critical",
        "nodeSelector": {"node-role.kubernetes.io/control-plane": ""},
        "tolerations": [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists"}],
    })
}

#[test]
fn the_chart_with_default_values_equals_the_plain_files() {
    let mut objects = rendered(&json!({}));
    // Without Helm `sluice-controller uninstall` is called by hand.
    objects.retain(|object| !is_hook(object));
    for object in &mut objects {
        // This annotation restarts Pods when the configuration changes. With the plain file this is manual, as its
        // comment says.
        if let Some(metadata) = object.pointer_mut("/spec/template/metadata").and_then(Value::as_object_mut) {
            let sum = metadata.remove("annotations").unwrap()["sluice.dev/configuration"].as_str().unwrap().len();
            assert_eq!(sum, 64);
        }
        read_configuration(object);
    }
    let mut files: Vec<_> = documents("rbac.yaml").into_iter().chain(documents("controller.yaml")).collect();
    // `helm install --create-namespace` creates it.
    files.retain(|object| object["kind"] != "Namespace");
    files.iter_mut().for_each(read_configuration);
    let (objects, files) = (by_name(objects), by_name(files));
    assert_eq!(objects.keys().collect::<Vec<_>>(), files.keys().collect::<Vec<_>>());
    for (name, object) in &objects {
        assert_eq!(object, &files[name], "{name}");
    }
}

/// Parses the configuration text of an object, so that its content is compared and not its formatting.
fn read_configuration(object: &mut Value) {
    if let Some(text) = object.pointer_mut("/data/controller.yaml") {
        *text = serde_saphyr::from_str(text.as_str().unwrap()).unwrap();
    }
}

#[test]
fn every_value_reaches_its_field() {
    let objects = rendered(&all_values_changed());
    let deployment = find(&objects, "Deployment")[0];
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(deployment["spec"]["replicas"], 3);
    assert_eq!(pod["containers"][0]["image"], "registry.example.com/sluice-controller:0.2.0");
    assert_eq!(pod["containers"][0]["imagePullPolicy"], "Always");
    assert_eq!(pod["containers"][0]["resources"]["limits"]["memory"], "1Gi");
    assert_eq!((&pod["hostNetwork"], &pod["dnsPolicy"]), (&json!(true), &json!("ClusterFirstWithHostNet")));
    for key in ["imagePullSecrets", "priorityClassName", "nodeSelector", "tolerations"] {
        assert_eq!(pod[key], all_values_changed()[key], "{key}");
    }
    let rules = find(&objects, "Role")[0]["rules"].as_array().unwrap();
    let named = |resource: &str| {
        let names = rules.iter().filter(|rule| rule["resources"] == json!([resource])).map(|rule| rule["resourceNames"].clone());
        names.filter(|names| !names.is_null()).collect::<Vec<_>>()
    };
    assert_eq!(named("secrets"), [json!(["certificates"])]);
    assert_eq!(named("leases"), [json!(["sluice-controller-east"])]);
    assert_eq!(find(&objects, "Service")[0]["spec"]["ports"][0]["nodePort"], 31_000);
    let gateway = &find(&objects, "DaemonSet")[0]["spec"]["template"]["spec"];
    let of_daemon = |list: &Value| list.as_array().unwrap().iter().find(|one| one["name"] == "routing-daemon").cloned().unwrap();
    assert_eq!(of_daemon(&gateway["volumes"])["hostPath"]["path"], "/run/frr");
    assert_eq!(of_daemon(&gateway["containers"][0]["volumeMounts"])["mountPath"], "/run/frr");
    let file = configuration(&objects).unwrap();
    assert_eq!(file.health_listen, Some(([0, 0, 0, 0], 9440).into()), "in addition to the rest of `config.health`");
    let settings = file.settings;
    assert_eq!(settings.health.fall, 7);
    assert_eq!((settings.group.as_str(), settings.load_balancer_class.as_str()), ("east", "example.com/edge"));
    assert_eq!((settings.defaults.mode, settings.cluster_cidrs.len()), (proto::Mode::Dsr, 1));
    assert!(settings.ownership.classless.enabled, "{settings:?}");
    let pools: Vec<AddressPool> =
        find(&objects, "AddressPool").into_iter().map(|pool| serde_json::from_value(pool.clone()).unwrap()).collect();
    let names: Vec<_> = pools.iter().map(|pool| pool.metadata.name.as_deref().unwrap()).collect();
    assert_eq!((names, pools[1].spec.max_per_namespace), (vec!["a", "b"], Some(2)));
}

#[test]
fn a_changed_configuration_restarts_pods_and_another_release_has_other_names() {
    let sum = |values: &Value| find(&rendered(values), "Deployment")[0]["spec"]["template"]["metadata"]["annotations"].clone();
    assert_eq!(sum(&json!({})), sum(&json!({"replicas": 5})));
    assert_ne!(sum(&json!({})), sum(&json!({"config": {"defaults": {"mode": "dsr"}}})));
    let one = by_name(rendered(&json!({})));
    let other = by_name(render(&deploy("chart"), "east", "edge", &json!({})).unwrap());
    assert!(one.keys().all(|name| !other.contains_key(name)), "{:?}", other.keys());
    assert_eq!(one.len(), other.len());
}

#[test]
fn every_document_is_a_kubernetes_object() {
    let plain = ["rbac.yaml", "controller.yaml"].into_iter().flat_map(documents);
    let charts = [json!({}), all_values_changed()];
    let all: Vec<_> = plain.chain(charts.iter().flat_map(rendered)).collect();
    assert!(all.len() > 25);
    for object in all {
        let has = |path: &str| object.pointer(path).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
        assert!(has("/apiVersion") && has("/kind") && has("/metadata/name"), "{object}");
    }
}

/// The object after decoding as an API type: unknown fields are lost, wrong types are rejected.
fn decoded_as_api_type(object: &Value) -> Value {
    fn read<T: DeserializeOwned + Serialize>(object: &Value) -> Value {
        serde_json::to_value(serde_json::from_value::<T>(object.clone()).unwrap()).unwrap()
    }
    match object["kind"].as_str().unwrap() {
        "Namespace" => read::<Namespace>(object),
        "ServiceAccount" => read::<ServiceAccount>(object),
        "ConfigMap" => read::<ConfigMap>(object),
        "Service" => read::<Service>(object),
        "Deployment" => read::<Deployment>(object),
        "DaemonSet" => read::<DaemonSet>(object),
        "Job" => read::<Job>(object),
        "PodDisruptionBudget" => read::<PodDisruptionBudget>(object),
        "ClusterRole" => read::<ClusterRole>(object),
        "ClusterRoleBinding" => read::<ClusterRoleBinding>(object),
        "Role" => read::<Role>(object),
        "RoleBinding" => read::<RoleBinding>(object),
        "CustomResourceDefinition" => read::<CustomResourceDefinition>(object),
        other => panic!("unknown kind {other}"),
    }
}

/// Whether the object is of a kind that Kubernetes itself has.
fn is_of_kubernetes(object: &Value) -> bool {
    !["AddressPool", "ServiceMonitor"].contains(&object["kind"].as_str().unwrap())
}

#[test]
fn a_service_monitor_selects_the_service_of_the_metrics_port() {
    assert!(find(&rendered(&json!({})), "ServiceMonitor").is_empty(), "it needs CRDs of another product");
    let objects = rendered(&json!({"metrics": {"serviceMonitor": true}}));
    let spec = &find(&objects, "ServiceMonitor")[0]["spec"];
    let wanted = spec["selector"]["matchLabels"].as_object().unwrap();
    let has_all = |labels: &Value| wanted.iter().all(|(key, value)| labels[key] == *value);
    let selected: Vec<_> =
        find(&objects, "Service").into_iter().filter(|service| has_all(&service["metadata"]["labels"])).collect();
    assert_eq!(selected.len(), 1);
    let port = &selected[0]["spec"]["ports"][0];
    assert_eq!(port["name"], spec["endpoints"][0]["port"]);
    let container = &find(&objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0];
    let target = container["ports"].as_array().unwrap().iter().find(|of| of["name"] == port["targetPort"]).unwrap();
    let listen = configuration(&objects).unwrap().metrics_listen.unwrap();
    assert_eq!((&target["containerPort"], &port["port"]), (&json!(listen.port()), &json!(listen.port())));
}

#[test]
fn every_field_is_known_to_kubernetes() {
    let files = ["rbac.yaml", "controller.yaml", "crds.yaml"].into_iter().flat_map(documents);
    for object in files.chain(rendered(&all_values_changed())).filter(is_of_kubernetes) {
        let read = decoded_as_api_type(&object);
        let lost = lost_fields(&object, &read, "");
        assert!(lost.is_empty(), "{} {}: {lost:?}", object["kind"], object["metadata"]["name"]);
    }
}

/// Paths of the fields that are in `written` and not in `read`.
fn lost_fields(written: &Value, read: &Value, path: &str) -> Vec<String> {
    match (written, read) {
        (Value::Object(written), Value::Object(read)) => {
            let fields = written
                .iter()
                .flat_map(|(key, value)| lost_fields(value, read.get(key).unwrap_or(&Value::Null), &format!("{path}.{key}")));
            fields.collect()
        }
        (Value::Array(written), Value::Array(read)) if written.len() == read.len() => written
            .iter()
            .zip(read)
            .enumerate()
            .flat_map(|(index, (one, other))| lost_fields(one, other, &format!("{path}[{index}]")))
            .collect(),
        _ if written == read || written.as_f64().is_some_and(|number| read.as_f64() == Some(number)) => Vec::new(),
        // Empty objects may be left out.
        _ if *written == json!({}) && read.is_null() => Vec::new(),
        _ => vec![format!("{path}: {written}, read {read}")],
    }
}

#[test]
fn the_shipped_configuration_is_accepted_by_the_controller() {
    configuration(&documents("controller.yaml")).unwrap();
    configuration(&rendered(&json!({}))).unwrap();
}

#[test]
fn the_chart_contains_the_shipped_crds() {
    let shipped = documents("crds.yaml");
    assert_eq!(shipped.len(), 2);
    assert_eq!(documents("chart/crds/crds.yaml"), shipped);
}

#[test]
fn values_are_checked_by_the_schema() {
    let schema: Value = serde_json::from_str(&fs::read_to_string(deploy("chart/values.schema.json")).unwrap()).unwrap();
    let with = |over: Value| {
        let mut values = read_yaml(&deploy("chart/values.yaml"));
        merge(&mut values, &over);
        schema::errors(&schema, &values)
    };
    assert_eq!(with(json!({})), Vec::<String>::new());
    assert_eq!(with(all_values_changed()), Vec::<String>::new());
    let wrong = [
        (json!({"replica": 2}), ".replica"),
        (json!({"replicas": 0}), ".replicas"),
        (json!({"replicas": "2"}), ".replicas"),
        (json!({"image": {"pullPolicy": "Sometimes"}}), ".image.pullPolicy"),
        (json!({"class": "a b"}), ".class"),
        (json!({"group": "East"}), ".group"),
        (json!({"config": {"tls": {}}}), ".config.tls"),
        (json!({"config": {"health": {"listen": "0.0.0.0:1"}}}), ".config.health.listen"),
        (json!({"pools": [{"name": "a", "spec": {"addresses": []}}]}), ".pools[0].spec.addresses"),
        (json!({"tls": {"secret": ""}}), ".tls.secret"),
        (json!({"service": {"nodePort": 70_000}}), ".service.nodePort"),
        (json!({"metrics": {"serviceMonitor": 1}}), ".metrics.serviceMonitor"),
        (json!({"uninstall": {"enabled": "no"}}), ".uninstall.enabled"),
        (json!({"advertise": "node"}), ".advertise"),
        (json!({"advertise": "host"}), ": not"),
        (json!({"gateway": {"enabled": "yes"}}), ".gateway.enabled"),
        (json!({"gateway": {"capabilities": ["CAP_net_admin"]}}), ".gateway.capabilities[0]"),
        (json!({"gateway": {"hugepages": true}}), ".gateway.hugepages"),
        (json!({"gateway": {"routingDaemonSockets": "run/bird"}}), ".gateway.routingDaemonSockets"),
        (json!({"nodeSelector": {"a": true}}), ".nodeSelector.a"),
    ];
    for (over, path) in wrong {
        let errors = with(over);
        assert!(errors.len() == 1 && errors[0].starts_with(path), "{path}: {errors:?}");
    }
    let named = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    let mut known = named(&schema["properties"]);
    known.retain(|key| key != "global");
    assert_eq!(known, named(&read_yaml(&deploy("chart/values.yaml"))), "every value has a rule, and every rule has a value");
}

#[test]
fn a_release_is_uninstalled_by_a_hook_before_anything_is_deleted() {
    let objects = rendered(&json!({}));
    let hooks: Vec<_> = objects.iter().filter(|object| is_hook(object)).collect();
    let kinds: Vec<_> = hooks.iter().map(|object| object["kind"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["Role", "RoleBinding", "Job"]);
    for hook in &hooks {
        assert_eq!(hook["metadata"]["annotations"]["helm.sh/hook"], "pre-delete");
        assert_eq!(hook["metadata"]["annotations"]["helm.sh/hook-delete-policy"], "before-hook-creation,hook-succeeded");
    }
    let [deployment, account] = ["Deployment", "ServiceAccount"].map(|kind| find(&objects, kind)[0]["metadata"]["name"].clone());
    let rules = &hooks[0]["rules"];
    assert_eq!(rules[0]["resourceNames"], json!([deployment]));
    assert_eq!((&rules[0]["resources"], &rules[0]["verbs"]), (&json!(["deployments/scale"]), &json!(["patch"])));
    assert_eq!((&hooks[1]["subjects"][0]["name"], &hooks[1]["roleRef"]["name"]), (&account, &hooks[0]["metadata"]["name"]));
    let pod = &hooks[2]["spec"]["template"]["spec"];
    let of_deployment = &find(&objects, "Deployment")[0]["spec"]["template"]["spec"];
    let container = &pod["containers"][0];
    assert_eq!(container["args"], json!(["uninstall", "--config", "/etc/sluice/controller.yaml", "--scale-down", deployment]));
    assert_eq!((&pod["serviceAccountName"], &container["image"]), (&account, &of_deployment["containers"][0]["image"]));
    assert_eq!(
        (&pod["securityContext"]["runAsNonRoot"], &container["securityContext"]["capabilities"]),
        (&json!(true), &json!({"drop": ["ALL"]}))
    );
    assert!(!rendered(&json!({"uninstall": {"enabled": false}})).iter().any(is_hook));
}

#[test]
fn followers_send_gateways_only_to_addresses_that_gateways_are_known_to_reach() {
    let values = |advertise: &str, host_network: bool| json!({"advertise": advertise, "hostNetwork": host_network});
    for (objects, field) in [
        (documents("controller.yaml"), None),
        (rendered(&json!({})), None),
        (rendered(&json!({"hostNetwork": true})), Some("status.hostIP")),
        (rendered(&values("pod", false)), Some("status.podIP")),
        (rendered(&values("host", true)), Some("status.hostIP")),
        (rendered(&values("none", true)), None),
    ] {
        let container = &find(&objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0];
        let arguments = container["args"].as_array().unwrap();
        let advertised = [json!("--advertise-host"), json!("$(ADVERTISE_HOST)")];
        assert_eq!(arguments.ends_with(&advertised), field.is_some(), "{arguments:?}");
        assert_eq!(arguments.len(), if field.is_some() { 5 } else { 3 });
        let variable = &container["env"][0];
        let source = variable["valueFrom"]["fieldRef"]["fieldPath"].as_str();
        assert_eq!((variable["name"].as_str(), source), (field.map(|_| "ADVERTISE_HOST"), field));
    }
}

#[test]
fn pods_run_unprivileged() {
    for objects in [documents("controller.yaml"), rendered(&all_values_changed())] {
        let pod = &find(&objects, "Deployment")[0]["spec"]["template"]["spec"];
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        let container = &pod["containers"][0]["securityContext"];
        assert_eq!(container["capabilities"], json!({"drop": ["ALL"]}));
        assert_eq!((&container["allowPrivilegeEscalation"], &container["readOnlyRootFilesystem"]), (&json!(false), &json!(true)));
    }
}

#[test]
fn the_deployment_probes_the_health_port_of_the_controller() {
    for objects in [documents("controller.yaml"), rendered(&json!({})), rendered(&all_values_changed())] {
        let container = &find(&objects, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0];
        let ports = container["ports"].as_array().unwrap();
        let health = &ports.iter().find(|port| port["name"] == "health").unwrap()["containerPort"];
        assert_eq!(configuration(&objects).unwrap().health_listen.map(|address| json!(address.port())).as_ref(), Some(health));
        let probed = ["readinessProbe", "livenessProbe"].map(|probe| container[probe]["httpGet"].clone());
        assert_eq!(probed, ["/readyz", "/livez"].map(|path| json!({"path": path, "port": "health"})));
    }
}

/// The capabilities of the first table row of docs/operate/privileges.md that says `always`, as a container names them.
fn documented_capabilities() -> Vec<String> {
    let page = fs::read_to_string(deploy("../docs/operate/privileges.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `CAP_") && line.split('|').nth(2).unwrap().trim() == "always");
    rows.map(|row| row.split('`').nth(1).unwrap().trim_start_matches("CAP_").to_owned()).collect()
}

#[test]
fn gateways_are_a_daemon_set_with_the_documented_capabilities_and_no_others() {
    assert!(find(&rendered(&json!({})), "DaemonSet").is_empty(), "only if wanted");
    let objects = rendered(&json!({"gateway": {"enabled": true}}));
    let pod = &find(&objects, "DaemonSet")[0]["spec"]["template"]["spec"];
    assert_eq!((&pod["hostNetwork"], &pod["automountServiceAccountToken"]), (&json!(true), &json!(false)));
    assert_eq!(pod["nodeSelector"], json!({"sluice.dev/gateway-node": "true"}), "not on every node");
    let container = &pod["containers"][0];
    let context = &container["securityContext"];
    assert_eq!(context["capabilities"], json!({"drop": ["ALL"], "add": documented_capabilities()}));
    assert_eq!((&context["allowPrivilegeEscalation"], &context["privileged"]), (&json!(false), &Value::Null));
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    for mount in container["volumeMounts"].as_array().unwrap() {
        assert!(pod["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == mount["name"]), "{mount}");
    }
    let settings = json!({"name": "settings", "mountPath": "/host/proc/sys/net"});
    assert!(container["volumeMounts"].as_array().unwrap().contains(&settings), "its own /proc/sys is read-only");

    let changed = rendered(&all_values_changed());
    let pod = &find(&changed, "DaemonSet")[0]["spec"]["template"]["spec"];
    let values = &all_values_changed()["gateway"];
    let container = &pod["containers"][0];
    assert_eq!(container["image"], "registry.example.com/sluiced:0.2.0");
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(container["resources"]["limits"], values["resources"]["limits"]);
    assert_eq!(container["securityContext"]["capabilities"]["add"], values["capabilities"]);
    // Helm merges maps.
    assert_eq!(pod["nodeSelector"], json!({"edge": "yes", "sluice.dev/gateway-node": "true"}));
    for key in ["tolerations", "priorityClassName"] {
        assert_eq!(pod[key], values[key], "{key}");
    }

    let privileged = rendered(&json!({"gateway": {"enabled": true, "privileged": true}}));
    let context = &find(&privileged, "DaemonSet")[0]["spec"]["template"]["spec"]["containers"][0]["securityContext"];
    assert_eq!(context, &json!({"privileged": true, "readOnlyRootFilesystem": true}));
}
