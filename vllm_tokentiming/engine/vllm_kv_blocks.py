"""Which KV blocks hold which draft context: allocation, rollback, prefix reuse and eviction.

Owns the free list (vLLM's ``BlockPool``) and one :class:`DraftSequence` per request. Invariants: a sequence's blocks
cover its ``ids``, which are exactly the tokens whose KV is valid; a block that the prefix cache can hand to another
sequence is never written again.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from vllm_tokentiming.errors import DraftCacheExhaustedError

_ROLLBACK_MARGIN = 64
"""Blocks this close to the end of a context are not offered for reuse: re-encoding at the seam may rewrite them."""

_GROUP = 0


@dataclass(slots=True, eq=False)
class DraftSequence:
    """One request's draft context in the cache."""

    ids: list[int] = field(default_factory=list)
    blocks: list[KVCacheBlock] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_registered(self) -> int:
        """Leading blocks that the prefix cache knows."""
        return len(self.hashes)

    def block_ids(self) -> list[int]:
        """The sequence's row of the block table."""
        return [block.block_id for block in self.blocks]


class DraftBlocks:
    """The draft's KV blocks.

    Args:
        num_blocks: blocks in the cache; block 0 is vLLM's null block and never handed out.
        block_size: tokens in a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_gpu_blocks=num_blocks, enable_caching=True, hash_block_size=block_size)
        # Least recently used first.
        self._sequences: OrderedDict[str, DraftSequence] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; those with a reusable prefix are among them."""
        return int(self._pool.get_num_free_blocks())

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, request_id: str, context_ids: Sequence[int]) -> DraftSequence:
        """The request's sequence; a new one starts with whatever prefix of ``context_ids`` the cache still holds."""
        found = self._sequences.get(request_id)
        if found is not None:
            self._sequences.move_to_end(request_id)
            return found
        created = self._sequences[request_id] = DraftSequence()
        self._reuse_prefix(created, context_ids)
        return created

    def roll_back(self, sequence: DraftSequence, num_tokens: int) -> int:
        """Keep the first ``num_tokens`` tokens, fewer where a block that others may read would be rewritten.

        Returns:
            The number of tokens kept.
        """
        first_written = num_tokens // self.block_size
        if first_written < sequence.num_registered:
            num_tokens = first_written * self.block_size
            del sequence.hashes[first_written:]
        keep = -(-num_tokens // self.block_size)
        if keep < len(sequence.blocks):
            self._pool.free_blocks(reversed(sequence.blocks[keep:]))
            del sequence.blocks[keep:]
        del sequence.ids[num_tokens:]
        return num_tokens

    def reserve(self, sequence: DraftSequence, num_tokens: int, *, busy: Collection[str]) -> None:
        """Give the sequence room for ``num_tokens`` tokens in all, evicting idle requests, coldest first.

        Raises:
            DraftCacheExhaustedError: no block is free, and every other request is ``busy``.
        """
        missing = -(-num_tokens // self.block_size) - len(sequence.blocks)
        if missing <= 0:
            return
        if missing > self.num_free:
            self._evict(missing, busy)
        sequence.blocks.extend(self._pool.get_new_blocks(missing))

    def register_prefix(self, sequence: DraftSequence) -> None:
        """Offer the full blocks of the sequence for reuse by others."""
        full = max(0, len(sequence.ids) - _ROLLBACK_MARGIN) // self.block_size
        known = sequence.num_registered
        if full <= known:
            return
        for index in range(known, full):
            parent = sequence.hashes[-1] if sequence.hashes else b""
            sequence.hashes.append(self._hash(parent, sequence.ids, index))
        # BlockPool reads nothing but the hashes of its Request argument (KV events are off).
        self._pool.cache_full_blocks(
            request=SimpleNamespace(block_hashes=sequence.hashes),
            blocks=sequence.blocks,
            num_cached_blocks=known,
            num_full_blocks=full,
            block_size=self.block_size,
            kv_cache_group_id=_GROUP,
        )

    def release(self, request_id: str) -> None:
        """Free the request's blocks; those that are registered stay reusable until they are handed out again."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._pool.free_blocks(reversed(sequence.blocks))

    def forget(self, request_id: str) -> list[int]:
        """Free the request's blocks and make sure that nobody reuses what is in them: their KV cannot be trusted.

        Returns:
            The blocks that nobody reads now, whose KV the caller must clear.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._pool.evict_blocks({block.block_id for block in sequence.blocks[: sequence.num_registered]})
        self.release(request_id)
        return [block.block_id for block in sequence.blocks if block.ref_cnt == 0]

    def _evict(self, missing: int, busy: Collection[str]) -> None:
        for request_id in [rid for rid in self._sequences if rid not in busy]:
            if self.num_free >= missing:
                break
            self.release(request_id)
        if self.num_free < missing:
            raise DraftCacheExhaustedError(
                f"the draft's KV cache is exhausted: {missing} blocks of {self.block_size} tokens are needed, "
                f"{self.num_free} are free. Raise draft_kv_cache_memory, or lower --max-num-seqs or "
                "draft_max_model_len."
            )

    def _reuse_prefix(self, sequence: DraftSequence, context_ids: Sequence[int]) -> None:
        parent: BlockHash | bytes = b""
        for index in range((len(context_ids) - 1) // self.block_size):
            block_hash = self._hash(parent, context_ids, index)
            cached = self._pool.get_cached_block(block_hash, [_GROUP])
            if cached is None:
                break
            self._pool.touch(cached)
            sequence.blocks.append(cached[0])
            sequence.hashes.append(block_hash)
            parent = block_hash
        sequence.ids.extend(context_ids[: len(sequence.blocks) * self.block_size])

    def _hash(self, parent: bytes, ids: Sequence[int], index: int) -> BlockHash:
        tokens = array("i", ids[index * self.block_size : (index + 1) * self.block_size]).tobytes()
        return BlockHash(hashlib.sha256(parent + tokens).digest())
