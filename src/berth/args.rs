//! The command line. The help text of a command describes it and shows examples.

use crate::state::StateCommand;
use berth_cli::command::ClientCommand;
use berth_cli::endpoint::ClientArgs;
use berth_config::ServeArgs;
use berth_observe::logs::LogFormat;
use berth_scenario::pack::PackArgs;
use berth_scenario::policy_new::NewPolicy;
use clap::{ArgAction, Parser, Subcommand};
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  berth node check                           What does this node need?
  berth config check /etc/berth/config.yaml  Would the daemon accept this file?
  berth gpu list                             GPUs, what is wrong, who is on them
  berth gpu drain 3 --wait                   Empty GPU 3, for a repair
Exit codes: 0 success, 1 refused or failed (a missing file, an unknown name, a \
refusal by the daemon), 2 bad usage.";

/// The two forms of `berth policy test`; clap would show both FILE and NAME as optional.
const TEST_USAGE: &str = "berth policy test [OPTIONS] <FILE> <SCENARIOS>...
       berth policy test [OPTIONS] --shipped <NAME> <SCENARIOS>...";

/// Shares and protects this node's GPUs: the daemon, and its commands
#[derive(Parser, Debug)]
#[command(
    name = "berth",
    version,
    after_help = EXAMPLES,
    disable_help_subcommand = true,
    // Replaced by the flag below, whose help is a screen also as `--help`.
    disable_help_flag = true
)]
pub struct Cli {
    /// Print help; `berth options` lists the connection flags
    #[arg(short, long, global = true, action = ArgAction::HelpShort, display_order = 1000)]
    pub help: Option<bool>,
    /// Access to a running daemon.
    #[command(flatten)]
    pub client: ClientArgs,
    /// The command.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the daemon on this node
    #[command(after_help = "\
Finds the GPUs, adopts the allocations of running pods, registers with the kubelet, \
and serves the admin API on loopback. Without a GPU or a kubelet it waits and logs \
that. Ends on SIGTERM. `berth options serve` prints all flags with their variables. A \
flag overrides its variable, and both override the file.
  berth serve --config /etc/berth/config.yaml
  berth serve --gpus sim:8xh100 --kubelet-dir /tmp/k --state-dir /tmp/s")]
    Serve(Box<ServeArgs>),
    /// Run the guard, the container runtime's plugin, on this node
    #[command(after_help = "\
A process of its own beside `berth serve`, since it needs root's rights on the node and \
must not end with the daemon. It shows the daemon which container got which allocation \
before the container runs, and when the container has ended. It needs containerd or \
CRI-O with NRI. Without it, or while it does not run, everything else works as before, \
unless `enforce.memory` is `require`. \
In the configuration file, `guard` sets its paths, and `enforce` and `bypass` set what it \
enforces; docs/guard.md and docs/enforcement.md describe it.
  berth guard
  berth guard --config /etc/berth/config.yaml")]
    Guard {
        /// The configuration file (YAML), as for `berth serve`
        #[arg(long, env = "BERTH_CONFIG", hide_env = true, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The namespace of Berth's own pods, which the guard neither changes nor refuses
        #[arg(long, env = "POD_NAMESPACE", hide_env = true, value_name = "NAME")]
        own_namespace: Option<String>,
        /// Format of the log [default: text]
        #[arg(long, env = "BERTH_LOG", hide_env = true, value_enum)]
        log: Option<LogFormat>,
    },
    /// Run the controller of the fleet: rolls SharingPolicies out
    #[command(after_help = "\
One process for the cluster, or several of which one works at a time (a Lease). It names \
the stack of each SharingPolicy in the GPUNodes of its nodes, a few at a time, and halts \
when nodes fail. Each node activates and judges the stack by itself; without a controller \
no further node is assigned a stack. In the configuration file, `fleet` sets the \
registries where tags are resolved, as for `berth serve`. docs/fleet.md describes it.
  berth controller
  berth controller --config /etc/berth/config.yaml
  berth controller --kubeconfig ~/.kube/config --namespace berth")]
    Controller {
        /// The configuration file (YAML), as for `berth serve`
        #[arg(long, env = "BERTH_CONFIG", hide_env = true, value_name = "FILE")]
        config: Option<PathBuf>,
        /// Kubeconfig for the API server, outside a pod; one that runs a program (exec) is refused
        #[arg(long, env = "BERTH_KUBECONFIG", hide_env = true, value_name = "FILE")]
        kubeconfig: Option<PathBuf>,
        /// The namespace of the Lease [default: that of the service account or kubeconfig]
        #[arg(long, env = "POD_NAMESPACE", hide_env = true, value_name = "NAME")]
        namespace: Option<String>,
        /// Format of the log [default: text]
        #[arg(long, env = "BERTH_LOG", hide_env = true, value_enum)]
        log: Option<LogFormat>,
    },
    /// Commands for a running daemon.
    #[command(flatten)]
    Client(ClientCommand),
    /// Write, test, upload and activate policies
    #[command(after_help = "\
new, check, pack and test need no daemon. A version is given by its name if only one has \
it, by its digest or the beginning of it, or by `name@digest`:
  berth policy list
  berth policy show timeslice     Which parameters does it have?
  berth policy push my-policy.wasm
  berth policy activate stack.yaml
  berth policy stack
  berth policy reset

`berth policy activate --help` shows a stack.yaml.")]
    Policy {
        /// The subcommand.
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Check a configuration file, or convert one of NVIDIA's
    Config {
        /// The subcommand.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Show the node, or check the daemon's requirements on it
    Node {
        /// The subcommand.
        #[command(subcommand)]
        command: NodeCommand,
    },
    /// Compare CDI specifications
    Cdi {
        /// The subcommand.
        #[command(subcommand)]
        command: CdiCommand,
    },
    /// Save, restore and check the allocation store of a stopped daemon
    #[command(after_help = "\
Stop the daemon first, or give a copy of its state folder:
  berth state verify
  berth state export > state.jsonl
  berth state import --state-dir /var/lib/berth-new state.jsonl
  berth state init    # the store is lost without an export: create an empty one

JSON lines: a header with the format and the number of records, then one record per \
line. The modules of uploaded policies and the token are not in the store: copy their \
files, or push the policies again.")]
    State {
        /// The subcommand.
        #[command(subcommand)]
        command: StateCommand,
    },
    /// Show or change the token of the admin API
    Token {
        /// The subcommand.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Print the admin API's OpenAPI description
    Openapi,
    /// Print the shell completions of `berth`
    #[command(after_help = "\
GPUs, policies and allocations are completed, too: the daemon is asked, with \
BERTH_SERVER and BERTH_TOKEN_FILE or with the flags on the line.
  source <(berth completions bash)
  berth completions zsh > ~/.zfunc/_berth
  berth completions fish > ~/.config/fish/completions/berth.fish")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the help of a command
    Help {
        /// The command, such as `gpu drain`
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Print the flags of the connection, or all flags of a command
    #[command(after_help = "\
Examples:
  berth options         For all commands that talk to a running daemon
  berth options serve   All flags of `berth serve`, with their variables")]
    Options {
        /// The command, such as `serve` or `node check`
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Print the manual page, or write those of all commands
    #[command(after_help = "\
Examples:
  berth man | man -l -
  berth man --into /usr/local/share/man/man1")]
    Man {
        /// The folder; created if it does not exist
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,
    },
}

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
The policy is checked, compiled and called on this machine by the daemon's rules, also \
on a simulated node; nothing is sent. Exit code 1 if it is refused.
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
    /// Pack a policy as an OCI artifact, in a registry or a folder
    Pack(PackArgs),
    /// Run scenario files against a policy, on simulated nodes
    #[command(override_usage = TEST_USAGE, after_help = "\
A scenario is a YAML file: a node, steps, and the expected results. A folder means all \
.yaml files in it. Exit code 1 if one fails.
  berth policy test my_policy.wasm scenarios/
  berth policy test --shipped timeslice scenarios/shares.yaml
The tested policy is FILE, or with --shipped one that is built into this program; then \
every path is a scenario. policies-wasm/README.md of the sources describes the format; \
`berth policy new` writes an example.")]
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

/// `berth config`.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Check a configuration file as the daemon would and list its errors
    #[command(after_help = "\
Lists all errors of the file, each with its line, and exits with 1 if there are any. \
Reads the token and TLS files, opens the GPUs, and runs the policies of its stack \
against them, as the daemon does at start.")]
    Check {
        /// The configuration file; `-` reads standard input
        file: PathBuf,
        /// Skip the token and TLS files and uploaded policies, for a machine that does not have them
        #[arg(long)]
        without_files: bool,
        /// Skip the GPUs, for a machine that has none
        #[arg(long)]
        without_gpus: bool,
    },
    /// Convert a configuration file of NVIDIA's device plugin; settings without an equivalent become comments
    FromNvidia {
        /// The file, `version: v1`; `-` reads standard input
        file: PathBuf,
    },
}

/// `berth token`.
#[derive(Subcommand, Clone, Copy, Debug)]
pub enum TokenCommand {
    /// Write a new token to the token file
    #[command(after_help = "\
Writes the file of --token-file, so run it on the node. A running daemon accepts the \
new token at once, without a restart, and no longer the old one; give the new one to \
its users.")]
    Rotate,
    /// Print the token in the token file
    #[command(after_help = "\
For `kubectl exec POD -- berth token show > token`, since berth's pod has no shell. \
Anyone with the token has full control of the daemon.")]
    Show,
}

/// `berth cdi`.
#[derive(Subcommand, Debug)]
pub enum CdiCommand {
    /// Check that containers get the same from a CDI specification as from another one
    #[command(after_help = "\
Compares devices by their names, device nodes and mounts by their paths in the \
container, environment variables, and hooks with their arguments; not the order, the \
kind, or paths on the host. What Berth leaves out on purpose (graphics, firmware, the \
device `all`) and what it adds (libraries under their sonames) does not count as a \
difference. Also checks that the paths on the host that FILE names exist on this \
machine. The exit code is 1 if there is a difference, or a path does not exist.
  nvidia-ctk cdi generate --output=/tmp/nvidia.yaml
  berth cdi check /var/run/cdi/berth-gpu.json --against /tmp/nvidia.yaml")]
    Check {
        /// The specification to check, in JSON or YAML
        file: PathBuf,
        /// The specification to compare it with, such as that of nvidia-ctk
        #[arg(long, value_name = "FILE")]
        against: PathBuf,
        /// Do not check that paths exist on this machine
        #[arg(long)]
        without_files: bool,
    },
}

/// `berth node`.
#[derive(Subcommand, Debug)]
pub enum NodeCommand {
    /// Commands for operators, on a running daemon.
    #[command(flatten)]
    Client(berth_cli::node::NodeCommand),
    /// One line for each requirement of the daemon: ok, WARN or FAIL, with the fix
    #[command(after_help = "\
Has the flags of `berth serve` (`berth options serve` prints all) and changes nothing. \
FAIL: the daemon would not start, or no container would get a GPU; the exit code is \
then 1. WARN: it would run, but wait or lack a feature.")]
    Check(Box<ServeArgs>),
}

#[cfg(test)]
mod tests;
