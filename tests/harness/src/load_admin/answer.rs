//! Where an answer ends, and no more than that: the client shares the processors with what it measures, so
//! nothing is unzipped or parsed as JSON. That answers are right is for the tests.

use anyhow::{Context as _, bail, ensure};

/// Largest head of an answer, bytes.
const HEAD_MAX: usize = 16 * 1024;

/// What is known of an answer that is whole.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) tag: Option<String>,
}

/// The answer, if all of it has come.
///
/// # Errors
/// If it is malformed, or longer than requested.
pub(crate) fn whole(bytes: &[u8]) -> anyhow::Result<Option<Answer>> {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        ensure!(bytes.len() <= HEAD_MAX, "a head of more than {HEAD_MAX} bytes");
        return Ok(None);
    };
    let (head, body) = (std::str::from_utf8(&bytes[..end])?, &bytes[end + 4..]);
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).context("no status line")?.parse()?;
    let (mut length, mut chunked, mut tag) = (None, false, None);
    for (name, value) in lines.filter_map(|line| line.split_once(':')) {
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            length = Some(value.parse::<usize>()?);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = value.eq_ignore_ascii_case("chunked");
        } else if name.eq_ignore_ascii_case("etag") {
            tag = Some(value.to_owned());
        }
    }
    let length = match length {
        // RFC 9110, 15.4.5: it has none.
        _ if status == 304 => Some(0),
        _ if chunked => chunks(body)?,
        Some(length) => Some(length),
        None => bail!("an answer without an end: {head}"),
    };
    let Some(length) = length.filter(|length| body.len() >= *length) else { return Ok(None) };
    ensure!(body.len() == length, "{} bytes after the end of an answer", body.len() - length);
    Ok(Some(Answer { status, tag }))
}

/// How long a body in chunks is; `None` while some are missing. Each is its length in hex, its bytes, and
/// an empty one is the last (RFC 9112, 7.1).
fn chunks(body: &[u8]) -> anyhow::Result<Option<usize>> {
    let mut at = 0;
    loop {
        let rest = &body[at.min(body.len())..];
        let Some(line) = rest.windows(2).position(|two| two == b"\r\n") else { return Ok(None) };
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line])?.trim(), 16)?;
        // Two line ends: after the length and after the bytes.
        at += line + 2 + size + 2;
        if size == 0 {
            return Ok(Some(at));
        }
    }
}
