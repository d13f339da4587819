//! What the host keeps for one call: how much the guest has taken, and what it has said.

use wasmtime::component::Linker;
use wasmtime::{ResourceLimiter, Result, StoreContextMut};

use super::limits::{
    CORE_INSTANCES_MAX, GUEST_MEMORY_BYTES_MAX, GUEST_TABLES_ELEMENTS_MAX, LOG_BYTE_FUEL, LOG_LINE_BYTES_MAX,
    LOG_LINE_FUEL, LOG_LINES_MAX, MEMORIES_MAX, TABLES_MAX,
};

/// The host's side of one call.
#[derive(Debug, Default)]
pub(super) struct Guest {
    memory_bytes: usize,
    table_elements: usize,
    /// What it asked for beyond its limits, once it did.
    pub(super) refused: Option<&'static str>,
    /// Lines that it logged, escaped and cut.
    pub(super) said: Vec<String>,
    /// Lines beyond the limit.
    pub(super) unheard: u32,
}

/// The only import of the world.
pub(super) fn add_to_linker(linker: &mut Linker<Guest>) -> Result<()> {
    linker.root().func_wrap("log", |mut store: StoreContextMut<'_, Guest>, (line,): (String,)| {
        // Fuel counts the guest's instructions and not the host's copying, so that is paid here.
        let bytes = u64::try_from(line.len()).unwrap_or(u64::MAX);
        let price = LOG_LINE_FUEL.saturating_add(bytes.saturating_mul(LOG_BYTE_FUEL));
        let left = store.get_fuel()?.checked_sub(price);
        store.set_fuel(left.unwrap_or(0))?;
        if left.is_none() {
            return Err(wasmtime::Trap::OutOfFuel.into());
        }
        store.data_mut().hear(&line);
        Ok(())
    })
}

impl Guest {
    fn hear(&mut self, line: &str) {
        if self.said.len() == LOG_LINES_MAX {
            self.unheard = self.unheard.saturating_add(1);
            return;
        }
        self.said.push(escape(line));
    }
}

/// Cut to the length of a line, control characters written out: a guest must not be able to forge
/// lines of the log, nor to speak to a terminal. Of what is invisible only the direction marks and
/// line separators matter, which `escape_debug` knows, too.
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
    // All memories together: wasmtime's own limits are for each.
    fn memory_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        let total = self.memory_bytes.saturating_add(desired.saturating_sub(current));
        if total > GUEST_MEMORY_BYTES_MAX {
            self.refused = Some("more than 128 MiB of memory");
            return Ok(false);
        }
        self.memory_bytes = total;
        Ok(true)
    }

    fn memory_grow_failed(&mut self, _: wasmtime::Error) -> Result<()> {
        self.refused = Some("more memory than there is");
        Ok(())
    }

    fn table_growing(&mut self, current: usize, desired: usize, _: Option<usize>) -> Result<bool> {
        let total = self.table_elements.saturating_add(desired.saturating_sub(current));
        if total > GUEST_TABLES_ELEMENTS_MAX {
            self.refused = Some("more than 65536 table elements");
            return Ok(false);
        }
        self.table_elements = total;
        Ok(true)
    }

    fn table_grow_failed(&mut self, _: wasmtime::Error) -> Result<()> {
        self.refused = Some("more than 16384 elements of one table");
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
    fn a_line_cannot_forge_another_nor_speak_to_a_terminal() {
        assert_eq!(escape("a\nb\r\u{1b}[31m\u{0}"), "a\\nb\\r\\u{1b}[31m\\0");
        assert_eq!(escape("\u{202e}\u{2028}"), "\\u{202e}\\u{2028}");
        assert_eq!(escape("it's \"fine\" \\ \u{e9}"), "it's \"fine\" \\ \u{e9}");
    }

    #[test]
    fn lines_are_cut_and_counted() {
        let mut guest = Guest::default();
        for _ in 0..LOG_LINES_MAX + 3 {
            guest.hear(&"\u{e9}".repeat(LOG_LINE_BYTES_MAX));
        }
        assert_eq!((guest.said.len(), guest.unheard), (LOG_LINES_MAX, 3));
        assert_eq!(guest.said[0].len(), LOG_LINE_BYTES_MAX);
    }

    #[test]
    fn memory_is_counted_over_all_memories() {
        let mut guest = Guest::default();
        assert!(guest.memory_growing(0, GUEST_MEMORY_BYTES_MAX, None).unwrap());
        assert!(!guest.memory_growing(0, 65_536, None).unwrap());
        assert_eq!(guest.refused, Some("more than 128 MiB of memory"));
    }
}
