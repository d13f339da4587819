use super::*;
use crate::kernel::allocation::{
    Allocation, DEVICES_PER_ALLOCATION_MAX, Decision, End, EndReason, Holder, Limits,
};
use crate::kernel::drain::{Drain, Mark};
use crate::kernel::gpu::{Mig, Part};
use crate::kernel::names::{DeviceId, Resource};
use crate::kernel::offer::{Consumes, OfferLine, ShareRange};
use crate::kernel::policy::{Hook, PolicyVersion};
use crate::kernel::record::{DeviceRun, Meta, PartRecord, StackHead};
use crate::kernel::stack::{OnFault, Permissions, StackEntry};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;

fn part_id() -> impl Strategy<Value = PartId> {
    "[A-Za-z0-9_./-]{1,56}".prop_map(|text| PartId::parse(&text).unwrap())
}

fn resource() -> impl Strategy<Value = Resource> {
    "[a-z]{1,9}\\.[a-z0-9]{1,9}/[A-Za-z0-9]([A-Za-z0-9_.-]{0,20}[A-Za-z0-9])?"
        .prop_filter_map("reserved", |text| Resource::parse(&text).ok())
}

fn digest() -> impl Strategy<Value = Digest> {
    "[0-9a-f]{64}".prop_map(|text| Digest::parse(&text).unwrap())
}

fn devices() -> impl Strategy<Value = Vec<DeviceId>> {
    let group = (part_id(), vec(option::of(0_u32..=65_535), 1..9), any::<bool>());
    vec(group, 0..5).prop_map(|groups| {
        let share = |part: &PartId, share| DeviceId { part: part.clone(), share };
        let groups = groups.into_iter().flat_map(|(part, shares, run)| {
            let mut devices: Vec<_> = shares.iter().map(|n| share(&part, *n)).collect();
            if run {
                devices.extend((7..30).map(|n| share(&part, Some(n))));
            }
            devices
        });
        groups.collect()
    })
}

fn consumes() -> impl Strategy<Value = Consumes> {
    prop_oneof![
        Just(Consumes::Whole),
        (any::<u64>(), any::<u32>())
            .prop_map(|(memory_mib, compute_percent)| Consumes::Slice { memory_mib, compute_percent }),
    ]
}

prop_compose! {
    fn allocation()(
        (store, number) in any::<(u32, u64)>(),
        resource in resource(),
        devices in devices(),
        (granted_wall_ms, overlapped) in any::<(u64, bool)>(),
        (namespace, pod, pod_uid, container) in any::<(Option<String>, Option<String>, Option<String>, Option<String>)>(),
        (by, reason, environment) in any::<(Vec<String>, String, Vec<(String, String)>)>(),
        (memory_mib, compute_percent) in any::<(Option<u64>, Option<u32>)>(),
        ended in option::of((0..4_usize, any::<u64>())),
    ) -> Record {
        let reasons = [
            EndReason::Released,
            EndReason::NeverStarted,
            EndReason::Superseded,
            EndReason::Operator,
        ];
        Record::Allocation(Allocation {
            id: AllocationId { store, number },
            resource,
            devices,
            granted_wall_ms,
            holder: Holder { namespace, pod, pod_uid, container },
            overlapped,
            decision: Decision { by, reason, environment, limits: Limits { memory_mib, compute_percent } },
            ended: ended.map(|(i, wall_ms)| End { reason: reasons[i], wall_ms }),
        })
    }
}

prop_compose! {
    fn part()(
        id in part_id(),
        parent in option::of(part_id()),
        (vendor, model, pci_bus) in any::<(String, String, String)>(),
        (gpu_index, minor, numa_node, memory_mib, mig_enabled) in any::<(u32, Option<u32>, Option<u32>, u64, bool)>(),
        mig in any::<Option<(String, u32, u32)>>(),
        attributes in btree_map(any::<String>(), any::<String>(), 0..5),
    ) -> Part {
        let mig = mig.map(|(profile, gpu_instance, compute_instance)| Mig {
            profile, gpu_instance, compute_instance,
        });
        Part {
            id, parent, vendor, model, gpu_index, minor, memory_mib, pci_bus, numa_node,
            mig_enabled, mig, attributes,
        }
    }
}

prop_compose! {
    fn part_record()(
        part in part(),
        offered_by in any::<String>(),
        lines in vec((resource(), any::<u32>(), consumes()), 0..4),
        ranges in vec((resource(), 0..60_000_u32, 0..5_000_u32), 0..4),
        runs in vec((resource(), option::of(0..60_000_u32), 1..5_000_u32, consumes(), any::<bool>()), 0..6),
    ) -> Record {
        Record::Part(PartRecord {
            part,
            offered_by,
            lines: lines.into_iter().map(|(resource, count, consumes)| OfferLine { resource, count, consumes }).collect(),
            ranges: ranges.into_iter().map(|(resource, first, len)| ShareRange { resource, first, len }).collect(),
            runs: runs.into_iter().map(|(resource, first, len, consumes, retiring)| DeviceRun {
                resource,
                first,
                len: if first.is_some() { len } else { 1 },
                consumes,
                retiring,
            }).collect(),
        })
    }
}

prop_compose! {
    fn policy()(
        (name, version, summary, parameters_schema) in any::<(String, String, String, String)>(),
        hooks in vec(0..5_usize, 0..6),
        (digest, artifact) in (digest(), digest()),
        (bytes, shipped, since_wall_ms) in any::<(u64, bool, u64)>(),
    ) -> Record {
        let all = [Hook::Describe, Hook::Offer, Hook::Place, Hook::Admit, Hook::Triage];
        Record::Policy(PolicyVersion {
            name, version, summary, parameters_schema, digest, artifact, bytes, shipped, since_wall_ms,
            hooks: hooks.into_iter().map(|i| all[i]).collect(),
        })
    }
}

prop_compose! {
    fn stack_entry()(
        (i, name, parameters, deny, share_max) in any::<(usize, String, String, bool, u32)>(),
        digest in digest(),
        (resources, environment, on_deny) in any::<(Vec<String>, Vec<String>, bool)>(),
    ) -> Record {
        Record::StackEntry(i, StackEntry {
            name,
            digest,
            parameters,
            permissions: Permissions { deny, share_max, resources, environment },
            on_fault: if on_deny { OnFault::Deny } else { OnFault::Skip },
        })
    }
}

fn small() -> impl Strategy<Value = Record> {
    let meta = any::<(u32, u64, Option<u64>)>().prop_map(|(store, next_number, seen)| {
        Record::Meta(Meta { store, next_number, kubelet_seen_wall_ms: seen })
    });
    let mark =
        any::<(String, String, u64)>().prop_map(|(by, why, since_wall_ms)| Mark { by, why, since_wall_ms });
    let drain = (part_id(), option::of(mark))
        .prop_map(|(gpu, mark)| Record::Drain(gpu, mark.map_or(Drain::Active, Drain::Cordoned)));
    let stack = any::<(u64, bool, String, u64, usize)>().prop_map(
        |(revision, from_api, by, since_wall_ms, entries)| {
            Record::Stack(StackHead { revision, from_api, by, since_wall_ms, entries })
        },
    );
    prop_oneof![meta, drain, stack]
}

fn record() -> impl Strategy<Value = Record> {
    prop_oneof![small(), allocation(), part_record(), policy(), stack_entry()]
}

proptest! {
    #[test]
    fn every_record_reads_back_as_written(record in record()) {
        let key = key_bytes(&record.key());
        match encode(&record) {
            Ok(value) => prop_assert_eq!(decode(&key, &value).unwrap(), record),
            // Long odd texts may be too large; then nothing would be written.
            Err(StoreError::TooLarge { bytes, .. }) => prop_assert!(bytes > RECORD_BYTES_MAX),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn keys_sort_as_the_kernels_do(a in record(), b in record()) {
        let (a, b) = (a.key(), b.key());
        prop_assert_eq!(key_bytes(&a).cmp(&key_bytes(&b)), a.cmp(&b));
    }

    #[test]
    fn bytes_that_are_no_record_are_an_error_and_no_panic(
        record in record(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let key = key_bytes(&record.key());
        if let Ok(mut value) = encode(&record) {
            let at = at.index(value.len());
            if cut { value.truncate(at) } else { value[at] = byte }
            // A changed letter may still be a record: `super::check` finds that.
            if cut {
                prop_assert!(decode(&key, &value).is_err());
            } else {
                let _ = decode(&key, &value);
            }
        }
    }
}

/// What release 0.1 writes, byte for byte. A store of that form is on nodes: if this test fails,
/// raise `FORMAT` and go on reading these.
#[test]
fn golden_records_of_format_1() {
    for (key, value, record) in golden() {
        let mut bytes = vec![1];
        bytes.extend_from_slice(value.as_bytes());
        assert_eq!(key_bytes(&record.key()), key, "{record:?}");
        let written = encode(&record).unwrap();
        assert_eq!(String::from_utf8(written[1..].to_vec()).unwrap(), value, "{record:?}");
        assert_eq!(written, bytes);
        assert_eq!(decode(&key, &bytes).unwrap(), record);
    }
}

const DIGEST_A: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const DIGEST_B: &str = "ffeeddccbbaa99887766554433221100ffeeddccbbaa99887766554433221100";

fn golden() -> Vec<(Vec<u8>, &'static str, Record)> {
    let gpu = PartId::parse("GPU-1").unwrap();
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
                    parent: Some(gpu.clone()),
                    vendor: "nvidia".into(),
                    model: "NVIDIA H100 80GB HBM3".into(),
                    gpu_index: 3,
                    minor: Some(4),
                    memory_mib: 9984,
                    pci_bus: "00000000:65:00.0".into(),
                    numa_node: Some(1),
                    mig_enabled: false,
                    mig: Some(Mig { profile: "1g.10gb".into(), gpu_instance: 7, compute_instance: 0 }),
                    attributes: [("architecture".into(), "hopper".into())].into(),
                },
                offered_by: "timeslice@001122334455".into(),
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
            r#"{"cordoned":{"by":"admin","why":"fan \"rattles\"","sinceMs":5}}"#,
            Record::Drain(
                gpu.clone(),
                Drain::Cordoned(Mark { by: "admin".into(), why: "fan \"rattles\"".into(), since_wall_ms: 5 }),
            ),
        ),
        (
            vec![4, 0xde, 0xad, 0xbe, 0xef, 0, 0, 0, 0, 0, 0, 0, 17],
            r#"{"resource":"nvidia.com/gpu.shared","devices":[{"part":"GPU-1","shares":[0,1,[4,3]]},{"part":"GPU-2","shares":[null]}],"grantedMs":9,"holder":{"namespace":"ml","pod":"train-0","uid":"u-1","container":"main"},"overlapped":true,"by":["quota@001122334455"],"reason":"within quota","environment":[["A","1"]],"memoryMib":8192,"computePercent":10,"ended":{"reason":"neverStarted","ms":12}}"#,
            Record::Allocation(Allocation {
                id: AllocationId { store: 0xdead_beef, number: 17 },
                resource: shared,
                devices: [0, 1, 4, 5, 6]
                    .map(|n| DeviceId::share(&gpu, n))
                    .into_iter()
                    .chain([DeviceId::whole(&PartId::parse("GPU-2").unwrap())])
                    .collect(),
                granted_wall_ms: 9,
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
            }),
        ),
        (
            vec![6],
            r#"{"revision":2,"fromApi":true,"by":"admin","sinceMs":7,"entries":1}"#,
            Record::Stack(StackHead {
                revision: 2,
                from_api: true,
                by: "admin".into(),
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
    ]
}

#[test]
fn a_later_format_is_told_from_damage() {
    let (key, _, record) = golden().remove(3);
    let mut value = encode(&record).unwrap();
    value[0] = 2;
    assert_eq!(decode(&key, &value), Err(DecodeError::Newer(2)));
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

/// What a flipped bit can make of a number must not become millions of devices, or a record that
/// says something else than it said.
#[test]
fn malformed_records_name_themselves() {
    let allocation = golden().remove(3);
    let part = golden().remove(1);
    let swaps: [(&(Vec<u8>, &str, Record), &str, &str, &str); 7] = [
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

fn of_devices(devices: Vec<DeviceId>, reason: String) -> Record {
    let Record::Allocation(allocation) = golden().remove(3).2 else {
        panic!("the fourth golden record is an allocation");
    };
    Record::Allocation(Allocation {
        devices,
        decision: Decision { reason, ..allocation.decision },
        ..allocation
    })
}

/// 16 GPUs of 128 devices, with the longest names, and numbers that make no runs.
#[test]
fn the_largest_allocation_fits() {
    let parts = (0..16).map(|i| PartId::parse(&format!("GPU-{i:0>52}")).unwrap());
    let devices = parts.flat_map(|part| {
        let numbers = (0..128).map(|n| 60_000 + 2 * n);
        numbers.map(|n| DeviceId::share(&part, n)).collect::<Vec<_>>()
    });
    let devices: Vec<_> = devices.collect();
    assert_eq!(devices.len(), DEVICES_PER_ALLOCATION_MAX);
    let record = of_devices(devices, "r".repeat(1024));
    let value = encode(&record).unwrap();
    assert!(value.len() <= RECORD_BYTES_MAX, "{}", value.len());
    assert_eq!(decode(&key_bytes(&record.key()), &value).unwrap(), record);
}

#[test]
fn a_record_that_is_too_large_is_refused() {
    let error = encode(&of_devices(Vec::new(), "r".repeat(RECORD_BYTES_MAX))).unwrap_err();
    assert!(
        matches!(error, StoreError::TooLarge { limit: RECORD_BYTES_MAX, bytes } if bytes > RECORD_BYTES_MAX),
        "{error}"
    );
}
