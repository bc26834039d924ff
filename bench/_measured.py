"""What things cost, for the simulation: every figure with the measurement it comes from, or marked as an assumption.

PERFORMANCE is a row of docs/explain/performance.md (one H200, bf16, adapters of rank 32; bench/gpu_training.py,
gpu_decode.py). BENCHMARKS is docs/reference/benchmarks.md, "What a request costs" (bench/server_costs.py, CPU time).
tests/test_simulation.py keeps them as the pages have them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

GIB: Final = 2**30

# --- assumptions: not measured ---------------------------------------------------------------------------------------

PREFILL_OVER_TRAINING = 2.0
"""Prompt tokens a second over trained ones: with frozen weights, the way back costs as much as the way forward."""
SMALLEST_FULL_BATCH = 2048
"""Tokens on a GPU below which a training batch gets no faster. Measured were 8,192 and 16,384 at a time."""
NETWORK_BYTES_PER_SECOND = 10e9
"""Between machines, for one transfer: most of a link of 100 Gbit/s."""
LINK_BYTES_PER_SECOND = 200e9
"""Between the GPUs of one machine, for sums of gradients."""
GPUS_PER_MACHINE = 8
DATABASE_CORES = 8
"""Of a PostgreSQL server. Transactions that wait for each other's rows are not modelled."""

# --- the GPU ---------------------------------------------------------------------------------------------------------

COPY_BYTES_PER_SECOND = 4.28e12  # PERFORMANCE: "that of a copy 4.28 TB/s"
WEIGHTS_TO_SAMPLER_SECONDS = 2.2e-3  # PERFORMANCE: "weights of a step to the sampler"
BYTES_OF_OPTIMIZER = 28
"""Read and written for each weight by AdamW in float32: weight and moments both ways, gradient once. An assumption is
that it runs at the rate of a copy."""


class BaseModel(NamedTuple):
    name: str
    train_tokens_per_second: float
    decode_seconds: float
    """Of a step of the smallest batch, extrapolated to no sample at all."""
    decode_seconds_per_sample: float
    adapter_weights: int
    """Of rank 32 on every layer, from the shape."""
    train_token_budget: int
    """What `automatic_token_budget` gives on a card of 139 GiB with these weights."""
    kv_tokens: int
    """What `automatic_kv_tokens` gives there."""

    def decode_step(self, samples: int) -> float:
        return self.decode_seconds + self.decode_seconds_per_sample * samples

    def prefill(self, tokens: int) -> float:
        return tokens / (PREFILL_OVER_TRAINING * self.train_tokens_per_second)

    @property
    def optimizer_seconds(self) -> float:
        return self.adapter_weights * BYTES_OF_OPTIMIZER / COPY_BYTES_PER_SECOND

    @property
    def transfer_seconds(self) -> float:
        """An adapter in bfloat16 to another machine, and into the sampler there."""
        return self.adapter_bytes / NETWORK_BYTES_PER_SECOND + WEIGHTS_TO_SAMPLER_SECONDS

    @property
    def adapter_bytes(self) -> int:
        return 2 * self.adapter_weights


def _line(batch: int, seconds: float, other_batch: int, other_seconds: float) -> tuple[float, float]:
    slope = (other_seconds - seconds) / (other_batch - batch)
    return seconds - slope * batch, slope


SMALL = BaseModel(
    "1.7B",
    63_231,  # PERFORMANCE: "train 1.7B, 8 x 2,048"
    *_line(1, 1.32e-3, 256, 256 / 57_748),  # PERFORMANCE: "decode 1.7B, batch 1", "batch 256, eight adapters"
    adapter_weights=34_865_152,
    train_token_budget=30_000,
    kv_tokens=500_000,
)
LARGE = BaseModel(
    "8B",
    16_909,  # PERFORMANCE: "train 8B, 4 x 2,048"
    # PERFORMANCE: "decode 8B, batch 64". Batch 1 was not measured: assumed is the floor there, the time of reading.
    *_line(1, 3.96e-3, 64, 5.55e-3),
    adapter_weights=87_293_952,
    train_token_budget=11_000,
    kv_tokens=360_000,
)

# --- the server ------------------------------------------------------------------------------------------------------


class ApiCosts(NamedTuple):
    """CPU seconds of the API process, from submission to result."""

    sample: float
    train: float


API = ApiCosts(sample=0.59e-3, train=2.77e-3)  # BENCHMARKS: "a sample", "a training operation"


class RowCosts(NamedTuple):
    """Seconds of a transaction with one row and with 64, which give those of any other number."""

    one: float
    many: float

    def of(self, rows: int) -> float:
        return self.one + self.each * (rows - 1)

    @property
    def each(self) -> float:
        return (self.many - self.one) / 63


class StoreCosts(NamedTuple):
    """Time that the database is kept from other writes, or one of its cores from other work."""

    name: str
    cores: int
    submit: RowCosts
    claim: RowCosts
    begin: RowCosts
    complete: RowCosts
    asking: float
    """What a worker's own process adds to a turn: claim, begin and complete of one job, in the column beside."""


# BENCHMARKS: "SQLite". One writer at a time, and what the asking process does is done with the lock held.
SQLITE = StoreCosts(
    "SQLite",
    1,
    submit=RowCosts(0.36e-3, 5.12e-3),
    claim=RowCosts(0.34e-3, 2.83e-3),
    begin=RowCosts(0.08e-3, 0.21e-3),
    complete=RowCosts(0.25e-3, 2.25e-3),
    asking=0.0,
)
# BENCHMARKS: "PostgreSQL", the column of the database.
POSTGRES = StoreCosts(
    "PostgreSQL",
    DATABASE_CORES,
    submit=RowCosts(0.17e-3, 6.00e-3),
    claim=RowCosts(1.00e-3, 6.00e-3),
    begin=RowCosts(0.07e-3, 3.33e-3),
    complete=RowCosts(0.17e-3, 4.67e-3),
    asking=1.45e-3,
)
