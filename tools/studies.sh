#!/usr/bin/env bash
# Parts of studies on a GPU that is lent by the minute: tools/studies.sh OUT SECONDS LANES STUDY ...
# STUDY may have options, as one word: "wall-clock --sizes 18m --seeds 0 1", "depth --sizes '6 blocks'", "dca-width --lanes 1".
# One after the other, each with the time that is left. Goes on from what is committed and from what an earlier call on the same
# machine found, and leaves OUT/STUDY-runs.jsonl, which takes the place of docs/results/STUDY/runs.jsonl, where tables and figures
# are made again with --report. Lanes share the GPU through NVIDIA's MPS where it is there; compiled kernels are kept between
# calls. ACCEPT="reason" is passed on as --accept-code, DEVICE as --device.
set -u
if [ $# -lt 4 ] || ! [ "$2" -gt 0 ] 2> /dev/null || ! [ "$3" -gt 0 ] 2> /dev/null; then
  echo "usage: tools/studies.sh OUT SECONDS LANES STUDY ..., with whole numbers above 0" >&2
  exit 2
fi
out=$1 seconds=$2 lanes=$3
shift 3
kept=${TMPDIR:-/tmp}/depthmix-studies
mkdir -p "$kept" "$out" || exit 1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$kept/triton TORCHINDUCTOR_CACHE_DIR=$kept/inductor
if [ "$lanes" -gt 1 ] && command -v nvidia-cuda-mps-control > /dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY=$kept/mps CUDA_MPS_LOG_DIRECTORY=$kept/mps-log
  mkdir -p "$kept/mps" "$kept/mps-log"
  pgrep -f nvidia-cuda-mps-control > /dev/null || nvidia-cuda-mps-control -d
fi
failed=0
for study in "$@"; do
  left=$((seconds - SECONDS))
  [ "$left" -gt 30 ] || break # no run would fit
  if ! words=$(printf '%s' "$study" | xargs -n1 printf '%s\n'); then # xargs reads quotes, and runs nothing that is in them
    echo "tools/studies.sh: cannot read the options of: $study" >&2
    failed=1
    continue
  fi
  readarray -t part <<< "$words"
  study=${part[0]}
  runs=$kept/$study/runs.jsonl # beside those of docs/results, which count in any case
  python3 -m depthmix study "$study" --out "$kept/$study" --minutes "$(awk "BEGIN {print $left / 60}")" --lanes "$lanes" \
    --device "${DEVICE:-auto}" ${ACCEPT:+--accept-code "$ACCEPT"} "${part[@]:1}" || failed=1
  if [ -f "$runs" ]; then
    cp "$runs" "$out/$study-runs.jsonl" || failed=1
    echo "$study: $(grep -c '"kind": "run"' "$runs") runs after $SECONDS s"
  fi
done
exit $failed
