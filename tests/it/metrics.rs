//! `/metrics`, as a scraper meets it: well-formed OpenMetrics text, on both listeners, and numbers that
//! follow what happens.

use crate::admin_bench::{Bench, ask};
use crate::admin_twins::module;
use crate::daemon::{House, SHARED, SOON, Serving};
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
                assert!(name.starts_with("berth_") && helped.contains(name), "{line}");
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
        scrape.histograms_add_up();
        scrape
    }

    fn histograms_add_up(&self) {
        for (series, count) in self.values.iter().filter(|(name, _)| name.contains("_count{")) {
            let (name, labels) = series.strip_suffix('}').unwrap().split_once("_count{").unwrap();
            let mut buckets: Vec<(f64, f64)> = Vec::new();
            for (series, n) in self.values.iter().filter(|(s, _)| s.starts_with(&format!("{name}_bucket{{")))
            {
                if let Some((_, le)) = series.split_once("le=\"").filter(|_| series.contains(labels)) {
                    let le = le.split('"').next().unwrap();
                    buckets.push((le.parse().unwrap_or(f64::INFINITY), *n));
                }
            }
            buckets.sort_by(|a, b| a.0.total_cmp(&b.0));
            assert_eq!(buckets.len(), 11, "{series}");
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

fn scraped(bench: &Bench) -> Scrape {
    let answer = bench.ask_bare("GET", "/metrics", &[], b"");
    assert_eq!(answer.status, 200);
    assert!(answer.headers["content-type"].starts_with("application/openmetrics-text; version=1.0.0"));
    Scrape::read(std::str::from_utf8(&answer.body).unwrap())
}

#[test]
fn calls_faults_and_suspension_are_counted_by_version_and_hook() {
    let bench = Bench::new(1);
    let fresh = scraped(&bench);
    assert!(
        fresh.values.contains_key(&format!("berth_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION")))
    );
    assert_eq!(
        (fresh.sum("berth_stack_revision", &[]), fresh.sum("berth_policy_calls_total", &[])),
        (0.0, 0.0)
    );
    assert!(!fresh.types.contains_key("berth_journal_kept"), "there is no journal");

    bench.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 2}}]);
    bench.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    bench.runtime.block_on(bench.door.reoffer()).unwrap();
    let calm = scraped(&bench);
    assert_eq!(calm.sum("berth_stack_revision", &[]), 1.0);
    let share = ["policy=\"share\"", "hook=\"offer\""];
    assert!(calm.sum("berth_policy_calls_total", &[share[0], share[1], "outcome=\"answer\""]) >= 1.0);
    assert_eq!(calm.sum("berth_policy_suspended", &share[..1]), 0.0);
    assert!(
        calm.values.keys().any(|series| series.starts_with("berth_policy_suspended{")),
        "it is shown as 0"
    );

    bench.policies.broken.store(true, Ordering::SeqCst);
    for round in 0.. {
        if scraped(&bench).sum("berth_policy_suspended", &share[..1]) > 0.0 {
            break;
        }
        assert!(round < 100, "it is never suspended");
        bench.runtime.block_on(bench.door.reoffer()).unwrap();
    }
    let sick = scraped(&bench);
    let faults = sick.sum("berth_policy_faults_total", &[share[0], share[1], "kind=\"trap\""]);
    assert_eq!(faults, f64::from(berth::admission::FAULTS_TO_SUSPEND));
    assert_eq!(sick.sum("berth_policy_calls_total", &[share[0], "outcome=\"fault\""]), faults);
    let calls = sick.sum("berth_policy_calls_total", &share);
    assert_eq!(sick.sum("berth_policy_call_duration_seconds_count", &share), calls);
    assert!(sick.sum("berth_decisions_total", &["hook=\"offer\"", "outcome=\"offered\""]) >= calls);

    // A counter never goes back: another activation begins records anew, not these.
    bench.json("PUT", "/api/v1/stack", &json!({"entries": []}).to_string()).expect(200);
    let after = scraped(&bench);
    assert_eq!(after.sum("berth_policy_faults_total", &share), faults);
    assert!(!after.values.keys().any(|series| series.starts_with("berth_policy_suspended{")));
}

#[test]
fn both_listeners_serve_the_numbers_as_they_serve_probes() {
    let bench = Bench::new(1);
    let health = bench.api.as_ref().unwrap().health_address.unwrap();
    for address in [bench.address(), health] {
        let answer = ask(address, "GET", "/metrics", &[], b"");
        assert_eq!(answer.status, 200, "without a token");
        Scrape::read(std::str::from_utf8(&answer.body).unwrap());
        ask(address, "POST", "/metrics", &[], b"").problem(405, "method-not-allowed");
    }
    let elsewhere = [("host", "evil.example")];
    ask(bench.address(), "GET", "/metrics", &elsewhere, b"").problem(421, "wrong-host");
    assert_eq!(
        ask(health, "GET", "/metrics", &elsewhere, b"").status,
        200,
        "scrapers name the pod's address"
    );
}

fn of_daemon(serving: &Serving) -> Scrape {
    let url = serving.base.replace("/api/v1", "/metrics");
    let text = ureq::get(url).call().unwrap().body_mut().read_to_string().unwrap();
    Scrape::read(&text)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_allocate_shows_in_the_numbers_of_a_daemon() {
    let house = House::new(
        "gpus: sim:2xh100\nstack: [{ policy: timeslice, parameters: { replicas: 2 } }, { policy: quota }]",
    )
    .await;
    let serving = house.serve();
    house.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let before = of_daemon(&serving);
    house.start("a", SHARED, 1).await.unwrap();
    let granted = ["hook=\"admit\"", "outcome=\"granted\""];
    let end = Instant::now() + SOON;
    let after = loop {
        let scrape = of_daemon(&serving);
        // The record is put down a moment later.
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

    // The same where an operator looks at the stack.
    let stack = serving.call("GET", "/stack", &serde_json::Value::Null);
    let hook = &stack["entries"][0]["record"]["hooks"]["place"];
    let number = |key: &str| hook[key].as_u64().unwrap();
    assert_eq!((number("calls"), number("passes"), number("faults")), (1, 0, 0), "{stack}");
    assert!(number("p50Microseconds") > 0 && number("p50Microseconds") <= number("worstMicroseconds"));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_berth"));
    let typed = command
        .args(["policy", "stack"])
        .env("BERTH_SERVER", serving.base.strip_suffix("/api/v1").unwrap())
        .env("BERTH_TOKEN_FILE", house.folder.path().join("state/token"))
        .output()
        .unwrap();
    let said = String::from_utf8(typed.stdout).unwrap();
    assert!(said.contains("P99 UP TO") && said.contains("timeslice  place"), "{said}");
}

/// What the events of the node are made of.
#[test]
fn whoever_tells_of_policies_hears_of_faults_suspension_and_its_end() {
    let bench = Bench::new(1);
    bench.upload(&module("share", "1")).expect(201);
    let entries = json!([{"policy": "share", "parameters": {"shares": 2}}]);
    bench.json("PUT", "/api/v1/stack", &json!({"entries": entries}).to_string()).expect(200);
    let mut told = bench.door.watch_standings();
    let standing = |told: &berth::admission::Standings| told.values().next().unwrap().clone();
    assert_eq!(standing(&told.borrow_and_update()).faults, 0);
    bench.policies.broken.store(true, Ordering::SeqCst);
    for faults in 1..=u64::from(berth::admission::FAULTS_TO_SUSPEND) {
        bench.runtime.block_on(bench.door.reoffer()).unwrap();
        bench.runtime.block_on(told.wait_for(|told| standing(told).faults >= faults)).unwrap();
    }
    let sick = standing(&told.borrow_and_update());
    assert!(sick.suspended && sick.last.as_deref() == Some("offer: unreachable (trap)"), "{sick:?}");
    bench.policies.broken.store(false, Ordering::SeqCst);
    bench.delete("/api/v1/stack/entries/0/suspension").expect(200);
    assert!(!standing(&told.borrow_and_update()).suspended);
}
