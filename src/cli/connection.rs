//! The flags that every command for a running daemon takes: where the daemon is, and how its answer is printed.

use super::output::Output;
use clap::Args;
use std::path::PathBuf;
use std::time::Duration;

/// How to reach a running daemon, and how to print its answers.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Connection to a running daemon")]
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
    /// The file with its token, created when the daemon first starts [default: /var/lib/berth/token;
    /// for `serve` and `node check`: token in the state folder]
    #[arg(long, global = true, env = "BERTH_TOKEN_FILE", value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// With https: CA certificates that may have signed the daemon's, PEM [default: those of this machine]
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
    /// Repeat every 2 s, or as in `--watch=500ms`: lists, `show` and the stack
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
