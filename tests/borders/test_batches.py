"""Rows that a loader brings: densities, draws and fits are those of arrays."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from disk import draws_of, recorder, same
from helpers import refused, run_chains
from numpyro.infer import MCMC, SVI, TraceMeanField_ELBO
from zoo import BATCH, CLASSES, NOISE, ZOO, N, X, Y, line

from numpyro_bnn import guides, infer, models, nn, runs
from numpyro_bnn.program import Posterior

pytestmark = pytest.mark.core
Q = [0.1586553, 0.5, 0.8413447]  # a standard deviation below and above the median
SIZE = 5  # rows of a batch, which does not divide N: the last one has four


class Tensor:
    """What NumPy can read and JAX cannot, as a tensor of torch or tf is."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None):
        return np.array(self.values, dtype)


class Loader:
    """Shuffles in each epoch, as a loader of torch does; it notes the orders."""

    def __init__(self, data=(X, Y), seed=0):
        self.data, self.random, self.orders = data, np.random.default_rng(seed), []

    def __iter__(self):
        order = self.random.permutation(len(self.data[0]))
        self.orders.append(order)
        for start in range(0, len(order), SIZE):
            yield [Tensor(part[order[start : start + SIZE]]) for part in self.data]


class WithPosition:
    """A loader without end whose iterator is where it is told to be."""

    def __init__(self, as_bytes=False):
        self.number, self.as_bytes = 0, as_bytes

    def __iter__(self):
        return WithPosition(self.as_bytes)

    def __next__(self):
        epoch, start = divmod(self.number, -(-N // SIZE))
        rows = np.random.default_rng(epoch).permutation(N)[start * SIZE :][:SIZE]
        self.number += 1
        return {"x": X[rows], "y": Y[rows]}

    def get_state(self):
        state = json.dumps({"number": self.number})
        return state.encode() if self.as_bytes else json.loads(state)

    def set_state(self, state):
        self.number = json.loads(state)["number"] if self.as_bytes else state["number"]


def grain_loader():
    grain = pytest.importorskip("grain", reason="grain is optional")
    rows = grain.MapDataset.source(range(N)).seed(1).shuffle().repeat()
    pairs = rows.map(lambda row: {"x": X[row], "y": Y[row]})
    return pairs.batch(SIZE).to_iter_dataset()


def torch_loader():
    torch = pytest.importorskip("torch", reason="torch is large, and optional")
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, (X, Y)))
    return torch.utils.data.DataLoader(data, batch_size=SIZE, shuffle=True)


def generator_function():
    loader = Loader()
    return lambda: iter(loader)


LOADERS = {
    "iterable": Loader,
    "function": generator_function,
    "torch": torch_loader,
    "grain": grain_loader,
}


def arguments(loader, num_rows=N, **options):
    """The arguments x and y of a model."""
    data = runs.batches(loader, num_rows, **options)
    return (data["x"], data["y"]) if isinstance(data, dict) else tuple(data)


# -- densities -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "prefetch"), [("iterable", 0), *((name, 2) for name in LOADERS)]
)
def test_minibatches_of_an_epoch_average_to_the_potential(name, prefetch):
    """Of 5 rows and a ragged batch of 4 become minibatches of 6."""
    x, y = arguments(LOADERS[name](), prefetch=prefetch)
    z = {"w": jnp.array([0.3, -1.2])}
    whole = Posterior(line, ZOO["line"].args)
    expected, gradient = jax.value_and_grad(whole.potential)(z)
    posterior = Posterior(line, (x, y), {"batch_size": BATCH}, full=False)
    rows = jax.random.randint(jax.random.key(1), (2 * N // BATCH, BATCH), 0, N)

    @jax.jit
    def each(rows):
        return jax.value_and_grad(lambda z: posterior.potential(z, {"data": rows}))(z)

    energies, gradients = jax.vmap(each)(rows)
    for part in (slice(0, N // BATCH), slice(N // BATCH, None)):
        np.testing.assert_allclose(energies[part].mean(), expected, rtol=1e-5)
        np.testing.assert_allclose(
            gradients["w"][part].mean(0), gradient["w"], rtol=1e-4, atol=1e-4
        )
    assert np.std(energies) > 0.1
    # the same draw again, in another order of its rows, by another program
    again, _ = each(rows[-1][::-1])
    np.testing.assert_allclose(again, energies[-1], rtol=1e-6)


def test_columns_give_the_same_rows():
    x, number = runs.batches(Loader((X, np.arange(N))), N)
    seen = []
    for seed in range(40):
        index = jax.random.randint(jax.random.key(seed), (2, BATCH), 0, N)
        first = jax.vmap(lambda i: x[i])(index)
        rows = jax.vmap(lambda i: number[i])(index)
        np.testing.assert_array_equal(first, X[np.asarray(rows)])
        seen += rows.ravel().tolist()
    for epoch in np.split(np.array(seen), range(N, len(seen), N)):
        assert len(set(epoch)) == len(epoch)


def test_parquet_through_pyarrow(tmp_path):
    """Record batches are dictionaries; a column of lists of one length is a matrix."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is optional")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {"x": pa.FixedSizeListArray.from_arrays(X.ravel(), 2), "y": Y, "row": range(N)}
    )
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=8)
    random = np.random.default_rng(0)

    def shuffled():
        file = pq.ParquetFile(tmp_path / "data.parquet")
        for group in random.permutation(file.num_row_groups):
            rows = file.read_row_group(group)
            yield rows.take(random.permutation(len(rows)))

    data = runs.batches(shuffled, N)
    index = jnp.arange(BATCH)
    rows = np.asarray(data["row"][index])
    np.testing.assert_array_equal(data["x"][index], X[rows])
    np.testing.assert_array_equal(data["y"][index], Y[rows])


# -- draws and fits --------------------------------------------------------------------


def mean_field_svi():
    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, 600))
    return SVI(line, guides.AutoMeanField(line), optimizer, TraceMeanField_ELBO())


def test_a_mean_field_fit_on_a_loader_is_that_on_arrays():
    """Over six keys, within five standard errors; and the best one, whose precision is
    the diagonal of the posterior's.
    """
    fits = []
    for data in (arguments(Loader()), ZOO["line"].args):
        svi, ends = mean_field_svi(), []
        for seed in range(6):
            given = {"batch_size": BATCH, "progress_bar": False}
            result = guides.fit(svi, jax.random.key(seed), 600, *data, **given)
            low, middle, high = svi.guide.quantiles(result.params, Q)["w"]
            ends.append([middle, (high - low) / 2])
        fits.append(np.array(ends, float))
    (loaded, spread), (in_memory, other_spread) = ((f.mean(0), f.var(0)) for f in fits)
    errors = ((spread + other_spread) / 5) ** 0.5
    assert np.all(np.abs(loaded - in_memory) < 5 * errors)
    exact = ZOO["line"].exact
    precision = X.astype(float).T @ X / NOISE**2 + np.eye(2)
    sd = np.diag(precision) ** -0.5
    np.testing.assert_allclose(loaded[0], exact.mean["w"], atol=0.2 * sd.min())
    np.testing.assert_allclose(loaded[1], sd, rtol=0.2)


def test_adf_on_a_loader_is_that_on_arrays_in_its_order():
    """To rounding: rows are absorbed one by one, in parts with a remainder."""
    loader, guide, key = Loader(), guides.AutoADF(line), jax.random.key(0)
    given = {"num_epochs": 3, "progress_bar": False}
    loaded = guide.run(key, *arguments(loader), **given)
    given["orders"] = np.stack(loader.orders[:3])
    expected = guide.run(key, *ZOO["line"].args, **given)
    np.testing.assert_allclose(loaded.losses, expected.losses, rtol=1e-5)
    for name, value in expected.params.items():
        np.testing.assert_allclose(loaded.params[name], value, rtol=1e-5)


# -- runs in folders -------------------------------------------------------------------


def start(path, _):
    data = arguments(WithPosition(as_bytes=True))
    kernel = infer.SGLD(line, 1e-4, steps_per_draw=20)
    sizes = {"num_warmup": 6, "num_samples": 6, "num_chains": 2}
    mcmc = MCMC(kernel, chain_method="vectorized", progress_bar=False, **sizes)
    given = {"batch_size": BATCH, "block_seconds": 1e-9, "progress_bar": False}
    return runs.start(path, mcmc, jax.random.key(0), *data, **given)


@pytest.mark.slow
def test_a_run_on_a_loader_with_a_position_goes_on_bit_for_bit(tmp_path):
    """Killed in warm-up and between draws; the position is bytes."""
    whole = recorder(lambda: tmp_path / "whole", start, every=5)("")
    expected = draws_of(whole.result)
    for cut in (whole.cuts[0], whole.cuts[len(whole.cuts) // 2]):
        assert same(draws_of(start(cut, "")), expected), cut


def fit_in_folder(path, _):
    given = {"block_seconds": 1e-9, "batch_size": BATCH, "progress_bar": False}
    data = arguments(WithPosition())
    return runs.fit(path, mean_field_svi(), jax.random.key(1), 150, *data, **given)


def test_a_fit_on_a_loader_with_a_position_goes_on_bit_for_bit(tmp_path):
    whole = recorder(lambda: tmp_path / "whole", fit_in_folder, every=5)("")
    expected = whole.result.params, whole.result.losses
    found = fit_in_folder(whole.cuts[len(whole.cuts) // 2], "")
    assert same((found.params, found.losses), expected)

    def adf(path, epochs):
        guide = guides.AutoADF(line)
        data, given = arguments(WithPosition()), {"progress_bar": False}
        return runs.fit(path, guide, jax.random.key(0), epochs, *data, **given)

    adf(tmp_path / "adf", 2)
    assert same(adf(tmp_path / "adf", 4)[:2], adf(tmp_path / "adf at once", 4)[:2])


@pytest.mark.slow
def test_a_run_on_grain_goes_on_bit_for_bit(tmp_path):
    def begin(path, samples):
        kernel = infer.SGNHT(line, steps_per_draw=10)
        mcmc = MCMC(kernel, num_warmup=6, num_samples=samples, progress_bar=False)
        given = {"batch_size": BATCH, "block_seconds": 1e-9, "progress_bar": False}
        return runs.start(
            path, mcmc, jax.random.key(0), *arguments(grain_loader()), **given
        )

    begin(tmp_path / "short", 3)
    found = draws_of(begin(tmp_path / "short", 6))
    assert same(found, draws_of(begin(tmp_path / "whole", 6)))


def test_a_loader_without_a_position_is_not_resumed(tmp_path):
    def begin(samples):
        kernel = infer.SGLD(line, 1e-4, steps_per_draw=2, warm_start=0.0)
        mcmc = MCMC(kernel, num_warmup=2, num_samples=samples, progress_bar=False)
        given = {"batch_size": BATCH, "progress_bar": False}
        return runs.start(
            tmp_path, mcmc, jax.random.key(0), *arguments(Loader()), **given
        )

    done = draws_of(begin(2))
    with refused("args", "`get_state` and `set_state`"):
        begin(4)
    assert np.isfinite(done["w"]).all()


# -- refusals --------------------------------------------------------------------------


def shifted(x, shift, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w + shift[i], NOISE), obs=y[i])


def with_effects(x, y=None, batch_size=None):
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        effect = numpyro.sample("effect", dist.Normal())
        numpyro.sample("y", dist.Normal(x[i] @ w + effect, NOISE), obs=y[i])


def with_mean(mean, size=None):
    """A model of which ``mean(x, w, i)`` is the mean."""

    def model(x, y=None, batch_size=None):
        w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
        with numpyro.plate("data", size or len(x), subsample_size=batch_size) as i:
            numpyro.sample("y", dist.Normal(mean(x, w, i), NOISE), obs=y[i])

    return model


def by_rows(x, w, i):
    return x[i] @ w


def in_chunks(x, w, i):
    return jax.lax.map(lambda part: x[part] @ w, i.reshape(2, -1)).reshape(-1)


OTHER_USES = {
    "in chunks": in_chunks,
    "numbers": lambda x, w, i: x[i] @ w + i / N,
    "shifted": lambda x, w, i: x[(i + 1) % N] @ w,
    "other rows": lambda x, w, i: x[i] @ w + runs.Rows(Y)[i],
}


@pytest.mark.parametrize("name", OTHER_USES)
def test_indices_may_only_read_all_rows_of_a_minibatch(name):
    """Others would be another draw, or belong to other rows."""
    with refused("args", "may only read rows, all at once and unchanged"):
        bound(with_mean(OTHER_USES[name]), arguments(Loader()))


def bound(model, args):
    given = {"batch_size": BATCH, "num_warmup": 1, "num_samples": 1}
    kernel = infer.SGLD(model, 1e-4, steps_per_draw=1, warm_start=0.0)
    run_chains(kernel, *args, **given)


def test_what_cannot_take_a_loader_refuses_it():
    x, y = arguments(Loader())
    other = arguments(Loader())[1]

    def sample(model=line, args=(x, y), batch_size=BATCH, **options):
        kernel = infer.SGLD(model, **options)
        run_chains(kernel, *args, batch_size=batch_size)

    def adf(*given, keys=None, **options):
        key = jax.random.key(0) if keys is None else keys
        guides.AutoADF(line).run(key, *given, progress_bar=False, **options)

    keys = jax.random.split(jax.random.key(0), 2)
    mesh = jax.make_mesh((1, 2), ("chain", "data"))
    mcmc = MCMC(infer.SGLD(line), num_warmup=1, num_samples=1)
    never_made = "never made", mcmc, keys[0], x, y, BATCH
    for call, argument, text in [
        (lambda: sample(shifted, (x, Y, y)), "args", "also select rows of an array"),
        (lambda: sample(with_effects), "args", "a value for each row"),
        (lambda: sample(args=(x, other)), "args", "from one `runs.batches`"),
        (lambda: sample(with_mean(by_rows, 12)), "args", "has size 12, the loader 24"),
        (lambda: sample(batch_size=2), "args", "so few rows fit in memory"),
        (lambda: sample(minibatches="epochs"), "minibatches", "its own order"),
        (lambda: sample(gradient="control_variates"), "args", "all are needed"),
        (
            lambda: guides.fit(mean_field_svi(), keys[0], 9, x, y, progress_bar=False),
            "args",
            "`subsample_size`",
        ),
        (lambda: adf(x, y, keys=keys), "rng_key", "several runs at once"),
        (lambda: adf(x, y, orders=np.arange(N)[None]), "orders", "its own order"),
        (lambda: adf(x, Y), "args", "another order"),
        (lambda: runs.start(*never_made, mesh=mesh), "mesh", "in no order"),
        (lambda: x[jnp.zeros((2, 2), int)], "index", "the plate's indices alone"),
        (lambda: x[0], "index", "the plate's indices alone"),
    ]:
        with refused(argument, text):
            call()


def test_wrong_sources_are_refused():
    for source, argument, text in [
        (3, "source", "Pass an iterable of batches"),
        (X, "source", "Pass an iterable of batches"),
        ([], "source", "without rows"),
        ([(X[:2], Y[:3])], "source", "one row for each data point"),
        ([(1.0, 2.0)], "source", "one row for each data point"),
        ([np.array(["a", "b"])], "source", "Give arrays of numbers"),
        ([(X[:5], Y[:5]), X[:5]], "source", "Only the number of rows may differ"),
        ([(X[:5], Y[:5]), (X[:5, :1], Y[:5])], "source", "of several kinds"),
        ([X[:20]], "num_rows", "Pass the rows of one epoch"),
        ([np.ones(41)], "num_rows", "a batch of 41 rows"),
        (iter([X]), "source", "starts again"),
    ]:
        with refused(argument, text):
            rows = runs.batches(source, 40 if argument == "num_rows" else N)
            rows.fetch(np.stack([np.full(N, number) for number in range(4)]))
    with refused("num_rows"):
        runs.batches([X], 0)


def test_an_epoch_may_drop_a_part_of_a_batch():
    random = np.random.default_rng(0)

    def dropping():
        order = random.permutation(N)
        yield from np.split(X[order[: N - 4]], 4)

    rows = runs.batches(dropping, N)
    rows.fetch(random.integers(0, N, (20, BATCH)))


def test_the_same_rows_in_each_epoch_are_all_that_a_loader_has():
    """Batches of one size do not tell a dropped last one from a wrong `num_rows`."""
    loader = Loader((X[:20].astype(float), Y[:20].astype(float)))
    x, _ = runs.batches(loader, N)
    with refused("num_rows", "24 for a source with 20 rows"):
        x.fetch(np.random.default_rng(0).integers(0, N, (40, BATCH)))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_goes_on_after_its_error(prefetch):
    failing, random = [False], np.random.default_rng(1)

    def loader():
        for part in np.split(X[random.permutation(N)], 4):
            if failing[0]:
                raise OSError("the disk went away")
            yield part

    rows = runs.batches(loader, N, prefetch=prefetch)
    draws = np.random.default_rng(0).integers(0, N, (60, BATCH))
    failing[0] = True
    for draw in draws[:2]:
        with pytest.raises(OSError, match="went away"):
            rows.fetch(np.stack([draw, *draws[2:12]]))
    failing[0] = False
    assert np.isfinite(rows.fetch(draws)).all()


def in_order(*data):
    """Batches that do not change."""
    return [tuple(part[k : k + SIZE] for part in data) for k in range(0, N, SIZE)]


def test_values_of_a_loader_are_checked_by_one_pass():
    """A label that does not exist, and NaN, in the last row only."""
    model, last = models.classification(nn.Dense(3), 3), np.arange(N) == N - 1
    for x, y in [
        (X, np.where(last, 3, CLASSES)),
        (np.where(last[:, None], np.nan, X), CLASSES),
    ]:
        data = arguments(in_order(x, y))
        with pytest.raises(ValueError, match=r"argument `[xy]` got"):
            Posterior(model, data, {"batch_size": BATCH}, full=False)
    once = arguments(iter(in_order(X, CLASSES)))
    with refused("source", "Pass a function that makes it"):
        Posterior(model, once, {"batch_size": BATCH}, full=False)


class Restarted:
    """The iterator of :class:`OneIterator`."""

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.batches)


class OneIterator(Loader):
    """As a loader of torch with ``persistent_workers=True``: one iterator again."""

    def __init__(self, data=(X, Y)):
        super().__init__(data)
        self.iterator = Restarted()

    def __iter__(self):
        self.iterator.batches = super().__iter__()
        return self.iterator


@pytest.mark.parametrize("prefetch", [0, 2])
def test_values_of_a_loader_with_one_iterator_are_checked(prefetch):
    """The pass that checks them does not take rows from the epochs."""
    x, y = arguments(OneIterator((X, CLASSES)), prefetch=prefetch)
    model = models.classification(nn.Dense(3), 3)
    Posterior(model, (x, y), {"batch_size": BATCH}, full=False)
    draws = np.stack([np.full(BATCH, number) for number in range(3 * N // BATCH)])
    rows = x.fetch(draws).reshape(-1, X.shape[1])
    np.testing.assert_array_equal(np.sort(rows, 0), np.sort(np.tile(X, (3, 1)), 0))


def test_a_loader_that_does_not_shuffle_is_noticed():
    x, _ = runs.batches(in_order(X, Y), N, prefetch=0)
    with pytest.warns(UserWarning, match="in the same order in every epoch") as seen:
        x.fetch(np.random.default_rng(0).integers(0, N, (20, BATCH)))
    assert len(seen) == 1
