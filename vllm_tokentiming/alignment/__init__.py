"""Dynamic Token Warping: which draft token each proxy token came from."""

from vllm_tokentiming.alignment.aligner import Aligner, Alignment
from vllm_tokentiming.alignment.kernel import warm_up

__all__ = ["Aligner", "Alignment", "warm_up"]
