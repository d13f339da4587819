//! The connections to one plugin's socket: which are served, how many at once, and which are closed.
//!
//! The kubelet makes one connection for each registration and keeps a stream open on it. Other
//! programs on the node can connect, too, and must not keep the kubelet out. So a connection without a
//! running call is closed after a short time; and if all slots are in use, the next connection takes
//! the slot of the one that has been idle longest. Further connections wait in the socket's backlog, in
//! the order in which they arrived.

use super::timeouts::ConnectionTimeouts;
use berth_core::log_limit::{LOG_INTERVAL, LogLimit};
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

/// Concurrent connections to one plugin. As each is kept for 200 ms at least, 320 idle ones per second are
/// replaced: the kubelet, which dials for 10 s, gets a slot behind 3,000 of them.
pub(super) const CONNECTIONS_MAX: usize = 64;
/// Up to this many idle connections are assumed to be new and are not closed while an older connection can be.
/// Otherwise open streams in all slots would keep new connections out.
const IDLE_KEPT_MAX: usize = CONNECTIONS_MAX / 4;

/// Increments a count until it is dropped.
#[derive(Debug)]
pub(super) struct CountGuard(Arc<watch::Sender<usize>>);

impl CountGuard {
    pub(super) fn new(count: &Arc<watch::Sender<usize>>) -> Self {
        count.send_modify(|n| *n += 1);
        Self(Arc::clone(count))
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.send_modify(|n| *n -= 1);
    }
}

/// The connections to one socket.
#[derive(Debug)]
pub(super) struct Connections {
    /// For the log.
    socket: String,
    /// The users whose processes may connect.
    allowed_users: [u32; 2],
    timeouts: ConnectionTimeouts,
    open: Mutex<Open>,
    /// Notified when a slot becomes free.
    freed: Notify,
}

#[derive(Debug, Default)]
struct Open {
    next_number: u64,
    by_age: BTreeMap<u64, Arc<Connection>>,
    close_log: LogLimit<()>,
    refusal_log: LogLimit<()>,
}

/// The state of one connection; its calls find it in their request extensions.
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
    /// Since when calls have been running, or none.
    since: Instant,
    /// Set on the kubelet's connections.
    kubelet_guard: Option<CountGuard>,
}

/// Cost of closing a connection; the cheapest is closed first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum CloseCost {
    /// No call is running.
    Idle,
    /// A call or a stream is running.
    Calling,
    /// The kubelet's connection.
    Kubelet,
}

impl Connection {
    fn new(now: Instant) -> Self {
        let state = Mutex::new(State { calls: 0, since: now, kubelet_guard: None });
        Self { accepted: now, state, closed: AtomicBool::new(false), waker: AtomicWaker::new() }
    }

    /// The connection of a call; `None` for a call without a socket.
    pub(super) fn of<T>(request: &Request<T>) -> Option<&Arc<Self>> {
        request.extensions().get()
    }

    /// Marks the connection as the kubelet's and counts it in `count`.
    pub(super) fn mark_kubelet(&self, count: &Arc<watch::Sender<usize>>) {
        self.state.lock().kubelet_guard.get_or_insert_with(|| CountGuard::new(count));
    }

    pub(super) fn is_accepted_since(&self, moment: Instant) -> bool {
        self.accepted >= moment
    }

    pub(super) fn is_kubelet(&self) -> bool {
        self.state.lock().kubelet_guard.is_some()
    }

    fn cost(&self) -> (CloseCost, Instant) {
        let state = self.state.lock();
        let cost = match state.calls {
            _ if state.kubelet_guard.is_some() => CloseCost::Kubelet,
            0 => CloseCost::Idle,
            _ => CloseCost::Calling,
        };
        (cost, state.since)
    }

    fn idle_since(&self) -> Option<Instant> {
        let state = self.state.lock();
        (state.calls == 0).then_some(state.since)
    }

    fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.waker.wake();
    }
}

/// A running call, until it is dropped.
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
    /// `allowed_users` are those whose processes may connect; the socket's path is for the log.
    pub(super) fn new(socket: String, allowed_users: [u32; 2], timeouts: ConnectionTimeouts) -> Arc<Self> {
        Arc::new(Self { socket, allowed_users, timeouts, open: Mutex::default(), freed: Notify::new() })
    }

    /// Whether any connection is open.
    pub(super) fn has_open(&self) -> bool {
        !self.open.lock().by_age.is_empty()
    }

    /// Closes all connections, with their calls and streams.
    pub(super) fn close_all(&self) {
        self.open.lock().by_age.values().for_each(|connection| connection.close());
    }

    /// Assigns a slot to an accepted connection, closing another connection if necessary. `None`, which
    /// closes the connection, for a process of another user.
    pub(super) async fn admit(self: Arc<Self>, stream: UnixStream) -> Option<ServedConnection> {
        // If the peer's user is unavailable, only the socket's permissions apply.
        if let Ok(peer) = stream.peer_cred()
            && !self.allowed_users.contains(&peer.uid())
        {
            self.refuse(peer.uid(), peer.pid());
            return None;
        }
        loop {
            match self.take_slot(Instant::now()) {
                Ok((number, connection)) => {
                    let idle_check = Box::pin(sleep(self.timeouts.idle_max));
                    return Some(ServedConnection {
                        stream,
                        connection,
                        connections: self,
                        number,
                        idle_check,
                    });
                }
                // A freed slot and the timeout both lead to another attempt.
                Err(wait) => drop(timeout(wait, self.freed.notified()).await),
            }
        }
    }

    fn refuse(&self, user: u32, process: Option<i32>) {
        if let Some(omitted) = self.open.lock().refusal_log.admit((), std::time::Instant::now()) {
            tracing::warn!(
                socket = self.socket,
                user,
                process,
                refused = omitted + 1,
                "refused a connection: only processes of root and of berth's own user may connect. Logged at most every {} s",
                LOG_INTERVAL.as_secs()
            );
        }
    }

    /// A slot, or the wait until one may become available.
    fn take_slot(&self, now: Instant) -> Result<(u64, Arc<Connection>), Duration> {
        let mut open = self.open.lock();
        if open.by_age.len() >= CONNECTIONS_MAX {
            let by_age = &open.by_age;
            let cost = move |(number, connection): (&u64, &Arc<Connection>)| {
                (connection.cost(), *number, now.saturating_duration_since(connection.accepted))
            };
            let all = || by_age.iter().map(cost);
            let idle = all().filter(|((cost, _), ..)| *cost == CloseCost::Idle).count();
            // The kubelet's may be the only old one, when others opened all their streams at once.
            let is_old = |((cost, _), _, age): &((CloseCost, Instant), u64, Duration)| {
                *cost != CloseCost::Kubelet && *age >= self.timeouts.min_age
            };
            let old = || all().filter(is_old).min();
            let cheapest = if idle > IDLE_KEPT_MAX { all().min() } else { old().or_else(|| all().min()) };
            if let Some((_, number, age)) = cheapest {
                let left = self.timeouts.min_age.saturating_sub(age);
                if !left.is_zero() {
                    // It may be the kubelet's, before its first call.
                    return Err(left);
                }
                self.close_for_another(&mut open, number);
            }
        }
        let number = open.next_number;
        open.next_number += 1;
        let connection = Arc::new(Connection::new(now));
        open.by_age.insert(number, Arc::clone(&connection));
        Ok((number, connection))
    }

    fn close_for_another(&self, open: &mut Open, number: u64) {
        if let Some(connection) = open.by_age.remove(&number) {
            connection.close();
        }
        if let Some(omitted) = open.close_log.admit((), std::time::Instant::now()) {
            tracing::warn!(
                socket = self.socket,
                closed = omitted + 1,
                "all {CONNECTIONS_MAX} connection slots of this plugin socket are in use; \
                 connections are closed for new ones, idle ones first (`ss -xp` lists the processes). Logged at most every {} s",
                LOG_INTERVAL.as_secs()
            );
        }
    }

    fn free_slot(&self, number: u64) {
        if self.open.lock().by_age.remove(&number).is_some() {
            self.freed.notify_one();
        }
    }
}

/// A connection with a slot.
pub(super) struct ServedConnection {
    stream: UnixStream,
    connection: Arc<Connection>,
    connections: Arc<Connections>,
    number: u64,
    /// When to check next whether it has been idle for too long.
    idle_check: Pin<Box<Sleep>>,
}

impl ServedConnection {
    /// Ready once the connection has to be closed.
    fn poll_closed(&mut self, context: &mut Context<'_>) -> Poll<()> {
        // Registered before the flag is read, so that no close is missed.
        self.connection.waker.register(context.waker());
        if self.connection.closed.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        loop {
            ready!(self.idle_check.as_mut().poll(context));
            let now = Instant::now();
            let end = self.connection.idle_since().unwrap_or(now) + self.connections.timeouts.idle_max;
            if end <= now {
                tracing::debug!(socket = self.connections.socket, "closed an idle connection");
                return Poll::Ready(());
            }
            self.idle_check.as_mut().reset(end);
        }
    }

    /// The stream, unless the connection has to be closed.
    fn poll_stream(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> io::Result<Pin<&mut UnixStream>> {
        match self.poll_closed(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(Pin::new(&mut self.get_mut().stream)),
        }
    }
}

impl Drop for ServedConnection {
    fn drop(&mut self) {
        self.connections.free_slot(self.number);
        // Running calls may keep the state for a moment, but the kubelet's connection is closed now.
        self.connection.state.lock().kubelet_guard.take();
    }
}

impl Connected for ServedConnection {
    type ConnectInfo = Arc<Connection>;

    fn connect_info(&self) -> Self::ConnectInfo {
        Arc::clone(&self.connection)
    }
}

impl AsyncRead for ServedConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for ServedConnection {
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
