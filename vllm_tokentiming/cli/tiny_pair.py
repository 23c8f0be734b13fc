"""``tokentiming tiny-pair``: where are the two embedded models?

Prints the target's folder, then the draft's, a line each and nothing else, so that a shell can read them. Owns no
state.
"""

from __future__ import annotations

import argparse

from vllm_tokentiming.tiny_pair import tiny_pair


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "tiny-pair",
        help="print the folders of the embedded tiny target and draft",
        description="Print the folder of the embedded tiny target model, then that of its draft, a line each.",
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)


def run(_arguments: argparse.Namespace) -> int:
    """Print the folders.

    Raises:
        ConfigError: the package was installed without its data files.
    """
    pair = tiny_pair()
    print(pair.target)
    print(pair.draft)
    return 0
