//! The compiler process: restricts itself, reads a module and writes one frame, the encoded [`Reply`].
//!
//! Compilation cannot be metered: a module of 300 kB can take Cranelift 17 s and 200 MB, and a module may exploit
//! a bug of the compiler. So it runs in a process of its own, with the operating system's limits and without
//! environment, files, network or a way to gain privileges.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetStatus, Scope};
use rustix::io::Errno;
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};

use super::engine;
use super::fault::error_chain;
use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};

/// The first argument of a compiler process.
pub(super) const ARGUMENT: &str = "__compile-policy";
/// Prefix of the lines on standard error that are for the daemon's log. Differs from the `note: ` lines that Rust
/// prints after a panic.
pub(super) const NOTE: &str = "berth-compiler-note: ";

/// Open files: standard input, output and error.
const FILES_MAX: u64 = 3;

/// Runs the compiler if this process was started as one. Call it first in `main`, and return the exit code if there
/// is one. Without that call a program cannot compile policies, since it starts itself as the compiler.
#[must_use]
pub fn compiler_process() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let code = match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            print_error(&error);
            ExitCode::FAILURE
        }
    };
    Some(code)
}

fn run(mut arguments: impl Iterator<Item = OsString>) -> Result<(), String> {
    let mut number = || -> Option<u64> { arguments.next()?.to_str()?.parse().ok() };
    let (Some(cpu_s), Some(memory_bytes)) = (number(), number()) else {
        return Err(format!("usage: {ARGUMENT} CPU-SECONDS MEMORY-BYTES"));
    };
    std::panic::set_hook(Box::new(|panic| print_error(&one_line(&panic.to_string()))));
    close_files();
    restrict(cpu_s, memory_bytes)?;
    let mut module = Vec::new();
    let limit = MODULE_BYTES_MAX as u64;
    let input = std::io::stdin().lock().take(limit + 1).read_to_end(&mut module);
    input.map_err(|error| format!("cannot read the module: {error}"))?;
    let frame = compile_or_refuse(module).encode();
    let mut output = std::io::stdout().lock();
    let written = output.write_all(&frame).and_then(|()| output.flush());
    written.map_err(|error| format!("cannot write the reply: {error}"))
}

/// Closes files that the daemon's libraries opened without close-on-exec.
fn close_files() {
    // SAFETY: at the start of the process, on its only thread, nothing owns a file except the standard three,
    // which are not closed.
    #[allow(unsafe_code)]
    let closed = unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    if closed != 0 {
        print_note("open files of the daemon could not be closed");
    }
}

/// Restricts this process to what compilation needs. The limits on memory and processor time are mandatory. The
/// others contain a compromised compiler; one that cannot be set is noted in the log.
fn restrict(cpu_s: u64, memory_bytes: u64) -> Result<(), String> {
    let must = |what: &str, result: rustix::io::Result<()>| {
        result.map_err(|error| format!("cannot limit the compiler's {what}: {error}"))
    };
    let should = |what: &str, result: rustix::io::Result<()>| {
        if let Err(error) = result {
            print_note(&format!("{what}: {error}"));
        }
    };
    must("memory", limit(Resource::As, memory_bytes, memory_bytes))?;
    // The soft limit raises SIGXCPU, from which the daemon sees the reason; the hard limit raises SIGKILL.
    must("processor time", limit(Resource::Cpu, cpu_s, cpu_s + 1))?;
    should("core dumps remain enabled", limit(Resource::Core, 0, 0));
    should("it may write files", limit(Resource::Fsize, 0, 0));
    should("it may start processes", limit(Resource::Nproc, 0, 0));
    // Without the daemon nothing reads the reply.
    let death_signal = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    should("it outlives the daemon", death_signal);
    let not_dumpable = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    should("other processes may trace it", not_dumpable);
    should("it may gain privileges", rustix::thread::set_no_new_privs(true));
    if !deny_files_and_network() {
        print_note(
            "this Linux has no Landlock, so only file permissions restrict the compiler's file access",
        );
    }
    // Last, since Landlock opens a file.
    should("it may open files", limit(Resource::Nofile, FILES_MAX, FILES_MAX));
    Ok(())
}

/// Sets a limit, at most the present hard limit.
fn limit(resource: Resource, soft: u64, hard: u64) -> rustix::io::Result<()> {
    let present = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let new = Rlimit { current: Some(soft.min(present)), maximum: Some(hard.min(present)) };
    rustix::process::setrlimit(resource, new)
}

/// Enforces a Landlock ruleset without rules, which allows nothing. Omits rights that this Linux does not know.
/// Returns whether any right is restricted.
fn deny_files_and_network() -> bool {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V6))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(ABI::V6)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    status.is_ok_and(|status| status.ruleset != RulesetStatus::NotEnforced)
}

/// Compiles a module, never in the daemon's own process. Refuses a module on which a library panics.
pub(super) fn compile_or_refuse(module: Vec<u8>) -> Reply {
    let bytes = module.len();
    // Unwind safe: the process exits after the reply. The panic's message is about the library's code and goes to
    // standard error only.
    catch_unwind(AssertUnwindSafe(|| compile(module))).unwrap_or_else(|_| {
        Reply::Refused(format!(
            "the compiler cannot read its {bytes} bytes: the file is damaged or was built wrong; copy it or build it \
             again"
        ))
    })
}

fn compile(module: Vec<u8>) -> Reply {
    if module.len() > MODULE_BYTES_MAX {
        return Reply::Refused(format!("more than {MODULE_BYTES_MAX} bytes"));
    }
    let is_component = module.starts_with(COMPONENT);
    let component = match check_complete(&module).and_then(|()| component(module)) {
        Ok(component) => component,
        Err(reason) => return Reply::Refused(reason),
    };
    let compiled = engine::compiler().and_then(|engine| engine.precompile_component(&component));
    match compiled {
        Ok(artifact) if artifact.len() > ARTIFACT_BYTES_MAX || component.len() > MODULE_BYTES_MAX => {
            let mib = ARTIFACT_BYTES_MAX >> 20;
            Reply::TooCostly(format!("it compiles to more than {mib} MiB of machine code"))
        }
        // The daemon has the component already if it sent one.
        Ok(artifact) => Reply::Compiled { component: (!is_component).then_some(component), artifact },
        Err(error) if is_out_of_memory(&error) => {
            Reply::TooCostly("it needs more memory than the compiler may have".to_owned())
        }
        Err(error) => Reply::Refused(error_chain(&error)),
    }
}

/// Whether the system refused memory. wasmtime passes on the error of `std` or of rustix.
fn is_out_of_memory(error: &wasmtime::Error) -> bool {
    error.chain().any(|cause| {
        let by_std = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        by_std == Some(libc::ENOMEM) || cause.downcast_ref() == Some(&Errno::NOMEM)
    })
}

/// The header of a core module: magic number, version and layer.
const CORE: &[u8] = b"\0asm\x01\0\0\0";
/// The header of a component.
const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

/// Returns a component unchanged; converts a core module that includes its world, as those of wit-bindgen do.
fn component(module: Vec<u8>) -> Result<Vec<u8>, String> {
    if module.starts_with(COMPONENT) {
        return Ok(module);
    }
    if !module.starts_with(CORE) {
        return Err("it is not WebAssembly; upload a component or a core module".to_owned());
    }
    let message = |error: anyhow::Error| format!("{error:#}").replace('\n', " ");
    let (stripped, _) = wit_component::metadata::decode(&module).map_err(message)?;
    if stripped.is_none() {
        let reason =
            "it is a core module without a world; build it with wit-bindgen or convert it to a component";
        return Err(reason.to_owned());
    }
    wit_component::ComponentEncoder::default()
        .module(&module)
        .and_then(|mut encoder| encoder.encode())
        .map_err(message)
}

/// A message without line breaks: it may include text of the module, which must not imitate lines of this process.
fn one_line(message: &str) -> String {
    message.replace(char::is_control, " ")
}

fn print_note(note: &str) {
    print_error(&format!("{NOTE}{note}"));
}

fn print_error(line: &str) {
    // There is no other place to report a failure.
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// Longest frame: both fields at their limits, a kind byte and two lengths.
pub(super) const FRAME_BYTES_MAX: usize = MODULE_BYTES_MAX + ARTIFACT_BYTES_MAX + 1 + 2 * 8;

const COMPILED: u8 = 1;
const REFUSED: u8 = 2;
const TOO_COSTLY: u8 = 3;

/// The compiler's reply.
///
/// Its frame is a kind byte and its fields: a text for [`Reply::Refused`] and [`Reply::TooCostly`], the component and
/// the artifact for [`Reply::Compiled`]. The component is empty if the module was one already. A field is its length
/// (eight bytes, little-endian) and its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The module was compiled.
    Compiled {
        /// The component that was made from a core module; `None` if the module is a component.
        component: Option<Vec<u8>>,
        /// The compiled code that wasmtime loads.
        artifact: Vec<u8>,
    },
    /// The module is not a policy, for this reason.
    Refused(String),
    /// Compilation exceeds this limit.
    TooCostly(String),
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, fields): (u8, Vec<&[u8]>) = match self {
            Self::Compiled { component, artifact } => {
                (COMPILED, vec![component.as_deref().unwrap_or_default(), artifact])
            }
            Self::Refused(reason) => (REFUSED, vec![reason.as_bytes()]),
            Self::TooCostly(limit) => (TOO_COSTLY, vec![limit.as_bytes()]),
        };
        let mut frame = vec![kind];
        for field in fields {
            frame.extend_from_slice(&(field.len() as u64).to_le_bytes());
            frame.extend_from_slice(field);
        }
        frame
    }

    /// `None` unless `frame` is exactly one complete frame.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (&kind, mut rest) = frame.split_first()?;
        let mut field = || {
            let (length, after) = rest.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (field, after) = after.split_at_checked(length)?;
            rest = after;
            Some(field.to_vec())
        };
        let reply = match kind {
            COMPILED => Self::Compiled {
                component: Some(field()?).filter(|component| !component.is_empty()),
                artifact: field()?,
            },
            REFUSED => Self::Refused(String::from_utf8(field()?).ok()?),
            TOO_COSTLY => Self::TooCostly(String::from_utf8(field()?).ok()?),
            _ => return None,
        };
        rest.is_empty().then_some(reply)
    }
}

/// Longest encoding of a section's size: a 32-bit LEB128 number.
const SIZE_BYTES_MAX: usize = 5;

/// Checks that all sections of a core module or a component are complete: incomplete copies are the usual damage, and
/// the parsers' errors do not name them. A section begins with a byte for its kind and its size in bytes; the content
/// is left to the parser.
///
/// # Errors
/// If the file ends within a section. A file that was truncated between two sections is not detected.
fn check_complete(module: &[u8]) -> Result<(), String> {
    let bytes = module.len();
    if bytes == 0 {
        return Err("the file is empty: build it or copy it again".to_owned());
    }
    let magic = [CORE, COMPONENT];
    if magic.iter().any(|magic| bytes < magic.len() && magic.starts_with(module)) {
        return Err(truncated(bytes, "it ends within the file header"));
    }
    if !magic.iter().any(|magic| module.starts_with(magic)) {
        // Not WebAssembly, which the caller checks.
        return Ok(());
    }
    let mut at = CORE.len();
    while at < bytes {
        // The size follows the byte of the kind.
        let Some((size, content)) = section_size(module, at + 1) else {
            // Other invalid sizes are left to the parser.
            let is_truncated = bytes - at <= SIZE_BYTES_MAX;
            return if is_truncated {
                Err(truncated(bytes, "it ends within a section header"))
            } else {
                Ok(())
            };
        };
        let end = content.saturating_add(size);
        if end > bytes {
            return Err(truncated(bytes, &format!("{} more must follow", end - bytes)));
        }
        at = end;
    }
    Ok(())
}

/// The size that is encoded at `at`, and the offset behind it. `None` if it is invalid or the file ends within it.
fn section_size(module: &[u8], at: usize) -> Option<(usize, usize)> {
    let mut size = 0_usize;
    for (index, byte) in module.get(at..)?.iter().take(SIZE_BYTES_MAX).enumerate() {
        size |= usize::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((size, at + index + 1));
        }
    }
    None
}

fn truncated(bytes: usize, detail: &str) -> String {
    format!(
        "the file is not a complete WebAssembly component: it has {bytes} bytes and breaks off ({detail}); copy it or \
         build it again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_decoded_as_encoded_and_only_if_complete() {
        let converted = Reply::Compiled { component: Some(vec![1, 2, 3]), artifact: vec![] };
        let unconverted = Reply::Compiled { component: None, artifact: vec![4] };
        for reply in [converted, unconverted, Reply::Refused("why".into()), Reply::TooCostly("\u{e9}".into())]
        {
            let frame = reply.encode();
            assert_eq!(Reply::decode(&frame), Some(reply));
            for end in 0..frame.len() {
                assert_eq!(Reply::decode(&frame[..end]), None);
            }
            assert_eq!(Reply::decode(&[&frame[..], b"x"].concat()), None);
        }
        assert_eq!(Reply::decode(&[COMPILED, 255, 255, 255, 255, 255, 255, 255, 255]), None);
    }

    fn shipped_component() -> Vec<u8> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies-wasm/prebuilt/exclusive.wasm");
        std::fs::read(file).unwrap()
    }

    #[test]
    fn a_truncated_file_is_reported() {
        let complete = shipped_component();
        assert_eq!(check_complete(&complete), Ok(()));
        let lengths = (1..200).chain((200..complete.len()).step_by(997)).chain([complete.len() - 1]);
        let mut reported = 0;
        for length in lengths {
            let Err(error) = check_complete(&complete[..length]) else { continue };
            reported += 1;
            assert!(error.contains(&format!("it has {length} bytes and breaks off")), "{error}");
            assert!(error.contains("copy it or build it again"), "{error}");
        }
        // All except those that end between two sections.
        assert!(reported > 280, "{reported}");
        let error = check_complete(&complete[..complete.len() - 7]).unwrap_err();
        assert!(error.contains("7 more must follow"), "{error}");
    }

    #[test]
    fn other_files_than_webassembly_are_not_checked() {
        assert_eq!(check_complete(b"hello"), Ok(()));
        assert_eq!(check_complete(CORE), Ok(()));
        assert!(check_complete(b"").unwrap_err().contains("empty"));
    }

    #[test]
    fn the_message_of_a_parser_panic_is_not_shown() {
        // A core module with a section `component-type` whose size exceeds it: the decoder panics.
        let mut module = CORE.to_vec();
        let name = b"component-type:x";
        let body = [&[u8::try_from(name.len()).unwrap()][..], name, &[0xff; 3]].concat();
        module.push(0);
        module.push(u8::try_from(body.len()).unwrap());
        module.extend(body);
        let Reply::Refused(reason) = compile_or_refuse(module) else { panic!("it is accepted") };
        for word in ["range", "index", "panicked", "slice"] {
            assert!(!reason.contains(word), "{reason}");
        }
    }
}
