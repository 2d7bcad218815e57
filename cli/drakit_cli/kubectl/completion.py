"""
Completes the commands and options of ``kubectl drakit``: statically, without the cluster.

kubectl's own completion asks the program ``kubectl_complete-drakit`` for the words of a plugin. The
scripts are for ``kubectl-drakit`` as a program of its own.

It must not know what the commands do.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

_COMMANDS = "explain devices claims doctor completion"
_OPTIONS = "--context --kubeconfig --namespace --all-namespaces --output --help"

_BASH = """\
# bash completion for kubectl drakit: source <(kubectl drakit completion bash)
_kubectl_drakit() {
    local word previous first
    word="${COMP_WORDS[COMP_CWORD]}"
    previous="${COMP_WORDS[COMP_CWORD-1]}"
    first=1
    [ "${COMP_WORDS[0]##*/}" = kubectl ] && first=2
    case "$previous" in
        -o|--output) COMPREPLY=($(compgen -W "wide json yaml" -- "$word")); return ;;
        --kubeconfig) COMPREPLY=($(compgen -f -- "$word")); return ;;
        explain) COMPREPLY=($(compgen -W "pod/ claim/" -- "$word")); compopt -o nospace; return ;;
        completion) COMPREPLY=($(compgen -W "bash zsh" -- "$word")); return ;;
    esac
    if [ "$COMP_CWORD" -eq "$first" ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    else
        COMPREPLY=($(compgen -W "@OPTIONS@" -- "$word"))
    fi
}
complete -F _kubectl_drakit kubectl-drakit"""

_ZSH = """\
#compdef kubectl-drakit
# zsh completion for kubectl drakit: source <(kubectl drakit completion zsh)
_kubectl_drakit() {
    case "${words[CURRENT-1]}" in
        -o|--output) compadd wide json yaml; return ;;
        --kubeconfig) _files; return ;;
        explain) compadd -S '' pod/ claim/; return ;;
        completion) compadd bash zsh; return ;;
    esac
    if (( CURRENT == 2 )); then
        compadd @COMMANDS@
    else
        compadd -- @OPTIONS@
    fi
}
compdef _kubectl_drakit kubectl-drakit"""

_SCRIPTS = {"bash": _BASH, "zsh": _ZSH}


_NEXT = {
    "explain": ("pod/", "claim/"),
    "completion": ("bash", "zsh"),
    "-o": ("wide", "json", "yaml"),
    "--output": ("wide", "json", "yaml"),
}
"""The completions that can follow a word."""

_NO_FILES = ":4"
"""The directive to kubectl that nothing else fits (cobra's ShellCompDirectiveNoFileComp)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the last word can become, as kubectl wants it."""
    words = list(sys.argv[1:] if arguments is None else arguments) or [""]
    *before, last = words
    if not before:
        found: Sequence[str] = _COMMANDS.split()
    elif not (found := _NEXT.get(before[-1], ())):
        found = _OPTIONS.split()
    for word in found:
        if word.startswith(last):
            print(word)
    print(_NO_FILES)
    return 0


def script(shell: str) -> str:
    """Return the script for a shell."""
    return _SCRIPTS[shell].replace("@COMMANDS@", _COMMANDS).replace("@OPTIONS@", _OPTIONS)
