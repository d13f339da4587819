//! Writes to the stand-in API server: evictions with disruption budgets, deletions, events and node conditions,
//! validated as the real one validates them; and faults of one kind of write.

use crate::support::api_server::{NODE, State, World, refused, status};
use actix_web::web::{self, Data, Json, Path, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::{Instant, sleep};

/// How long a write hangs at most.
const HANG_MAX: Duration = Duration::from_secs(60);

/// What clients wrote.
#[derive(Default)]
pub(crate) struct Writes {
    /// Every request to evict or delete a pod.
    pub(crate) asked: Vec<Asked>,
    /// Disruption budgets: name, `app` label of its pods, how many must be healthy.
    budgets: Vec<(String, String, usize)>,
    /// Events by name.
    pub(crate) events: BTreeMap<String, Value>,
    /// Requests that made or repeated an event.
    pub(crate) event_writes: usize,
    /// Conditions of the node by type.
    pub(crate) conditions: BTreeMap<String, Value>,
    /// Labels of the node, with who has applied them.
    labels: BTreeMap<String, (String, BTreeSet<String>)>,
    /// Patches of the node's status.
    pub(crate) patches: usize,
    /// Kinds of write that are answered with 403, or not at all.
    faults: BTreeMap<Write, Fault>,
}

/// A request to evict or delete a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Asked {
    pub(crate) write: Write,
    pub(crate) pod: String,
    /// The precondition.
    pub(crate) uid: Option<String>,
    /// The grace period, where the client set one.
    pub(crate) grace: Option<u64>,
    pub(crate) code: u16,
}

/// A kind of write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Write {
    Evict,
    Delete,
    Event,
    Status,
    Labels,
}

/// What is done to a kind of write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Forbidden,
    Hang,
}

pub(crate) fn routes(config: &mut ServiceConfig) {
    config
        .route("/api/v1/namespaces/{namespace}/pods/{name}/eviction", web::post().to(evict))
        .route("/api/v1/namespaces/{namespace}/pods/{name}", web::delete().to(delete))
        .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events", web::post().to(create_event))
        .route("/apis/events.k8s.io/v1/namespaces/{namespace}/events/{name}", web::patch().to(repeat_event))
        .route("/api/v1/nodes/{name}/status", web::patch().to(patch_status))
        .route("/api/v1/nodes/{name}", web::patch().to(apply_labels));
}

impl World {
    /// Does this to every write of a kind from now on; `None`: answers as it should.
    pub(crate) fn fault(&self, write: Write, fault: Option<Fault>) {
        let faults = &mut self.state.lock().unwrap().writes.faults;
        match fault {
            Some(fault) => faults.insert(write, fault),
            None => faults.remove(&write),
        };
    }

    /// At least so many pods labelled `app: APP` must run.
    pub(crate) fn budget(&self, name: &str, app: &str, min: usize) {
        self.state.lock().unwrap().writes.budgets.push((name.into(), app.into(), min));
    }

    /// The requests for this pod.
    pub(crate) fn asked(&self, pod: &str) -> Vec<Asked> {
        let state = self.state.lock().unwrap();
        state.writes.asked.iter().filter(|a| a.pod == pod).cloned().collect()
    }

    /// The number of requests to evict or delete pods.
    pub(crate) fn asked_count(&self) -> usize {
        self.state.lock().unwrap().writes.asked.len()
    }

    /// UIDs of pods whose deletion was requested.
    pub(crate) fn terminating(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let pods = state.pods.iter().filter(|(_, pod)| pod["metadata"]["deletionTimestamp"].is_string());
        pods.map(|(uid, _)| uid.clone()).collect()
    }

    /// Notes of all events with this reason.
    pub(crate) fn notes(&self, reason: &str) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let events = state.writes.events.values().filter(|e| e["reason"] == reason);
        events.map(|e| e["note"].as_str().unwrap().to_owned()).collect()
    }

    /// A condition of the node.
    pub(crate) fn condition(&self, kind: &str) -> Option<Value> {
        self.state.lock().unwrap().writes.conditions.get(kind).cloned()
    }

    /// Another client labels the node.
    pub(crate) fn label(&self, key: &str, value: &str, manager: &str) {
        let mut state = self.state.lock().unwrap();
        state.writes.labels.insert(key.into(), (value.into(), BTreeSet::from([manager.to_owned()])));
        self.changed(&mut state);
    }

    /// The node's labels.
    pub(crate) fn labels(&self) -> BTreeMap<String, String> {
        let state = self.state.lock().unwrap();
        state.writes.labels.iter().map(|(key, (value, _))| (key.clone(), value.clone())).collect()
    }

    /// The pod under a name is another one from now on, and no watch says so.
    pub(crate) fn replace_unseen(&self, uid: &str, new_uid: &str) {
        let mut state = self.state.lock().unwrap();
        let mut pod = state.pods.remove(uid).unwrap();
        pod["metadata"]["uid"] = json!(new_uid);
        state.pods.insert(new_uid.into(), pod);
    }
}

/// Name, labels and their owners.
pub(crate) fn node_metadata(world: &World) -> Value {
    let state = world.state.lock().unwrap();
    let labels = &state.writes.labels;
    let managers: BTreeSet<&String> = labels.values().flat_map(|(_, managers)| managers).collect();
    let fields = managers.into_iter().map(|manager| {
        let of = labels.iter().filter(|(_, (_, managers))| managers.contains(manager));
        let keys: BTreeMap<String, Value> = of.map(|(key, _)| (format!("f:{key}"), json!({}))).collect();
        json!({"manager": manager, "operation": "Apply", "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:labels": keys}}})
    });
    let fields: Vec<Value> = fields.collect();
    let labels: BTreeMap<&String, &String> = labels.iter().map(|(key, (value, _))| (key, value)).collect();
    json!({"apiVersion": "meta.k8s.io/v1", "kind": "PartialObjectMetadata",
        "metadata": {"name": NODE, "uid": NODE, "resourceVersion": state.version.to_string(), "labels": labels,
            "managedFields": fields}})
}

/// Server-side apply of labels: each manager's own, conflicts refused unless by force.
async fn apply_labels(
    world: Data<World>,
    name: Path<String>,
    request: HttpRequest,
    body: web::Bytes,
) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Labels).await {
        return faulty;
    }
    let kind = request.headers().get("content-type").unwrap();
    if *name != NODE || kind != "application/apply-patch+yaml" {
        return status(415, "not by server-side apply");
    }
    let query = web::Query::<BTreeMap<String, String>>::from_query(request.query_string()).unwrap();
    let (manager, force) = (query["fieldManager"].clone(), query.get("force").is_some_and(|f| f == "true"));
    let body: Value = serde_json::from_slice(&body).unwrap();
    let only: Vec<&String> = body["metadata"].as_object().unwrap().keys().collect();
    if only != ["labels", "name"] || body["kind"] != "Node" {
        return status(422, "it applies more than labels");
    }
    let wanted: BTreeMap<String, String> =
        serde_json::from_value(body["metadata"]["labels"].clone()).unwrap();
    {
        let labels = &mut world.state.lock().unwrap().writes.labels;
        let others = |(key, value): &(&String, &String)| {
            labels.get(*key).is_some_and(|(now, by)| now != *value && by.iter().any(|m| *m != manager))
        };
        let taken: Vec<&String> = wanted.iter().filter(others).map(|(key, _)| key).collect();
        if !force && !taken.is_empty() {
            let cause = |key: &&String| {
                json!({"reason": "FieldManagerConflict",
                "message": "conflict with \"another-client\"", "field": format!(".metadata.labels.{key}")})
            };
            let causes: Vec<Value> = taken.iter().map(cause).collect();
            return HttpResponse::Conflict().json(
                json!({"kind": "Status", "apiVersion": "v1", "metadata": {},
                "status": "Failure", "reason": "Conflict", "code": 409, "details": {"causes": causes},
                "message": format!("Apply failed with {} conflicts", taken.len())}),
            );
        }
        for (key, (_, by)) in labels.iter_mut() {
            if !wanted.contains_key(key) {
                by.remove(&manager);
            }
        }
        labels.retain(|_, (_, by)| !by.is_empty());
        for (key, value) in wanted {
            let label = labels.entry(key).or_default();
            label.0 = value;
            label.1.insert(manager.clone());
        }
    }
    HttpResponse::Ok().json(node_metadata(&world))
}

/// The whole node.
pub(crate) fn node_object(world: &World) -> Value {
    let state = world.state.lock().unwrap();
    let conditions: Vec<&Value> = state.writes.conditions.values().collect();
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE, "uid": "of-the-object"},
        "status": {"conditions": conditions}})
}

/// What is done to this kind of write, if anything.
async fn faulty(world: &World, write: Write) -> Option<HttpResponse> {
    if let Some(refused) = refused(world) {
        return Some(refused);
    }
    let fault = || world.state.lock().unwrap().writes.faults.get(&write).copied();
    if fault() == Some(Fault::Forbidden) {
        return Some(status(403, &format!("{write:?} is forbidden: the role does not allow it")));
    }
    let end = Instant::now() + HANG_MAX;
    while fault() == Some(Fault::Hang) && Instant::now() < end {
        sleep(Duration::from_millis(20)).await;
    }
    None
}

fn uid_of_precondition(options: &Value) -> Option<String> {
    options["preconditions"]["uid"].as_str().map(str::to_owned)
}

async fn evict(world: Data<World>, path: Path<(String, String)>, body: Json<Value>) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Evict).await {
        return faulty;
    }
    // The real API server drops unknown fields without an error; here they fail the test.
    let known = ["apiVersion", "kind", "metadata", "deleteOptions"];
    let unknown = body.as_object().unwrap().keys().find(|key| !known.contains(&key.as_str()));
    assert_eq!(unknown, None);
    if body["kind"] != "Eviction" || body["apiVersion"] != "policy/v1" || body["metadata"]["name"] != path.1 {
        return status(400, "no Eviction of policy/v1 of this pod");
    }
    let answer = go(&world, &path, &body["deleteOptions"], Write::Evict);
    // A dry run sends no pod away.
    if !is_dry_run(&body["deleteOptions"]) {
        note(&world, Write::Evict, &path, &body["deleteOptions"], &answer);
    }
    answer
}

fn is_dry_run(options: &Value) -> bool {
    options["dryRun"] == json!(["All"])
}

async fn delete(world: Data<World>, path: Path<(String, String)>, body: Json<Value>) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Delete).await {
        return faulty;
    }
    let answer = go(&world, &path, &body, Write::Delete);
    note(&world, Write::Delete, &path, &body, &answer);
    answer
}

fn note(world: &World, write: Write, path: &(String, String), options: &Value, answer: &HttpResponse) {
    world.state.lock().unwrap().writes.asked.push(Asked {
        write,
        pod: path.1.clone(),
        uid: uid_of_precondition(options),
        grace: options["gracePeriodSeconds"].as_u64(),
        code: answer.status().as_u16(),
    });
}

fn go(world: &World, path: &(String, String), options: &Value, write: Write) -> HttpResponse {
    let mut state = world.state.lock().unwrap();
    let found = state.pods.values().find(|pod| {
        pod["metadata"]["namespace"] == path.0.as_str() && pod["metadata"]["name"] == path.1.as_str()
    });
    let Some(mut pod) = found.cloned() else {
        return status(404, &format!("pods \"{}\" not found", path.1));
    };
    let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
    if uid_of_precondition(options).is_some_and(|wanted| wanted != uid) {
        return status(409, "the UID in the precondition does not match the UID in record");
    }
    if write == Write::Evict
        && let Some(refused) = over_budget(&state, &pod)
    {
        return refused;
    }
    if !pod["metadata"]["deletionTimestamp"].is_string() && !is_dry_run(options) {
        let grace = pod["spec"]["terminationGracePeriodSeconds"].as_u64().unwrap_or(30);
        pod["metadata"]["deletionTimestamp"] = json!(rfc3339(grace));
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
        state.version += 1;
        pod["metadata"]["resourceVersion"] = json!(state.version.to_string());
        state.pods.insert(uid, pod.clone());
        world.log(&mut state, "MODIFIED", pod.clone());
    }
    match write {
        Write::Delete => HttpResponse::Ok().json(pod),
        _ => HttpResponse::Created()
            .json(json!({"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201})),
    }
}

/// The message of a real API server, with the header that makes clients of some libraries wait for ever.
fn over_budget(state: &State, pod: &Value) -> Option<HttpResponse> {
    let app = pod["metadata"]["labels"]["app"].as_str()?;
    let healthy = |p: &&Value| {
        p["metadata"]["labels"]["app"] == app
            && p["status"]["phase"] == "Running"
            && !p["metadata"]["deletionTimestamp"].is_string()
    };
    let have = state.pods.values().filter(healthy).count();
    let (name, _, needs) = state.writes.budgets.iter().find(|(_, of, min)| of == app && have <= *min)?;
    let cause = format!("The disruption budget {name} needs {needs} healthy pods and has {have} currently");
    let body = json!({"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": 429,
        "message": "Cannot evict pod as it would violate the pod's disruption budget.",
        "reason": "TooManyRequests",
        "details": {"causes": [{"reason": "DisruptionBudget", "message": cause}]}});
    Some(HttpResponse::TooManyRequests().insert_header(("Retry-After", "10")).json(body))
}

async fn create_event(world: Data<World>, namespace: Path<String>, body: Json<Value>) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Event).await {
        return faulty;
    }
    let mut event = body.into_inner();
    if let Some(wrong) = wrong_event(&event, &namespace) {
        return status(422, wrong);
    }
    let name = event["metadata"]["name"].as_str().unwrap().to_owned();
    event["metadata"]["namespace"] = json!(*namespace);
    let writes = &mut world.state.lock().unwrap().writes;
    writes.event_writes += 1;
    if writes.events.insert(name, event.clone()).is_some() {
        return status(409, "there is such an event already");
    }
    HttpResponse::Created().json(event)
}

/// The reason for which events.k8s.io/v1 refuses an event.
fn wrong_event(event: &Value, namespace: &str) -> Option<&'static str> {
    let text = |key: &str| event[key].as_str().unwrap_or_default();
    let regarding = event["regarding"]["namespace"].as_str();
    if ["reason", "action", "reportingController", "reportingInstance", "eventTime"]
        .iter()
        .any(|key| text(key).is_empty())
    {
        return Some("something is missing");
    }
    if text("note").len() > 1024 || text("reason").len() > 128 || text("action").len() > 128 {
        return Some("something is too long");
    }
    if !["Normal", "Warning"].contains(&text("type")) {
        return Some("no such type");
    }
    let fits = regarding.map_or(namespace == "default", |of| of == namespace);
    (!fits).then_some("the namespace is not that of the object")
}

async fn repeat_event(world: Data<World>, path: Path<(String, String)>, body: Json<Value>) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Event).await {
        return faulty;
    }
    let writes = &mut world.state.lock().unwrap().writes;
    let Some(event) = writes.events.get_mut(&path.1) else {
        return status(404, "no such event");
    };
    event["series"] = body["series"].clone();
    writes.event_writes += 1;
    HttpResponse::Ok().json(&*event)
}

async fn patch_status(
    world: Data<World>,
    name: Path<String>,
    request: HttpRequest,
    body: Json<Value>,
) -> HttpResponse {
    if let Some(faulty) = faulty(&world, Write::Status).await {
        return faulty;
    }
    // Any other kind of patch would put our condition in the place of the kubelet's.
    let kind = request.headers().get("content-type").unwrap();
    if *name != NODE || kind != "application/strategic-merge-patch+json" {
        return status(415, "not merged by type");
    }
    {
        let writes = &mut world.state.lock().unwrap().writes;
        writes.patches += 1;
        for condition in body["status"]["conditions"].as_array().unwrap() {
            writes.conditions.insert(condition["type"].as_str().unwrap().to_owned(), condition.clone());
        }
    }
    HttpResponse::Ok().json(node_object(&world))
}

/// So many seconds from now.
fn rfc3339(seconds: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(now + seconds)).to_string()
}
