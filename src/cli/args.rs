//! What can be typed. Help texts teach: each says what the command does and shows how it is used.

pub(super) use super::allocation::AllocationCommand;
pub(super) use super::decision::DecisionCommand;
use super::drain::DrainArgs;
use super::event::EventsArgs;
pub(super) use super::process::ProcessCommand;
use super::state::StateCommand;
pub(super) use super::trial::{ShadowCommand, TrialCommand};
use crate::config::ServeArgs;
use clap::{Args, Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

mod config;
mod policy;

pub(super) use config::ConfigCommand;
pub(super) use policy::{Lang, NewPolicy, PolicyCommand};

const EXAMPLES: &str = "\
Examples:
  berth node check                          What does this node still need?
  berth config check /etc/berth/config.yaml  Would the daemon take this file?
  berth serve --config /etc/berth/config.yaml
  berth gpu list                            GPUs, their health, what is held
  berth gpu cordon 3 --reason 'new fan'     Grant nothing new on GPU 3; what runs goes on
  berth allocation list --gpu 3             Who holds it?
  berth state verify                        Is the store of a stopped daemon whole?
  berth policy push my-policy.wasm          Upload a policy; nothing changes yet
  berth policy activate stack.yaml          Swap the whole stack, or nothing

Exit codes: 0 done, 1 refused or failed (a file that is not there, a name that nobody knows, a no of the daemon),
2 bad usage (what was typed cannot be meant).
A setting of `berth serve` is a flag, an environment variable (`berth serve --help` names it) or a
key of the configuration file, in that order of precedence.";

/// Shares and guards this node's GPUs: the daemon, and its operator's commands
#[derive(Parser, Debug)]
#[command(name = "berth", version, after_help = EXAMPLES, disable_help_subcommand = true)]
pub struct Cli {
    /// How to reach a running daemon.
    #[command(flatten)]
    pub client: ClientArgs,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// How to reach a running daemon, and how to print what it says.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Talking to a running daemon")]
pub struct ClientArgs {
    /// Where the daemon's admin API is: http://, https:// or unix:///PATH, the socket of --admin-socket
    #[arg(
        long,
        global = true,
        env = "BERTH_SERVER",
        value_name = "URL",
        default_value = "http://127.0.0.1:9470"
    )]
    pub server: String,
    /// The file with its token, made when the daemon first starts [default: /var/lib/berth/token;
    /// for `serve` and `node check`: token in the state folder]
    #[arg(long, global = true, env = "BERTH_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// With https: whose certificate the daemon's must be signed by, PEM [default: those of this machine]
    #[arg(long, global = true, env = "BERTH_CA_FILE", value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
    /// With https: a client certificate instead of a token, PEM
    #[arg(long, global = true, env = "BERTH_CLIENT_CERT", value_name = "FILE")]
    pub client_cert: Option<PathBuf>,
    /// The key of the client certificate, PEM
    #[arg(long, global = true, env = "BERTH_CLIENT_KEY", value_name = "FILE")]
    pub client_key: Option<PathBuf>,
    /// Send the token over http:// to another machine, where everybody on the way can read it
    #[arg(long, global = true)]
    pub allow_plain_http: bool,
    /// How answers are printed
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: Output,
    /// Look again and again, every 2 s or `--watch=500ms`: lists, `show` and the stack
    #[arg(
        short,
        long,
        global = true,
        value_name = "TIME",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s",
        value_parser = super::usage::time
    )]
    pub watch: Option<Duration>,
}

impl ClientArgs {
    /// The token file that was named, or where a daemon has it by default.
    #[must_use]
    pub fn token_file(&self) -> PathBuf {
        self.token_file.clone().unwrap_or_else(|| "/var/lib/berth/token".into())
    }
}

/// How answers are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people
    #[default]
    Table,
    /// For people with room: more columns, where a list has more
    Wide,
    /// What the API answered, for programs
    Json,
    /// The same as YAML
    Yaml,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the daemon on this node
    ///
    /// Finds the GPUs, takes over what running pods hold, registers with the kubelet, and serves the
    /// admin API on loopback. Without a GPU or a kubelet it waits and says so. Ends on SIGTERM.
    #[command(after_help = "\
Examples:
  berth serve --config /etc/berth/config.yaml
  berth serve --gpus sim:8xh100 --kubelet-dir /tmp/kubelet --state-dir /tmp/berth   No GPU needed
  BERTH_LOG_FILTER=berth::wasm=debug,info berth serve   More from one room (RUST_LOG works, too)")]
    Serve(Box<ServeArgs>),
    /// Look at GPUs, cordon them, let vanished ones go
    #[command(after_help = "\
A GPU is named by its UUID, the beginning of it, or its index:
  berth gpu list
  berth gpu show 0
  berth gpu cordon GPU-8a56 --reason 'row remapping pending'
  berth gpu uncordon GPU-8a56")]
    Gpu {
        /// What to do.
        #[command(subcommand)]
        command: GpuCommand,
    },
    /// See who holds what
    #[command(after_help = "\
Examples:
  berth allocation list --namespace default
  berth allocation list --state all --limit 20
  berth allocation show 5eed0001-17 -o yaml")]
    Allocation {
        /// What to do.
        #[command(subcommand)]
        command: AllocationCommand,
    },
    /// See who is on the GPUs, and who without an allocation
    Process {
        /// What to do.
        #[command(subcommand)]
        command: ProcessCommand,
    },
    /// See what policies were asked, what they said, and what came of it
    #[command(after_help = "\
What was asked, newest first, and what each policy said:
  berth decision list --outcome denied
  berth decision list --pod trainer-0 -n default
  berth decision show 4711
  berth allocation explain ID")]
    Decision {
        /// What to do.
        #[command(subcommand)]
        command: DecisionCommand,
    },
    /// See what changes on the node, as it changes
    #[command(after_help = "\
Examples:
  berth events
  berth events --gpu 3 --kind gpuHealth,gpuDraining,gpuDrained
  berth events --no-follow                 What happened lately?
  berth events --since-id ID -o json       One JSON object a line, from where one left off")]
    Events(EventsArgs),
    /// Write policies, try them, upload them and choose which are asked
    #[command(after_help = "\
Without a daemon: new, check, test. A policy version is named by its name where that is plain, by its digest, the beginning of it, or
`name@` and that:
  berth policy list
  berth policy show timeslice     Which parameters does it take?
  berth policy push my-policy.wasm
  berth policy activate stack.yaml
  berth policy stack
  berth policy reset

`berth policy activate --help` shows a stack.yaml.")]
    Policy {
        /// What to do.
        #[command(subcommand)]
        command: PolicyCommand,
    },
    /// Check a configuration file without starting anything, or make one from NVIDIA's
    Config {
        /// What to do.
        #[command(subcommand)]
        command: ConfigCommand,
    },
    /// Check what this node has and still needs
    Node {
        /// What to do.
        #[command(subcommand)]
        command: NodeCommand,
    },
    /// Save, restore and check the allocation store of a stopped daemon
    #[command(after_help = "\
The daemon must be stopped, or a copy of its state folder be named:
  berth state verify
  berth state export > state.jsonl
  berth state import --state-dir /var/lib/berth-new state.jsonl
  berth state init                          # the store is lost, and there is no export: begin with an empty one

JSON lines: a header with the format and the number of records, then one record a line. Modules of
uploaded policies and the token are files beside the store and not in it: copy those, or push them anew.")]
    State {
        /// What to do.
        #[command(subcommand)]
        command: StateCommand,
    },
    /// Show or change the token of the admin API
    Token {
        /// What to do.
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// Print the admin API's OpenAPI description
    Openapi,
    /// Print what a shell needs to complete `berth`
    #[command(after_help = "\
Examples:
  source <(berth completions bash)
  berth completions zsh > ~/.zfunc/_berth
  berth completions fish > ~/.config/fish/completions/berth.fish")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
    /// Print the manual page, or write those of all commands into a folder
    #[command(after_help = "\
Examples:
  berth man | man -l -
  berth man --into /usr/local/share/man/man1")]
    Man {
        /// The folder; made if it is not there
        #[arg(long, value_name = "FOLDER")]
        into: Option<PathBuf>,
    },
}

/// `berth gpu`.
#[derive(Subcommand, Debug)]
pub enum GpuCommand {
    /// All GPUs at a glance
    List,
    /// One GPU with its devices and who holds them
    Show {
        /// UUID, the beginning of it, or index
        gpu: String,
    },
    /// Grant nothing new on a GPU; what is held stays
    Cordon {
        /// UUID, the beginning of it, or index
        gpu: String,
        /// Why, for whoever looks later
        #[arg(long, default_value = "", value_name = "TEXT")]
        reason: String,
    },
    /// Empty a GPU: cordon it and watch its holders leave
    #[command(after_help = "\
Without --evict nobody is asked to leave: end the pods yourself (`kubectl delete pod`), or wait until
they are done. With --evict they are evicted through the API server, as `kubectl drain` does: disruption
budgets hold, and static pods stay. A GPU is drained once nobody holds it and, where processes are
visible, none was seen on it for ten seconds. `berth gpu uncordon` takes it back at any point.

Examples:
  berth gpu drain 0 --reason 'fan replacement' --wait
  berth gpu drain 0 --evict --deadline 10m --wait
  berth gpu drain 0 --evict --deadline 10m --at-deadline delete --wait
  berth gpu drain 0 --deadline 10m --at-deadline give-up --wait
  berth gpu drain 0 --stop")]
    Drain(DrainArgs),
    /// Say that an unhealthy GPU works again; believed until the next bad sign
    MarkHealthy {
        /// UUID, the beginning of it, or index
        gpu: String,
        /// Why, for whoever looks later
        #[arg(long, default_value = "", value_name = "TEXT")]
        reason: String,
    },
    /// Let a GPU be granted again
    Uncordon {
        /// UUID, the beginning of it, or index
        gpu: String,
    },
    /// Let a GPU go that vanished and that nobody holds
    Forget {
        /// UUID, or the beginning of it
        gpu: String,
    },
}

/// `berth token`.
#[derive(Subcommand, Clone, Copy, Debug)]
pub enum TokenCommand {
    /// Put a new token into the token file
    ///
    /// Works on the file that --token-file names, so run it on the node. A running daemon takes the
    /// new token at once, without a restart, and the old one no more; hand the new one to whoever
    /// has a copy.
    Rotate,
    /// Print the token in the token file
    ///
    /// For `kubectl exec POD -- berth token show > token`, since a pod of berth's has no shell. Whoever has it
    /// is the operator.
    Show,
}

/// `berth node`.
#[derive(Subcommand, Debug)]
pub enum NodeCommand {
    /// One line for each thing that the daemon needs: ok, WARN or FAIL, with the fix
    ///
    /// Takes the flags of `berth serve`, so that it looks where the daemon would. Changes nothing.
    /// FAIL: the daemon would not start, or no container would get a GPU; the exit code is 1 then.
    /// WARN: it would run, but wait or do less.
    Check(Box<ServeArgs>),
}

#[cfg(test)]
mod tests;
