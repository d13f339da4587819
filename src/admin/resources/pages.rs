//! Pages for browsers, from files inside the binary: the node's web page at `/`, Swagger UI, and `/problems`. None needs
//! a token. The web page has no data itself: it requests everything from `/api/v1`, with a token that the operator
//! enters. A client without a token may want to read about `unauthorized`.

use actix_web::http::header::{
    AcceptEncoding, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, Header as _, HeaderValue,
    LOCATION, VARY,
};
use actix_web::web::{Bytes, Path};
use actix_web::{HttpRequest, HttpResponse};
use berth_api::{Kind, Problem};
use berth_http::{CompressedFile, Failure, HandlerResult, IDENTITY, Weight, accepts_gzip, excerpt};
use flate2::read::GzDecoder;
use parking_lot::Mutex;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::Read as _;
use std::sync::{Arc, LazyLock};
use utoipa_swagger_ui::Config;

/// Only its own scripts and styles, and requests to this server; nothing inline, no frames, no forms. So a text of a
/// policy or a pod in the markup could not run as a script.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

macro_rules! files {
    ($($name:literal: $kind:ident,)+) => {
        vec![$(($name, CompressedFile::new($kind, include_str!(concat!("page/", $name)))),)+]
    };
}

/// The files of the web page.
static FILES: LazyLock<Vec<(&str, CompressedFile)>> = LazyLock::new(|| {
    files! {
        "index.html": HTML,
        "page.css": CSS,
        "views.css": CSS,
        "icon.svg": SVG,
        "api.js": SCRIPT,
        "capacity.js": SCRIPT,
        "changes.js": SCRIPT,
        "clock.js": SCRIPT,
        "decisions.js": SCRIPT,
        "dialog.js": SCRIPT,
        "dom.js": SCRIPT,
        "drain.js": SCRIPT,
        "drawer.js": SCRIPT,
        "gauges.js": SCRIPT,
        "gpu-drawer.js": SCRIPT,
        "gpus.js": SCRIPT,
        "graph.js": SCRIPT,
        "help.js": SCRIPT,
        "history.js": SCRIPT,
        "keys.js": SCRIPT,
        "links.js": SCRIPT,
        "live.js": SCRIPT,
        "menu.js": SCRIPT,
        "model.js": SCRIPT,
        "page.js": SCRIPT,
        "pod-drawer.js": SCRIPT,
        "pods.js": SCRIPT,
        "policy-sheet.js": SCRIPT,
        "record.js": SCRIPT,
        "route.js": SCRIPT,
        "row.js": SCRIPT,
        "schema-form.js": SCRIPT,
        "stack.js": SCRIPT,
        "status-line.js": SCRIPT,
        "timeline.js": SCRIPT,
        "trial.js": SCRIPT,
        "why-here.js": SCRIPT,
        "words.js": SCRIPT,
    }
});

pub(crate) async fn start(request: HttpRequest) -> HandlerResult {
    answer(&request, "index.html")
}

pub(crate) async fn file(request: HttpRequest, path: Path<String>) -> HandlerResult {
    answer(&request, &path)
}

fn answer(request: &HttpRequest, name: &str) -> HandlerResult {
    let Some((_, text)) = FILES.iter().find(|(file, _)| *file == name) else {
        return Err(Failure::new(Kind::NoRoute, "the page has no such file").hint("the page is at /"));
    };
    let mut response = text.answer(request);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(PAGE_POLICY));
    Ok(response)
}

/// Swagger UI has only its own scripts, and requests to this server. Its pages set inline styles and have icons as data URLs.
const SWAGGER_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// The token is entered into the page and not stored; no other site validates the description.
static CONFIG: LazyLock<Arc<Config<'static>>> = LazyLock::new(|| {
    let config = Config::from("/openapi.json").validator_url("none").try_it_out_enabled(true);
    Arc::new(config.persist_authorization(false).display_request_duration(true))
});

/// Redirects to the pages of Swagger UI.
pub(crate) async fn swagger() -> HttpResponse {
    HttpResponse::Found().insert_header((LOCATION, "/swagger-ui/")).finish()
}

pub(crate) async fn swagger_file(request: HttpRequest, path: Path<String>) -> HandlerResult {
    let path: String = path.into_inner();
    let found = utoipa_swagger_ui::serve(&path, Arc::clone(&CONFIG))
        .map_err(|error| Failure::new(Kind::Internal, error))?;
    let Some(file) = found else {
        return Err(
            Failure::new(Kind::NoRoute, "Swagger UI has no such file").hint("its first page is /swagger-ui/")
        );
    };
    let mut response = HttpResponse::Ok();
    response.content_type(file.content_type).insert_header((CONTENT_SECURITY_POLICY, SWAGGER_POLICY));
    response.insert_header((VARY, "accept-encoding"));
    if file.gzpipped && !AcceptEncoding::parse(&request).is_ok_and(|accepts| accepts_gzip(&accepts)) {
        let bytes = unpacked(path, &file.bytes).map_err(|error| Failure::new(Kind::Internal, error))?;
        let mut response = response.insert_header((CONTENT_ENCODING, IDENTITY)).body(bytes);
        response.extensions_mut().insert(Weight::NONE);
        return Ok(response);
    }
    response.insert_header((CONTENT_ENCODING, if file.gzpipped { "gzip" } else { IDENTITY }));
    Ok(match file.bytes {
        Cow::Borrowed(bytes) => {
            let mut response = response.body(Bytes::from_static(bytes));
            response.extensions_mut().insert(Weight::NONE);
            response
        }
        Cow::Owned(bytes) => response.body(bytes),
    })
}

/// A file in its uncompressed form. Each is decompressed once, at its first request: that needs no token, and
/// decompressing 1.5 MB for every request would keep the processors busy. There are some ten files, 4 MiB in all.
fn unpacked(path: String, packed: &[u8]) -> std::io::Result<Bytes> {
    static FILES: Mutex<BTreeMap<String, Bytes>> = Mutex::new(BTreeMap::new());
    let mut files = FILES.lock();
    if let Some(bytes) = files.get(&path) {
        return Ok(bytes.clone());
    }
    let mut bytes = Vec::new();
    GzDecoder::new(packed).read_to_end(&mut bytes)?;
    let bytes = Bytes::from(bytes);
    files.insert(path, bytes.clone());
    Ok(bytes)
}

/// The source of the pages of `/problems`.
const DOCUMENT: &str = include_str!("../../../docs/problems.md");
/// Problems are text only: no script, no image, and no style but the inline one.
const PROBLEM_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
/// The pages of problems change with a release only.
const CACHE: &str = "public, max-age=3600";
const STYLE: &str = "body{font:1rem/1.5 system-ui,sans-serif;max-width:42rem;margin:2rem auto;padding:0 1rem}:root{color-scheme:light dark}";

/// All kinds of problems, by status.
pub(crate) async fn problems() -> HttpResponse {
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

/// One kind of problem.
pub(crate) async fn problem(path: Path<String>) -> HandlerResult {
    let name = path.into_inner();
    let found = sections().find(|(slug, _)| *slug == name);
    let found = found.and_then(|(_, text)| Some((Problem::kind_of(&format!("/problems/{name}"))?, text)));
    let Some((kind, text)) = found else {
        return Err(Failure::new(Kind::NoRoute, format!("there is no problem {:?}", excerpt(&name)))
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
        .content_type(HTML)
        .insert_header((CONTENT_SECURITY_POLICY, PROBLEM_POLICY))
        .insert_header((CACHE_CONTROL, CACHE))
        .body(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_file_of_the_folder_is_served_and_nothing_is_inline() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("resources/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(FILES.iter().any(|(file, _)| *file == name), "{name} is not in the list of files");
        }
        for (name, text) in FILES.iter() {
            for never in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                assert!(!text.text().contains(never), "{name}: {never}");
            }
            assert!(!text.text().contains("https://"), "{name} names another host");
        }
        let page = FILES.iter().find(|(name, _)| *name == "index.html").unwrap().1.text();
        for never in ["<style", "style=", "onclick", "<script>"] {
            assert!(!page.contains(never), "{never} would be refused by the content security policy");
        }
    }

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
