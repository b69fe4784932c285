#!/bin/sh
# The bench in the project's environment: `benchmarks/run.sh [options]` is `python -m benchmarks.run [options]`.
set -eu
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.run "$@"
