#!/bin/sh
# The same comparison on one borrowed GPU, short enough for a lease of minutes. Needs nothing but python3 with torch.
#
#   benchmarks/gpu.sh [RESULTS_FOLDER] [SECONDS] [ENTRY...]
#
# Entries, in bf16, one after the other while SECONDS last: dpo (speed and memory), offline (SFT, packed, KTO, Reward),
# online (GRPO and RLOO: whole step, rollout, training pass; memory). Without ENTRY: dpo.
# Packages that the machine lacks (transformers 5.24, datasets, peft, trl, preftune's other needs) travel as wheels in
# .whl/ and are put aside, not installed over what is there. Where TRL cannot be imported, our side runs alone.
# Parts are saved as they end, so that a run cut off at its limit keeps what it has measured.
set -eu
cd "$(dirname "$0")/.."
results=${1:-${OUT:-benchmarks/.cache/gpu}}
limit=${2:-420}
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

if ls .whl/*.whl >/dev/null 2>&1; then
    site=$(mktemp -d)
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl
    export PREFTUNE_BENCH_SITE="$site" PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi

nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
python3 -c "import torch, transformers; print('torch', torch.__version__, 'transformers', transformers.__version__)"

sides="ours"
if python3 -c "from trl import DPOTrainer" 2>/dev/null; then sides="trl ours"; else echo "no TRL here: ours alone"; fi

started=$(date +%s)

bench() {  # what is left of the time limit bounds each run
    left=$((limit - $(date +%s) + started))
    if [ "$left" -lt 20 ]; then echo "no time left for: $*"; return; fi
    # shellcheck disable=SC2086
    timeout "$left" python3 -m benchmarks.run --device cuda --sides $sides --trl-python "$(command -v python3)" \
        --steps 10 --warmup 3 --results "$results" "$@" || echo "ended with $? (124: the time limit)"
}

[ $# -gt 2 ] && shift 2 || set -- dpo
for entry in "$@"; do
    case $entry in
    dpo)  # 16 pairs a step: enough tokens to fill the GPU with a 135M model; the tuned setting first, the shortest run
        bench --only speed memory --trainers dpo --variants tuned default --profiles short long --pairs 16 \
            --wide-vocabulary 0 ;;
    offline)
        bench --only speed --trainers kto sft reward --pairs 32
        bench --only speed --trainers sft-packed --pairs 16 ;;
    online)  # 16 prompts x 8 answers of 64 tokens
        bench --only speed memory --trainers grpo rloo --online-models main --pairs 16 --answer-tokens 64 ;;
    *)
        echo "no entry $entry: dpo, offline or online"; exit 2 ;;
    esac
done
test -f "$results/RESULTS.md" && cat "$results/RESULTS.md"
