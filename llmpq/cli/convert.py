"""`llmpq-convert`: make a safetensors checkpoint of a `.bin` one, since stages read no `.bin`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmpq.cli.common import EXIT_DONE, Parser, command_line, console, run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = Parser(prog="llmpq-convert", description=__doc__)
    parser.add_argument("source", type=Path, help="folder with pytorch_model.bin or its index")
    parser.add_argument("target", type=Path, help="folder to make")
    options = parser.parse_args(arguments)
    return run_command("llmpq-convert", lambda: _convert(options.source, options.target))


def _convert(source: Path, target: Path) -> int:
    from quant.checkpoint.convert import convert

    made = convert(source, target)
    sentence = (
        f"wrote {made.tensors} tensors ({made.tensor_bytes / 2**30:.2f} GiB) in {made.shards} "
        f"safetensors {'file' if made.shards == 1 else 'files'} to {made.target}; plan it: "
        + command_line("llmpq", "plan", "--model", made.target)
        + " --cluster cluster.yaml"
    )
    console().print(sentence, markup=False, highlight=False, soft_wrap=True)
    return EXIT_DONE


if __name__ == "__main__":
    raise SystemExit(main())
