//! A plugin's unix socket, and how many are connected to it.

use super::folder::{FileId, socket_id};
use super::wire::v1beta1::device_plugin_server::{DevicePlugin, DevicePluginServer};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::{Stream, StreamExt, wrappers::UnixListenerStream};
use tonic::transport::Server;
use tonic::transport::server::Connected;

/// The largest request: 2048 ids to choose from and 2047 that must be chosen, at most 65 bytes
/// each on the wire, is 266 KiB.
const REQUEST_BYTES_MAX: usize = 1024 * 1024;
/// Connections to one plugin. The kubelet makes one a registration; root's curiosity needs a few.
const CONNECTIONS_MAX: usize = 16;
/// Calls under way on one connection. The kubelet makes two at most: the stream and an admission.
const CALLS_MAX: u32 = 32;
/// Headers of one call.
const HEADER_BYTES_MAX: u32 = 16 * 1024;
/// After a failed accept (no descriptors left) the next one waits this long.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Counts itself for as long as it lives.
#[derive(Debug)]
pub(super) struct Counted(Arc<watch::Sender<usize>>);

impl Counted {
    pub(super) fn new(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(Arc::clone(count))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// A served socket.
#[derive(Debug)]
pub(super) struct Socket {
    path: PathBuf,
    /// The file that we bound; another one at the same path is not ours.
    id: Option<FileId>,
    connections: Arc<watch::Sender<usize>>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
}

impl Socket {
    /// Binds anew, whatever socket lay there, and serves.
    pub(super) fn serve<S: DevicePlugin>(path: &Path, service: S) -> io::Result<Self> {
        if socket_id(path).is_some() {
            fs::remove_file(path)?;
        }
        let listener = UnixListener::bind(path)?;
        let id = socket_id(path);
        let connections = Arc::new(watch::Sender::new(0));
        let stop = watch::Sender::new(false);
        let service = DevicePluginServer::new(service).max_decoding_message_size(REQUEST_BYTES_MAX);
        let incoming = incoming(listener, Arc::clone(&connections));
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
        Ok(Self { path: path.to_owned(), id, connections, stop, serving })
    }

    /// Whether the file that we bound is still there: a starting kubelet deletes it.
    pub(super) fn is_in_place(&self) -> bool {
        self.id.is_some() && socket_id(&self.path) == self.id
    }

    /// Waits until nobody is connected any more.
    pub(super) async fn deserted(&self) {
        let mut connections = self.connections.subscribe();
        // The sender lives in `self`, so this cannot fail.
        let _ = connections.wait_for(|n| *n == 0).await;
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

fn incoming(
    listener: UnixListener,
    connections: Arc<watch::Sender<usize>>,
) -> impl Stream<Item = io::Result<Tracked>> {
    let accepted = UnixListenerStream::new(listener).then(|accepted| async {
        if accepted.is_err() {
            tokio::time::sleep(ACCEPT_AGAIN).await;
        }
        accepted
    });
    accepted.filter_map(move |accepted| match accepted {
        // Dropped, which closes it: better than a kubelet that cannot be served.
        Ok(_) if *connections.borrow() >= CONNECTIONS_MAX => None,
        accepted => Some(accepted.map(|stream| Tracked { stream, _counted: Counted::new(&connections) })),
    })
}

/// A connection that counts itself.
struct Tracked {
    stream: UnixStream,
    _counted: Counted,
}

impl Connected for Tracked {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl AsyncRead for Tracked {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Tracked {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
