"""The observation of one data point: Gaussian quantities of the network, and the
parameters of a distribution given these.

Moments are propagated up to quantities that can be treated as Gaussian; the likelihood
is integrated over these. For ``Poisson(jnp.exp(f))`` that is f, not the rate: a
Gaussian rate would be negative at some nodes. So the program of the distribution's
parameters is cut before the elementwise functions of a single random operand.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Literal, jaxpr_as_fun
from jax.flatten_util import ravel_pytree

from numpyro_bnn import moments
from numpyro_bnn._distributions import unmasked_elements, unwrapped
from numpyro_bnn._jaxprs.primitives import ELEMENTWISE, SHAPING, is_affine
from numpyro_bnn._jaxprs.slices import reached
from numpyro_bnn._jaxprs.walk import needed_equations, variables_of
from numpyro_bnn._types import Atom, PyTree, Trees
from numpyro_bnn.guides.adf.reading import CALL, Data, Roles, Values, refuse
from numpyro_bnn.moments import Equation
from numpyro_bnn.program.compiled import is_traced, shared
from numpyro_bnn.program.posterior import Posterior

CHECKED_ROWS = 100  # that are compared alone and among all


def rewritten(fn: Callable, rules: Mapping[str, Callable]) -> Callable:
    """The same function with sub-programs inlined and some primitives evaluated by
    rules.
    """
    rules = {"name": lambda equation, value: value, **rules}  # a mark of a site
    walk = moments.Interpreter(rules, lambda value: True, CALL, default=Equation.bind)

    def inlined(*arguments: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*arguments)
        outputs = walk.run(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), outputs)

    return inlined


class Cut:
    """A program ``fn(weights, hypers, data)``, a dictionary of arrays, in two parts:
    ``head`` computes the Gaussian quantities, ``tail`` all outputs from these.

    A quantity is the most distant variable of which an output is an elementwise
    function: what follows, hyperparameters included, belongs to the tail, where it is
    integrated. Outputs computed from one quantity share it.

    :param fn: the program.
    :param weights: example of the random argument.
    :param hypers: example of the hyperparameters.
    :param data: example of the other argument.
    :param keep: an output that may be a Gaussian quantity itself.
    """

    def __init__(
        self,
        fn: Callable,
        weights: PyTree,
        hypers: PyTree,
        data: tuple[Trees, Trees],
        keep: str | None,
    ) -> None:
        program = jax.make_jaxpr(rewritten(fn, {}), return_shape=True)
        self._closed, shapes = program(weights, hypers, data)
        jaxpr = self._closed.jaxpr
        self._outputs = dict(zip(sorted(shapes), jaxpr.outvars, strict=True))
        num_weights, num_hypers = map(len, map(jax.tree.leaves, (weights, hypers)))
        inputs = jaxpr.invars
        self._others = inputs[num_weights:]
        self._depends = reached(jaxpr.eqns, inputs[:num_weights])
        self._on_hypers = reached(jaxpr.eqns, self._others[:num_hypers])
        sources = _sources(jaxpr, self._depends)
        #: For each random output, the quantity of which it is an elementwise function.
        self.sources: dict[str, PyTree] = {}
        for name, var in self._outputs.items():
            if not isinstance(var, Literal) and var in self._depends:
                self.sources[name] = sources.get(var, var)
        #: The Gaussian quantities, by the name of the first output computed from each.
        self.quantities: dict[str, PyTree] = {}
        for name, source in self.sources.items():
            is_kept = name == keep and self.is_direct(name)
            quantity = self._outputs[name] if is_kept else source
            if quantity not in self.quantities.values():
                self.quantities[name] = quantity

    def is_direct(self, name: str) -> bool:
        """Whether an output depends on the weights alone, and shares them with no other
        and with no second element of itself.
        """
        if name not in self.sources:
            return False
        var, source = self._outputs[name], self.sources[name]
        is_shared = list(self.sources.values()).count(source) > 1
        is_spread = source.aval.size < var.aval.size
        return not is_shared and not is_spread and var not in self._on_hypers

    def is_linear(self, output: str) -> bool:
        """Whether a random output is an affine function of its source."""
        source, var = self.sources[output], self._outputs[output]
        needed = needed_equations(self._closed.jaxpr, [var], {source})
        for equation, _ in needed:
            operands = equation.invars
            is_random = [
                not isinstance(v, Literal) and v in self._depends for v in operands
            ]
            if not any(is_random):
                continue
            name, operand = equation.primitive.name, is_random.index(True)
            is_image = is_affine(name, operand) or name in SHAPING
            if sum(is_random) > 1 or not is_image:
                return False
        return True

    def head(self, weights: PyTree, hypers: PyTree, data: tuple[Trees, Trees]) -> Trees:
        """The quantities, from weights, hyperparameters and data."""
        inputs, values = self._closed.jaxpr.invars, (weights, hypers, data)
        outputs = self._evaluate(inputs, values, list(self.quantities.values()))
        return dict(zip(self.quantities, outputs, strict=True))

    def tail(
        self, quantities: Values, hypers: PyTree, data: tuple[Trees, Trees]
    ) -> Trees:
        """All outputs, from the quantities, hyperparameters and data."""
        inputs = [*self.quantities.values(), *self._others]
        values = [quantities[name] for name in self.quantities], hypers, data
        outputs = self._evaluate(inputs, values, list(self._outputs.values()))
        return dict(zip(self._outputs, outputs, strict=True))

    def _evaluate(
        self, inputs: list[Atom], values: PyTree, outputs: list[Atom]
    ) -> list:
        jaxpr = self._closed.jaxpr
        needed = needed_equations(jaxpr, outputs, frozenset(inputs))
        equations = [equation for equation, _ in needed]
        part = jaxpr.replace(invars=inputs, outvars=outputs, eqns=equations)
        program = jaxpr_as_fun(self._closed.replace(jaxpr=part))
        return program(*jax.tree.leaves(values))


def _sources(jaxpr: Any, random: set) -> dict[Any, Any]:
    """For every random variable, the most distant one of which it is an elementwise
    function, if there is one.

    Of a single number everything is such a function.
    """
    sources: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        operands = variables_of(equation.invars) & random
        ends = {sources.get(var, var) for var in operands}
        if len(ends) != 1:
            continue
        (end,) = ends
        name = equation.primitive.name
        same_size = equation.invars[0].aval.size == equation.outvars[0].aval.size
        is_elementwise = name in ELEMENTWISE or (name in SHAPING and same_size)
        if is_elementwise or end.aval.size == 1:
            sources.update(dict.fromkeys(equation.outvars, end))
    return sources


def check_quantities(cut: Cut, roles: Roles, data: tuple[Trees, Trees]) -> None:
    """Refuse quantities of one row that are functions of fewer: they are integrated as
    if they were independent.

    Their slopes at random weights, along as many random directions as there are
    quantities, are then dependent.
    """
    values = roles.random_values()
    weights = {name: values.pop(name) for name in roles.weights}

    def flat(weights: PyTree) -> Array:
        return ravel_pytree(cut.head(weights, values, data))[0]

    count = jax.eval_shape(flat, weights).size
    if count == 1:
        return

    def slopes_at(weights: PyTree) -> Array:
        point, unflatten = ravel_pytree(weights)

        def slope(key: Array) -> Array:
            direction = unflatten(jax.random.normal(key, point.shape))
            return jax.jvp(flat, (weights,), (direction,))[1]

        return jax.lax.map(slope, jax.random.split(jax.random.key(0), count))

    slopes = jax.jit(slopes_at)(weights)
    if isinstance(slopes, jax.core.Tracer) or not np.all(np.isfinite(slopes)):
        return
    slopes = np.asarray(slopes)[:, np.any(slopes, axis=0)]
    sizes = np.linalg.svd(slopes / np.linalg.norm(slopes, axis=0), compute_uv=False)
    if len(sizes) and np.min(sizes) < 1e-9:
        reason = (
            f"whose {count} linear predictors for one row are functions of each other"
        )
        instead = (
            "Give each its own weights, or write one observation per row of the data."
        )
        refuse(roles.observed, reason, instead)


def check_rows(data: Data, reading: Posterior, of_row: Posterior, roles: Roles) -> None:
    """Refuse a model in which the likelihood of a data point depends on other rows
    (batch statistics, sequences).

    Arrays as long as the observation are taken for its rows. Another one, such as a
    table of as many groups, shows here: a data point gives other numbers with all rows
    than with its own.

    :param reading: the model of all rows.
    :param of_row: the model of one row.
    """
    values, name = roles.random_values(), roles.observed
    row_indices = np.unique(np.linspace(0, data.num_rows - 1, CHECKED_ROWS).astype(int))

    def parameters(reading: Posterior, call: PyTree) -> list[Array]:
        site = reading.with_arguments(*call).at(values, only=[name])[name]
        base, mask = unwrapped(site["fn"], masked=True), unmasked_elements(site["fn"])
        return jax.tree.leaves((base, mask, site["value"]))

    def both(rows: PyTree) -> list[tuple[Array, Array]]:
        separately = jax.vmap(
            lambda row: parameters(of_row, data.row_call(row, data.arrays))
        )(jax.tree.map(lambda leaf: leaf[row_indices], rows))
        together = parameters(reading, data.call(rows))
        pairs = []
        for joint, separate in zip(together, separately, strict=True):
            if jnp.shape(separate)[1:2] == (1,):
                shape = data.num_rows, *jnp.shape(separate)[2:]
                joint = jnp.broadcast_to(joint, shape)[row_indices]
                pairs.append((joint, separate[:, 0]))
        return pairs

    if data.num_rows < 2 or is_traced(data.rows):
        return
    for together, separate in shared(both, runs_rarely=True)(data.rows):
        if not np.allclose(together, separate, rtol=1e-6, atol=1e-9, equal_nan=True):
            instead = (
                f"Data points are learned one at a time, each with its own row of "
                f"{', '.join(data.rows)}: remove batch statistics and the like, and "
                "let the model close over other arrays of this length."
            )
            refuse(name, "whose rows influence each other", instead)
