#!/usr/bin/env bash
# What the tests of this folder need beside Python: SLURM, munge and ip, from Debian's packages. Without root, or without the packages, it
# says so and the tests are skipped.
set -euo pipefail

missing=()
for pair in slurmctld:slurm-wlm munged:munge ip:iproute2; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${pair%%:*}" >/dev/null || missing+=("${pair##*:}")
done
((${#missing[@]} == 0)) && exit 0
if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
  echo "needs root and the packages ${missing[*]}: tests without them are skipped"
  exit 0
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
  echo "${missing[*]} cannot be installed here: tests without them are skipped"
