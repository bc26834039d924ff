"""A training group: one leader and its members share the rows of every batch.

The leader is an engine like any other: adapters, optimizer steps, snapshots and sampling are its own. Of
`forward_backward` alone it gives shares away, balanced by tokens. Members compute the gradients of their rows, from
zero; the leader adds them to its own in the order of their ranks, so that a batch gives the same sum every time. They
keep nothing that cannot be sent again: a batch that failed, for whatever reason, leaves no trace.

Each has the whole base model, or a shard of its layers (`sharding.py`). Shards are gathered by all at the same time:
then every member has a part in every batch, though it may have no rows in it, and in every pass that the leader makes
for samples. When one of them runs out of memory, all begin again with smaller micro-batches.

A member that is lost takes the group with it, and so does whatever else breaks off the talk with one: every later batch
fails at once, and whoever placed the processes starts them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from tinsmith.errors import ConfigError
from tinsmith.server.engine.attention import PackedCausal
from tinsmith.server.engine.batch import Example, pack
from tinsmith.server.engine.channels import Channel
from tinsmith.server.engine.engine import Computed, Engine, SavedGradients
from tinsmith.server.engine.group_messages import (
    Answer,
    Dismissal,
    Hello,
    InStep,
    JoinPass,
    adapters_of,
    decode,
    encode,
    refused,
    row_output,
    share_of,
)
from tinsmith.server.engine.sharding import BrokenShardsError, Turns
from tinsmith.server.engine.shares import balanced
from tinsmith.server.engine.train import RowOutput

_FINGERPRINT_TOKENS = 8
_SAME_WEIGHTS = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""How far apart the same hidden state may be on two kinds of hardware, as a share of its size."""
_SAME_NORM = 1e-9
"""The same for the norm of a matrix, which is computed in float64."""


class MemberError(RuntimeError):
    """A member met an error on its share; the group can be used again."""


class MemberOutOfMemoryError(MemberError):
    pass


class BrokenGroupError(RuntimeError):
    """An earlier batch was broken off, so that nobody knows what members will say next."""

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"The training group has to be started again, since it was left in a batch: {cause}")


class GroupEngine(Engine):
    """The engine of the leader. Without members it is an ordinary one."""

    _members: Sequence[_Member] = ()
    _broken_by: BaseException | None = None

    def lead(self, channels: Sequence[Channel]) -> None:
        """Take on members, given in the order of their ranks; all must have the same base model as we have."""
        own = hello(self)
        all_hellos = [decode(Hello, channel.receive()) for channel in channels]
        for theirs, channel in zip(all_hellos, channels, strict=True):
            _check_same(own, theirs, channel.rank)
        self._members = [_Member(channel) for channel in channels]
        if self.model.shards is not None:
            # What one cannot hold, none can be given: all go through their micro-batches together.
            self.train_token_budget = min(each.token_budget for each in (own, *all_hellos))
            self.model.shards.announce = self._call_members

    def dismiss(self) -> None:
        """Let the members go."""
        for member in self._members:
            member.dismiss()
        self._members = ()
        if self.model.shards is not None:
            self.model.shards.close()

    @property
    def is_broken(self) -> bool:
        """Whether the talk with the members was broken off, mostly since one of them is lost."""
        return self._broken_by is not None or (self.model.shards is not None and self.model.shards.is_broken)

    @property
    def batch_token_budget(self) -> int:
        return self.train_token_budget * (1 + len(self._members))

    def compute(self, examples: Sequence[Example], before: SavedGradients) -> Computed:
        if self._broken_by is not None:
            raise BrokenGroupError(self._broken_by) from self._broken_by
        if not self._members:
            return super().compute(examples, before)
        places = balanced([len(example.tokens) for example in examples], 1 + len(self._members))
        own, *shares = [[examples[place] for place in share] for share in places]
        dealt = list(zip(self._members, shares, strict=True))
        if self.model.shards is None:
            return self._compute([each for each in dealt if each[1]], None, partial(super().compute, own, before))
        while True:
            turns = Turns.of(pack(share, self.train_token_budget) for share in (own, *shares))
            in_step = InStep(turns, self.train_token_budget)
            try:
                return self._compute(dealt, in_step, partial(self.compute_in_step, own, turns))
            except (torch.OutOfMemoryError, MemberOutOfMemoryError):
                before.restore()
                if not self._could_halve_token_budget():
                    raise

    def _compute(
        self,
        asked: Sequence[tuple[_Member, Sequence[Example]]],
        in_step: InStep | None,
        compute_own: Callable[[], Computed],
    ) -> Computed:
        with self._not_to_be_broken_off():
            for member, share in asked:
                member.ask(share, in_step)
        try:
            outputs = compute_own()()
        except BrokenShardsError as error:
            self._broken_by = error
            raise
        except BaseException:
            # Their answers are on the way, and the next batch expects others.
            self._answers(asked)
            raise
        for (member, share), answer in zip(asked, self._answers(asked), strict=True):
            outputs |= member.outputs(answer, share)
            self._note_trained(answer.num_batches, share)
        return lambda: outputs

    def _call_members(self) -> None:
        """To a pass that is the leader's own."""
        if self._broken_by is not None:
            raise BrokenGroupError(self._broken_by) from self._broken_by
        with self._not_to_be_broken_off():
            for member in self._members:
                member.call()

    def _answers(self, asked: Sequence[tuple[_Member, Sequence[Example]]]) -> list[Answer]:
        """All of them, bad or good, and the gradients that come with them."""
        with self._not_to_be_broken_off():
            return [member.answer(share, self.on_progress) for member, share in asked]

    @contextmanager
    def _not_to_be_broken_off(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._broken_by = error
            raise


class _Member:
    """What the leader knows of a member."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._known_versions: frozenset[int] = frozenset()
        """The weights that it has: those of its last share."""

    def ask(self, examples: Sequence[Example], in_step: InStep | None) -> None:
        """Send a share, and go on: the member has it soon."""
        self._channel.send(encode(share_of(examples, self._known_versions, in_step)))
        adapters = adapters_of(examples)
        for adapter in adapters:
            if adapter.version not in self._known_versions:
                self._channel.send_tensor(adapter.weights)
        self._known_versions = frozenset(adapter.version for adapter in adapters)

    def call(self) -> None:
        self._channel.settle()  # it has long heard the last call
        self._channel.send(encode(JoinPass()))

    def answer(self, examples: Sequence[Example], on_progress: Callable[[], None]) -> Answer:
        """What came of the share; gradients are added to those of the adapters."""
        answer = decode(Answer, self._channel.receive(on_progress))
        self._channel.settle()
        adapters = adapters_of(examples)
        for place in answer.trained:
            gradient = torch.empty_like(adapters[place].gradient)
            self._channel.receive_tensor(gradient)
            adapters[place].gradient.add_(gradient)
        return answer

    def outputs(self, answer: Answer, examples: Sequence[Example]) -> dict[int, RowOutput]:
        if answer.refusal is not None:
            raise refused(answer.refusal, examples)
        if answer.failure:
            kind = MemberOutOfMemoryError if answer.is_out_of_memory else MemberError
            raise kind(f"Rank {self._channel.rank} of the training group failed on its rows: {answer.failure}")
        return {output.index: row_output(output) for output in answer.outputs}

    def dismiss(self) -> None:
        self._channel.send(encode(Dismissal()))
        self._channel.settle()


# --- that all have the same model ------------------------------------------------------------------------------------


def hello(engine: Engine) -> Hello:
    model = engine.model
    tokens = torch.arange(min(_FINGERPRINT_TOKENS, model.shape.vocab_size), device=model.device)
    with torch.no_grad():
        hidden = model.hidden(tokens, tokens, PackedCausal([len(tokens)]), None)
    return Hello(
        shape=repr(model.shape),
        dtype=str(model.compute_dtype),
        fingerprint=hidden[-1].float().tolist(),
        token_budget=engine.train_token_budget,
        norms=[] if model.shards is None else model.shards.norms,
    )


def _check_same(own: Hello, theirs: Hello, rank: int) -> None:
    if (own.shape, own.dtype) != (theirs.shape, theirs.dtype):
        differing = f"{theirs.shape} in {theirs.dtype}, and the leader {own.shape} in {own.dtype}"
        raise ConfigError(f"Rank {rank} of the training group has {differing}; give all the same model and dtype.")
    mine, other = torch.tensor(own.fingerprint), torch.tensor(theirs.fingerprint)
    tolerance = next(share for dtype, share in _SAME_WEIGHTS.items() if str(dtype) == own.dtype)
    is_close = float((mine - other).norm()) <= tolerance * float(mine.norm())
    if not (is_close and np.allclose(own.norms, theirs.norms, rtol=_SAME_NORM, atol=0)):
        raise ConfigError(
            f"Rank {rank} of the training group has other weights of the base model than the leader; give all the same "
            "model folder, in the same version."
        )
