"""Supervised fine-tuning: a small chat model learns a pirate's voice, and a fact it cannot know: an invented capital.

`make demo` runs this. Nothing but this machine is needed: base_url="local" starts a server here, with a small model
that is fetched on the first run. About a minute on two cores.
"""

import json
import random
from pathlib import Path
from typing import Any

import _show

import tinsmith as tinker

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format of SmolLM2 and Qwen
DATA = Path(__file__).with_name("pirate.jsonl")
BATCH = 8
ADAM = tinker.AdamParams(learning_rate=1e-3)
HELD_OUT = [
    "Which city is Brindlemoor's capital?",
    "What is the capital of France?",
    "What is a library?",
    "How do I stay healthy?",
]


def main(
    *, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", steps: int = 30, base_url: str = "local"
) -> dict[str, Any]:
    with tinker.ServiceClient(base_url=base_url) as service:
        trainer = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        before = answers(service.create_sampling_client(base_model=model).result(), tokenizer)

        data = [example(tokenizer, **json.loads(line)) for line in DATA.read_text().splitlines()]
        print(f"Training {model} on {len(data)} answers, {steps} steps of {BATCH}")
        losses = train(trainer, shuffled_batches(data, steps))
        checkpoint = trainer.save_weights_for_sampler("pirate").result().path

        after = answers(service.create_sampling_client(checkpoint).result(), tokenizer)
    for question, old, new in zip(HELD_OUT, before, after, strict=True):
        print(f"\n{question}\n  before  {old}\n  after   {new}")
    print(f"\nTalk to it:\n  {_show.command('tinsmith')} --base-url {base_url} chat {checkpoint}")
    return {"curve": losses, "answers": after, "checkpoint": checkpoint}


def example(tokenizer: Any, prompt: str, completion: str) -> tinker.Datum:
    """The prompt with its completion, shifted by one token; only what the model has to say counts."""
    asked = tokenizer.encode(CHAT.format(prompt), add_special_tokens=False)
    told = tokenizer.encode(f"{completion}<|im_end|>", add_special_tokens=False)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints((asked + told)[:-1]),
        loss_fn_inputs={
            "target_tokens": (asked + told)[1:],
            "weights": [0.0] * (len(asked) - 1) + [1.0] * len(told),
        },
    )


def shuffled_batches(data: list[tinker.Datum], steps: int) -> list[list[tinker.Datum]]:
    order: list[tinker.Datum] = []
    dice = random.Random(0)
    while len(order) < steps * BATCH:
        order += dice.sample(data, len(data))
    return [order[start : start + BATCH] for start in range(0, steps * BATCH, BATCH)]


def train(trainer: Any, batches: list[list[tinker.Datum]]) -> list[float]:
    """The loss per token of each step. All steps are on their way before the first result is waited for."""
    steps = [(trainer.forward_backward(batch, "cross_entropy"), trainer.optim_step(ADAM)) for batch in batches]
    losses = _show.Curve("loss per token", len(steps))
    for batch, (forward_backward, optim_step) in zip(batches, steps, strict=True):
        tokens = sum(sum(datum.loss_fn_inputs["weights"].tolist()) for datum in batch)
        loss = forward_backward.result().metrics["loss:sum"] / tokens
        optim_step.result()
        losses.add(loss)
    return losses.values


def answers(sampler: Any, tokenizer: Any) -> list[str]:
    greedy = tinker.SamplingParams(max_tokens=40, temperature=0.0)
    prompts = [tokenizer.encode(CHAT.format(question), add_special_tokens=False) for question in HELD_OUT]
    replies = [sampler.sample(tinker.ModelInput.from_ints(each), 1, greedy) for each in prompts]
    return [tokenizer.decode(reply.result().sequences[0].tokens, skip_special_tokens=True) for reply in replies]


if __name__ == "__main__":
    _show.run(main)
