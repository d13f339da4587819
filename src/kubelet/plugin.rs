//! The registration of one resource: serve, register, watch the stream, register again.
//!
//! The kubelet never redials, and another Register on a running kubelet can break the registration in
//! three ways (it disconnects by resource name; it closes a connection before it notifies its manager; a
//! failed Register deletes the live client). So the plugin never registers while the kubelet has a stream
//! open, and registers again with the same kubelet only after the kubelet has closed its connection and
//! had time to process that.
//!
//! The plugin always registers with a replaced kubelet.sock. Usually it belongs to a new kubelet, which
//! has deleted the plugin's socket: then the plugin registers without delay. The system closes a process's
//! connections when it exits, so a connection of the kubelet that stays open means that the same kubelet
//! created its socket again; then the waits above apply.
//!
//! Other programs may connect and open streams. Only a connection that is accepted during Register, and on
//! which GetDevicePluginOptions is called during it, counts as the kubelet's. As another program could do
//! both, the end of any stream on such connections counts as the end of the kubelet's.

mod stream;

use super::device_plugin::{Handler, Service};
use super::folder::{FileId, FolderState, SOCKET_PREFIX, socket_id};
use super::register::{RegisterOutcome, register};
use super::rival;
use super::settings::Settings;
use super::socket::{PLUGIN_CALLS_MAX, Socket};
use super::wire::v1beta1::device_plugin_server::DevicePluginServer;
use crate::socket_path::NoSocket;
use berth_kernel::ids::names::Resource;
use berth_observe::counters::{RegistrationOutcome, RegistrationState};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use stream::{Loss, StreamStart, wait_for_zero};
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tonic::service::Routes;

/// The largest request has 2048 available ids and 2047 required ones of at most 65 bytes each on the
/// wire: 266 KiB.
const REQUEST_BYTES_MAX: usize = 1024 * 1024;

/// The state of one resource's registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registration {
    /// No kubelet is available yet, or any more.
    Waiting {
        /// Why kubelet.sock is not a socket, and the remedy.
        obstacle: String,
    },
    /// The kubelet is available; the resource is not registered yet.
    Registering {
        /// Why the last attempt failed, or why the resource is registered again; `None` before the first attempt.
        cause: Option<String>,
    },
    /// Registered, and the kubelet has a stream open.
    Registered,
    /// Another plugin serves the same resource; this one waits until that has ended.
    Contested {
        /// What shows the other plugin, and the remedy.
        evidence: String,
    },
}

impl Registration {
    fn state(&self) -> RegistrationState {
        match self {
            Self::Waiting { .. } => RegistrationState::Waiting,
            Self::Registering { .. } => RegistrationState::Registering,
            Self::Registered => RegistrationState::Registered,
            Self::Contested { .. } => RegistrationState::Contested,
        }
    }
}

/// The registrations of all resources.
pub type Registrations = BTreeMap<Resource, Registration>;

/// The socket's file name: always 27 characters, since a unix socket's path has at most 107.
pub(super) fn socket_name(resource: &Resource) -> String {
    let hash = Sha256::digest(resource.as_str());
    let hex: String = hash.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("{SOCKET_PREFIX}{hex}.sock")
}

/// The former plugin of the resource, which ended by itself: the kubelet may still process the end of its streams.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Predecessor {
    /// When the kubelet has processed it; `None` if it has.
    settled_at: Option<Instant>,
}

impl Predecessor {
    /// That of an earlier process; to be called before this one changes the folder. An earlier process removed its
    /// socket files at its end, so the folder's time shows when that was, at the latest. A kubelet that started since
    /// knows no earlier process.
    pub(super) fn find(settings: &Settings, kubelet: Option<FileId>) -> Self {
        let changed = fs::metadata(&settings.device_plugins).and_then(|folder| folder.modified()).ok();
        let left = changed.zip(kubelet).and_then(|(changed, kubelet)| {
            let settle = settings.timeouts.disconnect.settle_after_process;
            settle_left(changed, kubelet.created_wall_ms(), SystemTime::now(), settle)
        });
        Self { settled_at: left.map(|left| Instant::now() + left) }
    }

    fn settle_left(self) -> Option<Duration> {
        let left = self.settled_at?.saturating_duration_since(Instant::now());
        (!left.is_zero()).then_some(left)
    }
}

/// What is left of the time `settle` after a change of the folder; `None` if the kubelet started after it.
fn settle_left(
    changed: SystemTime,
    kubelet_wall_ms: u64,
    now: SystemTime,
    settle: Duration,
) -> Option<Duration> {
    let changed_ms = changed.duration_since(UNIX_EPOCH).ok()?.as_millis();
    // A change in the future: the clock was set since.
    let elapsed = now.duration_since(changed).unwrap_or_default();
    let is_known = changed_ms > u128::from(kubelet_wall_ms);
    settle.checked_sub(elapsed).filter(|left| is_known && !left.is_zero())
}

/// Why a wait ended.
enum WaitOutcome {
    /// It completed.
    Done,
    /// kubelet.sock was replaced or removed.
    KubeletChanged,
}

/// The last logged reason for waiting for the kubelet. Shared by all plugins, so that it is logged once.
#[derive(Debug, Default)]
pub(super) struct LoggedReason(Mutex<Option<String>>);

impl LoggedReason {
    /// Stores `reason`; true if it differs from the last one.
    fn replace(&self, reason: &str) -> bool {
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
    handler: Arc<Handler>,
    settings: Arc<Settings>,
    folder_state: watch::Receiver<FolderState>,
    registrations: Arc<watch::Sender<Registrations>>,
    logged_wait: Arc<LoggedReason>,
    path: PathBuf,
    socket: Option<Socket>,
    /// The kubelet that this plugin, or an earlier process, may have sent a Register to.
    contacted_kubelet: Option<FileId>,
    /// The time that this kubelet may still need to process the end of the last streams.
    settle: Duration,
    quick_losses: u32,
    refused_wait: Duration,
    /// Why the resource is not registered; `None` before the first attempt, and once it is registered.
    last_cause: Option<String>,
    /// When Register was last sent, milliseconds since 1970.
    registered_wall_ms: u64,
}

impl Plugin {
    pub(super) fn new(
        handler: Arc<Handler>,
        settings: Arc<Settings>,
        folder_state: watch::Receiver<FolderState>,
        registrations: Arc<watch::Sender<Registrations>>,
        logged_wait: Arc<LoggedReason>,
        predecessor: Predecessor,
    ) -> Self {
        let path = settings.device_plugins.join(socket_name(&handler.resource));
        let kubelet = folder_state.borrow().kubelet.ok();
        let usual = settings.timeouts.disconnect.settle;
        let (contacted_kubelet, settle) = match (socket_id(&path), predecessor.settle_left()) {
            // Left by a process that was killed: the kubelet may not have noticed its end yet.
            (Some(_), _) => (kubelet, usual),
            (None, Some(left)) => (kubelet, left),
            (None, None) => (None, usual),
        };
        Self {
            refused_wait: settings.timeouts.registration.register_retry,
            settle,
            handler,
            settings,
            folder_state,
            registrations,
            logged_wait,
            path,
            socket: None,
            contacted_kubelet,
            quick_losses: 0,
            last_cause: None,
            registered_wall_ms: 0,
        }
    }

    /// Runs until `stop`, then ends its streams and stops serving.
    pub(super) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        tokio::select! {
            () = self.keep_registered() => {}
            _ = stop.wait_for(|stop| *stop) => {}
        }
        self.handler.end_all_streams();
        if let Some(socket) = self.socket.take() {
            // The kubelet closes its connection shortly before it notifies its device manager; a process
            // that registers in between would get a dead endpoint. The next process waits for that: it sees the time of
            // this removal of the socket file.
            let mut connections = self.handler.kubelet_connections.subscribe();
            let timeouts = &self.settings.timeouts;
            let _ = timeout(timeouts.disconnect.stop_within, wait_for_zero(&mut connections)).await;
            socket.stop(timeouts.connections.stop_limit).await;
        }
        let resource = self.handler.resource.clone();
        self.registrations.send_modify(|registrations| {
            registrations.remove(&resource);
        });
        self.handler.kernel.counters().kubelet.set_registration(resource.as_str(), None);
    }

    async fn keep_registered(&mut self) {
        loop {
            let kubelet = self.wait_for_kubelet().await;
            self.register_once(kubelet).await;
        }
    }

    /// Waits until kubelet.sock is a socket.
    async fn wait_for_kubelet(&mut self) -> FileId {
        loop {
            let kubelet = self.folder_state.borrow_and_update().kubelet;
            match kubelet {
                Ok(id) => return id,
                Err(no_socket) => self.report_missing_kubelet(no_socket),
            }
            // The supervisor, which owns this task, also owns the watcher.
            if self.folder_state.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn report_missing_kubelet(&self, no_socket: NoSocket) {
        let socket = self.settings.kubelet_socket();
        let reason = format!("{} {no_socket}; {}", socket.display(), no_socket.advice());
        if self.logged_wait.replace(&reason) {
            tracing::warn!(
                "waiting for the kubelet; resources are registered once it is available: {reason}"
            );
        }
        self.publish(Registration::Waiting { obstacle: reason });
    }

    /// One registration with this kubelet, from the end of earlier streams to the loss of the new one.
    async fn register_once(&mut self, kubelet: FileId) {
        self.publish(Registration::Registering { cause: self.last_cause.clone() });
        if matches!(self.end_earlier_streams(kubelet).await, WaitOutcome::KubeletChanged) {
            return;
        }
        if self.contacted_kubelet != Some(kubelet) {
            self.quick_losses = 0;
        }
        // Its file must not be replaced: the kubelet would be connected to this process without a call to the other
        // one.
        if !self.is_served()
            && let Some(evidence) = self.other_server()
        {
            return self.wait_while_contested(kubelet, evidence).await;
        }
        if !self.ensure_served() {
            self.wait(kubelet, self.settings.timeouts.registration.register_retry_max).await;
            return;
        }
        self.registered_wall_ms = self.handler.kernel.now().wall_ms;
        match self.try_register(kubelet).await {
            None | Some(RegisterOutcome::Unreachable(_)) => return,
            Some(RegisterOutcome::Refused(message)) => {
                self.count(RegistrationOutcome::Refused);
                self.handle_refusal(kubelet, message).await;
                return;
            }
            Some(RegisterOutcome::Registered) => {
                self.count(RegistrationOutcome::Registered);
            }
        }
        self.contacted_kubelet = Some(kubelet);
        self.refused_wait = self.settings.timeouts.registration.register_retry;
        let since = Instant::now();
        match self.wait_for_stream().await {
            StreamStart::Opened => {}
            StreamStart::TimedOut => {
                self.count(RegistrationOutcome::NotWatched);
                let cause = format!(
                    "the kubelet registered this resource but did not call ListAndWatch within {} s; registering again",
                    self.settings.timeouts.registration.watch_within.as_secs()
                );
                tracing::warn!(resource = %self.handler.resource, "{cause}");
                self.last_cause = Some(cause);
                return;
            }
            StreamStart::Disconnected => return self.handle_loss(since).await,
        }
        self.logged_wait.clear();
        self.last_cause = None;
        tracing::info!(resource = %self.handler.resource, "registered with the kubelet");
        self.publish(Registration::Registered);
        let loss = self.wait_for_loss(kubelet).await;
        match loss {
            Loss::StreamEnded => self.handle_loss(since).await,
            // Neither indicates another plugin for the same resource.
            Loss::OneOfSeveralEnded | Loss::KubeletChanged => self.register_again(&loss.to_string()),
            Loss::SocketGone => match self.other_server() {
                Some(evidence) => self.wait_while_contested(kubelet, evidence).await,
                None => self.register_again(&loss.to_string()),
            },
        }
    }

    /// Records why the resource is registered again.
    fn register_again(&mut self, cause: &str) {
        tracing::info!(resource = %self.handler.resource, "{cause}; registering again");
        self.last_cause = Some(format!("{cause}; registering again"));
    }

    /// Ends all streams, and waits until a kubelet that may know this plugin has processed that, or until
    /// kubelet.sock is replaced.
    async fn end_earlier_streams(&mut self, kubelet: FileId) -> WaitOutcome {
        let timeouts = self.settings.timeouts.disconnect;
        let mut connections = self.handler.kubelet_connections.subscribe();
        let is_new = self.contacted_kubelet != Some(kubelet)
            && timeout(timeouts.exit_seen_within, wait_for_zero(&mut connections)).await.is_ok();
        self.handler.end_streams();
        if is_new {
            return WaitOutcome::Done;
        }
        tokio::select! {
            closed = timeout(timeouts.close_within, wait_for_zero(&mut connections)) => if closed.is_err() {
                tracing::debug!(resource = %self.handler.resource, "the kubelet keeps its connection open");
            },
            () = self.wait_for_change(kubelet) => return WaitOutcome::KubeletChanged,
        }
        let settle = std::mem::replace(&mut self.settle, timeouts.settle);
        self.wait(kubelet, settle).await
    }

    /// Waits until kubelet.sock is replaced or removed.
    async fn wait_for_change(&mut self, kubelet: FileId) {
        self.wait_until(|state| state.kubelet != Ok(kubelet)).await;
    }

    /// Waits until the folder's state satisfies `condition`.
    async fn wait_until(&mut self, condition: impl Fn(&FolderState) -> bool) {
        let is_stopped = self.folder_state.wait_for(|state| condition(state)).await.is_err();
        if is_stopped {
            // The folder's watcher has ended, so this plugin is being stopped.
            std::future::pending::<()>().await;
        }
    }

    /// Waits for `duration`, or until kubelet.sock is replaced or removed.
    async fn wait(&mut self, kubelet: FileId, duration: Duration) -> WaitOutcome {
        match timeout(duration, self.wait_for_change(kubelet)).await {
            Ok(()) => WaitOutcome::KubeletChanged,
            Err(_) => WaitOutcome::Done,
        }
    }

    /// Serves the plugin's socket, creating it again if a starting kubelet has deleted it. False on an error.
    fn ensure_served(&mut self) -> bool {
        if self.is_served() {
            return true;
        }
        let service = DevicePluginServer::new(Service(Arc::clone(&self.handler)))
            .max_decoding_message_size(REQUEST_BYTES_MAX);
        let services = Routes::new(service);
        match Socket::serve(&self.path, services, PLUGIN_CALLS_MAX, self.settings.timeouts.connections) {
            Ok(socket) => {
                self.socket = Some(socket);
                true
            }
            Err(error) => {
                let cause = format!("cannot listen on {}: {error}", self.path.display());
                tracing::error!(resource = %self.handler.resource, "{cause}");
                self.set_cause(cause);
                false
            }
        }
    }

    /// Dials until the kubelet answers. `None` if kubelet.sock or the plugin's socket changed meanwhile.
    async fn try_register(&mut self, kubelet: FileId) -> Option<RegisterOutcome> {
        let timeouts = self.settings.timeouts.registration;
        let socket = self.settings.kubelet_socket();
        let name = socket_name(&self.handler.resource);
        let began = Instant::now();
        let mut backoff = timeouts.connect_retry_max / 64;
        loop {
            self.handler.register_began.send_replace(Some(Instant::now()));
            let outcome = register(&socket, &self.handler.resource, &name, timeouts.register_limit).await;
            self.handler.register_began.send_replace(None);
            let RegisterOutcome::Unreachable(reason) = outcome else {
                return Some(outcome);
            };
            if self.set_cause(reason.to_string()) {
                self.count(match reason.is_denied {
                    true => RegistrationOutcome::Denied,
                    false => RegistrationOutcome::Unreachable,
                });
            }
            // Starts short, as the first dial often falls between the kubelet's bind and its listen.
            backoff = (backoff * 2).min(timeouts.connect_retry_max);
            let mut wait = backoff;
            let is_late = began.elapsed() >= timeouts.connect_fast_for;
            if is_late {
                wait = timeouts.connect_retry_later;
            }
            // A starting kubelet refuses connections for a moment; it never denies them.
            if (is_late || reason.is_denied) && self.logged_wait.replace(&reason.to_string()) {
                tracing::warn!("waiting for the kubelet: {reason}");
            }
            if matches!(self.wait(kubelet, wait).await, WaitOutcome::KubeletChanged) {
                return None;
            }
            if !self.is_served() {
                // A starting kubelet deletes all sockets before it creates its own.
                return None;
            }
        }
    }

    async fn handle_refusal(&mut self, kubelet: FileId, message: String) {
        // A failed Register may have deleted an existing registration.
        self.contacted_kubelet = Some(kubelet);
        if self.set_cause(message.clone()) {
            tracing::warn!(
                resource = %self.handler.resource, error = message,
                "the kubelet refused to register this resource; trying again"
            );
        }
        let duration = self.refused_wait;
        self.refused_wait = (duration * 2).min(self.settings.timeouts.registration.register_retry_max);
        self.wait(kubelet, duration).await;
    }

    /// What shows that another process serves this resource's socket path; `None` if no process does.
    fn other_server(&self) -> Option<String> {
        let listener = rival::listener(&self.path)?;
        Some(format!("{listener} serves {}, as another berth daemon on this node does", self.path.display()))
    }

    fn count(&self, outcome: RegistrationOutcome) {
        self.handler.kernel.counters().kubelet.count_registration(outcome);
    }

    /// Publishes why the resource is not registered; true if that is new.
    fn set_cause(&mut self, cause: String) -> bool {
        self.last_cause = Some(cause.clone());
        self.publish(Registration::Registering { cause: Some(cause) })
    }

    /// Publishes the registration's state; true if it changed.
    fn publish(&self, registration: Registration) -> bool {
        let resource = &self.handler.resource;
        self.handler
            .kernel
            .counters()
            .kubelet
            .set_registration(resource.as_str(), Some(registration.state()));
        self.registrations.send_if_modified(|registrations| {
            let differs = registrations.get(resource) != Some(&registration);
            if differs {
                registrations.insert(resource.clone(), registration);
            }
            differs
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kubelet_gets_the_rest_of_its_time_after_an_earlier_process() {
        let ms = Duration::from_millis;
        let at = |after: u64| UNIX_EPOCH + ms(1_000_000 + after);
        let left =
            |changed, kubelet: u64, now| settle_left(at(changed), 1_000_000 + kubelet, at(now), ms(250));
        assert_eq!(left(100, 0, 140), Some(ms(210)));
        assert_eq!(left(100, 0, 350), None, "it has settled");
        assert_eq!(left(100, 100, 140), None, "the kubelet has started since");
        assert_eq!(left(100, 0, 20), Some(ms(250)), "the clock was set");
    }
}
