//! `berth policy new`.
use super::args::NewPolicy;
use super::output::Out;
pub(super) fn run(_: &NewPolicy, _: &mut Out) -> anyhow::Result<()> {
    anyhow::bail!("later")
}
