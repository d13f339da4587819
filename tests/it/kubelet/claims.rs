//! The DRA driver: its sockets as the kubelet calls them, and claims from their preparation to their release.

use crate::support::claim_node::{ClaimNode, DRIVER, POOL, dial, result, until_async};
use crate::support::gpus::{MEMORY_MIB, SHARED, gpu, gpu_id};
use crate::support::kubelet_node::{api_server_shows, cordon};
use crate::support::wait::SOON;
use berth_kernel::evidence::pods::{PodsSource, PodsView};
use berth_kernel::grants::allocation::{Allocation, EndReason};
use berth_kernel::grants::claim::{ClaimPod, DeviceResult};
use berth_kernel::hardware::gpu::{Reading, XID};
use berth_kernel::ids::names::{AllocationId, DeviceId};
use berth_kernel::node::command::Command;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::dra::{DraDriver, DriverRegistration, adopt_claims};
use berth_proto::dra::{self, NodePrepareResourcesRequest};
use berth_proto::plugin_registration::registration_client::RegistrationClient;
use berth_proto::plugin_registration::{InfoRequest, RegistrationStatus};
use berth_proto::{v1, v1alpha1};
use futures_util::FutureExt;
use futures_util::future::join_all;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

/// grpc-go sends the escaped path of a unix socket as `:authority` (`encodeAuthority`).
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_watcher_of_plugins_finds_the_driver_by_its_socket() {
    let node = ClaimNode::new().await;
    let socket = node.settings.registration_socket();
    let escaped = socket.display().to_string().replace('/', "%2F");
    let mut client = RegistrationClient::new(dial(&socket, &format!("http://{escaped}")).await);
    let info = client.get_info(InfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", DRIVER));
    assert_eq!(Path::new(&info.endpoint), node.settings.socket());
    assert_eq!(info.supported_versions[0], "v1.DRAPlugin");
    let mut state = node.driver.as_ref().unwrap().registration();
    for (status, expected) in [
        (
            RegistrationStatus { plugin_registered: true, error: String::new() },
            DriverRegistration::Registered,
        ),
        (
            RegistrationStatus { plugin_registered: false, error: "bad".into() },
            DriverRegistration::Failed("the kubelet refused the driver: bad".into()),
        ),
    ] {
        client.notify_registration_status(status).await.unwrap();
        assert_eq!(*state.borrow_and_update(), expected);
    }
    // The file is deleted: the watcher finds the driver again.
    fs::remove_file(&socket).unwrap();
    until_async("the socket is there again", || socket.exists()).await;
    node.driver.unwrap().stop().await;
    assert!(!socket.exists());
}

async fn shows(state: &mut watch::Receiver<DriverRegistration>, wanted: DriverRegistration) -> bool {
    timeout(SOON, state.wait_for(|state| *state == wanted)).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_driver_whose_kubelet_has_ended_is_not_shown_as_registered() {
    let ClaimNode { node: _node, driver, client, settings, .. } = ClaimNode::new().await;
    let socket = settings.registration_socket();
    let mut state = driver.as_ref().unwrap().registration();
    let mut watcher = RegistrationClient::new(dial(&socket, "http://localhost").await);
    let registered = RegistrationStatus { plugin_registered: true, error: String::new() };
    watcher.notify_registration_status(registered).await.unwrap();
    assert!(shows(&mut state, DriverRegistration::Registered).await);
    drop(client);
    assert!(shows(&mut state, DriverRegistration::Disconnected).await, "the kubelet has ended");
    let _connected_again = dial(&settings.socket(), "http://localhost").await;
    assert!(shows(&mut state, DriverRegistration::Registered).await, "only its connection was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn beside_another_driver_of_its_name_the_driver_is_not_registered() {
    let (mut other, mut node) = (ClaimNode::new().await, ClaimNode::new().await);
    node.driver.take().unwrap().stop().await;
    let own = node.settings.registration_socket();
    let foreign = own.with_file_name(format!("{DRIVER}-reg.sock"));
    symlink(other.settings.registration_socket(), &foreign).unwrap();
    let driver = DraDriver::new(node.settings.clone(), node.node.kernel.clone(), node.server.clone()).start();
    let mut state = driver.registration();
    let names_it = |state: &DriverRegistration| matches!(state, DriverRegistration::Failed(why) if why.contains(&foreign.display().to_string()));
    assert!(timeout(SOON, state.wait_for(names_it)).await.is_ok(), "the other driver is named");
    assert!(!own.exists());
    other.driver.take().unwrap().stop().await;
    let waits = timeout(SOON, state.wait_for(|state| *state == DriverRegistration::Waiting)).await;
    assert!(waits.is_ok(), "the other driver has ended");
    assert!(own.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_that_is_prepared_again_keeps_its_ids_and_its_allocation() {
    let node = ClaimNode::new().await;
    let claim = node.claim("a", &[0, 1]);
    let first = node.prepare(&claim).await.unwrap();
    let [one, two] = &node.live()[..] else { panic!("two requests") };
    let own = |allocation: &Allocation| format!("{DRIVER}/berth={}-0", allocation.id);
    assert_eq!(
        first,
        [vec![own(one), "nvidia.com/gpu=GPU-0".into()], vec![own(two), "nvidia.com/gpu=GPU-1".into()]]
    );
    for _ in 0..3 {
        let (again, at_once) = tokio::join!(node.prepare(&claim), node.prepare(&claim));
        assert_eq!((again.as_ref(), at_once.as_ref()), (Ok(&first), Ok(&first)));
    }
    assert_eq!(node.live().len(), 2);
    let text = fs::read_to_string(node.specification(&claim)).unwrap();
    let specification: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(specification["kind"], format!("{DRIVER}/berth"));
    let device = &specification["devices"][0];
    assert_eq!(device["name"], format!("{}-0", one.id));
    let environment = device["containerEdits"]["env"].as_array().unwrap();
    let has = |variable: String| environment.contains(&Value::from(variable));
    assert!(has(format!("BERTH_ALLOCATION_ID_NVIDIA_COM_GPU={}", one.id)), "{environment:?}");
    assert!(has("NVIDIA_VISIBLE_DEVICES=void".into()), "{environment:?}");
    for _ in 0..2 {
        node.unprepare(&claim).await;
    }
    assert!(node.live().is_empty() && !node.specification(&claim).exists());
    let ended = node.node.kernel.snapshot().ended.iter().map(|past| past.end().reason).collect::<Vec<_>>();
    assert_eq!(ended, [EndReason::Released, EndReason::Released]);
    node.unprepare(&dra::Claim { namespace: "ns".into(), uid: "unknown".into(), name: "x".into() }).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_is_prepared_although_another_one_of_the_call_is_not() {
    let node = ClaimNode::new().await;
    let (good, mut gone) = (node.claim("good", &[0]), node.claim("gone", &[1]));
    gone.uid = "uid-of-an-older-claim".into();
    let foreign = node.claim("foreign", &[]);
    let unknown = node.claim("unknown", &[77]);
    let all = [good.clone(), gone.clone(), foreign.clone(), unknown.clone()];
    let answers = node.prepare_all(&all).await;
    let ids = answers[&good.uid].clone().unwrap();
    let error = |claim: &dra::Claim| answers[&claim.uid].clone().unwrap_err();
    assert!(error(&gone).contains("no claim ns/gone with this UID"), "{}", error(&gone));
    assert!(error(&foreign).contains("no device of the driver"), "{}", error(&foreign));
    assert!(error(&unknown).contains("no device gpu-77"), "{}", error(&unknown));
    assert_eq!(node.prepare_all(&all).await[&good.uid], Ok(ids));
    assert_eq!(node.live().len(), 1);
    let path = dra::Claim { namespace: "ns".into(), uid: "../../x".into(), name: "x".into() };
    let request = NodePrepareResourcesRequest { claims: vec![path] };
    let status = node.client.clone().node_prepare_resources(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_waits_for_the_holder_of_its_device_and_names_it_in_the_end() {
    let mut node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    let holder = node.live()[0].id;
    let error = node.prepare(&second).await.unwrap_err();
    assert!(error.contains(&format!("allocation {holder}")), "{error}");
    node.settings.wait_max = SOON;
    node.restart().await;
    let release = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&first).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&second), release);
    prepared.unwrap();
    assert_eq!(node.live()[0].origin.claim().unwrap().claim.name, "second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn an_unprepare_voids_a_prepare_that_still_waits() {
    let node = ClaimNode::waiting(SOON).await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    let overtake = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&second).await;
        node.unprepare(&first).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&second), overtake);
    let error = prepared.unwrap_err();
    assert!(error.contains("has unprepared the claim"), "{error}");
    assert!(node.live().is_empty());
    node.prepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_prepare_that_waits_ends_with_the_driver_and_grants_nothing() {
    let mut node = ClaimNode::waiting(SOON).await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    let (mut client, driver) = (node.client.clone(), node.driver.take().unwrap());
    let stop = async {
        until_async("both claims are read", || node.server.reads.load(Ordering::SeqCst) >= 2).await;
        driver.stop().await;
    };
    let request = NodePrepareResourcesRequest { claims: vec![second] };
    let (answer, ()) = timeout(SOON, async { tokio::join!(client.node_prepare_resources(request), stop) })
        .await
        .expect("the call ends before its wait");
    assert!(answer.is_err(), "{answer:?}");
    let live = node.live();
    assert_eq!(live.len(), 1);
    assert!(live[0].is_of_claim(&first.uid));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn of_a_burst_of_claims_eight_are_read_at_a_time_and_none_fails() {
    let node = ClaimNode::shared(SOON).await;
    let server = &node.server;
    server.is_slow.store(true, Ordering::SeqCst);
    let claims: Vec<dra::Claim> = (0..16).map(|n| node.shares(&format!("c{n}"), &[(n / 4, 1)])).collect();
    let observe = async {
        until_async("eight are read", || server.reads.load(Ordering::SeqCst) >= 8).await;
        sleep(Duration::from_millis(50)).await;
        let reads = server.reads.load(Ordering::SeqCst);
        server.is_slow.store(false, Ordering::SeqCst);
        reads
    };
    let (answers, reads) = tokio::join!(join_all(claims.iter().map(|claim| node.prepare(claim))), observe);
    assert_eq!(reads, 8);
    answers.into_iter().collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(node.live().len(), 16);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn without_the_api_server_a_prepared_claim_is_answered_from_its_record() {
    let node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0, 2]), node.claim("second", &[1]));
    let ids = node.prepare(&first).await.unwrap();
    node.server.is_away.store(true, Ordering::SeqCst);
    assert_eq!(node.prepare(&first).await.unwrap(), ids);
    let error = node.prepare(&second).await.unwrap_err();
    assert!(error.contains("connection refused"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn on_a_full_disk_a_claim_is_unprepared_and_its_device_stays_held_until_that_is_recorded() {
    let node = ClaimNode::new().await;
    let (first, second) = (node.claim("first", &[0]), node.claim("second", &[0]));
    node.prepare(&first).await.unwrap();
    node.node.store_fails.store(true, Ordering::SeqCst);
    node.unprepare(&first).await;
    assert_eq!(node.live().len(), 1);
    assert!(node.prepare(&second).await.is_err());
    node.node.store_fails.store(false, Ordering::SeqCst);
    node.node.wait("the release is recorded", |ledger| ledger.live.is_empty()).await;
    node.prepare(&second).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_whose_files_cannot_be_written_is_prepared_once_they_can() {
    let node = ClaimNode::new().await;
    let (claim, grants) = (node.claim("a", &[0]), node.settings.grants_folder());
    let _ = fs::remove_dir_all(&grants);
    fs::write(&grants, "").unwrap();
    let error = node.prepare(&claim).await.unwrap_err();
    assert!(error.contains("files of the claim") && error.contains(&*grants.to_string_lossy()), "{error}");
    fs::remove_file(&grants).unwrap();
    node.prepare(&claim).await.unwrap();
    assert_eq!(node.live().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn the_specifications_of_prepared_claims_are_always_there() {
    let mut node = ClaimNode::new().await;
    let claim = node.claim("a", &[0]);
    node.prepare(&claim).await.unwrap();
    let (file, stale) =
        (node.specification(&claim), node.settings.cdi_dir.join(format!("{DRIVER}-berth_x.json")));
    let text = fs::read(&file).unwrap();
    fs::remove_file(&file).unwrap();
    until_async("it is written again", || fs::read(&file).is_ok_and(|now| now == text)).await;
    // A reboot empties the folder; the claim of a file that is left has been released.
    fs::remove_file(&file).unwrap();
    fs::write(&stale, "{}").unwrap();
    let foreign = node.settings.cdi_dir.join("nvidia.json");
    fs::write(&foreign, "{}").unwrap();
    node.restart().await;
    until_async("the folder is up to date", || file.exists() && !stale.exists()).await;
    assert!(foreign.exists());
}

/// The file's path on the node names the grant, and the guard reads it there.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn containers_of_a_claim_find_the_attributes_of_their_devices() {
    let mut node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = node.shares("half", &[(0, 2)]);
    {
        let mut claims = node.server.claims.lock().unwrap();
        let half = claims.get_mut("half").unwrap();
        half.pod_claim_name = Some("a-gpu".into());
        half.results[0].request = "gpu/big".into();
    }
    let answer = node.answer(&claim).await;
    assert_eq!(answer.devices[0].request_names, ["gpu"], "the kubelet knows no subrequests");
    node.prepare(&claim).await.unwrap();
    assert_eq!(node.live().len(), 1, "it was prepared already");
    let specification: Value =
        serde_json::from_slice(&fs::read(node.specification(&claim)).unwrap()).unwrap();
    let mounts = &specification["devices"][0]["containerEdits"]["mounts"];
    let mount = &mounts[0];
    // Another claim can have its file at the first path, and none at this one.
    assert_eq!(mounts[1]["containerPath"], format!("/var/run/berth/grants/{}.json", node.live()[0].id));
    assert_eq!(mounts[1]["hostPath"], mount["hostPath"]);
    let folder = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/a-gpu/gpu";
    assert_eq!(mount["containerPath"], format!("{folder}/{DRIVER}-metadata.json"));
    let path = PathBuf::from(mount["hostPath"].as_str().unwrap());
    let grant = format!("{}/{}={}", node.live()[0].id, gpu(0), 2 * (MEMORY_MIB / 4));
    let of_claim = node.settings.grants_folder().join(&claim.uid);
    assert_eq!(path, of_claim.join("gpu").join(grant).join("metadata.json"));
    let text = fs::read_to_string(&path).unwrap();
    let versions: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(versions.len(), 2);
    for version in versions {
        assert_eq!(
            (&version["metadata"]["uid"], &version["podClaimName"]),
            (&json!(claim.uid), &json!("a-gpu"))
        );
        assert_eq!(version["requests"][0]["name"], "gpu/big");
        let device = &version["requests"][0]["devices"][0];
        assert_eq!((&device["name"], &device["pool"]), (&json!("gpu-0-shared"), &json!(POOL)));
        assert_eq!(device["attributes"]["uuid"], json!({"string": gpu(0).as_str()}));
    }
    fs::remove_dir_all(node.settings.grants_folder()).unwrap();
    fs::create_dir_all(node.settings.grants_folder().join("uid-of-none")).unwrap();
    node.restart().await;
    until_async("the files are up to date", || {
        fs::read_to_string(&path).is_ok_and(|now| now == text)
            && !node.settings.grants_folder().join("uid-of-none").exists()
    })
    .await;
    node.unprepare(&claim).await;
    assert!(!of_claim.exists());
}

/// The kubelet does not have a claim prepared again while its containers run, so a daemon without its store reads the records.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_daemon_whose_store_was_lost_adopts_prepared_claims_and_their_gpus() {
    let first = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = first.shares("half", &[(0, 2)]);
    let ids = first.prepare(&claim).await.unwrap();
    let grants = first.settings.grants_folder();
    // Records that are not adopted: a damaged one, one in a folder that is not its claim's, and one whose UID is not valid. The
    // file `stray` is not Berth's.
    let record = fs::read_to_string(grants.join(&claim.uid).join("claim.json")).unwrap();
    let (id, more) = (first.live()[0].id, AllocationId { number: 99, ..first.live()[0].id });
    let record = record.replace(&id.to_string(), &more.to_string()).replace(gpu(0).as_str(), gpu(1).as_str());
    assert!(record.contains(&more.to_string()) && record.contains(gpu(1).as_str()), "{record}");
    for (folder, text) in
        [("damaged", "{}"), ("other", &*record), ("a.b", &*record.replace(&claim.uid, "a.b"))]
    {
        fs::create_dir_all(grants.join(folder)).unwrap();
        fs::write(grants.join(folder).join("claim.json"), text).unwrap();
    }
    fs::write(grants.join("stray"), "").unwrap();
    let second = ClaimNode::shared(Duration::from_millis(200)).await;
    let author = berth_kernel::drain::marks::Author::api("ada".into(), String::new());
    let order = Command::SetVia { gpu: gpu_id(0), api: KubeletApi::DevicePlugin, author };
    second.node.kernel.execute(order).await.unwrap();
    second.node.clock.skip(30_000);
    second.node.kernel.execute(Command::FinishMove { gpu: gpu_id(0) }).await.unwrap();
    assert_eq!(adopt_claims(grants.clone(), &second.node.kernel).await, Ok(1));
    assert_eq!(adopt_claims(grants.clone(), &second.node.kernel).await, Ok(0), "it is known");
    assert_eq!(second.node.kernel.snapshot().gpus[&gpu_id(0)].via.api, KubeletApi::Dra);
    let (granted, adopted) = (&first.live()[0], &second.live()[0]);
    assert_eq!(
        (granted.id, &granted.devices, &granted.origin),
        (adopted.id, &adopted.devices, &adopted.origin)
    );
    assert_eq!(adopted.decision.limits.memory_mib, Some(2 * (MEMORY_MIB / 4)));
    second.shares("half", &[(0, 2)]);
    assert_eq!(
        second.prepare(&claim).await,
        Ok(ids),
        "a container starts again with the ids that the kubelet kept"
    );
    second.unprepare(&claim).await;
    assert_eq!(adopt_claims(grants, &second.node.kernel).await, Ok(0), "it has ended");
    assert_eq!(second.live(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_cordon_comes_too_late_for_a_claim_and_an_unhealthy_gpu_refuses_it() {
    let node = ClaimNode::new().await;
    node.node.kernel.execute(cordon(gpu_id(0), "fan")).await.unwrap();
    node.prepare(&node.claim("a", &[0])).await.unwrap();
    lose(&node, 1).await;
    let error = node.prepare(&node.claim("b", &[1])).await.unwrap_err();
    assert!(error.contains("unhealthy"), "{error}");
}

/// An XID makes the GPU unhealthy.
async fn lose(node: &ClaimNode, index: u32) {
    let reading = Reading { part: gpu(index), source: XID.into(), code: 79, detail: String::new() };
    node.node.kernel.submit_reading(reading).unwrap();
    node.node
        .wait("the GPU is unhealthy", |ledger| !ledger.gpus[&gpu_id(index)].health.state.is_usable())
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn both_streams_of_health_show_every_device_and_each_change_until_the_driver_stops() {
    let node = ClaimNode::new().await;
    let channel = dial(&node.settings.socket(), "http://localhost").await;
    let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(channel.clone());
    let request = v1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.unwrap().into_inner();
    let health = |message: v1::NodeWatchResourcesResponse| -> BTreeMap<String, (i32, String)> {
        let of = |device: v1::DeviceHealth| {
            let id = device.device.unwrap();
            assert_eq!(id.pool_name, POOL);
            (id.device_name, (device.health, device.message))
        };
        message.devices.into_iter().map(of).collect()
    };
    let first = health(stream.message().await.unwrap().unwrap());
    assert_eq!(first.len(), 4);
    assert!(first.values().all(|(health, _)| *health == v1::HealthStatus::Healthy as i32), "{first:?}");
    lose(&node, 1).await;
    let second = loop {
        let next = health(stream.message().await.unwrap().unwrap());
        if next != first {
            break next;
        }
    };
    assert_eq!(second["gpu-1"].0, v1::HealthStatus::Unhealthy as i32);
    assert!(second["gpu-1"].1.contains("79"), "{second:?}");
    let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
    let request = v1alpha1::NodeWatchResourcesRequest {};
    let mut stream = client.node_watch_resources(request).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().devices.len(), 4);
    // An open stream would keep the ledger's thread from ending.
    node.driver.unwrap().stop().await;
    let ended = async { while let Ok(Some(_)) = stream.message().await {} };
    timeout(SOON, ended).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_gpu_of_the_device_plugin_is_granted_to_no_claim() {
    let node = ClaimNode::new().await;
    let claim = node.claim("a", &[0]);
    node.prepare(&claim).await.unwrap();
    let author = berth_kernel::drain::marks::Author::api("ada".into(), String::new());
    let order = Command::SetVia { gpu: gpu_id(0), api: KubeletApi::DevicePlugin, author };
    node.node.kernel.execute(order).await.unwrap();
    // It is prepared already, and the kubelet has restarted.
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await;
    node.node.clock.skip(30_000);
    node.node.kernel.execute(Command::FinishMove { gpu: gpu_id(0) }).await.unwrap();
    let error = node.prepare(&claim).await.unwrap_err();
    assert!(error.contains("via"), "{error}");
}

/// A release that was lost with the daemon: the kubelet does not repeat its call.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_that_the_api_server_has_no_more_is_released_after_a_time() {
    let node = ClaimNode::new().await;
    let (gone, kept) = (node.claim("gone", &[0]), node.claim("kept", &[1]));
    node.prepare(&gone).await.unwrap();
    node.prepare(&kept).await.unwrap();
    node.server.claims.lock().unwrap().remove("gone");
    node.node.wait("the claim is released", |ledger| ledger.live.len() == 1).await;
    assert_eq!(node.live()[0].origin.claim().unwrap().claim.name, "kept");
    until_async("its specification is removed", || !node.specification(&gone).exists()).await;
    // Without an answer nothing is known.
    node.server.is_away.store(true, Ordering::SeqCst);
    sleep(Duration::from_millis(600)).await;
    assert_eq!(node.live().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_whose_pod_runs_is_not_read_again() {
    let node = ClaimNode::new().await;
    let claim = node.claim("used", &[0]);
    let view = api_server_shows("pod-of-used", false);
    node.node.kernel.execute(Command::Pods(view)).await.unwrap();
    node.prepare(&claim).await.unwrap();
    // Ten checks for claims that are gone.
    sleep(node.settings.gone_after).await;
    assert_eq!(node.server.reads.load(Ordering::SeqCst), 1, "only the call to prepare it read it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn claims_get_different_shares_of_a_gpu_until_none_is_free() {
    let mut node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claims: Vec<dra::Claim> = (0..4).map(|n| node.shares(&format!("c{n}"), &[(0, 1)])).collect();
    let answers = join_all(claims.iter().map(|claim| node.prepare(claim))).await;
    let ids: Vec<Vec<Vec<String>>> = answers.into_iter().collect::<Result<_, _>>().unwrap();
    for (claim, ids) in claims.iter().zip(&ids) {
        let own = node.live().into_iter().find(|allocation| allocation.is_of_claim(&claim.uid)).unwrap();
        assert_eq!(own.resource.as_str(), SHARED);
        let of_allocation = format!("{DRIVER}/berth={}-0", own.id);
        assert_eq!(*ids, [[of_allocation, "nvidia.com/gpu=GPU-0".into()]]);
        assert_eq!(node.prepare(claim).await.as_ref(), Ok(ids), "again");
    }
    let held: BTreeSet<DeviceId> = claims.iter().flat_map(|claim| node.held_shares(claim)).collect();
    assert_eq!(held.len(), 4, "{held:?}");
    let fifth = node.shares("fifth", &[(0, 1)]);
    let error = node.prepare(&fifth).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.settings.wait_max = SOON;
    node.restart().await;
    let free = node.held_shares(&claims[2]);
    let release = async {
        sleep(Duration::from_millis(100)).await;
        node.unprepare(&claims[2]).await;
    };
    let (prepared, ()) = tokio::join!(node.prepare(&fifth), release);
    prepared.unwrap();
    assert_eq!(node.held_shares(&fifth), free);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_gets_as_many_shares_as_its_memory_takes_and_keeps_them() {
    let node = ClaimNode::shared(Duration::from_millis(200)).await;
    // Two requests for one GPU and one for another, which the scheduler puts into one claim.
    let claim = node.shares("big", &[(0, 2), (0, 1), (1, 3)]);
    let first = node.prepare(&claim).await.unwrap();
    assert_eq!(first.len(), 3, "an answer for each device: {first:?}");
    assert_ne!(first[0][0], first[1][0], "each with its own shares");
    let held = node.held_shares(&claim);
    let of = |index: u32| held.iter().filter(|id| id.part == gpu(index)).count();
    assert_eq!((of(0), of(1)), (3, 3));
    assert_eq!(node.prepare(&claim).await, Ok(first));
    assert_eq!(node.held_shares(&claim), held);
    let devices = node.answer(&claim).await.devices;
    let shown: Vec<_> =
        devices.iter().map(|device| (device.device_name.as_str(), device.share_id())).collect();
    assert_eq!(
        shown,
        [("gpu-0-shared", "share-big-0"), ("gpu-0-shared", "share-big-1"), ("gpu-1-shared", "share-big-2")]
    );
    // What is left of GPU 0 is one share.
    let error = node.prepare(&node.shares("two", &[(0, 2)])).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.prepare(&node.shares("one", &[(0, 1)])).await.unwrap();
    let error = node.prepare(&node.shares("five", &[(2, 5)])).await.unwrap_err();
    assert!(error.contains("5 shares of the device gpu-2-shared, which has 4 now"), "{error}");
    let unread = DeviceResult {
        consumed: [("memory".to_owned(), u64::MAX)].into(),
        share_id: Some("s".into()),
        ..result("gpu-2-shared")
    };
    let error = node.prepare(&node.allocated("unread", vec![unread])).await.unwrap_err();
    assert!(error.contains("which has 4 now"), "{error}");
    let counted = DeviceResult {
        consumed: [("shares".to_owned(), 2)].into(),
        share_id: Some("s".into()),
        ..result("gpu-2-shared")
    };
    let error = node.prepare(&node.allocated("counted", vec![counted])).await.unwrap_err();
    assert!(error.contains("another capacity than the device gpu-2-shared has now"), "{error}");
    // Without the API server the record names the device once for all shares of a request.
    node.server.is_away.store(true, Ordering::SeqCst);
    let names: Vec<String> =
        node.answer(&claim).await.devices.into_iter().map(|device| device.device_name).collect();
    assert_eq!(names, ["gpu-0-shared", "gpu-1-shared"]);
}

/// A changed offer takes nothing from a claim that holds a share, and a claim for what is gone is refused with a reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_claim_keeps_shares_whose_size_changes_or_that_are_offered_no_more() {
    let node = ClaimNode::shared(Duration::from_millis(200)).await;
    let claim = node.shares("kept", &[(0, 2)]);
    let first = node.prepare(&claim).await.unwrap();
    let held = node.held_shares(&claim);
    // By the new size its memory would be four shares.
    node.node.activate("shares=8").await;
    assert_eq!(node.prepare(&claim).await.as_ref(), Ok(&first));
    assert_eq!(node.held_shares(&claim), held);
    node.node.activate("whole").await;
    assert_eq!(node.prepare(&claim).await, Ok(first));
    let error = node.prepare(&node.shares("late", &[(1, 1)])).await.unwrap_err();
    assert!(error.contains("publishes no device gpu-1-shared"), "{error}");
    let error = node.prepare(&node.claim("whole", &[0])).await.unwrap_err();
    assert!(error.contains("holds its GPU"), "{error}");
    node.unprepare(&claim).await;
    node.prepare(&node.claim("whole", &[0])).await.unwrap();
}

/// The kubelet calls the driver only for the first pod of a claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pod_that_begins_to_use_a_prepared_claim_is_recorded() {
    let node = ClaimNode::new().await;
    let claim = node.claim("common", &[0]);
    node.prepare(&claim).await.unwrap();
    let id = node.live()[0].id;
    let show = |uids: &[&str]| {
        let mut view =
            PodsView { current: true, listed_mono_ms: 1, ..PodsView::empty(PodsSource::ApiServer) };
        for uid in uids {
            let mut shown = (*api_server_shows(uid, false).pods[*uid]).clone();
            (shown.namespace, shown.named_claims) = ("ns".into(), vec!["common".into()]);
            view.pods.insert((*uid).into(), Arc::new(shown));
        }
        node.node.kernel.execute(Command::Pods(view)).map(Result::unwrap)
    };
    let recorded = |ledger: &Ledger| -> Vec<String> {
        let claim = ledger.live[&id].origin.claim().unwrap();
        claim.pods.iter().map(|pod| pod.uid.clone()).collect()
    };
    let reserve = |uids: &[&str]| {
        let pods = uids.iter().map(|uid| ClaimPod { uid: (*uid).into(), name: (*uid).into() });
        node.server.claims.lock().unwrap().get_mut("common").unwrap().pods = pods.collect();
    };
    // The node has the second pod before the claim is reserved for it.
    show(&["pod-of-common", "second"]).await;
    until_async("the claim is read", || node.server.reads.load(Ordering::SeqCst) > 1).await;
    reserve(&["pod-of-common", "second"]);
    node.node.wait("both pods are recorded", |ledger| recorded(ledger) == ["pod-of-common", "second"]).await;
    // The first one has ended while the disk was full.
    node.node.store_fails.store(true, Ordering::SeqCst);
    reserve(&["second"]);
    let reads = node.server.reads.load(Ordering::SeqCst);
    show(&["second"]).await;
    until_async("the claim is read", || node.server.reads.load(Ordering::SeqCst) > reads).await;
    node.node.store_fails.store(false, Ordering::SeqCst);
    node.node.wait("the second pod is recorded", |ledger| recorded(ledger) == ["second"]).await;
    // A claim of the same name with another UID is not this one.
    node.server.claims.lock().unwrap().get_mut("common").unwrap().claim.uid = "another".into();
    let reads = node.server.reads.load(Ordering::SeqCst);
    show(&["second", "third"]).await;
    until_async("the claim is read", || node.server.reads.load(Ordering::SeqCst) > reads).await;
    show(&["second", "third", "fourth"]).await;
    until_async("the claim is read again", || node.server.reads.load(Ordering::SeqCst) > reads + 1).await;
    assert_eq!(recorded(&node.node.kernel.snapshot()), ["second"]);
    // Recording a pod of a claim that was unprepared grants nothing.
    node.unprepare(&claim).await;
    let pods = vec![ClaimPod { uid: "second".into(), name: "second".into() }];
    node.node.kernel.execute(Command::RecordClaimPods { claim: claim.uid, pods }).await.unwrap();
    assert!(node.live().is_empty());
}
