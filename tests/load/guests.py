"""A process of clients that come and go: `python -m tests.load.guests PACKAGE URL FOLDER PAUSE`

Round after round, until there is a file `FOLDER/stop`, one of the programs below is run with a new client of this
package; the package `http` is none, for programs in `rough_guests.py`. What a round costs the process is written to
`FOLDER/PACKAGE.rounds`, a line each.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.programs import MODEL
from tests.end_to_end.scripts import opened, rest_client, sentence
from tests.end_to_end.serving import KEY, OTHER_KEY
from tests.load.rough_guests import ROUGH_PROGRAMS

STOP = "stop"
PATIENCE = 300.0
TTL_SECONDS = 3600
"""The shortest there is; `soak.py` sees to it that time flies."""
_TOO_LARGE = 60_000  # no token of the model


class Visit:
    """What one client does while it is here."""

    def __init__(self, tinker: Any, url: str, key: str, random: Random) -> None:
        self.tinker, self.url, self.key, self.random = tinker, url, key, random

    def train(self, model: Any, steps: int = 2) -> None:
        for step in range(steps):
            model.forward_backward([sentence(self.tinker, step)], "cross_entropy").result(timeout=PATIENCE)
            model.optim_step(self.tinker.AdamParams(learning_rate=1e-3)).result(timeout=PATIENCE)

    def samples(self, sampler: Any, count: int, length: int) -> list[Any]:
        params = self.tinker.SamplingParams(max_tokens=length, temperature=1.0)
        prompt = self.tinker.ModelInput.from_ints([self.random.randrange(1, 90), 2, 3])
        return [sampler.sample(prompt, 1, params) for _ in range(count)]

    def failure(self, call: Callable[[], Any]) -> None:
        """What cannot work must not; which error it is, other tests say."""
        try:
            call()
        except Exception:  # noqa: BLE001 - of two packages
            return
        raise AssertionError(f"{call} did not fail")


def train_and_save(visit: Visit) -> None:
    with opened(visit.tinker, visit.url, visit.key) as client:
        model = client.create_lora_training_client(MODEL, rank=4)
        visit.train(model)
        saved = model.save_state("state", ttl_seconds=TTL_SECONDS).result(timeout=PATIENCE)
        again = client.create_training_client_from_state_with_optimizer(saved.path)
        visit.train(again, steps=1)
        # Who is killed before deleting it leaves it behind, for a while.
        to_delete = again.save_state("other", ttl_seconds=10 * TTL_SECONDS).result(timeout=PATIENCE)
        rest_client(visit.tinker, visit.url, visit.key).delete_checkpoint_from_tinker_path(to_delete.path).result()


def sample_own_weights(visit: Visit) -> None:
    with opened(visit.tinker, visit.url, visit.key) as client:
        model = client.create_lora_training_client(MODEL, rank=4)
        visit.train(model, steps=1)
        for sample in visit.samples(model.save_weights_and_get_sampling_client(), 4, 20):
            sample.result(timeout=PATIENCE)
        path = model.save_weights_for_sampler("sampler", ttl_seconds=TTL_SECONDS).result(timeout=PATIENCE).path
        for sample in visit.samples(client.create_sampling_client(model_path=path), 4, 20):
            sample.result(timeout=PATIENCE)


def leave_samples_behind(visit: Visit) -> None:
    """Closed while most of them wait."""
    client = visit.tinker.ServiceClient(base_url=visit.url, api_key=visit.key)
    samples = visit.samples(client.create_sampling_client(base_model=MODEL), 30, 100)
    samples[0].result(timeout=PATIENCE)
    client.close("interrupted").result()


def leave_without_a_word(visit: Visit) -> None:
    """The client is not closed, only forgotten. The official one keeps its session alive until the process ends."""
    client = visit.tinker.ServiceClient(base_url=visit.url, api_key=visit.key)
    visit.train(client.create_lora_training_client(MODEL, rank=4), steps=1)
    if visit.tinker.__name__ == "tinker":
        client.close("success").result()


def download(visit: Visit) -> None:
    with opened(visit.tinker, visit.url, visit.key) as client:
        model = client.create_lora_training_client(MODEL, rank=4)
        path = model.save_state("state", ttl_seconds=TTL_SECONDS).result(timeout=PATIENCE).path
        if hasattr(client, "download_checkpoint"):  # the other package leaves that to its command
            with tempfile.TemporaryDirectory() as folder:
                assert client.download_checkpoint(path, folder)


def fail(visit: Visit) -> None:
    with opened(visit.tinker, visit.url, visit.key) as client:
        model = client.create_lora_training_client(MODEL, rank=4)
        inputs = {"target_tokens": [1, _TOO_LARGE], "weights": [1.0, 1.0]}
        bad = visit.tinker.Datum(model_input=visit.tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=inputs)
        visit.failure(lambda: model.forward_backward([bad], "cross_entropy").result(timeout=PATIENCE))
        visit.failure(
            lambda: client.create_sampling_client(model_path="tinker://nobody:train:0/weights/nothing").result()
        )
        visit.failure(lambda: client.create_lora_training_client("no/model", rank=4).result())
        visit.failure(lambda: model.load_state("tinker://nobody:train:0/weights/nothing").result(timeout=PATIENCE))


PROGRAMS: list[Callable[[Visit], None]] = [
    train_and_save,
    sample_own_weights,
    leave_samples_behind,
    leave_without_a_word,
    download,
    fail,
]


def one_round(package: str, url: str, number: int) -> None:
    random = Random(number)
    if package == "http":
        ROUGH_PROGRAMS[number % len(ROUGH_PROGRAMS)](url)
        return
    visit = Visit(importlib.import_module(package), url, random.choice([KEY, OTHER_KEY]), random)
    PROGRAMS[number % len(PROGRAMS)](visit)


def tasks(package: str) -> int:
    """How many tasks the loop of our package has; 0 before it runs, and for the others."""
    if package != "tinsmith":
        return 0
    import asyncio

    from tinsmith.client.loop import background_loop

    return len(asyncio.all_tasks(background_loop().asyncio_loop))


def main(package: str, url: str, folder: str, pause: str) -> None:
    warnings.simplefilter("ignore")
    number = 0
    with Path(folder, f"{package}.rounds").open("a", buffering=1) as rounds:
        while not Path(folder, STOP).exists():
            error = ""
            try:
                one_round(package, url, number)
            except Exception:  # noqa: BLE001 - the verdict reports it
                error = traceback.format_exc()
            gc.collect()
            rounds.write(json.dumps({"number": number, "tasks": tasks(package), "error": error}) + "\n")
            number += 1
            time.sleep(float(pause))


if __name__ == "__main__":
    main(*sys.argv[1:])
