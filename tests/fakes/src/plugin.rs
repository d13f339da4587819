//! The kubelet's end of one plugin socket, for calls that are timed one by one.

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::proto::v1beta1::{AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse};
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// Where a resource is served: the name is part of what operators are told.
pub fn socket(kubelet_dir: &Path, resource: &str) -> PathBuf {
    let hash = Sha256::digest(resource);
    let hex: String = hash.iter().take(8).map(|b| format!("{b:02x}")).collect();
    kubelet_dir.join("device-plugins").join(format!("berth-{hex}.sock"))
}

/// A client of the plugin on this socket.
///
/// # Errors
/// If nobody listens there.
pub async fn dial(socket: &Path) -> anyhow::Result<DevicePluginClient<Channel>> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    Ok(DevicePluginClient::new(channel.with_context(|| format!("dialling {}", socket.display()))?))
}

/// One Allocate for one container: how long it took, and the answer.
///
/// # Errors
/// If it is refused, or answered for another number of containers.
pub async fn allocate(
    client: &mut DevicePluginClient<Channel>,
    ids: &[String],
) -> anyhow::Result<(Duration, ContainerAllocateResponse)> {
    let container = ContainerAllocateRequest { devices_ids: ids.to_vec() };
    let request = AllocateRequest { container_requests: vec![container] };
    let began = Instant::now();
    let answer = client.allocate(request).await?;
    let took = began.elapsed();
    let mut answers = answer.into_inner().container_responses;
    anyhow::ensure!(answers.len() == 1, "{} answers to one container", answers.len());
    answers.pop().map(|answer| (took, answer)).context("no answer")
}
