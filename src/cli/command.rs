//! The commands for a running daemon, except those of `berth policy`. Each help text says what the command does and
//! shows how it is used.

use super::allocation::AllocationCommand;
use super::decision::DecisionCommand;
use super::event::EventsArgs;
use super::gpu::GpuCommand;
use super::process::ProcessCommand;
use clap::Subcommand;

/// The commands for a running daemon, except those of `berth policy`.
#[derive(Subcommand, Debug)]
pub enum ClientCommand {
    /// List GPUs, cordon and drain them, remove vanished ones
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
    /// List the allocations: which pod and container holds what
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
    /// List the processes on the GPUs, and those without an allocation
    Process {
        /// What to do.
        #[command(subcommand)]
        command: ProcessCommand,
    },
    /// List the decisions: the calls of policies, their answers, and the results
    #[command(after_help = "\
The decisions, newest first, with the answer of each policy:
  berth decision list --outcome denied
  berth decision list --pod trainer-0 -n default
  berth decision show 4711
  berth allocation explain ID")]
    Decision {
        /// What to do.
        #[command(subcommand)]
        command: DecisionCommand,
    },
    /// Print changes on the node as they happen
    #[command(after_help = "\
Examples:
  berth events
  berth events --gpu 3 --kind gpuHealth,gpuDraining,gpuDrained
  berth events --no-follow                 The latest events, without waiting for more
  berth events --since-id ID -o json       One JSON object a line, resuming after the event ID")]
    Events(EventsArgs),
}
