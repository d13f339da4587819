//! Offers of a stack: for each GPU those of the first policy that answers, else of the baseline.

use super::*;
use crate::stack::Offers;
use berth_kernel::ids::names::PartId;

#[test]
fn the_first_policy_that_answers_for_a_gpu_offers_it_else_the_baseline() {
    let shared = "nvidia.com/gpu.shared";
    let mut case = Case::new([
        ('a', offers(vec![offer(1, shared, 4, 250)], Some(60))),
        ('b', offers(vec![offer(1, shared, 2, 500)], Some(7))),
    ]);
    let Offers { mut parts, again_after_s, faults, .. } = case.evaluation().offers();
    parts.sort_by_key(|(o, _)| o.part.clone());
    assert_eq!(parts.len(), 2);
    assert_eq!(parts[0].1, "baseline");
    assert_eq!(parts[0].0.lines[0].resource, resource("nvidia.com/gpu"));
    assert_eq!((parts[1].0.lines[0].count, parts[1].1.as_str()), (4, "a@aaaaaaaaaaaa"));
    assert_eq!((again_after_s, faults.len()), (Some(7), 0));
}

#[test]
fn the_baseline_offers_mig_by_strategy_after_the_policies() {
    let named = |case: &mut Case| -> Vec<(String, String)> {
        let parts = case.evaluation().offers().parts;
        let lines = parts.iter().flat_map(|(o, _)| o.lines.iter().map(|l| (&o.part, &l.resource)));
        let mut names: Vec<_> = lines.map(|(part, r)| (part.to_string(), r.to_string())).collect();
        names.sort();
        names
    };
    let pair = |part: &str, resource: &str| (part.to_owned(), format!("nvidia.com/{resource}"));
    let mut case = Case::new([('a', Ok(None))]);
    case.enable_mig(1);
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("GPU-1", "gpu")], "none");
    case.baseline.mig = MigStrategy::Mixed;
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("MIG-1", "mig-1g.10gb.me")]);
    case.baseline.mig = MigStrategy::Single;
    assert!(case.evaluation().offers().notes.mig.refusal.unwrap().contains("GPU 0"));
    assert_eq!(named(&mut case), []);
    // A policy shares the GPU that caused the refusal.
    let mut case = Case::new([('a', offers(vec![offer(0, "nvidia.com/gpu.shared", 2, 500)], None))]);
    case.enable_mig(1);
    case.baseline.mig = MigStrategy::Single;
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu.shared"), pair("MIG-1", "gpu")]);
    // A policy offers the instance, so its GPU is not offered as a whole as well.
    let instance =
        OfferLine { resource: resource("nvidia.com/mig-1g.10gb"), count: 1, consumes: Consumes::Whole };
    let part = PartId::parse("MIG-1").unwrap();
    let mut case = Case::new([('a', offers(vec![PartOffer { part, lines: vec![instance] }], None))]);
    case.enable_mig(1);
    assert_eq!(named(&mut case), [pair("GPU-0", "gpu"), pair("MIG-1", "mig-1g.10gb")]);
}

#[test]
fn single_withholds_a_resource_name_of_two_kinds_of_parts() {
    let whole = "nvidia.com/gpu";
    let instance = |name: &str| PartOffer {
        part: PartId::parse("MIG-1").unwrap(),
        lines: vec![OfferLine { resource: resource(name), count: 1, consumes: Consumes::Whole }],
    };
    let shares = |name: &str| offer(0, name, 4, 250);
    // Offered by a policy and the baseline; by two policies; by one policy, under another name.
    let stacks = [
        vec![('a', offers(vec![shares(whole)], None))],
        vec![('a', offers(vec![shares(whole)], None)), ('b', offers(vec![instance(whole)], None))],
        vec![('a', offers(vec![shares("nvidia.com/gpu.shared"), instance("nvidia.com/gpu.shared")], None))],
    ];
    for stack in stacks {
        let mut case = Case::new(stack);
        case.enable_mig(1);
        case.baseline.mig = MigStrategy::Single;
        let offers = case.evaluation().offers();
        assert!(offers.parts.iter().all(|(offer, _)| offer.lines.is_empty()), "{:?}", offers.parts);
        let refusal = offers.notes.mig.refusal.unwrap();
        assert!(refusal.contains("1g.10gb+me on GPU 1, no MIG mode on GPU 0"), "{refusal}");
    }
}

#[test]
fn warnings_of_a_policy_are_shown_with_its_label_up_to_a_limit() {
    let mut case = Case::new([('a', offers(vec![], None)), ('b', trap())]);
    case.policies.lines = vec!["just a line".into(), "warning: no such GPU".into()];
    let both = ["policy a@aaaaaaaaaaaa: no such GPU", "policy b@bbbbbbbbbbbb: no such GPU"];
    assert_eq!(case.evaluation().offers().notes.reasons(), both);
    let mut passes = Case::new([('a', Ok(None))]);
    passes.policies.lines = vec!["warning: nothing here can be shared".into()];
    let warned = ["policy a@aaaaaaaaaaaa: nothing here can be shared"];
    assert_eq!(passes.evaluation().offers().notes.reasons(), warned);
    case.policies.lines = vec!["warning: no such GPU".into(); 32];
    let warnings = case.evaluation().offers().notes.warnings;
    assert_eq!((warnings.len(), warnings[16].as_str()), (17, "48 more warnings of policies"));
}

#[test]
fn i8_a_policy_may_offer_a_gpu_in_mig_mode_only_if_mig_is_ignored() {
    let whole = OfferLine { resource: resource("nvidia.com/gpu"), count: 1, consumes: Consumes::Whole };
    let mut case = Case::new([('a', offers(vec![PartOffer { part: gpu(1), lines: vec![whole] }], None))]);
    case.enable_mig(1);
    for mig in [MigStrategy::Single, MigStrategy::Mixed] {
        case.baseline.mig = mig;
        assert!(case.evaluation().offers().faults[0].1.detail.contains("MIG mode"));
    }
    // Without a strategy it is like any other GPU.
    case.baseline.mig = MigStrategy::None;
    let offers = case.evaluation().offers();
    assert!(
        offers.faults.is_empty()
            && offers.parts.iter().any(|(o, by)| o.part == gpu(1) && by == "a@aaaaaaaaaaaa")
    );
}

#[test]
fn i8_an_offer_outside_the_permissions_or_the_part_is_a_fault() {
    let bad = [
        offer(0, "amd.com/gpu", 1, 1),
        offer(0, "nvidia.com/gpu.shared", 129, 1),
        offer(0, "nvidia.com/gpu.shared", 0, 1),
        offer(0, "nvidia.com/gpu.shared", 2, 1001),
        offer(7, "nvidia.com/gpu.shared", 2, 1),
        PartOffer {
            part: gpu(0),
            lines: [offer(0, "nvidia.com/gpu", 1, 1).lines, offer(0, "nvidia.com/gpu", 1, 1).lines].concat(),
        },
        PartOffer {
            part: gpu(0),
            lines: vec![OfferLine {
                resource: resource("nvidia.com/gpu"),
                count: 2,
                consumes: Consumes::Whole,
            }],
        },
    ];
    for offer in bad {
        let mut case = Case::new([('a', offers(vec![offer.clone()], None))]);
        let result = case.evaluation().offers();
        assert_eq!(result.faults[0].1.kind, FaultKind::Answer, "{offer:?}");
        assert!(result.parts.iter().all(|(_, by)| by == "baseline"), "I9: the baseline answers: {offer:?}");
    }
}
