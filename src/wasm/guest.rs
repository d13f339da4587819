//! The host's state of one call of a policy: the guest's memory use and its log lines.

use super::limits::{
    CORE_INSTANCES_MAX, GUEST_MEMORY_BYTES_MAX, GUEST_TABLE_ELEMENTS_MAX, GUEST_TABLES_ELEMENTS_MAX,
    LOG_BYTE_FUEL, LOG_LINE_BYTES_MAX, LOG_LINE_FUEL, LOG_LINES_MAX, MEMORIES_MAX, TABLES_MAX,
};
use wasmtime::component::Linker;
use wasmtime::{ResourceLimiter, Result, StoreContextMut};

/// The host's state of one call.
#[derive(Debug, Default)]
pub(super) struct Guest {
    memory_bytes: usize,
    table_elements: usize,
    /// The last request that exceeded a limit.
    pub(super) refused: Option<String>,
    /// Lines that the guest logged, escaped and truncated.
    pub(super) log_lines: Vec<String>,
    /// Number of log lines beyond the limit.
    pub(super) dropped_lines: u32,
}

/// Adds `log`, the only import of the world.
pub(super) fn add_log(linker: &mut Linker<Guest>) -> Result<()> {
    linker.root().func_wrap("log", |mut store: StoreContextMut<'_, Guest>, (line,): (String,)| {
        // wasmtime charges fuel for the guest's instructions only; this charges for the host's work.
        let bytes = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let price = LOG_LINE_FUEL.saturating_add(bytes.saturating_mul(LOG_BYTE_FUEL));
        let fuel_left = store.get_fuel()?.checked_sub(price);
        store.set_fuel(fuel_left.unwrap_or(0))?;
        if fuel_left.is_none() {
            return Err(wasmtime::Trap::OutOfFuel.into());
        }
        store.data_mut().log(&line);
        Ok(())
    })
}

impl Guest {
    fn log(&mut self, line: &str) {
        if self.log_lines.len() == LOG_LINES_MAX {
            self.dropped_lines = self.dropped_lines.saturating_add(1);
        } else {
            self.log_lines.push(escape(line));
        }
    }
}

/// A truncated line with escaped control characters, so that a guest can neither forge log lines nor control a
/// terminal. `escape_debug` also escapes direction marks and line separators.
fn escape(line: &str) -> String {
    let end = line.floor_char_boundary(LOG_LINE_BYTES_MAX);
    let mut escaped = String::with_capacity(end);
    for c in line[..end].chars() {
        match c {
            '"' | '\'' | '\\' => escaped.push(c),
            _ => escaped.extend(c.escape_debug()),
        }
    }
    escaped
}

impl ResourceLimiter for Guest {
    // Limits the sum of all memories; wasmtime's own limits apply to each memory.
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        let total = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if total > GUEST_MEMORY_BYTES_MAX {
            self.refused = Some(format!("more than {} MiB of memory", GUEST_MEMORY_BYTES_MAX >> 20));
            return Ok(false);
        }
        self.memory_bytes = total;
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _: wasmtime::Error) -> Result<()> {
        self.refused = Some("more memory than there is".to_owned());
        Ok(())
    }

    fn table_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        let total = self.table_elements.saturating_add(desired.saturating_sub(current));
        if total > GUEST_TABLES_ELEMENTS_MAX {
            self.refused = Some(format!("more than {GUEST_TABLES_ELEMENTS_MAX} table elements"));
            return Ok(false);
        }
        self.table_elements = total;
        Ok(true)
    }

    fn table_grow_failed(&mut self, _: wasmtime::Error) -> Result<()> {
        self.refused = Some(format!("more than {GUEST_TABLE_ELEMENTS_MAX} elements of one table"));
        Ok(())
    }

    fn instances(&self) -> usize {
        CORE_INSTANCES_MAX as usize
    }

    fn tables(&self) -> usize {
        TABLES_MAX as usize
    }

    fn memories(&self) -> usize {
        MEMORIES_MAX as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_can_neither_forge_another_nor_control_a_terminal() {
        assert_eq!(escape("a\nb\r\u{1b}[31m\u{0}"), "a\\nb\\r\\u{1b}[31m\\0");
        assert_eq!(escape("\u{202e}\u{2028}"), "\\u{202e}\\u{2028}");
        assert_eq!(escape("it's \"fine\" \\ \u{e9}"), "it's \"fine\" \\ \u{e9}");
    }

    #[test]
    fn lines_are_truncated_and_counted() {
        let mut guest = Guest::default();
        for _ in 0..LOG_LINES_MAX + 3 {
            guest.log(&"\u{e9}".repeat(LOG_LINE_BYTES_MAX));
        }
        assert_eq!((guest.log_lines.len(), guest.dropped_lines), (LOG_LINES_MAX, 3));
        assert_eq!(guest.log_lines[0].len(), LOG_LINE_BYTES_MAX);
    }

    #[test]
    fn the_memory_limit_is_the_sum_of_all_memories() {
        let mut guest = Guest::default();
        assert!(guest.memory_growing(0, GUEST_MEMORY_BYTES_MAX, None).unwrap());
        assert!(!guest.memory_growing(0, 65_536, None).unwrap());
        assert_eq!(guest.refused.as_deref(), Some("more than 128 MiB of memory"));
    }
}
