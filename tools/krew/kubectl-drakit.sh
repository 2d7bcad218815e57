#!/bin/sh
# Starts kubectl drakit with the first Python on the PATH that this archive has packages for.
program=$0
while [ -L "$program" ]; do # krew links to it
    target=$(readlink "$program")
    case $target in
        /*) program=$target ;;
        *) program=$(dirname "$program")/$target ;;
    esac
done
home=$(cd "$(dirname "$program")" && pwd -P)
DRAKIT_CEL=${DRAKIT_CEL:-$home/drakit-cel-1.38}
export DRAKIT_CEL
for python in python3 python3.14 python3.13 python3.12 python3.11; do
    version=$("$python" -I -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null) || continue
    if [ -d "$home/lib/$version" ]; then
        # Not by PYTHONPATH: credential plugins may be Python programs, too.
        exec "$python" -I -c 'import sys; sys.path.insert(0, sys.argv.pop(1)); from drakit_cli.kubectl.main import main; sys.exit(main())' \
            "$home/lib/$version" "$@"
    fi
done
echo "kubectl drakit needs one of the Python versions $(ls "$home/lib" | tr '\n' ' ')on the PATH" >&2
exit 2
