//! The checkpoint file.

use crate::{Bench, GPU, SOON};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use kubelet_standin::proto::v1beta1::ContainerAllocateResponse;
use kubelet_standin::{CheckpointMode, HEALTHY, PodSpec, TinyPlugin};
use prost::Message;
use serde_json::Value;
use std::{fs, os::unix::fs::MetadataExt};

fn read(bench: &Bench) -> Value {
    let bytes = fs::read(bench.kubelet.checkpoint_path()).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[tokio::test]
async fn it_holds_uid_container_ids_by_numa_node_and_the_plugins_own_answer() {
    let bench = Bench::new().await;
    let _plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    assert_eq!(read(&bench)["Data"]["PodDeviceEntries"], Value::Null);
    let spec = PodSpec::new("default", "p").init("prepare", &[(GPU, 1)]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    let file = read(&bench);
    let entry = &file["Data"]["PodDeviceEntries"][0];
    assert_eq!(entry["PodUID"], spec.uid.as_str());
    assert_eq!(entry["ContainerName"], "prepare");
    assert_eq!(entry["ResourceName"], GPU);
    assert_eq!(entry["DeviceIDs"], serde_json::json!({ "-1": ["a"] }));
    let bytes = STANDARD.decode(entry["AllocResp"].as_str().unwrap()).unwrap();
    let response = ContainerAllocateResponse::decode(&*bytes).unwrap();
    assert_eq!(response.envs["TINY"], "a");
    assert_eq!(file["Data"]["RegisteredDevices"][GPU], serde_json::json!(["a"]));
    assert!(file["Checksum"].is_u64());
}

#[tokio::test]
async fn a_purge_leaves_it_stale_until_the_next_list() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec.clone()).await.unwrap();
    bench.kubelet.delete(&spec.uid);
    let inode = fs::metadata(bench.kubelet.checkpoint_path()).unwrap().ino();
    crate::pod_resources::list(&bench).await;
    assert!(bench.kubelet.in_use(GPU).is_empty());
    assert_eq!(read(&bench)["Data"]["PodDeviceEntries"][0]["PodUID"], spec.uid.as_str());
    let now = fs::metadata(bench.kubelet.checkpoint_path()).unwrap().ino();
    assert_eq!(inode, now);
    // The same list again is enough: a new file, by rename.
    plugin.list(vec![TinyPlugin::device("a", HEALTHY)]);
    bench
        .kubelet
        .wait_for("a new file", SOON, |_| read(&bench)["Data"]["PodDeviceEntries"].is_null())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_kubelet_that_cannot_read_it_starts_empty() {
    for mode in [
        CheckpointMode::Garbage,
        CheckpointMode::Truncated,
        CheckpointMode::Folder,
        CheckpointMode::Reshaped,
        CheckpointMode::WrongSum,
    ] {
        let bench = Bench::new().await;
        let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
        bench.kubelet.set_faults(|f| f.checkpoint = mode);
        let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
        bench.kubelet.admit(spec.clone()).await.unwrap();
        bench.kubelet.restart().await.unwrap();
        assert_eq!(bench.kubelet.capacity(GPU), None, "{mode:?}");
        assert!(bench.kubelet.in_use(GPU).is_empty(), "{mode:?}");
        drop(plugin);
    }
}

#[tokio::test]
async fn the_other_modes_leave_what_they_say() {
    let bench = Bench::new().await;
    let plugin = bench.plugin("a.sock", GPU, &["a"]).await;
    let path = bench.kubelet.checkpoint_path();
    bench.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Frozen);
    let frozen = fs::read(&path).unwrap();
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    bench.kubelet.admit(spec).await.unwrap();
    assert_eq!(fs::read(&path).unwrap(), frozen);
    bench.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Newer);
    plugin.list(vec![TinyPlugin::device("a", HEALTHY)]);
    bench.kubelet.wait_for("a newer file", SOON, |_| read(&bench)["Version"] == "v2").await.unwrap();
    bench.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Symlink);
    plugin.list(vec![TinyPlugin::device("a", HEALTHY)]);
    bench
        .kubelet
        .wait_for("a link", SOON, |_| fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink()))
        .await
        .unwrap();
}
