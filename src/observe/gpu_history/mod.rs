//! The load of the GPUs: the newest one, and the last 24 hours of memory, utilisation, temperature and power by GPU,
//! and of memory and utilisation by pod. In memory only: a restart of the daemon empties it.
//!
//! It is filled by the inventory scans, which are made anyway, and has no thread and no timer. The load is not in the
//! ledger, so a temperature that moves wakes no reader.

mod series;

use berth_kernel::grants::gpu_holders::{PodName, PodUse, gpu_holders, pod_uses};
use berth_kernel::hardware::gpu::Load;
use berth_kernel::ids::names::GpuId;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ledger::Ledger;
use parking_lot::Mutex;
use series::{SLOTS, Series, Step, steps};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The longest past that is kept.
pub const LAST_MAX: Duration = Duration::from_secs(24 * 3600);
/// Most points of an answer: 24 hours by two minutes.
pub const POINTS_MAX: u64 = 720;
/// Most GPUs with a history: as many as a scan reads.
const GPUS_MAX: usize = 64;
/// Most pairs of a GPU and a pod with a history: 16 GPUs with 16 pods each. A new pair takes the place of the one that
/// was last seen longest ago; one that is seen now keeps its place.
const PODS_MAX: usize = 256;

/// Bytes of the slots of one GPU: 960 of 12 bytes, 11,520.
const GPU_BYTES: usize = SLOTS * (2 * size_of::<u32>() + 2 * size_of::<u8>() + size_of::<u16>());
/// Bytes of the slots of one pair of GPU and pod: 960 of 5 bytes, 4,800.
const POD_BYTES: usize = SLOTS * (size_of::<u32>() + size_of::<u8>());

/// Most bytes of all slots: 64 GPUs and 256 pairs, 1,966,080. With 16 GPUs of 10 pods each it is 952,320; names and
/// bookkeeping add about 0.6 KiB for each GPU and each pair.
pub const BYTES_MAX: usize = GPUS_MAX * GPU_BYTES + PODS_MAX * POD_BYTES;

/// Utilisation, temperature and power of the GPUs, and their past.
#[derive(Debug, Default)]
pub struct GpuHistory {
    kept: Mutex<SeriesStore>,
    /// The loads of the last scan; empty while the GPUs cannot be read.
    newest: Mutex<Arc<BTreeMap<GpuId, Load>>>,
}

/// The past of one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Past {
    /// Length of a step, seconds.
    pub step_s: u64,
    /// The steps with a value, oldest first.
    pub gpu: Vec<GpuPoint>,
    /// The pods that had processes on the GPU in this time, by name, each with its steps.
    pub pods: Vec<(PodName, Vec<PodPoint>)>,
}

/// Averages of one step of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuPoint {
    /// Start of the step, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// Memory in use, MiB.
    pub memory_used_mib: Option<u64>,
    /// Memory that the held devices take, MiB.
    pub memory_granted_mib: Option<u64>,
    /// Utilisation, percent.
    pub utilization_percent: Option<u64>,
    /// Temperature, degrees Celsius.
    pub temperature_celsius: Option<u64>,
    /// Power, watts.
    pub power_watts: Option<u64>,
}

/// Averages of one step of a pod on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodPoint {
    /// Start of the step, milliseconds since 1970.
    pub at_wall_ms: u64,
    /// Memory of its processes, MiB.
    pub memory_used_mib: Option<u64>,
    /// Utilisation by its processes, percent.
    pub utilization_percent: Option<u64>,
}

impl GpuHistory {
    /// Adds a scan: its loads, and memory and pods of the ledger that it led to.
    pub fn add(&self, ledger: &Ledger, loads: BTreeMap<GpuId, Load>, now: Now) {
        self.kept.lock().add(ledger, &loads, now);
        *self.newest.lock() = Arc::new(loads);
    }

    /// Forgets the newest loads, which are no longer those of the GPUs: a scan has failed.
    pub fn scan_failed(&self) {
        *self.newest.lock() = Arc::default();
    }

    /// The loads of the last scan by GPU; those of GPUs that did not answer it are missing.
    #[must_use]
    pub fn loads(&self) -> Arc<BTreeMap<GpuId, Load>> {
        Arc::clone(&self.newest.lock())
    }

    /// The past of a GPU in at most `points` equal steps. Empty for a GPU that no scan has found.
    #[must_use]
    pub fn past(&self, gpu: &GpuId, last: Duration, points: u64, now: Now) -> Past {
        self.kept.lock().past(gpu, last, points, now)
    }
}

#[derive(Debug, Default)]
struct SeriesStore {
    /// Wall time less monotonic time of the first scan, milliseconds. Series have monotonic times plus this, so that
    /// their slots begin at full minutes, and a wall clock that jumps moves none of them.
    offset_ms: Option<u64>,
    gpus: BTreeMap<GpuId, GpuSeries>,
    pods: BTreeMap<(GpuId, PodName), PodSeries>,
}

#[derive(Clone, Debug, Default)]
struct GpuSeries {
    seen_ms: u64,
    memory_used: Series<u32>,
    memory_granted: Series<u32>,
    utilization: Series<u8>,
    temperature: Series<u8>,
    power: Series<u16>,
}

#[derive(Clone, Debug, Default)]
struct PodSeries {
    seen_ms: u64,
    memory_used: Series<u32>,
    utilization: Series<u8>,
}

#[cfg(test)]
impl GpuSeries {
    fn bytes(&self) -> usize {
        let Self { seen_ms: _, memory_used, memory_granted, utilization, temperature, power } = self;
        memory_used.bytes()
            + memory_granted.bytes()
            + utilization.bytes()
            + temperature.bytes()
            + power.bytes()
    }
}

#[cfg(test)]
impl PodSeries {
    fn bytes(&self) -> usize {
        self.memory_used.bytes() + self.utilization.bytes()
    }
}

impl SeriesStore {
    fn add(&mut self, ledger: &Ledger, loads: &BTreeMap<GpuId, Load>, now: Now) {
        let offset_ms = *self.offset_ms.get_or_insert(now.wall_ms.saturating_sub(now.mono_ms));
        let at = now.mono_ms.saturating_add(offset_ms);
        let oldest = at.saturating_sub(milliseconds(LAST_MAX));
        self.gpus.retain(|_, series| series.seen_ms >= oldest);
        self.pods.retain(|_, series| series.seen_ms >= oldest);
        let (holders, uses) = (gpu_holders(ledger), pod_uses(ledger));
        let present_gpus = ledger.parts.values().filter(|part| part.present && part.part.is_whole_gpu());
        let answered: Vec<_> =
            present_gpus.filter(|part| !ledger.scan_errors.contains_key(&part.part.gpu)).collect();
        // The series of all GPUs and pods of this scan get its time first, so that a new series replaces none of them.
        for part in &answered {
            if let Some(series) = self.gpus.get_mut(&part.part.gpu) {
                series.seen_ms = at;
            }
        }
        for ((gpu, pod), series) in &mut self.pods {
            if uses.get(gpu).is_some_and(|pods| pods.contains_key(pod)) {
                series.seen_ms = at;
            }
        }
        for part in answered {
            let gpu = &part.part.gpu;
            let Some(series) = series_for(&mut self.gpus, gpu, GPUS_MAX, at, |series| series.seen_ms) else {
                continue;
            };
            series.seen_ms = at;
            let is_memory_known = part.part.memory_mib > 0;
            let used = ledger
                .usage
                .get(&part.part.id)
                .filter(|_| is_memory_known)
                .and_then(|usage| usage.memory_used_mib);
            let granted = holders.get(gpu).and_then(|holders| holders.memory_granted_mib);
            let load = loads.get(gpu).cloned().unwrap_or_default();
            add_known(&mut series.memory_used, at, used);
            add_known(&mut series.memory_granted, at, granted);
            add_known(&mut series.utilization, at, load.utilization_percent);
            add_known(&mut series.temperature, at, load.temperature_celsius);
            add_known(&mut series.power, at, load.power_watts);
        }
        for (gpu, pods) in uses {
            let percents = loads.get(&gpu).and_then(|load| load.processes_percent.as_ref());
            for (name, used) in pods {
                let key = (gpu.clone(), name);
                let Some(series) = series_for(&mut self.pods, &key, PODS_MAX, at, |series| series.seen_ms)
                else {
                    continue;
                };
                series.seen_ms = at;
                add_known(&mut series.memory_used, at, used.memory_mib);
                let percent = percents.map(|percents| utilization(percents, &used));
                add_known(&mut series.utilization, at, percent);
            }
        }
    }

    fn past(&self, gpu: &GpuId, last: Duration, points: u64, now: Now) -> Past {
        let offset_ms = self.offset_ms.unwrap_or(now.wall_ms.saturating_sub(now.mono_ms));
        let now_ms = now.mono_ms.saturating_add(offset_ms);
        let steps = steps(now_ms, milliseconds(last), points);
        let wall_ms = |step: &Step| {
            // Whole seconds, so that a clock that is corrected by milliseconds gives the same times in each answer.
            let moved_s = (now.wall_ms.cast_signed() - now_ms.cast_signed()) / 1000;
            step.start_ms.saturating_add_signed(moved_s * 1000)
        };
        let of_gpu = self.gpus.get(gpu).map(|series| {
            let point = |step: &Step| GpuPoint {
                at_wall_ms: wall_ms(step),
                memory_used_mib: series.memory_used.average(*step),
                memory_granted_mib: series.memory_granted.average(*step),
                utilization_percent: series.utilization.average(*step),
                temperature_celsius: series.temperature.average(*step),
                power_watts: series.power.average(*step),
            };
            let has_value =
                |point: &GpuPoint| *point != GpuPoint { at_wall_ms: point.at_wall_ms, ..GpuPoint::default() };
            steps.iter().map(point).filter(has_value).collect()
        });
        let pods_of_gpu = self.pods.iter().filter(|((on, _), _)| on == gpu);
        let pods = pods_of_gpu.map(|((_, name), series)| {
            let point = |step: &Step| PodPoint {
                at_wall_ms: wall_ms(step),
                memory_used_mib: series.memory_used.average(*step),
                utilization_percent: series.utilization.average(*step),
            };
            let has_value =
                |point: &PodPoint| point.memory_used_mib.is_some() || point.utilization_percent.is_some();
            (name.clone(), steps.iter().map(point).filter(has_value).collect::<Vec<_>>())
        });
        Past {
            step_s: steps.first().map_or(0, |step| step.length_ms / 1000),
            gpu: of_gpu.unwrap_or_default(),
            pods: pods.filter(|(_, points)| !points.is_empty()).collect(),
        }
    }
}

fn add_known<T: series::Slot>(series: &mut Series<T>, at_ms: u64, value: Option<impl Into<u64>>) {
    if let Some(value) = value {
        series.add(at_ms, value.into());
    }
}

/// The series of a key. A new one takes the place of the one that was seen longest ago if there are `most`; `None` if
/// all of these were seen now.
fn series_for<'m, K: Ord + Clone, S: Default>(
    all: &'m mut BTreeMap<K, S>,
    key: &K,
    most: usize,
    now_ms: u64,
    seen_ms: impl Fn(&S) -> u64,
) -> Option<&'m mut S> {
    if !all.contains_key(key) && all.len() >= most {
        let (oldest, series) = all.iter().min_by_key(|(_, series)| seen_ms(series))?;
        if seen_ms(series) >= now_ms {
            return None;
        }
        let oldest = oldest.clone();
        all.remove(&oldest);
    }
    Some(all.entry(key.clone()).or_default())
}

/// The utilisation by the processes of a pod, percent.
fn utilization(percents: &BTreeMap<u32, u8>, used: &PodUse) -> u64 {
    let each = used.pids.iter().filter_map(|pid| percents.get(pid)).map(|percent| u64::from(*percent));
    each.sum::<u64>().min(100)
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
