"""Progress bars on stderr for downloads and loading: a `headstart.hub.Progress`, silent where stderr is no terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_UNITS = {"warm-up": "steps", "sweep": "s"}  # what a stage counts; the others count bytes


class _Amount(ProgressColumn):
    """How much is done, in what the stage counts."""

    def __init__(self) -> None:
        super().__init__()
        self._bytes = DownloadColumn(binary_units=True)

    def render(self, task: Task) -> Text:
        unit = _UNITS.get(task.description)
        if unit is None:
            return self._bytes.render(task)
        return Text(f"{task.completed:.0f}/{task.total or 0:.0f} {unit}", style="progress.download")


class TerminalProgress:
    """One bar for each stage; a stage's bar stays when it is full. Use as a context manager; calls are thread-safe."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description}"),
            BarColumn(bar_width=32),
            _Amount(),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> TerminalProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Nothing is drawn any more. Safe to call twice."""
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int | None, /) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
