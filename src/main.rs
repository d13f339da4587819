//! berth
use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(code) = berth::wasm::compiler_process() {
        return code;
    }
    ExitCode::SUCCESS
}
