#!/bin/sh
# The same comparison on one borrowed GPU, short enough for a lease of minutes. Needs nothing but python3 with torch.
#
#   benchmarks/gpu.sh [RESULTS_FOLDER] [SECONDS]
#
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

# 16 pairs a step: enough tokens to fill the GPU with a 135M model; the tuned setting first, the shortest run.
# shellcheck disable=SC2086
timeout "$limit" python3 -m benchmarks.run --device cuda --sides $sides --trl-python "$(command -v python3)" \
    --only speed memory --variants tuned default --profiles short long --pairs 16 --steps 10 --warmup 3 \
    --wide-vocabulary 0 --results "$results" || echo "ended with $? (124: the time limit)"
test -f "$results/RESULTS.md" && cat "$results/RESULTS.md"
