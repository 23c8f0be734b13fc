"""Every error this package raises on purpose.

    TokenTimingError
    ├── ConfigError                 an option, a path or an environment that cannot work; raised at start-up
    │   ├── UnsupportedVLLMError    this vLLM version or model runner has no seam that we know
    │   └── UnsupportedModelError   a draft or target model that cannot take its role
    ├── VocabularyError             a tokenizer whose tokens cannot be mapped to bytes; raised at start-up
    │   └── UnencodableTextError    bytes that this tokenizer cannot represent; the request goes on without proposals
    └── DraftEngineError            the draft could not run a step; the request goes on without proposals
        └── DraftCacheExhaustedError

Messages say what was found, what is required, and the remedy.
"""


class TokenTimingError(Exception):
    """Root of the tree: catch this to catch everything that the package raises on purpose."""


class ConfigError(TokenTimingError, ValueError):
    """An option, path or environment that cannot work. Also a ``ValueError``, which vLLM reports at start-up."""


class UnsupportedVLLMError(ConfigError):
    """The installed vLLM, or the model runner that it would use, has no seam that this package knows."""


class UnsupportedModelError(ConfigError):
    """A model that cannot take the role it was given, such as an encoder-only draft."""


class VocabularyError(TokenTimingError, ValueError):
    """A tokenizer whose tokens cannot be mapped to bytes."""


class UnencodableTextError(VocabularyError):
    """Bytes that a tokenizer cannot represent exactly."""


class DraftEngineError(TokenTimingError, RuntimeError):
    """The draft model could not run a step."""


class DraftCacheExhaustedError(DraftEngineError):
    """No draft KV block is free and none can be evicted."""
