//! Property tests: records and keys survive a round trip, and malformed ones are errors.

use super::*;
use berth_kernel::drain::marks::{AtDeadline, MARKS_MAX, Mark, MarkKind, Marks, Order, Owner};
use berth_kernel::grants::allocation::{Allocation, Decision, End, EndReason, GrantOrigin, Holder, Limits};
use berth_kernel::grants::claim::{Claim, ClaimPod, ClaimRequest};
use berth_kernel::grants::history::weight;
use berth_kernel::hardware::gpu::{Mig, Part};
use berth_kernel::ids::names::{DeviceId, GpuId, PartId, Resource};
use berth_kernel::ids::pci::PciBusId;
use berth_kernel::node::record::{DeviceRun, Meta, PartRecord, StackHead};
use berth_kernel::policy::decider::Decider;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::stack::{
    FailedRevision, FleetRevision, OnFault, Permissions, StackEntry, StackOrigin,
};
use berth_kernel::policy::version::{Origin, PolicyVersion, Signature};
use berth_kernel::sharing::offer::{Consumes, OfferLine, ShareRange};
use berth_kernel::sharing::via::{KubeletApi, Via};
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use std::sync::Arc;

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
        claim in any::<Option<((String, String, String), String, Vec<(String, String)>)>>(),
        (namespace, pod, pod_uid, container) in any::<(Option<String>, Option<String>, Option<String>, Option<String>)>(),
        (by, reason, environment) in any::<(Vec<String>, String, Vec<(String, String)>)>(),
        (memory_mib, compute_percent) in any::<(Option<u64>, Option<u32>)>(),
        ended in option::of((0..4_usize, any::<u64>())),
    ) -> Record {
        let reasons = [
            EndReason::Released,
            EndReason::NeverStarted,
            EndReason::PodGone,
            EndReason::Superseded,
            EndReason::Operator,
        ];
        Record::Allocation(Allocation {
            id: AllocationId { store, number },
            resource,
            devices,
            granted_wall_ms,
            origin: claim.map_or(GrantOrigin::DevicePlugin, |(claim, request, pods)| {
                let (uid, namespace, name) = claim;
                let pods = pods.into_iter().map(|(uid, name)| ClaimPod { uid, name }).collect();
                let claim = Claim { uid, namespace, name };
                GrantOrigin::Claim(Arc::new(ClaimRequest { claim, pod_claim_name: pod.clone(), request, pods }))
            }),
            holder: Holder { namespace, pod, pod_uid, container },
            overlapped,
            decision: Decision { by: by.into_iter().map(Into::into).collect(), reason, environment, limits: Limits { memory_mib, compute_percent } },
            ended: ended.map(|(i, wall_ms)| End { reason: reasons[i], wall_ms }),
        })
    }
}

prop_compose! {
    fn part()(
        id in part_id(),
        parent in option::of(part_id()),
        (vendor, model) in any::<(String, String)>(),
        pci_bus in option::of((any::<(u32, u8)>(), 0..32_u8, 0..8_u8)),
        (gpu_index, minor, numa_node, memory_mib, mig_enabled) in any::<(u32, Option<u32>, Option<u32>, u64, bool)>(),
        mig in any::<Option<(String, u32, u32)>>(),
        attributes in btree_map(any::<String>(), any::<String>(), 0..5),
    ) -> Part {
        let pci_bus = pci_bus.and_then(|((domain, bus), device, function)| {
            PciBusId::parse(&format!("{domain:x}:{bus:x}:{device:x}.{function}")).ok()
        });
        let mig = mig.map(|(profile, gpu_instance, compute_instance)| Mig {
            profile, gpu_instance, compute_instance,
        });
        let gpu = GpuId::of_whole(parent.as_ref().unwrap_or(&id));
        Part {
            id, gpu, vendor, model, gpu_index, minor, memory_mib, pci_bus, numa_node,
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
            offered_by: Some(offered_by).filter(|by| !by.is_empty()).map(Into::into),
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
        origin in origin(),
    ) -> Record {
        let hook_values = [Hook::Describe, Hook::Offer, Hook::Place, Hook::Admit, Hook::Triage];
        Record::Policy(PolicyVersion {
            name, version, summary, parameters_schema, digest, artifact, bytes, shipped, since_wall_ms,
            hooks: hooks.into_iter().map(|i| hook_values[i]).collect(), origin,
        })
    }
}

prop_compose! {
    fn origin()(
        (by, why, signed_by, once_shipped) in any::<(String, String, Option<String>, bool)>(),
        signature in option::of(vec(any::<u8>(), 64)),
    ) -> Origin {
        let signature = signature.map(|bytes| Signature(bytes.try_into().unwrap()));
        Origin { by, why, signature, signed_by, once_shipped }
    }
}

prop_compose! {
    fn stack_entry()(
        (i, name, parameters, deny, share_max) in any::<(usize, String, String, bool, u32)>(),
        digest in digest(),
        (resources, environment, on_deny, past) in any::<(Vec<String>, Vec<String>, bool, Option<u64>)>(),
    ) -> Record {
        let entry = StackEntry {
            name,
            digest,
            parameters,
            permissions: Permissions { deny, share_max, resources, environment },
            on_fault: if on_deny { OnFault::Deny } else { OnFault::Skip },
        };
        match past {
            Some(revision) => Record::PastStackEntry(revision, i, entry),
            None => Record::StackEntry(i, entry),
        }
    }
}

fn small_record() -> impl Strategy<Value = Record> {
    let meta = any::<(u32, u64, Option<u64>)>().prop_map(|(store, next_number, seen)| {
        Record::Meta(Meta { store, next_number, kubelet_seen_wall_ms: seen })
    });
    let at_deadline = prop_oneof![Just(AtDeadline::Wait), Just(AtDeadline::Delete), Just(AtDeadline::GiveUp)];
    let order =
        (any::<(bool, Option<u64>)>(), at_deadline).prop_map(|((evict, deadline_wall_ms), at_deadline)| {
            Order { evict, deadline_wall_ms, at_deadline, ..Order::default() }
        });
    let mark = (any::<(String, String, u64, bool)>(), option::of(order)).prop_map(
        |((by, why, since_wall_ms, expired), order)| {
            let kind = order.map_or(MarkKind::Cordon, MarkKind::Drain);
            Mark { kind, by, why, since_wall_ms, expired }
        },
    );
    let owner = "[a-z]{1,9}(:\\PC{1,30})?".prop_map(|text| Owner::parse(&text).unwrap());
    let drain = (part_id(), btree_map(owner, mark, 1..=MARKS_MAX), any::<Option<u64>>()).prop_map(
        |(gpu, by_owner, drained_wall_ms)| {
            Record::Marks(GpuId::of_whole(&gpu), Marks { by_owner, drained_wall_ms })
        },
    );
    let fleet = any::<(String, String, u32)>().prop_map(|(policy, revision, attempt)| FleetRevision {
        policy,
        revision,
        attempt,
    });
    let failed = (fleet.clone(), any::<String>())
        .prop_map(|(revision, reason)| Box::new(FailedRevision { revision, reason }));
    let of_fleet =
        (fleet, any::<bool>()).prop_map(|(revision, is_settled)| StackOrigin::Fleet { revision, is_settled });
    let break_glass = any::<u64>().prop_map(|until_wall_ms| StackOrigin::BreakGlass { until_wall_ms });
    let origin = prop_oneof![Just(StackOrigin::File), Just(StackOrigin::Api), of_fleet, break_glass];
    let stack = (origin, option::of(failed), any::<(u64, String, String, u64, usize, bool)>()).prop_map(
        |(origin, failed, (revision, by, why, since_wall_ms, entries, past))| {
            let head = StackHead { revision, origin, failed, by, why, since_wall_ms, entries };
            if past { Record::PastStack(head) } else { Record::Stack(head) }
        },
    );
    let api = prop_oneof![Just(KubeletApi::DevicePlugin), Just(KubeletApi::Dra)];
    let via = (part_id(), api, any::<(bool, String, String, u64)>()).prop_map(
        |(gpu, api, (moving, by, why, since_wall_ms))| {
            Record::Via(GpuId::of_whole(&gpu), Via { api, moving, by, why, since_wall_ms, since_mono_ms: 0 })
        },
    );
    prop_oneof![meta, drain, via, stack]
}

fn record() -> impl Strategy<Value = Record> {
    prop_oneof![small_record(), allocation(), part_record(), policy(), stack_entry()]
}

/// A counterexample that the property below found: empty names.
#[test]
fn a_decision_with_many_empty_names_survives_a_round_trip() {
    let record = Record::Allocation(Allocation {
        id: AllocationId { store: 0, number: 0 },
        resource: Resource::parse("a.a/A").unwrap(),
        devices: Vec::new(),
        granted_wall_ms: 0,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision { by: vec![Decider::Policy("".into()); 31], ..Decision::default() },
        ended: None,
    });
    assert_eq!(decode(&key_bytes(&record.key()), &encode(&record).unwrap()).unwrap(), record);
}

proptest! {
    #[test]
    fn every_record_survives_a_round_trip(record in record()) {
        let key = key_bytes(&record.key());
        match encode(&record) {
            Ok(value) => prop_assert_eq!(decode(&key, &value).unwrap(), record),
            // Long random texts may exceed the limit.
            Err(StoreError::TooLarge { bytes, .. }) => prop_assert!(bytes > RECORD_BYTES_MAX),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// The weight, which limits the history's bytes, never underestimates a record.
    #[test]
    fn an_allocations_weight_is_at_least_its_encoded_size(record in allocation()) {
        let Record::Allocation(allocation) = &record else { unreachable!() };
        if let Ok(value) = encode(&record) {
            let (written, weight) = (key_bytes(&record.key()).len() + value.len(), weight(allocation));
            prop_assert!(written <= weight, "{written} bytes, and its weight is {weight}");
            // The difference is bounded: omitted fields, and shares encoded as runs.
            prop_assert!(weight <= written + 352 + allocation.devices.len() * 6, "{weight} for {written}");
        }
    }

    #[test]
    fn encoded_keys_sort_as_kernel_keys(a in record(), b in record()) {
        let (a, b) = (a.key(), b.key());
        prop_assert_eq!(key_bytes(&a).cmp(&key_bytes(&b)), a.cmp(&b));
    }

    #[test]
    fn malformed_bytes_are_an_error_and_no_panic(
        record in record(),
        at in any::<prop::sample::Index>(),
        byte in any::<u8>(),
        cut in any::<bool>(),
    ) {
        let key = key_bytes(&record.key());
        if let Ok(mut value) = encode(&record) {
            let at = at.index(value.len());
            if cut { value.truncate(at) } else { value[at] = byte }
            // A changed byte may still give a valid record, which `super::check` detects.
            if cut {
                prop_assert!(decode(&key, &value).is_err());
            } else {
                let _ = decode(&key, &value);
            }
        }
    }
}
