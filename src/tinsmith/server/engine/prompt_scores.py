"""What a sample request may ask about its own prompt: log-probabilities, alternatives, other tokens' chances.

The hidden state at prompt position i scores the token at position i + 1. States arrive in pieces, as the prompt is
prefilled; what a request does not ask for is never computed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tinsmith.errors import InvalidInputError
from tinsmith.server.engine import sampler
from tinsmith.types import PromptAltTokens, TensorData, TopkLogprobs
from tinsmith.types.sampling import EMPTY_LOGPROB, EMPTY_TOKEN

Floats = npt.NDArray[np.float32]

# Random numbers of alternatives come from streams that no sample of the request uses.
ALTERNATIVES_STREAM = 1 << 32


class Targets:
    """The tokens a request names for each prompt position, dense or sparse, and their log-probabilities."""

    def __init__(self, asked: TensorData, prompt_length: int, vocab_size: int) -> None:
        shape = list(asked.values.shape) if asked.csr is None else asked.shape
        if asked.dtype != "int64" or shape is None or len(shape) != 2 or shape[0] != prompt_length - 1:
            raise InvalidInputError(
                f"target_prompt_logprobs is {asked.dtype} of shape {shape}; a prompt of {prompt_length} tokens needs "
                f"int64 of shape [{prompt_length - 1}, K].",
                field="target_prompt_logprobs",
                value=shape,
            )
        self.asked = asked
        self.ids = asked.values.reshape(-1)
        if self.ids.size and not -1 <= self.ids.min() <= self.ids.max() < vocab_size:
            worst = int(self.ids.max() if self.ids.max() >= vocab_size else self.ids.min())
            raise InvalidInputError(
                f"target_prompt_logprobs holds {worst}; use token ids from 0 to {vocab_size - 1}, or -1 for nothing.",
                field="target_prompt_logprobs",
                value=worst,
            )
        cells = np.full(shape[0], shape[1]) if asked.csr is None else np.diff(asked.csr.crow)
        self.rows = np.repeat(np.arange(shape[0]), cells)
        self.logprobs = np.zeros(len(self.ids), np.float32)

    @property
    def first_row(self) -> int | None:
        wanted = self.rows[self.ids >= 0]
        return int(wanted[0]) if wanted.size else None

    def add(self, first: int, logits: Tensor, log_sums: Tensor) -> None:
        start, end = np.searchsorted(self.rows, [first, first + len(logits)])
        rows = torch.from_numpy(self.rows[start:end] - first).to(logits.device)
        ids = torch.from_numpy(self.ids[start:end].copy()).to(logits.device)
        logprobs = logits[rows, ids.clamp(min=0)] - log_sums[rows]
        self.logprobs[start:end] = torch.where(ids < 0, 0.0, logprobs).cpu().numpy()

    def result(self) -> TensorData:
        return TensorData.from_parts(self.logprobs.reshape(self.asked.values.shape), self.asked.shape, self.asked.csr)


class PromptScores:
    """Collects all that one request asks about its prompt."""

    def __init__(
        self,
        prompt: npt.NDArray[np.int32],
        vocab_size: int,
        *,
        logprobs: bool,
        topk: int,
        last_n: int | None,
        targets: TensorData | None,
        alternatives: int,
        temperature: float,
        seed: int,
    ) -> None:
        length = len(prompt)
        if last_n is not None and not (logprobs and 1 <= last_n < length):
            raise InvalidInputError(
                f"prompt_logprobs_last_n is {last_n}; with prompt_logprobs and a prompt of {length} tokens it may be 1 "
                f"to {length - 1}.",
                field="prompt_logprobs_last_n",
                value=last_n,
            )
        self.prompt = prompt
        self.first_scored = 0 if last_n is None else length - last_n - 1
        self.logprobs = np.full(length, np.nan, np.float32) if logprobs else None
        self.topk = _empty_topk(length, topk) if topk else None
        self.num_topk = min(topk, vocab_size)
        self.targets = None if targets is None else Targets(targets, length, vocab_size)
        self.num_alternatives = alternatives
        self.alternatives = np.zeros((length - 1, alternatives), np.int64)
        self.alternative_logprobs = np.zeros((length - 1, alternatives), np.float32)
        self.temperature = temperature
        self.seed = seed

    @property
    def first_state(self) -> int:
        """The first prompt position whose hidden state is needed; those before it may come from a cache."""
        wanted = [len(self.prompt) - 1]
        if self.logprobs is not None or self.topk is not None:
            wanted.append(self.first_scored)
        if self.num_alternatives:
            wanted.append(0)
        if self.targets is not None and (row := self.targets.first_row) is not None:
            wanted.append(row)
        return min(wanted)

    def add(self, first: int, logits: Tensor) -> None:
        """The logits that follow prompt positions `first` and after, the last position excepted."""
        log_sums = sampler.log_sums(logits)
        if self.targets is not None:
            self.targets.add(first, logits, log_sums)
        if self.num_alternatives:
            self._add_alternatives(first, logits, log_sums)
        skipped = max(self.first_scored - first, 0)
        if skipped < len(logits):
            self._add_scores(first + skipped, logits[skipped:], log_sums[skipped:])

    def _add_scores(self, first: int, logits: Tensor, log_sums: Tensor) -> None:
        rows = slice(first + 1, first + 1 + len(logits))
        if self.logprobs is not None:
            tokens = torch.from_numpy(self.prompt[rows].astype(np.int64)).to(logits.device)
            self.logprobs[rows] = (logits.gather(1, tokens[:, None])[:, 0] - log_sums).cpu().numpy()
        if self.topk is not None:
            values, ids = sampler.best(logits, self.num_topk)
            self.topk.token_ids[rows, : self.num_topk] = ids.cpu().numpy()
            self.topk.logprobs[rows, : self.num_topk] = (values - log_sums[:, None]).cpu().numpy()

    def _add_alternatives(self, first: int, logits: Tensor, log_sums: Tensor) -> None:
        rows = np.arange(first, first + len(logits))
        streams = ALTERNATIVES_STREAM + np.arange(self.num_alternatives)
        keys = sampler.keys_of(self.seed, streams[None, :], rows[:, None])
        tokens = sampler.draw_many(logits, self.temperature, keys)
        self.alternatives[rows] = tokens.cpu().numpy()
        self.alternative_logprobs[rows] = (logits.gather(1, tokens) - log_sums[:, None]).cpu().numpy()

    def alternatives_result(self) -> PromptAltTokens | None:
        if not self.num_alternatives:
            return None
        return PromptAltTokens(
            TensorData.from_numpy(self.alternatives), TensorData.from_numpy(self.alternative_logprobs)
        )

    def targets_result(self) -> TensorData | None:
        return None if self.targets is None else self.targets.result()


def _empty_topk(length: int, k: int) -> TopkLogprobs:
    return TopkLogprobs(np.full((length, k), EMPTY_TOKEN, np.int32), np.full((length, k), EMPTY_LOGPROB, np.float32))
