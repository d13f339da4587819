//! The runtimes and sockets of a kubelet process.

use crate::go_client::GoClient;
use crate::kubelet_state::KubeletState;
use crate::pod_resources::PodResourcesService;
use crate::pods_api::PodsService;
use crate::proto::v1::pod_resources_lister_server::PodResourcesListerServer;
use crate::proto::v1alpha1::pods_server::PodsServer;
use crate::proto::v1beta1::registration_server::RegistrationServer;
use crate::registration::RegistrationService;
use std::{
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};
use tokio::{
    net::{UnixListener, UnixSocket},
    runtime::{Builder, Handle, Runtime},
    task::JoinHandle,
    time::sleep,
};
use tokio_stream::{StreamExt as _, wrappers::UnixListenerStream};
use tonic::transport::Server;

/// The backlog of a listening socket.
const BACKLOG: u32 = 128;
/// The longest wait for the end of a process.
const END_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) state: Arc<KubeletState>,
    pub(crate) handle: Handle,
    devices: Option<Runtime>,
    pub(crate) pod_resources: Option<Runtime>,
    pub(crate) registration: JoinHandle<()>,
}

impl Process {
    /// Starts the process: listens on its sockets.
    pub(crate) async fn begin(state: Arc<KubeletState>) -> io::Result<Self> {
        let devices = one_worker("kubelet")?;
        let handle = devices.handle().clone();
        let registration = match listen_registration(&handle, &state).await {
            Ok(registration) => registration,
            Err(error) => {
                devices.shutdown_background();
                return Err(error);
            }
        };
        let mut process = Self { state, handle, devices: Some(devices), pod_resources: None, registration };
        process.pod_resources = Some(listen_pod_resources(&process.state).await?);
        if process.state.node.options.pods_api {
            listen_pods_api(&process.handle, &process.state).await?;
        }
        Ok(process)
    }

    /// Ends the process. Returns when every task is dropped and every connection is closed.
    pub(crate) async fn end(mut self) {
        self.state.alive.store(false, Ordering::SeqCst);
        let runtimes = [self.pod_resources.take(), self.devices.take()];
        for runtime in runtimes.into_iter().flatten() {
            end_runtime(runtime).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.state.alive.store(false, Ordering::SeqCst);
        let runtimes = [self.pod_resources.take(), self.devices.take()];
        for runtime in runtimes.into_iter().flatten() {
            // The only way to drop a runtime inside another one.
            runtime.shutdown_background();
        }
    }
}

fn one_worker(name: &str) -> io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build()
}

pub(crate) async fn end_runtime(runtime: Runtime) {
    // Blocks, so it must not run on a worker of the caller's runtime.
    let ended = tokio::task::spawn_blocking(move || runtime.shutdown_timeout(END_LIMIT));
    let _ = ended.await;
}

/// Binds `kubelet.sock` and serves registration on it.
pub(crate) async fn listen_registration(
    handle: &Handle,
    state: &Arc<KubeletState>,
) -> io::Result<JoinHandle<()>> {
    let socket = state.node.device_plugins().join("kubelet.sock");
    let gap = state.node.options.bind_gap;
    let listener = handle.spawn(bind(socket, gap)).await??;
    let service = RegistrationServer::new(RegistrationService(Arc::clone(state)));
    Ok(handle.spawn(async move {
        let incoming = UnixListenerStream::new(listener).map(|client| client.map(GoClient::new));
        // An accept error ends this server, as in the kubelet.
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    }))
}

/// Serves the pod resources API on a runtime of its own, so that it can be stopped separately.
pub(crate) async fn listen_pod_resources(state: &Arc<KubeletState>) -> io::Result<Runtime> {
    let runtime = one_worker("pod-resources")?;
    let socket = state.node.pod_resources().join("kubelet.sock");
    let removed = fs::remove_file(&socket);
    let bound = match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => runtime.spawn(bind(socket, Duration::ZERO)).await.map_err(io::Error::from).flatten(),
    };
    let listener = match bound {
        Ok(listener) => listener,
        Err(error) => {
            runtime.shutdown_background();
            return Err(error);
        }
    };
    let service = PodResourcesListerServer::new(PodResourcesService::new(Arc::clone(state)));
    runtime.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    });
    Ok(runtime)
}

/// Serves the Pods API until the process ends.
async fn listen_pods_api(handle: &Handle, state: &Arc<KubeletState>) -> io::Result<()> {
    let folder = state.node.pods_api();
    fs::create_dir_all(&folder)?;
    let socket = folder.join("pods-api.sock");
    if let Err(error) = fs::remove_file(&socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let listener = handle.spawn(bind(socket, Duration::ZERO)).await??;
    let service = PodsServer::new(PodsService(Arc::clone(state)));
    handle.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    });
    Ok(())
}

/// Binds, and listens after `gap`. A dial in between is refused.
async fn bind(socket: PathBuf, gap: Duration) -> io::Result<UnixListener> {
    let unix = UnixSocket::new_stream()?;
    unix.bind(socket)?;
    if !gap.is_zero() {
        sleep(gap).await;
    }
    unix.listen(BACKLOG)
}

/// Removes the sockets in `device-plugins/` and keeps all other files, as a starting kubelet does.
pub(crate) fn remove_sockets(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
