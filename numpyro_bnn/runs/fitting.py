"""``fit``: fit a guide and keep the run in a folder, or go on with the run that is
there.
"""

import os
import time
from typing import Any

from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult

from numpyro_bnn import guides
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import Positive, PositiveInt, RandomKey, Switch, checked
from numpyro_bnn._types import Attributes, HostArrays, PyTree, Trees
from numpyro_bnn.guides import AutoADF
from numpyro_bnn.guides.adf.guide import ADFResult
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.batches import Feed, positions, restore
from numpyro_bnn.program.compiled import refuse_tracers
from numpyro_bnn.program.rows import with_head
from numpyro_bnn.runs.code import described_value
from numpyro_bnn.runs.folder import Folder, FolderPath, digest
from numpyro_bnn.runs.identity import (
    begin_feeds,
    described_model,
    described_options,
    described_versions,
    read_model,
)

CALL = "runs.fit"


@checked(CALL)
def fit(
    folder: str | os.PathLike,
    method: SVI | AutoADF,
    rng_key: RandomKey,
    num_steps: PositiveInt,
    *args: Any,
    init_params: Trees | None = None,
    block_seconds: Positive = 10.0,
    stable_update: Switch = False,
    progress_bar: Switch = True,
    **kwargs: Any,
) -> SVIRunResult | ADFResult:
    """Fit a guide and keep the run in a folder; the same call goes on where an earlier
    one ended.

    The steps are those of :func:`~numpyro_bnn.guides.fit` or ``AutoADF.run``. A run
    survives whatever ends its process: the work of ``block_seconds`` is done again, or
    one epoch, and the result is that of a run that was not interrupted, bit for bit on
    the same device. A call with a larger ``num_steps`` adds steps. Ctrl-C returns the
    result so far.

    :param folder: name of the folder, which is made.
    :param method: an ``SVI`` (guide, optimizer, loss), or an
        :class:`~numpyro_bnn.guides.AutoADF`.
    :param rng_key: key of the run.
    :param num_steps: number of steps, or of epochs for ``AutoADF``, over all calls.
    :param args: arguments of the model.
    :param init_params: initial values of parameters, of an ``SVI``.
    :param block_seconds: seconds between two writes, about.
    :param stable_update: of an ``SVI``, as in :func:`~numpyro_bnn.guides.fit`.
    :param progress_bar: show a bar over steps.
    :param kwargs: keyword arguments of the model.
    :return: as :func:`~numpyro_bnn.guides.fit` or ``AutoADF.run``.
    :raises ValueError: for a folder of another run (the error names what differs), or
        one that another process writes; OSError: for a folder that cannot be written;
        ImportError: without the extra ``numpyro_bnn[runs]``.

    >>> import tempfile, jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> def model(y):
    ...     mean = numpyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.05), Trace_ELBO())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fit(
    ...         folder, svi, jax.random.key(0), 100, jnp.ones(3), progress_bar=False
    ...     )
    >>> result.losses.shape
    (100,)
    """
    if not isinstance(method, SVI | AutoADF):
        instead = (
            "Pass a `numpyro.infer.SVI` or a `guides.AutoADF`; for an `MCMC` call "
            "`runs.start`."
        )
        raise argument_error(CALL, "method", type(method).__name__, instead, TypeError)
    if isinstance(method, AutoADF) and (init_params is not None or stable_update):
        instead = "They are options of an `SVI`."
        raise argument_error(
            CALL, "method", "an AutoADF with `init_params` or `stable_update`", instead
        )
    refuse_tracers(
        CALL,
        "It runs on the host: call it outside of `jit` and `vmap`.",
        rng_key,
        args,
        kwargs,
    )
    model_arguments = as_arrays(args, kwargs, CALL)
    place = FolderPath.of(CALL, "folder", folder)
    feeds = begin_feeds(place, *model_arguments)
    if isinstance(method, AutoADF):  # whose model has no minibatches
        heads = with_head({"args": model_arguments[0], "kwargs": model_arguments[1]})
        model_arguments = heads["args"], heads["kwargs"]
    description = {
        "rng_key": digest(rng_key)[:16],
        "init_params": digest(init_params)[:16],
        "stable_update": str(stable_update),
        **_described_method(method),
        **described_model(
            read_model(CALL, method.model, *model_arguments), *model_arguments
        ),
        **described_versions(),
    }
    if feeds:
        description["rows of loaders"] = str([feed.num_rows for feed in feeds])
    with Folder(place, description) as run_folder:
        keeper = _Keeper(run_folder, block_seconds, feeds)
        options: dict[str, Any] = {
            "progress_bar": progress_bar,
            "keeper": keeper,
            **kwargs,
        }
        if isinstance(method, AutoADF):
            return method.run(rng_key, *args, num_epochs=num_steps, **options)
        options |= {"init_params": init_params, "stable_update": stable_update}
        return guides.fit(method, rng_key, num_steps, *args, **options)


def _described_method(method: SVI | AutoADF) -> Attributes:
    if isinstance(method, AutoADF):
        return described_options("guide", method)
    settings = {
        "optimizer": method.optim,
        "loss": method.loss,
        "options": method.static_kwargs,
        "model": method.model,
    }
    described = {name: described_value(setting) for name, setting in settings.items()}
    return described_options("guide", method.guide) | described


class _Keeper:
    """Writes the state of a fit and its records at most every few seconds.

    :param feeds: loaders, whose positions belong to the state.
    """

    def __init__(self, folder: Folder, seconds: float, feeds: list[Feed]) -> None:
        self._folder, self._seconds, self._feeds = folder, seconds, feeds
        self._number, self._written = 0, time.monotonic()
        self._positions = positions(feeds)

    def load(self, like: PyTree) -> tuple[PyTree, HostArrays] | None:
        saved = self._folder.latest(like)
        if saved is None:
            return None
        self._number, self._positions = saved.number, saved.notes.get("feeds", [])
        restore(self._feeds, self._positions)
        return saved.tree, saved.arrays

    def save(self, state: PyTree, records: HostArrays, last: bool) -> None:
        if not last:  # an interrupted step may have taken more rows since
            self._positions = positions(self._feeds)
        if last or time.monotonic() - self._written >= self._seconds:
            self._number += 1
            notes = {"feeds": self._positions}
            self._folder.commit(self._number, state, notes, records)
            self._written = time.monotonic()
