//! The driver's registration with the kubelet's plugin watcher, and the sockets' upkeep.
//!
//! The watcher finds sockets by their files, those that exist at its start included, so a kubelet that restarts needs no
//! call of the driver. The watcher waits 1 s for GetInfo, and backs off after a failure. So the registration socket appears
//! last: it is bound under a name that begins with a dot, which the watcher skips, and renamed once both are served.

use super::DriverSettings;
use crate::connections::Call;
use crate::socket::{PLUGIN_CALLS_MAX, Socket};
use crate::timeouts::ConnectionTimeouts;
use crate::wire;
use berth_proto::plugin_registration::registration_client::RegistrationClient;
use berth_proto::plugin_registration::registration_server::{Registration, RegistrationServer};
use berth_proto::plugin_registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use futures_util::future::join_all;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::service::Routes;
use tonic::{Request, Response, Status};

/// The type of a DRA driver (kubernetes `pluginregistration/v1/constants.go`).
const DRA_PLUGIN: &str = "DRAPlugin";
/// The services of `dra.sock`, by the names that the kubelet knows. It skips those that it does not know.
const SERVICES: [&str; 3] = ["v1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth"];
/// Concurrent calls on one connection to the driver: the kubelet calls for each pod that starts or ends, and those that wait
/// for a holder must not keep out the call that releases it. A node has a few hundred pods.
const DRIVER_CALLS_MAX: u32 = 1_024;
/// How long another driver has to answer GetInfo: what the kubelet's watcher waits for.
const OTHER_DRIVER_MAX: Duration = Duration::from_secs(1);
/// Most sockets of the kubelet's folder that are asked for their driver.
const SOCKETS_MAX: usize = 256;
/// How often the sockets' files are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The state of the driver's registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriverRegistration {
    /// The kubelet has not said yet whether it has registered the driver.
    Waiting,
    /// The kubelet has registered the driver, and is connected.
    Registered,
    /// The kubelet has registered the driver, but has no connection to it, so that the kubelet was stopped or is restarting: a
    /// running kubelet keeps one open (kubernetes `dra/plugin/dra_plugin_manager.go`).
    Disconnected,
    /// The kubelet refused the driver, or its sockets cannot be served, and why.
    Failed(String),
}

/// The registration service.
struct Service {
    settings: Arc<DriverSettings>,
    state: watch::Sender<DriverRegistration>,
}

#[tonic::async_trait]
impl Registration for Service {
    async fn get_info(&self, request: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        let _call = Call::begin(&request);
        Ok(Response::new(PluginInfo {
            r#type: DRA_PLUGIN.to_owned(),
            name: self.settings.driver.clone(),
            endpoint: self.settings.socket().display().to_string(),
            supported_versions: SERVICES.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let _call = Call::begin(&request);
        let status = request.into_inner();
        set(
            &self.state,
            if status.plugin_registered {
                DriverRegistration::Registered
            } else {
                DriverRegistration::Failed(format!("the kubelet refused the driver: {}", status.error))
            },
        );
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

/// Publishes the state, and logs it if it changed.
fn set(state: &watch::Sender<DriverRegistration>, new: DriverRegistration) {
    change(state, |_| Some(new));
}

/// Publishes the state that follows from the current one, and logs it if it differs from the current one.
fn change(
    state: &watch::Sender<DriverRegistration>,
    next: impl FnOnce(&DriverRegistration) -> Option<DriverRegistration>,
) {
    state.send_if_modified(|current| {
        let Some(new) = next(current).filter(|new| new != current) else { return false };
        match &new {
            DriverRegistration::Waiting => {}
            DriverRegistration::Registered => tracing::info!("the kubelet has registered the DRA driver"),
            DriverRegistration::Disconnected => {
                tracing::info!("the kubelet has closed its connection to the DRA driver");
            }
            DriverRegistration::Failed(why) => tracing::warn!("the DRA driver is not registered: {why}"),
        }
        *current = new;
        true
    });
}

/// Serves the driver's sockets.
pub(super) struct Registrar {
    settings: Arc<DriverSettings>,
    state: watch::Sender<DriverRegistration>,
}

/// Both sockets.
struct Sockets {
    api: Socket,
    registration: Socket,
}

impl Registrar {
    pub(super) fn new(settings: Arc<DriverSettings>, state: watch::Sender<DriverRegistration>) -> Self {
        Self { settings, state }
    }

    /// Serves until `stop`, and makes sockets again whose files were deleted.
    pub(super) async fn run(
        self,
        timeouts: ConnectionTimeouts,
        api: impl Fn() -> Routes,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut sockets: Option<Sockets> = None;
        loop {
            let is_served = sockets
                .as_ref()
                .is_some_and(|both| both.api.is_in_place() && both.registration.is_in_place());
            if !is_served {
                if let Some(old) = sockets.take() {
                    tracing::warn!("a socket of the DRA driver was deleted; the driver is registered again");
                    old.stop(timeouts.stop_limit).await;
                }
                let served = match self.other_driver().await {
                    Some(socket) => Err(format!(
                        "{} serves another driver with the name {}, and each would delete the other's ResourceSlices: \
                         uninstall that driver, or give this one another name (`dra.driver`)",
                        socket.display(),
                        self.settings.driver,
                    )),
                    None => self.serve(api(), timeouts),
                };
                match served {
                    Ok(both) => {
                        sockets = Some(both);
                        set(&self.state, DriverRegistration::Waiting);
                    }
                    Err(error) => set(&self.state, DriverRegistration::Failed(error)),
                }
            }
            if let Some(both) = &sockets {
                self.show_connection(both.api.is_connected());
            }
            tokio::select! {
                () = sleep(CHECK_INTERVAL) => {}
                _ = stop.wait_for(|stop| *stop) => break,
            }
        }
        if let Some(sockets) = sockets {
            sockets.stop(timeouts.stop_limit).await;
        }
    }

    /// Shows whether the kubelet is connected, since a kubelet that lost its connection connects again without registering the
    /// driver. A connected kubelet may never call the driver, so calls cannot identify it: any connected process of root counts.
    fn show_connection(&self, is_connected: bool) {
        change(&self.state, |state| match (state, is_connected) {
            (DriverRegistration::Registered, false) => Some(DriverRegistration::Disconnected),
            (DriverRegistration::Disconnected, true) => Some(DriverRegistration::Registered),
            _ => None,
        });
    }

    /// The registration socket of another driver that has this one's name, such as that of NVIDIA's DRA driver.
    async fn other_driver(&self) -> Option<PathBuf> {
        let own = self.settings.registration_socket();
        let entries = fs::read_dir(own.parent()?).ok()?.take(SOCKETS_MAX);
        let paths = entries.filter_map(|entry| entry.ok().map(|entry| entry.path()));
        let others = paths.filter(|path| *path != own && path.extension().is_some_and(|end| end == "sock"));
        let asked = others.map(|path| async move {
            let info = timeout(OTHER_DRIVER_MAX, driver_of(&path)).await.ok().flatten()?;
            (info.r#type == DRA_PLUGIN && info.name == self.settings.driver).then_some(path)
        });
        join_all(asked).await.into_iter().flatten().next()
    }

    fn serve(&self, api: Routes, timeouts: ConnectionTimeouts) -> Result<Sockets, String> {
        let (socket, registration) = (self.settings.socket(), self.settings.registration_socket());
        let failed = |path: &Path, error: io::Error| {
            format!(
                "{} cannot be served: {error}: mount the kubelet's folders `plugins/{}` and `plugins_registry` writable, \
                 and set `kubeletRootDir` to the kubelet's `--root-dir`",
                path.display(),
                self.settings.driver,
            )
        };
        // The driver creates its own folder in `plugins`. The kubelet creates `plugins_registry`, but may not have started
        // yet.
        for folder in [socket.parent(), registration.parent()].into_iter().flatten() {
            fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        }
        let api = Socket::serve(&socket, api, DRIVER_CALLS_MAX, timeouts)
            .map_err(|error| failed(&socket, error))?;
        let service = Service { settings: Arc::clone(&self.settings), state: self.state.clone() };
        let routes = Routes::new(RegistrationServer::new(service));
        let hidden = registration.with_file_name(format!(".{}.reg.sock", self.settings.driver));
        let registration = Socket::serve(&hidden, routes, PLUGIN_CALLS_MAX, timeouts)
            .and_then(|bound| bound.renamed(&registration))
            .map_err(|error| failed(&registration, error))?;
        Ok(Sockets { api, registration })
    }
}

/// What a registration socket answers; `None` if nothing answers there.
async fn driver_of(socket: &Path) -> Option<PluginInfo> {
    let channel = wire::dial(socket).await.ok()?;
    let info = RegistrationClient::new(channel).get_info(InfoRequest {}).await.ok()?;
    Some(info.into_inner())
}

impl Sockets {
    /// The registration goes first: the kubelet then removes the driver before it could call it.
    async fn stop(self, limit: Duration) {
        self.registration.stop(limit).await;
        self.api.stop(limit).await;
    }
}
