//! Callers that the cluster authenticates: the daemon reviews them with the stand-in API server, and refuses those
//! that it does not confirm.

use crate::rest::access::until_burst_refused;
use crate::support::api_server::{ApiServer, NODE};
use crate::support::client::agent;
use crate::support::process_node::{DaemonProcess, ProcessNode};
use crate::support::wait::{SOON, until};
use serde_json::Value;
use std::time::{Duration, Instant};

struct Cluster {
    api: ApiServer,
    node: ProcessNode,
    daemon: DaemonProcess,
}

const GRAFANA: &str = "system:serviceaccount:monitoring:grafana";
const GRAFANAS_TOKEN: &str = "the-token-of-grafana";

impl Cluster {
    async fn new(settings: &str) -> Self {
        let api = ApiServer::start();
        let node = ProcessNode::new(&format!("gpus: sim:1xt4\nnodeName: {NODE}\n{settings}")).await;
        let kubeconfig = api.kubeconfig(node.folder.path());
        let daemon = node.serve_with(&["--kubeconfig", kubeconfig.to_str().unwrap()]);
        {
            let mut state = api.world.state.lock().unwrap();
            let token = (GRAFANA.to_owned(), "berth".to_owned());
            state.reviews.tokens.insert(GRAFANAS_TOKEN.into(), token);
            let allowed = (GRAFANA.to_owned(), "get".to_owned(), "/berth/api/v1/node".to_owned());
            state.reviews.allowed.insert(allowed);
        }
        Self { api, node, daemon }
    }

    /// Status and type of the problem.
    fn ask(&self, token: &str, method: &str, path: &str) -> (u16, String) {
        let agent = agent(SOON);
        let request = ureq::http::Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.daemon.base))
            .header("authorization", format!("Bearer {token}"))
            .body(())
            .unwrap();
        let mut response = agent.run(request).unwrap();
        let status = response.status().as_u16();
        let body = response.body_mut().read_to_string().unwrap();
        let value: Value = serde_json::from_str(&body).unwrap_or_default();
        (status, value["type"].as_str().unwrap_or_default().to_owned())
    }

    fn asked(&self, kind: &str) -> usize {
        self.api.world.state.lock().unwrap().reviews.asked.get(kind).copied().unwrap_or(0)
    }

    fn refuse(&self, code: Option<u16>) {
        self.api.world.state.lock().unwrap().reviews.refuse = code;
    }
}

fn problem(status: u16, kind: &str) -> (u16, String) {
    (status, format!("/problems/{kind}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_api_server_reviews_the_user_and_the_rights_of_a_token() {
    let cluster = Cluster::new("admin: {kubernetes: {audiences: [berth]}}").await;
    let forbidden = problem(403, "forbidden");
    // An unknown token has no user; so has one for another audience.
    assert_eq!(cluster.ask("no-such-token", "GET", "/node"), problem(401, "unauthorized"));
    let other = ("system:serviceaccount:x:y".to_owned(), "vault".to_owned());
    cluster.api.world.state.lock().unwrap().reviews.tokens.insert("for-vault".into(), other);
    assert_eq!(cluster.ask("for-vault", "GET", "/node"), problem(401, "unauthorized"));
    // What is allowed, and nothing else of it.
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0, 200);
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/gpus"), forbidden);
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "PUT", "/node"), forbidden);
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "PUT", "/gpus/GPU-0/cordon"), forbidden);
    let line = cluster.daemon.line(|l| l.contains("/cordon\"") && l.contains(" audit: "));
    assert!(line.contains(GRAFANA) && line.contains("known_by=\"kubernetes\""), "{line}");
    // Reviewed once a minute, not with each request.
    let (tokens, accesses) = (cluster.asked("TokenReview"), cluster.asked("SubjectAccessReview"));
    for _ in 0..20 {
        assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0, 200);
    }
    assert_eq!((cluster.asked("TokenReview"), cluster.asked("SubjectAccessReview")), (tokens, accesses));
    // The daemon's own token is never shown to the API server.
    assert_eq!(cluster.ask(&cluster.daemon.token, "GET", "/gpus").0, 200);
    assert_eq!(cluster.asked("TokenReview"), tokens);
    assert!(!cluster.daemon.log().contains(GRAFANAS_TOKEN));
    cluster.daemon.stop();
    drop(cluster.node);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_cluster_user_is_rate_limited_and_no_other_caller() {
    let cluster = Cluster::new("admin: {kubernetes: {}}").await;
    let address = cluster.daemon.base.trim_start_matches("http://").trim_end_matches("/api/v1");
    let head = "GET /api/v1/gpus HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ";
    // Otherwise every pod's token could ask without end.
    until_burst_refused(address.parse().unwrap(), &format!("{head}{GRAFANAS_TOKEN}\r\n"));
    // What they would change is refused as ever, so that it is audited; and a stranger is one.
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "PUT", "/gpus/GPU-0/cordon"), problem(403, "forbidden"));
    assert_eq!(cluster.ask("no-such-token", "GET", "/node"), problem(401, "unauthorized"));
    assert_eq!(
        cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0,
        200,
        "what they may they may as often as others"
    );
    cluster.daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_without_an_answer_gives_no_access() {
    let mut cluster = Cluster::new("admin: {kubernetes: {}}").await;
    for code in [403, 500, 503] {
        cluster.refuse(Some(code));
        assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node"), problem(503, "review-failed"));
        assert_eq!(cluster.ask("no-such-token", "GET", "/node"), problem(503, "review-failed"));
    }
    cluster.refuse(None);
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0, 200);
    // Known by now, but not whether they may do that.
    cluster.refuse(Some(500));
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/gpus"), problem(503, "review-failed"));
    cluster.refuse(None);
    cluster.api.stop();
    until("an answer soon, without the API server", || {
        let began = Instant::now();
        assert_eq!(cluster.ask("another-token", "GET", "/node"), problem(503, "review-failed"));
        began.elapsed() < Duration::from_secs(15)
    });
    assert_eq!(cluster.ask(&cluster.daemon.token, "GET", "/gpus").0, 200, "own tokens go on");
    cluster.daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_configuration_no_request_is_sent_to_the_api_server() {
    let cluster = Cluster::new("").await;
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node"), problem(401, "unauthorized"));
    assert_eq!(cluster.asked("TokenReview"), 0);
    cluster.daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reviews_are_limited_however_many_callers_and_known_users_are_served() {
    let cluster = Cluster::new("admin: {kubernetes: {audiences: [berth]}}").await;
    let reviews = |read: &dyn Fn(&mut crate::support::api_reviews::Reviews) -> usize| {
        read(&mut cluster.api.world.state.lock().unwrap().reviews)
    };
    let mut attempt = 0;
    // A review has a deadline of 5 s. If it passes on a busy machine, the test repeats with other tokens and another
    // request.
    until("a known caller does not wait for the reviews of unknown tokens", || {
        attempt += 1;
        reviews(&|r| {
            r.hold = false;
            0
        });
        until("the last reviews end", || reviews(&|r| r.under_way) == 0);
        // A caller is known for a minute after its review.
        if cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0 != 200 {
            return false;
        }
        reviews(&|r| {
            (r.hold, r.most) = (true, 0);
            0
        });
        std::thread::scope(|scope| {
            let cluster = &cluster;
            let asking = Instant::now();
            let strangers: Vec<_> = (0..40)
                .map(|n| {
                    let token = format!("stranger-{attempt}-{n}");
                    scope.spawn(move || cluster.ask(&token, "GET", "/node"))
                })
                .collect();
            until("reviews of strangers", || reviews(&|r| r.most) >= 6);
            // Unknown tokens use all of their permits, and a known caller still has one.
            let began = Instant::now();
            let known = cluster.ask(GRAFANAS_TOKEN, "GET", &format!("/gpus/GPU-{attempt}"));
            let is_served = known == problem(403, "forbidden") && began.elapsed() < Duration::from_secs(4);
            let others_wait = strangers.iter().any(|stranger| !stranger.is_finished());
            // Later the stand-in counts some whose end it has not heard of.
            let most = reviews(&|r| r.most);
            assert!(most <= 8 || asking.elapsed() > Duration::from_secs(4), "{most} reviews at a time");
            for stranger in strangers {
                assert_eq!(stranger.join().unwrap(), problem(503, "review-failed"));
            }
            is_served && others_wait
        })
    });
    reviews(&|r| {
        r.hold = false;
        0
    });
    cluster.daemon.stop();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_number_of_reviews_is_limited_and_their_paths_are_the_routed_ones() {
    let cluster = Cluster::new("admin: {kubernetes: {audiences: [berth]}}").await;
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0, 200);
    let before = cluster.asked("SubjectAccessReview");
    // The same path by another spelling is the same question.
    for path in ["/n%6fde", "/%6eode"] {
        assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", path).0, 200, "{path}");
    }
    for n in 0..50 {
        let nowhere = cluster.ask(GRAFANAS_TOKEN, "GET", &format!("/nothing/{n}"));
        assert_eq!(nowhere, problem(404, "no-such-route"));
        let long = format!("/gpus/{}{n}", "x".repeat(400));
        assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", &long), problem(400, "malformed-path"));
    }
    assert_eq!(cluster.asked("SubjectAccessReview"), before);
    let began = Instant::now();
    let mut refused = 0;
    for n in 0..400 {
        match cluster.ask(GRAFANAS_TOKEN, "GET", &format!("/gpus/GPU-{n}")) {
            (403, _) => {}
            answer => {
                assert_eq!(answer, problem(429, "too-many-requests"));
                refused += 1;
            }
        }
    }
    // A burst of two seconds, and 50 a second.
    let most = 100 + 50 * (began.elapsed().as_secs() + 1);
    let asked = u64::try_from(cluster.asked("SubjectAccessReview") - before).unwrap();
    assert!(asked <= most, "{asked} reviews in {:?}", began.elapsed());
    assert!(refused > 0 || began.elapsed() > Duration::from_secs(5), "nothing was refused");
    // What is kept is answered all the same, and so are others.
    assert_eq!(cluster.ask(GRAFANAS_TOKEN, "GET", "/node").0, 200);
    assert_eq!(cluster.ask(&cluster.daemon.token, "GET", "/gpus").0, 200);
    cluster.daemon.stop();
}
