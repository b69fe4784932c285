"""The report's sections on SFT, KTO, Reward, GRPO and RLOO: every figure computed from the raw steps."""

from __future__ import annotations

from typing import Any

from benchmarks.kinds import KINDS
from benchmarks.summary import OURS, TRL
from benchmarks.tables import ENOUGH_STEPS, NAMES, NOISY, PRECISIONS, figure_of_ratio, of_spread, table, verdict
from benchmarks.trainer_figures import figures

SIDES = (TRL, OURS)
TIMES = ["TRL s", "preftune s", "ratio of medians", "median of step ratios"]


def name_of(run: dict[str, Any]) -> str:
    kind = run["trainer"]
    name = "SFT, packed" if kind == "sft-packed" else KINDS[kind].trainer
    return f"{name} ({PRECISIONS[run['precision']]})"


def steps_of(run: dict[str, Any]) -> int:
    return min(len(side["steps"]) for side in run["sides"].values())


def times(f: dict[str, Any], part: str) -> list[str]:
    found = [f["sides"][side]["seconds"][part] if side in f["sides"] else None for side in SIDES]
    ratio = f.get("ratios", {}).get(part)
    return [*map(of_spread, found), figure_of_ratio(ratio, "of_medians"), figure_of_ratio(ratio, "per_step")]


def reached(run: dict[str, Any], f: dict[str, Any], part: str, wanted: tuple[float, float] | None) -> str:
    ratio = f.get("ratios", {}).get(part)
    return verdict(ratio["of_medians"], wanted) if ratio and steps_of(run) >= ENOUGH_STEPS else "-"


def offline_section(runs: dict[str, Any]) -> str:
    found = {key: figures(run) for key, run in runs.items()}
    rows = [
        [
            name_of(run),
            KINDS[run["trainer"]].title,
            f"{run['pairs']} x {steps_of(run)}",
            *times(found[key], "step"),
            figure_of_ratio(found[key].get("ratios", {}).get("CPU"), "of_medians"),
            reached(run, found[key], "step", KINDS[run["trainer"]].wanted),
        ]
        for key, run in runs.items()
    ]
    titles = ", ".join(dict.fromkeys(run["title"] for run in runs.values()))
    text = f"## Training step: SFT, KTO, Reward\n\nDefault settings of both. Data: {titles}.\n\n"
    header = ["trainer", "rows", "rows x steps", *TIMES, "CPU-time ratio", "wanted"]
    text += table(header, rows) + work_table(runs, found)
    gaps = [(name_of(runs[key]), f) for key, f in found.items() if len(f.get("first_losses", ())) == 2]
    if gaps:
        text += "\nLosses as logged. KTO: the mismatched completions of the two sides are not the same.\n\n"
        cells = [[n, *(f"{x:.4f}" for x in f["first_losses"]), f"{f['largest_loss_gap']:.4f}"] for n, f in gaps]
        text += table(["trainer", "TRL, first", "preftune, first", "largest gap of any step"], cells)
    return text + noise(found)


def online_section(runs: dict[str, Any]) -> str:
    found = {key: figures(run) for key, run in runs.items()}
    rows = []
    for key, run in runs.items():
        kind, f = KINDS[run["trainer"]], found[key]
        for part in ("step", "rollout", "training"):
            wanted = kind.wanted if part == "step" else kind.wanted_parts[part]
            of_tokens = f.get("token_ratios", {}).get(part)
            cells = [*times(f, part), figure_of_ratio(of_tokens, "of_medians"), reached(run, f, part, wanted)]
            generations = kind.options["num_generations"]
            size = f"{run['pairs']} x {generations} x {run['answer_tokens']} tokens, {steps_of(run)} steps"
            rows.append([name_of(run), run["model"], size, "whole step" if part == "step" else part, *cells])
    text = (
        "## Training step: GRPO, RLOO\n\nDefault settings of both, but for the size of a group and its answers; RLOO "
        "with its KL. Prompts are equal on both sides, answers are drawn by each. Their end token is one that the "
        "model never says, so that all are as long as allowed. Rollout: the policy's `generate`, or our backend's. "
        "Training: all the rest of the step, scoring under policy and reference included.\n\n"
    )
    header = ["trainer", "model", "prompts x answers", "part", *TIMES, "ratio per token", "wanted"]
    text += table(header, rows) + "\n"
    text += (
        "Decoding, and what bounds it: a step reads all weights once however many rows it has, so it cannot take less "
        "than their bytes over the memory's bandwidth (measured beside it, all threads).\n\n"
    )
    header = ["trainer", "model", "side", "answer tokens a step", "tokens/s of the rollout", "prefill s"]
    header += ["decoding step ms", "bound ms", "share of bound", "GB/s"]
    text += table(header, [row for key, run in runs.items() for row in decode_rows(run, found[key])])
    return text + work_table(runs, found) + noise(found)


def decode_rows(run: dict[str, Any], f: dict[str, Any]) -> list[list[str]]:
    fastest = max(b["gigabytes"] for b in run["bandwidths"])
    return [
        [
            name_of(run),
            run["model"],
            NAMES[side],
            f"{s['completion_tokens']:.0f}",
            f"{s['rollout_tokens_per_second']:.0f}",
            f"{s['prefill_seconds']:.3f}",
            f"{1e3 * s['decode_step_seconds']:.2f}",
            f"{1e3 * s['decode_bound_seconds']:.2f}",
            f"{s['share_of_bandwidth']:.0%}",
            f"{fastest:.1f}",
        ]
        for side, s in f["sides"].items()
    ]


def work_table(runs: dict[str, Any], found: dict[str, Any]) -> str:
    header = ["trainer", "model", "side", "real tokens/s", "forwarded/real", "share of peak, forwarded", "needed"]
    header += ["peak GFLOP/s", "system time", "peak memory GiB", "memory ratio", "others"]
    rows = []
    for key, run in runs.items():
        sides = found[key]["sides"]
        for side, s in sides.items():
            both = side == OURS and TRL in sides
            share = s["share_of_peak"]
            rows.append(
                [
                    name_of(run),
                    run["model"],
                    NAMES[side],
                    f"{s['real_tokens_per_second']:.0f}",
                    f"{s['forwarded_per_real']:.2f}",
                    "-" if share is None else f"{share:.1%}",
                    f"{s['needed_share_of_peak']:.1%}",
                    f"{s['peak_gflops']:.0f}",
                    f"{s['system_share']:.0%}",
                    f"{s['peak_memory'] / 1024:.2f}",
                    f"{s['peak_memory'] / sides[TRL]['peak_memory']:.2f}" if both else "-",
                    f"{s['others_median']:.0%}, {s['others_highest']:.0%}",
                ]
            )
    text = (
        "\nShares of peak as for DPO, of the training pass. Forwarded: positions through the policy, with and without "
        "gradient, rollouts aside.\n\n"
    )
    return text + table(header, rows)


def noise(found: dict[str, Any]) -> str:
    noisy = [key for key, f in found.items() if any(s["others_median"] > NOISY for s in f["sides"].values())]
    if not noisy:
        return ""
    return f"\n**Noisy**: other processes took more than {NOISY:.0%} of the CPU in {', '.join(noisy)}; measure again.\n"
