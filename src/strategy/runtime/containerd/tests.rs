use super::*;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;

/// What some versions made of a case.
#[derive(Deserialize)]
struct Group {
    versions: Vec<String>,
    answer: Answer,
}

#[derive(Deserialize)]
#[serde(untagged, rename_all = "camelCase", deny_unknown_fields)]
enum Answer {
    Refused {
        error: String,
    },
    #[serde(rename_all = "camelCase")]
    Serves {
        cri: bool,
        cdi: bool,
        spec_dirs: Vec<String>,
        default_runtime: String,
        program: String,
    },
    ServesNoKubelet {
        cri: bool,
    },
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/runtimes")
}

/// Lays out the files of a txtar archive below `root`, and returns the file that containerd is given.
fn unpack(archive: &str, root: &Path) -> PathBuf {
    let usual = PathBuf::from("/etc/containerd/config.toml");
    let mut given = None;
    let mut file = None;
    for line in archive.lines() {
        if let Some(path) = line.strip_prefix("-- ").and_then(|rest| rest.strip_suffix(" --")) {
            given.get_or_insert_with(|| PathBuf::from(path));
            let path = under(root, Path::new(path));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "").unwrap();
            file = Some(path);
        } else if let Some(path) = &file {
            let text = fs::read_to_string(path).unwrap();
            fs::write(path, format!("{text}{line}\n")).unwrap();
        }
    }
    given.filter(|given| !given.starts_with("/etc/containerd")).unwrap_or(usual)
}

/// Files of several versions of the format configure one containerd.
/// Report: https://github.com/NVIDIA/nvidia-container-toolkit/issues/1956
/// Report: https://github.com/NVIDIA/aicr/issues/1688
#[test]
fn each_series_reads_the_files_as_its_programs_do() {
    let text = fs::read_to_string(fixtures().join("containerd.json")).unwrap();
    let cases: BTreeMap<String, Vec<Group>> = serde_json::from_str(&text).unwrap();
    let mut wrong = Vec::new();
    let mut series_seen = BTreeSet::new();
    for (case, groups) in &cases {
        let root = tempfile::tempdir().unwrap();
        let archive = fs::read_to_string(fixtures().join(format!("containerd/{case}.txtar"))).unwrap();
        let path = under(root.path(), &unpack(&archive, root.path()));
        let files = if path.is_file() { read_files(&path, root.path()) } else { Ok(Vec::new()) };
        for Group { versions, answer } in groups {
            for version in versions {
                let series = Series::of(Version::parse(version).unwrap());
                series_seen.insert(series);
                let ours = files.clone().and_then(|files| settings(files, series));
                let is_same = match (answer, &ours) {
                    (Answer::Refused { error }, ours) => !error.is_empty() && ours.is_err(),
                    (Answer::ServesNoKubelet { cri }, Ok(ours)) => !cri && !ours.has_cri,
                    (Answer::Serves { cri, cdi, spec_dirs, default_runtime, program }, Ok(ours)) => {
                        *ours
                            == Settings {
                                has_cri: *cri,
                                has_cdi: *cdi,
                                spec_folders: spec_dirs.clone(),
                                default_runtime: default_runtime.clone(),
                                program: program.clone(),
                            }
                    }
                    (_, Err(_)) => false,
                };
                if !is_same {
                    wrong.push(format!("{case} in {version}: {ours:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert_eq!(series_seen.into_iter().collect::<Vec<_>>(), Series::ALL);
    let archives = fs::read_dir(fixtures().join("containerd")).unwrap().count();
    assert_eq!(archives, cases.len(), "an archive without answers: run tests/runtimes/regenerate.py");
}

/// The runtime of these files; `versions` are those that run.
fn found(files: &[(&str, &str)], versions: &[&str]) -> Option<Runtime> {
    let root = tempfile::tempdir().unwrap();
    for (path, text) in files {
        let path = under(root.path(), Path::new(path));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let versions: Vec<Version> = versions.iter().map(|version| Version::parse(version).unwrap()).collect();
    read(Path::new("/etc/containerd/config.toml"), root.path(), &versions)
}

const ROOT: &str = "/etc/containerd/config.toml";
const IMPORTS: &str = "version = 3\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
const OLD_DROP_IN: (&str, &str) = (
    "/etc/containerd/conf.d/99-nvidia.toml",
    "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\ndefault_runtime_name = \"nvidia\"\n",
);

#[test]
fn versions_that_agree_need_not_be_known() {
    let nvidia = found(&[(ROOT, IMPORTS), OLD_DROP_IN], &[]).unwrap();
    assert_eq!(nvidia.default_runtime, Ok(DefaultRuntime { name: "nvidia".into(), is_nvidia: true }));
    let newer = [(ROOT, "version = 3\n")];
    assert!(matches!(found(&newer, &[]).unwrap().cdi, Cdi::On { .. }), "1.7 refuses a file of version 3");
}

#[test]
fn versions_that_differ_are_no_answer_until_the_version_is_known() {
    let explicit = format!(
        "{IMPORTS}[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = \"runc\"\n"
    );
    let files = [(ROOT, explicit.as_str()), OLD_DROP_IN];
    let unknown = found(&files, &[]).unwrap().default_runtime.unwrap_err();
    assert!(
        unknown.ends_with("which is not known (1.7: nvidia, from 2.0 on: runc, from 2.3 on: nvidia)"),
        "{unknown}"
    );
    let name =
        |versions: &[&str]| found(&files, versions).unwrap().default_runtime.map(|default| default.name);
    assert_eq!(name(&["2.2.9"]).as_deref(), Ok("runc"));
    assert_eq!(name(&["v2.3.7-k3s1"]).as_deref(), Ok("nvidia"));
    assert!(name(&["2.2.9", "2.3.7"]).is_err(), "two of them run");
    let unknown = found(&[(ROOT, "version = 2\n")], &[]).unwrap();
    let Cdi::Unknown(why) = unknown.cdi else { panic!("{unknown:?}") };
    assert!(why.ends_with("(1.7: off, from 2.0 on: on, with /etc/cdi and /var/run/cdi)"), "{why}");
    assert_eq!(unknown.cdi_fix, VERSION_FIX);
}

#[test]
fn cdi_is_off_by_the_file_or_by_the_version() {
    let off = |text: &str, version: &str| match found(&[(ROOT, text)], &[version]).unwrap() {
        Runtime { cdi: Cdi::Off(why), cdi_fix, .. } => (why, cdi_fix),
        on => panic!("{on:?}"),
    };
    let (why, fix) = off("version = 2\n", "1.7.27");
    assert!(why.contains("CDI off") && fix.contains("enable_cdi = true"), "{why}: {fix}");
    let (_, fix) =
        off("version = 3\n[plugins.\"io.containerd.cri.v1.runtime\"]\nenable_cdi = false\n", "2.1.4");
    assert!(fix.contains("remove enable_cdi = false"), "{fix}");
    let (why, _) = off("version = 2\n[plugins.\"io.containerd.grpc.v1.cri\"]\nenable_cdi = true\n", "1.6.9");
    assert_eq!(why, "containerd 1.6.9 has no CDI");
}

#[test]
fn files_that_containerd_refuses_show_nothing() {
    let missing = "version = 3\nimports = [\"/etc/containerd/other.toml\"]\n";
    for (text, versions) in
        [("version = [", &[][..]), (missing, &[]), ("version = 3", &["1.7.27"]), ("version = 9", &[])]
    {
        let runtime = found(&[(ROOT, text)], versions).unwrap();
        assert!(
            matches!(&runtime.cdi, Cdi::Unknown(why) if why.contains("is unknown: ")),
            "{text}: {runtime:?}"
        );
        assert!(runtime.default_runtime.is_err(), "{text}");
    }
}

#[test]
fn a_containerd_that_serves_no_kubelet_or_does_not_exist_is_none() {
    assert_eq!(found(&[(ROOT, "disabled_plugins = [\"cri\"]\n")], &[]), None);
    assert_eq!(found(&[], &[]), None);
    let defaults = found(&[], &["2.2.9"]).unwrap();
    assert!(matches!(defaults.cdi, Cdi::On { .. }), "it runs without its file: {defaults:?}");
}
