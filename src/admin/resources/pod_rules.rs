//! Warnings about policies whose rules about pods have no effect, since no source shows the pods of this node.

use crate::state::{StartStep, State};
use berth_kernel::evidence::pods::PodsSource;
use berth_kernel::grants::pod_candidates::{has_source, may_have_rules_about_pods};
use berth_kernel::node::ledger::Ledger;
use berth_kernel::policy::hooks::Hook;
use berth_kernel::policy::stack::StackEntry;
use berth_kernel::policy::version::PolicyVersion;

/// One warning for each policy of these entries that may have rules about pods; none if a source shows the pods.
pub(crate) fn warnings<'e>(
    state: &State,
    ledger: &Ledger,
    entries: impl IntoIterator<Item = &'e StackEntry>,
) -> Vec<String> {
    if has_source(ledger) {
        return Vec::new();
    }
    let mut versions: Vec<&PolicyVersion> = entries
        .into_iter()
        .filter_map(|entry| ledger.policies.get(&entry.digest).map(AsRef::as_ref))
        .filter(|version| {
            [Hook::Place, Hook::Admit].iter().any(|hook| may_have_rules_about_pods(version, *hook))
        })
        .collect();
    versions.sort_by_key(|version| version.label());
    versions.dedup_by_key(|version| version.label());
    let why = missing_source(ledger, (state.facts)().api_server.as_ref());
    let warning = |version: &PolicyVersion| {
        let is_known = version.shipped || version.origin.once_shipped;
        let rules =
            if is_known { "its rules about pods have" } else { "rules about pods, if it has any, have" };
        format!("policy {}: {rules} no effect, since {why}", version.label())
    };
    versions.into_iter().map(warning).collect()
}

/// The warnings about the active stack: those about its offers, and those about rules without effect.
pub(crate) fn of_active_stack(state: &State, ledger: &Ledger) -> Vec<String> {
    let mut all = state.kernel.offer_notes().reasons();
    all.extend(warnings(state, ledger, &ledger.stack.entries));
    all
}

/// Why no source shows the pods, and what to do. `api_server`: the connection to the API server, if it is used.
fn missing_source(ledger: &Ledger, api_server: Option<&StartStep>) -> String {
    match (api_server, ledger.pods.as_ref().map(|view| view.source)) {
        (Some(step), _) => {
            let waiting = step.waiting().unwrap_or_else(|| "it has not listed them yet".into());
            format!("the API server does not show at present which pods request devices ({waiting})")
        }
        (None, Some(PodsSource::Kubelet)) => {
            "the kubelet's Pods API does not show at present which pods request devices".into()
        }
        (None, Some(PodsSource::ApiServer) | None) => {
            "nothing shows the daemon which pods request devices: give it access to the API server (`--kubeconfig \
             FILE`, or in a pod its service account, without `--api-server off`), or turn on the kubelet's feature \
             gate PodsAPI"
                .into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::evidence::pods::PodsView;
    use std::sync::Arc;

    #[test]
    fn the_cause_is_the_missing_setting_or_the_state_of_the_source() {
        let mut ledger = Ledger::default();
        assert!(missing_source(&ledger, None).contains("`--kubeconfig FILE`"));
        let waiting = StartStep::Waiting("no route to host".into());
        let cause = missing_source(&ledger, Some(&waiting));
        assert!(cause.contains("(no route to host)") && !cause.contains("--kubeconfig"), "{cause}");
        ledger.pods = Some(Arc::new(PodsView::empty(PodsSource::Kubelet)));
        let cause = missing_source(&ledger, None);
        assert!(cause.contains("Pods API") && !cause.contains("--kubeconfig"), "{cause}");
    }
}
