//! The operating system's side of a kubelet process: runtimes and sockets.

use crate::life::Life;
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
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

/// Connections that the kernel holds for us before they are accepted.
const BACKLOG: u32 = 128;
/// The end of a process is waited for at most this long.
const END_LIMIT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) life: Arc<Life>,
    pub(crate) handle: Handle,
    devices: Option<Runtime>,
    pub(crate) pod_resources: Option<Runtime>,
    pub(crate) registration: JoinHandle<()>,
}

impl Process {
    /// Listens on both sockets.
    pub(crate) async fn begin(life: Arc<Life>) -> io::Result<Self> {
        let devices = one_worker("kubelet")?;
        let handle = devices.handle().clone();
        let registration = match listen_registration(&handle, &life).await {
            Ok(registration) => registration,
            Err(error) => {
                devices.shutdown_background();
                return Err(error);
            }
        };
        let mut process = Self { life, handle, devices: Some(devices), pod_resources: None, registration };
        process.pod_resources = Some(listen_pod_resources(&process.life).await?);
        if process.life.world.options.pods_api {
            listen_pods_api(&process.handle, &process.life).await?;
        }
        Ok(process)
    }

    /// Returns when every task has been dropped and every connection is closed.
    pub(crate) async fn end(mut self) {
        self.life.alive.store(false, Ordering::SeqCst);
        let runtimes = [self.pod_resources.take(), self.devices.take()];
        for runtime in runtimes.into_iter().flatten() {
            end_runtime(runtime).await;
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.life.alive.store(false, Ordering::SeqCst);
        let runtimes = [self.pod_resources.take(), self.devices.take()];
        for runtime in runtimes.into_iter().flatten() {
            // The only way to let go of a runtime inside another one.
            runtime.shutdown_background();
        }
    }
}

fn one_worker(name: &str) -> io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(1).thread_name(name).enable_all().build()
}

pub(crate) async fn end_runtime(runtime: Runtime) {
    // It blocks, so it must not be done on a worker of the caller's runtime.
    let ended = tokio::task::spawn_blocking(move || runtime.shutdown_timeout(END_LIMIT));
    let _ = ended.await;
}

/// Binds `kubelet.sock` and serves registration on it.
pub(crate) async fn listen_registration(handle: &Handle, life: &Arc<Life>) -> io::Result<JoinHandle<()>> {
    let socket = life.world.device_plugins().join("kubelet.sock");
    let gap = life.world.options.bind_gap;
    let listener = handle.spawn(bind(socket, gap)).await??;
    let service = RegistrationServer::new(RegistrationService(Arc::clone(life)));
    Ok(handle.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        // An accept error is the end of this server, as of a kubelet's.
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    }))
}

/// Serves the pod resources API on a runtime of its own, so that it can die alone.
pub(crate) async fn listen_pod_resources(life: &Arc<Life>) -> io::Result<Runtime> {
    let runtime = one_worker("pod-resources")?;
    let socket = life.world.pod_resources().join("kubelet.sock");
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
    let service = PodResourcesListerServer::new(PodResourcesService::new(Arc::clone(life)));
    runtime.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    });
    Ok(runtime)
}

/// Serves the Pods API until the process ends.
async fn listen_pods_api(handle: &Handle, life: &Arc<Life>) -> io::Result<()> {
    let folder = life.world.pods_api();
    fs::create_dir_all(&folder)?;
    let socket = folder.join("pods-api.sock");
    if let Err(error) = fs::remove_file(&socket)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(error);
    }
    let listener = handle.spawn(bind(socket, Duration::ZERO)).await??;
    let service = PodsServer::new(PodsService(Arc::clone(life)));
    handle.spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        let _ = Server::builder().serve_with_incoming(service, incoming).await;
    });
    Ok(())
}

/// Binds, and listens only after `gap`: a dial in between is refused.
async fn bind(socket: PathBuf, gap: Duration) -> io::Result<UnixListener> {
    let unix = UnixSocket::new_stream()?;
    unix.bind(socket)?;
    if !gap.is_zero() {
        sleep(gap).await;
    }
    unix.listen(BACKLOG)
}

/// What a starting kubelet does to `device-plugins/`: sockets go, all else stays.
pub(crate) fn remove_sockets(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_socket() {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}
