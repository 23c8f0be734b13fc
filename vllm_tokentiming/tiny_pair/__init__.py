"""Where is the embedded tiny pair? Two models of a few million weights that let everything be tried without a download.

The target has a byte-level BPE tokenizer, the draft a SentencePiece-style one. ``README.md`` in this folder says how
they were trained. Imports nothing heavy; owns no state.
"""

from dataclasses import dataclass
from pathlib import Path

from vllm_tokentiming.errors import ConfigError


@dataclass(frozen=True)
class TinyPair:
    """The two model folders, in Hugging Face's layout."""

    target: Path
    draft: Path

    def __post_init__(self) -> None:
        """Require both folders to hold a model.

        Raises:
            ConfigError: the package was installed without its data files.
        """
        for folder in (self.target, self.draft):
            if not (folder / "config.json").is_file():
                raise ConfigError(
                    f"found no model in {folder}; the package's data files are required; "
                    "reinstall vllm-tokentiming, or run scripts/train_tiny_pair.py"
                )


def tiny_pair() -> TinyPair:
    """Return the folders of the embedded pair.

    Raises:
        ConfigError: the package was installed without its data files.
    """
    here = Path(__file__).resolve().parent
    return TinyPair(target=here / "target", draft=here / "draft")
