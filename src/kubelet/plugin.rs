//! One resource at the kubelet: serve, register, watch over the stream, register again.
//!
//! The kubelet never dials again by itself, and registering anew on a living kubelet can poison
//! the registration in three ways (its disconnect goes by resource name; it closes a connection
//! before it tells its manager; a failed Register deletes the live client). So the rule is: never
//! Register while a stream of this resource lives, and on the same kubelet.sock only after its
//! connection is closed and it has had time to notice. A new kubelet.sock means a new kubelet that
//! knows nothing of us and has deleted our socket: then every millisecond counts.

mod stream;

use super::device_plugin::{Desk, Service};
use super::folder::{FileId, Seen, socket_id};
use super::register::{Tried, register};
use super::settings::Settings;
use super::socket::Socket;
use crate::figures::At;
use crate::kernel::names::Resource;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use stream::Watched;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Where the registration of one resource stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registration {
    /// No kubelet has been found yet, or it is gone.
    Waiting,
    /// The kubelet is there and does not have us yet; why not, if it said so.
    Registering {
        /// The last refusal.
        trouble: Option<String>,
    },
    /// Registered, and the kubelet watches the list.
    Registered,
    /// Another plugin registers the same resource; we stay away for a while.
    Contested,
}

impl Registration {
    fn at(&self) -> At {
        match self {
            Self::Waiting => At::Waiting,
            Self::Registering { .. } => At::Registering,
            Self::Registered => At::Registered,
            Self::Contested => At::Contested,
        }
    }
}

/// The registrations of all resources.
pub type Registrations = BTreeMap<Resource, Registration>;

/// The socket's file name: at most 27 characters whatever the resource is called, since the path
/// of a unix socket may have 107.
pub(super) fn socket_name(resource: &Resource) -> String {
    let hash = Sha256::digest(resource.as_str());
    let hex: String = hash.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("berth-{hex}.sock")
}

/// Why a wait ended.
enum Turn {
    /// What was waited for came.
    Done,
    /// Another kubelet.sock, or none, is there now.
    KubeletChanged,
}

pub(super) struct Plugin {
    desk: Arc<Desk>,
    settings: Arc<Settings>,
    seen: watch::Receiver<Seen>,
    registrations: Arc<watch::Sender<Registrations>>,
    /// Shared by all plugins: that no kubelet is there is said once.
    said_waiting: Arc<AtomicBool>,
    path: PathBuf,
    socket: Option<Socket>,
    /// The kubelet that has heard of us, or may have from an earlier process of ours.
    known_to: Option<FileId>,
    quick_losses: u32,
    refused_wait: Duration,
}

impl Plugin {
    pub(super) fn new(
        desk: Arc<Desk>,
        settings: Arc<Settings>,
        seen: watch::Receiver<Seen>,
        registrations: Arc<watch::Sender<Registrations>>,
        said_waiting: Arc<AtomicBool>,
    ) -> Self {
        let path = settings.device_plugins().join(socket_name(&desk.resource));
        // A socket left by an earlier process: the kubelet may still be noticing its end.
        let known_to = socket_id(&path).and_then(|_| seen.borrow().kubelet);
        Self {
            refused_wait: settings.waits.refused_again,
            desk,
            settings,
            seen,
            registrations,
            said_waiting,
            path,
            socket: None,
            known_to,
            quick_losses: 0,
        }
    }

    /// Runs until `stop`, then ends its streams and takes no more calls.
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            () = self.keep_registered() => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
        self.desk.end_all_streams();
        if let Some(socket) = self.socket.take() {
            // The kubelet closes its connection a moment before its device manager hears of it; a
            // process that registers in between would get a dead endpoint. So the file, which
            // tells the next process to wait, goes only after that moment.
            if tokio::time::timeout(self.settings.waits.leave_within, socket.deserted()).await.is_ok() {
                tokio::time::sleep(self.settings.waits.settle).await;
            }
            socket.stop(self.settings.waits.stop_limit).await;
        }
        let resource = self.desk.resource.clone();
        self.registrations.send_modify(|all| {
            all.remove(&resource);
        });
        self.desk.door.figures().kubelet.turned(resource.as_str(), None);
    }

    async fn keep_registered(&mut self) {
        loop {
            let kubelet = self.kubelet_there().await;
            self.attempt(kubelet).await;
        }
    }

    /// Waits for a kubelet.sock.
    async fn kubelet_there(&mut self) -> FileId {
        loop {
            if let Some(id) = self.seen.borrow_and_update().kubelet {
                return id;
            }
            self.turn(Registration::Waiting);
            if !self.said_waiting.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    socket = %self.settings.kubelet_socket().display(),
                    "waiting for the kubelet: its device plugin socket is not there. Resources are registered as soon as it is; if the kubelet runs, check --kubelet-dir and that the folder is mounted"
                );
            }
            // The watcher lives as long as the supervisor, which owns this task.
            if self.seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// One registration on this kubelet, from clearing the ground to the loss of the stream.
    async fn attempt(&mut self, kubelet: FileId) {
        let troubled = |r: Option<&Registration>| matches!(r, Some(Registration::Registering { .. }));
        if !troubled(self.registrations.borrow().get(&self.desk.resource)) {
            self.turn(Registration::Registering { trouble: None });
        }
        let clean = self.known_to != Some(kubelet) && self.streams() == 0;
        if !clean && matches!(self.clear_ground(kubelet).await, Turn::KubeletChanged) {
            return;
        }
        if !self.serve() {
            self.wait(kubelet, self.settings.waits.refused_again_max).await;
            return;
        }
        match self.try_register(kubelet).await {
            None | Some(Tried::NobodyThere(_)) => return,
            Some(Tried::Refused(why)) => {
                self.desk.door.figures().kubelet.register_answered(false);
                self.refused(kubelet, why).await;
                return;
            }
            Some(Tried::Registered) => self.desk.door.figures().kubelet.register_answered(true),
        }
        self.known_to = Some(kubelet);
        self.refused_wait = self.settings.waits.refused_again;
        let within = self.settings.waits.watch_within;
        match self.watched(kubelet, within).await {
            Watched::Yes => {}
            Watched::Not => {
                tracing::warn!(
                    resource = %self.desk.resource,
                    "the kubelet registered this resource but did not ask for its devices within {} s; registering again",
                    within.as_secs()
                );
                return;
            }
            Watched::KubeletChanged => {
                if !self.asked_behind_a_new_socket().await {
                    // The one that registered it was about to end.
                    return;
                }
            }
        }
        self.said_waiting.store(false, Ordering::Relaxed);
        tracing::info!(resource = %self.desk.resource, "registered with the kubelet");
        self.turn(Registration::Registered);
        let since = Instant::now();
        self.watch_over().await;
        self.lost(since).await;
    }

    fn streams(&self) -> usize {
        *self.desk.streams.borrow()
    }

    /// Ends what lives and gives the kubelet the time to notice. A new kubelet cuts it short.
    async fn clear_ground(&mut self, kubelet: FileId) -> Turn {
        self.desk.end_streams();
        if let Some(socket) = &self.socket {
            let closed = timeout(self.settings.waits.close_within, socket.deserted()).await;
            if closed.is_err() {
                tracing::debug!(resource = %self.desk.resource, "the kubelet keeps its connection");
            }
        }
        self.wait(kubelet, self.settings.waits.settle).await
    }

    /// Waits so long, or until another kubelet is there.
    async fn wait(&mut self, kubelet: FileId, so_long: Duration) -> Turn {
        let changed = async {
            let changed = self.seen.wait_for(|seen| seen.kubelet != Some(kubelet));
            let nobody_looks = changed.await.is_err();
            if nobody_looks {
                // The folder's watcher is gone, so we are being stopped.
                std::future::pending::<()>().await;
            }
        };
        match timeout(so_long, changed).await {
            Ok(()) => Turn::KubeletChanged,
            Err(_) => Turn::Done,
        }
    }

    /// Serves on our socket, made anew where a starting kubelet has deleted it.
    fn serve(&mut self) -> bool {
        if self.socket.as_ref().is_some_and(Socket::is_in_place) {
            return true;
        }
        match Socket::serve(&self.path, Service(Arc::clone(&self.desk))) {
            Ok(socket) => {
                self.socket = Some(socket);
                true
            }
            Err(error) => {
                let trouble = format!("cannot listen on {}: {error}", self.path.display());
                tracing::error!(resource = %self.desk.resource, "{trouble}");
                let trouble = Some(trouble);
                self.turn(Registration::Registering { trouble });
                false
            }
        }
    }

    /// Dials until somebody answers; `None` if another kubelet is there meanwhile.
    async fn try_register(&mut self, kubelet: FileId) -> Option<Tried> {
        let waits = self.settings.waits.clone();
        let socket = self.settings.kubelet_socket();
        let name = socket_name(&self.desk.resource);
        let began = Instant::now();
        let mut soon = waits.dial_again / 64;
        loop {
            let tried = register(&socket, &self.desk.resource, &name, waits.register_limit).await;
            let Tried::NobodyThere(why) = &tried else {
                return Some(tried);
            };
            // The first dial often comes between the kubelet's bind and its listen.
            soon = (soon * 2).min(waits.dial_again);
            let mut again = soon;
            if began.elapsed() >= waits.dial_eager {
                again = waits.dial_again_later;
                if !self.said_waiting.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        socket = %socket.display(), why,
                        "waiting for the kubelet: its device plugin socket is there but nobody answers"
                    );
                }
            }
            if matches!(self.wait(kubelet, again).await, Turn::KubeletChanged) {
                return None;
            }
            if !self.socket.as_ref().is_some_and(Socket::is_in_place) {
                // A starting kubelet deletes sockets before it makes its own.
                return None;
            }
        }
    }

    async fn refused(&mut self, kubelet: FileId, why: String) {
        // A failed Register may have deleted what the kubelet knew of us.
        self.known_to = Some(kubelet);
        let trouble = Registration::Registering { trouble: Some(why.clone()) };
        if self.turn(trouble) {
            tracing::warn!(resource = %self.desk.resource, why, "the kubelet refused to register; trying on");
        }
        let so_long = self.refused_wait;
        self.refused_wait = (so_long * 2).min(self.settings.waits.refused_again_max);
        self.wait(kubelet, so_long).await;
    }

    /// Publishes where we stand; true if that is news.
    fn turn(&self, registration: Registration) -> bool {
        let resource = &self.desk.resource;
        self.desk.door.figures().kubelet.turned(resource.as_str(), Some(registration.at()));
        self.registrations.send_if_modified(|all| {
            // The same trouble after another try is no news.
            let news = all.get(resource) != Some(&registration);
            if news {
                all.insert(resource.clone(), registration);
            }
            news
        })
    }
}
