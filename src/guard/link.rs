//! The socket between guard and daemon: messages of `proto/guard_v1.proto`, each with its length before it. The guard
//! listens, since its connection to the runtime must outlive restarts of the daemon.

use crate::state::GuardState;
use berth_proto::guard::{BypassRules, Daemon, PodDeletions, Update};
use bytes::{Bytes, BytesMut};
use futures_util::{SinkExt as _, StreamExt as _};
use prost::Message;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::codec::{Framed, LengthDelimitedCodec};

/// The longest message, bytes: twice the containers of a full ledger, at 300 bytes each, with room to spare.
const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// How many daemons may be connected: the daemon, one that replaces it, and two more for diagnosis.
const CONNECTIONS_MAX: usize = 4;
/// How long the other side may take to read a message.
const WRITE_MAX: Duration = Duration::from_secs(5);
/// How long the guard waits after a change before it sends a message, so that the creation of a container, its start and
/// its limits are one message, and the daemon uses no CPU time for them while the container starts.
const SEND_DELAY: Duration = Duration::from_millis(10);
/// The wait after a failed accept, which would fail again at once while no file descriptors are left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// The newest messages of daemons.
#[derive(Debug)]
pub(crate) struct DaemonMessages {
    /// Whether pods are being deleted, by the newest message of any connected daemon; `None` if that does not know it yet,
    /// and once none is connected.
    pub(crate) deletions: watch::Sender<Option<PodDeletions>>,
    /// Whether the driver was released; it stays so while the daemon is away.
    pub(crate) is_driver_released: watch::Sender<bool>,
    /// What is done about containers that can use GPUs that were not allocated to them; it stays so while the daemon is
    /// away. `None` until a daemon has sent it.
    pub(crate) bypass: watch::Sender<Option<Arc<BypassRules>>>,
}

impl Default for DaemonMessages {
    fn default() -> Self {
        Self {
            deletions: watch::Sender::new(None),
            is_driver_released: watch::Sender::new(false),
            bypass: watch::Sender::new(None),
        }
    }
}

/// One connection.
pub(crate) struct Link {
    messages: Framed<UnixStream, LengthDelimitedCodec>,
}

impl Link {
    pub(crate) fn new(socket: UnixStream) -> Self {
        let codec = LengthDelimitedCodec::builder().max_frame_length(MESSAGE_BYTES_MAX).new_codec();
        Self { messages: Framed::new(socket, codec) }
    }

    /// Sends a message.
    ///
    /// # Errors
    /// If the connection has failed, or the other side does not read.
    pub(crate) async fn send(&mut self, message: &impl Message) -> io::Result<()> {
        let bytes = Bytes::from(message.encode_to_vec());
        timeout(WRITE_MAX, self.messages.send(bytes)).await.map_err(|_| ErrorKind::TimedOut)?
    }

    /// The next message; `None` once the other side has closed the connection. A caller may drop the future.
    ///
    /// # Errors
    /// If the connection has failed, or what came is not a message.
    pub(crate) async fn receive<M: Message + Default>(&mut self) -> io::Result<Option<M>> {
        let decode = |bytes: BytesMut| {
            M::decode(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.to_string()))
        };
        self.messages.next().await.transpose()?.map(decode).transpose()
    }
}

/// Serves daemons until it is dropped.
pub(crate) async fn serve(listener: UnixListener, guard: Arc<GuardState>, messages: DaemonMessages) {
    let messages = Arc::new(messages);
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let socket = match listener.accept().await {
            Ok((socket, _)) => socket,
            Err(error) => {
                tracing::warn!(%error, "a connection to the guard's socket could not be accepted");
                sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        if !is_of_trusted_user(&socket) {
            tracing::warn!(
                "a connection to the guard's socket was refused: its process runs neither as root nor as the guard's user"
            );
            continue;
        }
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            tracing::warn!(
                "a connection to the guard's socket was closed: {CONNECTIONS_MAX} others are open"
            );
            continue;
        };
        let (guard, messages, places) = (Arc::clone(&guard), Arc::clone(&messages), Arc::clone(&places));
        tokio::spawn(async move {
            if let Err(error) = serve_daemon(Link::new(socket), &guard, &messages).await {
                tracing::warn!(
                    "the connection to the daemon ended: {error}; `berth node check` says why the daemon closed it"
                );
            }
            drop(place);
            if places.available_permits() == CONNECTIONS_MAX {
                messages.deletions.send_replace(None);
            }
        });
    }
}

/// Whether the peer is root, or the user of this process.
pub(crate) fn is_of_trusted_user(socket: &UnixStream) -> bool {
    let own = rustix::process::geteuid().as_raw();
    socket.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == own)
}

/// Sends everything, then changes, until the daemon closes the connection.
async fn serve_daemon(mut link: Link, guard: &GuardState, messages: &DaemonMessages) -> io::Result<()> {
    let mut changes = guard.changes();
    let mut sent = guard.published();
    link.send(&sent.whole()).await?;
    // When the changes since the last message are sent.
    let mut send_at = None;
    loop {
        tokio::select! {
            received = link.receive::<Daemon>() => match received? {
                Some(daemon) => {
                    // Before the deletions, which let the guard register: it sees containers from then on. A daemon of an
                    // older release sends none.
                    if let Some(rules) = &daemon.bypass {
                        messages.bypass.send_replace(Some(Arc::new(rules.clone())));
                    }
                    let known = (!daemon.are_deletions_unknown_yet).then(|| daemon.deletions());
                    messages.deletions.send_replace(known);
                    messages.is_driver_released.send_replace(daemon.is_driver_released);
                }
                None => return Ok(()),
            },
            // It never fails, since `guard` has the sender.
            _ = changes.changed(), if send_at.is_none() => send_at = Some(Instant::now() + SEND_DELAY),
            () = sleep_until(send_at.unwrap_or_else(Instant::now)), if send_at.is_some() => {
                send_at = None;
                changes.mark_unchanged();
                let now = guard.published();
                let update = now.since(&sent);
                if update != Update::default() {
                    link.send(&update).await?;
                }
                sent = now;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::Published;
    use berth_proto::nri::{Container, PodSandbox};

    #[tokio::test]
    async fn a_daemon_gets_everything_then_changes_and_is_forgotten_once_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("guard.sock");
        let guard = Arc::new(GuardState::new(crate::Settings::default().claim_grants));
        guard.set_status(|status| status.runtime = "containerd".into());
        let messages = DaemonMessages::default();
        let (mut known, released) = (messages.deletions.subscribe(), messages.is_driver_released.subscribe());
        let serving = tokio::spawn(serve(UnixListener::bind(&path).unwrap(), Arc::clone(&guard), messages));
        let mut link = Link::new(UnixStream::connect(&path).await.unwrap());
        let mut followed = Published::default();
        followed.apply(link.receive().await.unwrap().unwrap());
        assert_eq!(followed, guard.published());
        let messages = Daemon {
            deletions: PodDeletions::Some.into(),
            is_driver_released: true,
            are_deletions_unknown_yet: false,
            bypass: None,
        };
        link.send(&messages).await.unwrap();
        known.wait_for(|said| *said == Some(PodDeletions::Some)).await.unwrap();
        let pod = PodSandbox { id: "s".into(), uid: "a".into(), ..PodSandbox::default() };
        guard.update(|known| known.create(&pod, &Container::default()));
        guard.set_status(|status| status.version = "1.7".into());
        // Both are one message.
        followed.apply(link.receive().await.unwrap().unwrap());
        assert_eq!(followed.pods, ["a".to_owned()].into());
        assert_eq!(followed, guard.published());
        drop(link);
        known.wait_for(Option::is_none).await.unwrap();
        assert!(*released.borrow(), "the driver was not resumed");
        serving.abort();
    }

    #[tokio::test]
    async fn a_message_that_is_too_long_or_none_ends_the_connection_with_its_cause() {
        for bytes in [&u32::MAX.to_be_bytes()[..], &[0, 0, 0, 1, 0xff]] {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            tokio::io::AsyncWriteExt::write_all(&mut theirs, bytes).await.unwrap();
            let error = Link::new(ours).receive::<Daemon>().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
        }
    }
}
