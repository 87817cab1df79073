"""Stochastic-gradient Langevin dynamics, plain and preconditioned."""

from collections.abc import Callable
from typing import Any

from numpyro_bnn import sgmcmc
from numpyro_bnn.infer.base import SGMCMCKernel

__all__ = ["PSGLD", "SGLD"]


class SGLD(SGMCMCKernel):
    r"""Stochastic-gradient Langevin dynamics on the model's own subsampled plate.

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon_t}2 \tilde g(\theta) + \sqrt{\epsilon_t T}\,\xi,
              \quad \xi \sim N(0, I)

    with g~ the gradient of the log posterior estimated on a minibatch: the prior unscaled, the likelihood times
    N / B. With a constant step size the posterior variance comes out too large by about the share
    (eps / 4) (lam + V / T) in a direction of curvature lam and gradient-noise variance V; with a schedule that
    falls to 0 (:class:`~numpyro_bnn.sgmcmc.schedules.polynomial`) the bias falls too.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Welling & Teh (2011), equation 4; Vollmer, Zygalakis & Teh (2016) on the bias.

    >>> import jax, numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_bnn.infer import SGLD
    >>> def model(y, batch_size=None):
    ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
    ...     with numpyro.plate("data", y.shape[0], subsample_size=batch_size) as i:
    ...         numpyro.sample("y", dist.Normal(mu, 1.0), obs=y[i])
    >>> y = 2.0 + jax.random.normal(jax.random.key(0), (1000,))
    >>> mcmc = MCMC(SGLD(model, step_size=1e-4), num_warmup=10, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), y, batch_size=32)
    >>> bool(abs(mcmc.get_samples()["mu"].mean() - y.mean()) < 0.05)
    True
    """

    def dynamics(self, full_potential: Callable, step_size: Any) -> sgmcmc.interfaces.Dynamics:
        return sgmcmc.Overdamped()


class PSGLD(SGLD):
    r"""SGLD with a preconditioner G = L L' (RMSProp by default).

    .. math:: \theta \leftarrow \theta + \tfrac{\epsilon_t}2 G \tilde g(\theta) + \sqrt{\epsilon_t T}\,L\,\xi

    A G that is fixed while draws are kept needs no correction term and adds no bias. RMSProp's,
    G = 1 / (damping + sqrt(V)), is therefore adapted during warm-up and then frozen. The published form that goes on
    adapting, ``preconditioner=sgmcmc.RMSProp(running=True, num_data=N)``, is biased whatever the step size.

    Parameters: see :class:`~numpyro_bnn.infer.SGMCMCKernel`.

    Reference: Girolami & Calderhead (2011) for fixed G; Li et al. (2016), algorithm 1.

    >>> PSGLD(lambda: None).sample_field
    'z'
    """

    def __init__(
        self, model: Callable, step_size: Any = None, *, preconditioner: Any = "rmsprop", **options: Any
    ):
        super().__init__(model, step_size, preconditioner=preconditioner, **options)
