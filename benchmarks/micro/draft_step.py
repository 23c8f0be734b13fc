"""What a decode step of the draft costs on CPU, beside the time that its weights need from memory.

    python -m benchmarks.micro.draft_step --draft FOLDER [--dtype float32] [--compiled] [--threads 2 1] [--json FILE]

A step is ``DraftForward.decode_step``: the model and its logits, no sampling. Ways: vLLM's layers, eager or compiled,
the hand-written step on vLLM's kernels, and that on int8 kernels of our own; weights as they are, and int8
(``draft_quantization``; without AMX only our own kernels read these). The floor is the bytes of weights that a step
reads, by the bandwidth of reading a buffer of that size with the same threads. Every number of threads is a process of
its own, bound to cores as vLLM binds its workers. All ways take turns, a few steps each, and before each turn the
benchmark waits for a moment in which nobody else computes, as long as its patience lasts. On a machine that others use
the minimum and the lowest decile say what it can do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from benchmarks.provenance import provenance
from scripts.cpu_env import one_process_environment

if TYPE_CHECKING:
    from vllm_tokentiming.engine.vllm_forward import HandStep

STEPS = 8
_PASSED_ON = ("draft", "dtype", "context", "batch", "rounds", "patience")
BLOCKS = 8
"""KV blocks of a row: room for a context of 1000 tokens."""


def weight_bytes(folder: Path, float_bytes: int) -> int:
    """Bytes of weights that one step reads: everything but an embedding that is not also the head.

    Args:
        folder: with safetensors.
        float_bytes: size of a number that is not int8.
    """
    sizes: dict[str, int] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                tensor = file.get_tensor(key)
                sizes[key] = tensor.numel() * (1 if tensor.dtype == torch.int8 else float_bytes)
    untied = "lm_head.weight" in sizes
    return sum(size for key, size in sizes.items() if not (untied and key.endswith("embed_tokens.weight")))


def start_distributed() -> None:
    """What a vLLM worker does before it loads a model."""
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}", backend="gloo"
    )
    ensure_model_parallel_initialized(1, 1)


def load(folder: Path, *, dtype: str, int8: bool, compiled: bool, max_num_seqs: int) -> Any:
    """A draft engine under a target that is the same model."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs

    from vllm_tokentiming.config import TokenTimingConfig
    from vllm_tokentiming.engine.vllm_engine import VllmDraftEngine

    config = EngineArgs(
        model=str(folder),
        dtype=dtype,
        enforce_eager=not compiled,
        max_num_seqs=max_num_seqs,
        skip_tokenizer_init=True,
    ).create_engine_config()
    options = TokenTimingConfig(
        draft_model=str(folder), draft_max_model_len=1024, draft_quantization="int8" if int8 else None
    )
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            start_distributed()
        return VllmDraftEngine(config, options)


def hand_steps(engine: Any) -> dict[str, HandStep]:
    """The hand-written steps of a draft: the one that it takes, and the one on vLLM's kernels alone."""
    from vllm_tokentiming.engine.vllm_decode_step import LlamaDecodeStep

    chosen = engine._forward.hand_step
    if chosen is None:
        sys.exit("this draft has no hand-written step here; VLLM_LOGGING_LEVEL=INFO says why")
    steps: dict[str, HandStep] = {"hand": LlamaDecodeStep(engine._model, cache=engine._cache)}
    return {**steps, "own kernels": chosen} if chosen.has_int8_layers else steps


def stepper(engine: Any, *, hand_step: HandStep | None, context: int, batch: int) -> Callable[[], list[float]]:
    """A function that takes some steps from the same context and returns their milliseconds."""
    forward = engine._forward
    generator = torch.Generator().manual_seed(0)
    block_ids = [[1 + BLOCKS * row + i for i in range(BLOCKS)] for row in range(batch)]
    ids = torch.randint(engine.vocab_size, (batch, context), generator=generator).tolist()
    tokens = torch.randint(engine.vocab_size, (STEPS, batch), generator=generator)
    forward.prefill(ids=ids, starts=[0] * batch, block_ids=block_ids)

    def steps() -> list[float]:
        forward.hand_step = hand_step
        forward.begin_decode(lengths=[context] * batch, block_ids=block_ids)
        spent = []
        for step in tokens:
            began = time.perf_counter()
            forward.decode_step(step)
            spent.append(1e3 * (time.perf_counter() - began))
        return spent

    return steps


def reader(num_bytes: int) -> Callable[[], list[float]]:
    """A function that reads a buffer of that size and returns GB/s, by a sum and by a scalar product."""
    buffer = torch.ones(num_bytes // 4)

    def read() -> list[float]:
        found = []
        for reduce in (buffer.sum, lambda: torch.dot(buffer, buffer)):
            began = time.perf_counter()
            reduce()
            found.append(num_bytes / 1e9 / (time.perf_counter() - began))
        return found

    return read


class Patience:
    """Waits for idle moments, some seconds in all."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds

    def wait(self) -> None:
        """Return in an idle moment, or when no patience is left."""
        while self.left > 0:
            before = self._ticks()
            time.sleep(0.1)
            self.left -= 0.1
            idle, total = (after - b for after, b in zip(self._ticks(), before, strict=True))
            if total and idle / total > 0.9:
                return

    @staticmethod
    def _ticks() -> tuple[int, int]:
        fields = [int(f) for f in Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]]
        return fields[3] + fields[4], sum(fields)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """In the process with the right number of threads."""
    from vllm_tokentiming.engine.int8_checkpoint import int8_checkpoint

    folder: Path = arguments.draft
    float_kind, float_bytes = {"bfloat16": ("bf16", 2), "float32": ("float32", 4)}[arguments.dtype]
    sizes = {float_kind: weight_bytes(folder, float_bytes), "int8": weight_bytes(int8_checkpoint(folder), float_bytes)}
    ways: dict[str, Callable[[], list[float]]] = {}
    for compiled in (False, True) if arguments.compiled else (False,):
        for kind in sizes:
            engine = load(
                folder,
                dtype=arguments.dtype,
                int8=kind == "int8",
                compiled=compiled,
                max_num_seqs=max(2, arguments.batch),
            )
            shape = {"context": arguments.context, "batch": arguments.batch}
            vllm_weights = "int8" if engine.config.model_config.quantization else float_kind
            name = f"layers {'compiled' if compiled else 'eager'} {vllm_weights}"
            ways.setdefault(name, stepper(engine, hand_step=None, **shape))
            if not compiled:
                for name, step in hand_steps(engine).items():
                    weights = kind if name == "own kernels" else vllm_weights
                    ways.setdefault(f"{name} {weights}", stepper(engine, hand_step=step, **shape))
    readers = {kind: reader(size) for kind, size in sizes.items()}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    bandwidth: dict[str, list[float]] = {kind: [] for kind in sizes}
    patience = Patience(arguments.patience)
    for _ in range(arguments.rounds):
        for name, steps in ways.items():
            patience.wait()
            taken[name] += steps()
        for kind, read in readers.items():
            patience.wait()
            bandwidth[kind] += read()
    results = {}
    for name, figures in taken.items():
        kind = name.split()[-1]
        floor = sizes[kind] / 1e6 / max(bandwidth[kind])
        decile = statistics.quantiles(figures, n=10)[0]
        results[name] = {
            "min_ms": round(min(figures), 2),
            "p10_ms": round(decile, 2),
            "median_ms": round(statistics.median(figures), 2),
            "floor_ms": round(floor, 2),
            "p10_over_floor": round(decile / floor, 2),
        }
    return {
        "threads": arguments.threads[0],
        "weight_bytes_read": sizes,
        "read_gb_per_s": {kind: round(max(found), 1) for kind, found in bandwidth.items()},
        "results": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", type=Path, required=True, help="folder of a Llama or Qwen2 model")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of activations and KV")
    parser.add_argument("--context", type=int, default=200, help="tokens before the first step")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, nargs="+", default=[len(os.sched_getaffinity(0))])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for idle moments, in all")
    parser.add_argument("--compiled", action="store_true", help="also vLLM's compiled layers (minutes)")
    parser.add_argument("--json", type=Path, help="write results and provenance to this file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments)))
        return
    passed = [f"--{name}={getattr(arguments, name)}" for name in _PASSED_ON]
    passed += ["--compiled"] if arguments.compiled else []
    measured = []
    for threads in arguments.threads:
        environment = {**one_process_environment(threads), "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "benchmarks.micro.draft_step", "--child", f"--threads={threads}", *passed]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        found = json.loads(output.splitlines()[-1])
        found["environment"] = {
            name: environment[name] for name in ("KMP_AFFINITY", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
        }
        measured.append(found)
        _report(found)
    if arguments.json:
        report = {
            "benchmark": "micro.draft_step",
            "draft": arguments.draft.name,
            "dtype": arguments.dtype,
            "context": arguments.context,
            "batch": arguments.batch,
            "rounds": arguments.rounds,
            "steps_per_round": STEPS,
            "measured": measured,
            "provenance": provenance(),
        }
        arguments.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _report(found: dict[str, Any]) -> None:
    print(f"{found['threads']} threads, reading {found['read_gb_per_s']} GB/s")
    print(f"{'':>24} {'min ms':>8} {'p10':>8} {'median':>8} {'floor':>8} {'p10/floor':>9}")
    for name, row in found["results"].items():
        print(
            f"{name:>24} {row['min_ms']:8.2f} {row['p10_ms']:8.2f} {row['median_ms']:8.2f} {row['floor_ms']:8.2f} "
            f"{row['p10_over_floor']:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
