use super::*;
use berth_kernel::change::{Change, Entry};
use berth_kernel::gpu::Mig;
use berth_kernel::pods::{Pod, PodContainer, PodsSource, PodsView, Stage};
use std::collections::VecDeque;

#[test]
fn candidates_have_their_labels() {
    let resource = Resource::parse("nvidia.com/gpu").unwrap();
    let pod = Pod {
        uid: "u".into(),
        namespace: "team".into(),
        name: "p".into(),
        labels: vec![("app".into(), "x".into())],
        is_static: false,
        is_of_daemon_set: false,
        stage: Stage::Waiting,
        deletion_wall_ms: None,
        created_wall_ms: 0,
        containers: vec![PodContainer { name: "main".into(), requests: vec![(resource.clone(), 2)] }],
        bypass: None,
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
    let shown = View::new(&ledger, Now::default(), &Rules::sample()).candidates(&resource, 2);
    let [candidate] = shown.as_slice() else { panic!("{} candidates", shown.len()) };
    let names = (candidate.namespace.as_str(), candidate.pod.as_str(), candidate.container.as_str());
    assert_eq!(names, ("team", "p", "main"));
    assert_eq!(candidate.pod_uid, "u");
    assert_eq!(candidate.labels[0].key, "app");
    assert!(View::new(&ledger, Now::default(), &Rules::sample()).candidates(&resource, 1).is_empty());
}

#[test]
fn parts_have_the_resource_of_the_baseline() {
    let gpu = |n: u32, mig_enabled| Part {
        id: PartId::parse(&format!("GPU-{n}")).unwrap(),
        parent: None,
        vendor: "nvidia".into(),
        model: "Test".into(),
        gpu_index: n,
        minor: Some(n),
        memory_mib: 80_000,
        pci_bus: String::new(),
        numa_node: None,
        mig_enabled,
        mig: None,
        attributes: BTreeMap::new(),
    };
    let instance = Part {
        id: PartId::parse("MIG-1").unwrap(),
        parent: PartId::parse("GPU-1").ok(),
        mig: Some(Mig { profile: "1g.10gb+me".into(), gpu_instance: 7, compute_instance: 0 }),
        ..gpu(1, false)
    };
    let mut ledger = Ledger::default();
    let changes = [gpu(0, false), gpu(1, true), instance].map(Change::PartFound).to_vec();
    ledger.apply(&Entry { at: Now::default(), changes });
    let ledger = Arc::new(ledger);
    let resources = |mig| -> Vec<Option<String>> {
        let view = View::new(&ledger, Now::default(), &Rules { mig, ..Rules::sample() });
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
