//! The pages behind the `type` of each problem: what it means and what to do. Public, since whoever
//! has no token yet wants to read what 401 means.

use super::problem_words::{Words, words};
use actix_web::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY};
use actix_web::{HttpResponse, web};
use berth_api::Kind;
use berth_api::Problem;
use berth_http::Failure;
use std::fmt::Write;

/// Text alone: no script, no image, no style but the one line below, which is named by its nature.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// They change with the release only.
const CACHED: &str = "public, max-age=3600";
const STYLE: &str = "body{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:2rem auto;padding:0 1rem}:root{color-scheme:light dark}";

/// All kinds, by status.
pub(super) async fn index() -> HttpResponse {
    let mut kinds: Vec<_> = Kind::ALL.to_vec();
    kinds.sort_by_key(|kind| (kind.facts().1, kind.facts().0));
    let mut list = String::new();
    for kind in kinds {
        let (slug, status, title) = kind.facts();
        // Writing to a String cannot fail.
        let _ = writeln!(list, "<li>{} <a href=\"{slug}\">{title}</a></li>", status);
    }
    page("Problems", &format!("<p>Every error of this API names one of these.</p>\n<ul>\n{list}</ul>"))
}

/// One kind.
pub(super) async fn show(path: web::Path<String>) -> Result<HttpResponse, Failure> {
    let slug = format!("/problems/{}", path.into_inner());
    let kind = Problem::kind_of(&slug).ok_or_else(|| {
        let shown: String = slug.chars().take(80).collect();
        Failure::new(Kind::NoRoute, format!("no problem is called {shown}")).hint("/problems lists them")
    })?;
    let (slug, status, title) = kind.facts();
    let Words { means, todo } = words(kind);
    let (means, todo) = (escaped(means), escaped(todo));
    Ok(page(
        title,
        &format!(
            "<p><code>{slug}</code>, status {}</p>\n<p>{means}</p>\n<h2>What to do</h2>\n<p>{todo}</p>\n<p><a href=\"/problems\">All problems</a></p>",
            status
        ),
    ))
}

fn page(title: &str, body: &str) -> HttpResponse {
    let text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{title} - Berth</title><style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    );
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .insert_header((CONTENT_SECURITY_POLICY, POLICY))
        .insert_header((CACHE_CONTROL, CACHED))
        .body(text)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_says_what_it_means_and_what_to_do() {
        for kind in Kind::ALL {
            let Words { means, todo } = words(*kind);
            for text in [means, todo] {
                assert!(text.len() > 20 && text.ends_with('.'), "{kind:?}: {text}");
            }
            assert_eq!(Problem::kind_of(kind.facts().0), Some(*kind));
        }
    }
}
