"""What does ``tokentiming`` accept, and which subcommand answers?

Each subcommand lives in a module of this package with ``register(subparsers)``; it sets ``run``, a function from the
parsed arguments to an exit status. Nothing heavy is imported before a subcommand needs it. Owns no state.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from vllm_tokentiming import __version__
from vllm_tokentiming.cli import tiny_pair
from vllm_tokentiming.errors import TokenTimingError

# 2 is also argparse's own status for a bad command line: both are the user's to mend.
EXIT_BAD_USE = 2


def build_parser() -> argparse.ArgumentParser:
    """Build the whole command line."""
    parser = argparse.ArgumentParser(
        prog="tokentiming", description="Speculative decoding across tokenizers for vLLM.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"tokentiming {__version__}")
    subparsers = parser.add_subparsers(title="subcommands", metavar="COMMAND", required=True)
    for register in (tiny_pair.register,):
        register(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status; the message of an expected error goes to stderr.

    Raises:
        SystemExit: from argparse, for ``--help``, ``--version`` (0) and a bad command line (2).
    """
    parser = build_parser()
    arguments = parser.parse_args(argv)
    run: Callable[[argparse.Namespace], int] = arguments.run
    try:
        return run(arguments)
    except TokenTimingError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return EXIT_BAD_USE


if __name__ == "__main__":
    sys.exit(main())
