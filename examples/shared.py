"""Helpers of the scripts: checks of options and of output paths, and tables inside
pages.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "at_least",
    "between_marks",
    "early_stopped",
    "markdown",
    "observations_of_members",
    "writable_file",
    "writable_folder",
]


def at_least(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    names: Iterable[str],
    least: int = 1,
) -> None:
    """Refuse numbers below the minimum, also in options that take several.

    :param names: of the options, as attributes of ``args``.
    """
    for name in names:
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}")


def writable_folder(path: Path) -> Path:
    """Report before the work starts if results cannot be saved."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        sys.exit(
            f"--output: cannot write to {path} ({error.strerror}). Choose another "
            f"folder."
        )
    return path


def writable_file(path: Path) -> Path:
    """The same for one file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        sys.exit(
            f"--output: cannot write {path} ({error.strerror}). Choose another file."
        )
    return path


def early_stopped(
    loss: Callable[[Any], Any],
    held_out: Callable[[Any], Any],
    start: Any,
    optimizer: Any,
    num_steps: int,
) -> tuple[Any, Any]:
    """Parameters for which the loss of held-out rows was smallest on the way of an
    optimizer, and that loss.
    """
    import jax
    import jax.numpy as jnp
    import optax

    def step(carry: tuple, _: None) -> tuple:
        params, state, best, least = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        params = optax.apply_updates(params, updates)
        now = held_out(params)
        best = jax.tree.map(
            lambda new, old: jnp.where(now < least, new, old), params, best
        )
        return (params, state, best, jnp.minimum(now, least)), None

    carry = start, optimizer.init(start), start, jnp.asarray(jnp.inf)
    (_, _, best, least), _ = jax.lax.scan(step, carry, length=num_steps)
    return best, least


def observations_of_members(
    mcmc: Any, predictions: Mapping[str, Any], times: int = 10
) -> np.ndarray:
    """Draws (S, N) of new observations, several from each member: intervals need more
    than there are members.
    """
    import jax

    import numpyro_bnn as bnn

    options = {
        "members": True,
        "predictions": predictions,
        "log_likelihood": False,
        "posterior_predictive": False,
    }
    exports = (
        bnn.to_inference_data(mcmc, rng_key=jax.random.key(i), **options)
        for i in range(times)
    )
    return np.concatenate(
        [export["predictions"]["y"].to_numpy()[:, 0] for export in exports]
    )


def markdown(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def between_marks(page: Path, text: str, name: str) -> None:
    """Put a table into a page, between the comments ``table of <name>: begin`` and
    ``end``.
    """
    begin, end = (f"<!-- table of {name}: {which} -->" for which in ("begin", "end"))
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}")
