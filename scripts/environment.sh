# Sourced by the scripts: makes .venv with plain pip and keeps it as long as nothing it depends on changes.
# PYTHON chooses the interpreter (default python3); it has to be 3.11 or newer.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
# Without the constraint some packages replace torch by a build of several GB.
export PIP_CONSTRAINT="$ROOT/ci/constraints.txt"
export PIP_DISABLE_PIP_VERSION_CHECK=1

# usage: environment docs|examples|test
environment() {
    local extra="$1" python="${PYTHON:-python3}" stamp tools=()
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "headrace needs Python 3.11 or newer, but '$python' is $("$python" -V 2>&1); set PYTHON to another one" >&2
        return 1
    }
    stamp="$(cat "$ROOT"/sub-packages/*/pyproject.toml "$ROOT/ci/constraints.txt" | "$python" -c \
        'import hashlib, sys; print(sys.version.split()[0], hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
    for have in test "$extra"; do
        # What the tests need includes what the examples need, but not what the site needs.
        [ "$have" = test ] && [ "$extra" = docs ] && continue
        [ "$(cat "$VENV/.headrace-$have" 2>/dev/null)" = "$stamp" ] && return 0
    done
    case "$extra" in
        test) tools=(build import-linter mypy pytest-xdist ruff types-tqdm) ;;
        # the generator, Markdown for it, a theme that fits a telephone, a button that copies an example
        docs) tools=(sphinx myst-parser furo sphinx-copybutton) ;;
    esac
    echo "installing headrace into $VENV (once)" >&2
    # Another interpreter needs another environment.
    local version='import sys; print(sys.version_info[:2])'
    if [ "$("$VENV/bin/python" -c "$version" 2> /dev/null)" != "$("$python" -c "$version")" ]; then
        "$python" -m venv --clear "$VENV"
    fi
    # A test extra of every member, the examples of the meta-package alone; the site needs no extra.
    local members=() member
    for member in "$ROOT"/sub-packages/*/; do
        if [ "$extra" = test ] || [ "$extra $(basename "$member")" = "examples headrace" ]; then
            members+=(-e "$member[$extra]")
        else
            members+=(-e "$member")
        fi
    done
    "$VENV/bin/python" -m pip install --quiet "${members[@]}" "${tools[@]}"
    echo "$stamp" > "$VENV/.headrace-$extra"
}
