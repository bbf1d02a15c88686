#!/usr/bin/env bash
# need.sh 'CHECK' PACKAGE...: installs Debian packages when CHECK fails and we are root; else says so.
set -euo pipefail
check=$1
shift
if bash -c "$check" >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "missing: apt-get install $*" >&2
    exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" >/dev/null
