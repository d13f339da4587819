//! Rate limits: a token bucket for each client. A client is a name once it is authenticated, and an address before
//! that.

use crate::failure::Failure;
use crate::peer::Peer;
use berth_api::Kind;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Clients with a bucket of their own: some 100 bytes each. Further ones share one bucket.
const CLIENTS_MAX: usize = 1024;
/// Capacity of a bucket, seconds of its rate: a page or a script may start with a burst.
const BURST_S: f64 = 2.0;
/// Least time between two log lines about one client.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// The owner of a bucket.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    /// An authenticated caller, with its kind of authentication: equal names of different kinds are different
    /// clients.
    Named(&'static str, Arc<str>),
    /// An IPv4 address, or the /64 network of an IPv6 one, which one host has.
    Net([u8; 8]),
    /// A user of this machine.
    User(u32),
    /// A token, by the first bytes of its hash.
    Token([u8; 8]),
    /// All clients beyond [`CLIENTS_MAX`].
    Others,
}

impl Client {
    /// A client that is not authenticated yet.
    pub(crate) fn of(peer: Option<&Peer>) -> Self {
        match peer {
            Some(Peer::Tcp(from) | Peer::Tls { from, .. }) => Self::at(from.ip()),
            Some(Peer::Unix { uid, .. }) => Self::User(*uid),
            None => Self::Others,
        }
    }

    /// All clients with the token of this SHA-256 hash, at any address.
    pub(crate) fn token(hash: &[u8; 32]) -> Self {
        let [a, b, c, d, e, f, g, h, ..] = *hash;
        Self::Token([a, b, c, d, e, f, g, h])
    }

    /// All clients at this address.
    pub(crate) fn at(ip: IpAddr) -> Self {
        let mut net = [0; 8];
        match ip.to_canonical() {
            // An IPv6 network with the same bytes shares the bucket.
            IpAddr::V4(ip) => net[4..].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => net.copy_from_slice(&ip.octets()[..8]),
        }
        Self::Net(net)
    }
}

/// Whether a review counts against a client's rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// It does: a request causes it.
    Yes,
    /// It does not: the daemon itself causes it.
    No,
}

/// A rate, and the bucket of each client.
pub(crate) struct Limiter {
    what: &'static str,
    per_second: f64,
    clients: Mutex<HashMap<Client, Bucket>>,
}

struct Bucket {
    permits: f64,
    at: Instant,
    logged: Option<Instant>,
}

impl Limiter {
    /// So many a second; `what` names them in messages.
    pub(crate) fn new(what: &'static str, per_second: u32) -> Self {
        Self { what, per_second: f64::from(per_second), clients: Mutex::default() }
    }

    fn burst(&self) -> f64 {
        (self.per_second * BURST_S).max(1.0)
    }

    /// Takes one permit.
    ///
    /// # Errors
    /// 429 if there is none, with the whole seconds until there is one.
    pub(crate) fn take(&self, client: &Client) -> Result<(), Failure> {
        self.take_at(client, Instant::now())
    }

    /// Takes one permit if it counts.
    ///
    /// # Errors
    /// As [`Self::take`].
    pub(crate) fn take_if(&self, counted: Counted, client: &Client) -> Result<(), Failure> {
        match counted {
            Counted::Yes => self.take(client),
            Counted::No => Ok(()),
        }
    }

    fn take_at(&self, client: &Client, now: Instant) -> Result<(), Failure> {
        let (burst, per_second) = (self.burst(), self.per_second);
        let mut clients = self.clients.lock();
        let filled = |b: &Bucket| b.permits + now.saturating_duration_since(b.at).as_secs_f64() * per_second;
        if clients.len() >= CLIENTS_MAX && !clients.contains_key(client) {
            // A full bucket is the same as a new one.
            clients.retain(|_, b| filled(b) < burst);
        }
        let client = match clients.len() >= CLIENTS_MAX && !clients.contains_key(client) {
            true => Client::Others,
            false => client.clone(),
        };
        let fresh = || Bucket { permits: burst, at: now, logged: None };
        let bucket = clients.entry(client.clone()).or_insert_with(fresh);
        bucket.permits = filled(bucket).min(burst);
        bucket.at = now;
        if bucket.permits >= 1.0 {
            bucket.permits -= 1.0;
            return Ok(());
        }
        if bucket.logged.is_none_or(|logged| now.saturating_duration_since(logged) >= LOG_INTERVAL) {
            bucket.logged = Some(now);
            tracing::warn!(
                ?client,
                per_second,
                "a client of the admin API sends too many requests: {}",
                self.what
            );
        }
        // A rate is at least one, so a permit is available after a second.
        Err(Failure::new(Kind::TooMany, format!("more than {per_second} {} a second", self.what))
            .retry_after(1)
            .hint("wait a second, and send fewer requests; the rate is set by the daemon's admin.limits"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Client {
        Client::Named("token", name.into())
    }

    #[test]
    fn a_burst_passes_then_the_rate_applies_for_each_client() {
        let limiter = Limiter::new("reads", 10);
        let start = Instant::now();
        let (a, b) = (named("a"), named("b"));
        let taken = (0..100).filter(|_| limiter.take_at(&a, start).is_ok()).count();
        assert_eq!(taken, 20);
        let refused = limiter.take_at(&a, start).unwrap_err();
        assert_eq!(refused.problem.status, 429);
        assert_eq!(refused.response().headers().get("retry-after").unwrap(), "1");
        assert!(limiter.take_at(&b, start).is_ok());
        let later = start + Duration::from_millis(500);
        assert_eq!((0..100).filter(|_| limiter.take_at(&a, later).is_ok()).count(), 5);
        // A long wait fills the bucket, no more.
        let much_later = start + Duration::from_secs(3600);
        assert_eq!((0..100).filter(|_| limiter.take_at(&a, much_later).is_ok()).count(), 20);
    }

    #[test]
    fn many_addresses_do_not_evict_other_clients() {
        let limiter = Limiter::new("reads", 1);
        let start = Instant::now();
        let known = named("known");
        while limiter.take_at(&known, start).is_ok() {}
        for i in 0..10_000_u32 {
            let _ = limiter.take_at(&Client::Net(u64::from(i).to_be_bytes()), start);
        }
        assert!(limiter.clients.lock().len() <= CLIENTS_MAX + 1);
        assert!(limiter.take_at(&known, start).is_err(), "its bucket was forgotten");
        // Full buckets are removed when others need room.
        let later = start + Duration::from_secs(10);
        assert!(limiter.take_at(&named("new"), later).is_ok());
        assert!(limiter.clients.lock().len() < 10);
    }

    #[test]
    fn a_host_with_many_ipv6_addresses_is_one_client() {
        let at = |text: &str| Client::at(text.parse().unwrap());
        assert_eq!(at("2001:db8:1:2::1"), at("2001:db8:1:2:ffff::9"));
        assert_ne!(at("2001:db8:1:2::1"), at("2001:db8:1:3::1"));
        assert_eq!(at("10.0.0.1"), at("::ffff:10.0.0.1"));
        assert_ne!(at("10.0.0.1"), at("10.0.0.2"));
    }
}
