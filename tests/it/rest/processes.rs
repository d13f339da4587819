//! Processes on GPUs, over the whole daemon: real processes of this machine on simulated GPUs, and a `/proc` of files
//! that names their containers. Read over REST and by the command line.

use crate::support::files;
use crate::support::gpus::SHARED;
use crate::support::process_node::{DaemonProcess, ProcessNode, berth};
use crate::support::wait::SOON;
use serde_json::Value;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(crate) const HOST: &str = "pid:[4026531836]";

/// A real process that does nothing; killed when dropped.
pub(crate) struct Sleeper(Child);

impl Sleeper {
    pub(crate) fn start() -> Self {
        Self(Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap())
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The simulated machine and its `/proc`.
pub(crate) struct Machine(TempDir);

impl Machine {
    pub(crate) fn new(namespace: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("proc/self/ns")).unwrap();
        symlink(namespace, folder.path().join("proc/self/ns/pid")).unwrap();
        let machine = Self(folder);
        machine.runs("");
        machine
    }

    pub(crate) fn settings(&self) -> String {
        format!(
            "gpus: sim:{}\nstack: [{{ policy: timeslice, parameters: {{ replicas: 2 }} }}]\n\
             processes: {{ ignore: [dcgmi], procRoot: {} }}\n",
            self.0.path().join("machine.yaml").display(),
            self.0.path().join("proc").display()
        )
    }

    /// What runs on the first GPU, as a list in YAML.
    pub(crate) fn runs(&self, running: &str) {
        let text = format!("model: t4\ncount: 2\ngpus: [{{ index: 0, running: [{running}] }}]\n");
        files::replace(&self.0.path().join("machine.yaml"), text);
    }

    fn process(&self, pid: u32) -> PathBuf {
        let folder = self.0.path().join("proc").join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// Puts a process into a container: its own start and name, and the cgroup that it would have.
    pub(crate) fn place(&self, pid: u32, cgroup: &str) {
        let folder = self.process(pid);
        fs::copy(format!("/proc/{pid}/stat"), folder.join("stat")).unwrap();
        fs::write(folder.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
    }

    /// Another process has come to have this id.
    fn replace(&self, pid: u32, name: &str, cgroup: &str) {
        let folder = self.process(pid);
        let stat = format!("{pid} ({name}) S 1 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 77 0 0\n");
        fs::write(folder.join("cgroup"), format!("0::{cgroup}\n")).unwrap();
        files::replace(&folder.join("stat"), stat);
    }
}

pub(crate) fn systemd(uid: &str, digit: &str) -> String {
    let flat = uid.replace('-', "_");
    format!("/kubepods.slice/kubepods-pod{flat}.slice/cri-containerd-{}.scope", digit.repeat(64))
}

impl DaemonProcess {
    fn until_logged(&self, words: &str, times: usize) {
        let end = Instant::now() + SOON;
        while self.count_in_log(words) < times {
            assert!(Instant::now() < end, "waited in vain for {words:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn count_in_log(&self, words: &str) -> usize {
        self.log().lines().filter(|line| line.contains(words)).count()
    }
}

fn by_pid(list: &Value, pid: u32) -> Value {
    let items = list["items"].as_array().unwrap();
    items.iter().find(|item| item["pid"] == pid).cloned().unwrap_or_default()
}

/// A pod uses GPUs that it did not request.
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/87
/// Report: https://github.com/NVIDIA/k8s-device-plugin/issues/1605
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_are_shown_with_their_pods_and_those_without_an_allocation_are_listed() {
    let machine = Machine::new(HOST);
    let node = ProcessNode::new(&machine.settings()).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let uid = node.start("trainer", SHARED, 1).await.unwrap();
    daemon.until("its holder", |live| live.len() == 1 && live[0]["holder"]["podUid"].is_string());
    let allocation = daemon.live().remove(0);
    assert_eq!(allocation["uses"][0]["memoryUsedMiB"], 0);
    let (id, gpu) = (allocation["id"].as_str().unwrap(), allocation["gpus"][0].as_str().unwrap());
    let index = daemon.get(&format!("/gpus/{gpu}"))["index"].as_u64().unwrap();
    assert_eq!(index, 0, "the machine's file puts the processes there");

    let (mine, stray, dcgm) = (Sleeper::start(), Sleeper::start(), Sleeper::start());
    machine.place(mine.pid(), &systemd(&uid, "a"));
    machine.place(stray.pid(), "/kubepods/besteffort/pod00112233445566778899aabbccddeeff/bbbbbbbbbbbb");
    machine.replace(dcgm.pid(), "dcgmi", "/system.slice/dcgm.service");
    let (m, s, d) = (mine.pid(), stray.pid(), dcgm.pid());
    let runs = |memory: u64| {
        machine
            .runs(&format!("{{pid: {m}, memoryMiB: {memory}}}, {{pid: {s}, memoryMiB: 99}}, {{pid: {d}}}"));
    };
    runs(512);

    let on_gpu = format!("/gpus/{gpu}/processes");
    let list = daemon.get_until(&on_gpu, |list| by_pid(list, s)["right"] == "bypass");
    assert_eq!(list["sight"]["state"], "visible");
    let known = by_pid(&list, m);
    assert_eq!((&known["right"], &known["allocations"][0]), (&"allocation".into(), &id.into()));
    assert_eq!((&known["pod"]["uid"], &known["pod"]["name"]), (&uid.into(), &"trainer".into()));
    assert_eq!((&known["name"], &known["memoryMiB"]), (&"sleep".into(), &512.into()));
    assert_eq!(known["containerId"], "a".repeat(64));
    assert_eq!(by_pid(&list, d)["right"], "ignored");

    let bypass = daemon.get("/bypass");
    assert_eq!(bypass["total"], 1, "{bypass}");
    let one = by_pid(&bypass, s);
    assert_eq!((&one["reason"], &one["gpu"]), (&"podHoldsNothing".into(), &gpu.into()));
    assert_eq!(one["pod"]["uid"], "00112233445566778899aabbccddeeff");
    let answer = daemon.get("/node");
    assert_eq!(
        (&answer["processes"]["state"], &answer["counts"]["bypasses"]),
        (&"visible".into(), &1.into())
    );
    let shown = daemon.get(&format!("/gpus/{gpu}"));
    assert_eq!((&shown["processes"], &shown["bypasses"]), (&2.into(), &1.into()), "the daemon is left out");

    let uses = daemon.live().remove(0)["uses"][0].clone();
    assert_eq!((&uses["memoryUsedMiB"], &uses["pids"][0]), (&512.into(), &m.into()));
    let limit = uses["memoryLimitMiB"].as_u64().expect("a share of a T4 has a limit");
    assert_eq!(uses["overLimit"], false);
    assert_eq!(daemon.live()[0]["limits"]["enforcedBy"], "none");
    runs(limit + 1);
    daemon.until("more than it may", |live| live[0]["uses"][0]["overLimit"] == true);

    let printed = daemon.printed(&["process", "list", "--gpu", "0"]);
    for word in ["sleep", "ns/trainer", "BYPASS", "dcgmi", "ignored"] {
        assert!(printed.contains(word), "{word}: {printed}");
    }
    assert!(printed.lines().all(|line| line.len() <= 80), "{printed}");
    let printed = daemon.printed(&["process", "list", "-o", "wide"]);
    assert!(printed.contains(id), "{printed}");
    let printed = daemon.printed(&["process", "bypass"]);
    assert!(printed.contains(&s.to_string()) && printed.contains("NVIDIA_VISIBLE_DEVICES"), "{printed}");
    let printed = daemon.printed(&["gpu", "show", "0"]);
    assert!(printed.contains("1 process without an allocation") && printed.contains("BYPASS"), "{printed}");
    let printed = daemon.printed(&["allocation", "list"]);
    assert!(
        printed.contains(&format!("uses {} of {limit} MiB: more than its limit", limit + 1)),
        "{printed}"
    );
    let printed = daemon.printed(&["allocation", "list", "-o", "wide"]);
    assert!(printed.contains(&format!("{}/{limit} OVER", limit + 1)), "{printed}");
    let printed = daemon.printed(&["allocation", "show", id]);
    assert!(printed.contains("not enforced") && printed.contains(&format!("by {m}")), "{printed}");

    // The pod's process ends, and its id goes to one of the host.
    machine.replace(m, "intruder", "/user.slice");
    let other = daemon.get_until("/bypass", |list| by_pid(list, m)["name"] == "intruder");
    assert_eq!(by_pid(&other, m)["reason"], "hostProcess");
    assert_eq!(daemon.live()[0]["uses"][0]["memoryUsedMiB"], 0);

    let (began, ended) = ("is used without an allocation by process", "no longer uses GPU");
    daemon.until_logged(began, 2);
    machine.runs("");
    daemon.get_until("/bypass", |list| list["total"] == 0);
    daemon.until_logged(ended, 2);
    assert_eq!((daemon.count_in_log(began), daemon.count_in_log(ended)), (2, 2), "{}", daemon.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_containers_on_one_gpu_are_distinguished_and_leftover_processes_are_named() {
    let machine = Machine::new(HOST);
    let node = ProcessNode::new(&machine.settings()).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    let pod = kubelet_standin::PodSpec::new("ns", "two-containers")
        .container("left", &[(SHARED, 1)])
        .container("right", &[(SHARED, 1)])
        .container("more", &[(SHARED, 1)]);
    let uid = pod.uid.clone();
    node.kubelet.admit(pod).await.unwrap();
    node.kubelet.run(&uid).await.unwrap();
    daemon.until("its holders", |live| {
        live.len() == 3 && live.iter().all(|a| a["holder"]["container"].is_string())
    });
    let live = daemon.live();
    let gpu_of = |a: &Value| a["gpus"][0].as_str().unwrap().to_owned();
    let first = daemon.get("/gpus")["items"][0]["uuid"].as_str().unwrap().to_owned();
    let here: Vec<&Value> = live.iter().filter(|a| gpu_of(a) == first).collect();
    assert_eq!(here.len(), 2, "three shares of two GPUs with two each: {live:?}");
    let name = |a: &Value| a["holder"]["container"].as_str().unwrap().to_owned();

    let (known, unknown) = (Sleeper::start(), Sleeper::start());
    machine.place(known.pid(), &systemd(&uid, "a"));
    let log = format!(
        "9 8 8:1 /var/lib/kubelet/pods/{uid}/containers/{}/1f2e /dev/termination-log rw - ext4 /dev/sda rw\n",
        name(here[0])
    );
    fs::write(machine.process(known.pid()).join("mountinfo"), log).unwrap();
    machine.place(unknown.pid(), &systemd(&uid, "b"));
    let (k, u) = (known.pid(), unknown.pid());
    machine.runs(&format!("{{pid: {k}, memoryMiB: 100}}, {{pid: {u}, memoryMiB: 50}}"));

    let on_gpu = format!("/gpus/{first}/processes");
    let list = daemon.get_until(&on_gpu, |list| list["items"].as_array().unwrap().len() == 2);
    assert_eq!(by_pid(&list, k)["right"], "allocation");
    assert_eq!(by_pid(&list, k)["allocations"][0], here[0]["id"]);
    assert_eq!(by_pid(&list, k)["pod"]["container"], name(here[0]));
    assert_eq!(by_pid(&list, u)["right"], "shared");
    let used = daemon.get(&format!("/allocations/{}", here[0]["id"].as_str().unwrap()))["uses"][0].clone();
    assert_eq!((&used["memoryUsedMiB"], &used["shared"]["memoryMiB"]), (&100.into(), &50.into()));
    assert_eq!(used["shared"]["with"][0], here[1]["id"]);
    assert_eq!(daemon.get("/bypass")["total"], 0);

    // The pod is deleted; its processes stay.
    node.kubelet.delete(&uid);
    let left = daemon.get_until("/bypass", |list| list["total"] == 2);
    assert_eq!(by_pid(&left, k)["reason"], "leftover");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_hosts_pids_it_reports_what_it_cannot_see() {
    let machine = Machine::new("pid:[4026532999]");
    let node = ProcessNode::new(&machine.settings()).await;
    let daemon = node.serve();
    node.kubelet.wait_allocatable(SHARED, 4, SOON).await.unwrap();
    node.start("trainer", SHARED, 1).await.unwrap();
    let answer = daemon.get("/node");
    assert_eq!(answer["processes"]["state"], "pidsHidden");
    assert!(answer["processes"]["fix"].as_str().unwrap().contains("hostPID: true"));
    let gpu = daemon.live()[0]["gpus"][0].as_str().unwrap().to_owned();
    assert_eq!(daemon.live()[0]["uses"][0]["memoryUsedMiB"], Value::Null);

    // This process's id is that of another process on the host: it is ignored.
    machine.runs(&format!("{{pid: {}, memoryMiB: 7}}", std::process::id()));
    let on_gpu = format!("/gpus/{gpu}/processes");
    let list = daemon.get_until(&on_gpu, |list| list["items"].as_array().unwrap().len() == 1);
    assert_eq!((&list["items"][0]["right"], &list["items"][0]["name"]), (&"unclear".into(), &Value::Null));
    let printed = daemon.printed(&["process", "list"]);
    assert!(printed.contains("hostPID: true"), "{printed}");
    daemon.stop();

    // What `berth node check` says of the same.
    let command = node.command();
    let shown: Vec<_> = command.get_args().collect();
    let mut check = berth();
    check.args(["node", "check"]).args(&shown[1..]).stdout(Stdio::piped()).stderr(Stdio::null());
    let output = String::from_utf8(check.output().unwrap().stdout).unwrap();
    let line = output.lines().find(|line| line.contains("processes")).expect("a line about processes");
    assert!(line.starts_with("WARN") && line.contains("hostPID: true"), "{output}");
}
