//! `berth events`: changes on the node as they happen.

use crate::age::parse_time_or_duration;
use crate::client::{Client, Temporary, query, shown};
use crate::complete;
use crate::named_gpu;
use crate::output::{self, Out, Output, in_lines, or_dash, terminal_columns};
use berth_api::{Event, EventHistory, EventKind};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use std::io::{BufRead, BufReader, Read};
use std::time::{Duration, Instant, SystemTime};

/// Wait before a stream that ended is opened again.
const REOPEN_AFTER: Duration = Duration::from_secs(1);
/// How long to wait for a daemon that is gone: a restart takes a second, an update of a DaemonSet's pod half a minute.
const DISCONNECTED_MAX: Duration = Duration::from_secs(60);
/// A stream without data for this long is dead, as after a firewall dropped it or the node stopped: the daemon sends
/// something every 15 seconds.
const SILENT_MAX: Duration = Duration::from_secs(45);
/// Longest line of a stream, bytes: an event has at most 2 KiB, and escapes six times that.
const LINE_BYTES_MAX: u64 = 64 * 1024;

/// `berth events`.
#[derive(Args, Clone, Debug, Default)]
pub struct EventsArgs {
    /// Only of these kinds, such as gpuHealth,gpuDrained
    #[arg(long, value_name = "KINDS", value_delimiter = ',', add = ArgValueCandidates::new(complete::kinds))]
    pub kind: Vec<String>,
    /// Only about this GPU: index, UUID, or the beginning of it
    #[arg(long, add = ArgValueCandidates::new(complete::gpus))]
    pub gpu: Option<String>,
    /// Begin with past events, such as those of the last 10m; at most 24h. Events of single allocations are not kept
    #[arg(long, value_name = "TIME", value_parser = past, conflicts_with = "since_id")]
    pub since: Option<Duration>,
    /// Begin after this event; 0: with the oldest that the daemon keeps
    #[arg(long, value_name = "ID")]
    pub since_id: Option<String>,
    /// Continue until interrupted; the default
    #[arg(long, conflicts_with = "no_follow")]
    pub follow: bool,
    /// Print the events that the daemon keeps, and exit
    #[arg(long)]
    pub no_follow: bool,
}

/// One event, and its id; a past one has none.
#[derive(serde::Serialize)]
struct Shown<'e> {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'e str>,
    #[serde(flatten)]
    event: &'e Event,
}

pub(crate) fn run(args: &EventsArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    if let Some(kind) = args.kind.iter().find(|kind| EventKind::parse(kind).is_none()) {
        let all = EventKind::NAMES.join(", ");
        let rule = format!("--kind: no event is called {kind:?}; there are {all}");
        return Err(super::usage::BadUsage(rule).into());
    }
    let is_not_kept = |kind: &&String| EventKind::parse(kind).is_some_and(|kind| !kind.concerns_operators());
    if let Some(kind) = args.kind.iter().find(is_not_kept).filter(|_| args.since.is_some()) {
        let rule = format!("--since: past events of the kind {kind} are not kept; leave out one of the two");
        return Err(super::usage::BadUsage(rule).into());
    }
    let kinds = (!args.kind.is_empty()).then(|| args.kind.join(","));
    let gpu = args.gpu.as_deref().map(|gpu| named_gpu::resolve(client, gpu)).transpose()?;
    let mut heading = out.is_table();
    if let (Some(last), true) = (args.since, args.no_follow) {
        return show_past(last, args, gpu.as_deref(), client, out, &mut heading).map(|_| ());
    }
    let (mut last, mut past) = (args.since, Vec::new());
    // Without `--follow`, all kept events are requested.
    let mut since = args.since_id.clone().or(args.no_follow.then(|| "0".into()));
    let (mut met, mut away) = (false, None::<Instant>);
    loop {
        let query = query(&[
            ("follow", Some(if args.no_follow { "false" } else { "true" })),
            ("kind", kinds.as_deref()),
            ("gpu", gpu.as_deref()),
            ("since", since.as_deref()),
        ]);
        match client.stream(&format!("/events{query}"), SILENT_MAX) {
            Ok(body) => {
                (met, away) = (true, None);
                // Once the stream is open, so that no event is missed between the two.
                if let Some(last) = last.take() {
                    past = show_past(last, args, gpu.as_deref(), client, out, &mut heading)?;
                }
                follow(body, out, &mut since, &mut heading, &past)?;
            }
            Err(error) => {
                let gone = *away.get_or_insert_with(Instant::now);
                // A daemon that never answered is not one that restarts.
                if !met || !error.is::<Temporary>() || gone.elapsed() > DISCONNECTED_MAX {
                    return Err(error);
                }
            }
        }
        if args.no_follow || out.is_closed() {
            return Ok(());
        }
        std::thread::sleep(REOPEN_AFTER);
    }
}

/// Parses the time of which past events are printed.
fn past(text: &str) -> Result<Duration, String> {
    let at = parse_time_or_duration(text)?;
    let at = humantime::parse_rfc3339_weak(at.trim_end_matches('Z')).map_err(|error| error.to_string())?;
    let last = SystemTime::now().duration_since(at).unwrap_or_default();
    // The API takes whole seconds.
    let last = Duration::from_secs(last.as_secs());
    let kept = Duration::from_secs(60)..=Duration::from_secs(24 * 3600);
    if kept.contains(&last) {
        Ok(last)
    } else {
        Err("past events are kept for a day: give at least a minute (1m) and at most a day (24h)".into())
    }
}

/// Prints the past events that the daemon keeps for operators, no older than `last`, oldest first.
fn show_past(
    last: Duration,
    args: &EventsArgs,
    gpu: Option<&str>,
    client: &Client,
    out: &mut Out,
    heading: &mut bool,
) -> anyhow::Result<Vec<Event>> {
    let last = humantime::format_duration(last).to_string().replace(' ', "");
    let past: EventHistory = client.get(&format!("/events/history{}", query(&[("last", Some(&last))])))?;
    let is_wanted = |event: &&Event| {
        (args.kind.is_empty() || args.kind.iter().any(|kind| kind == event.kind.as_str()))
            && (gpu.is_none() || event.gpu.as_deref() == gpu)
    };
    past.items.iter().rev().filter(is_wanted).try_for_each(|event| show(None, event, out, heading))?;
    Ok(past.items)
}

/// Prints a stream until it ends, except events that were printed as past ones, and updates `since` to the id of its
/// last event. `heading`: whether the head of the table is still to be printed.
fn follow(
    body: impl Read,
    out: &mut Out,
    since: &mut Option<String>,
    heading: &mut bool,
    past: &[Event],
) -> anyhow::Result<()> {
    let mut stream = BufReader::new(body);
    let (mut id, mut data) = (None::<String>, String::new());
    // A broken connection is an end like any other: the stream resumes after `since`.
    while let Some(line) = next_line(&mut stream).filter(|_| !out.is_closed()) {
        if line.is_empty() {
            if let Some(id) = id.clone() {
                *since = Some(id);
            }
            if !data.is_empty() {
                // An event that cannot be read does not end the stream.
                let event = event_of(&data, out);
                if let Some(event) = event.filter(|event| !past.contains(event)) {
                    show(id.as_deref(), &event, out, heading)?;
                }
                data.clear();
            }
        } else if let Some(value) = line.strip_prefix("id:") {
            id = Some(value.trim_start().to_owned());
        } else if let Some(value) = line.strip_prefix("data:") {
            data.push_str(value.trim_start());
        }
    }
    Ok(())
}

/// The event of a frame.
fn event_of(data: &str, out: &Out) -> Option<Event> {
    let event = serde_json::from_str::<serde_json::Value>(data).ok()?;
    serde_json::from_value(if out.is_table() { shown(event) } else { event }).ok()
}

fn show(id: Option<&str>, event: &Event, out: &mut Out, heading: &mut bool) -> anyhow::Result<()> {
    match out.form() {
        Output::Json => out.text(&(serde_json::to_string(&Shown { id, event })? + "\n")),
        Output::Yaml => out.text(&format!("---\n{}", berth_files::yaml::to_string(&Shown { id, event })?)),
        Output::Table | Output::Wide => match event.kind {
            EventKind::Here | EventKind::Missed | EventKind::End => {
                output::note(&format!("{} ({})", event.words, id.unwrap_or_default()));
                Ok(())
            }
            _ => {
                let head = if std::mem::take(heading) {
                    line(out.wide(), "AT", "KIND", "ALLOCATION", "WHAT")
                } else {
                    String::new()
                };
                let allocation = or_dash(event.allocation.as_ref());
                out.text(
                    &(head + &line(out.wide(), &event.at, event.kind.as_str(), &allocation, &event.words)),
                )
            }
        },
    }
}

/// The columns before the last one of a narrow line.
const WHAT_AT: usize = 9 + 2 + 17 + 2;

/// One line, with columns of fixed widths, since later lines are not known yet. A narrow one has the time of day (UTC).
fn line(wide: bool, at: &str, kind: &str, allocation: &str, what: &str) -> String {
    if wide {
        return format!("{at:24}  {kind:17}  {allocation:12}  {what}\n");
    }
    // Of `2026-02-03T04:05:06.000Z`.
    let time = at.get(11..19).unwrap_or(at);
    let time = if time == at { at.to_owned() } else { format!("{time}Z") };
    let what = match terminal_columns() {
        Some(columns) => in_lines(what, columns - WHAT_AT).join(&format!("\n{}", " ".repeat(WHAT_AT))),
        None => what.to_owned(),
    };
    format!("{time:9}  {kind:17}  {what}\n")
}

/// The next whole line of a stream; `None` at its end, at a line that is too long, and if the connection breaks.
fn next_line(stream: &mut BufReader<impl Read>) -> Option<String> {
    let mut line = Vec::new();
    stream.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line).ok()?;
    if line.pop() != Some(b'\n') {
        return None;
    }
    String::from_utf8(line).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_line_has_the_time_of_day() {
        assert_eq!(line(false, "AT", "KIND", "ALLOCATION", "WHAT"), "AT         KIND               WHAT\n");
        let narrow = line(false, "2026-02-03T04:05:06.000Z", "gpuDrained", "-", "GPU 3 is drained");
        assert_eq!(narrow, "04:05:06Z  gpuDrained         GPU 3 is drained\n");
    }

    #[test]
    fn a_stream_is_read_frame_by_frame_and_its_id_is_kept() {
        let event = |kind: &str| {
            format!("{{\"kind\":\"{kind}\",\"at\":\"t\",\"generation\":1,\"words\":\"w\",\"later\":true}}")
        };
        let stream = format!(
            "retry: 3000\nid: a-1\nevent: here\ndata: {}\n\nid: a-2\nevent: new\ndata: {}\n\n: still here\nid: a-7\n\nid: a-8\ndata: {}",
            event("here"),
            event("kindOfALaterRelease"),
            event("end"),
        );
        let (mut out, mut since) = (Out::new(Output::Yaml), None);
        follow(stream.as_bytes(), &mut out, &mut since, &mut false, &[]).unwrap();
        // The last event was cut off, so it does not count.
        assert_eq!(since.as_deref(), Some("a-7"));
        let mut endless = BufReader::new(std::io::repeat(b'x'));
        assert_eq!(next_line(&mut endless), None);
    }
}
