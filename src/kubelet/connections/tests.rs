use super::*;
use std::future::{Future, poll_fn};
use tokio::io::AsyncReadExt;

const HOUR: Duration = Duration::from_secs(3600);

fn connections(idle_max: Duration, min_age: Duration) -> Arc<Connections> {
    let own = rustix::process::geteuid().as_raw();
    let timeouts = ConnectionTimeouts { idle_max, min_age, ..ConnectionTimeouts::default() };
    Connections::new("test.sock".into(), [own, own], timeouts)
}

/// Both ends of an admitted connection.
async fn admit(connections: &Arc<Connections>) -> (ServedConnection, UnixStream) {
    let (server, client) = UnixStream::pair().unwrap();
    (Arc::clone(connections).admit(server).await.unwrap(), client)
}

fn call(served: &ServedConnection) -> Call {
    call_on(&served.connection)
}

fn call_on(connection: &Arc<Connection>) -> Call {
    let mut request = Request::new(());
    request.extensions_mut().insert(Arc::clone(connection));
    Call::begin(&request)
}

fn is_closed(served: &ServedConnection) -> bool {
    served.connection.closed.load(Ordering::SeqCst)
}

#[tokio::test]
async fn only_the_allowed_users_are_served() {
    let (server, mut client) = UnixStream::pair().unwrap();
    let other = rustix::process::geteuid().as_raw() + 1;
    let connections = Connections::new("test.sock".into(), [other, other], ConnectionTimeouts::default());
    assert!(connections.admit(server).await.is_none());
    assert_eq!(client.read(&mut [0]).await.unwrap(), 0, "the connection is closed");
}

#[tokio::test]
async fn idle_connections_are_closed_first_then_the_oldest_busy_ones_and_the_kubelets_last() {
    let connections = connections(HOUR, Duration::ZERO);
    let mut admitted = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        admitted.push(admit(&connections).await);
    }
    let kubelet_connections = Arc::new(watch::Sender::new(0));
    admitted[0].0.connection.mark_kubelet(&kubelet_connections);
    admitted[0].0.connection.mark_kubelet(&kubelet_connections);
    assert_eq!(*kubelet_connections.borrow(), 1);
    // All but two have a running call; number 5 has been idle longer than number 3.
    let _calls: Vec<Call> = admitted
        .iter()
        .skip(1)
        .filter(|(served, _)| ![3, 5].contains(&served.number))
        .map(|(served, _)| call(served))
        .collect();
    drop(call(&admitted[3].0));
    let mut new = Vec::new();
    for next in [5, 3, 1, 2] {
        assert!(!is_closed(&admitted[next].0));
        let (served, client) = admit(&connections).await;
        new.push((call(&served), served, client));
        assert!(is_closed(&admitted[next].0), "connection {next} is closed");
    }
    assert!(!is_closed(&admitted[0].0) && !is_closed(&admitted[4].0));
    assert!(new.iter().all(|(_, served, _)| !is_closed(served)));
    // The reader of a closed connection is woken and gets an error.
    let error = admitted[1].0.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    admitted.clear();
    assert_eq!(*kubelet_connections.borrow(), 0, "the kubelet is disconnected");
    assert_eq!(connections.open.lock().by_age.len(), new.len());
}

#[tokio::test]
async fn a_new_connection_is_not_closed_and_a_freed_slot_is_taken_at_once() {
    let connections = connections(HOUR, HOUR);
    let mut admitted = Vec::new();
    for _ in 0..CONNECTIONS_MAX {
        admitted.push(admit(&connections).await);
    }
    let mut next = Box::pin(admit(&connections));
    poll_fn(|context| {
        assert!(next.as_mut().poll(context).is_pending());
        Poll::Ready(())
    })
    .await;
    assert!(admitted.iter().all(|(served, _)| !is_closed(served)));
    drop(admitted.pop());
    assert!(!is_closed(&next.await.0));
}

#[test]
fn streams_in_all_slots_are_closed_for_new_connections_up_to_the_idle_limit() {
    let connections = connections(HOUR, HOUR);
    let now = Instant::now();
    let streaming: Vec<_> = (0..CONNECTIONS_MAX).map(|_| connections.take_slot(now).unwrap().1).collect();
    let _calls: Vec<Call> = streaming.iter().map(call_on).collect();
    let closed = || streaming.iter().filter(|connection| connection.closed.load(Ordering::SeqCst)).count();
    assert_eq!(connections.take_slot(now + HOUR / 2).err(), Some(HOUR / 2), "none is old enough");
    let later = now + HOUR;
    for n in 0..=IDLE_KEPT_MAX {
        assert!(connections.take_slot(later).is_ok());
        assert_eq!(closed(), n + 1, "the oldest stream is closed");
    }
    // Above the limit, idle connections are closed once they are old enough.
    assert_eq!(connections.take_slot(later + HOUR / 4).err(), Some(HOUR * 3 / 4));
    assert!(connections.take_slot(later + HOUR).is_ok());
    assert_eq!(closed(), IDLE_KEPT_MAX + 1);
}

#[test]
fn the_kubelets_connection_is_kept_where_it_alone_is_old() {
    let connections = connections(HOUR, HOUR);
    let now = Instant::now();
    let kubelet = connections.take_slot(now).unwrap().1;
    kubelet.mark_kubelet(&Arc::new(watch::Sender::new(0)));
    let later = now + HOUR;
    let streaming: Vec<_> = (1..CONNECTIONS_MAX).map(|_| connections.take_slot(later).unwrap().1).collect();
    let _calls: Vec<Call> = streaming.iter().map(call_on).collect();
    assert_eq!(connections.take_slot(later).err(), Some(HOUR), "a stream is closed once it is old enough");
    assert!(!kubelet.closed.load(Ordering::SeqCst));
    assert!(connections.take_slot(later + HOUR).is_ok());
    assert!(!kubelet.closed.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_connection_without_a_call_is_closed_and_one_with_a_call_is_not() {
    let idle_max = Duration::from_millis(20);
    let connections = connections(idle_max, HOUR);
    let (mut idle, _idle_client) = admit(&connections).await;
    let (mut busy, _busy_client) = admit(&connections).await;
    let running_call = call(&busy);
    let error = idle.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
    assert!(timeout(5 * idle_max, busy.read(&mut [0])).await.is_err(), "its call is running");
    drop(running_call);
    let error = busy.read(&mut [0]).await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionAborted);
}
