# fish completion for kubectl-drakit: kubectl drakit completion fish | source
function __kubectl_drakit_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l lines ($words[1] @COMPLETE@ $words[2..-1] 2> /dev/null)
    if test "$lines[-1]" = "@FILES@"
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $lines[1..-2]
    end
end
complete -c kubectl-drakit -f -a '(__kubectl_drakit_complete)'
