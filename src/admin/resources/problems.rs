//! The pages of `/problems`, made of `docs/problems.md`. They need no token: a client without one may want to read about
//! `unauthorized`.

use actix_web::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY};
use actix_web::{HttpResponse, web};
use berth_api::Kind;
use berth_api::Problem;
use berth_http::Failure;
use std::fmt::Write;

const DOCUMENT: &str = include_str!("../../../docs/problems.md");
/// Text only: no script, no image, and no style but the inline one.
const CONTENT_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// The pages change with a release only.
const CACHE: &str = "public, max-age=3600";
const STYLE: &str = "body{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:2rem auto;padding:0 1rem}:root{color-scheme:light dark}";

/// All kinds, by status.
pub(crate) async fn index() -> HttpResponse {
    let mut list = String::new();
    for (slug, _) in sections() {
        if let Some(kind) = Problem::kind_of(&format!("/problems/{slug}")) {
            let (path, status, title) = kind.facts();
            // Writing to a String cannot fail.
            let _ = writeln!(list, "<li>{status} <a href=\"{path}\">{title}</a></li>");
        }
    }
    page("Problems", &format!("<p>Every error of this API has one of these types.</p>\n<ul>\n{list}</ul>"))
}

/// One kind.
pub(crate) async fn show(path: web::Path<String>) -> Result<HttpResponse, Failure> {
    let name = path.into_inner();
    let found = sections().find(|(slug, _)| *slug == name);
    let found = found.and_then(|(_, text)| Some((Problem::kind_of(&format!("/problems/{name}"))?, text)));
    let Some((kind, text)) = found else {
        let shown: String = name.chars().take(80).collect();
        return Err(Failure::new(Kind::NoRoute, format!("there is no problem {shown:?}"))
            .hint("/problems lists them"));
    };
    let (path, status, title) = kind.facts();
    let mut body = format!("<p><code>{path}</code>, status {status}</p>\n");
    for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        let _ = writeln!(body, "<p>{}</p>", html(paragraph));
    }
    Ok(page(title, &(body + "<p><a href=\"/problems\">All problems</a></p>")))
}

/// The sections of the document: the name of a kind, and its text.
fn sections() -> impl Iterator<Item = (&'static str, &'static str)> {
    DOCUMENT.split("\n## ").skip(1).filter_map(|section| {
        let (heading, text) = section.split_once('\n')?;
        Some((heading.split_once(" (")?.0, text))
    })
}

/// Escapes a paragraph; text between backticks is code.
fn html(paragraph: &str) -> String {
    let escaped = paragraph.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let mut text = String::new();
    for (index, piece) in escaped.split('`').enumerate() {
        if index % 2 == 1 {
            let _ = write!(text, "<code>{piece}</code>");
        } else {
            text += piece;
        }
    }
    text
}

fn page(title: &str, body: &str) -> HttpResponse {
    let text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>{title} - Berth</title><style>{STYLE}</style></head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    );
    HttpResponse::Ok()
        .content_type("text/html; charset=utf-8")
        .insert_header((CONTENT_SECURITY_POLICY, CONTENT_POLICY))
        .insert_header((CACHE_CONTROL, CACHE))
        .body(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_each_kind_once_sorted_by_status_with_a_remedy() {
        let mut headings: Vec<_> = Kind::ALL
            .iter()
            .map(|kind| (kind.facts().1, kind.facts().0.trim_start_matches("/problems/")))
            .collect();
        headings.sort_unstable();
        let expected: Vec<_> = headings.iter().map(|(status, slug)| format!("{slug} ({status})")).collect();
        let found: Vec<_> = DOCUMENT.lines().filter_map(|line| line.strip_prefix("## ")).collect();
        assert_eq!(found, expected);
        for (slug, text) in sections() {
            assert!(
                text.contains("\n\nWhat to do: ") && text.matches('`').count() % 2 == 0,
                "{slug}: {text}"
            );
        }
    }
}
