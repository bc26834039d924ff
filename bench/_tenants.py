"""The trace: tenants who train on data of their own, and tenants who sample and train on what they sampled.

Every tenant is a loop, as a script is: it does not begin a step before the last one is over, and then waits for a
while (for rewards, data, evaluations). All of it is drawn from one seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from _measured import LARGE, SMALL, WEIGHTS_TO_SAMPLER_SECONDS, BaseModel

Kind: TypeAlias = Literal["supervised", "one turn", "three turns"]

SHARES: dict[Kind, float] = {"supervised": 0.5, "one turn": 0.375, "three turns": 0.125}
SHARE_OF_SMALL = 0.5
TENANTS_PER_GPU = 10
BATCH_WHEN_BUSY = 128
"""Samples that a busy sampler decodes at once, for the plan of how many GPUs sample."""

SYSTEM_TOKENS = 512  # the beginning that all prompts of a tenant share
QUESTION_TOKENS = 256
REPLY_TOKENS = 128  # what a tool or a user says between two turns
MAX_OUTPUT_TOKENS = 1024
ROW_TOKENS = 1024


class Tenant(NamedTuple):
    number: int
    model: BaseModel
    kind: Kind
    prompts: int
    samples: int
    """Of each prompt."""
    turns: int
    mean_output: int
    train_tokens: int
    """Of a supervised step; those of others follow from what was sampled."""

    @property
    def owner(self) -> str:
        return f"tenant-{self.number}"

    @property
    def samples_of_a_step(self) -> int:
        return self.prompts * self.samples

    @property
    def tokens_of_a_step(self) -> int:
        """Trained on, as expected."""
        if self.kind == "supervised":
            return self.train_tokens
        prompt = SYSTEM_TOKENS + QUESTION_TOKENS + REPLY_TOKENS * (self.turns - 1)
        return self.samples_of_a_step * (prompt + self.turns * self.mean_output)


def draw_tenants(count: int, seed: int) -> list[Tenant]:
    """Sizes of steps differ: half of them lie between 0.7 and 1.4 times the middle, one in a hundred is above 3."""
    dice = random.Random(f"tenants {seed}")
    tenants = []
    for number in range(count):
        kind = dice.choices(list(SHARES), list(SHARES.values()))[0]
        model = SMALL if dice.random() < SHARE_OF_SMALL else LARGE
        scale = dice.lognormvariate(0.0, 0.5)
        prompts, samples, turns = {"supervised": (0, 0, 0), "one turn": (8, 16, 1), "three turns": (4, 4, 3)}[kind]
        tenants.append(
            Tenant(
                number,
                model,
                kind,
                max(1, round(prompts * scale)) if prompts else 0,
                samples,
                turns,
                mean_output=round(dice.uniform(150, 450)),
                train_tokens=max(ROW_TOKENS, round(32 * scale) * ROW_TOKENS) if kind == "supervised" else 0,
            )
        )
    return tenants


def draw_output(tenant: Tenant, dice: random.Random) -> int:
    drawn = dice.lognormvariate(math.log(tenant.mean_output) - 0.18, 0.6)
    return max(1, min(MAX_OUTPUT_TOKENS, round(drawn)))


class Demand(NamedTuple):
    """GPU seconds of one step of every tenant."""

    train: float
    sample: float


def train_seconds(tenant: Tenant) -> float:
    return tenant.tokens_of_a_step / tenant.model.train_tokens_per_second + tenant.model.optimizer_seconds


def sample_seconds(tenant: Tenant) -> float:
    model = tenant.model
    decode = model.decode_step(BATCH_WHEN_BUSY) / BATCH_WHEN_BUSY
    prompts = tenant.prompts * (SYSTEM_TOKENS + QUESTION_TOKENS)
    return tenant.samples_of_a_step * tenant.turns * tenant.mean_output * decode + model.prefill(prompts)


def alone_seconds(tenant: Tenant, train_gpus: int = 1) -> float:
    """About how long a step takes if nobody else is there, with one sampler."""
    model = tenant.model
    longest = min(MAX_OUTPUT_TOKENS, 2 * tenant.mean_output)
    sampling = tenant.turns * longest * model.decode_step(tenant.samples_of_a_step) if tenant.turns else 0.0
    share = max(ROW_TOKENS, tenant.tokens_of_a_step / train_gpus)
    training = share / model.train_tokens_per_second + model.optimizer_seconds
    return sampling + training + WEIGHTS_TO_SAMPLER_SECONDS


def demand(tenants: Sequence[Tenant]) -> Demand:
    return Demand(sum(map(train_seconds, tenants)), sum(map(sample_seconds, tenants)))
