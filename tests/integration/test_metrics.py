"""Our counters reach a scraper in another process as soon as a cycle ends, without a further one to push them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from prometheus_client import CollectorRegistry, multiprocess

from vllm_tokentiming.metrics import STAGES, Metrics

CYCLES = """
from vllm_tokentiming.metrics import Metrics
metrics = Metrics()
for _ in range(3):
    metrics.proposed(draft_tokens=5, proxy_tokens=4)
    metrics.proposed(draft_tokens=5, proxy_tokens=2)
    metrics.silent("inside_character")
    metrics.spent("draft", 0.25)
    metrics.end_cycle()
"""


def samples(registry: CollectorRegistry) -> dict[str, float]:
    return {
        s.name + "".join(f"/{value}" for value in s.labels.values()): s.value
        for metric in registry.collect()
        for s in metric.samples
        if not s.name.endswith("_created")
    }


def test_a_scraper_in_another_process_sees_every_finished_cycle(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-c", CYCLES], env={**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}, check=True
    )
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    found = samples(registry)
    assert found["vllm:tokentiming_proposals_total"] == 6
    assert found["vllm:tokentiming_draft_tokens_total"] == 30
    assert found["vllm:tokentiming_proxy_tokens_total"] == 18
    assert found["vllm:tokentiming_silences_total/inside_character"] == 3
    assert found["vllm:tokentiming_seconds_total/draft"] == 0.75


def test_a_cycle_is_counted_once_and_when_it_ends():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    metrics.proposed(draft_tokens=5, proxy_tokens=4)
    for stage in STAGES:
        metrics.spent(stage, 0.5)
    assert samples(registry)["vllm:tokentiming_proposals_total"] == 0
    metrics.end_cycle()
    metrics.end_cycle()
    found = samples(registry)
    assert found["vllm:tokentiming_proposals_total"] == metrics.totals["proposals"] == 1
    assert {found[f"vllm:tokentiming_seconds_total/{stage}"] for stage in STAGES} == {0.5}


def test_the_log_line_tells_what_changed_since_the_last_one(monkeypatch, caplog):
    monkeypatch.setattr("vllm_tokentiming.metrics.LOG_INTERVAL", 0.0)
    # Where vLLM's plugins were loaded, our logger does not propagate to the root any more.
    monkeypatch.setattr(logging.getLogger("vllm_tokentiming"), "propagate", True)
    metrics = Metrics(CollectorRegistry())
    with caplog.at_level("INFO", logger="vllm_tokentiming.metrics"):
        metrics.proposed(draft_tokens=5, proxy_tokens=4)
        metrics.spent("draft", 0.002)
        metrics.end_cycle()
        metrics.end_cycle()
        metrics.proposed(draft_tokens=3, proxy_tokens=1)
        metrics.silent("inside_character")
        metrics.end_cycle()
    first, second = (record.getMessage() for record in caplog.records)
    assert "1 proposals, 5.00 draft and 4.00 proxy tokens each" in first
    assert "draft 2.00" in first
    assert "1 proposals, 3.00 draft and 1.00 proxy tokens each" in second
    assert second.endswith("without a proposal so far: {'inside_character': 1}")
