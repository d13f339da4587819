//! `berth config`.

use clap::Subcommand;
use std::path::PathBuf;

/// `berth config`.
#[derive(Subcommand, Debug)]
pub enum ConfigCommand {
    /// Check a configuration file as the daemon would and list its errors
    ///
    /// Lists all errors of the file, each with its line, and exits with 1 if there are any. Reads the token and TLS
    /// files, opens the GPUs, and runs the policies of its stack against them, as the daemon does at
    /// start.
    Check {
        /// The configuration file
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
        /// The file, `version: v1`
        file: PathBuf,
    },
}
