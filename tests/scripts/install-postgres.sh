#!/bin/sh
# Installs PostgreSQL 15 with wal2json from Debian, if no server or no wal2json is there.
set -eu

have_server() {
    command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

have_wal2json() {
    libraries=$(pg_config --pkglibdir 2>/dev/null || true)
    [ -n "$libraries" ] && [ -e "$libraries/wal2json.so" ] && return
    ls /usr/lib/postgresql/*/lib/wal2json.so >/dev/null 2>&1
}

if have_server && have_wal2json; then
    exit 0
fi

. "$(dirname "$0")/apt.sh"
apt_install postgresql-15 postgresql-15-wal2json
