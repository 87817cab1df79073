"""How each kind of layer changes the covariances of its units: one rule per class of
specification.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from numpyro_bnn import nn
from numpyro_bnn._checks import argument_error
from numpyro_bnn._types import Scalar
from numpyro_bnn.infinite.activations import Dual, dual, nodes
from numpyro_bnn.infinite.prior_moments import SiteMoments
from numpyro_bnn.nn import Layer

GAIN_NODES = 24


class Inputs(NamedTuple):
    """Data points before the first weights: fixed numbers, (N1, ...) and (N2, ...)."""

    x1: Array
    x2: Array


class Covariance(NamedTuple):
    """Second moments of one of infinitely many independent units, at all pairs of data
    points.
    """

    nngp: Array  # E f(x1) f(x2), (N1, N2)
    # sum over standardized parameters of the products of their derivatives, (N1, N2)
    ntk: Array | None
    own1: Array  # ``nngp`` of every first data point with itself, (N1,)
    own2: Array
    mean1: Array  # E f(x1), (N1,)
    mean2: Array


class ByGain(NamedTuple):
    """Second moments given each of G values of a random number that all data points
    share: the gain of a unit.
    """

    weights: Array  # probabilities of the values, (G,)
    k: Covariance  # with a leading axis of G


class Units(NamedTuple):
    """Infinitely many units of a layer."""

    k: Covariance
    # whether they are normal, as after weights; activations need it
    gaussian: bool = True
    # if they are normal given a random number, moments for each of its values
    by_gain: ByGain | None = None


State = Inputs | Units


class Context(NamedTuple):
    """Where a layer is in the network, and the prior moments of the parameters by
    dotted path.
    """

    sites: Mapping[str, SiteMoments]
    normal: frozenset[str]  # paths of parameters that are independent and normal
    ntk: bool  # whether the tangent kernel is wanted
    path: str = ""

    def child(self, name: str) -> "Context":
        return self._replace(path=self.full(name))

    def full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def weight(self, name: str = "kernel") -> Any:
        """Variance of a parameter, times the fan-in for a kernel."""
        return self.sites[self.full(name)].variance

    def bias(self, used: bool) -> Any:
        """Variance of the biases; they must be normal, because nothing averages over
        them.
        """
        if not used:
            return 0.0
        self.need_normal("bias", "Biases enter each unit as they are")
        return self.common("bias")

    def common(self, name: str) -> Any:
        """A variance shared by all units; if it differs by hidden input, its mean (by
        the law of large numbers).
        """
        value = self.weight(name)
        if jnp.ndim(value) and (jnp.ndim(value) == 1 or value.shape[-1] != 1):
            came = f"different variances within {self.full(name)!r}"
            instead = (
                "In the limit all units of a layer are alike: variances may differ by "
                "input only."
            )
            raise argument_error("infinite", "prior", came, instead)
        return jnp.mean(value)

    def need_normal(self, name: str, reason: str) -> None:
        if self.full(name) not in self.normal:
            came = f"weights of {self.full(name)!r} that are not normal"
            raise argument_error(
                "infinite",
                "prior",
                came,
                f"{reason}: only normal ones give a Gaussian process.",
            )


Rule = Callable[[Any, Context, State], State]
RULES: dict[type[Layer], Rule] = {}


def rule(kind: type[Layer]) -> Callable[[Rule], Rule]:
    """Register the rule of a kind of layer."""
    return lambda fn: RULES.setdefault(kind, fn)


def propagate(layer: Layer, context: Context, state: State) -> State:
    """Apply the rule of a layer, or refuse it; layers without parameters act on inputs
    as usual.
    """
    for kind in type(layer).__mro__:
        if kind in RULES:
            return RULES[kind](layer, context, state)
    if isinstance(state, Inputs) and not layer.param_shapes(state.x1.shape[1:]):
        return _on_inputs(layer, context, state)
    raise _unsupported(
        layer,
        context,
        "Layers with a limit: " + ", ".join(k.__name__ for k in RULES) + ".",
    )


def contains(layer: Layer, kind: type[Layer]) -> bool:
    """Whether a layer, or one inside it, is of a kind."""
    return isinstance(layer, kind) or any(
        contains(child, kind) for _, child in layer.children()
    )


def _on_inputs(layer: Layer, context: Context, state: Inputs) -> Inputs:
    no_weights = nn.ForwardContext({}, context.path)
    return Inputs(
        layer.forward(no_weights, state.x1), layer.forward(no_weights, state.x2)
    )


def _unsupported(layer: Layer, context: Context, reason: str) -> Exception:
    """The error for a layer that has no Gaussian limit."""
    place = type(layer).__name__
    if context.path:
        place += f" at {context.path!r}"
    return argument_error("infinite", "net", place, reason)


@rule(nn.Dense)
def dense(layer: nn.Dense, context: Context, state: State) -> Units:
    """K = s^2 K_in + b^2, and for the tangent kernel K + s^2 T_in."""
    if isinstance(state, Inputs):
        return _first_dense(layer, context, state)
    k, weight, bias = state.k, context.common("kernel"), context.bias(layer.use_bias)
    nngp = weight * k.nngp + bias
    ntk = None if k.ntk is None else nngp + weight * k.ntk
    return _centered(nngp, ntk, weight * k.own1 + bias, weight * k.own2 + bias)


def _first_dense(layer: nn.Dense, context: Context, state: Inputs) -> Units:
    """s^2 x1 . x2 / D + b^2; the variances may differ by input."""
    x1, x2 = state
    context.need_normal("kernel", "The number of inputs is finite")
    weight, bias = context.weight("kernel"), context.bias(layer.use_bias)
    if jnp.ndim(weight):
        context.common("kernel")  # refuses variances that differ by unit
        weight = weight[:, 0][None]
    scaled1, scaled2 = x1 * weight / x1.shape[1], x2 * weight / x1.shape[1]
    nngp = jnp.matmul(scaled1, x2.T, precision="highest") + bias
    own1 = jnp.sum(scaled1 * x1, axis=1) + bias
    own2 = jnp.sum(scaled2 * x2, axis=1) + bias
    return _centered(nngp, nngp if context.ntk else None, own1, own2)


def _centered(nngp: Array, ntk: Array | None, own1: Array, own2: Array) -> Units:
    """Sums over many weights of mean 0: normal, whatever is summed."""
    return Units(
        Covariance(nngp, ntk, own1, own2, jnp.zeros_like(own1), jnp.zeros_like(own2))
    )


@rule(nn.Activation)
def activation(layer: nn.Activation, context: Context, state: State) -> State:
    """E f(x) f(y), and T E f'(x) f'(y) for the tangent kernel."""
    if isinstance(state, Inputs):
        return _on_inputs(layer, context, state)
    if layer.name == "identity":
        return state
    forms = dual(layer)
    if state.gaussian:
        return Units(_activated(forms, state.k), gaussian=False)
    if state.by_gain is None:
        reason = (
            "An activation needs normal inputs: put it after Dense. In a residual "
            "network write blocks `Residual(Sequential(['relu', Dense(n), ...]))`, "
            "without activation between them."
        )
        raise _unsupported(layer, context, reason)
    covariances = jax.vmap(lambda k: _activated(forms, k))(state.by_gain.k)
    return Units(_average(ByGain(state.by_gain.weights, covariances)), gaussian=False)


def _activated(forms: Dual, k: Covariance) -> Covariance:
    """Moments of f of normal units."""
    q1, q2 = k.own1, k.own2
    cross = (
        jnp.broadcast_to(q1[:, None], k.nngp.shape),
        jnp.broadcast_to(q2[None, :], k.nngp.shape),
    )
    return Covariance(
        nngp=forms.value(k.nngp, *cross),
        ntk=None if k.ntk is None else k.ntk * forms.slope(k.nngp, *cross),
        own1=forms.value(q1, q1, q1),
        own2=forms.value(q2, q2, q2),
        mean1=forms.mean(q1),
        mean2=forms.mean(q2),
    )


def _average(by_gain: ByGain) -> Covariance:
    """Moments averaged over the random number that data points share."""
    return jax.tree.map(
        lambda moment: jnp.tensordot(by_gain.weights, moment, 1), by_gain.k
    )


@rule(nn.LayerNorm)
def layer_norm(layer: nn.LayerNorm, context: Context, state: State) -> State:
    """Covariance over the sds of both data points; then gains 1 + g v and biases b u,
    independent for each unit.
    """
    if isinstance(state, Inputs):
        if layer.use_scale or layer.use_bias:
            reason = (
                "On inputs write `LayerNorm(use_scale=False, use_bias=False)`: few "
                "random gains have no limit."
            )
            raise _unsupported(layer, context, reason)
        return _on_inputs(layer, context, state)
    unit, bias = _standardized(state.k), context.bias(layer.use_bias)
    if not layer.use_scale:
        return Units(_shifted(unit, 1.0, 0.0, bias), state.gaussian)
    context.need_normal("scale", "Gains enter each unit as they are")
    mean, spread = context.sites[context.full("scale")].mean, context.common("scale")
    x, w = nodes(unit.own1.dtype, GAIN_NODES)
    gains = mean + jnp.sqrt(spread) * x
    moments = jax.vmap(lambda gain: _shifted(unit, gain, spread, bias))(gains)
    by_gain = ByGain(w, moments)
    return Units(_average(by_gain), False, by_gain if state.gaussian else None)


def _standardized(k: Covariance) -> Covariance:
    sd1, sd2 = jnp.sqrt(k.own1 - k.mean1**2), jnp.sqrt(k.own2 - k.mean2**2)
    sds = sd1[:, None] * sd2[None, :]
    return Covariance(
        (k.nngp - k.mean1[:, None] * k.mean2[None, :]) / sds,
        None if k.ntk is None else k.ntk / sds,
        (k.own1 - k.mean1 * k.mean1) / (sd1 * sd1),
        (k.own2 - k.mean2 * k.mean2) / (sd2 * sd2),
        jnp.zeros_like(k.mean1),
        jnp.zeros_like(k.mean2),
    )


def _shifted(k: Covariance, gain: Scalar, spread: Scalar, bias: Scalar) -> Covariance:
    """Units times a given gain, plus random biases; the tangent kernel counts both
    parameters.
    """
    ntk = None if k.ntk is None else gain**2 * k.ntk + spread * k.nngp + bias
    return k._replace(
        nngp=gain**2 * k.nngp + bias,
        ntk=ntk,
        own1=gain**2 * k.own1 + bias,
        own2=gain**2 * k.own2 + bias,
    )


@rule(nn.BatchNorm)
def batch_norm(layer: nn.BatchNorm, context: Context, state: State) -> State:
    """Statistics of a batch couple all its data points."""
    raise _unsupported(
        layer,
        context,
        "Batch statistics have no kernel of two data points: use `LayerNorm`.",
    )


@rule(nn.Flatten)
def flatten(layer: nn.Flatten, context: Context, state: State) -> State:
    """No operation: units already have one axis."""
    return _on_inputs(layer, context, state) if isinstance(state, Inputs) else state


@rule(nn.Sequential)
def sequential(layer: nn.Sequential, context: Context, state: State) -> State:
    """Apply the layers in order."""
    for name, child in layer.children():
        state = propagate(child, context.child(name), state)
    return state


@rule(nn.Residual)
def residual(layer: nn.Residual, context: Context, state: State) -> State:
    """Branches with separate weights are independent: covariances add, and so do
    products of their means.
    """
    a = state
    if layer.shortcut is not None:
        a = propagate(layer.shortcut, context.child("shortcut"), state)
    b = propagate(layer.body, context.child("body"), state)
    if isinstance(a, Inputs) and isinstance(b, Inputs):
        return Inputs(a.x1 + b.x1, a.x2 + b.x2)
    if isinstance(a, Inputs) or isinstance(b, Inputs):
        reason = (
            "Inputs plus random units have no limit in the width: put a Dense layer "
            "before the block."
        )
        raise _unsupported(layer, context, reason)
    if not contains(layer, nn.Dense):
        raise _unsupported(
            layer,
            context,
            "A branch needs weights: otherwise it depends on the other branch.",
        )
    return Units(_sum(a.k, b.k), gaussian=a.gaussian and b.gaussian)


def _sum(a: Covariance, b: Covariance) -> Covariance:
    cross = a.mean1[:, None] * b.mean2[None, :] + b.mean1[:, None] * a.mean2[None, :]
    return Covariance(
        a.nngp + b.nngp + cross,
        None if a.ntk is None or b.ntk is None else a.ntk + b.ntk,
        a.own1 + b.own1 + (a.mean1 * b.mean1 + b.mean1 * a.mean1),
        a.own2 + b.own2 + (a.mean2 * b.mean2 + b.mean2 * a.mean2),
        a.mean1 + b.mean1,
        a.mean2 + b.mean2,
    )
