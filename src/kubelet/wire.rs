//! The generated wire types and their helpers. They are not used outside this crate.

use hyper_util::rt::TokioIo;
use std::path::{Path, PathBuf};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

pub(super) use berth_proto::{core, v1, v1alpha1, v1beta1};

/// The only version that the kubelet registers.
pub(super) const API_VERSION: &str = "v1beta1";
/// The kubelet's health value of a device that may be allocated.
pub(super) const HEALTHY: &str = "Healthy";
/// The kubelet's health value of a device that may not be allocated.
pub(super) const UNHEALTHY: &str = "Unhealthy";

/// A channel to a unix socket that connects when first used, and again after a lost connection.
pub(super) fn lazy_channel(socket: &Path) -> Channel {
    // Any valid authority works; the kubelet itself uses "localhost".
    Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector(socket))
}

/// A channel to a unix socket, connected now.
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
