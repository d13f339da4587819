//! A client of the API server, by the service account of our pod or by a kubeconfig.

use super::settings::{ApiServer, ApiServerStatus, Settings};
use super::wait::{self, Backoff};
use http::Response;
use http::header::RETRY_AFTER;
use k8s_openapi::api::core::v1::Node;
use kube::client::{ClientBuilder, DynBody};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::{PartialObjectMeta, Status};
use kube::{Api, Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};
use tower::util::MapResponseLayer;

/// Most bytes that are read of a kubeconfig; clusters and users by the hundred need less.
const KUBECONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// Timeout of one request. Watches have a timeout of their own.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(15);

/// The API server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig is missing or wrong.
    #[error("the kubeconfig {0} cannot be used")]
    Kubeconfig(PathBuf, #[source] Box<KubeconfigError>),
    /// The kubeconfig cannot be parsed. The parser's error is left out: it quotes the file, secrets included.
    #[error(
        "the file {0} is not a valid kubeconfig (`kubectl --kubeconfig {0} config view` shows where it is wrong)"
    )]
    Malformed(PathBuf),
    /// The kubeconfig gets its credentials from a program (`exec` or `auth-provider`). Each refresh would run it while
    /// all requests wait for it, and the library gives it no deadline (kube-client 5.0, `RefreshableToken`): with one
    /// that hangs the daemon would work on outdated pods, without an error.
    #[error(
        "the kubeconfig {path} gets its credentials from a program ({program}), and Berth runs none: use one with a \
         client certificate, a token or a tokenFile that something else renews, such as a service account's"
    )]
    Program {
        /// Which file.
        path: PathBuf,
        /// The program, without its arguments, which may be secrets.
        program: String,
    },
    /// The service account of the pod is incomplete.
    #[error("the pod's service account cannot be used (set automountServiceAccountToken: true)")]
    InCluster(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The client cannot be built from the configuration.
    #[error("the client of the API server cannot be built from the kubeconfig or service account")]
    Client(#[source] Box<kube::Error>),
    /// The node object cannot be read: no connection, or an error status.
    #[error("cannot read node {node:?} from the API server at {url}{hint}")]
    Request {
        /// URL of the API server.
        url: String,
        /// The node's name.
        node: String,
        /// What to do, or empty.
        hint: &'static str,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// It has no object of this node: it may be another cluster's API server.
    #[error(
        "the API server at {url} has no node {node:?}: set --node-name to the node's name there, or --kubeconfig to that of this cluster"
    )]
    UnknownNode {
        /// URL of the API server.
        url: String,
        /// The node's name.
        node: String,
    },
    /// No answer of the API server with this URL within the timeout of a request, 15 s.
    #[error("the API server at {0} did not answer within {seconds} s", seconds = ANSWER_MAX.as_secs())]
    Timeout(String),
}

impl ConnectError {
    /// Whether a retry may succeed without a configuration change: no connection, no answer in time, or a server
    /// that is starting or busy.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Timeout(_) => true,
            Self::Request { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => status.code == 429 || status.code >= 500,
                _ => true,
            },
            _ => false,
        }
    }
}

/// Connects once, and checks that the API server has an object of this node: with the API server of another cluster all
/// pods of this node would seem to be deleted.
///
/// # Errors
/// If the API server cannot be used; the error names the remedy.
pub async fn connect(settings: &Settings) -> Result<Client, ConnectError> {
    connect_and_get_node(settings).await.map(|(client, _)| client)
}

/// [`connect`], which also returns the metadata of this node.
pub(super) async fn connect_and_get_node(
    settings: &Settings,
) -> Result<(Client, PartialObjectMeta<Node>), ConnectError> {
    let mut config = match &settings.api_server {
        ApiServer::Kubeconfig(path) => config_from_file(path).await?,
        ApiServer::InCluster | ApiServer::Off => {
            Config::incluster().map_err(|error| ConnectError::InCluster(Box::new(error)))?
        }
    };
    // The library would repeat for minutes an eviction that a disruption budget forbids, and not report it. The retries
    // are those of this crate.
    config.default_retry = false;
    // Bookmarks come more often than this: a connection that delivers nothing for longer is dead.
    config.read_timeout = Some(settings.read_timeout);
    config.reset_reader_on_write = true;
    let url = config.cluster_url.to_string();
    let builder = ClientBuilder::try_from(config);
    let builder = builder.map_err(|error| ConnectError::Client(Box::new(error)))?;
    // Read here: the library drops the headers of an error response.
    let retry_after = settings.retry_after.clone();
    let record_retry_after = MapResponseLayer::new(move |response: Response<Box<DynBody>>| {
        let header = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        retry_after.record(response.status().as_u16(), header, Instant::now());
        response
    });
    let client = builder.with_layer(&record_retry_after).build();
    let node = get_node(&client, &url, &settings.node).await?;
    Ok((client, node))
}

async fn config_from_file(path: &Path) -> Result<Config, ConnectError> {
    let wrong = |e| match e {
        KubeconfigError::Parse(_) => ConnectError::Malformed(path.to_owned()),
        other => ConnectError::Kubeconfig(path.to_owned(), Box::new(other)),
    };
    // The file is opened here first: the library would block on a FIFO.
    let text = berth_files::read_text(path, KUBECONFIG_BYTES_MAX);
    text.map_err(|error| wrong(KubeconfigError::ReadConfig(error, path.to_owned())))?;
    let file = Kubeconfig::read_from(path).map_err(wrong)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)?;
    match credential_program(&config.auth_info) {
        Some(program) => Err(ConnectError::Program { path: path.to_owned(), program }),
        None => Ok(config),
    }
}

/// The program that the library would run for credentials; fields are checked in the library's order.
fn credential_program(user: &AuthInfo) -> Option<String> {
    if let Some(provider) = &user.auth_provider {
        return provider.config.get("cmd-path").cloned();
    }
    let has_static_credentials = user.username.is_some() && user.password.is_some()
        || user.token.is_some()
        || user.token_file.is_some();
    let exec = user.exec.as_ref().filter(|_| !has_static_credentials)?;
    Some(exec.command.clone().unwrap_or_else(|| "unnamed".to_owned()))
}

/// Reads the metadata of this node.
async fn get_node(client: &Client, url: &str, node: &str) -> Result<PartialObjectMeta<Node>, ConnectError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let answer = timeout(ANSWER_MAX, nodes.get_metadata(node)).await;
    match answer.map_err(|_| ConnectError::Timeout(url.to_owned()))? {
        Ok(found) => Ok(found),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            Err(ConnectError::UnknownNode { url: url.to_owned(), node: node.to_owned() })
        }
        Err(error) => Err(ConnectError::Request {
            url: url.to_owned(),
            node: node.to_owned(),
            hint: hint(&error),
            source: Box::new(error),
        }),
    }
}

/// Reads the versions of the node's kubelet and container runtime, which the kubelet reports.
///
/// # Errors
/// If the API server cannot be used; the error names the remedy.
pub async fn node_info(settings: &Settings) -> Result<NodeInfo, ConnectError> {
    let (client, _) = connect_and_get_node(settings).await?;
    let nodes: Api<Node> = Api::all(client);
    let request = |source| ConnectError::Request {
        url: "its address".into(),
        node: settings.node.clone(),
        hint: hint(&source),
        source: Box::new(source),
    };
    let answer = timeout(ANSWER_MAX, nodes.get(&settings.node)).await;
    let node = answer.map_err(|_| ConnectError::Timeout("its address".into()))?.map_err(request)?;
    let info = node.status.and_then(|status| status.node_info).unwrap_or_default();
    Ok(NodeInfo { kubelet: info.kubelet_version, container_runtime: info.container_runtime_version })
}

/// Versions, as the kubelet reports them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeInfo {
    /// `v1.33.1`; empty if it is not reported.
    pub kubelet: String,
    /// `containerd://2.1.4`; empty if it is not reported.
    pub container_runtime: String,
}

/// What the operator has to do about an error status, or empty.
fn hint(error: &kube::Error) -> &'static str {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            " (it needs: get nodes, list and watch pods; ClusterRole berth, see deploy/cluster-role.yaml)"
        }
        kube::Error::Api(status) if status.code == 401 => " (the token or certificate is not accepted)",
        _ => "",
    }
}

/// Why a request failed.
pub(super) struct RequestError {
    /// The reason, for the log.
    pub(super) why: String,
    /// The error status that the API server answered with.
    pub(super) status: Option<Box<Status>>,
}

impl RequestError {
    /// The code of the error status; 0 without one.
    pub(super) fn code(&self) -> u16 {
        self.status.as_ref().map_or(0, |status| status.code)
    }
}

/// The answer to a request within its timeout. `right`: the right that the request needs, for the message of a 403.
pub(super) async fn request<T>(
    request: impl Future<Output = kube::Result<T>>,
    right: &str,
) -> Result<T, RequestError> {
    let error = match timeout(ANSWER_MAX, request).await {
        Ok(Ok(answer)) => return Ok(answer),
        Ok(Err(error)) => error,
        Err(_) => {
            let why = format!("no answer within {} s", ANSWER_MAX.as_secs());
            return Err(RequestError { why, status: None });
        }
    };
    let why = match &error {
        kube::Error::Api(status) if status.code == 403 => {
            format!("{} (the daemon needs: {right}; see deploy/cluster-role.yaml)", status.message)
        }
        kube::Error::Api(status) => format!("{} ({})", status.message.trim_end(), status.code),
        error => error_chain(error),
    };
    let status = if let kube::Error::Api(status) = error { Some(status) } else { None };
    Err(RequestError { why, status })
}

/// Connects, with retries until it succeeds. An error that repeats is logged once.
pub(super) async fn connect_with_retries(
    settings: &Settings,
    link: &watch::Sender<ApiServerStatus>,
) -> Client {
    let mut backoff = Backoff::new(settings.retry_interval);
    loop {
        match connect(settings).await {
            Ok(client) => return client,
            Err(error) => report_error(link, &error),
        }
        let wait = backoff.next(wait::random());
        sleep(settings.retry_after.delay(wait, Instant::now())).await;
    }
}

/// The text of an error and of its causes, each once: many of kube's errors contain the text of their cause.
#[must_use]
pub fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        // Its own text also has the whole status as the debugger would show it.
        if let Some(kube::Error::Api(status)) = next.downcast_ref() {
            return format!("{text}: {} ({})", status.message.trim_end(), status.code);
        }
        let next_text = next.to_string();
        if !text.contains(&next_text) {
            text = format!("{text}: {next_text}");
        }
        cause = next.source();
    }
    text
}

/// Sets the link to `Connecting` with this error, and logs the error if it differs from the last one.
pub(super) fn report_error(link: &watch::Sender<ApiServerStatus>, error: &dyn std::error::Error) {
    let text = error_chain(error);
    let next = ApiServerStatus::Connecting { last_error: Some(text.clone()) };
    let changed = link.send_if_modified(|link| {
        let changed = *link != next;
        *link = next.clone();
        changed
    });
    if changed {
        tracing::warn!("the API server cannot be used at present: {text}");
    }
}
