//! Repeated output (`--watch`), wide columns, and output for shells and pagers.

use crate::admin_bench::Bench;
use crate::cli::{berth, ran};
use crate::port::Port;
use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::{Arc, Mutex};

/// A running watch command; ended when dropped.
struct Looking {
    child: Child,
    seen: Arc<Mutex<String>>,
}

impl Looking {
    fn at(bench: &Bench, args: &[&str]) -> Self {
        let mut command = bench.command(args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let seen = Arc::<Mutex<String>>::default();
        let pipes: [Box<dyn std::io::Read + Send>; 2] =
            [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
        for pipe in pipes {
            let into = Arc::clone(&seen);
            std::thread::spawn(move || {
                for line in BufReader::new(pipe).lines().map_while(Result::ok) {
                    *into.lock().unwrap() += &(line + "\n");
                }
            });
        }
        Self { child, seen }
    }

    fn until(&self, words: &str, times: usize) {
        crate::wait::until_some(words, || {
            (self.seen.lock().unwrap().matches(words).count() >= times).then_some(())
        });
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_watched_command_is_repeated_and_prints_changes() {
    let mut bench = Bench::new(1);
    let port = Port::held();
    bench.start_at(&port);
    let looking = Looking::at(&bench, &["gpu", "list", "--watch=100ms"]);
    looking.until("INDEX", 1);
    bench.done(&["gpu", "cordon", "0", "--reason", "fan"]);
    looking.until("cordoned by admin (fan)", 1);
    // A daemon that is away is reported once and waited for.
    bench.api.take().unwrap().stop();
    looking.until("trying on", 1);
    bench.start_at(&port);
    looking.until("cordoned by admin (fan)", 2);
    bench.done(&["gpu", "uncordon", "0"]);
    looking.until("INDEX", 4);
    let seen = looking.seen.lock().unwrap();
    assert_eq!((seen.matches("INDEX").count(), seen.matches("trying on").count()), (4, 1), "{seen}");
    assert!(!seen.contains('\u{1b}'), "no terminal, no colours: {seen}");
}

#[test]
fn documents_of_repeated_output_are_separated() {
    let bench = Bench::new(1);
    let looking = Looking::at(&bench, &["gpu", "list", "-o", "yaml", "-w=100ms"]);
    looking.until("items:", 1);
    bench.done(&["gpu", "cordon", "0"]);
    looking.until("items:", 2);
    let seen = looking.seen.lock().unwrap().clone();
    let documents: Vec<serde_json::Value> =
        seen.split("---\n").map(|document| serde_saphyr::from_str(document).unwrap()).collect();
    let states: Vec<_> = documents.iter().map(|d| d["items"][0]["drain"]["state"].clone()).collect();
    assert_eq!(states, ["active", "cordoned"]);
}

#[test]
fn only_read_commands_are_repeated_and_not_too_often() {
    let bench = Bench::new(1);
    for args in [&["gpu", "cordon", "0", "--watch"][..], &["gpu", "list", "--watch=1ms"], &["openapi", "-w"]]
    {
        let ran = bench.berth(args);
        assert_eq!((ran.code, ran.out.as_str()), (2, ""), "{args:?}: {}", ran.err);
        assert!(ran.err.contains("--watch"), "{}", ran.err);
    }
    assert!(bench.done(&["gpu", "list"]).contains("active"), "nothing was cordoned");
    // A permanent error ends a watch command.
    assert_eq!(bench.berth(&["gpu", "show", "7", "--watch"]).code, 1);
}

#[test]
fn a_wide_terminal_shows_more_columns() {
    let bench = Bench::new(1);
    bench.allocate(0);
    for (list, more) in [("gpu", &["PROCESSES", "HEALTH SINCE"][..]), ("allocation", &["POD UID", "REASON"])]
    {
        let (narrow, wide) = (bench.done(&[list, "list"]), bench.done(&[list, "list", "-o", "wide"]));
        for column in more {
            assert!(wide.contains(column) && !narrow.contains(column), "{column}: {wide}");
        }
    }
}

#[test]
fn completions_and_manual_pages_have_every_command() {
    let commands = ["gpu", "allocation", "process", "decision", "policy", "config", "node", "state", "token"];
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let ran = ran(berth(&["completions", shell]));
        assert_eq!(ran.code, 0, "{}", ran.err);
        for command in commands {
            assert!(ran.out.contains(command), "{shell} does not complete {command}");
        }
    }
    assert_eq!(ran(berth(&["completions", "tcsh"])).code, 2);
    assert!(ran(berth(&["man"])).out.contains(".TH berth 1"));
    let dir = tempfile::tempdir().unwrap();
    let into = dir.path().join("man1");
    let ran = ran(berth(&["man", "--into", into.to_str().unwrap()]));
    assert_eq!(ran.code, 0, "{}", ran.err);
    for command in commands {
        let page = std::fs::read_to_string(into.join(format!("berth-{command}.1"))).unwrap();
        assert!(page.contains(".SH SYNOPSIS"), "{command}: {page}");
    }
    assert!(into.join("berth-gpu-drain.1").is_file());
}
