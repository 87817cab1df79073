"""The scripts of examples/ as tests run them: options for a tiny run, and what is
checked of it beside its scores.
"""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

SHORT_CHAINS = (
    "ignore:to_inference_data"  # chains this short are not healthy, and say so
)
NOT_AT_THE_MODE = (
    "ignore:.*posterior sds from the mode"  # nor are fits of a few steps at the mode
)
PIXELS = "ignore:to_inference_data.*\n- standardized"  # they share a scale
# five transitions of warm-up do not find the step size
REFUSED_STEPS = "ignore:to_inference_data.*\n- refused_steps"
FEW_ROWS = "ignore:.*rows lie more than 3 standard deviations"


class Script(NamedTuple):
    """A script and a tiny run of it.

    :param options: of the command line.
    :param refused: options that the script answers with "must be at least", with their
        values.
    :param says: what it prints, in part.
    :param needs_data: it reads the folder of benchmark data.
    :param warnings: filters for what a run this small warns of.
    :param check: called with the result, the page, and the output path; asserts what is
        special.
    :param runs: False if another test runs it.
    """

    options: str
    refused: tuple[str, ...] = ()
    says: str = ""
    needs_data: bool = False
    warnings: tuple[str, ...] = ()
    check: Callable[[SimpleNamespace], None] | None = None
    runs: bool = True


# -- checks ----------------------------------------------------------------------------


def check_microcanonical(run):
    case = run.result["cases"]["energy, 1x20"]["MCLMC"]
    assert case["equal_gradients"]["gradients"] == 2 * 12 * 25 * 2
    assert case["equal_seconds"]["seconds"] >= case["equal_gradients"]["seconds"]
    flops = run.result["step_costs"]["energy, 1x20"]["flops"]
    # not much more arithmetic than two gradients
    assert flops["step, mclachlan"] < 2.5 * flops["gradient"]


def check_collapse_cost(run):
    assert [(row["hidden"], row["outputs"]) for row in run.result] == [(50, 1), (50, 3)]
    # Counted by the compiler, not timed: without derivatives by directions, and outputs
    # apart from each other.
    assert all(
        row["flops_ratio"] < limit
        for row, limit in zip(run.result, (12, 25), strict=True)
    )


def check_gradient_cost(run):
    assert [row["n"] for row in run.result] == [455, 455, 5000]
    # Counted by the compiler, not timed: our models do no more arithmetic than the
    # hand-written ones.
    assert all(row["flops_ratio"] < 1.05 for row in run.result)


def check_gpu(run):
    from examples.benchmarks import gpu

    cells = run.result["cells"]
    assert not [name for name, found in cells.items() if "failed" in found]
    assert len(cells) == 2 * 7 + 1 + 2
    table, images = cells["splits: generated, 2 splits"], cells["images: ensemble"]
    assert np.isfinite(table["log_likelihood"]).all()
    assert len(table["rmse"]) == 2
    assert 0 <= images["error"] <= 1
    # a later call measures nothing again
    options = SCRIPTS[f"{BENCHMARK}.gpu"].options.split()
    again = gpu.main([*options, "--output", str(run.output)])
    assert again["cells"] == json.loads(json.dumps(cells))


def check_minibatches(run):
    spent = {
        row["method"]: row["spent"]
        for row in run.result["rows"]
        if row["method"] in ("SGNHT", "MCLMC")
    }
    assert len(spent) == 2
    # what was asked for
    assert all(0.75 * 4000 < value < 1.25 * 4000 for value in spent.values())


def check_last_layer(run):
    # 64-4-2-10: 260 + 10 + 30
    assert [row.random_weights for row in run.result] == [
        0,
        30,
        30,
        300,
        300,
    ]


def check_active_learning(run):
    assert run.result["labels"] == [16, 19]
    assert run.result["programs"][0] > 0
    assert sum(run.result["programs"][2:]) == 0  # the second seed compiles nothing
    assert [row[0] for row in run.result["random"]] == [
        row[0] for row in run.result["uncertain"]
    ]


def check_coupling_step(run):
    from examples.benchmarks.coupling_step import ratio_to_fastest

    # the flows compared have the same size
    assert len(set(run.result["rows"][0]["parameters"].values())) == 1
    times = {
        "AutoCoupling": [2.0, 2.0, 9.0],
        "a": [4.0, 4.0, 4.0],
        "b": [5.0, 1.0, 5.0],
    }
    assert ratio_to_fastest(times) == 0.5


def check_sources(run):
    memory, *steps = run.result["rows"]
    assert min(memory["peaks"].values()) > 10  # MB of an interpreter
    assert [row["source"] for row in steps] == ["arrays", "batches"]


# -- scripts ---------------------------------------------------------------------------

BENCHMARK = "examples.benchmarks"
SCRIPTS: dict[str, Script] = {
    "examples.demo": Script(
        "--held-out 180 --effort 0.004",
        ("--held-out 2",),
        says="CAN THE FIT BE TRUSTED?",
        warnings=("ignore::numpyro_bnn.metrics.HealthWarning",),
    ),
    "examples.tabular": Script("--splits 2 --effort 0.004 --trees 3", ("--splits 0",)),
    "examples.minibatch": Script(
        "--width 3 --batch-size 64 --num-warmup 10 --num-samples 12 --steps-per-draw 30"
        " --nuts-rows 40 --nuts-warmup 15 --num-chains 2 --test-rows 30",
        ("--batch-size 0",),
        says="diabetes data instead",
        warnings=(REFUSED_STEPS,),
    ),
    "examples.ensembles": Script(
        "--sets energy --widths 3 --members 2 --optimizer-steps 600 --num-warmup 20"
        " --num-samples 12 --steps-per-draw 4 --nuts-warmup 6 --max-tree-depth 2",
        ("--members 1",),
    ),
    "examples.symmetries": Script(
        "--nets relu --ways non-centered moves --width 3 --num-warmup 6"
        " --num-samples 8 --max-tree-depth 2",
        ("--num-chains 1",),
    ),
    "examples.probabilistic_backpropagation": Script(
        "--widths 4 3 --num-epochs 2 --nuts-rows 30 --nuts-warmup 10 --nuts-samples 10",
        ("--widths 3 0", "--num-epochs 0"),
        says="diabetes data instead",
    ),
    "examples.neal": Script(
        "--num-warmup 4 --num-samples 6 --num-chains 2 --max-tree-depth 2",
        ("--num-samples 3",),
    ),
    "examples.two_modes": Script(
        "--num-warmup 4 --num-samples 8 --kept-draws 4 --num-chains 2 --num-moves 3 "
        "--max-tree-depth 2"
    ),
    "examples.last_layer": Script(
        "--width 2 --train-rows 30 --num-steps 5 --num-warmup 8 --num-samples 6 "
        "--max-tree-depth 2 --steps-per-draw 5",
        ("--train-rows 9",),
        warnings=(PIXELS,),
        check=check_last_layer,
    ),
    "examples.lotka_volterra": Script(
        "--data-sets 1 --num-warmup 6 --num-samples 6 --max-tree-depth 2",
        ("--held-out 0",),
    ),
    "examples.active_learning": Script(
        "--seeds 2 --rounds 1 --width 2 --effort 0.02",
        ("--seeds 1",),
        warnings=(FEW_ROWS, NOT_AT_THE_MODE),
        check=check_active_learning,
    ),
    "examples.bayesian_optimization": Script(
        "--seeds 2 --start 6 --evaluations 8 --candidates 32 --width 2 --effort 0.02",
        ("--evaluations 3", "--start 5"),
        warnings=(
            FEW_ROWS,
            "ignore:.*rows hardly show",
            "ignore:.*worse than by a constant",
        ),
    ),
    "examples.nnx_module": Script(
        "--splits 2 --width 2 --optimizer-steps 5 --num-warmup 8 --num-samples 8 "
        "--num-chains 2 --steps-per-draw 3",
        ("--splits 1",),
    ),
    "examples.groups": Script(
        "--groups 4 --batch-size 10 --steps-per-draw 3 --num-warmup 8 "
        "--num-samples 6 --num-chains 2",
        ("--groups 2",),
        warnings=(SHORT_CHAINS,),
    ),
    "examples.unknown_digits": Script(
        "--pairs 2 --train-rows 40 --width 3 --members 2 --optimizer-steps 20 "
        "--num-chains 2 --num-warmup 8 --num-samples 6 --steps-per-draw 3",
        ("--pairs 1",),
        warnings=(SHORT_CHAINS,),
    ),
    "examples.variational": Script(
        "--width 3 --points 8 --num-steps 20 --num-particles 1 --num-warmup 8 "
        "--num-samples 8",
        ("--points 3",),
    ),
    "examples.image_classification": Script(
        "--num-epochs 1 --batch-size 200 --members 2 --num-draws 4 --rounds 1 "
        "--test-images 40",
        ("--num-epochs 0",),
        says="small digits instead",
    ),
    "examples.image_chains": Script(
        "--methods ensemble SGHMC --num-epochs 1 --chain-epochs 1 --members 2 --chains "
        "2 --num-draws 2 --batch-size 200 --test-images 40 --foreign-images 30",
        ("--members 1",),
        runs=False,
    ),
    "examples.infinite_width": Script(
        "--widths 2 4 --networks 20 --trained 2 --steps 2 --nuts-width 3 "
        "--nuts-warmup 5 --nuts-samples 5",
        ("--widths 4 0",),
    ),
    f"{BENCHMARK}.microcanonical": Script(
        "--sets energy --nets 1x20 --methods MCLMC --gradients 1200 --draws 12 "
        "--num-chains 2 --rounds 1 --steps 4",
        ("--gradients 10",),
        check=check_microcanonical,
    ),
    f"{BENCHMARK}.function_agreement": Script(
        "--sets energy --methods MCLMC --gradients 600 --draws 6 --num-chains 4 "
        "--max-tree-depth 3",
        ("--num-chains 2",),
    ),
    f"{BENCHMARK}.gradient_cost": Script(
        "--repeats 1 --calls 2 --steps 2", check=check_gradient_cost
    ),
    f"{BENCHMARK}.collapse_cost": Script(
        "--repeats 1 --calls 2 --rows 1000 --hidden 50 --outputs 1 3",
        check=check_collapse_cost,
    ),
    f"{BENCHMARK}.mixing": Script(
        "--sets energy --ways collapsed exchange smc --seconds 1 --num-chains 2"
        " --steps 3 --moves 4 --replicas 2 --leapfrogs 2 --particles 6 --mutations 1",
        ("--particles 2",),
    ),
    f"{BENCHMARK}.compilation": Script(
        "--kernels NUTS --rows 6 --width 1 --num-chains 1", runs=False
    ),
    f"{BENCHMARK}.first_draw": Script(
        "--ways NUTS AutoMeanField --rows 6 --width 1", ("--rows 0",), runs=False
    ),
    f"{BENCHMARK}.gauntlet": Script(
        "--seeds 45 46 --methods ADF Laplace,\\ diag", ("--most-rows 0",), "ADF"
    ),
    f"{BENCHMARK}.minibatch_defaults": Script(
        "--rows 40 --width 2 --batch-size 8 --draws 4 --likelihoods normal categorical "
        "--activations relu --priors Normal --kernels SGNHT",
        ("--draws 0",),
        "SGNHT",
    ),
    f"{BENCHMARK}.minibatches": Script(
        "--rows 40 --gradients 4000 --width 2 --batch-size 8 --num-chains 2 "
        "--reference-gradients 6000"
        " --methods SGNHT MCLMC long\\ chain deep\\ ensemble AutoMeanField",
        ("--gradients 0",),
        check=check_minibatches,
    ),
    f"{BENCHMARK}.gpu": Script(
        "--chains 1 2 --widths 2 --rows 20 --batch-size 4 --transitions 2 --rounds 1 "
        "--splits 2 --gradients 100 --draws 3 --width 2 --sets generated --members 2 "
        "--image-gradients 8 --image-batch 8 --image-draws 2 --test-images 20",
        ("--chains 0", "--splits 0"),
        "images: MCLMC",
        check=check_gpu,
    ),
    f"{BENCHMARK}.runs": Script(
        "--rows 600 --rounds 1 --draws 2 --data rows", ("--rows 0",)
    ),
    f"{BENCHMARK}.scale": Script("--rows 60 --rounds 1 --draws 2", ("--rounds 0",)),
    f"{BENCHMARK}.sgld_step": Script(
        "--rounds 1 --steps 20 --run-rounds 1 --run-steps 40 --steps-per-draw 20 "
        "--sizes 64 640",
        ("--rounds 0", "--run-steps 3", "--sizes 3"),
    ),
    f"{BENCHMARK}.variational_uci": Script(
        "--sets yacht --splits 1 --width 3 --num-steps 20 --num-warmup 6 "
        "--num-samples 6 --max-tree-depth 2",
        ("--splits 0",),
        needs_data=True,
    ),
    f"{BENCHMARK}.infinite_uci": Script(
        "--sets yacht --variants relu erf-ard --splits 1 --max-steps 2",
        ("--splits 0",),
        runs=False,
    ),
    f"{BENCHMARK}.estimators": Script(
        "--sets yacht --splits 1 --method mean_field --effort 0.01",
        ("--splits 0",),
        needs_data=True,
    ),
    f"{BENCHMARK}.classification": Script(
        "--sets wine --splits 2 --effort 0.01", ("--splits 0",), warnings=("default",)
    ),
    f"{BENCHMARK}.infinite_kernel": Script(
        "--points 60 --depth 2 --block-size 25", ("--points 0",)
    ),
    f"{BENCHMARK}.adf_uci": Script(
        "--sets boston --splits 2 --epochs 2 --width 5",
        ("--epochs 0",),
        needs_data=True,
    ),
    f"{BENCHMARK}.laplace_uci": Script(
        "--sets yacht --splits 1 --rounds 2 --steps 5 --widths 3",
        ("--rounds 0",),
        needs_data=True,
        warnings=(NOT_AT_THE_MODE,),
    ),
    f"{BENCHMARK}.laplace_torch": Script(
        "ours --structures diag --rows 8 --batch-size 4", warnings=(NOT_AT_THE_MODE,)
    ),
    f"{BENCHMARK}.adf_speed": Script(
        "--rounds 1 --splits 2 --rows 30 --width 4", ("--rounds 0",)
    ),
    f"{BENCHMARK}.gradient_variance": Script(
        "--batch-sizes 8 --width 3 --draws 4 --steps 2 --rounds 1 --calls 1 "
        "--networks mlp",
        ("--draws 1", "--rounds 0"),
    ),
    f"{BENCHMARK}.orbit_moves": Script(
        "--nets ReLU --rounds 1 --rows 64 --width 3 --sweeps 3 --refreshes 2"
        " --transitions 1 --tree-depth 2 --draws 1 --steps-per-draw 2 --batches 8",
        ("--tree-depth 0", "--batches 65"),
    ),
    f"{BENCHMARK}.hierarchical_hmc": Script(
        "--sets boston --ways long persistent --num-chains 2 --num-warmup 8 "
        "--num-samples 8 --num-steps 4"
    ),
    f"{BENCHMARK}.blackjax_ess": Script(
        "--num-chains 2 --gradients 200 --posteriors gaussian --ways NUTS MCLMC",
        ("--gradients 1",),
    ),
    f"{BENCHMARK}.sources": Script(
        "--rows 2000 --runs 1 --steps 4 --rounds 1 --sources arrays batches",
        ("--runs 0", "--steps 0"),
        check=check_sources,
    ),
    f"{BENCHMARK}.horseshoe": Script(
        "--rows 12 --inputs 7 --num-chains 2 --num-warmup 10 --sweeps 12 "
        "--nuts-draws 8 --max-tree-depth 2",
        ("--inputs 5", "--sweeps 3"),
    ),
    f"{BENCHMARK}.tables": Script(
        "--only linear --folds 1", ("--folds 0", "--rows 9"), runs=False
    ),
    f"{BENCHMARK}.uci": Script("--sets yacht --splits 1 --no-progress-bar", runs=False),
    f"{BENCHMARK}.coupling_step": Script(
        "--rounds 1 --steps 2 --widths 1 --particles 1 --num-flows 1 --hidden 2 "
        "--rows 3",
        ("--widths 3 0",),
        check=check_coupling_step,
    ),
}
