//! The pods of deploy/manifests: their permissions, settings and profiles.

use crate::deploy::files::{documents, name, of_kind, read};
use crate::support::gpus::{SHARED, WHOLE};
use crate::support::process_node::{ProcessNode, berth, ended};
use crate::support::wait::SOON;
use berth_config::{Config, FileConfig, ServeArgs};
use berth_wasm::limits::{COMPILE_MEMORY_BYTES_MAX, DAEMON_MEMORY_BYTES};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const MANIFESTS: [&str; 2] = ["deploy/manifests/berth.yaml", "deploy/manifests/profiles.yaml"];
/// Where the pods have the file of `berth serve --config`.
const CONFIG_FILE: &str = "/etc/berth/config.yaml";

/// A DaemonSet with the file that its pods read.
struct Deployed {
    set: Value,
    file: String,
}

impl Deployed {
    fn all() -> Vec<Self> {
        let all: Vec<Self> = MANIFESTS.into_iter().flat_map(Self::of).collect();
        assert_eq!(all.len(), 3);
        all
    }

    fn of(path: &str) -> Vec<Self> {
        let file = |name: &str| {
            let maps = of_kind(path, "ConfigMap");
            let map = maps.iter().find(|map| map["metadata"]["name"] == name).unwrap();
            map["data"]["config.yaml"].as_str().unwrap().to_owned()
        };
        let sets = of_kind(path, "DaemonSet").into_iter();
        sets.map(|set| {
            let volumes = set["spec"]["template"]["spec"]["volumes"].as_array().unwrap();
            let map = volumes.iter().find(|v| v["name"] == "config").unwrap();
            Self { file: file(map["configMap"]["name"].as_str().unwrap()), set }
        })
        .collect()
    }

    fn pod(&self) -> &Value {
        &self.set["spec"]["template"]["spec"]
    }

    fn container(&self) -> &Value {
        assert_eq!(self.pod()["containers"].as_array().unwrap().len(), 1);
        assert_eq!(self.pod()["initContainers"], Value::Null);
        &self.pod()["containers"][0]
    }

    fn config(&self) -> Config {
        Config::merge(&ServeArgs::default(), FileConfig::parse(&self.file).unwrap()).unwrap()
    }
}

#[test]
fn pods_have_no_rights_that_they_do_not_need() {
    for deployed in Deployed::all() {
        let (pod, container) = (deployed.pod(), deployed.container());
        let security = json!({
            "allowPrivilegeEscalation": false,
            "capabilities": { "drop": ["ALL"] },
            "privileged": false,
            "readOnlyRootFilesystem": true,
            "runAsGroup": 0,
            "runAsUser": 0,
            "seccompProfile": { "type": "RuntimeDefault" },
        });
        assert_eq!(container["securityContext"], security);
        for host in ["hostNetwork", "hostIPC", "shareProcessNamespace"] {
            assert_eq!(pod[host], Value::Null, "{host}");
        }
        // docs/sharing.md, "Process ids of the host": they mean nothing without it.
        assert_eq!(pod["hostPID"], true);
        let hosts: BTreeMap<&str, &str> = pod["volumes"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|volume| volume["name"] != "config" && volume["name"] != "tmp")
            .map(|volume| (volume["name"].as_str().unwrap(), volume["hostPath"]["path"].as_str().unwrap()))
            .collect();
        let wanted = [
            ("cdi-0", "/etc/cdi"),
            // Berth's own CDI specification is written into it.
            ("cdi-own", "/var/run/cdi"),
            ("runtime-config-0", "/etc/containerd"),
            ("runtime-config-1", "/etc/crio"),
            ("device-plugins", "/var/lib/kubelet/device-plugins"),
            ("pod-resources", "/var/lib/kubelet/pod-resources"),
            ("state", "/var/lib/berth"),
        ];
        assert_eq!(hosts, BTreeMap::from(wanted));
        // `berth config check` needs a place for files where the root has none.
        let tmp = pod["volumes"].as_array().unwrap().iter().find(|volume| volume["name"] == "tmp").unwrap();
        assert!(tmp["emptyDir"].is_object(), "{tmp}");
        let mounts = container["volumeMounts"].as_array().unwrap();
        assert!(mounts.contains(&json!({ "name": "tmp", "mountPath": "/tmp" })));
        for mount in container["volumeMounts"].as_array().unwrap() {
            let written =
                ["state", "device-plugins", "tmp", "cdi-own"].contains(&mount["name"].as_str().unwrap());
            assert_eq!(mount["readOnly"] != true, written, "{mount}");
        }
    }
}

#[test]
fn pods_have_room_for_the_compiler_and_are_never_two_on_a_node() {
    for deployed in Deployed::all() {
        let resources = &deployed.container()["resources"];
        let limit = resources["limits"]["memory"].as_str().unwrap();
        let mib = match (limit.strip_suffix("Gi"), limit.strip_suffix("Mi")) {
            (Some(gib), _) => gib.parse::<u64>().unwrap() * 1024,
            (_, Some(mib)) => mib.parse().unwrap(),
            _ => panic!("{limit}"),
        };
        assert!(mib << 20 >= COMPILE_MEMORY_BYTES_MAX + DAEMON_MEMORY_BYTES, "{limit}");
        assert_eq!(resources["limits"]["cpu"], Value::Null, "a throttled daemon lets pods wait");
        assert_eq!(deployed.pod()["priorityClassName"], "system-node-critical");
        let update = &deployed.set["spec"]["updateStrategy"];
        assert_eq!(update, &json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}));
    }
}

#[test]
fn variables_of_containers_are_accepted_by_the_daemon() {
    let folder = tempfile::tempdir().unwrap();
    let flags_of = |args: &[&str]| output_of(berth().args(args)).1;
    // Commands in the container read the connection to the daemon from variables, too.
    let help = flags_of(&["options", "serve"]) + &flags_of(&["options"]);
    for deployed in Deployed::all() {
        let file = folder.path().join("config.yaml");
        std::fs::write(&file, &deployed.file).unwrap();
        let (code, trouble) =
            ended(berth().args(["config", "check", "--without-files", "--without-gpus"]).arg(&file));
        assert_eq!(code, Some(0), "{}: {trouble}", deployed.file);

        let container = deployed.container();
        assert_eq!(container["args"], json!(["serve", "--config", CONFIG_FILE]));
        let mounts = container["volumeMounts"].as_array().unwrap();
        let mounted =
            |path: &Path| mounts.iter().any(|m| path == Path::new(m["mountPath"].as_str().unwrap()));
        let config = deployed.config();
        assert!(mounted(Path::new(CONFIG_FILE).parent().unwrap()));
        assert!(mounted(&config.node.state_dir), "{:?}", config.node.state_dir);
        for folder in [&config.kubelet.device_plugins_dir, &config.kubelet.root_dir.join("pod-resources")] {
            assert!(mounted(folder), "{}", folder.display());
        }
        for variable in container["env"].as_array().unwrap() {
            let name = variable["name"].as_str().unwrap();
            let of_nvidia_runtime = ["NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"].contains(&name);
            assert!(of_nvidia_runtime || help.contains(name), "`berth serve` knows no {name}");
        }
    }
}

/// For sharing they are not: the daemon applies it while it runs.
#[test]
fn pods_are_replaced_for_settings_that_a_start_reads() {
    let mut sums: BTreeMap<String, String> = BTreeMap::new();
    let all: Vec<_> =
        Deployed::all().into_iter().chain(Deployed::of("deploy/manifests/admin-tls.yaml")).collect();
    for deployed in &all {
        let mut file: Value = serde_saphyr::from_str(&deployed.file).unwrap();
        file.as_object_mut().unwrap().remove("stack");
        let sum = &deployed.set["spec"]["template"]["metadata"]["annotations"]["checksum/start-settings"];
        let sum = sum.as_str().unwrap();
        let first = sums.entry(file.to_string()).or_insert_with(|| sum.to_owned());
        assert_eq!(first, sum, "{}", deployed.file);
    }
    let different: BTreeSet<&String> = sums.values().collect();
    assert_eq!(different.len(), sums.len(), "{sums:?}");
    assert!(
        (2..all.len()).contains(&sums.len()),
        "some differ in their stack alone, and one in TLS: {sums:?}"
    );
}

#[test]
fn only_probes_and_scrapers_reach_the_health_port() {
    for deployed in Deployed::all() {
        let config = deployed.config();
        assert!(config.admin.listen.ip().is_loopback());
        let health = config.admin.health_listen.unwrap();
        assert!(health.ip().is_unspecified());
        let ports = json!([{ "name": "health", "containerPort": health.port() }]);
        assert_eq!(deployed.container()["ports"], ports);
        for (probe, path) in
            [("startupProbe", "/livez"), ("livenessProbe", "/livez"), ("readinessProbe", "/readyz")]
        {
            let asked = json!({ "path": path, "port": "health" });
            assert_eq!(deployed.container()[probe]["httpGet"], asked, "{probe}");
        }
        let [manifest, _] = MANIFESTS;
        let service = &of_kind(manifest, "Service")[0]["spec"];
        let labels = deployed.set["spec"]["template"]["metadata"]["labels"].as_object().unwrap();
        let selects =
            |selector: &Value| selector.as_object().unwrap().iter().all(|(k, v)| labels.get(k) == Some(v));
        assert!(selects(&service["selector"]) && service["clusterIP"] == "None");
        let port = json!([{ "name": "health", "port": health.port(), "targetPort": "health" }]);
        assert_eq!(service["ports"], port);
        let network = &of_kind(manifest, "NetworkPolicy")[0]["spec"];
        assert!(selects(&network["podSelector"]["matchLabels"]));
        assert_eq!(network["policyTypes"], json!(["Ingress", "Egress"]));
        assert_eq!(network["ingress"], json!([{ "ports": [{ "port": "health", "protocol": "TCP" }] }]));
    }
}

/// One file opens the admin API to the network; without it the API stays on loopback.
#[test]
fn the_admin_api_is_on_the_network_over_tls_alone() {
    const OPEN: &str = "deploy/manifests/admin-tls.yaml";
    let [plain, open] = [MANIFESTS[0], OPEN].map(|path| Deployed::of(path).remove(0));
    assert!(plain.config().admin.access.tls.is_none() && plain.config().admin.access.socket.is_none());
    let config = open.config();
    let (tls, socket) =
        (config.admin.access.tls.as_ref().unwrap(), config.admin.access.socket.as_ref().unwrap());
    assert!(config.admin.listen.ip().is_unspecified());
    assert_eq!(config.admin.access.kubernetes.as_ref().unwrap().audiences, ["berth"]);

    // The files of TLS are of a Secret, for root's eyes; the socket's folder is the pod's own.
    let volume_at = |folder: &Path| {
        let mounts = open.container()["volumeMounts"].as_array().unwrap();
        let mount = mounts.iter().find(|m| folder == Path::new(m["mountPath"].as_str().unwrap())).unwrap();
        let volumes = open.pod()["volumes"].as_array().unwrap();
        (mount.clone(), volumes.iter().find(|v| v["name"] == mount["name"]).unwrap().clone())
    };
    assert_eq!(tls.cert.parent(), tls.key.parent());
    let (mount, volume) = volume_at(tls.cert.parent().unwrap());
    assert_eq!((&mount["readOnly"], &volume["secret"]["defaultMode"]), (&json!(true), &json!(0o400)));
    let paths = volume["secret"]["items"].as_array().unwrap().iter().map(|i| i["path"].as_str().unwrap());
    let files = [&tls.cert, &tls.key].map(|f| f.file_name().unwrap().to_str().unwrap());
    assert_eq!(paths.collect::<Vec<_>>(), files);
    assert!(volume_at(socket.parent().unwrap()).1["emptyDir"].is_object());
    // `kubectl exec POD -- berth` goes by the socket: the certificate need not name 127.0.0.1.
    let server = json!({ "name": "BERTH_SERVER", "value": format!("unix://{}", socket.display()) });
    assert!(open.container()["env"].as_array().unwrap().contains(&server));

    let port = config.admin.listen.port();
    let ports = open.container()["ports"].as_array().unwrap();
    assert!(ports.contains(&json!({ "name": "admin", "containerPort": port })), "{ports:?}");
    let service = of_kind(OPEN, "Service").remove(0);
    let named = json!({ "name": "admin", "port": port, "targetPort": "admin" });
    assert!(service["spec"]["ports"].as_array().unwrap().contains(&named));
    let ingress = of_kind(OPEN, "NetworkPolicy")[0]["spec"]["ingress"].as_array().unwrap().clone();
    assert!(ingress.contains(&json!({ "ports": [{ "port": "admin", "protocol": "TCP" }] })), "{ingress:?}");

    // Probes go by the other listener, which has no TLS; and the pod may no more than before.
    for same in ["securityContext", "startupProbe", "livenessProbe", "readinessProbe", "resources"] {
        assert_eq!(open.container()[same], plain.container()[same], "{same}");
    }
    let hosts = |deployed: &Deployed| {
        let volumes = deployed.pod()["volumes"].as_array().unwrap().clone();
        volumes.into_iter().filter(|v| v["hostPath"].is_object()).collect::<Vec<_>>()
    };
    assert_eq!(hosts(&open), hosts(&plain));
}

/// With default values no pod labels nodes or writes into node-feature-discovery's folder.
#[test]
fn nodes_are_labelled_only_if_configured() {
    for deployed in Deployed::all() {
        assert!(!deployed.config().cluster.labels.is_enabled());
        assert!(!deployed.pod().to_string().contains("features.d"));
    }
}

#[test]
fn no_two_profiles_are_on_one_node() {
    let selectors: Vec<Value> = Deployed::of("deploy/manifests/profiles.yaml")
        .iter()
        .map(|d| d.pod()["nodeSelector"].clone())
        .collect();
    assert_eq!(selectors, [json!({ "berth/profile": "exclusive" }), json!({ "berth/profile": "shared" })]);
    let pods: BTreeSet<String> =
        Deployed::all().iter().map(|d| d.set["spec"]["selector"]["matchLabels"].to_string()).collect();
    assert_eq!(pods.len(), 3, "DaemonSets select each other's pods: {pods:?}");
}

/// Two nodes with two GPUs each, as their profiles have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_profile_makes_a_node_exclusive_or_shared() {
    let profiles = Deployed::of("deploy/manifests/profiles.yaml");
    for (deployed, resource, count) in [(&profiles[0], WHOLE, 2), (&profiles[1], SHARED, 10)] {
        let node = ProcessNode::of(&deployed.file).await;
        let here = ["--gpus", "sim:2xh100", "--health-listen", "127.0.0.1:0", "--log", "text"];
        let daemon = node.serve_with(&here);
        node.kubelet.wait_allocatable(resource, count, SOON).await.unwrap();
        let other = if resource == WHOLE { SHARED } else { WHOLE };
        // The kubelet does not know the resource, or has no device of it.
        assert_eq!(node.kubelet.allocatable(other).unwrap_or(0), 0, "{}", name(&deployed.set));
        daemon.stop();
    }
}

#[test]
fn the_chart_accepts_the_keys_of_the_daemon() {
    let refused = FileConfig::parse("noSuchKey: 1").unwrap_err().to_string();
    let known: BTreeSet<&str> =
        refused.split_once("expected one of").unwrap().1.split('`').skip(1).step_by(2).collect();
    let schema: Value = serde_json::from_str(&read("deploy/helm/berth/values.schema.json")).unwrap();
    let config = schema["definitions"]["config"]["properties"].as_object().unwrap();
    // These the chart sets itself, and these it has for itself: which file is the node's.
    let own = ["kubeletDir", "kubeletRootDir", "devicePluginsDir", "stateDir", "adminListen", "healthListen"];
    let of_chart = ["name", "map", "default", "fallbackStrategies"];
    assert!(of_chart.iter().all(|key| config.contains_key(*key) && !known.contains(key)));
    let keys = config.keys().map(String::as_str).filter(|key| !of_chart.contains(key));
    let taken: BTreeSet<&str> = keys.chain(own).collect();
    assert_eq!(taken, known);
    assert_eq!(schema["definitions"]["config"]["additionalProperties"], false);
}

#[test]
fn versions_and_files_go_together() {
    let chart = &documents("deploy/helm/berth/Chart.yaml")[0];
    assert_eq!(chart["appVersion"], env!("CARGO_PKG_VERSION"));
    let image = format!("registry.example.com/berth:{}", env!("CARGO_PKG_VERSION"));
    for deployed in Deployed::all() {
        assert_eq!(deployed.container()["image"], image);
    }
    let dockerfile = read("deploy/Dockerfile");
    let rust = format!("ARG RUST_VERSION={}", env!("CARGO_PKG_RUST_VERSION"));
    assert!(dockerfile.contains(&rust), "deploy/Dockerfile is built with another Rust than {rust}");
    // What the pods' `args` and `kubectl exec POD -- berth` go by.
    assert!(dockerfile.contains("ENTRYPOINT [\"/usr/bin/berth\"]") && dockerfile.contains("USER 0:0"));
}

/// The dashboard and the alert rules name no metric that a daemon has not got.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dashboards_and_alerts_use_existing_metrics() {
    let node = ProcessNode::new("gpus: sim:1xt4").await;
    let daemon = node.serve();
    let url = daemon.base.replace("/api/v1", "/metrics");
    let agent: ureq::Agent =
        ureq::Agent::config_builder().proxy(None).timeout_global(Some(SOON)).build().into();
    let text = agent.get(&url).call().unwrap().body_mut().read_to_string().unwrap();
    let mut there = BTreeSet::new();
    for line in text.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (family, kind) = line.split_once(' ').unwrap();
        let endings: &[&str] = match kind {
            "counter" => &["_total"],
            "info" => &["_info"],
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        there.extend(endings.iter().map(|ending| format!("{family}{ending}")));
    }
    let board: Value = serde_json::from_str(&read("deploy/grafana/berth.json")).unwrap();
    let panels = board["panels"].as_array().unwrap().iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().into_iter().flatten());
    let mut asked: Vec<String> = targets.map(|target| target["expr"].as_str().unwrap().to_owned()).collect();
    let rules = &documents("deploy/prometheus/rules.yaml")[0];
    for group in rules["groups"].as_array().unwrap() {
        asked.extend(
            group["rules"].as_array().unwrap().iter().map(|r| r["expr"].as_str().unwrap().to_owned()),
        );
    }
    assert!(asked.len() > 15, "{asked:?}");
    for query in asked {
        let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        for metric in words.filter(|word| word.starts_with("berth_")) {
            assert!(there.contains(metric), "there is no {metric}: {query}");
        }
    }
}

/// Runs to its end and gives exit code and standard output.
fn output_of(command: &mut std::process::Command) -> (Option<i32>, String) {
    let output = command.stdout(std::process::Stdio::piped()).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}
