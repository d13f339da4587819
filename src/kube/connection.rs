//! A client of the API server, by the service account of our pod or by a kubeconfig.

use super::wait::{self, RetryAfter};
use http::Response;
use http::header::RETRY_AFTER;
use kube::client::{ClientBuilder, DynBody};
use kube::config::{AuthInfo, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::{Client, Config};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::time::Instant;
use tower::util::MapResponseLayer;

/// Most bytes that are read of a kubeconfig; clusters and users by the hundred need less.
const KUBECONFIG_BYTES_MAX: u64 = 1024 * 1024;

/// How the API server is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ApiServer {
    /// Not at all: the kubelet's own accounts are the only sources.
    Off,
    /// By the service account of our pod.
    InCluster,
    /// By a kubeconfig.
    Kubeconfig(PathBuf),
}

/// The connection to the API server, and its waits.
#[derive(Clone, Debug)]
pub struct Connection {
    /// How the API server is reached.
    pub api_server: ApiServer,
    /// `timeoutSeconds` of each watch, whole seconds.
    pub watch_timeout: Duration,
    /// Read timeout of a connection: how long it may deliver nothing before it counts as dead. The API server sends a
    /// bookmark on each watch every minute.
    pub read_timeout: Duration,
    /// The first wait after a failure; doubles up to [`wait::BACKOFF_MAX`].
    pub retry_interval: Duration,
    /// Until when the API server asked its clients to wait (`Retry-After`).
    pub retry_after: RetryAfter,
}

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
}

impl Connection {
    /// With the waits that Berth uses.
    #[must_use]
    pub fn new(api_server: ApiServer) -> Self {
        Self {
            api_server,
            watch_timeout: wait::watch(wait::random()),
            // Two and a half bookmarks.
            read_timeout: Duration::from_secs(150),
            retry_interval: Duration::from_secs(1),
            retry_after: RetryAfter::default(),
        }
    }

    /// A client, and the URL of the API server. No request is sent yet.
    ///
    /// # Errors
    /// If kubeconfig or service account cannot be used; the error names the remedy.
    pub async fn client(&self) -> Result<(Client, String), ConnectError> {
        let mut config = match &self.api_server {
            ApiServer::Kubeconfig(path) => config_from_file(path).await?,
            ApiServer::InCluster | ApiServer::Off => {
                Config::incluster().map_err(|error| ConnectError::InCluster(Box::new(error)))?
            }
        };
        // The library would repeat for minutes an eviction that a disruption budget forbids, and not report it. The retries
        // are those of this crate.
        config.default_retry = false;
        // Bookmarks come more often than this: a connection that delivers nothing for longer is dead.
        config.read_timeout = Some(self.read_timeout);
        config.reset_reader_on_write = true;
        let url = config.cluster_url.to_string();
        let builder = ClientBuilder::try_from(config);
        let builder = builder.map_err(|error| ConnectError::Client(Box::new(error)))?;
        // Read here: the library drops the headers of an error response.
        let retry_after = self.retry_after.clone();
        let record_retry_after = MapResponseLayer::new(move |response: Response<Box<DynBody>>| {
            let header = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
            retry_after.record(response.status().as_u16(), header, Instant::now());
            response
        });
        Ok((builder.with_layer(&record_retry_after).build(), url))
    }
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
