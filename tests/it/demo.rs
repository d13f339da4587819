//! The demo tells its story to the end.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Where cargo puts the example: beside the folder of this test. `cargo test` builds it; `cargo test
/// --test it` alone does not.
fn built() -> Option<PathBuf> {
    let test = std::env::current_exe().unwrap();
    let demo = test.parent()?.parent()?.join("examples/demo");
    demo.exists().then_some(demo)
}

#[test]
fn the_demo_runs_to_its_end_and_refuses_nobody_it_should_not() {
    let Some(demo) = built() else {
        println!("not built here: `cargo build --example demo` makes it");
        return;
    };
    let mut command = Command::new(demo);
    command.arg("--once").stdin(Stdio::null()).env_remove("RUST_LOG");
    let output = command.output().unwrap();
    let (told, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{}\n{told}\n{said}", output.status);
    let last = told.lines().last().unwrap_or_default();
    let pods =
        last.strip_prefix("demo: ok pods=").and_then(|rest| rest.strip_suffix(" refused_unexpectedly=0"));
    let pods: u32 = pods.unwrap_or_else(|| panic!("{last:?} ends {told}")).parse().unwrap();
    assert!(pods > 0, "{told}");
}
