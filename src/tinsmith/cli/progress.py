"""Progress bars: on stderr, and only where a person sees them."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tinsmith.cli import shown
from tinsmith.cli.output import printable

if TYPE_CHECKING:
    import rich.progress


class Bar:
    """Appears with the first report and is gone in the end. Reports may come from any thread."""

    def __init__(self, *, counts_bytes: bool = False) -> None:
        self._counts_bytes = counts_bytes
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._progress: rich.progress.Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def report(self, label: str, done: int, total: int | None) -> None:
        if not self._is_shown:
            return
        if self._progress is None:
            self._progress = self._start()
        task = self._progress.task_ids[0]
        self._progress.update(task, description=printable(label), completed=done, total=total)

    def _start(self) -> rich.progress.Progress:
        from rich import progress
        from rich.console import Console

        measures: tuple[progress.ProgressColumn, ...]
        if self._counts_bytes:
            measures = (progress.DownloadColumn(binary_units=True), _speed())
        else:
            measures = (progress.MofNCompleteColumn(),)
        bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            *measures,
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        bar.add_task("", total=None)
        bar.start()
        return bar


def _speed() -> rich.progress.ProgressColumn:
    """In the units of all other sizes; the library's own column counts in thousands."""
    from rich import progress
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.finished_speed or task.speed
            return Text(f"{shown.size(int(speed))}/s" if speed else "", style="progress.data.speed")

    return Speed()
