#!/usr/bin/env bash
# Run parts of comparisons on a GPU that is lent by the minute: lab/studies.sh OUT SECONDS RECIPE ...
# RECIPE may have options, as one word: "recipes/studies/long.yaml --only dca 0 1", "lab/recipes/depth.yaml --only '6 blocks'".
# They run one after the other, each with the time that is left. Committed results count, and so do those of an earlier call on the
# same machine. A call leaves OUT/NAME-runs.jsonl, which replaces the committed runs.jsonl; `depthmix compare RECIPE --report` then
# rewrites table and figures. Compiled kernels are kept between calls. ACCEPT="reason" is passed on as --accept-code, DEVICE as
# --device.
set -u
if [ $# -lt 3 ] || ! [ "$2" -gt 0 ] 2> /dev/null; then
  echo "usage: lab/studies.sh OUT SECONDS RECIPE ..., with a whole number above 0" >&2
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
  runs=$kept/$study/runs.jsonl
  committed=()
  for file in "docs/results/$study/runs.jsonl" "lab/results/$study/runs.jsonl"; do
    [ ! -f "$file" ] || committed+=(--results "$file")
  done
  python3 -m depthmix compare "$recipe" --out "$kept/$study" --minutes "$(awk "BEGIN {print $left / 60}")" \
    --device "${DEVICE:-auto}" "${committed[@]}" ${ACCEPT:+--accept-code "$ACCEPT"} "${part[@]:1}" || failed=1
  if [ -f "$runs" ]; then
    cp "$runs" "$out/$study-runs.jsonl" || failed=1
    echo "$study: $(grep -c '"kind": "run"' "$runs") runs after $SECONDS s"
  fi
done
exit $failed
