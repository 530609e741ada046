#!/usr/bin/env bash
# Installs hpcai from this folder alone, without a network:  bash install.sh [FOLDER]     PYTHON=python3.12 names another Python
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:-hpcai-env}
python=${PYTHON:-python3}
target="@TARGET@"

cd_back=$PWD
cd "$here"
if ! sha256sum --check --quiet --strict SHA256SUMS; then
  echo "install.sh: files of $here are not those that were packed (see above); copy the folder again. Nothing was installed." >&2
  exit 1
fi
cd "$cd_back"

found=$("$python" -c 'import platform, sys; v = sys.version_info; print(f"Python {v[0]}.{v[1]}, {platform.system()} {platform.machine()}")')
if [ "$found" != "$target" ]; then
  echo "install.sh: these wheels are for $target, and $python is $found; name another: PYTHON=... bash install.sh" >&2
  exit 1
fi
if [ -e "$folder" ]; then
  echo "install.sh: $folder is there; name a folder that is not" >&2
  exit 1
fi

"$python" -m venv "$folder"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check --isolated --no-cache-dir \
  --no-index --find-links "$here/wheels" --no-deps --require-hashes -r "$here/requirements.txt"
"$folder/bin/python" -m pip check --disable-pip-version-check
"$folder/bin/hpcai" doctor
echo "installed: . $folder/bin/activate; hpcai run --help"
