#!/bin/sh
# Runs the compiler that the link `kept` beside this script names. It waits first while there is a file `hold`, fails
# while there is a file `fail`, and writes a line to the file `log` when a compilation begins and when it ends.
here=${0%/*}
echo began >>"$here/log"
while [ -e "$here/hold" ]; do sleep 0.01; done
if [ -e "$here/fail" ]; then
    echo "out of order" >&2
    echo ended >>"$here/log"
    exit 1
fi
"$(readlink "$here/kept")" "$@"
code=$?
echo ended >>"$here/log"
exit $code
