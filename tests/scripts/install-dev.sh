#!/bin/sh
# Installs what `make dev` needs and this machine lacks: PostgreSQL 15 with wal2json, and the tools of README's commands.
set -eu

have_server() {
    command -v initdb >/dev/null || ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1
}

have_wal2json() {
    libraries=$(pg_config --pkglibdir 2>/dev/null || true)
    [ -n "$libraries" ] && [ -e "$libraries/wal2json.so" ] && return
    ls /usr/lib/postgresql/*/lib/wal2json.so >/dev/null 2>&1
}

missing=
if ! have_server || ! have_wal2json; then
    missing="postgresql-15 postgresql-15-wal2json"
fi
for tool in curl jq psql setpriv; do
    command -v "$tool" >/dev/null && continue
    case $tool in
        psql) missing="$missing postgresql-client-15" ;;
        setpriv) missing="$missing util-linux" ;;
        *) missing="$missing $tool" ;;
    esac
done

if [ -n "$missing" ]; then
    . "$(dirname "$0")/apt.sh"
    # shellcheck disable=SC2086 # a list of names
    apt_install $missing
fi
