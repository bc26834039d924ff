"""Preferences: the model learns to prefer a plain answer to a flattering one, by direct preference optimisation (DPO).

Each pair is one question with the answer we want and the one we do not. The loss widens the margin between the two: how
much more the first has gained in likelihood, compared with the base model, than the second. It is a function of whole
pairs, so it is a custom loss. Half a minute on two cores.
"""

import json
import random
from pathlib import Path
from typing import Any

import _show
import torch

import tinsmith as tinker

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format of SmolLM2 and Qwen
PAIRS = Path(__file__).with_name("plain_or_flattering.jsonl")
BATCH, HELD_OUT, BETA = 4, 10, 0.1
ADAM = tinker.AdamParams(learning_rate=2e-4)
Answer = tuple[list[int], list[int]]
"""The tokens of a prompt, and those of what is said to it."""


def main(
    *, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", steps: int = 16, base_url: str = "local"
) -> dict[str, Any]:
    with tinker.ServiceClient(base_url=base_url) as service:
        trainer = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        answers = read_answers(trainer.get_tokenizer())
        reference = likelihoods(service.create_sampling_client(base_model=model).result(), answers)
        data = [example(*answer, before) for answer, before in zip(answers, reference, strict=True)]

        dice = random.Random(0)
        margins = _show.Curve("margin", steps, full=50.0)
        for _ in range(steps):
            pairs = dice.sample(range(HELD_OUT, len(data) // 2), BATCH)
            batch = [datum for pair in pairs for datum in data[2 * pair : 2 * pair + 2]]
            step = trainer.forward_backward_custom(batch, dpo)
            trainer.optim_step(ADAM).result()
            margins.add(step.result().metrics["margin"])

        held_out = slice(2 * HELD_OUT)
        now = likelihoods(trainer.save_weights_and_get_sampling_client().result(), answers[held_out])
    gained = torch.tensor(now) - torch.tensor(reference[held_out])
    plain, flattering = gained[0::2], gained[1::2]
    figures = {"gained by plain": plain, "gained by flattering": flattering, "margin": plain - flattering}
    _show.table(
        ("pairs it never saw", "mean", "lowest", "highest"),
        *[(name, *[f"{each:+.1f}" for each in (v.mean(), v.min(), v.max())]) for name, v in figures.items()],
    )
    accuracy = float((plain > flattering).float().mean())
    print(f"The plain answer is preferred in {accuracy:.0%} of them.")
    return {"curve": margins.values, "margin": float((plain - flattering).mean()), "accuracy": accuracy}


def dpo(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Gets the log-probability of every target token; the data come in pairs, the answer we want first."""
    gained = torch.stack(
        [
            (datum.loss_fn_inputs["weights"].to_torch() * each).sum() - datum.loss_fn_inputs["reference"].to_torch()[0]
            for datum, each in zip(data, logprobs, strict=True)
        ]
    )
    margins = gained[0::2] - gained[1::2]
    return -torch.nn.functional.logsigmoid(BETA * margins).mean(), {"margin": margins.mean().item()}


def read_answers(tokenizer: Any) -> list[Answer]:
    """Two for each pair, the plain one first."""
    rows = [json.loads(line) for line in PAIRS.read_text().splitlines()]
    texts = [
        (CHAT.format(row["question"]), f"{row[kind]}<|im_end|>") for row in rows for kind in ("plain", "flattering")
    ]
    return [tuple(tokenizer.encode(part, add_special_tokens=False) for part in text) for text in texts]


def likelihoods(sampler: Any, answers: list[Answer]) -> list[float]:
    scores = [sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt + answer)) for prompt, answer in answers]
    return [sum(score.result()[-len(answer) :]) for score, (_, answer) in zip(scores, answers, strict=True)]


def example(prompt: list[int], answer: list[int], reference: float) -> tinker.Datum:
    """Tokens shifted by one. The loss gets every input; the server is sent the targets and the weights only."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints((prompt + answer)[:-1]),
        loss_fn_inputs={
            "target_tokens": (prompt + answer)[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
            "reference": torch.tensor([reference]),
        },
    )


if __name__ == "__main__":
    _show.run(main)
