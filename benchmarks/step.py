"""Examples a second of one private step against ordinary training and against opacus, in one run.

    python benchmarks/step.py [--device cpu|cuda] [--batch 4096] [--model dnn|fm] [--rows N] [--steps 8] [--json]

`dnn` is the model of document 002 (26 categories, 13 numbers, a table a category, 4 × 598) with SGD and momentum, at
46 M embedding parameters by default; `fm` that of document 000 (dim 32, 1 M rows by default) with Adam. Contenders take
turns, step by step, on the same batches of random ids; a step ends when the parameters have moved:

    private   forward, backward, exact norms, clipped sums, noise on every parameter, update
    dense     ordinary training, dense table gradients
    sparse    ordinary training, sparse table gradients (dnn)
    opacus    opacus 1.6 ghost clipping, where it is installed (dnn): pip install opacus==1.6.0

Memory is the peak of each contender in a process of its own. `parts` is how a private step's time divides.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from adumbra.config import DpPhase
from adumbra.models import DNN, Batch, FactorizationMachine, Field, Layout, TowerLayout
from adumbra.privacy.noise import Noise
from adumbra.privacy.sampling import Poisson
from adumbra.training import phases
from adumbra.training.inputs import Rows
from adumbra.training.losses import binary_cross_entropy
from adumbra.training.plan import DpSgd

CATEGORIES = 26
NUMBERS = 13
HIDDEN = 598


def layout(model: str, rows: int) -> Layout:
    """Table rows spread over the categories as in a real log: a few large ones, many small ones."""
    count = CATEGORIES if model == "dnn" else 39
    shares = [0.5**i for i in range(count)]
    sizes = [max(4, int(rows * share / sum(shares))) for share in shares]
    fields, offset = [], 1
    for place, size in enumerate(sizes):
        fields.append(Field(f"c{place}", place, size, offset))
        offset += size
    if model == "dnn":
        return Layout(TowerLayout(), TowerLayout(tuple(fields), NUMBERS))
    half = len(fields) // 2
    public, sensitive = fields[:half], fields[half:]
    shift = sensitive[0].offset - 1
    moved = [Field(f.name, f.start - half, f.rows, f.offset - shift) for f in sensitive]
    return Layout(TowerLayout(tuple(public)), TowerLayout(tuple(moved)))


def log(made: Layout, rows: int) -> Rows:
    """Random rows with power-law ids."""
    generator = torch.Generator().manual_seed(0)

    def ids(tower: TowerLayout) -> Tensor:
        columns = []
        for field in tower.fields:
            skewed = torch.rand(rows, generator=generator).pow(3) * field.rows
            columns.append(field.offset + skewed.long().clamp(max=field.rows - 1))
        return torch.stack(columns, 1).int() if columns else torch.zeros(rows, 0, dtype=torch.int32)

    def numbers(tower: TowerLayout) -> Tensor:
        return torch.rand(rows, tower.numbers, generator=generator)

    batch = Batch(ids(made.public), ids(made.sensitive), numbers(made.public), numbers(made.sensitive))
    return Rows(batch, (torch.rand(rows, generator=generator) < 0.25).float(), torch.device("cpu"))


def described(model: str) -> DNN | FactorizationMachine:
    return DNN((HIDDEN,) * 4) if model == "dnn" else FactorizationMachine(dim=32)


def private(model: str, made: Layout, rows: Rows, batch: int, device: str) -> Callable[[], object]:
    module = described(model).build(made).to(device)
    optimizer = "momentum" if model == "dnn" else "adam"
    phase = DpPhase(epochs=1, batch_size=batch, optimizer=optimizer, learning_rate=0.01, physical_batch=2 * batch)
    plan = DpSgd(Poisson(len(rows), batch / len(rows)), 10**6, 1.0, 0.6, 1)
    trained = phases.Private(module, on(rows, device), binary_cross_entropy, phase, plan, Noise())
    steps = trained.run(10**6)
    return lambda: next(steps)


def ordinary(model: str, made: Layout, rows: Rows, batch: int, device: str, sparse: bool) -> Callable[[], object]:
    module = described(model).build(made).to(device)
    tables = [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]
    for layer in tables:
        layer.sparse = sparse
    owned = {id(layer.weight) for layer in tables}
    dense = [p for p in module.parameters() if not sparse or id(p) not in owned]
    if model == "dnn":
        optimizers = [torch.optim.SGD(dense, 0.01, momentum=0.9)]
        optimizers += [torch.optim.SGD([t.weight for t in tables], 0.01)] if sparse else []
    else:
        optimizers = [torch.optim.Adam(dense, 1e-3, fused=True)]
    source = on(rows, device)

    def step() -> None:
        inputs, label = source.take(torch.randint(len(source), (batch,)).sort().values)
        for optimizer in optimizers:
            optimizer.zero_grad()
        binary_cross_entropy_with_logits(module(inputs), label).backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


class Plain(nn.Module):
    """The same network as opacus takes it: a table a category, ids and numbers as two tensors."""

    def __init__(self, made: Layout) -> None:
        super().__init__()
        fields = made.sensitive.fields
        self.offsets = torch.tensor([field.offset for field in fields])
        self.tables = nn.ModuleList(nn.Embedding(field.rows, int(2 * field.rows**0.25)) for field in fields)
        width = sum(table.embedding_dim for table in self.tables) + NUMBERS
        sizes = [width, HIDDEN, HIDDEN, HIDDEN, HIDDEN]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in itertools.pairwise(sizes))
        self.logit = nn.Linear(HIDDEN, 1)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        own = ids - self.offsets
        x = torch.cat([*(table(own[:, place]) for place, table in enumerate(self.tables)), numbers], 1)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.logit(x)


def ghost(made: Layout, rows: Rows, batch: int) -> Callable[[], object]:
    """opacus's fast gradient clipping, driven as its own engine drives it."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    module = GradSampleModuleFastGradientClipping(Plain(made), max_grad_norm=1.0, use_ghost_clipping=True)
    inner = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    optimizer = DPOptimizerFastGradientClipping(
        inner, noise_multiplier=0.6, max_grad_norm=1.0, expected_batch_size=batch, loss_reduction="mean"
    )
    loss = DPLossFastGradientClipping(module, optimizer, nn.BCEWithLogitsLoss(reduction="mean"), "mean")

    def step() -> None:
        inputs, label = rows.take(torch.randint(len(rows), (batch,)).sort().values)
        optimizer.zero_grad()
        loss(module(inputs.sensitive.long(), inputs.numbers_sensitive), label.unsqueeze(1)).backward()
        optimizer.step()

    return step


def on(rows: Rows, device: str) -> Rows:
    return Rows(rows.batch, rows.label, torch.device(device))


def contenders(model: str, device: str) -> list[str]:
    names = ["private", "dense"]
    if model == "dnn":
        names.append("sparse")
        try:
            import opacus  # noqa: F401

            names += ["opacus"] if device == "cpu" else []
        except ImportError:
            pass
    return names


def start(name: str, arguments: argparse.Namespace) -> Callable[[], object]:
    made = layout(arguments.model, arguments.rows)
    rows = log(made, max(20 * arguments.batch, 200_000))
    match name:
        case "private":
            return private(arguments.model, made, rows, arguments.batch, arguments.device)
        case "opacus":
            return ghost(made, rows, arguments.batch)
        case _:
            return ordinary(arguments.model, made, rows, arguments.batch, arguments.device, name == "sparse")


def timed(step: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def parts(step: Callable[[], object]) -> dict[str, float]:
    """Shares of a private step."""
    import cProfile
    import pstats

    profile = cProfile.Profile()
    profile.enable()
    for _ in range(3):
        step()
    profile.disable()
    named = {
        "sampling and gather": (("sampling.py", "draw"), ("inputs.py", "take")),
        "forward and backward": (("clip.py", "_forward_backward"),),
        "norms": (("clip.py", "gather"), ("clip.py", "sum_squares")),
        "clipped sums": (("contributions.py", "clipped_sum"),),
        "noise": (("gaussian.py", "fill_"),),
        "update": (("optimizer.py", "wrapper"),),
    }
    times: dict[str, float] = {}
    total = 0.0
    for (file, _, function), (_, _, _, cumulative, _) in pstats.Stats(profile).stats.items():  # pyright: ignore[reportAttributeAccessIssue]
        for name, places in named.items():
            if any(file.endswith(place) and function == word for place, word in places):
                times[name] = times.get(name, 0.0) + cumulative
        if function == "_descend":
            total = cumulative
    shares = {name: round(value / total, 3) for name, value in times.items()}
    return shares | {"rest": round(1 - sum(shares.values()), 3)}


def peak(name: str, arguments: argparse.Namespace) -> float:
    command = [sys.executable, __file__, "--only", name]
    for option in ("device", "batch", "model", "rows"):
        command += [f"--{option}", str(getattr(arguments, option))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def highest_memory() -> int:
    """The peak of this process; what getrusage says begins with its parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4096)
    parser.add_argument("--model", choices=["dnn", "fm"], default="dnn")
    parser.add_argument("--rows", type=int, default=1_050_000, help="rows of all tables together")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(2)
    if arguments.only:
        step = start(arguments.only, arguments)
        for _ in range(2):
            step()
        print(torch.cuda.max_memory_allocated() if arguments.device != "cpu" else highest_memory())
        return
    names = contenders(arguments.model, arguments.device)
    steps = {name: start(name, arguments) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.steps + 2):
        for name in names:
            seconds = timed(steps[name], arguments.device)
            if turn >= 2:
                times[name].append(seconds)
    medians = {name: statistics.median(several) for name, several in times.items()}
    divided = parts(steps["private"])
    steps.clear()
    memory = {name: peak(name, arguments) for name in names}
    made = layout(arguments.model, arguments.rows)
    module = described(arguments.model).build(made)
    result = {
        "model": arguments.model,
        "batch": arguments.batch,
        "embedding_parameters": sum(t.weight.numel() for t in module.modules() if isinstance(t, nn.Embedding)),
        "examples_per_second": {name: round(arguments.batch / seconds) for name, seconds in medians.items()},
        "ratios": {f"private/{name}": round(medians[name] / medians["private"], 3) for name in names[1:]},
        "memory": {name: round(value / 1e9, 3) for name, value in memory.items()},
        "parts": divided,
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<22} {value}")


if __name__ == "__main__":
    main()
