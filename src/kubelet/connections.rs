//! The connections to one plugin's socket: which are served, how many at once, which are closed.
//!
//! The kubelet makes one connection for each registration and keeps a stream open on it. Other
//! programs of the node connect, too, and none may keep the kubelet out. So a connection without a
//! call under way is closed after a short time; and where all slots are in use, the next connection
//! takes the slot of the one that has been silent longest. Connections that come in the meantime
//! wait in the system's queue, in the order in which they came.

use super::settings::Waits;
use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, Sleep, sleep, timeout};
use tonic::Request;
use tonic::transport::server::Connected;

/// Connections to one plugin at once. Where each is spared for 200 ms, 320 silent ones a second make
/// room for others: the kubelet, which dials for 10 s, gets past 3,000 of them.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// Up to this many idle connections are assumed to be new and are not closed while an older connection can be.
/// Otherwise open streams in all slots would keep newcomers out.
const IDLE_KEPT_MAX: usize = CONNECTIONS_MAX / 4;
/// Connections are refused or closed for others with one line in this time.
const WARN_EVERY: Duration = Duration::from_secs(60);

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

/// The connections to one socket.
#[derive(Debug)]
pub(super) struct Connections {
    /// For the log.
    socket: String,
    /// The users whose processes are served.
    users: [u32; 2],
    silent_max: Duration,
    min_age: Duration,
    open: Mutex<Open>,
    /// A slot became free.
    freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    by_age: BTreeMap<u64, Arc<Connection>>,
    closed: WarnLimit,
    refused: WarnLimit,
}

/// Lets one warning through in `WARN_EVERY`.
#[derive(Debug, Default)]
struct WarnLimit {
    last: Option<Instant>,
    count: u64,
}

impl WarnLimit {
    /// Counts one more case; the cases since the last warning, if it is time for the next one.
    fn count(&mut self) -> Option<u64> {
        self.count += 1;
        if self.last.is_some_and(|last| last.elapsed() < WARN_EVERY) {
            return None;
        }
        self.last = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}

/// What is known of one connection; its calls find it in their extensions.
#[derive(Debug)]
pub(super) struct Connection {
    accepted: Instant,
    state: Mutex<State>,
    closed: AtomicBool,
    waker: AtomicWaker,
}

#[derive(Debug)]
struct State {
    calls: usize,
    /// Since when there have been calls under way, or none.
    since: Instant,
    /// Set on a connection of the kubelet's.
    kubelets: Option<Counted>,
}

/// Cost of closing a connection; the cheapest is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CloseCost {
    /// No call is under way.
    Silent,
    /// A call or a stream is.
    Calling,
    /// The kubelet's.
    Kubelets,
}

impl Connection {
    fn new(now: Instant) -> Self {
        let state = Mutex::new(State { calls: 0, since: now, kubelets: None });
        Self { accepted: now, state, closed: AtomicBool::new(false), waker: AtomicWaker::new() }
    }

    /// The connection of a call; `None` for one that came over no socket.
    pub(super) fn of<T>(request: &Request<T>) -> Option<&Arc<Self>> {
        request.extensions().get()
    }

    /// From now on it is one of the kubelet's, which `count` counts.
    pub(super) fn mark_kubelet(&self, count: &Arc<watch::Sender<usize>>) {
        self.state.lock().kubelets.get_or_insert_with(|| Counted::new(count));
    }

    pub(super) fn is_made_since(&self, moment: Instant) -> bool {
        self.accepted >= moment
    }

    pub(super) fn is_kubelets(&self) -> bool {
        self.state.lock().kubelets.is_some()
    }

    fn cost(&self) -> (CloseCost, Instant) {
        let state = self.state.lock();
        let cost = match state.calls {
            _ if state.kubelets.is_some() => CloseCost::Kubelets,
            0 => CloseCost::Silent,
            _ => CloseCost::Calling,
        };
        (cost, state.since)
    }

    fn silent_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        (state.calls == 0).then_some(state.since)
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waker.wake();
    }
}

/// A call under way, for as long as it lives.
#[derive(Debug)]
pub(super) struct Call(Option<Arc<Connection>>);

impl Call {
    pub(super) fn begin<T>(request: &Request<T>) -> Self {
        let connection = Connection::of(request).cloned();
        if let Some(connection) = &connection {
            let mut state = connection.state.lock();
            if state.calls == 0 {
                state.since = Instant::now();
            }
            state.calls += 1;
        }
        Self(connection)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(connection) = &self.0 {
            let mut state = connection.state.lock();
            state.calls -= 1;
            if state.calls == 0 {
                state.since = Instant::now();
            }
        }
    }
}

impl Connections {
    /// None yet. `users` are those whose processes are served; the socket's path is for the log.
    pub(super) fn new(socket: String, users: [u32; 2], waits: &Waits) -> Arc<Self> {
        Arc::new(Self {
            socket,
            users,
            silent_max: waits.silent_max,
            min_age: waits.min_age,
            open: Mutex::default(),
            freed: Notify::new(),
        })
    }

    /// Gives an accepted connection a slot, another one's if it must be. `None`, which closes it, for
    /// a process of a user who is not served.
    pub(super) async fn admit(self: Arc<Self>, stream: UnixStream) -> Option<Served> {
        // Where the system does not say whose process it is, the permissions of the socket decide alone.
        if let Ok(peer) = stream.peer_cred()
            && !self.users.contains(&peer.uid())
        {
            self.refuse(peer.uid(), peer.pid());
            return None;
        }
        loop {
            match self.take_slot(Instant::now()) {
                Ok((number, connection)) => {
                    let silence = Box::pin(sleep(self.silent_max));
                    return Some(Served { stream, connection, connections: self, number, silence });
                }
                // Either outcome means: try again.
                Err(wait) => drop(timeout(wait, self.freed.notified()).await),
            }
        }
    }

    fn refuse(&self, user: u32, process: Option<i32>) {
        if let Some(refused) = self.open.lock().refused.count() {
            tracing::warn!(
                socket = self.socket,
                user,
                process,
                refused,
                "refused a connection: only processes of root and of berth's own user may connect. Logged at most every {} s",
                WARN_EVERY.as_secs()
            );
        }
    }

    /// A slot, or how long to wait before one can be taken.
    fn take_slot(&self, now: Instant) -> Result<(u64, Arc<Connection>), Duration> {
        let mut open = self.open.lock();
        if open.by_age.len() >= CONNECTIONS_MAX {
            let by_age = &open.by_age;
            let cost = move |(number, one): (&u64, &Arc<Connection>)| {
                (one.cost(), *number, now.saturating_duration_since(one.accepted))
            };
            let all = || by_age.iter().map(cost);
            let silent = all().filter(|((cost, _), ..)| *cost == CloseCost::Silent).count();
            let old = || all().filter(|(.., age)| *age >= self.min_age).min();
            let least = if silent > IDLE_KEPT_MAX { all().min() } else { old().or_else(|| all().min()) };
            if let Some((_, number, age)) = least {
                let left = self.min_age.saturating_sub(age);
                if !left.is_zero() {
                    // It may be the kubelet's, which has had no time for its first call.
                    return Err(left);
                }
                self.close_for_another(&mut open, number);
            }
        }
        let number = open.next;
        open.next += 1;
        let connection = Arc::new(Connection::new(now));
        open.by_age.insert(number, Arc::clone(&connection));
        Ok((number, connection))
    }

    fn close_for_another(&self, open: &mut Open, number: u64) {
        if let Some(connection) = open.by_age.remove(&number) {
            connection.close();
        }
        if let Some(closed) = open.closed.count() {
            tracing::warn!(
                socket = self.socket,
                closed,
                "all {CONNECTIONS_MAX} connection slots of this plugin socket are in use; connections are closed to make room, idle ones first (`ss -xp` lists the processes). Logged at most every {} s",
                WARN_EVERY.as_secs()
            );
        }
    }

    fn leave(&self, number: u64) {
        if self.open.lock().by_age.remove(&number).is_some() {
            self.freed.notify_one();
        }
    }
}

/// A connection with a slot.
pub(super) struct Served {
    stream: UnixStream,
    connection: Arc<Connection>,
    connections: Arc<Connections>,
    number: u64,
    /// When to check next whether it has been silent for too long.
    silence: Pin<Box<Sleep>>,
}

impl Served {
    /// Ready once the connection is to end.
    fn poll_closed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // Registered before the flag is read, so that a close is either read or wakes.
        self.connection.waker.register(context.waker());
        if self.connection.closed.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        loop {
            ready!(self.silence.as_mut().poll(context));
            let now = Instant::now();
            let end = self.connection.silent_since().unwrap_or(now) + self.connections.silent_max;
            if end <= now {
                tracing::debug!(socket = self.connections.socket, "closed a connection that asked nothing");
                return Poll::Ready(());
            }
            self.silence.as_mut().reset(end);
        }
    }

    /// The stream, unless the connection is to end.
    fn poll_stream(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> io::Result<Pin<&mut UnixStream>> {
        match self.poll_closed(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(Pin::new(&mut self.get_mut().stream)),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.connections.leave(self.number);
        // Calls keep the connection's state for a moment longer; the kubelet has left now.
        self.connection.state.lock().kubelets.take();
    }
}

impl Connected for Served {
    type ConnectInfo = Arc<Connection>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.connection)
    }
}

impl AsyncRead for Served {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Served {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_stream(context)?.poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_stream(context)?.poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests;
