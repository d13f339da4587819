//! Users of the stand-in API server: tokens with their owners, audiences and rights.

use crate::support::api_server::{World, refused, status};
use actix_web::web::{self, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Default)]
pub(crate) struct Reviews {
    /// Token, the user's name, and the audience that it is meant for.
    pub(crate) tokens: BTreeMap<String, (String, String)>,
    /// User, verb, path.
    pub(crate) allowed: BTreeSet<(String, String, String)>,
    /// Answers reviews with this status, if set.
    pub(crate) refuse: Option<u16>,
    /// TokenReviews are not answered as long as this is set.
    pub(crate) hold: bool,
    /// TokenReviews under way, and the most at a time.
    pub(crate) under_way: usize,
    pub(crate) most: usize,
    /// Requested reviews, by kind.
    pub(crate) asked: BTreeMap<&'static str, usize>,
}

pub(crate) fn routes(config: &mut ServiceConfig) {
    config.route("/apis/authentication.k8s.io/v1/tokenreviews", web::post().to(token));
    config.route("/apis/authorization.k8s.io/v1/subjectaccessreviews", web::post().to(access));
}

/// Counts a review, and refuses it if the test orders that. It must come from the daemon.
fn asked(world: &World, kind: &'static str, request: &HttpRequest) -> Option<HttpResponse> {
    if let Some(refused) = refused(world) {
        return Some(refused);
    }
    let mut state = world.state.lock().unwrap();
    *state.reviews.asked.entry(kind).or_default() += 1;
    let own = request.headers().get("authorization").and_then(|h| h.to_str().ok());
    assert_eq!(own, Some("Bearer t"), "the daemon asks as itself");
    state.reviews.refuse.map(|code| status(code, "reviews are refused by the test"))
}

async fn token(world: web::Data<World>, request: HttpRequest, review: web::Json<Value>) -> HttpResponse {
    if let Some(refused) = asked(&world, "TokenReview", &request) {
        return refused;
    }
    let _under = Under::way(&world);
    while world.state.lock().unwrap().reviews.hold {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    let spec = &review["spec"];
    let wanted: Vec<&str> =
        spec["audiences"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let state = world.state.lock().unwrap();
    let known = state.reviews.tokens.get(spec["token"].as_str().unwrap());
    let known = known.filter(|(_, meant)| wanted.is_empty() || wanted.contains(&meant.as_str()));
    let answer = match known {
        Some((name, meant)) => json!({"authenticated": true, "audiences": [meant],
            "user": {"username": name, "uid": "u-1", "groups": ["system:authenticated"]}}),
        None => json!({"error": "[invalid bearer token]", "user": {}}),
    };
    HttpResponse::Created().json(json!({"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview",
        "metadata": {}, "spec": {"token": ""}, "status": answer}))
}

/// A TokenReview that is not answered yet.
struct Under(web::Data<World>);

impl Under {
    fn way(world: &web::Data<World>) -> Self {
        let reviews = &mut world.state.lock().unwrap().reviews;
        reviews.under_way += 1;
        reviews.most = reviews.most.max(reviews.under_way);
        Self(world.clone())
    }
}

impl Drop for Under {
    fn drop(&mut self) {
        self.0.state.lock().unwrap().reviews.under_way -= 1;
    }
}

async fn access(world: web::Data<World>, request: HttpRequest, review: web::Json<Value>) -> HttpResponse {
    if let Some(refused) = asked(&world, "SubjectAccessReview", &request) {
        return refused;
    }
    let spec = &review["spec"];
    assert!(spec["resourceAttributes"].is_null());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let about = &spec["nonResourceAttributes"];
    let question = (text(&spec["user"]), text(&about["verb"]), text(&about["path"]));
    let allowed = world.state.lock().unwrap().reviews.allowed.contains(&question);
    HttpResponse::Created()
        .json(json!({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
        "metadata": {}, "spec": {}, "status": {"allowed": allowed}}))
}
