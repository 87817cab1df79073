"""Stochastic-gradient Langevin dynamics: plain, preconditioned, and cyclical."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn._options import FractionBelow1, Positive, PositiveInt, check_fields
from numpyro_bnn._types import Scalar
from numpyro_bnn.infer.base import SGMCMCKernel


class SGLD(SGMCMCKernel):
    r"""Sample a posterior from minibatch gradients with injected noise:
    stochastic-gradient Langevin dynamics.

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon_t}2 \tilde g(\theta) +
              \sqrt{\epsilon_t T}\,\xi,
              \quad \xi \sim N(0, I)

    where g~ is the gradient of the log posterior estimated on a minibatch of the
    model's own subsampled plate: the prior unscaled, the likelihood times N / B. With a
    constant step size the posterior variance is too large by about a fraction (eps / 4)
    (lam + V / T) in a direction of curvature lam and gradient-noise variance V; with a
    schedule that decreases to 0 (:class:`~numpyro_bnn.sgmcmc.schedules.polynomial`) the
    bias vanishes too.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Welling & Teh (2011), equation 4; Vollmer, Zygalakis & Teh (2016) on the
    bias.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_bnn.infer import SGLD
    >>> def model(y, batch_size=None):
    ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as i:
    ...         numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])
    >>> y = 2.0 + jax.random.normal(jax.random.key(0), (1000,))
    >>> mcmc = MCMC(
    ...     SGLD(model, step_size=1e-4),
    ...     num_warmup=10,
    ...     num_samples=100,
    ...     progress_bar=False,
    ... )
    >>> mcmc.run(jax.random.key(1), y, batch_size=32)
    >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05)
    True
    """

    def dynamics(
        self, step_size: float, size: int, noisy: bool
    ) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.Overdamped(max_kick=self.max_kick)


class PSGLD(SGLD):
    r"""SGLD for parameters on different scales, with a preconditioner G = L L' (RMSProp
    by default).

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon_t}2 G \tilde g(\theta) +
              \sqrt{\epsilon_t T}\,L\,\xi

    A G that is fixed while draws are kept needs no correction term and adds no bias.
    RMSProp's, G = 1 / (damping + sqrt(V)), is therefore adapted during warm-up and then
    frozen. The published form, which keeps adapting
    (``preconditioner=sgmcmc.RMSProp(running=True, num_data=N)``), is biased at any step
    size.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Girolami & Calderhead (2011) for fixed G; Li et al. (2016), algorithm 1.

    >>> PSGLD(lambda: None).sample_field
    'z'
    """

    usual_preconditioner = "rmsprop"


@dataclass(eq=False, repr=False)
class CyclicalSGLD(SGLD):
    r"""Cyclical SGLD, for posteriors with several modes: explore with large steps,
    sample with small ones, repeat.

    .. math:: \epsilon_k = \tfrac{\epsilon_0}2 \left[\cos\left(\pi\,\frac{\mathrm{mod}(k
              - 1, C)}{C}\right) + 1\right]

    for step k with cycles of C steps. The first fraction ``explore`` of a cycle is
    discarded; from the rest, ``draws_per_cycle`` evenly spaced draws are kept. Each
    transition of ``MCMC`` is one draw, so with ``num_warmup=0`` there are num_samples /
    draws_per_cycle cycles.

    :param step_size: eps_0, a number.
    :param cycle_length: C, steps of a cycle.
    :param draws_per_cycle: draws kept per cycle.
    :param explore: beta, fraction of a cycle that explores, in [0, 1).
    :raises ValueError: for numbers out of range, a sampling part shorter than its
        draws, or ``steps_per_draw`` and ``warm_start``, which follow from the cycle.

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Zhang et al. (2020), equation 1 and algorithm 1.

    >>> kernel = CyclicalSGLD(
    ...     lambda: None, 1e-3, cycle_length=1000, draws_per_cycle=5, explore=0.5
    ... )
    >>> kernel.explore_steps, kernel.steps_per_draw
    (500, 100)
    """

    step_size: Positive = field()
    _: KW_ONLY
    cycle_length: PositiveInt = 2000
    draws_per_cycle: PositiveInt = 10
    explore: FractionBelow1 = 0.5
    steps_per_draw: Any = None
    warm_start: Any = None

    def __post_init__(self) -> None:
        call, given = "infer.CyclicalSGLD", (self.steps_per_draw, self.warm_start)
        check_fields(call, self)
        if given not in ((None, None), (None, 0)):
            instead = "Set `cycle_length`, `draws_per_cycle` and `explore`."
            raise argument_error(call, "steps_per_draw or warm_start", given, instead)
        length, draws = self.cycle_length, self.draws_per_cycle
        self.steps_per_draw = round(length * (1 - self.explore)) // draws
        if self.steps_per_draw < 1:
            came = (length, draws, self.explore)
            instead = (
                "The sampling part of a cycle must contain at least one step per draw."
            )
            raise argument_error(
                call, "cycle_length, draws_per_cycle, explore", came, instead
            )
        self.explore_steps = length - self.steps_per_draw * draws
        self._cycle = sgmcmc.schedules.cyclical(
            1.0, num_steps=length, num_cycles=1, explore=self.explore
        )
        # The first half of a cycle already explores, better than an optimizer would.
        self.warm_start = 0.0
        super().__post_init__()

    @property
    def schedule(self) -> Callable[[Scalar], Scalar]:
        return self._cycle

    def steps(
        self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: Scalar
    ) -> sgmcmc.State:
        def explored(begin: sgmcmc.State) -> sgmcmc.State:
            end = sampler.run(begin, self.explore_steps)
            means = sgmcmc.engine.reset_statistics(end).statistics
            spent = end.statistics.num_gradients
            return end._replace(statistics=means._replace(num_gradients=spent))

        if self.explore_steps:
            first = i % self.draws_per_cycle == 0
            engine = lax.cond(first, explored, lambda e: e, engine)
        return sampler.run(engine, self.steps_per_draw)

    def steps_of(self, transitions: int) -> int:
        cycles, remainder = divmod(transitions, self.draws_per_cycle)
        steps = cycles * self.cycle_length + remainder * self.steps_per_draw
        return steps + (self.explore_steps if remainder else 0)
