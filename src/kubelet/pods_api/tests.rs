//! The pod cache, event by event.

use super::*;
use crate::wire::core;
use berth_kernel::evidence::pods::PodState;
use prost::Message;

fn event(kind: EventType, uid: &str, phase: &str) -> WatchPodsEvent {
    let text = |text: &str| Some(text.to_owned());
    let metadata = core::ObjectMeta {
        name: text(&format!("pod-{uid}")),
        namespace: text("team"),
        uid: text(uid),
        ..core::ObjectMeta::default()
    };
    let status = core::PodStatus { phase: text(phase), ..core::PodStatus::default() };
    let pod = core::Pod { metadata: Some(metadata), spec: None, status: Some(status) };
    WatchPodsEvent { r#type: kind.into(), pod: pod.encode_to_vec() }
}

fn synced() -> WatchPodsEvent {
    WatchPodsEvent { r#type: EventType::InitialSyncComplete.into(), pod: Vec::new() }
}

fn uids(cache: &PodCache) -> Vec<&str> {
    cache.view.pods.keys().map(String::as_str).collect()
}

#[test]
fn a_list_applies_once_it_is_complete_and_a_missing_pod_has_not_ended() {
    let mut cache = PodCache::default();
    cache.begin();
    assert!(!cache.apply(&event(EventType::Added, "a", "Running")));
    assert!(!cache.apply(&event(EventType::Added, "b", "Running")));
    assert!(!cache.has_listed && uids(&cache).is_empty());
    assert!(cache.apply(&synced()));
    assert_eq!(uids(&cache), ["a", "b"]);
    assert!(cache.view.current);
    // A restarted kubelet, which lists only one of them yet.
    cache.begin();
    cache.apply(&event(EventType::Added, "b", "Running"));
    assert_eq!(uids(&cache), ["a", "b"], "the old view applies until the new list is complete");
    assert!(cache.apply(&synced()));
    assert_eq!(uids(&cache), ["b"]);
    assert!(cache.view.deleted.is_empty());
    assert_eq!(cache.view.listed_mono_ms, 0, "a missing pod has not ended");
    cache.dirty = false;
    cache.begin();
    cache.apply(&event(EventType::Added, "b", "Running"));
    assert!(!cache.apply(&synced()), "nothing changed");
}

#[test]
fn deleted_pods_are_remembered() {
    let mut cache = PodCache::default();
    cache.begin();
    cache.apply(&event(EventType::Added, "a", "Running"));
    cache.apply(&synced());
    assert!(cache.apply(&event(EventType::Modified, "a", "Succeeded")));
    assert!(!cache.apply(&event(EventType::Modified, "a", "Succeeded")), "nothing changed");
    assert!(cache.apply(&event(EventType::Deleted, "a", "")));
    assert_eq!((uids(&cache).len(), cache.view.deleted.len()), (0, 1));
    // A static pod can come back under its UID.
    assert!(cache.apply(&event(EventType::Added, "a", "Pending")));
    assert_eq!(uids(&cache), ["a"]);
    for n in 0..DELETED_MAX + 3 {
        cache.apply(&event(EventType::Deleted, &n.to_string(), ""));
    }
    assert_eq!(cache.view.deleted.len(), DELETED_MAX);
}

#[test]
fn invalid_events_change_nothing() {
    let mut cache = PodCache::default();
    cache.begin();
    cache.apply(&synced());
    let before = cache.view.clone();
    for kind in [EventType::Added, EventType::Deleted, EventType::Unspecified] {
        assert!(!cache.apply(&WatchPodsEvent { r#type: kind.into(), pod: vec![0xff] }));
    }
    assert!(!cache.apply(&WatchPodsEvent { r#type: 99, pod: Vec::new() }));
    assert!(!cache.apply(&synced()), "a second time");
    assert_eq!(cache.view, before);
}

#[test]
fn a_change_not_sent_before_a_stream_ended_is_sent_with_the_next_list() {
    let mut cache = PodCache::default();
    cache.begin();
    cache.apply(&event(EventType::Added, "a", "Running"));
    cache.apply(&event(EventType::Added, "b", "Running"));
    cache.apply(&synced());
    for change in [event(EventType::Deleted, "a", ""), event(EventType::Modified, "b", "Succeeded")] {
        cache.dirty = false;
        assert!(cache.apply(&change));
        // The stream ends here. The next list equals the view.
        cache.begin();
        cache.apply(&event(EventType::Added, "b", last_phase(&cache)));
        assert!(cache.apply(&synced()), "the change was not sent yet");
    }
    // The same for a deletion during a list, of a pod that the view never contained.
    cache.dirty = false;
    cache.begin();
    cache.apply(&event(EventType::Added, "b", "Succeeded"));
    assert!(!cache.apply(&event(EventType::Deleted, "c", "")));
    assert!(cache.apply(&synced()));
}

fn last_phase(cache: &PodCache) -> &'static str {
    if cache.view.pods["b"].stage == Stage::Finished { "Succeeded" } else { "Running" }
}

#[test]
fn too_many_pods_drop_the_finished_ones_first_and_then_all_are_unknown() {
    let mut cache = PodCache::default();
    cache.begin();
    for n in 0..PODS_MAX {
        cache.apply(&event(EventType::Added, &format!("runs-{n}"), "Running"));
    }
    cache.apply(&synced());
    cache.apply(&event(EventType::Added, "done", "Succeeded"));
    let view = cache.bounded_view().unwrap();
    assert_eq!((view.current, view.pods.len()), (true, PODS_MAX));
    assert!(!view.pods.contains_key("done"));
    for back in ["back", "gone"] {
        cache.apply(&event(EventType::Deleted, back, ""));
    }
    cache.apply(&event(EventType::Added, "back", "Running"));
    assert_eq!(cache.bounded_view().unwrap_err(), PODS_MAX + 1);
    let view = cache.overflow_view();
    assert_eq!((view.source, view.current, view.pods.len()), (PodsSource::Kubelet, false, 0));
    assert_eq!(view.state_of("runs-0", 0), PodState::Unknown, "the pod may run");
    assert_eq!(view.state_of("back", 0), PodState::Unknown, "the pod is back");
    assert_eq!(view.state_of("gone", 0), PodState::Over);
    cache.apply(&event(EventType::Deleted, "runs-0", ""));
    assert!(cache.bounded_view().unwrap().current);
}

#[test]
fn only_a_pod_that_newly_waits_for_devices_is_marked() {
    let with_gpus = |phase: &str, gpus: &str| {
        let quantity = core::Quantity { string: Some(gpus.to_owned()) };
        let limits = [("nvidia.com/gpu".to_owned(), quantity)].into_iter().collect();
        let resources = Some(core::ResourceRequirements { limits });
        let main = core::Container { name: Some("main".to_owned()), resources, ..core::Container::default() };
        let plain = event(EventType::Modified, "a", phase);
        let mut pod = core::Pod::decode(plain.pod.as_slice()).unwrap();
        pod.spec = Some(core::PodSpec { containers: vec![main], ..core::PodSpec::default() });
        WatchPodsEvent { pod: pod.encode_to_vec(), ..plain }
    };
    let mut cache = PodCache::default();
    cache.begin();
    cache.apply(&synced());
    cache.apply(&event(EventType::Added, "b", "Pending"));
    assert!(cache.newly_waiting.is_none(), "the pod requests no devices");
    cache.apply(&with_gpus("Pending", "1"));
    assert_eq!(cache.newly_waiting.as_ref().map(|pod| pod.uid.as_str()), Some("a"));
    cache.apply(&with_gpus("Running", "1"));
    assert!(cache.newly_waiting.is_none(), "the pod has its devices");
}
