r"""Likelihoods in a Gauss-Newton approximation: natural outputs f, and a root of their
Fisher information.

============  =======================  ==========================================
distribution  outputs f                Fisher information
============  =======================  ==========================================
Normal        loc, log scale           :math:`\mathrm{diag}(\sigma^{-2}, 2)`
Bernoulli     logits                   :math:`p (1 - p)`
Categorical   logits                   :math:`\mathrm{diag}(p) - p p^\top`
Poisson       log rate                 the rate
============  =======================  ==========================================

The Fisher information does not depend on how a model writes its parameters, so that
``probs`` and ``logits`` give the same approximation; for logits, rates and a fixed
scale it is the Hessian of -log p in f.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import logsumexp

from numpyro_bnn._checks import argument_error
from numpyro_bnn._distributions import (
    affine_normal,
    is_affine_normal,
    is_factor,
    unmasked_elements,
    unwrapped,
)

CALL = "guides.AutoLaplace"
BERNOULLI = (dist.BernoulliLogits, dist.BernoulliProbs)
CATEGORICAL = (dist.CategoricalLogits, dist.CategoricalProbs)
KINDS = {"bernoulli": BERNOULLI, "categorical": CATEGORICAL, "poisson": (dist.Poisson,)}

Site = dict[str, Any]


def kind_of(site: Site) -> str:
    """Row of the table; refuses all other likelihoods."""
    fn = site["fn"]
    if is_affine_normal(fn, masked=True):
        return "normal"
    base = unwrapped(fn, masked=True)
    for kind, classes in KINDS.items():
        if isinstance(base, classes):
            return kind
    noun = "factor" if is_factor(fn) else f"{type(base).__name__} likelihood"
    got = f"the observed site {site['name']!r} with a {noun}"
    instead = (
        "It knows Normal, Categorical, Bernoulli and Poisson; "
        "`AutoLaplaceApproximation` of NumPyro takes others."
    )
    raise argument_error(CALL, "model", got, instead)


def natural(site: Site) -> dict[str, jax.Array]:
    """The natural outputs of a site by name, each shaped like ``fn.shape()``, with an
    axis of K for classes.
    """
    kind, fn = kind_of(site), site["fn"]
    if kind == "normal":
        loc, scale = affine_normal(fn, masked=True)  # type: ignore[misc]
        return {"loc": loc, "log_scale": jnp.log(jnp.abs(scale))}
    base = unwrapped(fn, masked=True)
    if kind == "poisson":
        return {"log_rate": jnp.broadcast_to(jnp.log(base.rate), fn.shape())}
    logits = base.logits
    if kind == "categorical":
        return {"logits": jnp.broadcast_to(logits, (*fn.shape(), logits.shape[-1]))}
    return {"logits": jnp.broadcast_to(logits, fn.shape())}


class ObservedRows(NamedTuple):
    """An observed site with its axis of rows in front, its elements flat.

    :param kind: a row of the table.
    :param shape: shape of the site, rows first.
    :param outputs: (B, M) by name, or (B, M, K) for classes.
    :param weight: (B, M) powers of the densities: 0 where masked.
    """

    kind: str
    shape: tuple[int, ...]
    outputs: Mapping[str, jax.Array]
    weight: jax.Array

    def flat(self, used: tuple[str, ...]) -> jax.Array:
        """(B, E): the used outputs, joined."""
        outputs = [self.outputs[name].reshape(self.shape[0], -1) for name in used]
        return jnp.concatenate(outputs, axis=1)

    def roots(self, used: tuple[str, ...]) -> jax.Array:
        """(B, D, E) with sum over d of r_d r_d^T equal to the Fisher information of a
        row.
        """
        root = jnp.sqrt(self.weight)
        if self.kind == "categorical":
            p = jax.nn.softmax(self.outputs["logits"])
            factors = (
                root[..., None, None]
                * jnp.sqrt(p)[..., None]
                * (jnp.eye(p.shape[-1]) - p[..., None, :])
            )
            blocks = jnp.einsum("bmde,mn->bmdne", factors, jnp.eye(p.shape[1]))
            size = p.shape[1] * p.shape[2]
            return blocks.reshape(self.shape[0], size, size)
        diagonal = [root * self._information(name) for name in used]
        return jax.vmap(jnp.diag)(jnp.concatenate(diagonal, axis=1))

    def _information(self, name: str) -> jax.Array:
        """Square root of the Fisher information of an elementwise output."""
        f = self.outputs[name]
        if self.kind == "normal":
            if name == "loc":
                return jnp.exp(-self.outputs["log_scale"])
            return jnp.full(f.shape, 2.0**0.5)
        if self.kind == "poisson":
            return jnp.exp(f / 2)
        return jnp.sqrt(jax.nn.sigmoid(f) * jax.nn.sigmoid(-f))


def observation(site: Site, axis: int | None) -> ObservedRows:
    """Read a site; ``axis`` of ``fn.shape()`` indexes the rows (``None``: it is one
    row).
    """
    fn = site["fn"]
    shape = fn.shape()
    scale = 1.0 if site["scale"] is None else site["scale"]
    scale = jnp.broadcast_to(scale, fn.batch_shape).reshape(
        fn.batch_shape + (1,) * fn.event_dim
    )
    weight = scale * unmasked_elements(fn)

    def rows_first(value: jax.Array, tail: tuple[int, ...] = ()) -> jax.Array:
        value = value[None] if axis is None else jnp.moveaxis(value, axis, 0)
        return value.reshape(
            (value.shape[0], prod(value.shape[1 : value.ndim - len(tail)]), *tail)
        )

    outputs = {}
    for name, value in natural(site).items():
        outputs[name] = rows_first(value, value.shape[len(shape) :])
    row_shape = (1, *shape)
    if axis is not None:
        row_shape = (shape[axis], *shape[:axis], *shape[axis + 1 :])
    return ObservedRows(kind_of(site), row_shape, outputs, rows_first(weight))


def predicted(
    kind: str, f: Mapping[str, jax.Array], v: Mapping[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    r"""Mean and variance of an observation whose outputs have means f and variances v.

    Classes by the probit approximation :math:`\mathrm{softmax}(f / \sqrt{1 + \pi v /
    8})`, all others in closed form (a log scale or log rate that is Gaussian makes
    scale and rate log-normal).
    """
    if kind == "normal":
        return f["loc"], v["loc"] + jnp.exp(2 * f["log_scale"] + 2 * v["log_scale"])
    if kind == "poisson":
        rate = jnp.exp(f["log_rate"] + v["log_rate"] / 2)
        return rate, rate + rate**2 * jnp.expm1(v["log_rate"])
    logits = probit(f["logits"], v["logits"])
    p = jax.nn.softmax(logits) if kind == "categorical" else jax.nn.sigmoid(logits)
    return p, p * (1 - p)


def probit(logits: jax.Array, variance: jax.Array) -> jax.Array:
    """Logits whose probabilities are about the mean of those of Gaussian logits."""
    return logits / jnp.sqrt(1 + jnp.pi / 8 * variance)


def log_density(kind: str, f: Mapping[str, jax.Array], value: jax.Array) -> jax.Array:
    """log p(value | f), elementwise."""
    if kind == "normal":
        return dist.Normal(f["loc"], jnp.exp(f["log_scale"])).log_prob(value)
    if kind == "poisson":
        return dist.Poisson(jnp.exp(f["log_rate"])).log_prob(value)
    if kind == "bernoulli":
        return dist.BernoulliLogits(f["logits"]).log_prob(value)
    logits = f["logits"] - logsumexp(f["logits"], axis=-1, keepdims=True)
    labels = jnp.asarray(value, int)[..., None]
    return jnp.take_along_axis(
        logits, jnp.broadcast_to(labels, (*logits.shape[:-1], 1)), axis=-1
    )[..., 0]
