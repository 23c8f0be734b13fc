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
        seconds = _counter(registry, "vllm:tokentiming_seconds", "Time spent, by stage.", ["stage"])
        self._published = {
            "proposals": _counter(registry, "vllm:tokentiming_proposals", "Requests and cycles with a proposal.", []),
            "repeats": _counter(
                registry, "vllm:tokentiming_repeats", "Proposals that repeat the request's own text.", []
            ),
            "appended_tokens": _counter(
                registry,
                "vllm:tokentiming_appended_tokens",
                "Proposed tokens that repeat the request's own text after its draft.",
                [],
            ),
            "draft_tokens": _counter(
                registry, "vllm:tokentiming_draft_tokens", "Tokens drafted, in the draft's vocabulary.", []
            ),
            "proxy_tokens": _counter(
                registry, "vllm:tokentiming_proxy_tokens", "Tokens proposed, in the target's vocabulary.", []
            ),
            "rows_dropped": _counter(
                registry,
                "vllm:tokentiming_rows_dropped",
                "Cycles whose rows did not fit the buffer: proposed as point masses.",
                [],
            ),
            **{f"seconds/{stage}": seconds.labels(stage) for stage in STAGES},
        }
        self.silences: Tally[str] = Tally()
        self.totals: dict[str, float] = dict.fromkeys(self._published, 0)
        self._cycle: dict[str, float] = dict.fromkeys(self._published, 0)
        self._warned: set[str] = set()
        self._logged_at = time.monotonic()
        self._logged = dict(self.totals)

    def silent(self, reason: str) -> None:
        """One request has no proposal this cycle."""
        self.silences[reason] += 1
        self._silences.labels(reason).inc()

    def proposed(
        self, *, draft_tokens: int, proxy_tokens: int, appended_tokens: int = 0, is_repeat: bool = False
    ) -> None:
        """One request has a proposal."""
        self._cycle["repeats"] += is_repeat
        self._cycle["proposals"] += 1
        self._cycle["appended_tokens"] += appended_tokens
        self._cycle["draft_tokens"] += draft_tokens
        self._cycle["proxy_tokens"] += proxy_tokens

    def rows_dropped(self) -> None:
        """One cycle's rows did not fit."""
        self._cycle["rows_dropped"] += 1

    def spent(self, stage: str, seconds: float) -> None:
        """Time of one stage of one cycle."""
        self._cycle[f"seconds/{stage}"] += seconds

    def warn_once(self, kind: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        """Log the first failure of a kind; the counters tell how many follow."""
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(message, *arguments, exc_info=exc_info)
            logger.warning("the line above is logged once; vllm:tokentiming_silences counts what follows")

    def end_cycle(self) -> None:
        """Publish what this cycle counted, and log now and then."""
        for key, change in self._cycle.items():
            if change:
                self._published[key].inc(change)
                self.totals[key] += change
                self._cycle[key] = 0
        now = time.monotonic()
        if now - self._logged_at >= LOG_INTERVAL:
            self._logged_at = now
            self._log()

    def _log(self) -> None:
        change = {key: value - self._logged[key] for key, value in self.totals.items()}
        count = change["proposals"]
        if not count:
            return
        self._logged = dict(self.totals)
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
