"""What the targets of a regression are: a scale for the network, a likelihood, and
answers in the units of the data that never leave the support.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import transforms
from scipy import stats
from scipy.special import expit, log_expit, logit

from numpyro_bnn._checks import argument_error
from numpyro_bnn.datasets import Scaler
from numpyro_bnn.estimators import methods
from numpyro_bnn.estimators.mixtures import MAX_LOG, Hurdle
from numpyro_bnn.estimators.network import weighted_scaler

ROUNDING = 4 * np.finfo(float).eps
MIN_DISPERSION = 1e-3  # of counts: below, float32 loses digits of the density
MAX_LOG_MEAN = 30.0  # of counts
MAX_LEVELS = 30  # of ordered targets

Ask = Callable[..., tuple]  # a summary by name, arrays by row, and `options`


class NoiseSettings(NamedTuple):
    """Settings of the noise: ``None`` where the user does not say."""

    heteroscedastic: bool | None
    heavy_tails: bool | None
    bounds: tuple[float, float] | None
    min_sd: float


class TargetKind(ABC):
    """A kind of targets, fitted to those of a table.

    :param y: targets (N,) or (N, K). :param weight: how often each row counts.
    :param noise: settings of the user. :param usual: those of the method.
    """

    name: ClassVar[str]
    #: Whether ``y`` may have several columns.
    several: ClassVar[bool] = False
    #: Whether methods that know only normal noise can fit it.
    is_normal: ClassVar[bool] = False
    #: Whether :meth:`Regressor.calibrate` can stretch it, and Student's t be its noise.
    stretches: ClassVar[bool] = False
    may_have_heavy_tails: ClassVar[bool] = False
    may_be_heteroscedastic: ClassVar[bool] = True
    #: Whether means grow exponentially with an output of the network.
    is_exponential: ClassVar[bool] = False
    #: The summary whose first array is what the network says without its noise.
    mean_summary: ClassVar[str] = "moments"
    #: Standardization inside, in whose units the export is, if there is any.
    scaler: Scaler | None = None
    bounds: tuple[float, float] | None = None
    #: Outputs of the network, and how many of them, the last, are scales of the noise.
    num_outputs: int
    num_scales: int = 0

    @classmethod
    def misfit(cls, y: np.ndarray, bounds: Any) -> str | None:
        """Which targets it cannot have, in words."""
        return None

    @classmethod
    def shortage(cls, y: np.ndarray) -> str | None:
        """What all targets together lack for a fit, in words."""
        return None

    @classmethod
    def with_density(cls, y: np.ndarray) -> np.ndarray:
        """Those on which the density of a noise that may vanish would have no bound."""
        return y[:0]

    @abstractmethod
    def likelihood(self) -> Callable:
        """What ``methods.network_model`` calls."""

    @abstractmethod
    def observed(self, y: np.ndarray) -> np.ndarray:
        """What the network is trained on."""

    @abstractmethod
    def constant_log_density(self, y: np.ndarray) -> np.ndarray:
        """Log densities (N,), as :meth:`log_density`, of a prediction that is the same
        for all rows.
        """

    @abstractmethod
    def moments(self, ask: Ask, factor: float) -> tuple:
        """Mean, variance of the noise, and variance of the function, like y."""

    @abstractmethod
    def quantiles(self, ask: Ask, levels: np.ndarray, factor: float) -> np.ndarray:
        """Quantiles (Q, N) or (Q, N, K)."""

    @abstractmethod
    def cdf(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        """Probability of at most y."""

    @abstractmethod
    def crps(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        """Continuous ranked probability score."""

    @abstractmethod
    def log_density(self, ask: Ask, y: np.ndarray) -> Callable[[float], np.ndarray]:
        """Log density (N,), as a function of the factor."""

    @abstractmethod
    def draws(
        self, ask: Ask, generator: np.random.Generator, noise: bool, factor: float
    ) -> np.ndarray:
        """Draws (S, N) of observations, or of their means."""

    @abstractmethod
    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        """The mixture over the draws, of batch shape (N,)."""

    # -- conformal intervals by quantiles ----------------------------------------------

    @abstractmethod
    def places(self, y: np.ndarray) -> np.ndarray:
        """Targets on the scale of :meth:`central`."""

    @abstractmethod
    def central(self, ask: Ask, levels: np.ndarray) -> tuple:
        """Quantiles (Q, N) and standard deviation (N,) on that scale."""

    @abstractmethod
    def ends(self, low: np.ndarray, high: np.ndarray) -> tuple:
        """The smallest interval in units of y that holds all targets between places."""


def _mixture(component: dist.Distribution) -> dist.Distribution:
    """Of components (N, M) or (N, M, K), whose last axis is an event."""
    number = component.batch_shape[1]
    mixing = dist.Categorical(probs=np.full(number, 1 / number))
    component = component.to_event(len(component.batch_shape) - 2)
    return dist.MixtureSameFamily(mixing, component)


def _rows_first(values: np.ndarray) -> np.ndarray:
    return np.moveaxis(values, 0, 1)


# -- a monotone function of the target has normal or Student's t noise -----------------


class Continuous(TargetKind):
    """Numbers without bounds."""

    name = "continuous"
    several = True
    is_normal = True
    stretches = True
    may_have_heavy_tails = True

    def __init__(
        self,
        y: np.ndarray,
        weight: np.ndarray | None,
        noise: NoiseSettings,
        usual: methods.Regression,
    ) -> None:
        hetero, tails = noise.heteroscedastic, noise.heavy_tails
        hetero = usual.heteroscedastic if hetero is None else bool(hetero)
        if tails is None:
            tails = usual.heavy_tails and self.may_have_heavy_tails
        self.bounds = noise.bounds
        self._targets = 1 if y.ndim == 1 else y.shape[1]
        self.num_scales = self._targets * hetero
        self.num_outputs = self._targets + self.num_scales
        self._settings = (self._targets, hetero, tails, noise.min_sd)
        self.scaler: Scaler = weighted_scaler(self.forward(y), weight)

    @classmethod
    def with_density(cls, y: np.ndarray) -> np.ndarray:
        return y

    def forward(self, y: np.ndarray) -> np.ndarray:
        """Targets on the scale of the noise."""
        return y

    def backward(self, u: np.ndarray) -> np.ndarray:
        """The inverse of :meth:`forward`."""
        return u

    def log_slope(self, u: np.ndarray) -> np.ndarray | float:
        """Log derivative of :meth:`forward`, at its values."""
        return 0.0

    def likelihood(self) -> Callable:
        return partial(methods.noise_likelihood, *self._settings)

    def observed(self, y: np.ndarray) -> np.ndarray:
        return self.scaler.transform(self.forward(y))

    def _units(self, z: np.ndarray) -> np.ndarray:
        return self.backward(z * self.scaler.scale + self.scaler.mean)

    def log_slopes(self, z: np.ndarray) -> np.ndarray | float:
        """Of each row, from y to what the network is trained on; missing ones have
        none.
        """
        u = z * self.scaler.scale + self.scaler.mean
        slopes = self.log_slope(u) - np.log(self.scaler.scale) + 0 * u
        return slopes if slopes.ndim == 1 else np.nansum(slopes, axis=1)

    def _stretched(self, ask: Ask, values: np.ndarray, factor: float) -> np.ndarray:
        """Standardized values (..., N) or (..., N, K), with this many times their
        distance from the predictive mean.
        """
        if factor == 1:
            return values
        mean = ask("moments")[0]
        return mean + factor * (values - mean)

    def constant_log_density(self, y: np.ndarray) -> np.ndarray:
        z = self.observed(y)
        densities = np.nansum(stats.norm.logpdf(z).reshape(len(z), -1), axis=1)
        return densities + self.log_slopes(z)

    def moments(self, ask: Ask, factor: float) -> tuple:
        mean, noise, spread = ask("moments")
        square = factor**2 * self.scaler.scale**2
        return self._units(mean), noise * square, spread * square

    def quantiles(self, ask: Ask, levels: np.ndarray, factor: float) -> np.ndarray:
        quantiles = np.stack(ask("quantiles", options=(levels,)))
        return self._units(self._stretched(ask, quantiles, factor))

    def cdf(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        z = self._stretched(ask, self.observed(y), 1 / factor)
        return ask("cdf", z)[0]

    def crps(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        z = self._stretched(ask, self.observed(y), 1 / factor)
        return ask("crps", z)[0] * factor * self.scaler.scale

    def log_density(self, ask: Ask, y: np.ndarray) -> Callable[[float], np.ndarray]:
        z = self.observed(y)
        columns = (~np.isnan(z)).reshape(len(z), -1).sum(axis=1)
        remembered = cache(ask)  # the same moments for all factors

        def density(factor: float) -> np.ndarray:
            places = self._stretched(remembered, z, 1 / factor)
            (log_density,) = ask("log_density", places)
            return log_density + self.log_slopes(z) - columns * np.log(factor)

        return density

    def draws(
        self, ask: Ask, generator: np.random.Generator, noise: bool, factor: float
    ) -> np.ndarray:
        draws, sds, *df = ask("components")
        if noise:
            if df:
                unit = np.sqrt(1 - 2 / df[0]) * generator.standard_t(df[0])
            else:
                unit = generator.normal(size=sds.shape)
            draws = draws + sds * unit
        return self._units(self._stretched(ask, draws, factor))

    def _component(self, ask: Ask, factor: float) -> dist.Distribution:
        """Components (N, M) or (N, M, K) on the scale of the noise."""
        means, sds, *df = map(_rows_first, ask("components"))
        if factor != 1:
            center = ask("moments")[0][:, None]
            means = center + factor * (means - center)
        loc = means * self.scaler.scale + self.scaler.mean
        sd = factor * sds * self.scaler.scale
        if df:
            degrees = df[0].reshape(sd.shape)
            return dist.StudentT(degrees, loc, sd * np.sqrt(1 - 2 / degrees))
        return dist.Normal(loc, sd)

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        return _mixture(self._component(ask, factor))

    def places(self, y: np.ndarray) -> np.ndarray:
        return self.observed(y)

    def central(self, ask: Ask, levels: np.ndarray) -> tuple:
        _, noise, spread = ask("moments")
        return ask("quantiles", options=(levels,)), np.sqrt(noise + spread)

    def ends(self, low: np.ndarray, high: np.ndarray) -> tuple:
        # a target at an end went through the scale of the noise and back
        size = (np.abs(self.scaler.mean) + 1) / self.scaler.scale
        low = low - ROUNDING * (np.abs(low) + size)
        high = high + ROUNDING * (np.abs(high) + size)
        return self._units(low), self._units(high)


class _Curved(Continuous):
    """A function of the target that is not linear: moments and scores by integrals."""

    def _options(self, *first: float) -> tuple[np.ndarray, ...]:
        return (*map(np.asarray, first), self.scaler.mean, self.scaler.scale)

    def _unit(self) -> tuple[Any, Any]:
        """By which the answers of summaries are multiplied, and what is added."""
        raise NotImplementedError

    def moments(self, ask: Ask, factor: float) -> tuple:
        unit, shift = self._unit()
        options = self._options(factor)
        mean, noise, spread = ask(f"{self.name}_moments", options=options)
        return shift + unit * mean, noise * unit**2, spread * unit**2

    def cdf(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        low, high = self._support()
        inside = super().cdf(ask, self._inside(y), factor)
        return np.where(y <= low, 0.0, np.where(y >= high, 1.0, inside))

    def crps(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        near = self._inside(y)
        options = self._options(factor)
        (score,) = ask(f"{self.name}_crps", self.observed(near), options=options)
        return score * self._unit()[0] + np.abs(y - near)

    def log_density(self, ask: Ask, y: np.ndarray) -> Callable[[float], np.ndarray]:
        low, high = self._support()
        # missing ones are not
        outside = ((y <= low) | (y >= high)).reshape(len(y), -1).any(axis=1)
        density = super().log_density(ask, np.where(outside, self._inside(y).T, y.T).T)
        return lambda factor: np.where(outside, -np.inf, density(factor))

    def draws(
        self, ask: Ask, generator: np.random.Generator, noise: bool, factor: float
    ) -> np.ndarray:
        if noise:
            return super().draws(ask, generator, noise, factor)
        unit, shift = self._unit()
        middle = ask("moments")[0]
        options = self._options(factor)
        means = ask(f"{self.name}_components", middle, options=options)[0]
        return shift + unit * means

    def _support(self) -> tuple[float, float]:
        raise NotImplementedError

    def _inside(self, y: np.ndarray) -> np.ndarray:
        """Targets moved into the support, to where nothing is beyond."""
        lowest = self.scaler.mean - MAX_LOG
        highest = self.scaler.mean + MAX_LOG
        low, high = self._support()
        between = np.nextafter(low, np.inf), np.nextafter(high, -np.inf)
        ends = (self.backward(np.asarray(end)) for end in (lowest, highest))
        least, most = (np.clip(end, *between) for end in ends)
        return np.clip(y, least, most)


class Positive(_Curved):
    """Positive numbers: normal noise on the scale of their logarithm.

    A Student's t there would have no mean.
    """

    name = "positive"
    may_have_heavy_tails = False
    is_exponential = True

    @classmethod
    def misfit(cls, y: np.ndarray, bounds: Any) -> str | None:
        bad = np.sum(y <= 0)
        return f"{bad} targets that are not above zero" if bad else None

    def forward(self, y: np.ndarray) -> np.ndarray:
        return np.log(y)

    def backward(self, u: np.ndarray) -> np.ndarray:
        return np.exp(u)

    def log_slope(self, u: np.ndarray) -> np.ndarray | float:
        return -u

    def _support(self) -> tuple[float, float]:
        return 0.0, np.inf

    def _unit(self) -> tuple[Any, Any]:
        return np.exp(self.scaler.mean), 0.0

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        normal = self._component(ask, factor)
        return _mixture(dist.LogNormal(normal.loc, normal.scale))


class Bounded(_Curved):
    """Numbers between two bounds: the noise is on the scale of their logit."""

    name = "bounded"

    @classmethod
    def misfit(cls, y: np.ndarray, bounds: Any) -> str | None:
        low, high = bounds
        bad = np.sum((y <= low) | (y >= high))
        return f"{bad} targets that are not between {bounds}" if bad else None

    def forward(self, y: np.ndarray) -> np.ndarray:
        low, high = self._support()
        return np.log(y - low) - np.log(high - y)

    def backward(self, u: np.ndarray) -> np.ndarray:
        low, high = self._support()
        return low + (high - low) * expit(u)

    def log_slope(self, u: np.ndarray) -> np.ndarray | float:
        low, high = self._support()
        return -log_expit(u) - log_expit(-u) - np.log(high - low)

    def _support(self) -> tuple[float, float]:
        assert self.bounds is not None  # refused before
        return self.bounds

    def _unit(self) -> tuple[Any, Any]:
        low, high = self._support()
        return high - low, low

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        low, high = self._support()
        into_bounds = [
            transforms.SigmoidTransform(),
            transforms.AffineTransform(
                low, high - low, domain=dist.constraints.unit_interval
            ),
        ]
        return dist.TransformedDistribution(
            super().distribution(ask, factor), into_bounds
        )


# -- likelihoods of their own ----------------------------------------------------------


def _rounded(scaler: Scaler) -> tuple[float, float]:
    """Location and scale of an output, so coarse that folds share programs."""
    coarse = 2.0 ** (np.round(2 * np.log2(np.maximum(scaler.scale, 0.25))) / 2)
    return float(np.round(4 * scaler.mean) / 4), float(coarse)


class _Direct(TargetKind):
    """Targets in their own units, whose likelihood is not that of a function of
    them.
    """

    def _options(self) -> tuple[np.ndarray, ...]:
        return ()

    def _ask(self, ask: Ask, name: str, *by_row: np.ndarray, options: Any = ()) -> Any:
        return ask(f"{self.name}_{name}", *by_row, options=options or self._options())

    def observed(self, y: np.ndarray) -> np.ndarray:
        return y

    def moments(self, ask: Ask, factor: float) -> tuple:
        return self._ask(ask, "moments")

    def quantiles(self, ask: Ask, levels: np.ndarray, factor: float) -> np.ndarray:
        return np.stack(self._ask(ask, "quantiles", options=(levels,)))

    def cdf(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        return self._ask(ask, "cdf", y)[0]

    def crps(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        near = np.maximum(y, 0.0)
        return self._ask(ask, "crps", near)[0] + np.abs(y - near)

    def log_density(self, ask: Ask, y: np.ndarray) -> Callable[[float], np.ndarray]:
        (log_density,) = self._ask(ask, "log_density", y)
        return lambda factor: log_density

    def draws(
        self, ask: Ask, generator: np.random.Generator, noise: bool, factor: float
    ) -> np.ndarray:
        if noise:
            return self.noisy(ask("components"), generator)
        return self._ask(ask, "components")[0]

    @abstractmethod
    def noisy(self, components: tuple, generator: np.random.Generator) -> np.ndarray:
        """An observation of each component."""

    def places(self, y: np.ndarray) -> np.ndarray:
        return y

    def central(self, ask: Ask, levels: np.ndarray) -> tuple:
        _, noise, spread = self.moments(ask, 1.0)
        return self.quantiles(ask, levels, 1.0), np.sqrt(noise + spread)

    def ends(self, low: np.ndarray, high: np.ndarray) -> tuple:
        low = low - ROUNDING * np.abs(low)
        return np.maximum(low, 0.0), np.maximum(high + ROUNDING * np.abs(high), 0.0)


def zeros_likelihood(
    center: float, spread: float, zero_logit: float, heteroscedastic: bool
) -> Callable:
    """A hurdle: outputs for the log of a positive amount, the chance of zero, and, if
    ``heteroscedastic``, the scale.
    """
    sigma: Any = 0.0
    if not heteroscedastic:
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))

    def of_output(out: Array) -> dist.Distribution:
        sd = sigma
        if heteroscedastic:
            sd = methods.MIN_SD + jax.nn.softplus(out[..., 2])
        loc = center + spread * out[..., 0]
        return Hurdle(zero_logit + out[..., 1], loc, spread * sd)

    return of_output


class Zeros(_Direct):
    """Amounts that are often exactly zero: a chance of zero, and a log-normal part."""

    name = "zeros"
    is_exponential = True
    mean_summary = "zeros_moments"

    def __init__(
        self,
        y: np.ndarray,
        weight: np.ndarray | None,
        noise: NoiseSettings,
        usual: methods.Regression,
    ) -> None:
        hetero = noise.heteroscedastic
        hetero = usual.heteroscedastic if hetero is None else bool(hetero)
        weight = np.ones(len(y)) if weight is None else weight
        logs = weighted_scaler(np.log(y[y > 0]), weight[y > 0])
        center, spread = _rounded(logs)
        # as if half a row more were of each kind
        share = (weight[y == 0].sum() + 0.5) / (weight.sum() + 1)
        self._settings = (center, spread, float(np.round(4 * logit(share)) / 4), hetero)
        self._constant = (share, logs.mean, logs.scale)
        self.num_outputs, self.num_scales = 2 + hetero, int(hetero)

    @classmethod
    def misfit(cls, y: np.ndarray, bounds: Any) -> str | None:
        bad = np.sum(y < 0)
        return f"{bad} targets below zero" if bad else None

    @classmethod
    def shortage(cls, y: np.ndarray) -> str | None:
        return None if np.sum(y > 0) > 1 else "fewer than two targets above zero"

    @classmethod
    def with_density(cls, y: np.ndarray) -> np.ndarray:
        return y[y > 0]

    def likelihood(self) -> Callable:
        return partial(zeros_likelihood, *self._settings)

    def constant_log_density(self, y: np.ndarray) -> np.ndarray:
        share, center, spread = self._constant
        logs = np.log(np.where(y > 0, y, 1.0))
        density = stats.norm.logpdf(logs, center, spread) - logs + np.log1p(-share)
        return np.where(y == 0, np.log(share), density)

    def noisy(self, components: tuple, generator: np.random.Generator) -> np.ndarray:
        zero, loc, scale = components
        amounts = np.exp(loc + scale * generator.normal(size=loc.shape))
        return np.where(generator.random(zero.shape) < zero, 0.0, amounts)

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        zero, loc, scale = map(_rows_first, ask("components"))
        return _mixture(Hurdle(logit(zero), loc, scale))


def counts_likelihood(center: float, spread: float, heteroscedastic: bool) -> Callable:
    """Negative binomial: an output for the log of the mean, and a dispersion, the
    variance being mean + dispersion mean^2, for all rows or as an output.
    """
    dispersion: Any = 0.0
    if not heteroscedastic:
        dispersion = numpyro.sample("dispersion", dist.HalfNormal(1.0))

    def of_output(out: Array) -> dist.Distribution:
        excess = jax.nn.softplus(out[..., 1]) if heteroscedastic else dispersion
        log_mean = center + spread * out[..., 0]
        mean = jnp.exp(jnp.clip(log_mean, -MAX_LOG_MEAN, MAX_LOG_MEAN))
        return dist.NegativeBinomial2(mean, 1 / (MIN_DISPERSION + excess))

    return of_output


class Counts(_Direct):
    """Whole numbers from zero on: Poisson with a learned over-dispersion."""

    name = "counts"
    is_exponential = True
    mean_summary = "counts_moments"

    def __init__(
        self,
        y: np.ndarray,
        weight: np.ndarray | None,
        noise: NoiseSettings,
        usual: methods.Regression,
    ) -> None:
        hetero = bool(noise.heteroscedastic)
        known = weighted_scaler(y, weight)
        logs = weighted_scaler(np.log(y + 0.5), weight)
        center, spread = _rounded(Scaler(np.log(known.mean + 0.5), logs.scale))
        self._settings = (center, spread, hetero)
        self._mean = known.mean + 0.5 / len(y)
        excess = (known.scale**2 - self._mean) / self._mean**2
        self._concentration = 1 / np.maximum(excess, MIN_DISPERSION)
        self.num_outputs, self.num_scales = 1 + hetero, int(hetero)

    @classmethod
    def misfit(cls, y: np.ndarray, bounds: Any) -> str | None:
        bad = np.sum((y < 0) | (y != np.round(y)))
        return f"{bad} targets that are no whole numbers from zero on" if bad else None

    def likelihood(self) -> Callable:
        return partial(counts_likelihood, *self._settings)

    def constant_log_density(self, y: np.ndarray) -> np.ndarray:
        success = self._concentration / (self._concentration + self._mean)
        return stats.nbinom.logpmf(y, self._concentration, success)

    def noisy(self, components: tuple, generator: np.random.Generator) -> np.ndarray:
        mean, concentration = components
        rate = generator.gamma(concentration, mean / concentration)
        return generator.poisson(rate).astype(float)

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        mean, concentration = map(_rows_first, ask("components"))
        return _mixture(dist.NegativeBinomial2(mean, concentration))

    def ends(self, low: np.ndarray, high: np.ndarray) -> tuple:
        low, high = super().ends(low, high)
        low = np.ceil(low)
        # between two whole numbers there is none: the interval is the next one
        return low, np.maximum(np.floor(high), low)


def ordered_likelihood(num_levels: int) -> Callable:
    """Ordered logits: cut points between which a logistic variable around the output
    lies; with the output 0 all divisions of the probability are equally likely.
    """
    probs = numpyro.sample("level_probs", dist.Dirichlet(jnp.ones(num_levels)))
    tiny = jnp.finfo(probs.dtype).tiny
    below = jnp.cumsum(probs)[:-1] + tiny
    above = jnp.cumsum(probs[::-1])[::-1][1:] + tiny
    cuts = jnp.log(below) - jnp.log(above)

    def of_output(out: Array) -> dist.Distribution:
        distance = cuts - out[..., :1]
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - e^(a - b))
        first = jax.nn.log_sigmoid(distance[..., :1])
        last = jax.nn.log_sigmoid(-distance[..., -1:])
        gap = jnp.maximum(jnp.diff(cuts), tiny)
        middle = (
            jax.nn.log_sigmoid(distance[..., 1:])
            + jax.nn.log_sigmoid(-distance[..., :-1])
            + jnp.log(-jnp.expm1(-gap))
        )
        return dist.Categorical(logits=jnp.concatenate([first, middle, last], -1))

    return of_output


class Ordered(_Direct):
    """A few numbers whose order matters, not their distance, such as ratings."""

    name = "ordered"
    mean_summary = "probabilities"
    may_be_heteroscedastic = False
    num_outputs = 1

    def __init__(
        self,
        y: np.ndarray,
        weight: np.ndarray | None,
        noise: NoiseSettings,
        usual: methods.Regression,
    ) -> None:
        self.values, codes = np.unique(y, return_inverse=True)
        counts = np.bincount(codes, weight)
        self._log_shares = np.log(counts / counts.sum())

    @classmethod
    def shortage(cls, y: np.ndarray) -> str | None:
        number = len(np.unique(y))
        if 2 <= number <= MAX_LEVELS:
            return None
        return f"{number} different targets, not 2 to {MAX_LEVELS}"

    def likelihood(self) -> Callable:
        return partial(ordered_likelihood, len(self.values))

    def observed(self, y: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.values, y)

    def constant_log_density(self, y: np.ndarray) -> np.ndarray:
        return self._log_shares[self.observed(y)]

    def _options(self) -> tuple[np.ndarray, ...]:
        return (self.values,)

    def _probs(self, ask: Ask) -> np.ndarray:
        (probs,) = ask("probabilities")
        return probs / probs.sum(axis=-1, keepdims=True)

    def quantiles(self, ask: Ask, levels: np.ndarray, factor: float) -> np.ndarray:
        below = np.cumsum(self._probs(ask), axis=1)[:, :-1]
        codes = (below < levels[:, None, None]).sum(axis=2)
        return self.values[codes]

    def cdf(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        probs = self._probs(ask)
        return np.sum(probs * (self.values <= y[:, None]), axis=1)

    def crps(self, ask: Ask, y: np.ndarray, factor: float) -> np.ndarray:
        below = np.cumsum(self._probs(ask), axis=1)[:, :-1]
        gaps = np.diff(self.values)
        before = np.clip(y[:, None] - self.values[:-1], 0, gaps)
        within = before * below**2 + (gaps - before) * (1 - below) ** 2
        near = np.clip(y, self.values[0], self.values[-1])
        return within.sum(axis=1) + np.abs(y - near)

    def log_density(self, ask: Ask, y: np.ndarray) -> Callable[[float], np.ndarray]:
        probs = np.sum(self._probs(ask) * (self.values == y[:, None]), axis=1)
        with np.errstate(divide="ignore"):
            log_probs = np.log(probs)
        return lambda factor: log_probs

    def noisy(self, components: tuple, generator: np.random.Generator) -> np.ndarray:
        (probs,) = components
        uniform = generator.random((*probs.shape[:2], 1))
        return self.values[(uniform > np.cumsum(probs, axis=2)[..., :-1]).sum(axis=2)]

    def distribution(self, ask: Ask, factor: float) -> dist.Distribution:
        levels = Levels(self.values, self._probs(ask))
        return levels.to_event(len(levels.batch_shape) - 1)

    def ends(self, low: np.ndarray, high: np.ndarray) -> tuple:
        slack = ROUNDING * np.abs(self.values).max()
        first = np.searchsorted(self.values, low - slack)
        last = np.searchsorted(self.values, high + slack, "right") - 1
        largest = len(self.values) - 1
        # between two levels there is none: the interval is one of them
        first = np.minimum(first, largest)
        return self.values[first], self.values[np.maximum(last, first)]


class Levels(dist.Distribution):
    """Probabilities of numbers: a categorical distribution over its ``values``.

    :param values: the numbers (K,), increasing. :param probs: (..., K).

    >>> fn = Levels(np.array([1.0, 3.0]), np.array([[0.25, 0.75]]))
    >>> float(fn.mean[0]), float(fn.cdf(jnp.array([2.0]))[0])
    (2.5, 0.25)
    """

    arg_constraints: ClassVar = {"probs": dist.constraints.simplex}
    support = dist.constraints.real
    pytree_data_fields = ("values", "probs")

    def __init__(self, values: Any, probs: Any, *, validate_args: Any = None) -> None:
        self.values, self.probs = jnp.asarray(values), jnp.asarray(probs)
        batch_shape = jnp.shape(probs)[:-1]
        super().__init__(batch_shape, (), validate_args=validate_args)

    def sample(self, key: Array, sample_shape: tuple[int, ...] = ()) -> Array:
        codes = dist.Categorical(probs=self.probs).sample(key, sample_shape)
        return self.values[codes]

    def log_prob(self, value: Array) -> Array:
        is_level = jnp.asarray(value)[..., None] == self.values
        return jnp.log(jnp.sum(is_level * self.probs, axis=-1))

    def cdf(self, value: Array) -> Array:
        below = self.values <= jnp.asarray(value)[..., None]
        return jnp.sum(below * self.probs, axis=-1)

    @property
    def mean(self) -> Array:
        return self.probs @ self.values

    @property
    def variance(self) -> Array:
        return self.probs @ self.values**2 - self.mean**2


# One row for each kind.
TARGETS: Mapping[str, type[Any]] = {
    target.name: target
    for target in (Continuous, Positive, Bounded, Counts, Zeros, Ordered)
}


def check_target(
    call: str, name: str, y: np.ndarray, noise: NoiseSettings, method: str
) -> None:
    """Refuse a kind that targets, method or settings do not allow."""
    kind = TARGETS[name]
    if name == "bounded" and noise.bounds is None:
        instead = "Pass the bounds of the targets, e.g. `bounds=(0, 1)`."
        raise argument_error(call, "bounds", None, instead)
    if noise.bounds is not None and name != "bounded":
        instead = 'Leave it out, or use `target="bounded"`.'
        raise argument_error(call, "bounds", noise.bounds, instead)
    if not kind.is_normal and method not in methods.ANY_LIKELIHOOD:
        instead = f'Use another `method` for "{name}": '
        instead += f"{', '.join(methods.ANY_LIKELIHOOD)}."
        raise argument_error(call, "method", method, instead)
    if noise.heavy_tails and not kind.may_have_heavy_tails:
        instead = f'Leave it out: "{name}" has its own tails.'
        raise argument_error(call, "heavy_tails", True, instead)
    if noise.heteroscedastic and not kind.may_be_heteroscedastic:
        instead = f'Leave it out: "{name}" has no scale.'
        raise argument_error(call, "heteroscedastic", True, instead)
    if y.ndim > 1 and not kind.several:
        instead = f'Pass one column for `target="{name}"`.'
        raise argument_error(f"{call}.fit", "y", y, instead)
    misfit = kind.misfit(y, noise.bounds) or kind.shortage(y)
    if misfit is not None:
        instead = f'Another `target` than "{name}" may have them.'
        raise argument_error(f"{call}.fit", "y", misfit, instead)
