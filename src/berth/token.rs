//! `berth token`.

use crate::args::TokenCommand;
use berth_cli::client::read_token;
use berth_cli::output::Out;
use berth_cli::reach::ClientArgs;

pub(super) fn run(command: TokenCommand, args: &ClientArgs, out: &mut Out) -> anyhow::Result<()> {
    match command {
        TokenCommand::Rotate => {
            let path = args.token_file();
            berth_http::rotate_token(&path)?;
            out.done(&format!("{} has a new token; the old one is no longer valid", path.display()))
        }
        TokenCommand::Show => out.text(&format!("{}\n", read_token(args)?)),
    }
}
