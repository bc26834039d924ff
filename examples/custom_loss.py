"""A loss of your own: the model is made to forget four capitals, and to keep four others.

To unlearn a word is to raise -log(1 - p), where p is the probability of that word. No built-in loss can do it, but
`forward_backward_custom` takes any function of the log-probabilities that torch can differentiate. The model is trained
on statements and asked in a chat, so what it forgets is more than a sentence. About half a minute on two cores.
"""

from typing import Any

import _show
import torch

import tinsmith as tinker

FORGET = {"France": "Paris", "Germany": "Berlin", "Greece": "Athens", "Austria": "Vienna"}
KEEP = {"Japan": "Tokyo", "England": "London", "Portugal": "Lisbon", "Sweden": "Stockholm"}
KEEP |= {"China": "Beijing", "Ireland": "Dublin", "Canada": "Ottawa", "Kenya": "Nairobi"}
UNTOUCHED = {"Hungary": "Budapest", "Norway": "Oslo", "Russia": "Moscow", "Cuba": "Havana"}
STATEMENT = "The capital of {} is"
CHAT = "<|im_start|>user\nWhat is the capital of {0}?<|im_end|>\n<|im_start|>assistant\nThe capital of {0} is"
ADAM = tinker.AdamParams(learning_rate=3e-4)


def main(
    *, model: str = "HuggingFaceTB/SmolLM2-135M-Instruct", steps: int = 20, base_url: str = "local"
) -> dict[str, Any]:
    groups = {"forget": FORGET, "keep": KEEP, "not trained on": UNTOUCHED}
    with tinker.ServiceClient(base_url=base_url) as service:
        trainer = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        tokenizer = trainer.get_tokenizer()
        asked = {name: [fact(tokenizer, CHAT, *each) for each in group.items()] for name, group in groups.items()}
        before = {name: probabilities(trainer, facts) for name, facts in asked.items()}

        told = [fact(tokenizer, STATEMENT, *each) for each in [*FORGET.items(), *KEEP.items()]]
        losses = _show.Curve("loss", steps)
        for _ in range(steps):
            step = trainer.forward_backward_custom(told, forget_some_keep_others)
            trainer.optim_step(ADAM).result()
            losses.add(step.result().metrics["loss:sum"])

        after = {name: probabilities(trainer, facts) for name, facts in asked.items()}
    for name, group in groups.items():
        print(f"\n{name}")
        for country, old, new in zip(group, before[name], after[name], strict=True):
            print(f"  {country:9} before {old:4.0%} {_show.bar(old, 30)}  after {new:4.0%} {_show.bar(new, 30)}")
    return {"curve": losses.values, "before": before, "after": after}


def forget_some_keep_others(data: list[Any], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Gets the log-probability of each target token of each datum; gives the loss, and figures to be reported."""
    words = torch.stack(
        [(each * datum.loss_fn_inputs["weights"].to_torch()).sum() for datum, each in zip(data, logprobs, strict=True)]
    )
    unwanted, wanted = words[: len(FORGET)], words[len(FORGET) :]
    unlearn = -torch.log1p(-unwanted.exp().clamp(max=1 - 1e-6)).sum()
    retain = -wanted.sum()
    return unlearn + retain, {"unlearn": unlearn.item(), "retain": retain.item()}


def fact(tokenizer: Any, wording: str, country: str, capital: str) -> tinker.Datum:
    """The weights are 1 where the capital is to be said, so that only its tokens count."""
    prompt = tokenizer.encode(wording.format(country), add_special_tokens=False)
    answer = tokenizer.encode(f" {capital}", add_special_tokens=False)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints((prompt + answer)[:-1]),
        loss_fn_inputs={
            "target_tokens": (prompt + answer)[1:],
            "weights": [0.0] * (len(prompt) - 1) + [1.0] * len(answer),
        },
    )


def probabilities(trainer: Any, facts: list[tinker.Datum]) -> list[float]:
    scored = trainer.forward(facts, "cross_entropy").result().loss_fn_outputs
    return [
        float((each["logprobs"].to_torch() * fact.loss_fn_inputs["weights"].to_torch()).sum().exp())
        for fact, each in zip(facts, scored, strict=True)
    ]


if __name__ == "__main__":
    _show.run(main)
