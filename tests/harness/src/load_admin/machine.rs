//! How much of the processors' time this machine had: a virtual one shares them with its neighbours.

use anyhow::Context as _;

/// What the kernel has counted since it was started, in its ticks (proc_stat(5), the line `cpu`).
#[derive(Clone, Copy)]
pub(crate) struct Machine {
    /// In which a processor had something to do and the machine's host did not let it.
    stolen: u64,
    all: u64,
}

impl Machine {
    /// Until now.
    pub(crate) fn now() -> anyhow::Result<Self> {
        Self::parse(&std::fs::read_to_string("/proc/stat")?).context("/proc/stat has no line cpu")
    }

    /// The columns: user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in
    /// these, too.
    fn parse(text: &str) -> Option<Self> {
        let columns = text.lines().next()?.strip_prefix("cpu ")?;
        let ticks: Vec<u64> = columns.split_whitespace().take(8).map_while(|t| t.parse().ok()).collect();
        Some(Self { stolen: *ticks.get(7)?, all: ticks.iter().sum() })
    }

    /// How much was stolen since `before`, percent of all processors' time.
    pub(crate) fn stolen_percent_since(self, before: Self) -> f64 {
        let all = self.all.saturating_sub(before.all).max(1);
        self.stolen.saturating_sub(before.stolen) as f64 / all as f64 * 100.0
    }
}
