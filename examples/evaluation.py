"""Evaluation: the base model and a checkpoint on questions that neither was trained on, with 95 % intervals.

Perplexity says how surprised a model is by the expected answer, per token; a reply is right if it names the word that
matters. The checkpoint is the newest that demo.py made, unless --checkpoint names another. Some seconds on two cores.
"""

import json
import math
import random
from pathlib import Path
from statistics import mean
from typing import Any

import _show

import tinsmith as tinker

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format of SmolLM2 and Qwen
TEST = Path(__file__).with_name("pirate_test.jsonl")


def main(
    *, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", checkpoint: str = "", base_url: str = "local"
) -> dict[str, dict[str, Any]]:
    rows = [json.loads(line) for line in TEST.read_text().splitlines()]
    with tinker.ServiceClient(base_url=base_url) as service:
        checkpoint = checkpoint or newest_checkpoint(base_url, "pirate")
        # A sampling client looks for its tokenizer on a hub; a training client is told by the server where it is.
        tokenizer = service.create_lora_training_client(base_model=model, rank=1).result().get_tokenizer()
        scores = {
            "base model": evaluate(service.create_sampling_client(base_model=model).result(), tokenizer, rows),
            "checkpoint": evaluate(service.create_sampling_client(checkpoint).result(), tokenizer, rows),
        }
    print(f"{model} and {checkpoint} on {len(rows)} questions")
    _show.table(("", *scores["base model"]), *[(name, *map(shown, each.values())) for name, each in scores.items()])
    return scores


def evaluate(sampler: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Everything is asked before the first answer is waited for, so the server works on all questions at once."""
    prompts = [tokenizer.encode(CHAT.format(row["question"]), add_special_tokens=False) for row in rows]
    expected = [tokenizer.encode(f"{row['answer']}<|im_end|>", add_special_tokens=False) for row in rows]
    greedy = tinker.SamplingParams(max_tokens=24, temperature=0.0)
    scores = [
        sampler.compute_logprobs(tinker.ModelInput.from_ints(prompt + answer))
        for prompt, answer in zip(prompts, expected, strict=True)
    ]
    replies = [sampler.sample(tinker.ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts]

    surprise = [-mean(score.result()[-len(answer) :]) for score, answer in zip(scores, expected, strict=True)]
    said = [tokenizer.decode(reply.result().sequences[0].tokens) for reply in replies]
    right = [row["key"].lower() in text.lower() for row, text in zip(rows, said, strict=True)]
    return {
        "perplexity": bootstrap(surprise),
        "new facts": wilson([ok for ok, row in zip(right, rows, strict=True) if row["new"]]),
        "old knowledge": wilson([ok for ok, row in zip(right, rows, strict=True) if not row["new"]]),
    }


def bootstrap(surprise: list[float], times: int = 2000) -> tuple[float, float, float]:
    """Perplexity, and its interval: what it would have been on other draws of as many questions."""
    dice = random.Random(0)
    draws = sorted(mean(dice.choices(surprise, k=len(surprise))) for _ in range(times))
    return math.exp(mean(surprise)), math.exp(draws[times // 40]), math.exp(draws[-times // 40])


def wilson(right: list[bool], z: float = 1.96) -> tuple[float, float, float]:
    """A share, and its interval, which does not shrink to nothing at 0 % and 100 %."""
    n, share = len(right), mean(right)
    middle, half = share + z * z / (2 * n), z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return share, (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def shown(figures: tuple[float, float, float]) -> str:
    value, low, high = figures
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def newest_checkpoint(base_url: str, name: str) -> str:
    listed = tinker.RestClient(base_url=base_url).list_user_checkpoints().result().checkpoints
    found = [each for each in listed if each.checkpoint_id == f"sampler_weights/{name}"]
    if not found:
        raise SystemExit(f"There is no checkpoint {name!r} yet. Run examples/demo.py first, or pass --checkpoint.")
    return max(found, key=lambda each: each.time).tinker_path


if __name__ == "__main__":
    _show.run(main)
