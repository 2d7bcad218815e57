#compdef kubectl-drakit
# zsh completion for kubectl-drakit: source <(kubectl drakit completion zsh)
_kubectl_drakit() {
    local -a lines
    lines=("${(@f)$("${words[1]}" @COMPLETE@ "${(@)words[2,CURRENT]}" 2> /dev/null)}")
    local directive="${lines[-1]}"
    lines[-1]=()
    case "$directive" in
        @FILES@) _files ;;
        @NO_SPACE@) compadd -S '' -- "${lines[@]}" ;;
        *) compadd -- "${lines[@]}" ;;
    esac
}
compdef _kubectl_drakit kubectl-drakit
