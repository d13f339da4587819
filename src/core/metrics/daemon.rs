//! Metrics of the daemon: build, readiness, liveness, API requests and traces.

use super::families::Families;
use super::scrape::Scrape;
use super::table;
use std::fmt;

/// Status classes, in the order of [`berth_observe::counters::Served::by_class`].
const CLASSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

pub(super) fn encode(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let about = &scrape.about;
    families.info(&table::BUILD, [vec![env!("CARGO_PKG_VERSION")]])?;
    let versions = scrape.counters.gpus.versions();
    let label = |version: &'_ Option<String>| version.clone().unwrap_or_default();
    let (driver, cuda) = (label(&versions.driver), label(&versions.cuda));
    families.info(&table::NVIDIA, [vec![driver.as_str(), cuda.as_str()]])?;
    for (family, checks) in [
        (&table::READY, &about.ready),
        (&table::LIVE, &about.live),
        (&table::CHECK_WARNINGS, &about.messages),
    ] {
        let values = checks.iter().map(|(check, result)| (vec![check.as_str()], u64::from(*result)));
        families.gauge(family, values)?;
    }
    families.value(&table::FILE_REFUSED, about.file_refused.map(u64::from))?;
    families.value(&table::FILE_STACK_OVERRIDDEN, about.file_stack_overridden.map(u64::from))
}

/// The counters of spans; all zero while traces are off.
pub(super) fn encode_traces(families: &mut Families<'_>) -> fmt::Result {
    let counts = berth_observe::spans::counts();
    let outcomes = [("exported", counts.exported), ("failed", counts.failed), ("dropped", counts.dropped)];
    families.counter(&table::TRACE_SPANS, outcomes.map(|(outcome, n)| (vec![outcome], n)))
}

pub(super) fn encode_http(scrape: &Scrape, families: &mut Families<'_>) -> fmt::Result {
    let served = scrape.counters.http.served();
    let requests = served.iter().flat_map(|((route, method), served)| {
        let classes = CLASSES.iter().zip(served.by_class).filter(|(_, n)| *n > 0);
        classes.map(move |(class, n)| (vec![route.as_str(), method.as_str(), class], n))
    });
    families.counter(&table::HTTP_REQUESTS, requests)?;
    let times = served.iter().map(|((route, method), served)| {
        (vec![route.as_str(), method.as_str()], served.times.clone().into())
    });
    families.histogram(&table::HTTP_TIME, times)
}
