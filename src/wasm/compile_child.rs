//! The compiler's process: takes what it does not need away from itself, reads a module, answers
//! one frame.
//!
//! Compiling has no meter: a module of 300 kB can keep Cranelift busy for 17 s and 200 MB, and a bug
//! in the compiler would be met by whoever looks for one. So it runs apart, with the limits of an
//! operating system, and with nothing in reach: no environment, no files, no network, no privileges
//! to gain.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use landlock::{ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetStatus, Scope};
use rustix::process::{DumpableBehavior, Resource, Rlimit, Signal};

use super::engine;
use super::fault::words_of;
use super::frame::Reply;
use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};
use super::whole;

/// The first argument of a program that is started to compile.
pub(super) const ARGUMENT: &str = "__compile-policy";
/// What this process says on standard error that is for the daemon's log. Rust's own `note: ` lines, which
/// follow a panic, are not.
pub(super) const NOTE: &str = "berth-compiler-note: ";

/// Open files: standard input, output and error.
const FILES_MAX: u64 = 3;

/// Does the work of the compiler's process if this one was started for it: call it first in `main`,
/// and return the code if there is one. The policies of a program that does not cannot be compiled,
/// since the compiler is the program itself.
#[must_use]
pub fn compiler_process() -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ARGUMENT {
        return None;
    }
    let code = match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(words) => {
            say(&words);
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
    std::panic::set_hook(Box::new(|panic| say(&one_line(&panic.to_string()))));
    close_files();
    restrict(cpu_s, memory_bytes)?;
    let mut module = Vec::new();
    let limit = MODULE_BYTES_MAX as u64;
    let input = std::io::stdin().lock().take(limit + 1).read_to_end(&mut module);
    input.map_err(|error| format!("cannot read the module: {error}"))?;
    let frame = compile_or_refuse(module).encode();
    let mut output = std::io::stdout().lock();
    let written = output.write_all(&frame).and_then(|()| output.flush());
    written.map_err(|error| format!("cannot answer: {error}"))
}

/// Files that the daemon's libraries opened without close-on-exec.
fn close_files() {
    // SAFETY: nothing in this process owns a file yet but the standard three, which stay open: it is
    // the first thing that it does, on its only thread.
    #[allow(unsafe_code)]
    let closed = unsafe { libc::close_range(3, libc::c_uint::MAX, 0) };
    if closed != 0 {
        note("open files of the daemon could not be closed");
    }
}

/// Gives up what compiling does not need. Memory and processor time must be limited; the rest stands
/// in the way of somebody who has already taken the compiler over, and is told where it cannot be.
fn restrict(cpu_s: u64, memory_bytes: u64) -> Result<(), String> {
    let must = |what: &str, result: rustix::io::Result<()>| {
        result.map_err(|error| format!("cannot limit the compiler's {what}: {error}"))
    };
    let should = |what: &str, result: rustix::io::Result<()>| {
        if let Err(error) = result {
            note(&format!("{what}: {error}"));
        }
    };
    must("memory", limit(Resource::As, memory_bytes, memory_bytes))?;
    // The first makes SIGXCPU, which tells the daemon why; the second makes SIGKILL.
    must("processor time", limit(Resource::Cpu, cpu_s, cpu_s + 1))?;
    should("core dumps stay on", limit(Resource::Core, 0, 0));
    should("it may write files", limit(Resource::Fsize, 0, 0));
    should("it may start processes", limit(Resource::Nproc, 0, 0));
    // If the daemon dies, nobody waits for the answer.
    let dies = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    should("it outlives the daemon", dies);
    let hidden = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    should("other processes may trace it", hidden);
    should("it may gain privileges", rustix::thread::set_no_new_privs(true));
    if !no_files_and_network() {
        note("this Linux has no landlock, so only its rights keep the compiler from files");
    }
    // Last, since landlock opens one.
    should("it may open files", limit(Resource::Nofile, FILES_MAX, FILES_MAX));
    Ok(())
}

/// At most what the system lets this process have.
fn limit(resource: Resource, soft: u64, hard: u64) -> rustix::io::Result<()> {
    let most = rustix::process::getrlimit(resource).maximum.unwrap_or(u64::MAX);
    let new = Rlimit { current: Some(soft.min(most)), maximum: Some(hard.min(most)) };
    rustix::process::setrlimit(resource, new)
}

/// A ruleset without a rule: nothing is allowed. Parts that this Linux does not know are left out.
fn no_files_and_network() -> bool {
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V6))
        .and_then(|ruleset| ruleset.handle_access(AccessNet::from_all(ABI::V6)))
        .and_then(|ruleset| ruleset.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(landlock::RulesetCreated::restrict_self);
    status.is_ok_and(|status| status.ruleset != RulesetStatus::NotEnforced)
}

/// What this process is for; the daemon's own runs none of it. A library that panics over a module has
/// found what it did not expect there: that is the module's fault, and not the daemon's trouble.
pub(super) fn compile_or_refuse(module: Vec<u8>) -> Reply {
    let bytes = module.len();
    // The module is gone either way, and whatever else was touched ends with this process. What the panic
    // says is of the library's inside; whoever looks for a bug in it finds it on standard error.
    catch_unwind(AssertUnwindSafe(|| compile(module))).unwrap_or_else(|_| {
        Reply::Refused(format!(
            "the compiler cannot make sense of its {bytes} bytes: the file is damaged, or its tools made it wrong; \
             copy it or build it again"
        ))
    })
}

fn compile(module: Vec<u8>) -> Reply {
    if module.len() > MODULE_BYTES_MAX {
        return Reply::Refused(format!("more than {MODULE_BYTES_MAX} bytes"));
    }
    if let Err(words) = whole::check(&module) {
        return Reply::Refused(words);
    }
    let sent = module.starts_with(COMPONENT);
    let component = match component(module) {
        Ok(component) => component,
        Err(words) => return Reply::Refused(words),
    };
    let compiled = engine::compiler().and_then(|engine| engine.precompile_component(&component));
    match compiled {
        Ok(artifact) if artifact.len() > ARTIFACT_BYTES_MAX || component.len() > MODULE_BYTES_MAX => {
            let mib = ARTIFACT_BYTES_MAX >> 20;
            Reply::TooCostly(format!("it becomes more than {mib} MiB of machine code"))
        }
        // Whoever sent a component has it: it does not come back.
        Ok(artifact) => Reply::Compiled { component: (!sent).then_some(component), artifact },
        Err(error) if words_of(&error).contains("os error 12") => {
            Reply::TooCostly("it needs more memory than the compiler may have".to_owned())
        }
        Err(error) => Reply::Refused(words_of(&error)),
    }
}

/// What a core module and a component begin with: the magic number, version and layer.
pub(super) const CORE: &[u8] = b"\0asm\x01\0\0\0";
pub(super) const COMPONENT: &[u8] = b"\0asm\x0d\0\x01\0";

/// A component as it is; a core module that carries its world (as wit-bindgen leaves it there)
/// becomes one.
fn component(module: Vec<u8>) -> Result<Vec<u8>, String> {
    if module.starts_with(COMPONENT) {
        return Ok(module);
    }
    if !module.starts_with(CORE) {
        return Err("it is no WebAssembly; upload a component, or a core module".to_owned());
    }
    let words = |error: anyhow::Error| format!("{error:#}").replace('\n', " ");
    let (stripped, _) = wit_component::metadata::decode(&module).map_err(words)?;
    if stripped.is_none() {
        return Err("it is a core module that does not say which world it is of; build it with \
             wit-bindgen, or make a component of it"
            .to_owned());
    }
    wit_component::ComponentEncoder::default()
        .module(&module)
        .and_then(|mut encoder| encoder.encode())
        .map_err(words)
}

/// A module's own text may be in it, which must not look like lines of ours.
fn one_line(words: &str) -> String {
    words.replace(char::is_control, " ")
}

fn note(words: &str) {
    say(&format!("{NOTE}{words}"));
}

fn say(words: &str) {
    // If nobody listens, there is nobody to tell that.
    let _ = writeln!(std::io::stderr(), "{words}");
}
