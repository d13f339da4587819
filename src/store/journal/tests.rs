use super::*;
use berth_kernel::allocation::Limits;
use berth_kernel::decision::{CallNote, Cost, Grant, Outcome, Request, Said};
use berth_kernel::gpu::Reading;
use berth_kernel::names::{AllocationId, DeviceId, PartId, Resource};
use berth_kernel::offer::{Consumes, OfferLine, PartOffer};
use berth_kernel::policy::{Answer, Fault, FaultKind, Hook, OfferAnswer, Placement, Severity, TriageAnswer};
use std::fs;
use std::fs::OpenOptions;

fn gpu(n: u32) -> PartId {
    PartId::parse(&format!("GPU-{n}")).unwrap()
}

fn decision(hook: Hook, n: u32, outcome: Outcome) -> Decision {
    Decision {
        seq: 0,
        at_wall_ms: 1_000 + u64::from(n),
        hook,
        generation: 7,
        request: None,
        reading: None,
        gpus: vec![gpu(n)],
        candidates: Vec::new(),
        calls: Vec::new(),
        outcome,
        input: None,
    }
}

fn denied(n: u32) -> Decision {
    decision(Hook::Admit, n, Outcome::Denied { by: "quota@1".into(), reason: format!("no {n}") })
}

fn input(node: &str, question: &str) -> Input {
    Input { node: node.as_bytes().to_vec(), question: question.as_bytes().to_vec() }
}

fn open(folder: &tempfile::TempDir) -> FileJournal {
    FileJournal::open(folder.path(), JournalLimit::default()).unwrap()
}

fn seqs(journal: &FileJournal, filter: &Filter) -> Vec<u64> {
    journal.find(filter, 100).unwrap().decisions.iter().map(|d| d.seq).collect()
}

/// One of each kind.
fn kinds() -> Vec<Decision> {
    let device = DeviceId { part: gpu(1), share: Some(3) };
    let line =
        |consumes| OfferLine { resource: Resource::parse("nvidia.com/gpu").unwrap(), count: 2, consumes };
    let slice = Consumes::Slice { memory_mib: 512, compute_percent: 10 };
    let offer = PartOffer { part: gpu(1), lines: vec![line(Consumes::Whole), line(slice)] };
    let placement = Placement { devices: vec![device], reason: "near".into() };
    let triage = TriageAnswer { severity: Severity::Degraded, reason: "hot".into(), again_after_s: Some(60) };
    let call = |said| CallNote {
        policy: "p@1".into(),
        digest: Digest::parse(&"a".repeat(64)).unwrap(),
        parameters: "{\"a\":1}".into(),
        said,
        cost: Cost { fuel: 12, wall_us: 34 },
    };
    let terms = berth_kernel::policy::Terms {
        environment: vec![("A".into(), "b".into())],
        limits: Limits { memory_mib: Some(512), compute_percent: None },
        reason: "why not".into(),
    };
    let grant = Grant {
        allocation: Some(AllocationId::parse("5eed0001-17").unwrap()),
        by: vec!["p@1".into()],
        reason: terms.reason.clone(),
        limits: terms.limits,
        environment: terms.environment.clone(),
    };
    let answers = OfferAnswer { parts: vec![offer.clone()], again_after_s: None };
    let fault = Fault { kind: FaultKind::Fuel, detail: "too much".into() };
    vec![
        Decision {
            calls: vec![call(Said::Pass), call(Said::Answer(Answer::Offer(answers)))],
            ..decision(Hook::Offer, 1, Outcome::Offered(vec![(offer, "p@1".into())]))
        },
        Decision {
            request: Some(Request { resource: "r".into(), count: 1, devices: vec!["d".into()] }),
            calls: vec![call(Said::Fault(fault)), call(Said::Answer(Answer::Place(placement.clone())))],
            ..decision(Hook::Place, 2, Outcome::Placed(placement, "p@1".into()))
        },
        Decision {
            candidates: vec!["team/pod".into()],
            calls: vec![call(Said::Suspended), call(Said::Answer(Answer::Allow(terms)))],
            ..decision(Hook::Admit, 3, Outcome::Granted(grant))
        },
        Decision { calls: vec![call(Said::Answer(Answer::Deny("no 4".into())))], ..denied(4) },
        decision(Hook::Admit, 5, Outcome::Refused { reason: "held".into() }),
        Decision {
            reading: Some(Reading { part: gpu(6), source: "xid".into(), code: 79, detail: "gone".into() }),
            calls: vec![call(Said::Answer(Answer::Triage(triage.clone())))],
            ..decision(Hook::Triage, 6, Outcome::Triaged(triage, "p@1".into()))
        },
    ]
}

#[test]
fn what_is_put_down_is_read_back_also_by_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for decision in kinds() {
        journal.append(&decision, None).unwrap();
    }
    let numbered = |(seq, decision): (u64, Decision)| Decision { seq, ..decision };
    let mut expected: Vec<_> = (1..).zip(kinds()).map(numbered).collect();
    expected.reverse();
    assert_eq!(journal.find(&Filter::default(), 100).unwrap().decisions, expected);
    drop(journal);
    let journal = open(&folder);
    assert_eq!(journal.find(&Filter::default(), 100).unwrap().decisions, expected);
    assert_eq!(journal.append(&denied(9), None).unwrap(), 7, "numbers go on");
    assert_eq!(journal.standing().kept, 7);
    assert_eq!(journal.standing().oldest_wall_ms, Some(1_001));
}

#[test]
fn filters_pick() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for decision in kinds() {
        journal.append(&decision, None).unwrap();
    }
    let with = |change: fn(&mut Filter)| {
        let mut filter = Filter::default();
        change(&mut filter);
        seqs(&journal, &filter)
    };
    assert_eq!(with(|f| f.gpu = Some(gpu(2))), [2]);
    assert_eq!(with(|f| f.hook = Some(Hook::Admit)), [5, 4, 3]);
    assert_eq!(with(|f| f.outcome = Some("denied".into())), [4]);
    assert_eq!(with(|f| f.outcome = Some("fault".into())), [2]);
    assert_eq!(with(|f| f.policy = Some("quota".into())), [4]);
    assert_eq!(with(|f| f.since_wall_ms = Some(1_005)), [6, 5]);
    assert_eq!(with(|f| f.until_wall_ms = Some(1_003)), [2, 1]);
    assert_eq!(with(|f| f.before = Some(3)), [2, 1]);
    let whose = |pod: &str| Filter {
        whose: Some(berth_kernel::decision::Whose { pod: Some(pod.into()), ..Default::default() }),
        ..Filter::default()
    };
    for pod in ["team/pod", "team/", "/pod"] {
        assert_eq!(seqs(&journal, &whose(pod)), [3], "{pod}");
    }
    assert!(seqs(&journal, &whose("team/other")).is_empty());
}

#[test]
fn pages_follow_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for n in 0..7 {
        journal.append(&denied(n), None).unwrap();
    }
    let mut filter = Filter::default();
    let mut all = Vec::new();
    loop {
        let found = journal.find(&filter, 3).unwrap();
        all.extend(found.decisions.iter().map(|d| d.seq));
        match found.next {
            Some(next) => filter.before = Some(next),
            None => break,
        }
    }
    assert_eq!(all, [7, 6, 5, 4, 3, 2, 1]);
}

#[test]
fn the_newest_are_found_in_memory_as_they_are_found_in_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for n in 0..200 {
        let mut decision = kinds().swap_remove(usize::try_from(n % 6).unwrap());
        decision.at_wall_ms = 1_000 + n;
        journal.append(&decision, Some(&input("{}", "{}"))).unwrap();
    }
    let with = |change: fn(&mut Filter)| {
        let mut filter = Filter::default();
        change(&mut filter);
        filter
    };
    let filters = [
        Filter::default(),
        with(|f| f.hook = Some(Hook::Admit)),
        with(|f| f.outcome = Some("denied".into())),
        with(|f| f.before = Some(190)),
        with(|f| f.before = Some(20)),
        with(|f| f.since_wall_ms = Some(1_150)),
        with(|f| f.gpu = Some(gpu(99))),
    ];
    let ask = |journal: &FileJournal| -> Vec<_> {
        let asked = filters.iter().flat_map(|filter| [1, 5, 50, 63, 64, 100].map(|limit| (filter, limit)));
        asked.map(|(filter, limit)| journal.find(filter, limit).unwrap()).collect()
    };
    let oldest = journal.lock().oldest();
    let recent = |limit| journal.lock().recent.find(&filters[0], limit, oldest);
    assert!(recent(63).is_some() && recent(64).is_none(), "both ways are tried");
    let in_memory = ask(&journal);
    drop(journal);
    // Nothing is in memory after a start.
    assert_eq!(ask(&open(&folder)), in_memory);
}

#[test]
fn what_was_shown_is_kept_once_and_found_by_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    let node = format!("{{\"node\":\"{}\"}}", "x".repeat(10_000));
    for n in 0..50 {
        journal.append(&denied(n), Some(&input(&node, &format!("{{\"n\":{n}}}")))).unwrap();
    }
    let (found, shown) = journal.open(33).unwrap().unwrap();
    assert_eq!(shown, Some(input(&node, "{\"n\":32}")));
    let name: [u8; 32] = Sha256::digest(node.as_bytes()).into();
    assert_eq!(found.input.unwrap().as_str(), hex(&name));
    let bytes = fs::read(&journal.lock().segments.all[0].path).unwrap();
    let nodes = frames(&bytes).filter(|frame| matches!(frame.head, Head::Node { .. })).count();
    assert_eq!(nodes, 1);
    assert_eq!(journal.open(51).unwrap(), None);
}

/// Noise that cannot be deflated, so that files fill fast.
fn noise(n: u64) -> String {
    let mut state = n + 1;
    let mut text = String::new();
    for _ in 0..8_000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text.push_str(&format!("{:016x}", state));
    }
    format!("{{\"noise\":\"{text}\"}}")
}

#[test]
fn the_oldest_go_and_are_counted() {
    let folder = tempfile::tempdir().unwrap();
    let limits = JournalLimit { bytes: 3 * SEGMENT_BYTES, ..JournalLimit::default() };
    let journal = FileJournal::open(folder.path(), limits).unwrap();
    let mut n = 0;
    while journal.standing().dropped == 0 {
        n += 1;
        journal.append(&denied(0), Some(&input(&noise(n), "{}"))).unwrap();
        assert!(journal.standing().bytes <= limits.bytes + 256 * 1024, "after {n}");
        assert!(n < 2_000, "nothing was ever dropped");
    }
    let standing = journal.standing();
    assert_eq!(standing.kept + standing.dropped, n);
    assert_eq!(journal.open(1).unwrap(), None);
    let mut filter = Filter::default();
    let mut seen = 0;
    loop {
        let found = journal.find(&filter, 1_000).unwrap();
        seen += found.decisions.len() as u64;
        match found.next {
            Some(next) => filter.before = Some(next),
            None => break,
        }
    }
    assert_eq!(seen, standing.kept, "whatever is kept is found");
}

#[test]
fn what_is_too_old_goes_after_an_hour_of_being_too_old() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    journal.append(&denied(1), None).unwrap();
    drop(journal);
    let journal = open(&folder);
    journal.append(&denied(2), None).unwrap();
    drop(journal);
    let first = folder.path().join(format!("{:020}.log", 1));
    let file = OpenOptions::new().append(true).open(&first).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(8 * 24 * 3600)).unwrap();
    // It may be the clock.
    let journal = open(&folder);
    assert_eq!(seqs(&journal, &Filter::default()), [2, 1]);
    journal.append(&denied(3), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [3, 2, 1]);
    let hour_ago = Instant::now().checked_sub(AGED_APART).unwrap();
    journal.lock().aged = hour_ago;
    journal.append(&denied(4), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [4, 3, 2]);
    assert_eq!(journal.standing().dropped, 1);
}

#[test]
fn a_file_that_this_release_cannot_read_hides_no_other() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    journal.append(&denied(1), None).unwrap();
    drop(journal);
    // Whole frames, of a later release perhaps.
    let mut later = Vec::new();
    frame::write(&mut later, Head::Decision { seq: 2, at_wall_ms: 5_000 }, b"{\"later\":1}").unwrap();
    fs::write(folder.path().join(format!("{:020}.log", 2)), later).unwrap();
    let journal = open(&folder);
    assert_eq!(seqs(&journal, &Filter::default()), [1]);
    assert_eq!(seqs(&journal, &Filter { since_wall_ms: Some(1_000), ..Filter::default() }), [1]);
}

#[test]
fn each_has_what_the_policies_were_shown() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    let shown = [input("{\"node\":1}", "{\"q\":1}"), input("{\"node\":2}", "{\"q\":2}")];
    for shown in [&shown[0], &shown[1], &shown[0], &shown[1]] {
        journal.append(&denied(1), Some(shown)).unwrap();
    }
    journal.append(&denied(4), None).unwrap();
    let mut seen = Vec::new();
    let mut each = |filter: &Filter, most: usize| {
        let next = journal.each(filter, &mut |decision, input| {
            let room = seen.len() < most;
            if room {
                seen.push((decision.seq, input));
            }
            room
        });
        (next.unwrap(), seen.clone())
    };
    let (next, some) = each(&Filter::default(), 2);
    assert_eq!(some, [(5, None), (4, Some(shown[1].clone()))]);
    assert_eq!(next, Some(4), "the one that was not taken is the first of the next look");
    let (next, all) = each(&Filter { before: next, ..Filter::default() }, 9);
    let rest = [(3, 0), (2, 1), (1, 0)].map(|(seq, n)| (seq, Some(shown[n].clone())));
    assert_eq!(all[2..], rest);
    assert_eq!(next, None);
    // As one by one.
    for (seq, input) in all {
        assert_eq!(journal.open(seq).unwrap().unwrap().1, input);
    }
}

#[test]
fn a_torn_tail_costs_only_itself() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for n in 0..3 {
        journal.append(&denied(n), None).unwrap();
    }
    drop(journal);
    let path = folder.path().join(format!("{:020}.log", 1));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 5).unwrap();
    let journal = open(&folder);
    assert_eq!(seqs(&journal, &Filter::default()), [2, 1]);
    journal.append(&denied(9), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [3, 2, 1]);
}

#[test]
fn a_disk_that_fails_loses_what_was_pending_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    journal.append(&denied(1), None).unwrap();
    journal.flush().unwrap();
    // A file with the name of the next one: it cannot be begun.
    journal.lock().file = None;
    let taken = folder.path().join(format!("{:020}.log", 2));
    fs::write(&taken, b"").unwrap();
    journal.append(&denied(2), None).unwrap();
    let error = journal.flush().unwrap_err();
    assert!(error.to_string().contains("cannot be written"), "{error}");
    assert_eq!(journal.standing().lost, 1);
    journal.append(&denied(3), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [3, 1]);
}

#[test]
fn strange_files_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    fs::write(folder.path().join(format!("{:020}.log", 5)), b"no frame").unwrap();
    let journal = open(&folder);
    assert_eq!(journal.append(&denied(1), None).unwrap(), 6, "the name is taken");
    assert_eq!(seqs(&journal, &Filter::default()), [6]);
    assert!(folder.path().join("notes.txt").exists());
}

#[test]
fn how_much_there_is_waits_for_no_disk() {
    let folder = tempfile::tempdir().unwrap();
    let journal = std::sync::Arc::new(open(&folder));
    journal.append(&denied(1), None).unwrap();
    let before = journal.size();
    assert_eq!((before.kept, before.lost), (1, 0));
    assert!(before.bytes > 0);
    // As while a write hangs.
    let held = journal.lock();
    let (told, tells) = std::sync::mpsc::channel();
    let asked = std::sync::Arc::clone(&journal);
    let asking = std::thread::spawn(move || told.send(asked.size()));
    let size = tells.recv_timeout(std::time::Duration::from_secs(20));
    drop(held);
    assert_eq!(size.ok(), Some(before), "it waited for the lock");
    asking.join().unwrap().unwrap();
    drop(journal);
    assert_eq!(open(&folder).size().kept, 1, "it is known from the start");
}
