#!/usr/bin/env bash
# Rules of the house that no compiler knows. Prints each breach with its place; exits 1 if any.
set -euo pipefail
cd "$(dirname "$0")/.."

self=tests/style.sh
breaches=0

breach() {
    printf '%s\n' "$2" | sed "s|^|style: $1: |" >&2
    breaches=$((breaches + 1))
}

# files that are, or are about to be, part of the project
mapfile -t files < <(git ls-files --cached --others --exclude-standard | while read -r file; do
    [ -f "$file" ] && [ "$file" != "$self" ] && echo "$file"
done)
of_kind() { printf '%s\n' "${files[@]}" | grep -E "$1" || true; }

mapfile -t rust < <(of_kind '\.rs$')
mapfile -t product < <(of_kind '\.rs$' | grep -vE '(^|/)(tests|benches|fuzz)/|/tests\.rs$')

found=$(printf '%s\n' "${rust[@]}" | grep -v '^device/' |
    xargs grep -nE '\bunsafe +(\{|fn|impl|extern|trait)' || true)
[ -z "$found" ] || breach 'unsafe code belongs in device/' "$found"

# tests stand at the end of a file, after #[cfg(test)]
found=$(for file in "${product[@]}"; do
    awk -v file="$file" '
        /^ *#\[cfg\(test\)\]/ { exit }
        /^ *\/\// { next }
        /\.(unwrap|expect)\(/ { print file ":" FNR ":" $0 }
    ' "$file"
done)
[ -z "$found" ] || breach 'unwrap and expect belong in tests' "$found"

found=$(of_kind '(^|/)(utils?|common|helpers?|misc)(\.[a-z]+|/)')
[ -z "$found" ] || breach 'a name that says nothing' "$found"

found=$(printf '%s\n' "${files[@]}" | xargs grep -nIE '\b(TODO|FIXME|XXX)\b' || true)
[ -z "$found" ] || breach 'unfinished: finish it or file an issue' "$found"

found=$(for file in "${rust[@]}"; do
    lines=$(wc -l <"$file")
    [ "$lines" -le 500 ] || echo "$file has $lines lines"
done)
[ -z "$found" ] || breach 'over 500 lines: split it' "$found"

found=$(printf '%s\n' "${files[@]}" | grep -v '^LICENSE$' |
    xargs grep -nIE '(^|[^A-Za-z0-9_.])/(work|root|home)/[A-Za-z0-9_.-]' || true)
[ -z "$found" ] || breach 'a path of one machine' "$found"

[ "$breaches" -eq 0 ] || exit 1
echo "style: ${#files[@]} files, nothing to complain about"
