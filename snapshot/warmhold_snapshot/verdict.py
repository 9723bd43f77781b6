# SPDX-License-Identifier: Apache-2.0
"""Memory is verified while criu reads it, and nothing that was restored runs before the verdict.

What criu parses is verified before it starts. When all memory is in its place, and no process runs
yet, criu calls a script, which waits for the verdict. Without a good one criu ends what it has
made. What else has to be so by then can be waited for in the same way.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .checksum import Progress
from .errors import SnapshotError
from .script import program

_ACTION, _SOUND = "post-restore", "sound"


class Verdict:
    """Verifies in a thread of its own. criu inherits `fd`, and calls `script`. `error` is what was
    against it, None as long as nothing is."""

    def __init__(
        self,
        verify: Callable[..., None],
        progress: Progress | None,
        ready: Callable[[], None] | None,
    ) -> None:
        self.fd, self._writer = os.pipe()
        self.script: Path | None = None
        self._verify, self._progress, self._ready = verify, progress, ready
        self._given_up = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._judge, name="verify", daemon=True)
        self._thread.start()

    def require(self) -> None:
        """Wait for the verdict; raise what it was, unless all is sound."""
        self._thread.join()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Verify no more, where nobody waits for the rest; it has ended then."""
        self._given_up = True
        self._thread.join()
        os.close(self.fd)

    def _judge(self) -> None:
        try:
            if self._ready is not None:
                self._ready()
            self._verify(progress=self._go_on)
            os.write(self._writer, f"{_SOUND}\n".encode())
        except BaseException as error:
            self.error = error
        finally:
            os.close(self._writer)  # who still reads there is told by that

    def _go_on(self, done_bytes: int, total_bytes: int) -> None:
        if self._given_up:
            raise SnapshotError("snapshot.stopped", "there is no restore any more", "none")
        if self._progress is not None:
            self._progress(done_bytes, total_bytes)


@contextmanager
def judging(
    folder: Path,
    verify: Callable[..., None],
    progress: Progress | None,
    ready: Callable[[], None] | None = None,
) -> Iterator[Verdict]:
    """Given the artifact's folder, what verifies, who follows that, and what is to be waited for
    first, let it begin; it has ended afterwards."""
    verdict = Verdict(verify, progress, ready)
    # A script has no descriptor but its first three; criu, its parent, has this one.
    command = f'read -r verdict < /proc/$PPID/fd/{verdict.fd} && [ "$verdict" = {_SOUND} ]'
    try:
        with program(folder, _ACTION, command) as verdict.script:
            yield verdict
    finally:
        verdict.end()
