# apt_install PACKAGE...: with sudo unless we are root; says what to do where there is no apt.

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo "$@"; fi
}

apt_install() {
    if ! command -v apt-get >/dev/null; then
        echo "please install: $*" >&2
        exit 1
    fi
    echo "installing $*" >&2
    # The lists of a fresh machine or image are empty or old.
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}
