"""AutoLaplace: a Gaussian at the mode of a model, as a NumPyro guide."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from numpyro_bnn._checks import argument_error, check_finite, unknown_name
from numpyro_bnn._options import (
    KEY,
    Choice,
    Kind,
    Model,
    Natural,
    PositiveInt,
    Prefix,
    RandomKey,
    Switch,
    checked,
)
from numpyro_bnn._types import Arrays, Kwargs, Optimizer, PyTree, Site, Trees
from numpyro_bnn.guides.auto_blocks import AutoBlocks, LocScale
from numpyro_bnn.guides.blocks import Family, Patterns, matches
from numpyro_bnn.guides.laplace.jacobians import MatrixLayout, OuterJacobian
from numpyro_bnn.guides.laplace.likelihoods import CALL
from numpyro_bnn.guides.laplace.posterior import (
    LaplacePosterior,
    Values,
    check_sites,
    read,
)
from numpyro_bnn.guides.laplace.prediction import (
    LaplacePredictive,
    PredictiveOptions,
    log_density,
    predict,
)
from numpyro_bnn.guides.laplace.rows import Batch, ModelRows
from numpyro_bnn.guides.laplace.search import ModeSearch
from numpyro_bnn.guides.laplace.structures import (
    Blocks,
    DiagonalStructure,
    FullStructure,
    KroneckerStructure,
    LaplaceGaussian,
    LowRankStructure,
)
from numpyro_bnn.guides.laplace.tuning import (
    EvidenceTuning,
    LaplaceResult,
    tuned_groups,
)
from numpyro_bnn.program.arguments import as_arrays
from numpyro_bnn.program.compiled import TRACING, refuse_tracers
from numpyro_bnn.program.posterior import Posterior
from numpyro_bnn.program.row_lengths import check_rows
from numpyro_bnn.program.rows import refuse_rows

STRUCTURES: dict[str, Callable] = {
    "full": FullStructure,
    "kron": KroneckerStructure,
    "diag": DiagonalStructure,
    "low_rank": LowRankStructure,
}
MAX_FULL_UNKNOWNS = 10_000


def _are_patterns(value: object) -> bool:
    patterns = [value] if isinstance(value, str) else value
    return (
        isinstance(patterns, Sequence)
        and bool(patterns)
        and all(isinstance(p, str) and p for p in patterns)
    )


class AutoLaplace(AutoBlocks):
    r"""Give a trained network uncertainty: a Gaussian at the mode (Laplace
    approximation), with generalized Gauss-Newton precision.

    .. math:: q(v) = N\Big(v^*,\ \Big[\sum_n J_n^\top F_n J_n - \nabla^2 \log
              p(v^*)\Big]^{-1}\Big), \qquad
              J_n = \frac{\partial f_n}{\partial v}

    with f_n the natural outputs of the likelihood (loc and log scale, logits, log rate)
    and F_n their Fisher information: the Hessian without the curvature of the network,
    which is never negative. The coordinates v are unconstrained values; a weight whose
    prior scale s is learned is u = (w - m) / s. The joint density of w and s is
    infinite at s = 0, and the joint mode of u and s hardly penalizes large weights, so
    v^* is the mode of u given s, where s has the largest evidence times its prior.

    Structures of the precision, each of all sites or of those in ``sites``:

    - ``"full"``: dense, up to 10^4 unknowns, every site jointly, prior curvature exact;
    - ``"kron"``: a Kronecker product of inputs and gradients per weight (K-FAC), of
      dense layers and convolutions, with biases apart; elements of all other sites
      (noise, prior scales, gains) are independent;
    - ``"diag"``: independent unknowns;
    - ``"low_rank"``: the ``rank`` strongest directions, and the diagonal of the rest.

    All other latent sites are held at the mode (point masses); with ``sites=None`` none
    is, so that noise and prior scales are part of the Gaussian. Predict with
    :meth:`predictive`, which linearizes the network like the precision does: draws of
    the weights pushed through the network itself fit worse, often by far.

    :param model: a NumPyro model whose likelihood is in the table of
        :mod:`numpyro_bnn.guides.laplace.likelihoods`.
    :param structure: ``"full"``, ``"kron"``, ``"diag"`` or ``"low_rank"``.
    :param sites: patterns on site names, e.g. ``"net/Dense_2.*"`` for the last layer.
    :param rank: number of directions of ``"low_rank"``.
    :param prefix: part of the parameter names.
    :raises ValueError: when it reads the model, for a site it cannot handle; the
        message names the site.

    References: MacKay (1992), *A practical Bayesian framework for backpropagation
    networks*; Immer, Korzepa & Bauer (2021), *Improving predictions of Bayesian neural
    nets via local linearization*; Daxberger et al. (2021), *Laplace redux*; Grosse &
    Martens (2016) for convolutions; Transtrum & Sethna (2012) for the search.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x, y=None):
    ...     w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(x @ w, 0.5), obs=y)
    >>> x = jnp.array([[1.0, 0.0], [0.0, 1.0]])
    >>> guide = AutoLaplace(model, "full")
    >>> fit = guide.run(jax.random.key(0), x, jnp.array([1.0, 2.0]), progress_bar=False)
    >>> [
    ...     round(float(mean), 3) for mean in guide.predictive(fit.params, x).mean
    ... ]  # exact: y / (1 + 0.5^2)
    [0.8, 1.6]
    """

    @checked("guides.{}")
    def __init__(
        self,
        model: Model,
        structure: Annotated[str, Choice(STRUCTURES)] = "kron",
        sites: Annotated[
            Patterns,
            Kind(_are_patterns, 'Pass patterns, e.g. `sites="net/Dense_2.*"`.'),
        ]
        | None = None,
        *,
        rank: PositiveInt = 50,
        prefix: Prefix = "auto",
    ) -> None:
        self.structure, self._patterns, self._rank = structure, sites, rank
        self._model_params: dict[str, PyTree] = {}
        super().__init__(model, condition_on_scales=True, prefix=prefix)

    # -- reading the model -------------------------------------------------------------

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        # of this reading alone: a later run that is refused leaves an earlier fit
        learned = partial(_given_param, self._model_params)
        model = handlers.substitute(self.model, substitute_fn=learned)
        self._rows = ModelRows(model, (args, kwargs))
        check_rows(f"{CALL}.run", self._rows.reading(), args, kwargs)
        check_sites(self._rows)
        super()._setup_prototype(*args, **kwargs)

    def _read(self, args: tuple, kwargs: Kwargs) -> Posterior:
        return self._rows.reading()

    def _choose_blocks(self) -> Sequence[tuple[str, tuple[str, ...], Family]]:
        latent = list(self._latent())
        patterns = "*" if self._patterns is None else self._patterns
        for pattern in (patterns,) if isinstance(patterns, str) else patterns:
            if not any(matches(name, pattern) for name in latent):
                raise unknown_name(CALL, "sites", pattern, latent)
        self._chosen = [name for name in latent if matches(name, patterns)]
        sizes = {name: int(np.size(self._init_locs[name])) for name in self._chosen}
        total = sum(sizes.values())
        if self.structure == "full" and total > MAX_FULL_UNKNOWNS:
            got = f"'full' for {total} unknowns, more than {MAX_FULL_UNKNOWNS}"
            instead = (
                'Use "kron", "low_rank" or "diag", or `sites=` for the last layer.'
            )
            raise argument_error(CALL, "structure", got, instead)
        by_products = self.structure == "kron"
        self._prototype_posterior = read(
            self._rows, self._transforms, self._scaled, self._chosen, by_products
        )
        options: dict = {}
        if by_products:
            options["layouts"] = self._layouts(self._prototype_posterior)
        elif self.structure == "low_rank":
            options["rank"] = self._rank
        self._structure = STRUCTURES[self.structure](sizes, **options)
        return self._structure.blocks()

    def _layouts(self, posterior: LaplacePosterior) -> dict[str, MatrixLayout]:
        """The sites that are matrices of a layer."""
        layouts: dict[str, MatrixLayout] = {}
        index = posterior.rows.chunks[0]
        batch = posterior.rows.batch(posterior.rows.reading(index), index)

        def note(v: Values) -> None:
            for name, jacobian in posterior.jacobians(batch, v).items():
                if isinstance(jacobian, OuterJacobian):
                    layouts[name] = jacobian.layout

        jax.eval_shape(note, dict(self._init_locs))
        for name in layouts:
            scale = posterior.fixed[name][1] if name in posterior.fixed else np.ones(1)
            uneven = np.ptp(scale) > 1e-6 * np.max(scale)
            if uneven or name in posterior.other_sites:
                got = (
                    f"'kron' with the site {name!r}, whose prior is not Normal with "
                    f"one scale for all its elements"
                )
                instead = 'Use "diag", "low_rank" or "full".'
                raise argument_error(CALL, "structure", got, instead)
        return layouts

    def _mean_field(self, name: str, moments: LocScale | None) -> dist.Distribution:
        if name in self._chosen:
            return super()._mean_field(name, moments)
        event_dim = self._event_dims[name]
        loc = numpyro.param(
            f"{name}_{self.prefix}_loc", self._init_locs[name], event_dim=event_dim
        )
        value = self._transforms[name](
            loc if moments is None else moments[0] + moments[1] * loc
        )
        return dist.Delta(value, event_dim=self._latent()[name]["fn"].event_dim)

    def _normals(self, params: Arrays) -> dict[str, dist.Normal]:
        scales = {}
        for name in self._transforms:
            if name not in self._chosen:
                scales[f"{name}_{self.prefix}_scale"] = 0.0
        with numpyro.validation_enabled(False):  # a point mass is a normal of scale 0
            return super()._normals(scales | dict(params))

    def _gaussian_blocks(self, params: Arrays) -> Blocks:
        """The jointly Gaussian sites, and their distributions."""
        blocks: list = []
        families = self._families(params)
        for (block, _), fn in zip(self._blocks, families, strict=True):
            blocks.append((list(block.shapes), fn))
        for name, fn in self._normals(params).items():
            if name in self._chosen:
                blocks.append(([name], fn))
        return blocks

    # -- fitting -----------------------------------------------------------------------

    @checked(f"{CALL}.run")
    def run(
        self,
        rng_key: RandomKey,
        *args: Any,
        num_epochs: Natural = 1000,
        optimizer: Optimizer = None,
        patience: PositiveInt = 20,
        init_params: Annotated[
            Mapping, Kind(Mapping, "Pass a dictionary of values by site.")
        ]
        | None = None,
        tune_prior: bool | Annotated[str, Choice(("site", "global", "auto"))] = False,
        num_rounds: PositiveInt = 10,
        progress_bar: Switch = True,
        **kwargs: Any,
    ) -> LaplaceResult:
        r"""Find the mode, and the precision there.

        With ``structure="full"`` on all rows, damped steps of Newton (Levenberg and
        Marquardt's, by the precision of the approximation, with geodesic acceleration)
        go from where the optimizer ends to the mode. With nearly exact targets they fit
        a network of about a thousand weights far better than an optimizer can.

        Prior scales that the model learns are found in rounds: each searches for the
        mode of :math:`\log p(D, v) - \sum_j (\log s_j + V_j / 2 s_j^2)`, with
        :math:`V_j` the variance of weight j given its scale, from the round before.
        This is expectation maximization, whose fixed point is the mode of the scales
        under Laplace's evidence.

        With ``tune_prior`` the precisions of fixed Normal priors are multiplied by
        factors that maximize Laplace's evidence (MacKay's fixed point :math:`\delta =
        \gamma / \sum_j (w_j - m_j)^2 / s_j^2` with :math:`\gamma` the effective
        parameters), alternating with further search for the mode. The fixed point may
        pass the maximum: the round with the largest evidence is kept, and tuning ends
        after three rounds below it. The result is then the posterior under prior sds
        that are ``prior_precision ** -0.5`` times those of the model. A learned noise
        scale of a Normal likelihood is then at its evidence too, :math:`\sigma^2 =
        \sum_n (r_n^2 + \mathrm{var} f_n) / N`, while the joint mode is too small by the
        effective parameters. Many short rounds (``num_epochs=20, num_rounds=100``) find
        a larger evidence than few long ones.

        It warns (:class:`~numpyro_bnn.metrics.HealthWarning`) if it ends far from the
        mode, or else predicts left-out rows clearly worse than a constant or a linear
        model does, and if it loses digits.

        :param rng_key: key of start and minibatches.
        :param args: arguments of the model, targets included; minibatches by its
            subsampled plate.
        :param num_epochs: most passes over the data (of each round); 0 takes
            ``init_params`` as the mode.
        :param optimizer: an optax optimizer; by default L-BFGS on all rows, and Adam
            with a cosine schedule in minibatches.
        :param patience: epochs without a lower loss after which the search stops.
        :param init_params: where to start: constrained values by site, e.g. trained
            weights, and values of the model's own parameters (``numpyro.param``), which
            stay as they are.
        :param tune_prior: ``True`` or ``"site"``: one factor per site, ``"global"``:
            one for all; ``"auto"``: one per site if there are such priors.
        :param num_rounds: most rounds of tuning, and of learning prior scales.
        :param progress_bar: show a progress bar over epochs.
        :param kwargs: keyword arguments of the model.
        :return: a :class:`LaplaceResult`.
        :raises ValueError: for a model, data or options it cannot use, and if the
            precision is not positive.
        """
        call = f"{CALL}.run"
        instead = "It runs on the host; call it outside."
        refuse_tracers(call, instead, rng_key, args, kwargs, init_params)
        refuse_rows(call, "Its precision is a sum over all rows", args, kwargs)
        args, kwargs = as_arrays(args, kwargs, call)
        _check_finite(call, args, kwargs)
        start = dict(init_params or {})
        self._model_params = dict(start)
        with TRACING, handlers.block(), handlers.seed(rng_seed=rng_key):
            self._setup_prototype(*args, **kwargs)
        self._model_params = self._given_params(start)
        posterior = self._prototype_posterior
        search = ModeSearch(
            posterior, self._structure, num_epochs, optimizer, patience, progress_bar
        )
        groups = tuned_groups(posterior, tune_prior)
        by_newton = optimizer is None and num_epochs > 0 and not posterior.rows.plates
        by_newton &= self.structure == "full"
        tuning = EvidenceTuning(self, search, groups, num_rounds, by_newton)
        result = tuning.run(self._started(posterior, start), rng_key)
        self._posterior = posterior
        return result._replace(params={**result.params, **self._model_params})

    def _given_params(self, init: Trees) -> dict[str, PyTree]:
        """Values of the model's own parameters; refuses names that the model lacks, and
        parameters without a value.
        """
        trace = self.prototype_trace or {}
        learned = {name for name, site in trace.items() if site["type"] == "param"}
        for name in init:
            if name not in self._transforms and name not in learned:
                known = [*self._transforms, *learned]
                raise unknown_name(f"{CALL}.run", "init_params", name, known)
        for name in learned - init.keys():
            leaves = jax.tree.leaves(trace[name]["value"])
            if leaves and all(hasattr(leaf, "dtype") for leaf in leaves):
                got = f"a model with the parameter {name!r}, and no value for it"
                instead = "Train it first, e.g. by SVI, and pass it."
                raise argument_error(f"{CALL}.run", "init_params", got, instead)
        return {name: init[name] for name in init if name in learned}

    def _started(self, posterior: LaplacePosterior, init: Trees) -> Values:
        """Coordinates of the start."""
        passed = {name: init[name] for name in init if name in self._transforms}
        v = dict(self._init_locs)
        if not passed:
            return v
        values = posterior.rows.run_once(posterior.values, v)
        for name, value in passed.items():
            if np.shape(value) != values[name].shape:
                got = f"shape {np.shape(value)} for {name!r}"
                instead = f"Pass a value of shape {values[name].shape}."
                raise argument_error(f"{CALL}.run", "init_params", got, instead)
            check_finite(f"{CALL}.run", f"init_params[{name!r}]", value)
            values[name] = jnp.asarray(value, float)
        return posterior.rows.run_once(posterior.coordinates, values)

    def _to_params(self, v: Values, gaussian: LaplaceGaussian) -> Values:
        """Parameters by the names of the guide."""
        labels: dict[str, str] = {"*": self.prefix}
        params: Values = {}
        for block, _ in self._blocks:
            labels |= dict.fromkeys(block.shapes, block.name)
            locs = [jnp.ravel(v[name]) for name in block.shapes]
            params[f"{block.name}_loc"] = jnp.concatenate(locs)
        for name, value in v.items():
            if name not in labels:
                params[f"{name}_{self.prefix}_loc"] = value
        for (name, field), value in gaussian.params.items():
            if name in labels:
                params[f"{labels[name]}_{field}"] = value
            else:
                params[f"{name}_{self.prefix}_{field}"] = value.reshape(v[name].shape)
        return params

    # -- prediction --------------------------------------------------------------------

    @checked(f"{CALL}.predictive")
    def predictive(
        self,
        params: Trees,
        *args: Any,
        linearized: Switch = True,
        link: Annotated[str, Choice(("probit", "sample"))] = "probit",
        covariance: Switch = False,
        rng_key: Array | None = None,
        num_samples: PositiveInt = 1000,
        site: str | None = None,
        **kwargs: Any,
    ) -> LaplacePredictive:
        r"""Predict from the network linearized at the mode, :math:`f(x) \sim N(f^*, J
        \Sigma J^\top)`.

        This is the model whose posterior the Gaussian is: the Gauss-Newton matrix is
        the Hessian of the linearized network. Classes by the probit approximation or by
        draws of the logits; numbers and counts in closed form.

        :param params: parameters from a run.
        :param args: arguments of the model; targets may be left out.
        :param linearized: ``False`` draws weights and runs the network itself, for
            comparison: it underfits.
        :param link: ``"probit"`` (closed forms), or ``"sample"``: draws of the outputs,
            without the error of the probit approximation.
        :param covariance: also covariances between rows.
        :param rng_key: key of the draws, for ``"sample"`` and ``linearized=False``.
        :param num_samples: number of draws.
        :param site: the observed site, if there are several.
        :return: a :class:`LaplacePredictive`.
        """
        if link == "sample" or not linearized:
            KEY.check(f"{CALL}.predictive", "rng_key", rng_key)
        name, posterior = self._for_rows("predictive", params, args, kwargs, site)
        options = PredictiveOptions(name, linearized, link, covariance, num_samples)

        def predicted(batch: Batch, params: Values, key: Array) -> dict:
            return predict(self, posterior, batch, params, key, options)._asdict()

        prediction = posterior.rows.run_once(predicted, dict(params), rng_key)
        return LaplacePredictive(**prediction)

    def log_predictive_density(
        self,
        params: Trees,
        *args: Any,
        site: str | None = None,
        **kwargs: Any,
    ) -> Array:
        """log p(y_n | x_n) of each row: the likelihood averaged over the outputs of the
        linearized network.

        Normal numbers in closed form given their log scales, with the covariances of
        all locations and log scales of a row, classes by the probit approximation, all
        others by quadrature over the outputs of each element.

        :param params: parameters from a run.
        :param args: arguments of the model, targets included.
        :param site: the observed site, if there are several.
        :return: (N,), of all elements of a row, which are taken as independent unless
            they are Normal.
        """
        name, posterior = self._for_rows(
            "log_predictive_density", params, args, kwargs, site
        )

        def score(batch: Batch, params: Trees) -> Array:
            return log_density(self, posterior, batch, params, name)

        return posterior.rows.run_once(score, dict(params))

    def _for_rows(
        self, method: str, params: PyTree, args: tuple, kwargs: Kwargs, site: str | None
    ) -> tuple[str, LaplacePosterior]:
        """The observed site, and the posterior on new rows."""
        call = f"{CALL}.{method}"
        Kind(Mapping, "Pass the `params` of a run of this guide.").check(
            call, "params", params
        )
        posterior: LaplacePosterior | None = getattr(self, "_posterior", None)
        if posterior is None:
            instead = "Call `run` of this guide first, so that it reads the model."
            raise argument_error(call, "params", "those of another guide", instead)
        names = list(posterior.observed)
        if site is None and len(names) > 1:
            raise argument_error(call, "site", None, f"Pass one of {', '.join(names)}.")
        name = names[0] if site is None else site
        Choice(names).check(call, "site", name)
        args, kwargs = as_arrays(args, kwargs, call)
        _check_finite(call, args, kwargs)
        return name, posterior.on(args, kwargs)

    def _coordinates(self, params: Arrays) -> Values:
        """Locations of all sites."""
        locs: Values = {}
        for block, _ in self._blocks:
            locs |= block.unflatten(params[f"{block.name}_loc"])
        for name in self._transforms.keys() - locs.keys():
            locs[name] = params[f"{name}_{self.prefix}_loc"]
        return {name: locs[name] for name in self._transforms}


def _check_finite(call: str, args: tuple, kwargs: Kwargs) -> None:
    for leaf in jax.tree.leaves((args, kwargs)):
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact):
            check_finite(call, "args", leaf)


def _given_param(params: Trees, site: Site) -> PyTree:
    """Value of a parameter of the model."""
    return params.get(site["name"]) if site["type"] == "param" else None
