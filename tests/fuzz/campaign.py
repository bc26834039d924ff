"""Many inputs against one server: sent by several at once, judged by the rules, counted."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.fuzz.bending import case as next_case
from tests.fuzz.rules import broken
from tests.fuzz.world import Answer, Case, Send, World

HANG_SECONDS = 60.0
MAX_FINDINGS = 200
MAX_SHOWN = 20


class Finding(NamedTuple):
    number: int
    rule: str
    case: Case
    answer: Answer | None

    def __str__(self) -> str:
        answered = "" if self.answer is None else f"\n  answered {self.answer.status} {self.answer.body[:300]!r}"
        headers = ", ".join(f"{name}: {value[:60]}" for name, value in self.case.headers)
        return (
            f"input {self.number}: {self.rule}\n  {self.case.method} {self.case.target[:300]}\n  {headers}\n"
            f"  {len(self.case.body)} bytes {self.case.body[:300]!r}{answered}"
        )


@dataclass
class Campaign:
    """`seed` and the number of an input decide how it is bent."""

    world: World
    send: Send
    seed: int
    at_once: int = 16
    statuses: Counter[int] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0

    async def run(self, inputs: range) -> None:
        started, unsent = time.monotonic(), iter(inputs)

        async def work() -> None:
            for index in unsent:
                await self._try(index)

        await asyncio.gather(*(work() for _ in range(self.at_once)))
        self.seconds += time.monotonic() - started

    async def _try(self, index: int) -> None:
        case = next_case(self.world, Random(f"{self.seed}:{index}"))
        answer, rule = None, None
        try:
            async with asyncio.timeout(HANG_SECONDS):
                answer = await self.send(case)
            rule = broken(case, answer)
        except TimeoutError:
            rule = f"no answer within {HANG_SECONDS} s"
        except Exception as error:  # noqa: BLE001 - whatever comes out of the server is a finding
            rule = f"raised {error!r}"
        if case.claim is not None:
            self.world.settle(case.claim, answer)
        self._count(index, case, answer, rule)

    def _count(self, index: int, case: Case, answer: Answer | None, rule: str | None) -> None:
        self.sent += 1
        if answer is not None:
            self.statuses[answer.status] += 1
            if answer.status < 300:
                self.accepted[case.endpoint] += 1
        if rule is not None and len(self.findings) < MAX_FINDINGS:
            self.findings.append(Finding(index, rule, case, answer))

    def complain(self, problems: Iterable[str], about: str) -> None:
        """Note what no single input shows."""
        self.problems += [f"{about}: {problem}" for problem in problems]

    def report(self) -> str:
        counts = ", ".join(f"{status}: {count:,}" for status, count in sorted(self.statuses.items()))
        rate = self.sent / self.seconds if self.seconds else 0.0
        rules = Counter(re.sub(r"[\d,]+", "N", finding.rule) for finding in self.findings)
        return "\n".join(
            [
                f"{self.sent:,} inputs in {self.seconds:.0f} s ({rate:.0f}/s), seed {self.seed}; answers {counts}",
                f"{len(self.findings) + len(self.problems)} findings",
                *(f"{count} times: {rule}" for rule, count in rules.most_common()),
                *self.problems[:MAX_SHOWN],
                *map(str, self.findings[:MAX_SHOWN]),
            ]
        )

    @property
    def is_clean(self) -> bool:
        return not self.findings and not self.problems
