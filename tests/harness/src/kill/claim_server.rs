//! The API server of a node: it has the node, and ResourceClaims with what a scheduler has allocated to them. It refuses all
//! other requests, so that the pods of the node are known from the kubelet alone.

use actix_web::dev::ServerHandle;
use actix_web::http::StatusCode;
use actix_web::{App, HttpResponse, HttpServer, web};
use anyhow::Context as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The namespace of all claims.
pub(crate) const NAMESPACE: &str = "crash";

type Claims = Mutex<BTreeMap<String, Value>>;

/// An API server that serves until it is dropped.
#[derive(Debug)]
pub(crate) struct ClaimServer {
    claims: Arc<Claims>,
    address: SocketAddr,
    handle: ServerHandle,
    thread: Option<JoinHandle<()>>,
}

/// A ResourceClaim that a scheduler has allocated.
#[derive(Clone, Debug)]
pub(crate) struct AllocatedClaim<'a> {
    pub(crate) name: &'a str,
    pub(crate) uid: &'a str,
    pub(crate) driver: &'a str,
    pub(crate) pool: &'a str,
    /// Names in the ResourceSlices.
    pub(crate) devices: Vec<String>,
}

impl ClaimServer {
    /// # Errors
    /// If it cannot listen.
    pub(crate) fn start() -> anyhow::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .context("the API server of the claims cannot listen")?;
        let address = listener.local_addr()?;
        let claims = Arc::<Claims>::default();
        let (shared, (started, handle)) = (Arc::clone(&claims), mpsc::channel());
        let thread = std::thread::spawn(move || {
            let app = move || {
                App::new()
                    .app_data(web::Data::from(Arc::clone(&shared)))
                    .route(
                        &format!("/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims/{{name}}"),
                        web::get().to(claim),
                    )
                    .route("/api/v1/nodes/{name}", web::get().to(node))
                    .default_service(web::to(refuse))
            };
            actix_web::rt::System::new().block_on(async move {
                let server = HttpServer::new(app).workers(1).disable_signals().shutdown_timeout(0);
                // Without a handle, `start` fails.
                if let Ok(server) = server.listen(listener) {
                    let server = server.run();
                    let _ = started.send(server.handle());
                    let _ = server.await;
                }
            });
        });
        let handle = handle.recv().context("the API server of the claims")?;
        Ok(Self { claims, address, handle, thread: Some(thread) })
    }

    /// Writes a kubeconfig for this API server.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(crate) fn write_kubeconfig(&self, path: &Path) -> anyhow::Result<()> {
        let text = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": format!("http://{}", self.address)}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        });
        Ok(std::fs::write(path, text.to_string())?)
    }

    /// Adds a claim.
    pub(crate) fn allocate(&self, claim: &AllocatedClaim<'_>) {
        let AllocatedClaim { name, uid, driver, pool, devices } = claim;
        let result = |device| json!({"request": "gpu", "driver": driver, "pool": pool, "device": device});
        let results: Vec<Value> = devices.iter().map(result).collect();
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": {"name": name, "namespace": NAMESPACE, "uid": uid},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": format!("pod-of-{name}"), "uid": format!("pod-{uid}")}],
            },
        });
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).insert((*name).to_owned(), object);
    }

    /// Deletes a claim.
    pub(crate) fn delete(&self, name: &str) {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
    }
}

impl Drop for ClaimServer {
    fn drop(&mut self) {
        // Ends the server's thread; the future itself only waits for it.
        drop(self.handle.stop(false));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn claim(claims: web::Data<Claims>, name: web::Path<String>) -> HttpResponse {
    let claims = claims.lock().unwrap_or_else(PoisonError::into_inner);
    match claims.get(&*name) {
        Some(claim) => HttpResponse::Ok().json(claim),
        None => status(StatusCode::NOT_FOUND, "NotFound"),
    }
}

async fn node(name: web::Path<String>) -> HttpResponse {
    let metadata = json!({"name": *name, "uid": "uid-of-the-node"});
    HttpResponse::Ok().json(json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata}))
}

async fn refuse() -> HttpResponse {
    status(StatusCode::FORBIDDEN, "Forbidden")
}

fn status(code: StatusCode, reason: &str) -> HttpResponse {
    HttpResponse::build(code).json(json!({
        "apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason,
        "message": "this API server has only claims and nodes", "code": code.as_u16(),
    }))
}
