use super::*;
use berth_config::RUNTIME_FILES;
use berth_kubelet::Cdi;
use std::fs;

const CONTAINERD: &str = "/etc/containerd/config.toml";
const CRIO: &str = "/etc/crio/crio.conf";
const DOCKER: &str = "/etc/docker/daemon.json";

fn program(name: &str, version: &str, arguments: &[&str]) -> Program {
    let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
    Program { name: name.into(), version: Version::parse(version).unwrap(), arguments }
}

fn found(files: &[(&str, &str)], node_object: Option<&str>, programs: &[Program]) -> Vec<Runtime> {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = under(root.path(), Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    runtimes(&RUNTIME_FILES.map(PathBuf::from), root.path(), Running { node_object, programs })
}

fn names(runtimes: &[Runtime]) -> Vec<&str> {
    runtimes.iter().map(|runtime| runtime.name.as_str()).collect()
}

fn default_of(runtime: &Runtime) -> (&str, bool) {
    let default = runtime.default_runtime.as_ref().unwrap();
    (&default.name, default.is_nvidia)
}

#[test]
fn the_runtime_that_runs_counts_if_it_is_known() {
    let files = [(CONTAINERD, "version = 3\n"), (CRIO, ""), (DOCKER, "{}")];
    assert_eq!(names(&found(&files, None, &[])), ["containerd", "CRI-O", "Docker"]);
    for (node_object, name) in
        [("containerd://2.1.4", "containerd"), ("cri-o://1.33.0", "CRI-O"), ("docker://28.5.2", "Docker")]
    {
        assert_eq!(names(&found(&files, Some(node_object), &[])), [name]);
    }
    let crio = [program("crio", "1.33.0", &[])];
    assert_eq!(names(&found(&files, None, &crio)), ["CRI-O"]);
    // Docker has a containerd of its own, with another file.
    let docker = [
        program("cri-dockerd", "0.4.3", &[]),
        program("dockerd", "28.5.2", &[]),
        program("containerd", "2.1.4", &["--config", "/var/run/docker/containerd/containerd.toml"]),
    ];
    assert_eq!(names(&found(&files, None, &docker)), ["Docker"]);
    let containerd = [program("containerd", "2.1.4", &[]), program("dockerd", "28.5.2", &[])];
    assert_eq!(names(&found(&files, None, &containerd)), ["containerd"]);
    assert_eq!(
        names(&found(&files, Some("cri-o://1.33.0"), &containerd)),
        ["CRI-O"],
        "the kubelet says which"
    );
    assert!(found(&[], None, &[]).is_empty());
}

#[test]
fn the_version_comes_from_the_node_object_or_from_the_process() {
    let files = [(CONTAINERD, "version = 2\n")];
    let cdi = |node_object, programs: &[Program]| found(&files, node_object, programs).remove(0).cdi;
    assert!(matches!(cdi(None, &[]), Cdi::Unknown(_)));
    assert!(matches!(cdi(Some("containerd://1.7.27"), &[]), Cdi::Off(_)));
    assert!(matches!(cdi(Some("containerd://2.1.4-k3s1"), &[]), Cdi::On { .. }));
    assert!(matches!(cdi(None, &[program("containerd", "1.7.27", &[])]), Cdi::Off(_)));
    assert!(matches!(cdi(None, &[program("containerd", "2.1.4", &["-c", CONTAINERD])]), Cdi::On { .. }));
}

#[test]
fn of_a_containerd_without_a_visible_file_the_default_runtime_is_unknown() {
    let likely = found(&[], Some("containerd://2.2.9"), &[]).remove(0);
    assert!(matches!(&likely.cdi, Cdi::On { why, .. } if why.contains("by default")), "{likely:?}");
    assert!(likely.default_runtime.unwrap_err().contains("was not found"));
    let old = found(&[], Some("containerd://1.7.27"), &[]).remove(0);
    assert!(matches!(old.cdi, Cdi::Unknown(_)), "{old:?}");
}

#[test]
fn the_drop_ins_of_cri_o_are_all_files_below_its_folder_in_order() {
    let read = |files: &[(&str, &str)]| found(files, Some("cri-o://1.33.0"), &[]).remove(0);
    let nvidia = "[crio.runtime]\ndefault_runtime = \"nvidia\"\n";
    let runc = "[crio.runtime]\ndefault_runtime = \"runc\"\n";
    let crio = read(&[("/etc/crio/crio.conf.d/99-nvidia.toml", nvidia)]);
    assert_eq!((default_of(&crio), crio.file.as_str()), (("nvidia", true), CRIO));
    for (first, second) in
        [("10-a", "20-b"), ("10-a.toml", "10-a.toml.bak"), ("10-a", "20-more/00-c"), ("10/z", "2")]
    {
        let in_folder = |name| format!("/etc/crio/crio.conf.d/{name}");
        let (first, second) = (in_folder(first), in_folder(second));
        let crio = read(&[(CRIO, runc), (first.as_str(), runc), (second.as_str(), nvidia)]);
        assert_eq!(default_of(&crio), ("nvidia", true), "{first}, then {second}");
        let crio = read(&[(CRIO, nvidia), (first.as_str(), nvidia), (second.as_str(), runc)]);
        assert_eq!(default_of(&crio), ("runc", false), "{first}, then {second}");
    }
    let by_program = "[crio.runtime]\ndefault_runtime = \"gpu\"\n[crio.runtime.runtimes.gpu]\nruntime_path = \
        \"/usr/bin/nvidia-container-runtime\"\n";
    let other = "[crio.runtime.runtimes.runc]\nruntime_path = \"/usr/bin/runc\"\n";
    let replaced = "[crio.runtime]\ncdi_spec_dirs = [\"/run/cdi\"]\n[crio.runtime.runtimes.gpu]\nruntime_type = \"vm\"\n";
    let with = |more| read(&[(CRIO, by_program), ("/etc/crio/crio.conf.d/10", more)]);
    assert_eq!(default_of(&with(other)), ("gpu", true));
    assert_eq!(default_of(&with(replaced)), ("gpu", false), "a runtime is replaced as a whole");
    let Cdi::On { folders, .. } = with(replaced).cdi else { panic!() };
    assert_eq!(folders, [PathBuf::from("/run/cdi")]);
}

#[test]
fn the_default_runtime_of_cri_o_depends_on_its_version() {
    let name = |node_object| {
        let crio = found(&[(CRIO, "")], node_object, &[]).remove(0);
        default_of(&crio).0.to_owned()
    };
    assert_eq!(name(Some("cri-o://1.30.14")), "runc");
    assert_eq!(name(Some("cri-o://1.31.0")), "crun");
    assert!(name(None).contains("crun from 1.31 on, else runc"));
    let broken = found(&[(CRIO, ""), ("/etc/crio/crio.conf.d/50", "[crio")], None, &[]).remove(0);
    assert!(matches!(broken.cdi, Cdi::Unknown(_)) && broken.default_runtime.is_err(), "{broken:?}");
}

/// Docker has CDI, and containers of pods get no device.
/// Report: https://github.com/Mirantis/cri-dockerd/issues/558
#[test]
fn docker_has_cdi_if_its_file_or_version_and_cri_dockerd_say_so() {
    let docker = |text: &str, docker: Option<&str>, cri_dockerd: Option<&str>| {
        let programs: Vec<Program> =
            cri_dockerd.into_iter().map(|version| program("cri-dockerd", version, &[])).collect();
        let node_object = docker.map(|version| format!("docker://{version}"));
        found(&[(DOCKER, text)], node_object.as_deref(), &programs).remove(0)
    };
    let on = r#"{"features": {"cdi": true}}"#;
    let off = r#"{"features": {"cdi": false}}"#;
    let (old, new) = (Some("0.4.3"), Some("0.5.0"));
    let text = |runtime: Runtime| match runtime.cdi {
        Cdi::On { .. } => "on".to_owned(),
        Cdi::Off(why) => format!("off: {why}"),
        Cdi::Unknown(why) => format!("unknown: {why}"),
    };
    // What the file says, and which version of cri-dockerd passes it on.
    assert!(
        text(docker(on, Some("28.5.2"), None))
            .starts_with("unknown: whether the pods of Docker get CDI devices")
    );
    assert_eq!(
        text(docker(on, Some("28.5.2"), old)),
        "off: cri-dockerd 0.4.3 passes no CDI devices to Docker"
    );
    assert_eq!(text(docker(on, Some("27.5.1"), new)), "on");
    assert_eq!(text(docker("{}", Some("28.5.2"), new)), "on");
    assert_eq!(text(docker("{}", Some("28.1.1"), new)), "off: Docker has CDI off (/etc/docker/daemon.json)");
    assert!(text(docker("{}", None, new)).starts_with("unknown: whether Docker has CDI on"));
    assert_eq!(text(docker(off, None, None)), "off: Docker has CDI off (/etc/docker/daemon.json)");
    assert!(text(docker(r#"{"cdi-spec-dirs": [""]}"#, Some("28.5.2"), new)).starts_with("off"));
    assert!(text(docker("{", Some("28.5.2"), new)).contains("is unknown: "));
    let nvidia =
        r#"{"default-runtime": "nvidia", "runtimes": {"nvidia": {"path": "nvidia-container-runtime"}}}"#;
    assert_eq!(default_of(&docker(nvidia, None, None)), ("nvidia", true));
}
