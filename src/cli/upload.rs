//! `berth policy push`: uploads a policy and its signature, with progress on a terminal.

use crate::arguments::{ReasonArgs, read_file};
use crate::client::Client;
use crate::names::{name_with_digest, short_digest};
use crate::output::{Out, warn};
use anyhow::bail;
use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use berth_api::{MODULE_BYTES_MAX, Policy, PolicyDetail, PolicyList};
use clap::Args;
use std::io::{IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// How often the progress line is written.
const PROGRESS_EVERY: Duration = Duration::from_millis(200);
/// Bytes written to the socket at a time: small, so that the progress is close to what was sent.
const CHUNK_BYTES: usize = 64 * 1024;
/// Largest signature file, bytes: 64 in base64, with room for line ends.
const SIGNATURE_FILE_BYTES_MAX: u64 = 1024;

/// `berth policy push`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Where the daemon's configuration has trustedKeys, a policy must be signed by one of them:
  openssl genpkey -algorithm ed25519 -out release.pem  Once; keep it off the nodes
  openssl pkey -in release.pem -pubout                 Goes into trustedKeys
  openssl pkeyutl -sign -rawin -inkey release.pem -in p.wasm -out p.wasm.sig
  berth policy push p.wasm --signature p.wasm.sig")]
pub struct PushArgs {
    /// A WebAssembly component of the world berth:policy, or a core module
    pub file: PathBuf,
    /// An Ed25519 signature over the file's bytes: 64 bytes as openssl writes them, or in base64
    #[arg(long, value_name = "FILE")]
    pub signature: Option<PathBuf>,
    /// The person behind the change, and the reason.
    #[command(flatten)]
    pub word: ReasonArgs,
}

pub(crate) fn run(args: &PushArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let module = read_file(&args.file, u64::try_from(MODULE_BYTES_MAX)?)?;
    let signature = args.signature.as_deref().map(read_signature).transpose()?;
    let signature = signature.map(|signature| BASE64.encode(signature));
    let length = module.len().to_string();
    let mut headers = vec![("content-type", "application/wasm"), ("content-length", length.as_str())];
    headers.extend(signature.as_deref().map(|text| ("berth-signature", text)));
    let path = format!("/policies{}", args.word.query());
    let sent = AtomicUsize::new(0);
    let mut counted = Counted { rest: &module, sent: &sent };
    let mut upload = || client.upload::<PolicyDetail>(&path, &headers, &mut counted);
    // A pipe or a log gets no progress line, which is written over and over.
    let (new, policy) = if std::io::stderr().is_terminal() {
        watched(upload, &mut std::io::stderr(), &sent, module.len())?
    } else {
        upload()?
    };
    // The upload succeeded whether or not the list can be fetched.
    let known = client.get::<PolicyList>("/policies").map(|list| list.items).unwrap_or_default();
    let is_other = |p: &Policy| p.name == policy.policy.name && p.digest != policy.policy.digest;
    let others: Vec<Policy> = known.into_iter().filter(is_other).collect();
    out.answer(&policy, |p| {
        let p = &p.policy;
        let how = if new { "was uploaded and is not active yet: `berth policy try` shows what it would do, and a stack that names it activates it" } else { "was uploaded before; its files are complete" };
        let signed = p.signed_by.as_ref().map(|by| format!(", signed by {by}")).unwrap_or_default();
        format!("{} {}{signed} {how}\n{}", name_with_digest(p), p.version, entry(p, &others))
    })?;
    if let Some(warning) = warning(&policy.policy, &others) {
        warn(&warning);
    }
    Ok(())
}

/// A stack entry that names this version, if its name alone means another one.
fn entry(policy: &Policy, others: &[Policy]) -> String {
    if others.is_empty() || policy.shipped {
        return String::new();
    }
    let (name, digest) = (&policy.name, short_digest(&policy.digest));
    format!(
        "{name} has other versions here; this one is {name}@{digest}, and in a stack file\n- policy: {name}\n  digest: {digest}\n"
    )
}

fn warning(policy: &Policy, others: &[Policy]) -> Option<String> {
    (!policy.shipped && others.iter().any(|other| other.shipped))
        .then(|| shipped_name(&policy.name, &name_with_digest(policy)))
}

/// The warning for an uploaded policy that has the name of a shipped one.
pub fn shipped_name(name: &str, label: &str) -> String {
    format!(
        "{name} is also the name of a shipped policy, and the name alone selects that one: use {label} or rename yours"
    )
}

/// The signature in a file: 64 bytes, or those bytes in base64.
///
/// # Errors
/// If the file cannot be read, or has something else.
pub fn read_signature(file: &Path) -> anyhow::Result<[u8; 64]> {
    let bytes = read_file(file, SIGNATURE_FILE_BYTES_MAX)?;
    let raw = <[u8; 64]>::try_from(bytes.as_slice()).ok();
    let text = || {
        let text: String = std::str::from_utf8(&bytes).ok()?.split_whitespace().collect();
        <[u8; 64]>::try_from(BASE64.decode(text).ok()?).ok()
    };
    match raw.or_else(text) {
        Some(signature) => Ok(signature),
        None => bail!(
            "{} is not an Ed25519 signature: 64 bytes, as `openssl pkeyutl -sign -rawin` writes them, or those bytes in base64",
            file.display()
        ),
    }
}

/// A reader that counts the bytes read.
struct Counted<'m> {
    rest: &'m [u8],
    sent: &'m AtomicUsize,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let most = into.len().min(CHUNK_BYTES);
        let count = self.rest.read(&mut into[..most])?;
        self.sent.fetch_add(count, Ordering::Relaxed);
        Ok(count)
    }
}

/// Runs the upload and shows its progress in one line.
fn watched<T>(
    work: impl FnOnce() -> T,
    screen: &mut (impl Write + Send),
    sent: &AtomicUsize,
    total: usize,
) -> T {
    let (done, watch) = channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut all_since = None;
            while let Err(RecvTimeoutError::Timeout) = watch.recv_timeout(PROGRESS_EVERY) {
                let sent = sent.load(Ordering::Relaxed);
                if sent >= total {
                    all_since.get_or_insert_with(Instant::now);
                }
                let seconds = all_since.map(|since| since.elapsed().as_secs());
                // A closed terminal does not stop the upload.
                let _ =
                    write!(screen, "\r\u{1b}[K{}", line(sent, total, seconds)).and_then(|()| screen.flush());
            }
            let _ = write!(screen, "\r\u{1b}[K").and_then(|()| screen.flush());
        });
        let answer = work();
        drop(done);
        answer
    })
}

/// The progress line of an upload; `compiling_s`: seconds since all bytes were sent.
fn line(sent: usize, total: usize, compiling_s: Option<u64>) -> String {
    match compiling_s {
        Some(seconds) => format!("compiling ... {seconds} s"),
        None => {
            let percent = sent.saturating_mul(100).checked_div(total).unwrap_or(100);
            format!("sent {} of {} KiB ({percent} %)", sent / 1024, total.div_ceil(1024))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use std::sync::Arc;

    #[test]
    fn progress_shows_the_bytes_sent_and_then_the_compilation() {
        assert_eq!(line(512 * 1024, 2 * 1024 * 1024, None), "sent 512 of 2048 KiB (25 %)");
        assert_eq!(line(0, 0, None), "sent 0 of 0 KiB (100 %)");
        assert_eq!(line(5, 5, Some(12)), "compiling ... 12 s");
    }

    /// A terminal whose text the test reads.
    #[derive(Clone, Default)]
    struct Screen(Arc<Mutex<Vec<u8>>>);

    impl Screen {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_line_is_there_while_it_works_and_gone_after() {
        let module = vec![7; 200_000];
        let sent = AtomicUsize::new(0);
        let screen = Screen::default();
        let mut counted = Counted { rest: &module, sent: &sent };
        let work = || {
            let mut read = Vec::new();
            counted.read_to_end(&mut read).unwrap();
            let until = Instant::now() + Duration::from_secs(300);
            while !screen.text().contains("compiling ... ") {
                assert!(Instant::now() < until, "{:?}", screen.text());
                std::thread::yield_now();
            }
            read
        };
        assert_eq!(watched(work, &mut screen.clone(), &sent, module.len()), module);
        assert!(screen.text().ends_with("\r\u{1b}[K"), "{:?}", screen.text());
    }

    #[test]
    fn a_signature_is_taken_raw_or_in_base64() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, bytes: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            path
        };
        let wanted = BASE64.encode([9; 64]);
        assert_eq!(read_signature(&write("raw", &[9; 64])).unwrap(), [9; 64]);
        assert_eq!(read_signature(&write("text", format!("{wanted}\n").as_bytes())).unwrap(), [9; 64]);
        let says = read_signature(&write("short", &[9; 63])).unwrap_err().to_string();
        assert!(says.contains("openssl pkeyutl"), "{says}");
    }
}
