//! The limits of a namespace, and the messages about them.

use berth_policy_sdk::matches;
use serde::Deserialize;

use crate::usage::Count;

/// The limit of one namespace, or of each of those that match.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limit {
    /// The namespace; a `*` matches any text, and each matching namespace has its own limit.
    pub namespace: String,
    /// The maximum number of devices.
    pub devices: Option<u32>,
    /// The maximum memory, MiB. A share counts with what it consumes, a whole GPU with all of its memory.
    #[serde(rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
    /// The resources that count; a `*` matches any text. All if it is missing.
    pub resources: Option<Vec<String>>,
}

/// The limit of each namespace without an entry of its own.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Others {
    /// As [`Limit::devices`].
    pub devices: Option<u32>,
    /// As [`Limit::memory_mib`].
    #[serde(rename = "memoryMiB")]
    pub memory_mib: Option<u64>,
    /// As [`Limit::resources`].
    pub resources: Option<Vec<String>>,
}

impl Others {
    pub(crate) fn limit(&self) -> Limit {
        let Self { devices, memory_mib, resources } = self.clone();
        Limit { namespace: "*".into(), devices, memory_mib, resources }
    }

    pub(crate) fn check(&self, key: &str) -> Result<(), String> {
        self.limit().check(key)
    }
}

impl Limit {
    pub(crate) fn check(&self, key: &str) -> Result<(), String> {
        if self.namespace.is_empty() {
            return Err(format!("{key}.namespace: is empty; name a namespace, or write `*` for all"));
        }
        if self.devices.is_none() && self.memory_mib.is_none() {
            return Err(format!("{key}: limits nothing; give `devices` or `memoryMiB`"));
        }
        if self.resources.as_ref().is_some_and(Vec::is_empty) {
            return Err(format!("{key}.resources: the list is empty; omit it to count all resources"));
        }
        Ok(())
    }

    pub(crate) fn fits(&self, namespace: &str) -> bool {
        matches(&self.namespace, namespace)
    }

    /// Whether devices of this resource count.
    pub(crate) fn counts(&self, resource: &str) -> bool {
        self.resources.as_deref().is_none_or(|all| all.iter().any(|pattern| matches(pattern, resource)))
    }

    /// The message of the denial, if the requested and the held devices together exceed the limit. A
    /// request for devices that the namespace already holds, such as that of the container after an init
    /// container, is never denied, even if the limit was lowered in the meantime.
    pub(crate) fn denial(&self, namespace: &str, before: Count, after: Count) -> Option<String> {
        let of = self.of_resources();
        let (more, more_mib) = (after.devices - before.devices, after.memory_mib - before.memory_mib);
        let most = self.devices.map(u64::from).filter(|most| more > 0 && after.devices > *most);
        if let Some(most) = most {
            return Some(format!(
                "namespace {namespace} holds {} of the {most} devices{of} that it may have on this node, and \
                 {more} more are requested: {}",
                before.devices,
                advice(most.saturating_sub(before.devices), ""),
            ));
        }
        let most = self.memory_mib.filter(|most| more_mib > 0 && after.memory_mib > *most)?;
        Some(format!(
            "namespace {namespace} holds {} of the {most} MiB{of} that it may have on this node, and {more_mib} \
             MiB more are requested: {}",
            before.memory_mib,
            advice(most.saturating_sub(before.memory_mib), " MiB"),
        ))
    }

    /// What the namespace holds after the grant.
    pub(crate) fn state(&self, namespace: &str, after: Count) -> String {
        let devices = self.devices.map(|most| format!("{} of {most} devices", after.devices));
        let memory = self.memory_mib.map(|most| format!("{} of {most} MiB", after.memory_mib));
        let both: Vec<String> = devices.into_iter().chain(memory).collect();
        format!("namespace {namespace} holds {}", both.join(" and "))
    }

    /// The resources of the limit, two names at most: a denial must fit into a pod's status.
    fn of_resources(&self) -> String {
        match self.resources.as_deref() {
            None => String::new(),
            Some(all @ ([_] | [_, _])) => format!(" of {}", all.join(" and ")),
            Some(all) => format!(" of {} and {} other resources", all[0], all.len() - 1),
        }
    }
}

fn advice(left: u64, unit: &str) -> String {
    match left {
        0 => "wait until pods of the namespace end, or use another node".into(),
        left => {
            format!("request {left}{unit} at most, wait until pods of the namespace end, or use another node")
        }
    }
}
