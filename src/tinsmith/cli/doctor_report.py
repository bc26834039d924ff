"""What `tinsmith doctor` found out about one thing."""

from __future__ import annotations

from typing import NamedTuple

OK, WARNING, FAULT = "ok", "warning", "fault"
_WIDTH = len(WARNING)


class Check(NamedTuple):
    name: str
    status: str
    message: str
    remedy: str = ""

    def lines(self, name_width: int) -> str:
        line = f"{self.status:{_WIDTH}}  {self.name:{name_width}}  {self.message}\n"
        return line + (f"{'':{_WIDTH}}  {'':{name_width}}  {self.remedy}\n" if self.remedy else "")


def ok(name: str, message: str) -> Check:
    return Check(name, OK, message)


def warning(name: str, message: str, remedy: str) -> Check:
    return Check(name, WARNING, message, remedy)


def fault(name: str, message: str, remedy: str) -> Check:
    return Check(name, FAULT, message, remedy)
