#!/bin/sh
# The Go client's generator needs Java.
set -eu

command -v java >/dev/null && exit
. "$(dirname "$0")/apt.sh"
apt_install default-jre-headless
