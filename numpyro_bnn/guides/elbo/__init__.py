"""Low-variance estimators of the evidence lower bound, for any NumPyro model."""

from numpyro_bnn.guides.elbo.elbo import TraceFlipout_ELBO, TraceLocalReparam_ELBO

__all__ = ["TraceFlipout_ELBO", "TraceLocalReparam_ELBO"]
