use super::*;
use crate::hardware::gpu::Mig;
use crate::ids::names::{GpuId, PartId};

fn id(text: &str) -> PartId {
    PartId::parse(text).unwrap()
}

fn gpu(index: u32, mig_enabled: bool) -> Part {
    let gpu = GpuId::of_whole(&id(&format!("GPU-{index}")));
    Part { minor: Some(index), memory_mib: 80_000, mig_enabled, ..Part::whole_gpu(gpu, index) }
}

/// A node from one text for each GPU: `-` is a GPU outside of MIG mode, else its instances' profiles.
fn node(gpus: &[&str]) -> Vec<Part> {
    let mut parts = Vec::new();
    for (index, profiles) in (0..).zip(gpus) {
        let whole = gpu(index, *profiles != "-");
        for (n, profile) in (0..).zip(profiles.split_whitespace().filter(|p| *p != "-")) {
            parts.push(Part {
                id: id(&format!("MIG-{index}-{n}")),
                gpu: whole.gpu.clone(),
                mig_enabled: false,
                mig: Some(Mig { profile: profile.into(), gpu_instance: n, compute_instance: 0 }),
                ..whole.clone()
            });
        }
        parts.push(whole);
    }
    parts
}

fn whole() -> Resource {
    Resource::parse("nvidia.com/gpu").unwrap()
}

fn plan_of(strategy: MigStrategy, gpus: &[&str]) -> Plan {
    plan(strategy, &whole(), &node(gpus), |_| true)
}

fn counts(plan: &Plan) -> Vec<(&str, usize)> {
    plan.counts().into_iter().map(|(resource, n)| (resource.as_str(), n)).collect()
}

#[test]
fn profiles_have_nvidias_resource_names() {
    let names = [
        ("1g.5gb", Some("nvidia.com/mig-1g.5gb")),
        ("1g.10gb+me", Some("nvidia.com/mig-1g.10gb.me")),
        ("1g.24gb+me.all", Some("nvidia.com/mig-1g.24gb.me.all")),
        ("2g.48gb+gfx", Some("nvidia.com/mig-2g.48gb.gfx")),
        ("1g.24gb-me", Some("nvidia.com/mig-1g.24gb-me")),
        ("7g.80gb", Some("nvidia.com/mig-7g.80gb")),
        ("1c.3g.40gb", None),
        ("", None),
        ("1g.10 gb", None),
    ];
    for (profile, name) in names {
        assert_eq!(resource_of_profile(profile).as_ref().map(Resource::as_str), name, "{profile}");
    }
}

#[test]
fn strategies_parse_from_their_keywords() {
    for strategy in [MigStrategy::None, MigStrategy::Single, MigStrategy::Mixed] {
        assert_eq!(MigStrategy::parse(strategy.as_str()), Some(strategy));
    }
    assert_eq!(MigStrategy::parse("Mixed"), None);
    assert_eq!(MigStrategy::default(), MigStrategy::None);
}

#[test]
fn none_offers_every_gpu_whole_and_no_instance() {
    let plan = plan_of(MigStrategy::None, &["-", "1g.10gb 1g.10gb", ""]);
    assert_eq!(counts(&plan), [("nvidia.com/gpu", 3)]);
    assert_eq!(plan.resource(&id("MIG-1-0")), None);
    assert_eq!(plan.messages.refusal, None);
    assert_eq!(plan.messages.notes.len(), 2, "both in MIG mode: {:?}", plan.messages);
}

#[test]
fn single_offers_instances_of_one_profile_as_gpus() {
    let plan = plan_of(MigStrategy::Single, &["1g.10gb 1g.10gb", "1g.10gb"]);
    assert_eq!((counts(&plan), &plan.messages), (vec![("nvidia.com/gpu", 3)], &PlanMessages::default()));
    assert_eq!(plan.resource(&id("GPU-0")), None);
    let without = plan_of(MigStrategy::Single, &["-", "-"]);
    assert_eq!(
        (counts(&without), &without.messages),
        (vec![("nvidia.com/gpu", 2)], &PlanMessages::default())
    );
}

#[test]
fn single_refuses_several_kinds_of_devices_and_names_them() {
    let table: [(&[&str], &[&str]); 3] = [
        (&["1g.10gb", "3g.40gb 1g.10gb"], &["1g.10gb on GPU 0, 1", "3g.40gb on GPU 1"]),
        (&["1g.10gb", "-"], &["1g.10gb on GPU 0", "no MIG mode on GPU 1"]),
        (&["1g.10gb 1g.10gb+me"], &["1g.10gb on GPU 0", "1g.10gb+me on GPU 0"]),
    ];
    for (gpus, facts) in table {
        let plan = plan_of(MigStrategy::Single, gpus);
        assert_eq!(counts(&plan), [], "{gpus:?}");
        let refusal = plan.messages.refusal.unwrap();
        assert!(refusal.contains("mixed") && facts.iter().all(|s| refusal.contains(s)), "{refusal}");
    }
}

#[test]
fn mixed_offers_each_profile_under_its_name_next_to_whole_gpus() {
    let plan = plan_of(MigStrategy::Mixed, &["-", "1g.10gb 1g.10gb 3g.40gb", "1g.10gb+me"]);
    let expected = [
        ("nvidia.com/gpu", 1),
        ("nvidia.com/mig-1g.10gb", 2),
        ("nvidia.com/mig-1g.10gb.me", 1),
        ("nvidia.com/mig-3g.40gb", 1),
    ];
    assert_eq!((counts(&plan), &plan.messages), (expected.to_vec(), &PlanMessages::default()));
}

#[test]
fn mixed_does_not_offer_a_profile_without_a_name_and_notes_it() {
    let plan = plan_of(MigStrategy::Mixed, &["1c.2g.20gb 1g.10gb"]);
    assert_eq!(counts(&plan), [("nvidia.com/mig-1g.10gb", 1)]);
    assert!(plan.messages.notes[0].contains("1c.2g.20gb"), "{:?}", plan.messages);
}

#[test]
fn a_gpu_in_mig_mode_without_instances_does_not_affect_the_others() {
    for strategy in [MigStrategy::Single, MigStrategy::Mixed] {
        let plan = plan_of(strategy, &["1g.10gb", ""]);
        assert_eq!(plan.counts().values().sum::<usize>(), 1);
        assert_eq!(plan.messages.refusal, None);
        assert!(plan.messages.notes[0].contains("GPU 1 (GPU-1)"), "{:?}", plan.messages);
    }
}

#[test]
fn parts_that_a_policy_offers_are_left_to_it() {
    let parts = node(&["-", "1g.10gb 1g.10gb"]);
    let resource = whole();
    // The policy shares GPU 0 under another name, so all remaining parts are of one kind.
    let planned = plan(MigStrategy::Single, &resource, &parts, |part| *part != id("GPU-0"));
    assert_eq!((counts(&planned), &planned.messages.refusal), (vec![("nvidia.com/gpu", 2)], &None));
    // The policy offers an instance, so its GPU is not offered whole as well.
    let planned = plan(MigStrategy::None, &resource, &parts, |part| *part != id("MIG-1-1"));
    assert_eq!(counts(&planned), [("nvidia.com/gpu", 1)]);
    assert_eq!(planned.resource(&id("GPU-1")), None);
}

#[test]
fn single_withholds_a_name_of_several_kinds() {
    let parts = node(&["-", "1g.10gb", "3g.40gb"]);
    let part = |text: &str| parts.iter().find(|part| part.id == id(text)).unwrap();
    let (gpu, shared) = (whole(), Resource::parse("nvidia.com/gpu.shared").unwrap());
    let ambiguous = |strategy, offered: &[(&str, &Resource)]| -> Vec<(String, String)> {
        let offered = offered.iter().map(|(id, resource)| (part(id), *resource));
        ambiguous_names(strategy, offered).into_iter().map(|(r, why)| (r.to_string(), why)).collect()
    };
    let both_kinds = [("GPU-0", &gpu), ("MIG-1-0", &gpu)];
    let found = ambiguous(MigStrategy::Single, &both_kinds);
    assert_eq!(found[0].0, "nvidia.com/gpu");
    assert!(found[0].1.contains("1g.10gb on GPU 1, no MIG mode on GPU 0"), "{found:?}");
    let profiles = ambiguous(MigStrategy::Single, &[("MIG-1-0", &shared), ("MIG-2-0", &shared)]);
    assert!(profiles[0].1.contains("nvidia.com/gpu.shared would name several kinds"), "{profiles:?}");
    // Separate names are not ambiguous, and the other strategies allow mixed kinds.
    assert_eq!(ambiguous(MigStrategy::Single, &[("GPU-0", &shared), ("MIG-1-0", &gpu)]), []);
    assert_eq!(ambiguous(MigStrategy::Mixed, &both_kinds), []);
}
