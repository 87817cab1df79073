"""Chains and rows over devices and processes have the draws of one device."""

import re
import socket
import stat
import subprocess
import time
import warnings
from functools import partial
from signal import SIGKILL

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import zoo
from disk import blocks, draws_of, python, same
from helpers import each, group, group_names
from jax.sharding import NamedSharding, PartitionSpec
from numpy.testing import assert_allclose
from numpyro.infer import MCMC, NUTS
from zoo import BATCH, line

import numpyro_bnn as bnn
from numpyro_bnn import infer, models, nn, runs
from numpyro_bnn.estimators import Regressor

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore:Disabling progress bar"),
]
X, Y = zoo.X[:23], zoo.Y[:23]  # an odd number of rows: the last device has fewer


def masked(x, y=None):
    """Missing observations, plates of groups, a value for each group and row."""
    w = numpyro.sample("w", dist.Normal().expand([2]).to_event(1))
    with numpyro.plate("groups", 3):
        effect = numpyro.sample("effect", dist.Normal())
    with numpyro.plate("data", len(x)):
        scale = numpyro.sample("scale", dist.LogNormal(0.0, 0.1))
        mean = numpyro.subsample(x, event_dim=1) @ w + effect[jnp.arange(len(x)) % 3]
        with numpyro.handlers.mask(mask=x[:, 0] > -0.5):
            numpyro.sample("y", dist.Normal(mean, 0.5 * scale), obs=y)


FIELDS = {"extra_fields": ("potential_energy",)}
CASES = {
    "NUTS": (lambda: NUTS(zoo.hierarchical, max_tree_depth=3), FIELDS),
    "NUTS of values for each row": (lambda: NUTS(masked, max_tree_depth=3), FIELDS),
    "SGLD": (
        lambda: infer.SGLD(zoo.spread, 1e-3, steps_per_draw=2),
        {"batch_size": BATCH},
    ),
    "SGHMC": (
        lambda: infer.SGHMC(models.regression(nn.Dense(1)), 1e-3, steps_per_draw=2),
        {},
    ),
    "MCLMC": (lambda: infer.MCLMC(zoo.hierarchical, 0.1, steps_per_draw=2), {}),
}


def mcmc_of(case, chains=2, samples=5, method="vectorized"):
    kernel = CASES[case][0]() if case in CASES else case
    sizes = {"num_warmup": 3, "num_samples": samples, "num_chains": chains}
    return MCMC(kernel, chain_method=method, progress_bar=False, **sizes)


def start(path, case, shape=None, data=(X, Y), **options):
    mesh = shape and jax.make_mesh(shape, ("chain", "data"))
    given = {"block_seconds": 1e-3, "progress_bar": False, **CASES[case][1]}
    data = data(mesh) if callable(data) else data
    mcmc = mcmc_of(case, **options)
    return runs.start(path, mcmc, jax.random.key(1), *data, mesh=mesh, **given)


def own_rows(mesh, memory=None):
    """Arrays of all rows, of which this process has its part only."""
    sharding = NamedSharding(mesh, PartitionSpec("data"), memory_kind=memory)
    count = len(zoo.X) // jax.process_count()
    own = slice(count * jax.process_index(), count * (jax.process_index() + 1))
    parts = zoo.X[own], zoo.Y[own]
    return [jax.make_array_from_process_local_data(sharding, part) for part in parts]


def close(found, expected):
    """Equal but for the rounding of sums in another order."""
    for name, value in expected.items():
        assert_allclose(found[name], value, rtol=2e-3, atol=2e-4, err_msg=name)


# -- devices ---------------------------------------------------------------------------


@each("case", ["SGHMC", "NUTS of values for each row", "MCLMC"], fast=1)
def test_rows_over_two_devices(tmp_path, case):
    """If they sent each other rows, a warning would say so."""
    spread = start(tmp_path / "spread", case, (1, 2))
    assert len(jax.tree.leaves(spread.last_state)[0].sharding.device_set) == 2
    close(draws_of(spread), draws_of(start(tmp_path / "one", case)))


@pytest.mark.parametrize("memory", [None, "unpinned_host"])
def test_rows_that_are_already_on_the_devices(tmp_path, memory):
    """As those of several processes are made; a gather of them says how it is split."""
    rows = partial(own_rows, memory=memory)
    spread = start(tmp_path / "spread", "SGLD", (1, 2), rows)
    alone = start(tmp_path / "one", "SGLD", data=(zoo.X, zoo.Y))
    close(draws_of(spread), draws_of(alone))


@pytest.mark.slow
def test_chains_over_two_devices(tmp_path):
    """What one device began, two go on with."""
    one = start(tmp_path / "one", "SGLD")
    two = start(tmp_path / "two", "SGLD", method="parallel")
    assert len(two.last_state.z["sigma"].sharding.device_set) == 2
    close(draws_of(two), draws_of(one))
    start(tmp_path / "both", "SGLD", samples=2)
    both = draws_of(start(tmp_path / "both", "SGLD", method=infer.parallel_vectorized))
    assert same(both["sigma"][:, :2], draws_of(one)["sigma"][:, :2])
    close(both, draws_of(one))
    for method in ("parallel", "vectorized"):
        # programs of a mesh are no use to other methods
        mcmc = mcmc_of("SGLD", method=method)
        mcmc.run(jax.random.key(1), X, Y, batch_size=BATCH)
        close(draws_of(mcmc), draws_of(one))


@pytest.mark.slow
def test_rows_that_must_be_sent_around_are_noticed(tmp_path):
    mesh = jax.make_mesh((1, 2), ("chain", "data"))
    mcmc, given = mcmc_of(infer.SGHMC(line, 1e-3)), {"progress_bar": False}
    message = "every step sends all rows.*numpyro.subsample"
    with pytest.warns(UserWarning, match=message) as seen:
        runs.start(tmp_path, mcmc, jax.random.key(1), X, Y, mesh=mesh, **given)
    assert seen[0].filename == __file__


def shaped(x, y=None):
    """The number of clusters is a value of the data."""
    with numpyro.plate("clusters", len(np.unique(x)) + 1):
        numpyro.sample("w", dist.Normal())
    with numpyro.plate("data", len(x)):
        numpyro.sample("y", dist.Normal(), obs=y)


def test_a_mesh_that_cannot_be_used(tmp_path):
    def use(shape=(1, 2), names=("chain", "data"), model=line, x=X, **options):
        given = {"mesh": jax.make_mesh(shape, names), "progress_bar": False}
        runs.start(
            tmp_path, mcmc_of(NUTS(model), **options), jax.random.key(1), x, Y, **given
        )

    for call, message in [
        (lambda: use((2,), ("rows",)), "Name its axes"),
        (lambda: use((2, 1), chains=3), '2 devices along "chain" for 3 chains'),
        (lambda: use(method="sequential"), "sequential"),
        (lambda: use(x=runs.Rows(X)), "not split over devices"),
        (lambda: use(x=X[:, 0] * 0, model=shaped), "shaped by the values"),
        (lambda: use(model=lambda x, y: line(x[:9], y[:9])), "as many rows"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert not blocks(tmp_path)


# -- programs on disk ------------------------------------------------------------------


def fitted_elsewhere(folder, **options):
    """Programs that a process keeps during a fit, and what it predicts."""
    code = f"import test_processes; test_processes.fit_here(**{options})"
    # an empty name of JAX's own cache: there is none
    place = {"XDG_CACHE_HOME": str(folder), "JAX_COMPILATION_CACHE_DIR": ""}
    process = python(code, devices=1, JAX_PLATFORMS="cpu", **place)
    done = subprocess.run(**process, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kept, *predicted = done.stdout.split()
    return int(kept), predicted


def fit_here(**options):
    """What such a process does; afterwards JAX keeps no programs."""
    kept = []

    def note(name, **_):
        if name.endswith("cache_misses"):
            kept.append(name)

    jax.monitoring.register_event_listener(note)
    model = Regressor("adf", widths=(3,), effort=0.1, random_state=0, **options)
    model.fit(X, Y)
    predicted, number = model.predict(X[:3]).tolist(), len(kept)
    jax.jit(lambda x: x**3 - 0.123)(X)
    assert len(kept) == number
    assert not jax.config.jax_compilation_cache_dir
    print(number, *predicted)


@pytest.mark.slow
def test_another_process_loads_the_programs_of_a_fit(tmp_path):
    """And predicts the same bits; nobody else may read or change them."""
    first, predicted = fitted_elsewhere(tmp_path)
    folder = tmp_path / "numpyro_bnn" / "programs"
    assert first == len(list(folder.iterdir())) > 0
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    second, again = fitted_elsewhere(tmp_path)
    assert second < first / 10  # one is not lowered to the same bytes each time
    assert again == predicted


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unwanted", "open to others"])
def test_fits_that_keep_no_programs(case, tmp_path):
    """Nobody wants it, or others could put programs there."""
    folder = tmp_path / "numpyro_bnn" / "programs"
    if case == "open to others":
        folder.mkdir(parents=True)
        folder.chmod(0o770)
    kept, predicted = fitted_elsewhere(tmp_path, cache=case != "unwanted")
    assert kept == 0
    assert len(predicted) == 3


# -- processes -------------------------------------------------------------------------


def begin(path, case, shape, processes=1, devices=1, **options):
    """Processes that make one run together, each of which calls ``work``."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    begun = []
    for index in range(processes):
        joined = (
            f"jax.distributed.initialize('127.0.0.1:{port}', {processes}, {index}, "
            f"heartbeat_timeout_seconds=10)"
        )
        first = f"import jax; {joined}; " if processes > 1 else ""
        given = f"{str(path)!r}, {case!r}, {shape}, {index}, **{options}"
        code = f"{first}import test_processes; test_processes.work({given})"
        process = python(code, devices, JAX_PLATFORMS="cpu")
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        begun.append(subprocess.Popen(**process, **pipes))
    return begun


def end(processes):
    """Exit code and output of each."""
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        codes = [process.returncode for process in processes]
        return list(zip(codes, outputs, strict=True))
    finally:
        for process in processes:
            process.kill()
            process.wait()


def together(*given, **options):
    for code, text in end(begin(*given, **options)):
        assert code == 0, text


def work(path, case, shape, index, chains=4, samples=5, own=False):
    warnings.simplefilter("error")
    data = own_rows if own else (X, Y)
    if own:
        rows = own_rows(jax.make_mesh(shape, ("chain", "data")))
        with pytest.raises(ValueError, match="Split its rows along the axis"):
            start(path, case, shape[::-1], rows, chains=chains)
    run = start(path, case, shape, data, chains=chains, samples=samples)
    assert run.complete
    if index:
        with pytest.raises(RuntimeError, match="the first process has the draws"):
            run.get_samples()
    elif own:
        warnings.simplefilter("ignore")  # chains this short are not healthy
        idata = bnn.to_inference_data(run, predictions={"x": zoo.NEW_X})
        assert group(idata, "predictions")["y_mean"].shape == (chains, samples, 5)
        assert "log_likelihood" not in group_names(idata)


def values_of(path):
    idata = bnn.to_inference_data(path)
    groups = [group(idata, name) for name in group_names(idata)]
    return {
        name: value.to_numpy()
        for found in groups
        for name, value in found.data_vars.items()
    }


@pytest.mark.slow
def test_an_error_of_the_first_process_ends_all(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    begun = begin(tmp_path, "MCLMC", (1, 2), processes=2)
    (code, text), (other_code, other_text) = end(begun)
    assert code != 0
    assert "which holds other files" in text
    assert other_code != 0
    assert "the first process has stopped" in other_text


@pytest.mark.slow
@pytest.mark.parametrize("case", ["SGHMC", "NUTS"])
def test_each_process_has_its_own_rows(tmp_path, case):
    """No process has those of the other; the draws are those of one with all."""
    for samples in (2, 5):
        options = {"processes": 2, "own": True, "samples": samples}
        together(tmp_path / "own", case, (1, 2), **options)
    start(tmp_path / "one", case, data=(zoo.X, zoo.Y), chains=4)
    close(values_of(tmp_path / "own"), values_of(tmp_path / "one"))


@pytest.mark.slow
def test_chains_over_two_processes(tmp_path):
    """Bit for bit those of one process; a run goes on, in one process too."""
    together(tmp_path / "one", "NUTS", (2, 1), devices=2)
    for path, processes in (("run", 2), ("both", 1)):
        together(tmp_path / path, "NUTS", (2, 1), processes=2, samples=2)
        options = {"processes": processes, "devices": 2 // processes}
        together(tmp_path / path, "NUTS", (2, 1), **options)
        assert same(values_of(tmp_path / path), values_of(tmp_path / "one")), path


@pytest.mark.slow
def test_a_process_that_is_gone_ends_the_others(tmp_path):
    """The run then goes on from its last block."""
    left, gone = begin(tmp_path, "MCLMC", (1, 2), processes=2, samples=1_000_000)
    while blocks(tmp_path) < 5 and left.poll() is None:
        time.sleep(0.05)
    gone.send_signal(SIGKILL)
    [(code, text)] = end([left])
    gone.kill()
    gone.communicate()
    assert code != 0
    assert re.search("process of this run may have ended|heartbeat", text, re.I), text
    done = values_of(tmp_path)["sigma"].shape[1]
    together(tmp_path, "MCLMC", (1, 2), devices=2, samples=done + 2)
    assert values_of(tmp_path)["sigma"].shape == (4, done + 2)
