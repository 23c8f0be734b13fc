"""What one decoding cycle costs beside the draft's forward passes: reading the batch, context, proposal and rows.

    python -m benchmarks.micro.cycle [--draft DIR --target DIR] [--text PATH …] [--json FILE] [--seconds 5]

The plugin's own pipeline runs over real text, with an engine that replays drafts instead of computing them: the draft's
tokens of what follows in the text, some replaced, and laws of ``draft_top_k`` tokens that followed the token before
elsewhere in the text. Some of the proposed tokens are then committed, with one more. Prompts are read outside of the
clock.

*steady* is how cycles go after many others. *novel* forgets the chunks with a run and the target's encoded pieces
before each cycle, so every run is one that was never seen. Times are CPU time of the calling thread, which does not
count waiting for other processes, per request and cycle.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry
from transformers import AutoConfig, AutoTokenizer

from benchmarks.provenance import provenance
from vllm_tokentiming.config import TokenTimingConfig
from vllm_tokentiming.draft_length import FixedLength
from vllm_tokentiming.engine.interface import DraftedTokens, DraftRequest
from vllm_tokentiming.metrics import STAGES, Metrics
from vllm_tokentiming.pair import Pair
from vllm_tokentiming.pipeline import Pipeline
from vllm_tokentiming.proposal_modes import ProposalMode
from vllm_tokentiming.tiny_pair import tiny_pair
from vllm_tokentiming.vllm_adapter.batch import BatchReader
from vllm_tokentiming.vllm_adapter.draft_rows import DraftRows
from vllm_tokentiming.vocabulary import SpecialTokenMap, Vocabulary

TRANSFERS = ("exact", "point_mass", "paper")
BATCHES = (1, 8, 32)
MAX_PROPOSAL = 5
MAX_MODEL_LEN = 2048
PROMPT_TOKENS = 200
DOCUMENT_BYTES = 8000
TRUE_SHARE = 0.7
"""How often a drafted token is that of the text; else it is drawn from its law, as all after it then are."""
BLOCKS = 5


class Laws:
    """Draft laws of a bigram model: what followed a token in some text, filled up with the commonest tokens."""

    def __init__(self, documents: Sequence[Sequence[int]], *, top_k: int, vocab_size: int) -> None:
        followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for ids in documents:
            for before, after in pairwise(ids):
                followers[before][after] += 1
        unigrams = Counter(token for ids in documents for token in ids)
        self._common = [token for token, _ in unigrams.most_common(4 * top_k)]
        self._common += [token for token in range(vocab_size) if token not in unigrams][: 4 * top_k]
        self._followers = {token: counts.most_common(top_k) for token, counts in followers.items()}
        self._top_k = top_k

    def draw(self, before: int, true: int | None, rng: random.Random) -> tuple[int, list[int], list[float]]:
        """The drafted token and its law: the true token if there is one, else one drawn from the law."""
        weights: dict[int, float] = {} if true is None else {true: 0.0}
        weights.update(self._followers.get(before, ()))
        for rank, token in enumerate(self._common):
            if len(weights) >= self._top_k:
                break
            weights.setdefault(token, 0.3 / (rank + 2))
        if true is not None:
            weights[true] += 1.0 + 0.5 * sum(weights.values())
        kept = sorted(weights.items(), key=lambda item: -item[1])[: self._top_k]
        ids, probs = [token for token, _ in kept], np.array([weight for _, weight in kept])
        drawn = true if true is not None else rng.choices(ids, probs.tolist())[0]
        return drawn, ids, (probs / probs.sum()).tolist()


class ReplayedDraft:
    """A draft engine that hands out what was laid down for each request before the clock started."""

    def __init__(self) -> None:
        self.laid_down: dict[str, DraftedTokens] = {}
        self.sampled: dict[str, bool] = {}
        self.seconds = 0.0

    def draft(self, requests: Sequence[DraftRequest], stop_rule: object = None) -> list[DraftedTokens]:
        """What was laid down; without laws where none are asked for."""
        del stop_rule
        began = time.thread_time()
        drafted = []
        for request in requests:
            tokens = self.laid_down[request.request_id]
            self.sampled[request.request_id] = request.sampling is not None
            if request.num_steps == 0:
                tokens = DraftedTokens(ids_in_draft_vocab=[])
            elif request.sampling is None:
                tokens = DraftedTokens(ids_in_draft_vocab=tokens.ids_in_draft_vocab)
            drafted.append(tokens)
        self.seconds += time.thread_time() - began
        return drafted

    def restrict(self, allowed: object) -> None:
        """Nothing is restricted."""
        del allowed

    def release(self, request_id: str) -> None:
        """Forget a request."""
        self.laid_down.pop(request_id, None)


class Server:
    """Plays vLLM's part: a batch of requests whose text is known in advance."""

    def __init__(self, pair: Pair, documents: Sequence[list[int]], laws: Laws, *, transfer: str, batch: int) -> None:
        self._pair, self._documents, self._laws = pair, documents, laws
        self._rng = random.Random(batch)
        options = TokenTimingConfig(draft_model="replayed", transfer=transfer, allow_lossy=transfer == "paper")
        self.engine = ReplayedDraft()
        self.metrics = Metrics(CollectorRegistry())
        self.mode = ProposalMode(pair, options)
        length = FixedLength(num_draft_tokens=MAX_PROPOSAL)
        self._pipeline = Pipeline(mode=self.mode, engine=self.engine, length=length, metrics=self.metrics)
        self._reader = BatchReader(max_model_len=MAX_MODEL_LEN, max_proposal=MAX_PROPOSAL)
        vocab_size = pair.target.model_vocab_size
        self._rows = DraftRows(vocab_size=vocab_size, device=torch.device("cpu"), max_rows=batch * MAX_PROPOSAL)
        self._token_ids = np.zeros((batch, MAX_MODEL_LEN), dtype=np.int32)
        self._num_tokens = np.zeros(batch, dtype=np.int32)
        self._texts: list[list[int]] = [[] for _ in range(batch)]
        self._runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=[""] * batch), requests={})
        self._started = 0
        for row in range(batch):
            self._start(row, at=self._rng.randrange(PROMPT_TOKENS, MAX_MODEL_LEN // 2))

    def _start(self, row: int, *, at: int = PROMPT_TOKENS) -> None:
        """A new request in a row; its prompt is read outside of the clock."""
        runner = self._runner
        runner.requests.pop(runner.input_batch.req_ids[row], None)
        self._texts[row] = self._documents[self._started % len(self._documents)][:MAX_MODEL_LEN]
        request_id = runner.input_batch.req_ids[row] = f"request-{self._started}"
        self._started += 1
        at = min(at, len(self._texts[row]) // 2)
        params = SimpleNamespace(
            temperature=0.8, seed=None, max_tokens=None, min_tokens=0, all_stop_token_ids=set(), structured_outputs=None
        )
        runner.requests[request_id] = SimpleNamespace(
            sampling_params=params, prompt_embeds=None, mm_features=[], num_prompt_tokens=at
        )
        self._token_ids[row, : len(self._texts[row])] = self._texts[row]
        self._num_tokens[row] = at
        self._lay_down(row)
        self._propose([[1] if other == row else [] for other in range(len(self._texts))])

    def _lay_down(self, row: int) -> None:
        at, k = int(self._num_tokens[row]), MAX_PROPOSAL
        encode, decode = self._pair.draft.encode, self._pair.target.decode
        before = encode(decode(self._texts[row][at - 8 : at]))[-1]
        true = encode(decode(self._texts[row][at : at + 4 * k]))[:k]
        ids, law_ids, law_probs = [], [], []
        on_text = True
        for position in range(k):
            on_text = on_text and position < len(true) and self._rng.random() < TRUE_SHARE
            drawn, law, probs = self._laws.draw(before, true[position] if on_text else None, self._rng)
            ids.append(drawn)
            law_ids.append(law)
            law_probs.append(probs)
            before = drawn
        self.engine.laid_down[self._runner.input_batch.req_ids[row]] = DraftedTokens(
            ids_in_draft_vocab=ids,
            law_ids=np.array(law_ids, dtype=np.int32),
            law_probs=np.array(law_probs, dtype=np.float64),
        )

    def _propose(self, sampled: Sequence[Sequence[int]]) -> list[list[int]]:
        """What ``TokenTimingProposer.propose`` does in a step."""
        self._pipeline.retain(self._runner.requests)
        requests = self._reader.read(
            self._runner,
            sampled_token_ids=sampled,
            num_tokens_no_spec=self._num_tokens,
            token_ids=self._token_ids,
        )
        proposals = self._pipeline.propose(requests)
        began = time.perf_counter()
        self._rows.fill(proposals)
        self.metrics.spent("rows", time.perf_counter() - began)
        self.metrics.end_cycle()
        return proposals.ids_in_target_vocab

    def cycle(self) -> tuple[float, dict[str, float]]:
        """One cycle: its cost without the engine's, and that of its stages by the wall clock; seconds per request."""
        batch = len(self._texts)
        committed = [[0]] * batch
        stages = self._stages()
        self.engine.seconds = 0.0
        began = time.thread_time()
        proposals = self._propose(committed)
        spent = time.thread_time() - began - self.engine.seconds
        stages = {stage: (after - stages[stage]) / batch for stage, after in self._stages().items()}
        for row, proposal in enumerate(proposals):
            # A greedy draft is never right here, so that the policy's choice is mostly a draft with laws.
            request_id = self._runner.input_batch.req_ids[row]
            accepted = self._rng.randint(0, len(proposal)) if self.engine.sampled.get(request_id) else 0
            self._num_tokens[row] += accepted + 1
            if self._num_tokens[row] + 4 * MAX_PROPOSAL >= len(self._texts[row]):
                self._start(row)
            else:
                self._lay_down(row)
        return spent / batch, stages

    def _stages(self) -> dict[str, float]:
        return {stage: self.metrics.totals[f"seconds/{stage}"] for stage in STAGES if stage != "draft"}

    def forget_chunks(self) -> None:
        """As if no run had been seen before, nor the target's encoding of any piece of text."""
        exact = self.mode._exact
        if exact is not None:
            exact.transfer.table._keep_singles_only()
        self._pair.target.encoder._known.clear()

    def is_sampling(self) -> bool:
        """Whether most drafts of the last cycle had laws."""
        sampled = [self.engine.sampled.get(request_id, False) for request_id in self._runner.input_batch.req_ids]
        return sum(sampled) * 2 > len(sampled)


def measure(server: Server, *, seconds: float, novel: bool, laws_expected: bool) -> dict[str, Any]:
    """Microseconds per request and cycle; the best of several blocks' medians, for a machine that others use too."""
    blocks, everything = [], []
    stages: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(BLOCKS):
        block = []
        stop = time.perf_counter() + seconds / BLOCKS
        while time.perf_counter() < stop or len(block) < 20:
            if novel:
                server.forget_chunks()
            spent, by_stage = server.cycle()
            if server.is_sampling() != laws_expected:
                continue
            block.append(1e6 * spent)
            for stage, value in by_stage.items():
                stages[stage].append(1e6 * value)
        blocks.append(statistics.median(block))
        everything += block
    deciles = statistics.quantiles(everything, n=10)
    return {
        "median_us": round(min(blocks), 1),
        "mean_us": round(statistics.fmean(everything), 1),
        "p90_us": round(deciles[-1], 1),
        "p99_us": round(statistics.quantiles(everything, n=100)[-1], 1),
        "stage_median_us": {stage: round(statistics.median(values), 1) for stage, values in stages.items()},
        "cycles": len(everything),
    }


def read_texts(paths: Sequence[Path]) -> Iterator[str]:
    """Plain texts; of a ``.jsonl`` file the turns of its prompts; by default the documentation in Python itself."""
    if not paths:
        from pydoc_data.topics import topics

        yield from topics.values()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            text = file.read_text(encoding="utf-8", errors="ignore")
            if file.suffix == ".jsonl":
                yield "\n\n".join(turn for line in text.splitlines() for turn in json.loads(line)["turns"])
            else:
                yield text


def documents_of(texts: Iterator[str]) -> list[bytes]:
    joined = "\n\n".join(texts).encode()
    documents = [joined[at : at + DOCUMENT_BYTES] for at in range(0, len(joined), DOCUMENT_BYTES)]
    # Cut at line ends: a document must not start inside a character.
    return [document.partition(b"\n")[2].rpartition(b"\n")[0] for document in documents]


def load_vocabulary(folder: Path) -> Vocabulary:
    config = AutoConfig.from_pretrained(folder).get_text_config()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Vocabulary.from_tokenizer(tokenizer, model_vocab_size=config.vocab_size, name=folder.name)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    target, draft = load_vocabulary(arguments.target), load_vocabulary(arguments.draft)
    special_tokens = SpecialTokenMap.build(target, draft, ())
    documents = documents_of(read_texts(arguments.text))
    if len(documents) < 8:
        sys.exit(f"the text fills {len(documents)} documents of {DOCUMENT_BYTES} bytes; at least 8 are needed")
    # Every other document tells what follows what; the rest is replayed.
    top_k = TokenTimingConfig(draft_model="replayed").draft_top_k
    laws = Laws([draft.encode(text) for text in documents[::2]], top_k=top_k, vocab_size=draft.size)
    replayed = [ids for text in documents[1::2] if len(ids := target.encode(text)) >= 2 * PROMPT_TOKENS]
    results = []
    for transfer in arguments.transfer:
        for batch in arguments.batch:
            pair = Pair(target, draft, special_tokens, window_radius=8)
            server = Server(pair, replayed, laws, transfer=transfer, batch=batch)
            stop = time.perf_counter() + arguments.warm_up
            while time.perf_counter() < stop:
                server.cycle()
            expected = transfer != "point_mass"
            row = {"transfer": transfer, "batch": batch}
            row["steady"] = measure(server, seconds=arguments.seconds, novel=False, laws_expected=expected)
            row["novel"] = measure(server, seconds=arguments.seconds / 2, novel=True, laws_expected=expected)
            results.append(row)
            _report(row)
    return results


def _report(row: dict[str, Any]) -> None:
    for kind in ("steady", "novel"):
        figures = row[kind]
        stages = "  ".join(f"{stage} {value:.1f}" for stage, value in figures["stage_median_us"].items())
        print(
            f"{row['transfer']:>10} {row['batch']:5d} {kind:>7} {figures['median_us']:8.1f} {figures['mean_us']:8.1f} "
            f"{figures['p90_us']:8.1f} {figures['p99_us']:8.1f}   {stages}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tiny = tiny_pair()
    parser.add_argument("--draft", type=Path, default=tiny.draft, help="folder of the draft; default: the tiny pair's")
    parser.add_argument("--target", type=Path, default=tiny.target, help="folder of the target")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files, .jsonl of prompts, folders of .py")
    parser.add_argument("--transfer", nargs="+", choices=TRANSFERS, default=TRANSFERS)
    parser.add_argument("--batch", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each measurement")
    parser.add_argument("--warm-up", type=float, default=10.0, help="seconds of cycles before each measurement")
    parser.add_argument("--json", type=Path, help="write results and provenance to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"µs of CPU time per request and cycle, {MAX_PROPOSAL} drafted tokens; stages by the wall clock")
    print(f"{'transfer':>10} {'batch':>5} {'':>7} {'median':>8} {'mean':>8} {'p90':>8} {'p99':>8}   median of stages")
    results = run(arguments)
    if arguments.json:
        report = {
            "benchmark": "micro.cycle",
            "clock": "CPU time of the calling thread",
            "draft": arguments.draft.name,
            "target": arguments.target.name,
            "draft_tokens": MAX_PROPOSAL,
            "results": results,
            "provenance": provenance(),
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
