//! `berth config`.

use clap::Subcommand;
use std::path::PathBuf;

/// `berth config`.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Read a file as the daemon would, and say what is wrong with it
    ///
    /// Names all errors of the file, each with its line, and exits with 1 if there are any. Reads the token and TLS
    /// files that it names, opens the GPUs, and asks the policies of its stack about them, as a start does.
    Check {
        /// The configuration file
        file: PathBuf,
        /// Leave out the token and TLS files that it names, and uploaded policies: for a machine that has none of them
        #[arg(long)]
        without_files: bool,
        /// Leave out the GPUs: for a machine that has none of them
        #[arg(long)]
        without_gpus: bool,
    },
    /// Print a file of NVIDIA's device plugin as Berth's own, with a comment at each line that has no equal
    FromNvidia {
        /// The file, `version: v1`
        file: PathBuf,
    },
}
