//! A unix socket on which the kubelet calls.

use super::connections::{Connections, ServedConnection};
use super::folder::{FileId, socket_id};
use super::timeouts::ConnectionTimeouts;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt, wrappers::UnixListenerStream};
use tonic::service::Routes;
use tonic::transport::Server;

/// Concurrent calls on one connection to a device plugin. The kubelet makes two at most: the stream and an admission.
pub(super) const PLUGIN_CALLS_MAX: u32 = 32;
/// The limit of one call's headers.
const HEADER_BYTES_MAX: u32 = 16 * 1024;
/// The wait after a failed accept (no descriptors left).
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// A served socket.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    /// The file that this process bound, to recognize a replacement at the same path.
    id: Option<FileId>,
    connections: Arc<Connections>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl Socket {
    /// Binds the socket, replacing an existing one, and serves root and this process's user. `calls_max`: concurrent calls on
    /// one connection.
    pub(super) fn serve(
        path: &Path,
        services: Routes,
        calls_max: u32,
        timeouts: ConnectionTimeouts,
    ) -> io::Result<Self> {
        if socket_id(path).is_some() {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let id = socket_id(path);
        let allowed_users = [0, rustix::process::geteuid().as_raw()];
        let connections = Connections::new(path.display().to_string(), allowed_users, timeouts);
        let stop = watch::Sender::new(false);
        let incoming = incoming(listener, Arc::clone(&connections));
        let mut stopped = stop.subscribe();
        let serving = tokio::spawn(async move {
            let mut server = Server::builder()
                .max_concurrent_streams(calls_max)
                .http2_max_header_list_size(HEADER_BYTES_MAX);
            // Ends only by the signal, since `incoming` retries failed accepts.
            let signal = async move {
                let _ = stopped.wait_for(|stop| *stop).await;
            };
            let _ = server.add_routes(services).serve_with_incoming_shutdown(incoming, signal).await;
        });
        Ok(Self { path: path.to_owned(), id, connections, stop, serving })
    }

    /// The socket under another name in the same folder, where it replaces an existing one.
    ///
    /// # Errors
    /// The system's error.
    pub(super) fn renamed(mut self, path: &Path) -> io::Result<Self> {
        fs::rename(&self.path, path)?;
        self.path = path.to_owned();
        // Where the file system keeps no time of creation, the rename has changed the file's.
        self.id = socket_id(path);
        Ok(self)
    }

    /// Whether the bound file still exists. A starting kubelet deletes it.
    pub(super) fn is_in_place(&self) -> bool {
        self.id.is_some() && socket_id(&self.path) == self.id
    }

    /// Whether any process is connected.
    pub(super) fn is_connected(&self) -> bool {
        self.connections.has_open()
    }

    /// Accepts no more connections, waits up to `limit` for running calls, closes the connections, and removes the socket file.
    /// A file left by a killed process shows the next one that the kubelet may not have noticed its end.
    pub(super) async fn stop(mut self, limit: Duration) {
        self.stop.send_replace(true);
        if tokio::time::timeout(limit, &mut self.serving).await.is_err() {
            self.serving.abort();
            // Each connection is served by a task of its own, which `abort` does not end.
            self.connections.close_all();
        }
        if self.is_in_place() {
            // An error means that the file is deleted already.
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.stop.send_replace(true);
    }
}

fn incoming(
    listener: UnixListener,
    connections: Arc<Connections>,
) -> impl Stream<Item = io::Result<ServedConnection>> {
    let accepted = UnixListenerStream::new(listener).then(move |accepted| {
        let connections = Arc::clone(&connections);
        async move {
            match accepted {
                Ok(stream) => connections.admit(stream).await.map(Ok),
                Err(error) => {
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    Some(Err(error))
                }
            }
        }
    });
    accepted.filter_map(|admitted| admitted)
}
