"""What the clients do: programs as a user writes them, for whichever package is passed in as `tinker`.

They know nothing of faults. Every number in them is fixed, so each round of a program must give what every other does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tests.chaos.ledger import Ledger
from tests.end_to_end.scripts import sentence

MODEL = "tiny/model-1"
RESULT_SECONDS = 600.0

Read = Callable[[Any], Any]


class Pending:
    """An operation on its way; whatever comes back is noted when it is asked for."""

    def __init__(self, ledger: Ledger, kind: str, future: Any, read: Read) -> None:
        self._ledger, self._kind, self._future, self._read = ledger, kind, future, read

    def result(self) -> Any:
        value = self._read(self._future.result(timeout=RESULT_SECONDS))
        self._ledger.note("result", kind=self._kind, value=value)
        return value


class Run:
    """One round: the public API of a package, with a note for each call and each result."""

    def __init__(self, tinker: Any, client: Any, ledger: Ledger) -> None:
        self._tinker, self._client, self._ledger = tinker, client, ledger
        self._adam = tinker.AdamParams(learning_rate=1e-3, eps=1e-6, weight_decay=0.01, grad_clip_norm=1.0)

    def new_model(self, seed: int) -> Any:
        model = self._client.create_lora_training_client(MODEL, rank=4, seed=seed)
        self._ledger.note("called", model=model.model_id, kind="create_model")
        return model

    def forward_backward(self, model: Any, step: int) -> Pending:
        data = [sentence(self._tinker, step), sentence(self._tinker, step + 3)]
        return self._call(
            model,
            "forward_backward",
            lambda: model.forward_backward(data, "cross_entropy"),
            lambda output: output.metrics["loss:sum"],
        )

    def optim_step(self, model: Any) -> Pending:
        return self._call(
            model, "optim_step", lambda: model.optim_step(self._adam), lambda output: output.metrics["grad_norm"]
        )

    def save(self, model: Any, name: str) -> str:
        """Again under the same name, if it was used before."""
        saved = self._call(
            model, "save_weights", lambda: model.save_state(name, overwrite=True), lambda output: output.path
        )
        return str(saved.result())

    def load(self, model: Any, path: str) -> None:
        self._call(model, "load_weights", lambda: model.load_state_with_optimizer(path), lambda output: None).result()

    def sampler(self, model: Any) -> Any:
        self._ledger.note("called", model=model.model_id, kind="save_weights_for_sampler")
        return model.save_weights_and_get_sampling_client()

    def base_sampler(self) -> Any:
        return self._client.create_sampling_client(base_model=MODEL)

    def sample(self, sampler: Any, seed: int, length: int = 24) -> Pending:
        params = self._tinker.SamplingParams(max_tokens=length, seed=seed, temperature=1.0)
        prompt = self._tinker.ModelInput.from_ints([seed % 90 + 1, 2, 3])
        return Pending(
            self._ledger,
            "sample",
            sampler.sample(prompt, 2, params),
            lambda output: [list(sequence.tokens) for sequence in output.sequences],
        )

    def _call(self, model: Any, kind: str, submit: Callable[[], Any], read: Read) -> Pending:
        self._ledger.note("called", model=model.model_id, kind=kind)
        return Pending(self._ledger, kind, submit(), read)


def patient(run: Run) -> None:
    """Waits for every result before the next call; goes back to the latest state, and then overwrites it."""
    model = run.new_model(seed=1)
    _steps(run, model, range(3))
    run.save(model, "latest")
    _steps(run, model, range(3, 6))
    latest = run.save(model, "latest")
    _steps(run, model, range(6, 9))
    run.load(model, latest)
    _steps(run, model, range(9, 11))
    run.save(model, "latest")
    _steps(run, model, range(11, 13))
    run.save(model, "end")


def hasty(run: Run) -> None:
    """Calls everything before it asks for the first result."""
    model = run.new_model(seed=2)
    pending = []
    for step in range(16):
        pending += [run.forward_backward(model, step), run.forward_backward(model, step + 1), run.optim_step(model)]
    _results(pending)
    run.save(model, "end")


def in_turns(run: Run) -> None:
    """Trains and samples by turns, as reinforcement learning does; an older sampler must stay as it was."""
    model, samplers = run.new_model(seed=3), []
    for turn in range(3):
        _steps(run, model, range(turn, turn + 3))
        samplers.append(run.sampler(model))
        _results([run.sample(sampler, seed) for sampler in samplers for seed in (turn, turn + 40)])
    run.save(model, "end")


def sampling(run: Run) -> None:
    """Many samples of the base model at once."""
    sampler = run.base_sampler()
    _results([run.sample(sampler, seed, length=40) for seed in range(12)])


def marathon(run: Run) -> None:
    """One model for a long time, a step after the other: what is lost has to be replayed from far back."""
    model = run.new_model(seed=4)
    _steps(run, model, range(200))
    run.save(model, "end")


def _steps(run: Run, model: Any, steps: Sequence[int]) -> None:
    for step in steps:
        run.forward_backward(model, step).result()
        run.optim_step(model).result()


def _results(pending: Sequence[Pending]) -> None:
    for one in pending:
        one.result()


PROGRAMS: dict[str, Callable[[Run], None]] = {
    program.__name__: program for program in (patient, hasty, in_turns, sampling, marathon)
}
