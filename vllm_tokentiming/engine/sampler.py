"""Draws draft tokens: greedily, or from laws that are restricted to the top k tokens before sampling.

Owns the random streams. A request with a seed has its own generator; the others share one. Neither is the verifier's:
a proposal must be independent of the random numbers that judge it (Leviathan et al., arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokentiming.engine.interface import DraftSampling


class DraftSampler:
    """Samples one token for each row of a batch, step after step.

    Args:
        device: where logits live.
        seed: of the shared stream; equal on all ranks of a tensor-parallel group, so that all draft the same.
    """

    def __init__(self, *, device: torch.device, seed: int) -> None:
        self._device = device
        self._shared = torch.Generator(device=device).manual_seed(seed)
        self._own: dict[str, torch.Generator] = {}
        self._forbidden: torch.Tensor | None = None

    def restrict(self, allowed: npt.NDArray[np.bool_]) -> None:
        """Name the tokens, bool [V], that rows with ``shared_only`` may draw."""
        self._forbidden = torch.from_numpy(~allowed).to(self._device)

    def release(self, request_id: str) -> None:
        """Forget a request's stream."""
        self._own.pop(request_id, None)

    def plan(self, request_ids: Sequence[str], samplings: Sequence[DraftSampling | None]) -> SamplingPlan:
        """Prepare a cycle for these rows; the plan is used for each of its steps."""
        return SamplingPlan(
            device=self._device,
            samplings=samplings,
            generators=[self._generator(rid, s) for rid, s in zip(request_ids, samplings, strict=True)],
            shared=self._shared,
            forbidden=self._forbidden,
        )

    def _generator(self, request_id: str, sampling: DraftSampling | None) -> torch.Generator | None:
        if sampling is None or sampling.seed is None:
            return None
        generator = self._own.get(request_id)
        if generator is None:
            generator = self._own[request_id] = torch.Generator(device=self._device)
        # Anew in each cycle: a cycle may go on for other requests' sake, and draw more than this one proposes.
        return generator.manual_seed(sampling.seed)


def confidence(logits: torch.Tensor) -> torch.Tensor:
    """The largest probability of each row at temperature 1: float32 [B] of logits [B, V]."""
    # Two kernels: each one more takes longer to start, between two passes of the draft, than it computes.
    return logits.softmax(dim=-1, dtype=torch.float32).amax(dim=-1)


class SamplingPlan:
    """One cycle's sampling for a batch of rows, without host synchronisation.

    Attributes:
        keeps_laws: whether any row is sampled, so that :meth:`step` returns laws.
    """

    def __init__(
        self,
        *,
        device: torch.device,
        samplings: Sequence[DraftSampling | None],
        generators: Sequence[torch.Generator | None],
        shared: torch.Generator,
        forbidden: torch.Tensor | None,
    ) -> None:
        self._forbidden = forbidden
        self._restricted = torch.tensor([s is not None and s.shared_only for s in samplings], device=device)  # [B]
        self._restricts = forbidden is not None and any(s is not None and s.shared_only for s in samplings)
        self._generators = generators
        self._shared = shared
        drawn = [s for s in samplings if s is not None and s.temperature > 0]
        self.keeps_laws = bool(drawn)
        self._top_k = max((s.top_k for s in drawn), default=1)
        self._own_top_k = [1 if s is None else s.top_k for s in samplings]
        if not self.keeps_laws:
            return
        greedy = [s is None or s.temperature <= 0 for s in samplings]
        self._greedy = torch.tensor(greedy, device=device) if any(greedy) else None  # [B]
        self._inverse_temperature = torch.tensor(
            [1.0 if g or s is None else 1.0 / s.temperature for g, s in zip(greedy, samplings, strict=True)],
            dtype=torch.float64,
            device=device,
        ).unsqueeze(1)  # [B, 1]
        narrow = [self._top_k if g or s is None else s.top_k for g, s in zip(greedy, samplings, strict=True)]
        self._beyond: torch.Tensor | None = None  # [B, top_k], where a row's law is narrower than the widest one
        if min(narrow) < self._top_k:
            ranks = torch.arange(self._top_k, device=device)
            self._beyond = ranks >= torch.tensor(narrow, device=device).unsqueeze(1)

    def step(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Draw a token for the first ``len(logits)`` rows.

        Args:
            logits: [B', V], B' ≤ B.

        Returns:
            ids int64 [B']; largest logits [B'], not finite where the row is broken; and, where laws are kept, their
            support int64 [B', top_k] and probabilities float64 [B', top_k].
        """
        if self._restricts and self._forbidden is not None:
            # Before sampling, so that the law is the one that the token was drawn from.
            forbidden = self._restricted[: len(logits), None] & self._forbidden[: logits.shape[-1]]
            logits = logits.masked_fill(forbidden, float("-inf"))
        largest, likeliest = logits.max(dim=-1)
        if not self.keeps_laws:
            return likeliest, largest, None, None
        rows = len(logits)
        top_k = min(self._top_k, logits.shape[-1])
        values, support = logits.topk(top_k, dim=-1)  # descending
        scaled = (values.double() - largest.double().unsqueeze(1)) * self._inverse_temperature[:rows]
        if self._beyond is not None:
            scaled = scaled.masked_fill(self._beyond[:rows, :top_k], float("-inf"))
        probs = scaled.softmax(dim=-1)
        noise = self._noise(rows, top_k, logits.device)
        # argmax(p / Exp(1)) is a draw from p.
        drawn = support.gather(1, (probs / noise).argmax(dim=-1, keepdim=True)).squeeze(1)
        if self._greedy is not None:
            # Among equal logits topk may order otherwise; a greedy row takes what it would without sampled neighbours.
            drawn = torch.where(self._greedy[:rows], likeliest, drawn)
        return drawn, largest, support, probs

    def _noise(self, rows: int, top_k: int, device: torch.device) -> torch.Tensor:
        noise = torch.ones(rows, top_k, dtype=torch.float64, device=device)
        own = [row for row in range(rows) if self._generators[row] is not None]
        if len(own) < rows:
            noise.exponential_(generator=self._shared)
        for row in own:
            # A seeded row's draws must not depend on who else is in the batch, nor on how wide the others' laws are.
            noise[row, : self._own_top_k[row]].exponential_(generator=self._generators[row])
        return noise
