//! The readers: an open loop, which asks when it is time to ask whether or not the answers before came, and
//! counts from then. A daemon that stands still for 100 ms costs 500 reads at 5,000 a second, not one.
//!
//! One thread and the system's own `poll` over some kept connections: what a client costs is missing from
//! the two processors on which the daemon is measured, so requests are put together beforehand, answers are
//! read to their end and no further, and there is no runtime, no lock and no task in between. A request that
//! finds all connections at work waits for the first that is done, and that wait counts.

use crate::load_admin::answer::whole;
use crate::load_admin::mix::Mix;
use crate::load_admin::node::{Node, TOOLS};
use crate::load_admin::wire::{Connector, Wire};
use anyhow::{Context as _, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Kept connections: eight of each tool, about as many as a browser and its neighbours have.
pub(crate) const CONNECTIONS: usize = 8 * TOOLS;
/// Longest that answers may be outstanding at the end of a block.
const PATIENCE: Duration = Duration::from_secs(60);
/// Read at once, bytes: most answers whole.
const READ_BYTES: usize = 64 * 1024;
/// Most messages about wrong responses that are printed of each block.
const PRINTED_MAX: usize = 3;

/// What was seen of one block.
pub(crate) struct Seen {
    /// From the time at which each request was due to the end of its response.
    pub(crate) took: Vec<Duration>,
    /// From the first to the last answer.
    pub(crate) lasted: Duration,
    /// Answers 304.
    pub(crate) unchanged: usize,
    pub(crate) bytes: usize,
}

/// All of them.
pub(crate) struct Readers {
    connector: Connector,
    connections: Vec<Connection>,
    /// Of each path: its requests up to the end of the head, by tool, and the tag of the last answer.
    paths: Vec<(Vec<String>, Option<String>)>,
    order: Vec<crate::load_admin::mix::Read>,
    /// The next of them.
    next: usize,
    /// The connection that is checked first.
    turn: usize,
    every: Duration,
    request: Vec<u8>,
    room: Vec<u8>,
}

struct Connection {
    wire: Wire,
    tool: usize,
    /// A request: when it was due, and its path.
    asked: Option<(Instant, usize)>,
    answer: Vec<u8>,
}

impl Readers {
    pub(crate) fn connect(node: &Node, mix: &Mix, per_second: u64) -> anyhow::Result<Self> {
        let address = node.address()?;
        let start = |path: &String, token: &String| {
            format!(
                "GET {path} HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {token}\r\nAccept: */*\r\n"
            )
        };
        let by_tool = |path: &String| node.tools.iter().map(|token| start(path, token)).collect();
        Ok(Self {
            connector: Connector::to(node)?,
            connections: Vec::new(),
            turn: 0,
            paths: mix.paths.iter().map(|path| (by_tool(path), None)).collect(),
            order: mix.order.clone(),
            next: 0,
            every: Duration::from_secs(1) / u32::try_from(per_second)?,
            request: Vec::new(),
            room: vec![0; READ_BYTES],
        })
    }

    /// Connects again: the daemon closes a connection that is idle for half a minute, and before its first request
    /// sooner.
    fn reconnect(&mut self) -> anyhow::Result<()> {
        let connection = |number: usize| -> anyhow::Result<Connection> {
            let wire = self.connector.connect()?;
            Ok(Connection { wire, tool: number % TOOLS, asked: None, answer: Vec::with_capacity(READ_BYTES) })
        };
        self.connections = (0..CONNECTIONS).map(connection).collect::<anyhow::Result<_>>()?;
        Ok(())
    }

    /// Sends requests for a time, and waits for the responses.
    pub(crate) fn run(&mut self, length: Duration) -> anyhow::Result<Seen> {
        self.reconnect()?;
        let began = Instant::now();
        let (mut due, mut waiting) = (began, VecDeque::new());
        let mut seen = Seen { took: Vec::new(), lasted: Duration::ZERO, unchanged: 0, bytes: 0 };
        let (mut wrong, mut last) = (0, began);
        loop {
            let now = Instant::now();
            while due <= now && due < began + length {
                waiting.push_back(due);
                due += self.every;
            }
            self.ask(&mut waiting)?;
            let over = due >= began + length;
            let busy: Vec<usize> =
                (0..self.connections.len()).filter(|n| self.connections[*n].asked.is_some()).collect();
            if over && busy.is_empty() && waiting.is_empty() {
                break;
            }
            ensure!(
                now < began + length + PATIENCE,
                "{} reads were not answered",
                busy.len() + waiting.len()
            );
            let until = if over { now + PATIENCE } else { due };
            for number in self.wait(&busy, until)? {
                let Some((took, status)) = self.hear(number, &mut seen.bytes)? else { continue };
                last = Instant::now();
                seen.took.push(took);
                seen.unchanged += usize::from(status == 304);
                if !matches!(status, 200 | 304) {
                    wrong += 1;
                    if wrong <= PRINTED_MAX {
                        println!("  a read was answered {status}");
                    }
                }
            }
        }
        ensure!(wrong == 0, "{wrong} of {} reads were refused or failed", seen.took.len());
        seen.lasted = last - began;
        Ok(seen)
    }

    /// Requests one path so often, one request after the other, and returns the bytes of all responses.
    pub(crate) fn repeat(&mut self, path: usize, gzip: bool, times: usize) -> anyhow::Result<usize> {
        let order = vec![crate::load_admin::mix::Read { path, conditional: false, gzip }];
        let (order, next) = (std::mem::replace(&mut self.order, order), std::mem::take(&mut self.next));
        self.reconnect()?;
        let mut bytes = 0;
        for _ in 0..times {
            self.turn = 0;
            self.ask(&mut VecDeque::from([Instant::now()]))?;
            while self.connections[0].asked.is_some() {
                for number in self.wait(&[0], Instant::now() + PATIENCE)? {
                    self.hear(number, &mut bytes)?;
                }
            }
        }
        (self.order, self.next) = (order, next);
        Ok(bytes)
    }

    /// Sends what waits, as far as there are connections with nothing under way.
    fn ask(&mut self, waiting: &mut VecDeque<Instant>) -> anyhow::Result<()> {
        for _ in 0..self.connections.len() {
            let Some(due) = waiting.front().copied() else { break };
            // Each in turn, so that all are kept in use.
            let connection = &mut self.connections[self.turn];
            self.turn = (self.turn + 1) % CONNECTIONS;
            if connection.asked.is_some() {
                continue;
            }
            waiting.pop_front();
            let read = &self.order[self.next];
            self.next = (self.next + 1) % self.order.len();
            let (starts, tag) = &self.paths[read.path];
            self.request.clear();
            self.request.extend_from_slice(starts[connection.tool].as_bytes());
            if read.gzip {
                self.request.extend_from_slice(b"Accept-Encoding: gzip\r\n");
            }
            if let Some(tag) = tag.as_ref().filter(|_| read.conditional) {
                self.request.extend_from_slice(b"If-None-Match: ");
                self.request.extend_from_slice(tag.as_bytes());
                self.request.extend_from_slice(b"\r\n");
            }
            self.request.extend_from_slice(b"\r\n");
            connection.wire.send(&self.request).context("sending a request")?;
            connection.asked = Some((due, read.path));
            connection.answer.clear();
        }
        Ok(())
    }

    /// Which of these have something to read, once one has or it is time.
    fn wait(&self, busy: &[usize], until: Instant) -> anyhow::Result<Vec<usize>> {
        let socket = |number: &usize| PollFd::new(self.connections[*number].wire.socket(), PollFlags::IN);
        let mut sockets: Vec<_> = busy.iter().map(socket).collect();
        let wait = Timespec::try_from(until.saturating_duration_since(Instant::now()))?;
        poll(&mut sockets, Some(&wait))?;
        let ready = busy.iter().zip(&sockets).filter(|(_, socket)| !socket.revents().is_empty());
        Ok(ready.map(|(number, _)| *number).collect())
    }

    /// Reads on. Answers how long it took and its status, once it is whole.
    fn hear(&mut self, number: usize, bytes: &mut usize) -> anyhow::Result<Option<(Duration, u16)>> {
        let connection = &mut self.connections[number];
        loop {
            let read = connection.wire.read(&mut self.room).context("reading an answer")?;
            if read == 0 {
                return Ok(None);
            }
            *bytes += read;
            connection.answer.extend_from_slice(&self.room[..read]);
            if let Some(answer) = whole(&connection.answer)? {
                let (due, path) = connection.asked.take().context("an answer to nothing")?;
                if answer.tag.is_some() {
                    self.paths[path].1 = answer.tag;
                }
                return Ok(Some((due.elapsed(), answer.status)));
            }
        }
    }
}
