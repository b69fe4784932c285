"""Writes RESULTS.md from results.json: every figure of the page is computed from the raw steps kept there.

`python -m benchmarks.report` renders it again without measuring anything.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import observer_table, summary, trainer_tables
from benchmarks.kinds import KINDS
from benchmarks.parts import PARTS
from benchmarks.summary import OURS, TRL
from benchmarks.tables import ENOUGH_STEPS, NAMES, NOISY, PRECISIONS, figure_of_ratio, table, verdict

WANTED_SPEED = {
    ("real", "default"): (3.5, 6.0),
    ("real", "tuned"): (2.8, 5.0),
    ("short", "default"): (3.5, 6.0),
    ("short", "tuned"): (2.8, 5.0),
    ("long", "default"): (4.5, 8.0),
    ("long", "tuned"): (3.5, 6.0),
}
WANTED_MEMORY, WANTED_MEMORY_WIDE, WANTED_MEMORY_ONLINE = (0.7, 0.5), (0.5, 0.3), (0.6, 0.5)
WANTED_ROWS = (3.0, 8.0)
WANTED_START = {"import the package": 0.1, "--help": 0.3, "dpo --help": 1.5}

INTRODUCTION = """\
# preftune beside TRL: measured

Written by `python -m benchmarks.report` from `results.json`, which keeps every raw step; do not edit by hand.

Both sides run real trainers (`trl.DPOTrainer`, `preftune.DPOTrainer` and so on) in environments of their own with the
same versions of torch, transformers, accelerate, peft and datasets, the same threads and precision, and the same rows
in the same order (checked by digest at every step). The steps are interleaved: one side works while the other waits;
who goes first alternates. A step is a whole turn of `trainer.train()`: batch, collation, forward, backward, clipping,
optimizer, logging. *default*: each library as it comes, with an online reference (TRL: gradient checkpointing on).
*tuned*: TRL without gradient checkpointing, both with reference log-probabilities computed beforehand. Ratios are TRL's
time over ours (more is better for preftune), with 95 % bootstrap intervals over steps. *fp32*: `bf16=False` on both
sides, what `preftune` chooses by itself on a CPU; *bf16*: `bf16=True` on both, autocast over fp32 weights, what TRL
does by default everywhere.
"""


def seconds_of(figures: dict[str, Any], side: str) -> str:
    f = figures["sides"].get(side)
    return f"{f['seconds']:.2f} [{f['seconds_low']:.2f}, {f['seconds_high']:.2f}]" if f else "-"


def setting_of(run: dict[str, Any]) -> str:
    return f"{run['variant']}, {PRECISIONS[run['precision']]}"


def speed_section(runs: dict[str, Any]) -> str:
    figures = {key: summary.speed_figures(run) for key, run in runs.items()}
    rows, throughput = [], []
    for key, run in runs.items():
        f, profile = figures[key], key.split("/")[0]
        wall = f.get("wall_ratio")
        wanted = WANTED_SPEED.get((profile, run["variant"]))
        steps = min(len(s["steps"]) for s in run["sides"].values())
        rows.append(
            [
                run["title"],
                setting_of(run),
                f"{run['pairs']} x {steps}",
                seconds_of(f, TRL),
                seconds_of(f, OURS),
                figure_of_ratio(wall, "of_medians"),
                figure_of_ratio(wall, "per_step"),
                figure_of_ratio(f.get("cpu_ratio"), "of_medians"),
                verdict(wall["of_medians"], wanted) if wall and steps >= ENOUGH_STEPS else "-",
            ]
        )
        throughput += [throughput_row(run, side, s) for side, s in f["sides"].items()]
    text = "## DPO training step\n\nSeconds: median [quartiles].\n\n"
    header = ["data", "setting", "pairs x steps", "TRL s", "preftune s", "ratio of medians", "median of step ratios"]
    text += table([*header, "CPU-time ratio", "wanted"], rows)
    text += (
        "\nReal tokens: prompt once per branch, no padding, the same count for both sides. Share of peak, forwarded: "
        "operations of the positions that the side really put through the model (no recomputation counted) over time "
        "and the machine's best matrix product with all threads used, measured beside it. Needed: the same with the "
        "operations that the pairs need (shared prompt once, head on answers only). Others: CPU share of everything "
        "else on the machine (median, highest step).\n\n"
    )
    header = ["data", "setting", "side", "real tokens/s", "forwarded/real", "share of peak, forwarded", "needed"]
    text += table(
        [*header, "peak GFLOP/s, bf16 and fp32", "system time", "page faults a step", "others", "build s"], throughput
    )
    return text + agreement(figures, runs) + noise_warning(figures)


def throughput_row(run: dict[str, Any], side: str, f: dict[str, Any]) -> list[str]:
    return [
        run["title"],
        setting_of(run),
        NAMES[side],
        f"{f['real_tokens_per_second']:.0f}",
        f"{f['forwarded_per_real']:.2f}",
        f"{f['share_of_peak']:.1%}",
        f"{f['needed_share_of_peak']:.1%}",
        ", ".join(f"{rate:.0f}" for rate in f["peak_gflops"].values()),
        f"{f['system_share']:.0%}",
        f"{f['faults']:.3g}",
        f"{f['others_median']:.0%}, {f['others_highest']:.0%}",
        f"{f['build_seconds']:.1f}",
    ]


def agreement(figures: dict[str, Any], runs: dict[str, Any]) -> str:
    rows = [
        [
            runs[key]["title"],
            setting_of(runs[key]),
            *(f"{x:.4f}" for x in f["first_losses"]),
            f"{f['largest_loss_gap']:.4f}",
        ]
        for key, f in figures.items()
        if len(f.get("first_losses", ())) == 2
    ]
    if not rows:
        return ""
    text = "\nThe two sides do the same job: losses as logged (the first one of DPO is log 2 = 0.6931).\n\n"
    return text + table(["data", "setting", "TRL, first", "preftune, first", "largest gap of any step"], rows)


def noise_warning(figures: dict[str, Any]) -> str:
    noisy = [key for key, f in figures.items() if any(s["others_median"] > NOISY for s in f["sides"].values())]
    if not noisy:
        return ""
    return f"\n**Noisy**: other processes took more than {NOISY:.0%} of the CPU in {', '.join(noisy)}; measure again.\n"


def parts_section(runs: dict[str, Any]) -> str:
    text = (
        "## Where a step's time goes\n\nOne more step of each, under `torch.profiler`: seconds (share of the step).\n"
    )
    for run in runs.values():
        columns = {side: s["parts"] for side, s in run["sides"].items() if s["parts"]}
        totals = {side: sum(parts.values()) for side, parts in columns.items()}
        rows = [
            [part, *(f"{parts[part]:.2f} ({parts[part] / totals[side]:.0%})" for side, parts in columns.items())]
            for part in PARTS
        ]
        name = "" if (kind := run.get("trainer", "dpo")) == "dpo" else f"{kind}, {run['model']}, "
        text += f"\n{name}{run['title']}, {setting_of(run)}\n\n" + table(["part", *(NAMES[s] for s in columns)], rows)
    return text


def memory_section(runs: dict[str, Any]) -> str:
    rows = []
    for run in runs.values():
        f = summary.memory_figures(run)
        trainer = run.get("trainer", "dpo")
        wanted = WANTED_MEMORY if run["vocabulary"] < 100_000 else WANTED_MEMORY_WIDE
        wanted = wanted if trainer == "dpo" else WANTED_MEMORY_ONLINE
        peaks = [f"{f['peaks'][side] / 1024:.2f}" if side in f["peaks"] else "-" for side in (TRL, OURS)]
        both = "ratio" in f
        rows.append(
            [
                KINDS[trainer].trainer,
                run["title"],
                run["variant"],
                str(run["vocabulary"]),
                str(run["pairs"]),
                *peaks,
                f"**{f['ratio']:.2f}**" if both else "-",
                f"{f['ratio_above_imports']:.2f}" if both else "-",
                verdict(f["ratio"], wanted, less_is_better=True) if both else "-",
            ]
        )
    text = f"## Peak memory\n\n{next(iter(runs.values()))['steps']} steps, each side alone in its process; GiB.\n\n"
    header = ["trainer", "data", "setting", "vocabulary", "pairs or prompts", "TRL", "preftune", "ratio"]
    header += ["ratio above imports", "wanted"]
    return text + table(header, rows)


def preparation_section(runs: dict[str, Any]) -> str:
    rows = []
    for run in runs.values():
        f = summary.preparation_figures(run)

        def rate(side: str, f: dict[str, Any] = f) -> str:
            low, middle, high = f["rows_per_second"][side]
            return f"{middle:.0f} [{low:.0f}, {high:.0f}] ({f['rows_per_cpu_second'][side]:.0f})"

        sides = [rate(side) if side in run["sides"] else "-" for side in (TRL, OURS)]
        r = f.get("ratio")
        wanted = verdict(r["of_medians"], WANTED_ROWS) if r else "-"
        rows.append(
            [run["title"], str(run["rows"]), str(run["num_proc"]), *sides, figure_of_ratio(r, "of_medians"), wanted]
        )
    text = "## Data preparation\n\nRows per second of the constructor, cold cache (in brackets: per second of CPU).\n\n"
    return text + table(["data", "rows", "`dataset_num_proc`", "TRL", "preftune", "ratio", "wanted"], rows)


def startup_section(run: dict[str, Any]) -> str:
    names = list(dict.fromkeys(name for side in run["sides"].values() for name in side))
    rows = []
    for name in names:
        cells = [run["sides"].get(side, {}).get(name) for side in (TRL, OURS)]
        wanted = WANTED_START.get(name)
        ours = cells[1]
        if wanted and ours:
            bare = run["sides"][OURS]["python alone"]["cpu"] if name.startswith("import") else 0.0
            word = "reached" if ours["cpu"] - bare < wanted else "**short**"
        rows.append(
            [
                name,
                *(f"{c['cpu']:.2f} ({c['wall']:.2f})" if c else "-" for c in cells),
                f"{wanted:g}: {word}" if wanted and ours else "-",
            ]
        )
    text = f"## Start-up\n\nCPU seconds (wall), medians of {run['repeats']} fresh processes.\n\n"
    return text + table(["command", "TRL", "preftune", "wanted (an import: beyond Python alone)"], rows)


def origin_section(results: dict[str, Any]) -> str:
    """When, on what and with which versions each part was measured; equal origins are told once."""
    by_origin: dict[str, list[str]] = {}
    for part, content in results.items():
        entries = {part: content} if part == "startup" else {f"{part} {key}": run for key, run in content.items()}
        for name, run in entries.items():
            by_origin.setdefault(json.dumps(run["origin"], sort_keys=True), []).append(name)
    text = "## Origin\n\n"
    for origin_text, names in by_origin.items():
        o = json.loads(origin_text)
        machine = ", ".join(f"{k} {v}" for k, v in o["machine"].items())
        sides = "; ".join(
            f"{NAMES[side]}: " + ", ".join(f"{k} {v}" for k, v in found.items())
            for side, found in o["versions"].items()
        )
        text += f"- {', '.join(names)}: {o['date']}, code {o['code']}, model {o['model']}, {o['threads']} threads; "
        text += f"{machine}. {sides}. `{o['command']}`\n"
    return text


def render(results: dict[str, Any]) -> str:
    """The page; parts that were not measured are left out."""
    sections = [INTRODUCTION]
    if results.get("speed"):
        sections.append(speed_section(results["speed"]))
    if results.get("trainers"):
        sections.append(trainer_tables.offline_section(results["trainers"]))
    if results.get("online"):
        sections.append(trainer_tables.online_section(results["online"]))
    if results.get("memory"):
        sections.append(memory_section(results["memory"]))
    if results.get("preparation"):
        sections.append(preparation_section(results["preparation"]))
    if results.get("callbacks"):
        sections.append(observer_table.observers_section(results["callbacks"]))
    if results.get("startup"):
        sections.append(startup_section(results["startup"]))
    timed = {key: run for part in ("speed", "trainers", "online") for key, run in results.get(part, {}).items()}
    if timed:
        sections.append(parts_section(timed))
    return "\n".join([*sections, origin_section(results)])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
    results = json.loads((folder / "results.json").read_text())
    (folder / "RESULTS.md").write_text(render(results), encoding="utf-8")


if __name__ == "__main__":
    main()
