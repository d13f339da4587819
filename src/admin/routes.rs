//! The route table. A path that is not in it is a problem, too.

use crate::openapi;
use crate::resources::{
    access, allocations, comparisons, decisions, drains, driver, events, gpus, health, history, node, pages,
    policies, processes, stack, trials,
};
use actix_web::web::{self, ServiceConfig};
use actix_web::{HttpRequest, HttpResponse};
use berth_http::CompressedFile;
use berth_http::gate::api;
use berth_http::route::{no_health_route, no_route, read, resource};
use std::sync::LazyLock;

/// The routes of the admin listener.
pub(crate) fn admin(config: &mut ServiceConfig) {
    let api = api()
        .service(resource("/node", "GET, HEAD").route(read().to(node::show)))
        .service(resource("/node/nvml/release", "POST").route(web::post().to(driver::release)))
        .service(resource("/node/nvml/resume", "POST").route(web::post().to(driver::resume)))
        .service(resource("/access", "GET, HEAD").route(read().to(access::show)))
        .service(resource("/gpus", "GET, HEAD").route(read().to(gpus::list)))
        .service(
            resource("/gpus/{uuid}", "GET, HEAD, DELETE")
                .route(read().to(gpus::show))
                .route(web::delete().to(gpus::forget)),
        )
        .service(
            resource("/gpus/{uuid}/cordon", "PUT, DELETE")
                .route(web::put().to(drains::cordon))
                .route(web::delete().to(drains::uncordon)),
        )
        .service(
            resource("/gpus/{uuid}/drain", "GET, HEAD, PUT, DELETE")
                .route(read().to(drains::show))
                .route(web::put().to(drains::start))
                .route(web::delete().to(drains::stop)),
        )
        .service(resource("/gpus/{uuid}/drain/preview", "GET, HEAD").route(read().to(drains::preview)))
        .service(resource("/gpus/{uuid}/health", "PUT").route(web::put().to(drains::mark_healthy)))
        .service(resource("/gpus/{uuid}/history", "GET, HEAD").route(read().to(history::of_gpu)))
        .service(resource("/gpus/{uuid}/processes", "GET, HEAD").route(read().to(processes::list)))
        .service(resource("/bypass", "GET, HEAD").route(read().to(processes::bypass)))
        .service(resource("/events", "GET, HEAD").route(read().to(events::follow)))
        .service(resource("/events/history", "GET, HEAD").route(read().to(history::of_events)))
        .service(resource("/allocations", "GET, HEAD").route(read().to(allocations::list)))
        .service(
            resource("/allocations/{id}", "GET, HEAD, DELETE")
                .route(read().to(allocations::show))
                .route(web::delete().to(allocations::end)),
        )
        .service(resource("/allocations/{id}/explanation", "GET, HEAD").route(read().to(decisions::explain)))
        .service(resource("/decisions", "GET, HEAD").route(read().to(decisions::list)))
        .service(resource("/decisions/{seq}", "GET, HEAD").route(read().to(decisions::show)))
        .service(resource("/decisions/{seq}/input", "GET, HEAD").route(read().to(decisions::input)))
        .service(resource("/replays", "POST").route(web::post().to(comparisons::replay)))
        .service(resource("/trials", "POST").route(web::post().to(trials::add)))
        .service(
            resource("/shadows", "GET, HEAD, POST")
                .route(read().to(comparisons::list))
                .route(web::post().to(comparisons::add)),
        )
        .service(
            resource("/shadows/{id}", "GET, HEAD, DELETE")
                .route(read().to(comparisons::show))
                .route(web::delete().to(comparisons::end)),
        )
        .service(
            resource("/policies", "GET, HEAD, POST")
                .route(read().to(policies::list))
                .route(web::post().to(policies::upload)),
        )
        .service(
            resource("/policies/{digest}", "GET, HEAD, DELETE")
                .route(read().to(policies::show))
                .route(web::delete().to(policies::delete)),
        )
        .service(resource("/policies/{digest}/module", "GET, HEAD").route(read().to(policies::module)))
        .service(
            resource("/stack", "GET, HEAD, PUT")
                .route(read().to(stack::show))
                .route(web::put().to(stack::activate)),
        )
        .service(resource("/stack/history", "GET, HEAD").route(read().to(stack::history)))
        .service(resource("/stack/rollback", "POST").route(web::post().to(stack::roll_back)))
        .service(
            resource("/stack/entries/{place}/suspension", "DELETE")
                .route(web::delete().to(stack::end_suspension)),
        )
        .service(resource("/stack/override", "DELETE").route(web::delete().to(stack::reset)))
        .default_service(web::to(no_route));
    config.service(api);
    config.service(resource("/", "GET, HEAD").route(read().to(pages::start)));
    config.service(resource("/page/{file}", "GET, HEAD").route(read().to(pages::file)));
    config.service(resource("/swagger-ui", "GET, HEAD").route(read().to(pages::swagger)));
    config.service(resource("/swagger-ui/{file:.*}", "GET, HEAD").route(read().to(pages::swagger_file)));
    config.service(resource("/openapi.json", "GET, HEAD").route(read().to(document)));
    for index in ["/problems", "/problems/"] {
        config.service(resource(index, "GET, HEAD").route(read().to(pages::problems)));
    }
    config.service(resource("/problems/{word}", "GET, HEAD").route(read().to(pages::problem)));
    checks(config);
    config.default_service(web::to(no_route));
}

/// The routes of the health listener.
pub(crate) fn health(config: &mut ServiceConfig) {
    checks(config);
    config.default_service(web::to(no_health_route));
}

fn checks(config: &mut ServiceConfig) {
    config.service(resource("/livez", "GET, HEAD").route(read().to(health::livez)));
    config.service(resource("/readyz", "GET, HEAD").route(read().to(health::readyz)));
    config.service(resource("/metrics", "GET, HEAD").route(read().to(health::metrics)));
}

/// The API's description: half a megabyte of repetitive text.
async fn document(request: HttpRequest) -> HttpResponse {
    static DOCUMENT: LazyLock<CompressedFile> =
        LazyLock::new(|| CompressedFile::new("application/json", openapi::openapi_json()));
    DOCUMENT.answer(&request)
}
