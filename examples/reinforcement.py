"""Reinforcement learning with a reward that a program can check: the model learns to answer sums with just the number.

Group-relative policy gradients: for each question the model gives a group of answers, each answer is rewarded, and what
counts is how much better it did than its group. No answer is ever shown to the model. About a minute on two cores.
"""

import random
import re
from statistics import mean
from typing import Any

import _show

import tinsmith as tinker

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format of SmolLM2 and Qwen
HELD_OUT, QUESTIONS, GROUP = 20, 4, 8
ADAM = tinker.AdamParams(learning_rate=5e-4)
Group = list[tuple[list[int], Any, float]]
"""The answers to one question: prompt, sampled sequence and reward of each."""


def main(
    *, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", steps: int = 16, base_url: str = "local"
) -> dict[str, Any]:
    dice = random.Random(0)
    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    dice.shuffle(sums)
    held_out, sums = sums[:HELD_OUT], sums[HELD_OUT:]

    with tinker.ServiceClient(base_url=base_url) as service:
        trainer = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        greedy = tinker.SamplingParams(max_tokens=12, temperature=0.0)
        before = ask(trainer, tokenizer, held_out, 1, greedy)

        rewards = _show.Curve("reward", steps, full=1.0)
        for step in range(steps):
            explore = tinker.SamplingParams(max_tokens=12, temperature=1.0, seed=step)
            groups = ask(trainer, tokenizer, dice.sample(sums, QUESTIONS), GROUP, explore)
            batch = [
                example(prompt, sequence, earned - average(group))
                for group in groups
                for prompt, sequence, earned in group
                if earned != average(group)  # what is no better and no worse than its group teaches nothing
            ]
            if batch:
                update = trainer.forward_backward(batch, "importance_sampling")
                trainer.optim_step(ADAM).result()
                update.result()
            rewards.add(mean(map(average, groups)))

        after = ask(trainer, tokenizer, held_out, 1, greedy)
    figures = {"before": mean(map(average, before)), "after": mean(map(average, after))}
    _show.table(("sums it never saw", "mean reward"), *[(name, f"{value:.2f}") for name, value in figures.items()])
    return {"curve": rewards.values, **figures}


def ask(trainer: Any, tokenizer: Any, sums: list[tuple[int, int]], answers: int, params: Any) -> list[Group]:
    """So many answers to each sum, from the weights as they are now."""
    sampler = trainer.save_weights_and_get_sampling_client().result()
    texts = [CHAT.format(f"What is {a} + {b}? Answer with only the number.") for a, b in sums]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    replies = [sampler.sample(tinker.ModelInput.from_ints(prompt), answers, params) for prompt in prompts]
    return [
        [(prompt, each, reward(tokenizer.decode(each.tokens), a + b)) for each in reply.result().sequences]
        for prompt, reply, (a, b) in zip(prompts, replies, sums, strict=True)
    ]


def reward(answer: str, correct: int) -> float:
    """1 for the right number and nothing after it, a half if it goes on: the base model hardly ever stops."""
    numbers = re.findall(r"\d+", answer)
    if not numbers or int(numbers[-1]) != correct:
        return 0.0
    return 1.0 if answer.endswith("<|im_end|>") else 0.5


def average(group: Group) -> float:
    return mean(earned for _, _, earned in group)


def example(prompt: list[int], sequence: Any, advantage: float) -> tinker.Datum:
    """Tokens shifted by one. The prompt has no advantage, so it has no part in the loss."""
    tokens, unscored = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*unscored, *sequence.logprobs],
            "advantages": unscored + [advantage] * len(sequence.tokens),
        },
    )


if __name__ == "__main__":
    _show.run(main)
