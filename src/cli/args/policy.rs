//! `berth policy`: what an operator does with policies.

use crate::trial::TrialCommand;
use crate::upload::PushArgs;
use crate::versions::{VersionCommand, WordArgs};
use clap::Subcommand;
use std::path::PathBuf;

const STACK_FILE: &str = "\
The file is a list of entries, first asked first, or a configuration file with such a list under
`stack`. Only `policy` must be given:
  - policy: timeslice
    digest: 9f86d081884c              # which version of it; or `policy: timeslice@9f86d081884c`
    parameters: {replicas: 4}         # `berth policy show timeslice` tells what it takes
    permissions: {deny: false, shareMax: 4, resources: [nvidia.com/gpu.shared]}
    onFault: skip                     # or deny";

/// `berth policy`.
#[derive(Subcommand, Debug)]
pub enum PolicyCommand {
    /// All versions that the node knows
    List,
    /// One version with the parameters that it takes; `-o json` has their schema
    Show {
        /// Name, digest, the beginning of a digest, or name@ and that
        policy: String,
    },
    /// Upload a policy: checked, compiled, kept; asked nothing until a stack names it
    Push(PushArgs),
    /// Try one without effect.
    #[command(flatten)]
    Trial(TrialCommand),
    /// Delete a version that is not active
    Delete {
        /// Name, digest, the beginning of a digest, or name@ and that
        policy: String,
    },
    /// Swap the active stack as a whole: asked on the live node first, and unchanged if one fails
    #[command(after_help = STACK_FILE)]
    Activate {
        /// The stack as YAML or JSON; `-` reads standard input
        file: PathBuf,
        /// Only if the active stack is still at this revision
        #[arg(long, value_name = "REVISION")]
        if_revision: Option<u64>,
        /// Who and why.
        #[command(flatten)]
        word: WordArgs,
    },
    /// Go back to the stack of the configuration file
    Reset(WordArgs),
    /// Versions over time: fetch one, see what was active, go back to it.
    #[command(flatten)]
    Versions(VersionCommand),
    /// The active stack, and how its policies fare
    Stack,
}
