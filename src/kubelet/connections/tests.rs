use super::*;
use std::future::{Future, poll_fn};
use tokio::io::AsyncReadExt;

const HOUR: Duration = Duration::from_secs(3600);

fn connections(silent_max: Duration, min_age: Duration) -> Arc<Connections> {
    let own = rustix::process::geteuid().as_raw();
    let waits = Waits { silent_max, min_age, ..Waits::default() };
    Connections::new("test.sock".into(), [own, own], &waits)
}

/// Both ends of an admitted connection.
async fn admit(connections: &Arc<Connections>) -> (Served, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (Arc::clone(connections).admit(ours).await.unwrap(), theirs)
}

fn call(served: &Served) -> Call {
    call_on(&served.connection)
}

fn call_on(connection: &Arc<Connection>) -> Call {
    let mut request = Request::new(());
    request.extensions_mut().insert(Arc::clone(connection));
    Call::begin(&request)
}

fn is_closed(served: &Served) -> bool {
    served.connection.closed.load(Ordering::SeqCst)
}

#[tokio::test]
async fn only_the_users_named_are_served() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let other = rustix::process::geteuid().as_raw() + 1;
    let connections = Connections::new("test.sock".into(), [other, other], &Waits::default());
    assert!(connections.admit(ours).await.is_none());
    assert_eq!(theirs.read(&mut [0]).await.unwrap(), 0, "it is to be closed");
}

#[tokio::test]
async fn the_silent_go_first_then_the_oldest_that_call_and_the_kubelets_last() {
    let connections = connections(HOUR, Duration::ZERO);
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        all.push(admit(&connections).await);
    }
    let kubelets = Arc::new(watch::Sender::new(0));
    all[0].0.connection.mark_kubelet(&kubelets);
    all[0].0.connection.mark_kubelet(&kubelets);
    assert_eq!(*kubelets.borrow(), 1);
    // All but two have a call under way; of those two, one was silent for longer.
    let _calls: Vec<Call> = all
        .iter()
        .skip(1)
        .filter(|(one, _)| ![3, 5].contains(&one.number))
        .map(|(one, _)| call(one))
        .collect();
    drop(call(&all[3].0));
    let mut new = Vec::new();
    for gone in [5, 3, 1, 2] {
        assert!(!is_closed(&all[gone].0));
        let (one, end) = admit(&connections).await;
        new.push((call(&one), one, end));
        assert!(is_closed(&all[gone].0), "{gone} was to go");
    }
    assert!(!is_closed(&all[0].0) && !is_closed(&all[4].0) && new.iter().all(|(_, one, _)| !is_closed(one)));
    // Its reader is woken, and finds the end.
    let error = all[1].0.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    all.clear();
    assert_eq!(*kubelets.borrow(), 0, "the kubelet has left");
    assert_eq!(connections.open.lock().by_age.len(), new.len());
}

#[tokio::test]
async fn one_that_came_just_now_is_waited_for_and_a_freed_slot_is_taken_at_once() {
    let connections = connections(HOUR, HOUR);
    let mut all = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        all.push(admit(&connections).await);
    }
    let mut next = Box::pin(admit(&connections));
    poll_fn(|context| {
        assert!(next.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    assert!(all.iter().all(|(one, _)| !is_closed(one)));
    drop(all.pop());
    assert!(!is_closed(&next.await.0));
}

#[test]
fn streams_in_all_slots_give_way_to_new_connections_and_not_to_a_silent_crowd() {
    let connections = connections(HOUR, HOUR);
    let now = Instant::now();
    let streaming: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connections.take_slot(now).unwrap().1).collect();
    let _calls: Vec<Call> = streaming.iter().map(call_on).collect();
    let closed = || streaming.iter().filter(|one| one.closed.load(Ordering::SeqCst)).count();
    assert_eq!(connections.take_slot(now + HOUR / 2).err(), Some(HOUR / 2), "none is old enough");
    let later = now + HOUR;
    for n in 0..=IDLE_KEPT_MAX {
        assert!(connections.take_slot(later).is_ok());
        assert_eq!(closed(), n + 1, "the oldest stream goes");
    }
    // From then on the silent ones are waited for, and go.
    assert_eq!(connections.take_slot(later + HOUR / 4).err(), Some(HOUR * 3 / 4));
    assert!(connections.take_slot(later + HOUR).is_ok());
    assert_eq!(closed(), IDLE_KEPT_MAX + 1);
}

#[tokio::test]
async fn a_connection_without_a_call_ends_and_one_with_a_call_stays() {
    let silent_max = Duration::from_millis(20);
    let connections = connections(silent_max, HOUR);
    let (mut silent, _end) = admit(&connections).await;
    let (mut calls, _other_end) = admit(&connections).await;
    let under_way = call(&calls);
    let error = silent.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    assert!(timeout(5 * silent_max, calls.read(&mut [0])).await.is_err(), "its call is under way");
    drop(under_way);
    let error = calls.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
}

#[test]
fn a_warning_counts_what_was_not_logged_before_it() {
    let mut limit = WarnLimit::default();
    assert_eq!((limit.count(), limit.count(), limit.count()), (Some(1), None, None));
    limit.last = None;
    assert_eq!(limit.count(), Some(3));
}
