"""A check of the gate, and its verdict, in words."""

from lathe.evaluate.comparison import MIN_DOCUMENTS, Check

PAST = {"pass": "passed", "inconclusive": "not proven", "fail": "failed"}


def outcome(verdict: str, passed: bool) -> str:
    """A verdict in words. NOT PROVEN is in capitals, so that it is not mistaken for a pass."""
    if verdict != "inconclusive":
        return PAST.get(verdict, verdict)
    return "NOT PROVEN, passed by the recipe" if passed else "NOT PROVEN"


def sentence(check: Check, confidence: float) -> str:
    """A check's result as a sentence, for the reasons of a verdict."""
    shown = formats(check)
    needed = (
        f"; {decisive(check)} would decide it if the change stays the same" if check.needed else ""
    )
    return (
        f"{PAST[check.verdict]}: {check.measure} {shown['baseline']} -> {shown['candidate']}: "
        f"a change of {shown['change']}, {100 * confidence:.6g}% interval {shown['low']} to "
        f"{shown['high']}, {shown['limit']} allowed; {units(check)}{needed}{_noise(check)}"
    )


def _noise(check: Check) -> str:
    """What the noise floor means for a check."""
    if check.noise_floor is None:
        return ""
    text = (
        f"; run again, the baseline disagrees with itself on {check.noise_floor:,} of {check.n:,}"
    )
    if check.is_noise:
        text += f", so a net loss of {check.net_loss:,} is no evidence of a worse model"
    return text


def decisive(check: Check) -> str:
    """The units that would decide an inconclusive check, to two digits."""
    return f"about {float(f'{check.needed:.2g}'):,.0f} {check.unit}" if check.needed else ""


def units(check: Check) -> str:
    """The units of a check, with its flips and p-value."""
    counted = f"{check.n:,} {check.unit}"
    if check.documents is not None:
        counted += f" of {check.documents:,} document{'s' if check.documents > 1 else ''}"
        if check.documents < MIN_DOCUMENTS:
            counted += ", too few to measure how documents differ"
    if check.p_value is not None:
        flips = f"{check.lost} lost, {check.gained} gained, " if check.lost is not None else ""
        counted += f", {flips}{check.test} p = {check.p_value:.2g}"
    if check.is_meaningless:
        counted += " (meaningless: even a model that has learned nothing would pass)"
    return counted


def formats(check: Check) -> dict[str, str]:
    """The figures of a check as text; accuracies change by percentage points."""
    value, change, factor = {
        "points": ("{:.2%}", "{:+.2f} points", 100),
        "relative": ("{:.2f}", "{:+.3g}%", 100),
        "own": ("{:.4g}", "{:+.3g}", 1),
    }[check.scale]
    shown = {name: value.format(getattr(check, name)) for name in ("baseline", "candidate")}
    for name in ("change", "low", "high", "limit"):
        shown[name] = change.format(factor * getattr(check, name))
    plain = change.replace("+", "").format(factor * (check.detectable or 0.0))
    shown["detectable"] = f"a change of {plain}"
    return shown
