//! The lease of the controller: of several processes, one writes.
//!
//! No clocks of two machines are compared: a lease is free when it was not seen to change for its duration. Its holder stops writing
//! some seconds before another process may take it, counted from the request that renewed it last.

use berth_kube::{Connection, request};
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::PostParams;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// The name of the Lease.
const NAME: &str = "berth-controller";
/// The lease is free when it was not renewed for so long, seconds.
const DURATION_SECONDS: i32 = 15;
/// How long its holder may write after it was renewed.
const HELD: Duration = Duration::from_secs(10);
/// How often it is renewed, or looked at.
const RENEWED_EVERY: Duration = Duration::from_secs(2);
/// What the requests need.
const RIGHT: &str =
    "get, create and update leases of coordination.k8s.io; ClusterRole berth-controller-lease";

/// What was seen of a lease that another process holds.
#[derive(Debug, Default)]
struct Observed {
    spec: Option<LeaseSpec>,
    at: Option<Instant>,
}

/// What to do with the lease.
#[derive(Debug, PartialEq)]
enum Next {
    /// Write it with this process as its holder.
    Take(LeaseSpec),
    /// Wait for its holder.
    Wait,
}

impl Observed {
    /// `found` is the lease as it was just read.
    fn next(&mut self, found: &LeaseSpec, identity: &str, now: Instant, wall: Timestamp) -> Next {
        if self.spec.as_ref() != Some(found) {
            (self.spec, self.at) = (Some(found.clone()), Some(now));
        }
        let holder = found.holder_identity.as_deref().unwrap_or_default();
        let duration = found.lease_duration_seconds.unwrap_or(DURATION_SECONDS).clamp(1, 3600);
        let duration = Duration::from_secs(u64::try_from(duration).unwrap_or(1));
        let is_expired = self.at.is_some_and(|at| now.saturating_duration_since(at) > duration);
        if holder != identity && !holder.is_empty() && !is_expired {
            return Next::Wait;
        }
        let is_new = holder != identity;
        let transitions = found.lease_transitions.unwrap_or(0);
        Next::Take(LeaseSpec {
            holder_identity: Some(identity.to_owned()),
            lease_duration_seconds: Some(DURATION_SECONDS),
            acquire_time: if is_new { Some(MicroTime(wall)) } else { found.acquire_time.clone() },
            renew_time: Some(MicroTime(wall)),
            lease_transitions: Some(transitions.saturating_add(i32::from(is_new))),
            ..found.clone()
        })
    }
}

/// Takes and renews the lease; never returns. `held_until` has until when this process may write.
pub(super) async fn keep(
    connection: &Connection,
    leases: Api<Lease>,
    identity: &str,
    held_until: &watch::Sender<Option<Instant>>,
) {
    let mut observed = Observed::default();
    let mut last_error = None;
    loop {
        let asked = Instant::now();
        let renewed = renew(&leases, identity, &mut observed).await;
        match renewed {
            Ok(true) => {
                held_until.send_replace(Some(asked + HELD));
                last_error = None;
            }
            Ok(false) => {
                held_until.send_replace(None);
                last_error = None;
            }
            Err(error) if last_error.as_ref() != Some(&error) => {
                tracing::warn!(why = error, "the lease of the controller cannot be renewed or read");
                last_error = Some(error);
            }
            Err(_) => {}
        }
        sleep(connection.retry_after.delay(RENEWED_EVERY, Instant::now())).await;
    }
}

/// Returns whether this process holds the lease.
async fn renew(leases: &Api<Lease>, identity: &str, observed: &mut Observed) -> Result<bool, String> {
    let found = request(leases.get_opt(NAME), RIGHT).await.map_err(|error| error.why)?;
    let metadata = match &found {
        Some(lease) => lease.metadata.clone(),
        None => ObjectMeta { name: Some(NAME.to_owned()), ..ObjectMeta::default() },
    };
    let is_new = found.is_none();
    let spec = found.and_then(|lease| lease.spec).unwrap_or_default();
    let Next::Take(spec) = observed.next(&spec, identity, Instant::now(), Timestamp::now()) else {
        return Ok(false);
    };
    let lease = Lease { metadata, spec: Some(spec) };
    let params = PostParams::default();
    let written = match is_new {
        true => request(leases.create(&params, &lease), RIGHT).await,
        false => request(leases.replace(NAME, &params, &lease), RIGHT).await,
    };
    match written {
        Ok(_) => Ok(true),
        // Another process was faster.
        Err(error) if error.code() == 409 => Ok(false),
        Err(error) => Err(error.why),
    }
}

/// Gives the lease back, so that another process need not wait for its end.
pub(super) async fn release(leases: &Api<Lease>, identity: &str) -> Result<(), String> {
    let found = request(leases.get_opt(NAME), RIGHT).await.map_err(|error| error.why)?;
    let Some(mut lease) = found else { return Ok(()) };
    let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(identity))
    else {
        return Ok(());
    };
    spec.holder_identity = None;
    let written = request(leases.replace(NAME, &PostParams::default(), &lease), RIGHT).await;
    written.map(|_| ()).map_err(|error| error.why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_taken_when_it_was_not_seen_to_change_whatever_the_clocks_say() {
        let (begin, wall) = (Instant::now(), Timestamp::UNIX_EPOCH);
        let held = |second: i64| LeaseSpec {
            holder_identity: Some("other".into()),
            lease_duration_seconds: Some(15),
            renew_time: Some(MicroTime(Timestamp::from_second(second).unwrap())),
            ..LeaseSpec::default()
        };
        let mut observed = Observed::default();
        let at = |seconds| begin + Duration::from_secs(seconds);
        // Its time of renewal is long past, and then in the future.
        assert_eq!(observed.next(&held(-9_999), "me", at(0), wall), Next::Wait);
        assert_eq!(observed.next(&held(-9_999), "me", at(14), wall), Next::Wait);
        assert_eq!(observed.next(&held(99_999), "me", at(15), wall), Next::Wait);
        assert_eq!(observed.next(&held(99_999), "me", at(30), wall), Next::Wait);
        let Next::Take(taken) = observed.next(&held(99_999), "me", at(31), wall) else { panic!("not taken") };
        assert_eq!((taken.holder_identity.as_deref(), taken.lease_transitions), (Some("me"), Some(1)));
        let Next::Take(renewed) = observed.next(&taken, "me", at(32), wall) else { panic!("not renewed") };
        assert_eq!(renewed.lease_transitions, Some(1));
        let released = LeaseSpec { holder_identity: None, ..held(0) };
        assert!(matches!(Observed::default().next(&released, "me", at(0), wall), Next::Take(_)));
    }
}
