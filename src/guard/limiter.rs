//! Limits the memory of containers on their GPUs before their first instruction, and reads the limits back.

use crate::cgroup::ContainerCgroup;
use crate::plugin::Refusal;
use crate::settings::{LimitSettings, Settings};
use crate::state::GuardState;
use crate::suspended::{SuspendedFolder, SuspendedProcess, kill};
use berth_gpus::nvml::NvmlLimits;
use berth_kernel::evidence::limits::matches_granted;
use berth_kernel::ids::names::GpuId;
use berth_proto::guard::{LimitReading, LimitState, LimitSupport, MemoryLimit, Status};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};

/// Interval at which all limits are read.
const READ_INTERVAL: Duration = Duration::from_secs(30);
/// The limit that is tried on each GPU, MiB.
const PROBE_MIB: u64 = 1024;
/// The name of the cgroup in which it is tried.
const PROBE_CGROUP: &str = "berth-guard-probe";
/// How often NVML is opened again at most because it does not list the GPU of a container.
const REOPEN_INTERVAL: Duration = Duration::from_secs(300);
/// How long a reading is shown: twice the interval of readings.
const READING_AGE_MAX: Duration = Duration::from_secs(60);
/// How often the guard sets a changed limit again within [`CHANGES_TIME`]. After one more change it gives up, since
/// something else keeps changing the limit.
const CHANGES_MAX: usize = 2;
/// See [`CHANGES_MAX`].
const CHANGES_TIME: Duration = Duration::from_secs(600);

/// Waits for NVML.
#[derive(Clone, Copy, Debug)]
struct Waits {
    /// How long the answer to the runtime waits. Meanwhile no other container of the node is created or started.
    answer: Duration,
    /// How long a suspended container waits.
    suspend: Duration,
    /// How long a suspended container waits that may not run without its limits. After that it is killed.
    suspend_required: Duration,
}

impl Default for Waits {
    fn default() -> Self {
        Self {
            answer: Duration::from_millis(50),
            suspend: Duration::from_secs(2),
            suspend_required: Duration::from_secs(10),
        }
    }
}

/// Why a limit is not set after a panic.
const PANICKED: &str =
    "the guard had an internal error while it set the limit, which its log shows; it tries again within 30 s";

/// Sets limits and reads them.
pub(crate) struct Limiter {
    guard: Arc<GuardState>,
    /// NVML, or why there are no limits.
    nvml: Result<Arc<NvmlLimits>, &'static str>,
    /// Whether a container is refused or killed if its limits cannot be set.
    is_required: bool,
    cgroup_root: PathBuf,
    waits: Waits,
    /// Containers whose limits are being set at their start.
    starting: Mutex<BTreeSet<String>>,
    /// When limits were found changed, by container and GPU.
    times_changed: Mutex<BTreeMap<(String, String), Vec<Instant>>>,
    /// Ends the wait for the next reading.
    wake: Notify,
    suspended_folder: SuspendedFolder,
    /// How many containers are suspended.
    suspended: watch::Sender<usize>,
    /// When NVML was opened last.
    opened: Mutex<Option<Instant>>,
    /// Whether NVML is being opened, which takes seconds where no process has it open; at first too, so that a container that
    /// starts before does not run without its limits.
    is_opening: watch::Sender<bool>,
}

impl Limiter {
    pub(crate) fn new(settings: &Settings, guard: Arc<GuardState>) -> Self {
        let (nvml, is_required) = match &settings.limits {
            LimitSettings::Off => (Err("`enforce.memory` is `off`"), false),
            LimitSettings::Simulated { is_required } => (Err("the GPUs are simulated"), *is_required),
            LimitSettings::Nvml { library, driver_root, is_required } => {
                let nvml = NvmlLimits::new(library.clone(), driver_root.clone());
                (Ok(Arc::new(nvml)), *is_required)
            }
        };
        Self {
            guard,
            is_opening: watch::Sender::new(nvml.is_ok()),
            nvml,
            is_required,
            cgroup_root: settings.cgroup_root.clone(),
            waits: Waits::default(),
            starting: Mutex::default(),
            times_changed: Mutex::default(),
            wake: Notify::new(),
            suspended_folder: SuspendedFolder::beside(&settings.socket),
            suspended: watch::Sender::new(0),
            opened: Mutex::default(),
        }
    }

    /// Resumes what an earlier guard has left suspended.
    pub(crate) fn resume_left(&self) {
        self.suspended_folder.resume_all(self.is_required);
    }

    /// Waits until no container is suspended: a registration would then block the runtime.
    pub(crate) async fn wait_until_none_is_suspended(&self) {
        // The sender is not dropped meanwhile.
        let _ = self.suspended.subscribe().wait_for(|suspended| *suspended == 0).await;
    }

    /// Has all limits read soon.
    pub(crate) fn wake(&self) {
        self.wake.notify_one();
    }

    /// Marks a container as starting. Until the value is dropped, the regular check leaves its limits alone.
    pub(crate) fn mark_starting(self: &Arc<Self>, id: &str) -> Starting {
        self.starting.lock().insert(id.to_owned());
        Starting { limiter: Arc::clone(self), id: id.to_owned() }
    }

    /// Sets the limits of a container that is about to run its first instruction. If NVML takes longer than
    /// [`Waits::answer`], the container is suspended, and this returns.
    ///
    /// # Errors
    /// If the limits cannot be set, and the container may not run without.
    pub(crate) async fn start(
        &self,
        starting: Starting,
        pid: u32,
        cgroup: Option<ContainerCgroup>,
        limits: Vec<MemoryLimit>,
    ) -> Result<(), Refusal> {
        let refused = self.set_before_start(starting, pid, cgroup, limits).await;
        if refused.is_err() {
            kill(pid);
        }
        refused
    }

    async fn set_before_start(
        &self,
        starting: Starting,
        pid: u32,
        cgroup: Option<ContainerCgroup>,
        limits: Vec<MemoryLimit>,
    ) -> Result<(), Refusal> {
        let id = &starting.id;
        let (limits, impossible) = self.split(limits);
        self.record_start(id, impossible)?;
        if limits.is_empty() {
            return Ok(());
        }
        let mut setting =
            tokio::spawn(Arc::clone(&starting.limiter).set_all_once_open(cgroup, limits.clone()));
        if let Ok(done) = timeout(self.waits.answer, &mut setting).await {
            return self.record_start(id, done.unwrap_or_else(|_| failed(limits, PANICKED)));
        }
        match SuspendedProcess::suspend(pid, &self.suspended_folder, self.is_required) {
            Ok(process) => {
                self.suspended.send_modify(|suspended| *suspended += 1);
                tokio::spawn(starting.suspend(process, setting, limits));
                Ok(())
            }
            Err(error) => {
                let why = format!("NVML does not answer, and the container cannot be suspended: {error}");
                self.record_start(id, failed(limits, &why))
            }
        }
    }

    /// The limits that can be set, and those that cannot, with the reason.
    fn split(&self, limits: Vec<MemoryLimit>) -> (Vec<MemoryLimit>, Vec<MemoryLimit>) {
        // Where limits do not work that is no failure, unless they are required.
        let state = if self.is_required { LimitState::Failed } else { LimitState::Pending };
        let status = self.guard.status();
        let (mut possible, mut impossible) = (Vec::new(), Vec::new());
        for limit in limits {
            match self.why_impossible(&status, &limit.gpu) {
                Some(why) => impossible.extend(with_state(vec![limit], state, &why)),
                None => possible.push(limit),
            }
        }
        (possible, impossible)
    }

    /// Sets the limits of one container, as soon as NVML is open.
    async fn set_all_once_open(
        self: Arc<Self>,
        cgroup: Option<ContainerCgroup>,
        limits: Vec<MemoryLimit>,
    ) -> Vec<MemoryLimit> {
        if self.nvml.as_ref().is_ok_and(|nvml| !nvml.is_open()) {
            // A call has found the driver gone, and NVML is opened again.
            self.is_opening.send_replace(true);
            self.wake();
        }
        // The sender is not dropped meanwhile.
        let _ = self.is_opening.subscribe().wait_for(|is_opening| !is_opening).await;
        let (possible, mut all) = self.split(limits);
        all.extend(match (&self.nvml, cgroup) {
            (Ok(nvml), Some(cgroup)) => {
                let (nvml, limits) = (Arc::clone(nvml), possible.clone());
                let setting = spawn_blocking(move || set_all(&nvml, cgroup.path(), limits));
                setting.await.unwrap_or_else(|_| failed(possible, PANICKED))
            }
            (Err(why), _) => failed(possible, why),
            (Ok(_), None) => {
                let why = format!(
                    "the guard found no cgroup of the container below {}: set `guard.cgroupRoot` to the folder in which \
                     cgroup v2 is mounted",
                    self.cgroup_root.display()
                );
                failed(possible, &why)
            }
        });
        all
    }

    /// A container has an annotation of a grant that its pod has, too, so that its limits are not known.
    ///
    /// # Errors
    /// If it may not run without its limits.
    pub(crate) fn refuse_doubtful(&self, id: &str, pid: u32, key: &str) -> Result<(), Refusal> {
        let why = format!(
            "its pod has the annotation {key} with the value that the container has, so that the value can be the pod \
             author's: remove the annotation from the pod"
        );
        tracing::warn!(container = id, "a grant of a container is not used: {why}");
        if !self.is_required {
            return Ok(());
        }
        kill(pid);
        Err(Refusal(format!(
            "`enforce.memory` is `require`, and the memory limit of the container is not known: {why}"
        )))
    }

    /// Why limits cannot work on a GPU: the guard has tried, or the settings or the node rule them out. `None` also while it
    /// has not tried yet.
    fn why_impossible(&self, status: &Status, gpu: &str) -> Option<String> {
        if let Err(why) = self.nvml {
            return Some(why.into());
        }
        if *self.is_opening.borrow() {
            return None;
        }
        let of_gpu = status.limit_support.iter().find(|one| one.gpu == gpu).map(|one| one.why.clone());
        of_gpu.or_else(|| Some(status.limits_error.clone())).filter(|why| !why.is_empty())
    }

    /// Records what has become of a container's limits.
    ///
    /// # Errors
    /// If one was not set, and the container may not run without.
    fn record_start(&self, id: &str, limits: Vec<MemoryLimit>) -> Result<(), Refusal> {
        let unset = limits.iter().find(|limit| limit.state() != LimitState::Set);
        let refusal = unset.filter(|_| self.is_required).map(|limit| {
            Refusal(format!(
                "`enforce.memory` is `require`, and the memory limit of {} MiB on GPU {} cannot be set: {}. Repair this, or \
                 set `enforce.memory: auto` and restart daemon and guard",
                limit.granted_mib, limit.gpu, limit.why
            ))
        });
        self.record(id, limits);
        refusal.map_or(Ok(()), Err)
    }

    fn record(&self, id: &str, limits: Vec<MemoryLimit>) {
        for limit in &limits {
            log(id, limit);
        }
        self.guard.update(|known| {
            limits.into_iter().fold(false, |is_new, limit| known.set_limit(id, limit) | is_new)
        });
    }

    /// Reads all limits again and again, and sets those that are missing. While the driver is released NVML is closed.
    pub(crate) async fn run(self: &Arc<Self>, mut released: watch::Receiver<bool>) {
        let nvml = match &self.nvml {
            Ok(nvml) => Arc::clone(nvml),
            Err(why) => {
                return self.guard.set_status(|status| {
                    status.limits_error = (*why).to_owned();
                    status.is_required = self.is_required;
                });
            }
        };
        self.guard.set_status(|status| {
            status.is_required = self.is_required;
            // From now on NVML can be opened at any moment, so that a release of the driver has to wait for an answer.
            status.is_driver_released = Some(false);
        });
        loop {
            let (this, nvml) = (Arc::clone(self), Arc::clone(&nvml));
            let is_released = *released.borrow_and_update();
            let checked = spawn_blocking(move || {
                this.drop_old_readings();
                match is_released {
                    true => this.close(&nvml),
                    false => this.check(&nvml),
                }
                this.guard.set_status(|status| status.is_driver_released = Some(is_released));
            });
            if checked.await.is_err() {
                tracing::error!("the check of the memory limits panicked; it is tried again");
                self.is_opening.send_replace(false);
            }
            tokio::select! {
                () = sleep(READ_INTERVAL) => {}
                () = self.wake.notified() => {}
                _ = released.changed() => {}
            }
        }
    }

    fn close(&self, nvml: &NvmlLimits) {
        let why = "the driver was released; `berth nvml resume` ends that";
        let is_closed = nvml.close(why);
        self.guard.set_status(|status| {
            status.has_driver_open = !is_closed;
            status.limit_support.clear();
            status.limits_error = why.into();
        });
        self.is_opening.send_replace(false);
    }

    fn check(&self, nvml: &NvmlLimits) {
        if self.misses_a_gpu() {
            nvml.close("it does not list the GPU of a container, and is opened again");
        }
        match nvml.is_open() {
            true => self.probe_again(nvml),
            false => self.open(nvml),
        }
        self.is_opening.send_replace(false);
        let support = self.guard.status().limit_support;
        let works = |gpu: &str| support.iter().any(|one| one.gpu == gpu && one.why.is_empty());
        // In this order: a container with a cgroup has been marked before.
        let all = self.guard.limited();
        let is_starting = self.starting.lock().clone();
        self.times_changed.lock().retain(|(id, _), _| all.iter().any(|(known, ..)| known == id));
        for (id, cgroup, limits) in all.into_iter().filter(|(id, ..)| !is_starting.contains(id)) {
            for limit in limits.into_iter().filter(|limit| works(&limit.gpu)) {
                let now = self.check_limit(nvml, &id, cgroup.path(), limit.clone());
                if now.state != limit.state || now.why != limit.why {
                    log(&id, &now);
                }
                // Without waiting for the other GPUs, so that the daemon gets each reading while it is new.
                self.guard.update(|known| known.set_limit(&id, now));
            }
        }
    }

    /// Whether a container has a limit on a GPU that NVML did not list when it was opened, some time ago: the GPU may have
    /// been attached since.
    fn misses_a_gpu(&self) -> bool {
        let support = self.guard.status().limit_support;
        let mut limits = self.guard.limited().into_iter().flat_map(|(.., limits)| limits);
        !support.is_empty()
            && self.opened.lock().is_none_or(|at| at.elapsed() >= REOPEN_INTERVAL)
            && limits.any(|limit| support.iter().all(|one| one.gpu != limit.gpu))
    }

    /// Tries the GPUs once more on which no limit could be set.
    fn probe_again(&self, nvml: &NvmlLimits) {
        let support = self.guard.status().limit_support;
        let failing = support.iter().filter(|one| !one.why.is_empty());
        let failing: Vec<GpuId> = failing.filter_map(|one| GpuId::parse(&one.gpu).ok()).collect();
        if failing.is_empty() {
            return;
        }
        let again: BTreeMap<String, LimitSupport> =
            self.probe(nvml, &failing).into_iter().map(|one| (one.gpu.clone(), one)).collect();
        let now: Vec<_> = support.iter().map(|one| again.get(&one.gpu).unwrap_or(one).clone()).collect();
        if now != support {
            log_support(&now);
            self.guard.set_status(|status| status.limit_support = now);
        }
    }

    /// Removes readings that are too old to show anything.
    fn drop_old_readings(&self) {
        let age_max_ms = u64::try_from(READING_AGE_MAX.as_millis()).unwrap_or_default();
        let oldest_ms = wall_ms().saturating_sub(age_max_ms);
        self.guard.update(|known| known.drop_readings_before(oldest_ms));
    }

    /// Opens NVML, and tries a limit on each GPU.
    fn open(&self, nvml: &NvmlLimits) {
        self.is_opening.send_replace(true);
        // Before it is opened, so that no release of the driver is overtaken.
        self.guard.set_status(|status| status.has_driver_open = true);
        *self.opened.lock() = Some(Instant::now());
        let opened = match self.cgroup_root.join("cgroup.controllers").exists() {
            true => nvml.open().map_err(|error| error.to_string()),
            false => Err(format!(
                "cgroup v2 is not mounted at {}, and memory limits need it: set `guard.cgroupRoot` to its folder; on a node \
                 that has only cgroup v1 there are no limits",
                self.cgroup_root.display()
            )),
        };
        let (limit_support, limits_error) = match opened {
            Ok(gpus) => (self.probe(nvml, &gpus), String::new()),
            Err(why) => (Vec::new(), why),
        };
        log_support(&limit_support);
        self.guard.set_status(|status| {
            status.has_driver_open = nvml.is_open();
            (status.limit_support, status.limits_error) = (limit_support, limits_error);
        });
    }

    /// Sets a limit on a cgroup without processes, and reads it back.
    fn probe(&self, nvml: &NvmlLimits, gpus: &[GpuId]) -> Vec<LimitSupport> {
        let cgroup = self.cgroup_root.join(PROBE_CGROUP);
        let made = match fs::create_dir(&cgroup) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            made => made,
        };
        let why = |gpu: &GpuId| match &made {
            Ok(()) => set_one(nvml, &cgroup, gpu, PROBE_MIB).err().unwrap_or_default(),
            Err(error) => format!("no cgroup can be created in {}: {error}", self.cgroup_root.display()),
        };
        let support = gpus.iter().map(|gpu| LimitSupport { gpu: gpu.to_string(), why: why(gpu) }).collect();
        // The limit ends with its cgroup.
        let _ = fs::remove_dir(&cgroup);
        support
    }

    /// Reads one limit of a container that runs, and sets it if it is missing.
    fn check_limit(&self, nvml: &NvmlLimits, id: &str, cgroup: &Path, limit: MemoryLimit) -> MemoryLimit {
        let Ok(gpu) = GpuId::parse(&limit.gpu) else { return limit };
        let reported = match nvml.get(&gpu, cgroup) {
            Ok(reported) => reported,
            // The container has ended.
            Err(_) if !cgroup.exists() => return limit,
            // The previous reading counts until it is too old.
            Err(error) => {
                return MemoryLimit { why: format!("the limit could not be read: {error}"), ..limit };
            }
        };
        let granted_mib = limit.granted_mib;
        let reading = reported.map(reading_of);
        let is_as_granted = reported.is_some_and(|now| matches_granted(now.limit_mib, granted_mib));
        let was_set = matches!(limit.state(), LimitState::Set | LimitState::Late);
        if is_as_granted && (was_set || limit.state() == LimitState::Pending) {
            let state = if was_set { limit.state } else { LimitState::Set.into() };
            return MemoryLimit { state, why: String::new(), reading, ..limit };
        }
        let times_changed = limit.times_changed + u32::from(was_set);
        if was_set {
            let found = reported.map_or_else(|| "removed".to_owned(), |now| format!("{} MiB", now.limit_mib));
            tracing::warn!(
                container = id,
                gpu = limit.gpu,
                "a memory limit was changed by something other than the guard: it is {found}, and {granted_mib} MiB were \
                 granted"
            );
            self.record_change(id, &limit.gpu);
        }
        if self.has_given_up(id, &limit.gpu) {
            let minutes = CHANGES_TIME.as_secs() / 60;
            let why = format!(
                "it was changed {} times in {minutes} minutes by something other than the guard, so it is not set again",
                CHANGES_MAX + 1
            );
            return MemoryLimit { state: LimitState::Failed.into(), why, reading, times_changed, ..limit };
        }
        match set_one(nvml, cgroup, &gpu, granted_mib) {
            Ok(reading) => {
                let state = if was_set { limit.state } else { LimitState::Late.into() };
                MemoryLimit { state, why: String::new(), reading: Some(reading), times_changed, ..limit }
            }
            Err(why) => {
                MemoryLimit { state: LimitState::Failed.into(), why, reading: None, times_changed, ..limit }
            }
        }
    }

    /// Records that a limit was found changed.
    fn record_change(&self, id: &str, gpu: &str) {
        let mut times_changed = self.times_changed.lock();
        let of_limit = times_changed.entry((id.to_owned(), gpu.to_owned())).or_default();
        of_limit.retain(|at| at.elapsed() < CHANGES_TIME);
        of_limit.push(Instant::now());
    }

    /// Whether a limit was changed so often that it is not set again while the container runs.
    fn has_given_up(&self, id: &str, gpu: &str) -> bool {
        let times_changed = self.times_changed.lock();
        times_changed.get(&(id.to_owned(), gpu.to_owned())).is_some_and(|times| times.len() > CHANGES_MAX)
    }
}

/// A container whose start has begun.
pub(crate) struct Starting {
    limiter: Arc<Limiter>,
    id: String,
}

impl Starting {
    /// Holds the container until its limits are set, or NVML has taken too long.
    async fn suspend(
        self,
        process: SuspendedProcess,
        mut setting: JoinHandle<Vec<MemoryLimit>>,
        limits: Vec<MemoryLimit>,
    ) {
        let (id, limiter) = (self.id.as_str(), &self.limiter);
        let waits = limiter.waits;
        let max = if limiter.is_required { waits.suspend_required } else { waits.suspend };
        tracing::warn!(
            container = id,
            "NVML did not answer within {} ms, or is still being opened: the first process of the container is \
             suspended until its memory limits are set, for at most {} s",
            waits.answer.as_millis(),
            max.as_secs()
        );
        let done = match timeout(max, &mut setting).await {
            Ok(done) => done.unwrap_or_else(|_| failed(limits.clone(), PANICKED)),
            Err(_) => {
                let why = format!("NVML has not answered for {} s", max.as_secs());
                failed(limits.clone(), &why)
            }
        };
        match limiter.record_start(id, done) {
            Ok(()) => process.resume(),
            Err(_) => process.kill(),
        }
        limiter.suspended.send_modify(|suspended| *suspended -= 1);
        if !setting.is_finished() {
            // The call cannot be ended. What it sets is in force from then on.
            let done = setting.await.unwrap_or_else(|_| failed(limits, PANICKED));
            limiter.record(id, done.into_iter().map(late).collect());
        }
    }
}

impl Drop for Starting {
    fn drop(&mut self) {
        self.limiter.starting.lock().remove(&self.id);
    }
}

/// Sets the limits of one container.
fn set_all(nvml: &NvmlLimits, cgroup: &Path, limits: Vec<MemoryLimit>) -> Vec<MemoryLimit> {
    let set = |limit: MemoryLimit| {
        let done = GpuId::parse(&limit.gpu)
            .map_err(|error| error.to_string())
            .and_then(|gpu| set_one(nvml, cgroup, &gpu, limit.granted_mib));
        let (state, why, reading) = match done {
            Ok(reading) => (LimitState::Set, String::new(), Some(reading)),
            Err(why) => (LimitState::Failed, why, None),
        };
        MemoryLimit { state: state.into(), why, reading, ..limit }
    };
    limits.into_iter().map(set).collect()
}

/// Sets a limit and reads it back.
fn set_one(nvml: &NvmlLimits, cgroup: &Path, gpu: &GpuId, granted_mib: u64) -> Result<LimitReading, String> {
    match nvml.set(gpu, cgroup, granted_mib).map_err(|error| error.to_string())? {
        Some(now) if matches_granted(now.limit_mib, granted_mib) => Ok(reading_of(now)),
        Some(now) => {
            let limit_mib = now.limit_mib;
            Err(format!("NVML reports a limit of {limit_mib} MiB after a limit of {granted_mib} MiB was set"))
        }
        None => Err("NVML reports no limit after one was set".into()),
    }
}

fn reading_of(now: berth_gpus::nvml::ReportedLimit) -> LimitReading {
    LimitReading { limit_mib: now.limit_mib, used_mib: now.used_mib, wall_ms: wall_ms() }
}

fn failed(limits: Vec<MemoryLimit>, why: &str) -> Vec<MemoryLimit> {
    with_state(limits, LimitState::Failed, why)
}

fn with_state(limits: Vec<MemoryLimit>, state: LimitState, why: &str) -> Vec<MemoryLimit> {
    let with_state = |limit| MemoryLimit { state: state.into(), why: why.into(), ..limit };
    limits.into_iter().map(with_state).collect()
}

fn late(limit: MemoryLimit) -> MemoryLimit {
    match limit.state() {
        LimitState::Set => MemoryLimit { state: LimitState::Late.into(), ..limit },
        _ => limit,
    }
}

fn log_support(support: &[LimitSupport]) {
    for one in support {
        match one.why.as_str() {
            "" => tracing::info!(gpu = one.gpu, "memory limits can be set on the GPU"),
            why => tracing::info!(gpu = one.gpu, "no memory limits can be set on the GPU: {why}"),
        }
    }
}

fn wall_ms() -> u64 {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since_1970.as_millis()).unwrap_or_default()
}

fn log(container: &str, limit: &MemoryLimit) {
    let (gpu, mib) = (&limit.gpu, limit.granted_mib);
    match (limit.state(), limit.why.as_str()) {
        (LimitState::Pending, _) => {}
        (LimitState::Set, "") => tracing::debug!(container, gpu, mib, "the memory limit is set"),
        (LimitState::Late, "") => {
            tracing::info!(container, gpu, mib, "the memory limit was set while the container ran");
        }
        (LimitState::Failed, why) => {
            tracing::warn!(container, gpu, mib, "the memory limit of a container is not set: {why}");
        }
        (LimitState::Set | LimitState::Late, why) => {
            tracing::warn!(container, gpu, mib, "the memory limit of a container is not known: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_proto::nri::{Container, PodSandbox};
    use fake_nvml::{Fault, Installed, LimitBackend, State};
    use std::process::{Child, Command};
    use tempfile::TempDir;

    const NO_LIMIT: u64 = u64::MAX / (1 << 20);

    /// A node with a container `c` that was granted shares of two GPUs, and whose process sleeps. A folder stands for its
    /// cgroup.
    struct Node {
        limiter: Arc<Limiter>,
        installed: Installed,
        process: Child,
        folder: TempDir,
    }

    impl Node {
        fn new(is_required: bool, waits: Waits) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let state = State { memory_limits: Some(LimitBackend::Dmem), ..State::h100(2) };
            let installed = Installed::new(&folder.path().join("nvml"), &state).unwrap();
            let root = folder.path().join("cgroup");
            fs::create_dir_all(root.join("c")).unwrap();
            fs::write(root.join("cgroup.controllers"), "").unwrap();
            let library = Some(installed.library().to_owned());
            let settings = Settings {
                cgroup_root: root,
                limits: LimitSettings::Nvml {
                    library: library.clone(),
                    driver_root: "/".into(),
                    is_required,
                },
                ..Settings::default()
            };
            let guard = Arc::new(GuardState::new(Settings::default().claim_grants));
            let nvml = NvmlLimits::new(library, "/".into()).with_calls_max(PATIENT.answer);
            let nvml = Ok(Arc::new(nvml));
            let limiter = Limiter { waits, nvml, ..Limiter::new(&settings, Arc::clone(&guard)) };
            let pod = PodSandbox { id: "s".into(), uid: "uid-1".into(), ..PodSandbox::default() };
            let mut uuids = [0, 1].map(|gpu| state.gpus[gpu].uuid.clone());
            // As the limits of a container are.
            uuids.sort();
            let [first, second] = uuids;
            let grant = ("berth.dev/grant.a".to_owned(), format!("0000002a-7 {first}=4096 {second}=1001"));
            let container = Container { id: "c".into(), annotations: [grant].into(), ..Container::default() };
            guard.update(|known| known.create(&pod, &container));
            let process = Command::new("sleep").arg("600").spawn().unwrap();
            Self { limiter: Arc::new(limiter), installed, process, folder }
        }

        fn open(self) -> Self {
            self.limiter.check(self.nvml());
            let support = self.limiter.guard.status().limit_support;
            assert!(support.len() == 2 && support.iter().all(|one| one.why.is_empty()), "{support:?}");
            self
        }

        fn nvml(&self) -> &NvmlLimits {
            self.limiter.nvml.as_ref().unwrap()
        }

        fn change(&self, change: impl FnOnce(&mut State)) {
            self.installed.change(change).unwrap();
        }

        fn cgroup(&self) -> ContainerCgroup {
            ContainerCgroup::find_for_tests("0::/c\n", &self.folder.path().join("cgroup"))
        }

        /// The runtime starts the container.
        async fn start(&self) -> Result<(), Refusal> {
            let starting = self.limiter.mark_starting("c");
            self.show_cgroup();
            let limits = self.limits();
            self.limiter.start(starting, self.process.id(), Some(self.cgroup()), limits).await
        }

        fn show_cgroup(&self) {
            self.limiter.guard.update(|known| {
                known.start("c", Some(self.cgroup()));
                true
            });
        }

        fn limits(&self) -> Vec<MemoryLimit> {
            self.limiter.guard.containers.lock().limits_of("c")
        }

        fn states(&self) -> Vec<LimitState> {
            self.limits().iter().map(MemoryLimit::state).collect()
        }

        /// MiB that NVML reports, by GPU.
        fn reported(&self) -> Vec<Option<u64>> {
            let reported = |limit: &MemoryLimit| {
                let gpu = GpuId::parse(&limit.gpu).unwrap();
                self.nvml().get(&gpu, self.cgroup().path()).unwrap().map(|now| now.limit_mib)
            };
            self.limits().iter().map(reported).collect()
        }

        /// Another program changes the first limit.
        fn drift(&self, to_mib: u64) {
            let gpu = GpuId::parse(&self.limits()[0].gpu).unwrap();
            self.nvml().set(&gpu, self.cgroup().path(), to_mib).unwrap();
        }

        fn is_stopped(&self) -> bool {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.process.id())).unwrap();
            stat.contains(") T ")
        }

        fn has_ended(&mut self) -> bool {
            self.process.try_wait().unwrap().is_some()
        }
    }

    impl Drop for Node {
        fn drop(&mut self) {
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }

    async fn until(mut holds: impl FnMut() -> bool) {
        let began = Instant::now();
        while !holds() {
            assert!(began.elapsed() < PATIENT.answer, "it never holds");
            sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits for ever where NVML hangs, so that no test depends on how long a call takes.
    const PATIENT: Waits = Waits {
        answer: Duration::from_secs(600),
        suspend: Duration::from_secs(600),
        suspend_required: Duration::from_secs(600),
    };
    const HASTY: Waits =
        Waits { answer: Duration::ZERO, suspend: Duration::ZERO, suspend_required: Duration::ZERO };

    #[tokio::test]
    async fn the_limits_of_a_container_are_set_and_read_back_before_it_starts() {
        let node = Node::new(true, PATIENT).open();
        node.start().await.unwrap();
        assert_eq!(node.states(), [LimitState::Set; 2]);
        let read = node.limits().iter().map(|limit| limit.reading.unwrap().limit_mib).collect::<Vec<_>>();
        assert_eq!(read, [4096, 1000], "the driver rounds down to pages of 2 MiB");
        assert_eq!(node.reported(), [Some(4096), Some(1000)]);
        assert!(node.limiter.starting.lock().is_empty() && !node.is_stopped());
    }

    #[tokio::test]
    async fn a_container_that_starts_before_nvml_is_open_is_suspended_until_its_limits_are_set() {
        let node = Node::new(false, Waits { answer: Duration::ZERO, ..PATIENT });
        node.start().await.unwrap();
        until(|| node.is_stopped()).await;
        assert_eq!(node.states(), [LimitState::Pending; 2]);
        let node = node.open();
        until(|| !node.is_stopped()).await;
        until(|| node.states() == [LimitState::Set; 2]).await;
    }

    #[tokio::test]
    async fn a_container_that_starts_after_nvml_was_lost_is_suspended_until_its_limits_are_set() {
        let node = Node::new(true, Waits { answer: Duration::ZERO, ..PATIENT }).open();
        node.nvml().close("the driver was reloaded");
        node.start().await.unwrap();
        until(|| node.is_stopped()).await;
        // The regular check is asked for.
        node.limiter.wake.notified().await;
        node.limiter.check(node.nvml());
        until(|| !node.is_stopped()).await;
        until(|| node.states() == [LimitState::Set; 2]).await;
    }

    #[tokio::test]
    async fn a_container_whose_limits_cannot_be_set_runs_unless_they_are_required() {
        for is_required in [false, true] {
            let node = Node::new(is_required, PATIENT).open();
            node.change(|state| state.memory_limits = None);
            let started = node.start().await;
            assert_eq!(node.states(), [LimitState::Failed; 2]);
            assert!(node.limits()[0].why.contains("615"), "{}", node.limits()[0].why);
            match started {
                Ok(()) => assert!(!is_required),
                Err(Refusal(why)) => assert!(is_required && why.contains("4096 MiB on GPU"), "{why}"),
            }
        }
    }

    #[tokio::test]
    async fn where_limits_do_not_work_a_container_has_none_or_is_refused_and_killed() {
        for is_required in [false, true] {
            let mut node = Node::new(is_required, PATIENT);
            node.change(|state| state.memory_limits = None);
            node.limiter.check(node.nvml());
            // A call would hang now.
            node.change(|state| state.faults = vec![Fault::hang("nvmlDeviceSetMemoryLimits_v1")]);
            let started = node.start().await;
            node.change(|state| state.faults.clear());
            assert!(node.limits()[0].why.contains("615"), "{}", node.limits()[0].why);
            assert_eq!(started.is_err(), is_required);
            let state = if is_required { LimitState::Failed } else { LimitState::Pending };
            assert_eq!(node.states(), [state; 2]);
            if is_required {
                until(|| node.has_ended()).await;
            }
        }
    }

    #[tokio::test]
    async fn a_gpu_on_which_limits_do_not_work_does_not_keep_the_limit_of_another_from_being_set() {
        let node = Node::new(false, PATIENT);
        let first = node.limits()[0].gpu.clone();
        let fails = Fault::fail("nvmlDeviceSetMemoryLimits_v1", fake_nvml::Code::NotSupported).of_gpu(first);
        node.change(|state| state.faults = vec![fails]);
        node.limiter.check(node.nvml());
        node.start().await.unwrap();
        assert_eq!(node.states(), [LimitState::Pending, LimitState::Set]);
    }

    #[tokio::test]
    async fn a_gpu_on_which_no_limit_could_be_set_is_tried_again() {
        let node = Node::new(false, PATIENT);
        node.change(|state| state.memory_limits = None);
        node.limiter.check(node.nvml());
        node.start().await.unwrap();
        node.change(|state| state.memory_limits = Some(LimitBackend::Misc));
        let node = node.open();
        assert_eq!(node.states(), [LimitState::Late; 2]);
    }

    #[tokio::test]
    async fn a_reading_that_is_too_old_is_removed() {
        let node = Node::new(false, PATIENT).open();
        node.start().await.unwrap();
        let mut old = node.limits()[0].clone();
        old.reading.as_mut().unwrap().wall_ms -= 61_000;
        node.limiter.guard.update(|known| known.set_limit("c", old));
        node.limiter.drop_old_readings();
        let readings: Vec<_> = node.limits().iter().map(|limit| limit.reading.is_some()).collect();
        assert_eq!(readings, [false, true]);
    }

    #[test]
    fn a_container_whose_grant_can_be_its_pod_authors_is_refused_only_if_limits_are_required() {
        for is_required in [false, true] {
            let mut node = Node::new(is_required, PATIENT);
            let refused = node.limiter.refuse_doubtful("c", node.process.id(), "berth.dev/grant.a");
            assert_eq!(refused.is_err(), is_required);
            assert!(!is_required || node.process.wait().is_ok(), "it is killed");
        }
    }

    #[tokio::test]
    async fn a_container_is_suspended_while_nvml_does_not_answer() {
        let waits = Waits { answer: Duration::ZERO, ..PATIENT };
        let node = Node::new(false, waits).open();
        node.change(|state| state.faults = vec![Fault::hang("nvmlDeviceSetMemoryLimits_v1")]);
        node.start().await.unwrap();
        until(|| node.is_stopped()).await;
        assert_eq!(node.states(), [LimitState::Pending; 2]);
        // It is not mistaken for one that runs.
        node.change(|state| state.faults.clear());
        until(|| !node.is_stopped()).await;
        until(|| node.states() == [LimitState::Set; 2]).await;
        until(|| node.limiter.starting.lock().is_empty()).await;
    }

    #[tokio::test]
    async fn a_container_that_was_suspended_too_long_runs_and_gets_its_limits_late() {
        let node = Node::new(false, HASTY).open();
        node.change(|state| state.faults = vec![Fault::hang("nvmlDeviceSetMemoryLimits_v1")]);
        node.start().await.unwrap();
        until(|| node.states() == [LimitState::Failed; 2]).await;
        assert!(node.limits()[0].why.contains("not answered"), "{}", node.limits()[0].why);
        until(|| !node.is_stopped()).await;
        node.change(|state| state.faults.clear());
        until(|| node.states() == [LimitState::Late; 2]).await;
    }

    #[tokio::test]
    async fn a_container_that_may_not_run_without_limits_is_killed() {
        let mut node = Node::new(true, HASTY).open();
        node.change(|state| state.faults = vec![Fault::hang("nvmlDeviceSetMemoryLimits_v1")]);
        node.start().await.unwrap();
        until(|| node.has_ended()).await;
        node.change(|state| state.faults.clear());
        until(|| node.limiter.starting.lock().is_empty()).await;
    }

    #[test]
    fn a_container_that_runs_already_gets_its_limits_late_unless_it_has_them() {
        let node = Node::new(false, PATIENT).open();
        node.drift(4096);
        node.show_cgroup();
        node.limiter.check(node.nvml());
        assert_eq!(node.states(), [LimitState::Set, LimitState::Late]);
        assert_eq!(node.reported(), [Some(4096), Some(1000)]);
    }

    #[tokio::test]
    async fn a_limit_that_changes_is_set_again_twice_and_then_not_in_force() {
        let node = Node::new(false, PATIENT).open();
        node.start().await.unwrap();
        for (times_changed, to_mib) in [(1, 8192), (2, NO_LIMIT)] {
            if to_mib == NO_LIMIT {
                fs::remove_dir_all(node.folder.path().join("nvml/fake-nvml.limits")).unwrap();
            } else {
                node.drift(to_mib);
            }
            node.limiter.check(node.nvml());
            let limits = node.limits();
            assert_eq!((limits[0].state(), limits[0].times_changed), (LimitState::Set, times_changed));
            assert_eq!(node.reported(), [Some(4096), Some(1000)]);
        }
        node.drift(8192);
        for _ in 0..2 {
            node.limiter.check(node.nvml());
            assert_eq!(node.states(), [LimitState::Failed, LimitState::Set]);
            assert_eq!(node.reported(), [Some(8192), Some(1000)]);
            assert!(node.limits()[0].why.contains("3 times"), "{}", node.limits()[0].why);
        }
    }

    #[tokio::test]
    async fn a_failed_reading_is_reported_and_the_previous_one_counts_until_it_expires() {
        let node = Node::new(false, PATIENT).open();
        node.start().await.unwrap();
        let read = node.limits()[0].reading;
        node.change(|state| {
            state.faults = vec![Fault::fail("nvmlDeviceGetMemoryLimits_v1", fake_nvml::Code::Unknown)];
        });
        node.limiter.check(node.nvml());
        let limit = &node.limits()[0];
        assert_eq!((limit.state(), limit.reading), (LimitState::Set, read));
        assert!(limit.why.contains("could not be read"), "{}", limit.why);
        node.change(|state| state.faults.clear());
        node.limiter.check(node.nvml());
        assert_eq!(node.limits()[0].why, "");
    }

    #[tokio::test]
    async fn a_reading_is_shown_while_another_gpu_does_not_answer() {
        let node = Node::new(false, PATIENT).open();
        node.start().await.unwrap();
        let hangs = Fault::hang("nvmlDeviceGetMemoryLimits_v1").of_gpu(node.limits()[1].gpu.clone());
        node.change(|state| state.faults = vec![hangs]);
        node.drift(8192);
        let limiter = Arc::clone(&node.limiter);
        let checking = spawn_blocking(move || limiter.check(limiter.nvml.as_ref().unwrap()));
        until(|| node.limits()[0].times_changed == 1).await;
        assert!(!checking.is_finished(), "the other GPU has answered");
        node.change(|state| state.faults.clear());
        checking.await.unwrap();
    }

    #[test]
    fn a_released_driver_is_closed_and_used_again_afterwards() {
        let node = Node::new(false, PATIENT).open();
        assert!(node.limiter.guard.status().has_driver_open);
        node.limiter.close(node.nvml());
        let status = node.limiter.guard.status();
        assert!(!status.has_driver_open && status.limits_error.contains("released"), "{status:?}");
        let node = node.open();
        assert!(node.limiter.guard.status().has_driver_open);
    }

    #[tokio::test]
    async fn a_guard_that_is_about_to_open_nvml_has_not_released_the_driver() {
        let node = Node::new(false, PATIENT);
        node.change(|state| state.faults = vec![Fault::hang("nvmlInit_v2")]);
        let (release, released) = watch::channel(false);
        let limiter = Arc::clone(&node.limiter);
        let running = tokio::spawn(async move { limiter.run(released).await });
        let status = || node.limiter.guard.status();
        until(|| status().is_driver_released.is_some()).await;
        assert_eq!(status().is_driver_released, Some(false));
        release.send_replace(true);
        until(|| status().has_driver_open).await;
        assert_eq!(status().is_driver_released, Some(false), "NVML is being opened");
        node.change(|state| state.faults.clear());
        until(|| status().is_driver_released == Some(true)).await;
        assert!(!status().has_driver_open);
        running.abort();
    }

    #[test]
    fn on_cgroup_v1_there_are_no_limits() {
        let node = Node::new(false, PATIENT);
        fs::remove_file(node.folder.path().join("cgroup/cgroup.controllers")).unwrap();
        node.limiter.check(node.nvml());
        let status = node.limiter.guard.status();
        assert!(status.limits_error.contains("cgroup v2 is not mounted"), "{status:?}");
        assert!(!status.has_driver_open);
    }
}
