//! The compiler process: restricts itself, reads a module and writes one frame.
//!
//! Compilation cannot be metered: a module of 300 kB can take Cranelift 17 s and 200 MB, and a module may exploit
//! a bug of the compiler. So it runs in a process of its own, with the operating system's limits and without
//! environment, files, network or a way to gain privileges.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetStatus, Scope};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};

use super::engine;
use super::fault::error_chain;
use super::frame::Reply;
use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};
use super::truncation;

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
    if let Err(reason) = truncation::check(&module) {
        return Reply::Refused(reason);
    }
    let is_component = module.starts_with(COMPONENT);
    let component = match component(module) {
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
        // ENOMEM.
        Err(error) if error_chain(&error).contains("os error 12") => {
            Reply::TooCostly("it needs more memory than the compiler may have".to_owned())
        }
        Err(error) => Reply::Refused(error_chain(&error)),
    }
}

/// The header of a core module: magic number, version and layer.
pub(super) const CORE: &[u8] = b"\0asm\x01\0\0\0";
/// The header of a component.
pub(super) const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

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
        return Err("it is a core module without a world; build it with wit-bindgen or convert it to a \
             component"
            .to_owned());
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
