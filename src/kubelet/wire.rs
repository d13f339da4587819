//! The generated wire types and their helpers. Nothing outside this room sees them.

use hyper_util::rt::TokioIo;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

pub(super) use berth_proto::{core, v1, v1alpha1, v1beta1};

/// The one version that the kubelet registers.
pub(super) const API_VERSION: &str = "v1beta1";
/// What the kubelet calls a device that may be allocated.
pub(super) const HEALTHY: &str = "Healthy";
/// And one that may not.
pub(super) const UNHEALTHY: &str = "Unhealthy";

/// A channel to a unix socket that dials when it is first used, and again after a loss.
pub(super) fn lazy_channel(socket: &Path) -> Channel {
    // The authority only has to be valid; the kubelet itself says "localhost".
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector(socket))
}

/// A channel to a unix socket, dialled now.
pub(super) async fn dial(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    Endpoint::from_static("http://localhost").connect_with_connector(connector(socket)).await
}

fn connector(
    socket: &Path,
) -> impl tower::Service<
    tonic::transport::Uri,
    Response = TokioIo<UnixStream>,
    Error = std::io::Error,
    Future: Send,
> + Send
+ 'static {
    let socket: PathBuf = socket.to_owned();
    tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    })
}
