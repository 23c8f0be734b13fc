"""Tokenizers as byte tables: draft contexts, proxy tokens, special tokens."""

from vllm_tokentiming.vocabulary.draft_context import DraftContext
from vllm_tokentiming.vocabulary.kinds import TokenizerKind
from vllm_tokentiming.vocabulary.proxy_tokens import ProxyTokenizer
from vllm_tokentiming.vocabulary.special_tokens import SpecialTokenMap
from vllm_tokentiming.vocabulary.vocabulary import Vocabulary, overlap

__all__ = ["DraftContext", "ProxyTokenizer", "SpecialTokenMap", "TokenizerKind", "Vocabulary", "overlap"]
