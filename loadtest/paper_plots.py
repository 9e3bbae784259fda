"""`make paper-plots`: the simulator's curves beside the points of Orca's figure 10, into docs/images.

The paper's points were read off its figure with about 2 % error; it prints none of them as numbers but
6.81 and 0.185 req/s at 190 ms.
"""

import io
import re
from pathlib import Path

from matplotlib.figure import Figure

from services.simulator.main import Plan
from services.simulator.settings import SimulateSettings

# (requests per second, median ms per token) of figure 10b: GPT-3 175B
PAPER_175B = {
    "orca, max_bs 32": [
        (0.13, 55), (0.52, 57), (1.01, 61), (2.03, 70), (2.98, 79), (4.06, 92), (5.09, 109), (6.0, 132), (6.81, 193),
        (7.01, 485),
    ],
    "FasterTransformer (1, 1)": [(0.07, 75), (0.13, 100), (0.18, 197), (0.195, 492)],
    "FasterTransformer (8, 8)": [(0.08, 123), (0.11, 492), (0.19, 948)],
}  # fmt: skip
OURS = {"orca, max_bs 32": ("orca", 32), "FasterTransformer (1, 1)": ("request-level", 1),
        "FasterTransformer (8, 8)": ("request-level", 8)}  # fmt: skip
COLOURS = ("#1f4e79", "#b3541e", "#4f7f3a")


def main() -> None:
    plan = Plan(SimulateSettings(preset="orca-175b"), lambda what, total: lambda done: None)
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for colour, (label, points) in zip(COLOURS, PAPER_175B.items(), strict=True):
        policy, size = OURS[label]
        (variant,) = [
            v
            for v in plan.variants()
            if (v.study.cluster.policy, v.study.cluster.limits.max_num_seqs) == (policy, size)
        ]
        rates = plan.preset.rates[policy]
        found = [1000 * variant.study.run(rate)[1]["normalised_latency_s"]["p50"] for rate in rates]
        print(label, [f"{rate:g}: {ms:.0f}" for rate, ms in zip(rates, found, strict=True)], flush=True)
        axes.plot(rates, found, color=colour, marker="o", markersize=4, label=f"simulated {policy}, max_bs {size}")
        axes.plot(*zip(*points, strict=True), color=colour, linestyle=":", marker="x", label=f"paper: {label}")
    axes.axhline(190, linestyle="--", linewidth=1, color="#777", label="190 ms")
    axes.set(xscale="log", yscale="log", xlabel="requests per second", ylabel="median normalised latency, ms per token")
    axes.set_ylim(40, 2000)
    axes.grid(True, which="both", alpha=0.25)
    axes.legend(fontsize=8)
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = re.sub(r"[ \t]+$", "", out.getvalue(), flags=re.MULTILINE)
    Path("docs/images/orca-175b.svg").write_text(text)


if __name__ == "__main__":
    main()
