"""The groups of one fit: training rows, members of a warm start, and new rows."""

import json
import warnings
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, outside, unknown_name
from numpyro_bnn._types import HostArrays, PyTree, Trees
from numpyro_bnn.metrics._inputs import spread
from numpyro_bnn.metrics._result import DRAWS, ROWS, Losses, Result, losses_by_site
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.sites import Sites, safe
from numpyro_bnn.results.arguments import for_prediction
from numpyro_bnn.results.fit import CALL, DRAW_NEW_SITES, Draws, Fit, zero_draws
from numpyro_bnn.results.layout import SAMPLE_DIMS, Layout
from numpyro_bnn.results.replay import (
    Evaluate,
    Groups,
    ReadModel,
    Replay,
    naming_new_rows,
    read_model,
)

MAX_ROWS_UNASKED = 10_000  # training rows that are predicted without being asked for


class NewRows(NamedTuple):
    """A model at new rows.

    :param sites: with the values of observations; ``arguments``: the new ones.
    """

    read: ReadModel
    sites: Sites
    arguments: Trees


class Exporter:
    """The groups of one fit.

    :param coords: labels by dimension; ``dims``: names of dimensions by variable.
    :param evaluate: evaluates functions at draws.
    :param posterior_predictive: whether to predict the training rows, by default if
        there are few.
    """

    def __init__(
        self,
        fit: Fit,
        coords: Mapping[str, Sequence],
        dims: Mapping[str, Sequence[str]],
        evaluate: Evaluate,
        log_likelihood: bool = True,
        posterior_predictive: bool | None = None,
    ) -> None:
        self.replay = Replay(fit)
        self.layout = Layout(self.replay, coords, dims)
        self.evaluate = evaluate
        self.scored = log_likelihood
        #: Whether so many training rows are not predicted without being asked for.
        self.has_many_rows = posterior_predictive is None and self._has_many_rows()
        self.predictive = posterior_predictive is not False and not self.has_many_rows

    def _has_many_rows(self) -> bool:
        rows = 0
        for name in self.replay.redrawn:
            rows = max(rows, len(np.atleast_1d(self.layout.sites[name]["value"])))
        if rows > MAX_ROWS_UNASKED:
            message = (
                f"{CALL}: no `posterior_predictive` of {rows} training rows: ask for "
                "it by `posterior_predictive=True`, or leave it out by `False`."
            )
            warnings.warn(message, stacklevel=outside())
        return rows > MAX_ROWS_UNASKED

    def refuse_batch_statistics(self) -> None:
        """Of rows that stay on disk."""
        if self.replay.read.statistics:
            got = "a network with batch normalization and rows on disk"
            instead = (
                "Its statistics are those of all training inputs: use `nn.LayerNorm`."
            )
            raise argument_error(CALL, "result", got, instead)

    def at_new_rows(self, predictions: Trees) -> NewRows:
        """Read the model at new rows."""
        replay, fit = self.replay, self.replay.fit
        arguments = for_prediction(
            fit.arguments,
            predictions,
            replay.observed,
            replay.affecting,
            lambda: replay.counts,
        )
        with naming_new_rows(CALL, "predictions"):
            read = read_model(fit.model, arguments, fit.params, new_rows=True)
            names = [name for name in replay.latent if name in read.sites]
            for name, like in read.reading.shapes(names).items():
                shape = replay.latent[name].shape[2:]
                if like.shape != shape:
                    raise ValueError(f"{name!r} is {like.shape}, its draws {shape}")
            sites = replay.observations(read)
        unknown = [name for name in read.reading.latent if name not in replay.sites]
        if unknown:
            got = f"arguments at which the model has sites without draws: {unknown}"
            raise argument_error(CALL, "predictions", got, DRAW_NEW_SITES)
        return NewRows(read, sites, {n: arguments.values[n] for n in predictions})

    # -- groups ------------------------------------------------------------------------

    def training_groups(
        self, rng_key: Array, starts: Draws | None = None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Groups of draws and training rows, and attributes for the health report.

        :param starts: members of a warm start (C, 1, ...), evaluated with the draws.
        """
        replay = self.replay
        draws = _joined(replay.latent, starts) if starts else replay.latent
        values = replay.values(
            replay.read, draws, rng_key, self.evaluate, self.scored, self.predictive
        )
        of_members: Groups = {}
        if starts:
            values, of_members = _split(values, replay.latent)
        groups = self.layout.training_groups(values)
        if of_members:
            return groups, _judged(of_members, self.layout.observed_values())
        return groups, self._judged_at_some_rows(groups, rng_key)

    def prediction_groups(
        self,
        new: NewRows,
        rng_key: Array,
        coords: Mapping[str, Sequence],
        draws: Draws | None = None,
    ) -> Trees:
        """Groups of new rows, by default at all draws."""
        replay, arguments = self.replay, Arguments(new.arguments)
        scored = bool(replay.observed) and replay.observed <= new.arguments.keys()
        values = replay.values(
            new.read, draws or replay.latent, rng_key, self.evaluate, scored
        )
        return self.layout.prediction_groups(
            values, new.sites, arguments.arrays, coords
        )

    def _judged_at_some_rows(self, groups: Trees, rng_key: Array) -> dict[str, str]:
        """What chains explain of some rows, where all are too many to be predicted."""
        observed, sites = groups["observed_data"], self.layout.sites
        redrawn = self.replay.redrawn
        dims = {observed[safe(site)].dims[:1] for site in redrawn}
        unmasked = all(sites[site]["unmasked"].all() for site in redrawn)
        if not self.has_many_rows or len(dims) > 1 or not unmasked:
            return {}
        ((dim,),) = dims
        rows = spread(observed.sizes[dim], ROWS)
        inputs = groups["constant_data"].isel({dim: rows}, missing_dims="ignore")
        new = {name: x.to_numpy() for name, x in inputs.items() if dim in x.dims}
        for name in self.replay.observed:
            new[name] = np.asarray(self.replay.fit.arguments.arrays[name])[rows]
        posterior = groups["posterior"]
        posterior = posterior.isel(draw=spread(posterior.sizes["draw"], DRAWS))
        draws = {n: posterior[safe(n)].to_numpy() for n in self.replay.latent}
        try:
            at_rows = self.at_new_rows(new)
            predicted = self.prediction_groups(at_rows, rng_key, {}, draws)
        # a model of no other number of rows, or whose names collide in predictions
        except (TypeError, ValueError):
            return {}
        # A model that uses the place of a row, or other rows, is another one here.
        stored = groups.get("log_likelihood", {})
        for site in redrawn:
            at_all = stored.get(safe(site))
            at_some = predicted["predictions"].get(f"{safe(site)}_log_likelihood")
            if at_all is None or at_some is None:
                return {}
            draws_used = spread(at_all.sizes["draw"], DRAWS)
            at_all = at_all.isel({dim: rows, "draw": draws_used})
            if not np.allclose(at_all, at_some, rtol=1e-3, atol=1e-3):
                return {}
        some_groups = {
            "posterior": posterior,
            "posterior_predictive": predicted["predictions"],
            "observed_data": observed.isel({dim: rows}),
        }
        losses = Result(_arviz.inference_data(some_groups)).losses
        return {"explained_by_chains": _shares(losses)} if losses else {}

    def check_labels(
        self,
        new: NewRows | None,
        coords: Mapping[str, Sequence],
        prediction_coords: Mapping[str, Sequence],
        dims: Mapping[str, Sequence[str]],
    ) -> None:
        """Build all groups without computing them, so that every error comes before
        the work, and refuse labels without an axis.
        """
        outline, key = copy(self), jax.random.key(0)
        outline.evaluate, outline.has_many_rows = zero_draws, False
        outline.layout = self.layout.with_coords({})
        training, _ = outline.training_groups(key)
        predicted: Trees = {}
        if new is not None:
            with naming_new_rows(CALL, "predictions"):
                predicted = outline.prediction_groups(new, key, {})
        draws = {dim: {training["posterior"].sizes[dim]} for dim in SAMPLE_DIMS}
        groups = {**training, **predicted}
        _check_coords("coords", coords, list(groups.values()), draws)
        new_groups = list(predicted.values())
        _check_coords("prediction_coords", prediction_coords, new_groups, {})
        variables: list[str] = []
        for name, data in groups.items():
            if name in ("posterior", "sample_stats") or name.endswith("constant_data"):
                variables += data.data_vars
        for variable in dims:
            if variable not in variables:
                raise unknown_name(CALL, "dims", variable, variables)


def _check_coords(
    argument: str,
    coords: Mapping[str, Sequence],
    groups: Sequence[Any],
    sizes: dict[Any, set[int]],
) -> None:
    """Every label must belong to an axis: one of ``sizes`` or of ``groups``, which have
    one chain and draw.
    """
    for data in groups:
        for dim, size in data.sizes.items():
            if dim not in SAMPLE_DIMS:
                sizes.setdefault(dim, set()).add(size)
    for dim, labels in coords.items():
        if dim not in sizes:
            raise unknown_name(CALL, argument, dim, sizes)
        if len(labels) not in sizes[dim]:
            got = (
                f"{len(labels)} labels of {dim!r}, which has "
                f"{' or '.join(map(str, sorted(sizes[dim])))}"
            )
            raise argument_error(CALL, argument, got, "Pass one label for each.")


def _joined(draws: Draws, starts: Draws) -> HostArrays:
    """Draws (C, S, ...) and members (C, 1, ...) as one chain, evaluated by one
    program.
    """
    joined = {}
    for name, value in draws.items():
        flat = value.reshape(-1, *value.shape[2:])
        joined[name] = np.concatenate([flat, starts[name][:, 0]])[None]
    return joined


def _split(values: PyTree, draws: Draws) -> tuple[PyTree, PyTree]:
    """Values at the draws and at the members of :func:`_joined`."""
    shape = next(iter(draws.values())).shape[:2]
    total = shape[0] * shape[1]

    def at_draws(value: np.ndarray) -> np.ndarray:
        return value[0, :total].reshape(*shape, *value.shape[2:])

    of_members = jax.tree.map(lambda value: value[0, total:], values)
    return jax.tree.map(at_draws, values), of_members


def _judged(values: Groups, observed: HostArrays) -> dict[str, str]:
    """Attributes: how much members explain, and their log likelihoods."""
    means = {}
    for (site, ending), value in values["predictions"].items():
        if ending:
            means[safe(site) + ending] = value[:, None]
    attrs = {"explained_by_members": _shares(losses_by_site(means, observed))}
    if densities := values.get("log_likelihood"):
        totals = [
            value.reshape(len(value), -1).sum(axis=1) for value in densities.values()
        ]
        total = np.sum(totals, axis=0, dtype=np.float64)
        attrs["log_likelihood_of_members"] = json.dumps(total.tolist())
    return attrs


def _shares(losses: Mapping[str, Losses]) -> str:
    """An attribute: the share that each chain explains, by site."""
    explained = {}
    for site, of_site in losses.items():
        explained[site] = of_site.share(of_site.by_chain).tolist()
    return json.dumps(explained)
