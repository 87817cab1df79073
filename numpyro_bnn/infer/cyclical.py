"""Cyclical SGLD: explore with large steps, sample with small ones, again and again."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from numpyro_bnn import sgmcmc
from numpyro_bnn._checks import argument_error
from numpyro_bnn.infer.sgld import SGLD

__all__ = ["CyclicalSGLD"]


class CyclicalSGLD(SGLD):
    r"""SGLD whose step size falls and restarts in cycles; draws come from the sampling part of a cycle only.

    .. math:: \epsilon_k = \tfrac{\epsilon_0}2 \left[\cos\left(\pi\,\frac{\mathrm{mod}(k - 1, C)}{C}\right) + 1\right]

    for step k with cycles of C steps. The first share ``explore`` of a cycle is not collected; of the rest,
    ``draws_per_cycle`` draws are kept at even distances. Each transition of ``MCMC`` is one draw, so with
    ``num_warmup=0`` there are num_samples / draws_per_cycle cycles.

    :param step_size: eps_0, a number.
    :param cycle_length: C, steps of a cycle.
    :param draws_per_cycle: draws kept of each cycle.
    :param explore: beta, share of a cycle that explores, in [0, 1).

    Other parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`; ``steps_per_draw`` follows from these.

    Reference: Zhang et al. (2020), equation 1 and algorithm 1.

    >>> kernel = CyclicalSGLD(lambda: None, 1e-3, cycle_length=1000, draws_per_cycle=5, explore=0.5)
    >>> kernel.steps_per_draw, kernel.explore_steps
    (100, 500)
    """

    def __init__(
        self,
        model: Callable,
        step_size: float,
        *,
        cycle_length: int = 2000,
        draws_per_cycle: int = 10,
        explore: float = 0.5,
        **options: Any,
    ) -> None:
        call = "infer.CyclicalSGLD"
        if not isinstance(step_size, int | float):
            raise argument_error(
                call, "step_size", step_size, "Pass eps_0, a number: the cycles are its schedule."
            )
        if "steps_per_draw" in options or options.get("warm_start"):
            raise argument_error(
                call,
                "steps_per_draw or warm_start",
                "a value",
                "Set `cycle_length`, `draws_per_cycle` and `explore`.",
            )
        steps = round(cycle_length * (1 - explore)) // draws_per_cycle if draws_per_cycle > 0 else 0
        if not 0 <= explore < 1 or steps < 1:
            raise argument_error(
                call,
                "cycle_length, draws_per_cycle, explore",
                (cycle_length, draws_per_cycle, explore),
                "The sampling part of a cycle must hold at least one step per draw.",
            )
        self.cycle_length = cycle_length
        self.draws_per_cycle = draws_per_cycle
        self.explore_steps = cycle_length - steps * draws_per_cycle
        self._cycle = sgmcmc.schedules.cyclical(1.0, num_steps=cycle_length, num_cycles=1, explore=explore)
        options["warm_start"] = 0.0  # the first half of a cycle explores as no descent would
        super().__init__(model, step_size, steps_per_draw=steps, **options)

    def schedule(self, step: jax.Array) -> Any:
        return self._cycle(step)

    @property
    def sampled_warmup(self) -> int:
        cycles, rest = divmod(self._num_warmup, self.draws_per_cycle)
        return cycles * self.cycle_length + (self.explore_steps if rest else 0) + rest * self.steps_per_draw

    def run(self, sampler: sgmcmc.Sampler, engine: sgmcmc.State, i: jax.Array) -> sgmcmc.State:
        if self.explore_steps:
            engine = lax.cond(
                i % self.draws_per_cycle == 0,
                lambda e: _forget_means(sampler.run(e, self.explore_steps)),
                lambda e: e,
                engine,
            )
        return sampler.run(engine, self.steps_per_draw)


def _forget_means(engine: sgmcmc.State) -> sgmcmc.State:
    """Statistics are about the sampling phase, but the gradients of exploration were spent."""
    spent = engine.statistics.num_gradients
    engine = sgmcmc.engine.reset_statistics(engine)
    return engine._replace(statistics=engine.statistics._replace(num_gradients=spent))
