//! Connections by the thousand, from many addresses of the loopback network.

use crate::flood_admin::node::Target;
use anyhow::Context;
use rustix::process::{Resource, getrlimit, setrlimit};
use serde_json::Value;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Connects that are under way at a time.
const AT_ONCE: usize = 200;
/// Longest wait for a connect, or for a write to a server that reads no more.
const WAIT: Duration = Duration::from_secs(3);

/// Room for what comes of those that have little: what does not fit there lies with the daemon.
const NARROW_BYTES: u32 = 4 * 1024;

/// Lets this process have so many descriptors, as far as the system does.
pub(crate) fn allow(descriptors: usize) -> anyhow::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    let wanted = u64::try_from(descriptors)?;
    limit.current = Some(limit.maximum.map_or(wanted, |most| most.min(wanted)));
    setrlimit(Resource::Nofile, limit).context("RLIMIT_NOFILE: more connections than this user may have")
}

/// From where a flood comes.
#[derive(Clone, Copy)]
pub(crate) enum From {
    /// From so many addresses.
    Many(u16),
    /// The same, with little room for what comes.
    Narrow(u16),
    /// From the address of the good client.
    Same,
}

impl From {
    fn address(self, n: usize) -> Ipv4Addr {
        match self {
            Self::Same => Ipv4Addr::LOCALHOST,
            Self::Many(count) | Self::Narrow(count) => {
                let [high, low] = u16::try_from(n % usize::from(count)).unwrap_or_default().to_be_bytes();
                Ipv4Addr::new(127, 1, high, low.saturating_add(1))
            }
        }
    }

    pub(crate) async fn connect(self, to: SocketAddr, n: usize) -> anyhow::Result<TcpStream> {
        let socket = TcpSocket::new_v4()?;
        if matches!(self, Self::Narrow(_)) {
            socket.set_recv_buffer_size(NARROW_BYTES)?;
        }
        socket.bind(SocketAddr::new(self.address(n).into(), 0))?;
        Ok(timeout(WAIT, socket.connect(to)).await??)
    }
}

/// So many connections, each of which has sent what it says; those that could be had.
pub(crate) async fn crowd(
    from: From,
    to: SocketAddr,
    count: usize,
    says: impl Fn(usize) -> Vec<u8>,
) -> Vec<TcpStream> {
    let (mut opened, mut tasks) = (Vec::with_capacity(count), JoinSet::new());
    for n in 0..count {
        if tasks.len() >= AT_ONCE
            && let Some(Ok(Some(stream))) = tasks.join_next().await
        {
            opened.push(stream);
        }
        let bytes = says(n);
        tasks.spawn(async move {
            let mut stream = from.connect(to, n).await.ok()?;
            let _ = timeout(WAIT, stream.write_all(&bytes)).await;
            Some(stream)
        });
    }
    opened.extend(tasks.join_all().await.into_iter().flatten());
    opened
}

/// How many the server has not closed.
pub(crate) fn open(crowd: &[TcpStream]) -> usize {
    let mut piece = [0; 65_536];
    let is_open = |stream: &&TcpStream| {
        loop {
            match stream.try_read(&mut piece) {
                Ok(0) => return false,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::WouldBlock,
            }
        }
    };
    crowd.iter().filter(is_open).count()
}

/// Each of them sends a byte a second, for so many seconds.
pub(crate) async fn trickle(crowd: &mut [TcpStream], seconds: u64) {
    for _ in 0..seconds {
        for stream in crowd.iter_mut() {
            let _ = stream.try_write(b"a");
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The status of an answer; `None` where the connection ended, or nothing came in time.
pub(crate) async fn status(stream: &mut TcpStream) -> Option<u16> {
    let mut head = vec![0; 65_536];
    let n = timeout(WAIT, stream.read(&mut head)).await.ok()?.ok()?;
    String::from_utf8_lossy(&head[..n]).get(9..12)?.parse().ok()
}

impl Target {
    /// A request's head and body.
    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> Vec<u8> {
        let token = &self.token;
        format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{headers}\r\n{body}"
        )
        .into_bytes()
    }

    /// One answer to the good client, on a connection of its own.
    pub(crate) fn ask(&self, path: &str) -> anyhow::Result<Value> {
        let config = ureq::Agent::config_builder().timeout_global(Some(Duration::from_secs(30))).proxy(None);
        let (scheme, config) = match &self.authority {
            Some(authority) => ("https", config.tls_config(authority.trusted())),
            None => ("http", config),
        };
        let agent: ureq::Agent = config.build().into();
        let url = format!("{scheme}://localhost:{}{path}", self.admin.port());
        let call = agent.get(&url).header("Authorization", format!("Bearer {}", self.good)).call();
        Ok(serde_json::from_str(&call?.body_mut().read_to_string()?)?)
    }

    pub(crate) async fn get(&self, path: &str) -> anyhow::Result<Value> {
        let (target, path) = (self.clone(), path.to_owned());
        tokio::task::spawn_blocking(move || target.ask(&path)).await?
    }
}
