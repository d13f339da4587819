//! What is known of the pods, event by event.

use super::*;
use crate::wire::core;
use berth_kernel::pods::Fate;
use prost::Message;

fn event(kind: EventType, uid: &str, phase: &str) -> WatchPodsEvent {
    let text = |text: &str| Some(text.to_owned());
    let metadata = core::ObjectMeta {
        name: text(&format!("pod-{uid}")),
        namespace: text("team"),
        uid: text(uid),
        ..core::ObjectMeta::default()
    };
    let status = core::PodStatus { phase: text(phase), start_time: None };
    let pod = core::Pod { metadata: Some(metadata), spec: None, status: Some(status) };
    WatchPodsEvent { r#type: kind.into(), pod: pod.encode_to_vec() }
}

fn synced() -> WatchPodsEvent {
    WatchPodsEvent { r#type: EventType::InitialSyncComplete.into(), pod: Vec::new() }
}

fn uids(known: &Known) -> Vec<&str> {
    known.view.pods.keys().map(String::as_str).collect()
}

#[test]
fn a_list_counts_once_it_is_whole_and_who_is_missing_is_not_over() {
    let mut known = Known::default();
    known.begin();
    assert!(!known.take(&event(EventType::Added, "a", "Running")));
    assert!(!known.take(&event(EventType::Added, "b", "Running")));
    assert!(!known.complete && uids(&known).is_empty());
    assert!(known.take(&synced()));
    assert_eq!(uids(&known), ["a", "b"]);
    assert!(known.view.current);
    // Another kubelet, which knows but one of them yet.
    known.begin();
    known.take(&event(EventType::Added, "b", "Running"));
    assert_eq!(uids(&known), ["a", "b"], "the old view until the new one is whole");
    assert!(known.take(&synced()));
    assert_eq!(uids(&known), ["b"]);
    assert!(known.view.deleted.is_empty());
    assert_eq!(known.view.listed_mono_ms, 0, "a pod that it lacks is not over");
    known.dirty = false;
    known.begin();
    known.take(&event(EventType::Added, "b", "Running"));
    assert!(!known.take(&synced()), "no news");
}

#[test]
fn what_is_told_to_be_over_is_remembered() {
    let mut known = Known::default();
    known.begin();
    known.take(&event(EventType::Added, "a", "Running"));
    known.take(&synced());
    assert!(known.take(&event(EventType::Modified, "a", "Succeeded")));
    assert!(!known.take(&event(EventType::Modified, "a", "Succeeded")), "no news");
    assert!(known.take(&event(EventType::Deleted, "a", "")));
    assert_eq!((uids(&known).len(), known.view.deleted.len()), (0, 1));
    // A static pod comes back under its UID.
    assert!(known.take(&event(EventType::Added, "a", "Pending")));
    assert_eq!(uids(&known), ["a"]);
    for n in 0..DELETED_MAX + 3 {
        known.take(&event(EventType::Deleted, &n.to_string(), ""));
    }
    assert_eq!(known.view.deleted.len(), DELETED_MAX);
}

#[test]
fn what_cannot_be_read_changes_nothing() {
    let mut known = Known::default();
    known.begin();
    known.take(&synced());
    let before = known.view.clone();
    for kind in [EventType::Added, EventType::Deleted, EventType::Unspecified] {
        assert!(!known.take(&WatchPodsEvent { r#type: kind.into(), pod: vec![0xff] }));
    }
    assert!(!known.take(&WatchPodsEvent { r#type: 99, pod: Vec::new() }));
    assert!(!known.take(&synced()), "twice");
    assert_eq!(known.view, before);
}

#[test]
fn what_was_not_handed_in_before_a_stream_ended_is_with_the_next_list() {
    let mut known = Known::default();
    known.begin();
    known.take(&event(EventType::Added, "a", "Running"));
    known.take(&event(EventType::Added, "b", "Running"));
    known.take(&synced());
    for change in [event(EventType::Deleted, "a", ""), event(EventType::Modified, "b", "Succeeded")] {
        known.dirty = false;
        assert!(known.take(&change));
        // The stream ends here. The next list is the view as it is already.
        known.begin();
        known.take(&event(EventType::Added, "b", known_phase(&known)));
        assert!(known.take(&synced()), "nobody was told");
    }
    // So does a deletion while a list comes in, of a pod that the view never had.
    known.dirty = false;
    known.begin();
    known.take(&event(EventType::Added, "b", "Succeeded"));
    assert!(!known.take(&event(EventType::Deleted, "c", "")));
    assert!(known.take(&synced()));
}

fn known_phase(known: &Known) -> &'static str {
    if known.view.pods["b"].stage == Stage::Finished { "Succeeded" } else { "Running" }
}

#[test]
fn of_too_many_pods_the_finished_ones_are_left_out_and_then_nobody_is_vouched_for() {
    let mut known = Known::default();
    known.begin();
    for n in 0..PODS_MAX {
        known.take(&event(EventType::Added, &format!("runs-{n}"), "Running"));
    }
    known.take(&synced());
    known.take(&event(EventType::Added, "done", "Succeeded"));
    let view = known.taken().unwrap();
    assert_eq!((view.current, view.pods.len()), (true, PODS_MAX));
    assert!(!view.pods.contains_key("done"));
    for back in ["back", "gone"] {
        known.take(&event(EventType::Deleted, back, ""));
    }
    known.take(&event(EventType::Added, "back", "Running"));
    assert_eq!(known.taken().unwrap_err(), PODS_MAX + 1);
    let view = known.silent();
    assert_eq!((view.source, view.current, view.pods.len()), (PodsSource::Kubelet, false, 0));
    assert_eq!(view.fate("runs-0", 0), Fate::Unknown, "it may run");
    assert_eq!(view.fate("back", 0), Fate::Unknown, "it was there again");
    assert_eq!(view.fate("gone", 0), Fate::Over);
    known.take(&event(EventType::Deleted, "runs-0", ""));
    assert!(known.taken().unwrap().current);
}

#[test]
fn a_pod_that_comes_to_ask_is_told_from_other_news() {
    let asks = |phase: &str, gpus: &str| {
        let quantity = core::Quantity { string: Some(gpus.to_owned()) };
        let limits = [("nvidia.com/gpu".to_owned(), quantity)].into_iter().collect();
        let resources = Some(core::ResourceRequirements { limits });
        let main = core::Container { name: Some("main".to_owned()), resources, ..core::Container::default() };
        let plain = event(EventType::Modified, "a", phase);
        let mut pod = core::Pod::decode(plain.pod.as_slice()).unwrap();
        pod.spec = Some(core::PodSpec { containers: vec![main], ..core::PodSpec::default() });
        WatchPodsEvent { pod: pod.encode_to_vec(), ..plain }
    };
    let mut known = Known::default();
    known.begin();
    known.take(&synced());
    known.take(&event(EventType::Added, "b", "Pending"));
    assert!(known.waits.is_none(), "it asks for nothing");
    known.take(&asks("Pending", "1"));
    assert_eq!(known.waits.as_ref().map(|pod| pod.uid.as_str()), Some("a"));
    known.take(&asks("Running", "1"));
    assert!(known.waits.is_none(), "it was served");
}
