"""The scripts of examples/ as tests run them: options, and what is checked."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    :param warnings: filters for what a run this small warns of.
    :param check: called with the result; asserts what is special.
    """

    options: str
    refused: tuple[str, ...] = ()
    says: str = ""
    warnings: tuple[str, ...] = ()
    check: Callable[[Any], None] | None = None


# -- checks ----------------------------------------------------------------------------


def check_gradient_cost(result):
    assert [row["n"] for row in result] == [455, 455, 5000]
    # Counted by the compiler, not timed: our models do no more arithmetic than the
    # hand-written ones.
    assert all(row["flops_ratio"] < 1.05 for row in result)


def check_collapse_cost(result):
    # Counted by the compiler, not timed: without derivatives by directions, and outputs
    # apart from each other.
    limits = (12, 25)  # of one output and of three
    for row, limit in zip(result, limits, strict=True):
        assert row["flops_ratio"] < limit


def check_last_layer(result):
    # 64-4-2-10: 260 + 10 + 30
    assert [row.random_weights for row in result] == [0, 30, 30, 300, 300]


def check_active_learning(result):
    assert result["labels"] == [16, 19]
    assert result["programs"][0] > 0
    assert sum(result["programs"][2:]) == 0  # the second seed compiles nothing


# -- scripts ---------------------------------------------------------------------------

BENCHMARK = "examples.benchmarks"
SCRIPTS: dict[str, Script] = {
    "examples.demo": Script(
        "--held-out 180 --effort 0.004",
        ("--held-out 2",),
        says="CAN THE FIT BE TRUSTED?",
        warnings=(SHORT_CHAINS, "ignore:.*left out"),
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
    ),
    "examples.infinite_width": Script(
        "--widths 2 4 --networks 20 --trained 2 --steps 2 --nuts-width 3 "
        "--nuts-warmup 5 --nuts-samples 5",
        ("--widths 4 0",),
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
    f"{BENCHMARK}.gauntlet": Script(
        "--seeds 45 46 --methods ADF Laplace,\\ diag", ("--most-rows 0",), "ADF"
    ),
    f"{BENCHMARK}.sgld_step": Script(
        "--rounds 1 --steps 20 --run-rounds 1 --run-steps 40 --steps-per-draw 20 "
        "--sizes 64 640",
        ("--rounds 0", "--run-steps 3", "--sizes 3"),
    ),
    f"{BENCHMARK}.classification": Script(
        "--sets wine --splits 2 --effort 0.01", ("--splits 0",), warnings=("default",)
    ),
}
