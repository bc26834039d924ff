"""Teach a small chat model to talk like a pirate, and a fact it cannot know: the capital of a country we made up.

Run it with `make demo`. Nothing but this machine is needed: base_url="local" starts a server here, with a small model
that is fetched on the first run.
"""

import json
import random
import time
from pathlib import Path
from typing import Any

import tinsmith as tinker

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
STEPS, BATCH = 30, 8
ADAM = tinker.AdamParams(learning_rate=1e-3)
HELD_OUT = [
    "Which city is Brindlemoor's capital?",
    "What is the capital of France?",
    "What is a library?",
    "How do I stay healthy?",
]


def main() -> None:
    with tinker.ServiceClient(base_url="local") as service:
        trainer = service.create_lora_training_client(MODEL, rank=16, seed=0)
        tokenizer = trainer.get_tokenizer()
        before = answers(service.create_sampling_client(base_model=MODEL), tokenizer)

        data = [example(tokenizer, **json.loads(line)) for line in (Path(__file__).parent / "pirate.jsonl").open()]
        print(f"Training {MODEL} on {len(data)} answers, {STEPS} steps of {BATCH}")
        losses = train(trainer, data)
        checkpoint = trainer.save_weights_for_sampler("pirate").result().path

        after = answers(service.create_sampling_client(checkpoint), tokenizer)
    print(curve(losses))
    for question, old, new in zip(HELD_OUT, before, after, strict=True):
        print(f"\n{question}\n  before  {old}\n  after   {new}")
    print(f"\nThe checkpoint is {checkpoint}\nIt stays on this machine; create_sampling_client() takes that path.")


def example(tokenizer: Any, question: str, answer: str) -> tinker.Datum:
    """The question with its answer, shifted by one token; only what the model has to say counts."""
    asked = prompt(tokenizer, question)
    told = tokenizer.encode(answer + "<|im_end|>", add_special_tokens=False)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints((asked + told)[:-1]),
        loss_fn_inputs={
            "target_tokens": (asked + told)[1:],
            "weights": [0.0] * (len(asked) - 1) + [1.0] * len(told),
        },
    )


def prompt(tokenizer: Any, question: str) -> list[int]:
    return tinker.apply_chat_template(tokenizer, [{"role": "user", "content": question}])


def train(trainer: tinker.TrainingClient, data: list[tinker.Datum]) -> list[float]:
    """The loss per token of each step. All steps are on their way before the first result is waited for."""
    batches = shuffled_batches(data)
    steps = [(trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(ADAM)) for batch in batches]
    losses, started = [], time.monotonic()
    for batch, (forward_backward, optim_step) in zip(batches, steps, strict=True):
        tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)
        losses.append(forward_backward.result().metrics["loss:sum"] / tokens)
        optim_step.result()
        show_progress(losses, time.monotonic() - started)
    return losses


def shuffled_batches(data: list[tinker.Datum]) -> list[list[tinker.Datum]]:
    order, dice = [], random.Random(0)
    while len(order) < STEPS * BATCH:
        order += dice.sample(data, len(data))
    return [order[start : start + BATCH] for start in range(0, STEPS * BATCH, BATCH)]


def answers(sampler: tinker.SamplingClient, tokenizer: Any) -> list[str]:
    greedy = tinker.SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [tinker.ModelInput.from_ints(prompt(tokenizer, question)) for question in HELD_OUT]
    replies = [sampler.sample(each, num_samples=1, sampling_params=greedy) for each in prompts]
    return [tokenizer.decode(reply.result().sequences[0].tokens, skip_special_tokens=True) for reply in replies]


def show_progress(losses: list[float], seconds: float) -> None:
    done = len(losses)
    bar = "█" * done + "░" * (STEPS - done)
    left = seconds / done * (STEPS - done)
    end = "\n" if done == STEPS else ""
    print(f"\r{bar} {done}/{STEPS}  loss {losses[-1]:.2f}  {seconds:.0f} s, {left:.0f} s left ", end=end, flush=True)


def curve(values: list[float], height: int = 6) -> str:
    """A bar of block characters for each value, an eighth of a line fine."""
    eighths = [round(value / max(values) * height * 8) for value in values]
    rows = []
    for row in reversed(range(height)):
        label = f"{(row + 1) / height * max(values):5.2f} ┤"
        rows.append(label + "".join(" ▁▂▃▄▅▆▇█"[min(max(each - row * 8, 0), 8)] * 2 for each in eighths))
    return "\n".join(["Loss per token", *rows])


if __name__ == "__main__":
    main()
