"""Models that tests share: small, of one shape each, with data and, where there is one,
the exact answer.

A test takes its model from here unless the model is what the test is about: programs of
equal models are compiled once. Data are NumPy arrays; ``entry.args`` gives them as JAX
arrays.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.contrib.module import random_flax_module

from numpyro_bnn import models, nn, priors, random_network

N, BATCH = 24, 6
_RANDOM = np.random.default_rng(7)
X = _RANDOM.normal(size=(N, 2)).astype(np.float32)
WEIGHTS = np.array([1.0, -0.5], np.float32)
NOISE = 0.5
Y = (X @ WEIGHTS + NOISE * _RANDOM.normal(size=N)).astype(np.float32)
LABELS = (X @ WEIGHTS + 0.5 * _RANDOM.logistic(size=N) > 0).astype(np.int32)
CLASSES = (LABELS + (X[:, 1] > 0.5)).astype(np.int32)  # 0, 1, 2
COUNTS = _RANDOM.poisson(np.exp(X @ WEIGHTS * 0.5)).astype(np.int32)
GROUP = np.arange(N, dtype=np.int32) % 4
KNOWN = np.arange(N) % 3 > 0  # rows that the masked model observes
NEW_X = _RANDOM.normal(size=(5, 2)).astype(np.float32)

NET = nn.MLP([3, 1], "tanh")


class Moments(NamedTuple):
    """Exact posterior means and standard deviations by site, and the log evidence."""

    mean: Mapping[str, np.ndarray]
    sd: Mapping[str, np.ndarray]
    log_evidence: float


class Entry:
    """A model, its data, and its exact posterior if there is one.

    :param model: of the data, the last of which is the target and may be left out. All
        but ``flax`` and ``random_inside`` take ``batch_size``.
    :param data: NumPy arrays, in the order of the model's arguments.
    :param shapes: latent site -> shape, as the posterior has it.
    :param exact: makes the exact answer, in NumPy, from formulas of its own.
    :param new: arguments at which to predict; without the target.
    """

    def __init__(
        self,
        model: Callable,
        data: tuple[np.ndarray, ...],
        shapes: Mapping[str, tuple[int, ...]],
        exact: Callable[[], Moments] | None = None,
        new: tuple[np.ndarray, ...] = (NEW_X,),
    ) -> None:
        self.model, self.data, self.shapes, self.new = model, data, shapes, new
        self._exact = exact

    @property
    def args(self) -> tuple[jax.Array, ...]:
        """The data as JAX arrays."""
        return tuple(map(jnp.asarray, self.data))

    @property
    def has_exact(self) -> bool:
        """Whether there is an exact answer."""
        return self._exact is not None

    @cached_property
    def exact(self) -> Moments:
        """The exact answer; an error if there is none."""
        assert self._exact is not None, "this model has no exact answer"
        return self._exact()


def _rows(values, indices):
    return None if values is None else values[indices]


def _weights():
    return numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))


# -- exact answers ---------------------------------------------------------------------


def _gaussian(
    design: np.ndarray, y: np.ndarray, noise: float, prior_sd: np.ndarray
) -> tuple[Any, Any, float]:
    """Mean, covariance and log evidence of a line with normal prior and noise."""
    precision = design.T @ design / noise**2 + np.diag(prior_sd**-2.0)
    covariance = np.linalg.inv(precision)
    mean = covariance @ design.T @ y / noise**2
    marginal = design @ np.diag(prior_sd**2) @ design.T + noise**2 * np.eye(len(y))
    _, log_det = np.linalg.slogdet(2 * np.pi * marginal)
    return mean, covariance, float(-0.5 * (log_det + y @ np.linalg.solve(marginal, y)))


def _moments_of_line(rows: np.ndarray) -> Moments:
    x, y = X[rows].astype(float), Y[rows].astype(float)
    mean, covariance, log_evidence = _gaussian(x, y, NOISE, np.ones(2))
    return Moments({"w": mean}, {"w": np.sqrt(np.diag(covariance))}, log_evidence)


def _on_a_grid(log_likelihood: Callable[[np.ndarray], np.ndarray]) -> Moments:
    """Moments of w ~ N(0, 1) in two dimensions by quadrature; takes weights (G, 2)."""
    nodes, weights = np.polynomial.legendre.leggauss(160)
    nodes, log_weights = 6 * nodes, np.log(6 * weights)
    w = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
    log_volume = (log_weights[:, None] + log_weights[None]).ravel()
    log_joint = (
        log_likelihood(w) - 0.5 * (w**2).sum(-1) - np.log(2 * np.pi) + log_volume
    )
    log_evidence = np.logaddexp.reduce(log_joint)
    mass = np.exp(log_joint - log_evidence)
    mean = mass @ w
    return Moments(
        {"w": mean}, {"w": np.sqrt(mass @ (w - mean) ** 2)}, float(log_evidence)
    )


def _log_bernoulli(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return -np.logaddexp(0, np.where(labels == 1, -logits, logits)).sum(-1)


def _log_poisson(log_rates: np.ndarray, counts: np.ndarray) -> np.ndarray:
    log_factorials = np.array(
        [np.log(np.arange(1, count + 1)).sum() for count in counts]
    )
    return (counts * log_rates - np.exp(log_rates) - log_factorials).sum(-1)


def _log_normal(y: np.ndarray, mean: np.ndarray) -> np.ndarray:
    return (-0.5 * ((y - mean) / NOISE) ** 2 - np.log(NOISE * np.sqrt(2 * np.pi))).sum(
        -1
    )


def _moments_of_groups() -> Moments:
    design = np.concatenate([X, np.eye(4)[GROUP]], 1).astype(float)
    mean, covariance, log_evidence = _gaussian(
        design, Y.astype(float), NOISE, np.array([1.0, 1.0, *[0.7] * 4])
    )
    sd = np.sqrt(np.diag(covariance))
    return Moments(
        {"w": mean[:2], "effect": mean[2:]},
        {"w": sd[:2], "effect": sd[2:]},
        log_evidence,
    )


# -- models ----------------------------------------------------------------------------


def line(x, y=None, batch_size=None):
    """y ~ N(x w, 0.5): the posterior is normal."""
    w = _weights()
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, NOISE), obs=_rows(y, i))


def logistic(x, y=None, batch_size=None):
    """Two classes, logits x w."""
    w = _weights()
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Bernoulli(logits=x[i] @ w), obs=_rows(y, i))


def softmax(x, y=None, batch_size=None):
    """Three classes, logits x w."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Categorical(logits=x[i] @ w), obs=_rows(y, i))


def counts(x, y=None, batch_size=None):
    """Poisson counts with log rate x w."""
    w = _weights()
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Poisson(jnp.exp(x[i] @ w)), obs=_rows(y, i))


def spread(x, y=None, batch_size=None):
    """A line with a positive noise site, and deterministic sites of rows."""
    w = _weights()
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.deterministic("precision", sigma**-2)
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        mean = numpyro.deterministic("mean", x[i] @ w)
        numpyro.sample("y", dist.Normal(mean, sigma), obs=_rows(y, i))


def network(x, y=None, batch_size=None):
    """A small network with known noise."""
    net = random_network("net", NET, (2,), priors.Normal())
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], NOISE), obs=_rows(y, i))


noisy_network = models.regression(
    nn.MLP([3, 2], "tanh"), priors.Normal(), heteroscedastic=True
)
hierarchical = models.regression(NET, priors.Hierarchical())


def groups(x, group, y=None, batch_size=None):
    """A line with an effect of each of four groups: the posterior is normal."""
    w = _weights()
    with numpyro.plate("groups", 4):
        effect = numpyro.sample("effect", dist.Normal(0.0, 0.7))
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(x[i] @ w + effect[group[i]], NOISE), obs=_rows(y, i)
        )


def masked(x, known, y=None, batch_size=None):
    """The line, observed only where ``known``."""
    w = _weights()
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample(
            "y", dist.Normal(x[i] @ w, NOISE).mask(known[i]), obs=_rows(y, i)
        )


def several(x, label=None, y=None, batch_size=None):
    """A measurement and a label of each row, from the same weights."""
    w = _weights()
    with numpyro.plate("data", x.shape[0], subsample_size=batch_size) as i:
        numpyro.sample("label", dist.Bernoulli(logits=x[i] @ w), obs=_rows(label, i))
        numpyro.sample("y", dist.Normal(x[i] @ w, NOISE), obs=_rows(y, i))


def random_inside(x, y=None):
    """A line whose inputs have noise of the model's own, drawn anew in each run."""
    w = _weights()
    blur = 0.1 * jax.random.normal(numpyro.prng_key(), x.shape)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal((x + blur) @ w, NOISE), obs=y)


def flax(x, y=None):
    """The small network as a Flax module."""
    import flax.linen as linen

    module = linen.Sequential([linen.Dense(3), linen.tanh, linen.Dense(1)])
    net = random_flax_module("net", module, priors.Normal(), input_shape=(1, 2))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Normal(net(x)[..., 0], NOISE), obs=y)


_NET_SHAPES = {f"net/{name}": shape for name, shape in NET.param_shapes((2,)).items()}
_TWO_HEADS = {
    f"net/{name}": shape
    for name, shape in nn.MLP([3, 2], "tanh").param_shapes((2,)).items()
}
_W = {"w": (2,)}

ZOO: dict[str, Entry] = {
    "line": Entry(line, (X, Y), _W, lambda: _moments_of_line(np.ones(N, bool))),
    "logistic": Entry(
        logistic,
        (X, LABELS),
        _W,
        lambda: _on_a_grid(lambda w: _log_bernoulli(w @ X.T, LABELS)),
    ),
    "softmax": Entry(softmax, (X, CLASSES), {"w": (2, 3)}),
    "counts": Entry(
        counts,
        (X, COUNTS),
        _W,
        lambda: _on_a_grid(lambda w: _log_poisson(w @ X.T, COUNTS)),
    ),
    "spread": Entry(spread, (X, Y), {**_W, "sigma": ()}),
    "network": Entry(network, (X, Y), _NET_SHAPES),
    "noisy network": Entry(noisy_network, (X, Y), _TWO_HEADS),
    "hierarchical": Entry(
        hierarchical,
        (X, Y),
        {
            **{
                (f"{name}_base" if "kernel" in name else name): shape
                for name, shape in _NET_SHAPES.items()
            },
            "net/Dense_0.kernel_scale": (),
            "net/Dense_1.kernel_scale": (),
            "sigma": (),
        },
    ),
    "groups": Entry(
        groups,
        (X, GROUP, Y),
        {**_W, "effect": (4,)},
        _moments_of_groups,
        (NEW_X, GROUP[:5]),
    ),
    "masked": Entry(
        masked,
        (X, KNOWN, Y),
        _W,
        lambda: _moments_of_line(KNOWN),
        (NEW_X, np.ones(5, bool)),
    ),
    "several": Entry(
        several,
        (X, LABELS, Y),
        _W,
        lambda: _on_a_grid(
            lambda w: _log_bernoulli(w @ X.T, LABELS) + _log_normal(Y, w @ X.T)
        ),
    ),
    "random inside": Entry(random_inside, (X, Y), _W),
    "flax": Entry(
        flax,
        (X, Y),
        {
            "net/layers_0.bias": (3,),
            "net/layers_0.kernel": (2, 3),
            "net/layers_2.bias": (1,),
            "net/layers_2.kernel": (3, 1),
        },
    ),
}
