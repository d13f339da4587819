//! `berth policy`: what an operator does with policies, and what an author does.

use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;

/// Either names the policy: clap would show both as optional.
const TEST_USAGE: &str = "berth policy test [OPTIONS] <FILE> <SCENARIOS>...
       berth policy test [OPTIONS] --shipped <NAME> <SCENARIOS>...";

/// `berth policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// What an operator does with policies, on a running daemon.
    #[command(flatten)]
    Client(berth_cli::policy::PolicyCommand),
    /// Begin a policy of your own: a folder that builds and passes its test
    #[command(after_help = "\
Its README.md has the commands to build, check and test it, and to bring it to a node:
  berth policy new my-policy
  berth policy new my-policy --lang python --dir /tmp/my-policy")]
    New(NewPolicy),
    /// Say offline what a daemon would say of a policy at upload
    #[command(after_help = "\
Nothing is sent anywhere: the policy is checked, compiled and asked on this machine, by the daemon's
own rules. Exit code 1 if it is refused.
  berth policy check my_policy.wasm
  berth policy check my_policy.wasm --parameters '{\"shares\": 4}'
  berth policy check my_policy.wasm --parameters @parameters.json -o json")]
    Check {
        /// A WebAssembly component of the world berth:policy, or a core module
        file: PathBuf,
        /// Ask it with these, too: JSON, or @ and a file of it
        #[arg(long, value_name = "JSON|@FILE")]
        parameters: Option<String>,
    },
    /// Run scenario files against a policy, on simulated nodes
    #[command(override_usage = TEST_USAGE, after_help = "\
A scenario is a YAML file: a node, what happens, and what is expected. A folder stands for the .yaml
files in it. Exit code 1 if one fails.
  berth policy test my_policy.wasm scenarios/
  berth policy test --shipped timeslice scenarios/shares.yaml
One policy is tested: FILE, or with --shipped one that came with this program; every path is a scenario then.

policies-wasm/README.md of the sources describes the form; `berth policy new` writes a first one.")]
    Test {
        /// The policy; not with --shipped
        #[arg(value_name = "FILE", required_unless_present = "shipped")]
        file: Option<PathBuf>,
        /// Scenario files, or folders of them
        #[arg(value_name = "SCENARIOS")]
        scenarios: Vec<PathBuf>,
        /// A policy that came with this program, in place of FILE
        #[arg(long, value_name = "NAME")]
        shipped: Option<String>,
    },
}

/// `berth policy new`.
#[derive(Args, Clone, Debug)]
pub struct NewPolicy {
    /// What it is called: a DNS label such as `fill-first`
    pub name: String,
    /// The language that it is written in
    #[arg(long, value_enum, default_value_t)]
    pub lang: Lang,
    /// Where; must not be there yet [default: a folder of its name]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// Languages that `berth policy new` knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Lang {
    /// The smallest and fastest, with a kit and native tests
    #[default]
    Rust,
    /// By wit-bindgen and clang
    C,
    /// By componentize-qjs
    Js,
    /// By componentize-py
    Python,
}
