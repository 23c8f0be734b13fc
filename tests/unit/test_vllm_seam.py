"""Does this vLLM still have what the package reaches into? A new one must fail here, and not in a user's server.

Three nets: every name that the package imports exists, every signature that it relies on has the parameters it passes
or wraps, and vLLM's runner still calls the proposer as the proposer expects.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import vllm_tokentiming

pytest.importorskip("vllm")

PACKAGE = Path(vllm_tokentiming.__file__).parent

SIGNATURES = {
    "vllm.config:VllmConfig": "model_config quant_config compilation_config cache_config parallel_config "
    "additional_config speculative_config lora_config kv_transfer_config kv_events_config ec_transfer_config "
    "weight_transfer_config watermark_config reasoning_config",
    "vllm.engine.arg_utils:EngineArgs.create_speculative_config": "self target_model_config",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids": "self",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": "self",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync": "self",
    "vllm.v1.sample.rejection_sampler:expand_batch_to_tokens": "x cu_num_tokens num_tokens replace_from replace_to",
    "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_top_p_pytorch": "logits k p allow_cpu_sync",
    "vllm.v1.sample.rejection_sampler:rejection_sample": "draft_token_ids num_draft_tokens max_spec_len "
    "cu_num_draft_tokens draft_probs target_logits bonus_token_ids sampling_metadata",
    "vllm.v1.sample.rejection_sampler:RejectionSampler.forward": "self metadata draft_probs logits sampling_metadata",
    "vllm.v1.spec_decode.metadata:SpecDecodeMetadata": "draft_token_ids num_draft_tokens target_logits_indices "
    "bonus_logits_indices",
    "vllm.model_executor.layers.utils:apply_penalties": "logits prompt_tokens_tensor output_tokens_tensor "
    "presence_penalties frequency_penalties repetition_penalties",
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.apply_to_logits": "self logits predict_bonus_token "
    "spec_token_ids",
    "vllm.v1.sample.thinking_budget_state:ThinkingBudgetStateHolder.sync_batch": "self batch_update",
    "vllm.model_executor.model_loader:get_model": "vllm_config",
    "vllm.forward_context:set_forward_context": "attn_metadata vllm_config num_tokens slot_mapping "
    "cudagraph_runtime_mode batch_descriptor",
    "vllm.compilation.cuda_graph:CUDAGraphWrapper": "runnable vllm_config runtime_mode",
    "vllm.compilation.monitor:set_cudagraph_capturing_enabled": "enabled",
    "vllm.config:CompilationConfig.resolve_cudagraph_mode_and_sizes": "self min_cg_support min_cg_attn_backend",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.initialize_cudagraph_keys": "self cudagraph_mode",
    "vllm.v1.cudagraph_dispatcher:CudagraphDispatcher.dispatch": "self num_tokens uniform_decode valid_modes",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": "self common_attn_metadata",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
    "vllm.v1.attention.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs "
    "num_actual_tokens max_query_len max_seq_len block_table_tensor slot_mapping causal seq_lens_cpu_upper_bound "
    "positions",
    "vllm.v1.core.block_pool:BlockPool": "num_gpu_blocks enable_caching hash_block_size",
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": "self num_blocks",
    "vllm.v1.core.block_pool:BlockPool.free_blocks": "self ordered_blocks",
    "vllm.v1.core.block_pool:BlockPool.evict_blocks": "self block_ids",
    "vllm.v1.core.block_pool:BlockPool.touch": "self blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": "self block_hash kv_cache_group_ids",
    "vllm.v1.core.block_pool:BlockPool.cache_full_blocks": "self request blocks num_cached_blocks num_full_blocks "
    "block_size kv_cache_group_id",
    "vllm_tokentiming.engine.vllm_kv_cache:kv_cache_planning.unify_hybrid_kv_cache_specs": "kv_cache_spec",
    "vllm_tokentiming.engine.vllm_kv_cache:kv_cache_planning.get_kv_cache_groups": "vllm_config kv_cache_spec",
    "vllm_tokentiming.engine.vllm_kv_cache:kv_cache_planning.get_kv_cache_config_from_groups": "vllm_config "
    "kv_cache_groups available_memory",
    "vllm.v1.worker.utils:allocate_kv_cache": "kv_cache_config device layout kernel_block_sizes",
    "vllm.v1.worker.utils:prepare_kernel_block_sizes": "kv_cache_config attn_groups",
    "vllm.v1.worker.utils:bind_kv_cache": "kv_caches forward_context runner_kv_caches kv_cache_groups",
    "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders": "self vllm_config device kernel_block_size",
}

OF_OTHER_VERSIONS = frozenset({"kv_cache_planning"})


def names_imported_of_vllm() -> Iterator[tuple[str, str, str]]:
    """(file, module, name) of each ``from vllm… import …``, wherever in a module it stands."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                for alias in node.names:
                    yield str(file.relative_to(PACKAGE)), node.module or "", alias.name


@pytest.mark.parametrize(("file", "module", "name"), sorted(set(names_imported_of_vllm())))
def test_every_imported_name_exists(file, module, name):
    if name in OF_OTHER_VERSIONS:
        pytest.skip("one of two places, tried in turn; what is found there is a signature below")
    assert hasattr(importlib.import_module(module), name) or importlib.util.find_spec(f"{module}.{name}")


def test_the_imports_were_found():
    found = {(module, name) for _, module, name in names_imported_of_vllm()}
    assert ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner") in found
    assert len(found) > 30


@pytest.mark.parametrize("place", SIGNATURES)
def test_signatures_have_what_is_passed(place):
    module, _, path = place.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    parameters = list(inspect.signature(found).parameters)
    wanted = SIGNATURES[place].split()
    # What is passed by position must stand first, in this order; the rest is passed by name.
    by_position = {
        "rejection_sample": 8,
        "apply_penalties": 6,
        "RejectionSampler.forward": 5,
        "apply_top_k_top_p_pytorch": 3,
    }.get(path, 1)
    assert parameters[:by_position] == wanted[:by_position]
    assert set(wanted) <= set(parameters), f"{place} has {parameters}"


def test_nothing_new_changes_the_logits_of_a_batch():
    """Direct verification stands aside for each of these; what a new field asks for, it would leave out."""
    from vllm.v1.sample.metadata import SamplingMetadata

    harmless = "temperature all_greedy all_random generators output_token_ids spec_token_ids prompt_token_ids"
    penalties = "no_penalties frequency_penalties presence_penalties repetition_penalties"
    looked_at = (
        "top_p top_k max_num_logprobs logprob_token_ids allowed_token_ids_mask bad_words_token_ids logitsprocs "
        "thinking_budget_state_holder"
    )
    known = f"{harmless} {penalties} {looked_at}".split()
    assert sorted(field.name for field in dataclasses.fields(SamplingMetadata)) == sorted(known)


def test_the_runner_calls_a_custom_proposer_as_ours_is_called():
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from vllm_tokentiming import TokenTimingProposer

    stock = inspect.unwrap(GPUModelRunner.propose_draft_token_ids)
    branches = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(stock))))
        if isinstance(node, ast.If) and "'custom_class'" in ast.dump(node.test)
    ]
    assert len(branches) == 1
    calls = [
        node
        for statement in branches[0].body
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "propose"
    ]
    assert len(calls) == 1
    given = [ast.unparse(argument).rpartition(".")[2] for argument in calls[0].args]
    ours = [name for name in inspect.signature(TokenTimingProposer.propose).parameters if name != "self"]
    assert given == ours[: len(given)]
    assert [keyword.arg for keyword in calls[0].keywords] == ours[len(given) :]


def test_the_runner_still_has_what_is_read_and_set():
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner, batch = inspect.getsource(GPUModelRunner), inspect.getsource(InputBatch)
    for name in ("self.requests", "self.input_batch", "self.discard_request_mask", "self.drafter"):
        assert f"{name}:" in runner or f"{name} =" in runner, name
    # Rows: reset at the start of the call that the seam wraps, and read by row and number of tokens afterwards.
    assert "self._draft_probs = None" in runner
    assert "self._draft_prob_req_ids" in runner
    for name in ("num_tokens_no_spec", "token_ids_cpu", "generators"):
        assert f"self.{name}" in batch, name


def test_a_schedule_of_speculative_tokens_still_keeps_steps_unpadded():
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    condition = source.partition("padded_num_tokens = ")[0].rpartition("if (")[2]
    assert "self.dynamic_sd_lookup is None" in condition
    assert "self.dynamic_sd_lookup[" in source


def test_the_groups_that_a_draft_is_kept_out_of_are_where_they_were():
    from vllm.distributed import parallel_state

    assert hasattr(parallel_state, "_TP")
    assert hasattr(parallel_state, "_PP")
    for function, name in ((parallel_state.get_tp_group, "_TP"), (parallel_state.get_pp_group, "_PP")):
        assert f"return {name}" in inspect.getsource(function)
