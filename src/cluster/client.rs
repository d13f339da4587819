//! A client of the API server, by the service account of our pod or by a kubeconfig.

use super::wait::{self, Backoff};
use super::{Link, Settings};
use crate::ApiServer;
use http::Response;
use http::header::RETRY_AFTER;
use k8s_openapi::api::core::v1::Node;
use kube::client::{ClientBuilder, DynBody};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::PartialObjectMeta;
use kube::{Api, Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Instant;
use tower::util::MapResponseLayer;

/// Most bytes that are read of a kubeconfig; clusters and users by the hundred need less.
const KUBECONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// Longest wait for an answer to one request. Watches have a timeout of their own.
pub(super) const ANSWER_MAX: Duration = Duration::from_secs(15);

/// The API server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig is missing or wrong.
    #[error("the kubeconfig {path} cannot be used")]
    Kubeconfig {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<kube::config::KubeconfigError>,
    },
    /// The kubeconfig is not what it should be. The parser's words show the file, secrets and all.
    #[error(
        "the file {path} is not a valid kubeconfig (`kubectl --kubeconfig {path} config view` says where it is wrong)"
    )]
    Malformed {
        /// Which file.
        path: PathBuf,
    },
    /// The kubeconfig has its credentials from a program. A refresh would run it with every request
    /// waiting for it, and the library gives it no deadline (kube-client 5.0, `RefreshableToken`): one
    /// that hangs would leave the daemon with pods of long ago, and nothing would say so.
    #[error(
        "the kubeconfig {path} gets its credentials from a program ({program}), and Berth runs none: use one with a \
         client certificate, a token or a tokenFile that something else renews, such as a service account's"
    )]
    Program {
        /// Which file.
        path: PathBuf,
        /// What it would run, without arguments: they may be secrets.
        program: String,
    },
    /// The service account of the pod is incomplete.
    #[error("the pod's service account cannot be used (set automountServiceAccountToken: true)")]
    InCluster {
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// No client can be made of the settings.
    #[error("no client can be made of the settings for the API server")]
    Client {
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// It does not answer, or not to us.
    #[error("the API server at {url} does not say what it knows of node {node:?}{hint}")]
    Ask {
        /// Where it is.
        url: String,
        /// The node's name.
        node: String,
        /// What to do, if that is known.
        hint: &'static str,
        /// Why.
        #[source]
        source: Box<kube::Error>,
    },
    /// It does not know this node: it may be another cluster's.
    #[error(
        "the API server at {url} knows no node {node:?}: set --node-name to the node's name there, or --kubeconfig to that of this cluster"
    )]
    UnknownNode {
        /// Where it is.
        url: String,
        /// The node's name.
        node: String,
    },
    /// It does not answer in time.
    #[error("the API server at {url} did not answer within {} s", ANSWER_MAX.as_secs())]
    Slow {
        /// Where it is.
        url: String,
    },
}

impl ConnectError {
    /// Whether a retry may succeed without a configuration change: no connection, no answer in time, or a server
    /// that is starting or busy.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Slow { .. } => true,
            Self::Ask { source, .. } => match source.as_ref() {
                kube::Error::Api(status) => status.code == 429 || status.code >= 500,
                _ => true,
            },
            _ => false,
        }
    }
}

/// Connects once, and makes sure that the API server knows this node: the pods of another cluster
/// would say that all of ours are gone.
///
/// # Errors
/// If it cannot be used; says what to do.
pub async fn connect(settings: &Settings) -> Result<Client, ConnectError> {
    connected(settings).await.map(|(client, _)| client)
}

/// The same, with this node's metadata.
pub(super) async fn connected(
    settings: &Settings,
) -> Result<(Client, PartialObjectMeta<Node>), ConnectError> {
    let mut config = match &settings.api_server {
        ApiServer::Kubeconfig(path) => from_file(path).await?,
        ApiServer::InCluster | ApiServer::Off => {
            Config::incluster().map_err(|e| ConnectError::InCluster { source: Box::new(e) })?
        }
    };
    // The library would try again what a disruption budget forbids for minutes, and never say so: the
    // waits of this room are its own.
    config.default_retry = false;
    // A watch is sent a bookmark sooner than this; whatever is silent for longer is dead.
    config.read_timeout = Some(settings.silence);
    config.reset_reader_on_write = true;
    let url = config.cluster_url.to_string();
    let builder =
        ClientBuilder::try_from(config).map_err(|e| ConnectError::Client { source: Box::new(e) })?;
    // The library drops the headers of an answer that is an error.
    let retry_after = settings.retry_after.clone();
    let noted = MapResponseLayer::new(move |response: Response<Box<DynBody>>| {
        let header = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
        retry_after.record(response.status().as_u16(), header, Instant::now());
        response
    });
    let client = builder.with_layer(&noted).build();
    let node = this_node(&client, &url, &settings.node).await?;
    Ok((client, node))
}

async fn from_file(path: &Path) -> Result<Config, ConnectError> {
    let wrong = |e| match e {
        KubeconfigError::Parse(_) => ConnectError::Malformed { path: path.to_owned() },
        other => ConnectError::Kubeconfig { path: path.to_owned(), source: Box::new(other) },
    };
    // The library would wait for the other end of a FIFO.
    let text = berth_files::read_text(path, KUBECONFIG_BYTES_MAX);
    text.map_err(|error| wrong(KubeconfigError::ReadConfig(error, path.to_owned())))?;
    let file = Kubeconfig::read_from(path).map_err(wrong)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(wrong)?;
    match program(&config.auth_info) {
        Some(program) => Err(ConnectError::Program { path: path.to_owned(), program }),
        None => Ok(config),
    }
}

/// The program that the library would run for credentials, in the order in which it looks at them.
fn program(user: &AuthInfo) -> Option<String> {
    if let Some(provider) = &user.auth_provider {
        return provider.config.get("cmd-path").cloned();
    }
    let given = user.username.is_some() && user.password.is_some()
        || user.token.is_some()
        || user.token_file.is_some();
    let exec = user.exec.as_ref().filter(|_| !given)?;
    Some(exec.command.clone().unwrap_or_else(|| "unnamed".to_owned()))
}

/// Asks for this node's object.
async fn this_node(client: &Client, url: &str, node: &str) -> Result<PartialObjectMeta<Node>, ConnectError> {
    let nodes: Api<Node> = Api::all(client.clone());
    let asked = tokio::time::timeout(ANSWER_MAX, nodes.get_metadata(node)).await;
    match asked.map_err(|_| ConnectError::Slow { url: url.to_owned() })? {
        Ok(found) => Ok(found),
        Err(kube::Error::Api(status)) if status.code == 404 => {
            Err(ConnectError::UnknownNode { url: url.to_owned(), node: node.to_owned() })
        }
        Err(error) => Err(ConnectError::Ask {
            url: url.to_owned(),
            node: node.to_owned(),
            hint: hint(&error),
            source: Box::new(error),
        }),
    }
}

/// What an operator does about an answer.
fn hint(error: &kube::Error) -> &'static str {
    match error {
        kube::Error::Api(status) if status.code == 403 => {
            " (it needs: get nodes, list and watch pods; ClusterRole berth, see deploy/cluster-role.yaml)"
        }
        kube::Error::Api(status) if status.code == 401 => " (the token or certificate is not accepted)",
        _ => "",
    }
}

/// Connects, as often as it takes. Says each trouble once.
pub(super) async fn connect_at_last(settings: &Settings, told: &watch::Sender<Link>) -> Client {
    let mut backoff = Backoff::new(settings.again);
    loop {
        match connect(settings).await {
            Ok(client) => return client,
            Err(error) => trouble(told, &error),
        }
        let wait = backoff.next(wait::random());
        tokio::time::sleep(settings.retry_after.delay(wait, Instant::now())).await;
    }
}

/// An error with its causes, each once: many of kube's repeat theirs.
#[must_use]
pub fn words(error: &dyn std::error::Error) -> String {
    let mut words = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let next_words = next.to_string();
        if !words.contains(&next_words) {
            words = format!("{words}: {next_words}");
        }
        cause = next.source();
    }
    words
}

/// Takes a trouble down, and logs it where it is news.
pub(super) fn trouble(told: &watch::Sender<Link>, error: &dyn std::error::Error) {
    let words = words(error);
    let news = Link::Connecting { trouble: Some(words.clone()) };
    let changed = told.send_if_modified(|link| {
        let changed = *link != news;
        *link = news.clone();
        changed
    });
    if changed {
        tracing::warn!("the API server cannot be used at present: {words}");
    }
}
