"""What the plugin counts: requests left without a proposal and why, proposals, and the time of each stage.

The counters are ``prometheus_client`` ones in the worker's process. vLLM's own speculative metrics (drafts, draft
tokens, accepted tokens, per position) need nothing from here. The worker is another process than the API server, so
ours appear on ``/metrics`` when ``PROMETHEUS_MULTIPROC_DIR`` is set, and in the log every ``LOG_INTERVAL`` seconds in
any case.
"""

from __future__ import annotations

import logging
import time
from collections import Counter as Tally
from typing import Final

from prometheus_client import REGISTRY as DEFAULT_REGISTRY
from prometheus_client import CollectorRegistry, Counter

logger = logging.getLogger(__name__)

LOG_INTERVAL: Final = 10.0

STAGES: Final = ("context", "draft", "proposal", "rows")


class Metrics:
    """Counters of one proposer."""

    def __init__(self, registry: CollectorRegistry = DEFAULT_REGISTRY) -> None:
        self._silences = _counter(
            registry, "vllm:tokentiming_silences", "Requests and cycles without a proposal, by reason.", ["reason"]
        )
        self._proposals = _counter(registry, "vllm:tokentiming_proposals", "Requests and cycles with a proposal.", [])
        self._draft_tokens = _counter(
            registry, "vllm:tokentiming_draft_tokens", "Tokens drafted, in the draft's vocabulary.", []
        )
        self._proxy_tokens = _counter(
            registry, "vllm:tokentiming_proxy_tokens", "Tokens proposed, in the target's vocabulary.", []
        )
        self._rows_dropped = _counter(
            registry,
            "vllm:tokentiming_rows_dropped",
            "Cycles whose rows did not fit the buffer: proposed as point masses.",
            [],
        )
        self._seconds = _counter(registry, "vllm:tokentiming_seconds", "Time spent, by stage.", ["stage"])
        self.silences: Tally[str] = Tally()
        self.totals: Tally[str] = Tally()
        self.seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        self._warned: set[str] = set()
        self._logged_at = time.monotonic()
        self._logged: Tally[str] = Tally()

    def silent(self, reason: str) -> None:
        """One request has no proposal this cycle."""
        self.silences[reason] += 1
        self._silences.labels(reason).inc()

    def proposed(self, *, draft_tokens: int, proxy_tokens: int) -> None:
        """One request has a proposal."""
        self.totals["proposals"] += 1
        self.totals["draft_tokens"] += draft_tokens
        self.totals["proxy_tokens"] += proxy_tokens

    def rows_dropped(self) -> None:
        """One cycle's rows did not fit."""
        self.totals["rows_dropped"] += 1

    def spent(self, stage: str, seconds: float) -> None:
        """Time of one stage of one cycle."""
        self.seconds[stage] += seconds

    def warn_once(self, kind: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        """Log the first failure of a kind; the counters tell how many follow."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, *arguments, exc_info=exc_info)
            logger.warning("the line above is logged once; vllm:tokentiming_silences counts what follows")

    def end_cycle(self) -> None:
        """Publish now and then; cheap otherwise."""
        now = time.monotonic()
        if now - self._logged_at < LOG_INTERVAL:
            return
        self._logged_at = now
        self.publish()

    def publish(self) -> None:
        """Bring the counters up to date and log what changed."""
        current: Tally[str] = Tally(self.totals)
        current.update({f"seconds/{stage}": value for stage, value in self.seconds.items()})
        change = {key: value - self._logged[key] for key, value in current.items()}
        self._logged = current
        for counter, key in (
            (self._proposals, "proposals"),
            (self._draft_tokens, "draft_tokens"),
            (self._proxy_tokens, "proxy_tokens"),
            (self._rows_dropped, "rows_dropped"),
        ):
            counter.inc(change.get(key, 0))
        for stage in STAGES:
            self._seconds.labels(stage).inc(change.get(f"seconds/{stage}", 0.0))
        if change.get("proposals"):
            count = change["proposals"]
            stages = ", ".join(f"{stage} {1e3 * change[f'seconds/{stage}'] / count:.2f}" for stage in STAGES)
            silent = f"; without a proposal so far: {dict(self.silences)}" if self.silences else ""
            logger.info(
                "TokenTiming: %d proposals, %.2f draft and %.2f proxy tokens each; ms per proposal: %s%s",
                count,
                change["draft_tokens"] / count,
                change["proxy_tokens"] / count,
                stages,
                silent,
            )


def _counter(registry: CollectorRegistry, name: str, help_text: str, labels: list[str]) -> Counter:
    try:
        return Counter(name, help_text, labels, registry=registry)
    except ValueError:
        # Two engines in one process share the default registry; Prometheus has one counter of a name.
        existing = registry._names_to_collectors[f"{name}_total"]  # noqa: SLF001
        if not isinstance(existing, Counter):
            raise
        return existing
