//! How GPUs are passed to containers: checks the node, decides, and keeps Berth's own CDI specification.
//!
//! The decision itself is [`berth_kubelet::resolve`]; this crate collects what it needs. `berth node check` and the
//! daemon use it alike, except that only the daemon writes.

mod own_spec;
mod runtime;
mod settled;
mod task;

pub use task::{OnChange, StrategySettings, StrategyTask};

use berth_config::{CdiGenerate, Config, GpuSource};
use berth_gpus::cdi::{Driver, FileState, NamedDevices, OWN_FILE, OWN_KIND, file_states, named_devices};
use berth_kernel::hardware::gpu::Part;
use berth_kernel::hardware::mig::MigStrategy;
use berth_kernel::ids::names::PartId;
use berth_kernel::node::ledger::Ledger;
use berth_kubelet::{
    Cdi, DeviceIdStrategy, DeviceListStrategy, Edits, FoundSpec, Resolution, Runtime, StrategyFacts,
    device_name, missing_nodes, resolve,
};
use own_spec::OwnSpec;
use runtime::{Programs, Running, under};
use settled::Settled;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// The kubelet and the container runtime of the node, as the API server shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeVersions {
    /// The minor version of the kubelet.
    pub kubelet_minor: Option<u32>,
    /// `containerd://2.1.4`.
    pub runtime: Option<String>,
}

impl NodeVersions {
    /// The versions of the node object.
    #[must_use]
    pub fn of(info: &berth_cluster::NodeInfo) -> Self {
        let minor = info.kubelet.trim_start_matches('v').split('.').nth(1);
        let runtime = Some(info.container_runtime.clone()).filter(|runtime| runtime.contains("://"));
        Self { kubelet_minor: minor.and_then(|minor| minor.parse().ok()), runtime }
    }
}

/// How GPUs are passed at present.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strategy {
    /// The decision.
    pub resolution: Resolution,
    /// The parts that the CDI specification in use names; `None` if none is used.
    pub named_parts: Option<BTreeSet<PartId>>,
    /// Device nodes that containers need and that do not exist.
    pub missing_nodes: Option<String>,
    /// What containers lack by Berth's own specification, and why it could not be written.
    pub warnings: Vec<String>,
}

impl Strategy {
    /// As the REST API shows it.
    #[must_use]
    pub fn shown(&self, is_auto: bool) -> berth_api::DeviceListStrategy {
        let mut shown = berth_api::DeviceListStrategy {
            auto: is_auto,
            strategies: Vec::new(),
            cdi_kind: None,
            reason: String::new(),
            warnings: self.missing_nodes.iter().chain(&self.warnings).cloned().collect(),
        };
        match &self.resolution {
            Resolution::Works { strategies, cdi_kind, why, warning } => {
                shown.strategies = strategies.iter().map(|strategy| strategy.as_str().to_owned()).collect();
                shown.cdi_kind.clone_from(cdi_kind);
                shown.reason.clone_from(why);
                shown.warnings.splice(0..0, warning.as_ref().map(ToString::to_string));
            }
            Resolution::NoStrategy(error) => shown.reason = error.to_string(),
        }
        shown
    }

    /// The edits of containers by this strategy.
    #[must_use]
    pub fn edits(&self, configured: &Edits) -> Arc<Edits> {
        let mut edits = configured.clone();
        if let Resolution::Works { strategies, cdi_kind, .. } = &self.resolution {
            edits.strategies.clone_from(strategies);
            if let Some(kind) = cdi_kind {
                edits.cdi_kind.clone_from(kind);
            }
        }
        Arc::new(edits)
    }
}

/// Files, each with its state.
type FileStates = Vec<(PathBuf, Option<FileState>)>;

/// Checks the node.
pub struct StrategyFinder {
    configured: Option<BTreeSet<DeviceListStrategy>>,
    edits: Edits,
    is_simulated: bool,
    mig_strategy: MigStrategy,
    runtime_files: Vec<PathBuf>,
    /// What those files show.
    runtimes: Settled<Vec<Runtime>>,
    /// The programs of the running container runtimes. They give the version if the API server does not show it.
    programs: Programs,
    folders: Vec<PathBuf>,
    generate: CdiGenerate,
    own: OwnSpec,
    /// The devices of the configured kind, with the files that were read.
    named: Option<(FileStates, NamedDevices)>,
    root: PathBuf,
}

/// Whether the specification may be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is kept up to date.
    Write,
    /// Only what would be written is computed.
    Read,
}

impl StrategyFinder {
    /// `root` is `/` outside tests. `is_simulated`: the GPUs are not real, whatever the configuration says.
    #[must_use]
    pub fn new(config: &Config, root: &Path, is_simulated: bool) -> Self {
        let edits = config.containers.edits.clone();
        let folders: Vec<PathBuf> =
            config.containers.cdi.folders.iter().map(|folder| under(root, folder)).collect();
        let driver = Driver {
            root: edits.driver_folder(),
            nodes: edits.node_folders(),
            hook: config.containers.cdi.hook.clone(),
            sysfs: "/sys".into(),
            capabilities: berth_kernel::hardware::device_nodes::MIG_MINORS.into(),
        };
        let file = folders.last().map(|folder| folder.join(OWN_FILE)).unwrap_or_default();
        Self {
            configured: (!config.containers.auto_strategy).then(|| edits.strategies.clone()),
            is_simulated: is_simulated || matches!(config.gpus.source, GpuSource::Sim(_)),
            mig_strategy: config.offers.mig_strategy,
            runtime_files: config.containers.cdi.runtime_files.clone(),
            runtimes: Settled::default(),
            programs: Programs::default(),
            generate: config.containers.cdi.generate,
            own: OwnSpec::new(driver, file),
            named: None,
            root: root.to_owned(),
            folders,
            edits,
        }
    }

    /// Whether the kubelet's and the runtime's version matter.
    #[must_use]
    pub fn needs_versions(&self) -> bool {
        !self.is_simulated
    }

    /// Whether a changed configuration of the runtime was read once, and is to be read again.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        self.runtimes.is_settling()
    }

    /// The folders of the CDI specifications and of the runtimes' configurations.
    #[must_use]
    pub fn folders(&self) -> Vec<PathBuf> {
        let files = self.runtime_files.iter().filter_map(|file| file.parent());
        self.folders.iter().cloned().chain(files.map(|folder| under(&self.root, folder))).collect()
    }

    /// Checks the node and decides. Reads files, and writes the specification; blocks.
    pub fn find(&mut self, ledger: &Ledger, versions: &NodeVersions, access: Access) -> Strategy {
        let parts: Vec<&Part> =
            ledger.parts.values().filter(|state| state.present).map(|state| &state.part).collect();
        let held: BTreeSet<String> = ledger
            .parts
            .values()
            .filter(|state| state.held())
            .flat_map(|state| [state.part.id.to_string(), device_name(&state.part, self.edits.id_strategy)])
            .collect();
        self.find_for(&parts, &held, versions, access)
    }

    /// [`Self::find`] for these parts; `held` are the names of those that containers hold.
    pub fn find_for(
        &mut self,
        parts: &[&Part],
        held: &BTreeSet<String>,
        versions: &NodeVersions,
        access: Access,
    ) -> Strategy {
        let grantable: Vec<&Part> =
            parts.iter().copied().filter(|part| part.mig.is_some() || !part.mig_enabled).collect();
        let mut facts = StrategyFacts { is_simulated: self.is_simulated, ..StrategyFacts::default() };
        let mut warnings = Vec::new();
        if !self.is_simulated {
            let node_object = versions.runtime.as_deref();
            // Docker's version does not show that of cri-dockerd.
            let is_known = node_object.is_some_and(|text| !text.starts_with("docker://"));
            let programs = if is_known { Vec::new() } else { self.programs.find(&self.root.join("proc")) };
            let running = Running { node_object, programs: &programs };
            let read = runtime::runtimes(&self.runtime_files, &self.root, running);
            facts.runtimes = self.runtimes.after(read, Instant::now());
            facts.kubelet_minor = versions.kubelet_minor;
            if facts.needs_spec(self.configured.as_ref()) {
                let unread = unread_folders(&self.folders, &self.root, &facts.runtimes);
                facts.spec = Some(self.find_spec(&grantable, &unread, held, access, &mut warnings));
            }
        }
        let resolution = resolve(self.configured.as_ref(), &facts);
        let missing_nodes = self.missing_nodes(&resolution, &grantable);
        let named_parts = facts.spec.and_then(|_| self.named_parts(&resolution, parts));
        if let Some(named) = named_parts.as_ref().filter(|_| self.mig_strategy == MigStrategy::None) {
            let unnamed = |part: &&&Part| part.mig_enabled && !named.contains(&part.id);
            warnings.extend(parts.iter().filter(unnamed).map(|part| {
                format!(
                    "{} is in MIG mode, in which CDI specifications name only its instances, so it is not offered: set \
                     migStrategy, or turn its MIG mode off",
                    part.id
                )
            }));
        }
        Strategy { resolution, named_parts, missing_nodes, warnings }
    }

    /// The parts named by the specifications that were just found or written; `None` if the strategy does not use CDI.
    /// It is also `None` if a configured strategy finds no name at all: the folder of the specifications may be hidden
    /// from this process, and then no part is withheld.
    fn named_parts(&self, resolution: &Resolution, parts: &[&Part]) -> Option<BTreeSet<PartId>> {
        let Resolution::Works { strategies, cdi_kind, .. } = resolution else { return None };
        let is_cdi =
            |strategy| matches!(strategy, &DeviceListStrategy::CdiCri | &DeviceListStrategy::CdiAnnotations);
        if !strategies.iter().any(is_cdi) {
            return None;
        }
        let mut names: BTreeSet<&str> = BTreeSet::new();
        if cdi_kind.as_deref() == Some(OWN_KIND) {
            names.extend(self.own.names().iter().map(String::as_str));
        }
        if cdi_kind.as_ref().is_none_or(|kind| *kind == self.edits.cdi_kind) {
            let found = self.named.iter().flat_map(|(_, named)| named.files.keys());
            names.extend(found.map(String::as_str));
        }
        if names.is_empty() && cdi_kind.is_none() {
            return None;
        }
        let is_named = |part: &&&Part| names.contains(device_name(part, self.edits.id_strategy).as_str());
        Some(parts.iter().filter(is_named).map(|part| part.id.clone()).collect())
    }

    /// The missing device nodes, with the remedy. They are checked only if Berth passes device nodes itself, or names
    /// them in its own specification.
    fn missing_nodes(&self, resolution: &Resolution, parts: &[&Part]) -> Option<String> {
        let Resolution::Works { strategies, cdi_kind, .. } = resolution else { return None };
        let edits = Edits { strategies: strategies.clone(), ..self.edits.clone() };
        let passes = self.edits.pass_device_specs && !edits.is_cdi_only();
        let is_concerned = passes || cdi_kind.as_deref() == Some(OWN_KIND);
        (is_concerned && !self.is_simulated).then(|| missing_nodes(parts, &edits)).flatten()
    }

    /// A specification that names every part: an existing one of the configured kind, else our own. `unread`: the
    /// folders that a container runtime does not read.
    fn find_spec(
        &mut self,
        parts: &[&Part],
        unread: &BTreeMap<PathBuf, String>,
        held: &BTreeSet<String>,
        access: Access,
        warnings: &mut Vec<String>,
    ) -> Result<FoundSpec, String> {
        let existing = self.existing(parts, unread);
        let is_own_needed = match self.generate {
            CdiGenerate::Never => false,
            CdiGenerate::Always => true,
            // Containers that were given names of our specification need it when they restart.
            CdiGenerate::Auto => existing.is_err() || self.own.exists(),
        };
        if !is_own_needed {
            return existing;
        }
        // Looked up each time: a driver container that is started again mounts its root later.
        self.own.set_folders(self.edits.driver_folder(), self.edits.node_folders());
        let unread = self.own.file().parent().and_then(|folder| unread.get(folder).cloned());
        let own = match (self.no_driver_root(), unread) {
            (Some(why), _) => Err(why),
            (None, Some(why)) if self.generate == CdiGenerate::Auto => Err(why),
            (None, unread) => self.own.update(parts, held, access, warnings).and(unread.map_or(Ok(()), Err)),
        };
        match (existing, own) {
            (Ok(existing), _) if self.generate == CdiGenerate::Auto => Ok(existing),
            (_, Ok(())) => {
                Ok(FoundSpec { kind: OWN_KIND.into(), file: self.own.file().display().to_string() })
            }
            (Ok(_), Err(own)) => Err(format!("Berth's own CDI specification cannot be made: {own}")),
            (Err(existing), Err(own)) => Err(format!("{existing}, and Berth's own cannot be made: {own}")),
        }
    }

    /// Why no specification of our own can be made here at present, if so.
    fn no_driver_root(&self) -> Option<String> {
        let is_in_pod = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        (is_in_pod && !self.edits.driver_root_in_container.is_dir()).then(|| {
            "the host's driver root is not mounted into Berth's pod (chart: nvidiaDriverRoot, / if the driver is installed \
             on the host; its last folder must not be a symbolic link)"
                .to_owned()
        })
    }

    /// The specification of the configured kind, if it names every part.
    fn existing(&mut self, parts: &[&Part], unread: &BTreeMap<PathBuf, String>) -> Result<FoundSpec, String> {
        let kind = &self.edits.cdi_kind.clone();
        let folders: Vec<PathBuf> =
            self.folders.iter().filter(|folder| !unread.contains_key(*folder)).cloned().collect();
        let files = file_states(&folders);
        // Parsing takes milliseconds, and most checks find no change.
        if self.named.as_ref().is_none_or(|(before, _)| *before != files) {
            self.named = Some((files, named_devices(&folders, kind)));
        }
        let found = self.named.as_ref().map(|(_, named)| named.clone()).unwrap_or_default();
        let names: Vec<String> = parts.iter().map(|part| device_name(part, self.edits.id_strategy)).collect();
        if let Some((name, files)) = names.iter().find_map(|name| found.conflicts.get_key_value(name)) {
            let files: Vec<_> = files.iter().map(|file| file.display().to_string()).collect();
            let files = files.join(" and ");
            return Err(format!(
                "no runtime uses {kind}={name}, since {files} both name it (delete one of them)"
            ));
        }
        let unnamed = names.iter().find(|name| !found.files.contains_key(*name));
        match (unnamed, found.files.values().next()) {
            (None, Some(first)) => {
                let file = names.first().and_then(|name| found.files.get(name)).unwrap_or(first);
                Ok(FoundSpec { kind: kind.clone(), file: file.display().to_string() })
            }
            (_, None) => match unread.values().next() {
                Some(why) if folders.is_empty() => Err(why.clone()),
                _ => {
                    let folders: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
                    let folders = folders.join(" or ");
                    let broken = found.broken.first().map(|why| format!(" ({why})")).unwrap_or_default();
                    Err(format!("there is no CDI specification of the kind {kind} in {folders}{broken}"))
                }
            },
            (Some(name), Some(_)) => Err(match self.other_id_strategy(parts, &found) {
                Some(keyword) => format!(
                    "no CDI specification names {kind}={name}; the specifications name each GPU by its {keyword} (set \
                     containerEdits.deviceIdStrategy: {keyword})"
                ),
                None => format!("no CDI specification names {kind}={name}"),
            }),
        }
    }

    /// The keyword of the other `deviceIdStrategy`, if the specifications name every part by it.
    fn other_id_strategy(&self, parts: &[&Part], found: &NamedDevices) -> Option<&'static str> {
        let (other, keyword) = match self.edits.id_strategy {
            DeviceIdStrategy::Uuid => (DeviceIdStrategy::Index, "index"),
            DeviceIdStrategy::Index => (DeviceIdStrategy::Uuid, "uuid"),
        };
        parts.iter().all(|part| found.files.contains_key(&device_name(part, other))).then_some(keyword)
    }
}

/// The folders in which a container runtime reads no CDI specifications, each with the reason and the remedy.
fn unread_folders(folders: &[PathBuf], root: &Path, runtimes: &[Runtime]) -> BTreeMap<PathBuf, String> {
    // `/var/run` is a link to `/run` on every node.
    let one_form = |folder: &Path| match folder.strip_prefix("/var/run") {
        Ok(rest) => Path::new("/run").join(rest),
        Err(_) => folder.to_owned(),
    };
    let mut unread = BTreeMap::new();
    for runtime in runtimes {
        let Cdi::On { folders: read, .. } = &runtime.cdi else { continue };
        for folder in folders {
            let on_node = Path::new("/").join(folder.strip_prefix(root).unwrap_or(folder));
            if read.iter().any(|read| one_form(read) == one_form(&on_node)) {
                continue;
            }
            let (name, on_node) = (&runtime.name, on_node.display());
            let list = read.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ");
            let why = if read.is_empty() {
                format!("{name} reads CDI specifications in no folder: {} sets cdi_spec_dirs", runtime.file)
            } else {
                format!(
                    "{name} reads CDI specifications in [{list}], not in {on_node} (set cdi.folders: [{list}])"
                )
            };
            unread.insert(folder.clone(), why);
        }
    }
    unread
}

#[cfg(test)]
mod tests;
