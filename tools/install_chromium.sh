#!/usr/bin/env bash
# Debian's chromium, for the tests of pages; with sudo only where it is needed.
set -euo pipefail
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
"${as_root[@]}" apt-get update --quiet
DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install --quiet --yes --no-install-recommends chromium fonts-dejavu-core
