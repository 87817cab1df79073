"""The only names that tests take from inside the package, and why no public name shows
what they test.

All else comes from ``numpyro_bnn``, from what its rooms list in ``__all__``, or from
the rooms that contributors build with: ``sgmcmc``, ``moments`` and ``program``.
`tests/use/test_repository.py` holds the tests to this list.
"""

PRIVATE: dict[str, str] = {
    "numpyro_bnn.infer.target.bind": (
        "the potential that all kernels share, against exact densities on every batch"
    ),
    "numpyro_bnn.infer.model_arguments.Start": "what `bind` takes",
    "numpyro_bnn._options.declared_option": (
        "what a declaration says, from which wrong and right values are drawn"
    ),
    "numpyro_bnn.guides.laplace.likelihoods.LIKELIHOODS": (
        "the table of likelihoods of AutoLaplace, of which each row needs an example"
    ),
    "numpyro_bnn.guides.laplace.likelihoods.observed_rows": (
        "an observed site as its likelihood sees it, against sums over all values"
    ),
    "numpyro_bnn.estimators.methods": (
        "the model that an estimator hands to its method, which the demo prints"
    ),
    "numpyro_bnn.metrics.left_out.behind": (
        "when a fit counts as worse than simple models, against scores that are known"
    ),
}
