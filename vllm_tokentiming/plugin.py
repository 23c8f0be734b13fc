"""Entry point in ``vllm.general_plugins``: teaches vLLM the method name ``tokentiming``.

vLLM calls :func:`register` in every process, more than once. It does nothing but wrap the place where
``--speculative-config`` becomes a ``SpeculativeConfig``: there ``{"method": "tokentiming", …}`` is rewritten to vLLM's
``custom_class`` form, and our options move to ``additional_config["tokentiming"]``, which travels to the workers.

Symptom without the wrap: vLLM refuses ``"method": "tokentiming"``, because its methods are a closed list. Removal:
when vLLM lets plugins register speculative methods.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Final

from vllm_tokentiming.config import OPTIONS_KEY, TokenTimingConfig, check_num_speculative_tokens
from vllm_tokentiming.errors import ConfigError

logger = logging.getLogger(__name__)

METHOD: Final = "tokentiming"
PROPOSER: Final = "vllm_tokentiming.TokenTimingProposer"
SCHEDULER: Final = "vllm_tokentiming.vllm_adapter.scheduler.UnpaddedScheduler"
PROPOSER_NAMES: Final = (PROPOSER, "vllm_tokentiming.proposer.TokenTimingProposer")


def register() -> None:
    """Called by vLLM; never raises, because who does not use the method must not notice the plugin."""
    try:
        _wrap_engine_args()
    except Exception:
        logger.warning('vllm-tokentiming cannot register "method": "tokentiming" with this vLLM', exc_info=True)
    _share_vllm_log_format()


def _wrap_engine_args() -> None:
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_speculative_config
    if getattr(stock, "_tokentiming", False):
        return

    @functools.wraps(stock)
    def create_speculative_config(self: Any, target_model_config: Any, *args: Any, **kwargs: Any) -> Any:
        speculative = _with_flags(self)
        if speculative is not None and _is_ours(speculative):
            from vllm.platforms import current_platform

            from vllm_tokentiming.vllm_adapter.compat import check_layout, require_supported_vllm
            from vllm_tokentiming.vllm_adapter.draft_check import check_draft

            require_supported_vllm()
            check_layout(pipeline_parallel_size=self.pipeline_parallel_size, device_type=current_platform.device_type)
            self.speculative_config, options = rewrite(speculative, (self.additional_config or {}).get(OPTIONS_KEY))
            self.spec_method = self.spec_model = self.spec_tokens = None
            self.additional_config = {**(self.additional_config or {}), OPTIONS_KEY: options.to_mapping()}
            check_draft(target_model_config, options)
            # A user's own stays.
            self.scheduler_cls = self.scheduler_cls or SCHEDULER
        return stock(self, target_model_config, *args, **kwargs)

    create_speculative_config._tokentiming = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config


def _with_flags(engine_args: Any) -> dict[str, Any] | None:
    """``speculative_config`` with the short flags (``--spec-method`` …) in it; None where neither is given."""
    merged = {k.replace("-", "_"): v for k, v in (engine_args.speculative_config or {}).items()}
    for key, value in (
        ("method", getattr(engine_args, "spec_method", None)),
        ("model", getattr(engine_args, "spec_model", None)),
        ("num_speculative_tokens", getattr(engine_args, "spec_tokens", None)),
    ):
        if value is not None:
            merged.setdefault(key, value)
    return merged or None


def _is_ours(speculative: dict[str, Any]) -> bool:
    return speculative.get("method") == METHOD or speculative.get("model") in PROPOSER_NAMES


def rewrite(speculative: dict[str, Any], additional: object) -> tuple[dict[str, Any], TokenTimingConfig]:
    """Turn either way in into vLLM's ``custom_class`` form.

    Args:
        speculative: ``--speculative-config``. With ``"method": "tokentiming"``, ``model`` names the draft, and the
            other keys are options of :class:`TokenTimingConfig`; their prefix ``draft_`` may be left out, as for
            vLLM's own methods (``quantization``, ``revision``, …).
        additional: ``additional_config["tokentiming"]``.

    Returns:
        What vLLM gets as ``--speculative-config``, and the options.

    Raises:
        ConfigError
    """
    rest = dict(speculative)
    method, model = rest.pop("method", None), rest.pop("model", None)
    if "num_speculative_tokens" not in rest:
        raise ConfigError(
            'num_speculative_tokens is missing. Set it in --speculative-config, e.g. "num_speculative_tokens": 5.'
        )
    num_tokens = check_num_speculative_tokens(rest.pop("num_speculative_tokens"))
    if additional is not None and not isinstance(additional, dict):
        raise ConfigError(
            f'"{OPTIONS_KEY}" in --additional-config is {additional!r}; it must be an object such as '
            '{"draft_model": "…"}.'
        )
    options = dict(additional or {})
    if method == METHOD:
        if model is not None:
            rest["draft_model"] = model
        known = {f.name for f in dataclasses.fields(TokenTimingConfig)}
        for key, value in rest.items():
            name = f"draft_{key}" if key not in known and f"draft_{key}" in known else key
            if name in options:
                raise ConfigError(
                    f"{name} is set twice: in --speculative-config and in --additional-config or under two names. "
                    f"Set it once."
                )
            options[name] = value
    elif rest:
        raise ConfigError(
            f"--speculative-config has keys that custom_class does not take: {', '.join(sorted(rest))}. Put the "
            f"plugin's options into "
            '--additional-config {"tokentiming": …}, or use "method": "tokentiming".'
        )
    config = TokenTimingConfig.from_mapping(options)
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_tokens}, config


def _share_vllm_log_format() -> None:
    """Log as vLLM does: same handler, same level. Nothing where vLLM's logging is configured by the user."""
    ours, theirs = logging.getLogger("vllm_tokentiming"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
