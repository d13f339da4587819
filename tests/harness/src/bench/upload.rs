//! A policy that this node has never seen, from its upload over the admin API of the built binary until
//! it is the active stack.

use crate::bench::measure::{Effort, Series};
use crate::bench::node::{GPU, House, PATIENCE};
use crate::bench::process::{Serving, Site};
use crate::bench::table::{Budget, Row, Table};
use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Uploads of one run; with five runs well below the 256 versions that a node keeps.
const SAMPLES: usize = 10;
/// The smallest shipped policy, which is still twice the 46 kB of one that `berth policy new` begins.
const COMPONENT: &[u8] = include_bytes!("../../../../policies-wasm/prebuilt/exclusive.wasm");
/// What its author calls it.
const NAME: &str = "exclusive";
/// Each one of the samples, not only the middle one.
const ACTIVE_WITHIN: Duration = Duration::from_secs(1);

/// A client with the token.
struct Operator {
    agent: ureq::Agent,
    base: String,
    authorization: String,
}

impl Operator {
    fn new(serving: &Serving) -> Self {
        let config = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .proxy(None)
            .build();
        let authorization = format!("Bearer {}", serving.token);
        Self { agent: config.into(), base: serving.base.clone(), authorization }
    }

    fn upload(&self, component: &[u8]) -> Result<String> {
        let request = self.agent.post(format!("{}/policies", self.base));
        let request = request.header("Authorization", &self.authorization);
        let answer = request.header("Content-Type", "application/wasm").send(component)?;
        // 200 would mean that it was known, and nothing compiled.
        let taken = said(answer, 201)?;
        Ok(taken["digest"].as_str().context("no digest")?.to_owned())
    }

    /// Answers the digests of the active stack.
    fn activate(&self, digest: &str) -> Result<Vec<Value>> {
        let request = self.agent.put(format!("{}/stack", self.base));
        let request = request.header("Authorization", &self.authorization);
        let body = json!({ "entries": [{ "policy": NAME, "digest": digest }] });
        let answer = request.header("Content-Type", "application/json").send(body.to_string())?;
        let active = said(answer, 200)?;
        let entries = active["entries"].as_array().context("no entries")?;
        Ok(entries.iter().map(|entry| entry["digest"].clone()).collect())
    }
}

fn said(mut answer: ureq::http::Response<ureq::Body>, wanted: u16) -> Result<Value> {
    let text = answer.body_mut().read_to_string()?;
    ensure!(answer.status().as_u16() == wanted, "answered {}: {text}", answer.status());
    Ok(serde_json::from_str(&text)?)
}

/// The component with a custom section that no other has: the same policy under another digest.
fn unseen(number: u8) -> Vec<u8> {
    const SECTION: &[u8] = b"sample";
    let mut component = COMPONENT.to_vec();
    // Id 0, then its length, the length of its name, the name, and what is in it; both lengths are below
    // 128, so that each is one byte of LEB128.
    let length = u8::try_from(1 + SECTION.len() + 1).unwrap_or_default();
    let name_length = u8::try_from(SECTION.len()).unwrap_or_default();
    component.extend_from_slice(&[0, length, name_length]);
    component.extend_from_slice(SECTION);
    component.push(number);
    component
}

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let site = Site::new(house, "upload")?;
    let (serving, _) = site.serve()?;
    house.kubelet.block_on(site.kubelet.wait_allocatable(GPU, 8, PATIENCE))?;
    let operator = Operator::new(&serving);
    let (mut taken, mut active) = (Series::default(), Series::default());
    let mut number = 0_u8;
    for _ in 0..effort.runs() {
        taken.begin();
        active.begin();
        for _ in 0..effort.samples(SAMPLES) {
            number += 1;
            let component = unseen(number);
            let began = Instant::now();
            let digest = operator.upload(&component)?;
            taken.push(began.elapsed());
            let stack = operator.activate(&digest)?;
            active.push(began.elapsed());
            ensure!(stack == [digest.as_str()], "{digest} was activated, and {stack:?} is active");
        }
    }
    let kilobytes = COMPONENT.len() / 1000;
    let name = format!("upload of a Rust policy of {kilobytes} kB that the node has never seen");
    table.add(Row::new(name, &taken, Budget::NONE));
    let within = Some(ACTIVE_WITHIN);
    let budget = Budget { median: within, p99: within, ..Budget::NONE };
    table.add(Row::new("the same, until it is the active stack", &active, budget));
    Ok(())
}
