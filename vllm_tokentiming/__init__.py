"""Speculative decoding across tokenizers, inside vLLM: any small model drafts for any target, losslessly."""

from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.errors import ConfigError, TokenTimingError

__version__ = "0.1.0"

__all__ = ["ConfigError", "TokenTimingConfig", "TokenTimingError", "TokenTimingProposer", "__version__"]


def __getattr__(name: str) -> object:
    # The proposer imports vLLM and torch; vLLM asks for it by this name, in the worker alone.
    if name == "TokenTimingProposer":
        from vllm_tokentiming.proposer import TokenTimingProposer

        return TokenTimingProposer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
