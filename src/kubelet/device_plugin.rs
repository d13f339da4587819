//! The five calls of the device plugin API, for one resource.

use super::connections::{Call, Connection, CountGuard};
use super::device_list::DeviceList;
use super::reconciler::Reconciler;
use super::wire::v1beta1::device_plugin_server::DevicePlugin;
use super::wire::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use super::{convert, parse, parse::BadRequest, status};
use crate::settings::CurrentEdits;
use berth_core::keeper::CommandError;
use berth_core::log_limit::LogLimit;
use berth_core::{Granted, KernelHandle};
use berth_kernel::grants::allocation::Allocation;
use berth_kernel::ids::names::{DeviceId, PartId, Resource};
use berth_kernel::node::command::Attempt;
use berth_kernel::policy::hooks::{AdmitRequest, PlaceRequest};
use berth_observe::counters::{CODES, Rpc};
use berth_observe::spans;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

/// The most containers in one request. The kubelet sends exactly one; the API allows more.
const CONTAINERS_MAX: usize = 16;

/// Answers the calls of one resource. Shared by all connections to its socket.
pub(super) struct Handler {
    pub(super) resource: Resource,
    pub(super) kernel: KernelHandle,
    pub(super) edits: CurrentEdits,
    pub(super) reconciler: Arc<Reconciler>,
    pub(super) device_list: Arc<DeviceList>,
    /// When the Register in progress began. A connection accepted since then on which
    /// GetDevicePluginOptions is called meanwhile is the kubelet's: from 1.25 on, the kubelet does both
    /// before it answers.
    pub(super) register_began: watch::Sender<Option<Instant>>,
    /// The number of the kubelet's connections.
    pub(super) kubelet_connections: Arc<watch::Sender<usize>>,
    /// The kinds of refused Allocate calls that were logged, each with the part of the first device.
    pub(super) refusal_log: Mutex<LogLimit<(&'static str, Option<PartId>)>>,
    /// Each value sent ends all open streams; true also ends those that are opened later.
    pub(super) stream_end: watch::Sender<bool>,
}

/// The gRPC service; cheap to create again for another socket.
pub(super) struct Service(pub(super) Arc<Handler>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let _call = Call::begin(&request);
        if let Some(connection) = Connection::of(&request)
            && self.0.register_began.borrow().is_some_and(|began| connection.is_accepted_since(began))
        {
            connection.mark_kubelet(&self.0.kubelet_connections);
        }
        let options = async {
            Ok(Response::new(DevicePluginOptions {
                // Berth prepares nothing before a container starts, and the call would delay each restart.
                pre_start_required: false,
                get_preferred_allocation_available: true,
            }))
        };
        self.0.count(Rpc::GetDevicePluginOptions, options).await
    }

    async fn list_and_watch(
        &self,
        request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let call = Call::begin(&request);
        let is_kubelet = Connection::of(&request).is_some_and(|connection| connection.is_kubelet());
        let stream = async {
            // Holds one message: a slow reader gets the newest list, not every version.
            let (sender, receiver) = mpsc::channel(1);
            let handler = Arc::clone(&self.0);
            tokio::spawn(async move {
                let _call = call;
                let _guard = is_kubelet.then(|| StreamGuard::new(&handler));
                send_lists(&handler, sender).await;
            });
            Ok(Response::new(ReceiverStream::new(receiver)))
        };
        self.0.count(Rpc::ListAndWatch, stream).await
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let _call = Call::begin(&request);
        self.0.count(Rpc::GetPreferredAllocation, self.0.preferred_allocation(request.into_inner())).await
    }

    async fn allocate(
        &self,
        request: Request<AllocateRequest>,
    ) -> Result<Response<AllocateResponse>, Status> {
        let _call = Call::begin(&request);
        let requests = request.into_inner().container_requests;
        let granted = async {
            check_containers(requests.len())?;
            let container_responses = self.0.allocate(&requests).await?;
            Ok(Response::new(AllocateResponse { container_responses }))
        };
        self.0.count(Rpc::Allocate, granted).await
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let _call = Call::begin(&request);
        self.0.count(Rpc::PreStartContainer, async { Ok(Response::new(PreStartContainerResponse {})) }).await
    }
}

/// gRPC's name of a status code; `UNKNOWN` for a number without one.
fn code_name(code: i32) -> &'static str {
    let name = usize::try_from(code).ok().and_then(|code| CODES.get(code));
    name.copied().unwrap_or("UNKNOWN")
}

fn check_containers(given: usize) -> Result<(), Status> {
    let limit = CONTAINERS_MAX;
    let error = match given {
        0 => BadRequest::NoContainer,
        n if n > limit => BadRequest::TooManyContainers { given, limit },
        _ => return Ok(()),
    };
    Err(status::bad_request(&error))
}

/// One stream: sends the whole list now, and again with each new version.
async fn send_lists(handler: &Handler, sender: mpsc::Sender<Result<ListAndWatchResponse, Status>>) {
    let mut stream_end = handler.stream_end.subscribe();
    if *stream_end.borrow_and_update() {
        // The kubelet opens the stream some time after Register, perhaps when this plugin is already stopping.
        return;
    }
    let mut list = handler.device_list.devices.subscribe();
    loop {
        let devices = Arc::clone(&list.borrow_and_update());
        let span = spans::device_list(&handler.resource, devices.iter().map(|device| device.healthy));
        let devices = devices.iter().map(convert::device).collect();
        let message = Ok(ListAndWatchResponse { devices });
        tokio::select! {
            sent = sender.send(message).instrument(span) => if sent.is_err() { return },
            _ = stream_end.changed() => return,
        }
        tokio::select! {
            changed = list.changed() => if changed.is_err() { return },
            _ = stream_end.changed() => return,
            // The kubelet closed the stream or its connection.
            () = sender.closed() => return,
        }
    }
}

/// Counts one of the kubelet's streams until it is dropped.
struct StreamGuard<'d> {
    handler: &'d Handler,
    _count: CountGuard,
}

impl<'d> StreamGuard<'d> {
    fn new(handler: &'d Handler) -> Self {
        handler.kernel.counters().kubelet.stream_began(handler.resource.as_str());
        Self { handler, _count: CountGuard::new(&handler.device_list.streams) }
    }
}

impl Drop for StreamGuard<'_> {
    fn drop(&mut self) {
        self.handler.kernel.counters().kubelet.stream_ended(self.handler.resource.as_str());
    }
}

impl Handler {
    /// Counts a call, its duration and its outcome. A call whose caller has left is dropped before its
    /// end and counted as cancelled.
    async fn count<T>(
        &self,
        rpc: Rpc,
        response: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let call = self.kernel.counters().kubelet.begin(rpc);
        let span = spans::grpc(rpc.as_str(), &self.resource);
        let response = response.instrument(span.clone()).await;
        let code = response.as_ref().err().map_or(0, |status| status.code().into());
        call.end(code);
        spans::grpc_answered(&span, code_name(code), code);
        response
    }

    async fn preferred_allocation(
        &self,
        request: PreferredAllocationRequest,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.container_requests;
        check_containers(requests.len())?;
        let ledger = self.kernel.snapshot();
        let mut container_responses = Vec::new();
        for request in &requests {
            let request = parse::preferred_request(&ledger, &self.resource, request).map_err(|error| {
                self.kernel.request_refused(&self.resource, &[], &error);
                status::bad_request(&error)
            })?;
            let devices = self.place(request).await;
            let device_i_ds = devices.iter().map(DeviceId::to_string).collect();
            container_responses.push(ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    /// Chooses devices and checks the choice against the request: whatever the policies chose, the
    /// result has the requested number of available ids, the required ones among them.
    async fn place(&self, request: PlaceRequest) -> Vec<DeviceId> {
        if request.size == 0 || request.available.is_empty() {
            return Vec::new();
        }
        if request.size >= request.available.len() {
            return request.available;
        }
        let (placement, _by) = self.kernel.place(request.clone()).await;
        let available: BTreeSet<&DeviceId> = request.available.iter().collect();
        // Required ids first, so that the limit cuts off others.
        let candidates = request.required.iter().chain(&placement.devices).chain(&request.available);
        let mut chosen = BTreeSet::new();
        candidates
            .filter(|id| available.contains(*id) && chosen.insert(*id))
            .take(request.size.max(request.required.len()))
            .cloned()
            .collect()
    }

    /// One grant for all containers of the call, or none. Each container's response has its own devices
    /// and the id of the common allocation.
    async fn allocate(
        &self,
        requests: &[ContainerAllocateRequest],
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let ledger = self.kernel.snapshot();
        let (admit, containers) =
            parse::allocate_request(&ledger, &self.resource, requests).map_err(|error| {
                self.kernel.counters().kubelet.count_refusal("badRequest");
                self.kernel.request_refused(&self.resource, &[], &error);
                status::bad_request(&error)
            })?;
        let devices = admit.devices.clone();
        let Granted { allocation, snapshot } = self.grant(admit).await.map_err(|error| {
            self.kernel.counters().kubelet.count_refusal(error.kind());
            self.kernel.request_refused(&self.resource, &devices, &error);
            // A controller creates a refused pod again and again.
            let kind = (error.kind(), devices.first().map(|device| device.part.clone()));
            if let Some(omitted) = self.refusal_log.lock().admit(kind, std::time::Instant::now()) {
                tracing::warn!(resource = %self.resource, %error, omitted, "refused an Allocate call");
            }
            status::refused(&self.resource, &error)
        })?;
        spans::granted(&allocation.id);
        tracing::info!(
            allocation = %allocation.id, resource = %self.resource, devices = ?allocation.devices,
            "granted"
        );
        let edits = Arc::clone(&self.edits.borrow());
        let response =
            |devices| convert::response(&Allocation { devices, ..allocation.clone() }, &snapshot, &edits);
        Ok(containers.into_iter().map(response).collect())
    }

    /// Tries a refused grant once more after a reconcile pass if the pass may change the answer.
    async fn grant(&self, admit: AdmitRequest) -> Result<Granted, CommandError> {
        let asked_mono_ms = self.kernel.now().mono_ms;
        match self.kernel.allocate(admit.clone(), Attempt::First).await {
            Err(CommandError::Refused(refusal)) if refusal.reconcile_may_resolve() => {
                tracing::info!(
                    resource = %self.resource, %refusal,
                    "checking with the kubelet who holds these devices now"
                );
                self.reconciler.run_pass_before_refusal().await;
                self.kernel.allocate(admit, Attempt::Last { asked_mono_ms }).await
            }
            result => result,
        }
    }

    /// Ends all open streams.
    pub(super) fn end_streams(&self) {
        self.stream_end.send_modify(|_| {});
    }

    /// Ends all open streams and those opened later. A later stream would otherwise stay open as long as
    /// the kubelet's connection, with a list that is no longer updated.
    pub(super) fn end_all_streams(&self) {
        self.stream_end.send_replace(true);
    }
}
