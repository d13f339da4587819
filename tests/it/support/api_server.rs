//! A stand-in API server over real HTTP: one node, its pods, lists and watches as kube clients request them, and
//! faults that tests order.

use crate::support::api_reviews::{self, Reviews};
use crate::support::api_writes::{self, Writes};
use crate::support::port::Port;
use crate::support::wait::SOON;
use actix_web::dev::ServerHandle;
use actix_web::dev::Service as _;
use actix_web::web::{self, Bytes};
use actix_web::{App, HttpRequest, HttpResponse, HttpServer};
use futures_util::stream;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

/// A list of pods, for [`World::came`].
pub(crate) const LIST: &str = "GET /api/v1/pods";
/// A watch of pods.
pub(crate) const WATCH: &str = "GET /api/v1/pods watch";
/// A watch of the node's metadata.
pub(crate) const NODE_WATCH: &str = "GET /api/v1/nodes watch";
/// A read of the node or of its metadata.
pub(crate) const NODE_READ: &str = "GET /api/v1/nodes/node-1";

/// The name of its one node.
pub(crate) const NODE: &str = "node-1";

/// An API server that serves until it is dropped.
pub(crate) struct ApiServer {
    pub(crate) world: Arc<World>,
    port: Port,
    serving: Option<Serving>,
}

struct Serving {
    handle: ServerHandle,
    thread: std::thread::JoinHandle<()>,
    /// Upgrades as long as a worker or a connection of the server is left.
    connections: Weak<()>,
}

/// The cluster's state, and the faults that tests order.
pub(crate) struct World {
    pub(crate) state: Mutex<State>,
    /// The newest resource version; who watches waits for it.
    news: watch::Sender<u64>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) version: u64,
    pub(crate) pods: BTreeMap<String, Value>,
    /// Every event since the start: version, type, object.
    log: Vec<(u64, &'static str, Value)>,
    /// Answers every request with this status, if set.
    refuse: Option<u16>,
    /// The same for requests of pods alone, by how many there still are, with a `Retry-After` in seconds.
    refuse_pods: Option<(u16, usize, u64)>,
    /// How often watches were cut off; one that began before the newest cut ends, and how.
    cuts: u64,
    cut: Cut,
    /// How many watches of pods began: each of them sees every later cut.
    begun: usize,
    /// Watches from before this version get 410 Gone.
    forgotten_before: u64,
    /// How often a watch with bookmarks is sent one, if at all.
    bookmarks: Option<Duration>,
    /// Every request so far: when it came, its method and path, and whether it is a watch.
    asked: Vec<(Instant, String)>,
    /// What is done to reads of a kind.
    reads: BTreeMap<Read, Unread>,
    /// Reads that were refused so, and watches and lists that began to hang.
    unread: usize,
    /// What clients wrote, and what is done to their writes.
    pub(crate) writes: Writes,
    /// The users, and their rights.
    pub(crate) reviews: Reviews,
}

/// How a watch is cut off.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Cut {
    /// It ends as it does after its requested time.
    #[default]
    Clean,
    /// The connection breaks.
    Broken,
    /// It ends with an event that names an error.
    Event(u16),
}

impl Cut {
    /// The last bytes of a watch that is cut off; `None` if it ends without any.
    fn last(self) -> Option<std::io::Result<Bytes>> {
        match self {
            Self::Clean => None,
            Self::Broken => Some(Err(std::io::Error::other("broken by the test"))),
            Self::Event(code) => Some(Ok(Bytes::from(wrong(code)))),
        }
    }
}

/// A kind of read: the whole node object, watches of it, or lists and watches of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Read {
    Node,
    NodeWatch,
    Pods,
}

/// What is done to a kind of read: a refusal, or no answer, by watches that are under way neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unread {
    Refuse(u16),
    Hang,
}

/// A pod as the API server has it.
pub(crate) fn pod(namespace: &str, name: &str, uid: &str, limits: &[(&str, usize)]) -> Value {
    let limits: BTreeMap<&str, String> = limits.iter().map(|(r, n)| (*r, n.to_string())).collect();
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": NODE, "containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"},
    })
}

impl ApiServer {
    pub(crate) fn start() -> Self {
        let world = Arc::new(World { state: Mutex::default(), news: watch::channel(0).0 });
        let mut server = Self { world, port: Port::held(), serving: None };
        server.serve();
        server
    }

    /// Serves; again at the same address after [`Self::stop`].
    pub(crate) fn serve(&mut self) {
        let listener = TcpListener::bind(self.port.address()).unwrap();
        let (world, (started, handle)) = (Arc::clone(&self.world), std::sync::mpsc::channel());
        let in_use = Arc::new(());
        let connections = Arc::downgrade(&in_use);
        let thread = std::thread::spawn(move || {
            let serve = async move {
                let app = move || {
                    let seen = Arc::clone(&world);
                    App::new()
                        .wrap_fn(move |request, next| {
                            let watch =
                                if request.query_string().contains("watch=true") { " watch" } else { "" };
                            let what = format!("{} {}{watch}", request.method(), request.path());
                            seen.state.lock().unwrap().asked.push((Instant::now(), what));
                            next.call(request)
                        })
                        .app_data(web::Data::from(Arc::clone(&world)))
                        .app_data(Arc::clone(&in_use))
                        .route("/api/v1/nodes", web::get().to(nodes))
                        .route("/api/v1/nodes/{name}", web::get().to(node))
                        .route("/api/v1/pods", web::get().to(pods))
                        .configure(api_writes::routes)
                        .configure(api_reviews::routes)
                };
                let server = HttpServer::new(app).workers(1).disable_signals().shutdown_timeout(0);
                let server = server.listen(listener).unwrap().run();
                started.send(server.handle()).unwrap();
                server.await.unwrap();
            };
            actix_web::rt::System::new().block_on(serve);
        });
        self.serving = Some(Serving { handle: handle.recv().unwrap(), thread, connections });
    }

    /// Ends all connections; a dial is refused from now on.
    pub(crate) fn stop(&mut self) {
        if let Some(Serving { handle, thread, connections }) = self.serving.take() {
            // Ends the server's thread; the future itself only waits for it.
            drop(handle.stop(false));
            thread.join().unwrap();
            // The worker's thread ends a little later, and answers what comes over an open connection until then.
            let end = std::time::Instant::now() + SOON;
            while connections.strong_count() > 0 {
                assert!(std::time::Instant::now() < end, "connections of the stopped server stay open");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// A kubeconfig that leads here.
    pub(crate) fn kubeconfig(&self, folder: &Path) -> PathBuf {
        let path = folder.join("kubeconfig");
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.port.address())}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        std::fs::write(&path, text.to_string()).unwrap();
        path
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.stop();
    }
}

impl World {
    /// Adds a pod, or changes the one with its UID.
    pub(crate) fn apply(&self, mut pod: Value) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let kind = if state.pods.insert(uid, pod.clone()).is_some() { "MODIFIED" } else { "ADDED" };
        self.log(&mut state, kind, pod);
    }

    /// Changes the pod with this UID.
    pub(crate) fn change(&self, uid: &str, change: impl FnOnce(&mut Value)) {
        let mut pod = self.state.lock().unwrap().pods[uid].clone();
        change(&mut pod);
        self.apply(pod);
    }

    /// Deletes the pod with this UID.
    pub(crate) fn delete(&self, uid: &str) {
        let mut state = self.state.lock().unwrap();
        let Some(mut pod) = state.pods.remove(uid) else { return };
        state.version += 1;
        pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
        self.log(&mut state, "DELETED", pod);
    }

    /// Notifies the watches of a change of something other than a pod.
    pub(crate) fn changed(&self, state: &mut State) {
        state.version += 1;
        self.news.send_replace(state.version);
    }

    pub(crate) fn log(&self, state: &mut State, kind: &'static str, pod: Value) {
        let version = state.version;
        state.log.push((version, kind, pod));
        self.news.send_replace(version);
    }

    /// Answers everything with this status from now on; `None`: as it should.
    pub(crate) fn refuse(&self, status: Option<u16>) {
        self.state.lock().unwrap().refuse = status;
        self.cut(Cut::Clean);
    }

    /// Answers so many requests of pods with this status and `Retry-After`, from now on.
    pub(crate) fn refuse_pods(&self, status: u16, times: usize, retry_after_s: u64) {
        self.state.lock().unwrap().refuse_pods = Some((status, times, retry_after_s));
    }

    /// Cuts off every watch that is under way.
    pub(crate) fn cut(&self, how: Cut) {
        let mut state = self.state.lock().unwrap();
        state.cuts += 1;
        state.cut = how;
        self.news.send_replace(state.version);
    }

    /// Forgets all earlier events, as an API server does that restarts.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock().unwrap();
        state.version += 1;
        state.forgotten_before = state.version;
    }

    /// Sends bookmarks so often.
    pub(crate) fn bookmarks(&self, every: Duration) {
        self.state.lock().unwrap().bookmarks = Some(every);
    }

    /// When requests of this kind came: a method and a path, with ` watch` behind it for a watch.
    pub(crate) fn came(&self, what: &str) -> Vec<Instant> {
        let state = self.state.lock().unwrap();
        state.asked.iter().filter(|(_, asked)| asked == what).map(|(at, _)| *at).collect()
    }

    /// How many requests came, by kind.
    pub(crate) fn requests(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for (_, what) in &self.state.lock().unwrap().asked {
            *counts.entry(what.clone()).or_default() += 1;
        }
        counts
    }

    /// Does this to every read of a kind from now on; `None`: answers as it should.
    pub(crate) fn read_fault(&self, read: Read, fault: Option<Unread>) {
        let mut state = self.state.lock().unwrap();
        match fault {
            Some(fault) => state.reads.insert(read, fault),
            None => state.reads.remove(&read),
        };
        // A refusal ends watches; what hangs is left hanging.
        drop(state);
        if matches!(fault, Some(Unread::Refuse(_))) {
            self.cut(Cut::Clean);
        }
    }

    /// How many reads were refused or began to hang.
    pub(crate) fn unread(&self) -> usize {
        self.state.lock().unwrap().unread
    }

    fn hangs(&self, read: Read) -> bool {
        self.state.lock().unwrap().reads.get(&read) == Some(&Unread::Hang)
    }

    /// How many watches of pods began. A request that only came may still miss a cut.
    pub(crate) fn watches_begun(&self) -> usize {
        self.state.lock().unwrap().begun
    }

    /// How often pods were listed.
    pub(crate) fn lists(&self) -> usize {
        self.came(LIST).len()
    }
}

pub(crate) fn refused(world: &World) -> Option<HttpResponse> {
    let code = world.state.lock().unwrap().refuse?;
    Some(status(code, "refused by the test"))
}

pub(crate) fn status(code: u16, message: &str) -> HttpResponse {
    let body = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Test",
        "message": message, "code": code});
    HttpResponse::build(actix_web::http::StatusCode::from_u16(code).unwrap()).json(body)
}

/// What is done to this kind of read, if anything; a client that hangs up ends the waiting.
async fn faulty(world: &World, read: Read) -> Option<HttpResponse> {
    if let Some(refused) = refused(world) {
        return Some(refused);
    }
    let fault = {
        let mut state = world.state.lock().unwrap();
        let fault = state.reads.get(&read).copied()?;
        state.unread += 1;
        fault
    };
    if let Unread::Refuse(code) = fault {
        return Some(status(code, "refused by the test"));
    }
    while world.hangs(read) {
        sleep(Duration::from_millis(20)).await;
    }
    None
}

async fn node(world: web::Data<World>, name: web::Path<String>, request: HttpRequest) -> HttpResponse {
    if let Some(refused) = refused(&world) {
        return refused;
    }
    if *name != NODE {
        return status(404, &format!("nodes \"{name}\" not found"));
    }
    let accept = request.headers().get("accept").and_then(|a| a.to_str().ok()).unwrap_or_default();
    if !accept.contains("as=PartialObjectMetadata") {
        if let Some(faulty) = faulty(&world, Read::Node).await {
            return faulty;
        }
        return HttpResponse::Ok().json(api_writes::node_object(&world));
    }
    HttpResponse::Ok().json(api_writes::node_metadata(&world))
}

/// Watches of the node's metadata by its name, for the requested time.
async fn nodes(world: web::Data<World>, request: HttpRequest) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Read::NodeWatch).await {
        return faulty;
    }
    let query = web::Query::<BTreeMap<String, String>>::from_query(request.query_string()).unwrap();
    let accept = request.headers().get("accept").and_then(|a| a.to_str().ok()).unwrap_or_default();
    let own = query.get("fieldSelector") == Some(&format!("metadata.name={NODE}"));
    let watches = query.get("watch").is_some_and(|w| w == "true" || w == "1");
    if !own || !watches || !accept.contains("as=PartialObjectMetadata") {
        return status(403, "this service account may watch the metadata of its own node only");
    }
    let since: u64 = query["resourceVersion"].parse().unwrap();
    let end = Instant::now() + Duration::from_secs(query["timeoutSeconds"].parse().unwrap());
    let world = world.into_inner();
    let news = world.news.subscribe();
    let cuts = {
        let state = world.state.lock().unwrap();
        if since < state.forgotten_before {
            return HttpResponse::Ok().content_type("application/json").body(wrong(410));
        }
        state.cuts
    };
    let since = Some(since);
    let lines = stream::unfold((world, news, since), move |(world, mut news, since)| async move {
        let since = since?;
        loop {
            let version = *news.borrow_and_update();
            let cut = {
                let state = world.state.lock().unwrap();
                (state.cuts != cuts).then_some(state.cut)
            };
            if let Some(cut) = cut {
                return Some((cut.last()?, (world, news, None)));
            }
            if version > since {
                let object = api_writes::node_metadata(&world);
                let line = format!("{}\n", json!({"type": "MODIFIED", "object": object}));
                return Some((Ok(Bytes::from(line)), (world, news, Some(version))));
            }
            if !matches!(timeout_at(end, news.changed()).await, Ok(Ok(()))) {
                return None;
            }
        }
    });
    HttpResponse::Ok().content_type("application/json").streaming(Box::pin(lines))
}

async fn pods(world: web::Data<World>, request: HttpRequest) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Read::Pods).await {
        return faulty;
    }
    if let Some(refused) = refused_for_now(&world) {
        return refused;
    }
    let query = web::Query::<BTreeMap<String, String>>::from_query(request.query_string()).unwrap();
    // A request for the pods of other nodes is refused.
    if query.get("fieldSelector") != Some(&format!("spec.nodeName={NODE}")) {
        return status(403, "this service account may list the pods of its own node only");
    }
    match query.get("watch").map(String::as_str) {
        Some("true" | "1") => {
            let since = query["resourceVersion"].parse().unwrap();
            let seconds = query.get("timeoutSeconds").map_or(60, |s| s.parse().unwrap());
            let bookmarks = query.get("allowWatchBookmarks").is_some_and(|asked| asked == "true");
            watched(world.into_inner(), since, Duration::from_secs(seconds), bookmarks)
        }
        // Further pages are read from etcd.
        _ if query.contains_key("limit") => status(400, "this list is to be asked for in one page"),
        _ => {
            let state = world.state.lock().unwrap();
            let items: Vec<&Value> = state.pods.values().collect();
            HttpResponse::Ok().json(json!({"apiVersion": "v1", "kind": "PodList",
                "metadata": {"resourceVersion": state.version.to_string()}, "items": items}))
        }
    }
}

/// A refusal of requests of pods, as long as there are any left.
fn refused_for_now(world: &World) -> Option<HttpResponse> {
    let mut state = world.state.lock().unwrap();
    let (code, left, retry_after_s) = state.refuse_pods.as_mut()?;
    *left = left.checked_sub(1)?;
    // As the API server's own: the time is in the header alone, and the body is no Status.
    let status = actix_web::http::StatusCode::from_u16(*code).unwrap();
    let header = ("retry-after", retry_after_s.to_string());
    Some(HttpResponse::build(status).insert_header(header).body("Too many requests, please try again later."))
}

/// A line of a watch with an error of this code.
fn wrong(code: u16) -> String {
    let status = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": "Test",
        "message": "ended by the test", "code": code});
    format!("{}\n", json!({"type": "ERROR", "object": status}))
}

/// The events after `since`, a line each, until the time is up or the watch is cut.
fn watched(world: Arc<World>, since: u64, lasts: Duration, bookmarks: bool) -> HttpResponse {
    let (end, news) = (Instant::now() + lasts, world.news.subscribe());
    let (cuts, every) = {
        let mut state = world.state.lock().unwrap();
        if since < state.forgotten_before {
            return HttpResponse::Ok().content_type("application/json").body(wrong(410));
        }
        state.begun += 1;
        (state.cuts, state.bookmarks.filter(|_| bookmarks))
    };
    let since = Some(since);
    let lines = stream::unfold((world, news, since), move |(world, mut news, since)| async move {
        let since = since?;
        loop {
            news.mark_unchanged();
            if world.hangs(Read::Pods) {
                sleep(Duration::from_millis(20)).await;
                continue;
            }
            {
                let state = world.state.lock().unwrap();
                if state.cuts != cuts {
                    let cut = state.cut;
                    drop(state);
                    return Some((cut.last()?, (world, news, None)));
                }
                let next = state.log.iter().find(|(version, ..)| *version > since);
                if let Some((version, kind, object)) = next {
                    let line = format!("{}\n", json!({"type": kind, "object": object}));
                    let item = Ok::<_, std::io::Error>(Bytes::from(line));
                    let version = *version;
                    drop(state);
                    return Some((item, (world, news, Some(version))));
                }
            }
            let next = every.map_or(end, |every| end.min(Instant::now() + every));
            match timeout_at(next, news.changed()).await {
                Ok(Ok(())) => {}
                _ if world.hangs(Read::Pods) => {}
                _ if next < end => {
                    let version = world.state.lock().unwrap().version;
                    let object = json!({"apiVersion": "v1", "kind": "Pod",
                        "metadata": {"resourceVersion": version.to_string(), "creationTimestamp": null}});
                    let line = format!("{}\n", json!({"type": "BOOKMARK", "object": object}));
                    return Some((Ok(Bytes::from(line)), (world, news, Some(version.max(since)))));
                }
                _ => return None,
            }
        }
    });
    HttpResponse::Ok().content_type("application/json").streaming(Box::pin(lines))
}
