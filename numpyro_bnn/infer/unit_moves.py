"""Moves that redraw the parameters of hidden units from their prior, for posteriors
with several modes.
"""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array, lax, random
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._checks import argument_error, unknown_name
from numpyro_bnn._distributions import GroupStudentT, unwrapped
from numpyro_bnn._options import PositiveInt, checked
from numpyro_bnn._types import Arrays, Kwargs, PyTree, Shape, Sites
from numpyro_bnn.infer.model_arguments import DataVersion
from numpyro_bnn.infer.wrapper import Wrapper, inner_attribute
from numpyro_bnn.program.plates import sites_of_type
from numpyro_bnn.program.posterior import Posterior, log_density
from numpyro_bnn.program.row_lengths import refuse_random
from numpyro_bnn.program.sites import arrays_in


class UnitState(NamedTuple):
    """State of :class:`UnitMoves`; it has the attributes of the inner state as well.

    :param base: state of the inner kernel, with the values after the moves.
    :param unit_accept_prob: mean acceptance probability of the moves of the last
        transition.
    :param i: transitions so far; ``rng_key``: the key of the next transition.
    :param data: how often they had changed in place; no array.
    """

    base: PyTree
    unit_accept_prob: Array
    i: Array
    rng_key: Array
    data: DataVersion = DataVersion()

    def __getattr__(self, name: str) -> PyTree:
        return inner_attribute(self, name)


class UnitMoves(Wrapper):
    r"""Wrap any kernel so that after each of its transitions some hidden units are
    redrawn from their prior.

    A move picks m units, m with probability proportional to 1 / m, and one or more of
    the sites that hold their parameters, all choices equally likely. It draws these
    parameters from their prior given all others, :math:`\theta_u' \sim p(\theta_u \mid
    \theta_{-u})`, and accepts with probability

    .. math:: \min\Big(1, \frac{p(y, \phi \mid \theta')}{p(y, \phi \mid \theta)}\Big),

    where :math:`\phi` are all other sites. With more units than the data need, some are
    idle; a move takes such a unit anywhere in one step, where a gradient sampler would
    have to climb. Moves of several units at once can leave the common scale that a
    :class:`~numpyro_bnn.priors.GroupStudentT` gives them. While its output weights are
    sampled too, a unit can hardly move: integrate them out first
    (:func:`~numpyro_bnn.infer.collapse`), and most moves of single units are accepted.

    A move costs one evaluation of the log density on all data, and no gradient. Moves
    begin after warm-up: redrawn idle units would distort the learned mass matrix.

    The extra field ``unit_accept_prob`` holds the acceptance probability.

    :param kernel: NUTS, HMC, a kernel of :mod:`numpyro_bnn.infer`, or a
        :class:`~numpyro.infer.gibbs.Gibbs`; any kernel with a model and ``refresh``.
    :param units: axis of the units by site, e.g. ``{"net/Dense_0.kernel": 1,
        "net/Dense_0.bias": 0}``. The elements of a site must be independent given the
        other sites, or have a :class:`~numpyro_bnn.priors.GroupStudentT`.
    :param num_moves: moves per transition.
    :raises ValueError: for unknown sites or axes, different numbers of units, sites
        with dependent elements or with priors that depend on each other.
    :raises TypeError: for a kernel without model or ``refresh``.

    Reference: Neal (1996), section 3.5, for how such modes arise; Tierney (1994),
    section 2.3.3, independence chains.

    >>> import jax, jax.numpy as jnp
    >>> from numpyro.infer import MCMC, NUTS
    >>> from numpyro_bnn import infer, models, nn
    >>> x = jnp.linspace(-1, 1, 8)[:, None]
    >>> model = models.regression(nn.MLP([3, 1], "tanh"))
    >>> model = infer.collapse(
    ...     model, ["net/Dense_1.kernel", "net/Dense_1.bias"], x, x[:, 0]
    ... )
    >>> kernel = UnitMoves(
    ...     NUTS(model), {"net/Dense_0.kernel": 1, "net/Dense_0.bias": 0}, num_moves=10
    ... )
    >>> mcmc = MCMC(kernel, num_warmup=5, num_samples=5, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, x[:, 0])
    >>> mcmc.get_extra_fields()["unit_accept_prob"].shape
    (5,)
    """

    @checked("infer.{}")
    def __init__(
        self,
        kernel: MCMCKernel,
        units: Mapping[str, int],
        *,
        num_moves: PositiveInt = 100,
    ) -> None:
        super().__init__(kernel)
        good = isinstance(units, Mapping) and units
        if not good or not all(isinstance(axis, int) for axis in units.values()):
            instead = (
                "Pass the axis of the units by site, e.g. `{'net/Dense_0.kernel': 1, "
                "'net/Dense_0.bias': 0}`."
            )
            raise argument_error(self._call, "units", units, instead, TypeError)
        self._units = dict(units)
        self._num_moves = num_moves
        self._num_units = 0

    @property
    def default_fields(self) -> tuple[str, ...]:
        return (*self._kernel.default_fields, "unit_accept_prob")

    def _prepare(self, reading: Posterior, args: tuple, kwargs: Kwargs) -> None:
        # a ratio of likelihoods needs one value of each
        refuse_random(self._call, "kernel", reading.stochastic)
        sizes = {}
        for name, axis in self._units.items():
            sizes[name] = self._size(reading, name, axis)
        if len(set(sizes.values())) > 1:
            got, instead = f"sites with {sizes} units", "Name axes of equal length."
            raise argument_error(self._call, "units", got, instead)
        self._num_units = next(iter(sizes.values()))
        priors = reading.depends(
            lambda sites: {n: arrays_in(sites[n]["fn"]) for n in self._units},
            self._units,
        )
        for name, parents in priors.items():
            if parents:
                came = f"{name!r}, whose prior depends on {sorted(parents)}"
                instead = "Name sites whose priors do not depend on each other."
                raise argument_error(self._call, "units", came, instead)

    def _size(self, reading: Posterior, name: str, axis: int) -> int:
        if name not in reading.latent:
            raise unknown_name(self._call, "units", name, reading.latent)
        fn, shape = reading.sites[name]["fn"], jnp.shape(reading.sites[name]["value"])
        if not -len(shape) <= axis < len(shape):
            instead = "Name the axis that runs over the units."
            raise argument_error(
                self._call, "units", f"axis {axis} of {name!r}, shaped {shape}", instead
            )
        base = unwrapped(fn)
        if not isinstance(base, GroupStudentT) and (
            base.event_dim or isinstance(base, dist.MaskedDistribution)
        ):
            came = f"{name!r}, a site with a {type(base).__name__} prior"
            instead = "Its elements must be independent, or a `priors.GroupStudentT`."
            raise argument_error(self._call, "units", came, instead)
        return shape[axis]

    def _start(self, base: PyTree, batch_shape: Shape, rng_key: Array) -> UnitState:
        return UnitState(
            base, jnp.zeros(batch_shape), jnp.zeros(batch_shape, jnp.int32), rng_key
        )

    def _move(
        self,
        state: UnitState,
        values: Arrays,
        rng_key: Array,
        reading: Posterior,
    ) -> tuple[UnitState, dict[str, Array]]:
        # Priors of the moved sites depend on none of them.
        sites = reading.at(values, only=self._units)
        prior = {name: site["fn"] for name, site in sites.items()}

        def log_other(units: Arrays) -> Array:
            return _log_other(reading.at({**values, **units}), prior)

        def step(carry: tuple, key: Array) -> tuple[tuple, Array]:
            current, current_log_other = carry
            key_move, key_accept = random.split(key)
            proposal = self._redraw(key_move, current, prior)
            proposal_log_other = log_other(proposal)
            log_ratio = jnp.where(
                jnp.isnan(proposal_log_other),
                -jnp.inf,
                proposal_log_other - current_log_other,
            )
            accepted = jnp.log(random.uniform(key_accept)) < log_ratio
            carry = jax.tree.map(
                partial(jnp.where, accepted), (proposal, proposal_log_other), carry
            )
            return carry, jnp.minimum(1.0, jnp.exp(log_ratio))

        start = {name: jnp.asarray(values[name]) for name in self._units}
        keys = random.split(rng_key, self._num_moves)
        (final, _), probs = lax.scan(step, (start, log_other(start)), keys)
        warm = state.i >= self._num_warmup
        new_values = jax.tree.map(partial(jnp.where, warm), final, start)
        accept_prob = jnp.mean(probs).astype(state.unit_accept_prob.dtype)
        return state._replace(unit_accept_prob=accept_prob), new_values

    def _redraw(
        self,
        rng_key: Array,
        values: Arrays,
        prior: Mapping[str, dist.Distribution],
    ) -> Arrays:
        key_size, key_units, key_sites, *keys = random.split(rng_key, 3 + len(values))
        sizes = jnp.arange(1, self._num_units + 1)
        size = random.choice(key_size, sizes, p=(1 / sizes) / jnp.sum(1 / sizes))
        units = random.permutation(key_units, self._num_units) < size
        # a nonempty set of sites, encoded as bits
        site_bits = random.randint(key_sites, (), 1, 2 ** len(values))
        redrawn = {}
        for i, (name, value) in enumerate(values.items()):
            shape = [1] * value.ndim
            shape[self._units[name]] = -1
            selected = units.reshape(shape) & (((site_bits >> i) & 1) == 1)
            redrawn[name] = _given_rest(keys[i], prior[name], value, selected)
        return redrawn


def _given_rest(
    rng_key: Array, fn: dist.Distribution, value: Array, selected: Array
) -> Array:
    """``value`` with the chosen elements drawn from their prior given the others."""
    base = unwrapped(fn)
    if isinstance(base, GroupStudentT):
        return base.given_rest(rng_key, value, selected)
    return jnp.where(selected, fn.sample(rng_key).astype(value.dtype), value)


def _log_other(trace: Sites, prior: Mapping[str, dist.Distribution]) -> Array:
    """Log density of all sites without the prior that the moves draw from.

    If a handler scales the prior of a moved site, the scaled log density minus the
    plain one remains.
    """
    total = jnp.zeros(())
    for name, site in sites_of_type(trace, "sample").items():
        if name not in prior:
            total += log_density(site, within=True)
        elif site["scale"] is not None:
            plain = jnp.sum(prior[name].log_prob(site["value"]))
            total += log_density(site, within=True) - plain
    return total
