//! A small device plugin: the competing plugin in tests of others, and the plugin with which
//! the stand-in itself is tested.

use crate::node_state::lock;
use crate::proto::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use crate::proto::v1beta1::registration_client::RegistrationClient;
use crate::proto::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateResponse, ContainerPreferredAllocationResponse,
    Device, DevicePluginOptions, Empty, ListAndWatchResponse, PreStartContainerRequest,
    PreStartContainerResponse, PreferredAllocationRequest, PreferredAllocationResponse, RegisterRequest,
};
use crate::{API_VERSION, HEALTHY};
use hyper_util::rt::TokioIo;
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use tokio::net::{UnixListener, UnixStream};
use tokio::{sync::watch, task::JoinHandle};
use tokio_stream::{Stream, StreamExt, wrappers::UnixListenerStream, wrappers::WatchStream};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

type AllocateFn = Box<dyn Fn(&[String]) -> Result<ContainerAllocateResponse, Status> + Send>;
type PreferFn = Box<dyn Fn(&PreferredAllocationRequest) -> Result<Vec<String>, Status> + Send>;

/// A plugin that serves one resource on one socket until it is dropped.
pub struct TinyPlugin {
    folder: PathBuf,
    shared: Arc<Shared>,
    serving: JoinHandle<()>,
}

struct Shared {
    socket: String,
    resource: String,
    /// `None` ends every stream.
    devices: watch::Sender<Option<Vec<Device>>>,
    options: Mutex<Result<DevicePluginOptions, Status>>,
    allocate: Mutex<AllocateFn>,
    prefer: Mutex<PreferFn>,
    allocated_ids: Mutex<Vec<Vec<String>>>,
    preferred_requests: Mutex<Vec<PreferredAllocationRequest>>,
}

impl TinyPlugin {
    /// Serves `resource` on a socket of this name in `folder`, with all devices healthy.
    /// Each Allocate response has a variable `TINY` with the ids.
    pub fn serve(folder: &Path, socket: &str, resource: &str, ids: &[&str]) -> io::Result<Self> {
        let path = folder.join(socket);
        let _ = fs::remove_file(&path);
        let listener = UnixListener::bind(&path)?;
        let devices = ids.iter().map(|id| Self::device(id, HEALTHY)).collect();
        let options =
            DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true };
        let shared = Arc::new(Shared {
            socket: socket.to_owned(),
            resource: resource.to_owned(),
            devices: watch::Sender::new(Some(devices)),
            options: Mutex::new(Ok(options)),
            allocate: Mutex::new(Box::new(|ids| Ok(tiny_response(ids)))),
            prefer: Mutex::new(Box::new(|_| Ok(Vec::new()))),
            allocated_ids: Mutex::default(),
            preferred_requests: Mutex::default(),
        });
        let service = DevicePluginServer::new(Service(Arc::clone(&shared)));
        let serving = tokio::spawn(async move {
            let incoming = UnixListenerStream::new(listener);
            let _ = Server::builder().serve_with_incoming(service, incoming).await;
        });
        Ok(Self { folder: folder.to_owned(), shared, serving })
    }

    /// A device without topology.
    pub fn device(id: &str, health: &str) -> Device {
        Device { id: id.to_owned(), health: health.to_owned(), topology: None }
    }

    /// Registers with the kubelet in the same folder.
    pub async fn register(&self) -> Result<(), Status> {
        self.register_with_version(API_VERSION).await
    }

    /// Registers with the given API version.
    pub async fn register_with_version(&self, version: &str) -> Result<(), Status> {
        let path = self.folder.join("kubelet.sock");
        let connector = tower::service_fn(move |_| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        let channel = Endpoint::from_static("http://localhost")
            .connect_with_connector(connector)
            .await
            .map_err(|error| Status::unavailable(error.to_string()))?;
        let request = RegisterRequest {
            version: version.to_owned(),
            endpoint: self.shared.socket.clone(),
            resource_name: self.shared.resource.clone(),
            options: None,
        };
        RegistrationClient::new(channel).register(request).await?;
        Ok(())
    }

    /// Sends a new list on every stream.
    pub fn send_list(&self, devices: Vec<Device>) {
        self.shared.devices.send_replace(Some(devices));
    }

    /// Ends every stream. `send_list` allows new ones.
    pub fn end_streams(&self) {
        self.shared.devices.send_replace(None);
    }

    /// Sets the result of GetDevicePluginOptions.
    pub fn set_options(&self, options: Result<DevicePluginOptions, Status>) {
        *lock(&self.shared.options) = options;
    }

    /// Sets the function that answers Allocate.
    pub fn on_allocate(
        &self,
        respond: impl Fn(&[String]) -> Result<ContainerAllocateResponse, Status> + Send + 'static,
    ) {
        *lock(&self.shared.allocate) = Box::new(respond);
    }

    /// Sets the function that answers GetPreferredAllocation.
    pub fn on_prefer(
        &self,
        respond: impl Fn(&PreferredAllocationRequest) -> Result<Vec<String>, Status> + Send + 'static,
    ) {
        *lock(&self.shared.prefer) = Box::new(respond);
    }

    /// The ids of every Allocate call so far, in order.
    pub fn allocated_ids(&self) -> Vec<Vec<String>> {
        lock(&self.shared.allocated_ids).clone()
    }

    /// The GetPreferredAllocation requests so far.
    pub fn preferred_requests(&self) -> Vec<PreferredAllocationRequest> {
        lock(&self.shared.preferred_requests).clone()
    }
}

impl Drop for TinyPlugin {
    fn drop(&mut self) {
        self.serving.abort();
        self.end_streams();
    }
}

/// The default response: the sorted ids in one variable.
fn tiny_response(ids: &[String]) -> ContainerAllocateResponse {
    let mut ids = ids.to_vec();
    ids.sort();
    ContainerAllocateResponse {
        envs: [("TINY".to_owned(), ids.join(","))].into(),
        ..ContainerAllocateResponse::default()
    }
}

struct Service(Arc<Shared>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream =
        std::pin::Pin<Box<dyn Stream<Item = Result<ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        lock(&self.0.options).clone().map(Response::new)
    }

    async fn list_and_watch(&self, _: Request<Empty>) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let lists = WatchStream::new(self.0.devices.subscribe());
        let lists = lists.map_while(|list| list.map(|devices| Ok(ListAndWatchResponse { devices })));
        Ok(Response::new(Box::pin(lists)))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let request = request.into_inner();
        lock(&self.0.preferred_requests).push(request.clone());
        let device_i_ds = lock(&self.0.prefer)(&request)?;
        Ok(Response::new(PreferredAllocationResponse {
            container_responses: vec![ContainerPreferredAllocationResponse { device_i_ds }],
        }))
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let mut container_responses = Vec::new();
        for request in request.into_inner().container_requests {
            let response = lock(&self.0.allocate)(&request.devices_ids);
            lock(&self.0.allocated_ids).push(request.devices_ids);
            container_responses.push(response?);
        }
        Ok(Response::new(AllocateResponse { container_responses }))
    }

    async fn pre_start_container(
        &self,
        _: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        Ok(Response::new(PreStartContainerResponse {}))
    }
}
