#!/usr/bin/env bash
# Parts of studies on a GPU that is lent by the minute: lab/studies.sh OUT SECONDS STUDY ...
# STUDY may have options, as one word: "long --arms dca --seeds 0 1", "lab/recipes/depth.yaml --sizes '6 blocks'".
# One after the other, each with the time that is left. Goes on from what is committed and from what an earlier call on the same
# machine found, and leaves OUT/STUDY-runs.jsonl, which replaces docs/results/STUDY/runs.jsonl. `--report` then makes table and
# figures again. Compiled kernels are kept between calls. ACCEPT="reason" is passed on as --accept-code, DEVICE as --device.
set -u
if [ $# -lt 3 ] || ! [ "$2" -gt 0 ] 2> /dev/null; then
  echo "usage: lab/studies.sh OUT SECONDS STUDY ..., with a whole number above 0" >&2
  exit 2
fi
out=$1 seconds=$2
shift 2
kept=${TMPDIR:-/tmp}/depthmix-studies
mkdir -p "$kept" "$out" || exit 1
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 TRITON_CACHE_DIR=$kept/triton TORCHINDUCTOR_CACHE_DIR=$kept/inductor
failed=0
for study in "$@"; do
  left=$((seconds - SECONDS))
  [ "$left" -gt 30 ] || break # no run would fit
  if ! words=$(printf '%s' "$study" | xargs -n1 printf '%s\n'); then # xargs reads quotes, and runs nothing that is in them
    echo "lab/studies.sh: cannot read the options of: $study" >&2
    failed=1
    continue
  fi
  readarray -t part <<< "$words"
  recipe=${part[0]}
  study=$(basename "$recipe" .yaml)
  runs=$kept/$study/runs.jsonl # beside those of docs/results, which count in any case
  python3 -m depthmix study "$recipe" --out "$kept/$study" --minutes "$(awk "BEGIN {print $left / 60}")" \
    --device "${DEVICE:-auto}" ${ACCEPT:+--accept-code "$ACCEPT"} "${part[@]:1}" || failed=1
  if [ -f "$runs" ]; then
    cp "$runs" "$out/$study-runs.jsonl" || failed=1
    echo "$study: $(grep -c '"kind": "run"' "$runs") runs after $SECONDS s"
  fi
done
exit $failed
