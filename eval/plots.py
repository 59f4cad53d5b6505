"""Pictures of evaluations; needs the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data_prep.files import new_file


def plot_curve(
    path: str | Path,
    points: Sequence[tuple[float, float, float]],
    *,
    reference: tuple[float, float] | None = None,
    metric: str = "Recall@10",
) -> None:
    """Write a PNG: the share kept at the first level against a measure, and against the tokens that it costs.

    points: (share, measure, tokens a query). reference: (measure, tokens) of judging everything below the first level.

    Raises:
        ModuleNotFoundError: no matplotlib; install `retrail[plots]`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ordered = sorted(points)
    shares = [100 * share for share, _, _ in ordered]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    left.plot(shares, [value for _, value, _ in ordered], "o-")
    right.plot(shares, [tokens for _, _, tokens in ordered], "o-", color="tab:orange")
    if reference is not None:
        left.axhline(reference[0], linestyle="--", color="grey", label="all judged below")
        right.axhline(reference[1], linestyle="--", color="grey", label="all judged below")
        left.legend()
    for axes, name in ((left, metric), (right, "tokens a query")):
        axes.set_xscale("log")
        axes.set_xlabel("kept at the first level (%)")
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    with new_file(path) as file:
        figure.savefig(file, format="png", dpi=130)
