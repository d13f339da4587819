#!/bin/sh
# Stands before the compiler `kept` beside this script: waits while there is a file `hold`, fails while there is a file
# `fail`, and writes to the file `log` when each compilation began and ended.
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
