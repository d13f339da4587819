//! How GPUs are passed to containers on this node: the decision, as a pure function of what was found.

use crate::edits::DeviceListStrategy::{self, CdiAnnotations, CdiCri, Envvar};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

/// The first minor version of the kubelet (1.x) that passes CDI devices of device plugins without a feature gate
/// (KEP-4009).
const CDI_KUBELET_MINOR: u32 = 29;

/// What was found on the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StrategyFacts {
    /// The GPUs are simulated, so there is nothing to pass and no container runtime is needed.
    pub is_simulated: bool,
    /// The container runtimes whose configuration was found. Usually one.
    pub runtimes: Vec<Runtime>,
    /// The minor version of the kubelet, if the API server shows it; else it counts as recent.
    pub kubelet_minor: Option<u32>,
    /// The kind of a CDI specification that names every part, or why there is none. `None`: it was not searched.
    pub spec: Option<Result<FoundSpec, String>>,
}

/// A container runtime, as its configuration shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// `containerd`, `CRI-O`, ...
    pub name: String,
    /// The file that was read.
    pub file: String,
    /// Whether it adds CDI devices to containers.
    pub cdi: Cdi,
    /// How to turn CDI on, or how Berth learns whether it is on.
    pub cdi_fix: String,
    /// Its default runtime, or why that is unknown.
    pub default_runtime: Result<DefaultRuntime, String>,
}

/// Whether a container runtime adds CDI devices to containers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cdi {
    /// It does.
    On {
        /// The folders in which it reads specifications.
        folders: Vec<PathBuf>,
        /// How this is known, as a clause.
        why: String,
    },
    /// It does not, and why.
    Off(String),
    /// Its files do not show it, and why.
    Unknown(String),
}

/// The runtime of pods that name no other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DefaultRuntime {
    /// Its name.
    pub name: String,
    /// Whether it is NVIDIA's, by its name or its program.
    pub is_nvidia: bool,
}

/// A CDI specification that names every part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundSpec {
    /// Its kind.
    pub kind: String,
    /// Its file.
    pub file: String,
}

/// The decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// GPUs are passed by these strategies.
    Works {
        /// At least one.
        strategies: BTreeSet<DeviceListStrategy>,
        /// The kind of the CDI names.
        cdi_kind: Option<String>,
        /// Why these.
        why: String,
        /// Why containers may get no GPU all the same. Only of strategies that were configured.
        warning: Option<StrategyError>,
    },
    /// No strategy can work.
    NoStrategy(StrategyError),
}

/// Something that does not work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StrategyError {
    /// What, and why.
    pub what: String,
    /// The remedy.
    pub fix: String,
}

impl fmt::Display for StrategyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.fix)
    }
}

impl StrategyFacts {
    /// Why every runtime adds CDI devices and the kubelet passes them, or why not.
    fn cdi(&self) -> Result<String, String> {
        let old = self.kubelet_minor.filter(|minor| *minor < CDI_KUBELET_MINOR);
        if let Some(minor) = old {
            return Err(format!(
                "the kubelet (1.{minor}) passes no CDI devices before 1.{CDI_KUBELET_MINOR}"
            ));
        }
        if self.runtimes.is_empty() {
            return Err(
                "no configuration of containerd or CRI-O was found (containerRuntime.configFiles)".into()
            );
        }
        let mut reasons = BTreeSet::new();
        for runtime in &self.runtimes {
            match &runtime.cdi {
                Cdi::On { why, .. } => reasons.insert(why.as_str()),
                Cdi::Off(why) | Cdi::Unknown(why) => return Err(why.clone()),
            };
        }
        Ok(reasons.into_iter().collect::<Vec<_>>().join(", "))
    }

    /// Whether NVIDIA's runtime is the default of every runtime, so that `NVIDIA_VISIBLE_DEVICES` has an effect in
    /// every pod.
    fn nvidia(&self) -> Result<(), String> {
        if self.runtimes.is_empty() {
            return Err("the default runtime is unknown".into());
        }
        for runtime in &self.runtimes {
            match &runtime.default_runtime {
                Ok(default) if default.is_nvidia => {}
                Ok(default) => {
                    return Err(format!(
                        "the default runtime of {} is {}, not nvidia",
                        runtime.name, default.name
                    ));
                }
                Err(why) => return Err(why.clone()),
            }
        }
        Ok(())
    }

    /// Whether a specification is worth searching or writing for these strategies; `None` is `auto`.
    #[must_use]
    pub fn needs_spec(&self, configured: Option<&BTreeSet<DeviceListStrategy>>) -> bool {
        match configured {
            Some(strategies) => strategies.iter().any(|strategy| strategy.is_cdi()),
            None => !self.is_simulated && self.cdi().is_ok(),
        }
    }

    fn found_spec(&self) -> Result<&FoundSpec, String> {
        match &self.spec {
            Some(Ok(spec)) => Ok(spec),
            Some(Err(why)) => Err(why.clone()),
            None => Err("no CDI specification was searched".into()),
        }
    }

    /// The remedy where nothing works: for CDI, for NVIDIA's runtime, or without either.
    fn fix(&self) -> String {
        let without_cdi = self.runtimes.iter().find(|runtime| !matches!(runtime.cdi, Cdi::On { .. }));
        let cdi = match (self.kubelet_minor, without_cdi) {
            (Some(..CDI_KUBELET_MINOR), _) => {
                format!("upgrade the kubelet to 1.{CDI_KUBELET_MINOR} or newer")
            }
            (_, Some(runtime)) => runtime.cdi_fix.clone(),
            (_, None) if self.runtimes.is_empty() => {
                "name the runtime's configuration in containerRuntime.configFiles (chart: also its folder in \
                 containerRuntime.configFolders)"
                    .into()
            }
            (_, None) => "let `nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` write a CDI specification, or set \
                          nvidiaDriverRoot so that Berth can write its own"
                .into(),
        };
        let is_nvidia =
            |runtime: &&Runtime| runtime.default_runtime.as_ref().is_ok_and(|default| default.is_nvidia);
        let other = self.runtimes.iter().find(|runtime| !is_nvidia(runtime));
        let nvidia = other.map_or_else(
            || "make nvidia the default runtime".to_owned(),
            |other| match other.file.starts_with("/var/lib/rancher/k3s/") {
                // K3s writes the file again at each start.
                true => "start K3s with `--default-runtime nvidia`".into(),
                false => format!(
                    "make nvidia the default runtime (`nvidia-ctk runtime configure --runtime={} --set-as-default`) and restart it",
                    other.name.to_lowercase().replace('-', "")
                ),
            },
        );
        format!(
            "{cdi}; or {nvidia}; or, if all GPU pods set a runtimeClassName, set containerEdits.deviceListStrategy to envvar"
        )
    }
}

/// Decides how GPUs are passed. `configured`: the strategies of the configuration; `None` is `auto`.
#[must_use]
pub fn resolve(configured: Option<&BTreeSet<DeviceListStrategy>>, facts: &StrategyFacts) -> Resolution {
    match configured {
        Some(strategies) => {
            let warning = if facts.is_simulated { None } else { warning(strategies, facts) };
            let spec = facts.spec.as_ref().and_then(|spec| spec.as_ref().ok());
            Resolution::Works {
                strategies: strategies.clone(),
                cdi_kind: spec.filter(|_| facts.needs_spec(configured)).map(|spec| spec.kind.clone()),
                why: "configured".into(),
                warning,
            }
        }
        None if facts.is_simulated => works(Envvar, None, "the GPUs are simulated".into()),
        None => {
            let cdi = facts.cdi().and_then(|why| Ok((why, facts.found_spec()?)));
            let cdi_error = match cdi {
                Ok((why, spec)) => {
                    let why = format!("{why}, and {} names every GPU", spec.file);
                    return works(CdiCri, Some(spec.kind.clone()), why);
                }
                Err(error) => error,
            };
            match facts.nvidia() {
                Ok(()) => works(Envvar, None, format!("the default runtime is nvidia; {cdi_error}")),
                Err(nvidia_error) => Resolution::NoStrategy(StrategyError {
                    what: format!(
                        "no device list strategy can work on this node: {cdi_error}, and {nvidia_error}"
                    ),
                    fix: facts.fix(),
                }),
            }
        }
    }
}

fn works(strategy: DeviceListStrategy, cdi_kind: Option<String>, why: String) -> Resolution {
    Resolution::Works { strategies: BTreeSet::from([strategy]), cdi_kind, why, warning: None }
}

/// Why the configured strategies may not work. A node with several works if one does; what is unknown is no warning.
fn warning(strategies: &BTreeSet<DeviceListStrategy>, facts: &StrategyFacts) -> Option<StrategyError> {
    let mut errors = Vec::new();
    for strategy in strategies {
        let error = match strategy {
            CdiCri | CdiAnnotations => {
                let off = facts.runtimes.iter().any(|runtime| matches!(runtime.cdi, Cdi::Off(_)));
                let old =
                    *strategy == CdiCri && facts.kubelet_minor.is_some_and(|minor| minor < CDI_KUBELET_MINOR);
                match (facts.cdi(), facts.found_spec()) {
                    (Err(error), _) if off || old => Some(error),
                    (_, Err(error)) => Some(error),
                    _ => None,
                }
            }
            _ if facts.runtimes.iter().all(|runtime| runtime.default_runtime.is_err()) => None,
            _ => facts
                .nvidia()
                .err()
                .map(|error| format!("{error}, so a pod gets its GPU only with runtimeClassName: nvidia")),
        };
        errors.push(error?);
    }
    errors.dedup();
    Some(StrategyError { what: errors.join("; "), fix: facts.fix() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime(has_cdi: Option<bool>, default_runtime: &str) -> Runtime {
        let cdi = match has_cdi {
            Some(true) => Cdi::On { folders: vec!["/etc/cdi".into()], why: "containerd has CDI on".into() },
            Some(false) => Cdi::Off("containerd has CDI off".into()),
            None => Cdi::Unknown("the version of containerd is not known".into()),
        };
        Runtime {
            name: "containerd".into(),
            file: "/etc/containerd/config.toml".into(),
            cdi,
            cdi_fix: "set enable_cdi = true".into(),
            default_runtime: Ok(DefaultRuntime {
                name: default_runtime.into(),
                is_nvidia: default_runtime == "nvidia",
            }),
        }
    }

    fn found() -> Option<Result<FoundSpec, String>> {
        Some(Ok(FoundSpec { kind: "berth/gpu".into(), file: "/var/run/cdi/berth-gpu.json".into() }))
    }

    fn facts(runtimes: &[Runtime], spec: Option<Result<FoundSpec, String>>) -> StrategyFacts {
        StrategyFacts { runtimes: runtimes.to_vec(), spec, ..StrategyFacts::default() }
    }

    #[test]
    fn auto_is_cdi_then_nvidia_then_none() {
        let (on, off, unknown) = (Some(true), Some(false), None);
        let no_spec = || Some(Err("no specification names every GPU".to_owned()));
        let cases = [
            ("CDI before nvidia", vec![runtime(on, "nvidia")], found(), Some(CdiCri)),
            ("CDI", vec![runtime(on, "runc")], found(), Some(CdiCri)),
            ("no specification", vec![runtime(on, "nvidia")], no_spec(), Some(Envvar)),
            ("nvidia", vec![runtime(off, "nvidia")], None, Some(Envvar)),
            ("unknown, nvidia", vec![runtime(unknown, "nvidia")], None, Some(Envvar)),
            ("none", vec![runtime(off, "runc")], None, None),
            ("unknown", vec![runtime(unknown, "runc")], None, None),
            ("CDI without a specification", vec![runtime(on, "runc")], no_spec(), None),
            ("one of two has CDI", vec![runtime(on, "runc"), runtime(off, "runc")], found(), None),
            ("no runtime", vec![], found(), None),
        ];
        for (case, runtimes, spec, expected) in cases {
            match (resolve(None, &facts(&runtimes, spec)), expected) {
                (Resolution::Works { strategies, cdi_kind, warning, .. }, Some(strategy)) => {
                    assert_eq!(strategies, BTreeSet::from([strategy]), "{case}");
                    assert_eq!(cdi_kind.is_some(), strategy == CdiCri, "{case}");
                    assert_eq!(warning, None, "{case}");
                }
                (Resolution::NoStrategy(error), None) => {
                    let why = error.to_string();
                    assert!(why.contains("no device list strategy can work"), "{case}: {why}");
                    assert!(why.contains("the default runtime"), "{case}: {why}");
                }
                (resolution, _) => panic!("{case}: {resolution:?}"),
            }
        }
    }

    #[test]
    fn simulated_gpus_need_no_runtime() {
        let simulated = StrategyFacts { is_simulated: true, ..StrategyFacts::default() };
        let Resolution::Works { strategies, .. } = resolve(None, &simulated) else { panic!("none") };
        assert_eq!(strategies, BTreeSet::from([Envvar]));
        assert!(!simulated.needs_spec(None));
    }

    #[test]
    fn a_kubelet_before_1_29_gets_no_cdi_devices() {
        let old = StrategyFacts { kubelet_minor: Some(28), ..facts(&[runtime(Some(true), "runc")], found()) };
        let Resolution::NoStrategy(error) = resolve(None, &old) else { panic!("works") };
        assert!(error.what.contains("1.28"), "{error}");
        assert!(error.fix.starts_with("upgrade the kubelet to 1.29 or newer; or "), "{error}");
        let new = StrategyFacts { kubelet_minor: Some(29), ..old };
        assert!(matches!(resolve(None, &new), Resolution::Works { .. }));
    }

    #[test]
    fn a_configured_strategy_stays_and_warns_where_it_cannot_work() {
        let configured = |strategies: &[DeviceListStrategy], facts: &StrategyFacts| {
            let strategies = strategies.iter().copied().collect();
            match resolve(Some(&strategies), facts) {
                Resolution::Works { strategies: kept, warning, .. } if kept == strategies => {
                    warning.map(|error| error.what)
                }
                other => panic!("{other:?}"),
            }
        };
        let (cdi, plain) =
            (facts(&[runtime(Some(true), "runc")], found()), facts(&[runtime(Some(false), "runc")], None));
        assert_eq!(configured(&[CdiCri], &cdi), None);
        assert!(configured(&[CdiCri], &plain).unwrap().contains("CDI off"));
        assert!(configured(&[Envvar], &cdi).unwrap().contains("runtimeClassName: nvidia"));
        assert_eq!(configured(&[Envvar, CdiCri], &cdi), None, "one of them works");
        assert_eq!(configured(&[Envvar], &facts(&[], None)), None, "nothing is known");
        assert_eq!(configured(&[Envvar], &facts(&[runtime(None, "nvidia")], None)), None);
        assert_eq!(configured(&[Envvar], &facts(&[unknown_default()], None)), None);
    }

    fn unknown_default() -> Runtime {
        Runtime { default_runtime: Err("two versions differ".into()), ..runtime(None, "") }
    }

    #[test]
    fn the_remedy_is_that_of_what_is_missing() {
        let fix = |facts: &StrategyFacts| match resolve(None, facts) {
            Resolution::NoStrategy(error) => error.fix,
            works => panic!("{works:?}"),
        };
        let no_spec = || Some(Err("no specification names every GPU".to_owned()));
        assert!(fix(&facts(&[], None)).contains("containerRuntime.configFiles"));
        assert!(
            fix(&facts(&[runtime(Some(true), "runc")], no_spec()))
                .starts_with("let `nvidia-ctk cdi generate")
        );
        let off = runtime(Some(false), "runc");
        assert!(
            fix(&facts(std::slice::from_ref(&off), None))
                .starts_with("set enable_cdi = true; or make nvidia the default")
        );
        // Without `--runtime` the toolkit configures Docker.
        for (name, flag) in [("containerd", "containerd"), ("CRI-O", "crio"), ("Docker", "docker")] {
            let fix = fix(&facts(&[Runtime { name: name.into(), ..off.clone() }], None));
            assert!(fix.contains(&format!("configure --runtime={flag} --set-as-default")), "{fix}");
        }
        let k3s = Runtime { file: "/var/lib/rancher/k3s/agent/etc/containerd/config.toml".into(), ..off };
        assert!(fix(&facts(&[k3s], None)).contains("start K3s with `--default-runtime nvidia`"));
    }

    #[test]
    fn a_default_runtime_that_is_unknown_is_called_unknown() {
        let Resolution::NoStrategy(error) = resolve(None, &facts(&[unknown_default()], None)) else {
            panic!("works")
        };
        assert!(
            error.what.ends_with("the version of containerd is not known, and two versions differ"),
            "{error}"
        );
    }
}
