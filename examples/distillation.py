"""On-policy distillation: the student answers in its own words, and the teacher says how likely it finds each of them.

A token's advantage is the teacher's log-probability minus the student's; its mean over what the student says is minus
the reverse KL divergence, which falls. By default the teacher is the same model with two short answers in its prompt,
TEACHER_SEES, and the student learns to be as brief without them. One to two minutes on two cores.

A larger teacher must share the student's tokenizer, and the server must have both models:
    tinsmith serve --model HuggingFaceTB/SmolLM2-135M-Instruct --model HuggingFaceTB/SmolLM2-1.7B-Instruct
    python examples/distillation.py --teacher HuggingFaceTB/SmolLM2-1.7B-Instruct --base-url http://127.0.0.1:8000
"""

import json
import random
from pathlib import Path
from statistics import mean
from typing import Any

import _show

import tinsmith as tinker

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # the format of SmolLM2 and Qwen
TEACHER_SEES = (
    f"{CHAT.format('What is a hammer?')}A tool for nails.<|im_end|>\n"
    f"{CHAT.format('Why do we cook food?')}It becomes easier to eat.<|im_end|>\n"
)
QUESTIONS = Path(__file__).with_name("plain_or_flattering.jsonl")
HELD_OUT, BATCH, GROUP = 8, 8, 2
ADAM = tinker.AdamParams(learning_rate=5e-4)


def main(
    *,
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
    teacher: str = "",
    steps: int = 20,
    base_url: str = "local",
) -> dict[str, Any]:
    questions = [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()]
    held_out, questions = questions[:HELD_OUT], questions[HELD_OUT:]
    with tinker.ServiceClient(base_url=base_url) as service:
        student = service.create_lora_training_client(base_model=model, rank=16, seed=0).result()
        judge = service.create_sampling_client(base_model=teacher or model).result()
        tokenizer = student.get_tokenizer()
        before = answers(student, judge, tokenizer, held_out, seed=0)

        dice = random.Random(0)
        curve = _show.Curve("KL per token", steps)
        for step in range(steps):
            batch = answers(student, judge, tokenizer, dice.sample(questions, BATCH), seed=step)
            update = student.forward_backward([example(*answer) for answer in batch], "importance_sampling")
            student.optim_step(ADAM).result()
            update.result()
            curve.add(kl_per_token(batch))
        after = answers(student, judge, tokenizer, held_out, seed=0)

    for number, question in enumerate(held_out[:4]):
        old, new = [tokenizer.decode(found[number * GROUP][1].tokens) for found in (before, after)]
        print(f"\n{question}\n  before  {old}\n  after   {new}")
    figures = {
        name: (kl_per_token(found), mean(len(said.tokens) for _, said, _ in found))
        for name, found in (("before", before), ("after", after))
    }
    rows = [(name, f"{kl:.2f}", f"{length:.1f}") for name, (kl, length) in figures.items()]
    _show.table(("questions it never saw", "KL per token", "tokens in an answer"), *rows)
    return {"curve": curve.values, **{name: kl for name, (kl, _) in figures.items()}}


def answers(student: Any, judge: Any, tokenizer: Any, questions: list[str], seed: int) -> list[tuple[Any, Any, Any]]:
    """Prompt, answer, and the teacher's log-probabilities of its tokens; GROUP of them for each question."""
    sampler = student.save_weights_and_get_sampling_client().result()
    params = tinker.SamplingParams(max_tokens=20, temperature=1.0, seed=seed)
    prompts = [tokenizer.encode(CHAT.format(question), add_special_tokens=False) for question in questions]
    replies = [sampler.sample(tinker.ModelInput.from_ints(prompt), GROUP, params) for prompt in prompts]
    said = [
        (prompt, sequence)
        for prompt, reply in zip(prompts, replies, strict=True)
        for sequence in reply.result().sequences
    ]
    shown = tokenizer.encode(TEACHER_SEES, add_special_tokens=False)
    scores = [judge.compute_logprobs(tinker.ModelInput.from_ints([*shown, *p, *each.tokens])) for p, each in said]
    return [
        (prompt, sequence, score.result()[-len(sequence.tokens) :])
        for (prompt, sequence), score in zip(said, scores, strict=True)
    ]


def example(prompt: list[int], sequence: Any, scores: list[float]) -> tinker.Datum:
    """Tokens shifted by one. The prompt has no advantage, so it has no part in the loss."""
    tokens, unscored = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    advantages = [theirs - ours for theirs, ours in zip(scores, sequence.logprobs, strict=True)]
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": [*unscored, *sequence.logprobs],
            "advantages": unscored + advantages,
        },
    )


def kl_per_token(answers: list[tuple[Any, Any, Any]]) -> float:
    return mean(
        ours - theirs for _, said, scores in answers for ours, theirs in zip(said.logprobs, scores, strict=True)
    )


if __name__ == "__main__":
    _show.run(main)
