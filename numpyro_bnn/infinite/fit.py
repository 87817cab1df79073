"""Prior scales from the marginal likelihood of the infinitely wide network, for
empirical Bayes.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.scipy.linalg import cho_solve, solve_triangular
from jax.typing import ArrayLike

from numpyro_bnn._checks import argument_error, as_floats
from numpyro_bnn._options import (
    Positive,
    PositiveInt,
    PositiveOrInfinite,
    Switch,
    checked,
)
from numpyro_bnn._types import Arrays, HostArrays, PyTree, Trees
from numpyro_bnn.infinite.kernels import kernel
from numpyro_bnn.infinite.prior_moments import (
    PriorMoments,
    Scales,
    SiteMoments,
    prior_moments,
)
from numpyro_bnn.infinite.regression import check_data, factorize, with_noise
from numpyro_bnn.nn import Dense, Layer
from numpyro_bnn.nn.base import Net, Shape, fan_in, role
from numpyro_bnn.priors import BySite, Normal
from numpyro_bnn.priors.base import PriorLike

# Bounds of standard deviations: of weights (times the root of the fan-in) and biases;
# of the noise, per sd of y.
SCALES = (1e-3, 1e3)
NOISE = (1e-4, 10.0)


class PriorFit(NamedTuple):
    """Prior scales that maximize the marginal likelihood; returned by
    :func:`prior_fit`.

    :param prior: a prior for :func:`~numpyro_bnn.random_network` and :func:`nngp`,
        normal with these scales.
    :param noise_sd: sd of the noise.
    :param log_marginal_likelihood: log p(y | x) at these values.
    :param start: log p(y | x) at the start of the search.
    :param scales: sds of weights times the root of their fan-in, and of biases, by
        parameter.
    :param jitter: amount added to the diagonal at these values; 0 if none was needed.
    :param converged: whether the search ended at a maximum (or at a bound) before it
        ran out of steps.
    :param num_evaluations: number of gradient evaluations.
    """

    prior: BySite
    noise_sd: float
    log_marginal_likelihood: float
    start: float
    scales: dict[str, PyTree]
    jitter: float
    converged: bool
    num_evaluations: int


@checked("infinite.prior_fit")
def prior_fit(
    net: Net,
    x: ArrayLike,
    y: ArrayLike,
    *,
    prior: PriorLike | None = None,
    scales: Scales = None,
    noise_sd: Positive | None = None,
    ard: Switch = False,
    log_sd: PositiveOrInfinite = 3.0,
    max_steps: PositiveInt = 200,
) -> PriorFit:
    r"""Empirical Bayes: prior scales and noise that maximize the marginal likelihood of
    the infinitely wide network.

    Maximizes log p(y | x, scales, noise_sd) of :func:`gp_regression` over one sd for
    the kernel and one for the biases of each layer, and over the noise, by L-BFGS in
    float64. A wide network with this prior is close to the process, so these are good
    prior scales for it as well, at the cost of one Cholesky factor per step.

    :param net: as for :func:`nngp`; BatchNorm and other layers without a limit are
        refused.
    :param x: inputs ``(N, *input_shape)``; a few thousand at most.
    :param y: targets (N,), or (N, K); center them.
    :param prior: initial scales, ``priors.Normal()`` by default; gains of
        normalizations keep this prior.
    :param scales: values of its hyper-sites.
    :param noise_sd: initial sd of the noise; by default a third of the sd of y.
    :param ard: one scale for each input instead of one for the first kernel, for
        networks that begin with :class:`~numpyro_bnn.nn.Dense`.
    :param log_sd: sd of a weak normal prior on the log scales (not on the noise),
        centered at their initial values. It determines what the data do not: the scales
        of ReLU layers can be traded. Infinity for none.
    :param max_steps: steps of L-BFGS.
    :return: a :class:`PriorFit`; its ``prior`` fits
        :func:`~numpyro_bnn.random_network`.
    :raises ValueError: as :func:`nngp` does; for ``ard`` with another first layer.

    Reference: MacKay (1992), *Bayesian interpolation*, section 3; Rasmussen & Williams
    (2006), section 5.4.1.

    >>> import numpy as np
    >>> from numpyro_bnn import nn
    >>> x = np.linspace(-2, 2, 20)[:, None]
    >>> found = prior_fit(nn.MLP([50, 1], "tanh"), x, np.sin(2 * x[:, 0]), max_steps=5)
    >>> found.log_marginal_likelihood > found.start, list(found.prior.patterns)
    (True, ['Dense_0.*', 'Dense_1.*'])
    """
    call = "infinite.prior_fit"
    x, y = as_floats(call, "x", x), as_floats(call, "y", y)
    check_data(call, x, y)
    with jax.enable_x64(True):
        moments = prior_moments(call, net, x.shape[1:], prior, scales)
        spread = float(np.std(y)) or 1.0
        begin = _beginning(call, net, moments, x.shape[1:], ard)
        begin["noise"] = np.asarray(
            np.log(spread / 3 if noise_sd is None else float(noise_sd))
        )
        evidence = partial(_evidence, net, moments.normal, moments.sites, x, y)
        best, start, done = _search(begin, evidence, spread, log_sd, max_steps)
        value, jitter, _ = evidence(best)
        fitted = {name: np.exp(best[name]) for name in begin}
    noise = float(fitted.pop("noise"))
    patterns = _patterns(moments, fitted, net.param_shapes(x.shape[1:]))
    plain = {}
    for name, scale in fitted.items():
        plain[name] = scale.ravel() if np.ndim(scale) else float(scale)
    return PriorFit(
        prior=BySite(patterns),
        noise_sd=noise,
        log_marginal_likelihood=float(value),
        start=start,
        scales=plain,
        jitter=float(jitter),
        converged=bool(done.success),
        num_evaluations=int(done.nfev) + 1,
    )


def _beginning(
    call: str, net: Layer, moments: PriorMoments, input_shape: Shape, ard: bool
) -> dict:
    """Logarithms of the scales at the start of the search."""
    shapes = net.param_shapes(input_shape)
    begin: dict[str, np.ndarray] = {}
    for name, site in moments.sites.items():
        if role(name, shapes[name]) != "scale":
            variance = np.asarray(site.variance, np.float64)
            begin[name] = np.log(
                np.sqrt(np.clip(variance.mean(), SCALES[0] ** 2, SCALES[1] ** 2))
            )
    if ard:
        first, start = next(iter(shapes)), net
        while children := list(start.children()):
            start = children[0][1]
        if len(input_shape) != 1 or not isinstance(start, Dense):
            instead = "Scales by input need a network that begins with `nn.Dense`."
            raise argument_error(call, "ard", "another first layer", instead)
        begin[first] = np.full((input_shape[0], 1), begin[first])
    return begin


def _search(
    begin: HostArrays,
    evidence: Callable[[dict], tuple[Array, Array, dict]],
    spread: float,
    log_sd: float,
    max_steps: int,
) -> tuple[dict[str, Any], float, Any]:
    """L-BFGS on the logarithms, within bounds: the best ones, the log evidence at the
    start, and SciPy's report.
    """
    from scipy.optimize import Bounds, minimize

    def each(of_scales: float, of_noise: float) -> np.ndarray:
        """One number for every scale, and one for the noise, as the search has them."""
        numbers = {}
        for name, value in begin.items():
            numbers[name] = np.full_like(
                value, of_noise if name == "noise" else of_scales
            )
        return flat(numbers)

    bounds = Bounds(*map(each, np.log(SCALES), np.log(NOISE) + np.log(spread)))
    _, unflatten = ravel_pytree(begin)
    start = np.clip(flat(begin), bounds.lb, bounds.ub)
    precision = each(1.0, 0.0) / log_sd**2

    def value_and_slope(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, _, slope = evidence(unflatten(jnp.asarray(point)))
        return float(value), flat(slope)

    first, slope = value_and_slope(start)
    # the first step, down the gradient, is at most e-fold
    unit = max(1.0, float(np.abs(slope).max()))

    def objective(point: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = value_and_slope(point)
        if not (np.isfinite(value) and np.isfinite(gradient).all()):
            # No jitter was large enough: the line search steps back.
            return -first / unit + 100.0, np.zeros_like(point)
        away = precision * (point - start)
        penalty = 0.5 * float(np.sum(away * (point - start)))
        return (penalty - value) / unit, (away - gradient) / unit

    done = minimize(
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": max_steps},
    )
    return unflatten(done.x), first, done


def flat(tree: PyTree) -> np.ndarray:
    """All numbers of a tree."""
    return np.asarray(ravel_pytree(tree)[0])


@partial(jax.jit, static_argnums=(0, 1))
def _evidence(
    net: Layer,
    normal: frozenset[str],
    sites: Mapping[str, SiteMoments],
    x: Array,
    y: Array,
    log_scales: Arrays,
) -> tuple[Array, Array, dict[str, Any]]:
    """Log marginal likelihood, the jitter of its Cholesky factor, and the slope of the
    likelihood.

    With a = A^-1 y it changes by a' dA a / 2 - tr(A^-1 dA) / 2, which takes one factor
    and one inverse; the derivative of the factor would take several.
    """

    def covariance(log_scales: dict[str, Any]) -> Array:
        scaled = dict(sites)
        for name, log_scale in log_scales.items():
            if name != "noise":
                scaled[name] = scaled[name]._replace(variance=jnp.exp(2 * log_scale))
        of_function = kernel(net, scaled, normal, x)
        return with_noise(of_function, jnp.exp(log_scales["noise"]))

    matrix, pull_back = jax.vjp(covariance, log_scales)
    factor = factorize(matrix)
    whitened = solve_triangular(factor.lower, y, lower=True)
    solved = solve_triangular(factor.lower, whitened, lower=True, trans=1)
    columns = solved.reshape((len(y), -1))
    inverse = cho_solve((factor.lower, True), jnp.eye(len(y), dtype=matrix.dtype))
    slope = 0.5 * (columns @ columns.T - columns.shape[1] * inverse)
    return factor.log_density(whitened), factor.jitter, pull_back(slope)[0]


def _patterns(
    moments: PriorMoments, fitted: Trees, shapes: Mapping[str, Shape]
) -> Trees:
    """One normal prior for each layer; plain distributions if its family has no such
    scale.
    """
    layers: dict[str, dict[str, Any]] = {}
    special: dict[str, PriorLike] = {}
    for name, shape in shapes.items():
        layer, _, leaf = name.rpartition(".")
        if role(name, shape) == "scale":
            site = moments.sites[name]
            special[name] = dist.Normal(float(site.mean), float(site.variance) ** 0.5)
        elif fitted[name].ndim:
            special[name] = dist.Normal(0.0, fitted[name] / fan_in(name, shape) ** 0.5)
        else:
            option = "scale" if leaf == "kernel" else "bias_scale"
            pattern = f"{layer}.*" if layer else "*"
            layers.setdefault(pattern, {})[option] = float(fitted[name])
    return special | {pattern: Normal(**scales) for pattern, scales in layers.items()}
