use super::*;
use berth_kernel::evidence::limits::LimitSupport;
use berth_kernel::evidence::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::grants::allocation::{Decision, GrantOrigin};
use berth_kernel::hardware::gpu::Mig;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::{AllocationId, GpuId, PartId};
use berth_kernel::node::change::{Change, Entry};

/// Settings without MIG.
fn settings() -> Settings {
    Settings::new("unused".into())
}

#[test]
fn candidates_have_their_labels() {
    let resource = Resource::parse("nvidia.com/gpu").unwrap();
    let pod = Pod {
        uid: "u".into(),
        namespace: "team".into(),
        name: "p".into(),
        labels: vec![("app".into(), "x".into())],
        is_static: false,
        owner: None,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers: vec![PodContainer { name: "main".into(), requests: vec![(resource.clone(), 2)] }],
        bypass: None,
        has_claims: false,
        named_claims: Vec::new(),
    };
    let view = PodsView {
        source: PodsSource::ApiServer,
        current: true,
        listed_mono_ms: 0,
        pods: [("u".to_owned(), Arc::new(pod))].into(),
        deleted: VecDeque::new(),
        finished: VecDeque::new(),
    };
    let ledger = Arc::new(Ledger { pods: Some(Arc::new(view)), ..Ledger::default() });
    let shown = View::new(&ledger, Now::default(), &settings(), None).candidates(&resource, 2);
    let [candidate] = shown.as_slice() else { panic!("{} candidates", shown.len()) };
    let names = (candidate.namespace.as_str(), candidate.pod.as_str(), candidate.container.as_str());
    assert_eq!(names, ("team", "p", "main"));
    assert_eq!(candidate.pod_uid, "u");
    assert_eq!(candidate.labels[0].key, "app");
    assert!(View::new(&ledger, Now::default(), &settings(), None).candidates(&resource, 1).is_empty());
}

#[test]
fn parts_have_the_resource_of_the_baseline() {
    let gpu = |n: u32, mig_enabled| {
        let gpu = GpuId::parse(&format!("GPU-{n}")).unwrap();
        Part { memory_mib: 80_000, mig_enabled, ..Part::whole_gpu(gpu, n) }
    };
    let instance = Part {
        id: PartId::parse("MIG-1").unwrap(),
        gpu: GpuId::parse("GPU-1").unwrap(),
        mig: Some(Mig { profile: "1g.10gb+me".into(), gpu_instance: 7, compute_instance: 0 }),
        ..gpu(1, false)
    };
    let mut ledger = Ledger::default();
    let changes = [gpu(0, false), gpu(1, true), instance].map(Change::PartFound).to_vec();
    ledger.apply(&Entry { at: Now::default(), changes });
    let ledger = Arc::new(ledger);
    let resources = |mig| -> Vec<Option<String>> {
        let view = View::new(&ledger, Now::default(), &Settings { mig, ..settings() }, None);
        let baseline =
            |part: &wit::Part| part.attributes.iter().find(|a| a.key == BASELINE_RESOURCE).cloned();
        view.context.node.parts.iter().map(|part| baseline(part).map(|a| a.value)).collect()
    };
    let (gpu, none) = (Some("nvidia.com/gpu".to_owned()), None::<String>);
    assert_eq!(resources(MigStrategy::None), [gpu.clone(), gpu.clone(), none.clone()]);
    let own = Some("nvidia.com/mig-1g.10gb.me".to_owned());
    assert_eq!(resources(MigStrategy::Mixed), [gpu, none.clone(), own]);
    // GPUs and instances would have the same resource, so none is offered.
    assert_eq!(resources(MigStrategy::Single), [none.clone(), none.clone(), none]);
}

#[test]
fn parts_say_whether_their_memory_can_be_limited() {
    let mut ledger = Ledger::default();
    let changes = (0..2).map(|n| {
        let gpu = GpuId::parse(&format!("GPU-{n}")).unwrap();
        Change::PartFound(Part::whole_gpu(gpu, n))
    });
    ledger.apply(&Entry { at: Now::default(), changes: changes.collect() });
    let gpus = [(GpuId::parse("GPU-1").unwrap(), None)].into();
    let limit_support = LimitSupport { gpus, ..LimitSupport::default() };
    let view = RuntimeView { is_whole: true, limit_support, ..RuntimeView::default() };
    ledger.runtime = Some(Arc::new(view));
    let view = View::new(&Arc::new(ledger), Now::default(), &settings(), None);
    let enforcer = |part: &wit::Part| part.attributes.iter().find(|a| a.key == MEMORY_ENFORCER).cloned();
    let values: Vec<_> = view.context.node.parts.iter().map(|part| enforcer(part).unwrap().value).collect();
    assert_eq!(values, ["none", "memoryLimits"]);
}

fn at(ms: u64) -> Now {
    Now { wall_ms: 1_000_000 + ms, mono_ms: ms }
}

/// Two GPUs and an allocation whose ages differ in their fractions of a second.
fn node() -> Arc<Ledger> {
    let mut node = Ledger::default();
    for (index, since_ms) in [(0, 300), (1, 1_750)] {
        let part = Part::whole_gpu(GpuId::parse(&format!("GPU-{index}")).unwrap(), index);
        node.apply(&Entry { at: at(since_ms), changes: vec![Change::PartFound(part)] });
    }
    let allocation = Allocation {
        id: AllocationId { store: 1, number: 1 },
        resource: Resource::parse("nvidia.com/gpu").unwrap(),
        devices: Vec::new(),
        granted_wall_ms: at(1_920).wall_ms,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder::default(),
        overlapped: false,
        decision: Decision::default(),
        ended: None,
    };
    node.live = Arc::new([(allocation.id, Arc::new(allocation))].into());
    Arc::new(node)
}

#[test]
fn a_current_view_equals_a_new_one() {
    let node = node();
    let (mut current, mut different) = (0, 0);
    for created in (2_000..4_000).step_by(70) {
        let view = View::new(&node, at(created), &settings(), None);
        for now in (1_000..6_000).step_by(10) {
            let same = View::new(&node, at(now), &settings(), None).context == view.context;
            let is_current = view.is_current(&node, at(now));
            assert!(same || !is_current, "created at {created}, current at {now}");
            // A view with the same ages is current, unless the time went back.
            assert!(is_current || !same || now < created, "created at {created}, not current at {now}");
            current += u32::from(is_current);
            different += u32::from(!same);
        }
    }
    assert!(current > 0 && different > 0, "{current} current, {different} different");
}

#[test]
fn a_view_of_another_snapshot_or_time_is_not_reused() {
    let (cache, node) = (ViewCache::new(settings()), node());
    let count = || cache.views.lock().len();
    let allocations = |node: &Arc<Ledger>, now| {
        cache.with(node, now, "{}", |view| {
            assert_eq!(view.context.parameters, "{}");
            view.context.node.allocations.len()
        })
    };
    assert_eq!(allocations(&node, at(2_000)), 1);
    assert_eq!((allocations(&node, at(2_010)), count()), (1, 1), "the same view");
    let other = Arc::new(Ledger { live: Arc::default(), ..Ledger::clone(&node) });
    assert_eq!((allocations(&other, at(2_010)), count()), (0, 2));
    assert_eq!(
        (allocations(&node, Now { wall_ms: 0, ..at(2_010) }), count()),
        (1, 3),
        "the wall clock jumped"
    );
    for _ in 0..2 * VIEWS_MAX {
        assert_eq!(allocations(&Arc::new(Ledger::clone(&other)), at(2_010)), 0);
    }
    assert_eq!(count(), VIEWS_MAX);
}

#[test]
fn concurrent_users_have_their_own_parameters() {
    let (cache, node) = (ViewCache::new(settings()), node());
    cache.with(&node, at(2_000), "first", |first| {
        cache.with(&node, at(2_000), "second", |second| {
            let parameters = (first.context.parameters.as_str(), second.context.parameters.as_str());
            assert_eq!(parameters, ("first", "second"));
        });
    });
}

/// Allocations that came, ended or changed since another view, and ones that stayed.
#[test]
fn a_view_made_from_another_equals_a_new_one() {
    let allocation = |number, pod: Option<&str>| Allocation {
        id: AllocationId { store: 1, number },
        resource: Resource::parse("nvidia.com/gpu").unwrap(),
        devices: Vec::new(),
        granted_wall_ms: at(0).wall_ms,
        origin: GrantOrigin::DevicePlugin,
        holder: Holder { pod: pod.map(str::to_owned), ..Holder::default() },
        overlapped: false,
        decision: Decision::default(),
        ended: None,
    };
    let with = |live: &[&Arc<Allocation>]| {
        let live = live.iter().map(|allocation| (allocation.id, Arc::clone(allocation))).collect();
        Arc::new(Ledger { live: Arc::new(live), ..Ledger::clone(&node()) })
    };
    let [one, two, three, four] = [1, 2, 3, 4].map(|number| Arc::new(allocation(number, None)));
    let named = Arc::new(allocation(2, Some("p")));
    let nodes = [
        with(&[&one, &two, &three]),
        with(&[&two, &four]),
        with(&[&one, &named, &three, &four]),
        with(&[]),
        Arc::new(Ledger { parts: BTreeMap::new(), ..Ledger::clone(&with(&[&two, &three])) }),
    ];
    for before in &nodes {
        for after in &nodes {
            let old = View::new(before, at(2_000), &settings(), None);
            let made = View::new(after, at(5_000), &settings(), Some(old));
            assert_eq!(made.context, View::new(after, at(5_000), &settings(), None).context);
        }
    }
}
