"""The league's table and chart."""

import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from peers.engine import DECODED_PROMPT, STEPS
from peers.entries import FLOAT, REFERENCE

CASES = {  # name: (method of a worker, its argument)
    "prefill 128": ("prefill", 128),
    "prefill 512": ("prefill", 512),
    "decode 1": ("decode", 1),
    "decode 8": ("decode", 8),
    "decode 16": ("decode", 16),
}
SLACK = 1.01  # maximum perplexity of a row that counts, relative to its reference
UNITS = {("prefill", False): "tokens", ("decode", False): "rows", ("decode", True): "row"}
TITLES = tuple(f"{case} {UNITS[method, n == 1]}" for case, (method, n) in CASES.items())
BLUE, GREY = "#1f5fa8", "#9aa5b1"
Found = dict[str, dict[str, Any]]


def longest(method: str, argument: int) -> int:
    """Length of a row at the end of a case."""
    return argument if method == "prefill" else DECODED_PROMPT + STEPS


def table(found: Found) -> str:
    """Format as Markdown; in brackets the speedup over Lathe INT8 in the same round, with
    quartiles.

    Quality is included if it was measured; see `_counts` for the rows that are struck out.
    """
    scored = any("losses" in own for own in found.values())
    quality = ["perplexity", "against float32", "last words", "their perplexity"] if scored else []
    first = {(bits, case): _first(found, bits, case) for bits in (4, 8, 32) for case in CASES}
    head = ["", "version", "MB", "difference", *TITLES, *quality]
    lines = [head, ["---"] * len(head)]
    for title, own in found.items():
        if "failed" in own:
            lines.append([title, own["failed"], *[""] * (len(head) - 2)])
            continue
        size = f"{own['bytes'] / 1e6:.0f}" if "bytes" in own else ""
        cells = [_speed(found, title, case) for case in CASES]
        if scored and not _counts(found, title):
            cells = [f"~~{cell}~~" if cell else "" for cell in cells]
        elif scored:
            bits = own.get("bits", 0)
            cells = [
                f"**{cell}**" if cell and first.get((bits, case)) == title else cell
                for case, cell in zip(CASES, cells, strict=True)
            ]
        difference = f"{own['difference']:.3f}" if "difference" in own else ""
        quality = _quality(found, title) if scored else []
        lines.append([title, own.get("version", ""), size, difference, *cells, *quality])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def chart(found: Found, path: Path) -> None:
    """Plot every entry's speed relative to Lathe INT8, and its quality loss."""
    shown = [title for title, own in found.items() if "failed" not in own]
    measures = [*CASES, *(["perplexity"] if any("losses" in found[t] for t in shown) else [])]
    height = 0.32 * len(shown) + 1.1
    figure, axes = plt.subplots(
        1, len(measures), figsize=(2.6 * len(measures), height), sharey=True
    )
    for axis, measure in zip(axes, measures, strict=True):
        if measure == "perplexity":
            cells = [_change(found, title) for title in shown]
            middles = np.array([100 * c[0] if c else math.nan for c in cells])
            spans = np.array([[100 * c[1]] * 2 if c else [0, 0] for c in cells]).T
            axis.set_title("perplexity, % above float32", fontsize=9)
        else:
            quartiles = np.array([_quartiles(found, title, measure) for title in shown])
            middles = quartiles[:, 1]
            spans = np.nan_to_num(np.abs(quartiles[:, [0, 2]] - quartiles[:, [1]])).T
            axis.axvline(1, color=BLUE, linewidth=0.8)
            axis.set_title(f"{measure}, speed / {REFERENCE}", fontsize=9)
        colors = [BLUE if title.startswith("Lathe") else GREY for title in shown]
        axis.barh(shown, middles, color=colors, xerr=spans, ecolor="#444", height=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].invert_yaxis()
    figure.tight_layout()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "league"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _quartiles(found: Found, title: str, case: str) -> list[float]:
    """Quartiles of the speedup over the reference in the same round; NaN if unknown."""
    if case not in found[title] or case not in found.get(REFERENCE, {}):
        return [math.nan] * 3
    ratios = np.array(found[REFERENCE][case]) / np.array(found[title][case])
    return [float(quartile) for quartile in np.quantile(ratios, (0.25, 0.5, 0.75))]


def _speed(found: Found, title: str, case: str) -> str:
    if case not in found[title]:
        return ""
    seconds = float(np.median(found[title][case]))
    method, argument = CASES[case]
    absolute = (
        f"{1e3 * seconds:.1f} ms" if method == "prefill" else f"{argument / seconds:.1f} tok/s"
    )
    low, middle, high = _quartiles(found, title, case)
    if title == REFERENCE or math.isnan(middle):
        return absolute
    return f"{absolute}, {middle:.2f}x ({low:.2f} to {high:.2f})"


def _change(found: Found, title: str) -> tuple[float, float] | None:
    """Relative increase of perplexity over float32, with its standard error from the differences
    of windows."""
    if "losses" not in found[title] or "losses" not in found.get(FLOAT, {}):
        return None
    differences = np.array(found[title]["losses"]) - np.array(found[FLOAT]["losses"])
    change = math.exp(differences.mean())
    return change - 1, change * float(differences.std(ddof=1)) / math.sqrt(len(differences))


def _quality(found: Found, title: str) -> list[str]:
    """Cells for perplexity and last words, with changes."""
    if "losses" not in found[title]:
        return [""] * 4
    words = _words(found[title].get("cloze", []))
    perplexity = f"{math.exp(np.mean(found[title]['losses'])):.2f}"
    change = _change(found, title)
    if title == FLOAT or change is None:
        return [perplexity, "", *words]
    return [perplexity, f"{change[0]:+.2%} ± {change[1]:.2%}", *words]


def _words(scores: list[tuple[float, bool]]) -> list[str]:
    """Cells for the accuracy of greedily decoded last words, and their perplexity."""
    if not scores:
        return ["", ""]
    likelihoods, right = np.array(scores, float).T
    error = right.std() / math.sqrt(len(right))
    return [f"{right.mean():.1%} ± {error:.1%}", f"{math.exp(-likelihoods.mean()):.1f}"]


def _counts(found: Found, title: str) -> bool:
    """Whether the perplexity is at most 1 % above that of the model in float32, or for 4 bits,
    above that of the best engine other than Lathe."""
    own = found[title]
    held_against = [FLOAT]
    if own.get("bits") == 4:
        held_against = [t for t, o in found.items() if o.get("bits") == 4 and "Lathe" not in t]
    losses = [np.mean(found[t]["losses"]) for t in held_against if "losses" in found.get(t, {})]
    if not losses or "losses" not in own:
        return True
    return bool(math.exp(np.mean(own["losses"]) - min(losses)) <= SLACK)


def _first(found: Found, bits: int, case: str) -> str:
    """Title of the fastest row of this width that counts; empty if there is none."""
    rows = [t for t, own in found.items() if own.get("bits") == bits and case in own]
    medians = {t: np.median(found[t][case]) for t in rows if _counts(found, t)}
    return min(medians, key=lambda t: medians[t], default="")
