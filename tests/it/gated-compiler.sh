#!/bin/sh
# Stands before the real compiler, which lies beside it as `berth`: waits while there is a file `hold`,
# fails while there is a file `fail`, and puts down when each compilation began and how it ended.
here=${0%/*}
echo began >>"$here/log"
while [ -e "$here/hold" ]; do sleep 0.01; done
if [ -e "$here/fail" ]; then
    echo "out of order" >&2
    echo ended >>"$here/log"
    exit 1
fi
"$here/berth" "$@"
code=$?
echo ended >>"$here/log"
exit $code
