"""AutoMNF: multiplicative normalizing flows, a guide of correlated weights whose cost is that of mean field."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers

from numpyro_bnn._checks import argument_error
from numpyro_bnn.guides.base import AutoBlocks, Blocks
from numpyro_bnn.guides.blocks import Patterns, matches
from numpyro_bnn.guides.flows.families import Coupling, SplineCoupling
from numpyro_bnn.guides.multiplier import Multiplier, check_reverse
from numpyro_bnn.guides.starting import init_to_fan_in
from numpyro_bnn.guides.summaries import NUM_DRAWS, Values, is_identity
from numpyro_bnn.nn import input_axis, output_axis, role

__all__ = ["AutoMNF"]

BASE = "_base"  # of the site that a non-centered prior samples
Moments = tuple[jax.Array, jax.Array]


class AutoMNF(AutoBlocks):
    r"""Multiplicative normalizing flows: Gaussian weights whose means are multiplied by random numbers, per kernel.

    .. math::
        q(w) = \int q(z) \prod_{ij} N(w_{ij};\, z_i m_{ij},\, s_{ij}^2)\, dz, \qquad
        z = a + c \odot f(\epsilon), \quad \epsilon \sim N(0, I)

    with f a coupling flow. One z_i for each *input* i of a dense kernel, one for each *filter* of a convolution, as
    in the paper: all weights at a unit move together, and the flow lets the units depend on one another. q(w) has no
    closed density. With any r(z | w),

    .. math::
        \log p(y) \ge E\Big[\log \frac{p(y, w)}{q(w)}\Big] \ge
        E_{q(z) q(w | z)}\Big[\log p(y, w) - \log q(w | z) - \log q(z) + \log r(z | w)\Big],

    the gap of the second step being E KL(q(z | w) || r(z | w)). The guide is a sample statement of z (auxiliary), one
    of w, and a factor -log r(z | w), so that every ELBO of NumPyro is this bound, and importance weights stay right.
    Given z the weights are independent normals, for the estimators that draw them in pre-activations.

    With u = (z - a) / c and another flow g, r is N(g(u); mean(w), sd(w)^2) times its Jacobian. ``reverse`` says how
    it reads the weights:

    - ``"conjugate"``: u_i ~ N(b_i, d_i^2) times the likelihood of the weights that z_i multiplies. Their
      least-squares estimate of z_i is a sufficient statistic; where f and g are the identity r is the exact q(z | w)
      and the bound the ELBO of q(w). It has no parameters of the size of the kernel.
    - ``"outer"``: equations 8-10 of the paper, mean = b_0 + b_1 mean_j tanh(c^T w)_j and sd = d exp(b_2 mean_j ...):
      one number read from a whole kernel.

    Sites that are no kernels, and kernels inside plates, are mean field, or in ``blocks``. It starts at the mean
    field: z near 1, flows at the identity. Parameters and cost of a step exceed those of mean field by what is linear
    in the number of units.

    :param model: a NumPyro model.
    :param kernels: patterns of the sites that get z; by default all whose name says that they are kernels
        (``...kernel``, ``...weight``, ``...embedding``) or their non-centered ``_base``.
    :param flow: :class:`~numpyro_bnn.guides.Coupling` or :class:`~numpyro_bnn.guides.SplineCoupling` over z.
    :param reverse: ``"conjugate"`` or ``"outer"``.
    :param multiplier_scale: first sd of z.
    :param blocks: families of other sites, as in :class:`AutoBlocks`.
    :param init_scale: of the weights given z, see :class:`AutoBlocks`.
    :param init_loc_fn: strategy for the first means.
    :param prefix: of the parameters.
    :param create_plates: as in :class:`~numpyro.infer.autoguide.AutoGuide`, for minibatches.
    :raises ValueError: when first called, for a model without kernels, a pattern that matches none.

    Reference: Louizos & Welling (2017), *Multiplicative normalizing flows for variational Bayesian neural networks*,
    equations 5-10; Ranganath, Tran & Blei (2016), *Hierarchical variational models*, for the bound.

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> from numpyro_bnn import guides, nn, random_network
    >>> def model(x, y=None):
    ...     net = random_network("net", nn.MLP([4, 1], "tanh"), x.shape[1:])
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("y", dist.Normal(net(x)[..., 0], 0.1), obs=y)
    >>> guide = guides.AutoMNF(model)
    >>> svi = SVI(model, guide, optax.adam(0.01), Trace_ELBO())
    >>> params = svi.get_params(svi.init(jax.random.key(0), jnp.ones((5, 3)), jnp.ones(5)))
    >>> params["net/Dense_0.kernel_auto_z_loc"].shape  # one for each input
    (3,)
    """

    def __init__(
        self,
        model: Callable,
        kernels: Patterns | None = None,
        *,
        flow: Coupling | SplineCoupling | None = None,
        reverse: str = "conjugate",
        multiplier_scale: float = 0.05,
        blocks: Blocks = (),
        init_scale: Any = 0.1,
        init_loc_fn: Callable = init_to_fan_in,
        prefix: str = "auto",
        create_plates: Callable | None = None,
    ) -> None:
        super().__init__(
            model,
            blocks,
            init_scale=init_scale,
            init_loc_fn=init_loc_fn,
            prefix=prefix,
            create_plates=create_plates,
        )
        flow = Coupling(num_flows=2) if flow is None else flow
        if not isinstance(flow, Coupling | SplineCoupling):
            instead = "Pass `guides.Coupling(...)` or `guides.SplineCoupling(...)`."
            raise argument_error(self._call, "flow", flow, instead, TypeError)
        check_reverse(self._call, reverse)
        if not multiplier_scale > 0:
            raise argument_error(self._call, "multiplier_scale", multiplier_scale, "Pass a positive number.")
        self._kernels, self._flow, self._reverse, self._z_scale = kernels, flow, reverse, multiplier_scale
        self._multipliers: dict[str, Multiplier] = {}

    def _cut(self) -> None:
        super()._cut()
        joint = {name for block, _ in self._blocks for name in block.shapes}
        axes = {name: _axis(site) for name, site in self._latent().items() if name not in joint}
        able = {name: axis for name, axis in axes.items() if axis is not None}
        asked = (self._kernels,) if isinstance(self._kernels, str) else self._kernels
        for pattern in asked or ():
            if not any(matches(name, pattern) for name in able):
                instead = f"Kernels outside plates and blocks: {', '.join(able) or 'none'}."
                raise argument_error(self._call, "kernels", repr(pattern), instead)
        chosen = [name for name in able if asked is None or matches(name, asked)]
        if not chosen:
            got = f"one whose latent sites ({', '.join(self._latent())}) are no kernels"
            instead = "Name kernels like `net/Dense_0.kernel`, or use AutoMeanField."
            raise argument_error(self._call, "model", got, instead)
        self._multipliers = {
            name: Multiplier(
                name,
                self.prefix,
                jnp.shape(self._init_locs[name]),
                able[name],
                self._flow,
                self._reverse,
                self._z_scale,
            )
            for name in chosen
        }

    # -- the guide -------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Values:
        """Sample the latent sites of the model, with z before and log r behind each kernel.

        :return: values by site.
        """
        with handlers.trace() as trace:
            result = super().__call__(*args, **kwargs)
        if numpyro.get_mask() is False:
            return result
        seen = {name: site["value"] for name, site in trace.items()}
        for multiplier in self._multipliers.values():
            numpyro.factor(f"{multiplier.name}_log_reverse", -multiplier.log_reverse(seen))
        return result

    def _alone(self, name: str, moments: Moments | None) -> dist.Distribution:
        fn = super()._alone(name, moments)
        if name not in self._multipliers:
            return fn
        multiplier = self._multipliers[name]
        z = numpyro.sample(multiplier.name, multiplier.posterior(), infer={"is_auxiliary": True})
        return dist.Normal(multiplier.expand(z) * fn.base_dist.loc, fn.base_dist.scale).to_event(fn.event_dim)

    # -- what was learned ------------------------------------------------------------------------------

    def _draw_multipliers(
        self, rng_key: jax.Array, params: Mapping[str, Any], sample_shape: tuple[int, ...]
    ) -> Values:
        """Draws (*sample_shape, size) of z by kernel."""
        found = {}
        keys = jax.random.split(rng_key, len(self._multipliers))
        for (name, multiplier), key in zip(self._multipliers.items(), keys, strict=True):
            with handlers.block():
                fn = handlers.substitute(multiplier.posterior, data=dict(params))()
            found[name] = fn.sample(key, sample_shape)
        return found

    def _draw(self, rng_key: jax.Array, params: Mapping[str, Any], sample_shape: tuple[int, ...]) -> Values:
        of_weights, of_z = jax.random.split(rng_key)
        values = super()._draw(of_weights, params, sample_shape)
        for name, z in self._draw_multipliers(of_z, params, sample_shape).items():
            # m + s eps is there already.
            values[name] += (self._multipliers[name].expand(z) - 1.0) * params[f"{name}_{self.prefix}_loc"]
        return values

    def _unconstrained_quantiles(self, params: Mapping[str, Any], q: jax.Array) -> Values:
        found = super()._unconstrained_quantiles(params, q)
        for name, z in self._draw_multipliers(jax.random.key(0), params, (NUM_DRAWS,)).items():
            loc, sd = (params[f"{name}_{self.prefix}_{field}"] for field in ("loc", "scale"))
            found[name] = self._multipliers[name].quantiles(z, loc, sd, q)
        return found


def _axis(site: dict[str, Any]) -> int | None:
    """Axis of a kernel that z runs along, ``None`` for what is no kernel."""
    name, fn = site["name"].removesuffix(BASE), site["fn"]
    shape = fn.shape()
    leaf = name.replace("/", ".").rsplit(".", 1)[-1]
    kernel = leaf in ("kernel", "embedding") or leaf.startswith("weight")
    real = is_identity(dist.biject_to(fn.support))
    if not kernel or not real or site["cond_indep_stack"] or role(name, shape) != "kernel":
        return None
    return input_axis(name, shape) if len(shape) == 2 else output_axis(name, shape)
