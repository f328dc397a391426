"""Tables and plots of the results of `kernels`."""

import math
from pathlib import Path

from drm_triton.bench.record import Row


def show(rows: list[Row]) -> None:
    """Print the rows, with percentages of the peaks if these were measured."""
    peaks = {row["name"]: row.get("gflops") or row.get("gbytes") for row in rows if row["section"] == "peaks"}
    for row in rows:
        sizes = " ".join(f"{key}={row[key]}" for key in ("m", "B", "n", "d", "K", "items", "threads") if key in row)
        line = f"{row['section']:12}{row['name']:40}{sizes:58}"
        if "seconds" in row:
            line += f"{row['seconds'] * 1e3:10.2f} ms"
        if "times_ours" in row:
            line += f"{row['times_ours']:8.1f} x"
        for key, other in (("times_sort", "torch.sort"), ("times_softmax", "softmax in torch")):
            if key in row:
                line += f"{row[key]:8.2f} x {other}"
        for key, peak in (("gflops", "fma"), ("gbytes", "copy")):
            if row.get(key):
                line += f"{row[key]:8.1f} {'Gflop/s' if key == 'gflops' else 'GB/s'}"
                if row["section"] != "peaks" and peaks.get(peak):
                    line += f" ({row[key] / peaks[peak]:.0%} of peak)"
        print(line)


def plot(rows: list[Row], folder: Path) -> list[str]:
    """Plot the time per list (or query of top-k) over n to kernels_n.png and over d to kernels_d.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    written = []
    for axis in ("n", "d"):
        chosen = [row for row in rows if row.get("axis") == axis]
        if not chosen:
            continue
        figure, panel = plt.subplots(figsize=(5.5, 3.6), layout="constrained")
        for name in dict.fromkeys(row["name"] for row in chosen):
            line = [(row[axis], row["us_per_list"]) for row in chosen if row["name"] == name]
            panel.plot(*zip(*line, strict=True), marker="o", markersize=4, label=name)
        panel.set(xscale="log", yscale="log", ylabel="microseconds per list, or query of top-k")
        n, d = (chosen[0].get(key) for key in ("n", "d"))
        panel.set_xlabel(f"n, items in a list (d = {d})" if axis == "n" else f"d, factors (n = {n})")
        panel.set_xticks(sorted({row[axis] for row in chosen}))
        panel.get_xaxis().set_major_formatter(matplotlib.ticker.ScalarFormatter())
        panel.get_xaxis().set_minor_locator(matplotlib.ticker.NullLocator())
        times = [row["us_per_list"] for row in chosen]
        ends = [math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))]
        panel.set_ylim(10.0 ** ends[0], 10.0 ** ends[1])  # whole decades, so that the axis has at least two labels
        panel.grid(alpha=0.3)
        panel.legend(frameon=False)
        folder.mkdir(parents=True, exist_ok=True)
        written.append(f"kernels_{axis}.png")
        figure.savefig(folder / written[-1], dpi=150)
        plt.close(figure)
    return written
