# bash completion for kubectl-drakit: source <(kubectl drakit completion bash)
_kubectl_drakit() {
    local line directive=""
    COMPREPLY=()
    while IFS= read -r line; do
        case "$line" in
            :*) directive="$line" ;;
            *) COMPREPLY+=("$line") ;;
        esac
    done < <("${COMP_WORDS[0]}" @COMPLETE@ "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null)
    case "$directive" in
        @FILES@) COMPREPLY=($(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")) ;;
        @NO_SPACE@) compopt -o nospace 2> /dev/null ;;
    esac
}
complete -F _kubectl_drakit kubectl-drakit
