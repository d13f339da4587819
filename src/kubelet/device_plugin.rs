//! The five calls of the device plugin API, for one resource.

use super::board::Board;
use super::connections::{Call, Connection, Counted};
use super::rounds::Rounds;
use super::wire::v1beta1::device_plugin_server::DevicePlugin;
use super::wire::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerAllocateResponse,
    ContainerPreferredAllocationResponse, DevicePluginOptions, Empty, ListAndWatchResponse,
    PreStartContainerRequest, PreStartContainerResponse, PreferredAllocationRequest,
    PreferredAllocationResponse,
};
use super::{convert, parse, parse::BadRequest, status};
use crate::edits::Edits;
use berth_core::admission::{Attempt, Granted, KernelHandle};
use berth_core::counters::{CODES, Rpc};
use berth_core::keeper::CommandError;
use berth_core::spans;
use berth_kernel::allocation::Allocation;
use berth_kernel::names::{DeviceId, Resource};
use berth_kernel::policy::{AdmitRequest, PlaceRequest};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use tracing::Instrument;

/// Containers in one request. The kubelet sends exactly one; the API allows more.
const CONTAINERS_MAX: usize = 16;

/// What the calls of one resource need. One a resource, shared by all its connections.
pub(super) struct Desk {
    pub(super) resource: Resource,
    pub(super) kernel: KernelHandle,
    pub(super) edits: Arc<Edits>,
    pub(super) rounds: Arc<Rounds>,
    pub(super) board: Arc<Board>,
    /// When the Register that is under way began: a connection made since then, on which the options are
    /// asked for meanwhile, is the kubelet's, which does both before it answers (from 1.25 on).
    pub(super) registering: watch::Sender<Option<Instant>>,
    /// How many connections are the kubelet's.
    pub(super) kubelets: Arc<watch::Sender<usize>>,
    /// How many ListAndWatch streams are open on them.
    pub(super) streams: Arc<watch::Sender<usize>>,
    /// Streams opened before the newest turn of this end.
    pub(super) ending: watch::Sender<Ending>,
}

/// How often streams were ended.
#[derive(Debug, Default)]
pub(super) struct Ending {
    turn: u64,
    /// There will be no other turn: who opens a stream now is told the end at once.
    last: bool,
}

/// The service; cheap to make anew for another socket.
pub(super) struct Service(pub(super) Arc<Desk>);

#[tonic::async_trait]
impl DevicePlugin for Service {
    type ListAndWatchStream = ReceiverStream<Result<ListAndWatchResponse, Status>>;

    async fn get_device_plugin_options(
        &self,
        request: Request<Empty>,
    ) -> Result<Response<DevicePluginOptions>, Status> {
        let _call = Call::begin(&request);
        if let Some(connection) = Connection::of(&request)
            && self.0.registering.borrow().is_some_and(|began| connection.is_made_since(began))
        {
            connection.mark_kubelet(&self.0.kubelets);
        }
        let options = async {
            Ok(Response::new(DevicePluginOptions {
                // Nothing is done to a GPU before a start, and the call would cost each restart.
                pre_start_required: false,
                get_preferred_allocation_available: true,
            }))
        };
        self.0.counted(Rpc::GetDevicePluginOptions, options).await
    }

    async fn list_and_watch(
        &self,
        request: Request<Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let call = Call::begin(&request);
        let is_kubelets = Connection::of(&request).is_some_and(|connection| connection.is_kubelets());
        let stream = async {
            // One message at a time: a reader that lags gets the newest list, not all of them.
            let (sender, receiver) = mpsc::channel(1);
            let desk = Arc::clone(&self.0);
            tokio::spawn(async move {
                let _call = call;
                let _watched = is_kubelets.then(|| Watched::new(&desk));
                show(&desk, sender).await;
            });
            Ok(Response::new(ReceiverStream::new(receiver)))
        };
        self.0.counted(Rpc::ListAndWatch, stream).await
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<PreferredAllocationRequest>,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let _call = Call::begin(&request);
        self.0.counted(Rpc::GetPreferredAllocation, self.0.preferred(request.into_inner())).await
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
        self.0.counted(Rpc::Allocate, granted).await
    }

    async fn pre_start_container(
        &self,
        request: Request<PreStartContainerRequest>,
    ) -> Result<Response<PreStartContainerResponse>, Status> {
        let _call = Call::begin(&request);
        self.0
            .counted(Rpc::PreStartContainer, async { Ok(Response::new(PreStartContainerResponse {})) })
            .await
    }
}

/// gRPC's word for a code; a number of none is `UNKNOWN`.
fn word_of(code: i32) -> &'static str {
    let word = usize::try_from(code).ok().and_then(|code| CODES.get(code));
    word.copied().unwrap_or("UNKNOWN")
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

/// One stream: the whole list now, and again whenever the board turns.
async fn show(desk: &Desk, sender: mpsc::Sender<Result<ListAndWatchResponse, Status>>) {
    let mut ending = desk.ending.subscribe();
    if ending.borrow_and_update().last {
        // The kubelet asks some time after it registered us, which may be when we are leaving already.
        return;
    }
    let mut sheets = desk.board.subscribe();
    loop {
        let listed = Arc::clone(&sheets.borrow_and_update().devices);
        let span = spans::device_list(&desk.resource, listed.iter().map(|device| device.healthy));
        let devices = listed.iter().map(convert::device).collect();
        let message = Ok(ListAndWatchResponse { devices });
        tokio::select! {
            sent = sender.send(message).instrument(span) => if sent.is_err() { return },
            _ = ending.changed() => return,
        }
        tokio::select! {
            turned = sheets.changed() => if turned.is_err() { return },
            _ = ending.changed() => return,
            // The kubelet closed the stream or its connection.
            () = sender.closed() => return,
        }
    }
}

/// Counts one of the kubelet's streams for as long as it lives.
struct Watched<'d> {
    desk: &'d Desk,
    _counted: Counted,
}

impl<'d> Watched<'d> {
    fn new(desk: &'d Desk) -> Self {
        desk.kernel.counters().kubelet.stream_began(desk.resource.as_str());
        Self { desk, _counted: Counted::new(&desk.streams) }
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.desk.kernel.counters().kubelet.stream_ended(self.desk.resource.as_str());
    }
}

impl Desk {
    /// Counts a call, how long it takes and how it ends. One that its caller no longer waits for is
    /// dropped half way, and counts as cancelled.
    async fn counted<T>(
        &self,
        rpc: Rpc,
        answer: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Status> {
        let call = self.kernel.counters().kubelet.begin(rpc);
        let span = spans::grpc(rpc.as_str(), &self.resource);
        let answer = answer.instrument(span.clone()).await;
        let code = answer.as_ref().err().map_or(0, |status| status.code().into());
        call.end(code);
        spans::grpc_answered(&span, word_of(code), code);
        answer
    }

    async fn preferred(
        &self,
        request: PreferredAllocationRequest,
    ) -> Result<Response<PreferredAllocationResponse>, Status> {
        let requests = request.container_requests;
        check_containers(requests.len())?;
        let ledger = self.kernel.snapshot();
        let mut container_responses = Vec::new();
        for request in &requests {
            let place = parse::place(&ledger, &self.resource, request)
                .map_err(|error| status::bad_request(&error))?;
            let devices = self.place(place).await;
            let device_i_ds = devices.iter().map(DeviceId::to_string).collect();
            container_responses.push(ContainerPreferredAllocationResponse { device_i_ds });
        }
        Ok(Response::new(PreferredAllocationResponse { container_responses }))
    }

    /// Asks where to place, and holds the answer against the request: whatever the middle said,
    /// the kubelet gets that many of the available ids with the required ones among them.
    async fn place(&self, request: PlaceRequest) -> Vec<DeviceId> {
        if request.size == 0 || request.available.is_empty() {
            return Vec::new();
        }
        if request.size >= request.available.len() {
            return request.available;
        }
        let (answer, _by) = self.kernel.place(request.clone()).await;
        let available: BTreeSet<&DeviceId> = request.available.iter().collect();
        // Required first, so that they are in whatever else is cut off.
        let wanted = request.required.iter().chain(&answer.devices);
        let rest = wanted.chain(&request.available);
        let mut seen = BTreeSet::new();
        rest.filter(|id| available.contains(*id) && seen.insert(*id))
            .take(request.size.max(request.required.len()))
            .cloned()
            .collect()
    }

    /// One grant for all containers of the call, or none. Each container's answer names its own devices, and all
    /// carry the id of the one allocation.
    async fn allocate(
        &self,
        requests: &[ContainerAllocateRequest],
    ) -> Result<Vec<ContainerAllocateResponse>, Status> {
        let ledger = self.kernel.snapshot();
        let (admit, containers) = parse::admit(&ledger, &self.resource, requests).map_err(|error| {
            self.kernel.counters().kubelet.count_refusal("badRequest");
            status::bad_request(&error)
        })?;
        let Granted { allocation, snapshot } = self.grant(admit).await.map_err(|error| {
            self.kernel.counters().kubelet.count_refusal(error.kind());
            tracing::warn!(resource = %self.resource, %error, "no grant");
            status::declined(&self.resource, &error)
        })?;
        spans::granted(&allocation.id);
        tracing::info!(
            allocation = %allocation.id, resource = %self.resource, devices = ?allocation.devices,
            "granted"
        );
        let answer = |devices| {
            convert::response(&Allocation { devices, ..allocation.clone() }, &snapshot, &self.edits)
        };
        Ok(containers.into_iter().map(answer).collect())
    }

    /// Asks once, and once more after a round where a holder may have left unnoticed.
    async fn grant(&self, admit: AdmitRequest) -> Result<Granted, CommandError> {
        match self.kernel.allocate(admit.clone(), Attempt::First).await {
            Err(CommandError::Refused(refusal)) if refusal.reconcile_may_resolve() => {
                tracing::info!(
                    resource = %self.resource, %refusal,
                    "looking whether the holder is still there"
                );
                self.rounds.cure().await;
                self.kernel.allocate(admit, Attempt::Last).await
            }
            answer => answer,
        }
    }

    /// Ends every stream that lives now.
    pub(super) fn end_streams(&self) {
        self.ending.send_modify(|ending| ending.turn += 1);
    }

    /// The same for good: whoever opens one later sees its end at once. Else it would live as long as the
    /// kubelet's connection, with a list that nobody turns any more.
    pub(super) fn end_all_streams(&self) {
        self.ending.send_modify(|ending| *ending = Ending { turn: ending.turn + 1, last: true });
    }
}
