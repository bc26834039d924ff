"""What the benches on a GPU share: models of published shapes with random weights, ceilings, and the table.

They run from the source tree and need torch with Triton, transformers and peft; what else the package imports may lie
in a folder on PYTHONPATH. Peer and ours run one after the other in the same process, each with the GPU to itself.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import torch

from tinsmith.server.engine.adapters import Adapter, AdapterSpec
from tinsmith.server.engine.engine import Engine
from tinsmith.server.engine.model import Layer, ModelShape, Transformer
from tinsmith.server.engine.products import Matrix

RANK = 32
DEVICE = torch.device("cuda")
GIB = 2**30


def _config(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": tied,
    }  # fmt: skip


CONFIGS = {
    "1.7B": _config(2048, 6144, 28, 16, tied=True),
    "8B": _config(4096, 12288, 36, 32, tied=False),
}


def matrix_parameters(name: str) -> int:
    """Of all that is multiplied for every token: the layers and the unembedding."""
    c = CONFIGS[name]
    attention = c["hidden_size"] * 128 * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
    layers = c["num_hidden_layers"] * (attention + 3 * c["hidden_size"] * c["intermediate_size"])
    return int(layers + c["vocab_size"] * c["hidden_size"])


def cache_bytes_per_token(name: str) -> int:
    c = CONFIGS[name]
    return int(2 * 2 * 128 * c["num_hidden_layers"] * c["num_key_value_heads"])


# --- both sides ------------------------------------------------------------------------------------------------------


def our_engine(name: str, **options: Any) -> Engine:
    shape = ModelShape.from_config(CONFIGS[name])

    def matrix(num_out: int, num_in: int) -> Matrix:
        return Matrix(torch.randn(num_out, num_in, device=DEVICE, dtype=torch.bfloat16).mul_(num_in**-0.5))

    def ones(*size: int) -> torch.Tensor:
        return torch.ones(*size, device=DEVICE)

    q, kv, hidden, inner = shape.num_heads * 128, shape.num_kv_heads * 128, shape.hidden_size, shape.intermediate_size
    layers = [
        Layer(ones(hidden), matrix(q + 2 * kv, hidden), ones(shape.num_heads + shape.num_kv_heads, 128),
              matrix(hidden, q), ones(hidden), matrix(2 * inner, hidden), matrix(hidden, inner))
        for _ in range(shape.num_layers)
    ]  # fmt: skip
    embedding = torch.randn(shape.vocab_size, hidden, device=DEVICE, dtype=torch.bfloat16).mul_(0.02)
    head = Matrix(embedding) if shape.tie_embeddings else matrix(shape.vocab_size, hidden)
    return Engine(Transformer(shape, embedding, layers, ones(hidden), head), **options)


def our_adapter(engine: Engine, seed: int = 0) -> Adapter:
    """With a B that is not zero, so that nothing can be left out."""
    adapter = engine.create_adapter(AdapterSpec(RANK, seed))
    adapter.weights.copy_(torch.randn_like(adapter.weights).mul_(0.01))
    adapter.weights_changed()
    return adapter


def peer_model(name: str, *, adapter: bool) -> Any:
    """transformers' model of the same shape, with peft's adapter of the same rank on the same layers."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**CONFIGS[name])
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if not adapter:
        return model.eval()
    modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=32, target_modules=modules))


@contextmanager
def alone() -> Iterator[None]:
    """Gives back what a side took, and counts its memory from here."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    gc.collect()
    torch.cuda.empty_cache()


# --- time ------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def median_seconds(work: Callable[[], object], rounds: int = 5, warm_up: int = 2) -> float:
    for _ in range(warm_up):
        work()
    return statistics.median(seconds(work) for _ in range(rounds))


def on_gpu(work: Callable[[], object], times: int = 20) -> float:
    """Seconds of one of many that follow each other without the host."""
    work()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / times


def matrix_rate(times: int = 20) -> float:
    """FLOP/s of a large product of random bfloat16 matrices, so many of them without a break.

    A few of them find a cool card; after some hundred, power bounds its clock.
    """
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / on_gpu(lambda: a @ b, times)


def read_rate() -> float:
    """Bytes/s of a large copy, reading and writing counted."""
    source = torch.empty(2**31, device=DEVICE, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return 2 * 2**31 / on_gpu(lambda: target.copy_(source))


# --- table -----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    work: str
    ours: str
    peer: str
    reached: float
    bar: float
    note: str = ""

    @property
    def is_met(self) -> bool:
        return self.reached >= self.bar


def print_table(rows: list[Row], ceilings: str) -> None:
    print(f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; {ceilings}\n")
    print("| work | ours | peer, same run | ratio | bar | |\n| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        mark = "" if row.is_met else "MISSED "
        print(f"| {row.work} | {row.ours} | {row.peer} | {row.reached:.2f} | {row.bar:g} | {mark}{row.note} |")
