#!/bin/sh
# install-venv.sh DIRECTORY REQUIREMENTS: a private virtual environment with what is listed there.
set -eu

if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then
    . "$(dirname "$0")/apt.sh"
    apt_install python3 python3-venv
fi
python3 -m venv "$1"
"$1/bin/pip" install --quiet --disable-pip-version-check --requirement "$2"
