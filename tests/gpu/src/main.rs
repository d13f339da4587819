//! `just gpu`: checks Berth on a machine with a real GPU, in ten minutes. docs/gpu.md describes how to run it, and what
//! each step asserts.
//!
//! It changes no setting of a GPU and never resets one; it reads them before and after. The daemon is the real one; the
//! kubelet is the stand-in of the tests. Against the fake NVML (`--nvml`, `--fake-state`) the same steps run without a
//! GPU.

// The output is for people.
#![allow(clippy::print_stdout)]

mod cdi;
mod cgroup;
mod check;
mod child;
mod cuda;
mod daemon;
mod fixture;
mod inventory;
mod load;
mod machine;
mod node;
mod nvml;
mod spec_root;

use check::{Check, Options, Step};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

/// Checks Berth on this machine's GPU: a line for each step, figures in gpu.json
#[derive(Parser)]
#[command(name = "gpu-check")]
struct Cli {
    #[command(flatten)]
    check: CheckArgs,
    /// The cgroup in which a hidden subcommand runs
    #[arg(long, hide = true, global = true)]
    cgroup: Option<PathBuf>,
    #[command(subcommand)]
    child: Option<ChildCommand>,
}

#[derive(Args)]
struct CheckArgs {
    /// The program `berth` [default: beside this program]
    #[arg(long, value_name = "FILE")]
    berth: Option<PathBuf>,
    /// The NVML library [default: where the loader or Berth finds libnvidia-ml.so.1]
    #[arg(long, value_name = "FILE")]
    nvml: Option<PathBuf>,
    /// CUDA's driver library [default: where the loader finds libcuda.so.1, or beside NVML]
    #[arg(long, value_name = "FILE")]
    cuda: Option<PathBuf>,
    /// The state file of the fake NVML that --nvml names: it simulates processes and errors
    #[arg(long, value_name = "FILE", requires = "nvml")]
    fake_state: Option<PathBuf>,
    /// Folder of gpu.json, the fixture, the probe and the daemons' log
    #[arg(long, value_name = "FOLDER", env = "OUT", default_value = "target/gpu")]
    out: PathBuf,
    /// How long CUDA processes are started, one a second, in the last step
    #[arg(long, value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=100))]
    load_seconds: u64,
}

/// Hidden subcommands, which this program starts as child processes.
#[derive(Subcommand)]
#[command(disable_help_subcommand = true)]
enum ChildCommand {
    /// Reads everything by NVML, and prints it
    #[command(hide = true)]
    Nvml { library: PathBuf },
    /// Holds the GPUs open by NVML until standard input ends
    #[command(hide = true)]
    NvmlHold { library: PathBuf },
    /// Scans as the daemon does, and prints durations
    #[command(hide = true)]
    Scans { library: Option<PathBuf> },
    /// Prints the UUID of CUDA's first device
    #[command(hide = true)]
    CudaUuid { libraries: Vec<PathBuf> },
    /// Holds memory until standard input ends
    #[command(hide = true)]
    CudaHold { mib: usize, libraries: Vec<PathBuf> },
    /// Allocates what fits into a limit of memory, and then what does not
    #[command(hide = true)]
    CudaLimited { fits_mib: usize, exceeds_mib: usize, libraries: Vec<PathBuf> },
    /// Causes an error of the GPU
    #[command(hide = true)]
    CudaFault { libraries: Vec<PathBuf> },
    /// Adds two vectors
    #[command(hide = true)]
    CudaAdd { libraries: Vec<PathBuf> },
    /// Waits until standard input ends
    #[command(hide = true)]
    Idle,
    /// Prints the UUID of CUDA's first device, seen from a root folder with nothing but a CDI spec
    #[command(hide = true)]
    SpecRoot { spec: PathBuf, root: PathBuf },
}

/// The steps of `just gpu` with their time limits.
fn steps() -> [Step; 14] {
    let step = |name, seconds, run| Step { name, limit: Duration::from_secs(seconds), run };
    [
        step("probe", 30, inventory::probe),
        step("node-check", 70, inventory::node_check),
        step("facts", 20, inventory::facts),
        step("scans", 40, inventory::scans),
        step("kubelet", 20, daemon::kubelet),
        step("allocate", 20, daemon::allocate),
        step("cdi", 90, cdi::check),
        step("process", 40, load::process),
        step("xid", 40, load::xid),
        step("release", 40, daemon::release),
        step("mig", 20, inventory::mig),
        step("limits", 60, cgroup::limits),
        step("close", 30, cgroup::close),
        step("load", 120, load::load),
    ]
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.child {
        Some(child) => cli
            .cgroup
            .map_or(Ok(()), |folder| cgroup::join(&folder))
            .and_then(|()| run_child(child))
            .map(|()| true),
        None => run_check(cli.check),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_check(args: CheckArgs) -> anyhow::Result<bool> {
    let absent = if args.nvml.is_some() { None } else { machine::find_driver().err() };
    let berth = args.berth.map_or_else(|| fakes::program::beside_this("berth"), Ok)?;
    let check = Check::new(Options {
        berth,
        nvml: args.nvml,
        cuda: args.cuda,
        fake_state: args.fake_state,
        out: args.out,
        load_seconds: args.load_seconds,
    });
    check::run(&check, &steps(), absent.as_deref())
}

fn run_child(child: ChildCommand) -> anyhow::Result<()> {
    match child {
        ChildCommand::Nvml { library } => println!("{}", serde_json::to_string(&nvml::read(&library)?)?),
        ChildCommand::NvmlHold { library } => nvml::hold(&library)?,
        ChildCommand::Scans { library } => {
            println!("{}", serde_json::to_string(&inventory::make_scans(library)?)?);
        }
        ChildCommand::CudaUuid { libraries } => println!("{}", cuda::uuid(&libraries)?),
        ChildCommand::CudaHold { mib, libraries } => cuda::hold(&libraries, mib)?,
        ChildCommand::CudaLimited { fits_mib, exceeds_mib, libraries } => {
            println!("{}", serde_json::to_string(&cuda::limited(&libraries, fits_mib, exceeds_mib)?)?);
        }
        ChildCommand::CudaFault { libraries } => println!("{}", cuda::fault(&libraries)?),
        ChildCommand::CudaAdd { libraries } => cuda::add(&libraries)?,
        ChildCommand::Idle => drop(std::io::read_to_string(std::io::stdin())?),
        ChildCommand::SpecRoot { spec, root } => println!("{}", spec_root::uuid_within(&spec, &root)?),
    }
    Ok(())
}
