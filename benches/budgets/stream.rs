//! From a GPU that fails to the list that says so on the kubelet's stream, 16 GPUs of 128 shares.

use crate::calls::memory;
use crate::measure::{Effort, Series};
use crate::node::{House, Node, PATIENCE, Recipe, SHARED};
use crate::table::{Budget, Row, Table};
use anyhow::{Context as _, Result, ensure};
use kubelet_standin::HEALTHY;
use kubelet_standin::proto::v1beta1::Empty;
use std::time::Instant;

const SAMPLES: usize = 40;
const DEVICES: usize = 16 * 128;

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let policy = Some(("timeslice", "{\"replicas\": 128}"));
    let recipe = Recipe { gpus: "16xh100", store: memory()?, policy, resource: SHARED };
    let mut node = Node::start(house, recipe)?;
    let mut troubled = node.inventory.clone();
    let gpu = troubled.parts.first().context("no GPU")?.id.clone();
    troubled.troubles.insert(gpu, "fell off the bus".into());
    let mut series = Series::default();
    let opened = house.client.block_on(node.client.0.list_and_watch(Empty {}))?;
    let mut stream = opened.into_inner();
    let mut healthy = || -> Result<usize> {
        let next = async { tokio::time::timeout(PATIENCE, stream.message()).await };
        let list = house.client.block_on(next).context("the list does not come")??;
        let list = list.context("the stream ended")?;
        ensure!(list.devices.len() == DEVICES, "{} devices listed", list.devices.len());
        Ok(list.devices.iter().filter(|d| d.health == HEALTHY).count())
    };
    ensure!(healthy()? == DEVICES, "not all devices are healthy at first");
    for _ in 0..effort.runs() {
        series.begin();
        for _ in 0..effort.samples(SAMPLES) {
            let began = Instant::now();
            node.door.looked(troubled.clone())?;
            while healthy()? != DEVICES - 128 {}
            series.push(began.elapsed());
            node.door.looked(node.inventory.clone())?;
            while healthy()? != DEVICES {}
        }
    }
    let name = "health change to the stream, 16 GPUs x 128 shares";
    table.add(Row::new(name, &series, Budget::p99(10_000)));
    Ok(())
}
