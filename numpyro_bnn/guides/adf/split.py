"""Cut a likelihood into the part that carries moments and the elementwise part behind it.

``Poisson(exp(f))`` has the rate exp(f): the Gaussian quantity is f, and exp belongs to the likelihood, which is
integrated by quadrature. So from each parameter of the likelihood one walks back through elementwise functions of a
single random operand, and cuts in front of the first of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from numpyro_bnn._dependence import needed_equations
from numpyro_bnn.moments import Interpreter

__all__ = ["Split", "split"]

# Elementwise, but affine in a single random operand: no reason to cut in front of them.
AFFINE = {"add", "sub", "neg", "mul", "div", "convert_element_type", "copy"}
SHAPING = {"squeeze", "reshape", "broadcast_in_dim", "expand_dims"}
NONLINEAR = {
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "tanh",
        "erf",
        "erfc",
        "erf_inv",
        "lgamma",
        "digamma",
    ),
    *(
        "pow",
        "integer_pow",
        "sqrt",
        "rsqrt",
        "cbrt",
        "square",
        "abs",
        "sign",
        "max",
        "min",
        "clamp",
        "select_n",
    ),
    *("sin", "cos", "tan", "atan", "atan2", "asin", "acos", "sinh", "cosh", "asinh", "acosh", "atanh"),
    *("ge", "gt", "le", "lt", "eq", "ne", "and", "or", "not", "is_finite", "stop_gradient", "nextafter"),
}


def split(
    fn: Callable[[Any, Any], Mapping[str, Any]], weights: Any, context: Any, keep: Sequence[str]
) -> "Split":
    """Cut ``fn(weights, context)``, a dictionary of arrays.

    :param weights: example of the argument that is random.
    :param context: example of everything else.
    :param keep: outputs that are Gaussian quantities themselves.

    >>> import jax.numpy as jnp
    >>> cut = split(lambda w, x: {"rate": jnp.exp(2 * w * x), "sd": x}, jnp.ones(3), jnp.ones(3), keep=())
    >>> predictors = cut.head(jnp.ones(3), jnp.ones(3))
    >>> list(predictors), sorted(cut.tail(predictors, jnp.ones(3)))
    (['rate'], ['rate', 'sd'])
    """
    closed, shapes = jax.make_jaxpr(_inline(fn), return_shape=True)(weights, context)
    flat = [path[0].key for path, _ in jax.tree.flatten_with_path(shapes)[0]]
    count = len(jax.tree.leaves(weights))
    random = _random(closed.jaxpr, count)
    cuts: dict[str, Any] = {}
    for name, var in zip(flat, closed.jaxpr.outvars, strict=True):
        if not isinstance(var, Literal) and var in random:
            found = var if name in keep else _walk_back(closed.jaxpr, var, random)
            if found not in cuts.values():
                cuts[name] = found
    nonlinear = {
        name for name, var in zip(flat, closed.jaxpr.outvars, strict=True) if cuts.get(name, var) is not var
    }
    return Split(closed, flat, cuts, random, nonlinear)


class Split:
    """The two parts of a likelihood.

    :ivar cuts: the Gaussian quantities, by the first output computed from each.
    :ivar random: outputs that depend on the weights, cut or not.
    :ivar nonlinear: outputs that are a nonlinear function of their quantity.
    """

    def __init__(
        self, closed: Any, names: list[str], cuts: dict[str, Any], random: set, nonlinear: set[str]
    ) -> None:
        self._closed, self._names, self._cuts = closed, names, cuts
        self.cuts = tuple(cuts)
        self.nonlinear = nonlinear
        outputs = zip(names, closed.jaxpr.outvars, strict=True)
        self.random = {name for name, var in outputs if not isinstance(var, Literal) and var in random}

    def head(self, weights: Any, context: Any) -> dict[str, Any]:
        """The Gaussian quantities."""
        known = dict(zip(self._closed.jaxpr.invars, jax.tree.leaves((weights, context)), strict=True))
        return dict(zip(self._cuts, self._evaluate(known, list(self._cuts.values())), strict=True))

    def tail(self, quantities: Mapping[str, Any], context: Any) -> dict[str, Any]:
        """All outputs from the Gaussian quantities."""
        leaves = jax.tree.leaves(context)
        inputs = self._closed.jaxpr.invars
        known = dict(zip(inputs[len(inputs) - len(leaves) :], leaves, strict=True))
        known |= {self._cuts[name]: value for name, value in quantities.items()}
        return dict(zip(self._names, self._evaluate(known, self._closed.jaxpr.outvars), strict=True))

    def _evaluate(self, known: dict[Any, Any], wanted: list[Any]) -> list[Any]:
        """Evaluate what ``wanted`` needs beyond what is known."""
        jaxpr = self._closed.jaxpr
        known.update(zip(jaxpr.constvars, self._closed.consts, strict=True))
        for equation, _ in needed_equations(jaxpr, wanted, frozenset(known)):
            operands = [v.val if isinstance(v, Literal) else known[v] for v in equation.invars]
            out = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
            for var, value in zip(
                equation.outvars, out if equation.primitive.multiple_results else [out], strict=True
            ):
                known.setdefault(var, value)
        return [v.val if isinstance(v, Literal) else known[v] for v in wanted]


def _inline(fn: Callable) -> Callable:
    """The same program without calls of sub-programs, so that one can walk through all of it."""
    descend = Interpreter(
        {}, lambda value: True, "guides.AutoADF", default=lambda eqn, *operands: eqn.bind(*operands)
    )

    def inlined(*arguments: Any) -> Any:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        outputs = descend.run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return inlined


def _random(jaxpr: Any, count: int) -> set:
    """Variables that depend on the first ``count`` inputs."""
    random = set(jaxpr.invars[:count])
    for equation in jaxpr.eqns:
        if any(not isinstance(var, Literal) and var in random for var in equation.invars):
            random.update(equation.outvars)
    return random


def _walk_back(jaxpr: Any, var: Any, random: set) -> Any:
    """The variable in front of the first elementwise nonlinear function on the way to ``var``; itself if none."""
    made_by = {out: equation for equation in jaxpr.eqns for out in equation.outvars}
    ends: dict[Any, Any] = {}

    def passed(equation: Any) -> list[Any]:
        """The random operands of an elementwise equation; none of any other."""
        name = equation.primitive.name
        shaping = name in SHAPING and equation.invars[0].aval.size == equation.outvars[0].aval.size
        if not (name in AFFINE or name in NONLINEAR or shaping):
            return []
        return [v for v in equation.invars if not isinstance(v, Literal) and v in random]

    def end(var: Any) -> Any:
        """The farthest variable of which ``var`` is an elementwise function."""
        if var not in ends:
            sources = {end(v) for v in passed(made_by[var])} if var in made_by else set()
            ends[var] = sources.pop() if len(sources) == 1 else var
        return ends[var]

    source = end(var)
    return _last_affine(jaxpr, source, var, made_by, random)


def _last_affine(jaxpr: Any, source: Any, var: Any, made_by: Mapping, random: set) -> Any:
    """Move the cut from ``source`` towards ``var`` over affine steps that lie on the only path."""
    users: dict[Any, list] = {}
    reaches = {var}
    for equation in reversed(jaxpr.eqns):
        if reaches.intersection(equation.outvars):
            for used in equation.invars:
                if not isinstance(used, Literal) and used in random:
                    reaches.add(used)
                    users.setdefault(used, []).append(equation)
    while source is not var:
        following = users.get(source, [])
        if len(following) != 1 or following[0].primitive.name not in AFFINE | SHAPING:
            return source
        if following[0].primitive.name == "div" and following[0].invars[1] is source:
            return source
        source = following[0].outvars[0]
    return source
