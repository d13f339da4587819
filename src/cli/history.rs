//! `berth gpu history`: the load of a GPU over the last hours, and that of the pods on it.

use crate::client::{Client, escaped, query};
use crate::complete;
use crate::named_gpu::{gib, resolve, with_unit};
use crate::output::Column::{Name, Whole};
use crate::output::{Out, fitted, or_dash, table};
use crate::usage;
use berth_api::{GpuHistory, GpuSample, PodHistory};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use std::time::Duration;

/// Steps if `--points` is not given: they fit a screen with the pods below.
const STEPS: &str = "12";

/// `berth gpu history`.
#[derive(Args, Clone, Debug)]
pub struct HistoryArgs {
    /// Index, UUID, or the beginning of it
    #[arg(add = ArgValueCandidates::new(complete::gpus))]
    pub gpu: String,
    /// The time that is shown, such as 15m or 24h
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = usage::time)]
    pub last: Duration,
    /// The largest number of steps, 1 to 720
    #[arg(long, value_name = "COUNT", default_value = STEPS)]
    pub points: u32,
}

pub(crate) fn run(args: &HistoryArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let last = humantime::format_duration(args.last).to_string().replace(' ', "");
    let query = query(&[("last", Some(&last)), ("points", Some(&args.points.to_string()))]);
    let path = format!("/gpus/{}/history{query}", escaped(&resolve(client, &args.gpu)?));
    let history: GpuHistory = client.get(&path)?;
    let empty_text = history
        .items
        .is_empty()
        .then(|| "No load is recorded for this time; a restart of the daemon empties the history".into());
    out.list(&history, empty_text, shown)
}

fn shown(history: &GpuHistory) -> String {
    let step = humantime::format_duration(Duration::from_secs(history.step_seconds));
    let mut text = format!("averages of {step}\n");
    let head = ["AT", "UTIL", "USED GIB", "GRANTED GIB", "TEMP", "POWER"];
    text += &table(&head, history.items.iter().map(gpu_row));
    if !history.pods.is_empty() {
        text += "\n";
        let head = [("POD", Name), ("LAST GIB", Whole), ("MOST GIB", Whole), ("UTIL", Whole)];
        text += &fitted(&head, history.pods.iter().map(pod_row));
    }
    text
}

fn gpu_row(sample: &GpuSample) -> Vec<String> {
    // The time of `2026-02-03T04:05:06.000Z` without its date: the rows are in order, so a reader sees where a day
    // begins.
    let time = sample.at.get(11..19).map_or_else(|| sample.at.clone(), |time| format!("{time}Z"));
    vec![
        time,
        with_unit(sample.utilization_percent, "%"),
        gib(sample.memory_used_mib),
        gib(sample.memory_granted_mib),
        with_unit(sample.temperature_celsius, "C"),
        with_unit(sample.power_watts, "W"),
    ]
}

/// The newest and the largest use of memory by a pod, and its average utilisation.
fn pod_row(pod: &PodHistory) -> Vec<String> {
    let memory = || pod.items.iter().filter_map(|sample| sample.memory_used_mib);
    let percents: Vec<u32> = pod.items.iter().filter_map(|sample| sample.utilization_percent).collect();
    let average = u32::try_from(percents.len()).ok().filter(|count| *count > 0);
    let average = average.map(|count| format!("{}%", percents.iter().sum::<u32>() / count));
    vec![
        format!("{}/{}", pod.namespace, pod.pod),
        gib(memory().next_back()),
        gib(memory().max()),
        or_dash(average),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_have_units_and_pods_their_newest_and_largest_use() {
        let history: GpuHistory = serde_json::from_value(serde_json::json!({
            "stepSeconds": 300,
            "items": [
                {"at": "2026-02-03T04:05:00.000Z", "memoryUsedMiB": 20_480, "utilizationPercent": 87, "powerWatts": 412},
                {"at": "2026-02-03T04:10:00.000Z", "memoryUsedMiB": 0, "temperatureCelsius": 56},
            ],
            "pods": [{"namespace": "team", "pod": "web-0", "items": [
                {"at": "2026-02-03T04:05:00.000Z", "memoryUsedMiB": 20_480, "utilizationPercent": 80},
                {"at": "2026-02-03T04:10:00.000Z", "memoryUsedMiB": 10_240, "utilizationPercent": 41},
            ]}],
        }))
        .unwrap();
        let text = shown(&history);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["averages", "of", "5m"]);
        assert_eq!(lines[2], ["04:05:00Z", "87%", "20", "-", "-", "412W"], "{text}");
        assert_eq!(lines[3], ["04:10:00Z", "-", "0", "-", "56C", "-"], "{text}");
        assert_eq!(lines[6], ["team/web-0", "10", "20", "60%"], "{text}");
    }
}
