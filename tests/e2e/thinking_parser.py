"""A ``--reasoning-parser-plugin`` for the tiny target, which has no token for the end of thinking: a comma ends it.

An ordinary token is harder than a special one: it falls anywhere within a proposal. Requests ask for it by
``chat_template_kwargs``; all others are parsed as if there were no parser.
"""

from __future__ import annotations

from typing import Any

from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.reasoning.deepseek_r1_reasoning_parser import DeepSeekR1ReasoningParser
from vllm.reasoning.deepseek_v3_reasoning_parser import DeepSeekV3ReasoningParser
from vllm.reasoning.identity_reasoning_parser import IdentityReasoningParser


class CommaEndsThought(DeepSeekR1ReasoningParser):
    @property
    def start_token(self) -> str:
        return "<|im_start|>"

    @property
    def end_token(self) -> str:
        return ","


class CommaEndsThoughtIfAsked(DeepSeekV3ReasoningParser):
    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        ReasoningParser.__init__(self, tokenizer, *args, **kwargs)
        asked = (kwargs.get("chat_template_kwargs") or {}).get("thinking")
        self._parser = (CommaEndsThought if asked else IdentityReasoningParser)(tokenizer, *args, **kwargs)


# Not as a decorator: that remembers the name of a module which vLLM could not import by it.
ReasoningParserManager.register_module("comma", module=CommaEndsThoughtIfAsked)
