"""The report's section on what observers cost; every figure computed from the raw steps."""

from __future__ import annotations

from typing import Any

from benchmarks.summary import observer_figures
from benchmarks.tables import NOISY, of_spread, table

WANTED = 0.02


def observers_section(runs: dict[str, Any]) -> str:
    """The two ways of measuring beside each other, then the hooks one by one."""
    text = (
        "## What observers cost\n\n"
        "The same DPO run with nobody looking on, and with a live panel, JSON lines, health, the manifest, and "
        "completions to a tracker; steps in turn, the process that waits stopped. Every step is logged "
        "(`logging_steps=1`, ten times as often as by default). The generation that was asked for, and the scoring of "
        "what came, is in no figure but its own. Hooks: time inside the hooks of the callbacks. Threads: CPU time of "
        "the threads that draw and write, beside the step. Both as shares of the step.\n\n"
    )
    rows, parts = [], []
    for run in runs.values():
        f = observer_figures(run)
        steps = len(run["sides"]["bare"])
        reached = f["share"] + f["threads"] < WANTED and f["ratio"]["per_step_low"] < 1 + WANTED
        rows.append(
            [
                run["model"],
                f"{run['pairs']} x {steps}",
                *(of_spread(f["seconds"][name]) for name in ("bare", "watched")),
                *(figure(f["ratio"], kind) for kind in ("of_medians", "per_step")),
                f"**{f['share']:.2%}**",
                f"{f['threads']:.2%}",
                f"{f['generation']:.1%}",
                f"both < {WANTED:.0%}: " + ("reached" if reached else "**short**"),
            ]
        )
        shares = ", ".join(f"{name} {share:.3%}" for name, share in sorted(f["hooks"].items(), key=lambda x: -x[1]))
        noise = f" **Noisy**: others used up to {f['others_highest']:.0%}." if f["others_highest"] > NOISY else ""
        parts.append(
            f"{run['model']}, trackers {', '.join(run['trackers'])}: {shares}. Once, at the beginning: "
            f"{f['begin']:.2f} s.{noise}\n"
        )
    header = ["model", "pairs x steps", "alone s", "watched s", "ratio of medians", "median of step ratios", "hooks"]
    return text + table([*header, "threads", "generation", "wanted"], rows) + "\n" + "\n".join(parts)


def figure(ratio: dict[str, float], kind: str) -> str:
    """With three digits: these ratios are near 1."""
    return f"{ratio[kind]:.3f} [{ratio[kind + '_low']:.3f}, {ratio[kind + '_high']:.3f}]"
