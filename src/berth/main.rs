//! The program `berth`.

use std::process::ExitCode;

fn main() -> ExitCode {
    berth::main()
}
