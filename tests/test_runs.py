"""Runs in folders: the draws of ``MCMC``, resumed bit for bit, refused if they are of something else."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from numpyro.infer import HMC, MCMC, NUTS, SVI, BarkerMH, Gibbs, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_bnn as bnn
from numpyro_bnn import guides, infer, models, nn, priors, runs, symmetry
from numpyro_bnn.runs import folder
from numpyro_bnn.runs.draws import Draws
from numpyro_bnn.runs.folder import Folder
from numpyro_bnn.runs.identity import described_model, described_options, read_model

KEY = jax.random.key(1)
X = jax.random.normal(jax.random.key(0), (24, 2))
Y = jnp.tanh(X @ jnp.array([1.0, -2.0])) + 0.1 * jax.random.normal(jax.random.key(2), (24,))


def model(x, y=None, batch_size=None):
    scale = numpyro.sample("w/scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    numpyro.deterministic("norm", jnp.sum(w**2))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i] @ w), 0.3), obs=None if y is None else y[i])


class Callable_:
    """A model that is an object."""

    def __call__(self, x, y=None):
        return model(x, y)


def network(x, y=None):
    net = bnn.random_network("net", nn.MLP([2, 1], "tanh"), x.shape[1:], priors.Hierarchical())
    with numpyro.plate("data", len(x)) as i:
        numpyro.sample("y", dist.Normal(net(x[i])[..., 0], 0.3), obs=None if y is None else y[i])


def precision(x, y=None):
    tau = numpyro.sample("tau", dist.Gamma(2.0, 2.0))
    w = numpyro.sample("w", dist.Normal(0.0, 1 / jnp.sqrt(tau)).expand([2]).to_event(1))
    numpyro.sample("y", dist.Normal(jnp.tanh(x @ w), 0.3), obs=y)


def blocks():
    return Gibbs([(infer.PrecisionGibbs(precision), ["tau"]), (HMC(precision), None)])


KERNELS = {
    "SGLD": lambda: infer.SGLD(model, steps_per_draw=3, warm_start=0.4),
    "SGHMC": lambda: infer.SGHMC(model, 1e-3, steps_per_draw=2, minibatches="epochs"),
    "MCLMC in OrbitMoves": lambda: infer.OrbitMoves(
        infer.MCLMC(network, steps_per_draw=2, warm_start=infer.WarmStart(0.3, num_steps=20, held_out=0.2)),
        symmetry.find(network, X, Y),
    ),
    "NUTS": lambda: NUTS(model),
    "ParallelTempering": lambda: infer.ParallelTempering(infer.MALA(model, steps_per_draw=2), num_replicas=3),
    "BarkerMH of an object": lambda: BarkerMH(Callable_()),
}
MINIBATCH = {"SGLD", "SGHMC"}


def make(kernel, chains=1, method="vectorized", warmup=8, samples=12, thinning=1):
    return MCMC(
        KERNELS[kernel](),
        num_warmup=warmup,
        num_samples=samples,
        num_chains=chains,
        chain_method=method,
        thinning=thinning,
        progress_bar=False,
    )


def start(path, mcmc, *args, kernel="", **options):
    """In blocks of a few transitions: their number depends on the machine, the draws must not."""
    batch = {"batch_size": 6} if kernel in MINIBATCH else {}
    given = {"block_seconds": 1e-3, "progress_bar": False, **batch, **options}
    return runs.start(path, mcmc, KEY, *(args or (X, Y)), **given)


def same(one, other):
    leaves = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(folder.raw(a), folder.raw(b), equal_nan=True) for a, b in leaves)


def draws_of(run):
    return {**run.get_samples(True), **{f"field {n}": v for n, v in run.get_extra_fields(True).items()}}


# ------------------------------------------------------------------------------------- the draws of MCMC


@pytest.mark.core
@pytest.mark.parametrize(
    ("kernel", "chains", "method", "thinning"),
    [
        ("SGLD", 2, "vectorized", 1),
        ("SGHMC", 1, "vectorized", 3),
        ("NUTS", 1, "vectorized", 1),
        ("NUTS", 3, "vectorized", 2),
        ("NUTS", 2, "sequential", 1),
        ("BarkerMH of an object", 2, "sequential", 1),
        pytest.param("ParallelTempering", 1, "vectorized", 1, marks=pytest.mark.slow),
        pytest.param("MCLMC in OrbitMoves", 2, "vectorized", 1, marks=pytest.mark.slow),
        pytest.param("MCLMC in OrbitMoves", 2, "sequential", 2, marks=pytest.mark.slow),
    ],
)
def test_the_chains_are_those_of_mcmc(tmp_path, kernel, chains, method, thinning):
    """The same to the last bits: two programs may round a transformation differently."""
    batch = {"batch_size": 6} if kernel in MINIBATCH else {}
    mcmc = make(kernel, chains, method, thinning=thinning)
    mcmc.run(KEY, X, Y, **batch)
    run = start(tmp_path / "run", make(kernel, chains, method, thinning=thinning), kernel=kernel)
    assert run.complete
    assert run.num_draws == 12 // thinning
    wanted = {**mcmc.get_samples(True), **{f"field {n}": v for n, v in mcmc.get_extra_fields(True).items()}}
    found = draws_of(run)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.core
def test_gibbs_runs_in_blocks_as_in_mcmc(tmp_path):
    def mcmc():
        return MCMC(blocks(), num_warmup=5, num_samples=8, progress_bar=False)

    wanted = mcmc()
    wanted.run(KEY, X, Y)
    run = start(tmp_path / "run", mcmc())
    for name, value in wanted.get_samples(True).items():
        np.testing.assert_allclose(run.get_samples(True)[name], value, rtol=2e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------- interruptions


class Killed(BaseException):
    """What a SIGKILL is to a test: nothing that runs afterwards sees it."""


def killed_after(monkeypatch, owner, name, count):
    """Let the ``count``-th call of a method end the run, before it has done anything."""
    original, calls = getattr(owner, name), []

    def method(*args, **kwargs):
        calls.append(None)
        if len(calls) == count:
            raise Killed
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize(
    "kernel",
    [
        "SGLD",
        pytest.param("NUTS", marks=pytest.mark.core),
        *(pytest.param(k, marks=pytest.mark.slow) for k in KERNELS if k not in ("SGLD", "NUTS")),
    ],
)
def test_a_run_that_ends_anywhere_goes_on_bit_for_bit(tmp_path, monkeypatch, kernel):
    """In warm-up, in sampling, before the draws of a block are written, and between draws and state."""
    chains = 1 if kernel in ("ParallelTempering", "BarkerMH of an object") else 2
    whole = start(tmp_path / "whole", make(kernel, chains), kernel=kernel, block_seconds=100.0)
    number = 0
    for owner, name, counts in ((Folder, "commit", (1, 2, 4)), (Draws, "write", (1, 3))):
        for count in counts:
            path, number = tmp_path / f"run{number}", number + 1
            with monkeypatch.context() as patch:
                killed_after(patch, owner, name, count)
                with pytest.raises(Killed):
                    start(path, make(kernel, chains), kernel=kernel, block_seconds=1e-9)
            run = start(path, make(kernel, chains), kernel=kernel)
            assert same(draws_of(run), draws_of(whole)), (owner, count)
            assert same(run.last_state, whole.last_state), (owner, count)


def test_draws_can_be_added(tmp_path):
    whole = start(tmp_path / "whole", make("NUTS", 2, samples=14))
    start(tmp_path / "run", make("NUTS", 2, samples=5))
    run = start(tmp_path / "run", make("NUTS", 2, samples=14))
    assert same(draws_of(run), draws_of(whole))
    less = start(tmp_path / "run", make("NUTS", 2, samples=5))
    assert (less.num_draws, less.complete) == (14, True)


def test_a_run_without_warm_up(tmp_path):
    kernel = BarkerMH(model, adapt_step_size=False)
    one = start(tmp_path / "one", MCMC(kernel, num_warmup=0, num_samples=9, progress_bar=False))
    mcmc = MCMC(kernel, num_warmup=0, num_samples=9, progress_bar=False)
    mcmc.run(KEY, X, Y)
    np.testing.assert_allclose(one.get_samples()["w"], mcmc.get_samples()["w"], rtol=1e-6)


def test_ctrl_c_returns_the_finished_draws(tmp_path, monkeypatch):
    whole = start(tmp_path / "whole", make("SGLD", 2), kernel="SGLD")
    original, calls = Folder.commit, []

    def press(*args, **kwargs):
        original(*args, **kwargs)
        calls.append(args[3]["draws"])
        if args[3]["draws"] >= 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "commit", press)
        with pytest.warns(UserWarning, match=r"runs.start: interrupted: \d+ of 12 draws; the same call goes on"):
            part = start(tmp_path / "run", make("SGLD", 2), kernel="SGLD", block_seconds=1e-9)
    assert not part.complete
    assert 0 < part.num_draws < 12
    assert same(part.get_samples(True)["w"], whole.get_samples(True)["w"][:, : part.num_draws])
    run = start(tmp_path / "run", make("SGLD", 2), kernel="SGLD")
    assert run.complete
    assert same(draws_of(run), draws_of(whole))


def test_ctrl_c_before_a_block_is_committed(tmp_path, monkeypatch):
    """Draws and state are those of the block before."""
    whole = start(tmp_path / "whole", make("SGLD", 2), kernel="SGLD")
    original = Folder.commit

    def press(*args, **kwargs):
        if args[3]["draws"] >= 5:
            raise KeyboardInterrupt
        original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "commit", press)
        with pytest.warns(UserWarning, match="interrupted"):
            part = start(tmp_path / "run", make("SGLD", 2), kernel="SGLD", block_seconds=1e-9)
    assert part.num_draws == folder.last_notes(tmp_path / "run")["draws"] < 5
    assert same(part.last_state.z["w"], whole.get_samples(True)["w"][:, part.num_draws - 1])


SCRIPT = """
import sys, signal, jax
sys.path.insert(0, {tests!r})
import test_runs as t
t.start(sys.argv[1], t.make({kernel!r}, 2, samples=60), kernel={kernel!r}, block_seconds=0.02)
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["SGLD", "NUTS", "MCLMC in OrbitMoves"])
def test_sigkill_at_random_moments(tmp_path, kernel):
    """A process that is killed again and again, and started again, draws what one that is left alone draws."""
    random, tests = np.random.default_rng(0), str(Path(__file__).parent)
    script = textwrap.dedent(SCRIPT.format(tests=tests, kernel=kernel))
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}

    def begun(path):
        return subprocess.Popen([sys.executable, "-c", script, str(path)], env=env, stdout=subprocess.DEVNULL)

    path, kills = tmp_path / "run", 0
    for _ in range(6):
        before = max(folder.state_numbers(path), default=0)
        with begun(path) as process:
            while process.poll() is None and max(folder.state_numbers(path), default=0) == before:
                time.sleep(0.005)
            time.sleep(random.uniform(0.0, 0.3))
            kills += process.poll() is None
            process.kill()
    assert kills >= 1
    for name in ("run", "whole"):
        with begun(tmp_path / name) as process:
            assert process.wait() == 0
    found, whole = (bnn.to_inference_data(tmp_path / name) for name in ("run", "whole"))
    for group in ("posterior", "sample_stats"):
        for name, value in whole[group].data_vars.items():
            np.testing.assert_array_equal(found[group][name], value, err_msg=name)


# ------------------------------------------------------------------------------------ damage, disks, locks


def last_state(path):
    return path / f"state-{folder.state_numbers(path)[-1]:08d}.npz"


@pytest.mark.parametrize("what", ["cut", "empty", "changed", "draws"])
def test_a_torn_last_block_is_made_again(tmp_path, what):
    run = start(tmp_path / "run", make("NUTS", 2), block_seconds=1e-9)
    wanted = draws_of(run)
    path = tmp_path / "run"
    if what == "draws":
        chunk = sorted((path / "draws.zarr/posterior/w/c/1").glob("*/*"), key=lambda p: int(p.parent.name))[-1]
        chunk.write_bytes(bytes(len(chunk.read_bytes())))
    else:
        content = last_state(path).read_bytes()
        middle = len(content) // 2
        torn = {"cut": content[:-100], "empty": b"", "changed": content[:middle] + b"zzzz" + content[middle + 4 :]}
        last_state(path).write_bytes(torn[what])
    with pytest.warns(UserWarning, match=r"block \d+ in .* is damaged: the run goes on from the one before"):
        again = start(path, make("NUTS", 2))
    assert same(draws_of(again), wanted)


def test_a_folder_whose_states_are_all_damaged_is_refused(tmp_path):
    start(tmp_path / "run", make("NUTS"), block_seconds=1e-9)
    for state in (tmp_path / "run").glob("state-*.npz"):
        state.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(ValueError, match="whose last blocks are all damaged"),
    ):
        start(tmp_path / "run", make("NUTS"))


def test_any_changed_bytes_of_a_state_are_seen(tmp_path):
    tree = {"a": jnp.arange(50.0), "key": jax.random.key(3), "b": jnp.ones(3, jnp.bfloat16)}
    with Folder("runs.start", tmp_path / "run") as held:
        held.claim({"kernel": "none"})
        held.commit(1, tree, {"n": 1}, {"losses": np.arange(7)})
        assert same(held.latest(tree).tree, tree)
        path, random, refused = last_state(tmp_path / "run"), np.random.default_rng(0), 0
        written = path.read_bytes()
        for begin in random.integers(0, len(written) - 4, 150):
            path.write_bytes(written[:begin] + random.bytes(4) + written[begin + 4 :])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = held.latest(tree)
                except ValueError as error:
                    assert "damaged" in str(error)  # noqa: PT017
                    refused += 1
                else:
                    assert same((found.tree, found.arrays), (tree, {"losses": np.arange(7)}))
        assert refused > 75


def test_a_state_of_other_values_is_seen(tmp_path):
    """A whole file, with numbers that were not written."""
    tree = {"a": jnp.arange(3.0)}
    with Folder("runs.start", tmp_path / "run") as held:
        held.claim({"kernel": "none"})
        held.commit(1, tree, {})
        with np.load(last_state(tmp_path / "run")) as file:
            arrays = {name: file[name] for name in file.files}
        arrays["leaf_0"][1] = 7.0
        np.savez(last_state(tmp_path / "run"), **arrays)
        with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match="all damaged"):
            held.latest(tree)


def test_one_process_at_a_time(tmp_path):
    refused = pytest.raises(ValueError, match=r"another process is writing\. Wait for it")
    with Folder("runs.start", tmp_path / "run"), refused:
        start(tmp_path / "run", make("NUTS"))
    start(tmp_path / "run", make("NUTS"))


def test_the_lock_of_a_killed_process_is_free(tmp_path):
    code = (
        "import sys, os; from numpyro_bnn.runs import folder as f; f.Folder('', sys.argv[1]); os.kill(os.getpid(), 9)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=env, check=False)
    assert done.returncode == -signal.SIGKILL
    assert start(tmp_path / "run", make("BarkerMH of an object")).complete


@pytest.mark.parametrize("where", ["state", "draws"])
def test_a_full_disk_is_reported_and_loses_nothing(tmp_path, monkeypatch, where):
    whole = start(tmp_path / "whole", make("NUTS", 2))
    original, calls = os.fsync, []

    def full(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        calls.append(None)
        if len(calls) > 20 and ("draws.zarr" in name) == (where == "draws") and not os.path.isdir(name):
            raise OSError(28, "No space left on device")
        return original(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"argument `folder` got .*run.*No space left on device.*Free space"):
            start(tmp_path / "run", make("NUTS", 2), block_seconds=1e-9)
    assert not list((tmp_path / "run").glob("*.part"))
    run = start(tmp_path / "run", make("NUTS", 2))
    assert same(draws_of(run), draws_of(whole))


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"runs.start: argument `folder` got .*file.*which cannot be written"):
        start(tmp_path / "file", make("NUTS"))


def test_a_folder_of_other_files(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"holds other files, such as 'thesis\.tex'"):
        start(tmp_path, make("NUTS"))
    assert (tmp_path / "thesis.tex").exists()


# ------------------------------------------------------------------------------------------- the wrong run


def other_prior(x, y=None):
    scale = numpyro.sample("w/scale", dist.HalfNormal(1.1))
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([2]).to_event(1))
    numpyro.deterministic("norm", jnp.sum(w**2))
    with numpyro.plate("data", len(x), subsample_size=None) as i:
        numpyro.sample("y", dist.Normal(jnp.tanh(x[i] @ w), 0.3), obs=None if y is None else y[i])


def other_likelihood(x, y=None):
    with numpyro.handlers.scale(scale=0.5):
        model(x, y)


def mcmc_of(kernel, **options):
    return MCMC(kernel, **{"num_warmup": 4, "num_samples": 6, "progress_bar": False, **options})


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "known"
    start(path, mcmc_of(NUTS(model, target_accept_prob=0.8)))
    return path


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"mcmc": lambda: mcmc_of(NUTS(other_prior))}, "log density was"),
        ({"mcmc": lambda: mcmc_of(NUTS(other_likelihood))}, "log density was"),
        ({"mcmc": lambda: mcmc_of(NUTS(network))}, "site net/Dense_0.kernel_scale was absent"),
        ({"mcmc": lambda: mcmc_of(HMC(model))}, "kernel was NUTS, is HMC"),
        ({"mcmc": lambda: mcmc_of(NUTS(model, target_accept_prob=0.9))}, "option target_accept_prob was 0.8, is 0.9"),
        ({"mcmc": lambda: mcmc_of(NUTS(model), num_warmup=5)}, "num_warmup was 4, is 5"),
        ({"mcmc": lambda: mcmc_of(NUTS(model), num_chains=2, chain_method="vectorized")}, "num_chains was 1, is 2"),
        ({"mcmc": lambda: mcmc_of(NUTS(model), thinning=2)}, "thinning was 1, is 2"),
        ({"args": (X, Y.at[0].add(1e-6))}, r"argument \[0\]\[1\] was float32\[24\]"),
        ({"args": (X[:20], Y[:20])}, r"plate data was \(24, None\), is \(20, None\)"),
        ({"sites": ("w",)}, "sites was None"),
        ({"dtype": "float16"}, "dtype was None, is float16"),
        ({"extra_fields": ("potential_energy",)}, "extra_fields was , is potential_energy"),
        ({"init_params": {"w": jnp.zeros(2), "w/scale": jnp.zeros(())}}, "init_params was"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_another_run_is_refused_by_name(known, change, named):
    given = dict(change)
    mcmc, args = given.pop("mcmc", lambda: mcmc_of(NUTS(model)))(), given.pop("args", (X, Y))
    before = sorted(path.name for path in known.rglob("*"))
    with pytest.raises(ValueError, match=f"the run of something else: .*{named}"):
        start(known, mcmc, *args, **given)
    assert sorted(path.name for path in known.rglob("*")) == before


@pytest.mark.core
def test_another_key_or_version_is_refused(known, monkeypatch):
    with pytest.raises(ValueError, match="rng_key was"):
        runs.start(known, mcmc_of(NUTS(model)), jax.random.key(5), X, Y)
    monkeypatch.setattr("numpyro_bnn.runs.identity.version", lambda name: "9.9")
    with pytest.raises(ValueError, match=r"version of numpyro_bnn was .*, is 9\.9; .*; and \d more"):
        start(known, mcmc_of(NUTS(model)))


# A kernel as a function of one option, and two values of it.
OPTIONS = {
    "number": (lambda eps: infer.SGLD(model, eps), 0.1, 0.2),
    "schedule": (lambda rate: infer.SGLD(model, optax.linear_schedule(rate, 0.0, 5)), 0.1, 0.2),
    "optimizer": (lambda rate: infer.SGLD(model, optimizer=optax.adam(rate)), 0.1, 0.2),
    "held out": (lambda share: infer.MCLMC(model, warm_start=infer.WarmStart(0.3, held_out=share)), 0.0, 0.1),
    "length": (lambda length: infer.MCLMC(model, decoherence_length=length), 1.0, 2.0),
    "array": (lambda size: infer.SGLD(model, 0.1, preconditioner=np.full(3, size)), 1.0, 2.0),
    "inner": (lambda eps: infer.ParallelTempering(infer.MALA(model, eps)), 0.1, 0.2),
    "block": (lambda accept: Gibbs([(HMC(model, target_accept_prob=accept), None)]), 0.7, 0.8),
}


@pytest.mark.core
@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_kernels_are_described(option):
    make, one, other = OPTIONS[option]
    assert described_options("kernel", make(one)) == described_options("kernel", make(one))
    assert described_options("kernel", make(one)) != described_options("kernel", make(other))


def descriptions():
    """Of every kernel in ``OPTIONS``, and of a model."""
    return [described_options("kernel", make(one)) for make, one, _ in OPTIONS.values()] + [
        described_model(read_model("f", network, (X, Y), {}), (X, Y), {})
    ]


def test_a_description_does_not_depend_on_the_process():
    tests = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {tests!r}); import test_runs as t; print(t.descriptions())"
    found = set()
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent), "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 1


def test_a_damaged_description_is_refused(tmp_path):
    start(tmp_path / "run", mcmc_of(NUTS(model)))
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        start(tmp_path / "run", mcmc_of(NUTS(model)))


# ---------------------------------------------------------------------------------------------- what is kept


@pytest.mark.core
def test_chosen_sites_in_half_precision(tmp_path):
    whole = start(tmp_path / "whole", make("NUTS", 2))
    run = start(tmp_path / "run", make("NUTS", 2), sites=("w*",), dtype="float16", extra_fields=("potential_energy",))
    assert set(run.get_samples()) == {"w", "w/scale"}
    assert run.get_samples()["w"].dtype == np.float16
    np.testing.assert_allclose(run.get_samples()["w"], whole.get_samples()["w"], rtol=1e-3)
    assert run.get_extra_fields()["potential_energy"].dtype == np.float32


def test_predictions_need_all_latent_sites(tmp_path):
    """Sites that are not kept would be drawn from the prior."""
    run = start(tmp_path / "run", make("NUTS"), sites=("w/scale",))
    for options in ({"predictions": {"x": X[:3]}, "log_likelihood": False, "posterior_predictive": False}, {}):
        with pytest.raises(ValueError, match=r"draws without those of w\. Keep all sites"):
            bnn.to_inference_data(run, **options)
    found = bnn.to_inference_data(run, log_likelihood=False, posterior_predictive=False)
    assert set(found["posterior"].data_vars) == {"w.scale"}


def test_a_draw_that_half_precision_cannot_hold(tmp_path):
    def large(y):
        a = numpyro.sample("a", dist.Normal(0.0, 1e6))
        numpyro.sample("y", dist.Normal(a, 1.0), obs=y)

    mcmc, options = mcmc_of(NUTS(large)), {"dtype": "float16", "init_params": {"a": jnp.float32(9e5)}}
    with pytest.raises(ValueError, match="in which a draw of 'a' would be infinite"):
        start(tmp_path / "run", mcmc, jnp.float32(9e5), **options)


@pytest.mark.core
def test_a_run_as_mcmc_and_in_arviz(tmp_path):
    run = start(tmp_path / "run", make("NUTS", 2))
    mcmc = make("NUTS", 2)
    mcmc.run(KEY, X, Y)
    assert same(run.mcmc.get_samples()["w"], run.get_samples()["w"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bnn.metrics.HealthWarning)
        one = bnn.to_inference_data(run, predictions={"x": X[:3]})
        other = bnn.to_inference_data(mcmc, predictions={"x": X[:3]})
    for group in ("posterior", "predictions", "log_likelihood", "sample_stats"):
        for name in other[group].data_vars:
            np.testing.assert_allclose(one[group][name], other[group][name], rtol=1e-4, atol=1e-4)
    disk = bnn.to_inference_data(tmp_path / "run")
    assert set(disk["posterior"].data_vars) == {"w", "w.scale", "norm"}
    np.testing.assert_array_equal(disk["posterior"]["w"], one["posterior"]["w"])
    assert disk["posterior"]["w"].dims == one["posterior"]["w"].dims
    assert disk.attrs["algorithm"] == "NUTS"
    assert set(disk["sample_stats"].data_vars) == set(one["sample_stats"].data_vars)


@pytest.mark.core
def test_a_folder_is_read_while_it_is_written(tmp_path, monkeypatch):
    seen = []
    original = Folder.commit

    def look(*args, **kwargs):
        original(*args, **kwargs)
        if args[3]["draws"]:
            found = bnn.to_inference_data(tmp_path / "run")["posterior"]["w"]
            assert np.isfinite(found.to_numpy()).all()
            seen.append(found.shape[1])

    monkeypatch.setattr(Folder, "commit", look)
    start(tmp_path / "run", make("NUTS", 2), block_seconds=1e-9)
    assert seen == sorted(seen)
    assert seen[0] < 12 == seen[-1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda path: bnn.to_inference_data(path / "none"), "which is not the folder of a run"),
        (lambda path: bnn.to_inference_data(str(path / "run"), predictions={"x": X}), "A folder has no model"),
    ],
)
def test_what_a_folder_cannot_give(tmp_path, call, message):
    start(tmp_path / "run", make("NUTS"))
    with pytest.raises(ValueError, match=message):
        call(tmp_path)


def double(x, y=None):
    numpyro.sample("a/b", dist.Normal(0.0, 1.0))
    numpyro.sample("a.b", dist.Normal(0.0, 1.0))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mcmc": 3}, TypeError, "argument `mcmc` got 3. Pass a `numpyro.infer.MCMC`"),
        ({"rng_key": 0}, TypeError, "Pass a key"),
        ({"block_seconds": 0}, ValueError, "above 0"),
        ({"block_seconds": float("nan")}, ValueError, "block_seconds"),
        ({"progress_bar": "no"}, TypeError, "Pass True or False"),
        ({"sites": "w"}, TypeError, "Pass a tuple of names"),
        ({"sites": ("v*",)}, ValueError, "argument `sites` got 'v\\*'. Known: "),
        ({"dtype": "float8"}, ValueError, "Known: float16, float32, float64"),
        ({"extra_fields": ("step_sizes",)}, ValueError, "argument `extra_fields` got 'step_sizes'"),
        ({"extra_fields": ("z_grad",)}, ValueError, "which is not one array"),
        ({"folder": 3}, TypeError, "Pass the name of a folder"),
        ({"mcmc": mcmc_of(NUTS(double))}, ValueError, "stored as 'a.b' like"),
        ({"mcmc": mcmc_of(NUTS(potential_fn=lambda z: z**2))}, ValueError, "Make the kernel from a model"),
        ({"mcmc": mcmc_of(NUTS(model), num_samples=7, thinning=2)}, ValueError, "Take a multiple of `thinning`"),
        ({"mcmc": mcmc_of(NUTS(model), num_chains=2, chain_method=jax.pmap)}, ValueError, "parallel_vectorized"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
@pytest.mark.filterwarnings("ignore:Disabling progress bar")
def test_wrong_arguments(tmp_path, change, error, message):
    if message is None:
        pytest.skip("the model takes no targets too")
    given = {
        "folder": tmp_path / "run",
        "mcmc": None,
        "rng_key": KEY,
        "args": (X, Y),
        "progress_bar": False,
        **change,
    }
    given["mcmc"] = given["mcmc"] or mcmc_of(NUTS(model))
    args = given.pop("args")
    with pytest.raises(error, match=message):
        runs.start(given.pop("folder"), given.pop("mcmc"), given.pop("rng_key"), *args, **given)


def test_a_state_to_start_from_is_refused(tmp_path):
    mcmc = mcmc_of(NUTS(model))
    mcmc.run(KEY, X, Y)
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.raises(ValueError, match="the folder keeps the state"):
        start(tmp_path / "run", mcmc)


@pytest.mark.parametrize("package", ["zarr", "filelock"])
def test_without_a_package_the_extra_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"pip install numpyro_bnn\[runs\]"):
        start(tmp_path / "run", make("NUTS"))
    assert not (tmp_path / "run").exists()


@pytest.mark.core
def test_mcmc_is_left_as_it_was(tmp_path):
    mcmc = make("NUTS", 2)
    start(tmp_path / "run", mcmc)
    assert mcmc.last_state is None
    mcmc.run(KEY, X, Y)  # its kernel was not initialized by the run
    assert mcmc.get_samples()["w"].shape == (24, 2)


# --------------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("method", "chains"), [pytest.param("parallel", 2, marks=pytest.mark.core), (infer.parallel_vectorized, 4)]
)
@pytest.mark.filterwarnings("ignore:Disabling progress bar")
def test_chains_over_two_devices(tmp_path, method, chains):
    """What one device began, two go on with."""
    assert jax.local_device_count() >= 2
    one = start(tmp_path / "one", make("SGLD", chains), kernel="SGLD")
    two = start(tmp_path / "two", make("SGLD", chains, method=method), kernel="SGLD")
    assert len(two.last_state.z["w"].sharding.device_set) == 2
    for name, value in draws_of(one).items():
        np.testing.assert_allclose(draws_of(two)[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    start(tmp_path / "both", make("SGLD", chains, samples=6), kernel="SGLD")
    both = start(tmp_path / "both", make("SGLD", chains, method=method), kernel="SGLD")
    assert same(both.get_samples(True)["w"][:, :6], one.get_samples(True)["w"][:, :6])
    np.testing.assert_allclose(both.get_samples(True)["w"], one.get_samples(True)["w"], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- guides


def linear(x, y, batch_size=None):
    w = numpyro.sample("w", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("data", len(x), subsample_size=batch_size) as i:
        numpyro.sample("y", dist.Normal(x[i] @ w, 0.5), obs=y[i])


def svi_of(optim=None, guide=AutoNormal, program=linear, loss=Trace_ELBO):
    return SVI(program, guide(program), optim or optax.adam(optax.cosine_decay_schedule(0.02, 100)), loss())


def fit(path, svi=None, steps=60, key=KEY, args=(X, Y), **options):
    given = {"batch_size": 6, "progress_bar": False, "block_seconds": 1e-9, **options}
    return runs.fit(path, svi or svi_of(), key, steps, *args, **given)


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["optax", "numpyro"])
def test_a_fit_goes_on_bit_for_bit(tmp_path, monkeypatch, optimizer):
    def svi():
        return svi_of(numpyro.optim.Adam(0.02) if optimizer == "numpyro" else None)

    whole = guides.fit(svi(), KEY, 60, X, Y, batch_size=6, progress_bar=False)
    assert len(fit(tmp_path / "half", svi(), 25).losses) == 25
    for count in (1, 2):
        with monkeypatch.context() as patch:
            killed_after(patch, Folder, "commit", count)
            with pytest.raises(Killed):
                fit(tmp_path / f"killed{count}", svi())
    for name in ("half", "killed1", "killed2", "half"):
        found = fit(tmp_path / name, svi())
        assert same((found.state, found.params, found.losses), (whole.state, whole.params, whole.losses)), name


@pytest.mark.core
def test_bfloat16_survives(tmp_path):
    optimizer = optax.adam(0.02, mu_dtype=jnp.bfloat16)
    whole = guides.fit(svi_of(optimizer), KEY, 60, X, Y, batch_size=6, progress_bar=False)
    fit(tmp_path / "run", svi_of(optax.adam(0.02, mu_dtype=jnp.bfloat16)), 25)
    assert same(fit(tmp_path / "run", svi_of(optax.adam(0.02, mu_dtype=jnp.bfloat16))).state, whole.state)


def test_a_fit_that_fails_keeps_its_last_finite_state(tmp_path):
    def breaking(x, y, batch_size=None):
        linear(x, y)
        numpyro.factor("step", jnp.where(jax.random.uniform(numpyro.prng_key()) < 0.05, jnp.nan, 0.0))

    for _ in range(2):  # going on fails at the same step
        with pytest.warns(UserWarning, match=r"guides.fit: .* at step \d+"):
            found = fit(tmp_path / "run", svi_of(program=breaking), 500)
        assert np.isfinite(found.losses).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"svi": lambda: svi_of(optax.adam(0.03))}, "optimizer was"),
        ({"svi": lambda: svi_of(guide=guides.AutoMeanField)}, "guide was AutoNormal, is AutoMeanField"),
        ({"svi": lambda: svi_of(loss=numpyro.infer.TraceMeanField_ELBO)}, "loss was"),
        ({"key": jax.random.key(9)}, "rng_key was"),
        ({"args": (X, Y + 1)}, "argument"),
        ({"init_params": {"w_auto_loc": jnp.ones(2)}}, "init_params was"),
        ({"batch_size": 5}, "argument"),
        ({"stable_update": True}, "stable_update was False, is True"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
def test_another_fit_is_refused_by_name(tmp_path, change, named):
    fit(tmp_path / "run", steps=3)
    given = dict(change)
    with pytest.raises(ValueError, match=f"runs.fit: .* the run of something else: .*{named}"):
        fit(tmp_path / "run", given.pop("svi", svi_of)(), steps=4, **given)


@pytest.mark.core
def test_adf_goes_on_after_any_epoch(tmp_path, monkeypatch):
    def guide():
        return guides.AutoADF(models.regression(nn.MLP([3, 1], "relu"), priors.Normal()))

    whole = guide().run(KEY, X, Y, num_epochs=5, progress_bar=False)
    options = {"progress_bar": False, "block_seconds": 1e-9}
    with monkeypatch.context() as patch:
        killed_after(patch, Folder, "commit", 3)
        with pytest.raises(Killed):
            runs.fit(tmp_path / "run", guide(), KEY, 5, X, Y, **options)
    for _ in range(2):
        assert same(runs.fit(tmp_path / "run", guide(), KEY, 5, X, Y, **options), whole)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"svi": 3}, TypeError, "argument `method` got int. Pass a `numpyro.infer.SVI` or a `guides.AutoADF`"),
        ({"steps": 0}, ValueError, "at least 1"),
        ({"block_seconds": -1}, ValueError, "block_seconds"),
        ({"progress_bar": 1}, TypeError, "True or False"),
    ],
)
def test_wrong_arguments_of_a_fit(tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        fit(tmp_path / "run", **given)


# ------------------------------------------------------------------------------------------------ progress


def test_one_line_of_progress(tmp_path, capsys):
    options = {"progress_bar": True, "block_seconds": 0.01}
    start(tmp_path / "run", make("NUTS", 2), **options)
    shown = capsys.readouterr().err
    assert "step size" in shown
    assert "20/20" in shown
    assert shown.count("\n") == 1
    start(tmp_path / "run", make("NUTS", 2), **options)  # nothing left to do, nothing to show
    assert capsys.readouterr().err == ""
