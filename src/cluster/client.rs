//! A client of the API server, by the service account of our pod or by a kubeconfig.

use super::settings::{ApiServerStatus, Settings};
use berth_kube::{ANSWER_MAX, Backoff, error_chain, random};
use k8s_openapi::api::core::v1::Node;
use kube::core::PartialObjectMeta;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

/// The API server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// There is no client.
    #[error(transparent)]
    Client(#[from] berth_kube::ConnectError),
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
    let (client, url) = settings.connection.client().await?;
    let node = get_node(&client, &url, &settings.node).await?;
    Ok((client, node))
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

/// Connects, with retries until it succeeds. An error that repeats is logged once.
pub(super) async fn connect_with_retries(
    settings: &Settings,
    link: &watch::Sender<ApiServerStatus>,
) -> Client {
    let mut backoff = Backoff::new(settings.connection.retry_interval);
    loop {
        match connect(settings).await {
            Ok(client) => return client,
            Err(error) => report_error(link, &error),
        }
        let wait = backoff.next(random());
        sleep(settings.connection.retry_after.delay(wait, Instant::now())).await;
    }
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
