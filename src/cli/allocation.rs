//! `berth allocation`.

use crate::age::age;
use crate::client::{Client, escaped, query};
use crate::complete;
use crate::confirm::warn_and_ask;
use crate::decision;
use crate::named_gpu;
use crate::names::{GpuIndices, pod_name};
use crate::output::Column::{Name, Whole};
use crate::output::{Out, facts, fitted, or_dash, table};
use crate::usage::BadUsage;
use anyhow::bail;
use berth_api::{Allocation, AllocationList, AllocationState, EnforcedBy, GpuLimit, Holder, PartUse};
use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCandidates;

/// `berth allocation`.
#[derive(Subcommand, Debug)]
pub enum AllocationCommand {
    /// Allocations, newest first
    List(AllocationFilter),
    /// One allocation with the decision behind it
    Show {
        /// The allocation's id, or `namespace/pod`
        #[arg(add = ArgValueCandidates::new(complete::allocations))]
        id: String,
    },
    /// Why the allocation's pod has these GPUs
    Explain {
        /// The allocation's id, or `namespace/pod`
        #[arg(add = ArgValueCandidates::new(complete::allocations))]
        id: String,
    },
    /// End an allocation when no source can show whether its pod still runs
    #[command(after_help = "\
Its devices are released at once. Refused while the kubelet's List or checkpoint, the \
API server or a process on the GPU shows its pod running, and for 30 s after the \
grant: delete the pod instead, and its allocation ends by itself. Ending what has \
already ended is refused, too. --force ends it anyway; on a terminal it asks first.")]
    End(EndArgs),
}

/// `berth allocation end`.
#[derive(Args, Clone, Debug)]
pub struct EndArgs {
    /// The allocation's id
    #[arg(add = ArgValueCandidates::new(complete::allocations))]
    pub id: String,
    /// End it even while its pod runs; the pod is not stopped, and its GPU may be given to another pod
    #[arg(long)]
    pub force: bool,
    /// With --force: skip the confirmation
    #[arg(short, long, requires = "force")]
    pub yes: bool,
}

/// Selects allocations.
#[derive(Args, Clone, Debug, Default)]
pub struct AllocationFilter {
    /// On this GPU: index, UUID, or the beginning of it
    #[arg(long, add = ArgValueCandidates::new(complete::gpus))]
    pub gpu: Option<String>,
    /// Held by pods of this namespace
    #[arg(short, long, add = ArgValueCandidates::new(complete::namespaces))]
    pub namespace: Option<String>,
    /// Held by pods of this name, or by the pod `namespace/name`
    #[arg(long)]
    pub pod: Option<String>,
    /// Of this resource, such as nvidia.com/gpu
    #[arg(long)]
    pub resource: Option<String>,
    /// live, ended or all
    #[arg(long, default_value = "live", value_parser = ["live", "ended", "all"])]
    pub state: String,
    /// The maximum number of allocations [default: 500]
    #[arg(long)]
    pub limit: Option<usize>,
    /// The next page: the value `next` of an earlier answer
    #[arg(long, value_name = "NEXT")]
    pub after: Option<String>,
}

pub(crate) fn run(command: &AllocationCommand, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    match command {
        AllocationCommand::List(filter) => {
            let wide = out.wide();
            let found = fetch(filter, client)?;
            let empty_text = found.items.is_empty().then(|| empty_text(filter));
            out.list(&found, empty_text, |found| {
                if wide { list_wide(found) } else { list(found, filter, &GpuIndices::fetch(client)) }
            })
        }
        AllocationCommand::Show { id } => {
            let allocation: Allocation =
                client.get(&format!("/allocations/{}", escaped(&resolve(client, id)?)))?;
            out.answer(&allocation, |allocation| show(allocation, &GpuIndices::fetch(client)))
        }
        AllocationCommand::Explain { id } => decision::explain(&resolve(client, id)?, client, out),
        AllocationCommand::End(args) => {
            let path = format!("/allocations/{}", escaped(&args.id));
            if args.force {
                let allocation: Allocation = client.get(&path)?;
                // One that has ended is refused by the daemon, with the reason.
                if allocation.state != AllocationState::Ended {
                    let question = format!("End allocation {} anyway?", allocation.id);
                    warn_and_ask(&forced(&allocation), &question, args.yes)?;
                }
            }
            let force = query(&[("force", args.force.then_some("true"))]);
            let ended: Allocation = client.delete(&(path + &force), None)?;
            out.answer(&ended, |a| format!("{} has ended; its devices are free\n", a.id))
        }
    }
}

/// The id of the allocation that is named by its id, or by the pod that holds it and no other.
fn resolve(client: &Client, given: &str) -> anyhow::Result<String> {
    // An id has no slash, and a pod's name is one part of a path.
    let is_pod = given.split_once('/').is_some_and(|(namespace, pod)| {
        !namespace.is_empty() && !namespace.contains('.') && !pod.is_empty() && !pod.contains('/')
    });
    if !is_pod {
        return Ok(given.to_owned());
    }
    let filter =
        AllocationFilter { pod: Some(given.to_owned()), state: "live".into(), ..AllocationFilter::default() };
    match fetch(&filter, client)?.items.as_slice() {
        [one] => Ok(one.id.clone()),
        [] => {
            bail!("no live allocation is held by the pod {given:?}; `berth allocation list` shows the pods")
        }
        several => {
            let ids: Vec<_> = several.iter().map(|allocation| allocation.id.as_str()).collect();
            bail!("the pod {given:?} has {} allocations; give one of: {}", several.len(), ids.join(", "))
        }
    }
}

/// The effect of a forced end.
fn forced(allocation: &Allocation) -> String {
    format!(
        "ending {} by force frees {} ({}) at once and does not stop its pod ({}): as long as the pod runs, it keeps \
         using the GPU, and the kubelet can give the same devices to another pod",
        allocation.id,
        allocation.devices.join(" "),
        allocation.resource,
        holder(allocation.holder.as_ref())
    )
}

/// Most allocations in one answer.
const PAGE: usize = 1000;

/// Fetches pages until there are as many allocations as the filter allows.
fn fetch(filter: &AllocationFilter, client: &Client) -> anyhow::Result<AllocationList> {
    let gpu = filter.gpu.as_deref().map(|g| named_gpu::resolve(client, g)).transpose()?;
    // `--pod` also takes `namespace/name`, as tables print it.
    let (namespace, pod) = match filter.pod.as_deref().and_then(|pod| pod.split_once('/')) {
        Some((namespace, pod)) if filter.namespace.as_deref().is_none_or(|given| given == namespace) => {
            (Some(namespace), Some(pod))
        }
        Some((namespace, _)) => {
            let error =
                format!("--pod has the namespace {namespace:?}, and --namespace another one: leave one out");
            return Err(BadUsage(error).into());
        }
        None => (filter.namespace.as_deref(), filter.pod.as_deref()),
    };
    let page = |limit: Option<usize>, after: Option<&str>| {
        let limit = limit.map(|limit| limit.min(PAGE).to_string());
        let query = query(&[
            ("gpu", gpu.as_deref()),
            ("namespace", namespace),
            ("pod", pod),
            ("resource", filter.resource.as_deref()),
            ("state", Some(&filter.state)),
            ("limit", limit.as_deref()),
            ("cursor", after),
        ]);
        client.get::<AllocationList>(&format!("/allocations{query}"))
    };
    let mut all = page(filter.limit, filter.after.as_deref())?;
    while let (Some(limit), Some(next)) = (filter.limit, all.next.as_deref())
        && all.items.len() < limit
    {
        let more = page(Some(limit - all.items.len()), Some(next))?;
        all.items.extend(more.items);
        (all.total, all.next) = (more.total, more.next);
    }
    Ok(all)
}

fn list(list: &AllocationList, filter: &AllocationFilter, indices: &GpuIndices) -> String {
    // Where all are live, their age is enough.
    let is_mixed = filter.state != "live" || list.items.iter().any(|a| a.overlapped);
    let row = |a: &Allocation| {
        vec![
            a.id.clone(),
            pod_name(a.holder.as_ref()),
            a.resource.clone(),
            a.devices.len().to_string(),
            indices.indices(&a.gpus),
            enforced(a),
            if is_mixed { short_state(a) } else { age(&a.granted_at) },
        ]
    };
    let head = [
        ("ID", Whole),
        ("POD", Name),
        ("RESOURCE", Name),
        ("DEVICES", Whole),
        ("GPU", Name),
        ("ENFORCED BY", Whole),
        (if is_mixed { "STATE" } else { "AGE" }, Whole),
    ];
    let over = |a: &Allocation| {
        a.uses.iter().filter_map(over_limit).map(|use_| format!("{} {use_}\n", a.id)).collect::<String>()
    };
    let over: String = list.items.iter().map(over).collect();
    fitted(&head, list.items.iter().map(row)) + &over + &next(list)
}

/// What enforces its limits; `-` without limits.
fn enforced(allocation: &Allocation) -> String {
    let limits = allocation.limits.as_ref();
    let privileged = if limits.is_some_and(|limits| limits.privileged) { " (privileged)" } else { "" };
    limits.map_or_else(|| "-".into(), |limits| format!("{}{privileged}", limits.enforced_by))
}

/// A limit on one GPU: `4096 MiB on GPU-1: set, 512 MiB used, read 5s ago`.
fn gpu_limit(limit: &GpuLimit) -> String {
    let read = limit.used_mib.zip(limit.read_at.as_ref());
    let read = read.map_or_else(String::new, |(used, at)| format!(", {used} MiB used, read {} ago", age(at)));
    let changed = match limit.times_changed {
        0 => String::new(),
        1 => ", changed once by something other than the guard".into(),
        times => format!(", changed {times} times by something other than the guard"),
    };
    let why = limit.why.as_ref().map_or_else(String::new, |why| format!(" ({why})"));
    format!("{} MiB on {}: {}{read}{changed}{why}", limit.granted_mib, limit.gpu, limit.state)
}

/// That an allocation uses more memory than its limit.
fn over_limit(used: &PartUse) -> Option<String> {
    let (memory, limit) = used.memory_used_mib.zip(used.memory_limit_mib)?;
    (used.over_limit == Some(true)).then(|| format!("uses {memory} of {limit} MiB: more than its limit"))
}

fn list_wide(list: &AllocationList) -> String {
    let row = |a: &Allocation| {
        vec![
            a.id.clone(),
            state(a),
            holder(a.holder.as_ref()),
            a.resource.clone(),
            a.devices.join(" "),
            a.uses.iter().map(memory).collect::<Vec<_>>().join(" "),
            enforced(a),
            a.granted_at.clone(),
            or_dash(a.holder.as_ref().and_then(|holder| holder.pod_uid.as_ref())),
            a.decision.by.join(" "),
            a.decision.reason.clone(),
        ]
    };
    let head = [
        "ID",
        "STATE",
        "NAMESPACE/POD/CONTAINER",
        "RESOURCE",
        "DEVICES",
        "USED/LIMIT MIB",
        "ENFORCED BY",
        "GRANTED",
        "POD UID",
        "BY",
        "REASON",
    ];
    table(&head, list.items.iter().map(row)) + &next(list)
}

/// How to see the rest of a list.
fn next(list: &AllocationList) -> String {
    let next = list.next.as_ref();
    next.map_or_else(String::new, |next| {
        format!("{} in total: --limit shows more, --after {next} the next ones\n", list.total)
    })
}

/// The text of an empty list, which names the filter: with a typo in it the list is empty, too.
fn empty_text(filter: &AllocationFilter) -> String {
    let state = if filter.state == "all" { String::new() } else { format!(" {}", filter.state) };
    let mut text = format!("No{state} allocations found");
    let filters = [
        (" on GPU ", &filter.gpu),
        (" in namespace ", &filter.namespace),
        (" of pod ", &filter.pod),
        (" of resource ", &filter.resource),
        (" after ", &filter.after),
    ];
    for (words, value) in filters {
        text += &value.as_ref().map_or_else(String::new, |value| format!("{words}{value}"));
    }
    if filter.state == "live" {
        text += "; --state all shows ended ones, too";
    }
    text
}

fn show(allocation: &Allocation, indices: &GpuIndices) -> String {
    let decision = &allocation.decision;
    let uid = allocation.holder.as_ref().and_then(|h| h.pod_uid.clone()).unwrap_or_default();
    let environment = decision.environment.iter().map(|(k, v)| format!("{k}={v}"));
    let limits = allocation.limits.as_ref().map_or_else(String::new, |l| {
        let memory = l.memory_mib.map(|m| format!("{m} MiB"));
        let compute = l.compute_percent.map(|c| format!("{c} % of compute"));
        let both = memory.into_iter().chain(compute).collect::<Vec<_>>().join(", ");
        match l.enforced_by {
            EnforcedBy::None => format!("{both}, not enforced"),
            ref by => format!("{both}, enforced by {by}"),
        }
    });
    let per_gpu = allocation.limits.iter().flat_map(|limits| &limits.per_gpu).map(gpu_limit);
    let uses = allocation
        .uses
        .iter()
        .map(|used| format!("{} MiB on {}{}", memory(used), used.part, processes_of(used)));
    let pairs = [
        ("id", allocation.id.clone()),
        ("state", state(allocation)),
        ("holder", holder(allocation.holder.as_ref())),
        ("pod UID", uid),
        ("resource", allocation.resource.clone()),
        ("devices", allocation.devices.join(" ")),
        ("GPUs", allocation.gpus.join(" ")),
        ("granted", format!("{} ({})", allocation.granted_at, age(&allocation.granted_at))),
        ("allowed by", decision.by.join(" ")),
        ("reason", decision.reason.clone()),
        ("environment", environment.collect::<Vec<_>>().join(" ")),
        ("limits", limits),
        ("memory limits", per_gpu.collect::<Vec<_>>().join("; ")),
        ("used", uses.collect::<Vec<_>>().join("; ")),
    ];
    facts(&pairs.map(|(name, value)| (name, indices.with_indices(&value))))
}

/// Memory in use and its limit: `512/1024`, `2048/1024 OVER`, `?/1024` if the use cannot be seen.
fn memory(used: &PartUse) -> String {
    let known = used.memory_used_mib.map_or_else(|| "?".into(), |m| m.to_string());
    let more = if used.shared.is_some() { "+" } else { "" };
    let limit = used.memory_limit_mib.map_or_else(String::new, |limit| format!("/{limit}"));
    let over = if used.over_limit == Some(true) { " OVER" } else { "" };
    format!("{known}{more}{limit}{over}")
}

/// The processes that use it.
fn processes_of(used: &PartUse) -> String {
    let pids = |pids: &[u32]| pids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
    let own = if used.pids.is_empty() { String::new() } else { format!(" by {}", pids(&used.pids)) };
    let shared = used.shared.as_ref().map_or_else(String::new, |shared| {
        let with = if shared.with.is_empty() { "its own other parts".into() } else { shared.with.join(" ") };
        format!(", and {} MiB by {} shared with {with}", shared.memory_mib, pids(&shared.pids))
    });
    own + &shared
}

/// The state with its age: `live 3m`, `ended 5m (operator)`.
fn short_state(allocation: &Allocation) -> String {
    match (&allocation.state, &allocation.ended) {
        (AllocationState::Ended, Some(end)) => format!("ended {} ({})", age(&end.at), end.reason),
        (AllocationState::Live, _) if allocation.overlapped => {
            format!("overlapped {}", age(&allocation.granted_at))
        }
        (state, _) => format!("{state} {}", age(&allocation.granted_at)),
    }
}

fn state(allocation: &Allocation) -> String {
    match (&allocation.state, &allocation.ended) {
        (AllocationState::Ended, Some(end)) => format!("ended {} ({})", end.at, end.reason),
        (AllocationState::Ended, None) => "ended".into(),
        (AllocationState::Live, _) if allocation.overlapped => "live, device also held by another".into(),
        (AllocationState::Live, _) => "live".into(),
        (AllocationState::Other(state), _) => state.clone(),
    }
}

fn holder(holder: Option<&Holder>) -> String {
    let container = holder.map(|holder| format!("/{}", holder.container.as_deref().unwrap_or("?")));
    pod_name(holder) + &container.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_names_the_filter() {
        let live = AllocationFilter { state: "live".into(), ..AllocationFilter::default() };
        assert_eq!(empty_text(&live), "No live allocations found; --state all shows ended ones, too");
        let all = AllocationFilter {
            state: "all".into(),
            gpu: Some("3".into()),
            namespace: Some("team".into()),
            pod: Some("web-0".into()),
            resource: Some("nvidia.com/gpu".into()),
            ..AllocationFilter::default()
        };
        let text = "No allocations found on GPU 3 in namespace team of pod web-0 of resource nvidia.com/gpu";
        assert_eq!(empty_text(&all), text);
        let ended = AllocationFilter { state: "ended".into(), ..live };
        assert_eq!(empty_text(&ended), "No ended allocations found");
    }
}
