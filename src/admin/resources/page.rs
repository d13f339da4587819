//! `/`: the node's web page, from files inside the binary. The page has no data itself, so it needs no token: it
//! requests everything from `/api/v1`, with a token that the operator enters.

use actix_web::http::header::{CONTENT_SECURITY_POLICY, HeaderValue};
use actix_web::{HttpRequest, HttpResponse, web};
use berth_api::Kind;
use berth_http::Failure;
use berth_http::packed::CompressedFile;
use std::sync::LazyLock;

/// Only its own scripts and styles, and requests to this server; nothing inline, no frames, no forms. So a text of a
/// policy or a pod in the markup could not run as a script.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; frame-ancestors 'none'; form-action 'none'";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";
/// The file of the page itself.
const START: &str = "index.html";

struct File {
    name: &'static str,
    text: CompressedFile,
}

macro_rules! files {
    ($($name:literal: $kind:ident,)+) => {
        vec![$(File { name: $name, text: CompressedFile::new($kind, include_str!(concat!("page/", $name))) },)+]
    };
}

static FILES: LazyLock<Vec<File>> = LazyLock::new(|| {
    files! {
        "index.html": HTML,
        "page.css": CSS,
        "icon.svg": SVG,
        "api.js": SCRIPT,
        "changes.js": SCRIPT,
        "decisions.js": SCRIPT,
        "dialog.js": SCRIPT,
        "dom.js": SCRIPT,
        "gpus.js": SCRIPT,
        "links.js": SCRIPT,
        "live.js": SCRIPT,
        "model.js": SCRIPT,
        "page.js": SCRIPT,
        "stack.js": SCRIPT,
    }
});

pub(crate) async fn start(request: HttpRequest) -> Result<HttpResponse, Failure> {
    answer(&request, START)
}

pub(crate) async fn file(request: HttpRequest, path: web::Path<String>) -> Result<HttpResponse, Failure> {
    answer(&request, &path)
}

fn answer(request: &HttpRequest, name: &str) -> Result<HttpResponse, Failure> {
    let Some(file) = FILES.iter().find(|file| file.name == name) else {
        return Err(Failure::new(Kind::NoRoute, "the page has no such file").hint("the page is at /"));
    };
    let mut response = file.text.answer(request);
    response.headers_mut().insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::FILES;
    use std::path::Path;

    #[test]
    fn every_file_of_the_folder_is_served_and_nothing_is_inline() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("resources/page");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(FILES.iter().any(|f| f.name == name), "{name} is not in the list of files");
        }
        for file in FILES.iter() {
            for never in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
                assert!(!file.text.text().contains(never), "{}: {never}", file.name);
            }
            assert!(!file.text.text().contains("https://"), "{} names another host", file.name);
        }
        let page = FILES.iter().find(|f| f.name == super::START).unwrap().text.text();
        for never in ["<style", "style=", "onclick", "<script>"] {
            assert!(!page.contains(never), "{never} would be refused by the content security policy");
        }
    }
}
