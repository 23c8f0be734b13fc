"""The draft's own config: what it takes over from the target's, and what it must not."""

from __future__ import annotations

import pytest

from vllm_tokentiming import TokenTimingConfig
from vllm_tokentiming.tiny_pair import tiny_pair

pytest.importorskip("vllm")


@pytest.mark.parametrize("chosen", [None, 64])
def test_a_block_size_that_nobody_chose_is_left_to_the_drafts_kernels(monkeypatch, chosen):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tokentiming.engine.vllm_config import make_draft_vllm_config

    arguments = {} if chosen is None else {"block_size": chosen}
    target = EngineArgs(
        model=str(tiny_pair().target), dtype="float32", enforce_eager=True, max_model_len=256, **arguments
    ).create_engine_config()
    draft = make_draft_vllm_config(target, TokenTimingConfig(draft_model=str(tiny_pair().draft)))
    assert draft.cache_config is not target.cache_config
    assert draft.cache_config.block_size == target.cache_config.block_size
    assert draft.cache_config.user_specified_block_size == (chosen is not None)
