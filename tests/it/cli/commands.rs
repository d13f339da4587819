//! The built `berth` against a live admin API: commands, output and exit codes.

use crate::support::admin_fakes::module;
use crate::support::admin_node::AdminNode;
use crate::support::kept_compiler::{self, kept_compiler};
use crate::support::port::Port;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};

pub(crate) struct Ran {
    pub(crate) code: i32,
    pub(crate) out: String,
    pub(crate) err: String,
}

pub(crate) fn berth(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_berth"));
    let cleared =
        std::env::vars().map(|(name, _)| name).filter(|n| n.starts_with("BERTH_") || n.starts_with("DP_"));
    for name in cleared {
        command.env_remove(name);
    }
    command.env(kept_compiler::VARIABLE, kept_compiler()).args(args).stdin(Stdio::null());
    command
}

pub(crate) fn ran(mut command: Command) -> Ran {
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Ran { code: status.code().unwrap(), out: text(stdout), err: text(stderr) }
}

impl AdminNode {
    pub(crate) fn berth(&self, args: &[&str]) -> Ran {
        ran(self.command(args))
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = berth(args);
        command.env("BERTH_SERVER", format!("http://{}", self.address()));
        command.env("BERTH_TOKEN_FILE", self.dir.path().join("token"));
        command
    }

    pub(crate) fn done(&self, args: &[&str]) -> String {
        let ran = self.berth(args);
        // A change of the stack says how many devices it withdraws.
        let err: Vec<_> =
            ran.err.lines().filter(|line| !line.starts_with("warning: this withdraws")).collect();
        assert!(ran.code == 0 && err.is_empty(), "{args:?}: {}{}", ran.out, ran.err);
        ran.out
    }

    fn refused(&self, args: &[&str]) -> String {
        let ran = self.berth(args);
        assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{args:?}: {}", ran.err);
        assert!(ran.err.starts_with("error: "), "{}", ran.err);
        ran.err
    }
}

fn write(path: &Path, text: impl AsRef<[u8]>) -> String {
    std::fs::write(path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn gpus_are_listed_shown_cordoned_and_uncordoned_by_index_uuid_or_its_beginning() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(1);
    let list = node.done(&["gpu", "list", "-o", "wide"]);
    let line = list.lines().nth(2).unwrap();
    for word in ["GPU-1", "H100", "7/81559", "healthy", "open", "nvidia.com/gpu 1/0"] {
        assert!(line.contains(word), "{word}: {list}");
    }
    let list = node.done(&["gpu", "list"]);
    let row: Vec<&str> = list.lines().nth(2).unwrap().split_whitespace().collect();
    assert_eq!([&row[..3], &row[4..7]].concat(), ["1", "healthy", "open", "1", "0", "0.0/80"], "{list}");
    assert!(!list.contains("GPU-1") && list.lines().all(|line| line.len() <= 80), "{list}");
    let shown = node.done(&["gpu", "show", "1"]);
    assert!(shown.contains(&allocation.id.to_string()) && shown.contains("hostBridge"), "{shown}");
    assert!(
        node.done(&["gpu", "cordon", "GPU-0", "--reason", "new fan"]).contains("cordoned by admin (new fan)")
    );
    assert!(node.done(&["gpu", "list"]).contains("cordoned by admin (new fan)"));
    assert!(node.done(&["gpu", "uncordon", "0"]).contains("GPU 0 is open"));
    assert!(node.refused(&["gpu", "show", "GPU-"]).contains("more characters"));
    assert!(node.refused(&["gpu", "show", "7"]).contains("berth gpu list"));
    let says = node.refused(&["gpu", "forget", "1"]);
    assert!(!says.contains("/api/"), "{says}");
    let says = node.refused(&["gpu", "forget", "GPU-0"]);
    assert!(says.contains("only a vanished GPU") && says.contains("cordon it instead"), "{says}");
    node.scan(1);
    node.end(allocation.id);
    assert!(node.done(&["gpu", "forget", "1"]).contains("GPU-1 is forgotten"));
    assert!(!node.done(&["gpu", "list", "-o", "wide"]).contains("GPU-1"));
}

#[test]
fn a_gpu_is_drained_and_marked_healthy_from_the_command_line() {
    let node = AdminNode::new(2);
    let allocation = node.allocate(0);
    let says = node.done(&["gpu", "drain", "0", "--reason", "fan", "--deadline", "10m"]);
    assert!(
        says.contains("GPU 0 is draining, ordered by admin (fan): 1 allocation left, 1 process, until"),
        "{says}"
    );
    assert!(node.done(&["gpu", "list"]).contains("draining, ordered by admin (fan)"));
    assert!(node.done(&["gpu", "drain", "0", "--stop"]).contains("GPU 0 is cordoned"));
    node.done(&["gpu", "uncordon", "0"]);
    // No pod leaves, so the drain is given up, and a waiting command reports it. On a busy machine a drain may be
    // given up before its order is answered.
    let give_up = |deadline| {
        node.berth(&["gpu", "drain", "0", "--deadline", deadline, "--at-deadline", "give-up", "--wait"])
    };
    let mut all = ["1s", "12s", "60s"].into_iter().map(give_up);
    let ran = all.find(|ran| ran.err.contains("1 allocation left")).unwrap();
    assert_eq!(ran.code, 1, "{}", ran.err);
    assert!(ran.err.contains("given up"), "{}", ran.err);
    node.end(allocation.id);
    node.scan_failing(2, 1);
    assert!(node.done(&["gpu", "show", "1"]).contains("unhealthy (fell off the bus)"));
    let says = node.refused(&["gpu", "mark-healthy", "1", "--reason", "reseated"]);
    assert!(says.contains("does not answer at present") && says.contains("fell off the bus"), "{says}");
    assert!(says.contains("mark it healthy once it answers"), "{says}");
    node.scan(2);
    assert!(node.done(&["gpu", "show", "1"]).contains("unhealthy (fell off the bus)"), "its quiet time runs");
    let says = node.done(&["gpu", "mark-healthy", "1", "--reason", "reseated"]);
    assert!(says.contains("GPU 1 is healthy (marked healthy by admin (reseated))"), "{says}");
    assert!(node.done(&["gpu", "show", "1"]).contains("fell off the bus"), "the history tells it");
    let bad = node.berth(&["gpu", "drain", "0", "--at-deadline", "give-up"]);
    assert_eq!(bad.code, 2, "{}", bad.err);
    let bad = node.berth(&["gpu", "drain", "0", "--deadline", "banana"]);
    assert!(bad.code == 2 && bad.err.contains("30s, 10m or 2h"), "{}", bad.err);
}

#[test]
fn several_gpus_are_changed_by_one_command() {
    let node = AdminNode::new(3);
    let cordoned = node.done(&["gpu", "cordon", "0", "2", "GPU-0", "--reason", "rack"]);
    assert_eq!(cordoned.lines().count(), 2, "each once: {cordoned}");
    assert!(cordoned.contains("GPU 0 is cordoned by admin (rack)") && cordoned.contains("GPU 2 is"));
    // A name that is wrong is found before anything is changed.
    assert!(node.refused(&["gpu", "uncordon", "0", "7"]).contains("no GPU \"7\""));
    let list = |node: &AdminNode| node.done(&["gpu", "list"]).matches("cordoned by").count();
    assert_eq!(list(&node), 2);
    let json: Value = serde_json::from_str(&node.done(&["gpu", "uncordon", "0", "2", "-o", "json"])).unwrap();
    let states: Vec<_> =
        json["items"].as_array().unwrap().iter().map(|gpu| gpu["drain"]["state"].clone()).collect();
    assert_eq!(states, ["active", "active"]);
    let one: Value = serde_json::from_str(&node.done(&["gpu", "cordon", "1", "-o", "json"])).unwrap();
    assert_eq!(one["index"], 1, "of one GPU it is the GPU");
    let drained = node.done(&["gpu", "drain", "0", "1"]);
    assert!(drained.contains("GPU 0 is drain") && drained.contains("GPU 1 is drain"), "{drained}");
}

#[test]
fn waiting_for_a_drain_ends_at_its_deadline_or_after_its_own_time() {
    let node = AdminNode::new(1);
    node.allocate(0);
    let late = node.berth(&["gpu", "drain", "0", "--deadline", "1s", "--wait"]);
    assert_eq!(late.code, 1, "{}", late.err);
    assert!(late.err.contains("GPU 0 is not drained at its deadline; the drain continues"), "{}", late.err);
    assert!(late.err.contains("`berth gpu drain 0 --wait` waits on"), "{}", late.err);
    assert!(node.done(&["gpu", "list"]).contains("draining"));
    // One that is late already is waited for, for as long as was ordered.
    let timed = node.berth(&["gpu", "drain", "0", "--wait", "--timeout", "1s"]);
    assert!(timed.code == 1 && timed.err.contains("is not drained after 1s"), "{}", timed.err);
}

#[test]
fn a_running_drain_is_watched_and_keeps_its_settings() {
    let node = AdminNode::new(1);
    let allocation = node.allocate(0);
    // On a busy machine a drain may be given up before the next command comes, which then orders another one.
    let watch = |deadline| {
        let order = ["gpu", "drain", "0", "--reason", "fan", "--deadline", deadline];
        node.done(&[&order[..], &["--at-deadline", "give-up"]].concat());
        node.berth(&["gpu", "drain", "0", "--wait", "--timeout", "2m"])
    };
    let mut all = ["3s", "12s", "60s"].into_iter().map(watch);
    let watched = all.find(|ran| ran.err.contains("GPU 0 is being drained already; watching")).unwrap();
    assert_eq!(watched.code, 1, "it ends at the deadline of the order: {}", watched.err);
    assert!(watched.err.contains("was stopped, or given up at its deadline"), "{}", watched.err);
    node.done(&["gpu", "drain", "0", "--deadline", "10m"]);
    let other = node.berth(&["gpu", "drain", "0", "--reason", "rack move"]);
    assert_eq!(other.code, 0, "{}", other.err);
    assert!(other.err.contains("it has no deadline any more (it was "), "{}", other.err);
    assert!(!other.out.contains("until"), "the new order holds: {}", other.out);
    node.end(allocation.id);
}

#[test]
fn json_and_yaml_output_is_the_response_of_the_api() {
    let node = AdminNode::new(2);
    node.allocate(0);
    let json: Value = serde_json::from_str(&node.done(&["-o", "json", "gpu", "list"])).unwrap();
    assert_eq!(json, node.get("/api/v1/gpus").expect(200));
    let yaml: Value = serde_saphyr::from_str(&node.done(&["allocation", "list", "-o", "yaml"])).unwrap();
    assert_eq!(yaml, node.get("/api/v1/allocations").expect(200));
}

#[test]
fn allocations_are_found_and_ended() {
    let node = AdminNode::new(2);
    let id = node.allocate(0).id.to_string();
    for args in [&["allocation", "list"][..], &["allocation", "list", "--gpu", "0"]] {
        let list = node.done(args);
        assert!(list.contains(&id) && list.contains("not known yet"), "{list}");
    }
    let none = node.berth(&["allocation", "list", "--namespace", "a&b=c"]);
    assert_eq!((none.code, none.out.as_str()), (0, ""), "a pipe gets no line");
    assert!(none.err.starts_with("No live allocations found in namespace a&b=c;"), "{}", none.err);
    assert!(node.done(&["allocation", "show", &id]).contains("baseline"));
    node.reconcile(&[]);
    assert!(node.done(&["allocation", "end", &id]).contains("has ended"));
    assert!(node.done(&["allocation", "list", "--state", "ended"]).contains("operator"));
    let strange = node.berth(&["allocation", "show", "../node"]);
    assert!(strange.code == 2 && strange.err.contains("not an allocation name"), "{}", strange.err);
    assert!(node.refused(&["allocation", "show", "00000000-99"]).contains("there is no allocation"));
}

#[test]
fn an_allocation_of_a_running_pod_ends_only_by_force_with_a_warning() {
    let node = AdminNode::new(1);
    let allocation = node.allocate(0);
    node.reconcile(&[(&allocation, "team", "train-0")]);
    let id = allocation.id.to_string();
    let refused = node.refused(&["allocation", "end", &id]);
    for part in [
        "pod team/train-0, container main",
        "checkpoint",
        "(List)",
        "end it by force: `berth allocation end",
        "--force`",
    ] {
        assert!(refused.contains(part), "{part}: {refused}");
    }
    assert!(node.done(&["allocation", "list"]).contains(&id), "it goes on");
    // Standard input is no terminal, so the flag is the whole answer.
    let forced = node.berth(&["allocation", "end", &id, "--force"]);
    assert_eq!(forced.code, 0, "{}", forced.err);
    assert!(forced.out.contains("has ended"), "{}", forced.out);
    for part in ["warning: ", "team/train-0/main", "GPU-0", "does not stop its pod"] {
        assert!(forced.err.contains(part), "{part}: {}", forced.err);
    }
    for again in [&["allocation", "end", &id][..], &["allocation", "end", &id, "--force", "--yes"]] {
        let refused = node.refused(again);
        assert!(
            refused.contains("has already ended (operator)") && !refused.contains("warning"),
            "{refused}"
        );
    }
    let alone = node.berth(&["allocation", "end", &id, "--yes"]);
    assert!(alone.code == 2 && alone.err.contains("--force"), "{}", alone.err);
}

#[test]
fn a_long_list_shows_how_to_see_the_next_items() {
    let node = AdminNode::new(1);
    (0..4).for_each(|_| node.end(node.allocate(0).id));
    let list = |args: &[&str]| node.done(&[&["allocation", "list", "--state", "ended"], args].concat());
    let rows = |text: &str| text.lines().filter(|line| line.contains("operator")).count();
    let first = list(&["--limit", "3"]);
    assert_eq!(rows(&first), 3);
    let last = first.lines().last().unwrap();
    assert!(last.starts_with("4 in total"), "{last}");
    let after = last.split("--after ").nth(1).unwrap().split(' ').next().unwrap();
    let rest = list(&["--after", after]);
    assert_eq!(rows(&rest), 1);
    assert!(!rest.contains("--after"), "{rest}");
    assert_eq!(rows(&list(&["--limit", "5000"])), 4);
    // Lists of more than one page are read in several requests.
    (4..1003).for_each(|_| node.end(node.allocate(0).id));
    assert_eq!(rows(&list(&["--limit", "1002"])), 1002);
    let all: Value = serde_json::from_str(&list(&["--limit", "5000", "-o", "json"])).unwrap();
    assert_eq!((all["items"].as_array().unwrap().len(), all.get("next")), (1003, None));
    let strange = node.berth(&["allocation", "list", "--after", "x"]);
    assert!(strange.code == 2 && strange.err.contains("the `next` of a response"), "{}", strange.err);
}

#[test]
fn a_policy_is_rolled_back_and_its_bytes_are_restored() {
    let node = AdminNode::new(1);
    let bytes = module("share", "1");
    let file = write(&node.dir.path().join("share.wasm"), &bytes);
    node.done(&["policy", "push", &file, "--by", "alice", "--why", "a try"]);
    let list = node.done(&["policy", "list", "-o", "wide"]);
    assert!(list.contains("SINCE") && list.contains("alice"), "{list}");
    assert!(node.done(&["policy", "show", "share"]).contains("a try"));
    let stack = |count: u32| {
        let text = format!("- policy: share\n  parameters: {{shares: {count}}}\n");
        write(&node.dir.path().join("stack.yaml"), text)
    };
    node.done(&["policy", "activate", &stack(2), "--by", "alice", "--reason", "two"]);
    node.done(&["policy", "activate", &stack(3), "--by", "bob"]);
    let history = node.done(&["policy", "history"]);
    let lines: Vec<&str> = history.lines().collect();
    assert!(lines[1].contains("yes") && lines[1].contains("bob"), "{history}");
    assert!(lines[2].starts_with('1') && lines[2].contains("alice") && lines[2].contains("two"), "{history}");
    let back = node.done(&["policy", "rollback", "--why", "three were too many"]);
    assert!(back.contains(r#"{"shares":2}"#) && back.contains("three were too many"), "{back}");
    assert!(node.done(&["policy", "rollback", "2", "--if-revision", "3"]).contains(r#"{"shares":3}"#));
    assert!(node.refused(&["policy", "rollback", "--if-revision", "3"]).contains("`berth policy stack`"));
    assert!(node.refused(&["policy", "rollback", "77"]).contains("berth policy history"));
    node.done(&["policy", "reset", "--why", "done"]);
    assert!(node.done(&["policy", "stack"]).contains("(done)"));

    let to = node.dir.path().join("back.wasm");
    node.done(&["policy", "download", "share", "--to", to.to_str().unwrap()]);
    assert_eq!(std::fs::read(&to).unwrap(), bytes);
    assert_eq!(node.done(&["policy", "download", "share", "--to", "-"]).as_bytes(), bytes);
    let mut command = berth(&["policy", "download", "share"]);
    command.env("BERTH_SERVER", format!("http://{}", node.address()));
    command.env("BERTH_TOKEN_FILE", node.dir.path().join("token")).current_dir(node.dir.path());
    let name = ran(command).out.split(' ').next().unwrap().to_owned();
    assert!(name.starts_with("share-") && name.ends_with(".wasm"), "{name}");
    assert_eq!(std::fs::read(node.dir.path().join(name)).unwrap(), bytes);

    node.done(&["policy", "delete", "share"]);
    assert!(node.done(&["policy", "history"]).contains("was deleted"));
    assert!(node.refused(&["policy", "rollback", "2"]).contains("berth policy push"));
}

#[test]
fn a_push_takes_a_signature_and_a_suspension_ends_by_name_or_index() {
    use std::sync::atomic::Ordering;
    let (pair, trusted) = crate::rest::versions::key("release", 1);
    let node = AdminNode::trusting(1, vec![trusted]);
    let bytes = module("share", "1");
    let file = write(&node.dir.path().join("share.wasm"), &bytes);
    let says = node.refused(&["policy", "push", &file]);
    assert!(says.contains("signed policies only") && !says.contains("header"), "{says}");
    let raw = write(&node.dir.path().join("share.wasm.sig"), pair.sign(&bytes).as_ref());
    let pushed = node.done(&["policy", "push", &file, "--signature", &raw]);
    assert!(pushed.contains("signed by release"), "{pushed}");
    assert!(node.done(&["policy", "list", "-o", "wide"]).contains("release"));
    assert!(
        node.refused(&["policy", "push", &file, "--signature", &file]).contains("not an Ed25519 signature")
    );

    let stack = write(&node.dir.path().join("stack.yaml"), "- policy: share\n  parameters: {shares: 2}\n");
    node.done(&["policy", "activate", &stack]);
    node.policies.broken.store(true, Ordering::SeqCst);
    for _ in 0..berth_core::stack::FAULTS_TO_SUSPEND {
        node.runtime.block_on(node.kernel.reoffer()).unwrap();
    }
    assert!(node.done(&["policy", "stack"]).contains("SUSPENDED"));
    node.policies.broken.store(false, Ordering::SeqCst);
    let error = node.done(&["policy", "unsuspend", "share"]);
    assert!(error.contains("share is called again") && !error.contains("SUSPENDED"), "{error}");
    assert!(node.done(&["policy", "unsuspend", "0"]).contains("was not suspended"));
    assert!(node.refused(&["policy", "unsuspend", "1"]).contains("berth policy stack"));
}

#[test]
fn a_policy_is_pushed_activated_and_rolled_back() {
    let node = AdminNode::new(1);
    let file = write(&node.dir.path().join("share.wasm"), module("share", "1"));
    assert!(node.done(&["policy", "push", &file]).contains("was uploaded and is not active yet"));
    assert!(node.done(&["policy", "push", &file]).contains("was uploaded before"));
    assert!(node.done(&["policy", "list"]).contains("share"));
    assert!(node.done(&["policy", "show", "share"]).contains("uploaded"));
    let list = "- policy: share\n  parameters: {shares: 3}\n  onFault: deny\n";
    let stack = write(&node.dir.path().join("stack.yaml"), list);
    let active = node.done(&["policy", "activate", &stack, "--if-revision", "0"]);
    assert!(active.contains(r#"{"shares":3}"#) && active.contains("deny"), "{active}");
    let says = node.refused(&["policy", "activate", &stack, "--if-revision", "0"]);
    assert!(
        says.contains("revision 1") && says.contains("`berth policy stack`") && !says.contains("ETag"),
        "{says}"
    );
    // A configuration file's stack is taken, too; a shell may pipe it in.
    let config = write(&node.dir.path().join("berth.yaml"), "gpus: nvml\nstack:\n- policy: share\n");
    assert!(node.done(&["policy", "activate", &config]).contains("revision 2"));
    assert!(node.refused(&["policy", "delete", "share"]).contains("active stack"));
    assert!(node.done(&["policy", "stack"]).contains("stack is not used while"));
    assert!(node.done(&["policy", "reset"]).contains("baseline"));
    assert!(node.done(&["policy", "delete", "share"]).contains("was deleted"));

    let noise = write(&node.dir.path().join("noise.wasm"), b"noise");
    assert!(node.refused(&["policy", "push", &noise]).contains("not a policy of the world"));
    let typo = write(&node.dir.path().join("typo.yaml"), "- policy: share\n  parameterz: {}\n");
    assert!(node.refused(&["policy", "activate", &typo]).contains("parameterz"));
    let none = write(&node.dir.path().join("none.yaml"), "hello");
    assert!(node.refused(&["policy", "activate", &none]).contains("not a stack"));
    let maybe = write(&node.dir.path().join("maybe.yaml"), "- policy: share\n  onFault: maybe\n");
    let says = node.refused(&["policy", "activate", &maybe]);
    assert!(says.contains("[0].onFault") && says.contains("expected one of `skip`, `deny`"), "{says}");
    assert!(node.refused(&["policy", "activate", "/nowhere.yaml"]).contains("cannot read"));
}

#[test]
fn with_several_versions_each_name_of_one_is_shown() {
    let node = AdminNode::new(1);
    let push = |file: &str, bytes: &[u8]| {
        let ran = node.berth(&["policy", "push", &write(&node.dir.path().join(file), bytes)]);
        assert_eq!(ran.code, 0, "{}", ran.err);
        (ran.out[..].split(' ').next().unwrap().to_owned(), ran)
    };
    let (first, ran) = push("1.wasm", &module("share", "1"));
    assert!(!ran.out.contains("digest:") && ran.err.is_empty(), "{}{}", ran.out, ran.err);
    let stack = |name: &str| {
        let text = format!("- policy: {name}\n  parameters: {{shares: 2}}\n");
        write(&node.dir.path().join("stack.yaml"), text)
    };
    node.done(&["policy", "activate", &stack("share")]);
    let (second, ran) = push("2.wasm", &module("share", "2"));
    let digest = second.strip_prefix("share@").unwrap();
    assert!(ran.out.ends_with(&format!("- policy: share\n  digest: {digest}\n")), "{}", ran.out);
    assert!(ran.out.contains(&second), "{}", ran.out);

    let old = first.strip_prefix("share@").unwrap();
    let says = node.refused(&["policy", "activate", &stack("share")]);
    assert!(says.contains(old) && says.contains(digest), "{says}");
    assert!(says.contains("(newest") && says.contains("active)"), "{says}");
    assert!(says.contains("share@DIGEST, or `digest:` in a stack file"), "{says}");
    // What changes nothing takes the newest one, and says so.
    let note = format!("note: {second} is the newest of 2 versions; `berth policy list` shows the others\n");
    for args in [&["policy", "try", "share"][..], &["policy", "show", "share"]] {
        let ran = node.berth(args);
        assert_eq!((ran.code, ran.err.as_str()), (0, note.as_str()), "{args:?}: {}", ran.out);
        assert!(ran.out.contains(digest), "{}", ran.out);
    }
    assert!(node.refused(&["policy", "delete", "share"]).contains("active)"));
    let active = node.done(&["policy", "activate", &stack(&second)]);
    let table = active.split("\nremoved: ").next().unwrap();
    assert!(!table.contains("share@") && table.contains(digest), "a name stays a name: {active}");
    assert!(
        active.ends_with(&format!("\nremoved: {first} {{\"shares\":2}}\nadded: {second} {{\"shares\":2}}\n")),
        "{active}"
    );
    let both = write(&node.dir.path().join("both.yaml"), format!("- policy: {second}\n  digest: {digest}\n"));
    assert!(node.refused(&["policy", "activate", &both]).contains("only once"));
    let says = node.refused(&["policy", "delete", &second]);
    assert!(says.contains(&format!("{second} was not deleted")), "{says}");
    assert!(says.contains("berth policy activate") && !says.contains("PUT "), "{says}");

    node.done(&["policy", "shadow", "start", &first]);
    let says = node.refused(&["policy", "delete", &first]);
    assert!(says.contains(&first) && says.contains("`berth policy shadow stop 1`"), "{says}");
    assert!(node.done(&["policy", "shadow", "show", "share"]).contains(&first));
    assert!(node.refused(&["policy", "shadow", "show", "shar"]).contains("berth policy shadow list"));
    node.done(&["policy", "shadow", "start", &second]);
    let says = node.refused(&["policy", "shadow", "stop", "share"]);
    assert!(says.contains("give a number") && says.contains(&second), "{says}");
    assert!(node.done(&["policy", "shadow", "stop", &second]).contains(&second));
    for _ in 0..3 {
        node.done(&["policy", "shadow", "start", &second]);
    }
    let says = node.refused(&["policy", "shadow", "start", &second]);
    assert!(says.contains("`berth policy shadow list`") && !says.contains("DELETE"), "{says}");
}

#[test]
fn a_push_with_a_shipped_name_causes_a_warning() {
    let node = AdminNode::new(1);
    node.record_shipped(b"shipped", "share", 5);
    let file = write(&node.dir.path().join("share.wasm"), module("share", "mine"));
    let ran = node.berth(&["policy", "push", &file]);
    let label = ran.out.split(' ').next().unwrap();
    assert_eq!(ran.code, 0, "{}", ran.err);
    let warning = format!(
        "warning: share is also the name of a shipped policy, and the name alone selects that one: use {label} or rename yours\n"
    );
    assert_eq!(ran.err, warning);
}

#[test]
fn an_unreachable_daemon_is_reported_with_advice() {
    let node = AdminNode::new(1);
    let token = node.dir.path().join("token");
    let ends = |code: i32, server: &str, token: &Path| {
        let mut command = berth(&["gpu", "list"]);
        command.args(["--server", server, "--token-file", token.to_str().unwrap()]);
        let ran = ran(command);
        assert_eq!(ran.code, code, "{}", ran.err);
        ran.err
    };
    let ask = |server: &str, token: &Path| ends(1, server, token);
    let unused = Port::held();
    let address = unused.address().to_string();
    let says = ask(&format!("http://{address}"), &token);
    assert!(says.contains("is `berth serve` running") && says.contains(&address), "{says}");
    let here = format!("http://{}", node.address());
    let says = ask(&here, Path::new("/nowhere/token"));
    assert!(says.contains("--token-file") && says.contains("No such file"), "{says}");
    let wrong = node.dir.path().join("wrong");
    write(&wrong, "0".repeat(64));
    let says = ask(&here, &wrong);
    assert!(says.contains("does not accept the token") && !says.contains("0000"), "{says}");
    for server in ["ftp://127.0.0.1", "127.0.0.1:9470", "http://h/path", ""] {
        assert!(ends(2, server, &token).contains("--server"), "{server}");
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let thread = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 4096]);
        let _ =
            stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\nno");
    });
    assert!(ask(&address, &token).contains("is not a berth daemon"));
    thread.join().unwrap();
}

#[test]
fn a_token_is_rotated_under_a_running_daemon() {
    let node = AdminNode::new(1);
    let file = node.dir.path().join("token");
    let old = write(&node.dir.path().join("old"), std::fs::read(&file).unwrap());
    node.done(&["gpu", "list"]);
    assert!(node.done(&["token", "rotate"]).contains("has a new token"));
    node.done(&["gpu", "list"]);
    assert!(node.refused(&["gpu", "list", "--token-file", &old]).contains("does not accept the token"));
    assert!(node.refused(&["token", "rotate", "--token-file", "/nowhere/token"]).contains("/nowhere/token"));
    let new = std::fs::read_to_string(&file).unwrap();
    assert_eq!(node.done(&["token", "show"]).trim(), new.trim());
    assert!(node.refused(&["token", "show", "--token-file", "/nowhere/token"]).contains("/nowhere/token"));
    let empty = write(&node.dir.path().join("empty"), "\n");
    for args in [&["token", "show"][..], &["gpu", "list"]] {
        let says = node.refused(&[args, &["--token-file", &empty]].concat());
        assert!(says.contains("is empty") && says.contains("64 hex digits"), "{says}");
    }
}

#[test]
fn bad_usage_exits_with_2_and_help_with_0_and_examples() {
    for args in
        [&[][..], &["dance"], &["gpu", "show"], &["gpu", "list", "-o", "xml"], &["serve", "--gpuss", "x"]]
    {
        let ran = ran(berth(args));
        assert_eq!(ran.code, 2, "{args:?}: {}{}", ran.out, ran.err);
    }
    for args in [&["--help"][..], &["serve", "--help"], &["gpu", "--help"], &["policy", "--help"]] {
        let ran = ran(berth(args));
        assert_eq!(ran.code, 0);
        assert!(ran.out.contains("berth "), "{args:?}: {}", ran.out);
    }
    assert!(ran(berth(&["--help"])).out.contains("Exit codes"));
}

#[test]
fn bad_values_of_flags_and_of_the_environment_exit_with_2_and_advice() {
    for (flag, variable, value, says) in [
        ("--gpus", "BERTH_GPUS", "amd", "sim:8xh100"),
        ("--gpus", "BERTH_GPUS", "sim:8xb900", "known are t4"),
        ("--admin-listen", "BERTH_ADMIN_LISTEN", "everywhere", "an IP address and a port"),
        ("--health-listen", "BERTH_HEALTH_LISTEN", "here", "an IP address and a port"),
        ("--log", "BERTH_LOG", "xml", "json"),
        ("--skip-adoption", "BERTH_SKIP_ADOPTION", "maybe", "boolean"),
        (
            "--device-discovery-strategy",
            "DEVICE_DISCOVERY_STRATEGY",
            "tegra",
            "leave NVIDIA's plugin on those nodes",
        ),
        ("--mig-strategy", "MIG_STRATEGY", "both", "none, single or mixed"),
        ("--device-list-strategy", "DEVICE_LIST_STRATEGY", "envvar,x", "cdi-cri"),
        ("--device-id-strategy", "DEVICE_ID_STRATEGY", "name", "uuid or index"),
        ("--pass-device-specs", "PASS_DEVICE_SPECS", "maybe", "boolean"),
        ("", "BERTH_LOG_FILTER", "a=b=c", "BERTH_LOG_FILTER"),
    ] {
        let mut command = berth(&["serve", "--state-dir", "/dev/null/x"]);
        let by_environment = ran({
            command.env(variable, value);
            command
        });
        assert_eq!(by_environment.code, 2, "{variable}={value}: {}", by_environment.err);
        assert!(by_environment.err.contains(says), "{variable}: {}", by_environment.err);
        if !flag.is_empty() && !value.starts_with("sim:") {
            assert!(by_environment.err.contains(&format!("variable {variable}")), "{}", by_environment.err);
        }
        if !["", "--skip-adoption"].contains(&flag) {
            let by_flag = ran(berth(&["node", "check", &format!("{flag}={value}")]));
            assert!(by_flag.code == 2 && by_flag.err.contains(says), "{flag}: {}", by_flag.err);
            assert!(!by_flag.err.contains("environment variable"), "{}", by_flag.err);
        }
    }
    // What only the file could allow is bad usage without it, too.
    let beyond = ran(berth(&["serve", "--state-dir", "/dev/null/x", "--admin-listen", "0.0.0.0:9470"]));
    assert!(beyond.code == 2 && beyond.err.contains("a loopback address"), "{}", beyond.err);
}

#[test]
fn the_description_and_a_configuration_are_printed_without_a_daemon() {
    let printed = ran(berth(&["openapi"]));
    assert_eq!((printed.code, printed.out.as_str()), (0, berth_admin::openapi_json()));
    let dir = tempfile::tempdir().unwrap();
    let good = write(&dir.path().join("good.yaml"), "gpus: sim:2xt4\nstack:\n- policy: exclusive\n");
    let checked = ran(berth(&["config", "check", &good]));
    assert_eq!(checked.code, 0, "{}", checked.err);
    assert!(checked.out.contains("ok: ") && checked.out.contains("exclusive"), "{}", checked.out);
    for (text, says) in [
        ("gpuss: nvml\n", "gpuss"),
        ("gpus: amd\n", "sim:8xh100"),
        (": :\n", "line 1, column 1"),
        ("gpus: sim:8xb900\n", "known are t4"),
        (
            "gpus: sim:1xt4\nstack: [{policy: timeslice, parameters: {replicas: banana}}]\n",
            "fails: parameters.replicas: invalid type: string \"banana\", expected a whole number, 0 or more",
        ),
        (
            "gpus: sim:1xt4\nstack: [{policy: mixed, parameters: {replica: 2}}]\n",
            "parameters: unknown parameter `replica`",
        ),
        ("gpus: sim:1xt4\nstack: [{policy: mixed, digest: short}]\n", "is not a digest"),
        (
            "gpus: sim:1xt4\nstack: [{policy: memory}]\n",
            "may not name nvidia.com/gpu.mem-4g (permissions.resources)",
        ),
        (
            "gpus: sim:1xt4\nstack: [{policy: timeslice, parameters: {replicas: 9}, permissions: {shareMax: 4}}]\n",
            "permissions.shareMax",
        ),
    ] {
        let bad = write(&dir.path().join("bad.yaml"), text);
        let checked = ran(berth(&["config", "check", &bad]));
        assert_eq!(checked.code, 1);
        assert!(checked.err.contains(says), "{}", checked.err);
    }
    assert_eq!(ran(berth(&["config", "check", "/nowhere.yaml"])).code, 1);
    // Whether an uploaded policy is on another node cannot be known here.
    let own = |state: &Path, flags: &[&str]| {
        let text = format!(
            "gpus: sim:1xt4\nstateDir: {}\nstack: [{{policy: ours}}, {{policy: mixed}}]\n",
            state.display()
        );
        let file = write(&dir.path().join("own.yaml"), text);
        ran(berth(&[&["config", "check", &file], flags].concat()))
    };
    for state in ["nowhere", "state"].map(|name| dir.path().join(name)) {
        let refused = own(&state, &[]);
        assert!(refused.code == 1 && refused.err.contains("has no policy \"ours\""), "{}", refused.err);
        assert!(refused.err.contains("line 3, column 18: stack[0].policy: "), "{}", refused.err);
        let elsewhere = own(&state, &["--without-files"]);
        assert_eq!(elsewhere.code, 0, "{}", elsewhere.err);
        assert!(elsewhere.out.contains("note: stack entry ours: "), "{}", elsewhere.out);
        std::fs::create_dir_all(dir.path().join("state/policies")).unwrap();
    }
    write(&dir.path().join("state/policies").join(format!("{}.wasm", "0".repeat(64))), b"");
    assert_eq!(own(&dir.path().join("state"), &[]).code, 0);
}

#[test]
fn a_node_check_has_one_line_for_each_check() {
    let dir = tempfile::tempdir().unwrap();
    let (kubelet, state) = (dir.path().join("kubelet"), dir.path().join("state"));
    let flags = [
        "--gpus",
        "sim:2xt4",
        "--kubelet-dir",
        kubelet.to_str().unwrap(),
        "--state-dir",
        state.to_str().unwrap(),
        // Another daemon of this machine may have the usual one.
        "--admin-listen",
        "127.0.0.1:0",
    ];
    let args: Vec<&str> = ["node", "check"].into_iter().chain(flags).collect();
    let bare = ran(berth(&args));
    assert_eq!(bare.code, 1, "{}", bare.out);
    let line = bare.out.lines().find(|l| l.contains("kubelet folder")).unwrap();
    assert!(line.starts_with("FAIL") && line.contains("fix: "), "{line}");
    assert!(bare.out.lines().any(|l| l.starts_with("ok") && l.contains("2 GPUs")), "{}", bare.out);

    std::fs::create_dir_all(kubelet.join("device-plugins")).unwrap();
    let args: Vec<&str> = ["-o", "json", "node", "check"].into_iter().chain(flags).collect();
    let there = ran(berth(&args));
    assert_eq!(there.code, 0, "{}", there.out);
    let lines: Value = serde_json::from_str(&there.out).unwrap();
    assert_eq!(lines.as_array().unwrap().len(), 15);
    assert!(lines.as_array().unwrap().iter().all(|l| l["level"] == "ok" || l["fix"].is_string()));

    // By the name that NVIDIA's users type.
    let machine =
        write(&dir.path().join("gpus.yaml"), "model: h100\ncount: 2\ngpus: [{index: 1, mig: [1g.10gb]}]");
    let source = format!("sim:{machine}");
    for (strategy, level, says) in [
        ("none", "WARN", "strategy none: 2 nvidia.com/gpu"),
        ("mixed", "ok", "strategy mixed: 1 nvidia.com/gpu, 1 nvidia.com/mig-1g.10gb"),
        ("single", "FAIL", "no MIG mode on GPU 0"),
    ] {
        let mut command =
            berth(&["node", "check", "--gpus", &source, flags[2], flags[3], flags[4], flags[5]]);
        command.env("MIG_STRATEGY", strategy);
        let error = ran(command).out;
        let line = error.lines().find(|l| l.contains("  MIG ")).unwrap();
        assert!(line.starts_with(level) && line.contains(says), "{line}");
    }
}

#[test]
fn errors_that_prevent_a_start_fail_the_node_check() {
    let node = AdminNode::new(1);
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("k/device-plugins")).unwrap();
    let check = |config: &str| {
        let file = write(&dir.path().join("berth.yaml"), format!("gpus: sim:1xt4\nkubeletDir: k\n{config}"));
        let mut command = berth(&["node", "check", "--config", &file]);
        command.current_dir(dir.path());
        ran(command)
    };
    let line = |ran: &Ran, check: &str| ran.out.lines().find(|l| l.contains(check)).unwrap().to_owned();
    let ok = check("stateDir: st\nadminListen: 127.0.0.1:0\n");
    assert_eq!(ok.code, 0, "a relative state folder: {}", ok.out);
    assert!(!dir.path().join("st").exists(), "it changed something");

    let taken = check(&format!("stateDir: st\nadminListen: {}\n", node.address()));
    let says = line(&taken, "admin API");
    assert!(taken.code == 1 && says.starts_with("FAIL") && says.contains("--admin-listen"), "{says}");
    assert!(says.contains("a Berth daemon") && says.contains("--state-dir"), "{says}");
    // Unless it is this very daemon that has it.
    let token = node.dir.path().join("token");
    let own = format!("stateDir: st\ntokenFile: {}\nadminListen: {}\n", token.display(), node.address());
    let own = check(&own);
    assert!(own.code == 0 && line(&own, "admin API").contains("already"), "{}", own.out);

    let stack = check(
        "stateDir: st\nadminListen: 127.0.0.1:0\nstack: [{policy: mixed, parameters: {replicas: x}}]\n",
    );
    let says = line(&stack, "stack");
    assert!(stack.code == 1 && says.starts_with("FAIL") && says.contains("parameters.replicas: "), "{says}");
}

#[test]
fn an_unusable_setting_ends_serve_with_one_line_and_exit_code_1() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().join("state");
    let serve = |more: &[&str]| {
        let mut command = berth(&["serve", "--gpus", "sim:1xt4", "--state-dir", state.to_str().unwrap()]);
        command.args(["--kubelet-dir", dir.path().to_str().unwrap()]).args(more);
        ran(command)
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ran = serve(&["--admin-listen", &address]);
    assert_eq!(ran.code, 1);
    let last = ran.err.lines().last().unwrap();
    assert!(last.contains("is in use by another process") && last.contains("--admin-listen"), "{}", ran.err);
    let bad = write(&dir.path().join("bad.yaml"), "gpuss: nvml\n");
    let ran = serve(&["--config", &bad]);
    assert_eq!((ran.code, ran.err.lines().count()), (1, 1), "{}", ran.err);
}

/// A running command, and its standard error so far.
struct Watching {
    child: Child,
    error: Arc<Mutex<String>>,
}

impl AdminNode {
    fn watch(&self, args: &[&str]) -> Watching {
        let mut command = self.command(args);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let (error, pipe) = (Arc::<Mutex<String>>::default(), child.stderr.take().unwrap());
        let into = Arc::clone(&error);
        std::thread::spawn(move || {
            for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                let mut error = into.lock().unwrap();
                *error += &line;
                *error += "\n";
            }
        });
        Watching { child, error }
    }
}

impl Watching {
    fn until_says(&self, words: &str, times: usize) {
        crate::support::wait::until_some(words, || {
            (self.error.lock().unwrap().matches(words).count() >= times).then_some(())
        });
    }

    /// Its exit code and all of its output.
    fn ended(mut self, last: &str) -> (i32, String) {
        let code = self.child.wait().unwrap().code().unwrap();
        self.until_says(last, 1);
        let error = self.error.lock().unwrap().clone();
        (code, error)
    }
}

#[test]
fn a_drain_is_watched_on_over_a_restart_of_the_daemon_but_not_past_a_refusal() {
    let mut node = AdminNode::new(2);
    let port = Port::held();
    node.start_at(&port);
    node.allocate(0);
    let left = "1 allocation left";
    let watching = node.watch(&["gpu", "drain", "0", "--wait"]);
    watching.until_says("waiting until it is drained, without a deadline", 1);
    watching.until_says("typically it is drained 10 to 60 s after", 1);
    watching.until_says(left, 1);
    node.api.take().unwrap().stop();
    watching.until_says("cannot be watched at present", 1);
    node.start_at(&port);
    watching.until_says(left, 2);
    node.done(&["gpu", "drain", "0", "--stop"]);
    let (code, error) = watching.ended("was stopped");
    assert_eq!((code, error.matches("at present").count()), (1, 1), "{error}");

    let watching = node.watch(&["gpu", "drain", "0", "--wait"]);
    watching.until_says(left, 1);
    node.done(&["token", "rotate", "--token-file", node.dir.path().join("token").to_str().unwrap()]);
    let (code, error) = watching.ended("cannot be watched any more");
    assert!(
        code == 1 && error.contains("does not accept the token") && !error.contains("at present"),
        "{error}"
    );
}
