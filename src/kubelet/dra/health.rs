//! The stream of the devices' health. The kubelet puts it into the status of the pods that hold them, and shows the health of
//! a device as Unknown if no message has named it for 30 s.

use super::DriverSettings;
use crate::connections::Call;
use berth_core::KernelHandle;
use berth_kernel::hardware::health::HealthState;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::publish::{Taint, Versions, publication};
use berth_proto::{v1, v1alpha1};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// The interval of messages without a change.
const REPEAT_INTERVAL: Duration = Duration::from_secs(10);
/// After how many seconds without a message the kubelet is to show a device's health as Unknown.
const TIMEOUT_S: i64 = 30;
/// Longest message, bytes (kubernetes `dra-health/v1`: 1024 characters).
const MESSAGE_BYTES_MAX: usize = 1024;

/// Both versions of the service, which have the same messages.
#[derive(Clone)]
pub(super) struct Health {
    settings: Arc<DriverSettings>,
    kernel: KernelHandle,
}

impl Health {
    pub(super) fn new(settings: Arc<DriverSettings>, kernel: KernelHandle) -> Self {
        Self { settings, kernel }
    }

    /// Adds the services.
    pub(super) fn add_to(self, routes: Routes) -> Routes {
        use v1::dra_resource_health_server::DraResourceHealthServer as OfV1;
        use v1alpha1::dra_resource_health_server::DraResourceHealthServer as OfV1Alpha1;
        routes.add_service(OfV1::new(self.clone())).add_service(OfV1Alpha1::new(self))
    }

    /// Sends the whole list now, at each change, and every 10 s, converted by `convert`.
    fn stream<T: Send + 'static>(
        &self,
        call: Call,
        convert: fn(v1::NodeWatchResourcesResponse) -> T,
    ) -> ReceiverStream<Result<T, Status>> {
        let (sender, receiver) = mpsc::channel(1);
        let (pool, kernel) = (self.settings.node.clone(), self.kernel.clone());
        tokio::spawn(async move {
            let _call = call;
            let mut snapshots = kernel.watch();
            let mut last = None;
            let mut repeat_at = Instant::now();
            loop {
                let snapshot = Arc::clone(&snapshots.borrow_and_update());
                let devices = devices(&snapshot, &pool);
                if last.as_ref() != Some(&devices) || Instant::now() >= repeat_at {
                    last = Some(devices.clone());
                    repeat_at = Instant::now() + REPEAT_INTERVAL;
                    if sender.send(Ok(convert(message(devices)))).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    changed = snapshots.changed() => if changed.is_err() { return },
                    () = sleep_until(repeat_at) => {}
                    () = sender.closed() => return,
                }
            }
        });
        ReceiverStream::new(receiver)
    }
}

/// A device's health, but for the time.
fn devices(ledger: &Ledger, pool: &str) -> Vec<v1::DeviceHealth> {
    let published = publication(ledger, &Versions::default()).into_iter();
    published
        .map(|device| {
            let state = ledger.gpus.get(&device.gpu);
            let is_bad = |taint: &Taint| matches!(taint, Taint::Xid | Taint::GpuLost | Taint::Unhealthy);
            let health = if device.taints.iter().any(is_bad) {
                v1::HealthStatus::Unhealthy
            } else if ledger.scan_errors.contains_key(&device.gpu) {
                v1::HealthStatus::Unknown
            } else {
                v1::HealthStatus::Healthy
            };
            let is_noted = |state: HealthState| state != HealthState::Healthy;
            let reason = state.filter(|gpu| is_noted(gpu.health.state)).map(|gpu| gpu.health.reason.as_str());
            let reason = reason.unwrap_or_default();
            v1::DeviceHealth {
                device: Some(v1::DeviceIdentifier { pool_name: pool.to_owned(), device_name: device.name }),
                health: health.into(),
                last_updated_time: 0,
                health_check_timeout_seconds: TIMEOUT_S,
                message: reason[..reason.floor_char_boundary(MESSAGE_BYTES_MAX)].to_owned(),
            }
        })
        .collect()
}

fn message(mut devices: Vec<v1::DeviceHealth>) -> v1::NodeWatchResourcesResponse {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(now.as_secs()).unwrap_or(i64::MAX);
    devices.iter_mut().for_each(|device| device.last_updated_time = now);
    v1::NodeWatchResourcesResponse { devices }
}

fn as_v1alpha1(message: v1::NodeWatchResourcesResponse) -> v1alpha1::NodeWatchResourcesResponse {
    let device = |health: v1::DeviceHealth| v1alpha1::DeviceHealth {
        device: health.device.map(|device| v1alpha1::DeviceIdentifier {
            pool_name: device.pool_name,
            device_name: device.device_name,
        }),
        health: health.health,
        last_updated_time: health.last_updated_time,
        health_check_timeout_seconds: health.health_check_timeout_seconds,
        message: health.message,
    };
    v1alpha1::NodeWatchResourcesResponse { devices: message.devices.into_iter().map(device).collect() }
}

#[tonic::async_trait]
impl v1::dra_resource_health_server::DraResourceHealth for Health {
    type NodeWatchResourcesStream = ReceiverStream<Result<v1::NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        request: Request<v1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(self.stream(Call::begin(&request), |message| message)))
    }
}

#[tonic::async_trait]
impl v1alpha1::dra_resource_health_server::DraResourceHealth for Health {
    type NodeWatchResourcesStream = ReceiverStream<Result<v1alpha1::NodeWatchResourcesResponse, Status>>;

    async fn node_watch_resources(
        &self,
        request: Request<v1alpha1::NodeWatchResourcesRequest>,
    ) -> Result<Response<Self::NodeWatchResourcesStream>, Status> {
        Ok(Response::new(self.stream(Call::begin(&request), as_v1alpha1)))
    }
}
