//! Reading the configuration again while the daemon runs: what changed, which settings apply at once, and which need a
//! restart.

use super::args::ServeArgs;
use super::checks::ConfigError;
use super::source::Source;
use super::{
    AdminSettings, ClusterSettings, Config, ContainerSettings, GpuSettings, HealthSettings, KubeletSettings,
    Loaded, NodeSettings, ObserveSettings, OfferSettings,
};
use berth_files::FileVersion;
use berth_files::yaml::Problems;
use berth_kernel::node::rules::Rules;
use berth_kubelet::Edits;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most characters of a value in a log line or in the API.
const VALUE_CHARACTERS_MAX: usize = 100;
/// Sections whose values are not shown: they may hold credentials, such as the hash of a short token.
const HIDDEN: [&str; 3] = ["admin", "tracing", "trustedKeys"];

/// Versions of the files, to notice changes.
pub type Versions = Vec<Option<FileVersion>>;

/// The files of settings, and what they held.
#[derive(Clone, Debug)]
pub struct Files {
    /// The daemon's flags, which take precedence.
    args: ServeArgs,
    file: PathBuf,
    /// The file with the keys that `file` lacks.
    base: Option<PathBuf>,
    /// The versions of the files just before they were read.
    versions: Versions,
    /// The values that are in use, by their keys in the file. For a key that needs a restart, this is the value at the
    /// start.
    values: BTreeMap<String, String>,
}

impl Files {
    pub(super) fn new(args: &ServeArgs, file: &Path, base: Option<&Path>) -> Self {
        Self {
            args: args.clone(),
            file: file.to_owned(),
            base: base.map(Path::to_owned),
            versions: Versions::new(),
            values: BTreeMap::new(),
        }
    }

    /// The path of the file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The versions that were read.
    #[must_use]
    pub fn versions(&self) -> &Versions {
        &self.versions
    }

    /// The present versions of the files.
    #[must_use]
    pub fn present_versions(&self) -> Versions {
        [Some(&self.file), self.base.as_ref()]
            .into_iter()
            .flatten()
            .map(|path| FileVersion::of(path))
            .collect()
    }

    /// The folders of the files, and of what they link to.
    #[must_use]
    pub fn folders(&self) -> Vec<PathBuf> {
        let files = [Some(&self.file), self.base.as_ref()].into_iter().flatten();
        let targets = files.clone().filter_map(|file| file.canonicalize().ok());
        let folder = |file: PathBuf| file.parent().map(Path::to_owned);
        files.cloned().chain(targets).filter_map(folder).collect()
    }

    /// Reads the files. Returns all errors, and the settings without the invalid ones: `None` if these cannot be merged
    /// even so.
    ///
    /// # Errors
    /// If a file cannot be read, or is not YAML.
    pub(super) fn read(&self) -> Result<(Option<Config>, Problems, Source), ConfigError> {
        let versions = self.present_versions();
        let base = self.base.as_deref().map(Source::read).transpose()?;
        let source = Source::read(&self.file)?;
        let (mut config, problems) = source.settings_with_base(base.as_ref(), &self.args);
        if let Some(config) = &mut config {
            let values = source.values(base.as_ref());
            config.loaded.files = Some(Arc::new(Self { versions, values, ..self.clone() }));
        }
        Ok((config, problems, source))
    }
}

/// A setting whose value in the file differs from the one in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingChange {
    /// Its key in the file, such as `stack[0].parameters.replicas`.
    pub key: String,
    /// The value in use before; `None` if the file did not have the key.
    pub from: Option<String>,
    /// The value in the file; `None` if it does not have the key any more.
    pub to: Option<String>,
    /// When it takes effect.
    pub effect: Effect,
}

/// When a changed setting takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It is in effect.
    Applied,
    /// With the next start; the previous value stays in use until then.
    AfterRestart,
    /// It never takes effect: a flag or an environment variable sets it, or it belongs to the file's stack while a
    /// stack that was activated through the API is in use.
    Overridden,
}

impl fmt::Display for SettingChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, from, to, effect: _ } = self;
        match (from, to) {
            (Some(from), Some(to)) => write!(f, "{key}: {from} -> {to}"),
            (None, Some(to)) => write!(f, "{key}: {to} (new)"),
            (Some(from), None) => write!(f, "{key}: removed (was {from})"),
            (None, None) => f.write_str(key),
        }
    }
}

/// Settings after the files were read again.
#[derive(Clone, Debug)]
pub struct Reloaded {
    /// The settings in use: new ones where they apply at once, and those of the start where they need a restart.
    pub config: Config,
    /// What changed, by key.
    pub changes: Vec<SettingChange>,
}

/// The settings that keep their value until a restart.
#[derive(Default)]
struct NeedsRestart {
    /// The keys of those whose value in the file differs.
    keys: BTreeSet<&'static str>,
}

impl NeedsRestart {
    /// Notes the keys of a setting if the file has another value than the one in use.
    fn note<T: PartialEq>(&mut self, keys: &[&'static str], running: &T, new: &T) {
        if running != new {
            self.keys.extend(keys);
        }
    }

    fn contains(&self, key: &str) -> bool {
        self.keys.iter().any(|changed| {
            key.strip_prefix(changed).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        })
    }
}

impl Config {
    /// Reads the files of these settings again, with the same flags. Returns all errors, and the settings without the
    /// invalid ones: `None` if these cannot be merged even so.
    ///
    /// # Errors
    /// If a file cannot be read, or is not YAML.
    pub fn read_again(files: &Files) -> Result<(Option<Self>, Problems), ConfigError> {
        files.read().map(|(config, problems, _)| (config, problems))
    }

    /// These settings changed to `new` as far as a running daemon can: sharing, container edits, health rules, timing
    /// and limits of the kernel. Addresses, folders, the GPU source, access and export are read once at the start,
    /// since other programs are configured with them or since their parts cannot be replaced without an interruption.
    /// A section that is not named here is kept, so a new one whose keys are applied has to be added.
    #[must_use]
    pub fn reloaded(&self, new: Self) -> Reloaded {
        let needs_restart = self.needs_restart(&new);
        let files = new.loaded.files.clone();
        let Edits { driver_root, dev_root, .. } = self.containers.edits.clone();
        let config = Self {
            containers: ContainerSettings {
                edits: Edits { driver_root, dev_root, ..new.containers.edits },
                ..new.containers
            },
            offers: new.offers,
            health: new.health,
            rules: Rules {
                trusted_keys: self.rules.trusted_keys.clone(),
                enforcement: self.rules.enforcement,
                claim_grants: self.rules.claim_grants.clone(),
                ..new.rules
            },
            reconcile: new.reconcile,
            loaded: Loaded { files: None, chosen: self.loaded.chosen.clone(), ..new.loaded },
            ..self.clone()
        };
        let (files, changes) = self.changes(&needs_restart, files);
        Reloaded { config: Self { loaded: Loaded { files, ..config.loaded }, ..config }, changes }
    }

    /// The keys of the settings that a reload does not change and whose value in `new` differs. The patterns have no
    /// `..`, so that a new setting does not compile until it is decided here what a reload does with it;
    /// [`Self::reloaded`] then does that, and the daemon hands what is applied to its parts.
    fn needs_restart(&self, new: &Self) -> NeedsRestart {
        let Self {
            node,
            kubelet,
            gpus,
            cluster,
            admin,
            observe,
            containers,
            guard,
            dra,
            offers,
            health,
            rules,
            reconcile: _,
            loaded: _,
        } = new;
        let mut needs = NeedsRestart::default();
        let NodeSettings { name, state_dir, decisions } = node;
        needs.note(&["nodeName"], &self.node.name, name);
        needs.note(&["stateDir"], &self.node.state_dir, state_dir);
        needs.note(&["decisions"], &self.node.decisions, decisions);
        let KubeletSettings { device_plugins_dir, root_dir, skip_adoption } = kubelet;
        let keys = ["kubeletDir", "devicePluginsDir"];
        needs.note(&keys, &self.kubelet.device_plugins_dir, device_plugins_dir);
        needs.note(&["kubeletDir", "kubeletRootDir"], &self.kubelet.root_dir, root_dir);
        needs.note(&["skipAdoption"], &self.kubelet.skip_adoption, skip_adoption);
        let GpuSettings { source, excluded, processes, health_checks, fail_on_init_error } = gpus;
        needs.note(&["gpus", "nvmlLibrary"], &self.gpus.source, source);
        needs.note(&["gpus"], &self.gpus.excluded, excluded);
        needs.note(&["processes"], &self.gpus.processes, processes);
        // A flag without a key.
        needs.note(&[], &self.gpus.health_checks, health_checks);
        needs.note(&["failOnInitError"], &self.gpus.fail_on_init_error, fail_on_init_error);
        let ClusterSettings { api_server, labels, fleet } = cluster;
        needs.note(&["apiServer", "kubeconfig"], &self.cluster.api_server, api_server);
        needs.note(&["labels"], &self.cluster.labels, labels);
        needs.note(&["fleet"], &self.cluster.fleet, fleet);
        let AdminSettings { listen, health_listen, token_file, access } = admin;
        needs.note(&["adminListen"], &self.admin.listen, listen);
        needs.note(&["healthListen"], &self.admin.health_listen, health_listen);
        needs.note(&["tokenFile"], &self.admin.token_file, token_file);
        needs.note(&["admin"], &self.admin.access, access);
        let ObserveSettings { log, tracing } = observe;
        needs.note(&["log"], &self.observe.log, log);
        needs.note(&["tracing"], &self.observe.tracing, tracing);
        let ContainerSettings { edits, auto_strategy: _, cdi: _ } = containers;
        let running = &self.containers.edits;
        needs.note(&["containerEdits.nvidiaDriverRoot"], &running.driver_root, &edits.driver_root);
        needs.note(&["containerEdits.nvidiaDevRoot"], &running.dev_root, &edits.dev_root);
        // The kubelet's folders are those of the daemon. `own_namespace` is a flag and no key of the file. What the guard
        // limits follows from `enforce` and the source of the GPUs.
        let berth_guard::Settings {
            socket,
            nri_socket,
            cgroup_root,
            device_plugins: _,
            claim_grants: _,
            own_namespace: _,
            limits: _,
        } = guard;
        needs.note(&["guard"], &self.guard.socket, socket);
        needs.note(&["guard"], &self.guard.nri_socket, nri_socket);
        needs.note(&["guard"], &self.guard.cgroup_root, cgroup_root);
        needs.note(&["dra"], &self.dra, dra);
        let OfferSettings { resource: _, mig_strategy: _, stack: _ } = offers;
        let HealthSettings { xids: _, scan_interval: _ } = health;
        // The signatures of all known versions are checked with the keys at the start.
        let Rules {
            timing: _,
            overcommit_percent: _,
            enforcement,
            bypass: _,
            claim_grants: _,
            via,
            history: _,
            trusted_keys,
        } = rules;
        needs.note(&["dra"], &self.rules.via, via);
        // The guard, a process of its own, reads it at its start.
        needs.note(&["enforce"], &self.rules.enforcement, enforcement);
        needs.note(&["trustedKeys"], &self.rules.trusted_keys, trusted_keys);
        needs
    }

    /// The changes from the values in use to the values of the file, and the new [`Files`], whose values are those in
    /// use from now on.
    fn changes(
        &self,
        needs_restart: &NeedsRestart,
        new: Option<Arc<Files>>,
    ) -> (Option<Arc<Files>>, Vec<SettingChange>) {
        let (Some(running), Some(new)) = (&self.loaded.files, new) else {
            return (self.loaded.files.clone(), Vec::new());
        };
        let mut values = new.values.clone();
        let keys: BTreeSet<&String> = running.values.keys().chain(new.values.keys()).collect();
        let mut changes = Vec::new();
        for key in keys {
            let (from, to) = (running.values.get(key), new.values.get(key));
            if from == to {
                continue;
            }
            let effect = if needs_restart.contains(key) {
                match from {
                    Some(from) => drop(values.insert(key.clone(), from.clone())),
                    None => drop(values.remove(key)),
                }
                Effect::AfterRestart
            } else if new.args.overrides(key.split('[').next().unwrap_or(key)) {
                Effect::Overridden
            } else {
                Effect::Applied
            };
            let shown = |value: Option<&String>| value.map(|value| shown(key, value));
            changes.push(SettingChange { key: key.clone(), from: shown(from), to: shown(to), effect });
        }
        (Some(Arc::new(Files { values, ..Files::clone(&new) })), changes)
    }
}

/// A value on one line, unless its section may hold credentials.
fn shown(key: &str, value: &str) -> String {
    let is_in = |section: &&str| {
        key.strip_prefix(*section).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
    };
    if HIDDEN.iter().any(is_in) {
        return "(not shown)".into();
    }
    let mut text: String = value.chars().take(VALUE_CHARACTERS_MAX).flat_map(char::escape_debug).collect();
    if value.chars().count() > VALUE_CHARACTERS_MAX {
        text += "...";
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The settings of a file with this text.
    fn load(folder: &Path, text: &str, args: &ServeArgs) -> Config {
        let file = folder.join("config.yaml");
        std::fs::write(&file, text).unwrap();
        Config::load(&ServeArgs { config: Some(file), ..args.clone() }).unwrap()
    }

    fn lines(reloaded: &Reloaded, effect: Effect) -> Vec<String> {
        let changes = reloaded.changes.iter().filter(|change| change.effect == effect);
        changes.map(ToString::to_string).collect()
    }

    #[test]
    fn sharing_is_applied_and_what_needs_a_restart_is_kept_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let args = ServeArgs { mig_strategy: Some("mixed".into()), ..ServeArgs::default() };
        let first = "gpus: sim:1xt4\nresource: a.com/gpu\nmigStrategy: none\ncontainerEdits: {passDeviceSpecs: true}\n\
                     stack: [{policy: timeslice, parameters: {replicas: 4}}]\nhistory: {allocations: 2000}\n";
        let running = load(folder.path(), first, &args);
        let second = "gpus: sim:2xt4\nresource: b.com/gpu\nmigStrategy: single\n\
                      containerEdits: {passDeviceSpecs: true, nvidiaDriverRoot: /run/nvidia/driver}\n\
                      stack: [{policy: timeslice, parameters: {replicas: 8}}]\n\
                      admin: {limits: {readsPerSecond: 7000}}\n";
        let reloaded = running.reloaded(load(folder.path(), second, &args));
        let Reloaded { config, .. } = &reloaded;
        assert_eq!(config.offers.resource.as_str(), "b.com/gpu");
        assert_eq!(config.offers.stack[0].parameters["replicas"], 8);
        assert_eq!(config.rules.history, Rules::default().history);
        let unchanged =
            (&config.gpus.source, &config.admin.access, &config.containers.edits, config.offers.mig_strategy);
        assert_eq!(
            unchanged,
            (
                &running.gpus.source,
                &running.admin.access,
                &running.containers.edits,
                running.offers.mig_strategy
            )
        );
        let applied = lines(&reloaded, Effect::Applied);
        let expected = [
            "history.allocations: removed (was 2000)",
            "resource: a.com/gpu -> b.com/gpu",
            "stack[0].parameters.replicas: 4 -> 8",
        ];
        assert_eq!(applied, expected);
        let restart = lines(&reloaded, Effect::AfterRestart);
        let expected = [
            "admin.limits.readsPerSecond: (not shown) (new)",
            "containerEdits.nvidiaDriverRoot: /run/nvidia/driver (new)",
            "gpus: sim:1xt4 -> sim:2xt4",
        ];
        assert_eq!(restart, expected);
        assert_eq!(lines(&reloaded, Effect::Overridden), ["migStrategy: none -> single"]);
        // What waits for a restart is named by the next reload, too, and no longer once the file has the old value.
        let third = second.replace("replicas: 8", "replicas: 2");
        let again = config.reloaded(load(folder.path(), &third, &args));
        assert_eq!(lines(&again, Effect::AfterRestart).len(), 3);
        assert_eq!(lines(&again, Effect::Applied), ["stack[0].parameters.replicas: 8 -> 2"]);
        let back = again.config.reloaded(load(folder.path(), first, &args));
        assert_eq!(lines(&back, Effect::AfterRestart), [] as [String; 0]);
    }

    #[test]
    fn a_changed_key_does_not_report_other_keys_of_its_section() {
        let folder = tempfile::tempdir().unwrap();
        let args = ServeArgs { admin_listen: Some("127.0.0.1:1".into()), ..ServeArgs::default() };
        let running = load(folder.path(), "gpus: sim:1xt4\n", &args);
        let changed = "gpus: sim:1xt4\nadminListen: 127.0.0.1:2\nhealthListen: 127.0.0.1:3\n";
        let reloaded = running.reloaded(load(folder.path(), changed, &args));
        assert_eq!(lines(&reloaded, Effect::Overridden), ["adminListen: 127.0.0.1:2 (new)"]);
        assert_eq!(lines(&reloaded, Effect::AfterRestart), ["healthListen: 127.0.0.1:3 (new)"]);
    }

    /// Each key of the file, with a value that differs from that of [`BASE`].
    const CHANGED: [(&str, &str); 37] = [
        ("nodeName", "other"),
        ("kubeletDir", "/other"),
        ("kubeletRootDir", "/other"),
        ("devicePluginsDir", "/other"),
        ("stateDir", "/other"),
        ("gpus", "sim:1xt4"),
        ("nvmlLibrary", "/other/libnvidia-ml.so.1"),
        ("apiServer", "off"),
        ("kubeconfig", "/other"),
        ("adminListen", "127.0.0.1:1"),
        ("admin", "{ limits: { readsPerSecond: 7 } }"),
        ("healthListen", "127.0.0.1:2"),
        ("tokenFile", "/other"),
        ("log", "json"),
        ("tracing", "{ endpoint: 'http://collector:4317' }"),
        ("resource", "a.com/gpu"),
        ("migStrategy", "mixed"),
        ("memoryOvercommit", "2.0"),
        ("skipAdoption", "true"),
        ("failOnInitError", "true"),
        ("health", "{ pollSeconds: 1, quietSeconds: 1, ignoredXids: [1] }"),
        ("history", "{ allocations: 2000 }"),
        ("decisions", "{ maxMiB: 0 }"),
        ("processes", "{ ignore: [] }"),
        ("labels", "{ node: true }"),
        ("cdi", "{ generate: always }"),
        ("containerRuntime", "{ configFiles: [/other] }"),
        ("guard", "{ socket: /other }"),
        ("enforce", "{ memory: require }"),
        ("bypass", "{ action: strip }"),
        ("dra", "{ driver: example.com }"),
        ("fleet", "{ enabled: true }"),
        ("containerEdits", "{ passDeviceSpecs: true, nvidiaDevRoot: /dev-root }"),
        ("rounds", "{ listEveryMs: 1 }"),
        ("timing", "{ retireMs: 1 }"),
        ("trustedKeys", "[{ name: a, key: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA= }]"),
        ("stack", "[{ policy: exclusive }]"),
    ];
    const BASE: (&str, &str) = ("kubeconfig", "/kubeconfig");

    /// The chart replaces the pods exactly for the keys that need it: `berth.startSettings`.
    #[test]
    fn every_key_is_applied_or_needs_a_restart_and_the_chart_knows_which() {
        let known = super::super::FileConfig::parse("noSuchKeyAtAll: 1").unwrap_err().to_string();
        let known = known.split('`').skip(1).step_by(2).collect::<BTreeSet<_>>();
        assert_eq!(known, CHANGED.iter().map(|(key, _)| *key).collect(), "{known:?}");
        let folder = tempfile::tempdir().unwrap();
        let base = format!("{}: {}\n", BASE.0, BASE.1);
        let running = load(folder.path(), &base, &ServeArgs::default());
        let (mut applied, mut restart) = (BTreeSet::new(), BTreeSet::new());
        for (key, value) in CHANGED {
            let rest = if key == BASE.0 { "" } else { &base };
            let text = format!("{rest}{key}: {value}\n");
            let Reloaded { config, changes } =
                running.reloaded(load(folder.path(), &text, &ServeArgs::default()));
            assert!(!changes.is_empty(), "{key}");
            for change in changes {
                let of_effect = match change.effect {
                    Effect::Applied => &mut applied,
                    Effect::AfterRestart => &mut restart,
                    Effect::Overridden => panic!("{change}"),
                };
                of_effect.insert(change.key.split(['[', '.']).next().unwrap().to_owned());
            }
            let settings =
                |config: &Config| format!("{:?}", Config { loaded: Loaded::default(), ..config.clone() });
            let is_same = settings(&config) == settings(&running);
            assert_eq!(is_same, !applied.contains(key), "{key}: applied, and the settings in use differ");
        }
        let both: Vec<_> = applied.intersection(&restart).collect();
        assert_eq!(both, ["containerEdits"]);
        let chart = std::fs::read_to_string("../../deploy/helm/berth/templates/_helpers.tpl").unwrap();
        let line = chart.lines().find(|line| line.contains("$start := omit")).unwrap();
        let omitted: BTreeSet<String> = line.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        assert_eq!(omitted, applied);
        assert!(
            chart.contains(r#"pick (default (dict) .containerEdits) "nvidiaDriverRoot" "nvidiaDevRoot""#)
        );
    }
}
