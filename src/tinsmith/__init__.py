"""Tinsmith: both ends of the Tinker training API.

`import tinsmith as tinker` and code written for the `tinker` SDK runs. Names are loaded on first use, so importing the
package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tinsmith._version import __title__ as __title__
from tinsmith._version import __version__ as __version__

if TYPE_CHECKING:
    from tinsmith import auth as auth
    from tinsmith import compat as compat
    from tinsmith import errors as errors
    from tinsmith import types as types
    from tinsmith.client.admin import AdminClient as AdminClient
    from tinsmith.client.config import Config as Config
    from tinsmith.client.download import Progress as Progress
    from tinsmith.client.futures import APIFuture as APIFuture
    from tinsmith.client.futures import AwaitableConcurrentFuture as AwaitableConcurrentFuture
    from tinsmith.client.hooks import Attempt as Attempt
    from tinsmith.client.hooks import Backoff as Backoff
    from tinsmith.client.hooks import BillingPause as BillingPause
    from tinsmith.client.hooks import ProgressLogger as ProgressLogger
    from tinsmith.client.hooks import QueueStateChange as QueueStateChange
    from tinsmith.client.loss_graph import LossHandle as LossHandle
    from tinsmith.client.loss_graph import PerDatumLossFn as PerDatumLossFn
    from tinsmith.client.options import RequestOptions as RequestOptions
    from tinsmith.client.options import Timeout as Timeout
    from tinsmith.client.rest import ExperimentalWarning as ExperimentalWarning
    from tinsmith.client.rest import RestClient as RestClient
    from tinsmith.client.retry import RetryConfig as RetryConfig
    from tinsmith.client.sampling import BackcompatSamplingClientFuture as BackcompatSamplingClientFuture
    from tinsmith.client.sampling import SamplingClient as SamplingClient
    from tinsmith.client.service import ServiceClient as ServiceClient
    from tinsmith.client.tokenizers import get_tokenizer as get_tokenizer
    from tinsmith.client.training import BackcompatTrainingClientFuture as BackcompatTrainingClientFuture
    from tinsmith.client.training import TrainingClient as TrainingClient
    from tinsmith.errors import *  # noqa: F403
    from tinsmith.text.chat_template import apply_chat_template as apply_chat_template
    from tinsmith.types import *  # noqa: F403

_MODULES = ("auth", "compat", "errors", "types")

_HOMES = {
    "tinsmith.client.admin": ("AdminClient",),
    "tinsmith.text.chat_template": ("apply_chat_template",),
    "tinsmith.client.config": ("Config",),
    "tinsmith.client.download": ("Progress",),
    "tinsmith.client.futures": ("APIFuture", "AwaitableConcurrentFuture"),
    "tinsmith.client.hooks": ("Attempt", "Backoff", "BillingPause", "ProgressLogger", "QueueStateChange"),
    "tinsmith.client.loss_graph": ("LossHandle", "PerDatumLossFn"),
    "tinsmith.client.options": ("RequestOptions", "Timeout"),
    "tinsmith.client.rest": ("ExperimentalWarning", "RestClient"),
    "tinsmith.client.retry": ("RetryConfig",),
    "tinsmith.client.sampling": ("BackcompatSamplingClientFuture", "SamplingClient"),
    "tinsmith.client.service": ("ServiceClient",),
    "tinsmith.client.tokenizers": ("get_tokenizer",),
    "tinsmith.client.training": ("BackcompatTrainingClientFuture", "TrainingClient"),
    "tinsmith.errors": (
        "APIConnectionError",
        "APIError",
        "APIResponseValidationError",
        "APIStatusError",
        "APITimeoutError",
        "AuthenticationError",
        "BadRequestError",
        "BillingError",
        "ClientClosedError",
        "ConfigError",
        "ConflictError",
        "ForkedProcessError",
        "InternalServerError",
        "InvalidInputError",
        "InvalidTypeError",
        "MissingExtraError",
        "NoProgressError",
        "NotFoundError",
        "PendingLimitError",
        "PermissionDeniedError",
        "RateLimitError",
        "RequestExpiredError",
        "RequestFailedError",
        "StreamAlreadyConsumed",
        "TinkerError",
        "TokenizerError",
        "UnconfirmedOperationError",
        "UnprocessableEntityError",
        "UnsupportedByServerError",
        "WouldDeadlockError",
    ),
    "tinsmith.types": (
        "AdamOptimizerConfig",
        "AdamParams",
        "Checkpoint",
        "CheckpointType",
        "Datum",
        "DimuonOptimizerConfig",
        "DimuonParams",
        "DmelChunk",
        "EncodedTextChunk",
        "ForwardBackwardOutput",
        "LoraConfig",
        "ModelID",
        "ModelInput",
        "ModelInputChunk",
        "OptimParams",
        "OptimStepRequest",
        "OptimStepResponse",
        "ParsedCheckpointTinkerPath",
        "PromptProvenanceSpan",
        "SampleRequest",
        "SampleResponse",
        "SampledProvenanceSpan",
        "SampledSequence",
        "SamplingParams",
        "StopReason",
        "TensorData",
        "TensorDtype",
        "TrainingRun",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(["__title__", "__version__", "auth", "types", *_HOME_OF])


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"tinsmith.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'tinsmith' has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, *_MODULES]
