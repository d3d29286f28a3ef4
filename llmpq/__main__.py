"""`python -m llmpq`: the command `llmpq`."""

from llmpq.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
