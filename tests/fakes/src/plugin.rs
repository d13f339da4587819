//! A client of one plugin socket in the kubelet's place, for calls that are timed individually.

use anyhow::Context as _;
use hyper_util::rt::TokioIo;
use kubelet_standin::proto::v1beta1::device_plugin_client::DevicePluginClient;
use kubelet_standin::proto::v1beta1::{
    AllocateRequest, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationRequest, PreferredAllocationRequest,
};
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};

/// The plugin socket of a resource. Its name is documented for operators.
pub fn socket(kubelet_dir: &Path, resource: &str) -> PathBuf {
    let hash = Sha256::digest(resource);
    let hex: String = hash.iter().take(8).map(|b| format!("{b:02x}")).collect();
    kubelet_dir.join("device-plugins").join(format!("berth-{hex}.sock"))
}

/// A client of the plugin on this socket.
///
/// # Errors
/// If no process listens there.
pub async fn dial(socket: &Path) -> anyhow::Result<DevicePluginClient<Channel>> {
    channel(socket).await.map(DevicePluginClient::new)
}

/// A connection to the gRPC server on this socket.
///
/// # Errors
/// If no process listens there.
pub async fn channel(socket: &Path) -> anyhow::Result<Channel> {
    let path = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let path = path.clone();
        async move { UnixStream::connect(path).await.map(TokioIo::new) }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connector).await;
    channel.with_context(|| format!("dialling {}", socket.display()))
}

/// Calls Allocate for one container. Returns the duration and the response.
///
/// # Errors
/// If the call is refused, or the response is not for one container.
pub async fn allocate(
    client: &mut DevicePluginClient<Channel>,
    ids: &[String],
) -> anyhow::Result<(Duration, ContainerAllocateResponse)> {
    let container = ContainerAllocateRequest { devices_ids: ids.to_vec() };
    let request = AllocateRequest { container_requests: vec![container] };
    let began = Instant::now();
    let response = client.allocate(request).await?;
    let duration = began.elapsed();
    let mut responses = response.into_inner().container_responses;
    anyhow::ensure!(responses.len() == 1, "{} responses for one container", responses.len());
    responses.pop().map(|response| (duration, response)).context("no response")
}

/// Calls GetPreferredAllocation for one container that needs `size` of the devices `from`. Returns the duration.
///
/// # Errors
/// If the call is refused, or the response has another number of devices.
pub async fn prefer(
    client: &mut DevicePluginClient<Channel>,
    from: &[String],
    size: usize,
) -> anyhow::Result<Duration> {
    let container = ContainerPreferredAllocationRequest {
        available_device_i_ds: from.to_vec(),
        must_include_device_i_ds: Vec::new(),
        allocation_size: i32::try_from(size)?,
    };
    let request = PreferredAllocationRequest { container_requests: vec![container] };
    let began = Instant::now();
    let response = client.get_preferred_allocation(request).await?;
    let duration = began.elapsed();
    let chosen = response.into_inner().container_responses.first().map_or(0, |c| c.device_i_ds.len());
    anyhow::ensure!(chosen == size, "{chosen} devices chosen instead of {size}");
    Ok(duration)
}
