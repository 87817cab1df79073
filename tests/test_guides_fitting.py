"""Running SVI: the same steps as NumPyro's, minibatches at O(B), interruption, and NaN."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal, AutoNormal

from numpyro_bnn.guides import AutoMeanField, fit, fitting
from numpyro_bnn.program.arguments import Arguments
from numpyro_bnn.program.plates import draw_indices, random_indices

X = jax.random.normal(jax.random.key(0), (50, 2))
Y = X @ jnp.array([1.0, -2.0]) + 0.5 * jax.random.normal(jax.random.key(1), (50,))


def model(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def make(optim=None, guide=AutoNormal, program=model, loss=Trace_ELBO):
    return SVI(program, guide(program), optim or numpyro.optim.Adam(0.02), loss())


@pytest.fixture(scope="module")
def svi():
    """One SVI for all tests that may share its compiled steps."""
    return make()


def quiet(svi, key, steps, *args, **kwargs):
    return fit(svi, key, steps, *(args or (X, Y)), **{"progress_bar": False, **kwargs})


def same(one, other):
    """Every leaf of two trees equal in every bit."""
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)

    def raw(leaf):
        is_key = jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return all(np.array_equal(raw(a), raw(b)) and a.dtype == b.dtype for a, b in leaves)


# -------------------------------------------------------------------------------------------------- start


def plain(x, y):
    """As :func:`model`, with a scale; all of its shapes are new to this process."""
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([7]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(x @ w, scale), obs=y)


def test_a_first_fit_compiles_few_programs(compiled):
    """Arguments, keys, initial values and scales, state, steps, parameters; it was one program per operation."""
    jax.clear_caches()  # whatever tests before this one have compiled
    x, key = np.random.default_rng(0).normal(size=(13, 7)).astype("float32"), jax.random.key(0)
    compiled.clear()
    result = quiet(make(guide=AutoMeanField, program=plain), key, 3, x, x[:, 0])
    assert 0 < len(compiled) <= 14, len(compiled)
    assert result.losses.shape == (3,)


def test_the_compiled_start_is_that_of_numpyro(key):
    """Also with bounds that NumPyro computes, and with given values."""

    class Bounded(AutoNormal):
        scale_constraint = dist.constraints.interval(0.0, jnp.array([2.0, 3.0]))

    for guide, given in ((AutoNormal, None), (AutoNormal, {"w_auto_loc": jnp.ones(2)}), (Bounded, None)):
        ours, theirs = make(guide=guide), make(guide=guide)
        with random_indices():
            state = theirs.init(key, X, Y, init_params=given)
            found = fitting._initial_state(ours, key, (X, Y), {}, given)
        expected, found = theirs.get_params(state), ours.get_params(found)
        assert found.keys() == expected.keys()
        for name in expected:
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5)


# ------------------------------------------------------------------------------------------------- indices


@pytest.mark.parametrize(("size", "batch"), [(10, 4), (10, 10), (7, 3), (5, 1), (12, 4)])
def test_indices_are_distinct_and_equally_likely(size, batch):
    number = 20_000
    keys = jax.random.split(jax.random.key(2), number)
    drawn = np.asarray(jax.vmap(lambda key: draw_indices(size, batch, key))(keys))
    assert drawn.min() >= 0
    assert drawn.max() < size
    assert all(len(set(row)) == batch for row in drawn[:500])
    share = batch / size
    # Five standard errors for the largest of at most 12 counts, in 5 cases: fails with probability below 4e-5.
    error = np.sqrt(share * (1 - share) / number)
    assert np.all(np.abs(np.bincount(drawn.ravel(), minlength=size) / number - share) <= 5 * error)


def test_sums_over_a_batch_vary_less_than_with_replacement():
    """By the theory of stratified sampling; on sorted values far less, on shuffled ones by the factor 1 - B/N."""
    values, batch = jnp.arange(100.0), 20
    keys = jax.random.split(jax.random.key(3), 4000)

    def variance(values):
        return float(jnp.var(jax.vmap(lambda key: values[draw_indices(100, batch, key)].mean())(keys)))

    with_replacement = float(jnp.var(values)) / batch
    shuffled = jax.random.permutation(jax.random.key(4), values)
    assert variance(values) < 0.2 * with_replacement
    # A variance of 4000 draws has a relative error of sqrt(2 / 4000) = 2.2 %; one shuffle differs from the mean
    # over shuffles by a few times 1 / sqrt(20 strata).
    assert variance(shuffled) < 0.95 * with_replacement


def test_indices_cost_the_batch_only():
    """No array of the size of the data is made."""

    def batch(key):
        with random_indices(), numpyro.plate("data", 10**6, subsample_size=7) as index:
            return index

    seeded = lambda key: handlers.seed(batch, key)(key)  # noqa: E731
    program = jax.make_jaxpr(seeded)(jax.random.key(0))
    sizes = [var.aval.size for eqn in program.jaxpr.eqns for var in eqn.outvars]
    assert max(sizes) <= 64


# ------------------------------------------------------------------------------------------------ the steps


def test_full_batch_steps_are_those_of_numpyro(svi, key):
    """The same keys and the same updates; only the order of operations in a compiled loop may differ."""
    ours = quiet(svi, key, 40)
    theirs = svi.run(key, 40, X, Y, progress_bar=False)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours.params, theirs.params)
    assert type(ours) is type(theirs)


@pytest.mark.slow
def test_minibatches_reach_the_posterior(key):
    """Conjugate regression: a full-rank guide trained on minibatches has its mean and covariance.

    The optimum is exact. With the step size falling to zero over the run the error left is below a tenth of a
    posterior standard deviation, of which the tolerance allows three.
    """
    svi = make(optax.adam(optax.cosine_decay_schedule(0.05, 4000)), AutoMultivariateNormal)
    result = quiet(svi, key, 4000, X, Y, batch_size=10)
    covariance = jnp.linalg.inv(jnp.eye(2) + X.T @ X / 0.25)
    mean = covariance @ X.T @ Y / 0.25
    sd = jnp.sqrt(jnp.diag(covariance))
    assert jnp.all(jnp.abs(result.params["auto_loc"] - mean) < 0.3 * sd)
    found = jnp.sqrt(jnp.diag(result.params["auto_scale_tril"] @ result.params["auto_scale_tril"].T))
    np.testing.assert_allclose(found, sd, rtol=0.3)


def test_legacy_and_typed_keys_give_the_same(svi):
    legacy, typed = (quiet(svi, key, 3) for key in (jax.random.PRNGKey(7), jax.random.key(7)))
    np.testing.assert_array_equal(legacy.losses, typed.losses)


def test_continuing_compiles_nothing(key):
    traced = []

    def counted(x, y):
        traced.append(1)
        model(x, y)

    svi = make(program=counted)
    first = quiet(svi, key, 5)
    before = len(traced)
    second = quiet(svi, key, 7, init_state=first.state)
    assert len(traced) == before
    whole = quiet(make(), key, 12)
    np.testing.assert_array_equal(np.concatenate([first.losses, second.losses]), whole.losses)
    assert same(second.params, whole.params)


def test_arguments_that_are_no_arrays_are_part_of_the_program(svi, key):
    """1 and True are equal, but not the same argument; another batch size is another program."""
    assert len({Arguments.of((value,), {}) for value in (1, True, 1.0)}) == 3
    unhashable = {1, 2}  # known by its identity
    assert Arguments.of((unhashable,), {}) == Arguments.of((unhashable,), {})
    fixed, arrays = Arguments.of((X, 5), {}).split()
    assert fixed == Arguments.of((Y, 5), {}).split()[0]
    assert fixed.call(arrays)[0][1] == 5
    small, large = (quiet(svi, key, 3, X, Y, batch_size=size) for size in (5, 40))
    assert not np.array_equal(small.losses, large.losses)


def test_initial_params_are_used(svi, key):
    start = {"w_auto_loc": jnp.array([1.0, -2.0]), "w_auto_scale": jnp.array([0.1, 0.1])}
    assert quiet(svi, key, 1, init_params=start).losses[0] < quiet(svi, key, 1).losses[0]


def test_other_losses_and_static_arguments(key):
    svi = SVI(model, AutoNormal(model), optax.adam(0.01), TraceMeanField_ELBO(num_particles=2), batch_size=10)
    assert np.isfinite(quiet(svi, key, 5).losses).all()


def test_mutable_state_is_carried(key):
    def counting(x, y):
        state = numpyro.primitives.mutable("steps", {"count": jnp.zeros(())})
        state["count"] = state["count"] + 1.0
        model(x, y)

    svi = make(program=counting)
    result = quiet(svi, key, 5)
    assert float(result.state.mutable_state["steps"]["count"]) == float(
        svi.run(key, 5, X, Y, progress_bar=False).state.mutable_state["steps"]["count"]
    )


def test_bar_shows_a_running_mean(svi, key, capsys):
    result = quiet(svi, key, 30, progress_bar=True)
    shown = capsys.readouterr().err
    assert "30/30" in shown
    assert f"loss {np.mean(result.losses):.5g}" in shown


# ------------------------------------------------------------------------------------- interruption and NaN


def interrupt_after(monkeypatch, chunks):
    """Ctrl-C while the chunk after so many is running."""
    compiled, calls = fitting._compiled, []

    def interrupted(*given):
        take = compiled(*given)

        def call(arrays, state, number):
            calls.append(number)
            if len(calls) > chunks:
                raise KeyboardInterrupt
            return take(arrays, state, number)

        return call

    monkeypatch.setattr(fitting, "_compiled", interrupted)
    return calls


def test_interruption_returns_what_is_done(svi, key, monkeypatch):
    whole = quiet(svi, key, 200)
    calls = interrupt_after(monkeypatch, 3)
    with pytest.warns(UserWarning, match=r"interrupted: the result is that of \d+ of 200 steps") as caught:
        result = quiet(svi, key, 200)
    done = sum(calls[:3])
    assert len(result.losses) == done
    np.testing.assert_array_equal(result.losses, whole.losses[:done])
    assert caught[0].filename == __file__


def test_interruption_before_the_first_step_is_raised(svi, key, monkeypatch):
    interrupt_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        quiet(svi, key, 10)


def breaking(at, how):
    """An optimizer that goes wrong after so many steps."""

    def update(updates, state, params=None):
        broken = jax.tree.map(lambda g: jnp.where(state == at, how, -0.01 * g), updates)
        return broken, state + 1

    return optax.GradientTransformation(lambda params: jnp.int32(0), update)


@pytest.mark.parametrize("steps", [12, 300])
def test_a_bad_gradient_keeps_the_last_finite_state(key, steps):
    """The update of step 12 makes the parameters NaN: the result is that of 11 steps."""
    broken, sound = (make(breaking(at, jnp.nan)) for at in (11, 10_000))
    with pytest.warns(UserWarning, match="a gradient that is not finite at step 12; .* 11 steps before"):
        result = quiet(broken, key, steps)
    assert same(result.params, quiet(sound, key, 11).params)
    assert len(result.losses) == 11


def test_a_loss_that_is_not_finite_is_named(key):
    """Parameters that jump to 1e30 are finite, but the loss there is not."""
    with pytest.warns(UserWarning, match=r"loss (inf|nan) at step 6; the result is that of the 5 steps before"):
        result = quiet(make(breaking(4, 1e30)), key, 50)
    assert np.isfinite(result.losses).all()
    assert len(result.losses) == 5


def test_stable_update_leaves_bad_steps_out(key):
    def fragile(x, y):
        model(x, y)
        numpyro.factor("rare", jnp.where(jax.random.uniform(numpyro.prng_key()) < 0.2, jnp.nan, 0.0))

    result = quiet(make(program=fragile), key, 60, stable_update=True)
    bad = np.isnan(result.losses)
    assert 1 <= bad.sum() < 40
    assert all(np.isfinite(value).all() for value in result.params.values())


def test_a_start_that_is_not_finite_is_an_error(svi, key):
    with pytest.raises(ValueError, match=r"guides.fit: argument `args` got .* loss (nan|inf) at the first step"):
        quiet(svi, key, 5, X, Y.at[3].set(jnp.nan))


def other_model(x, y):
    numpyro.sample("v", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(0.0, 0.5), obs=y)


def wider(x, y):
    numpyro.sample("w", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    numpyro.sample("y", dist.Normal(0.0, 0.5), obs=y)


# --------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"svi": 3}, TypeError, "argument `svi` got 3"),
        ({"num_steps": 0}, ValueError, "argument `num_steps` got 0. Pass an integer of at least 1"),
        ({"num_steps": 1.5}, ValueError, "argument `num_steps` got 1.5"),
    ],
)
def test_wrong_arguments(svi, key, change, error, message):
    given = {"svi": svi, "num_steps": 3, **change}
    with pytest.raises(error, match=f"guides.fit: .*{message}|{message}"):
        fit(given.pop("svi"), key, given.pop("num_steps"), X, Y, progress_bar=False, **given)


@pytest.mark.parametrize("program", [other_model, wider])
def test_the_state_of_another_model_is_refused(key, program):
    """Also by an SVI that has never run, whose parameters would be those of the state."""
    state = make(program=program).init(key, X, Y)
    with pytest.raises(ValueError, match=r"argument `init_state` got a state in which parameter \['w_auto_loc'\]"):
        quiet(make(), key, 3, init_state=state)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"init_params": {"w_auto_lok": 0.0}},
            ValueError,
            "`init_params` got 'w_auto_lok'. Did you mean 'w_auto_loc'",
        ),
        ({"init_params": 3}, TypeError, "`init_params` got 3"),
        ({"init_state": 3}, TypeError, "`init_state` got 3"),
        ({"stable_update": "no"}, TypeError, "`stable_update` got 'no'"),
        ({"batch_size": 51}, ValueError, "`subsample_size` got 51 for plate 'data' of size 50"),
    ],
)
@pytest.mark.filterwarnings("ignore:subsample_size does not match")  # NumPyro's own, before the refusal
def test_options_that_were_ignored_are_refused(key, options, error, message):
    with pytest.raises(error, match=message):
        quiet(make(), key, 3, X, Y, **options)


def test_parameters_beside_a_state_are_refused(svi, key):
    state = quiet(svi, key, 2).state
    with pytest.raises(ValueError, match="`init_params` got values beside `init_state`"):
        quiet(svi, key, 3, init_state=state, init_params={"w_auto_loc": jnp.ones(2)})


def test_inside_jit_is_refused(svi, key):
    with pytest.raises(TypeError, match=r"values traced by .* scan over `svi.update`"):
        jax.jit(lambda y: quiet(svi, key, 3, X, y).losses)(Y)


def test_no_warning_in_an_ordinary_run(svi, key):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(svi, key, 3)
