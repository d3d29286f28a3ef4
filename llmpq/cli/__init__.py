"""The command line: `llmpq` and its subcommands; `llmpq.cli.main` has their table."""
