"""A draft that is no use: the layout and tokenizer of a real one, weights drawn at random.

python -m benchmarks.hopeless_draft DRAFT FOLDER

It proposes noise at the price of the real draft, so it shows what speculation costs where it cannot pay.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def write_hopeless_draft(draft: str, folder: Path) -> None:
    """Write it, in bfloat16, with the same seed each time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(draft)).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(draft).save_pretrained(folder)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("draft")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_hopeless_draft(arguments.draft, arguments.folder)


if __name__ == "__main__":
    main()
