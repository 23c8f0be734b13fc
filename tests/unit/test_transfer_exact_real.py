"""The exact transfer on real vocabularies: the proxy tokens spell the draft, and each row holds its token."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tokentiming.transfer.boundary_prior import extendable_prior
from vllm_tokentiming.transfer.chunks import ChunkTable
from vllm_tokentiming.transfer.exact import ChunkTransfer
from vllm_tokentiming.transfer.extendable import ExtendableSet
from vllm_tokentiming.transfer.interface import Draft
from vllm_tokentiming.vocabulary import ProxyTokenizer, SpecialTokenMap, Vocabulary

TEXT = (
    "def main(argv: list[str]) -> int:\n    return len(argv)  # naïve 你好, 안녕하세요 😀\n"
    "Die Geschwindigkeitsbegrenzung gilt innerorts. Tokenisation of antidisestablishmentarianism.\n\n\n1234567890 "
)
STEPS, TOP_K = 5, 16


@pytest.mark.real_tokenizers
@pytest.mark.parametrize(("target", "draft"), [("qwen3", "llama2"), ("llama2", "qwen3")])
def test_proxy_tokens_spell_the_draft(tokenizer_folder, target, draft):
    transformers = pytest.importorskip("transformers")
    vocabularies = []
    for name in (target, draft):
        tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_folder(name))
        vocabularies.append(Vocabulary.from_tokenizer(tokenizer, model_vocab_size=len(tokenizer), name=name))
    to, by = vocabularies
    proxy = ProxyTokenizer(to, by, SpecialTokenMap.build(to, by, ()))
    table = ChunkTable(
        draft_vocab_size=by.model_vocab_size,
        target_vocab_size=to.model_vocab_size,
        encode=lambda run, lasts: [proxy.encode_chunk(run, last) for last in lasts],
    )
    transfer = ChunkTransfer(table, end_ids_in_draft_vocab=by.end_ids)
    learnt = ExtendableSet(extendable_prior(by.token_bytes, to.token_bytes), by.token_bytes)
    ids = by.encode(TEXT.encode())
    rng = np.random.default_rng(0)
    whole = 0
    for start in range(0, len(ids) - STEPS, STEPS):
        drafted = ids[start : start + STEPS]
        law_ids = np.array(
            [[d, *rng.choice(np.setdiff1d(np.arange(300, 20000), [d]), TOP_K - 1, replace=False)] for d in drafted]
        )
        law_probs = rng.dirichlet(np.ones(TOP_K), size=STEPS)
        exact = transfer.exact_rows(Draft(drafted, law_ids, law_probs, STEPS, max_tokens=99), learnt.snapshot())
        spelt = b"".join(to.token_bytes[t] for t in exact.tokens_in_target_vocab)
        text = b"".join(by.token_bytes[d] for d in drafted)
        assert text.startswith(spelt)
        whole += spelt == text
        for j, token in enumerate(exact.tokens_in_target_vocab):
            row = slice(*exact.offsets[j : j + 2])
            assert exact.probs[row].sum() == pytest.approx(1.0, abs=1e-12)
            assert exact.probs[row][exact.ids_in_target_vocab[row] == token] > 0
    # Drafts that end inside a character, or begin with the rest of one, are the exception.
    assert whole >= 0.5 * (len(ids) // STEPS)
