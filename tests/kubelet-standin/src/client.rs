//! The kubelet's side of one registered plugin: dial, ask, watch, disconnect.

use crate::anomalies::Anomaly;
use crate::calls::Rpc;
use crate::devices::Endpoint as ManagerEndpoint;
use crate::life::Life;
use crate::proto::v1beta1::device_plugin_client::DevicePluginClient;
use crate::proto::v1beta1::{DevicePluginOptions, Empty};
use crate::world::lock;
use hyper_util::rt::TokioIo;
use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};
use tokio::{net::UnixStream, sync::watch, time::sleep};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// A refused dial is tried again this often until the dial limit.
const REDIAL_EVERY: Duration = Duration::from_millis(20);

/// A connection to one plugin. It is never dialled again once it is closed.
#[derive(Debug)]
pub(crate) struct Client {
    resource: String,
    socket: PathBuf,
    channel: Mutex<Option<Channel>>,
    /// True once the kubelet has closed the connection; ends the stream.
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

    /// A caller for unary calls, unless the connection is closed.
    pub(crate) fn api(&self) -> Option<DevicePluginClient<Channel>> {
        let channel = lock(&self.channel).clone()?;
        Some(DevicePluginClient::new(channel))
    }

    /// Dials and asks for the options. On success the plugin is an endpoint.
    pub(crate) async fn connect(self: &Arc<Self>, life: &Life) -> Result<(), Status> {
        let channel = dial(&self.socket, life.world.options.dial_limit).await?;
        *lock(&self.channel) = Some(channel.clone());
        let began = Instant::now();
        let answer = DevicePluginClient::new(channel).get_device_plugin_options(Empty {}).await;
        let world = &life.world;
        let failed = answer.is_err();
        world.record(Rpc::GetDevicePluginOptions, &self.resource, began, failed);
        let options = answer
            .map_err(|status| {
                let why = go_error(&status);
                Status::unknown(format!("failed to get device plugin options: {why}"))
            })?
            .into_inner();
        self.connected(life, options);
        Ok(())
    }

    fn connected(self: &Arc<Self>, life: &Life, options: DevicePluginOptions) {
        let endpoint =
            ManagerEndpoint { client: Some(Arc::clone(self)), options: Some(options), stopped: None };
        let mut manager = lock(&life.manager);
        manager.endpoints.insert(self.resource.clone(), endpoint);
        drop(manager);
        life.world.touch();
    }

    /// Closes the connection; streams on it end.
    pub(crate) fn close(&self) {
        lock(&self.channel).take();
        self.closed.send_replace(true);
    }

    /// Watches the plugin until the stream ends, for whatever reason.
    async fn watch(&self, life: &Life) {
        let mut closed = self.closed.subscribe();
        if life.world.faults().never_watch {
            let _ = closed.wait_for(|closed| *closed).await;
            return;
        }
        let delay = life.world.faults().watch_delay;
        let late = async {
            tokio::time::sleep(delay).await;
            self.receive(life).await;
        };
        tokio::select! {
            () = late => {}
            _ = closed.wait_for(|closed| *closed) => {}
        }
    }

    async fn receive(&self, life: &Life) {
        let Some(mut api) = self.api() else { return };
        let began = Instant::now();
        let opened = api.list_and_watch(Empty {}).await;
        drop(api);
        let failed = opened.is_err();
        life.world.record(Rpc::ListAndWatch, &self.resource, began, failed);
        let Ok(opened) = opened else { return };
        let mut stream = opened.into_inner();
        let limit = life.world.options.first_list_limit;
        let first = async {
            let first = stream.message();
            tokio::pin!(first);
            tokio::select! {
                message = &mut first => message,
                () = sleep(limit) => {
                    life.world.report(Anomaly::LateList {
                        resource: self.resource.clone(),
                        waited: limit,
                    });
                    first.await
                }
            }
        };
        let mut message = first.await;
        while let Ok(Some(list)) = message {
            // Counted first: who waits for what the list says may look at the count next.
            life.world.record(Rpc::ListMessage, &self.resource, Instant::now(), false);
            life.receive_list(&self.resource, list.devices);
            message = stream.message().await;
        }
    }
}

/// Dials as the kubelet does: blocking, authority "localhost", over and over until
/// the limit. The connector hands its stream out once, so nothing ever redials.
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

/// Registers a client under its name, connects it and watches it.
pub(crate) async fn connect_client(life: &Arc<Life>, name: &str, socket: PathBuf) -> Result<(), Status> {
    report_poison(life, name);
    let client = Client::new(name, socket);
    lock(&life.clients).insert(name.to_owned(), Arc::clone(&client));
    if let Err(status) = client.connect(life).await {
        // By name: this removes the entry of a live client, too.
        lock(&life.clients).remove(name);
        return Err(status);
    }
    lock(&life.streams).push(name.to_owned());
    let life = Arc::clone(life);
    tokio::spawn(run_client(life, client));
    Ok(())
}

fn report_poison(life: &Life, name: &str) {
    let resource = name.to_owned();
    if lock(&life.streams).contains(&resource) {
        life.world.report(Anomaly::RegisteredOverLiveStream { resource });
    } else if lock(&life.disconnecting).contains(&resource) {
        life.world.report(Anomaly::RegisteredWhileDisconnecting { resource });
    }
}

async fn run_client(life: Arc<Life>, mine: Arc<Client>) {
    mine.watch(&life).await;
    let name = mine.resource.clone();
    remove_one(&mut lock(&life.streams), &name);
    life.world.touch();
    // The race of 1.36: whoever has the name now is disconnected, not `mine`.
    let Some(found) = lock(&life.clients).get(&name).cloned() else {
        return;
    };
    if life.world.options.name_keyed_race || Arc::ptr_eq(&found, &mine) {
        disconnect_client(&life, &name, &found).await;
    }
    // Ends a connection whose entry somebody else's failure had removed.
    drop(mine);
}

/// Closes first and tells the manager after, as 1.36 does.
async fn disconnect_client(life: &Life, name: &str, client: &Client) {
    lock(&life.clients).remove(name);
    lock(&life.disconnecting).push(name.to_owned());
    client.close();
    sleep(life.world.options.disconnect_gap).await;
    life.plugin_disconnected(name);
    remove_one(&mut lock(&life.disconnecting), name);
    life.world.touch();
}

fn remove_one(names: &mut Vec<String>, name: &str) {
    if let Some(at) = names.iter().position(|n| n == name) {
        names.swap_remove(at);
    }
}

/// A gRPC status as Go prints it, which is how it reaches a pod's message.
pub(crate) fn go_error(status: &Status) -> String {
    use tonic::Code;
    let code = match status.code() {
        Code::Cancelled => "Canceled".to_owned(),
        code => format!("{code:?}"),
    };
    format!("rpc error: code = {code} desc = {}", status.message())
}
