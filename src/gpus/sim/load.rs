//! The load of simulated GPUs: it follows from their processes and the number of the scan, so equal machines have equal
//! loads at the same scan.

use super::machine::{Model, SimGpu, SimKind};
use berth_kernel::hardware::gpu::Load;
use std::collections::BTreeMap;

/// Scans over which heat and power follow utilisation.
const LAG_SCANS: u64 = 8;
/// Most percent that all processes of a GPU use together.
const BUSY_PERCENT: u64 = 98;

/// The load of a GPU at this scan. In MIG mode it has no utilisation, as NVML has none.
pub(super) fn load(model: &Model, state: &SimGpu, scan: u64) -> Load {
    let by_process = percents(state, scan);
    let recent_sum: u64 = (0..LAG_SCANS).map(|ago| total(&percents(state, scan.saturating_sub(ago)))).sum();
    let average_percent = recent_sum / LAG_SCANS;
    let idle_celsius = 33 + u64::from(state.index % 4);
    let is_mig = !state.mig.is_empty();
    Load {
        utilization_percent: (!is_mig).then(|| u8::try_from(total(&by_process)).unwrap_or(100)),
        temperature_celsius: u32::try_from(idle_celsius + average_percent * 38 / 100).ok(),
        power_watts: u32::try_from(u64::from(model.power_watts) * (10 + average_percent * 8 / 10) / 100).ok(),
        processes_percent: (!is_mig && state.processes == 0).then(|| {
            by_process
                .into_iter()
                .filter_map(|(pid, percent)| Some((pid, u8::try_from(percent).ok()?)))
                .collect()
        }),
    }
}

fn total(percents: &BTreeMap<u32, u64>) -> u64 {
    percents.values().sum()
}

/// The percent of the GPU's time that each process uses. Processes of which only the number is given have the
/// ids 0, 1, 2, …
fn percents(state: &SimGpu, scan: u64) -> BTreeMap<u32, u64> {
    let listed = state.running.iter().map(|running| (running.pid, running.kind));
    let counted = (0..state.processes).map(|number| (number, SimKind::Compute));
    let wanted: BTreeMap<u32, u64> = listed
        .chain(counted)
        .map(|(pid, kind)| (pid, if kind == SimKind::Graphics { 2 } else { wave(state.index, pid, scan) }))
        .collect();
    let sum = total(&wanted);
    let share = |percent: u64| if sum > BUSY_PERCENT { percent * BUSY_PERCENT / sum } else { percent };
    wanted.into_iter().map(|(pid, percent)| (pid, share(percent))).collect()
}

/// Percent that a process would use alone: up and down between two values in 24 to 55 scans, all of which its id
/// decides.
fn wave(gpu: u32, pid: u32, scan: u64) -> u64 {
    // Any odd number that spreads neighbouring ids; this one is 2^64 divided by the golden ratio.
    let seed = ((u64::from(gpu) << 32) | u64::from(pid)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    let (base, height, period) = (30 + seed % 30, 20 + seed / 32 % 20, 24 + seed / 1024 % 32);
    let phase = (scan + seed) % period;
    let rise = phase.min(period - phase) * 2;
    base + height * rise / period
}

#[cfg(test)]
mod tests {
    use super::super::{Machine, SimProcess};
    use super::*;

    fn gpu(pids: &[u32]) -> SimGpu {
        let running = |pid: &u32| SimProcess { pid: *pid, ..SimProcess::default() };
        SimGpu { running: pids.iter().map(running).collect(), ..SimGpu::default() }
    }

    fn h100() -> &'static Model {
        Machine::from_profile("1xh100").unwrap().model_of(0).unwrap()
    }

    #[test]
    fn an_idle_gpu_is_cool_and_a_busy_one_moves_within_its_limits() {
        let idle = load(h100(), &gpu(&[]), 7);
        assert_eq!(
            (idle.utilization_percent, idle.temperature_celsius, idle.power_watts),
            (Some(0), Some(33), Some(70))
        );
        assert_eq!(idle.processes_percent, Some(BTreeMap::new()));
        let busy = gpu(&[11, 12, 13]);
        let loads: Vec<_> = (0..60).map(|scan| load(h100(), &busy, scan)).collect();
        assert_eq!(loads[20], load(h100(), &busy, 20), "equal machines have equal loads");
        for load in &loads {
            let of_processes = load.processes_percent.as_ref().unwrap();
            let sum: u32 = of_processes.values().map(|percent| u32::from(*percent)).sum();
            assert_eq!((of_processes.len(), Some(sum)), (3, load.utilization_percent.map(u32::from)));
            assert!((50..=98).contains(&sum) && load.temperature_celsius > Some(50), "{load:?}");
            assert!((300..=700).contains(&load.power_watts.unwrap()), "{load:?}");
        }
        let alone: Vec<_> = (0..60).map(|scan| load(h100(), &gpu(&[11]), scan).utilization_percent).collect();
        let (low, high) = (alone.iter().min().unwrap().unwrap(), alone.iter().max().unwrap().unwrap());
        assert!(high - low >= 15, "{low} to {high}");
    }

    #[test]
    fn a_gpu_in_mig_mode_has_no_utilisation() {
        let split = SimGpu { mig: vec!["1g.10gb".into()], ..gpu(&[1]) };
        let load = load(h100(), &split, 1);
        assert_eq!((load.utilization_percent, load.processes_percent), (None, None));
        assert!(load.power_watts.is_some() && load.temperature_celsius.is_some());
    }
}
