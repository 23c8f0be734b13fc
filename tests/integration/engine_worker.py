"""Run in a process of its own: builds one vLLM engine after the other, in this process, and plays scenarios on each.

Arguments: a file for the answers, and a JSON list of jobs: ``name``, ``engine`` (arguments of ``LLM`` beside the common
ones) and ``scenarios`` (functions of ``scenarios.py``, ``request_life.py`` and ``sampling_features.py``). Writes a line
of JSON for each job as soon as it is done.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))


def register_kernels_once() -> None:
    """Let vLLM register its CPU kernels for the first engine only: it cannot once llvmlite is loaded, and need not."""
    from vllm.triton_utils import dispatcher

    stock, done = dispatcher.register_kernels, []

    def register_kernels(overrides: Any) -> None:
        if not done:
            done.append(True)
            stock(overrides)

    dispatcher.register_kernels = register_kernels


class Records(logging.Handler):
    """Keeps what was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def play(job: dict[str, Any], records: Records) -> dict[str, Any]:
    """Build the engine of one job and run its scenarios; what one of them raises is its answer."""
    import gc

    import request_life
    import sampling_features
    import scenarios
    from vllm import LLM

    from vllm_tokentiming.tiny_pair import tiny_pair

    records.lines.clear()
    common = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 16, "seed": 0}
    llm = LLM(model=str(tiny_pair().target), disable_log_stats=False, **{**common, **job["engine"]})
    known = {**vars(request_life), **vars(sampling_features), **vars(scenarios)}
    answers = {}
    for name in job["scenarios"]:
        with scenarios.counted(llm) as counts:
            try:
                value = known[name](llm)
            except Exception:  # noqa: BLE001
                value = {"error": traceback.format_exc()}
        answers[name] = {"value": value, **counts}
    del llm
    gc.collect()
    return {"name": job["name"], "answers": answers, "log": list(records.lines)}


def main() -> None:
    """Play every job."""
    register_kernels_once()
    import vllm  # noqa: F401

    records = Records()
    with Path(sys.argv[1]).open("w") as file:
        for job in json.loads(sys.argv[2]):
            logging.getLogger("vllm_tokentiming").addHandler(records)
            print(json.dumps(play(job, records)), file=file, flush=True)
    # The engine's shutdown can hang at interpreter exit; everything is written.
    os._exit(0)


if __name__ == "__main__":
    main()
