"""Settings of the whole process that last while any of its threads needs them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import Lock

from threadpoolctl import threadpool_limits


class ProcessContext:
    """A context of the process: the first thread enters it, and the last one leaves.

    :param make: makes the context.
    """

    def __init__(self, make: Callable[[], AbstractContextManager]) -> None:
        self._make, self._lock, self._users = make, Lock(), 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._users:
                self._context = self._make()
                self._context.__enter__()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._context.__exit__(None, None, None)


# Several would take ten times the processor's time for matrices of a thousand rows.
one_blas_thread = ProcessContext(partial(threadpool_limits, 1, "blas"))
