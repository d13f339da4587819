//! `/proc/PID/stat`: the name and the start of a process. Pure.

/// Bytes of a command name that the kernel keeps: `TASK_COMM_LEN` (16) less the terminating NUL.
const NAME_BYTES: usize = 15;

/// The fields that are used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    /// The command name.
    pub(super) name: String,
    /// When it started, clock ticks since boot.
    pub(super) started_ticks: u64,
}

/// Parses `PID (NAME) STATE ...` (`man 5 proc_pid_stat`). A name may contain spaces and parentheses, so it ends at the
/// last closing one.
pub(super) fn parse(text: &str) -> Option<Stat> {
    /// `starttime` is field 22; the first one after the name is field 3.
    const START_AFTER_NAME: usize = 22 - 3;
    let (before, rest) = text.rsplit_once(')')?;
    let (_, name) = before.split_once('(')?;
    let started_ticks = rest.split_ascii_whitespace().nth(START_AFTER_NAME)?.parse().ok()?;
    Some(Stat { name: name.to_owned(), started_ticks })
}

/// Truncates a name as the kernel does.
pub(super) fn truncate(name: &str) -> &str {
    &name[..name.floor_char_boundary(NAME_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_look_like_the_fields_after_it() {
        let rest = "S 1 4117 4117 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 9 0 182734 12345 99 18446744073709551615";
        for name in ["python3", "a) S 1 (b", "", "tmux: server", ")"] {
            let stat = parse(&format!("4117 ({name}) {rest}\n")).unwrap();
            assert_eq!(stat, Stat { name: name.into(), started_ticks: 182_734 });
        }
        let numbers = "1 ".repeat(18);
        for bad in ["", "4117", "4117 (x", "4117 (x) S 1", &format!("4117 (x) S {numbers}start 1")] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_long_name_is_truncated_as_in_the_kernel() {
        assert_eq!(truncate("nvidia-persistenced"), "nvidia-persiste");
        assert_eq!(truncate("nvidia-smi"), "nvidia-smi");
        assert_eq!(truncate("fifteen-bytes-é"), "fifteen-bytes-", "never half a character");
    }
}
