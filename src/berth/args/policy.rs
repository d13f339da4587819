//! `berth policy`: commands for operators and for authors of policies.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// The two forms of the command; clap would show both FILE and NAME as optional.
const TEST_USAGE: &str = "berth policy test [OPTIONS] <FILE> <SCENARIOS>...
       berth policy test [OPTIONS] --shipped <NAME> <SCENARIOS>...";

/// `berth policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// Commands for operators, on a running daemon.
    #[command(flatten)]
    Client(berth_cli::policy::PolicyCommand),
    /// Create a folder with a new policy that builds and passes its test
    #[command(after_help = "\
Its README.md has the commands to build, check, test and upload it:
  berth policy new my-policy
  berth policy new my-policy --lang python --dir /tmp/my-policy")]
    New(NewPolicy),
    /// Check offline whether a daemon would accept a policy at upload
    #[command(after_help = "\
The policy is checked, compiled and called on this machine by the daemon's rules; nothing is sent.
Exit code 1 if it is refused.
  berth policy check my_policy.wasm
  berth policy check my_policy.wasm --parameters '{\"shares\": 4}'
  berth policy check my_policy.wasm --parameters @parameters.json -o json")]
    Check {
        /// A WebAssembly component of the world berth:policy, or a core module
        file: PathBuf,
        /// Call it with these parameters: JSON, or @ and a JSON file
        #[arg(long, value_name = "JSON|@FILE")]
        parameters: Option<String>,
    },
    /// Run scenario files against a policy, on simulated nodes
    #[command(override_usage = TEST_USAGE, after_help = "\
A scenario is a YAML file: a node, steps, and the expected results. A folder means all .yaml files in
it. Exit code 1 if one fails.
  berth policy test my_policy.wasm scenarios/
  berth policy test --shipped timeslice scenarios/shares.yaml
The tested policy is FILE, or with --shipped one that is built into this program; then every path is a scenario.

policies-wasm/README.md of the sources describes the format; `berth policy new` writes an example.")]
    Test {
        /// The policy; not with --shipped
        #[arg(value_name = "FILE", required_unless_present = "shipped")]
        file: Option<PathBuf>,
        /// Scenario files, or folders of them
        #[arg(value_name = "SCENARIOS")]
        scenarios: Vec<PathBuf>,
        /// A policy that is built into this program, in place of FILE
        #[arg(long, value_name = "NAME")]
        shipped: Option<String>,
    },
}

/// `berth policy new`.
#[derive(Args, Clone, Debug)]
pub struct NewPolicy {
    /// Its name: a DNS label such as `fill-first`
    pub name: String,
    /// Its programming language
    #[arg(long, value_enum, default_value_t)]
    pub lang: Lang,
    /// The new folder, which must not exist [default: the policy's name]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Languages of `berth policy new`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    /// The smallest and fastest, with an SDK and native tests
    #[default]
    Rust,
    /// With wit-bindgen and clang
    C,
    /// With componentize-qjs
    Js,
    /// With componentize-py
    Python,
}
