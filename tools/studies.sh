#!/usr/bin/env bash
# Part of a study on a GPU that is lent by the minute: tools/studies.sh OUT SECONDS LANES STUDY [options of depthmix study]
# Goes on from what is committed and from what an earlier call on the same machine found, and leaves OUT/STUDY-runs.jsonl, which
# takes the place of docs/results/STUDY/runs.jsonl. Lanes share the GPU through NVIDIA's MPS where it is there. Compiled kernels
# are kept between calls.
set -u
out=$1 seconds=$2 lanes=$3 study=$4
shift 4
kept=${TMPDIR:-/tmp}/depthmix-studies
mkdir -p "$kept" "$out/$study"
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$kept/triton TORCHINDUCTOR_CACHE_DIR=$kept/inductor
if [ "$lanes" -gt 1 ] && command -v nvidia-cuda-mps-control > /dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$kept/mps CUDA_MPS_LOG_DIRECTORY=$kept/mps-log
  mkdir -p "$kept/mps" "$kept/mps-log"
  pgrep -f nvidia-cuda-mps-control > /dev/null || nvidia-cuda-mps-control -d
fi
for earlier in "docs/results/$study/runs.jsonl" "$kept/$study-runs.jsonl"; do
  [ -f "$earlier" ] && cp "$earlier" "$out/$study/runs.jsonl"
done
python3 -m depthmix study "$study" --out "$out/$study" --minutes "$(awk "BEGIN {print $seconds / 60}")" --lanes "$lanes" --quiet "$@"
code=$?
[ -f "$out/$study/runs.jsonl" ] && cp "$out/$study/runs.jsonl" "$out/$study-runs.jsonl" && cp "$out/$study/runs.jsonl" "$kept/$study-runs.jsonl"
echo "$study: $(grep -c '"kind": "run"' "$out/$study-runs.jsonl") runs in ${SECONDS} s"
exit $code
