#!/usr/bin/env python3
"""Breaks the product in known ways and shows that a test notices each.

    tests/scripts/mutants.py [--here] [NAME…]

Each mutant of tests/mutants/*.toml replaces one piece of source and names the test that must turn red; without the mutant
the same test must be green, or its red shows nothing. All is done in a copy of the committed tree (or, with --here, in this
working tree, which must be clean and is restored). Prints a table for docs/testing.md; exit status 1 if a mutant survives.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
TESTS_FAILED = 100  # cargo-nextest's exit status; anything else that isn't 0 is no verdict.


def run(command, tree, **more):
    environment = os.environ | {"RUST_BACKTRACE": "0"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, **more)


def copy(into):
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", into], input=archive, check=True)
    for shared in [".cache", "tests/clients/js/node_modules"]:
        if (ROOT / shared).exists() and not (into / shared).exists():
            (into / shared).symlink_to((ROOT / shared).resolve())


def test(mutant, tree):
    """(exit status, output, seconds) of the mutant's test, binaries built before if it drives them."""
    if mutant.get("binaries"):
        built = run(["cargo", "build", "--workspace", "--bins"], tree)
        if built.returncode:
            return built.returncode, built.stderr, 0.0
    options = mutant.get("options", [])
    command = ["cargo", "nextest", "run", "--package", mutant["package"], *options, "-E", mutant["test"]]
    built = run([*command, "--no-run"], tree)
    if built.returncode:
        return built.returncode, built.stderr, 0.0
    began = time.monotonic()
    done = run(command, tree)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - began


def red(output):
    """Names of the tests that failed."""
    lines = (line.split() for line in output.splitlines())
    failed = {words[-1] for words in lines if words and words[0] in ("FAIL", "TIMEOUT", "ABORT", "SIGABRT")}
    return sorted(name.rsplit("::", 1)[-1] for name in failed)


def is_green(mutant, tree, known):
    """Whether the mutant's test passes on the source as it is; asked once for each selection."""
    selection = (mutant["package"], tuple(mutant.get("options", [])), mutant["test"])
    if selection not in known:
        status, output, _ = test(mutant, tree)
        known[selection] = status == 0
        if status:
            print(output[-2000:], file=sys.stderr)
    return known[selection]


def try_one(mutant, tree, known):
    """(verdict, tests that turned red, seconds)."""
    if not is_green(mutant, tree, known):
        return "no verdict: red without it", [], 0.0
    saved = {}
    try:
        for change in mutant["change"]:
            file = tree / change["file"]
            text = saved.setdefault(file, file.read_text())
            now = file.read_text()
            if now.count(change["find"]) != 1:
                return f"no longer applies: {change['file']}", [], 0.0
            file.write_text(now.replace(change["find"], change["replace"]))
        status, output, seconds = test(mutant, tree)
    finally:
        for file, text in saved.items():
            file.write_text(text)
    if status == 0:
        return "SURVIVES", [], seconds
    if status != TESTS_FAILED:
        return "no verdict:\n" + output[-2000:], [], seconds
    return "dies", red(output), seconds


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", action="store_true", help="in this working tree")
    parser.add_argument("names", nargs="*", help="only these, by the beginning of their files' names")
    options = parser.parse_args()
    files = sorted((ROOT / "tests/mutants").glob("*.toml"))
    chosen = [f for f in files if not options.names or any(f.name.startswith(name) for name in options.names)]
    if options.here and run(["git", "status", "--porcelain", "--untracked-files=no"], ROOT).stdout:
        sys.exit("the working tree isn't clean")
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        tree = ROOT
        if not options.here:
            tree = pathlib.Path(scratch)
            copy(tree)
        print("| mutant | verdict | test that turned red | seconds |\n|---|---|---|---|", flush=True)
        survivors, known = 0, {}
        for file in chosen:
            mutant = tomllib.loads(file.read_text())
            verdict, names, seconds = try_one(mutant, tree, known)
            survivors += verdict != "dies"
            tests = ", ".join(f"`{name}`" for name in names[:2]) + (f" and {len(names) - 2} more" if names[2:] else "")
            print(f"| {mutant['title']} | {verdict} | {tests} | {seconds:.1f} |", flush=True)
    sys.exit(1 if survivors else 0)


if __name__ == "__main__":
    main()
