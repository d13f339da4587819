//! One row of the route table: an operation as the server needs it, and as the API's description has it.

use berth_api::Kind;
use berth_http::{Audience, QueryRule, RouteRow, Verb};
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterIn};

/// A row.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    /// What the server does with requests.
    pub(crate) route: RouteRow,
    /// What the document says of it; `None` for pages.
    pub(crate) description: Option<Description>,
}

/// What the document says of an operation. Its texts, its body and its responses are at its handler, in
/// `#[utoipa::path]`.
#[derive(Clone, Copy)]
pub(crate) struct Description {
    /// Its section.
    pub(crate) tag: &'static str,
    /// Its name for generators of clients.
    pub(crate) id: &'static str,
    /// A document of its handler alone.
    pub(crate) of_handler: fn() -> utoipa::openapi::OpenApi,
    /// The parameters of its query.
    pub(crate) query: fn() -> Vec<Parameter>,
    /// What `If-Match` compares, if it takes one.
    pub(crate) condition: Option<&'static Condition>,
    /// Whether `If-None-Match` with the ETag of an earlier response is answered with 304.
    pub(crate) is_cached: bool,
    /// Whether a request may come without its body.
    pub(crate) is_body_optional: bool,
    /// The kinds of problem that its statuses show, where the status alone does not tell.
    pub(crate) kinds: &'static [(u16, Kind)],
}

/// What `If-Match` of some operations compares.
pub(crate) struct Condition {
    /// What it says of the parameter.
    pub(crate) about: &'static str,
    /// An ETag.
    pub(crate) example: &'static str,
    /// What 412 means.
    pub(crate) changed: &'static str,
}

/// The marks of a GPU.
pub(crate) static DRAIN: Condition = Condition {
    about: "Only if its drain state still has this ETag, from GET /api/v1/gpus/{uuid}/drain",
    example: "\"active\"",
    changed: "Another client changed the drain state first",
};
/// The API of a GPU.
pub(crate) static VIA: Condition = Condition {
    about: "Only if the GPU's API of the kubelet still has this ETag, from GET /api/v1/gpus/{uuid}/via",
    example: "\"devicePlugin-5d41402abc4b2a76\"",
    changed: "Another client gave an order first, or the GPU was moved",
};
/// The active stack.
pub(crate) static STACK: Condition = Condition {
    about: "Only if the active stack is still at this revision",
    example: "\"3\"",
    changed: "Another client activated a stack first",
};
/// The record of a policy version.
pub(crate) static POLICY: Condition = Condition {
    about: "Only if it still has this ETag, from GET",
    example: "\"5d41402abc4b2a76\"",
    changed: "It was signed or activated after it was read",
};

/// A row of the API: method, path, handler, section, name. It is guarded, and has no query, no condition and no ETag for
/// `If-None-Match`, unless the methods of [`Row`] say otherwise.
macro_rules! row {
    ($verb:ident, $path:literal, $($handler:ident)::+, $tag:literal, $id:literal) => {
        $crate::row::Row::new(
            berth_http::Verb::$verb,
            $path,
            |route| route.to($($handler)::+),
            $tag,
            $id,
            || {
                #[derive(utoipa::OpenApi)]
                #[openapi(paths($($handler)::+))]
                struct OfHandler;
                <OfHandler as utoipa::OpenApi>::openapi()
            },
        )
    };
}

/// A row of a page: path, handler. It is open and takes any query, and the document does not have it.
macro_rules! page {
    ($path:literal, $($handler:ident)::+) => {
        $crate::row::Row::page($path, |route| route.to($($handler)::+))
    };
}

pub(crate) use {page, row};

type Handler = fn(actix_web::Route) -> actix_web::Route;

impl Row {
    pub(crate) const fn new(
        verb: Verb,
        path: &'static str,
        handler: Handler,
        tag: &'static str,
        id: &'static str,
        of_handler: fn() -> utoipa::openapi::OpenApi,
    ) -> Self {
        Self {
            route: RouteRow {
                verb,
                path,
                handler,
                audience: Audience::Guarded,
                query: QueryRule::None,
                takes_if_match: false,
            },
            description: Some(Description {
                tag,
                id,
                of_handler,
                query: Vec::new,
                condition: None,
                is_cached: false,
                is_body_optional: false,
                kinds: &[],
            }),
        }
    }

    pub(crate) const fn page(path: &'static str, handler: Handler) -> Self {
        Self {
            route: RouteRow {
                verb: Verb::Get,
                path,
                handler,
                audience: Audience::Open,
                query: QueryRule::Any,
                takes_if_match: false,
            },
            description: None,
        }
    }

    /// It has the query of this type.
    pub(crate) const fn query<T: IntoParams>(mut self) -> Self {
        self.route.query = QueryRule::Typed;
        if let Some(description) = &mut self.description {
            description.query = || T::into_params(|| Some(ParameterIn::Query));
        }
        self
    }

    /// Its handler passes `If-Match` on with its command.
    pub(crate) const fn if_match(mut self, condition: &'static Condition) -> Self {
        self.route.takes_if_match = true;
        if let Some(description) = &mut self.description {
            description.condition = Some(condition);
        }
        self
    }

    /// `If-None-Match` with the ETag of an earlier response is answered with 304.
    pub(crate) const fn cached(mut self) -> Self {
        if let Some(description) = &mut self.description {
            description.is_cached = true;
        }
        self
    }

    /// A request may come without its body.
    pub(crate) const fn body_optional(mut self) -> Self {
        if let Some(description) = &mut self.description {
            description.is_body_optional = true;
        }
        self
    }

    /// The kinds of problem of these statuses.
    pub(crate) const fn kinds(mut self, kinds: &'static [(u16, Kind)]) -> Self {
        if let Some(description) = &mut self.description {
            description.kinds = kinds;
        }
        self
    }

    /// Who may use it.
    pub(crate) const fn audience(mut self, audience: Audience) -> Self {
        self.route.audience = audience;
        self
    }
}
