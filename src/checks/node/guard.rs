//! The state that the guard on this node reports.

use super::line::Line;
use berth_config::Config;
use berth_guard::{GuardStatus, query};
use berth_kernel::evidence::limits::Enforcement;
use berth_kernel::evidence::runtime::RuntimeView;
use berth_kernel::grants::bypass::BypassAction;
use berth_kernel::node::rules::Rules;

const CHECK: &str = "guard";
const READ_LOG: &str =
    "read the guard's log: `journalctl -u berth-guard`, or `kubectl logs` of its pod on this node";

/// A warning at most: without the guard the daemon works, but enforces nothing.
pub(super) fn guard(config: &Config) -> Line {
    let socket = &config.guard.socket;
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Line::warn(CHECK, format!("not checked: {error}"), "run the check again"),
    };
    // A node whose socket does not exist has no guard, as a rule on purpose.
    let answer = socket.exists().then(|| runtime.block_on(query(socket)));
    line(&config.rules, answer)
}

/// `answer`: of the guard, or why it has none; `None` if none runs.
fn line(rules: &Rules, answer: Option<Result<(GuardStatus, RuntimeView), String>>) -> Line {
    let (status, view) = match (answer, rules.why_guard_is_needed()) {
        (None, None) => {
            let what = "not running: memory limits are not enforced, and bypasses are only reported";
            return Line::ok(CHECK, what);
        }
        (None, Some(why)) => {
            let what = format!("not running, and {why}");
            return Line::warn(
                CHECK,
                what,
                "run `berth guard` on this node, or set `guard.enabled: true` in the chart",
            );
        }
        (Some(Err(why)), _) => return Line::warn(CHECK, why, READ_LOG),
        (Some(Ok((status, _))), _) if !status.is_connected => {
            return Line::warn(CHECK, format!("not connected: {}", status.why), READ_LOG);
        }
        (Some(Ok(answer)), _) => answer,
    };
    let support = &view.limit_support;
    let supported = support.gpus.values().filter(|why| why.is_none()).count();
    let why_not = support.gpus.values().flatten().chain(&support.why).next();
    let limits = match why_not {
        Some(why) => format!("limits memory on {supported} of {} GPUs: {why}", support.gpus.len()),
        None => format!("limits memory on {supported} of {} GPUs", support.gpus.len()),
    };
    let action = view.bypass_action.map_or("unknown", BypassAction::as_str);
    let text =
        format!("{}, connected to {}; {limits}; bypass action: {action}", status.version, status.runtime);
    match why_not {
        _ if rules.enforcement != Enforcement::Require => Line::ok(CHECK, text),
        _ if !support.is_required => Line::warn(
            CHECK,
            format!("{text}; it was started with another `enforce.memory` than `require`"),
            "set `enforce.memory: require` in the guard's configuration, too, and restart the guard; until then no device \
             with a memory limit is granted",
        ),
        Some(_) => Line::warn(
            CHECK,
            text,
            "repair the cause, or set `enforce.memory: auto` and restart daemon and guard; until then no device with a \
             memory limit is granted on those GPUs",
        ),
        None if support.gpus.is_empty() => Line::warn(
            CHECK,
            text,
            "run the check again: the guard is still opening NVML, and no device with a memory limit is granted until then",
        ),
        None => Line::ok(CHECK, text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::line::Level;
    use super::*;
    use berth_kernel::evidence::limits::LimitSupport;
    use berth_kernel::grants::bypass::BypassRules;
    use berth_kernel::ids::names::GpuId;

    fn answer(is_connected: bool, why: Option<&str>) -> Option<Result<(GuardStatus, RuntimeView), String>> {
        answer_of(is_connected, why, true)
    }

    fn answer_of(
        is_connected: bool,
        why: Option<&str>,
        is_required: bool,
    ) -> Option<Result<(GuardStatus, RuntimeView), String>> {
        let status = GuardStatus {
            is_connected,
            version: "0.1.0".into(),
            runtime: "containerd 2.2.9".into(),
            why: "the container runtime closed the connection".into(),
        };
        let gpus = [(GpuId::parse("GPU-1").unwrap(), why.map(Into::into))].into();
        let limit_support = LimitSupport { gpus, is_required, ..LimitSupport::default() };
        let view =
            RuntimeView { limit_support, bypass_action: Some(BypassAction::Strip), ..RuntimeView::default() };
        Some(Ok((status, view)))
    }

    #[test]
    fn it_says_what_is_enforced_and_why_not() {
        let rules = Rules::default();
        let required = Rules { enforcement: Enforcement::Require, ..Rules::default() };
        let bypass = BypassRules { action: BypassAction::Strip, ..BypassRules::default() };
        let stripping = Rules { bypass, ..Rules::default() };
        let older = "the driver is older than 615";
        for (rules, answer, level, text) in [
            (&rules, None, Level::Ok, "not running: memory limits are not enforced"),
            (&required, None, Level::Warn, "`enforce.memory` is `require`"),
            (&stripping, None, Level::Warn, "`bypass.action` is not `report`"),
            (&rules, Some(Err("no process listens".into())), Level::Warn, "no process listens"),
            (&rules, answer(false, None), Level::Warn, "not connected: the container runtime closed"),
            (&rules, answer(true, None), Level::Ok, "limits memory on 1 of 1 GPUs; bypass action: strip"),
            (
                &rules,
                answer(true, Some(older)),
                Level::Ok,
                "limits memory on 0 of 1 GPUs: the driver is older",
            ),
            (&required, answer(true, Some(older)), Level::Warn, "the driver is older"),
            (&required, answer(true, None), Level::Ok, "limits memory on 1 of 1 GPUs"),
            (
                &required,
                answer_of(true, None, false),
                Level::Warn,
                "was started with another `enforce.memory`",
            ),
        ] {
            let line = line(rules, answer);
            assert!(line.level == level && line.detail.contains(text), "{line:?}");
        }
    }
}
