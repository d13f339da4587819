//! What can be typed. Help texts teach: each says what the command does and shows how it is used.

use crate::config::ServeArgs;
use crate::state::StateCommand;
use berth_cli::command::ClientCommand;
use berth_cli::connection::ClientArgs;
use clap::{Parser, Subcommand};
use std::path::PathBuf;

mod config;
mod policy;

pub use config::ConfigCommand;
pub use policy::{Lang, NewPolicy, PolicyCommand};

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
  BERTH_LOG_FILTER=berth_wasm=debug,info berth serve   More from one room (RUST_LOG works, too)")]
    Serve(Box<ServeArgs>),
    /// What asks a running daemon.
    #[command(flatten)]
    Client(ClientCommand),
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
