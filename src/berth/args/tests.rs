use super::*;
use berth_cli::output::Output;
use clap::CommandFactory;

#[test]
fn the_command_line_is_consistent() {
    Cli::command().debug_assert();
}

#[test]
fn client_flags_are_accepted_before_and_after_the_command() {
    for line in ["berth -o json --server http://x gpu list", "berth gpu list --server http://x -o json"] {
        let cli = Cli::try_parse_from(line.split(' ')).unwrap();
        assert_eq!((cli.client.server.as_str(), cli.client.output), ("http://x", Output::Json));
    }
}

#[test]
fn bad_usage_exits_with_2() {
    for line in ["berth", "berth gpu", "berth gpu show", "berth dance", "berth allocation list --state some"]
    {
        assert_eq!(Cli::try_parse_from(line.split(' ')).unwrap_err().exit_code(), 2, "{line}");
    }
}
