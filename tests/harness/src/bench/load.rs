//! Allocate in the built binary, alone and while clients read its admin API.

use crate::bench::measure::{Effort, Series, ratio, turns};
use crate::bench::node::{Client, GPU, House, PATIENCE};
use crate::bench::process::{Serving, Site};
use crate::bench::table::{Budget, Row, Table};
use anyhow::{Context as _, Result, ensure};
use fakes::plugin::socket;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Instant;

const SAMPLES: usize = 300;
/// Clients that send the next request as soon as they are answered: twice the API's workers.
const READERS: usize = 4;

/// One client of the admin API.
struct Reader {
    agent: ureq::Agent,
    base: String,
    authorization: String,
}

impl Reader {
    fn new(serving: &Serving) -> Self {
        let config = ureq::Agent::config_builder().timeout_global(Some(PATIENCE)).build();
        let authorization = format!("Bearer {}", serving.token);
        Self { agent: config.into(), base: serving.base.clone(), authorization }
    }

    fn get(&self, path: &str) -> Result<String> {
        let url = format!("{}{path}", self.base);
        let mut answer = self.agent.get(&url).header("Authorization", &self.authorization).call()?;
        Ok(answer.body_mut().read_to_string()?)
    }

    /// Ends every live allocation, as an operator may.
    fn end_all(&self) -> Result<()> {
        let list: Value = serde_json::from_str(&self.get("/allocations")?)?;
        let items = list["items"].as_array().context("no list")?;
        ensure!(!items.is_empty(), "nothing is allocated");
        for id in items.iter().filter_map(|item| item["id"].as_str()) {
            // No source has shown yet whether a pod uses it, and without `force` an end is refused until then.
            let url = format!("{}/allocations/{id}?force=true", self.base);
            self.agent.delete(&url).header("Authorization", &self.authorization).call()?;
        }
        Ok(())
    }
}

/// Readers at work.
struct Crowd {
    stop: Arc<AtomicBool>,
    answers: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<()>>>,
    began: Instant,
}

impl Crowd {
    fn gather(serving: &Serving) -> Self {
        let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let read = |number: usize| {
            let (reader, stop, answers) = (Reader::new(serving), Arc::clone(&stop), Arc::clone(&answers));
            std::thread::spawn(move || {
                for path in ["/allocations", "/gpus"].iter().cycle().skip(number) {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    reader.get(path)?;
                    answers.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            })
        };
        let threads = (0..READERS).map(read).collect();
        Self { stop, answers, threads, began: Instant::now() }
    }

    /// Answers how many requests were answered in a second.
    fn disperse(self) -> Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().map_err(|_| anyhow::anyhow!("a reader panicked"))??;
        }
        let answers = u32::try_from(self.answers.load(Ordering::Relaxed))?;
        ensure!(answers > 0, "no request was answered");
        Ok(f64::from(answers) / self.began.elapsed().as_secs_f64())
    }
}

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let site = Site::new(house, "load")?;
    let (serving, _) = site.serve()?;
    house.kubelet.block_on(site.kubelet.wait_allocatable(GPU, 8, PATIENCE))?;
    let mut client = Client::dial(house, &socket(&site.kubelet_dir(), GPU))?;
    let ids: Vec<String> = site.kubelet.listed(GPU).into_keys().collect();
    let reader = Reader::new(&serving);
    let (mut quiet, mut loaded) = (Series::default(), Series::default());
    let mut rates = Vec::new();
    for run in 0..effort.runs() {
        for subject in turns(run, 2) {
            let series = if subject == 0 { &mut quiet } else { &mut loaded };
            let crowd = (subject == 1).then(|| Crowd::gather(&serving));
            series.begin();
            for id in ids.iter().cycle().take(effort.samples(SAMPLES)) {
                series.push(client.allocate(house, std::slice::from_ref(id))?);
                reader.end_all()?;
            }
            rates.extend(crowd.map(Crowd::disperse).transpose()?);
        }
    }
    let rate = rates.iter().copied().fold(f64::INFINITY, f64::min);
    println!("admin API under load: {READERS} clients, at least {rate:.0} answers a second");
    table.add(Row::new("Allocate in the binary, durable, alone", &quiet, Budget::NONE));
    let over = ratio(loaded.p99(), quiet.p99());
    let name = format!("the same, {READERS} clients reading the admin API");
    table.add(Row::new(name, &loaded, Budget::ratio(2.0)).beside(over, "its p99 alone"));
    Ok(())
}
