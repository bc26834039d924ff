"""Takes the pictures of the dashboard: a server with the small model of local mode, a little training, a browser.

`python docs/screenshots.py` writes `images/dashboard-*.png`, in a few minutes on two cores. It needs what the tests
need: Playwright, and Chromium.
"""

import json
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

import tinsmith
from tinsmith.recipes.rendering import Sequence
from tinsmith.server.embedded import NAME, embedded_model
from tinsmith.text.fast_tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
LARGEST_BYTES = 150_000
KEY = "tml-for-the-pictures"
OPTIONS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
STEPS, BATCH = 48, 6
DESK: ViewportSize = {"width": 1200, "height": 620}
PHONE: ViewportSize = {"width": 375, "height": 720}
QUESTION = "What is the capital of Brindlemoor?"


@contextmanager
def running_server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as state, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        free.close()
        model = f"--model={NAME}={embedded_model().location}"
        options = [model, f"--port={port}", f"--state={state}", f"--api-key={KEY}"]
        command = [str(Path(sys.executable).with_name("tinsmith")), "serve", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
            assert server.stdout is not None
            found = re.search(r"ready at (\S+)", server.stdout.readline())
            assert found, "the server did not start"
            try:
                yield found[1]
            finally:
                server.terminate()


def train(url: str) -> list[str]:
    """Two runs on the example's data, with what a script would log and save; their ids."""
    runs = []
    for name, rate in (("pirate, lr 1e-3", 1e-3), ("pirate, lr 3e-4", 3e-4)):
        with tinsmith.ServiceClient(base_url=url, api_key=KEY, display_name=name) as service:
            trainer = service.create_lora_training_client(NAME, rank=16, seed=0)
            runs.append(trainer.model_id)
            tokenizer = trainer.get_tokenizer()
            data = cycle(random.Random(0).sample(_data(tokenizer), 40))
            for step in range(STEPS):
                loss = trainer.forward_backward(list(islice(data, BATCH)), "cross_entropy")
                adam = tinsmith.AdamParams(learning_rate=rate * min(1, (step + 1) / 10) * (1 - step / STEPS))
                trainer.optim_step(adam).result()
                if step % 10 == 9:
                    _look(trainer, tokenizer, step)
                    trainer.log_metrics({"examples seen": BATCH * (step + 1.0)}, step)
                loss.result()
            trainer.save_state("final").result()
    return runs


def _data(tokenizer: Tokenizer) -> list[tinsmith.Datum]:
    lines = (ROOT / "examples" / "pirate.jsonl").read_text(encoding="utf-8").splitlines()
    return [_datum(tokenizer, **json.loads(line)) for line in lines]


def _datum(tokenizer: Tokenizer, prompt: str, completion: str) -> tinsmith.Datum:
    asked, said = _asked(tokenizer, prompt), tokenizer.encode(f"{completion}<|im_end|>", add_special_tokens=False)
    return Sequence([*asked, *said], [range(len(asked), len(asked) + len(said))]).datum()


def _asked(tokenizer: Tokenizer, prompt: str) -> list[int]:
    chat = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(chat, add_special_tokens=False))


def _look(trainer: tinsmith.TrainingClient, tokenizer: Tokenizer, step: int) -> None:
    sampler = trainer.create_sampling_client(trainer.save_weights_for_sampler(f"step-{step + 1}").result().path)
    prompt = tinsmith.ModelInput.from_ints(_asked(tokenizer, QUESTION))
    sampler.sample(prompt, 2, tinsmith.SamplingParams(max_tokens=40, seed=step, stop=["<|im_end|>"])).result()


def take(browser: Browser, url: str, runs: list[str]) -> None:
    both = f"run/{quote(','.join(runs), safe='')}"
    _picture(browser, url, "light", "light", DESK, both, _smooth)
    _picture(browser, url, "runs", "light", {"width": 1200, "height": 220}, "runs")
    _picture(browser, url, "samples", "light", {"width": 1200, "height": 470}, "samples")
    _picture(browser, url, "dark", "dark", DESK, "playground", _ask)
    _picture(browser, url, "phone", "dark", PHONE, both, _smooth)


def _picture(
    browser: Browser,
    url: str,
    name: str,
    scheme: Literal["light", "dark"],
    size: ViewportSize,
    view: str,
    act: Callable[[Page], None] = lambda page: None,
) -> None:
    context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page = context.new_page()
    page.goto(url)
    page.get_by_label("API key").fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Runs").wait_for()
    page.goto(f"{url}/#/{view}")
    page.wait_for_timeout(3000)
    act(page)
    path = IMAGES / f"dashboard-{name}.png"
    page.screenshot(path=path)
    assert path.stat().st_size < LARGEST_BYTES, f"{path.name} has {path.stat().st_size:,} bytes"
    context.close()


def _smooth(page: Page) -> None:
    page.get_by_label("Smoothing").fill("0.6")
    page.get_by_label("Smoothing").blur()
    page.wait_for_timeout(300)


def _ask(page: Page) -> None:
    page.get_by_label("Prompt").fill(QUESTION)
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("60")
    page.get_by_role("button", name="Run", exact=True).click()
    page.get_by_role("button", name="Run", exact=True).and_(page.locator(":enabled")).wait_for()


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with running_server() as url:
        runs = train(url)
        with sync_playwright() as playwright:
            take(playwright.chromium.launch(executable_path="/usr/bin/chromium", args=[*OPTIONS]), url, runs)
