"""``to_inference_data``: any inference result as one ArviZ object with one layout."""

import json
import platform
import warnings
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from os import PathLike
from typing import Annotated, Any, TypeAlias

import jax
import numpy as np
from jax import Array
from numpyro.infer import MCMC
from numpyro.infer.autoguide import AutoGuide

from numpyro_bnn import _arviz
from numpyro_bnn._checks import argument_error, outside
from numpyro_bnn._options import (
    Args,
    Kind,
    KwargsOption,
    PositiveInt,
    RandomKey,
    Switch,
    checked,
)
from numpyro_bnn._types import Attributes, HostArrays, InferenceData, Trees
from numpyro_bnn.infinite import GPRegression
from numpyro_bnn.metrics import HealthWarning
from numpyro_bnn.metrics.health import MIN_DRAWS, health
from numpyro_bnn.program.rows import rows_in, with_head
from numpyro_bnn.results.exporter import Exporter
from numpyro_bnn.results.fit import (
    CALL,
    Fit,
    check_complete,
    from_guide,
    from_mcmc,
    key_text,
    map_draws,
    members_of,
)
from numpyro_bnn.results.replay import Replay
from numpyro_bnn.results.sources import from_folder, process_attrs, process_groups
from numpyro_bnn.runs import Run


def _has_text_keys(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _has_lists(value: Any) -> bool:
    """Whether it is a dictionary of sequences; a text would be one label per letter."""
    return _has_text_keys(value) and all(
        np.ndim(np.asarray(labels, object)) == 1 for labels in value.values()
    )


Labels: TypeAlias = Annotated[
    Mapping[str, Any], Kind(_has_lists, "Pass a dictionary of lists, by name.")
]


@checked(CALL)
def to_inference_data(
    result: object,
    predictions: Trees | None = None,
    *,
    members: Switch = False,
    guide: AutoGuide | None = None,
    args: Args = (),
    kwargs: KwargsOption | None = None,
    num_samples: PositiveInt = 1000,
    rng_key: RandomKey | None = None,
    log_likelihood: Switch = True,
    posterior_predictive: Switch | None = None,
    draws_per_chunk: PositiveInt | None = None,
    coords: Labels | None = None,
    prediction_coords: Labels | None = None,
    dims: Labels | None = None,
    attrs: Annotated[
        Mapping[str, Any], Kind(_has_text_keys, "Pass a dictionary with names as keys.")
    ]
    | None = None,
    progress_bar: Switch = True,
) -> InferenceData:
    """Convert an inference result to ArviZ: posterior, predictions, log likelihood,
    data, settings.

    Subsampled plates are made full first: every group covers the full data, in order.
    Variable names have ``.`` for the ``/`` of a site, because netCDF and DataTree
    reject it: ``net/Dense_0.kernel`` is ``net.Dense_0.kernel``.

    Groups (``y`` stands for the name of each observed site):

    - ``posterior``, ``sample_stats``: draws and the fields collected with
      ``extra_fields``, under ArviZ's names. For draws of a guide: ``lp`` and
      ``log_weight``, log p(D, z) / q(z), and computed from them the attributes
      ``elbo``, ``iw_bound``, their standard errors and ``pareto_k``.
    - ``posterior_predictive``: ``y`` (draws) and ``y_mean`` (draws of the function: the
      mean of the observation; for a categorical one ``y_probs``, class probabilities)
      at the training inputs, and the deterministic sites that are functions of the
      inputs (they are not in ``posterior``, which is about parameters).
    - ``log_likelihood``: pointwise, at the training data. If a mask leaves out elements
      of ``y``, the others have one axis, ``y_observed``, with their coordinates or
      positions.
    - ``predictions``: the same as ``posterior_predictive`` at new inputs, and
      ``y_log_likelihood`` if new targets are given. Batch normalizations use the
      statistics of the training data under each draw.
    - ``observed_data``, ``constant_data``, ``predictions_constant_data``: targets and
      other array arguments.

    :param result: a run :class:`~numpyro.infer.mcmc.MCMC`, a
        :class:`~numpyro_bnn.runs.Run` or the folder of one (posterior and sample_stats
        only, read from disk when they are used), the result of ``SVI.run`` or
        ``AutoADF.run``, or a :class:`~numpyro_bnn.infinite.GPRegression`, whose
        arguments are called ``x`` and ``y``.
    :param predictions: new values of arguments of the model by name, e.g. ``{"x":
        x_test, "y": y_test}``. Optional arguments that only weight or mask the
        likelihood have their default; others keep their values.
    :param members: for an MCMC whose kernel has a ``warm_start``: instead of the draws,
        export the point where the warm start of each chain ended, a deep ensemble with
        one draw per chain.
    :param guide: the guide of an SVI or ADF result.
    :param args: arguments of the model in an SVI or ADF run; an MCMC knows its own.
    :param kwargs: its keyword arguments.
    :param num_samples: draws from a guide or a Gaussian process.
    :param rng_key: key of the predictive draws; ``jax.random.key(0)`` by default.
    :param log_likelihood: whether to compute that group, and the ``sample_stats`` of a
        guide.
    :param posterior_predictive: whether to compute that group; by default for at most
        10,000 training rows.
    :param draws_per_chunk: draws evaluated at once; by default as many as keep working
        memory near 128 MiB.
    :param coords: coordinate values by dimension, e.g. ``{"data": dates}``; those of
        rows are for the training data.
    :param prediction_coords: those of the rows of ``predictions``.
    :param dims: dimension names by variable, for axes that are not plates.
    :param attrs: additional text or numbers to store.
    :param progress_bar: show a bar over draws if the predictions take more than a few
        seconds.
    :return: ``arviz.InferenceData`` (ArviZ 0.x) or ``xarray.DataTree`` (ArviZ 1.x).
    :raises ValueError: for a result that has not run or has no model, unknown arguments
        in ``predictions``, NaN, or wrong shapes.
    :raises TypeError: for any other kind of result.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC, BarkerMH
    >>> import numpyro_bnn as bnn
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
    >>> x = jax.numpy.linspace(-1, 1, 5)
    >>> mcmc = MCMC(BarkerMH(model), num_warmup=20, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, 2 * x)
    >>> idata = bnn.to_inference_data(mcmc, predictions={"x": x[:2]})
    >>> dict(idata["predictions"]["y_mean"].sizes)
    {'chain': 1, 'draw': 10, 'data': 2}
    """
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    coords, prediction_coords, dims = coords or {}, prediction_coords or {}, dims or {}
    of_guide = {"guide": guide, "args": args, "kwargs": kwargs}
    _check_result(result, predictions, of_guide)
    if isinstance(result, str | PathLike):
        needs_model = predictions is not None or members or bool(posterior_predictive)
        groups, settings = from_folder(result, needs_model)
        return _arviz.inference_data(groups, about(settings, rng_key, attrs))
    result = result.mcmc if isinstance(result, Run) else result
    if isinstance(result, GPRegression):
        asked = log_likelihood, posterior_predictive is not False
        options = rng_key, num_samples, *asked, coords, prediction_coords
        groups = process_groups(result, predictions, *options)
        settings = process_attrs(result, num_samples)
        return reported(groups, about(settings, rng_key, attrs))
    on_disk = _on_disk(result, args, kwargs, posterior_predictive)
    if on_disk:
        log_likelihood = posterior_predictive = False
    if isinstance(result, MCMC):
        fit = from_mcmc(result, members)
        evaluated = log_likelihood, posterior_predictive, predictions is not None
        if any(group is not False for group in evaluated):
            check_complete(result, fit.posterior)
    else:
        key = jax.random.fold_in(rng_key, 1)
        drawing = key, num_samples, log_likelihood, draws_per_chunk
        fit = from_guide(result, guide, args, kwargs or {}, *drawing)
    evaluate = partial(
        map_draws, draws_per_chunk=draws_per_chunk, progress_bar=progress_bar
    )
    fit = _with_heads(fit) if on_disk else fit
    exporter = Exporter(
        fit, coords, dims, evaluate, log_likelihood, posterior_predictive
    )
    if on_disk:
        exporter.refuse_batch_statistics()
    new = None if predictions is None else exporter.at_new_rows(predictions)
    exporter.check_labels(new, coords, prediction_coords, dims)
    train_key, new_key = jax.random.split(rng_key)
    judged = isinstance(result, MCMC) and exporter.predictive and not members
    starts = _starts(result, exporter.replay) if judged else {}
    groups, settings = exporter.training_groups(train_key, starts)
    if on_disk:
        del groups["observed_data"], groups["constant_data"]
    if new is not None:
        groups |= exporter.prediction_groups(new, new_key, prediction_coords)
    exporter.layout.warn_of_missing(groups)
    return reported(groups, about({**fit.attrs, **settings}, rng_key, attrs))


def _on_disk(
    result: object, args: tuple, kwargs: Any, posterior_predictive: bool | None
) -> bool:
    """Whether rows stay on disk, of which only parameters and predictions are
    exported.
    """
    run_arguments = [getattr(result, name, None) for name in ("_args", "_kwargs")]
    on_disk = bool(rows_in(args, kwargs, *run_arguments))
    if on_disk and posterior_predictive:
        got = "True for rows that stay on disk"
        instead = "Pass some of the rows as `predictions`."
        raise argument_error(CALL, "posterior_predictive", got, instead)
    return on_disk


def _with_heads(fit: Fit) -> Fit:
    """The fit with the first rows in the place of those on disk."""
    arguments = fit.arguments
    return replace(fit, arguments=arguments.with_values(with_head(arguments.values)))


def _check_result(
    result: object, predictions: Any, guide_options: Mapping[str, Any]
) -> None:
    """Refuse new arguments without names; and a guide and arguments beside a result
    that has its own, which would be ignored.
    """
    if predictions is not None and not isinstance(predictions, Mapping):
        instead = 'Name the arguments of the model: `predictions={"x": x_test}`.'
        raise argument_error(
            CALL, "predictions", type(predictions).__name__, instead, TypeError
        )
    if not isinstance(result, MCMC | Run | GPRegression | str | PathLike):
        return
    for name, value in guide_options.items():
        if value:
            got = f"a value for {type(result).__name__}"
            instead = (
                "Leave it out: it belongs to the result of a guide, and this result "
                "has its own."
            )
            raise argument_error(CALL, name, got, instead)


def reported(groups: Trees, about: Attributes) -> InferenceData:
    """The result with its health report, chains at fault marked by a coordinate, and a
    warning of what is off.
    """
    report = health(_arviz.inference_data(groups, about))
    marked = dict(groups)
    for name, data in groups.items():
        if report.marked and "chain" in data.dims:
            at_fault = data["chain"].isin(report.marked)
            marked[name] = data.assign_coords(marked=at_fault)
    idata = _arviz.inference_data(marked, about)
    idata.attrs["health"] = json.dumps(
        [finding._asdict() for finding in report.findings]
    )
    off = report.warnings
    if off:
        failures = "".join(f"\n- {finding}" for finding in off)
        text = f"{CALL}: {len(off)} of {len(report.findings)} checks failed:{failures}"
        warnings.warn(text, HealthWarning, stacklevel=outside())
    return idata


def _starts(mcmc: MCMC, replay: Replay) -> HostArrays:
    """Values (C, 1, ...) by site of the members of a run's warm start, if there are any
    and draws to be compared.
    """
    if next(iter(replay.fit.posterior.values())).shape[1] < MIN_DRAWS:
        return {}
    try:
        member_values = members_of(mcmc)
    except ValueError:  # a run without warm start
        return {}
    return member_values if replay.latent.keys() <= member_values.keys() else {}


def about(settings: Trees, rng_key: Array, more: Mapping | None) -> Attributes:
    """Attributes of the whole result: versions, settings, key."""
    packages = ("numpyro_bnn", "numpyro", "jax", "arviz", "numpy")
    return {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "numpyro",
        "inference_library_version": version("numpyro"),
        "python_version": platform.python_version(),
        **{f"{name}_version": version(name) for name in packages},
        **settings,
        "predictive_rng_key": key_text(rng_key),
        **(more or {}),
    }
