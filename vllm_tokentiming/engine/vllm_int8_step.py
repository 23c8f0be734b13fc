"""How does a Llama-shaped draft take every pass on int8 kernels of our own, its attentions included?

For CPUs where vLLM has no int8 kernels that gain anything: the model stays loaded as it is, with weights that nothing
reads but the embedding, and the int8 checkpoint beside it computes all. A pass is one parallel region from the
embeddings to the hidden states, a second one makes the logits. Owns buffers and descriptions; the KV is the draft's
cache, laid out as vLLM's vector kernels do.

It takes every pass, long prompts too: if some went through the model's own weights, what a request's tokens are
computed with would depend on what else is in the pass, and a seed would not give the same output again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokentiming.engine import attention_kernels as attention
from vllm_tokentiming.engine import int8_kernels as kernels
from vllm_tokentiming.engine import openmp, vllm_int8_layers
from vllm_tokentiming.engine.int8_weights import Int8File
from vllm_tokentiming.engine.vllm_kv_cache import DraftKVCache

_LAYOUTS: Final = {"vec", "vec16"}
"""Of vLLM's attention, by name: those that lay out the KV as our kernels read it."""


@dataclass(frozen=True, slots=True)
class _Buffers:
    """For one number of rows: a pass's description, and what it points to."""

    call: npt.NDArray[np.int64]
    residual: torch.Tensor  # float32 [rows, hidden size]
    hidden: torch.Tensor  # float32 [rows, hidden size]
    requests: torch.Tensor  # int64 [rows]: each its own
    owned: tuple[Any, ...]


def why_unfit(model: Any, cache: DraftKVCache) -> str | None:
    """What keeps a draft that ``vllm_decode_step`` found fit from this step; None where nothing does."""
    return next(_unfit(model, cache), None)


def _unfit(model: Any, cache: DraftKVCache) -> Iterator[str]:
    if reason := vllm_int8_layers.why_unfit(model.model, is_packed=False):
        yield reason
    own, plain = model.model.layers[0].self_attn, model.model.layers[0].self_attn.attn.impl
    more = plain.alibi_slopes is not None or plain.logits_soft_cap or plain.sinks is not None
    if plain.sliding_window != -1 or more:
        yield "its attention looks at less than all, or does more to the scores"
    if not own.rotary_emb.is_neox_style or own.rotary_emb.rotary_dim != own.head_dim:
        yield "it does not rotate whole heads, half by half"
    if (layout := cache.attention_groups[0].get_metadata_builder().isa) not in _LAYOUTS:
        yield f"vLLM lays out its KV for {layout}"
    if reason := attention.why_unfit(head_size=own.head_dim, block_size=cache.block_size):
        yield reason


class Int8Step:
    """Any number of tokens of each row of a batch.

    Args:
        model: the draft, loaded by vLLM, for which :func:`why_unfit` found nothing.
        cache: its KV, bound to its layers.
        folder: its int8 checkpoint.

    Raises:
        ValueError: the weights' shapes do not fit.
    """

    has_int8_layers: Final = True
    is_quantized: Final = True
    takes_every_pass: Final = True

    def __init__(self, model: Any, *, cache: DraftKVCache, folder: Path) -> None:
        body, file = model.model, Int8File(folder)
        self._model = model
        self._embedding = body.embed_tokens.weight.data
        self._layers = vllm_int8_layers.of_checkpoint(body, file)
        self._head = vllm_int8_layers.head_of_checkpoint(model, file)
        self._all_layers = openmp.ParallelRegion(kernels.compiled().all_layers.address)
        own = body.layers[0].self_attn
        self._heads, self._kv_heads = int(own.num_heads), int(own.num_kv_heads)
        self._head_size, self._block_size = int(own.head_dim), cache.block_size
        self._scale = torch.tensor([own.attn.impl.scale], dtype=torch.float32)
        self._cos_sin = own.rotary_emb.cos_sin_cache.float().contiguous()
        self._caches = [layer.self_attn.attn.kv_cache for layer in body.layers]
        self._buffers: dict[int, _Buffers] = {}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self._embedding.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the model and its KV; activations are float32."""
        dtype: torch.dtype = self._embedding.dtype
        return dtype

    def __call__(
        self,
        ids: torch.Tensor,
        *,
        positions: torch.Tensor,
        seq_lens: torch.Tensor,  # noqa: ARG002
        block_table: torch.Tensor,
        slots: torch.Tensor,  # noqa: ARG002
        query_start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As ``LlamaDecodeStep``; lengths and slots follow from positions here, and ``slots`` is left as it is."""
        b = self._buffers.get(len(ids)) or self._make_buffers(len(ids))
        requests = b.requests
        if query_start is not None:
            requests = torch.repeat_interleave(torch.arange(len(query_start) - 1), query_start.diff().long())
        b.residual.copy_(self._embedding[ids])
        b.call[attention.POSITIONS] = positions.data_ptr()
        b.call[attention.REQUESTS] = requests.data_ptr()
        b.call[attention.BLOCK_TABLE] = block_table.data_ptr()
        b.call[attention.TABLE_WIDTH] = block_table.stride(0)
        self._all_layers(b.call.ctypes.data)
        return b.hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary] of hidden states after a step, [rows, H]."""
        if self._head is None:
            logits: torch.Tensor = self._model.compute_logits(hidden.to(self.dtype))
            return logits
        return self._head.logits(hidden)

    def _make_buffers(self, rows: int) -> _Buffers:
        queries, keys = self._heads * self._head_size, self._kv_heads * self._head_size
        qkv, attended = torch.zeros(rows, queries + 2 * keys), torch.zeros(rows, queries)
        hidden = torch.zeros(rows, self._embedding.shape[1])
        regions = self._layers.prepare(qkv=qkv, attended=attended, normed=hidden)
        kv = self._caches[0]
        layers = np.array(
            [(each.data_ptr(), region) for each, region in zip(self._caches, regions.after_attention, strict=True)],
            dtype=np.int64,
        )
        call = attention.describe(
            {
                attention.ROWS: rows,
                attention.HEADS: self._heads,
                attention.KV_HEADS: self._kv_heads,
                attention.HEAD_SIZE: self._head_size,
                attention.BLOCK_SIZE: self._block_size,
                attention.BLOCK_STRIDE: kv.stride(0),
                attention.HEAD_STRIDE: kv.stride(1),
                attention.IS_FLOAT32: kv.dtype == torch.float32,
                attention.SCALE: self._scale.data_ptr(),
                attention.COS_SIN: self._cos_sin.data_ptr(),
                attention.QKV: qkv.data_ptr(),
                attention.ATTENDED: attended.data_ptr(),
                attention.NUM_LAYERS: len(layers),
                attention.LAYERS: layers.ctypes.data,
                attention.BEFORE_LAYERS: regions.before_layers,
            }
        )
        self._buffers[rows] = _Buffers(
            call=call,
            residual=regions.residual,
            hidden=hidden,
            requests=torch.arange(rows),
            owned=(regions, layers, qkv, attended),
        )
        return self._buffers[rows]
