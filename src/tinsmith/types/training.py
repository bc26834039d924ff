"""Training: models, losses, optimizers and weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args
from urllib.parse import quote

import msgspec

from tinsmith.errors import InvalidInputError
from tinsmith.types._codecs import Codec
from tinsmith.types._model import Request, Response, Secret
from tinsmith.types.inputs import Datum, Seed
from tinsmith.types.runs import ParsedCheckpointTinkerPath
from tinsmith.types.tensors import TensorData

ModelID: TypeAlias = str

# --- losses ----------------------------------------------------------------------------------------------------------

LossFnType: TypeAlias = Literal[
    "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "custom"
]


def check_loss_fn(name: object) -> LossFnType:
    """The name of a loss, or an error that lists the legal ones."""
    if name in get_args(LossFnType):
        return name  # type: ignore[return-value]
    raise InvalidInputError(
        f"There is no loss {name!r}. The losses are: {', '.join(get_args(LossFnType))}", field="loss_fn", value=name
    )


LossFnOutput: TypeAlias = dict[str, TensorData]

CustomLossInputRank: TypeAlias = Literal[0, 1, 2]
"""0 is a scalar, 1 is `[T]`, 2 is `[T, K]`."""

CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]


class CustomLossInput(Request):
    """One tensor that a custom loss reads: `logprobs`, or a key of `loss_fn_inputs`."""

    name: str
    rank: CustomLossInputRank


class CustomLossNode(Request):
    """One step of a traced loss.

    Arguments are JSON values, or an object with one key for what JSON cannot say: `ref` (an earlier node), `tuple`,
    `dict`, `slice`, `ellipsis`, `float` (`inf`, `-inf`, `nan`), `dtype`, `device`, `layout`, `memory_format`.
    """

    op: CustomLossNodeOp
    name: str
    target: str
    """The parameter, the qualified function (`torch.exp`), the method or attribute, or `output`."""

    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class CustomLossGraph(Request):
    """A traced loss as plain data, its nodes in order of execution."""

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


class CreateCustomLossRequest(Request):
    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    """In the order of the graph; `logprobs` comes first."""

    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


class CreateCustomLossResponse(Response):
    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"


# --- forward and backward --------------------------------------------------------------------------------------------


class ForwardBackwardInput(Request, kw_only=False):
    """The examples of one pass, and the loss to compute on them."""

    data: list[Datum]
    loss_fn: LossFnType
    """One of the names of `LossFnType`."""

    loss_fn_config: Mapping[str, float | str] | None = None
    """Settings of the loss, such as `clip_low_threshold`."""


class ForwardBackwardRequest(Request, kw_only=False):
    forward_backward_input: ForwardBackwardInput
    model_id: ModelID

    seq_id: int | None = None
    """The number of this operation on its model. Always set by the client, rising by one from 1; the server executes in
    this order, and a repeated submission finds its first answer by it."""


class ForwardRequest(Request, kw_only=False):
    """The same without the backward pass; servers of older releases have an endpoint of its own for it."""

    forward_input: ForwardBackwardInput
    model_id: ModelID
    seq_id: int | None = None


class ForwardBackwardOutput(Response, kw_only=False):
    """What a pass gave: tensors for every datum, and metrics for the whole."""

    loss_fn_output_type: str
    loss_fn_outputs: list[LossFnOutput]
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Names end in `:` and how the values of several chunks are combined, as in `loss:sum`.

    Mixture-of-experts models also report, averaged over layers: `e_frac_with_tokens:mean`, the share of experts that
    got any token; `e_frac_oversubscribed:mean`, the share that got more than a fair part; `e_max_violation:mean` and
    `:max`, by how much the busiest expert exceeds its fair part; `e_min_violation:mean`, the same for the idlest."""


# --- optimizers ------------------------------------------------------------------------------------------------------


class AdamOptimizerConfig(Request):
    """AdamW, the default optimizer."""

    type: Literal["adamw"] = "adamw"


class DimuonOptimizerConfig(Request):
    type: Literal["dimuon"] = "dimuon"
    version: Literal[1] = 1


class _OpenFamily(Response):
    """An optimizer this version does not know: its fields are kept in `extra` and sent as they came."""

    type: str

    def __post_init__(self) -> None:
        try:
            settings = _SETTINGS.load(dict(self._extra))
        except msgspec.ValidationError as error:
            raise InvalidInputError(f"{type(self).__name__}: {error}", field=self.type) from None
        msgspec.structs.force_setattr(self, "_extra", tuple(settings.items()))

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        return {**super().to_builtins(nulls=nulls), **self.extra}


_SETTINGS = Codec(dict[str, Any], strict=True)


class OtherOptimizerConfig(_OpenFamily):
    """Selects an optimizer by its `type`."""


OptimizerConfig: TypeAlias = AdamOptimizerConfig | DimuonOptimizerConfig | OtherOptimizerConfig
"""Which optimizer a model has; fixed when the model is made."""


class AdamParams(Request):
    """One step of AdamW.

    The defaults are not those of torch: `beta2` is 0.95 (torch 0.999), `eps` is 1e-12 (torch 1e-8), `weight_decay` is 0
    (torch.optim.AdamW 0.01), `learning_rate` is 1e-4 (torch 1e-3).
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled from the gradient."""

    grad_clip_norm: float = 0.0
    """The largest norm of the whole gradient; 0 means no limit."""


class DimuonParams(Request):
    """One step of Dimuon."""

    type: Literal["dimuon"] = "dimuon"
    learning_rate: Annotated[float, msgspec.Meta(ge=0)]
    grad_clip_norm: float = 0.0
    """0 or less means no limit."""

    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9


class OtherOptimParams(_OpenFamily):
    """One step of an optimizer named by its `type`."""


OptimParams: TypeAlias = AdamParams | DimuonParams | OtherOptimParams
"""The settings of one optimizer step."""


class OptimStepRequest(Request):
    optim_params: OptimParams
    """Sent as `adam_params` or, for every other optimizer, as `optimizer_params`; all three names are read."""

    model_id: ModelID
    seq_id: int | None = None
    """See `ForwardBackwardRequest.seq_id`."""

    type: Literal["optim_step"] = "optim_step"

    aliases: ClassVar[Mapping[str, str]] = {"adam_params": "optim_params", "optimizer_params": "optim_params"}

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        fields = super().to_builtins(nulls=nulls)
        name = "adam_params" if isinstance(self.optim_params, AdamParams) else "optimizer_params"
        return {name: fields.pop("optim_params"), **fields}


class OptimStepResponse(Response):
    metrics: dict[str, float] | None = None


# --- models ----------------------------------------------------------------------------------------------------------


class LoraConfig(Request):
    rank: Annotated[int, msgspec.Meta(ge=1)]
    seed: Seed | None = None
    """With a seed, the first weights can be reproduced."""

    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Request):
    session_id: str
    model_seq_id: int
    """The number of this model within its session, from 0."""

    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraConfig | None = None
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    type: Literal["create_model"] = "create_model"


class CreateModelResponse(Response):
    model_id: ModelID
    type: Literal["create_model"] = "create_model"


class GetInfoRequest(Request):
    model_id: ModelID
    type: Literal["get_info"] = "get_info"


class ModelData(Response):
    arch: str | None = None
    model_name: str | None = None
    tokenizer_id: str | None = None


class GetInfoResponse(Response):
    type: Literal["get_info"] | None = None
    model_data: ModelData
    model_id: ModelID
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool | None = None
    lora_rank: int | None = None
    model_name: str | None = None


class LogMetricsRequest(Request):
    """Numbers of the client's own, to be shown with the curves of its model. Not every server takes them."""

    model_id: ModelID
    metrics: dict[str, float]
    step: int | None = None
    """By default the optimizer step that is next."""

    seq_id: int | None = None
    """Rises from call to call, so that one that is sent twice counts once."""

    type: Literal["log_metrics"] = "log_metrics"


class UnloadModelRequest(Request):
    model_id: ModelID
    type: Literal["unload_model"] = "unload_model"


class UnloadModelResponse(Response):
    model_id: ModelID
    type: Literal["unload_model"] | None = None


# --- weights ---------------------------------------------------------------------------------------------------------

_CONSOLE = "https://tinker.thinkingmachines.ai"


class SaveWeightsRequest(Request):
    """Saves weights and optimizer state, so that training can go on from there."""

    model_id: ModelID
    path: str | None = None
    """The name of the checkpoint."""

    seq_id: int | None = None
    ttl_seconds: int | None = None
    """How long to keep it: one hour to ten years, or `None` for ever."""

    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights"] = "save_weights"


class SaveWeightsResponse(Response):
    path: str
    """A `tinker://` path."""

    type: Literal["save_weights"] | None = None

    def get_console_url(self) -> str:
        """The page of this checkpoint in the hosted service's console."""
        return _console_url(self.path)


SamplingClientKind: TypeAlias = Literal["snapshot", "inflight"]
"""Which weights a sampling client made from a model has.

snapshot   those of the moment, whatever the model becomes
inflight   those of the moment or newer: with every further save of this kind, all such clients of the model get the
           new weights, between two samples
"""


class SaveWeightsForSamplerRequest(Request):
    """Saves what a sampler needs: under a name, or for one sampling session only."""

    model_id: ModelID
    path: str | None = None
    sampling_session_seq_id: int | None = None
    kind: SamplingClientKind = "snapshot"
    seq_id: int | None = None
    ttl_seconds: int | None = None
    user_metadata: dict[str, str] | None = None
    type: Literal["save_weights_for_sampler"] = "save_weights_for_sampler"

    def to_builtins(self, *, nulls: bool = False) -> dict[str, Any]:
        """Without the kind where it is what it always was: servers of older releases refuse what they do not know."""
        fields = super().to_builtins(nulls=nulls)
        if fields["kind"] == "snapshot" and not nulls:
            del fields["kind"]
        return fields


class SaveWeightsForSamplerResponseInternal(Response):
    """As the server sends it: a path for named weights, a session for those without a name."""

    path: str | None = None
    sampling_session_id: str | None = None
    type: Literal["save_weights_for_sampler"] | None = None


class SaveWeightsForSamplerResponse(Response):
    path: str
    type: Literal["save_weights_for_sampler"] | None = None

    def get_console_url(self) -> str:
        """The page of this checkpoint in the hosted service's console."""
        return _console_url(self.path)

    def get_playground_url(self) -> str:
        """A page of the hosted service on which to try these weights."""
        return f"{_CONSOLE}/playground?mode=checkpoint&checkpoint={quote(self.path, safe='')}"


class SaveWeightsExternalRequest(Request):
    """Saves weights in a form that other tools read."""

    model_id: ModelID
    path: str
    seq_id: int | None = None
    ttl_seconds: int | None = None
    age_encryption_recipients: Annotated[list[str], msgspec.Meta(max_length=10)] | None = None
    """Public keys (`age1...` or SSH) to encrypt every file to; the files then end in `.age`."""

    type: Literal["save_weights_external"] = "save_weights_external"


class SaveWeightsExternalResponseInternal(Response):
    path: str | None = None
    size_bytes: int | None = None
    type: Literal["save_weights_external"] | None = None


class SaveWeightsExternalResponse(Response):
    path: str
    type: Literal["save_weights_external"] | None = None


class LoadWeightsRequest(Request):
    """Loads weights into a model (`model_id` and `seq_id`), or makes a model of them (`session_id`, `model_seq_id`)."""

    model_id: ModelID | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    """Whether to restore the optimizer state too."""

    optimizer_config: OptimizerConfig | None = None
    """Only for a new model without restored optimizer state."""

    weights_access_token: Secret[str | None] = None
    """A credential for weights of another account."""

    type: Literal["load_weights"] = "load_weights"


class LoadWeightsResponse(Response):
    path: str | None = None
    model_id: str | None = None
    type: Literal["load_weights"] | None = None


class WeightsInfoRequest(Request):
    tinker_path: str


class WeightsInfoResponse(Response):
    """What must be known to load a checkpoint. A `train_*` flag of `None` counts as true."""

    base_model: str
    optimizer_config: OptimizerConfig = AdamOptimizerConfig()
    is_lora: bool
    lora_rank: int | None = None
    train_unembed: bool | None = None
    train_mlp: bool | None = None
    train_attn: bool | None = None


class CopyWeightsRequest(Request):
    """Copies a checkpoint into a project, or into a session."""

    session_id: str | None = None
    model_seq_id: int | None = None
    destination_project_id: str | None = None
    source_path: str
    ttl_seconds: int | None = None
    weights_access_token: Secret[str | None] = None


class CopyWeightsResponse(Response):
    tinker_path: str


class ImportWeightsResponse(Response):
    """Where an adapter that was made elsewhere is a checkpoint now."""

    tinker_path: str


def _console_url(path: str) -> str:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    return f"{_CONSOLE}/checkpoints/{quote(parsed.training_run_id, safe='')}/{quote(parsed.checkpoint_id, safe='')}"
