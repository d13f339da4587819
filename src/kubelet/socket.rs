//! A plugin's unix socket.

use super::connections::{Connections, Served};
use super::folder::{FileId, socket_id};
use super::settings::Waits;
use super::wire::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt, wrappers::UnixListenerStream};
use tonic::transport::Server;

/// The largest request: 2048 ids to choose from and 2047 that must be chosen, at most 65 bytes
/// each on the wire, is 266 KiB.
const REQUEST_BYTES_MAX: usize = 1024 * 1024;
/// Calls under way on one connection. The kubelet makes two at most: the stream and an admission.
const CALLS_MAX: u32 = 32;
/// Headers of one call.
const HEADER_BYTES_MAX: u32 = 16 * 1024;
/// After a failed accept (no descriptors left) the next one waits this long.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// A served socket.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    /// The file that we bound; another one at the same path is not ours.
    id: Option<FileId>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl Socket {
    /// Binds, in the place of a socket that is there already, and serves root and our own user.
    pub(super) fn serve<S: DevicePlugin>(path: &Path, service: S, waits: &Waits) -> io::Result<Self> {
        if socket_id(path).is_some() {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let id = socket_id(path);
        let users = [0, rustix::process::geteuid().as_raw()];
        let connections = Connections::new(path.display().to_string(), users, waits);
        let stop = watch::Sender::new(false);
        let service = DevicePluginServer::new(service).max_decoding_message_size(REQUEST_BYTES_MAX);
        let incoming = incoming(listener, connections);
        let mut stopped = stop.subscribe();
        let serving = tokio::spawn(async move {
            let server = Server::builder()
                .max_concurrent_streams(CALLS_MAX)
                .http2_max_header_list_size(HEADER_BYTES_MAX);
            // Ends only by the signal: a failed accept is waited out in `incoming`.
            let signal = async move {
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            let _ = server.serve_with_incoming_shutdown(service, incoming, signal).await;
        });
        Ok(Self { path: path.to_owned(), id, stop, serving })
    }

    /// Whether the file that we bound is still there: a starting kubelet deletes it.
    pub(super) fn is_in_place(&self) -> bool {
        self.id.is_some() && socket_id(&self.path) == self.id
    }

    /// Takes no more connections, lets calls under way end, at most for this long, and removes the
    /// socket file. One left by a kill tells the next process that a kubelet may still be noticing
    /// our end.
    pub(super) async fn stop(mut self, limit: Duration) {
        self.stop.send_replace(true);
        if tokio::time::timeout(limit, &mut self.serving).await.is_err() {
            self.serving.abort();
        }
        if self.is_in_place() {
            // Gone already is as good.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

fn incoming(listener: UnixListener, connections: Arc<Connections>) -> impl Stream<Item = io::Result<Served>> {
    let accepted = UnixListenerStream::new(listener).then(move |accepted| {
        let connections = Arc::clone(&connections);
        async move {
            match accepted {
                Ok(stream) => connections.admit(stream).await.map(Ok),
                Err(error) => {
                    tokio::time::sleep(ACCEPT_AGAIN).await;
                    Some(Err(error))
                }
            }
        }
    });
    accepted.filter_map(|admitted| admitted)
}
