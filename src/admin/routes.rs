//! The route table: one row for each operation. From it come the router, the methods of a 405, the checks of queries and
//! conditions, and the operations of the API's description, whose texts and responses are at the handlers.

use crate::resources::{
    access, allocations, comparisons, decisions, drains, driver, events, gpus, health, history, node, pages,
    policies, processes, stack, trials, via,
};
use crate::row::{DRAIN, POLICY, Row, STACK, VIA, page, row};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{ChangeNote, Kind, StackChange, StackReset};
use berth_http::{Audience, CompressedFile, RouteTable};
use std::sync::LazyLock;

/// The path below which everything needs a token.
const API: &str = "/api/v1";

/// All routes.
#[rustfmt::skip]
pub(crate) static ROWS: [Row; 57] = [
    row!(Get, "/api/v1/node", node::show, "node", "getNode").cached(),
    row!(Post, "/api/v1/node/nvml/release", driver::release, "node", "releaseDriver").body_optional().kinds(&[(409, Kind::State)]),
    row!(Post, "/api/v1/node/nvml/resume", driver::resume, "node", "resumeDriver"),
    row!(Get, "/api/v1/access", access::show, "node", "getAccess").cached(),
    row!(Get, "/api/v1/gpus", gpus::list, "gpus", "listGpus").query::<gpus::Filter>().cached(),
    row!(Get, "/api/v1/gpus/{uuid}", gpus::show, "gpus", "getGpu").cached(),
    row!(Delete, "/api/v1/gpus/{uuid}", gpus::forget, "gpus", "forgetGpu").kinds(&[(409, Kind::State)]),
    row!(Put, "/api/v1/gpus/{uuid}/cordon", drains::cordon, "gpus", "cordonGpu").body_optional().if_match(&DRAIN),
    row!(Delete, "/api/v1/gpus/{uuid}/cordon", drains::uncordon, "gpus", "uncordonGpu").query::<drains::OwnerQuery>().if_match(&DRAIN).kinds(&[(409, Kind::State)]),
    row!(Get, "/api/v1/gpus/{uuid}/drain", drains::show, "gpus", "getDrainOfGpu"),
    row!(Put, "/api/v1/gpus/{uuid}/drain", drains::start, "gpus", "drainGpu").body_optional().if_match(&DRAIN).kinds(&[(409, Kind::NoApiServer)]),
    row!(Delete, "/api/v1/gpus/{uuid}/drain", drains::stop, "gpus", "stopDrainOfGpu").query::<drains::OwnerQuery>().if_match(&DRAIN).kinds(&[(409, Kind::State)]),
    row!(Get, "/api/v1/gpus/{uuid}/drain/preview", drains::preview, "gpus", "previewDrainOfGpu").query::<drains::PreviewQuery>().kinds(&[(409, Kind::NoApiServer)]),
    row!(Get, "/api/v1/gpus/{uuid}/via", via::show, "gpus", "getApiOfGpu"),
    row!(Put, "/api/v1/gpus/{uuid}/via", via::order, "gpus", "moveGpu").if_match(&VIA).kinds(&[(409, Kind::NoApiServer)]),
    row!(Delete, "/api/v1/gpus/{uuid}/via", via::cancel, "gpus", "cancelMoveOfGpu").if_match(&VIA),
    row!(Put, "/api/v1/gpus/{uuid}/health", drains::mark_healthy, "gpus", "markGpuHealthy").kinds(&[(409, Kind::State)]),
    row!(Get, "/api/v1/gpus/{uuid}/history", history::of_gpu, "gpus", "getGpuHistory").query::<history::GpuQuery>().cached(),
    row!(Get, "/api/v1/gpus/{uuid}/processes", processes::list, "processes", "listGpuProcesses").cached(),
    row!(Get, "/api/v1/bypass", processes::bypass, "processes", "listBypasses").query::<processes::Filter>().cached(),
    row!(Get, "/api/v1/events", events::follow, "events", "streamEvents").query::<events::Query>().kinds(&[(503, Kind::Streams)]),
    row!(Get, "/api/v1/events/history", history::of_events, "events", "listPastEvents").query::<history::EventQuery>().cached(),
    row!(Get, "/api/v1/allocations", allocations::list, "allocations", "listAllocations").query::<allocations::Filter>().cached(),
    row!(Get, "/api/v1/allocations/{id}", allocations::show, "allocations", "getAllocation").cached(),
    row!(Delete, "/api/v1/allocations/{id}", allocations::end, "allocations", "endAllocation").query::<allocations::Ending>().kinds(&[(409, Kind::Running)]),
    row!(Get, "/api/v1/allocations/{id}/explanation", decisions::explain, "decisions", "explainAllocation").cached(),
    row!(Get, "/api/v1/decisions", decisions::list, "decisions", "listDecisions").query::<decisions::Query>().cached().kinds(&[(409, Kind::NoJournal)]),
    row!(Get, "/api/v1/decisions/{seq}", decisions::show, "decisions", "getDecision").cached().kinds(&[(409, Kind::NoJournal)]),
    row!(Get, "/api/v1/decisions/{seq}/input", decisions::input, "decisions", "getDecisionInput").kinds(&[(409, Kind::NoJournal)]),
    row!(Post, "/api/v1/replays", comparisons::replay, "decisions", "replayDecisions").query::<comparisons::Limit>().kinds(&[(409, Kind::NoJournal)]),
    row!(Post, "/api/v1/trials", trials::add, "decisions", "tryPolicy").kinds(&[(409, Kind::Limit)]),
    row!(Get, "/api/v1/shadows", comparisons::list, "decisions", "listShadows").cached(),
    row!(Post, "/api/v1/shadows", comparisons::add, "decisions", "addShadow").kinds(&[(409, Kind::Limit)]),
    row!(Get, "/api/v1/shadows/{id}", comparisons::show, "decisions", "getShadow").cached(),
    row!(Delete, "/api/v1/shadows/{id}", comparisons::end, "decisions", "endShadow"),
    row!(Get, "/api/v1/policies", policies::list, "policies", "listPolicies").query::<policies::Filter>().cached(),
    row!(Post, "/api/v1/policies", policies::upload, "policies", "uploadPolicy").query::<ChangeNote>().kinds(&[(409, Kind::Limit), (422, Kind::NotAPolicy)]),
    row!(Get, "/api/v1/policies/{digest}", policies::show, "policies", "getPolicy").cached(),
    row!(Delete, "/api/v1/policies/{digest}", policies::delete, "policies", "deletePolicy").if_match(&POLICY).kinds(&[(409, Kind::InUse)]),
    row!(Get, "/api/v1/policies/{digest}/module", policies::module, "policies", "getPolicyModule"),
    row!(Get, "/api/v1/stack", stack::show, "stack", "getStack"),
    row!(Put, "/api/v1/stack", stack::activate, "stack", "activateStack").query::<StackChange>().if_match(&STACK).kinds(&[(409, Kind::State), (422, Kind::StackFails)]),
    row!(Get, "/api/v1/stack/history", stack::history, "stack", "listActivations").cached(),
    row!(Post, "/api/v1/stack/rollback", stack::roll_back, "stack", "rollBackStack").query::<StackChange>().body_optional().if_match(&STACK).kinds(&[(404, Kind::UnknownRevision), (409, Kind::State), (422, Kind::StackFails)]),
    row!(Delete, "/api/v1/stack/entries/{place}/suspension", stack::end_suspension, "stack", "endSuspension").if_match(&STACK),
    row!(Delete, "/api/v1/stack/override", stack::reset, "stack", "resetStack").query::<StackReset>().if_match(&STACK).kinds(&[(409, Kind::State), (422, Kind::StackFails)]),
    row!(Get, "/livez", health::livez, "health", "livez").audience(Audience::Probe).query::<health::Probe>().kinds(&[(503, Kind::NotAlive)]),
    row!(Get, "/readyz", health::readyz, "health", "readyz").audience(Audience::Probe).query::<health::Probe>().kinds(&[(503, Kind::NotReady)]),
    row!(Get, "/metrics", health::metrics, "health", "metrics").audience(Audience::Scrape).kinds(&[(503, Kind::NotReady)]),
    page!("/", pages::start),
    page!("/page/{file}", pages::file),
    page!("/swagger-ui", pages::swagger),
    page!("/swagger-ui/{file:.*}", pages::swagger_file),
    page!("/openapi.json", document),
    page!("/problems", pages::problems),
    page!("/problems/", pages::problems),
    page!("/problems/{word}", pages::problem),
];

/// The table that the server works by.
pub(crate) static TABLE: LazyLock<RouteTable> = LazyLock::new(|| {
    let health_hint =
        "this address serves only /livez, /readyz and /metrics; the admin API has another address";
    RouteTable::new(API, "/swagger-ui/ shows all routes", health_hint, ROWS.iter().map(|row| &row.route))
});

/// The API's description: half a megabyte of repetitive text.
async fn document(request: HttpRequest) -> HttpResponse {
    static DOCUMENT: LazyLock<CompressedFile> =
        LazyLock::new(|| CompressedFile::new("application/json", crate::openapi_json()));
    DOCUMENT.answer(&request)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_http::Verb;
    use std::collections::BTreeSet;

    #[test]
    fn each_row_is_served_as_it_says_and_has_a_name_of_its_own() {
        assert_eq!(TABLE.mistakes(), Vec::<String>::new());
        let ids: BTreeSet<_> = ROWS.iter().filter_map(|row| Some(row.description?.id)).collect();
        assert_eq!(ids.len(), ROWS.iter().filter(|row| row.description.is_some()).count());
    }

    #[test]
    fn a_handler_is_described_with_the_method_of_its_row() {
        for row in &ROWS {
            let Some(description) = row.description else { continue };
            let mut items = (description.of_handler)().paths.paths.into_values();
            let item = items.next().unwrap();
            let methods =
                [item.get.is_some(), item.put.is_some(), item.post.is_some(), item.delete.is_some()];
            let verb = row.route.verb;
            let verbs = [Verb::Get, Verb::Put, Verb::Post, Verb::Delete].map(|one| one == verb);
            assert_eq!(methods, verbs, "{}", description.id);
        }
    }
}
