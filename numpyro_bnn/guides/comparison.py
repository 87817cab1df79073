"""Models compared by the evidence of their guides."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from numpyro_bnn._checks import argument_error
from numpyro_bnn._table import text_table
from numpyro_bnn.guides.evidence import Evidence, evidence

__all__ = ["EvidenceComparison", "compare"]

CALL = "guides.compare"


class EvidenceRow(NamedTuple):
    """One model of a comparison.

    :param difference: its bound less that of the best model, with the standard error ``difference_se``.
    """

    name: str
    evidence: Evidence
    difference: float
    difference_se: float


class EvidenceComparison(NamedTuple):
    """Models in the order of their importance-weighted bounds, the best first; prints as a table."""

    rows: tuple[EvidenceRow, ...]

    @property
    def best(self) -> str:
        """Name of the first model."""
        return self.rows[0].name

    def __str__(self) -> str:
        header = ["model", "bound", "se", "difference", "se", "ELBO", "se", "k-hat"]
        cells = [
            [
                row.name,
                *_cells(row.evidence.iw_bound, row.evidence.iw_se),
                *_cells(row.difference, row.difference_se),
                *_cells(row.evidence.elbo, row.evidence.elbo_se),
                f"{row.evidence.pareto_k:.2f}" + ("" if row.evidence.verdict != "unreliable" else " (!)"),
            ]
            for row in self.rows
        ]
        note = (
            "\n(!) unreliable: the bound may lie far below the evidence, and its standard error is too small"
        )
        table = text_table(header, cells)
        return table + (note if any(row.evidence.verdict == "unreliable" for row in self.rows) else "")


def compare(
    models: Mapping[str, Evidence | tuple],
    *,
    rng_key: jax.Array | None = None,
    num_samples: int = 1000,
) -> EvidenceComparison:
    """Compare models of the same data by importance-weighted bounds on log p(D).

    Differences are between *bounds*: where k-hat says that a guide is unreliable, a model may be better than its row.
    For a comparison by predictions see :func:`numpyro_bnn.results.compare_loo`.

    :param models: by name, an :class:`Evidence`, or ``(guide, params, args)`` or ``(guide, params, args, kwargs)``
        for which it is computed.
    :param rng_key: key of the draws, for models without an ``Evidence``. Each gets its own, so that the errors are
        independent.
    :param num_samples: draws of each.
    :return: an :class:`EvidenceComparison`.
    :raises ValueError: for no models, models with different numbers of observations, or no key where one is needed.
    :raises TypeError: for an entry that is neither.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer.autoguide import AutoNormal
    >>> def model(scale, y):
    ...     z = numpyro.sample("z", dist.Normal(0.0, scale))
    ...     numpyro.sample("y", dist.Normal(z, 1.0), obs=y)
    >>> narrow = AutoNormal(model), {"z_auto_loc": 0.25, "z_auto_scale": 0.5**0.5}, (1.0, 0.5)
    >>> wide = AutoNormal(model), {"z_auto_loc": 0.5, "z_auto_scale": 1.0}, (100.0, 0.5)
    >>> table = compare({"wide prior": wide, "narrow prior": narrow}, rng_key=jax.random.key(0))
    >>> table.best
    'narrow prior'
    """
    if not isinstance(models, Mapping) or not models:
        instead = "Pass a mapping from names to `(guide, params, args)` or to results of `evidence`."
        raise argument_error(CALL, "models", models, instead)
    keys = iter(() if rng_key is None else jax.random.split(rng_key, len(models)))
    found = {name: _found(name, entry, keys, num_samples) for name, entry in models.items()}
    sizes = {name: one.num_observations for name, one in found.items()}
    if len(set(sizes.values())) > 1:
        instead = "Bounds can be compared for the same observations only."
        raise argument_error(CALL, "models", f"different numbers of observations: {sizes}", instead)
    order = sorted(found, key=lambda name: -found[name].iw_bound)
    best = found[order[0]]
    return EvidenceComparison(tuple(_row(name, found[name], best) for name in order))


def _found(name: str, entry: Any, keys: Any, num_samples: int) -> Evidence:
    if isinstance(entry, Evidence):
        return entry
    if not isinstance(entry, tuple) or len(entry) not in (3, 4):
        instead = "Pass `(guide, params, args)`, `(guide, params, args, kwargs)` or a result of `evidence`."
        raise argument_error(CALL, f"models[{name!r}]", type(entry).__name__, instead, TypeError)
    key = next(keys, None)
    if key is None:
        raise argument_error(CALL, "rng_key", None, "Pass a key, e.g. `jax.random.key(0)`.")
    guide, params, args = entry[:3]
    kwargs = entry[3] if len(entry) == 4 else {}
    return evidence(guide, params, *args, rng_key=key, num_samples=num_samples, **kwargs)


def _row(name: str, found: Evidence, best: Evidence) -> EvidenceRow:
    if found is best:
        return EvidenceRow(name, found, 0.0, 0.0)
    error = float(np.hypot(found.iw_se, best.iw_se))
    return EvidenceRow(name, found, found.iw_bound - best.iw_bound, error)


def _cells(value: float, error: float) -> tuple[str, str]:
    return f"{value:.2f}", f"{error:.2f}"
