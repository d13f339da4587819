//! Golden records as release 0.1 writes them, and malformed records.

use super::*;
use berth_kernel::drain::marks::{
    AtDeadline, MARKS_MAX, MARKS_TEXT_BYTES_MAX, Mark, MarkKind, Marks, Order, Owner,
};
use berth_kernel::grants::allocation::{
    Allocation, DEVICES_PER_ALLOCATION_MAX, Decision, End, EndReason, GrantOrigin, Holder, Limits,
};
use berth_kernel::grants::claim::{Claim, ClaimPod, ClaimRequest};
use berth_kernel::hardware::gpu::{Mig, Part, Reading};
use berth_kernel::hardware::health::{HEALTH_HISTORY_MAX, HealthState, PastHealth};
use berth_kernel::hardware::judgement::{JUDGEMENTS_MAX, Judgement};
use berth_kernel::hardware::triage::Severity;
use berth_kernel::ids::names::{DeviceId, GpuId, PartId, Resource};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::node::record::{DeviceRun, HealthRecord, Meta, PartRecord, StackHead};
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::stack::{
    FailedRevision, FleetRevision, OnFault, Permissions, StackEntry, StackOrigin,
};
use berth_kernel::policy::version::{Origin, PolicyVersion, Signature};
use berth_kernel::sharing::offer::{Consumes, OfferLine, ShareRange};
use berth_kernel::sharing::via::{KubeletApi, Via};
use std::sync::Arc;

/// Stores on nodes contain these bytes: if this test fails, raise `FORMAT` and keep reading this form.
#[test]
fn golden_records_of_format_3() {
    for (key, value, record) in golden() {
        let bytes = [&[3], value.as_bytes()].concat();
        assert_eq!(key_bytes(&record.key()), key, "{record:?}");
        let written = encode(&record).unwrap();
        assert_eq!(String::from_utf8(written[1..].to_vec()).unwrap(), value, "{record:?}");
        assert_eq!(written, bytes);
        assert_eq!(decode(&key, &bytes).unwrap(), record);
    }
}

/// Earlier releases wrote these bytes.
#[test]
fn golden_records_of_format_2() {
    for (key, value, record) in golden() {
        let bytes = [&[2], value.as_bytes()].concat();
        assert_eq!(decode(&key, &bytes).unwrap(), record);
    }
}

/// Earlier releases wrote these bytes.
#[test]
fn golden_records_of_format_1() {
    let unchanged = golden().into_iter().filter(|(_, _, record)| !matches!(record, Record::Marks(..)));
    for (key, value, record) in unchanged.chain(golden_marks_of_format_1()) {
        let bytes = [&[1], value.as_bytes()].concat();
        assert_eq!(decode(&key, &bytes).unwrap(), record);
    }
}

/// Marks as format 1 stored them, and what they are read as.
fn golden_marks_of_format_1() -> Vec<Golden> {
    let golden = |gpu: &str, value, mark, drained_wall_ms| {
        let marks = Marks { by_owner: [(Owner::operator(), mark)].into(), drained_wall_ms };
        ([&[3], gpu.as_bytes()].concat(), value, Record::Marks(GpuId::parse(gpu).unwrap(), marks))
    };
    let order =
        Order { evict: true, deadline_wall_ms: Some(9), at_deadline: AtDeadline::GiveUp, ..Order::default() };
    let drain = |order| Mark { kind: MarkKind::Drain(order), ..Mark::cordon("admin", "", 5) };
    vec![
        golden(
            "GPU-1",
            r#"{"cordoned":{"by":"admin","why":"fan \"rattles\"","sinceMs":5}}"#,
            Mark::cordon("admin", "fan \"rattles\"", 5),
            None,
        ),
        golden(
            "GPU-2",
            r#"{"draining":[{"by":"admin","why":"","sinceMs":5},{"evict":true,"deadlineMs":9,"atDeadline":"giveUp"}]}"#,
            drain(order),
            None,
        ),
        golden(
            "GPU-3",
            r#"{"drained":{"by":"admin","why":"","sinceMs":5}}"#,
            drain(Order::default()),
            Some(5),
        ),
        golden(
            "GPU-4",
            r#"{"cordoned":{"by":"admin","why":"fan; drain given up at its deadline","sinceMs":5}}"#,
            Mark { expired: true, ..Mark::cordon("admin", "fan", 5) },
            None,
        ),
    ]
}

const DIGEST_A: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const DIGEST_B: &str = "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";

/// Key, value without its format byte, and the record.
type Golden = (Vec<u8>, &'static str, Record);

fn golden() -> Vec<Golden> {
    let gpu = GpuId::parse("GPU-1").unwrap();
    let named = |kind: u8, name: &str| [&[kind], name.as_bytes()].concat();
    let shared = Resource::parse("nvidia.com/gpu.shared").unwrap();
    let slice = Consumes::Slice { memory_mib: 8192, compute_percent: 10 };
    let run =
        |first, len, retiring| DeviceRun { resource: shared.clone(), first, len, consumes: slice, retiring };
    vec![
        (
            vec![1],
            r#"{"store":3735928559,"next":18,"kubeletSeenMs":1700000000000}"#,
            Record::Meta(Meta {
                store: 0xdead_beef,
                next_number: 18,
                kubelet_seen_wall_ms: Some(1_700_000_000_000),
            }),
        ),
        (
            named(2, "MIG-1"),
            r#"{"parent":"GPU-1","vendor":"nvidia","model":"NVIDIA H100 80GB HBM3","index":3,"minor":4,"memoryMib":9984,"pciBus":"00000000:65:00.0","numa":1,"mig":{"profile":"1g.10gb","gpuInstance":7,"computeInstance":0},"attributes":{"architecture":"hopper"},"offeredBy":"timeslice@001122334455","lines":[{"resource":"nvidia.com/gpu.shared","count":4,"consumes":{"slice":[8192,10]}}],"ranges":[{"resource":"nvidia.com/gpu.shared","first":0,"len":4}],"devices":[{"resource":"nvidia.com/gpu.shared","consumes":{"slice":[8192,10]},"runs":[[0,3,false],[3,1,true]]},{"resource":"nvidia.com/gpu","consumes":"whole","runs":[[null,1,false]]}]}"#,
            Record::Part(PartRecord {
                part: Part {
                    id: PartId::parse("MIG-1").unwrap(),
                    gpu: gpu.clone(),
                    vendor: "nvidia".into(),
                    model: "NVIDIA H100 80GB HBM3".into(),
                    gpu_index: 3,
                    minor: Some(4),
                    memory_mib: 9984,
                    pci_bus: PciBusId::parse("00000000:65:00.0").ok(),
                    numa_node: Some(1),
                    mig_enabled: false,
                    mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
                    attributes: [("architecture".into(), "hopper".into())].into(),
                },
                offered_by: Some("timeslice@001122334455".into()),
                lines: vec![OfferLine { resource: shared.clone(), count: 4, consumes: slice }],
                ranges: vec![ShareRange { resource: shared.clone(), first: 0, len: 4 }],
                runs: vec![
                    run(Some(0), 3, false),
                    run(Some(3), 1, true),
                    DeviceRun {
                        resource: Resource::parse("nvidia.com/gpu").unwrap(),
                        first: None,
                        len: 1,
                        consumes: Consumes::Whole,
                        retiring: false,
                    },
                ],
            }),
        ),
        (
            named(3, "GPU-1"),
            r#"{"marks":[{"owner":"api:admin","by":"admin","why":"fan \"rattles\"","sinceMs":5,"expired":true},{"owner":"operator","by":"root","sinceMs":6}]}"#,
            Record::Marks(
                gpu.clone(),
                Marks {
                    by_owner: [
                        (
                            Owner::api("admin"),
                            Mark { expired: true, ..Mark::cordon("admin", "fan \"rattles\"", 5) },
                        ),
                        (Owner::operator(), Mark::cordon("root", "", 6)),
                    ]
                    .into(),
                    drained_wall_ms: None,
                },
            ),
        ),
        (
            vec![4, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, 0, 0, 0, 17],
            r#"{"resource":"nvidia.com/gpu.shared","devices":[{"part":"GPU-1","shares":[0,1,[4,3]]},{"part":"GPU-2","shares":[null]}],"grantedMs":9,"holder":{"namespace":"ml","pod":"train-0","uid":"u-1","container":"main"},"overlapped":true,"by":["quota@001122334455"],"reason":"within quota","environment":[["A","1"]],"memoryMib":8192,"computePercent":10,"ended":{"reason":"neverStarted","ms":12}}"#,
            Record::Allocation(Allocation {
                id: AllocationId { store: 0xdead_beef, number: 17 },
                resource: shared,
                devices: [0, 1, 4, 5, 6]
                    .map(|n| DeviceId::share(gpu.as_part(), n))
                    .into_iter()
                    .chain([DeviceId::whole(&PartId::parse("GPU-2").unwrap())])
                    .collect(),
                granted_wall_ms: 9,
                origin: GrantOrigin::DevicePlugin,
                holder: Holder {
                    namespace: Some("ml".into()),
                    pod: Some("train-0".into()),
                    pod_uid: Some("u-1".into()),
                    container: Some("main".into()),
                },
                overlapped: true,
                decision: Decision {
                    by: vec!["quota@001122334455".into()],
                    reason: "within quota".into(),
                    environment: vec![("A".into(), "1".into())],
                    limits: Limits { memory_mib: Some(8192), compute_percent: Some(10) },
                },
                ended: Some(End { reason: EndReason::NeverStarted, wall_ms: 12 }),
            }),
        ),
        (
            vec![4, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, 0, 0, 0, 18],
            r#"{"resource":"nvidia.com/gpu","devices":[{"part":"GPU-2","shares":[null]}],"grantedMs":9,"claim":{"uid":"c-1","namespace":"ml","name":"train","request":"gpu","pods":[["u-1","train-0"]]},"holder":{"namespace":"ml","pod":"train-0","uid":"u-1"},"by":["baseline"]}"#,
            Record::Allocation(claimed()),
        ),
        (
            named(5, DIGEST_A),
            r#"{"name":"quota","version":"1.2.3","summary":"One sentence.","hooks":["offer","admit"],"schema":"{}","artifact":"ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100","bytes":40000,"shipped":true,"sinceMs":6}"#,
            Record::Policy(PolicyVersion {
                name: "quota".into(),
                version: "1.2.3".into(),
                summary: "One sentence.".into(),
                hooks: vec![Hook::Offer, Hook::Admit],
                parameters_schema: "{}".into(),
                digest: Digest::parse(DIGEST_A).unwrap(),
                artifact: Digest::parse(DIGEST_B).unwrap(),
                bytes: 40_000,
                shipped: true,
                since_wall_ms: 6,
                origin: Origin::default(),
            }),
        ),
        (
            vec![6],
            r#"{"revision":2,"fromApi":true,"by":"admin","sinceMs":7,"entries":1}"#,
            Record::Stack(StackHead {
                revision: 2,
                origin: StackOrigin::Api,
                failed: None,
                by: "admin".into(),
                why: String::new(),
                since_wall_ms: 7,
                entries: 1,
            }),
        ),
        (
            vec![7, 0, 0, 0, 0, 0, 0, 0, 1],
            r#"{"name":"quota","digest":"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff","parameters":"{\"n\":1}","mayDeny":true,"shareMax":10,"resources":["nvidia.com/*"],"environment":["A"],"onFault":"skip"}"#,
            Record::StackEntry(
                1,
                StackEntry {
                    name: "quota".into(),
                    digest: Digest::parse(DIGEST_A).unwrap(),
                    parameters: "{\"n\":1}".into(),
                    permissions: Permissions {
                        deny: true,
                        share_max: 10,
                        resources: vec!["nvidia.com/*".into()],
                        environment: vec!["A".into()],
                    },
                    on_fault: OnFault::Skip,
                },
            ),
        ),
        (
            named(3, "GPU-2"),
            r#"{"marks":[{"owner":"api:admin","by":"admin","sinceMs":5,"drain":{"evict":true,"deadlineMs":9,"atDeadline":"giveUp"}}],"drainedMs":7}"#,
            Record::Marks(
                GpuId::parse("GPU-2").unwrap(),
                Marks {
                    by_owner: [(
                        Owner::api("admin"),
                        Mark {
                            kind: MarkKind::Drain(Order {
                                evict: true,
                                deadline_wall_ms: Some(9),
                                at_deadline: AtDeadline::GiveUp,
                                ..Order::default()
                            }),
                            ..Mark::cordon("admin", "", 5)
                        },
                    )]
                    .into(),
                    drained_wall_ms: Some(7),
                },
            ),
        ),
        (
            named(8, "GPU-1"),
            r#"{"state":"unhealthy","reason":"XID 79","sinceMs":6,"quietMs":300000,"before":[{"state":"healthy","sinceMs":5}]}"#,
            Record::Health(HealthRecord {
                gpu,
                state: HealthState::Unhealthy,
                reason: "XID 79".into(),
                since_wall_ms: 6,
                quiet_ms: Some(300_000),
                until_reset: false,
                history: vec![PastHealth {
                    state: HealthState::Healthy,
                    reason: String::new(),
                    since_wall_ms: 5,
                }],
                judgements: Vec::new(),
            }),
        ),
        (
            named(8, "GPU-2"),
            r#"{"state":"unhealthy","reason":"XID 48","sinceMs":6,"untilReset":true,"before":[{"state":"healthy","sinceMs":5}]}"#,
            Record::Health(HealthRecord {
                gpu: GpuId::parse("GPU-2").unwrap(),
                state: HealthState::Unhealthy,
                reason: "XID 48".into(),
                since_wall_ms: 6,
                quiet_ms: None,
                until_reset: true,
                history: vec![PastHealth {
                    state: HealthState::Healthy,
                    reason: String::new(),
                    since_wall_ms: 5,
                }],
                judgements: Vec::new(),
            }),
        ),
        (
            named(8, "GPU-3"),
            r#"{"state":"unhealthy","reason":"as I see it","sinceMs":6,"judged":[{"by":"baseline","severity":"unhealthy","reason":"lost","quietMs":300000},{"part":"GPU-3","source":"xid","code":13,"detail":"an exception","by":"own@001122334455","revision":4,"severity":"unhealthy","reason":"as I see it"}]}"#,
            Record::Health(HealthRecord {
                gpu: GpuId::parse("GPU-3").unwrap(),
                state: HealthState::Unhealthy,
                reason: "as I see it".into(),
                since_wall_ms: 6,
                quiet_ms: None,
                until_reset: false,
                history: Vec::new(),
                judgements: vec![
                    Judgement {
                        reading: None,
                        by: Decider::Baseline,
                        revision: 0,
                        severity: Severity::Unhealthy,
                        reason: "lost".into(),
                        quiet_ms: Some(300_000),
                        at_mono_ms: 0,
                    },
                    Judgement {
                        reading: Some(Reading {
                            part: PartId::parse("GPU-3").unwrap(),
                            source: "xid".into(),
                            code: 13,
                            detail: "an exception".into(),
                        }),
                        by: Decider::Policy("own@001122334455".into()),
                        revision: 4,
                        severity: Severity::Unhealthy,
                        reason: "as I see it".into(),
                        quiet_ms: None,
                        at_mono_ms: 0,
                    },
                ],
            }),
        ),
        (
            named(5, DIGEST_B),
            r#"{"name":"own","version":"1.0.0","summary":"","hooks":["admit"],"schema":"{}","artifact":"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff","bytes":7,"shipped":false,"sinceMs":6,"by":"alice","why":"a try","signature":"AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQ==","signedBy":"release","onceShipped":true}"#,
            Record::Policy(PolicyVersion {
                name: "own".into(),
                version: "1.0.0".into(),
                summary: String::new(),
                hooks: vec![Hook::Admit],
                parameters_schema: "{}".into(),
                digest: Digest::parse(DIGEST_B).unwrap(),
                artifact: Digest::parse(DIGEST_A).unwrap(),
                bytes: 7,
                shipped: false,
                since_wall_ms: 6,
                origin: Origin {
                    by: "alice".into(),
                    why: "a try".into(),
                    signature: Some(Signature([1; 64])),
                    signed_by: Some("release".into()),
                    once_shipped: true,
                },
            }),
        ),
        (
            vec![9, 0, 0, 0, 0, 0, 0, 0, 3],
            r#"{"revision":3,"fromApi":false,"fleet":{"policy":"team-share","revision":"3f9c01ab77de","attempt":1},"settled":true,"failed":{"fleet":{"policy":"team-share","revision":"77aa00b1c2d3","attempt":2},"reason":"it traps"},"by":"team-share","sinceMs":9,"entries":0}"#,
            Record::PastStack(StackHead {
                revision: 3,
                origin: StackOrigin::Fleet {
                    revision: FleetRevision {
                        policy: "team-share".into(),
                        revision: "3f9c01ab77de".into(),
                        attempt: 1,
                    },
                    is_settled: true,
                },
                failed: Some(Box::new(FailedRevision {
                    revision: FleetRevision {
                        policy: "team-share".into(),
                        revision: "77aa00b1c2d3".into(),
                        attempt: 2,
                    },
                    reason: "it traps".into(),
                })),
                by: "team-share".into(),
                why: String::new(),
                since_wall_ms: 9,
                entries: 0,
            }),
        ),
        (
            vec![9, 0, 0, 0, 0, 0, 0, 0, 4],
            r#"{"revision":4,"fromApi":false,"breakGlassUntilMs":7200000,"by":"alice","why":"an outage","sinceMs":9,"entries":0}"#,
            Record::PastStack(StackHead {
                revision: 4,
                origin: StackOrigin::BreakGlass { until_wall_ms: 7_200_000 },
                failed: None,
                by: "alice".into(),
                why: "an outage".into(),
                since_wall_ms: 9,
                entries: 0,
            }),
        ),
        (
            vec![9, 0, 0, 0, 0, 0, 0, 0, 1],
            r#"{"revision":1,"fromApi":false,"by":"config","why":"as it was","sinceMs":4,"entries":1}"#,
            Record::PastStack(StackHead {
                revision: 1,
                origin: StackOrigin::File,
                failed: None,
                by: "config".into(),
                why: "as it was".into(),
                since_wall_ms: 4,
                entries: 1,
            }),
        ),
        (
            vec![10, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 2],
            r#"{"name":"quota","digest":"00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff","parameters":"{}","mayDeny":false,"shareMax":4,"resources":[],"environment":[],"onFault":"deny"}"#,
            Record::PastStackEntry(
                1,
                2,
                StackEntry {
                    name: "quota".into(),
                    digest: Digest::parse(DIGEST_A).unwrap(),
                    parameters: "{}".into(),
                    permissions: Permissions {
                        deny: false,
                        share_max: 4,
                        resources: vec![],
                        environment: vec![],
                    },
                    on_fault: OnFault::Deny,
                },
            ),
        ),
        (
            named(11, "GPU-1"),
            r#"{"api":"dra","moving":true,"by":"ann","why":"new jobs","sinceMs":7}"#,
            Record::Via(
                GpuId::parse("GPU-1").unwrap(),
                Via {
                    api: KubeletApi::Dra,
                    moving: true,
                    by: "ann".into(),
                    why: "new jobs".into(),
                    since_wall_ms: 7,
                    since_mono_ms: 0,
                },
            ),
        ),
    ]
}

#[test]
fn a_later_format_is_distinguished_from_damage() {
    let (key, _, record) = golden().remove(3);
    let mut value = encode(&record).unwrap();
    value[0] = FORMAT + 1;
    assert_eq!(decode(&key, &value), Err(DecodeError::Newer(FORMAT + 1)));
    value[0] = 0;
    let Err(DecodeError::Malformed(what)) = decode(&key, &value) else {
        panic!("format 0 was read");
    };
    assert!(what.contains("deadbeef-17"), "{what}");
    let Err(DecodeError::Malformed(what)) = decode(&key, &value[..0]) else {
        panic!("an empty record was read");
    };
    assert!(what.contains("deadbeef-17"), "{what}");
}

/// A damaged number must neither create millions of devices nor change a record's meaning.
#[test]
fn errors_of_malformed_records_name_the_record() {
    let allocation = golden().remove(3);
    let part = golden().remove(1);
    let swaps: [(&Golden, &str, &str, &str); 7] = [
        (&allocation, "[4,3]", "[4,4294967295]", "deadbeef-17"),
        (&allocation, "[4,3]", "[4,65000]", "deadbeef-17"),
        (&allocation, "[0,1,", "[-1,1,", "deadbeef-17"),
        (&allocation, "neverStarted", "neverstarted", "deadbeef-17"),
        (&allocation, "overlapped", "overlooked", "deadbeef-17"),
        (&part, "[0,3,false]", "[0,4294967295,false]", "MIG-1"),
        (&part, "[null,1,false]", "[null,2,false]", "MIG-1"),
    ];
    for ((key, value, _), from, to, name) in swaps {
        assert!(value.contains(from), "{from}");
        let mut bytes = vec![FORMAT];
        bytes.extend(value.replace(from, to).into_bytes());
        let Err(DecodeError::Malformed(what)) = decode(key, &bytes) else {
            panic!("read with {to}");
        };
        assert!(what.contains(name), "{what}");
    }
    for key in [&b""[..], b"\x08", b"\x04abc", b"\x02", b"\x02a b", b"\x01x"] {
        assert!(decode(key, b"\x01{}").is_err(), "{key:?}");
    }
}

/// A hostile policy gives reasons of which every character is escaped.
#[test]
fn the_largest_health_fits_into_a_record() {
    let gpu = GpuId::parse(&format!("GPU-{}", "x".repeat(40))).unwrap();
    let reason = "\"".repeat(256);
    let past = PastHealth {
        state: HealthState::Unhealthy,
        reason: reason.clone(),
        since_wall_ms: 1_770_000_000_000,
    };
    let judgement = Judgement {
        reading: Some(Reading {
            part: gpu.as_part().clone(),
            source: "recovery".into(),
            code: u64::MAX,
            detail: "\"".repeat(128),
        }),
        by: Decider::Policy(format!("{}@001122334455", "p".repeat(63)).into()),
        revision: u64::MAX,
        severity: Severity::Unhealthy,
        reason: reason.clone(),
        quiet_ms: Some(u64::from(u32::MAX) * 1000),
        at_mono_ms: 0,
    };
    let record = Record::Health(HealthRecord {
        gpu,
        state: HealthState::Unhealthy,
        reason,
        since_wall_ms: 1_770_000_000_000,
        quiet_ms: Some(u64::from(u32::MAX) * 1000),
        until_reset: true,
        history: vec![past; HEALTH_HISTORY_MAX],
        judgements: vec![judgement; JUDGEMENTS_MAX],
    });
    let bytes = encode(&record).unwrap();
    assert_eq!(decode(&key_bytes(&record.key()), &bytes).unwrap(), record);
}

/// A GPU for a request of a claim.
fn claimed() -> Allocation {
    let origin = GrantOrigin::Claim(Arc::new(ClaimRequest {
        claim: Claim { uid: "c-1".into(), namespace: "ml".into(), name: "train".into() },
        pod_claim_name: None,
        request: "gpu".into(),
        pods: vec![ClaimPod { uid: "u-1".into(), name: "train-0".into() }],
    }));
    Allocation {
        id: AllocationId { store: 0xdead_beef, number: 18 },
        resource: Resource::nvidia_gpu(),
        devices: vec![DeviceId::whole(&PartId::parse("GPU-2").unwrap())],
        granted_wall_ms: 9,
        holder: origin.holder(),
        origin,
        overlapped: false,
        decision: Decision { by: vec![Decider::Baseline], ..Decision::default() },
        ended: None,
    }
}

fn allocation_of(devices: Vec<DeviceId>, reason: String) -> Record {
    let Record::Allocation(allocation) = golden().remove(3).2 else {
        panic!("the fourth golden record is an allocation");
    };
    Record::Allocation(Allocation {
        devices,
        decision: Decision { reason, ..allocation.decision },
        ..allocation
    })
}

/// 16 GPUs of 128 devices each, with the longest names and without consecutive numbers.
#[test]
fn the_largest_allocation_fits() {
    let parts = (0..16).map(|i| PartId::parse(&format!("GPU-{i:0>52}")).unwrap());
    let devices = parts.flat_map(|part| {
        let numbers = (0..128).map(|n| 60_000 + 2 * n);
        numbers.map(|n| DeviceId::share(&part, n)).collect::<Vec<_>>()
    });
    let devices: Vec<_> = devices.collect();
    assert_eq!(devices.len(), DEVICES_PER_ALLOCATION_MAX);
    let record = allocation_of(devices, "r".repeat(1024));
    let value = encode(&record).unwrap();
    assert!(value.len() <= RECORD_BYTES_MAX, "{}", value.len());
    assert_eq!(decode(&key_bytes(&record.key()), &value).unwrap(), record);
}

#[test]
fn a_record_that_is_too_large_is_refused() {
    let error = encode(&allocation_of(Vec::new(), "r".repeat(RECORD_BYTES_MAX))).unwrap_err();
    assert!(
        matches!(error, StoreError::TooLarge { limit: RECORD_BYTES_MAX, bytes } if bytes > RECORD_BYTES_MAX),
        "{error}"
    );
}

/// Eight marks with as much text as the kernel allows, all of it doubled by JSON.
#[test]
fn the_longest_marks_fit() {
    const OWNER: usize = 150;
    let text = "\"".repeat((MARKS_TEXT_BYTES_MAX / MARKS_MAX - OWNER) / 3);
    let order = Order {
        evict: true,
        deadline_wall_ms: Some(u64::MAX),
        at_deadline: AtDeadline::GiveUp,
        ..Order::default()
    };
    let by_owner = (0..MARKS_MAX).map(|i| {
        let owner = Owner::parse(&format!("{i}{}", &text[1..OWNER])).unwrap();
        let mark = Mark {
            kind: MarkKind::Drain(order),
            expired: true,
            ..Mark::cordon(&text, &text.repeat(2), u64::MAX)
        };
        (owner, mark)
    });
    let marks = Marks { by_owner: by_owner.collect(), drained_wall_ms: Some(u64::MAX) };
    let texts = marks.by_owner.iter().map(|(owner, m)| owner.as_str().len() + m.by.len() + m.why.len());
    let bytes: usize = texts.sum();
    assert!((MARKS_TEXT_BYTES_MAX - 50..=MARKS_TEXT_BYTES_MAX).contains(&bytes), "{bytes}");
    let value = encode(&Record::Marks(GpuId::parse("GPU-1").unwrap(), marks)).unwrap();
    assert!(value.len() <= RECORD_BYTES_MAX, "{}", value.len());
}
