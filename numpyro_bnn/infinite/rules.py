"""What each kind of layer does to the covariances: one rule per class of specification."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_bnn._checks import argument_error
from numpyro_bnn.infinite.activations import Dual, dual
from numpyro_bnn.infinite.moments import Moments
from numpyro_bnn.infinite.quadrature import nodes
from numpyro_bnn.infinite.state import Covariance, Given, Inputs, State, Units, full, outer, variance, within
from numpyro_bnn.nn import (
    Activation,
    BatchNorm,
    Conv2d,
    Dense,
    ForwardContext,
    Layer,
    LayerNorm,
    Residual,
    Sequential,
)

__all__ = ["RULES", "Context", "propagate", "rule", "unsupported"]

GAIN_NODES = 24


class Context(NamedTuple):
    """Where a layer sits, and what the prior gives to the parameters.

    :param sites: moments by dotted path.
    :param normal: paths of parameters that are independent and normal.
    :param pixels: whether covariances of different pixels are needed.
    :param ntk: whether the tangent kernel is wanted.
    :param path: of the layer.
    """

    sites: Mapping[str, Moments]
    normal: frozenset[str]
    pixels: bool
    ntk: bool
    path: str = ""

    def child(self, name: str) -> "Context":
        return self._replace(path=self.full(name))

    def full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def weight(self, name: str = "kernel") -> Any:
        """Variance of a parameter, times the fan-in for a kernel."""
        return self.sites[self.full(name)].variance

    def bias(self, used: bool) -> Any:
        """Variance of the biases; they must be normal, because nothing averages over them."""
        if not used:
            return 0.0
        self.need_normal("bias", "Biases enter each unit as they are")
        return self.common("bias")

    def common(self, name: str) -> Any:
        """A variance that all units share; by the law of large numbers its mean where it differs by hidden input."""
        value = self.weight(name)
        if jnp.ndim(value) and (jnp.ndim(value) == 1 or value.shape[-1] != 1):
            came = f"different variances within {self.full(name)!r}"
            instead = "In the limit all units of a layer are alike: variances may differ by input only."
            raise argument_error("infinite", "prior", came, instead)
        return jnp.mean(value)

    def need_normal(self, name: str, why: str) -> None:
        if self.full(name) not in self.normal:
            came = f"weights of {self.full(name)!r} that are not normal"
            raise argument_error(
                "infinite", "prior", came, f"{why}: only normal ones give a Gaussian process."
            )


Rule = Callable[[Any, Context, State], State]
RULES: dict[type[Layer], Rule] = {}


def rule(*kinds: type[Layer]) -> Callable[[Rule], Rule]:
    """Register the rule of a kind of layer."""

    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, fn))
        return fn

    return register


def propagate(layer: Layer, context: Context, state: State) -> State:
    """Apply the rule of a layer; layers without parameters act on inputs as they always do.

    :raises ValueError: for a layer without a rule, or where the limit is not a Gaussian process.
    """
    kind = next((kind for kind in type(layer).__mro__ if kind in RULES), None)
    if kind is not None:
        return RULES[kind](layer, context, state)
    if isinstance(state, Inputs) and not layer.param_shapes(state.x1.shape[1:]):
        return on_inputs(layer, context, state)
    raise unsupported(layer, context, "Layers with a limit: " + ", ".join(k.__name__ for k in RULES) + ".")


def on_inputs(layer: Layer, context: Context, state: Inputs) -> Inputs:
    """A layer without parameters, before any weights."""
    return Inputs(*(layer.forward(ForwardContext({}, context.path), x) for x in state))


def unsupported(layer: Layer, context: Context, why: str) -> Exception:
    """The error for a layer that has no Gaussian limit."""
    place = f"{type(layer).__name__} at {context.path!r}" if context.path else type(layer).__name__
    return argument_error("infinite", "net", place, why)


# -- weights -----------------------------------------------------------------------------------------------


@rule(Dense)
def dense(layer: Dense, context: Context, state: State) -> Units:
    """K = s^2 K_in + b^2, and for the tangent kernel K + s^2 T_in."""
    if isinstance(state, Inputs):
        return first_dense(layer, context, state)
    return weighted(state.k, context.common("kernel"), context.bias(layer.use_bias))


def weighted(k: Covariance, weight: Any, bias: Any) -> Units:
    """Sums over units with fresh weights and biases, normal whatever the units are."""
    nngp = weight * k.nngp + bias
    ntk = None if k.ntk is None else nngp + weight * k.ntk
    zeros = jnp.zeros_like(k.mean1), jnp.zeros_like(k.mean2)
    return Units(Covariance(nngp, ntk, weight * k.own1 + bias, weight * k.own2 + bias, *zeros))


def first_dense(layer: Dense, context: Context, state: Inputs) -> Units:
    """s^2 x1 . x2 / D + b^2; the variances may differ by input."""
    context.need_normal("kernel", "The number of inputs is finite")
    weight, bias = context.weight("kernel"), context.bias(layer.use_bias)
    if jnp.ndim(weight):
        context.common("kernel")  # refuses variances that differ by unit
        weight = weight[:, 0][None]
    x1, x2 = state
    scaled1, scaled2 = x1 * weight / x1.shape[1], x2 * weight / x1.shape[1]
    nngp = jnp.matmul(scaled1, x2.T, precision="highest") + bias
    own1, own2 = jnp.sum(scaled1 * x1, axis=1) + bias, jnp.sum(scaled2 * x2, axis=1) + bias
    ntk = nngp if context.ntk else None
    return Units(Covariance(nngp, ntk, own1, own2, jnp.zeros_like(own1), jnp.zeros_like(own2)))


# -- activations -------------------------------------------------------------------------------------------


@rule(Activation)
def activation(layer: Activation, context: Context, state: State) -> State:
    """E f(x) f(y), and T E f'(x) f'(y) for the tangent kernel."""
    if isinstance(state, Inputs):
        return on_inputs(layer, context, state)
    if layer.name == "identity":
        return state
    forms = dual(layer)
    if state.gaussian:
        return Units(activated(forms, state.k), gaussian=False)
    if state.given is None:
        why = (
            "An activation needs normal inputs: put it behind Dense or Conv2d. In a residual network"
            " write blocks `Residual(Sequential(['relu', Dense(n), ...]))`, without activation between them."
        )
        raise unsupported(layer, context, why)
    parts = jax.vmap(lambda k: activated(forms, k))(state.given.k)
    return Units(average(Given(state.given.weights, parts)), gaussian=False)


def activated(forms: Dual, k: Covariance) -> Covariance:
    """Moments of f of normal units."""
    pixels = full(k)
    q1, q2 = variance(k.own1), variance(k.own2)
    cross = tuple(jnp.broadcast_to(q, k.nngp.shape) for q in outer(q1, q2, pixels))
    ntk = None if k.ntk is None else k.ntk * forms.slope(k.nngp, *cross)

    def own(block: jax.Array, q: jax.Array) -> jax.Array:
        return forms.value(block, *(jnp.broadcast_to(v, block.shape) for v in within(q, pixels)))

    return Covariance(
        forms.value(k.nngp, *cross),
        ntk,
        own(k.own1, q1),
        own(k.own2, q2),
        forms.mean(q1),
        forms.mean(q2),
    )


def average(given: Given) -> Covariance:
    """Moments averaged over what the units share."""
    return jax.tree.map(lambda part: jnp.tensordot(given.weights, part, 1), given.k)


# -- normalization -----------------------------------------------------------------------------------------


@rule(LayerNorm)
def layer_norm(layer: LayerNorm, context: Context, state: State) -> State:
    """Covariance over the sds of both data points; then gains 1 + g v and biases b u, each unit its own."""
    if isinstance(state, Inputs):
        if layer.use_scale or layer.use_bias:
            why = "On inputs write `LayerNorm(use_scale=False, use_bias=False)`: few random gains have no limit."
            raise unsupported(layer, context, why)
        return on_inputs(layer, context, state)
    unit, bias = _standardized(state.k), context.bias(layer.use_bias)
    if not layer.use_scale:
        return Units(_shifted(unit, 1.0, 0.0, bias), state.gaussian)
    context.need_normal("scale", "Gains enter each unit as they are")
    mean, spread = context.sites[context.full("scale")].mean, context.common("scale")
    x, w = (jnp.asarray(part, unit.own1.dtype) for part in nodes(GAIN_NODES))
    gains = mean + jnp.sqrt(spread) * x
    given = Given(w, jax.vmap(lambda gain: _shifted(unit, gain, spread, bias))(gains))
    return Units(average(given), gaussian=False, given=given if state.gaussian else None)


def _standardized(k: Covariance) -> Covariance:
    pixels = full(k)

    def scaled(block: jax.Array, one: tuple, sd: tuple) -> jax.Array:
        return (block - one[0] * one[1]) / (sd[0] * sd[1])

    sd1, sd2 = (jnp.sqrt(variance(o) - m**2) for o, m in ((k.own1, k.mean1), (k.own2, k.mean2)))
    sds, means = outer(sd1, sd2, pixels), outer(k.mean1, k.mean2, pixels)
    return Covariance(
        scaled(k.nngp, means, sds),
        None if k.ntk is None else k.ntk / (sds[0] * sds[1]),
        scaled(k.own1, within(k.mean1, pixels), within(sd1, pixels)),
        scaled(k.own2, within(k.mean2, pixels), within(sd2, pixels)),
        jnp.zeros_like(k.mean1),
        jnp.zeros_like(k.mean2),
    )


def _shifted(k: Covariance, gain: Any, spread: Any, bias: Any) -> Covariance:
    """Units times a given gain, plus random biases; the tangent kernel counts both parameters."""
    ntk = None if k.ntk is None else gain**2 * k.ntk + spread * k.nngp + bias
    return k._replace(
        nngp=gain**2 * k.nngp + bias, ntk=ntk, own1=gain**2 * k.own1 + bias, own2=gain**2 * k.own2 + bias
    )


@rule(BatchNorm)
def batch_norm(layer: BatchNorm, context: Context, state: State) -> State:
    """Statistics of a batch tie all its data points together."""
    raise unsupported(layer, context, "Batch statistics have no kernel of two data points: use `LayerNorm`.")


# -- containers --------------------------------------------------------------------------------------------


@rule(Sequential)
def sequential(layer: Sequential, context: Context, state: State) -> State:
    """One after the other."""
    for name, part in layer.children():
        state = propagate(part, context.child(name), state)
    return state


@rule(Residual)
def residual(layer: Residual, context: Context, state: State) -> State:
    """Branches with weights of their own are independent: covariances add, and so do products of their means."""
    a: State = state
    if layer.shortcut is not None:
        a = propagate(layer.shortcut, context.child("shortcut"), state)
    b = propagate(layer.body, context.child("body"), state)
    if isinstance(a, Inputs) and isinstance(b, Inputs):
        return Inputs(a.x1 + b.x1, a.x2 + b.x2)
    if isinstance(a, Inputs) or isinstance(b, Inputs):
        why = "Inputs plus random units have no limit in the width: put a Dense or Conv2d layer before the block."
        raise unsupported(layer, context, why)
    if not any(has_weights(branch) for branch in (layer.body, layer.shortcut) if branch is not None):
        raise unsupported(layer, context, "A branch needs weights, or it is not independent of the other.")
    return Units(_sum(a.k, b.k), gaussian=a.gaussian and b.gaussian)


def _sum(a: Covariance, b: Covariance) -> Covariance:
    pixels = full(a)

    def products(pair: Callable, one: tuple, other: tuple) -> jax.Array:
        left, right = pair(one[0], other[1], pixels), pair(other[0], one[1], pixels)
        return left[0] * left[1] + right[0] * right[1]

    def own(mean_a: jax.Array, mean_b: jax.Array) -> jax.Array:
        one, other = within(mean_a, pixels), within(mean_b, pixels)
        return one[0] * other[1] + other[0] * one[1]

    cross = products(outer, (a.mean1, a.mean2), (b.mean1, b.mean2))
    return Covariance(
        a.nngp + b.nngp + cross,
        None if a.ntk is None or b.ntk is None else a.ntk + b.ntk,
        a.own1 + b.own1 + own(a.mean1, b.mean1),
        a.own2 + b.own2 + own(a.mean2, b.mean2),
        a.mean1 + b.mean1,
        a.mean2 + b.mean2,
    )


def has_weights(layer: Layer) -> bool:
    """Whether a layer, or one inside it, multiplies by weights."""
    return isinstance(layer, Dense | Conv2d) or any(has_weights(part) for _, part in layer.children())
