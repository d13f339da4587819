//! The checkpoint file.

use crate::{Fixture, GPU, TIMEOUT};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use kubelet_standin::proto::v1beta1::ContainerAllocateResponse;
use kubelet_standin::{CheckpointMode, HEALTHY, PodSpec, TinyPlugin};
use prost::Message;
use serde_json::Value;
use std::{fs, os::unix::fs::MetadataExt};

fn read(fixture: &Fixture) -> Value {
    let bytes = fs::read(fixture.kubelet.checkpoint_path()).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

#[tokio::test]
async fn an_entry_has_the_pod_uid_the_ids_by_numa_node_and_the_plugins_response() {
    let fixture = Fixture::new().await;
    let _plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    assert_eq!(read(&fixture)["Data"]["PodDeviceEntries"], Value::Null);
    let spec = PodSpec::new("default", "p").init("prepare", &[(GPU, 1)]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    let file = read(&fixture);
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
async fn a_purge_leaves_the_checkpoint_stale_until_the_next_list() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec.clone()).await.unwrap();
    fixture.kubelet.delete(&spec.uid);
    let inode = fs::metadata(fixture.kubelet.checkpoint_path()).unwrap().ino();
    crate::pod_resources::list(&fixture).await;
    assert!(fixture.kubelet.in_use(GPU).is_empty());
    assert_eq!(read(&fixture)["Data"]["PodDeviceEntries"][0]["PodUID"], spec.uid.as_str());
    let inode_after = fs::metadata(fixture.kubelet.checkpoint_path()).unwrap().ino();
    assert_eq!(inode, inode_after);
    // Resending the same list writes a new file.
    plugin.send_list(vec![TinyPlugin::device("a", HEALTHY)]);
    fixture
        .kubelet
        .wait_for("a new file", TIMEOUT, |_| read(&fixture)["Data"]["PodDeviceEntries"].is_null())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_kubelet_with_an_unreadable_checkpoint_starts_empty() {
    for mode in [
        CheckpointMode::Garbage,
        CheckpointMode::Truncated,
        CheckpointMode::Folder,
        CheckpointMode::Reshaped,
        CheckpointMode::WrongSum,
    ] {
        let fixture = Fixture::new().await;
        let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
        fixture.kubelet.set_faults(|f| f.checkpoint = mode);
        let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
        fixture.kubelet.admit(spec.clone()).await.unwrap();
        fixture.kubelet.restart().await.unwrap();
        assert_eq!(fixture.kubelet.capacity(GPU), None, "{mode:?}");
        assert!(fixture.kubelet.in_use(GPU).is_empty(), "{mode:?}");
        drop(plugin);
    }
}

#[tokio::test]
async fn the_other_modes_write_the_expected_file() {
    let fixture = Fixture::new().await;
    let plugin = fixture.plugin("a.sock", GPU, &["a"]).await;
    let path = fixture.kubelet.checkpoint_path();
    fixture.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Frozen);
    let frozen = fs::read(&path).unwrap();
    let spec = PodSpec::new("default", "p").container("main", &[(GPU, 1)]);
    fixture.kubelet.admit(spec).await.unwrap();
    assert_eq!(fs::read(&path).unwrap(), frozen);
    fixture.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Newer);
    plugin.send_list(vec![TinyPlugin::device("a", HEALTHY)]);
    fixture.kubelet.wait_for("a newer file", TIMEOUT, |_| read(&fixture)["Version"] == "v2").await.unwrap();
    fixture.kubelet.set_faults(|f| f.checkpoint = CheckpointMode::Symlink);
    plugin.send_list(vec![TinyPlugin::device("a", HEALTHY)]);
    fixture
        .kubelet
        .wait_for("a link", TIMEOUT, |_| fs::symlink_metadata(&path).is_ok_and(|m| m.is_symlink()))
        .await
        .unwrap();
}
