//! What can be typed to a running daemon. Help texts teach: each says what the command does and shows how it is used.

pub use super::allocation::AllocationCommand;
pub use super::decision::DecisionCommand;
use super::drain::DrainArgs;
use super::event::EventsArgs;
pub use super::process::ProcessCommand;
pub use super::trial::{ShadowCommand, TrialCommand};
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

mod policy;

pub use policy::PolicyCommand;

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

/// The commands that ask a running daemon, but for those of `berth policy`.
#[derive(Subcommand, Debug)]
pub enum ClientCommand {
    /// Look at GPUs, cordon and drain them, remove vanished ones
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
    /// Remove a vanished GPU from the list, where no allocation uses it
    Forget {
        /// UUID, or the beginning of it
        gpu: String,
    },
}
