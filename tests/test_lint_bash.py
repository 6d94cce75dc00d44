"""Launch scripts in real bash: what lint reads of one is what bash runs, or it says that it is open.

A `torchrun` of ours at the front of PATH writes down the words that it gets; nothing else of the host takes part.
"""

import random
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress

import pytest

from nam_megatron.errors import Refused
from nam_megatron.lint import describe, follow, lint, report, shell
from nam_megatron.lint.follow import holes
from nam_megatron.lint.read import read
from nam_megatron.targets import current

STUB = """#!/bin/sh
for word in "$@"; do printf '%s\\0' "$word"; done >> "$OUT"; printf '\\1\\0' >> "$OUT"
"""
RUN = "torchrun t.py --hidden-size"
# `RUN` stands for it.
SCRIPTS = [
    'S=big; if [[ $S == "b*" ]]; then X=5; else X=4; fi; RUN $X',
    'S=big; if [ $S = "b*" ]; then X=5; else X=4; fi; RUN $X',
    'S=big; case $S in "b*") X=5;; *) X=4;; esac; RUN $X',
    'X=$((-7/2)); RUN $X',
    'X=$((-7%2)); RUN $X',
    'X=$((7/2*2)); RUN $X',
    'X=$(( (1+2)*3 )); RUN $X',
    'for i in {4..1}; do X=$i; done; RUN $X',
    'for i in {1..9..2}; do X=$i; done; RUN $X',
    'f() { RUN 4 "$@"; }; f --num-layers 8',
    'f() { RUN $1; }; f 4; ',
    'X=4; (false) && X=5; RUN $X',
    '(exit 3) && X=4 || X=5; RUN $X',
    'X=4; { true; [ 1 = 2 ]; } && X=5; RUN $X',
    'X=4; true | false || X=5; RUN $X',
    'X=4; f() { X=5; }; unset -f f; f; RUN $X',
    'f() { eval "$1=$2"; }; f X 4; RUN $X',
    'X=4; while getopts "a:" o; do X=5; done; RUN $X',
    'set -- --num-layers 8; RUN 4 "$@"',
    'X=4; (X=5); RUN $X',
    'X=4; { X=5; }; RUN $X',
    'X=4; echo a | X=5; RUN $X',
    'X=4; X=5 true; RUN $X',
    'X=4; f() { X=5; }; RUN $X',
    'X=4; f() { X=5; }; f; RUN $X',
    'X=4; f() { local X=5; }; f; RUN $X',
    'function f { RUN 4; }; f',
    'X=4; until [ $X -ge 7 ]; do X=$((X+1)); done; RUN $X',
    'A=(1 4 2); RUN ${A[1]}',
    'A=(1 4 2); RUN ${A}',
    'A=(1 4 2); RUN ${#A[@]}',
    'A=(); RUN 4${#A[*]}',
    'A=(1 4 2); A+=(5); [ ${#A[@]} -eq 4 ] && X=$((2*${#A[@]})); RUN $X',
    'A=(1 2 4); RUN ${A[-1]}',
    'X=4; RUN ${X:+5}',
    'RUN ${X:+5}4',
    'X=; RUN ${X-5}4',
    'X=; RUN ${X:-5}',
    'RUN ${X:=6}; torchrun t.py --num-layers $X --hidden-size $X',
    'X="4 --num-layers 8"; RUN $X',
    'X="4 --num-layers 8"; RUN "$X"',
    "X='4'; RUN '$X'",
    'X=4; RUN "$X"5',
    'X=4; RUN "${X}"',
    'X=4; RUN \\$X',
    "X=$'4\\t5'; RUN $X",
    'A=(--num-layers 8); RUN 4 pre"${A[@]}"',
    'A=(--num-layers 8); RUN 4 "${A[*]}"',
    'A=("--num-layers" "8 9"); RUN 4 ${A[@]}',
    'A=("--num-layers" "8 9"); RUN 4 "${A[@]}"',
    'A=(); RUN 4 "${A[@]}"',
    'RUN 4 ""',
    'X=""; RUN 4 $X --bf16',
    'X=""; RUN 4 "$X" --bf16',
    'if ! [ 1 -eq 2 ]; then X=4; fi; RUN $X',
    'if ! false; then X=4; else X=5; fi; RUN $X',
    'if true && false; then X=5; else X=4; fi; RUN $X',
    'if false || true; then X=4; fi; RUN $X',
    '[ 1 = 1 ] || X=5; X=${X:-4}; RUN $X',
    'if [[ 1 == 1 && 2 == 3 ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ 1 == 1 || 2 == 3 ]]; then X=4; fi; RUN $X',
    'if [[ 1 == 1 && 2 == 3 && 1 == 1 ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ 1 == 1 || 2 == 3 || 2 == 3 ]]; then X=4; else X=5; fi; RUN $X',
    'if [[ -z $U && 1 == 1 ]]; then X=4; fi; RUN $X',
    'if [[ 1 == 2 || ( 2 == 3 || 1 == 4 ) ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ ! ( 1 == 2 || 1 == 1 && 2 == 2 ) ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ 1 == 1 ]] 2> err; then X=4; else X=5; fi; RUN $X',
    'if [[ 1 == 1 &&\n\n ( 2 == 2 ) ]]; then X=4; else X=5; fi; RUN $X',
    'if ! [[ 1 == 1 && ! 2 == 3 ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ 1 == 1 || 2 == 2 && 2 == 3 ]]; then X=4; else X=5; fi; RUN $X',
    'X=4; [[ ( 1 == 2 ) ]] && X=5; [[ 1 == 1 && (1 == 2 || ! 2 == 2) ]] || RUN $X',
    '((X=3+1)); RUN $X',
    'let X=3+1; RUN $X',
    'X=3; ((X++)); RUN $X',
    'X=3; X+=4; RUN $X',
    'X=4 # comment\nRUN $X # --num-layers 8',
    'RUN 4 --save a#b',
    'X="a # b"; RUN 4 --save "$X"',
    'X=4 Y=$X; RUN $Y',
    'X=4 RUN ${X:-5}',
    'export X=4 Y=5; RUN $Y',
    'readonly X=4; RUN $X',
    'X=4; unset X; RUN ${X:-6}',
    'X=4; Y="$X$X"; RUN $Y',
    'X=a-b-c; RUN ${X//-/_}',
    'X=a-b-c; RUN ${X/-/}',
    'X=a.b; RUN ${X//./4}',
    'X=a/b/c.d/; RUN ${X%/} ${X%%/*} ${X#*/} ${X##*/} ${X%.?/}',
    'X=a*b; RUN "${X%b}" "${X#[ab]}" ${X%x}',
    'X=a4; RUN ${X#a}',
    'RUN $(seq 2 4)',
    "RUN 1 `# that's a comment` 2",
    'X=$(seq 4); RUN $X',
    'for i in $(seq 4 1); do X=5; done; X=${X:-4}; RUN $X',
    'while true; do X=4; break; done; RUN $X',
    'X=4; while false; do X=5; done; RUN $X',
    'eval "X=4"; RUN $X',
    'C="RUN 4"; eval "$C --num-layers 8"',
    'C="RUN \\"4\\""; eval $C',
    'C="RUN 4"; $C',
    'C="RUN \'4\'"; $C',
    'C=(RUN 4); "${C[@]}"',
    *(f'{shell} -c "RUN 4"' for shell in ("bash", "sh", "zsh", "dash")),
    "X=4; bash -c 'RUN ${X:-7}'",
    "export X=4; bash -c 'RUN $X'",
    'bash <<EOF\nRUN 4\nEOF',
    "X=4; bash <<'EOF'\nRUN ${X:-7}\nEOF",
    'X=4; bash <<EOF\nRUN $X\nEOF',
    'X=4; cat <<EOF | bash\nRUN $X\nEOF',
    'if [ -z "" ]; then RUN 4; else RUN 5 --bf16; fi',
    'false && RUN 5; RUN 4',
    'true || RUN 5 --bf16; RUN 4',
    'RUN 4 2>&1 | cat',
    'RUN 4 0</dev/null 2>>/dev/null',
    'RUN 4 > /dev/null',
    'RUN 4 &> /dev/null &\nwait',
    '{ RUN 4; } 2>&1',
    '( RUN 4 )',
    '! RUN 4',
    'time RUN 4',
    'exec RUN 4',
    'nohup RUN 4',
    'env X=4 RUN 4',
    'command RUN 4',
    'X=4;Y=5;RUN $X$Y',
    'X=4\\\n5; RUN $X',
    'X="4\\\n5"; RUN $X',
    "X='4\\\n5'; RUN $X",
    'RUN "a\\"b"',
    'RUN "a\\nb"',
    'T=\'x\'; RUN "${T}y"',
    'X="$(( 2 * 3 ))"; RUN $X',
    'X=2; Y=$((X*3)); Z=$((${Y}+$X)); RUN $Z',
    'A=(a b); A[1]=4; RUN ${A[1]}',
    'A=(1 2); A=(4 "${A[@]}"); RUN ${A[0]}',
    'A="x y"; B=($A 4); RUN ${B[2]}',
    'A=(--num-layers 8); A=(); RUN 4 ${A[@]}',
    'S=b; case $S in a) X=5;; b) X=4;& c) Y=1;; esac; RUN $X',
    'S=b; case $S in [ab]) X=4;; *) X=5;; esac; RUN $X',
    'S=; case $S in "") X=4;; *) X=5;; esac; RUN $X',
    'S=x; case $S in a) X=5;; esac; X=${X:-4}; RUN $X',
    'case 1 in 1|2) X=4;; esac; RUN $X',
    'case 1 in (1) X=4;; esac; RUN $X',
    'return 2>/dev/null; RUN 4',
    'X=4; if [ $X == 4 ]; then X=6; fi; RUN $X',
    'X=4; [ $X = 4 ] && X=6 && X=7; RUN $X',
    'X=4; [ $X = 5 ] && X=6; RUN $X',
    '[ "a b" = "a b" ] && X=4; RUN $X',
    'X="a b"; [ "$X" = "a b" ] && X=4; RUN $X',
    'if [ 4 ]; then X=4; else X=5; fi; RUN $X',
    'if [ ]; then X=5; else X=4; fi; RUN $X',
    'if [ "" ]; then X=5; else X=4; fi; RUN $X',
    'if test 3 -lt 4; then X=4; fi; RUN $X',
    'if [ a != b ]; then X=4; fi; RUN $X',
    'if [[ abc != a* ]]; then X=5; else X=4; fi; RUN $X',
    'if [ -n "$HOME" ]; then X=4; fi; RUN 4',
    'for x in 1 2; do for y in 3 4; do X=$x$y; done; done; RUN $X',
    'L="1 2 4"; for x in $L; do X=$x; done; RUN $X',
    'L=(1 "2 3" 4); for x in "${L[@]}"; do X=$x; done; RUN $X',
    'for x in a{1,2,4}; do X=$x; done; RUN $X',
    'RUN {4,--bf16}',
    'X=4; for x in; do X=5; done; RUN $X',
    'for x in *.none; do X=$x; done; RUN "$X"',
    'i=0; while [ $i -lt 3 ]; do i=$((i + 1)); X=$i; done; RUN $X',
    'A=(\n  --num-layers 8\n  # --bf16\n  --seq-length 7 # x\n); RUN 4 "${A[@]}"',
    'A="\n--num-layers 8\n"; RUN 4 $A',
    'shopt -s x; set -euo pipefail; RUN 4',
    'source ./none.sh; RUN 4',
    'pushd /tmp; RUN 4',
    'alias t=torchrun; RUN 4',
    'trap "echo x" EXIT; RUN 4',
    'if X=4; then Y=1; fi; RUN $X',
    'Y=$(( 1 )) X=4; RUN $X',
    'X=4; { X=5; } | cat; RUN $X',
    'X=4; X=6 & wait; RUN $X',
    'X=4; $(X=5); RUN $X',
    'Y=$(X=5; echo $X); RUN 4',
    "if (( 3 > 2 )); then X=4; else X=5; fi; RUN $X",
    "if (( 3 <= 2 )); then X=4; else X=5; fi; RUN $X",
    "for ((i=0;i<3;i++)); do X=$i; done; RUN $X",
    "for ((i=1; i <= 3; i++)); do X+=($i); done; RUN ${X[@]}",
    "for ((i=3; i < 3; i++)); do X=$i; done; X=7; RUN $X",
    "A=(1 2 3); printf -v X '[%s]' \"$(IFS=', '; echo \"${A[*]}\")\"; RUN $X",
]  # fmt: skip
# Those that lint leaves open.
OPEN = [
    'X=$((2**3)); RUN $X',
    'declare -i X=2+3; RUN $X',
    'A=(1 4 2); N=$(wc -l < t.sh); A[$N]=5; RUN ${A[0]}${A[1]}${A[2]}',
    'A=(1 4 2); N=$(expr 1); A[$N]=5; RUN ${A[1]}',
    'A=(1 *s 4); RUN ${#A[@]}',
    'if [ 1 = 1 -a 2 = 3 ]; then X=5; else X=4; fi; RUN $X',
    'if [[ abc =~ ^a ]]; then X=4; else X=5; fi; RUN $X',
    'X=4; Y=X; RUN ${!Y}',
    'X=abc; RUN ${#X}',
    'X=abcd; RUN ${X:1:2}',
    'X=abcd; RUN ${X#[^b]}',
    'X=ab; RUN ${X^^}',
    'RUN $(echo 4)',
    'RUN `echo 4`',
    'for i in 1 2 3; do if [ $i = 2 ]; then break; fi; X=$i; done; RUN $X',
    'for i in 1 2 3; do if [ $i = 2 ]; then continue; fi; X=$i; done; RUN $X',
    'X=08; RUN $((10#$X+1))',
    'X=3; RUN $((X==3?4:5))',
    'X=3; RUN $((X>2))',
    'declare -A M=([x]=4); RUN ${M[x]}',
    'A=(1 2 3); B=("${A[@]:1}"); RUN ${B[0]}',
    'A=(--num-layers 8); unset A; RUN 4 ${A[@]}',
    'if [ 10 \\> 9 ]; then X=5; else X=4; fi; RUN $X',
    'if [[ 10 > 9 ]]; then X=5; else X=4; fi; RUN $X',
    'if [[ a < b ]]; then X=4; else X=5; fi; RUN $X',
    'printf -v X 4; RUN $X',
    'read X <<< 4; RUN $X',
    'X=$(cat <<EOF\n4\nEOF\n); RUN $X',
    'f() { return 1; }; if f; then X=5; else X=4; fi; RUN $X',
    'X=4; f() { return 1; }; f && X=5; RUN $X',
    'X=4; f() { [ 1 = 2 ]; }; f && X=5; RUN $X',
    'A=(1 4 2); unset "A[1]"; RUN ${A[@]}',
    # What is changed within an expression.
    'X=7; (( X <<= 2 )); RUN $X',
    'X=7; (( X >>= 2 )); RUN $X',
    'X=7; RUN $(( --X ))',
    'X=7; Y=$(( X++ )); RUN $X',
    'X=7; Y=$(( X = 3 )); RUN $X',
]  # fmt: skip


@pytest.fixture(scope="module")
def bash(tmp_path_factory):
    """script -> the words of each launch that bash makes of it, without the launcher's."""
    folder = tmp_path_factory.mktemp("bash")
    schedulers = dict.fromkeys(("zsh", "dash", "sbatch", "srun", "ssh", "qsub", "bsub"), 'exec bash "$@"\n')
    for name, text in {"torchrun": STUB, **schedulers}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    def run(script: str) -> list[list[str]]:
        out = folder / "out"
        out.unlink(missing_ok=True)
        environ = {"PATH": f"{folder}:/usr/bin:/bin", "OUT": str(out), "HOME": "~"}
        subprocess.run(["bash", "-c", script], env=environ, cwd=folder, capture_output=True, timeout=600, check=False)
        text = out.read_bytes().decode(errors="replace") if out.exists() else ""  # a return stays one
        return [launch.split("\0")[1:-1] for launch in text.split("\1\0") if launch]

    return run


def words(script: str) -> list[str] | None:
    """What lint reads; None where something is open."""
    found = list(read(script, current()).words)
    return None if any(map(holes, found)) else found


def of_every_word() -> Iterator[str]:
    """Scripts that lint reads: of every word of a shell that it knows."""
    yield from (f"{shell} -c 'RUN 4'" for shell in sorted(follow.SHELLS))
    yield from (f"cat <<EOF | {taker}\nRUN 4\nEOF" for taker in sorted(follow.TAKES_SCRIPT - {"cat", "tee"}))
    yield from (f"f() {{ {declare} X=4; RUN $X; }}; f" for declare in sorted(follow.DECLARE))
    yield from (
        f"if [ {n} {test} 4 ]; then X=4; else X=5; fi; RUN $X" for test in sorted(follow.NUMERIC) for n in (3, 4, 5)
    )
    yield from (f"RUN $(( {n} {sign} 3 ))" for sign in "+-*/%" for n in (7, 3, 0, -7))
    yield from (f"X=7; (( X {sign}= 2 )); RUN $X" for sign in ("", *"+-*/%"))
    yield from (f"X=$'a{escape}b'; RUN \"$X\"" for escape in (r"\n", r"\t", r"\r", r"\\", r"\'", r"\"", r"\q"))
    yield "X=7; RUN $(( -X ))"


def of_every_unknown() -> Iterator[str]:
    """Scripts that lint leaves open, and of which words."""
    yield from (f"if {asks} a; then X=4; else X=5; fi; RUN $X" for asks in sorted(follow.ASKS))
    signs = ("**", "<<", ">>", "&", "|", "^", "<", "<=", ">", ">=", "==", "!=", "&&", "||", ",")
    yield from (f"RUN $(( 7 {sign} 3 ))" for sign in signs)
    yield from (f"X=7; (( X {sign}= 2 )); RUN $X" for sign in signs[:6])
    yield from (f"X=7; RUN $(( {text} ))" for text in ("+X", "!X", "~X", "X++", "X?1:2", "0x1f", "2#101", "Y"))


@pytest.mark.parametrize("script", (*SCRIPTS, *of_every_word()))
def test_what_is_read_is_what_bash_runs(script, bash):
    script = script.replace("RUN", RUN)
    assert words(script) in bash(script)


@pytest.mark.parametrize("script", (*OPEN, *of_every_unknown()))
def test_what_is_not_followed_is_left_open(script, bash):
    """Open is never wrong, and tells nobody anything: one that is followed some day goes to the others."""
    script = script.replace("RUN", RUN)
    assert words(script) is None and bash(script)


def test_one_tree_serves_all_ways_of_a_script(monkeypatch):
    """A script of many branches was parsed anew for each way, for half of its minute."""
    for text in (script.replace("RUN", RUN) for script in SCRIPTS):
        tree = shell.parsed(text)
        with suppress(shell.ShellError):
            follow.run(text)
        fresh = shell.Parser(text)
        assert tree == (fresh.block(), fresh.bodies), text
    made = []
    monkeypatch.setattr(shell, "Parser", lambda text, parser=shell.Parser: made.append(text) or parser(text))
    found = lint(f"if [ $A = 1 ]; then X=4; else X=8; fi\n{RUN} $X --num-attention-heads 2 --num-layers 2", "s.sh")
    assert "hidden ? (4 if $A = 1, else 8)" in report.text(found) and len(made) == 1


def test_a_script_that_is_cut_anywhere_is_refused():
    whole = "if [ 1 -eq 1 ] ; then for x in a b ; do case $x in a ) X=4 ;; esac ; done ; fi ; f () { X=5 ; } ; while true ; do f ; done"
    for n in range(whole.count(" ") + 2):
        with pytest.raises(Refused):
            read(" ".join(whole.split(" ")[:n]), current())


@pytest.mark.parametrize("printed", ["echo", "printf"])
def test_what_is_only_printed_is_read_and_noted(printed):
    launch = read(f"{printed} {RUN} 4 > job.sh; {printed} {RUN} 5", current())
    assert launch.words == ("--hidden-size", "4") and "only prints it" in launch.notes[-1]


@pytest.mark.parametrize("taker", ["bash", "sh", "zsh", "dash", "sbatch", "cat", "tee", "srun", "ssh", "qsub", "bsub"])
def test_what_a_program_is_given_as_its_input_is_read(taker):
    """Beside its own words, too, which bash alone does not know to be a script."""
    assert read(f"{taker} job.sh <<EOF\n{RUN} 4\nEOF", current()).words == ("--hidden-size", "4")


def test_what_bash_never_starts_is_no_launch(bash):
    script = f"X=4; exit 0; {RUN} $X"
    assert bash(script) == []
    with pytest.raises(Refused, match="Megatron flag"):
        words(script)


def test_what_a_script_would_be_called_with_is_open_in_its_functions_too():
    for call, known in (('f "$@"', None), ('f 4 "$@"', "4"), ("f 4", "4"), ('set -- 4 "$@"; f "$@"', "4")):
        assert words(f"f() {{ {RUN} $1; }}; {call}") == (known and ["--hidden-size", known])
        assert words(f'f() {{ {RUN} 4 "$@"; }}; f "$@"') == ["--hidden-size", "4"]


def test_a_default_stands_for_an_argument_beyond_the_last():
    assert words(f"set -- 4; {RUN} ${{1-5}} --num-layers ${{2-6}} --lr ${{3:-7}}") == [
        "--hidden-size",
        "4",
        "--num-layers",
        "6",
        "--lr",
        "7",
    ]


def test_flags_that_a_variable_would_bring_are_noted():
    notes = " ".join(lint("torchrun t.py --num-layers 2 ${FP8:+--fp8-format hybrid} ${NAME:+$NAME}").launch.notes)
    assert "not set in your environment" in notes and "FP8" in notes and "NAME" not in notes


def test_a_function_that_calls_itself_is_noted():
    launch = read(f"f() {{ f; X=5; }}\nX=4; f; {RUN} $X", current())
    assert any("calls itself" in note for note in launch.notes)


@pytest.mark.parametrize("form", ['A="{}"', 'f() {{ A="{}"; }}', "f() {{ A=({}); }}\ng() {{ :; }}"])
def test_a_file_that_only_sets_variables_holds_its_flags(form):
    """For another script to use; in functions, too."""
    launch = read(form.format("--hidden-size 4 --num-layers 2"), current())
    assert launch.words == ("--hidden-size", "4", "--num-layers", "2") and launch.partial


# Scripts that nobody has written -----------------------------------------------------------------------------------------------

VALUES = [
    "4", "7", "a\\ b", "$X", "${Y}", '"$X"', "'$X'", "${X:-3}", "${Z:-5}", "${Z:+1}", "$((X+1))", "$((2*3-1))", '"$X $Y"', "${A[0]}",
    "${A[1]}", '"${A[@]}"', "${#A[@]}", "{1,2}", "x{1..3}", "${X/4/5}", "${X%a}", "$(seq 2)", "$1", "$#", '"$@"', "\\$X", "$'c\\td'", "-3",
]  # fmt: skip
TESTS = [
    '[ "$X" = 4 ]', "[[ $X == 4* ]]", '[[ $X == "4*" ]]', '[ -z "$Y" ]', '[ -n "$X" ]', "true", "false", "! true", "[ 2 -lt 3 ]",
    "(( 5 > 3 ))", "[[ $X != a && 1 == 1 ]]", "[[ a == b || $X == 4 ]]", "test 1 = 1", "[ -f none ]", "[[ -v X ]]", "grep -q a none",
    "! [ 1 = 1 ]", "[[ a == b || ( $X == 4 && ! b == c ) ]]",
]  # fmt: skip
PATTERNS = ["4", "a*", '"a*"', "4|5", "[0-9]"]
PLAIN = [
    "export V=5", "export V=$X", "unset V", "((V=3*2))", "let V=4+1", "A[1]=6", "set -- p q", "shift", ":", "V=9 true", "V+=1", "V+=$Y",
    "A=(N N)", "A+=(N)", "V=N", "V=N", "V=N", "T && V=1", "T || V=6", 'eval "X=8"', 'eval "Y=\\$X"',
]  # fmt: skip
COMPOUND = [
    "if T; then B; else B; fi", "if T; then B; elif T; then B; fi", "for V in N 8; do B; done", "case $X in P) B;; *) B;; esac", "( B )",
    "{ B; }", "B | cat", "fD() { B; }", "fD() { B; }; fD", "gD() { local V=3; B; }; gD k", "{ B; } &\nwait",
    "iD=0; while [ $iD -lt 3 ]; do iD=$((iD+1)); B; done",
]  # fmt: skip
ENDS = [
    'RUN $X --lr "$Y" --data-path ${A[@]}', 'RUN "$X" --data-path "${A[@]}"', 'bash -c "RUN $X --lr \\$Y"', "bash -c 'RUN ${X:-1}'",
    "bash <<EOF\nRUN $X --lr \\$Y\nEOF", "bash <<'EOF'\nRUN $X\nEOF", "RUN $X | cat", 'h() { RUN $X "$@"; }; h --lr $Y',
]  # fmt: skip


def written(dice: random.Random, form: str, depth: int = 0) -> str:
    """A form with its capitals filled in: V a variable, N a value, T a test, P a pattern, D the depth, B a statement or two."""

    def filled(letter: str) -> str:
        match letter:
            case "V":
                return dice.choice("XYZ")
            case "N":
                return dice.choice(VALUES)
            case "T":
                return dice.choice(TESTS)
            case "P":
                return dice.choice(PATTERNS)
            case "D":
                return str(depth)
        forms = PLAIN + (COMPOUND if depth < 3 else [])
        return "; ".join(written(dice, dice.choice(forms), depth + 1) for _ in range(dice.randint(1, 2)))

    return re.sub(r"(?<![A-Za-z$])[VNTPB](?![A-Za-z])|(?<=[a-z])D", lambda m: filled(m[0]), form)


@pytest.mark.parametrize("seed", range(150))
def test_no_script_is_read_as_another(seed, bash):
    dice = random.Random(seed)
    body = [written(dice, "B") for _ in range(dice.randint(1, 3))]
    script = "\n".join(["X=4; A=(2 6)" if dice.random() < 0.7 else ":", *body, dice.choice(ENDS).replace("RUN", RUN)])
    runs, found = bash(script), words(script)
    assert not runs or found is None or found in runs, script


BOTH = """
if nvidia-smi | grep -q H100; then MBS=2; TP={}; else MBS=4; TP=8; fi
torchrun --nproc-per-node 8 pretrain_gpt.py --micro-batch-size $MBS --tensor-model-parallel-size $TP --lr $LR --num-layers 2
"""


def test_what_every_branch_sets_alike_is_known_and_what_they_set_otherwise_names_its_line():
    """It was said that nothing in the text sets a variable that both branches of an `if` do."""
    found = lint(BOTH.format(8))
    assert found.args.tensor_model_parallel_size == 8
    assert not [f for f in found.findings if f.id == "unknown-variable"]
    assert "open, since they hang on what line 2 would find: --micro-batch-size ($MBS)" in describe.notes(
        found.args, found.model
    )
    both = lint("LAYERS=4\n" + BOTH.format(4).replace("--lr $LR", "--lr $LR --hidden-size $4 --kv-channels $LAYRES"))
    unset = "the text does not decide what these hang on, and they are open: --lr ($LR), --hidden-size ($4), --kv-channels ($LAYRES)"
    assert unset in describe.notes(both.args, both.model)
    told = [(f.flag, f.detail) for f in both.findings if f.id == "unknown-variable"]
    assert told == [("--kv-channels $LAYRES", "nothing in the text sets LAYRES, but LAYERS")]
    assert dict(lint(BOTH.format(4)).args.open_values()).keys() >= {"tensor_model_parallel_size"}
    lone = BOTH.format(8).replace(" else MBS=4; TP=8;", "")
    assert dict(lint(lone).args.open_values()).keys() >= {"tensor_model_parallel_size"}


MODEL = """LAYERS=4
kinds=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < 1 )); then kinds+=(0); else kinds+=(1); fi
done
printf -v EVERY "[%s]" "$(IFS=', '; echo "${kinds[*]}")"
MODEL_ARGS=(--num-layers $LAYERS --hidden-size 64 --num-attention-heads 4 --num-experts 4 --moe-layer-freq "$EVERY" --swiglu)
"""
SOURCES = """HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${HERE}/models/small.sh"
ray job submit -- python3 train.py --actor-num-nodes 1 --colocate --rollout-size 4 --lr 1e-4 ${MODEL_ARGS[@]}
"""


def test_a_file_that_a_script_sources_is_read_where_it_lies(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text(MODEL)
    found = lint(SOURCES, str(tmp_path / "run.sh"))
    assert found.args.hidden_size == 64 and found.model.numbers("moe") == (2, 3, 4)
    below = tmp_path / "runs"
    below.mkdir()
    up = SOURCES.replace('[0]}")" &>', '[0]}")/.." &>')
    assert lint(up, str(below / "run.sh")).args.hidden_size == 64


def test_what_a_file_that_is_not_there_may_set_is_open():
    """A model of which nothing is known was described by Megatron's defaults."""
    found = lint(SOURCES, "run.sh")
    assert found.args.elsewhere and any("models/small.sh" in note for note in found.launch.notes)
    rows = dict(describe.rows(found.args, found.model))
    assert rows["activation"] == rows["dropout"] == "?"


WHOLE = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 "
    "--train-iters 10000 --lr 3e-4 --bf16 --tokenizer-type NullTokenizer --vocab-size 32000 --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --data-path x"
)
FORKED = f"ARGS=({WHOLE})\n{{}}\ntorchrun pretrain_gpt.py ${{{{ARGS[@]}}}}"


@pytest.mark.parametrize(
    "condition, said",
    [
        ('if [ "$X" = 1 ]; then ARGS+=(--hidden-dropout 0.0); fi', "0 if $X = 1, else 0.1 (default)"),
        ('[ "$X" = 1 ] && ARGS+=(--hidden-dropout 0.0)', "0 if $X = 1, else 0.1 (default)"),
        ('[ "$X" = 1 ] || ARGS+=(--hidden-dropout 0.0)', "0 if not ($X = 1), else 0.1 (default)"),
        ("if $X; then ARGS+=(--hidden-dropout 0.0); fi", "0 if $X, else 0.1 (default)"),
        ('( [ "$X" = 1 ] ) && ARGS+=(--hidden-dropout 0.0)', "0 if $X = 1, else 0.1 (default)"),
        ("nvidia-smi | grep -q H && ARGS+=(--hidden-dropout 0.0)", "0 if nvidia-smi | grep -q H, else 0.1 (default)"),
        ('is() { [ "$X" = 1 ]; }; is && ARGS+=(--hidden-dropout 0.0)', "0 if is, else 0.1 (default)"),
        (
            'add() { [ "$1" = 1 ] && ARGS+=("$2" 0.0); }; add "$X" --hidden-dropout; add "$V" --seed',
            "0 if $X = 1, else 0.1 (default)",
        ),
        ("D=0.3; if $X; then D=0.2; fi; ARGS+=(--hidden-dropout $D)", "0.2 if $X, else 0.3"),
        (
            "case $X in a) ARGS+=(--hidden-dropout 0.2);; b|c) ARGS+=(--hidden-dropout 0.3);; esac",
            "0.2 if $X = a, 0.3 if $X = b or c, else 0.1 (default)",
        ),
        (
            "case $X in a) ARGS+=(--hidden-dropout 0.2);; *) ARGS+=(--hidden-dropout 0.3);; esac",
            "0.2 if $X = a, else 0.3",
        ),
        (
            "if [ $X = 1 ]; then if [ $Y = 1 ]; then ARGS+=(--hidden-dropout 0.0); fi; fi",
            "? (0 if $Y = 1, else 0.1 (default)) if $X = 1, else 0.1 (default)",
        ),
    ],
)
def test_a_flag_that_hangs_on_a_condition_is_told_with_all_that_it_may_be(condition, said):
    """It was told as Megatron's default, and rules found fault with that."""
    found = lint(FORKED.format(condition))
    row = describe.told(found)["dropout"]
    assert row.startswith("hidden ? (") and said in row and row.endswith("attention 0.1 (default)")
    assert not [f for f in found.findings if "--hidden-dropout" in f.flag]
    assert found.open and [f for f in found.findings if "--attention-dropout" in f.flag]
    assert describe.data(found)["arguments"]["hidden_dropout"] is None


@pytest.mark.parametrize("value, holds", [("true", True), ("false", False)])
@pytest.mark.parametrize(
    "condition", ["if $X; then {}; fi", "if ! $X; then :; else {}; fi", "$X && {}", "if [[ $X == true ]]; then {}; fi"]
)
def test_a_condition_on_a_variable_that_the_text_sets_is_decided(condition, value, holds):
    found = lint(FORKED.format(f"X={value}\n{condition.format('ARGS+=(--hidden-dropout 0.0)')}"))
    assert describe.told(found)["dropout"].startswith("hidden 0," if holds else "hidden 0.1 (default),")
    assert not found.forks


def test_conditions_apart_keep_what_each_decides_and_a_count_that_hangs_is_none():
    text = "if [ $X = 1 ]; then ARGS+=(--hidden-dropout 0); fi; [ $Y = 1 ] && ARGS+=(--qk-layernorm)"
    found = lint(FORKED.format(text))
    rows = describe.told(found)
    assert (
        "if $X = 1" in rows["dropout"]
        and "$Y" not in rows["dropout"]
        and "? (on if $Y = 1, else none on) queries and keys" in rows["norms"]
    )
    assert "if $Y = 1" in rows["parameters"] and describe.data(found)["parameters"] is None


def test_what_a_condition_of_python_decides_is_told_with_all_that_it_may_be():
    text = f"""import subprocess
def main(args):
    cmd = ["torchrun", "pretrain_gpt.py", *"{WHOLE}".split()]
    if args.small:
        cmd += ["--global-batch-size", "2"]
    else:
        cmd += ["--global-batch-size", "4" if args.few else "8"]
    subprocess.run(cmd)
"""
    found = lint(text, "t.py")
    said = "--global-batch-size ? (2 if args.small, else ? (4 if args.few, else 8))"
    assert said in describe.told(found)["said"]


def test_a_name_of_python_that_a_function_sets_outside_itself_is_open():
    """Another's second value was told as its first, and the words that a name may hold as a switch's value."""
    text = f"""import os, subprocess
LONG = False
def main():
    global LONG
    LONG = True
main()
extra = os.environ.get("EXTRA", "").split()
cmd = ["torchrun", "pretrain_gpt.py", *"{WHOLE}".split(), "--train-samples", str(9 if LONG else 5), "--qk-layernorm"]
cmd += extra or ["--apply-layernorm-1p"]
subprocess.run(cmd)
"""
    said = describe.told(lint(text, "t.py"))["said"]
    assert "--train-samples $(9 if LONG else 5), --qk-layernorm, ? (no --apply-layernorm-1p if extra" in said


def test_a_condition_of_python_on_which_no_flag_hangs_is_not_read_for():
    """Of a program of two thousand lines each of its conditions was, for minutes."""
    other = "\n".join(f"    if args.x{i}:\n        y = {i}" for i in range(99))
    text = f"""import subprocess
def main(args):
    cmd = ["torchrun", "pretrain_gpt.py", *"{WHOLE}".split()]
{other}
    if args.small:
        cmd += ["--global-batch-size", "2"]
    subprocess.run(cmd)
"""
    assert [[arm.label for arm in fork] for fork in lint(text, "t.py").launch.forks] == [["args.small", "else"]]


def test_a_row_that_several_conditions_decide_is_open_whatever_else_is_asked():
    """The next condition told it again as if there were none."""
    asked = [("A", "--num-layers 2"), ("B", "--qk-layernorm"), ("C", "--tensor-model-parallel-size 2")]
    found = lint(FORKED.format("\n".join(f"[ ${n} = 1 ] && ARGS+=({flags})" for n, flags in asked)))
    rows = describe.told(found)
    assert rows["parameters"] == "?" and "2 MLP 1, 2 if $A = 1, else 24 attention" in rows["layers"]


@pytest.mark.parametrize("flag", ["--disable-bias-linear", "--qk-layernorm", "--apply-layernorm-1p"])
def test_a_flag_without_a_value_that_hangs_is_left_open(flag):
    """It was no matter, as a path is, and the launch had no finding."""
    found = lint(FORKED.format(f"[ $A = 1 ] && ARGS+=({flag})"))
    assert found.open == (f"{flag} ($A = 1)",)


def test_what_several_conditions_of_a_recipe_decide_is_said():
    """Its fields had no place in the row, and a flag lost its own where the next condition was asked."""
    text = """from megatron.bridge.recipes.x import base_config
def my_config(use_moe, long):
    cfg = base_config()
    cfg.model.hidden_size = 512
    if use_moe:
        cfg.model.moe_router_topk = 2
    if long:
        cfg.model.seq_length = 4096
    return cfg
"""
    found = lint(text, "t.py")
    assert found.open and describe.told(found)["said"].startswith(
        "hidden_size=512, ? (moe_router_topk=2 if use_moe, else no moe_router_topk), ? (seq_length=4096 if long, else"
    )


@pytest.mark.parametrize(
    "one, then, other",
    [
        (f"[ $X = /a/{'long' * 20}/8b ]", "", f"[ $X = /a/{'long' * 20}/70b ]"),
        ("( test -f /a )", "", "( test -f /b )"),
        ("grep -q x /a", "", "grep -q x /a"),
        ("[ $1 = a ]", "shift", "[ $1 = a ]"),
        ("! $C", "C=$(x)", "! $C"),
    ],
)
def test_conditions_that_only_look_alike_are_decided_apart(one, then, other):
    """The cut text was what a condition was known by: of two that it had alike one decided both."""
    asked = f"if {one}; then ARGS+=(--qk-layernorm); fi\n{then}\nif {other}; then ARGS+=(--disable-bias-linear); fi"
    found = lint(FORKED.format(asked))
    rows = describe.told(found)
    assert len(found.forks) == 2 and rows["parameters"] == "?"
    assert "--disable-bias-linear" not in found.forks[0][0][1].launch.words
    assert all(len(label) <= 60 for ways in found.forks for label, _ in ways)


def test_a_function_that_asks_what_it_is_given_asks_something_else_of_each_call():
    text = 'L=4; f() { [ "$1" = 1 ] && L=9; }; f "$A"; f "$B"; ARGS+=(--num-layers $L)'
    assert describe.told(lint(FORKED.format(text)))["model"] == "?"


def test_a_condition_in_a_round_of_which_nobody_knows_is_no_choice_of_the_scripts():
    """A model with both flags was none of those that were told."""
    arms = "a) ARGS+=(--hidden-dropout 0);; b) ARGS+=(--qk-layernorm);;"
    found = lint(FORKED.format(f"while read x; do case $x in {arms} esac; done < file"))
    assert not found.forks and describe.told(found)["dropout"] == "hidden ?, attention 0.1 (default)"
    retried = "while [ ! -f x ]; do if [ $X = 1 ]; then ARGS+=(--hidden-dropout 0); fi; done"
    assert "? (0 if $X = 1, else 0.1" in describe.told(lint(FORKED.format(retried)))["dropout"]
    asked = "for i in 1 2; do X=$(next); if [ $X = 1 ]; then ARGS+=(--rotary-base $i); fi; done"
    assert len(lint(FORKED.format(asked)).forks) == 2


def test_what_an_eval_or_the_arguments_may_set_is_said():
    assert any("may set what is used here: eval $X=4" in n for n in lint(FORKED.format('eval "$X=4"')).launch.notes)
    options = 'while getopts "a" o; do ARGS+=(--qk-layernorm); done'
    assert "called without arguments, which may say otherwise: $@" in lint(FORKED.format(options)).launch.notes[0]


def test_a_loop_of_nobody_knows_how_many_rounds_may_have_none():
    open_, said = (
        lint(FORKED.format(f"for i in {words}; do ARGS+=(--hidden-dropout 0.5); done")) for words in ("$X", "a $X")
    )
    assert open_.open == ("--hidden-dropout (one of many conditions)",)
    assert describe.told(said)["dropout"].startswith("hidden 0.5")


def test_an_argument_that_a_branch_gives_hangs_on_its_condition():
    asked = 'if [ "$X" = 1 ]; then set -- "$@" --hidden-dropout 0.5; fi\nARGS+=("$@")'
    assert lint(FORKED.format(asked)).open == ("--hidden-dropout ($X = 1)",)


@pytest.mark.parametrize("calls", ['f() { "$@" || f "$@"; }', "f() { g; }; g() { f; }"])
def test_how_a_function_ends_that_ends_as_itself_is_not_known(calls):
    """The whole script was nested too deep."""
    found = lint(FORKED.format(f"{calls}; f nvidia-smi && ARGS+=(--hidden-dropout 0.5)"))
    assert found.open == ("--hidden-dropout (f nvidia-smi)",)


def test_functions_that_call_one_another_in_every_branch_are_no_launch():
    """Each more was four times as long."""
    calls = (
        f"f{i}() {{ if [ $V{i} = 1 ]; then f{i - 1}; else f{i - 1}; fi; f{i - 1}; f{i - 1}; }}" for i in range(1, 9)
    )
    with pytest.raises(Refused, match="too long for a launch script"):
        lint(FORKED.format("\n".join(["f0() { X=1; }", *calls, "f8"])))


def test_a_condition_that_is_asked_twice_is_one():
    text = "[ $X = 1 ] && ARGS+=(--qk-layernorm); [ $Y = 1 ] && :; [ $X = 1 ] && ARGS+=(--disable-bias-linear)"
    found = lint(FORKED.format(text))
    assert len(found.forks) == 1 and re.fullmatch(
        r"\? \([\d,]+ if \$X = 1, else [\d,]+\)", describe.told(found)["parameters"]
    )


@pytest.mark.parametrize(
    "body",
    [
        "on = args.a\n    if on:\n        cmd += ['--swiglu']\n    on = args.b\n    if on:\n        cmd += ['--bf16']",
        "cmd += one(args.a)\n    cmd += two(args.b)",
    ],
)
def test_a_name_of_python_that_holds_another_thing_is_another_condition(body):
    text = f"""import subprocess
def one(on):
    if on:
        return ["--swiglu"]
    return []
def two(on):
    if on:
        return ["--bf16"]
    return []
def main(args):
    cmd = ["torchrun", "pretrain_gpt.py", "--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"]
    {body}
    subprocess.run(cmd)
"""
    found = lint(text, "t.py")
    assert [[arm.label for arm in fork] for fork in found.launch.forks] == [["on", "else"]] * 2
    assert {tuple("--swiglu" in way.launch.words for _, way in ways) for ways in found.forks} == {
        (True, False),
        (False, False),
    }


def test_a_way_says_nothing_of_what_another_condition_decides():
    """With both there are four experts of a token, and two were told."""
    found = lint(FORKED.format("[ $A = 1 ] && ARGS+=(--num-experts 8)\n[ $B = 1 ] && ARGS+=(--moe-router-topk 4)"))
    rows = describe.told(found)
    assert re.match(r"\? \(8 of 5440 \(default: the MLP's\), top \?; .* if \$A = 1, else none\)$", rows["experts"])
    assert rows["parameters"] == "?"
    assert "? (MoE if $A = 1, else MLP)" in rows["layers"] and rows["attention"].startswith("MHA")


def test_a_trap_in_all_that_a_launch_may_be_is_told():
    text = "if [ $A = 1 ]; then ARGS+=(--num-attention-heads 7); else ARGS+=(--num-attention-heads 9); fi"
    assert "indivisible" in [f.id for f in lint(FORKED.format(text)).findings]
    assert "indivisible" not in [f.id for f in lint(FORKED.format(text.replace("9", "8"))).findings]


@pytest.mark.parametrize(
    "text, said",
    [
        ("if [ $A = 1 ]; then L=2; exit 0; else L=4; fi", "GPT, 4 layers"),
        ("case $A in a) L=2;; b) L=4;; *) exit 1;; esac", "GPT, ? (2 if $A = a, else 4) layers"),
        ("L=4; if [ $A = 1 ]; then L=2; elif [ $B = 1 ]; then exit 1; fi", "GPT, ? (2 if $A = 1, else 4) layers"),
        ("if [ $A = 1 ]; then L=2; else exit 1; fi", "GPT, 2 layers"),
    ],
)
def test_what_a_script_ends_at_is_no_model_of_it(text, said):
    assert describe.told(lint(FORKED.format(f"{text}; ARGS+=(--num-layers $L)")))["model"] == said


def test_of_more_conditions_than_are_read_for_the_flags_are_open(monkeypatch):
    """Those of the others were told as if none of them could hold."""
    monkeypatch.setattr("nam_megatron.lint.MOST", 4)
    flags = ("--qk-layernorm", "--tensor-model-parallel-size 2", "--num-layers 2", "--hidden-dropout 0")
    found = lint(FORKED.format("\n".join(f"[ $X{i} = 1 ] && ARGS+=({flag})" for i, flag in enumerate(flags))))
    rows = describe.told(found)
    assert len(found.forks) == 2 and rows["model"] == "?" and rows["dropout"] == "hidden ?, attention 0.1 (default)"
    assert "--num-layers (one of many conditions)" in found.open


def test_a_script_that_takes_many_steps_is_read_less_often():
    asked = "\n".join(f"[ $X{i} = 1 ] && ARGS+=(--hidden-dropout 0.{i})" for i in range(1, 9))
    assert len(lint(FORKED.format(asked)).forks) == 8
    assert (
        len(lint(FORKED.format(f"for i in {{1..200}}; do for j in {{1..50}}; do K=$i; done; done\n{asked}")).forks) < 5
    )


@pytest.mark.parametrize(
    "one, other, label, said",
    [
        ("--data-path a", "--data-path b", "also", "--data-path ? or none"),
        ("--load a", "--load b", "start", "normal, std 0.02 (default); weights ?"),
        ("--recompute-granularity full", "--recompute-granularity full", "layout", "data 8, recompute ?"),
        ("--num-experts 8", "--num-experts 4", "layout", "data 8, expert ?, expert tensor ?"),
        ("--use-megatron-fsdp", "--use-megatron-fsdp", "layout", "data 8, Megatron-FSDP ?"),
        ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 4", "embedding", "? rows"),
        (
            "--tensor-model-parallel-size 2",
            "--tensor-model-parallel-size 4",
            "layout",
            "tensor ?, pipeline 1, context 1, data ?",
        ),
    ],
)
def test_what_two_conditions_decide_is_open_and_never_said_or_left_out(one, other, label, said):
    """Each way took what the other decides for given, or left it out, and both ways agreed."""
    text = (
        f"ARGS=({WHOLE.removesuffix(' --data-path x')})\n[ $X = 1 ] && ARGS+=({one})\n[ $Y = 1 ] && ARGS+=({other})\n"
    )
    assert said in describe.told(lint(f"{text}torchrun --nproc-per-node 8 pretrain_gpt.py ${{ARGS[@]}}"))[label]


@pytest.mark.parametrize("flag", ["--mock-data", "--kv-lora-rank 16", "--moe-router-topk 2"])
def test_a_trap_that_a_condition_may_spare_is_none_whatever_else_is_asked(flag):
    """The ways of the next condition took the flag for given, each of them."""
    asked = f"[ $X = 1 ] && ARGS+=({flag}); [ $Y = 1 ] && ARGS+=(--qk-layernorm)"
    found = lint(FORKED.format(asked)).findings
    assert not [f for f in found if flag.split()[0] in f.flag] and "default-bias" in [f.id for f in found]


@pytest.mark.parametrize(
    "above", ["if [ $Y = 2 ]; then ARGS+=(--qk-layernorm); fi", "case $Y in 2) ARGS+=(--qk-layernorm);; esac"]
)
def test_a_branch_in_a_branch_is_open_where_its_condition_is_asked_above_too(above):
    """Each condition was looked at apart from the other, and nobody looked at both: its flags were told as lacking."""
    found = lint(FORKED.format(f"{above}\n[ $X = 1 ] && {{ if [ $Y = 2 ]; then ARGS+=(--num-layers 2); fi; }}"))
    rows = describe.told(found)
    assert found.open[0].startswith("--num-layers ($Y = 2")
    assert all(
        rows[label].startswith("? (") and "if $Y = 2" in rows[label] for label in ("model", "layers", "parameters")
    )


@pytest.mark.parametrize(
    "flags, label, said",
    [
        ("--num-experts", "attention", "MHA: 16 heads of 128"),
        ("--mtp-num-layers", "width", "hidden 2048, MLP 5440 (default)"),
        ("--lr-warmup-iters", "schedule", "10000 steps, warm-up ?, decay over all of it"),
        ("--hidden-size", "width", "hidden ?, MLP ?"),
    ],
)
def test_a_row_keeps_what_does_not_hang_on_what_two_conditions_decide(flags, label, said):
    rows = describe.told(lint(FORKED.format(f"[ $X = 1 ] && ARGS+=({flags} 8); [ $Y = 1 ] && ARGS+=({flags} 16)")))
    assert rows[label] == said and "Mamba" not in rows


def test_a_row_that_two_conditions_decide_piece_by_piece_says_what_one_of_them_makes():
    """It was a whole `?`, the tensor size in it, too."""
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    asked = f"[ $X = 1 ] && ARGS+=(--num-experts 8 --expert-model-parallel-size 8); [ $Y = 1 ] && ARGS+=({full})"
    shared = "tensor 1, pipeline 1, context 1"
    assert describe.told(lint(FORKED.format(asked)))["layout"] == (
        f"? ({shared}, expert 8, expert tensor 1, recompute ? if $X = 1, else {shared}, recompute ?)"
    )


def test_a_row_whose_ways_are_alike_is_decided_by_none_of_them():
    """`layout ? (else tensor ?, ...`, and nothing of the sequence that the condition cuts."""
    asked = "if [ $X = 1 ]; then ARGS+=(--sequence-parallel); fi\nARGS+=(--tensor-model-parallel-size $T)"
    told = describe.told(lint(FORKED.format(f"{asked}\n[ $Y = 1 ] && ARGS+=(--recompute-granularity selective)")))
    assert "(else" not in told["layout"] and "sequence ?" in told["layout"]


def test_what_is_open_in_one_way_is_called_so():
    """`betas ? (? ? if $X = 1` was nothing that a person reads."""
    asked = "if [ $X = 1 ]; then ARGS+=(--bf16 $EXTRA); fi\nif [ $Y = 1 ]; then ARGS+=(--qk-layernorm); fi"
    rows = describe.told(lint(FORKED.format(asked)))
    assert "betas ? (open if $X = 1, else 0.9 (default) 0.999 (default))" in rows["optimizer"]
