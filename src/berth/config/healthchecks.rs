//! XIDs that make a GPU unhealthy: `DP_DISABLE_HEALTHCHECKS` and `DP_ENABLE_HEALTHCHECKS`, in every spelling that
//! NVIDIA's device plugin accepts (`internal/rm/health.go` of v0.20).

use super::ServeArgs;
use berth_kernel::health::APPLICATION_XIDS;

/// Highest XID that `all` covers; NVIDIA's numbers end well below.
const XID_MAX: u64 = 1024;

/// One of the two variables, parsed.
#[derive(Debug, Default)]
struct List {
    all: bool,
    xids: Vec<u64>,
    malformed: Vec<String>,
}

impl List {
    fn parse(text: Option<&str>) -> Self {
        let mut list = Self::default();
        for item in text.unwrap_or_default().split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.to_ascii_lowercase().as_str() {
                "all" | "xids" => list.all = true,
                number => match number.parse() {
                    Ok(xid) => list.xids.push(xid),
                    Err(_) => list.malformed.push(item.to_owned()),
                },
            }
        }
        list
    }

    fn is_empty(&self) -> bool {
        !self.all && self.xids.is_empty()
    }

    fn notices(&self, variable: &str) -> Vec<String> {
        let notice =
            |item| format!("{variable}: {item:?} is not an XID and is ignored, as NVIDIA's plugin does");
        self.malformed.iter().map(notice).collect()
    }
}

/// Both lists; enabled XIDs take precedence.
pub(super) struct HealthChecks {
    disabled: List,
    enabled: List,
}

impl HealthChecks {
    pub(super) fn from_args(args: &ServeArgs) -> Self {
        Self {
            disabled: List::parse(args.disable_healthchecks.as_deref()),
            enabled: List::parse(args.enable_healthchecks.as_deref()),
        }
    }

    /// Whether nothing makes a GPU unhealthy.
    pub(super) fn is_off(&self) -> bool {
        self.disabled.all && self.enabled.is_empty()
    }

    /// The ignored XIDs, sorted. `file` replaces those that are ignored by default.
    pub(super) fn ignored(&self, file: Option<Vec<u64>>) -> Vec<u64> {
        if self.enabled.all {
            return Vec::new();
        }
        let mut ignored = file.unwrap_or_else(|| APPLICATION_XIDS.to_vec());
        if self.disabled.all {
            ignored.extend(0..=XID_MAX);
        }
        ignored.extend(&self.disabled.xids);
        ignored.retain(|xid| !self.enabled.xids.contains(xid));
        ignored.sort_unstable();
        ignored.dedup();
        ignored
    }

    pub(super) fn notices(&self) -> Vec<String> {
        let mut notices = self.disabled.notices("DP_DISABLE_HEALTHCHECKS");
        notices.extend(self.enabled.notices("DP_ENABLE_HEALTHCHECKS"));
        notices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(disabled: &str, enabled: &str) -> HealthChecks {
        HealthChecks { disabled: List::parse(Some(disabled)), enabled: List::parse(Some(enabled)) }
    }

    #[test]
    fn every_spelling_of_nvidias_plugin_is_accepted() {
        for (disabled, enabled, ignored, malformed) in [
            ("", "", &[13, 31, 43, 45, 68, 109][..], 0),
            (",", ",", &[13, 31, 43, 45, 68, 109], 0),
            ("79, 48", "48,13", &[31, 43, 45, 68, 79, 109], 0),
            ("68,not-an-int,67", "", &[13, 31, 43, 45, 67, 68, 109], 1),
            ("-68", "x", &[13, 31, 43, 45, 68, 109], 2),
            ("", "all", &[], 0),
            ("79", "XIDS", &[], 0),
        ] {
            let checks = checks(disabled, enabled);
            assert_eq!(checks.ignored(None), ignored, "{disabled:?} {enabled:?}");
            assert_eq!(checks.notices().len(), malformed, "{disabled:?} {enabled:?}");
            assert!(!checks.is_off());
        }
    }

    #[test]
    fn all_turns_the_checks_off_unless_some_are_enabled() {
        for all in ["all", "ALL", " all ", "xids", "xids,79", "79,All"] {
            assert!(checks(all, "").is_off(), "{all}");
            let checks = checks(all, "48");
            assert!(!checks.is_off());
            let ignored = checks.ignored(None);
            assert!(ignored.contains(&79) && !ignored.contains(&48));
        }
    }
}
