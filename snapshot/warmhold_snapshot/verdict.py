# SPDX-License-Identifier: Apache-2.0
"""A step of criu's at which it asks for a verdict, while the tree stands still: a dump is kept, and
a restored process runs, only after a good one.

criu calls a script at the step, which asks and waits over pipes that criu has inherited: a script
has no descriptor but its first three. The answer is worked out in a thread of the caller's, at once
or when it is asked for, without an interpreter to start. A caller that is killed answers too: its
end of the pipes is closed.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

from .errors import SnapshotError
from .script import program

_GOOD = "good"
_T = TypeVar("_T")
Judge = Callable[[threading.Event], _T]


class Verdict(Generic[_T]):
    """What a judge returns or raises. It is given an event, set where nobody waits any more: it has
    to end soon then. criu inherits `fds` and calls `script`; `error` is what was against it, None
    as long as nothing is."""

    def __init__(self, judge: Judge[_T], when_asked: bool) -> None:
        self.script = Path()
        self.error: BaseException | None = None
        answer, self._answered = os.pipe()
        self._asked, question = os.pipe()
        self.fds = (answer, question)
        self._open = [question, answer, self._asked]
        self._judge, self._when_asked = judge, when_asked
        self._over = threading.Event()
        self._results: list[_T] = []
        self._thread = threading.Thread(target=self._work, name="verdict", daemon=True)
        self._thread.start()

    def command(self) -> str:
        """What the script does; its parent is criu."""
        answer, question = (f"/proc/$PPID/fd/{fd}" for fd in self.fds)
        ask = f"echo > {question} && " if self._when_asked else ""
        return f'{ask}read -r verdict < {answer} && [ "$verdict" = {_GOOD} ]'

    def require(self) -> _T:
        """Wait for the verdict and return it; raise what was against it."""
        self._give_up_asking()
        self._thread.join()
        if self.error is not None:
            raise self.error
        if not self._results:
            raise SnapshotError("snapshot.criu", "criu did not ask for a verdict", "try again")
        return self._results[0]

    def end(self) -> None:
        """Work no more on it, where nobody waits; it has ended then."""
        self._over.set()
        self._give_up_asking()
        self._thread.join()
        for fd in self._open:
            os.close(fd)

    def _give_up_asking(self) -> None:
        if self._open[0] == self.fds[1]:  # who waits for the question is told by that
            os.close(self._open.pop(0))

    def _work(self) -> None:
        try:
            if self._when_asked and not os.read(self._asked, 1):
                return
            self._results.append(self._judge(self._over))
            with suppress(BrokenPipeError):
                os.write(self._answered, f"{_GOOD}\n".encode())
        except BaseException as error:
            self.error = error
        finally:
            os.close(self._answered)  # who still reads there is told by that


@contextmanager
def judging(
    folder: Path, action: str, judge: Judge[_T], when_asked: bool = False
) -> Iterator[Verdict[_T]]:
    """Given the artifact's folder, the step of criu's, and who judges, at once or when criu asks,
    yield the verdict; the work has ended afterwards."""
    verdict = Verdict(judge, when_asked)
    try:
        with program(folder, action, verdict.command()) as verdict.script:
            yield verdict
    finally:
        verdict.end()
