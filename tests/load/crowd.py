"""A process of many clients: `python -m tests.load.crowd NAME PACKAGE URL FOLDER SAMPLERS MODELS PROBES SAMPLES KEY...`

Each client has a session of its own, and they share the keys evenly. When all sessions are open there is a file
`FOLDER/NAME.ready`. From `FOLDER/go` on each sampler queues its samples at once and waits for them, each model takes
one step after the other, and each probe submits a sample every now and then, both until there is `FOLDER/stop`. Then
`FOLDER/NAME.json` holds what they saw. The package `http` is none at all, and the only one that can probe.
"""

from __future__ import annotations

import asyncio
import importlib
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.chaos.programs import MODEL
from tests.end_to_end.scripts import sentence
from tests.load.by_hand import HandClient
from tests.load.records import Records

GO, STOP = "go", "stop"
SAMPLE_TOKENS = 24
OPENING_AT_ONCE = 20
PROBE_SECONDS = 0.05
_LOOK_SECONDS = 0.1

Work = Callable[[], Awaitable[None]]


class Crowd:
    def __init__(self, name: str, package: str, url: str, folder: Path, samples: int) -> None:
        self._name, self._package, self._url, self._folder, self._samples = name, package, url, folder, samples
        self._tinker = None if package == "http" else importlib.import_module(package)
        self._records = Records()
        self._door = asyncio.Semaphore(OPENING_AT_ONCE)

    async def run(self, samplers: int, models: int, probes: int, keys: list[str]) -> None:
        makers = [self._sampler] * samplers + [self._model] * models + [self._probe] * probes
        async with AsyncExitStack() as stack:
            opening = [make(stack, key, number) for number, (make, key) in enumerate(zip(makers, cycle(keys)))]
            work = await asyncio.gather(*opening)
            (self._folder / f"{self._name}.ready").touch()
            while not self._is_there(GO):  # noqa: ASYNC110 - the sign comes from another process
                await asyncio.sleep(_LOOK_SECONDS)
            await asyncio.gather(*(each() for each in work))
            self._records.write(self._folder / f"{self._name}.json")

    def _is_there(self, signal: str) -> bool:
        return (self._folder / signal).exists()

    # Samplers

    async def _sampler(self, stack: AsyncExitStack, key: str, number: int) -> Work:
        prompt = [number % 90 + 1, 2, 3]
        async with self._door:
            if self._tinker is None:
                client = await stack.enter_async_context(HandClient(self._url, key, self._records).opened())
                sampler = await client.sampler()
                return lambda: self._sample_by_hand(client, sampler, key, prompt)
            service = await stack.enter_async_context(self._service(key))
            chosen = await service.create_sampling_client_async(base_model=MODEL)
            return lambda: self._sample(chosen, key, prompt)

    async def _sample_by_hand(self, client: Any, sampler: Any, key: str, prompt: list[int]) -> None:
        submitted = [await sampler.submit(prompt, SAMPLE_TOKENS) for _ in range(self._samples)]
        self._records.note("queued", key, "samples")
        for request_id in submitted:
            await client.result(request_id)
            self._records.note("done", key, "sample")

    async def _sample(self, sampler: Any, key: str, prompt: list[int]) -> None:
        assert self._tinker is not None
        params = self._tinker.SamplingParams(max_tokens=SAMPLE_TOKENS)
        asked = self._tinker.ModelInput.from_ints(prompt)

        async def one() -> None:
            await sampler.sample_async(prompt=asked, num_samples=1, sampling_params=params)
            self._records.note("done", key, "sample")

        await asyncio.gather(*(one() for _ in range(self._samples)))

    async def _probe(self, stack: AsyncExitStack, key: str, number: int) -> Work:
        client = await stack.enter_async_context(HandClient(self._url, key, self._records).opened())
        sampler = await client.sampler()

        async def work() -> None:
            submitted = []
            while not self._is_there(STOP):
                submitted.append(await sampler.submit([1, 2, 3], SAMPLE_TOKENS))
                await asyncio.sleep(PROBE_SECONDS)
            for request_id in submitted:
                await client.result(request_id)

        return work

    # Models

    async def _model(self, stack: AsyncExitStack, key: str, number: int) -> Work:
        name = f"{self._name}-{number}"
        async with self._door:
            if self._tinker is None:
                client = await stack.enter_async_context(HandClient(self._url, key, self._records).opened())
                model = await client.model()
                return lambda: self._train(name, key, steps_by_hand(model))
            service = await stack.enter_async_context(self._service(key))
            chosen = await service.create_lora_training_client_async(MODEL, rank=4)
            return lambda: self._train(name, key, steps_of(self._tinker, chosen))

    async def _train(self, name: str, key: str, operations: Callable[[int], list[Work]]) -> None:
        step = 0
        while not self._is_there(STOP):
            for operation in operations(step):
                await operation()
                self._records.note("done", key, name)
            step += 1

    @asynccontextmanager
    async def _service(self, key: str) -> AsyncIterator[Any]:
        assert self._tinker is not None
        service = self._tinker.ServiceClient(base_url=self._url, api_key=key)
        yield service
        await service.close("success")


def steps_by_hand(model: Any) -> Callable[[int], list[Work]]:
    def operations(step: int) -> list[Work]:
        tokens = [(step + 11 * place) % 250 for place in range(13)]
        return [lambda: model.forward_backward(tokens), model.optim_step]

    return operations


def steps_of(tinker: Any, model: Any) -> Callable[[int], list[Work]]:
    adam = tinker.AdamParams(learning_rate=1e-3)

    async def forward_backward(step: int) -> None:
        await (await model.forward_backward_async([sentence(tinker, step)], "cross_entropy")).result_async()

    async def optim_step() -> None:
        await (await model.optim_step_async(adam)).result_async()

    return lambda step: [lambda: forward_backward(step), optim_step]


def main(name: str, package: str, url: str, folder: str, *numbers_and_keys: str) -> None:
    warnings.simplefilter("ignore")
    samplers, models, probes, samples = map(int, numbers_and_keys[:4])
    crowd = Crowd(name, package, url, Path(folder), samples)
    asyncio.run(crowd.run(samplers, models, probes, list(numbers_and_keys[4:])))


if __name__ == "__main__":
    main(*sys.argv[1:])
