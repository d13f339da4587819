//! One resource at the kubelet: serve, register, watch over the stream, register again.
//!
//! The kubelet never dials again by itself, and registering again on a living kubelet can poison
//! the registration in three ways (its disconnect goes by resource name; it closes a connection
//! before it tells its manager; a failed Register deletes the live client). So the rule is: never
//! Register while a stream of the kubelet's lives, and on a kubelet that knows us only after its
//! connection is closed and it has had time to notice.
//!
//! Another kubelet.sock is registered with in any case. Mostly it is a new kubelet's, which knows
//! nothing of us and has deleted our socket: then every millisecond counts. The system closes a
//! process's connections at its end, so a connection of the kubelet's that stays open means that
//! the same kubelet made its socket again, and it gets the care of a living one.
//!
//! Other programs may connect and open streams. Only a connection that is made, and on which the options
//! are asked for, while our Register is under way is taken for the kubelet's, and only its end means
//! something. A program that does both in that time is taken for it, too: so where there are several, the
//! end of any of their streams means that of the kubelet's.

mod stream;

use super::device_plugin::{Desk, Service};
use super::folder::{FileId, Seen, socket_id};
use super::register::{Tried, register};
use super::settings::Settings;
use super::socket::Socket;
use crate::socket_path::NoSocket;
use berth_core::counters::RegistrationState;
use berth_kernel::names::Resource;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use stream::{End, Watched, none_left};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

/// Where the registration of one resource stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registration {
    /// No kubelet has been found yet, or it is gone.
    Waiting {
        /// What is at the path of kubelet.sock instead of a socket, and what to do; `None` where
        /// nothing is.
        obstacle: Option<String>,
    },
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
    fn at(&self) -> RegistrationState {
        match self {
            Self::Waiting { .. } => RegistrationState::Waiting,
            Self::Registering { .. } => RegistrationState::Registering,
            Self::Registered => RegistrationState::Registered,
            Self::Contested => RegistrationState::Contested,
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

/// Why plugins wait for the kubelet, as last logged. Shared by all, so that each reason is logged once.
#[derive(Debug, Default)]
pub(super) struct LoggedReason(Mutex<Option<String>>);

impl LoggedReason {
    /// Whether `reason` is another one than was logged last, which it is from now on.
    fn is_new(&self, reason: &str) -> bool {
        let mut logged = self.0.lock();
        let is_new = logged.as_deref() != Some(reason);
        if is_new {
            *logged = Some(reason.to_owned());
        }
        is_new
    }

    fn clear(&self) {
        *self.0.lock() = None;
    }
}

pub(super) struct Plugin {
    desk: Arc<Desk>,
    settings: Arc<Settings>,
    seen: watch::Receiver<Seen>,
    registrations: Arc<watch::Sender<Registrations>>,
    logged_wait: Arc<LoggedReason>,
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
        logged_wait: Arc<LoggedReason>,
    ) -> Self {
        let path = settings.device_plugins().join(socket_name(&desk.resource));
        // A socket left by an earlier process: the kubelet may still be noticing its end.
        let known_to = socket_id(&path).and_then(|_| seen.borrow().kubelet.ok());
        Self {
            refused_wait: settings.waits.refused_again,
            desk,
            settings,
            seen,
            registrations,
            logged_wait,
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
            let mut kubelets = self.desk.kubelets.subscribe();
            if timeout(self.settings.waits.leave_within, none_left(&mut kubelets)).await.is_ok() {
                tokio::time::sleep(self.settings.waits.settle).await;
            }
            socket.stop(self.settings.waits.stop_limit).await;
        }
        let resource = self.desk.resource.clone();
        self.registrations.send_modify(|all| {
            all.remove(&resource);
        });
        self.desk.kernel.counters().kubelet.set_registration(resource.as_str(), None);
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
            let seen = self.seen.borrow_and_update().kubelet;
            match seen {
                Ok(id) => return id,
                Err(no_socket) => self.no_kubelet(no_socket),
            }
            // The watcher lives as long as the supervisor, which owns this task.
            if self.seen.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn no_kubelet(&self, no_socket: NoSocket) {
        let socket = self.settings.kubelet_socket();
        let reason = format!("{} {no_socket}; {}", socket.display(), no_socket.advice());
        if self.logged_wait.is_new(&reason) {
            tracing::warn!(
                "waiting for the kubelet; resources are registered once it is available: {reason}"
            );
        }
        let obstacle = (no_socket != NoSocket::Absent).then_some(reason);
        self.turn(Registration::Waiting { obstacle });
    }

    /// One registration on this kubelet, from clearing the ground to the loss of the stream.
    async fn attempt(&mut self, kubelet: FileId) {
        let troubled = |r: Option<&Registration>| matches!(r, Some(Registration::Registering { .. }));
        if !troubled(self.registrations.borrow().get(&self.desk.resource)) {
            self.turn(Registration::Registering { trouble: None });
        }
        if matches!(self.clear_ground(kubelet).await, Turn::KubeletChanged) {
            return;
        }
        if self.known_to != Some(kubelet) {
            self.quick_losses = 0;
        }
        if !self.serve() {
            self.wait(kubelet, self.settings.waits.refused_again_max).await;
            return;
        }
        match self.try_register(kubelet).await {
            None | Some(Tried::NobodyThere(_)) => return,
            Some(Tried::Refused(why)) => {
                self.desk.kernel.counters().kubelet.count_registration(false);
                self.refused(kubelet, why).await;
                return;
            }
            Some(Tried::Registered) => self.desk.kernel.counters().kubelet.count_registration(true),
        }
        self.known_to = Some(kubelet);
        self.refused_wait = self.settings.waits.refused_again;
        let since = Instant::now();
        match self.watched().await {
            Watched::Yes => {}
            Watched::Not => {
                tracing::warn!(
                    resource = %self.desk.resource,
                    "the kubelet registered this resource but did not ask for its devices within {} s; registering again",
                    self.settings.waits.watch_within.as_secs()
                );
                return;
            }
            Watched::Left => return self.lost(since).await,
        }
        self.logged_wait.clear();
        tracing::info!(resource = %self.desk.resource, "registered with the kubelet");
        self.turn(Registration::Registered);
        match self.watch_over(kubelet).await {
            End::Lost => self.lost(since).await,
            // No sign of another plugin for the same resource.
            End::OneOfSeveral => {
                tracing::info!(resource = %self.desk.resource, "one of several streams ended, perhaps the kubelet's; registering again");
            }
            End::KubeletChanged => {
                tracing::info!(resource = %self.desk.resource, "kubelet.sock was replaced; registering again");
            }
        }
    }

    /// Ends every stream, and gives a kubelet that may know us the time to notice. Another
    /// kubelet.sock cuts it short.
    async fn clear_ground(&mut self, kubelet: FileId) -> Turn {
        let waits = self.settings.waits.clone();
        let mut kubelets = self.desk.kubelets.subscribe();
        let is_new = self.known_to != Some(kubelet)
            && timeout(waits.exit_seen_within, none_left(&mut kubelets)).await.is_ok();
        self.desk.end_streams();
        if is_new {
            return Turn::Done;
        }
        tokio::select! {
            closed = timeout(waits.close_within, none_left(&mut kubelets)) => if closed.is_err() {
                tracing::debug!(resource = %self.desk.resource, "the kubelet keeps its connection");
            },
            () = self.changed(kubelet) => return Turn::KubeletChanged,
        }
        self.wait(kubelet, waits.settle).await
    }

    /// Waits until another kubelet.sock, or none, is there.
    async fn changed(&mut self, kubelet: FileId) {
        self.seen_until(|seen| seen.kubelet != Ok(kubelet)).await;
    }

    /// Waits until what is seen of the folder is so.
    async fn seen_until(&mut self, holds: impl Fn(&Seen) -> bool) {
        let unwatched = self.seen.wait_for(|seen| holds(seen)).await.is_err();
        if unwatched {
            // The folder's watcher is gone, so we are being stopped.
            std::future::pending::<()>().await;
        }
    }

    /// Waits so long, or until another kubelet.sock, or none, is there.
    async fn wait(&mut self, kubelet: FileId, so_long: Duration) -> Turn {
        match timeout(so_long, self.changed(kubelet)).await {
            Ok(()) => Turn::KubeletChanged,
            Err(_) => Turn::Done,
        }
    }

    /// Serves on our socket, made again where a starting kubelet has deleted it.
    fn serve(&mut self) -> bool {
        if self.socket.as_ref().is_some_and(Socket::is_in_place) {
            return true;
        }
        match Socket::serve(&self.path, Service(Arc::clone(&self.desk)), &self.settings.waits) {
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
            self.desk.registering.send_replace(Some(Instant::now()));
            let tried = register(&socket, &self.desk.resource, &name, waits.register_limit).await;
            self.desk.registering.send_replace(None);
            let Tried::NobodyThere(why) = &tried else {
                return Some(tried);
            };
            // The first dial often comes between the kubelet's bind and its listen.
            soon = (soon * 2).min(waits.dial_again);
            let mut again = soon;
            if began.elapsed() >= waits.dial_eager {
                again = waits.dial_again_later;
                let reason = format!("{} exists, but no process answers: {why}", socket.display());
                if self.logged_wait.is_new(&reason) {
                    tracing::warn!("waiting for the kubelet: {reason}");
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
        self.desk.kernel.counters().kubelet.set_registration(resource.as_str(), Some(registration.at()));
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
