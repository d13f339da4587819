//! `berth gpu drain`: orders a drain, and with `--wait` prints its progress.

use crate::client::{Client, Temporary, escaped, query};
use crate::complete;
use crate::named_gpu::{ChangedGpus, drain, resolve_all, title};
use crate::output::{Out, printable, report};
use crate::usage;
use anyhow::{anyhow, bail};
use berth_api::{DrainHolder, DrainHolderState, DrainOrder, DrainState, Gpu, GpuSummary};
use clap_complete::engine::ArgValueCandidates;
use std::time::{Duration, Instant};

/// Interval of the requests for the progress.
const POLL_EVERY: Duration = Duration::from_secs(1);
/// Interval at which the progress is printed even if nothing changed, with the time left.
const PRINT_EVERY: Duration = Duration::from_secs(30);
/// Longest deadline: that of the API.
const DEADLINE_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// How long to wait for a daemon that does not answer: a restart takes a second or two, a new image most of a minute.
const UNANSWERED_MAX: Duration = Duration::from_secs(60);

/// `berth gpu drain`.
#[derive(clap::Args, Debug)]
pub struct DrainArgs {
    /// Index, UUID, or the beginning of it; several are drained at once
    #[arg(required = true, value_name = "GPU", add = ArgValueCandidates::new(complete::gpus))]
    pub gpus: Vec<String>,
    /// The reason; recorded with the change
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT")]
    pub reason: String,
    /// Evict its pods through the API server, within their disruption budgets
    #[arg(long)]
    pub evict: bool,
    /// Time until the deadline, such as 10m; at most a week
    #[arg(long, value_name = "TIME", value_parser = deadline)]
    pub deadline: Option<Duration>,
    /// At the deadline: wait (longer), delete (the pods, with --evict), give-up
    #[arg(
        long,
        value_enum,
        value_name = "ACTION",
        default_value = "wait",
        hide_possible_values = true,
        hide_default_value = true,
        requires = "deadline",
        requires_if("delete", "evict")
    )]
    pub at_deadline: AtDeadlineArg,
    /// Show progress until the GPUs are drained, or their deadline; alone or with --timeout it does not change a drain
    /// in progress
    #[arg(long)]
    pub wait: bool,
    /// Wait this long, whatever the deadline; 0s: without a limit
    #[arg(long, value_name = "TIME", value_parser = usage::time, requires = "wait")]
    pub timeout: Option<Duration>,
    /// Stop the drain; the GPU stays cordoned
    #[arg(long, conflicts_with_all = ["reason", "evict", "deadline", "at_deadline", "wait", "timeout"])]
    pub stop: bool,
    /// Stop the drain of this owner instead of your own, or of `all` owners except GPUMaintenances and DeviceTaintRules
    #[arg(long, value_name = "OWNER", requires = "stop")]
    pub owner: Option<String>,
}

/// What happens to a drain at its deadline.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtDeadlineArg {
    /// The drain continues, and is shown as late
    Wait,
    /// Remaining pods are deleted, regardless of their disruption budgets; with --evict
    Delete,
    /// The drain stops; the GPU stays cordoned
    GiveUp,
}

pub(crate) fn run(args: &DrainArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let uuids = resolve_all(client, &args.gpus)?;
    let mut gpus = Vec::new();
    for uuid in &uuids {
        gpus.push(start(args, uuid, client)?);
    }
    let wait_until = WaitUntil::of(args.timeout);
    let mut ended = Ok(());
    for gpu in &mut gpus {
        if args.wait {
            // A deadline that this command sets ends the wait, even if it has passed by the first answer.
            match watch(client, gpu.clone(), wait_until, args.deadline.is_some()) {
                Ok(newest) => *gpu = newest,
                Err(error) if ended.is_ok() => ended = Err(error),
                Err(_) => {}
            }
        }
    }
    let text = |gpus: &[Gpu]| {
        let text = |gpu: &Gpu| line(gpu) + &next_step(gpu);
        gpus.iter().map(text).collect::<String>()
    };
    ended?;
    match gpus.as_slice() {
        [gpu] => out.answer(gpu, |gpu| text(std::slice::from_ref(gpu)))?,
        _ => out.answer(&ChangedGpus { items: gpus.clone() }, |all| text(&all.items))?,
    }
    if args.stop {
        return Ok(());
    }
    for gpu in &gpus {
        match gpu.summary.drain.state {
            DrainState::Draining | DrainState::Drained => {}
            DrainState::Active | DrainState::Cordoned | DrainState::Other(_) => {
                bail!("the drain of {} was stopped, or given up at its deadline", title(gpu))
            }
        }
    }
    Ok(())
}

/// Orders or stops the drain of a GPU, or finds one that is to be followed.
fn start(args: &DrainArgs, uuid: &str, client: &Client) -> anyhow::Result<Gpu> {
    let path = format!("/gpus/{}/drain", escaped(uuid));
    if args.stop {
        return client.delete(&(path + &query(&[("owner", args.owner.as_deref())])), None);
    }
    let order = DrainOrder {
        reason: args.reason.clone(),
        evict: args.evict,
        deadline_seconds: args.deadline.map(seconds),
        at_deadline: match args.at_deadline {
            AtDeadlineArg::Wait => berth_api::AtDeadline::Wait,
            AtDeadlineArg::Delete => berth_api::AtDeadline::Delete,
            AtDeadlineArg::GiveUp => berth_api::AtDeadline::GiveUp,
        },
    };
    let before: Gpu = client.get(&format!("/gpus/{}", escaped(uuid)))?;
    if only_watches(args, &before.summary.drain) {
        report(&format!("{} is being drained already; watching", title(&before)));
        return Ok(before);
    }
    let gpu: Gpu = client.put(&path, &order, None)?;
    for lost in removed_settings(&before.summary.drain, &order) {
        report(&format!("{}: this drain replaces the previous one: {lost}", title(&gpu)));
    }
    Ok(gpu)
}

/// How long a command waits for a drain.
#[derive(Clone, Copy)]
enum WaitUntil {
    /// Until its deadline, if it has one that has not passed.
    Deadline,
    /// As long as was ordered.
    Time(Instant, Duration),
    /// Without a limit.
    Drained,
}

impl WaitUntil {
    fn of(timeout: Option<Duration>) -> Self {
        match timeout {
            None => Self::Deadline,
            Some(Duration::ZERO) => Self::Drained,
            Some(time) => Instant::now().checked_add(time).map_or(Self::Drained, |at| Self::Time(at, time)),
        }
    }

    /// Why it waits no longer, if so. `was_late`: whether the deadline had passed when the command began.
    fn passed(self, gpu: &Gpu, was_late: bool) -> Option<String> {
        let progress = gpu.summary.drain.progress.as_ref();
        // At the other deadlines the daemon acts, and the drain ends.
        let is_late =
            progress.is_some_and(|p| p.late && p.at_deadline == berth_api::AtDeadline::Wait) && !was_late;
        match self {
            Self::Deadline if is_late => Some("at its deadline".to_owned()),
            Self::Time(at, time) if Instant::now() >= at => {
                Some(format!("after {}", humantime::format_duration(time)))
            }
            Self::Deadline | Self::Time(..) | Self::Drained => None,
        }
    }
}

/// Whether the command only follows a drain that is under way. An order replaces the one before, so one without
/// settings would remove those. (`--at-deadline` requires `--deadline`.)
fn only_watches(args: &DrainArgs, before: &berth_api::Drain) -> bool {
    let orders = !args.reason.is_empty() || args.evict || args.deadline.is_some();
    args.wait && !orders && matches!(before.state, DrainState::Draining | DrainState::Drained)
}

/// The settings of the order before that this one removes.
fn removed_settings(before: &berth_api::Drain, order: &DrainOrder) -> Vec<String> {
    let Some(progress) = &before.progress else { return Vec::new() };
    let deadline = progress.deadline.as_ref().filter(|_| order.deadline_seconds.is_none());
    let no_deadline = deadline.map(|at| {
        let then = match progress.at_deadline {
            berth_api::AtDeadline::Wait => "",
            berth_api::AtDeadline::Delete => ", at which its pods were to be deleted",
            berth_api::AtDeadline::GiveUp => ", at which it was to be given up",
        };
        format!("it has no deadline any more (it was {at}{then}); order it again with --deadline to have one")
    });
    let no_evict = (progress.evict && !order.evict)
        .then(|| "its pods are no longer evicted; order it again with --evict to evict them".into());
    no_deadline.into_iter().chain(no_evict).collect()
}

/// Prints each change to standard error until the GPU is no longer draining.
///
/// # Errors
/// If it is not drained in time, or the daemon does not answer for too long. The drain continues.
fn watch(client: &Client, mut gpu: Gpu, wait_until: WaitUntil, is_own_deadline: bool) -> anyhow::Result<Gpu> {
    let path = format!("/gpus/{}", escaped(&gpu.summary.uuid));
    let mut was_late = false;
    if let Some(progress) = gpu.summary.drain.progress.as_ref() {
        was_late = progress.late && !is_own_deadline;
        report(&waits_for(progress));
    }
    let (mut text, mut printed_at) = (String::new(), Instant::now());
    let mut patience = Patience::default();
    while gpu.summary.drain.state == DrainState::Draining {
        // The time left changes always, so it is not compared.
        let now = progress_lines(&gpu, TimeLeft::Hidden);
        if now != text || printed_at.elapsed() >= PRINT_EVERY {
            report(&line(&gpu));
            (text, printed_at) = (now, Instant::now());
        }
        if let Some(when) = wait_until.passed(&gpu, was_late) {
            return Err(anyhow!(
                "{} is not drained {when}; the drain continues, and `berth gpu drain {} --wait` waits on",
                title(&gpu),
                gpu.summary.index
            ));
        }
        std::thread::sleep(POLL_EVERY);
        match client.get(&path) {
            Ok(answer) => {
                gpu = answer;
                if patience.since.take().is_some() {
                    text.clear();
                }
            }
            Err(error) => {
                if patience.first(&error, Instant::now())? {
                    report(&format!(
                        "the drain continues, but cannot be watched at present: {error}; trying again for {} s",
                        UNANSWERED_MAX.as_secs()
                    ));
                }
            }
        }
    }
    Ok(gpu)
}

/// The line that is printed first: what the command waits for, and how long.
fn waits_for(progress: &berth_api::DrainProgress) -> String {
    let deadline = match (&progress.deadline, progress.at_deadline) {
        (None, _) => "without a deadline (--deadline sets one)".into(),
        (Some(at), berth_api::AtDeadline::Wait) => format!("late from {at} on"),
        (Some(at), berth_api::AtDeadline::Delete) => format!("remaining pods are deleted at {at}"),
        (Some(at), berth_api::AtDeadline::GiveUp) => format!("given up at {at}"),
    };
    format!(
        "waiting until it is drained, {deadline}; Ctrl-C ends this command but not the drain\n\
         typically it is drained 10 to 60 s after its last pod has ended"
    )
}

/// How long the daemon has not answered.
#[derive(Default)]
struct Patience {
    since: Option<Instant>,
}

impl Patience {
    /// Records a missing answer. Returns whether it is the first one.
    ///
    /// # Errors
    /// If another attempt cannot help, or the daemon has not answered for [`UNANSWERED_MAX`].
    fn first(&mut self, error: &anyhow::Error, now: Instant) -> anyhow::Result<bool> {
        let first = self.since.is_none();
        let since = *self.since.get_or_insert(now);
        if error.is::<Temporary>() && now.duration_since(since) < UNANSWERED_MAX {
            return Ok(first);
        }
        bail!("the drain continues, but cannot be watched any more: {error:#}")
    }
}

/// Whether the lines contain the time left.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TimeLeft {
    Shown,
    Hidden,
}

/// What to do once the GPU is drained.
fn next_step(gpu: &Gpu) -> String {
    let GpuSummary { index, drain, .. } = &gpu.summary;
    if drain.state != DrainState::Drained {
        return String::new();
    }
    let objects: Vec<&str> = drain.marks.iter().filter_map(|mark| mark.object.as_deref()).collect();
    match objects.join(" and ") {
        _ if objects.is_empty() => format!("`berth gpu uncordon {index}` returns it to use\n"),
        named if objects.len() == drain.marks.len() => {
            format!("it stays out of use until {named} is deleted\n")
        }
        named => format!("`berth gpu uncordon {index}` returns it to use once {named} is deleted, too\n"),
    }
}

fn line(gpu: &Gpu) -> String {
    progress_lines(gpu, TimeLeft::Shown)
}

/// One line for the GPU, and one for each pod that still holds it.
fn progress_lines(gpu: &Gpu, time: TimeLeft) -> String {
    let mut text = format!("{} is {}", title(gpu), drain(&gpu.summary.drain));
    let Some(progress) = &gpu.summary.drain.progress else {
        return text + "\n";
    };
    let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
    text += &format!(": {} left", many(progress.allocations.len(), "allocation"));
    if let Some(processes) = progress.processes {
        text += &format!(", {}", many(processes as usize, "process").replace("processs", "processes"));
    }
    if let Some(deadline) = &progress.deadline {
        text += if progress.late { ", late since " } else { ", until " };
        text += deadline;
    }
    if let Some(left) = progress.seconds_left.filter(|_| time == TimeLeft::Shown && !progress.late) {
        text += &format!(" ({} left)", humantime::format_duration(Duration::from_secs(left)));
    }
    text += "\n";
    if let Some(warning) = &progress.warning {
        text += &format!("  warning: {}\n", printable(warning));
    }
    if progress.allocations.is_empty() {
        text += match progress.processes {
            Some(1..) => {
                "  no allocations left; waiting for its processes to exit (`berth process list` names them)\n"
            }
            _ => {
                "  no allocations left; drained once no process was seen on it for 10 s (a minute if processes cannot be seen)\n"
            }
        };
    }
    for holder in &progress.holders {
        text += &format!("  {}\n", printable(&holder_line(holder)));
    }
    text
}

fn holder_line(holder: &DrainHolder) -> String {
    let name = match (&holder.namespace, &holder.pod, &holder.pod_uid) {
        (Some(namespace), Some(pod), _) => format!("{namespace}/{pod}"),
        (_, _, Some(uid)) => format!("pod {uid}"),
        _ => format!("allocation {}", holder.allocations.join(" ")),
    };
    let containers = match holder.containers.as_slice() {
        [] => String::new(),
        containers => format!(" ({})", containers.join(", ")),
    };
    let message = holder.message.as_deref().unwrap_or("no reason given");
    let since = holder.since.as_deref().unwrap_or("?");
    let state = match &holder.state {
        DrainHolderState::NotKnown => "holder not known yet".into(),
        DrainHolderState::NotShown => "cannot be evicted: the API server has not shown this pod".into(),
        DrainHolderState::NotAsked => "still runs".into(),
        DrainHolderState::StaticPod => {
            "blocker: a static pod cannot be evicted; take its file out of the kubelet's manifests".into()
        }
        DrainHolderState::Asked => format!("eviction requested, since {since}"),
        DrainHolderState::DisruptionBudget => format!("waits for its disruption budget: {message}"),
        DrainHolderState::Failed => format!("could not be evicted, trying again: {message}"),
        DrainHolderState::Terminating => format!("terminating since {since}"),
        DrainHolderState::Over => "gone; the kubelet releases its devices typically within 50 s".into(),
        DrainHolderState::Other(state) => format!("{state}: {message}"),
    };
    let back =
        if holder.comes_back { "; DaemonSet pod: created again, on another GPU or pending" } else { "" };
    format!("{name}{containers}: {state}{back}")
}

/// Parses a deadline.
fn deadline(text: &str) -> Result<Duration, String> {
    let deadline = usage::time(text)?;
    match (Duration::from_secs(1)..=DEADLINE_MAX).contains(&deadline) {
        true => Ok(deadline),
        false => Err("give at least a second (1s) and at most a week (7d)".into()),
    }
}

/// Whole seconds, which fit since [`deadline`] has a limit.
fn seconds(deadline: Duration) -> u32 {
    u32::try_from(deadline.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(state: DrainHolderState) -> DrainHolder {
        DrainHolder {
            namespace: Some("team".into()),
            pod: Some("web-0".into()),
            pod_uid: Some("u".into()),
            containers: vec!["main".into(), "side".into()],
            allocations: vec!["a-1".into()],
            comes_back: false,
            state,
            message: Some("needs 3".into()),
            since: Some("then".into()),
            shown: false,
            owner: None,
        }
    }

    #[test]
    fn a_line_names_the_holder_and_what_blocks_it() {
        use DrainHolderState as State;
        for (state, says) in [
            (State::NotAsked, "team/web-0 (main, side): still runs"),
            (State::Asked, "team/web-0 (main, side): eviction requested, since then"),
            (State::DisruptionBudget, "team/web-0 (main, side): waits for its disruption budget: needs 3"),
            (State::Failed, "team/web-0 (main, side): could not be evicted, trying again: needs 3"),
            (State::Terminating, "team/web-0 (main, side): terminating since then"),
        ] {
            assert_eq!(holder_line(&holder(state)), says);
        }
        assert!(holder_line(&holder(State::StaticPod)).contains("blocker"));
        let back = DrainHolder { comes_back: true, ..holder(State::Terminating) };
        assert!(holder_line(&back).ends_with("; DaemonSet pod: created again, on another GPU or pending"));
        let unknown = DrainHolder {
            namespace: None,
            pod: None,
            pod_uid: None,
            containers: Vec::new(),
            ..holder(State::NotKnown)
        };
        assert_eq!(holder_line(&unknown), "allocation a-1: holder not known yet");
    }

    fn progress() -> berth_api::DrainProgress {
        berth_api::DrainProgress {
            evict: true,
            deadline: Some("noon".into()),
            seconds_left: Some(1),
            at_deadline: berth_api::AtDeadline::GiveUp,
            late: false,
            warning: None,
            allocations: Vec::new(),
            processes: None,
            holders: Vec::new(),
        }
    }

    #[test]
    fn the_first_line_has_the_deadline() {
        use berth_api::AtDeadline as At;
        for (deadline, at_deadline, says) in [
            (None, At::Wait, "without a deadline (--deadline sets one)"),
            (Some("noon"), At::Wait, "late from noon on"),
            (Some("noon"), At::Delete, "remaining pods are deleted at noon"),
            (Some("noon"), At::GiveUp, "given up at noon"),
        ] {
            let progress =
                berth_api::DrainProgress { deadline: deadline.map(Into::into), at_deadline, ..progress() };
            let text = waits_for(&progress);
            assert!(text.contains(says) && text.contains("Ctrl-C"), "{text}");
        }
    }

    #[test]
    fn the_error_of_a_malformed_deadline_shows_the_format() {
        assert_eq!(deadline("1h 30m").unwrap(), Duration::from_secs(5400));
        assert_eq!(deadline("7d").unwrap(), DEADLINE_MAX);
        for bad in ["banana", "10", "", "-1s", "10 bananas"] {
            let text = deadline(bad).unwrap_err();
            assert!(text.contains("30s, 10m or 2h"), "{bad}: {text}");
        }
        for out in ["0s", "999ms", "8d"] {
            assert!(deadline(out).unwrap_err().contains("at most a week"), "{out}");
        }
    }

    #[test]
    fn settings_that_an_order_removes_are_reported() {
        let progress = progress();
        let draining = |progress| berth_api::Drain {
            state: DrainState::Draining,
            by: None,
            why: None,
            since: None,
            progress,
            marks: Vec::new(),
        };
        let before = draining(Some(progress));
        let lost = removed_settings(&before, &DrainOrder::default());
        assert!(lost[0].contains("it was noon, at which it was to be given up"), "{lost:?}");
        assert!(lost[1].contains("no longer evicted"), "{lost:?}");
        let same = DrainOrder { evict: true, deadline_seconds: Some(9), ..DrainOrder::default() };
        assert!(removed_settings(&before, &same).is_empty());
        assert!(removed_settings(&draining(None), &DrainOrder::default()).is_empty());
    }

    #[test]
    fn a_missing_answer_is_borne_for_a_minute_and_a_refusal_is_not() {
        let (gone, refused) = (Temporary("gone".into()).into(), anyhow::anyhow!("no such GPU"));
        let (begin, after) = (Instant::now(), |at: Instant, s| at + Duration::from_secs(s));
        let mut patience = Patience::default();
        assert!(patience.first(&gone, begin).unwrap(), "it is reported");
        assert!(!patience.first(&gone, after(begin, 59)).unwrap(), "once");
        let ended = patience.first(&gone, after(begin, 60)).unwrap_err().to_string();
        assert!(ended.contains("cannot be watched any more: gone"), "{ended}");
        let ended = Patience::default().first(&refused, begin).unwrap_err().to_string();
        assert!(ended.contains("no such GPU"), "{ended}");
    }
}
