use super::*;
use berth_kernel::grants::allocation::Limits;
use berth_kernel::hardware::gpu::Reading;
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{AllocationId, DeviceId, GpuId, Resource};
use berth_kernel::policy::decision::{CallOutcome, CallRecord, Cost, Grant, Outcome, Request};
use berth_kernel::policy::hooks::{Answer, Fault, FaultKind, Hook, OfferAnswer, Placement};
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::fs;
use std::fs::OpenOptions;

fn gpu(n: u32) -> GpuId {
    GpuId::parse(&format!("GPU-{n}")).unwrap()
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

/// One decision of each kind.
fn decisions_of_each_kind() -> Vec<Decision> {
    let device = DeviceId { part: gpu(1).as_part().clone(), share: Some(3) };
    let line =
        |consumes| OfferLine { resource: Resource::parse("nvidia.com/gpu").unwrap(), count: 2, consumes };
    let slice = Consumes::Slice { memory_mib: 512, compute_percent: 10 };
    let offer = PartOffer { part: gpu(1).as_part().clone(), lines: vec![line(Consumes::Whole), line(slice)] };
    let placement = Placement { devices: vec![device], reason: "near".into() };
    let triage = TriageAnswer { severity: Severity::Degraded, reason: "hot".into(), again_after_s: Some(60) };
    let call = |outcome| CallRecord {
        policy: "p@1".into(),
        digest: Digest::parse(&"a".repeat(64)).unwrap(),
        parameters: "{\"a\":1}".into(),
        outcome,
        cost: Cost { fuel: 12, wall_us: 34 },
    };
    let terms = berth_kernel::policy::hooks::Terms {
        environment: vec![("A".into(), "b".into())],
        limits: Limits { memory_mib: Some(512), compute_percent: None },
        reason: "why not".into(),
    };
    let grant = Grant {
        allocation: Some(AllocationId::parse("5eed0001-17").unwrap()),
        by: vec!["p@1".into()],
        terms: terms.clone(),
    };
    let answers = OfferAnswer { parts: vec![offer.clone()], again_after_s: None };
    let fault = Fault { kind: FaultKind::Fuel, detail: "too much".into() };
    vec![
        Decision {
            calls: vec![call(CallOutcome::Pass), call(CallOutcome::Answer(Answer::Offer(answers)))],
            ..decision(Hook::Offer, 1, Outcome::Offered(vec![(offer, "p@1".into())]))
        },
        Decision {
            request: Some(Request { resource: "r".into(), count: 1, devices: vec!["d".into()] }),
            calls: vec![
                call(CallOutcome::Fault(fault)),
                call(CallOutcome::Answer(Answer::Place(placement.clone()))),
            ],
            ..decision(Hook::Place, 2, Outcome::Placed(placement, "p@1".into()))
        },
        Decision {
            candidates: vec!["team/pod".into()],
            calls: vec![call(CallOutcome::Suspended), call(CallOutcome::Answer(Answer::Allow(terms)))],
            ..decision(Hook::Admit, 3, Outcome::Granted(grant))
        },
        Decision { calls: vec![call(CallOutcome::Answer(Answer::Deny("no 4".into())))], ..denied(4) },
        decision(Hook::Admit, 5, Outcome::Refused { reason: "held".into() }),
        Decision {
            reading: Some(Reading {
                part: gpu(6).as_part().clone(),
                source: "xid".into(),
                code: 79,
                detail: "gone".into(),
            }),
            calls: vec![call(CallOutcome::Answer(Answer::Triage(triage.clone())))],
            ..decision(Hook::Triage, 6, Outcome::Triaged(triage, "p@1".into()))
        },
    ]
}

#[test]
fn appended_decisions_are_found_before_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for decision in decisions_of_each_kind() {
        journal.append(&decision, None).unwrap();
    }
    let numbered = |(seq, decision): (u64, Decision)| Decision { seq, ..decision };
    let mut expected: Vec<_> = (1..).zip(decisions_of_each_kind()).map(numbered).collect();
    expected.reverse();
    assert_eq!(journal.find(&Filter::default(), 100).unwrap().decisions, expected);
    drop(journal);
    let journal = open(&folder);
    assert_eq!(journal.find(&Filter::default(), 100).unwrap().decisions, expected);
    assert_eq!(journal.append(&denied(9), None).unwrap(), 7, "numbers continue");
    assert_eq!(journal.stats().kept, 7);
    assert_eq!(journal.stats().oldest_wall_ms, Some(1_001));
}

#[test]
fn find_returns_the_matching_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for decision in decisions_of_each_kind() {
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
    let of_pod = |pod: &str| Filter {
        requester: Some(berth_kernel::policy::decision::Requester {
            pod: Some(pod.into()),
            ..Default::default()
        }),
        ..Filter::default()
    };
    for pod in ["team/pod", "team/", "/pod"] {
        assert_eq!(seqs(&journal, &of_pod(pod)), [3], "{pod}");
    }
    assert!(seqs(&journal, &of_pod("team/other")).is_empty());
}

#[test]
fn pages_are_consecutive() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for n in 0..7 {
        journal.append(&denied(n), None).unwrap();
    }
    let mut filter = Filter::default();
    let mut listed = Vec::new();
    loop {
        let found = journal.find(&filter, 3).unwrap();
        listed.extend(found.decisions.iter().map(|d| d.seq));
        match found.next {
            Some(next) => filter.before = Some(next),
            None => break,
        }
    }
    assert_eq!(listed, [7, 6, 5, 4, 3, 2, 1]);
}

#[test]
fn a_find_in_memory_equals_a_find_in_the_files() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    for n in 0..200 {
        let mut decision = decisions_of_each_kind().swap_remove(usize::try_from(n % 6).unwrap());
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
    let find_all = |journal: &FileJournal| -> Vec<_> {
        let queries = filters.iter().flat_map(|filter| [1, 5, 50, 63, 64, 100].map(|limit| (filter, limit)));
        queries.map(|(filter, limit)| journal.find(filter, limit).unwrap()).collect()
    };
    let oldest = journal.state.lock().oldest();
    let recent = |limit| journal.state.lock().recent.find(&filters[0], limit, oldest);
    assert!(recent(63).is_some() && recent(64).is_none(), "both cases are covered");
    let in_memory = find_all(&journal);
    drop(journal);
    // After a restart no decision is in memory.
    assert_eq!(find_all(&open(&folder)), in_memory);
}

#[test]
fn a_node_is_stored_once_and_found_by_its_digest() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    let node = format!("{{\"node\":\"{}\"}}", "x".repeat(10_000));
    for n in 0..50 {
        journal.append(&denied(n), Some(&input(&node, &format!("{{\"n\":{n}}}")))).unwrap();
    }
    let (found, recorded) = journal.open(33).unwrap().unwrap();
    assert_eq!(recorded, Some(input(&node, "{\"n\":32}")));
    let digest: [u8; 32] = Sha256::digest(node.as_bytes()).into();
    assert_eq!(found.input.unwrap().as_str(), hex(&digest));
    let bytes = fs::read(&journal.state.lock().segments.list[0].path).unwrap();
    let nodes = frames(&bytes).filter(|frame| matches!(frame.head, Head::Node { .. })).count();
    assert_eq!(nodes, 1);
    assert_eq!(journal.open(51).unwrap(), None);
}

/// Random text, which does not compress, so that files fill fast.
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
fn the_oldest_decisions_are_dropped_and_counted() {
    let folder = tempfile::tempdir().unwrap();
    let limits = JournalLimit { bytes: 3 * SEGMENT_BYTES, ..JournalLimit::default() };
    let journal = FileJournal::open(folder.path(), limits).unwrap();
    let mut n = 0;
    while journal.stats().dropped == 0 {
        n += 1;
        journal.append(&denied(0), Some(&input(&noise(n), "{}"))).unwrap();
        assert!(journal.stats().bytes <= limits.bytes + 256 * 1024, "after {n}");
        assert!(n < 2_000, "nothing was dropped");
    }
    let stats = journal.stats();
    assert_eq!(stats.kept + stats.dropped, n);
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
    assert_eq!(seen, stats.kept, "every kept decision is found");
}

#[test]
fn a_file_is_dropped_for_its_age_after_an_hour_at_the_earliest() {
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
    // Not at once: the clock may be wrong.
    let journal = open(&folder);
    assert_eq!(seqs(&journal, &Filter::default()), [2, 1]);
    journal.append(&denied(3), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [3, 2, 1]);
    let hour_ago = Instant::now().checked_sub(AGE_PRUNE_INTERVAL).unwrap();
    journal.state.lock().last_age_prune = hour_ago;
    journal.append(&denied(4), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [4, 3, 2]);
    assert_eq!(journal.stats().dropped, 1);
}

#[test]
fn an_unreadable_decision_is_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    journal.append(&denied(1), None).unwrap();
    drop(journal);
    // A valid frame of a later release.
    let mut later = Vec::new();
    frame::write(&mut later, Head::Decision { seq: 2, at_wall_ms: 5_000 }, b"{\"later\":1}").unwrap();
    fs::write(folder.path().join(format!("{:020}.log", 2)), later).unwrap();
    let journal = open(&folder);
    assert_eq!(seqs(&journal, &Filter::default()), [1]);
    assert_eq!(seqs(&journal, &Filter { since_wall_ms: Some(1_000), ..Filter::default() }), [1]);
}

#[test]
fn each_decision_has_the_policies_input() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    let inputs = [input("{\"node\":1}", "{\"q\":1}"), input("{\"node\":2}", "{\"q\":2}")];
    for input in [&inputs[0], &inputs[1], &inputs[0], &inputs[1]] {
        journal.append(&denied(1), Some(input)).unwrap();
    }
    journal.append(&denied(4), None).unwrap();
    let mut seen = Vec::new();
    let mut visit_up_to = |filter: &Filter, limit: usize| {
        let next = journal.visit_each(filter, &mut |decision, input| {
            let has_room = seen.len() < limit;
            if has_room {
                seen.push((decision.seq, input));
            }
            has_room
        });
        (next.unwrap(), seen.clone())
    };
    let (next, first_page) = visit_up_to(&Filter::default(), 2);
    assert_eq!(first_page, [(5, None), (4, Some(inputs[1].clone()))]);
    assert_eq!(next, Some(4), "the rejected decision is the first of the next page");
    let (next, visited) = visit_up_to(&Filter { before: next, ..Filter::default() }, 9);
    let second_page = [(3, 0), (2, 1), (1, 0)].map(|(seq, n)| (seq, Some(inputs[n].clone())));
    assert_eq!(visited[2..], second_page);
    assert_eq!(next, None);
    // Opening each decision gives the same inputs.
    for (seq, input) in visited {
        assert_eq!(journal.open(seq).unwrap().unwrap().1, input);
    }
}

#[test]
fn a_torn_tail_loses_only_the_last_decision() {
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
fn a_failed_write_loses_only_the_pending_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let journal = open(&folder);
    journal.append(&denied(1), None).unwrap();
    journal.flush().unwrap();
    // The next file's name exists, so the file cannot be created.
    journal.state.lock().file = None;
    let next_file = folder.path().join(format!("{:020}.log", 2));
    fs::write(&next_file, b"").unwrap();
    journal.append(&denied(2), None).unwrap();
    let error = journal.flush().unwrap_err();
    assert!(error.to_string().contains("cannot be written"), "{error}");
    assert_eq!(journal.stats().lost, 1);
    journal.append(&denied(3), None).unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [3, 1]);
}

#[test]
fn other_files_are_ignored() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("notes.txt"), b"mine").unwrap();
    fs::write(folder.path().join(format!("{:020}.log", 5)), b"no frame").unwrap();
    let journal = open(&folder);
    assert_eq!(journal.append(&denied(1), None).unwrap(), 6, "the name is in use");
    assert_eq!(seqs(&journal, &Filter::default()), [6]);
    assert!(folder.path().join("notes.txt").exists());
}

#[test]
fn statistics_are_read_without_the_lock() {
    let folder = tempfile::tempdir().unwrap();
    let journal = std::sync::Arc::new(open(&folder));
    journal.append(&denied(1), None).unwrap();
    let before = journal.stats_without_oldest();
    assert_eq!((before.kept, before.lost), (1, 0));
    assert!(before.bytes > 0);
    // A hanging write holds the lock.
    let held = journal.state.lock();
    let (sender, receiver) = std::sync::mpsc::channel();
    let reader_journal = std::sync::Arc::clone(&journal);
    let reader = std::thread::spawn(move || sender.send(reader_journal.stats_without_oldest()));
    let stats = receiver.recv_timeout(std::time::Duration::from_secs(20));
    drop(held);
    assert_eq!(stats.ok(), Some(before), "it waited for the lock");
    reader.join().unwrap().unwrap();
    drop(journal);
    assert_eq!(open(&folder).stats_without_oldest().kept, 1, "known right after opening");
}

#[test]
fn nothing_is_written_to_a_nearly_full_disk_and_what_is_there_stays() {
    let folder = tempfile::tempdir().unwrap();
    let mut journal = open(&folder);
    for n in 1..=3 {
        journal.append(&denied(n), None).unwrap();
        journal.flush().unwrap();
        // A file of its own for each.
        journal = open(&folder);
    }
    let on_disk = || {
        let files = fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap());
        let mut files: Vec<_> =
            files.map(|file| (file.file_name(), file.metadata().unwrap().len())).collect();
        files.sort();
        files
    };
    let before = on_disk();
    journal.free_bytes = |_| Ok(FREE_BYTES_MIN - 1);
    for n in 4..=5 {
        journal.append(&denied(n), None).unwrap();
        let error = journal.flush().unwrap_err();
        assert!(error.source.unwrap().to_string().contains("its disk has 15 MiB left"));
    }
    assert_eq!(on_disk(), before);
    let stats = journal.stats_without_oldest();
    assert_eq!((stats.kept, stats.lost, stats.dropped), (3, 2, 0));
    journal.free_bytes = |_| Ok(FREE_BYTES_MIN);
    journal.append(&denied(6), None).unwrap();
    journal.flush().unwrap();
    assert_eq!(seqs(&journal, &Filter::default()), [6, 3, 2, 1]);
}
