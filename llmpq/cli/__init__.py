"""Command lines: `llmpq` and its subcommands, one file each; `llmpq.cli.main` has their table."""
