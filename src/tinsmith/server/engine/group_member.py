"""A member of a training group: computes the shares that its leader sends, until it is let go."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from tinsmith.server.engine.adapters import Adapter, layout_of
from tinsmith.server.engine.channels import Channel
from tinsmith.server.engine.engine import Engine, SavedGradients
from tinsmith.server.engine.group import hello
from tinsmith.server.engine.group_messages import (
    Answer,
    Dismissal,
    JoinPass,
    Share,
    SharedAdapter,
    decode_order,
    encode,
    examples_of,
    packed_output,
    refusal_of,
)
from tinsmith.server.engine.sharding import BrokenShardsError
from tinsmith.server.engine.train import BadExampleError, RowOutput

_log = logging.getLogger(__name__)


def serve(engine: Engine, leader: Channel, check: Callable[[], None] = lambda: None) -> None:
    """Ends when the leader lets us go, and with an error if it is lost.

    `check` is called after an error that no row is to blame for; if the engine is lost, it raises.
    """
    member = _Member(engine, leader)
    engine.on_progress = leader.beat
    leader.send(encode(hello(engine)))
    while not isinstance(order := decode_order(leader.receive()), Dismissal):
        if isinstance(order, JoinPass):
            member.join_pass()
        elif member.answer(order).failure:
            check()
    if engine.model.shards is not None:
        engine.model.shards.close()


class _Member:
    def __init__(self, engine: Engine, leader: Channel) -> None:
        self._engine = engine
        self._leader = leader
        self._adapters: dict[int, Adapter] = {}
        """Those of the last share, by the version of their weights: however many the leader has, it is one batch."""

    def join_pass(self) -> None:
        shards = self._engine.model.shards
        assert shards is not None
        try:
            with shards.together([False]):
                pass
        except BrokenShardsError:
            if shards.keeps_others_waiting:
                raise
            # The leader judges by the ending of whoever was lost; we end with the leader.
            _log.exception("a pass of the leader failed")

    def answer(self, share: Share) -> Answer:
        self._adapters = {each.version: self._adapter(each) for each in share.adapters}
        adapters = [self._adapters[each.version] for each in share.adapters]
        answer = self._computed(share, adapters)
        self._leader.send(encode(answer))
        # Only now it looks for gradients; a GPU that sends before would wait for it with everything.
        self._leader.settle()
        for place in answer.trained:
            self._leader.send_tensor(adapters[place].gradient)
        self._leader.settle()
        return answer

    def _adapter(self, shared: SharedAdapter) -> Adapter:
        if not shared.is_sent:
            known = self._adapters[shared.version]
            known.clear_gradient()
            return known
        model = self._engine.model
        layout = layout_of(model.shape, shared.spec)
        weights = torch.empty(layout.size, device=model.device)
        self._leader.receive_tensor(weights)
        return Adapter(layout, shared.spec, weights, model.compute_dtype)

    def _computed(self, share: Share, adapters: list[Adapter]) -> Answer:
        """An error here is an answer, too: the leader knows what to do about it."""
        num_before = self._engine.num_micro_batches
        try:
            outputs = self._outputs(share, adapters)
        except BadExampleError as bad:
            return Answer(refusal=refusal_of(bad))
        except Exception as error:
            shards = self._engine.model.shards
            if shards is not None and shards.keeps_others_waiting:
                raise
            _log.exception("a share of %d rows failed", len(share.rows))
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
            return Answer(failure=f"{type(error).__name__}: {error}", is_out_of_memory=is_out_of_memory)
        return Answer(
            outputs=[packed_output(index, output) for index, output in outputs.items()],
            trained=sorted({row.adapter for row in share.rows if row.backward}),
            num_batches=self._engine.num_micro_batches - num_before,
        )

    def _outputs(self, share: Share, adapters: list[Adapter]) -> dict[int, RowOutput]:
        examples = examples_of(share, adapters)
        if share.in_step is None:
            return self._engine.compute(examples, SavedGradients(adapters))()
        self._engine.train_token_budget = share.in_step.token_budget
        return self._engine.compute_in_step(examples, share.in_step.turns)()
