//! `/metrics`, as a scraper reads it: valid OpenMetrics text, on both listeners, and values that follow what happens.

use crate::support::admin_fakes::module;
use crate::support::admin_node::{AdminNode, ask};
use crate::support::files;
use crate::support::gpus::SHARED;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use berth_core::metrics::table::{Family, GROUPS, Kind, page};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A scrape, by what each line is called with its labels.
struct Scrape {
    values: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Scrape {
    /// Reads it strictly: HELP and TYPE before the values of a family, families not mixed, no value
    /// twice, histograms that add up, an end.
    fn read(text: &str) -> Self {
        let mut scrape = Self { values: BTreeMap::new(), types: BTreeMap::new() };
        let (mut helped, mut family) = (BTreeSet::new(), String::new());
        let body = text.strip_suffix("# EOF\n").expect("no end");
        for line in body.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, help) = rest.split_once(' ').unwrap();
                assert!(help.ends_with('.') && helped.insert(name.to_owned()), "{line}");
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                let (name, kind) = rest.split_once(' ').unwrap();
                let ours = name.starts_with("berth_") || name.starts_with("process_");
                assert!(ours && helped.contains(name), "{line}");
                assert!(scrape.types.insert(name.into(), kind.into()).is_none(), "{line}");
                family = name.to_owned();
            } else if let Some(rest) = line.strip_prefix("# UNIT ") {
                let (name, unit) = rest.split_once(' ').unwrap();
                assert!(name == family && name.ends_with(&format!("_{unit}")), "{line}");
            } else {
                let (series, value) = line.rsplit_once(' ').unwrap();
                assert!(!series.contains("{}"), "{line}");
                let name = series.split('{').next().unwrap();
                let suffixes: &[&str] = match scrape.types[&family].as_str() {
                    "counter" => &["_total"],
                    "gauge" => &[""],
                    "info" => &["_info"],
                    "histogram" => &["_sum", "_count", "_bucket"],
                    other => panic!("{other}"),
                };
                let rest = name.strip_prefix(family.as_str()).unwrap_or_else(|| panic!("{line} in {family}"));
                assert!(suffixes.contains(&rest), "{line} in {family}");
                assert!(
                    scrape.values.insert(series.into(), value.parse().unwrap()).is_none(),
                    "{line} twice"
                );
            }
        }
        assert_eq!(helped.len(), scrape.types.len());
        scrape.histograms_add_up();
        scrape
    }

    fn histograms_add_up(&self) {
        let counts =
            self.values.iter().filter(|(series, _)| series.split('{').next().unwrap().ends_with("_count"));
        for (series, count) in counts {
            let (name, labels) = series.split_once("_count").unwrap();
            let labels = labels.strip_prefix('{').map_or("", |labels| labels.strip_suffix('}').unwrap());
            let mut buckets: Vec<(f64, f64)> = Vec::new();
            for (series, n) in self.values.iter().filter(|(s, _)| s.starts_with(&format!("{name}_bucket{{")))
            {
                if let Some((_, le)) = series.split_once("le=\"").filter(|_| series.contains(labels)) {
                    let le = le.split('"').next().unwrap();
                    buckets.push((le.parse().unwrap_or(f64::INFINITY), *n));
                }
            }
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert!((11..=13).contains(&buckets.len()), "{series}");
            assert!(buckets.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{series}: {buckets:?}");
            assert_eq!(buckets.last(), Some(&(f64::INFINITY, *count)), "{series}");
        }
    }

    /// The sum of a family's values that have all of these in their labels.
    fn sum(&self, name: &str, labels: &[&str]) -> f64 {
        let of = |series: &str| {
            series.split('{').next() == Some(name) && labels.iter().all(|label| series.contains(label))
        };
        self.values.iter().filter(|(series, _)| of(series)).map(|(_, value)| value).sum()
    }
}

fn scraped(node: &AdminNode) -> Scrape {
    let answer = node.ask_bare("GET", "/metrics", &[], b"");
    assert_eq!(answer.status, 200);
    assert!(answer.headers["content-type"].starts_with("application/openmetrics-text; version=1.0.0"));
    Scrape::read(std::str::from_utf8(&answer.body).unwrap())
}

#[test]
fn calls_faults_and_suspension_are_counted_by_version_and_hook() {
    let node = AdminNode::new(1);
    let fresh = scraped(&node);
    assert!(
        fresh.values.contains_key(&format!("berth_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")))
    );
    assert_eq!(
        (fresh.sum("berth_stack_revision", &[]), fresh.sum("berth_policy_calls_total", &[])),
        (0.0, 0.0)
    );
    assert!(!fresh.types.contains_key("berth_journal_kept"), "there is no journal");

    node.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 2}}]);
    node.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    node.runtime.block_on(node.kernel.reoffer()).unwrap();
    let calm = scraped(&node);
    assert_eq!(calm.sum("berth_stack_revision", &[]), 1.0);
    let share = ["policy=\"share\"", "hook=\"offer\""];
    assert!(calm.sum("berth_policy_calls_total", &[share[0], share[1], "outcome=\"answer\""]) >= 1.0);
    assert_eq!(calm.sum("berth_policy_suspended", &share[..1]), 0.0);
    assert!(
        calm.values.keys().any(|series| series.starts_with("berth_policy_suspended{")),
        "it is shown as 0"
    );

    node.policies.broken.store(true, Ordering::SeqCst);
    for round in 0.. {
        if scraped(&node).sum("berth_policy_suspended", &share[..1]) > 0.0 {
            break;
        }
        assert!(round < 100, "it is never suspended");
        node.runtime.block_on(node.kernel.reoffer()).unwrap();
    }
    let sick = scraped(&node);
    let faults = sick.sum("berth_policy_faults_total", &[share[0], share[1], "kind=\"trap\""]);
    assert_eq!(faults, f64::from(berth_core::stack::FAULTS_TO_SUSPEND));
    assert_eq!(sick.sum("berth_policy_calls_total", &[share[0], "outcome=\"fault\""]), faults);
    let calls = sick.sum("berth_policy_calls_total", &share);
    assert_eq!(sick.sum("berth_policy_call_duration_seconds_count", &share), calls);
    assert!(sick.sum("berth_decisions_total", &["hook=\"offer\"", "outcome=\"offered\""]) >= calls);

    // A counter never goes back: another activation resets the statistics, not these.
    node.json("PUT", "/api/v1/stack", &json!({"entries": []}).to_string()).expect(200);
    let after = scraped(&node);
    assert_eq!(after.sum("berth_policy_faults_total", &share), faults);
    assert!(!after.values.keys().any(|series| series.starts_with("berth_policy_suspended{")));
}

#[test]
fn both_listeners_serve_the_numbers_as_they_serve_probes() {
    let node = AdminNode::new(1);
    let health = node.api.as_ref().unwrap().health_address.unwrap();
    for address in [node.address(), health] {
        let answer = ask(address, "GET", "/metrics", &[], b"");
        assert_eq!(answer.status, 200, "without a token");
        Scrape::read(std::str::from_utf8(&answer.body).unwrap());
        ask(address, "POST", "/metrics", &[], b"").problem(405, "method-not-allowed");
    }
    let elsewhere = [("host", "evil.example")];
    ask(node.address(), "GET", "/metrics", &elsewhere, b"").problem(421, "wrong-host");
    assert_eq!(
        ask(health, "GET", "/metrics", &elsewhere, b"").status,
        200,
        "scrapers name the pod's address"
    );
}

fn of_daemon(daemon: &DaemonProcess) -> Scrape {
    let url = daemon.base.replace("/api/v1", "/metrics");
    let text = ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap();
    Scrape::read(&text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocate_is_counted_in_the_metrics() {
    let node = ProcessNode::new(
        "gpus: sim:2xh100\nstack: [{ policy: timeslice, parameters: { replicas: 2 } }, { policy: quota }]",
    )
    .await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let before = of_daemon(&daemon);
    node.start("a", SHARED, 1).await.unwrap();
    let granted = ["hook=\"admit\"", "outcome=\"granted\""];
    let end = Instant::now() + SOON;
    let after = loop {
        let scrape = of_daemon(&daemon);
        // The decision is recorded a moment later.
        if scrape.sum("berth_journal_kept", &[]) > before.sum("berth_journal_kept", &[]) + 1.0 {
            break scrape;
        }
        assert!(Instant::now() < end, "{:?}", scrape.values);
        std::thread::sleep(Duration::from_millis(20));
    };
    let grew = |name, labels: &[&str]| after.sum(name, labels) - before.sum(name, labels);
    assert_eq!(grew("berth_decisions_total", &granted), 1.0);
    assert_eq!(grew("berth_decisions_total", &["hook=\"place\"", "outcome=\"placed\""]), 1.0);
    assert_eq!(
        grew("berth_policy_calls_total", &["policy=\"timeslice\"", "hook=\"place\"", "outcome=\"answer\""]),
        1.0
    );
    assert_eq!(grew("berth_policy_calls_total", &["policy=\"quota\"", "hook=\"admit\""]), 1.0);
    let duration = "berth_policy_call_duration_seconds_sum";
    let took = grew(duration, &["policy=\"quota\"", "hook=\"admit\""]);
    assert!(took > 0.0 && took < 1.0, "{took} s");
    assert!(after.sum("berth_journal_bytes", &[]) > 0.0);
    assert_eq!(after.sum("berth_journal_lost_total", &[]), 0.0);

    // The same in the operator's view of the stack.
    let stack = daemon.call("GET", "/stack", &serde_json::Value::Null);
    let hook = &stack["entries"][0]["record"]["hooks"]["place"];
    let number = |key: &str| hook[key].as_u64().unwrap();
    assert_eq!((number("calls"), number("passes"), number("faults")), (1, 0, 0), "{stack}");
    assert!(number("p50Microseconds") > 0 && number("p50Microseconds") <= number("worstMicroseconds"));
    let printed = daemon.printed(&["policy", "stack"]);
    assert!(printed.contains("P99") && printed.contains("timeslice  place"), "{printed}");
}

/// What the events of the node are made of.
#[test]
fn faults_and_suspensions_of_policies_are_transitions() {
    let node = AdminNode::new(1);
    node.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 2}}]);
    node.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    let mut statuses = node.kernel.watch_policy_statuses();
    let first_status =
        |statuses: &berth_core::stack::PolicyStatuses| statuses.values().next().unwrap().clone();
    assert_eq!(first_status(&statuses.borrow_and_update()).faults, 0);
    node.policies.broken.store(true, Ordering::SeqCst);
    for faults in 1..=u64::from(berth_core::stack::FAULTS_TO_SUSPEND) {
        node.runtime.block_on(node.kernel.reoffer()).unwrap();
        node.runtime.block_on(statuses.wait_for(|statuses| first_status(statuses).faults >= faults)).unwrap();
    }
    let sick = first_status(&statuses.borrow_and_update());
    assert!(sick.suspended && sick.last.as_deref() == Some("offer: unreachable (trap)"), "{sick:?}");
    node.policies.broken.store(false, Ordering::SeqCst);
    node.delete("/api/v1/stack/entries/0/suspension").expect(200);
    assert!(!first_status(&statuses.borrow_and_update()).suspended);
}

/// A family's samples: as queries name them.
fn samples(family: &Family) -> Vec<String> {
    match family.kind {
        Kind::Histogram => ["_bucket", "_sum", "_count"].map(|end| format!("{}{end}", family.name)).to_vec(),
        _ => vec![family.name.to_owned()],
    }
}

fn families() -> impl Iterator<Item = &'static Family> {
    GROUPS.iter().flat_map(|(_, families)| *families)
}

#[test]
fn the_page_of_metrics_is_the_table_and_names_follow_the_rules() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../..", "/deploy/METRICS.md");
    if std::env::var_os("BERTH_WRITE_PAGES").is_some() {
        std::fs::write(path, page()).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(
        committed == page(),
        "deploy/METRICS.md differs from src/core/metrics/table.rs; to write it: BERTH_WRITE_PAGES=1 cargo test --test it the_page_of_metrics"
    );
    let mut names = BTreeSet::new();
    for family in families() {
        let Family { name, kind, labels, help } = family;
        assert!(names.insert(name), "{name} twice");
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_'), "{name}");
        assert_eq!(name.ends_with("_total"), *kind == Kind::Counter, "{name}");
        assert_eq!(name.ends_with("_info"), *kind == Kind::Info, "{name}");
        assert!(*kind != Kind::Histogram || name.ends_with("_duration_seconds"), "{name}");
        for wrong in ["_ms", "_millis", "_mib", "_kb", "_percent", "_us", "_minutes"] {
            assert!(!name.ends_with(wrong), "{name} is not in a base unit");
        }
        assert!(help.ends_with('.') && !help.contains('|') && help.len() < 200, "{name}: {help}");
        for label in *labels {
            assert!(
                !["pod", "namespace", "container", "le", "job", "instance"].contains(label),
                "{name} {label}"
            );
        }
    }
}

/// Everything that a node does: grants, refusals, an XID, a cordon, a drain, requests that mean nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_family_of_the_table_is_exported_and_counters_do_not_decrease() {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("machine.json");
    let mut simulated = json!({"model": "h100", "count": 3});
    files::replace(&machine, simulated.to_string());
    let node = ProcessNode::new(&format!(
        "gpus: \"sim:{}\"\nstack: [{{ policy: timeslice, parameters: {{ replicas: 2 }} }}, {{ policy: quota }}]\n\
         # A guard is needed, so that the metric is exported before one has connected.\n\
         bypass: {{ action: strip }}",
        machine.display()
    ))
    .await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 6, SOON).await.unwrap();
    let before = of_daemon(&daemon);
    node.start("a", SHARED, 1).await.unwrap();
    simulated["events"] = json!([{"seq": 1, "gpu": 2, "xid": 79}]);
    files::replace(&machine, simulated.to_string());
    let gpus = daemon.call("GET", "/gpus", &serde_json::Value::Null)["items"].as_array().unwrap().clone();
    let holds =
        |gpu: &&serde_json::Value| gpu["resources"].as_array().unwrap().iter().any(|of| of["held"] == 1);
    let held = gpus.iter().find(holds).unwrap_or_else(|| panic!("{gpus:?}"))["uuid"].as_str().unwrap();
    let deadline = json!({"reason": "fans", "deadlineSeconds": 3600});
    daemon.call("PUT", &format!("/gpus/{held}/drain"), &deadline);
    let journal = |scrape: &Scrape| scrape.sum("berth_journal_kept", &[]) > 0.0;
    let shared = format!("resource=\"{SHARED}\"");
    let end = Instant::now() + SOON;
    let after = loop {
        let scrape = of_daemon(&daemon);
        let scanned = scrape.sum("berth_gpu_scan_timestamp_seconds", &[]) > 0.0;
        let passes = scrape.sum("berth_reconcile_passes_total", &[]) > 0.0;
        let drains = scrape.sum("berth_gpu_drain_holders", &[]) > 0.0;
        let sick = scrape.sum("berth_gpu_health_changes_total", &["state=\"unhealthy\""]) > 0.0;
        // The XID is counted shortly after it was passed to the policies, and their judgement may come before that.
        let reported = scrape.sum("berth_gpu_xids_total", &["code=\"79\""]) > 0.0;
        // The state is set by another task than the one that sends the list.
        let registered = scrape.sum("berth_kubelet_registration", &[&shared, "state=\"registered\""]) > 0.0;
        if journal(&scrape) && scanned && passes && drains && sick && reported && registered {
            break scrape;
        }
        assert!(Instant::now() < end, "{:?}", scrape.values);
        std::thread::sleep(Duration::from_millis(20));
    };
    let is_exported = |name: &str| after.values.keys().any(|series| series.split('{').next() == Some(name));
    assert_eq!(after.sum("berth_guard_connected", &[]), 0.0);
    // Families without a sample yet: nothing of theirs happened, and no guard has connected.
    let quiet = [
        "berth_policy_faults_total",
        "berth_allocate_refusals_total",
        "berth_memory_limits",
        "berth_bypass_containers",
        "berth_memory_limit_used_bytes",
    ];
    for family in families().filter(|family| !quiet.contains(&family.name)) {
        for sample in samples(family) {
            let limitless = sample == "process_max_fds";
            assert!(is_exported(&sample) || limitless, "{sample} is not exported");
        }
    }
    for name in after.types.keys() {
        let of = |family: &Family| samples(family).iter().any(|sample| sample.starts_with(name.as_str()));
        assert!(families().any(of), "{name} is in no table");
    }
    // Labels are those of the table, in that order.
    for series in after.values.keys() {
        let Some((name, rest)) = series.split_once('{') else { continue };
        let family = families().find(|family| samples(family).iter().any(|sample| sample == name)).unwrap();
        let keys: Vec<&str> =
            rest.split("=\"").filter_map(|part| part.rsplit(['"', ',', '{']).next()).collect();
        let keys: Vec<&str> =
            keys.into_iter().filter(|key| !key.is_empty() && *key != "}" && *key != "le").collect();
        assert_eq!(keys, family.labels, "{series}");
    }
    let counters: BTreeSet<String> =
        families().filter(|f| f.kind == Kind::Counter).flat_map(samples).collect();
    let falls = |(series, value): (&String, &f64)| {
        let counter = counters.contains(series.split('{').next().unwrap());
        // Zeros of a resource that is no longer listed go with it.
        counter && after.values.get(series).copied().unwrap_or(0.0) < *value
    };
    assert!(!before.values.iter().any(falls), "a counter fell");
    let grew = |name, labels: &[&str]| after.sum(name, labels) - before.sum(name, labels);
    assert_eq!(grew("berth_allocations_granted_total", &["how=\"granted\""]), 1.0);
    assert_eq!(grew("berth_gpu_health_changes_total", &["state=\"unhealthy\""]), 1.0);
    assert_eq!(grew("berth_gpu_xids_total", &["code=\"79\""]), 1.0);
    assert_eq!(grew("berth_grpc_calls_total", &["method=\"Allocate\"", "code=\"OK\""]), 1.0);
    assert_eq!(after.sum("berth_allocations", &[&format!("uuid=\"{held}\"")]), 1.0);
    // Before its stack could be called the node offered whole GPUs, which may still be on their way out.
    assert_eq!(after.sum("berth_devices", &[&shared, "state=\"held\""]), 1.0);
    assert_eq!(after.sum("berth_devices", &[&shared]), 6.0);
    assert_eq!(after.sum("berth_gpu_drain", &["state=\"draining\""]), 1.0);
    assert_eq!((after.sum("berth_gpu_drain", &[]), after.sum("berth_gpu_health", &[])), (3.0, 3.0));
    assert_eq!(after.sum("berth_gpu_memory_capacity_bytes", &[]), 3.0 * 81_559.0 * 1_048_576.0);
    assert_eq!(after.sum("berth_kubelet_registration", &[&shared, "state=\"registered\""]), 1.0);
    assert_eq!(
        (after.sum("berth_list_and_watch_streams", &[&shared]), after.sum("berth_live", &[])),
        (1.0, 5.0)
    );
    // Every check of readiness is well.
    let checks = after.sum("berth_ready", &[]);
    assert!(checks >= 6.0, "{:?}", after.values);
    assert_eq!(after.sum("berth_check_warning", &["check=\"store\""]), 0.0);
    assert!(after.sum("berth_store_size_bytes", &[]) > 1_000.0);
    let age = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64()
        - after.sum("process_start_time_seconds", &[]);
    assert!((0.0..SOON.as_secs_f64()).contains(&age), "started {age} s ago");
    let resident = after.sum("process_resident_memory_bytes", &[]);
    assert!((5e6..1e9).contains(&resident), "{resident}");
}

/// Whatever clients request, and however often, the number of series stays within the limits of the table.
#[test]
fn no_client_and_no_pod_adds_labels() {
    let node = AdminNode::new(2);
    let kernel = &node.kernel;
    scraped(&node);
    let routes = |scrape: &Scrape| scrape.values.keys().filter(|s| s.starts_with("berth_http")).count();
    node.get("/api/v1/gpus/GPU-0").expect(200);
    node.get("/api/v1/gpus/unknown").problem(404, "unknown-gpu");
    ask(node.address(), "GET", "/nothing", &[], b"").problem(404, "no-such-route");
    ask(node.address(), "BREW", "/livez", &[], b"");
    scraped(&node);
    let before = scraped(&node);
    for n in 0..200 {
        node.get(&format!("/api/v1/gpus/GPU-x{n}")).problem(404, "unknown-gpu");
        ask(node.address(), "GET", &format!("/nothing/{n}"), &[], b"").problem(404, "no-such-route");
        ask(node.address(), &format!("BREW{}", char::from(b'A' + (n % 26) as u8)), "/livez", &[], b"");
        kernel.counters().gpus.xid("GPU-0", 1_000 + n);
        kernel.counters().gpus.xid(&format!("GPU-{n}"), 79);
    }
    let after = scraped(&node);
    assert_eq!(routes(&after), routes(&before));
    let unknown = ["route=\"/api/v1/gpus/{uuid}\"", "method=\"GET\"", "status=\"4xx\""];
    assert_eq!(after.sum("berth_http_requests_total", &unknown), 201.0);
    assert_eq!(after.sum("berth_http_requests_total", &["route=\"unmatched\""]), 201.0);
    let xids = after.values.keys().filter(|s| s.starts_with("berth_gpu_xids_total{")).count();
    assert_eq!(xids, berth_observe::counters::XIDS_COUNTED_MAX + 1);
    assert_eq!(after.sum("berth_gpu_xids_total", &[]), 400.0);
    assert!(after.values.len() < 2_000, "{} series", after.values.len());
}

/// What reads snapshots does not wait for who works.
#[test]
fn a_scrape_waits_neither_for_the_ledger_nor_for_policies() {
    let node = AdminNode::new(1);
    let heartbeat = &node.kernel.counters().keeper.heartbeat;
    // An append has a deadline of 2 s. If it passes on a busy machine before the scrape ends, the test repeats.
    until("a scrape while the ledger waits for its store", || {
        until("the store works", || node.delete("/api/v1/gpus/GPU-0/cordon").status == 200);
        let held = node.store_held.lock().unwrap();
        let cordon = {
            let (address, bearer) = (node.address(), format!("Bearer {}", node.token));
            std::thread::spawn(move || {
                let headers = [("authorization", bearer.as_str()), ("content-type", "application/json")];
                ask(address, "PUT", "/api/v1/gpus/GPU-0/cordon", &headers, b"{}").status
            })
        };
        until("the ledger waits for its store", || {
            let waits = heartbeat.busy_for().is_some_and(|busy| busy >= Duration::from_millis(300));
            waits || cordon.is_finished()
        });
        scraped(&node);
        let waited = !cordon.is_finished();
        drop(held);
        waited && cordon.join().unwrap() == 200
    });
    assert!(scraped(&node).sum("berth_keeper_turn_duration_seconds_count", &[]) > 1.0);
}
