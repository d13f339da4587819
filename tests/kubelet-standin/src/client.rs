//! The kubelet's client of one registered plugin: dials, gets the options, watches, disconnects.

use crate::anomalies::Anomaly;
use crate::calls::Rpc;
use crate::devices::Endpoint as ManagerEndpoint;
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::{DevicePluginOptions, Empty};
use hyper_util::rt::TokioIo;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{net::UnixStream, sync::watch, time::sleep};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// The interval between dials until the dial limit.
const REDIAL_EVERY: Duration = Duration::from_millis(20);

/// A connection to one plugin. It never redials after it is closed.
#[derive(Debug)]
pub(crate) struct Client {
    resource: String,
    socket: PathBuf,
    channel: Mutex<Option<Channel>>,
    /// True after the kubelet has closed the connection; ends the stream.
    closed: watch::Sender<bool>,
}

impl Client {
    pub(crate) fn new(resource: &str, socket: PathBuf) -> Arc<Self> {
        Arc::new(Self {
            resource: resource.to_owned(),
            socket,
            channel: Mutex::default(),
            closed: watch::Sender::new(false),
        })
    }

    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// A client for unary calls; `None` if the connection is closed.
    pub(crate) fn api(&self) -> Option<DevicePluginClient<Channel>> {
        let channel = lock(&self.channel).clone()?;
        Some(DevicePluginClient::new(channel))
    }

    /// Dials, gets the plugin's options and inserts its endpoint.
    pub(crate) async fn connect(self: &Arc<Self>, state: &KubeletState) -> Result<(), Status> {
        let channel = dial(&self.socket, state.node.options.dial_limit).await?;
        *lock(&self.channel) = Some(channel.clone());
        let began = Instant::now();
        let result = DevicePluginClient::new(channel).get_device_plugin_options(Empty {}).await;
        state.node.record(Rpc::GetDevicePluginOptions, &self.resource, began, result.is_err());
        let options = result
            .map_err(|status| {
                let error = go_error(&status);
                Status::unknown(format!("failed to get device plugin options: {error}"))
            })?
            .into_inner();
        self.insert_endpoint(state, options);
        Ok(())
    }

    fn insert_endpoint(self: &Arc<Self>, state: &KubeletState, options: DevicePluginOptions) {
        let endpoint =
            ManagerEndpoint { client: Some(Arc::clone(self)), options: Some(options), stopped: None };
        let mut manager = lock(&state.manager);
        manager.endpoints.insert(self.resource.clone(), endpoint);
        drop(manager);
        state.node.notify_changed();
    }

    /// Closes the connection, which ends its streams.
    pub(crate) fn close(&self) {
        lock(&self.channel).take();
        self.closed.send_replace(true);
    }

    /// Watches the plugin until the stream ends, for whatever reason.
    async fn watch(&self, state: &KubeletState) {
        let mut closed = self.closed.subscribe();
        if state.node.faults().never_watch {
            let _ = closed.wait_for(|closed| *closed).await;
            return;
        }
        let delay = state.node.faults().watch_delay;
        let delayed = async {
            tokio::time::sleep(delay).await;
            self.receive(state).await;
        };
        tokio::select! {
            () = delayed => {}
            _ = closed.wait_for(|closed| *closed) => {}
        }
    }

    async fn receive(&self, state: &KubeletState) {
        let Some(mut api) = self.api() else { return };
        let began = Instant::now();
        let response = api.list_and_watch(Empty {}).await;
        drop(api);
        state.node.record(Rpc::ListAndWatch, &self.resource, began, response.is_err());
        let Ok(response) = response else { return };
        let mut stream = response.into_inner();
        let limit = state.node.options.first_list_limit;
        let first = async {
            let first = stream.message();
            tokio::pin!(first);
            tokio::select! {
                message = &mut first => message,
                () = sleep(limit) => {
                    state.node.report(Anomaly::LateList {
                        resource: self.resource.clone(),
                        waited: limit,
                    });
                    first.await
                }
            }
        };
        let mut message = first.await;
        while let Ok(Some(list)) = message {
            // Counted first, for tests that wait for the list and then read the count.
            state.node.record(Rpc::ListMessage, &self.resource, Instant::now(), false);
            state.receive_list(&self.resource, list.devices);
            message = stream.message().await;
        }
    }
}

/// Dials as the kubelet does: blocking, authority "localhost", repeatedly until the
/// limit. The connector returns its stream once, so the channel never redials.
async fn dial(socket: &Path, limit: Duration) -> Result<Channel, Status> {
    let connecting = async {
        loop {
            match UnixStream::connect(socket).await {
                Ok(stream) => break stream,
                Err(_) => sleep(REDIAL_EVERY).await,
            }
        }
    };
    let stream = tokio::time::timeout(limit, connecting)
        .await
        .map_err(|_| Status::unknown("failed to dial device plugin: context deadline exceeded"))?;
    let mut once = Some(stream);
    let connector = tower::service_fn(move |_| {
        let stream = once.take();
        async move {
            let stream = stream.ok_or(std::io::ErrorKind::ConnectionAborted)?;
            Ok::<_, std::io::Error>(TokioIo::new(stream))
        }
    });
    Endpoint::from_static("http://localhost")
        .connect_with_connector(connector)
        .await
        .map_err(|error| Status::unknown(format!("failed to dial device plugin: {error}")))
}

/// Registers a client under its resource name, connects it and watches it.
pub(crate) async fn connect_client(
    state: &Arc<KubeletState>,
    name: &str,
    socket: PathBuf,
) -> Result<(), Status> {
    report_unsafe_registration(state, name);
    let client = Client::new(name, socket);
    lock(&state.clients).insert(name.to_owned(), Arc::clone(&client));
    if let Err(status) = client.connect(state).await {
        // By name, so this also removes the entry of an older client that still runs.
        lock(&state.clients).remove(name);
        return Err(status);
    }
    lock(&state.streams).push(name.to_owned());
    let state = Arc::clone(state);
    tokio::spawn(run_client(state, client));
    Ok(())
}

fn report_unsafe_registration(state: &KubeletState, name: &str) {
    let resource = name.to_owned();
    if lock(&state.streams).contains(&resource) {
        state.node.report(Anomaly::RegisteredOverLiveStream { resource });
    } else if lock(&state.disconnecting).contains(&resource) {
        state.node.report(Anomaly::RegisteredWhileDisconnecting { resource });
    }
}

async fn run_client(state: Arc<KubeletState>, client: Arc<Client>) {
    client.watch(&state).await;
    let name = client.resource.clone();
    remove_one(&mut lock(&state.streams), &name);
    state.node.notify_changed();
    // The race of 1.36: disconnects the current client of the name, not `client`.
    let Some(current) = lock(&state.clients).get(&name).cloned() else {
        return;
    };
    if state.node.options.name_keyed_race || Arc::ptr_eq(&current, &client) {
        disconnect_client(&state, &name, &current).await;
    }
    // Closes the connection if another client's failed Register removed the entry.
    drop(client);
}

/// Closes the connection before it notifies the manager, as 1.36 does.
async fn disconnect_client(state: &KubeletState, name: &str, client: &Client) {
    lock(&state.clients).remove(name);
    lock(&state.disconnecting).push(name.to_owned());
    client.close();
    sleep(state.node.options.disconnect_gap).await;
    state.plugin_disconnected(name);
    remove_one(&mut lock(&state.disconnecting), name);
    state.node.notify_changed();
}

fn remove_one(names: &mut Vec<String>, name: &str) {
    if let Some(index) = names.iter().position(|n| n == name) {
        names.swap_remove(index);
    }
}

/// A gRPC status as Go prints it, which a pod's message contains.
pub(crate) fn go_error(status: &Status) -> String {
    use tonic::Code;
    let code = match status.code() {
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}
