"""``ensemble``: the recipe for prediction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import jax
from numpyro.infer import MCMC
from numpyro.infer.mcmc import MCMCKernel

from numpyro_bnn._options import Count, FractionBelow1, Model, PositiveInt, checked
from numpyro_bnn._types import Attributes, Optimizer, PyTree
from numpyro_bnn.infer.chain_methods import parallel_vectorized
from numpyro_bnn.infer.mclmc import MCLMC
from numpyro_bnn.infer.orbit import OrbitMoves
from numpyro_bnn.infer.warm_start import WarmStart
from numpyro_bnn.symmetry import Symmetry

# Optimizer steps: a share of the gradients, but at least a number of them, or a larger
# share if there are few.
OPTIMIZER_SHARE = 0.05
MIN_OPTIMIZER_STEPS = 4000
MAX_OPTIMIZER_SHARE = 0.25
LEARNING_RATE = 0.02  # of Adam at its first step
SPREAD = 0.5  # factor of the initial values
SHARE = 0.3  # of the warm-up transitions that optimize
WARMUP = 0.4  # share of the other gradients that warm-up takes
# First: far from the member, last: the accuracy of the draws.
ENERGY_VARIANCE = (0.5, 0.0005)
PER_STEP = 2  # gradients of a step


@dataclass(frozen=True)
class _CosineAdam:
    """Adam with a cosine schedule; by its number of steps, because optax's functions
    cannot be pickled.
    """

    num_steps: int

    @property
    def _adam(self) -> Optimizer:
        import optax

        return optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, self.num_steps))

    def init(self, params: PyTree) -> PyTree:
        return self._adam.init(params)

    def update(self, updates: Any, state: PyTree, params: PyTree = None) -> Any:
        return self._adam.update(updates, state, params)


@checked("infer.ensemble")
def ensemble(
    model: Model,
    num_gradients: Annotated[int, Count(100)] = 60_000,
    *,
    num_chains: PositiveInt = 8,
    num_samples: PositiveInt = 250,
    held_out: FractionBelow1 = 0.1,
    symmetries: Sequence[Symmetry] = (),
    **options: Any,
) -> MCMC:
    """Predict as well as possible from a number of gradients: a deep ensemble, and
    chains around its members.

    Each chain starts as a member of a deep ensemble, from Adam with a cosine schedule
    and early stopping. Its microcanonical steps then begin long, with an energy
    variance of 0.5 per parameter, which takes the chain away from the member, and end
    as short as accurate draws need (:class:`MCLMC`). All chains count equally, whatever
    the weight of their modes: judge the result by held-out rows.

    :param num_gradients: gradients of all data for each chain. A twentieth, but at
        least 4000 or a quarter if that is less, are optimizer steps; two fifths of the
        others are warm-up.
    :param num_chains: number of members and of chains.
    :param num_samples: draws to keep from each chain; between them are as many steps as
        the gradients allow.
    :param held_out: fraction of the rows that stop the optimizer (:class:`WarmStart`);
        0 for its last step.
    :param symmetries: moves along the symmetries of the network after each transition
        (:class:`OrbitMoves`), e.g. ``symmetry.find(model, x, y)``.
    :param options: options of NumPyro's ``MCMC``, e.g. ``progress_bar=False``.
    :return: an ``MCMC`` whose ``run(rng_key, x, y)`` samples; ``to_inference_data(mcmc,
        members=True)`` exports the deep ensemble itself.
    :raises ValueError: for fewer than 100 gradients, or other numbers out of range.

    References: Sommer et al. (2025), "Microcanonical Langevin ensembles";
    Lakshminarayanan et al. (2017).

    >>> import jax, numpyro_bnn as bnn
    >>> x = jax.numpy.linspace(-2, 2, 40)[:, None]
    >>> model = bnn.models.regression(
    ...     bnn.nn.MLP([8, 1], "tanh"), bnn.priors.Hierarchical()
    ... )
    >>> mcmc = ensemble(model, 2000, num_samples=20, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), x, jax.numpy.sin(2 * x[:, 0]))
    >>> bnn.to_inference_data(mcmc, predictions={"x": x})["predictions"]["y_mean"].shape
    (8, 20, 40)
    """
    steps = max(MIN_OPTIMIZER_STEPS, OPTIMIZER_SHARE * num_gradients)
    steps = int(min(steps, MAX_OPTIMIZER_SHARE * num_gradients))
    sampling_gradients = num_gradients - steps
    steps_per_draw = max(
        1, round((1 - WARMUP) * sampling_gradients / (PER_STEP * num_samples))
    )
    num_warmup = max(
        20,
        round(WARMUP * sampling_gradients / (PER_STEP * steps_per_draw * (1 - SHARE))),
    )
    warm = WarmStart(
        SHARE,
        num_steps=steps,
        optimizer=_CosineAdam(steps),
        held_out=held_out,
        spread=SPREAD,
    )
    kernel: MCMCKernel = MCLMC(
        model,
        steps_per_draw=steps_per_draw,
        warm_start=warm,
        energy_variance=ENERGY_VARIANCE,
    )
    if symmetries:
        kernel = OrbitMoves(kernel, symmetries)
    chain_options: Attributes = {"chain_method": "vectorized"}
    if min(num_chains, jax.local_device_count()) > 1:
        # NumPyro has no bar for it
        chain_options = {"chain_method": parallel_vectorized, "progress_bar": False}
    return MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        **(chain_options | options),
    )
